# %% [markdown]
# # 01 Prefill and decode
#
# **Why can a model read 200 prompt tokens in the time in which it writes far fewer?** The weights are the same, the machine
# is the same, and a token is a token.
#
# After this lesson you can
#
# * compute *arithmetic intensity*, the number that decides what a machine waits for,
# * place reading and writing on the *roofline* of your own machine,
# * predict how fast a model can write, from bytes alone, for models that you have never run.
#
# *30 minutes. Needs stage 00 and its model. No GPU.*

# %% [markdown]
# ## Guess first
#
# Reading the prompt is called **prefill**, writing the answer is called **decode**. Put a number in place of each `None`.
#
# * `01.read`: while the model reads a prompt of 200 tokens, how many new tokens could it write?
# * `01.eight`: a matrix times *eight* vectors takes how many times as long as the matrix times one?

# %%
import statistics
import time
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from minillm import LLM, SamplingParams, roofline
from minillm.config import ModelConfig
from minillm.course import compare, predict, quiz, show_source
from minillm.course.widgets import slider_plot
from minillm.model import Linear
from minillm.request import Request

predict("01.read", None, "tokens")
predict("01.eight", None, "times")

# %% [markdown]
# ## Measure it
#
# The engine works in steps. The first step reads the prompt; each later one writes a token. We take the time of each.

# %%
llm = LLM("smollm2-135m", enable_prefix_caching=False)  # no reuse: every prompt is really read
ids = llm.tokenizer.encode("The river was high that spring, and nobody in the village slept well. " * 50)


