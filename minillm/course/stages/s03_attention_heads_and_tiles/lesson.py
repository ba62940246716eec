# %% [markdown]
# # 03 Attention: heads and tiles
#
# **A prompt of 100,000 tokens has 10 billion pairs of tokens, and attention gives each pair a score. Where are they kept?**
# Nowhere. This lesson shows how to take a softmax over scores that never exist at the same time. Before that, it makes the
# cache smaller by letting heads share.
#
# **Afterwards you can** explain MHA, GQA and MQA, write an online softmax and FlashAttention's loop, and say what a sliding
# window saves and costs.
#
# *40 minutes. You need stage 02 (keys, values, the mask) and some PyTorch. Everything runs on the CPU.*

# %%
import statistics
import time
from contextlib import contextmanager
from math import exp

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.patches import Rectangle

from minillm import LLM, SamplingParams, attention, kv, roofline
from minillm.course import compare, predict, quiz, show_source, swap
from minillm.course.checker import largest_tensor
from minillm.course.widgets import stepper

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#e4e4e4"
NEVER = float("-inf")

llm = LLM("smollm2-135m", num_kv_blocks=64, enable_prefix_caching=False)  # a small cache; what "prefix" means: stage 05
PARTS = llm.config, llm.model, llm.tokenizer
HEADS, KV_HEADS, DIM = llm.config.num_heads, llm.config.num_kv_heads, llm.config.head_dim


def engine(**options):
    """Another engine around the same model."""
    return LLM.from_parts(*PARTS, num_kv_blocks=64, enable_prefix_caching=False, **options)


def greedy(count):
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


# %% [markdown]
# ## Part one: heads that share
#
# Attention runs several times side by side, as *heads*. Each query head asks its own question. Does each need its own keys
# and values, too?

