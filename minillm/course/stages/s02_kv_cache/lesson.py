# %% [markdown]
# # 02 The KV cache
#
# **Can one token of an answer cost as much work as a whole answer of 200?** Without memory, yes. The memory is one array.
# This lesson builds it, proves that it changes nothing but the time, and works out its price.
#
# **Afterwards you can** turn recomputation into a cache, say how many bytes it takes for any model, and catch wrong
# numbers in blog posts.
#
# *35 minutes. You need some PyTorch (indexing, `@`, `softmax`) and a rough idea of attention. Everything runs on the CPU.*

# %%
import itertools
import time
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap

from minillm import LLM, SamplingParams, attention, kv, roofline
from minillm.config import ModelConfig
from minillm.course import compare, predict, quiz, show_source, swap
from minillm.course.widgets import slider_plot
from minillm.model import Batch, Transformer
from minillm.weights import random_state_dict

BLUE, ORANGE = "#0072B2", "#D55E00"

# Prefix caching (stage 05) would remember old prompts for us. It is off, so that every call starts from nothing.
llm = LLM("smollm2-135m", num_kv_blocks=128, enable_prefix_caching=False)


def greedy(count):
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


# %% [markdown]
# ## The loop that forgets
#
# A language model takes a list of tokens and says which token comes next. So the obvious way to generate is: give it
# everything, take one token, append it, give it everything again.


# %%
def slow_generate(prompt, count):
    """Greedy generation without any memory. Also returns how many tokens went through the model in each round."""
    tokens, passes = list(prompt), []
    for _ in range(count):
        passes.append(len(tokens))
        tokens += llm.generate(tokens, greedy(1))[0].outputs[0].token_ids
    return tokens[len(prompt) :], passes


prompt = llm.tokenizer.encode("The keeper of the lighthouse")
slow_tokens, passes = slow_generate(prompt, 24)
print("text:  ", llm.tokenizer.decode(prompt + slow_tokens))
print("passes:", passes)
print(f"{sum(passes)} tokens went through all {llm.config.num_layers} layers, to write {len(slow_tokens)} new ones")

# %% [markdown]
# Every round pushes the whole text through all layers, only to use the last row of the result. Count it for a long answer.
# To get token number *n*, the *n* - 1 tokens before it must pass through the model.

# %%
n = 200
with_memory = len(range(1, n))  # each token passes once; the last one need not
print(f"without memory, token {n} alone:        {n - 1:>6,} token passes")
print(f"with memory,    tokens 2 to {n} together: {with_memory:>4,} token passes")
print(f"without memory, tokens 2 to {n} together: {sum(range(1, n)):>4,} token passes")

# %% [markdown]
# Without memory, token 200 alone makes as many passes as all 200 tokens make with memory: 199. Written out in full, it is
# 19,900 against 199.
#
# ### Predict first
# Three guesses. Put a number in place of `None`; a wild one is fine. The measurements come later.

# %%
question = (
    "After 256 tokens: how many times longer does the next token take without memory than with it, on this machine?"
)
predict("02.slower", None, "times", question)
question = (
    "SmolLM2 has 30 layers and 3 KV heads of 64 numbers, in float32. How many KiB does the memory of ONE token take?"
)
predict("02.token", None, "KiB", question)
question = (
    "Llama 3.1 8B in fp16, one conversation: after how many thousand tokens is the memory bigger than the weights?"
)
predict("02.crossover", None, "thousand tokens", question)

# %% [markdown]
# ## What exactly is computed twice?
#
# Attention makes three vectors of each token, in each layer: a *query* (what am I looking for?), a *key* (what do I offer?)
# and a *value* (what do I hand over?). Take a tiny random model with two layers. Run it on 5 tokens, then on 9 tokens that
# begin with the same 5. Look at the key of position 3 both times. (Skip the body of `keys_of`; it only runs the model and
# returns its keys.)

# %%
config = ModelConfig("llama", vocab_size=96, hidden_size=48, intermediate_size=80, num_layers=2,
                     num_heads=4, num_kv_heads=2, head_dim=12)  # fmt: skip
tiny = Transformer.from_state(config, random_state_dict(config, seed=2))


