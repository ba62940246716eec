# %% [markdown]
# # 06 Batching
#
# **Four people ask the same model at the same moment. Three want a word, one wants a page. Who waits for the page?** It depends
# on one `if` in the scheduler. This lesson finds it, and measures what it is worth.
#
# **Afterwards you can** tell static, dynamic and continuous batching apart in code and in a picture, say in advance what each of
# them wastes, and take apart a famous "23x".
#
# *35 minutes. You need stage 01 (a decode step reads all weights) and stage 02 (the KV cache). No GPU.*

# %%
import heapq
import itertools
import math
import random
import statistics

import matplotlib.pyplot as plt
import torch

from minillm import LLM, SamplingParams, bench, metrics, roofline, scheduler
from minillm.config import ModelConfig
from minillm.course import compare, predict, quiz, show_source
from minillm.course.widgets import slider_plot
from minillm.model import Transformer
from minillm.scheduler import Scheduler
from minillm.weights import random_state_dict

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#BBBBBB"

# Prefix caching (stage 05) is off: a run must not be helped by the run before it.
llm = LLM("smollm2-135m", num_kv_blocks=256, enable_prefix_caching=False)
PARTS = llm.config, llm.model, llm.tokenizer


def engine(**options):
    """A new engine around the same model."""
    return LLM.from_parts(*PARTS, num_kv_blocks=256, enable_prefix_caching=False, **options)


def greedy(count):
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


# %% [markdown]
# ### Predict first
# Three guesses. Put a number in place of `None`. The measurements come later.

# %%
question = (
    "One step makes one token for each of 8 requests. How many times as long does it take as a step for 1 request?"
)
predict("06.step", None, "times", question)
question = "8 answers of random length, many short and a few long, run as one batch until the last is done. How much of the work is useful?"
predict("06.useful", None, "%", question)
question = (
    "12 requests, most short, three long, 4 at a time. "
    "Continuous batching makes how many times the tokens/s of static batching?"
)
predict("06.gain", None, "times", question)

# %% [markdown]
# ## Why batch at all?
#
# A decode step reads every weight of the model, to make one token (stage 01). If a second request sits in the same step, the
# weights are read *once* for both, so the second token should cost almost nothing. Does it? We put more and more requests into
# one step.

# %%
sizes = [1, 2, 4, 8, 16]
prompt = llm.tokenizer.encode("The keeper of the lighthouse")
llm.generate([prompt] * 2, greedy(3))  # warm up
step_seconds = {}
for size in sizes:
    llm.timeline = []  # the engine notes every step here: its time, and who was in it
    llm.generate([prompt] * size, greedy(9))
    step_seconds[size] = statistics.median(step.end - step.start for step in llm.timeline[1:])  # [0] reads the prompts
llm.timeline = None

machine = roofline.measure_machine(dtype=torch.float32)
print(f"{machine.name}: at most {machine.bandwidth / 1e9:.1f} GB/s and {machine.flops / 1e9:.0f} GFLOP/s, measured now")
print("in the step   ms/step   ms/token   tokens/s   GB/s (of peak)   GFLOP/s (of peak)")
length = len(prompt) + 5
for size, seconds in step_seconds.items():
    moved = roofline.step_bytes(llm.config, [length] * size, 4, 4) / seconds
    flops = size * roofline.flops_per_token(llm.config, length) / seconds
    print(f"{size:>11}{seconds * 1e3:>10.1f}{seconds * 1e3 / size:>11.1f}{size / seconds:>11.1f}", end="")
    print(f"{moved / 1e9:>9.1f} ({moved / machine.bandwidth:.0%}){flops / 1e9:>13.1f} ({flops / machine.flops:.0%})")

