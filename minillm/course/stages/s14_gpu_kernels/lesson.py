# %% [markdown]
# # 14 GPU kernels
#
# **A modern data-centre GPU reads over 4,000 gigabytes a second. SmolLM2 has 0.27 GB of weights. So it should write more than
# 10,000 tokens a second for one user. Plain PyTorch gives you a tiny part of that.** The GPU is not slow. It is waiting. This
# lesson finds out for what, and takes the waits away one at a time, until something else is the limit.
#
# **Afterwards you can** tell a launch-bound from a memory-bound model, read and write paged attention in Triton, say what a CUDA
# graph, fusion, split-KV and overlap each bring, and where their traps are.
#
# *40 minutes. You need stages 03 (online softmax) and 04 (block tables). **No GPU needed:** the kernels run here in Triton's
# interpreter, slowly but exactly. What only a GPU can show was measured on one (benchmarks/README.md); another run may differ
# by a fifth.*

# %%
import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # run GPU kernels on the CPU; must be set before Triton is imported

import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Rectangle

from minillm import LLM, SamplingParams, attention, gpu_inputs, gpu_runner, kernels, kv, roofline
from minillm.config import ModelConfig
from minillm.course import compare, predict, quiz, show_source, swap
from minillm.course.exercise import get_exercise
from minillm.course.stages.s14_gpu_kernels.exercises import decode_per_head, graphed_llm, run_decode, tiny_llm
from minillm.course.stages.s14_gpu_kernels.figures import count_operators, gpu_figures
from minillm.course.stages.s14_gpu_kernels.interpreted import launch, run_merge_parts, watch
from minillm.course.widgets import stepper

BLUE, SKY, ORANGE, GREEN, GREY = "#0072B2", "#9BC9E8", "#D55E00", "#009E73", "#D9D9D9"
SMALL, LARGE = "SmolLM2-135M", "Llama-3.1-8B"
np.seterr(all="ignore")  # exp2(-inf) is meant
torch.manual_seed(14)

gpu = gpu_figures()
llm = LLM("smollm2-135m", device="cpu", num_kv_blocks=64, enable_prefix_caching=False, attention="sdpa")
gpu

# %% [markdown]
# ## The limit, by hand
#
# To write one token, a decode step reads every weight once (stage 01). Nothing can be faster than bytes divided by bandwidth.
# Beside that limit, measured: plain PyTorch (Hugging Face's transformers, "eager": operator by operator), and this engine.

# %%
SHAPES = {
    SMALL: llm.config,
    LARGE: ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072),  # from its config.json
}
floor = {name: roofline.step_bytes(config, [256], 2, 2) / gpu.read(name) for name, config in SHAPES.items()}
print(f"{gpu.name}, one user, bfloat16, context 256; tokens per second")
print(f"{'':<14}{'bytes a step':>14}{'the limit':>12}{'transformers, eager':>21}{'minillm':>10}")
for name, config in SHAPES.items():
    eager = gpu.get("tokens_per_second", name, "eager", engine="transformers")
    shown = "not measured" if np.isnan(eager) else f"{eager:,.0f}"
    print(
        f"{name:<14}{roofline.step_bytes(config, [256], 2, 2) / 1e9:>11.2f} GB{1 / floor[name]:>12,.0f}"
        f"{shown:>21}{gpu.get('tokens_per_second', name):>10,.0f}"
    )
share = gpu.get("tokens_per_second", SMALL, "eager", engine="transformers") * floor[SMALL]
print(f"\nof what the bandwidth allows, eager PyTorch gets {share:.1%} with the small model")

# %% [markdown]
# Where is the rest?
#
# ### Predict first
# Put a number in place of `None`.

# %%
question = "One decode step of SmolLM2 (30 layers) in plain PyTorch: how many operators does it call?"
predict("14.operators", None, "operators", question)
question = "A CUDA graph replays a whole step with one call. How many times as fast does it make SmolLM2, for one user?"
predict("14.small", None, "times", question)
question = "And Llama 3.1 8B, on the same GPU?"
predict("14.large", None, "times", question)

# %% [markdown]
# ## What a step is made of
#
# On a GPU each PyTorch operator is at least one *kernel*: a function that the CPU launches and the GPU runs. We let the plain engine
# do one decode step here, and count the operators that compute something (views are free).