def keys_of(tokens, causal=True):
    """Run all tokens from nothing. Returns the keys of each layer: [tokens, num_kv_heads, head_dim]."""
    count = len(tokens)
    place = torch.arange(count)
    store = kv.KVCache(config, num_blocks=1, block_size=count, dtype=torch.float32, device="cpu")
    layout = attention.Layout([count], [count], [[0]], count)
    if not causal:
        # the float mask that is added to scores: 0 = visible, -inf = hidden
        layout.made["groups"] = groups = layout.groups(place.device)
        groups[0].masks[None] = torch.zeros(1, 1, count, count)  # nothing is hidden: every token sees every other
    with torch.inference_mode():
        tiny(Batch(torch.tensor(tokens), place, place, layout, place), store)
    return store.keys


def show_position_3(causal):
    five, nine = keys_of(text[:5], causal), keys_of(text[:9], causal)
    for layer in range(config.num_layers):
        a, b = five[layer][3, 0], nine[layer][3, 0]
        print(f"layer {layer}, key of position 3 (first four numbers)")
        print("   run on 5 tokens:", [f"{x:+.4f}" for x in a[:4].tolist()])
        print("   run on 9 tokens:", [f"{x:+.4f}" for x in b[:4].tolist()])
        print("   same:", "yes" if torch.allclose(a, b, rtol=1e-4, atol=1e-5) else "NO")


text = [17, 4, 88, 31, 60, 9, 73, 22, 55]
show_position_3(causal=True)

# %% [markdown]
# The same numbers. Four more tokens arrived, and position 3 did not notice. We computed its key again for nothing.
#
# Why? Let us break it. Take the causal mask away, so that each token sees later ones too.

# %%
show_position_3(causal=False)

# %% [markdown]
# Now layer 1 differs. **Causality is what makes keys last.** The key in layer 0 is made of the token and its position alone.
# The key in layer 1 is made of what layer 0 gave out at position 3, and with the mask that holds only positions 0 to 3.
# They are never touched again, in any layer. (An encoder such as BERT has no such mask, and no KV cache.)
#
# The same is true of values. And queries? The query of position 3 is needed once, to compute position 3. A new token brings
# its own query. So: **keep K and V, forget Q.** That is the KV cache.

# %% [markdown]
# ## Ten lines by hand
#
# One layer, one head, plain tensors. First the forgetful way. Then an array with room for 8 tokens, in which each new token fills
# one row.

# %%
D = 4
torch.manual_seed(0)
Wq, Wk, Wv = torch.randn(3, D, D)
x = torch.randn(6, D)  # six tokens, as they come into the layer


def forgetful(x):
    """Attention output of the last token, from nothing. x: [tokens, D]."""
    q, keys, values = x[-1] @ Wq, x @ Wk, x @ Wv
    return (keys @ q / D**0.5).softmax(dim=0) @ values


key_rows, value_rows = torch.zeros(8, D), torch.zeros(8, D)  # the cache


def remembering(new, position):
    """The same, but only the new token is given: [D]."""
    key_rows[position], value_rows[position] = new @ Wk, new @ Wv
    keys, values = key_rows[: position + 1], value_rows[: position + 1]
    return (keys @ (new @ Wq) / D**0.5).softmax(dim=0) @ values


print("token   keys made: forgetful   remembering   outputs equal")
for t in range(len(x)):
    a, b = forgetful(x[: t + 1]), remembering(x[t], t)
    print(f"{t:>5}{t + 1:>23}{1:>14}{torch.allclose(a, b, atol=1e-5)!s:>16}")

# %% [markdown]
# Note what did *not* get cheaper: `keys @ q` still reads every old key. The cache saves the making of keys and values, not
# the looking at them.
#
# ## The engine's version
#
# The engine's cache is the same idea for all layers, and for many requests at once. For each layer it is one flat array of
# **slots**. A slot holds one token's keys, or values, for all KV heads. A *block* is 16 neighbouring slots. Ignore blocks and
# `copy_block` until stage 04.

# %%
show_source(kv.KVCache)

# %% [markdown]
# Our toy wrote row `position`. The engine writes row `slots[t]`, a number that somebody else chose. So the tokens of one
# request may lie anywhere.

# %%
show_source(kv.write_kv)

# %%
cache = torch.zeros(6, 1, 2)  # 6 slots, 1 KV head, head_dim 2
new = torch.tensor([[[1.0, 1.5]], [[2.0, 2.5]], [[3.0, 3.5]]])  # three tokens
kv.write_kv(cache, new, slots=torch.tensor([4, 0, 2]))
for slot, row in enumerate(cache[:, 0].tolist()):
    print(f"slot {slot}: {row}")