# %%
milliseconds = {size: 1e3 * seconds for size, seconds in step_seconds.items()}
fig, ax = plt.subplots(figsize=(6.6, 3.4), layout="constrained")
ax.plot([1, 8], [milliseconds[1], 8 * milliseconds[1]], ":", color=GREY, lw=2)
ax.plot(sizes, milliseconds.values(), "o-", color=BLUE, lw=2)
floor = 1e3 * roofline.step_bytes(llm.config, [length], 4, 4) / machine.bandwidth
ax.plot([0, 16], [floor, floor], "--", color=ORANGE, lw=1)
ax.text(8.3, 8 * milliseconds[1], "one after another", color="#777777", va="center")
ax.text(16.4, milliseconds[16], "in one step (measured)", color=BLUE, va="center")
ax.text(16.4, floor, "reading the weights once", color=ORANGE, va="center")
ax.set(xlabel="requests in the step", ylabel="time (ms)", xlim=(0, 25), ylim=(0, 8.5 * milliseconds[1]), xticks=sizes)
ax.spines[["top", "right"]].set_visible(False)
plt.show()
compare("06.step", round(step_seconds[8] / step_seconds[1], 1), "times")

# %% [markdown]
# On most machines the blue line climbs far more slowly than the dotted one: the weights are read once, however many share the
# step. (Orange: the least time that reading can take.) It does climb, as each token brings its own arithmetic and its own KV
# cache, and a CPU runs out of arithmetic early. A data-centre GPU has far more of it, so there the line stays flat much longer.
#
# So we want many requests in each step. The trouble is: **they do not end together.**
#
# ## By hand: four requests
#
# A *seat* is a request's place in the batch. Four seats, four answers of 2, 3, 4 and 15 tokens. They start together, and nobody
# else may sit down until all are done.

# %%
answers = [2, 3, 4, 15]
for number, tokens in enumerate(answers):
    print(f"seat {number}  {'=' * tokens}{'.' * (max(answers) - tokens)}   {tokens:>2} tokens")
work = len(answers) * max(answers)
print(
    f"computed: {len(answers)} seats x {max(answers)} steps = {work}.  useful: {sum(answers)} = {sum(answers) / work:.0%}"
)
print(
    f"mean length {statistics.mean(answers):g}, longest {max(answers)}: every seat pays {max(answers) / statistics.mean(answers):.1f} times the mean"
)

# %% [markdown]
# **The slowest one sets the pace.** A batch costs its *longest* answer, and delivers the *mean* one. So what counts is how much
# bigger the longest is than the mean. Now leave the lengths to chance: an answer has 2 tokens, or, one time in four, 10. The mean
# is 4. What is the longest of four, on average?

# %%
outcomes = [max(four) for four in itertools.product([2, 2, 2, 10], repeat=4)]  # all 4 x 4 x 4 x 4 cases
all_short = outcomes.count(2)
print(f"{len(outcomes)} cases. No long answer among the four: {all_short} (3 x 3 x 3 x 3), so {all_short / 256:.0%}")
expected = sum(outcomes) / len(outcomes)
print(f"longest of four, on average: {expected:.2f}.  mean: 4.  useful: 4 / {expected:.2f} = {4 / expected:.0%}")

# %% [markdown]
# One answer in four is long, but two batches in three contain one. Now guess what a *bigger* batch does: more answers, more
# chances that one is long. A fair first model of chat are *exponential* lengths, many short and a few long. For them there is a
# formula: the longest of *n* is 1 + 1/2 + 1/3 + ... + 1/*n* times the mean.


# %%
def longest_over_mean(seats):
    """Expected maximum of so many exponential lengths, divided by their mean."""
    return sum(1 / k for k in range(1, seats + 1))


draw = random.Random(6)
print("seats   longest / mean   drawn 2,000 times   useful share")
for seats in (1, 2, 4, 8, 16, 32, 64):
    drawn = statistics.mean(max(draw.expovariate(1) for _ in range(seats)) for _ in range(2000))
    print(f"{seats:>5}{longest_over_mean(seats):>15.2f}{drawn:>19.2f}{1 / longest_over_mean(seats):>17.0%}")
compare("06.useful", round(100 / longest_over_mean(8)), "%")

# %% [markdown]
# **The bigger the batch, the more of it is dead.** A nasty bargain: batching shares the reading of the weights, and a batch that
# must end together eats its own gain.
#
# ## The `if` that decides
#
# `plan` hands out a step: to running requests first, then to new ones, *if* they may join. Look for that one line. (Preempting
# is stage 07.)