# %%
prompt = llm.tokenizer.encode("The keeper of the lighthouse")
llm.add_request(prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
llm.step()  # the prompt
with count_operators() as plain:
    llm.step()  # one token
operators = sum(plain.values())
print(f"{operators} operators for one token, {operators / llm.config.num_layers:.0f} a layer; the most frequent:")
print("   " + ", ".join(f"{name} {count}" for name, count in plain.most_common(8)))
compare("14.operators", operators, "operators")
while llm.scheduler.running:
    llm.step()

# %% [markdown]
# Most of them touch a few kilobytes: a row of 576 numbers. A GPU is done with that in a few microseconds, but Python needs longer
# than that to *launch* it. So the GPU waits for the CPU, again and again. The model is **launch-bound**.
#
# Here is a measured step, to scale: our engine (its own kernels are fewer), launched one by one, and all of them with one launch.

# %%
step, busy, count = {}, {}, {}
for mode in ("no graphs", ""):
    for name in SHAPES:
        step[name, mode] = 1e6 * gpu.get("tpot", name, mode)  # microseconds for a token
        busy[name, mode] = 1e3 * gpu.get("gpu_ms_per_step", name, mode)
        count[name, mode] = gpu.get("kernels_per_step", name, mode)
one_by_one, graph = (SMALL, "no graphs"), (SMALL, "")
print(f"{gpu.name}, {SMALL}, {count[one_by_one]:.0f} kernels for a token:")
for title, key in (("launched one by one", one_by_one), ("as one graph", graph)):
    print(
        f"   {title:<20} {step[key]:8,.0f} us, of these the GPU works {busy[key]:4.0f} us ({min(1, busy[key] / step[key]):.0%})"
    )


dear = ", ".join(
    f"{calls:.0f} {name.strip('_')} of {each:.1f} us" for name, calls, each in gpu.kernels(*one_by_one)[:4]
)
print(f"   the GPU's work, one by one, is mostly: {dear}")


def draw_step(ax, every, cpu, kernel, token, width, title):
    """CPU and GPU over time, in microseconds. every: from launch to launch; cpu, kernel: what each works on it."""
    for i in range(int(width / every) + 1):
        ax.add_patch(Rectangle((i * every, 1.1), cpu, 0.8, fc=SKY))
        ax.add_patch(Rectangle(((i + 1) * every - kernel, 0), kernel, 0.8, fc=ORANGE))
    for i in range(int(width / token) + 1 if token < width else 0):
        ax.text(
            (i + 0.5) * token, 0.4, f"token {i + 1}: all kernels", ha="center", va="center", color="white", clip_on=True
        )
    ax.set(xlim=(0, width), ylim=(-0.1, 2.1), yticks=[0.4, 1.5], yticklabels=["GPU: kernels", "CPU: work"])
    ax.set_title(title, loc="left", fontsize=10)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)


if gpu.found:
    fig, axes = plt.subplots(2, 1, figsize=(8, 2.8), layout="constrained", sharex=True)
    each, width = step[one_by_one] / count[one_by_one], 2 * step[graph]
    title = f"one by one: in this time {width / each:.0f} of {count[one_by_one]:.0f} kernels of the first token"
    draw_step(axes[0], each, 0.94 * each, busy[one_by_one] / count[one_by_one], width * 2, width, title)
    title = "one graph: one launch for each token; the blue bar is all of the CPU's work"
    draw_step(
        axes[1], step[graph], 1e3 * gpu.get("cpu_ms_per_step", SMALL), 0.98 * step[graph], step[graph], width, title
    )
    axes[1].set_xlabel(f"time (µs), {SMALL} on {gpu.name}; average durations")
    plt.show()

# %% [markdown]
# ## Rung 1: one launch for all
#
# A **CUDA graph** records a step's kernels once, with the addresses they work on, and replays all of them with one call. (They are
# the same kernels. That they work a little less in the graph is rung 6.) Without it, a kernel takes as long as its *launch* or as
# its *work*, whichever is longer. So what does a graph bring?