def step_times(requests, prompt_tokens, new_tokens):
    """Seconds of each step: the first reads all prompts, the others write a token for each request."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    started = [llm.add_request(ids[i : i + prompt_tokens], params) for i in range(requests)]
    seconds = []
    while llm.scheduler.waiting or llm.scheduler.running:
        start = time.perf_counter()
        llm.step()
        seconds.append(time.perf_counter() - start)
    for request_id in started:
        llm.abort(request_id)  # forget it
    return seconds


step_times(1, 200, 3)  # warm-up
runs = [step_times(1, 200, 8) for _ in range(3)]
read = statistics.median(run[0] for run in runs)
write = statistics.median(seconds for run in runs for seconds in run[1:])
print(f"read 200 tokens  {read * 1e3:7.0f} ms   {200 / read:7.1f} tokens/s")
print(f"write 1 token    {write * 1e3:7.0f} ms   {1 / write:7.1f} tokens/s")
compare("01.read", read / write, "tokens written while 200 are read")

# %% [markdown]
# Reading is far faster per token. Yet every token, read or written, meets the same weights: the arithmetic per token is
# nearly the same. So arithmetic is not what writing waits for. What else is there?

# %% [markdown]
# ## The smallest example
#
# A matrix of 2 x 3 weights times one vector. Each weight is multiplied once and added once: 2 FLOPs (floating-point
# operations) a weight. And each weight must come from memory: 4 bytes, as our weights are 32-bit floats (*fp32*). Then
# the same matrix times four vectors.

# %%
W = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
vectors = torch.tensor([[1.0, 0.0, 2.0, 1.0], [0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 2.0]])
print("one vector:  ", (W @ vectors[:, :1]).flatten().tolist())
print("four vectors:", (W @ vectors).tolist())
print(f"\n{'vectors':>7} {'multiply + add':>15} {'bytes of weights':>17} {'FLOPs per byte':>15}")
for n in (1, 4, 16):
    flops, num_bytes = 2 * W.numel() * n, W.numel() * 4
    print(f"{n:>7} {flops:>15} {num_bytes:>17} {flops / num_bytes:>15}")

# %%
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"  # colour-blind safe (Okabe and Ito)
MIDDLE = {"ha": "center", "va": "center"}


def draw_product(ax, count):
    def cells(x, y, rows, columns, color, values):
        for r in range(rows):
            for c in range(columns):
                corner = (x + c, y - r)
                ax.add_patch(plt.Rectangle(corner, 1, 1, facecolor=color, edgecolor="white", linewidth=2))
                ax.annotate(f"{values[r][c]:.0f}", (x + c + 0.5, y - r + 0.5), color="white", **MIDDLE)

    cells(0, 1.5, 2, 3, BLUE, W.tolist())
    ax.text(3.5, 1.5, "×", fontsize=16, **MIDDLE)
    cells(4, 2, 3, count, ORANGE, vectors[:, :count].tolist())
    ax.text(4.6 + count, 1.5, "=", fontsize=16, **MIDDLE)
    cells(5.2 + count, 1.5, 2, count, GREEN, (W @ vectors[:, :count]).tolist())
    flops = 2 * W.numel() * count
    ax.set_title(f"24 bytes of weights, {flops} FLOPs: {flops / 24:g} FLOP/byte", fontsize=11, loc="left")
    ax.set(xlim=(-0.1, 13.4), ylim=(-0.1, 3.1), aspect="equal")
    ax.axis("off")


fig, axes = plt.subplots(1, 2, figsize=(10, 2.2), layout="constrained")
draw_product(axes[0], 1)
draw_product(axes[1], 4)
plt.show()

# %% [markdown]
# Four times the work, the same 24 bytes of weights. FLOPs per byte is called **arithmetic intensity**. (The vectors are
# bytes too. Here they count; beside a real matrix they are nothing, as the next cell prints.)
#
# ## Does a real machine notice?
#
# We take the model's largest matrix, its *output head* (the last one, which gives every vocabulary entry a score), and
# multiply it with more and more vectors at once.

# %%
output_head = llm.model.embed.weight  # [vocabulary, hidden]; in this model embedding and output head are one matrix
print(f"weights {output_head.nbytes / 1e6:.0f} MB, one vector {output_head.shape[1] * 4 / 1e6:.4f} MB")


def median_seconds(work, repeats=7):
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


counts = [1, 2, 4, 8, 16, 32, 64, 128]
product_times = []
for n in counts:
    x = torch.randn(n, output_head.shape[1])
    product_times.append(median_seconds(partial(F.linear, x, output_head)))
for n, seconds in zip(counts, product_times, strict=True):
    print(f"{n:>4} vectors {seconds * 1e3:8.1f} ms {seconds / n * 1e3:8.2f} ms each")
compare("01.eight", product_times[counts.index(8)] / product_times[0], "times as long")

# %%
fig, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
each = [seconds / n * 1e3 for n, seconds in zip(counts, product_times, strict=True)]
ax.axhline(each[0], linestyle="--", color=GREY)
ax.plot(counts, each, "o-", color=BLUE)
ax.text(counts[-1], each[0] * 1.08, "if each vector cost as much as the first", color="#555555", ha="right")
ax.set(xscale="log", yscale="log", xlabel="vectors multiplied at once", ylabel="milliseconds for each vector")
ax.set_xticks(counts, labels=counts)
ticks = [t * 10**e for e in range(-3, 4) for t in (1, 2, 5) if min(each) / 2 < t * 10**e < max(each) * 2]
ax.set_yticks(ticks, labels=[f"{t:g}" for t in ticks])
ax.minorticks_off()
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# This is the surprise: 128 times the arithmetic, far less than 128 times the time. The cost of each vector (right column)
# falls as more share the weights. A guess at the reason: with one vector the machine waits for weights, and more vectors
# give its arithmetic units something to do meanwhile. We will put numbers to that.
#
# (The second vector may cost a jump; probably torch changes routine. The numbers vary? Other programs are busy.)
#
# **Prefill** knows all prompt tokens, so it brings 200 vectors at once. **Decode** cannot: token 201 must be chosen before
# token 202 can begin. One vector per request, and all the weights for it.

# %% [markdown]
# ## The engine's arithmetic
#
# Three words for now.
#
# * *Attention*: each new token looks back at every earlier one. For that the engine keeps two small lists of numbers per
#   token and layer, its *keys and values*: the *KV cache* (stage 02).
# * *Attention heads*: each layer looks back several times side by side, `num_heads` times. Several heads may share keys
#   and values, so there are only `num_kv_heads` of those (stage 03).
# * *Output head*: the last matrix, from above. It has nothing to do with attention heads.
#
# `minillm/roofline.py` counts FLOPs and bytes for a whole model. What you write in the exercises is left out here.

# %%
show_source(roofline.linear_params)
show_source(roofline.flops_per_token)
show_source(roofline.step_bytes)
show_source(roofline.arithmetic_intensity)

# %% [markdown]
# Now six kinds of steps. One detail: a prompt needs the output head for its *last* token only, so we take the rest out.

# %%
config, element = llm.config, output_head.element_size()  # fp32: 4 bytes


def work(requests, start, tokens):
    """FLOPs and bytes of one step: each request computes `tokens` tokens after `start` cached ones."""
    flops = sum(roofline.flops_per_token(config, start + i + 1) for i in range(tokens))
    flops -= 2 * config.vocab_size * config.hidden_size * (tokens - 1)
    return requests * flops, roofline.step_bytes(config, [start + tokens] * requests, element, element)


PROMPT = 8  # tokens in the cache of each request that writes
STEPS = {f"write, {n} request{'s' * (n > 1)}": (n, PROMPT, 1) for n in (1, 8, 64)}
STEPS |= {f"read {n} tokens": (1, 0, n) for n in (16, 128, 512)}
print(f"{'':<20}{'GFLOP':>9}{'GB':>8}{'FLOP/byte':>12}")
for name, (requests, start, tokens) in STEPS.items():
    flops, num_bytes = work(requests, start, tokens)
    intensity = roofline.arithmetic_intensity(flops, num_bytes)
    print(f"{name:<20}{flops / 1e9:>9.2f}{num_bytes / 1e9:>8.2f}{intensity:>12.1f}")

# %% [markdown]
# The bytes hardly change from row to row. The FLOPs change by two orders of magnitude.
#
# ## What can this machine do?
#
# Two ceilings: how fast it reads, and how fast it multiplies. Their quotient, the **ridge**, says how many FLOPs a machine
# can do in the time in which it reads one byte. Work below the ridge is *memory-bound*, work above it *compute-bound*.

# %%
show_source(roofline.Machine)
tries = [roofline.measure_machine() for _ in range(3)]  # a ceiling is the best that was ever seen
machine = roofline.Machine(tries[0].name, max(m.bandwidth for m in tries), max(m.flops for m in tries))
print(machine.name)
print(f"reads {machine.bandwidth / 1e9:.1f} GB/s, multiplies {machine.flops / 1e9:.0f} GFLOP/s in fp32")

A100 = roofline.Machine("A100 80GB", bandwidth=2.039e12, flops=312e12)
H200 = roofline.Machine("H200", bandwidth=4.8e12, flops=1979e12 / 2)
for one in (machine, A100, H200):
    print(f"ridge {one.ridge:6.1f} FLOP/byte   {one.name}")

# %% [markdown]
# Writing one token with 16-bit weights has about 1 FLOP per byte; here, with 32-bit weights, half of that. Every ridge
# lies above it, a GPU's far above: an A100 needs about as many requests in the step as its ridge says.
#
# (Sources: NVIDIA's data sheets. A100 80GB SXM: 2,039 GB/s, 312 TFLOP/s for dense bf16, a 16-bit format. H200 SXM:
# 4.8 TB/s, and 1,979 TFLOP/s for bf16 "with sparsity", which is 989.5 for ordinary, dense weights.)
#
# ## Predict the writing speed from bytes alone
#
# Below the ridge, time is bytes over bandwidth. No benchmark is needed. One last guess: what share of this ceiling does
# our engine reach when it writes for one request?

# %%
predict("01.share", None, "%")

# %%
step_seconds = {"write, 1 request": statistics.median(step_times(1, PROMPT, 9)[1:])}
measured = 1 / step_seconds["write, 1 request"]
num_bytes = roofline.step_bytes(config, [PROMPT + 1], element, element)
ceiling = machine.bandwidth / num_bytes
print(f"{num_bytes / 1e9:.3f} GB per token, {machine.bandwidth / 1e9:.1f} GB/s: at most {ceiling:.1f} tokens/s")
print(f"measured: {measured:.1f} tokens/s, which is {measured * num_bytes / 1e9:.1f} GB/s")
compare("01.share", 100 * measured / ceiling, "% of the memory's speed")

# %% [markdown]
# ## The roofline
#
# Plot speed over intensity, both logarithmic, and the two ceilings become a roof (Williams, Waterman and Patterson,
# *Roofline*, CACM 2009). No work can lie above it. Where do our six steps lie?

# %%
show_source(roofline.roofline_seconds)
for name, (requests, start, tokens) in STEPS.items():
    if start and requests > 1:  # writes: the median of the steps after the first
        step_seconds[name] = statistics.median(step_times(requests, start, 6 if requests > 8 else 9)[1:])
    elif not start:
        step_seconds[name] = statistics.median(step_times(1, tokens, 1)[0] for _ in range(3))

print(f"{'':<20}{'measured':>10}{'at least':>11}   ceiling {'share':>8}   achieved")
for name, seconds in step_seconds.items():
    flops, num_bytes = work(*STEPS[name])
    least = roofline.roofline_seconds(flops, num_bytes, machine)
    bound = "memory" if flops / num_bytes < machine.ridge else "compute"
    speed = f"{num_bytes / seconds / 1e9:.1f} GB/s" if bound == "memory" else f"{flops / seconds / 1e9:.0f} GFLOP/s"
    print(f"{name:<20}{seconds * 1e3:>7.0f} ms{least * 1e3:>8.0f} ms   {bound:<8}{least / seconds:>8.0%}   {speed}")

# %%
fig, ax = plt.subplots(figsize=(8.5, 4.6), layout="constrained")
grid = sorted([0.1, machine.ridge, 1500.0])
roof = [min(machine.flops, machine.bandwidth * g) / 1e9 for g in grid]
ax.plot(grid, roof, color="black", linewidth=2)
ax.fill_between(grid, roof, 1e6, color="#eeeeee")
ax.axvline(machine.ridge, color=GREY, linestyle=":")
low = min(work(*STEPS[name])[0] / s for name, s in step_seconds.items()) / 1e9
ax.text(machine.ridge * 1.08, low / 2.6, f"ridge: {machine.ridge:.1f} FLOP/byte", color="#555555")
ax.text(40, roof[-1] * 1.15, f"multiplies {roof[-1]:.0f} GFLOP/s")
ax.text(0.42, machine.bandwidth * 0.47e-9, f"reads {machine.bandwidth / 1e9:.1f} GB/s", ha="right")
for name, seconds in step_seconds.items():
    flops, num_bytes = work(*STEPS[name])
    x, y, writes = flops / num_bytes, flops / seconds / 1e9, name.startswith("write")
    color = BLUE if writes else ORANGE
    ax.plot([x, x], [y, min(machine.flops, machine.bandwidth * x) / 1e9], color=GREY, linewidth=1)
    ax.plot(x, y, "o" if writes else "s", color=color, markersize=9)
    text, shift = f"{name.split()[0].strip(',')} {STEPS[name][0 if writes else 2]}", (0, -17) if writes else (9, -12)
    ax.annotate(text, (x, y), shift, textcoords="offset points", color=color, ha="center" if writes else "left")
ax.set(xscale="log", yscale="log", xlim=(0.1, 1500), ylim=(low / 3, roof[-1] * 3))
ax.set(xlabel="arithmetic intensity, FLOP per byte", ylabel="speed, GFLOP/s")
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Blue: a step that writes for so many requests. Orange: a step that reads so many tokens. The grey line under the roof is
# what a step loses. (The ceiling is itself a measurement. If other programs are running, it is too low and your share too
# high.)
#
# Writing for one request sits far left, under the slope: memory sets the limit. A long prompt sits far right, under the
# flat part: arithmetic sets the limit. Prefill and decode are not two programs. They are the same program at two
# intensities, and more requests move decode to the right.
#
# Now the opening question has its number:

# %%
least_read, least_write = (roofline.roofline_seconds(*work(*step), machine) for step in ((1, 0, 200), (1, 200, 1)))
print(f"at least {least_read * 1e3:.0f} ms to read 200 tokens, at least {least_write * 1e3:.0f} ms to write one")
print(f"roofline: 200 tokens are read in the time of {least_read / least_write:.1f} written ones")
print(f"measured: {read / write:.1f}")

# %% [markdown]
# The roofline knows only counts and two ceilings. Where the two numbers differ, reading and writing lose different shares
# of their time. What do they lose it to? We count the operators that torch starts in one step, and then
# run a step's matrix products alone, without the rest of the model.


# %%
class CountOperators(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.calls += 1
        return operator(*args, **(kwargs or {}))


request_id = llm.add_request(ids[:PROMPT], SamplingParams(max_tokens=9, temperature=0.0))
llm.step()
with CountOperators() as counter:
    llm.step()
llm.abort(request_id)
small = torch.ones(1, config.hidden_size)
start_price = median_seconds(lambda: [small * 2.0 for _ in range(1000)]) / 1000
print(f"operators in one step, views and copies included: {counter.calls}")
print(f"an operator that does almost nothing takes {start_price * 1e6:.1f} microseconds here")
print(f"so many of those would take {counter.calls * start_price * 1e3:.1f} ms")
print(f"a whole step for one request took {step_seconds['write, 1 request'] * 1e3:.1f} ms")

# %%
inner = [part for part in llm.model.layers.modules() if isinstance(part, Linear)]  # the layers' matrices
widths = [(part.weight if part.packed is None else part.packed).shape[1] for part in inner]


@torch.inference_mode()
def products_alone(requests, start, tokens):
    """Seconds of a step's matrix products: the layers' for all tokens, the output head's for one of each request."""
    x = {width: torch.randn(requests * tokens, width) for width in widths}

    def products():
        for part, width in zip(inner, widths, strict=True):
            part(x[width])
        llm.model.head(x[config.hidden_size][:requests])

    return median_seconds(products, repeats=3)