# %%
show_source(Scheduler.plan)
show_source(Scheduler.may_admit)
show_source(Scheduler.hold)

# %% [markdown]
# Three answers to "may waiting requests join now?":
#
# - **static**: when nothing runs, and a full batch waits. `batch_delay` is its patience: after so many seconds it starts half full;
# - **dynamic**: when nothing runs. Whatever waits by then is the batch;
# - **continuous**: always. A seat that becomes free is filled in the very next step. The paper on Orca (Yu et al., OSDI 2022) calls it
#   *iteration-level scheduling*.
#
# The first two are rectangles, seats times steps. A finished request's seat is computed on, and short prompts are filled up to the
# longest one. `padding` counts these dead tokens. The engine really computes them.

# %%
show_source(scheduler.padding)
lens = [len(llm.tokenizer.encode(text)) for text in ("Hi!", "What is the capital of France?", "Name three birds.")]
print(f"a step with prompts of {lens} tokens, 4 seats, one of them dead: {scheduler.padding(lens, 4)} dead tokens")
print(f"a step in which 2 of 4 still write:                             {scheduler.padding([1, 1], 4)} dead tokens")

# %% [markdown]
# ## The same twelve requests, three times
#
# Twelve requests arrive one after another, most of them short, three long. There are four seats (`max_num_seqs`). The gaps are
# counted in steps of *your* machine, so the picture looks alike everywhere. `bench.run` sends them, and waits for the last answer.

# %%
texts = ["Hi!", "Name a colour.", "Write a story about a lighthouse.", "Thanks.", "What is two plus two?", "Bye!",
         "Explain how rain forms.", "Name three birds.", "Who are you?", "List the months.", "Yes or no?", "Say it again, please."]  # fmt: skip
answer_lens = [6, 4, 28, 5, 7, 4, 20, 6, 5, 10, 4, 8]
SEATS, tick = 4, step_seconds[4]


def trace(lengths, gap):
    """One request for each length; one arrives every `gap` seconds."""
    prompts = [llm.tokenizer.encode(text) for text in itertools.islice(itertools.cycle(texts), len(lengths))]
    return [bench.Item(p, n, i * gap) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))]


MODES = {
    "static": {"scheduling": "static", "batch_delay": 600.0},  # would rather wait ten minutes than start half full
    "dynamic": {"scheduling": "dynamic"},
    "continuous": {"scheduling": "continuous"},
}
requests = trace(answer_lens, 1.5 * tick)
reports = {name: bench.run(engine(max_num_seqs=SEATS, **mode), requests) for name, mode in MODES.items()}

print("              steps   useful   tokens/s   median latency      p99   GB/s (of peak)")
for name, report in reports.items():
    latency = report.percentiles["e2e"]
    print(
        f"{name:<12}{len(report.timeline):>7}{report.useful_share:>9.0%}{report.output_tokens_per_second:>11.1f}",
        end="",
    )
    print(f"{latency[50]:>15.2f} s{latency[99]:>8.2f} s", end="")
    print(f"{report.gb_per_second:>8.1f} ({report.gb_per_second * 1e9 / machine.bandwidth:.0%})")
gain = reports["continuous"].output_tokens_per_second / reports["static"].output_tokens_per_second
compare("06.gain", round(gain, 2), "times")

# %% [markdown]
# *Useful* is the share of all computed tokens that belong to a living request. GB/s do not show the difference: a machine that
# computes dead seats is busy, too. Latency counts from a request's *arrival*. (p99: 99 % of requests are faster; of 12, nearly the
# slowest.) Now the picture: one row for each seat, one cell for each step.


# %%
def cells(timeline, rectangular):
    """Who sits where: (seat, start, end, request or None if the seat is dead, tokens, longest share of this step)."""
    seat_of = {}
    for step in timeline:
        alive = {name: (start, end) for name, _, start, end in step.work}
        if not rectangular:
            seat_of = {name: seat for name, seat in seat_of.items() if name in alive}  # seats are given back at once
        elif not alive.keys() & seat_of.keys():
            seat_of = {}  # nobody of the old batch is left: a new batch
        for name in alive:
            seat_of.setdefault(name, min(set(range(99)) - set(seat_of.values())))
        longest = max(end - start for start, end in alive.values())
        for name, seat in seat_of.items():
            start, end = alive.get(name, (0, 0))
            yield seat, step.start, step.end, name if name in alive else None, end - start, longest