# %% [markdown]
# Reading needs one more thing: a mask. Often *several* tokens come at once, onto a cache that is already filled: the next
# piece of a long prompt, or a user's second message. Then there are few queries and many keys, and the mask is a **rectangle**.

# %%
show_source(attention.causal_mask)
print("3 new tokens, 8 in all (5 were cached):")
print(attention.causal_mask(3, 8).int())
print("1 new token, 8 in all:", attention.causal_mask(1, 8).int().tolist())

# %% [markdown]
# The first new token stands at position 5, so it sees keys 0 to 5. A single new token sees everything: no mask needed.
#
# ## Proof on the real model
#
# Same prompt, same 24 tokens, but now the engine keeps its cache between the tokens.

# %%
before = llm.stats()["computed_tokens"]
out = llm.generate(prompt, greedy(24))[0]
fast_passes = int(llm.stats()["computed_tokens"] - before)
print("same tokens:", out.outputs[0].token_ids == slow_tokens)
print(f"token passes: {sum(passes)} without the cache, {fast_passes} with it")

# %% [markdown]
# ## The time
#
# At several lengths: how long does *the next token* take? One run tells both. Until the first token comes, the whole text is
# computed, as it is for every token without the cache. The tokens after it use the cache. We go round three times and keep the
# fastest: what is slower was disturbed by other programs.

# %%
lengths = [16, 64, 128, 192, 256]
filler = (prompt * 100)[: max(lengths)]
llm.generate(filler, greedy(2))  # warm up
recomputed, cached = {n: [] for n in lengths}, {n: [] for n in lengths}
for _ in range(3):
    for n in lengths:
        start = time.perf_counter()
        stamps = llm.generate(filler[:n], greedy(9))[0].metrics.token_times
        recomputed[n].append(stamps[0] - start)
        cached[n] += [b - a for a, b in itertools.pairwise(stamps)]
without, with_cache = [min(recomputed[n]) for n in lengths], [min(cached[n]) for n in lengths]

print(f"{'tokens so far':>13}{'recompute':>12}{'with cache':>12}   (milliseconds for one more token)")
for length, a, b in zip(lengths, without, with_cache, strict=True):
    print(f"{length:>13}{a * 1e3:>12.1f}{b * 1e3:>12.1f}")

# %%
fig, ax = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
for seconds, color, label in ((without, ORANGE, "recompute everything"), (with_cache, BLUE, "with KV cache")):
    milliseconds = [1e3 * s for s in seconds]
    ax.plot(lengths, milliseconds, "o-", color=color, lw=2)
    ax.text(lengths[-1] + 8, milliseconds[-1], label, color=color, va="center")
ax.set(xlabel="tokens so far", ylabel="time for the next token (ms)", xlim=(0, max(lengths) * 1.5), ylim=(0, None))
ax.set_xticks(lengths)
ax.spines[["top", "right"]].set_visible(False)
ax.grid(axis="y", alpha=0.3)
plt.show()

# %%
compare("02.slower", round(without[-1] / with_cache[-1], 1), "times")

machine = roofline.measure_machine(dtype=torch.float32)
size, length = llm.config, lengths[-1]
head = 2 * size.vocab_size * size.hidden_size  # FLOPs of the output head: only the last token needs it
flops = sum(roofline.flops_per_token(size, i + 1) for i in range(length)) - (length - 1) * head
moved = roofline.step_bytes(size, [length], weight_dtype_bytes=4, kv_dtype_bytes=4)
print(f"{machine.name}: at most {machine.flops / 1e9:.0f} GFLOP/s and {machine.bandwidth / 1e9:.1f} GB/s, measured now")
print(f"recompute:  {flops / without[-1] / 1e9:5.1f} GFLOP/s, {flops / without[-1] / machine.flops:.0%} of that")
print(f"with cache: {moved / with_cache[-1] / 1e9:5.1f} GB/s, {moved / with_cache[-1] / machine.bandwidth:.0%} of that")
in_cache = length * llm.cache.bytes_per_token
print(f"read for that one token: {moved / 1e6:.0f} MB, of which {in_cache / 1e6:.0f} MB are the cache")

# %% [markdown]
# You expected 256? The passes fell 256-fold, the time did not. 256 tokens in one pass share *one* reading of the weights, so
# arithmetic is the limit. One token reads all weights for itself, so memory is the limit (stage 01).
#
# That is also why one line climbs and the other hardly moves: the weights are as many for each token. It is not flat for ever.
# The whole cache is read for each token, so its share grows with the text.
#
# (Busy machine? Then the shares jump about. Above 100 % means that the ceiling was measured in a worse moment than the run.)
#
# ## The price
#
# Time was bought with memory. How much? Ask the engine's own tensors.