# %%
print(f"{gpu.name}, microseconds")
print(f"{'':<14}{'a launch':>10}{'a kernel':>10}{'ratio':>8}{'a token without graphs':>25}{'with':>8}{'ratio':>8}")
for name in SHAPES:
    without, own = (name, "no graphs"), (name, "")
    launch_us, kernel_us = step[without] / count[without], busy[without] / count[without]
    gain = step[without] / step[own]
    print(
        f"{name:<14}{launch_us:>10.1f}{kernel_us:>10.1f}{launch_us / kernel_us:>8.1f}{step[without]:>25,.0f}{step[own]:>8,.0f}{gain:>8.1f}"
    )
for key, name in (("14.small", SMALL), ("14.large", LARGE)):
    compare(key, step[name, "no graphs"] / step[name, ""], "times")

# %% [markdown]
# Same GPU, same trick, two very different results. A launch costs about the same for both models: tens of microseconds, most of
# them Python. But each kernel of the large model reads tens of megabytes and lasts longer, so there is less waiting to remove.
# **Ask what is waiting for what, before you optimise.** A token takes about
#
# *max( kernels × launch, kernels × (start + end) + bytes / bandwidth )*
#
# where start + end is what a kernel costs besides its bytes. Take both costs from the small model, and predict the large one:

# %%
launch_us = step[SMALL, "no graphs"] / count[SMALL, "no graphs"]
ends_us = (step[SMALL, ""] - 1e6 * floor[SMALL]) / count[SMALL, ""]
print(f"from {SMALL}: a launch {launch_us:.1f} us; a kernel's start and end {ends_us:.2f} us")
for mode, us in (
    ("no graphs", count[LARGE, "no graphs"] * launch_us),
    ("", count[LARGE, ""] * ends_us + 1e6 * floor[LARGE]),
):
    print(f"{LARGE}, {mode or 'as a graph':<11} predicted {us:8,.0f} us, measured {step[LARGE, mode]:8,.0f} us")

# %% [markdown]
# ## What a kernel looks like
#
# Most rungs below attack one of these terms, so now to the kernels. In Triton they are Python functions about *tiles*. A launch starts
# many copies, called *programs*; each asks for its number, loads a tile of numbers, computes, and stores. `x` is an address and
# `x + column` an array of addresses: `tl.load(addresses, mask, other)` reads them and gives `other` where the mask is False.
# `tl.constexpr` arguments are fixed when the kernel is compiled. (Two lines say PDL: rung 6.)

# %%
show_source(kernels._rms_norm)

# %% [markdown]
# A tile's size must be a power of two, and a row of 6 is not. So the tile has 8 places, and `inside` says which are real. Without that
# mask the last two would be read from the next row, or from nobody's memory. We run it on two rows and watch what each program touches:

# %%
x, weight, out = torch.randn(2, 6), torch.ones(6), torch.empty(2, 6)
with watch(x=x, weight=weight, out=out) as seen:
    launch(kernels._rms_norm, (2,), x, weight, out, 6, 1e-5, 8, False)
for access in seen.accesses:
    verb = "reads " if access.kind == "read" else "writes"
    print(f"program {access.program[0]} {verb} {access.name:<7} {access.elements.tolist()}")
print("right:", torch.allclose(out, torch.nn.functional.rms_norm(x, (6,), weight, 1e-5), atol=1e-6))

# %% [markdown]
# ## Rung 2: fewer kernels
#
# Written out, RMSNorm is six operators, and each writes a row only for the next one to read it back. **Fused**, it is one kernel:
# load, compute in registers (the processor's own small memory), store. PyTorch has fused this one by now, but not rotation,
# activation, cache or sampling. With one row even the products take norm, activation and residual along. Does the real model run
# on such kernels? It does, even here (only the large products stay PyTorch's):

# %%
for module in llm.model.modules():  # the GPU path wants plain weights, not the CPU's packed ones
    if getattr(module, "packed", None) is not None:
        module.weight, module.packed = torch.nn.Parameter(module.packed.to_dense(), requires_grad=False), None
options = {"num_kv_blocks": 8, "max_num_seqs": 1, "enable_prefix_caching": False}
on_kernels = LLM.from_parts(llm.config, llm.model, llm.tokenizer, attention="triton", **options)
greedy = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
for title, engine in (("plain torch", llm), ("GPU kernels", on_kernels)):
    print(f"{title}: The keeper{engine.generate('The keeper', greedy)[0].outputs[0].text!r}")