def gantt(ax, report, rectangular):
    zero = min(r.arrival for r in report.requests)
    seen = set()
    for seat, start, end, name, tokens, longest in cells(report.timeline, rectangular):
        left, width = start - zero, end - start
        if rectangular:  # what is computed and not needed lies behind
            ax.barh(seat, width, left=left, height=0.8, color="#DDDDDD", edgecolor="white", lw=0.4)
        if name is None:
            continue
        height = 0.8 * tokens / longest if rectangular and tokens > 1 else 0.8
        color = ORANGE if name not in seen else BLUE
        ax.barh(seat + 0.4 - height / 2, width, left=left, height=height, color=color, edgecolor="white", lw=0.4)
        if name not in seen:
            number = int(name.rpartition("-")[2]) + 1
            ax.text(left + width * 1.15, seat, number, color="white", va="center", fontsize=8, weight="bold")
        seen.add(name)
    arrivals = sorted(r.arrival - zero for r in report.requests)
    ax.plot(arrivals, [-0.75] * len(arrivals), "v", color="black", ms=4, clip_on=False)
    ax.set(yticks=range(SEATS), ylim=(SEATS - 0.5, -1.0), ylabel="seat")
    ax.spines[["top", "right"]].set_visible(False)


fig, axes = plt.subplots(3, 1, figsize=(8.4, 5.6), sharex=True, layout="constrained")
for ax, (name, report) in zip(axes, reports.items(), strict=True):
    gantt(ax, report, rectangular=name != "continuous")
    ax.set_title(f"{name}: {report.useful_share:.0%} of the computed tokens are useful", loc="left", fontsize=10)
axes[-1].set(xlabel="time (s)      triangles: a request arrives      orange: prompt      blue: answer      grey: dead")
plt.show()

# %% [markdown]
# *Static* does nothing until the fourth request is there. Then request 3, the story, holds all four seats until its last word, and
# everybody behind it waits outside. *Dynamic* starts at once, with request 1 alone, and then has the same trouble. *Continuous*
# has no grey: whoever leaves is replaced in the next step (white: nobody was waiting).
#
# Static latency is flattered here: a true static server hands back the whole batch together, so requests 1, 2 and 4 would wait for
# the story too, while our engine hands out each answer when it is done.
#
# ### Why was it not always done?
# A prompt of 7 tokens and a single new token must go through the model *in the same step*, and they do not fit into a rectangular
# tensor `[batch, length]`. This engine lays all tokens of a step in one flat row. The big matrix products do not care whose token
# is whose; only attention does, and it runs for each request on its own cache. Orca calls that *selective batching*.
#
# ## When it is worth nothing
#
# How much does continuous batching bring? A request of *n* tokens takes *n* steps, so counting steps is enough. All requests wait
# from the start.


# %%
def static_steps(lengths, seats):
    """Each batch takes as long as its longest."""
    return sum(max(lengths[i : i + seats]) for i in range(0, len(lengths), seats))


def continuous_steps(lengths, seats):
    """The next request goes to the seat that is free first."""
    free = [0] * seats  # at which step each seat is free again
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


config = ModelConfig("llama", 96, 48, 80, 2, 4, 2, 12, max_position_embeddings=256)
tiny = Transformer.from_state(config, random_state_dict(config, seed=6))
for name, count in (("static", static_steps), ("continuous", continuous_steps)):
    small = LLM.from_parts(config, tiny, None, num_kv_blocks=64, max_num_seqs=SEATS, scheduling=name)
    small.generate([[5, 6, 7]] * len(answer_lens), [greedy(n) for n in answer_lens])
    print(
        f"{name:<12}counted {count(answer_lens, SEATS):>3} steps, the engine on a tiny model took {small.stats()['steps']:.0f}"
    )

# %% [markdown]
# The counting agrees with the engine. So now we may draw lengths as we like: always 32 tokens on average, but more and more
# uneven. The *spread* is the standard deviation divided by the mean: 0 is "all equal", 1 is exponential, 2 has a heavy tail.