# %%
keys = llm.cache.keys[0]  # layer 0
print(f"keys of one layer: {list(keys.shape)} [slots, KV heads, head_dim], {keys.element_size()} bytes a number")
per_token = llm.cache.data.nbytes // keys.shape[0]
print(f"the whole cache: {llm.cache.data.nbytes} bytes / {len(keys)} slots = {per_token} bytes per token")
print(f"kv.kv_bytes_per_token(30, 3, 64, 4) = {kv.kv_bytes_per_token(30, 3, 64, 4)}")
held = (
    len(prompt) + len(slow_tokens) - 1
)  # the newest token has not passed through the model: it is not in the cache yet
print(f"our sentence about a lighthouse, {held} tokens in the cache: {held * per_token / 2**20:.2f} MiB")
compare("02.token", per_token / 1024, "KiB")

# %% [markdown]
# Tens of kilobytes for one token, which is a short word. `kv_bytes_per_token` is yours to write in the exercises. It needs only
# four numbers, so we can size models that would never fit here. Their shapes come from their public `config.json` files; weights
# and cache both count 2 bytes a number (fp16 or bf16).

# %%
MODELS = {  # layers, query heads, KV heads, head_dim, number of weights, longest context
    "SmolLM2-135M": (30, 9, 3, 64, 134_515_008, 8_192),
    "Qwen3-0.6B": (28, 16, 8, 128, 596_049_920, 40_960),
    "Llama-2-7B": (32, 32, 32, 128, 6_738_415_616, 4_096),
    "Llama-3.1-8B": (32, 32, 8, 128, 8_030_261_248, 131_072),
    "Llama-3.1-70B": (80, 64, 8, 128, 70_553_706_496, 131_072),
}
token_bytes, weight_bytes, crossover = {}, {}, {}
print("                       query     KV  KV bytes                  cache passes  the model's")
print("model          layers  heads  heads  per token      weights     weights at    own limit")
for name, (layers, heads, kv_heads, head_dim, weights, limit) in MODELS.items():
    token_bytes[name], weight_bytes[name] = kv.kv_bytes_per_token(layers, kv_heads, head_dim, 2), 2 * weights
    crossover[name] = weight_bytes[name] // token_bytes[name] + 1  # the first number of tokens whose cache is larger
    sizes = f"{token_bytes[name] / 1024:>7.1f} KiB{weight_bytes[name] / 1e9:>9.2f} GB"
    print(f"{name:<15}{layers:>6}{heads:>7}{kv_heads:>7}{sizes}{crossover[name]:>15,}{limit:>13,}")
compare("02.crossover", round(crossover["Llama-3.1-8B"] / 1000, 1), "thousand tokens")

print()
for a, b in (("Qwen3-0.6B", "Llama-3.1-8B"), ("Llama-2-7B", "Llama-3.1-70B")):
    print(f"{a} against {b}: ", end="")
    print(
        f"{weight_bytes[a] / weight_bytes[b]:.2f} times the weights, {token_bytes[a] / token_bytes[b]:.2f} times the cache"
    )
print(f"Qwen3-0.6B: head_dim {MODELS['Qwen3-0.6B'][3]}, but hidden_size / heads = 1024 / 16 = {1024 // 16}")

# %% [markdown]
# Surprised? **The size of a model says little about the size of its cache.** Layers, KV heads and `head_dim` do. The old 7B model
# keeps 32 KV heads, the 70B model 8, shared by its 64 query heads. Several query heads may share one KV head (*grouped-query attention*, Ainslie et al. 2023, arXiv:2305.13245). Llama 2 used it for its 34B and
# 70B models only (Touvron et al. 2023, arXiv:2307.09288, appendix A.2.1). And `head_dim` is not always `hidden / heads`: read it.
#
# One conversation rarely outgrows the weights. But a server has many, and each brings its own cache. Move the sliders.