# %%
fig, axes = plt.subplots(1, 3, figsize=(8.4, 2.4), layout="constrained")
for ax, kv_heads, name in zip(axes, (8, 2, 1), ("MHA: one each", "GQA: a group shares", "MQA: all share"), strict=True):
    places = [(g + 0.5) * 8 / kv_heads - 0.5 for g in range(kv_heads)]
    for h in range(8):
        ax.plot([h, places[h // (8 // kv_heads)]], [1, 0], color="#999999", lw=1.2, zorder=0)
    ax.scatter(range(8), [1] * 8, s=150, color=BLUE)
    ax.scatter(places, [0] * kv_heads, s=190, marker="s", color=ORANGE)
    ax.set_title(name, fontsize=11)
    ax.text(3.5, -0.62, f"{kv_heads} KV head{'s' * (kv_heads > 1)} in the cache", color=ORANGE, ha="center")
    ax.set(xlim=(-0.7, 7.7), ylim=(-0.8, 1.35))
    ax.set_axis_off()
axes[0].text(3.5, 1.24, "8 query heads", color=BLUE, ha="center")
plt.show()

# %% [markdown]
# *Multi-head* (MHA), *grouped-query* (GQA, Ainslie et al. 2023, arXiv:2305.13245) and *multi-query attention* (MQA, Shazeer
# 2019, arXiv:1911.02150) differ in one number. Neighbours share: query head h reads KV head `h // share`. MHA is a share of 1,
# MQA a share of all.
#
# Only the orange squares are cached. So what do real models gain? The shapes are from their published `config.json`; two bytes
# a number.

# %%
MODELS = {  # layers, query heads, KV heads, head_dim
    "Llama-2-7B": (32, 32, 32, 128),
    "Llama-3.1-8B": (32, 32, 8, 128),
    "Qwen3-0.6B": (28, 16, 8, 128),
    "SmolLM2-135M": (30, 9, 3, 64),
    "Gemma-2B": (18, 8, 1, 256),
    "Falcon-7B": (32, 71, 1, 64),
}
print("                    query     KV    cache, KiB    if it were    tokens that fit")
print("model         kind  heads  heads     per token           MHA     in 10 GB of cache")
for name, (layers, heads, kv_heads, dim) in MODELS.items():
    kind = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
    bytes_, as_mha = kv.kv_bytes_per_token(layers, kv_heads, dim), kv.kv_bytes_per_token(layers, heads, dim)
    fits = kv.max_tokens_in(10 * 10**9, bytes_)
    print(f"{name:<14}{kind:<4}{heads:>7}{kv_heads:>7}{bytes_ / 1024:>14.1f}{as_mha / 1024:>14.1f}{fits:>19,}")
shrunk = kv.kv_bytes_per_token(32, 32, 128) // kv.kv_bytes_per_token(32, 1, 64)
print(f"\nLlama-2-7B against Falcon-7B, both with 32 layers: {shrunk} times the cache for each token")

# %% [markdown]
# Two models of the same size, and a factor of 64. Why does not everybody share everything? MQA can cost quality; a few groups
# come close to MHA in quality and to MQA in speed (the GQA paper, abstract). Llama 3.1 and Qwen3 settled on 8.
#
# ### Share without copying
#
# The plain formula needs as many keys as queries. So it *repeats* each key `share` times:

# %%
show_source(attention.naive)

# %% [markdown]
# That writes the cache out again, three times as large for SmolLM2, in every layer and step. The engine copies no key. It folds
# the queries instead: heads that read the same keys are treated as **more queries of one head**. Below, each number says who it
# is, *head.query*: 3.1 is query 1 of head 3.

# %%
q = torch.tensor([[h + i / 10 for h in range(6)] for i in range(2)])[:, :, None]  # 2 queries, 6 heads, D = 1
print("2 queries x 6 heads:\n", q[:, :, 0])
print("folded for 3 KV heads:\n", attention.fold_heads(q, 3)[:, :, 0])

# %% [markdown]
# Row g holds all that KV head g must answer. One matrix product does it, and each key is read once for the whole group. This is
# your first exercise. It is easy to get *nearly* right: deal the heads out in turn (`h % 3`, not `h // share`) and every shape
# still fits. Let us do that to the real model. `swap` puts our function in the place of the engine's, for one block of code.

# %%
DIARY = (
    "The keeper of the lighthouse has a cat called Biscuit. Every evening the keeper writes down the weather. Today the wind "
    "came from the west, and the sea was grey. A ship passed far out. In the afternoon it rained, and the lamp was cleaned. "
    "Then the oil was counted and the stairs were swept. At night the keeper called the cat by its name:"
)
engine_fold = attention.fold_heads


def dealt_in_turn(q, num_kv_heads):
    reordered = q.unflatten(-2, (-1, num_kv_heads)).transpose(-3, -2).flatten(-3, -2)
    return engine_fold(reordered, num_kv_heads)


right = engine(attention="tiled").generate(DIARY, greedy(12))[0].outputs[0]
with swap("03.1", dealt_in_turn):
    wrong = engine(attention="tiled").generate(DIARY, greedy(12))[0].outputs[0]
print(f"h // share:  ...the cat by its name:{right.text!r}")
print(f"h % kv:      ...the cat by its name:{wrong.text!r}")

# %% [markdown]
# ## Part two: the scores that are not there
#
# How large is the table of scores? One layer of Llama-3.1-8B, fp16:

# %%
per_token = kv.kv_bytes_per_token(32, 8, 128)
for tokens in (2_048, 8_192, 131_072):
    scores = 32 * tokens**2 * 2  # heads x queries x keys x bytes
    print(
        f"{tokens:>7,} tokens: scores of ONE layer {scores / 1e9:>8.1f} GB; the whole KV cache {tokens * per_token / 1e9:>5.1f} GB"
    )

# %% [markdown]
# At the model's full context one layer's scores would be a *terabyte*. The model runs on one GPU all the same.
#
# ### Predict first
# Put a number in place of `None`. The measurements come later.

# %%
question = "SmolLM2 has 9 query heads. 2,048 tokens, float32: how many MiB are one layer's scores, all at once?"
predict("03.scores", None, "MiB", question)
question = (
    "2,048 tokens, tiles of 64, each token sees the last 256: what share of the 2,048 x 2,048 scores must be computed?"
)
predict("03.share", None, "%", question)
question = "2,048 tokens again: how many times as fast as the plain formula are tiles, in PyTorch on this CPU? (0.5: half as fast)"
predict("03.speed", None, "times", question)

# %% [markdown]
# ### Why softmax wants the whole row
#
# Softmax divides exp(score) by the sum of all exp(score). But exp grows fast.

# %%
print("the largest score whose exp is still finite:")
for dtype in (torch.float16, torch.bfloat16, torch.float32):
    print(f"   {str(dtype)[6:]:<9}{torch.tensor(torch.finfo(dtype).max, dtype=torch.float64).log().item():6.1f}")

highest = []
engine_update = attention.online_update


def watch_scores(m, l, acc, scores, v):
    highest.append(scores.max().item())
    return engine_update(m, l, acc, scores, v)


with swap("03.3", watch_scores):
    engine(attention="tiled").generate(DIARY, greedy(1))
print(f"the largest score of SmolLM2 while it reads the diary: {max(highest):.1f}")
print("exp of [12, 10] in float16:", torch.tensor([12.0, 10.0]).half().exp().tolist())

# %% [markdown]
# Our little model's own scores would overflow in float16, and infinity divided by infinity is NaN. The way out: subtract the row's maximum *m* first. exp(s - m) is never above 1, and the
# factor exp(-m) cancels in the division.
#
# But then nothing can be added up before the whole row has been seen, since its last score may be the maximum. Or can it?
#
# ### Four numbers in two tiles, by hand
#
# Scores 1, 3, 2, 5; values 10, 20, 30, 40. All at once:

# %%
weights = [exp(s - 5) for s in (1, 3, 2, 5)]
print("all at once:", round(sum(w * x for w, x in zip(weights, (10, 20, 30, 40), strict=True)) / sum(weights), 4))

# tile 1: scores 1 and 3
m = 3  # the largest score so far
l = exp(1 - m) + exp(3 - m)  # the sum of the weights
acc = 10 * exp(1 - m) + 20 * exp(3 - m)  # "accumulator": the sum of weight times value
print(f"after tile 1: m = {m}, l = {l:.4f}, acc = {acc:.4f}   (acc / l = {acc / l:.4f})")

# tile 2: scores 2 and 5, relative to the new maximum
new_m = 5
l2, acc2 = exp(2 - new_m) + exp(5 - new_m), 30 * exp(2 - new_m) + 40 * exp(5 - new_m)
print(f"just added:        {(acc + acc2) / (l + l2):.4f}   wrong: tile 1 counts from 3, tile 2 from 5")

shrink = exp(m - new_m)
print(f"tile 1 rescaled:   {(acc * shrink + acc2) / (l * shrink + l2):.4f}   (by exp(3 - 5) = {shrink:.4f})")

# %% [markdown]
# That is the trick. exp(s - 5) = exp(s - 3) · exp(3 - 5), so **one factor corrects all old terms at once**, though their scores
# are forgotten. It is exact. This *online softmax* (Milakov and Gimelshein 2018, arXiv:1805.02867) needs three things for each
# row: m, l and acc. Below is what the engine promises; you write it.
#
# One trap. A row may have seen *nothing* so far, because the mask hid the whole tile. Then m is -inf, and so is the score.

# %%
show_source(attention.online_update)
nothing = torch.tensor(NEVER)
print("exp(-inf - (-inf)) =", (nothing - nothing).exp().item(), "  and one NaN spoils the row for good")
empty = torch.full((1, 1), NEVER), torch.zeros(1, 1), torch.zeros(1, 1)
print("the engine:", [x.item() for x in engine_update(*empty, torch.full((1, 2), NEVER), torch.ones(2, 1))])

# %% [markdown]
# ## Step through it
#
# 8 tokens, tiles of 4 queries x 2 keys. The orange scores are all that exist at that moment. Blue ones are spent. Watch m
# and l on the right: where m grows, the row is rescaled. The grey corner is never computed.

# %%
ROWS, COLUMNS, S = 4, 2, 8
table = torch.randint(0, 9, (S, S), generator=torch.Generator().manual_seed(363)).float()
table = table.masked_fill(~attention.causal_mask(S, S), NEVER)
frames, captions, values = [], [], torch.arange(S).float()[:, None]
for i in range(0, S, ROWS):
    state = torch.full((ROWS, 1), NEVER), torch.zeros(ROWS, 1), torch.zeros(ROWS, 1)
    for j in range(*attention.visible_keys(i, i + ROWS - 1), COLUMNS):
        old = state[0]
        state = attention.online_update(*state, table[i : i + ROWS, j : j + COLUMNS], values[j : j + COLUMNS])
        grew = int(((state[0] > old) & (old > NEVER)).sum())
        frames.append((i, j, state[0].flatten().tolist(), state[1].flatten().tolist()))
        captions.append(f"queries {i}-{i + ROWS - 1}, keys {j}-{j + COLUMNS - 1}; rows rescaled: {grew}")


def draw_tiles(ax, step):
    """The score table with the tile under work, and what is known of each row."""
    top, left, m, l = frames[step]
    spent = [(i, j) for i, j, _, _ in frames[:step]]
    reached = {(i, j) for i, j, _, _ in frames}
    for i in range(0, S, ROWS):
        for j in range(0, S, COLUMNS):
            if (i, j) not in reached:
                ax.add_patch(Rectangle((j, i), COLUMNS, ROWS, facecolor=GREY))
                ax.text(j + COLUMNS / 2, i + ROWS / 2, "skipped", ha="center", va="center", color="#777777", fontsize=8)
    for i, j in sorted(reached):
        color = ORANGE if (i, j) == (top, left) else BLUE if (i, j) in spent else "white"
        ax.add_patch(Rectangle((j, i), COLUMNS, ROWS, facecolor=color, alpha=1 if color == "white" else 0.28))
        ax.add_patch(Rectangle((j, i), COLUMNS, ROWS, fill=False, edgecolor="#777777", lw=1))
    for y in range(top, top + ROWS):
        for x in range(left, left + COLUMNS):
            text = "-inf" if x > y else f"{table[y, x]:.0f}"
            ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=9 if x > y else 11)
        low = m[y - top] == NEVER
        ax.text(8.9, y + 0.5, "-inf" if low else f"{m[y - top]:.0f}", ha="center", va="center", color=ORANGE)
        ax.text(10.2, y + 0.5, f"{l[y - top]:.2f}", ha="center", va="center", color=ORANGE)
    ax.text(8.9, -0.3, "m", ha="center")
    ax.text(10.2, -0.3, "l", ha="center")
    ax.set(xlim=(0, 11), ylim=(S, -0.8), xlabel="key" + " " * 34, ylabel="query")
    ax.set_xticks([x + 0.5 for x in range(S)], range(S))
    ax.set_yticks([y + 0.5 for y in range(S)], range(S))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


stepper(draw_tiles, len(frames), captions, size=(5.6, 3.4), still=[0, 1, 4, 5])

# %% [markdown]
# ## The loop
#
# This is FlashAttention's idea (Dao et al. 2022, arXiv:2205.14135), without its GPU code. You will write both parts.

# %%
show_source(attention.visible_keys)
show_source(attention.tiled)

# %% [markdown]
# ### What is skipped
#
# Tiles on the diagonal are masked in part. All beyond it, and all before the window, are not even looked at.

# %%
fig, axes = plt.subplots(1, 3, figsize=(8.6, 3.1), layout="constrained")
cases = (("a whole prompt", 512, None), ("with a window of 128", 512, 128), ("128 new tokens, 384 cached", 128, None))
for ax, (title, queries, window) in zip(axes, cases, strict=True):
    tiles = (
        attention.causal_mask(queries, 512, window)
        .unflatten(0, (-1, 64))
        .unflatten(2, (-1, 64))
        .float()
        .mean(dim=(1, 3))
    )
    for (i, j), seen in zip(torch.ones_like(tiles).nonzero().tolist(), tiles.flatten().tolist(), strict=True):
        color = BLUE if seen == 1 else "#7fb5d8" if seen else GREY
        ax.add_patch(Rectangle((j * 64, 512 - queries + i * 64), 64, 64, facecolor=color, edgecolor="white"))
    ax.set_title(f"{title}\n{(tiles > 0).float().mean():.0%} of the tiles", fontsize=10)
    ax.set(
        xlim=(0, 512), ylim=(512, 0), aspect="equal", xlabel="key position", xticks=(0, 256, 512), yticks=(0, 256, 512)
    )
    ax.spines[:].set_visible(False)
axes[0].set_ylabel("query position")
axes[0].text(330, 120, "skipped", color="#666666", ha="center")
axes[0].text(130, 400, "all seen", color="white", ha="center", bbox={"facecolor": BLUE, "edgecolor": "none", "pad": 1})
axes[1].text(210, 150, "seen in part", color="#3f7fab", ha="left")
plt.show()

length, tile, window = 2048, 64, 256
for name, size in (("causal", None), (f"window {window}", window)):
    ranges = [attention.visible_keys(i, i + tile - 1, size) for i in range(0, length, tile)]
    share = sum((end - start) * tile for start, end in ranges) / length**2
    print(f"{name:<11} {share:6.1%} of {length} x {length} scores")
compare("03.share", round(100 * share, 1), "%")

# %% [markdown]
# (The engine's key tiles begin at the window's first key, not at multiples of 64. So it needs a little less than the middle picture.)
#
# ## Measured: memory
#
# Random queries and keys in SmolLM2's shape. What is the largest tensor that comes into being? (`largest_tensor`, from the
# exercise checks, watches every operator of torch and keeps the size of the largest new result.)


# %%
def random_qkv(length):
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(length, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]


tile_sizes = []


def watch_size(m, l, acc, scores, v):
    tile_sizes.append(scores.numel())
    return engine_update(m, l, acc, scores, v)


lengths = [128, 256, 512, 1024, 2048]
naive_mib, tiled_mib = [], []
print("tokens    plain formula    tiles: largest tensor    tiles: scores at once   (MiB)")
for length in lengths:
    q, k, v = random_qkv(length)
    with largest_tensor() as peak:
        expected = attention.naive(q, k, v, attention.causal_mask(length, length), DIM**-0.5)
    naive_mib.append(peak[0] * 4 / 2**20)
    with largest_tensor() as peak, swap("03.3", watch_size):
        got = attention.tiled(q, k, v, DIM**-0.5)
    tiled_mib.append(peak[0] * 4 / 2**20)
    assert torch.allclose(got, expected, atol=1e-4)
    print(f"{length:>6}{naive_mib[-1]:>17.2f}{tiled_mib[-1]:>25.2f}{max(tile_sizes) * 4 / 2**20:>25.3f}")
compare("03.scores", naive_mib[-1], "MiB")

fig, ax = plt.subplots(figsize=(6.4, 3.3), layout="constrained")
for sizes, color, label in (
    (naive_mib, ORANGE, "plain formula:\nall scores"),
    (tiled_mib, BLUE, "tiles:\nonly the result"),
):
    ax.loglog(lengths, sizes, "o-", color=color, lw=2)
    ax.text(lengths[-1] * 1.12, sizes[-1], label, color=color, va="center")
ax.set(xlabel="tokens", ylabel="largest tensor (MiB)", xlim=(110, 5200))
ax.set_xticks(lengths, lengths)
ax.set_yticks([1, 10, 100], [1, 10, 100])
ax.minorticks_off()
ax.spines[["top", "right"]].set_visible(False)
ax.grid(alpha=0.3)
plt.show()

# %% [markdown]
# Twice the tokens: four times the scores, but twice the result. In tiles the *scores* do not grow at all; what grows is the
# output that was asked for.
#
# ## Proof on the real model
#
# A longer text, all layers, all heads, with the plain formula and in tiles. (The text is also a look ahead at the next stages.)

# %%
KITCHEN = """
A language model writes one token at a time, and each new token depends on all the tokens before it. An inference engine is the
program around the model. It decides which request may run, where its keys and values are kept, and when the answer is finished.
None of this changes what the model says. All of it changes how many people can be served, and how long they have to wait.

Think of a kitchen. The prompt is the order, and reading it is quick work, because the cook can look at the whole slip at once. The
answer comes plate by plate, and for every plate the cook walks to the store room and carries the whole recipe book back. The walk
takes the same time for one guest as for twenty. So a good kitchen waits until several guests are hungry, and cooks for all of them
on one walk. That is a batch.

The notes about each guest take up space on the shelf. Early engines gave every guest a shelf as long as the longest dinner, and most
of it stayed empty. Later somebody had an idea that is as old as operating systems: cut the shelf into small boxes, all of the same
size, and hand them out one by one. A list says which boxes belong to whom, and the boxes need not stand next to each other. When a
guest leaves, the boxes go back on the pile. If two guests began with the same words, they can even share the first boxes.

Sometimes the shelf is full and there is still a guest at the table. Then the engine has to choose. It can ask somebody to wait, or
throw some notes away and write them again later. Each choice is fair to one guest and unfair to another.

At the end of each step the model does not give a word but a list of numbers, one for each word it knows. The engine turns them into
chances, throws the dice, and sends the word to the guest at once, before the next step begins.
"""
text_ids = llm.tokenizer.encode(KITCHEN.strip())[:384]
tile_sizes.clear()
plain = engine(attention="naive").generate(text_ids, greedy(12))[0].outputs[0]
with swap("03.3", watch_size):
    in_tiles = engine(attention="tiled").generate(text_ids, greedy(12))[0].outputs[0]
print(f"plain: {plain.text!r}\ntiles: {in_tiles.text!r}")
print("same tokens:", plain.token_ids == in_tiles.token_ids)
count = len(text_ids)
print(f"scores at once while reading {count} tokens: {HEADS * count**2:,} plain, {max(tile_sizes):,} in tiles")

# %% [markdown]
# ## Measured: time
#
# Is it also faster? `sdpa` is torch's own attention, compiled code that works in tiles as well. Medians of three. The last row
# is decode: one new token.


# %%
def milliseconds(work, *args, **kwargs):
    times = []
    for _ in range(4):
        start = time.perf_counter()
        work(*args, **kwargs)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


tries = [roofline.measure_machine(dtype=torch.float32) for _ in range(3)]
machine = max(tries, key=lambda found: found.flops)  # a ceiling is the best that was seen
print(f"{machine.name}: at most {machine.flops / 1e9:.0f} GFLOP/s, measured now\n")
print("  new    all      attention of one layer, ms        GFLOP/s of     share of")
print("tokens tokens     plain     tiles      sdpa              sdpa    the ceiling")
plain_ms, tiles_ms = {}, {}
for new, length in ((64, 64), (256, 256), (1024, 1024), (2048, 2048), (1, 2048)):
    q, k, v = random_qkv(length)
    q, mask, scale = q[-new:], attention.causal_mask(new, length), DIM**-0.5
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    plain_ms[new] = milliseconds(attention.naive, q, k, v, mask, scale)
    tiles_ms[new] = milliseconds(attention.tiled, q, k, v, scale)
    sdpa_ms = milliseconds(F.scaled_dot_product_attention, *heads_first, is_causal=new > 1, enable_gqa=True)
    flops = 4 * HEADS * DIM * mask.sum().item()  # two products, for the pairs that are seen
    speed = flops / sdpa_ms * 1e3
    print(f"{new:>6}{length:>7}{plain_ms[new]:>10.2f}{tiles_ms[new]:>10.2f}{sdpa_ms:>10.2f}"
          f"{speed / 1e9:>18.1f}{speed / machine.flops:>15.0%}")  # fmt: skip
compare("03.speed", round(plain_ms[2048] / tiles_ms[2048], 2), "times")

# %% [markdown]
# Our tiles are a *Python loop*: a dozen small operators for each tile, each with its own overhead. On short texts, and in decode,
# that is all you see. On long prompts they may well win: they skip half of the work, and a tile stays in the processor's cache.
# **A loop in Python saves memory for certain, and time only by chance.** One compiled program (sdpa) has no such overhead.
#
# ### Why a GPU gains so much
#
# A GPU computes far faster than its large memory (HBM) delivers. In the plain formula all scores travel: written, read by the
# softmax, written again as weights, read again. One kernel (a program on the GPU) that works in tiles keeps them on the chip. Its
# traffic is Q, the result, and K and V once for each tile of queries. One layer of Llama-3.1-8B in fp16:

# %%
heads, kv_heads, dim, tile = 32, 8, 128, 64
print("tokens    plain, GB    tiles, GB    ratio    FLOPs per byte: plain    tiles")
for n in (2_048, 8_192, 32_768):
    once = 2 * n * dim * (2 * heads)  # Q in, result out
    plain = once + 2 * n * dim * 2 * kv_heads + 2 * 4 * heads * n * n
    keys = sum(attention.visible_keys(i, i + tile - 1)[1] for i in range(0, n, tile))
    tiles = once + 2 * keys * dim * 2 * kv_heads
    work = 4 * heads * n * n * dim  # the tiles do half of it
    print(
        f"{n:>6,}{plain / 1e9:>13.2f}{tiles / 1e9:>13.2f}{plain / tiles:>9.1f}{work / plain:>25.0f}{work / 2 / tiles:>9.0f}"
    )

# %% [markdown]
# Nearly all of the plain traffic is scores. (In general, for N tokens, head_dim d and M numbers on the chip: of the order of
# N·d + N² accesses against N²·d²/M, section 3.2 of the FlashAttention paper.) In the words of stage 01, tiles have a higher
# arithmetic intensity. And decode? One query has one row of scores: tiny. There is nothing to save but the copies of keys.
#
# ## A window on the real model
#
# Mistral 7B lets each token see the last 4,096 only (arXiv:2310.06825, section 2). Then the cache stops growing, and so does the
# work for a token. SmolLM2 was not trained that way. What does a window cost it? *Loss* is the mean of -ln(p), where p is the
# probability that the model gave to the token that really came next. Lower is better.

# %%
windowed = engine(attention="naive")


@contextmanager
def window(size):
    """Every layer of our model sees the last `size` tokens only."""
    for layer in windowed.model.layers:
        layer.window = size
    try:
        yield
    finally:
        for layer in windowed.model.layers:
            layer.window = None


def surprises(ids, size):
    """-ln(p) of each token of a text but the first, which nothing comes before."""
    with window(size):
        out = windowed.generate(ids, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))[0]
    return [-found[token] for token, found in zip(ids[1:], out.prompt_logprobs[1:], strict=True)]


def loss(surprise, last=256):
    return statistics.mean(surprise[-last:])


def diary_goes_on(size):
    with window(size):
        return windowed.generate(DIARY, greedy(12))[0].outputs[0].text


sizes = [None, 128, 64, 32, 16]
alone = {size: surprises(text_ids, size) for size in sizes}
print("window    loss    pairs computed    cache of a long text")
for size in sizes:
    share = attention.causal_mask(384, 384, size).float().mean().item()
    kept = f"{(size or 8192) * llm.cache.bytes_per_token / 2**20:.1f} MiB" + " (8,192 tokens)" * (size is None)
    print(f"{size or 'none':>6}{loss(alone[size]):>8.2f}{share:>18.1%}    {kept}")
print(
    f"\nno window:  ...the cat by its name:{diary_goes_on(None)!r}\nwindow 24:  ...the cat by its name:{diary_goes_on(24)!r}"
)

# %% [markdown]
# The cat's name stands more than 24 tokens back, out of sight. But why not even a *wrong name*? Is old text worth so much? Then it
# must cost as much to **cut it off** and begin in the middle. The loss of the last 64 tokens:

# %%
cut = surprises(text_ids[-128:], None)
print(f"all 384 tokens:                        {loss(alone[None], 64):.2f}")
print(f"the text cut to its last 128 tokens:   {loss(cut, 64):.2f}   (each sees 64 to 127 tokens back)")
print(f"all 384 tokens, window 128:            {loss(alone[128], 64):.2f}   (each sees 127 tokens back)")

# %% [markdown]
# The window shows *more* text than the cut, and does worse. So what has the cut text that the window has not? Think before you
# read on. ... A **first token**. Let us give it back: the window, and one single token more.

# %%
engine_mask = attention.causal_mask


def and_the_first(num_queries, context_len, window=None):
    mask = engine_mask(num_queries, context_len, window)
    mask[:, 0] = True
    return mask


with swap("02.3", and_the_first):
    repaired = {size: surprises(text_ids, size) for size in sizes[1:]}
    print(f"window 128 and the very first token:   {loss(repaired[128], 64):.2f}")
    print(f"window 24 and the first token:  ...the cat by its name:{diary_goes_on(24)!r}")

fig, ax = plt.subplots(figsize=(6.8, 3.2), layout="constrained")
places = range(1, len(sizes))
for found, color, name in ((alone, ORANGE, "window"), (repaired, BLUE, "window and\nfirst token")):
    ax.plot(places, [loss(found[size]) for size in sizes[1:]], "o-", color=color, lw=2)
    ax.text(len(sizes) - 0.85, loss(found[16]), name, color=color, va="center")
ax.axhline(loss(alone[None]), color="#555555", ls="--", lw=1)
ax.text(len(sizes) - 0.85, loss(alone[None]), "no window", color="#555555", va="bottom")
ax.set_xticks(places, sizes[1:])
ax.set(xlabel="window (tokens)", ylabel="loss of the last 256 tokens", xlim=(0.8, len(sizes) + 0.5))
ax.spines[["top", "right"]].set_visible(False)
ax.grid(axis="y", alpha=0.3)
plt.show()

# %% [markdown]
# One token repairs most of it, and the diary is made of words again, though not of the name. A model that was trained without a
# window leans on the first tokens, whatever they say: softmax must spend its weight *somewhere*. These *attention sinks* (Xiao et
# al. 2023, arXiv:2309.17453) come back in stage 13. A model *trained* with its window has no such trouble, and what lies further
# back is handed on from layer to layer. (This engine skips the work but keeps the old blocks; vLLM frees them.)
#
# ## What beginners get wrong
# - **`repeat` for `repeat_interleave`**, or `h % num_kv_heads`. No error, only nonsense (jax-js 180, onnx 7274).
# - **Rescaling acc but not l**, or neither. With one tile nobody notices: test with many.
# - **A big negative number in place of -inf.** A real score may lie below it: flashinfer 4401 had -50,000.
# - **The window off by one.** Here it counts the query itself. FlashAttention's `window_size` does not (transformers 39408).
# - **"FlashAttention is an approximation."** It is exact. **"It has fewer FLOPs."** It moves fewer bytes.
#
# ## Other names for the same thing
# | here | vLLM | SGLang | llama.cpp | torch |
# |---|---|---|---|---|
# | `fold_heads` | `num_queries_per_kv` in the Triton kernel | `kv_group_num` | product broadcast over the group | `enable_gqa=True` |
# | `tiled` | FlashAttention, `unified_attention` | `extend_attention` | `ggml_flash_attn_ext`, `-fa` | `scaled_dot_product_attention` |
# | window | `sliding_window`, `SlidingWindowSpec` | `sliding_window_size` | `n_swa` | a mask of your own |
#
# ## Three quick questions

# %%
quiz(
    "A model has 24 query heads and 6 KV heads. Which KV head does query head 9 read?",
    ["1", "2", "3", "9"],
    1,
    [
        "That is 9 // 6: divided by the number of KV heads. Divide by the size of a group, 24 / 6.",
        "A group has 24 / 6 = 4 members, and 9 // 4 = 2. Heads 8 to 11 share it.",
        "That is 9 % 6: heads dealt out in turn. Neighbours share.",
        "There are only 6. That would be MHA.",
    ],
)

# %%
quiz(
    "A row has m = 7 after three tiles. The next tile's largest score is 4. What happens to l?",
    ["It is multiplied by exp(4 - 7), then grows.", "It only grows.", "It stays: the tile is too low to count."],
    1,
    [
        "The maximum stays 7, so the old sum stands as it is. The new weights are exp(score - 7), at most exp(-3).",
        "The factor is exp(7 - 7) = 1. The tile adds its exp(score - 7), each at most exp(-3).",
        "Low, but not zero: each key adds exp(score - 7). Softmax leaves nobody out.",
    ],
)

# %%
quiz(
    "What does tiling save when ONE new token is decoded on a cache of 10,000?",
    ["Most of the memory that the step needs, as in prefill.", "Half of the reads, by causality.", "Next to nothing."],
    2,
    [
        "One query has one row of scores a head: 10,000 numbers. The keys of one head are 10,000 x head_dim.",
        "The newest token sees all 10,000 keys. Nothing can be skipped without a window.",
        "All keys and values must be read once, and the row of scores is small. (Splitting the keys over many cores helps, and "
        "merging the parts is your online_update again.)",
    ],
)

# %% [markdown]
# ## Now you can
# say from a config how heads share and what that saves; take a softmax piece by piece; explain why FlashAttention saves memory
# everywhere and time on a GPU; and choose a window knowing its price.
#
# **Next:** [exercises/03_attention_heads_and_tiles.ipynb](../exercises/03_attention_heads_and_tiles.ipynb). You write the four
# functions, and then the whole model runs on your own FlashAttention.
#
# The tiles here were slices of one contiguous array. In stage 04 they lie scattered over the cache, and the same loop finds
# them through a table.