# %%
def lengths_with(spread, count, mean=32, seed=0):
    """So many lengths with this mean and spread (gamma distribution)."""
    if spread == 0:
        return [mean] * count
    draw, shape = random.Random(seed), 1 / spread**2
    values = [draw.gammavariate(shape, 1.0) for _ in range(count)]
    return [max(1, round(v * mean * count / sum(values))) for v in values]


spreads = [0, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2]
gains = {}
for seats in (2, 4, 8, 16, 32):
    drawn = [lengths_with(s, 2048) for s in spreads]
    gains[seats] = [static_steps(n, seats) / continuous_steps(n, seats) for n in drawn]

print("spread ", *(f"{s:>7}" for s in spreads))
for seats, row in gains.items():
    print(f"{seats:>2} seats", *(f"{g:>6.2f}x" for g in row))

fig, ax = plt.subplots(figsize=(6.6, 3.6), layout="constrained")
for seats, shade in zip(gains, (0.5, 0.6, 0.7, 0.85, 1.0), strict=True):
    ax.plot(spreads, gains[seats], "o-", color=BLUE, alpha=shade, lw=2, ms=4)
    ax.text(2.05, gains[seats][-1], f"{seats} seats", color=BLUE, alpha=shade, va="center")
ax.axhline(1, color="black", lw=0.8)
ax.text(2.0, 0.93, "no gain", va="top", ha="right", fontsize=9)
ax.set(xlabel="spread of the answer lengths (standard deviation / mean)", ylabel="static steps / continuous steps",
       xlim=(0, 2.45), ylim=(0, None))  # fmt: skip
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# All lengths equal: **the gain is nothing**, whatever the number of seats. From there it grows with the spread *and* with the
# seats. A speed-up without its lengths is not a number.
#
# Steps are not seconds. One check with the real model and the clock, everything waiting at the start:

# %%
seconds = {}
for label, lens in (("all equal", [9] * 12), ("three long", [3, 3, 26, 3, 3, 3, 26, 3, 3, 3, 29, 3])):
    for name in ("static", "continuous"):
        seconds[name] = bench.run(engine(max_num_seqs=SEATS, scheduling=name), trace(lens, 0)).seconds
    counted = static_steps(lens, SEATS) / continuous_steps(lens, SEATS)
    print(
        f"{label:<12}{sum(lens)} tokens: static {seconds['static']:.2f} s, continuous {seconds['continuous']:.2f} s, ",
        end="",
    )
    print(f"so {seconds['static'] / seconds['continuous']:.2f}x (counted in steps: {counted:.2f}x)")

# %% [markdown]
# The clock's gain is usually below that of the steps: a new prompt makes its step longer for everybody (stage 07). Now play with
# it. Top: static, bottom: continuous, the same 24 requests.

# %%
SPREADS = {"all equal": 0, "mild": 0.4, "exponential": 1, "heavy tail": 1.8}


def draw_seats(ax, lengths, seats):
    """24 requests, counted in steps: static above, continuous below."""
    lens = lengths_with(SPREADS[lengths], 24, mean=10, seed=3)
    steps, begin = static_steps(lens, seats), 0
    for i in range(0, 24, seats):
        batch = lens[i : i + seats]
        ax.barh(range(len(batch)), max(batch), left=begin, height=0.85, color="#DDDDDD", edgecolor="white", lw=0.6)
        ax.barh(range(len(batch)), batch, left=begin, height=0.85, color=BLUE, edgecolor="white", lw=0.6)
        begin += max(batch)
    free = [(0, seats + 1.6 + k) for k in range(seats)]
    for n in lens:
        at, row = free[0]
        ax.barh(row, n, left=at, height=0.85, color=BLUE, edgecolor="white", lw=0.6)
        heapq.heapreplace(free, (at + n, row))
    fast = max(at for at, _ in free)
    padded = seats * sum(max(lens[i : i + seats]) for i in range(0, 24, seats))
    ax.text(0, -0.75, f"static: {steps} steps, {sum(lens) / padded:.0%} useful", va="bottom")
    text = f"continuous: {fast} steps, {steps / fast:.2f}x as fast"
    ax.text(0, seats + 0.85, text, va="bottom")
    ax.set(xlabel="steps", xlim=(0, {2: 260, 4: 180, 8: 135}[seats]), ylim=(2 * seats + 2.3, -2.2), yticks=[])
    ax.spines[["top", "right", "left"]].set_visible(False)