shown = ["write, 1 request", "write, 8 requests", "read 128 tokens"]
products = {name: min(products_alone(*STEPS[name]), step_seconds[name]) for name in shown}

# %%
fig, ax = plt.subplots(figsize=(8.5, 2.6), layout="constrained")
for row, name in enumerate(shown):
    total, least = step_seconds[name], min(roofline.roofline_seconds(*work(*STEPS[name]), machine), products[name])
    left = 0.0
    for seconds, color in ((least, GREEN), (products[name] - least, ORANGE), (total - products[name], GREY)):
        ax.barh(row, seconds / total, left=left, color=color, edgecolor="white", height=0.62)
        if seconds / total > 0.09:
            ax.text(left + seconds / total / 2, row, f"{seconds * 1e3:.0f} ms", color="white", **MIDDLE)
        left += seconds / total
    ax.text(1.01, row, f"{total * 1e3:.0f} ms", va="center")
LEGEND = {"roofline's least time": GREEN, "products: time above the least": ORANGE, "everything else": GREY}
for x, (text, color) in zip((0.0, 0.27, 0.71), LEGEND.items(), strict=True):
    ax.text(x, -0.72, "■ " + text, color=color, fontsize=11)
ax.set_yticks(range(len(shown)), labels=shown)
ax.set(xlim=(0, 1.12), ylim=(2.5, -1), xticks=[])
ax.spines[["top", "right", "bottom"]].set_visible(False)
plt.show()