on_kernels.add_request("The keeper", SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
on_kernels.step()
with watch() as seen, count_operators() as rest:
    on_kernels.step()  # a decode step of one row
products = sum(count for name, count in rest.items() if "mm" in name or "linear" in name)
names = [name for name, _ in seen.launches]
print(
    f"\none decode step: {len(names)} launches of our kernels + {products} products = {len(names) + products}; plain: {operators}"
)
print("   " + ", ".join(f"{names.count(name)} {name[1:]}" for name in sorted(set(names), key=names.index)))
norms, activations, merges = names.count("_rms_norm"), names.count("_swiglu"), llm.config.num_layers
print(
    f"on a GPU {norms} norms and {activations} activations go into the products, and rung 4 adds {merges} merges: "
    f"{len(names) + products - norms - activations + merges} kernels; {gpu.get('kernels_per_step', SMALL):.0f} measured on {gpu.name}"
)

# %% [markdown]
# Same text, a fraction of the launches. Each kernel's start and end is saved too, so fusion helps even inside a graph.
#
# ## Rung 3: attention that reads each key once
#
# Now the kernel that this stage is about. One program serves one sequence and one **KV head**. It walks over the context in tiles of
# keys: asks the block table where they lie, loads them, and feeds an online softmax. No scores are stored, nothing is gathered.

# %%
show_source(kernels.cache_rows)
show_source(kernels.online_softmax)

# %% [markdown]
# For each tile of keys the loop in `kernels._attention` does this:
#
# 1. `rows = cache_rows(...)`: where the tile's keys lie
# 2. `k`, `v`: load these rows
# 3. `scores = q · kᵀ · scale · log2(e)`, and -inf where a key may not be seen
# 4. `m, l, weights, shrink = online_softmax(m, l, scores)`
# 5. `acc = acc · shrink + weights · v`; after the last tile the result is `acc / l`
#
# Base 2, because a GPU has an instruction for it; exp2(-inf) is exactly 0. Where a context ends inside a tile, the engine loads the
# last key again and gives it the score -inf, so that no load needs a mask. The NaN trap of stage 03 is here too: exercise 14.2.
#
# ### One program, tile by tile
#
# Step through a real run of the kernel of exercise 14.6: 21 tokens in pages of 4, tiles of 8 keys. Every coloured slot was recorded
# while it was loaded. On the right, m and l of query head 0: where m grows, l shrinks before it is added to.

# %%
PAGE, LENGTH, TABLE = 4, 21, [9, 2, 6, 0, 11, 4]
heads, kv_heads, dim = 6, 2, 16
generator = torch.Generator().manual_seed(61)
cache_pair = torch.randn(2, 12 * PAGE, kv_heads, dim, generator=generator)
cache = kernels.LayerCache(*cache_pair)
q = torch.randn(1, heads * dim, generator=generator)
one, zero = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)


states = []
engine_softmax = kernels.online_softmax


def spy(m, l, scores):
    new = engine_softmax(m, l, scores)
    states.append((float(new[0].handle.data[0]), float(new[1].handle.data[0])))
    return new


small_kernel = get_exercise("14.6").reference()  # the same loop without options; the tile's size is an argument
tables, lengths = torch.tensor([TABLE], dtype=torch.int32), torch.tensor([LENGTH], dtype=torch.int32)
with swap("14.2", spy):
    got, seen = run_decode(small_kernel, q.view(1, heads, dim), *cache_pair, tables, lengths, PAGE, tile=8)