slider_plot(
    draw_seats,
    lengths=list(SPREADS),
    seats=[2, 4, 8],
    start={"lengths": "exponential", "seats": 4},
    stills=[{"lengths": name, "seats": 4} for name in SPREADS],
    size=(6.0, 3.2),
)

# %% [markdown]
# With the heavy tail, look at the right end of the lower half: when nobody waits any more, one long answer finishes alone. No
# batching helps against that.
#
# ## "Utilisation up 23x"
#
# One widely read post says that, by vLLM's official figures, continuous batching raises GPU *utilisation* 5 to 23 times. Test it.

# %%
share = reports["static"].useful_share
print(f"useful share of our static run: {share:.0%}. That share can grow to 100 %: {1 / share:.2f}-fold, and no more")
print(f"a share that grows 23-fold must start below 100 % / 23 = {100 / 23:.2f} %")
print(f"longest / mean reaches 23 at about e^(23 - 0.577) = {math.exp(23 - 0.5772):,.0f} seats (exponential lengths)")
print(
    f"what filling dead seats alone can bring: {longest_over_mean(8):.1f}x for 8 seats, {longest_over_mean(32):.1f}x for 32"
)
print(f"the source of the 23: 8x for continuous batching, 23x with vLLM's memory management; 23 / 8 = {23 / 8:.1f}")

# %% [markdown]
# **A share cannot rise above 100 %.** The source is a blog post by Anyscale, not vLLM (Daniel et al. 2023, "How continuous
# batching enables 23x throughput in LLM inference"). It measured *throughput*, which has no such limit. Against naive static
# batching it found 4x for a static batch in faster code (FasterTransformer), 8x for continuous batching, 23x for continuous
# batching *plus* vLLM's paged memory: more requests fit, so there are more seats.
#
# Even the 8x is more than dead seats explain in a batch of dozens: the systems differ in their code and their seats too. At the
# lowest spread of lengths, the post found static and continuous about equal, as you did.
#
# ## The delay knob
#
# When requests only trickle in, dynamic batches are small. So some servers let the first one wait a moment for company. Mind the
# names: in this engine that wait is `batch_delay`, the patience of the *static* batch; Triton Inference Server calls a batcher with
# such a delay *dynamic*. Sixteen requests of 6 tokens arrive at random, every third step on average:

# %%
arrive, moment, trickle = random.Random(9), 0.0, []
for text in (texts * 2)[:16]:
    trickle.append(bench.Item(llm.tokenizer.encode(text), 6, moment))
    moment += arrive.expovariate(1 / (3 * tick))
delays = [0, 4, 8, 16]  # in steps; 0 is our "dynamic"
waited = {d: bench.run(engine(max_num_seqs=8, scheduling="static", batch_delay=d * tick), trickle) for d in delays}
best = bench.run(engine(max_num_seqs=8), trickle)
print("delay (ms)      steps   requests per step   median latency (ms)")
for label, report in [*((f"{1e3 * d * tick:.0f}", r) for d, r in waited.items()), ("continuous", best)]:
    mean = statistics.mean(len(step.work) for step in report.timeline)
    print(f"{label:<12}{len(report.timeline):>9}{mean:>20.1f}{1e3 * report.percentiles['e2e'][50]:>22.0f}")

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.0, 3.0), layout="constrained")
xs = [1e3 * d * tick for d in delays]
rows = {
    "median latency (ms)": lambda r: 1e3 * r.percentiles["e2e"][50],
    "steps computed": lambda r: len(r.timeline),
}
for ax, (label, value) in zip(axes, rows.items(), strict=True):
    ax.plot(xs, [value(r) for r in waited.values()], "o-", color=BLUE, lw=2)
    ax.axhline(value(best), color=ORANGE, lw=1.5, ls="--")
    ax.text(xs[-1], value(best), "continuous, no delay ", color=ORANGE, ha="right", va="bottom")
    ax.set(xlabel="batch_delay (ms)", ylabel=label, ylim=(0, None))
    ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Compare the two ends: a long delay does the same work in fewer, fuller steps, and the users wait for it. Where the best delay