# %% [markdown]
# Part of the grey is starting operators: the cell above the plot puts a figure on it. The rest grows with the tokens:
# norms, rotations, copies, attention. Orange: with a few vectors torch's routine reaches neither ceiling.
#
# ## Try it on models that you cannot run
#
# The same functions, other configurations (from each model's `config.json` on the Hugging Face hub; the sizes that we
# compute confirm them). Weights can be 16, 8 or 4 bits; the KV cache stays at 16. The H200's ceilings are the data
# sheet's: real work stays below.

# %%
#                       vocabulary, hidden, intermediate, layers, heads, KV heads, head_dim
MODELS = {
    "SmolLM2-135M": config,
    "Qwen3-0.6B": ModelConfig("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, tie_word_embeddings=True),
    "Llama-3.1-8B": ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128),
    "Llama-3.1-70B": ModelConfig("llama", 128256, 8192, 28672, 80, 64, 8, 128),
}
print(f"{'':<14} billion parameters   GB read per step, 16 bits")
for name, one in MODELS.items():
    table = 0 if one.tie_word_embeddings else one.vocab_size * one.hidden_size
    weights = roofline.linear_params(one)
    print(
        f"{name:<14} {(weights + table) / 1e9:18.3f} {weights * 2 / 1e9:27.2f}"
        + "   (embedding table not read)" * (table > 0)
    )