# %%
def draw_memory(ax, context, requests, KV_bits):
    """Share of weights and KV cache in the memory, for each model."""
    caches = {name: context * requests * token_bytes[name] * KV_bits // 16 for name in MODELS}
    digits = 3 if min(caches.values()) < 5e7 else 1
    notes = ["share of memory (%)"]
    for row, name in enumerate(reversed(MODELS)):
        share = 100 * weight_bytes[name] / (weight_bytes[name] + caches[name])
        ax.barh(row, share, color=BLUE, height=0.62)
        ax.barh(row, 100 - share, left=share, color=ORANGE, height=0.62)
        ax.text(103, row, f"{caches[name] / 1e9:,.{digits}f} GB", va="center", color=ORANGE)
        star = "*" if context > MODELS[name][5] else ""
        ax.text(-3, row, name + star, va="center", ha="right")
    if context > min(shape[5] for shape in MODELS.values()):
        notes.append("* a longer context than the model allows")
    if KV_bits == 4:
        notes.append("(4 bits without scales; see exercise 02.4 K)")
    ax.axvline(50, color="black", ls=":", lw=1)
    top = len(MODELS) - 0.45
    ax.text(0, top, "weights (fp16)", color=BLUE)
    ax.text(100, top, "KV cache", color=ORANGE, ha="right")
    ax.set(xlim=(0, 100), ylim=(-0.5, top + 0.3), xlabel="\n".join(notes))
    ax.set_yticks([])
    ax.spines[:].set_visible(False)


slider_plot(
    draw_memory,
    context=[512, 2048, 8192, 32_768, 131_072],
    requests=[1, 4, 16, 64, 256],
    KV_bits=[16, 8, 4],
    start={"context": 2048, "requests": 16},
    stills=[
        {"context": 2048, "requests": 64, "KV_bits": 16},
        {"context": 32_768, "requests": 1, "KV_bits": 16},
    ],
    size=(6.8, 3.0),
)

# %% [markdown]
# Where a bar turns orange before the dotted line, the cache is the bigger half. With 64 conversations of 2,048 tokens it outweighs
# four of these five models. Most of such a server's memory is not the model, but what the model remembers. That is why so much of
# this course is about it.
#
# ## Two classic bugs, live
#
# A cache is easy to write and easy to get *nearly* right. **Bug 1: the position.** Keys and queries are turned by an angle that
# depends on the position (RoPE). A call that brings one token must still know where that token stands. We break the engine in two
# ways: the new token always says "I am at position 0", and "I am one further than I am".

# %%
PARTS = llm.config, llm.model, llm.tokenizer


def engine_on_same_model(**options):
    return LLM.from_parts(*PARTS, num_kv_blocks=32, enable_prefix_caching=False, **options)


def with_positions(change):
    """An engine whose positions are changed in every step that brings one single token."""
    broken = engine_on_same_model()
    build = broken.runner.build

    def wrong_build(plan):
        batch = build(plan)
        return replace(batch, positions=change(batch.positions)) if len(batch.positions) == 1 else batch

    broken.runner.build = wrong_build
    return broken


right = engine_on_same_model().generate(prompt, greedy(40))[0].outputs[0]
print(f"right:\n   {right.text!r}")
for label, change in (("always at position 0", lambda p: p * 0), ("one position too far", lambda p: p + 1)):
    wrong = with_positions(change).generate(prompt, greedy(40))[0].outputs[0]
    agree = [a == b for a, b in zip(wrong.token_ids, right.token_ids, strict=True)]
    first = agree.index(False) + 1 if False in agree else None
    print(f"{label} (first wrong token: number {first}):\n   {wrong.text!r}")

# %% [markdown]
# "Always 0" goes round in circles. The other is worse: it reads well, and it is wrong. **Nobody sees an off-by-one in a demo.**
# The only test that finds it compares the tokens (better: the logits) with a full recompute.
#
# **Bug 2: the square mask.** A prompt of 22 tokens is computed in pieces of 8. The broken mask takes the queries to begin at
# position 0, as in training, though 8 or 16 tokens lie in the cache already. `swap` puts our function in the engine's place, as
# `plug_in` will do with yours.

# %%
months = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. January, February, March, April,"
good_mask = attention.causal_mask


def corner_mask(num_queries, context_len, window=None):
    """Many implementations need no mask for one query, so the bug shows with several only."""
    if num_queries == 1:
        return good_mask(num_queries, context_len, window)
    return torch.ones(num_queries, context_len).tril().bool()


def next_months(**options):
    return engine_on_same_model(**options).generate(months, greedy(9))[0].outputs[0].text


print("whole prompt at once:   ", next_months())
print("in pieces of 8:         ", next_months(max_num_batched_tokens=8))
with swap("02.3", corner_mask):
    print("pieces, wrong mask:     ", next_months(max_num_batched_tokens=8))

# %%
fig, axes = plt.subplots(1, 2, figsize=(7.6, 2.6), layout="constrained", sharey=True)
pictures = {"right: the chunk is the end": good_mask(8, 16), "wrong: the chunk is the start": corner_mask(8, 16)}
for ax, (title, mask) in zip(axes, pictures.items(), strict=True):
    ax.imshow(mask, cmap=ListedColormap(["#e8e8e8", BLUE]))
    ax.axvline(7.5, color=ORANGE, lw=2)
    ax.text(7.2, -0.8, "cached", color=ORANGE, ha="right")
    ax.text(7.9, -0.8, "new", color=ORANGE)
    ax.set_title(title, pad=18)
    ax.set(xlabel="key position", xticks=range(0, 16, 5), yticks=[0, 7], yticklabels=[8, 15])
axes[0].set_ylabel("query position")
plt.show()

# %% [markdown]
# Blue means "may look". With the wrong mask the new tokens cannot even see themselves. The text is fluent all the same.
# hyprstream had exactly this, silently (pull request 1521), and so did executorch's reference cache (21749). Meta's Llama code used
# the square of the new tokens: there it crashed (issue 899).
#
# ## What beginners get wrong
# - **Counting query heads.** The cache holds *KV* heads. For Llama 3.1 70B that is a factor of 8.
# - **Losing the 2.** Keys *and* values.
# - **Growing the cache with `torch.cat`.** Each token then copies all that came before, twice the memory for a moment, and the
#   tensors move. The engine sets the memory aside once and writes rows.
# - **`cache[slots].copy_(new)`.** Indexing with a tensor makes a copy, so this fills the copy and throws it away. No error, no effect.
# - **"The cache makes attention linear."** Each new token still looks at all old ones. What is gone is the work of making them again.
#
# ## Other names for the same thing
# | here | vLLM | SGLang | llama.cpp | transformers |
# |---|---|---|---|---|
# | `slots` | `slot_mapping` | `out_cache_loc` | cells of the KV cache | (grows by `torch.cat` in `DynamicCache`) |
# | `write_kv` | `reshape_and_cache_flash` | `set_kv_buffer` | `cpy_k`, `cpy_v` | `Cache.update` |
# | `KVCache` | KV cache tensors, `--kv-cache-dtype` | `MHATokenToKVPool` | `--cache-type-k`, `--cache-type-v` | `past_key_values` |
#
# ## Three quick questions

# %%
quiz(
    "Why does nobody cache the queries?",
    [
        "They change when later tokens arrive.",
        "Only the new tokens' queries are used in a step.",
        "They are too big.",
    ],
    1,
    [
        "They do not change either: causality holds for all three. They could be kept, but what for?",
        "Old queries belong to positions that are finished. Their results are in the keys and values of the next layer already.",
        "With grouped-query attention they are bigger than the keys, but that is not the reason: they are never read again.",
    ],
)

# %%
quiz(
    "3 new tokens arrive on a cache of 5. How many entries of the mask are True?",
    ["6", "15", "21", "24"],
    2,
    [
        "That is the lower triangle of 3 x 3: the new tokens would not see the cache at all.",
        "Those are the 3 x 5 cached keys. The new tokens see themselves and one another too.",
        "6 + 7 + 8. They stand at positions 5, 6 and 7, and each sees itself and all before it.",
        "That is the whole rectangle, so the first new token would see the two after it.",
    ],
)

# %%
quiz(
    "A model goes from 32 KV heads to 8, still with 32 query heads. What happens to the time of one more token with a nearly empty cache?",
    ["It falls to a quarter.", "Hardly anything.", "It doubles, as heads must be shared."],
    1,
    [
        "The cache falls to a quarter. But with few tokens in it, nearly all bytes that a step reads are weights.",
        "The weights rule while the cache is small (k and v projections do shrink a little). The gain comes with long texts and many requests.",
        "Sharing costs nothing: the query heads of a group read the same keys.",
    ],
)

# %% [markdown]
# ## Now you can
# say what is recomputed and why it may be kept, write into a cache and mask it, size it for any model from four numbers, and test
# a cache in the only way that counts: the same tokens as a full recompute.
#
# **Next:** [exercises/02_kv_cache.ipynb](../exercises/02_kv_cache.ipynb). You write the engine's three functions, and then take the
# numbers of a few blog posts apart.
#
# The cache is one flat array of slots. With many requests of unknown length: who owns which slot? That is stage 04. Before it,
# stage 03 looks at the heads that share it.