loads = [a for a in seen.accesses if a.name == "keys" and a.program[1] == 0]  # of the program for KV head 0
tiles_read = [sorted(set((a.elements // (kv_heads * dim)).tolist())) for a in loads]  # slots, tile by tile
want = attention.paged_query(q.view(heads, dim), cache.keys, cache.values, TABLE, LENGTH, PAGE, dim**-0.5)
print(f"{seen.launches[0][1]} programs, one for each KV head; the first loads the keys in these slots:")
for slots, (m, l) in zip(tiles_read, states, strict=False):
    print(f"   {slots}   then m = {m:5.2f}, l = {l:4.2f}")
print(f"largest difference to attention.paged_query: {float((got[0] - want).abs().max()):.0e}")


# %%
def draw_tile(ax, step):
    """The cache as pages of slots, the table above, the tile's slots in orange."""
    for page in range(12):
        x, y = page % 6 * 5, 2.2 - page // 6 * 1.7
        ax.text(x + 2, y + 0.95, f"page {page}", ha="center", fontsize=8, color="black" if page in TABLE else "#999999")
        for i in range(PAGE):
            slot = page * PAGE + i
            now, before = slot in tiles_read[step], any(slot in tile for tile in tiles_read[:step])
            color = ORANGE if now else SKY if before else "white" if page in TABLE else GREY
            ax.add_patch(Rectangle((x + i, y), 1, 0.8, fc=color, ec="#888888", lw=0.8))
            if page in TABLE:
                position = TABLE.index(page) * PAGE + i
                text = str(position) if position < LENGTH else ""
                ax.text(
                    x + i + 0.5, y + 0.4, text, ha="center", va="center", fontsize=9, color="white" if now else "black"
                )
    ax.text(0, 4.55, "block table:", va="center")
    for j, page in enumerate(TABLE):
        used = any(TABLE[j] * PAGE <= slot < (TABLE[j] + 1) * PAGE for slot in tiles_read[step])
        ax.add_patch(
            Rectangle((6 + 2 * j, 4.15), 1.8, 0.8, fc="white", ec=ORANGE if used else "#888888", lw=2 if used else 0.8)
        )
        ax.text(6.9 + 2 * j, 4.55, str(page), ha="center", va="center")
    m, l = states[step]
    ax.text(29, 4.55, f"m = {m:.2f}    l = {l:.2f}", ha="right", va="center", color=ORANGE)
    ax.set(xlim=(-0.3, 29.5), ylim=(0.2, 5.2))
    ax.set_axis_off()


captions = [f"positions {8 * i} to {min(8 * i + 7, LENGTH - 1)}, through two pages" for i in range(len(tiles_read))]
captions[-1] = f"positions {8 * (len(tiles_read) - 1)} to {LENGTH - 1}: the rest of the last page is not read"
stepper(draw_tile, len(tiles_read), captions, size=(7.4, 2.3), still=[0, 1, len(tiles_read) - 1])

# %% [markdown]
# Numbers in the boxes are positions; grey pages belong to others.
#
# ### Why one program per KV head
#
# SmolLM2 has 9 query heads that share 3 KV heads. To read keys and values for each *query* head is the obvious choice. We count what
# both ask for:

# %%
q9, (k3, v3) = torch.randn(1, 9, 64), torch.randn(2, 512, 3, 64)
table, length = torch.arange(32, dtype=torch.int32)[None], torch.tensor([500], dtype=torch.int32)
_, apart = run_decode(decode_per_head, q9, k3, v3, table, length, 16, 64)
o9 = torch.empty(1, 9 * 64)
with watch(keys=k3, values=v3) as packed:
    tiles = kernels.Tiles(zero, one, length, zero, table, zero, zero, 16, 1)
    kernels.paged_attention(q9.view(1, -1), kernels.LayerCache(k3, v3), tiles, o9, 16, 9, 64**-0.5, None)
needed = kv.kv_bytes_per_token(1, 3, 64, 4) * 500
for title, run in (("one query head at a time", apart), ("heads that share are one tile", packed)):
    print(
        f"{title:<30} {run.bytes_moved('read') / 1e3:8,.0f} kB of keys and values asked for, {run.bytes_moved('read') / needed:.0f} x what is there"
    )

# %% [markdown]
# The heads of a group become rows of one tile (`fold_heads` of stage 03, inside a kernel), padded to the rows that a matrix unit
# wants. That some are empty does not matter: the kernel waits for bytes, not for arithmetic.
#
# ## Rung 4: more programs than one
#
# A GPU has over a hundred multiprocessors, each with room for several programs; the engine wants four on each. One request of SmolLM2
# has three programs, one for each KV head. So a context is cut into parts, each part is a program, and a second small kernel merges
# the results (**split-KV**; Flash-Decoding, Dao et al. 2023):

# %%
print("requests    programs   parts    programs with split-KV    (132 multiprocessors, 4 programs each: 528)")
for requests in (1, 4, 16, 64):
    programs = 3 * requests
    parts = gpu_runner.split_count(programs, 4 * 132)
    print(f"{requests:>8}{programs:>12}{parts:>8}{programs * parts:>19}")
each, lse = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([3.0, 1.0])
print(
    "\npart outputs [1, 0] and [0, 1], with 2^3 and 2^1 behind them:",
    [round(x, 3) for x in run_merge_parts(kernels.merge_parts, each, lse).tolist()],
)
right = attention.paged_query(q9.view(9, 64), k3, v3, table[0].tolist(), 500, 16, 64**-0.5)
for splits in (1, 4):
    tiles = kernels.Tiles(zero, one, length, zero, table, zero, zero, 16, splits)
    kernels.paged_attention(q9.view(1, -1), kernels.LayerCache(k3, v3), tiles, o9, 16, 9, 64**-0.5, None)
    off = float((o9.view(9, 64) - right).abs().max())
    print(f"the 500 tokens from above in {splits} part{'s' * (splits > 1)}: largest difference {off:.0e}")
print(f"{gpu.name}, context near 256, a token without and with split-KV:")
for name in SHAPES:
    print(f"   {name:<14}{1e3 * gpu.get('tpot', name, 'no split-KV'):7.3f} ms{1e3 * gpu.get('tpot', name):7.3f} ms")

# %% [markdown]
# The merge is not a plain average. Each part also reports `lse`, log2 of its sum of exp2(scores), and counts for as much; an *empty*
# part reports -inf. (A part is at least one tile of 64 keys: at 256 tokens only four have work.)
#
# ## The price of graphs: padding
#
# A graph has a fixed number of rows. Three requests run in a graph of four, and **the fourth row is computed as well**, with whatever
# its buffers hold. It writes a key *somewhere*. `spare_slot` is a place that no request owns. Let us forget it, and replay all rows as
# a graph does:

# %%
show_source(gpu_inputs.pad_rows)


def careless_padding(fields, count, padded, spare_slot):
    for array in fields.values():
        array[count:padded] = 0  # zeros are harmless, aren't they?


prompts, lengths = [[5, 17, 3], [11, 2, 44], [9, 31, 7]], (8, 8, 3)
params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]
right = [o.outputs[0].token_ids for o in tiny_llm("sdpa").generate(prompts, params)]
with swap("14.5", careless_padding):
    wrong = [o.outputs[0].token_ids for o in graphed_llm().generate(prompts, params)]
for i, (a, b) in enumerate(zip(right, wrong, strict=True)):
    print(f"request {i}: right {a!s:<34} with zeros {b!s:<34}{'' if a == b else '<- another text'}")

# %% [markdown]
# Zeros are not harmless. Slot 0 belongs to somebody, and the padding row wrote its key there in every step. No error, no NaN: **one
# user's text changes because the batch does not fill its graph.** (Which text may differ from run to run: part of the padding row
# comes from memory that nobody has set.)
#
# ## Rung 5: do not wait for the answer
#
# With graphs the GPU is fast, and the CPU's own work shows: scheduling, text, stop strings. So the engine starts step n + 1 before it
# looks at the tokens of step n. They stay on the GPU, where the next step finds them (`sources`). If a request turns out to be
# finished, one token was computed in vain.

# %%
print(f"{gpu.name}, one user, ms a token:")
print(f"{'':<14}{'CPU work':>10}{'GPU work':>10}{'one after the other':>21}{'overlapped':>12}")
for name in SHAPES:
    cpu, work = gpu.get("cpu_ms_per_step", name, "no overlap"), gpu.get("gpu_ms_per_step", name, "no overlap")
    print(
        f"{name:<14}{cpu:>10.2f}{work:>10.2f}{1e3 * gpu.get('tpot', name, 'no overlap'):>21.2f}{1e3 * gpu.get('tpot', name):>12.2f}"
    )

# %% [markdown]
# Overlapped, a token takes hardly longer than the GPU's own work.
#
# ## Rungs 6 and 7: the last microsecond, and fewer bytes
#
# **Programmatic dependent launch** (PDL, NVIDIA GPUs from Hopper on) lets a kernel start while the one before it ends. It fetches
# its weights, and waits (`wait_for_last`) only before it touches what the other one makes.
#
# **An 8-bit KV cache** (stage 13) changes no launch. It halves the bytes of keys and values, and in a large batch these are most of all bytes:

# %%
qwen = ModelConfig("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 40960, qk_norm=True)  # Qwen3-0.6B
for requests in (1, 128):
    total, cache_bytes = (roofline.step_bytes(qwen, [620] * requests, w, 2) / 1e9 for w in (2, 0))
    print(
        f"Qwen3-0.6B, {requests:>3} requests of 620 tokens: {total:6.2f} GB a step, of these keys and values {cache_bytes / total:.0%}"
    )
full, half = (roofline.step_bytes(qwen, [620] * 128, 2, size) for size in (2, 1))
print(f"with one byte a number the 128 requests read {full / half:.2f} times less")
print(f"\n{gpu.name}: a step of 128 requests of about 620 tokens; tokens/s of 256 requests, prompts included")
print(f"{'cache':<6}{'tokens/s':>10}{'ms of GPU a step':>18}{'attention, us a layer':>23}")
for kind in ("bf16", "int8", "fp8"):
    mode = f"{kind} KV"
    rate, ms = (gpu.get(f, "Qwen3-0.6B", mode, "b") for f in ("tokens_per_second", "gpu_ms_per_step"))
    one_layer = {n: us for n, _, us in gpu.kernels("Qwen3-0.6B", mode, "b")}.get("_attention", float("nan"))
    print(f"{kind:<6}{rate:>10,.0f}{ms:>18.2f}{one_layer:>23.1f}")

# %% [markdown]
# Fewer bytes, more tokens, but by less than the bytes say: unpacking costs arithmetic, and all other kernels take as long as before.
#
# ## The ladder
#
# Everything on, and one rung taken away at a time. The further a dot is to the right of the lowest one, the more that rung is worth.

# %%
MODES = {
    "": "all rungs",
    "no PDL": "without 6, dependent launch",
    "no overlap": "without 5, overlap",
    "no split-KV": "without 4, split-KV",
    "no matvec kernel (cuBLAS)": "without 2, fused products",
    "no graphs": "without 1, CUDA graph",
}
fig, axes = plt.subplots(1, 2, figsize=(8.4, 2.9), layout="constrained", sharey=True)
for ax, name in zip(axes, SHAPES, strict=True):
    least = 1e3 * floor[name]
    for y, mode in enumerate(MODES):
        ms = 1e3 * gpu.get("tpot", name, mode)
        ax.plot([least, ms], [y, y], color=GREY, lw=3, zorder=1)
        ax.scatter(ms, y, s=70, color=SKY if mode else BLUE, edgecolor=BLUE, zorder=2)
        ax.annotate(f"{ms:.2f}", (ms, y), (8, 0), textcoords="offset points", va="center", fontsize=9)
    ax.axvline(least, color=ORANGE, lw=1.5, ls="--")
    ax.annotate(
        "bytes / bandwidth", (least, len(MODES) - 0.3), (4, 0), textcoords="offset points", color=ORANGE, fontsize=9
    )
    ax.set_yticks(range(len(MODES)), MODES.values())
    ax.set_ylim(-0.5, len(MODES) + 0.2)
    if gpu.found:
        most = max(1e3 * gpu.get("tpot", name, mode) for mode in MODES)
        ax.set_xscale("log")
        ax.set_xlim(0.75 * least, 3 * most)
        ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if 0.75 * least <= t <= 3 * most]
        ax.set_xticks(ticks, map(str, ticks))
        ax.minorticks_off()
    ax.set_xlabel("ms per token, log scale")
    ax.set_title(f"{name}, one user", fontsize=10, loc="left")
    ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# So what is the limit now? Divide the bytes by the time:

# %%
print(f"{gpu.name}, one user")
print(f"{'':<14}{'tokens/s':>9}{'GB/s':>8}{'of the bandwidth':>18}{'kernels':>9}{'us a kernel':>13}")
for name in (SMALL, "Qwen3-0.6B", "Llama-3.2-1B", LARGE):
    launched, work = gpu.get("kernels_per_step", name), gpu.get("gpu_ms_per_step", name)
    print(
        f"{name:<14}{1 / gpu.get('tpot', name):>9,.0f}{gpu.get('gb_per_second', name):>8,.0f}"
        f"{gpu.get('share_of_read', name):>18.0%}{launched:>9.0f}{1e3 * work / launched:>13.1f}"
    )

# %% [markdown]
# From top to bottom the models get larger, and the share of the bandwidth rises. The largest is **memory-bound**: only fewer bytes
# would help it (smaller weights, stages 11 and 12). The smallest is limited by the *number* of its kernels. Only fewer kernels would
# help, down to one for the whole model (a "megakernel").
#
# ### Your own GPU
#
# With an NVIDIA GPU and the repository at hand, this cell measures yours. It takes a minute or two.

# %%
command = [sys.executable, "benchmarks/gpu.py", "--only", f"^a/{SMALL}/minillm"]
root = next((f for f in Path.cwd().resolve().parents if (f / "benchmarks" / "gpu.py").is_file()), None)
if torch.cuda.is_available() and root is not None:
    plain_env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}  # real kernels there
    subprocess.run(command, cwd=root, env=plain_env, check=False)
else:
    print("no GPU here (or not the repository); with one, this cell runs: python " + " ".join(command[1:]))

# %% [markdown]
# ## What beginners get wrong
# - **Timing without waiting.** A launch returns at once. Without a synchronisation you measure how fast Python asks.
# - **Masking only one of two.** The load but not the score: a key that is not there counts with score 0. The score but not the load:
#   0 times NaN is NaN.
# - **A number from the CPU inside a graph.** It is frozen at capture. What changes, such as a length, the *kernel* must read from memory.
# - **int32 addresses.** page × page size × heads × dim passes 2³¹ in a large cache (vLLM, pull request 47671).
#
# ## Other names for the same thing
# | here | vLLM | SGLang / FlashInfer | llama.cpp |
# |---|---|---|---|
# | `_attention` | `kernel_unified_attention_2d` (Triton), FlashAttention | `BatchDecodeWithPagedKVCacheWrapper` | `fattn-vec`, `fattn-mma` |
# | `spare_slot` | `PAD_SLOT_ID` (-1, skipped by the kernel) | slot 0 of the pool, never handed out | – |
# | run ahead | async scheduling | overlap scheduler | – |
# | `merge_parts` | `merge_attn_states` | `merge_state` | `flash_attn_combine_results` |
#
# ## Three quick questions

# %%
quiz(
    "A 0.1B model at batch 1 runs inside a CUDA graph, far from the bandwidth. You make its weights 4-bit. What happens to a token's time?",
    ["It falls to about a quarter.", "It hardly changes.", "It doubles."],
    1,
    [
        "That would be so if bytes were what it waits for.",
        "Its kernels are as many as before, and each has a start and an end that do not depend on the bytes.",
        "Unpacking costs arithmetic, but there is plenty of that left.",
    ],
)

# %%
quiz(
    "Part A of a context has lse 10, part B has lse 7 (base 2). How much of the result comes from B?",
    ["1/2", "7/17", "1/9", "1/8"],
    2,
    [
        "A plain average would ignore that A holds far more weight.",
        "lse is a logarithm. Its size is not a weight.",
        "Weights 2^10 and 2^7 are 8 to 1, so B has one of nine parts.",
        "8 to 1 is the ratio of the two. B's share of the whole is one of nine.",
    ],
)

# %%
quiz(
    "Five requests run in a graph of 8 rows. Which padding is right for a row's slot and context length?",
    ["slot 0, length 1", "the spare slot, length 0", "slot -1, length 0", "the last request's slot and length"],
    1,
    [
        "Slot 0 is some request's key, and a context of 1 reads through some table.",
        "It writes where nobody reads, and reads nothing.",
        "Unless the kernel skips negative slots, -1 is the last slot of the cache or memory in front of it.",
        "It would write that request's key twice, and read its whole context for nothing.",
    ],
)

# %% [markdown]
# ## Now you can
# say what a model waits for, read a Triton kernel, run it without a GPU, and name the trap on each rung of the ladder.
#
# **Next:** [exercises/14_gpu_kernels.ipynb](../exercises/14_gpu_kernels.ipynb). You write five pieces of the engine, and then a paged
# attention kernel of your own.
#
# One GPU is now busy. What if the model does not fit on it, or one is not enough? That is stage 15.