# %%
MACHINES = {"mine": machine, "H200": H200}
BATCHES = [2**i for i in range(11)]
COLOR = {"memory": BLUE, "compute": ORANGE}


def draw_rate(ax, model, machine, batch, context, bits):
    one, place, size = MODELS[model], MACHINES[machine], bits / 8
    rates = {b: roofline.decode_tokens_per_second(one, [context] * b, size, 2, place) for b in BATCHES}
    moved = {b: roofline.step_bytes(one, [context] * b, size, 2) for b in BATCHES}
    bound = {b: "memory" if moved[b] / place.bandwidth * rates[b] > 0.999999 * b else "compute" for b in BATCHES}
    ax.plot(BATCHES, [rates[1] * b for b in BATCHES], "--", color=GREY, linewidth=1)
    ax.plot(BATCHES, list(rates.values()), color="#555555", linewidth=1)
    for b in BATCHES:
        ax.plot(b, rates[b], "o", color=COLOR[bound[b]], markersize=12 if b == batch else 5)
    weights = roofline.step_bytes(one, [], size, 2) / moved[batch]
    lines = f"{rates[batch]:,.1f} tokens/s in all, {rates[batch] / batch:,.1f} for each request\n"
    lines += f"reads {moved[batch] / 1e9:,.2f} GB: {weights:.0%} weights, {1 - weights:.0%} KV cache"
    corner = {"transform": ax.transAxes, "va": "top"}
    ax.text(0.02, 0.98, f"{bound[batch]}-bound", weight="bold", color=COLOR[bound[batch]], **corner)
    ax.text(0.02, 0.87, lines, **corner)
    ax.text(90, rates[1] * 150, "if every request came for free", color="#555555", ha="right", fontsize=9)
    ax.set(xscale="log", yscale="log", ylim=(rates[1] / 2, rates[1] * 8000))
    ax.set(xlabel="requests in the step", ylabel="tokens/s at most")
    ax.set_xticks(BATCHES, labels=BATCHES)
    ax.minorticks_off()
    ax.spines[["top", "right"]].set_visible(False)