# lies depends on who happens to come. For a model that answers in one pass (an image classifier, say) this is a fair trade: who just
# missed the bus waits for one pass. For text, the bus is gone for the whole of the longest answer. Continuous batching needs no such
# knob: boarding is at every step.
#
# ## What beginners get wrong
# - **The names.** Anyscale's post says *dynamic* for *continuous*, NVIDIA *in-flight*. Ask: what happens when one of the batch is done?
# - **"A new request waits for the current batch."** In continuous batching it waits for one step, if a seat and memory are free.
#   (candle-vllm had a scheduler and still let nobody in while others ran: issue 156.)
# - **Padding and padding masks.** Continuous engines need none for lengths that differ: the tokens lie in one flat row.
# - **Benchmarks with equal lengths, all at once.** They cannot show the difference (the left end of your plot).
# - **Latency from the moment of admission.** The queue is where the time goes; count from arrival.
#
# ## Other names for the same thing
# | here | vLLM | SGLang | TGI | llama.cpp server |
# |---|---|---|---|---|
# | `"continuous"` | always on | always on | always on | `--cont-batching` |
# | `max_num_seqs` | `--max-num-seqs` | `--max-running-requests` | `--max-batch-size` | `--parallel` (slots) |
# | `_fill` | loop over `waiting` in `Scheduler.schedule` | `get_new_batch_prefill` | `batching_task` in the router | `get_available_slot` |
#
# Triton: `dynamic_batching { }` is our `"dynamic"`; with a `max_queue_delay_microseconds`, our `"static"` with a `batch_delay`; for
# language models TensorRT-LLM's *in-flight batching*, our `"continuous"`. A list given to transformers' `generate` is a static batch.
#
# ## Three quick questions

# %%
quiz(
    "Static batching, 4 seats, answers of 10, 10, 10 and 90 tokens. You double the seats; the next four are 10, 10, 10 and 90 too. What happens to the useful share?",
    ["It doubles.", "It stays the same.", "It halves."],
    1,
    [
        "There are twice as many useful tokens, but also twice as many seats for 90 steps.",
        "240 of 8 x 90 instead of 120 of 4 x 90: one third both times. On random lengths it would fall, because the longest grows.",
        "The dead tokens double, and the useful ones do too.",
    ],
)

# %%
quiz(
    "You switch from static to continuous batching. 1,000 requests wait at the start, each writes exactly 128 tokens. The throughput ...",
    ["grows about 2.7-fold with 8 seats.", "stays about the same.", "falls, because of the scheduling in each step."],
    1,
    [
        "That is for exponential lengths. What is longest / mean here?",
        "Longest and mean are equal: no seat is ever dead. With arrivals over time there would be a gain, as nobody waits for a batch to end.",
        "Planning a step costs microseconds, running the model milliseconds.",
    ],
)

# %%
quiz(
    "Continuous batching, and 7.6 of 8 seats are taken on average. What could still double the tokens per second?",
    ["A better admission rule.", "More seats.", "A longer batch_delay."],
    1,
    [
        "At most 8 / 7.6 is left to win by filling seats.",
        "If memory allows, and reading weights is still what a step waits for: the same reading, twice the tokens. Paging makes room.",
        "Continuous batching does not use it, and the seats are nearly full anyway.",
    ],
)

# %% [markdown]
# ## Now you can
# read a batch as a picture of seats, compute what the slowest costs the others, and ask of every speed-up: against what, with
# which lengths, with how many seats?
#
# **Next:** [exercises/06_batching.ipynb](../exercises/06_batching.ipynb). You write the `if`, the padding and the admission loop, run
# the engine on them, and judge nine claims.
#
# One thing is left open: a newcomer with a very long prompt joins at once, and everybody's step gets long. Stage 07 cuts it up.