slider_plot(
    draw_rate,
    model=list(MODELS),
    machine=list(MACHINES),
    batch=BATCHES,
    context=[128, 1024, 4096, 16384, 65536],
    bits=[16, 8, 4],
    start={"model": "Llama-3.1-8B", "machine": "H200", "batch": 64, "context": 1024},
    stills=[
        {"model": "SmolLM2-135M", "machine": "mine", "batch": 8, "context": 128, "bits": 16},
        {"model": "Llama-3.1-8B", "machine": "H200", "batch": 64, "context": 128, "bits": 16},
        {"model": "Llama-3.1-8B", "machine": "H200", "batch": 16, "context": 16384, "bits": 4},
    ],
    size=(8.0, 3.0),
)

# %% [markdown]
# Blue dots are memory-bound, orange ones compute-bound. Look for three things:
#
# 1. With short contexts the dots follow the dashed line until the ridge. Batching is nearly free.
# 2. With long contexts they leave it early and *stay blue*. The weights are shared; each KV cache is private.
# 3. Fewer weight bits lift the left end a lot, and the orange part not at all.
#
# (The first picture has 16-bit weights and a 16-bit cache. Our engine ran with 32 bits, so what it measured is at most
# about half of that. And the sliders do not ask whether it fits: an H200 has 141 GB. Stage 02 does.)

# %% [markdown]
# ## The engine knows no phases
#
# "Prefill" and "decode" are our words. The engine has one number for each request (`draft` holds tokens that stage 09
# guesses ahead; here it is empty):

# %%
show_source(Request.need.fget)

# %% [markdown]
# A step hands out a budget of tokens to whoever needs some. Watch request A write while B arrives with a prompt of 40
# tokens. The budget is 16 tokens a step.

# %%
engine = LLM.from_parts(
    config,
    llm.model,
    llm.tokenizer,
    max_num_batched_tokens=16,  # the budget
    num_kv_blocks=16,  # how big the KV cache is: enough for this (stage 04)
)
params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
live = {}
print("step   A needs  gets   B needs  gets")
for step in range(1, 8):
    if step in (1, 3):
        name, prompt = ("A", ids[:6]) if step == 1 else ("B", ids[100:140])
        live[name] = engine.requests[engine.add_request(prompt, params, request_id=name)][0]
    need = {name: request.need for name, request in live.items()}
    before = {name: request.num_computed for name, request in live.items()}
    engine.step()
    got = {name: request.num_computed - before[name] for name, request in live.items()}
    print(f"{step:>4}" + "".join(f"{need.get(name, ''):>10}{got.get(name, ''):>6}" for name in "AB"))
for name in live:
    engine.abort(name)

# %% [markdown]
# B's prompt is read in pieces, and A never misses a step. The model's code cannot tell which token is which. This is
# *chunked prefill* (stage 07): prompt tokens keep the arithmetic units busy that decode leaves idle.
#
# ## What beginners get wrong
#
# * **"Decode is memory-bound."** With few requests. Enough of them make the *matrices* compute-bound; attention over
#   private KV caches stays memory-bound, whatever the batch.
# * **"More TFLOP/s, faster chat."** One user's speed follows bandwidth. And check the sheet's footnote: figures "with
#   sparsity" are twice what dense weights can get.
# * **Counting a multiply-add as one FLOP.** Sheets count two.
# * **"Heads that share keys and values save arithmetic."** They save KV bytes. Every head still computes its own scores.
#
# ## Elsewhere this is called ...
#
# | here | vLLM | SGLang | llama.cpp |
# |---|---|---|---|
# | read the prompt | prefill | extend (`ForwardMode.EXTEND`) | prompt processing, `pp` in llama-bench |
# | write | decode | decode (`ForwardMode.DECODE`) | text generation, `tg` |
# | both in one step | always possible (V1) | `ForwardMode.MIXED` | one `llama_batch` |
# | `Request.need` | `num_tokens_with_spec - num_computed_tokens` | `extend_input_len` | tokens added to the batch |

# %% [markdown]
# ## Three quick questions

# %%
quiz(
    "A prompt of 500 tokens is compute-bound on your machine. A prompt of 1,000 tokens takes ...",
    ["about as long: the weights are read once either way", "about twice as long", "about four times as long"],
    1,
    [
        "True below the ridge. Above it, the weights have long arrived; the multiplications set the pace.",
        "Twice the FLOPs at the same FLOP/s, and a little more for attention.",
        "Attention's part does grow with the square. At these lengths the matrices do most of the arithmetic.",
    ],
)

# %%
quiz(
    "One user, short context, memory-bound. 4-bit weights instead of 16-bit ones. Writing can become ...",
    ["up to 4 times as fast", "no faster: the FLOPs are the same", "up to 16 times as fast"],
    0,
    [
        "A quarter of the bytes, a quarter of the time, if unpacking the weights keeps up.",
        "The FLOPs are the same, but this step does not wait for them.",
        "The bits fall from 16 to 4, so the bytes fall by a factor of 4.",
    ],
)

# %%
quiz(
    "Llama-3.1-8B in 4 bits, H200, 16 requests with 16,384 tokens each. Now 32 such requests. The total tokens/s ...",
    [
        "nearly doubles: the weights are shared",
        "doubles until compute is the limit",
        "rises by a few percent: the step mostly reads KV caches",
    ],
    2,
    [
        "The third picture above: weights are the small part of the bytes here.",
        "The dots stay blue at this context: compute is never reached.",
        "Twice the requests read twice the KV, so the step takes nearly twice as long. Only the weights are shared.",
    ],
)

# %% [markdown]
# ## Now you can
#
# say what a step waits for, draw the roof of any machine from two numbers, and refuse a speed claim that no memory could
# deliver. Next: [the exercises](../exercises/01_prefill_and_decode.ipynb). You write the functions behind this page, and
# torch's own FLOP counter will check you to the last FLOP. Then stage 02 asks where the KV cache's bytes come from.
