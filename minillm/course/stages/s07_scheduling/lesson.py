# %% [markdown]
# # 07 Scheduling
#
# **Your answer is streaming along, word after word. Somebody else pastes a report of 1,000 tokens. What happens to your
# stream?** With a careless scheduler it freezes. Nobody took anything from you: one step of the engine was simply very long.
#
# **Afterwards you can** cut long prompts into chunks, say what a token budget costs and buys, choose who waits and who is
# thrown out, and judge all that by the one number that users feel: goodput.
#
# *40 minutes. You need stage 04 (blocks) and stage 06 (continuous batching). Everything runs on the CPU.*

# %%
import itertools
import random
import statistics
import time

import matplotlib.pyplot as plt

from minillm import LLM, SamplingParams, kv, metrics, roofline
from minillm.config import ModelConfig
from minillm.course import compare, predict, quiz, show_source, swap
from minillm.course.stages.s07_scheduling.counted import Job, mixed_jobs, run_counted
from minillm.course.widgets import slider_plot
from minillm.scheduler import Scheduler, by_arrival, by_priority

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"

llm = LLM("smollm2-135m", num_kv_blocks=96)
PARTS = llm.config, llm.model, llm.tokenizer


def engine(**options):
    """A new engine around the same model. No prefix cache, so that nothing is found ready-made."""
    return LLM.from_parts(*PARTS, **{"num_kv_blocks": 96, "enable_prefix_caching": False, **options})


def greedy(count):
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def tidy(ax):
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", alpha=0.3)


# %% [markdown]
# ### Predict first
# Put a number in place of `None`. Three streams run, each gets one token per step. Then a prompt of 1,000 tokens arrives.

# %%
question = "The prompt is computed in one go. The longest pause of a stream is how many usual ones?"
predict("07.whole", None, "times", question)
question = "The same, if a step may hold at most 64 tokens?"
predict("07.chunked", None, "times", question)
question = "Later: a pool far too small for 24 requests. Tokens computed for 100 that were needed?"
predict("07.thrash", None, "tokens", question)

# %% [markdown]
# ## The smallest example, by hand
#
# A step has a **budget**, say 10 tokens. Streams A, B and C need one token each. L brings a prompt of 20 tokens, and one step
# later S brings a short one of 4.
#
# `run_counted` runs the engine's own scheduler, only without a model. One step is one *tick*. So the numbers are exact.


# %%
def show_shares(**options):
    jobs = [Job(name, 0, 1, 12) for name in "ABC"] + [Job("L", 1, 20, 3), Job("S", 2, 4, 3)]
    run = run_counted(jobs, max_num_batched_tokens=10, **options)
    print("step    A    B    C    L    S   tokens in the step")
    for i, shares in enumerate(run.shares[1:7], 1):
        print(f"{i:>4}" + "".join(f"{shares.get(name, '.'):>5}" for name in "ABCLS") + f"{sum(shares.values()):>9}")


show_shares()

# %% [markdown]
# The streams are served first, always. L takes what is left: 7, 7, and the last 6. Then it is a stream too. A, B and C never miss
# a step, and no step is longer than 10 tokens: **chunked prefill** (Agrawal et al. 2024, Sarathi-Serve, arXiv:2403.02310).
#
# But look at S. In step 2 there is nothing left for it. A second limit helps: at most 4 tokens *of one request* in a step.

# %%
show_shares(long_prefill_token_threshold=4)

# %% [markdown]
# S now moves at once, beside L, and its prompt is done a step sooner. L pays with two more steps. The budget protects those who
# *run*, the threshold protects those who *come*.
#
# In the engine, this is the loop. Read three lines first: `sorted`, `share` (your first exercise), and the last `budget -=`.

# %%
show_source(Scheduler._serve_running)

# %% [markdown]
# Sorted by need, so a stream's next token (need 1) comes before a chunk. The `while` is for the case that no block is free: below.
#
# ## The stall, measured
#
# Now the real model, and the clock. Three streams run; after eight steps the long prompt arrives. Only the budget differs. At
# 2,048, the whole prompt fits into one step.

# %%
sentence = llm.tokenizer.encode("The keeper of the lighthouse climbed the stairs and looked out at the grey sea. ")
report = (sentence * 100)[:1000]


def rush(budget):
    """Three streams, then the report. Returns times in seconds, 0 is the moment when the report arrives."""
    llm = engine(max_num_batched_tokens=budget)
    names = [llm.add_request(sentence[i : i + 8], greedy(200), f"stream {i}") for i in range(3)]
    streams = [llm.requests[name][0] for name in names]
    for _ in range(8):
        llm.step()
    llm.timeline = []
    long = llm.requests[llm.add_request(report, greedy(4), "report")][0]
    while long.num_output < 4:
        llm.step()
    zero = long.metrics.arrival
    times = [[t - zero for t in stream.metrics.token_times] for stream in streams]
    gaps = [(b - a, a) for a, b in itertools.pairwise(times[0])]
    before = statistics.median(gap for gap, start in gaps[1:6])
    steps = [(s.start - zero, s.end - zero, s.work) for s in llm.timeline]
    stall, start = max(gaps)
    return {"times": times, "steps": steps, "ttft": long.metrics.ttft, "usual": before, "stall": stall, "from": start}


BUDGETS = [16, 64, 256, 2048]
rush(256)  # warm up
runs = {budget: rush(budget) for budget in BUDGETS}
usual = statistics.median(run["usual"] for run in runs.values())
print(f"usual pause between two tokens of a stream: {usual * 1e3:.0f} ms")
print("budget   steps   longest pause     report's first token")
for budget, run in runs.items():
    steps = sum(any(name == "report" for name, *_ in work) for *_, work in run["steps"]) - 3
    print(f"{budget:>6}{steps:>8}{run['stall'] * 1e3:>13.0f} ms{run['ttft']:>20.2f} s")

# %%
compare("07.whole", round(runs[2048]["stall"] / usual, 1), "times")
compare("07.chunked", round(runs[64]["stall"] / usual, 1), "times")

# %% [markdown]
# One long step is one long pause, for *all* streams. Is the long step badly written? The roofline of stage 01 tells:

# %%
machine = roofline.measure_machine()
config = llm.config
head = 2 * config.vocab_size * config.hidden_size  # FLOPs; it runs for the last token only
work = sum(roofline.flops_per_token(config, i + 1) for i in range(1000)) - 999 * head
read = roofline.step_bytes(config, [20] * 3, 4, 4)
print(f"measured now: at most {machine.flops / 1e9:.0f} GFLOP/s and {machine.bandwidth / 1e9:.1f} GB/s")
speed = work / runs[2048]["stall"]
print(f"the report in one step: {speed / 1e9:.0f} GFLOP/s, {speed / machine.flops:.0%} of that")
print(f"a usual step:           {read / usual / 1e9:.1f} GB/s, {read / usual / machine.bandwidth:.0%} of that")

# %% [markdown]
# The pause is arithmetic that must be done; a usual step mostly reads the weights. (Above 100 %? Then the ceiling was measured in a
# worse moment than the run.)
#
# Here is what a watcher sees. Each dot is a token, each orange bar a step with a part of the report, grey is the longest pause.
# Move the budget:


# %%
def draw_run(ax, budget):
    run = runs[budget]
    for start, end, work in run["steps"]:
        if any(name == "report" and last <= len(report) for name, _, _, last in work):
            ax.barh(0, end - start, left=start, height=0.5, color=ORANGE, edgecolor="white", lw=0.5)
    for row, times in enumerate(run["times"], 1):
        ax.plot(times, [row] * len(times), "o", ms=3.5, color=BLUE)
    ax.axvspan(run["from"], run["from"] + run["stall"], color=GREY, alpha=0.25, lw=0)
    ax.axvline(0, color="black", lw=1, ls=":")
    right = 1.05 * max(r["ttft"] for r in runs.values())
    note = f"pause {run['stall'] * 1e3:.0f} ms, report's first token {run['ttft']:.2f} s"
    ax.text(1, 1.03, note, ha="right", va="bottom", transform=ax.transAxes)
    ax.set(xlim=(-0.08 * right, right), ylim=(-0.5, 3.5), xlabel="seconds since the report arrived")
    ax.set_yticks(range(4), ["report", "stream 0", "stream 1", "stream 2"])
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)


slider_plot(
    draw_run,
    budget=BUDGETS,
    start={"budget": 256},
    stills=[{"budget": budget} for budget in BUDGETS],
    size=(6.4, 2.4),
)

# %% [markdown]
# Why not a tiny budget, then? Each step reads all the weights, whatever it computes, and each chunk reads the keys and values of all
# chunks before it. In chunks of 13 (16, less three streams) the report pays that 77 times. **Short pauses for those who run, against
# a soon beginning for those who come:** that is the trade. The paper's rule: the largest budget whose step still keeps the promised
# time between tokens.
#
# ## Who waits? A policy is a sort key
#
# When all seats are taken, requests queue. Who is next? The engine asks a **policy**: a function from a request to a sort key.
# The smallest key goes first.

# %%
show_source(by_arrival)
show_source(by_priority)

# %% [markdown]
# Any function will do. "Shortest first" sounds clever: the mean wait falls. Let us try it. Short requests keep four seats just
# busy; at tick 40 one long prompt arrives. The short ones keep coming, for a while or for a long while.


# %%
def shortest_first(request):
    return (request.num_prompt, request.order)


def aging(request):
    """Each token of the prompt is worth half a tick of waiting."""
    return (request.metrics.arrival + 0.5 * request.num_prompt, request.order)


POLICIES = {
    "first come": (by_arrival, BLUE),
    "shortest first": (shortest_first, ORANGE),
    "aging": (aging, GREEN),
}
COUNTS = [50, 100, 150, 200, 250, 300]
waits = {name: [] for name in POLICIES}
print("wait for the first token, in ticks:      the long one   short ones, mean")
for name, (policy, _) in POLICIES.items():
    for count in COUNTS:
        jobs = [Job(f"short {i}", 2.0 * i, 8, 8) for i in range(count)]
        jobs.append(Job("long", 40, 120, 16))
        run = run_counted(jobs, max_num_seqs=4, max_num_batched_tokens=64, scheduling_policy=policy)
        waits[name].append(run.requests["long"].metrics.ttft)
    others = statistics.mean(r.metrics.ttft for key, r in run.requests.items() if key != "long")
    print(f"{name:<38}{waits[name][-1]:>14.0f}{others:>19.1f}")

# %%
fig, ax = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for name, (_, color) in POLICIES.items():
    ax.plot(COUNTS, waits[name], "o-", color=color, lw=2)
    ax.text(COUNTS[-1] + 6, waits[name][-1], name, color=color, va="center")
ax.set(
    xlabel="short requests that come (one every 2 ticks)",
    ylabel="the long one waits (ticks)",
    xlim=(40, 375),
    ylim=(-25, None),
)
tidy(ax)
plt.show()

# %% [markdown]
# Shortest first serves the short ones better, and the long one *not at all*, as long as short ones come. That is **starvation**, and
# no mean shows it.
#
# **Aging** is the cure: waiting must count for something. That seems to need a clock. It does not: all in the queue age at the same
# speed, so the order of any two never changes. *Add* a handicap to the time of arrival, once. The long one's key is 40 + 60 = 100; a
# short one's is its arrival + 4. So whoever comes after tick 96 stands behind it, however long the rush. That also keeps the engine's
# rule: **the key must not change while a request waits**, for the queue is kept sorted by it.
#
# (With one long prompt, first come looks even better. Wait for the busy hour.)
#
# ## Deadlines
#
# A request may carry a priority, and a timeout. When its deadline passes it is ended, with what it has by then.

# %%
late = engine(scheduling_policy="deadline")
name = late.add_request("The old lighthouse", greedy(500), timeout=1.0)
request = late.requests[name][0]
while request.finish_reason is None:
    late.step()
print(f"{request.num_output} of 500 tokens, finish reason {request.finish_reason!r}")
print(f"The old lighthouse{request.text[:60]}")

# %% [markdown]
# Now a busy hour, counted again, for four seats: chats (priority 0, due in 30 ticks), reports (1, due in 90) and background jobs
# (2, never due). The policy "deadline" compares priorities first, then deadlines; you write it in exercise 07.3.

# %%
hour = mixed_jobs(seed=1, gap=2.8)
dated = sum(job.timeout is not None for job in hour)
print(f"{len(hour)} requests, {dated} of them with a deadline")
print("policy      in time   slowest background job")
seats = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "num_kv_blocks": 64}
for policy in ("fcfs", "priority", "deadline"):
    run = run_counted(hour, scheduling_policy=policy, **seats)
    in_time = sum(run.requests[name].deadline is not None for name in run.in_time)
    slowest = max(r.metrics.e2e for r in run.requests.values() if r.deadline is None)
    print(f"{policy:<12}{in_time:>7}{slowest:>19.0f} ticks")

# %% [markdown]
# First come misses a third of the deadlines. The other two keep all, and let a background job starve for nearly the whole hour. (They
# agree: within a class all have the same patience, so who came first is due first.) Can one have both? Find out in exercise 07.5.
#
# ## Goodput
#
# "Requests per second" does not ask whether anybody was still waiting for the answer. A promise (a *service level objective*, SLO)
# might be: first token within 15 ticks, then one each 3 ticks or better. **Goodput** counts the requests per second that got *both*.
# We turn up the load. Here a step takes one tick plus 1/32 for each token in it.

# %%
GAPS = [10, 8, 7, 6, 5.5, 5, 4.7, 4.4, 4.2, 4, 3.7, 3.4, 3, 2.7]
offered, served, good = [], [], []
print("requests per 100 ticks:   offered   served   as promised")
for gap in GAPS:
    draw, now, jobs = random.Random(3), 0.0, []
    for i in range(150):
        now += draw.expovariate(1 / gap)
        jobs.append(Job(f"r{i}", now, draw.randint(20, 60), draw.randint(10, 30)))
    run = run_counted(jobs, token=1 / 32, max_num_seqs=8, max_num_batched_tokens=128)
    all_ = [request.metrics for request in run.requests.values()]
    offered.append(100 / gap)
    served.append(100 * len(all_) / run.ticks)
    good.append(100 * metrics.goodput(all_, run.ticks, max_ttft=15, max_tpot=3))
    if gap in (8, 5, 4, 3):
        print(f"{offered[-1]:>33.1f}{served[-1]:>9.1f}{good[-1]:>14.1f}")

# %%
fig, ax = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for values, color, label in ((served, ORANGE, "served: throughput"), (good, BLUE, "as promised: goodput")):
    ax.plot(offered, values, "o-", color=color, lw=2)
    ax.text(offered[-1], values[-1] + 1.8, label, color=color, ha="right", va="bottom")
ax.plot([10, 26], [10, 26], ls=":", color=GREY)
ax.text(25.3, 26, "offered", color=GREY, ha="right")
ax.set(xlabel="load (requests offered per 100 ticks)", ylabel="requests per 100 ticks")
ax.set(xlim=(9, 38), ylim=(0, 28))
tidy(ax)
plt.show()

# %% [markdown]
# From 20 to 25 on the x axis, throughput goes *up* and goodput falls off a cliff. More comes than is served, so the queue grows, soon
# everybody in it is late, and the engine works hard on answers that nobody waits for. **Tune for throughput and you will sit to the
# right of the cliff.** (DistServe, arXiv:2401.09670, calls the x value before the cliff goodput: the highest load at which, say, 90 %
# keep the SLO.)
#
# ## When the pool is full
#
# Each stream grows. At some point a request needs one more block, and there is none. Somebody is **preempted**: all its blocks are
# taken away, and later their keys and values are computed again. Nothing is lost but work. How much? 24 requests of 32 + 96 tokens,
# one every 3 ticks, each with 8 blocks at its end. Only the size of the pool differs.
#
# With **swap** the victim's blocks are copied to the host's memory and back instead. (The host is the computer around the GPU. On a
# CPU that is another place in the same memory.)

# %%
crowd = [Job(f"r{i}", 3 * i, 32, 96) for i in range(24)]
needed = sum(job.prompt + job.output - 1 for job in crowd)  # the last token of each need not pass through the model
POOLS = [12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 160, 192]
cures = {"24 seats": ({"max_num_seqs": 24}, ORANGE), "3 seats": ({"max_num_seqs": 3}, GREEN),
         "24 seats, swap": ({"max_num_seqs": 24, "preemption": "swap"}, BLUE)}  # fmt: skip
crowded = {}
print(f"{needed} tokens are needed           preemptions   computed   for 100   steps")
for label, (options, _) in cures.items():
    crowded[label] = [run_counted(crowd, num_kv_blocks=blocks, **options) for blocks in POOLS]
    for blocks in (12, 24, 192):
        run = crowded[label][POOLS.index(blocks)]
        row = f"{run.preemptions:>10}{run.computed:>13}{100 * run.computed / needed:>10.0f}{len(run.shares):>8}"
        print(f"{label:<15} {blocks:>4} blocks      {row}")
compare("07.thrash", round(100 * crowded["24 seats"][0].computed / needed), "tokens")

# %%
fig, ax = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for label, (_, color) in cures.items():
    shares = [100 * run.computed / needed for run in crowded[label]]
    ax.plot(POOLS, shares, "o-", color=color, lw=2, ms=4)
ax.text(34, 152, "24 seats, recompute", color=ORANGE)
ax.text(12.6, 128, "3 seats", color=GREEN, ha="left")
ax.text(46, 102, "24 seats, swap", color=BLUE, va="bottom")
ax.set_xscale("log", base=2)
ax.set_xticks([12, 24, 48, 96, 192], ["12", "24", "48", "96", "192"])
ax.minorticks_off()
ax.set(xlabel="blocks in the pool (log scale)", ylabel="tokens computed per 100 needed", ylim=(90, None))
tidy(ax)
plt.show()

# %% [markdown]
# With the smallest pool every token is computed *twice* on the mean, and no error is shown: **thrashing**. (The bump? A little more
# room lets more requests in, who then collide.) Three cures: fewer seats, swap, a larger pool. But look at the steps. Three seats in
# 24 blocks waste nothing, yet need *more* steps, and every step reads all the weights. Which is faster on the clock?

# %%
print("                 preemptions   computed   seconds")
CASES = {
    "crowded": {},
    "fewer seats": {"max_num_seqs": 2},
    "swap": {"preemption": "swap"},
    "larger pool": {"num_kv_blocks": 64},
}
texts = {}
for label, options in CASES.items():
    small = engine(**{"num_kv_blocks": 14, "block_size": 8, "max_model_len": 112, **options})
    start = time.perf_counter()
    outs = small.generate([sentence[i : i + 12] for i in range(8)], greedy(36), progress=False)
    seconds, stats = time.perf_counter() - start, small.stats()
    texts[label] = [out.outputs[0].token_ids for out in outs]
    print(f"{label:<14}{stats['preemptions']:>11.0f}{stats['computed_tokens']:>13.0f}{seconds:>11.2f}")
roomy = texts.pop("larger pool")
same = [a == b for outputs in texts.values() for a, b in zip(outputs, roomy, strict=True)]
print(f"answers equal to those in the larger pool: {sum(same)} of {len(same)}")

# %% [markdown]
# The larger pool is hard to beat. Whether "fewer seats" beats "crowded" depends on the machine: what is dearer there, computing
# tokens twice or reading the weights more often? The answers are the same.
#
# ## Recompute or swap?
#
# One costs FLOPs, the other bytes over the link between GPU and host, out and in again. First the best cases, from the data sheet (for
# this CPU, from its roofline):

# %%
# layers, query heads, KV heads and head size are the last four numbers; nothing is loaded
llama13 = ModelConfig("llama", 32_000, 5120, 13_824, 40, 40, 40, 128)
llama8 = ModelConfig("llama", 128_256, 4096, 14_336, 32, 32, 8, 128)
a100 = roofline.Machine("A100", 1.555e12, 312e12)  # data sheet: dense bf16; PCIe 4 x16 moves 32 GB/s each way
rows = [
    ("Llama-2-13B, A100", llama13, a100, 32e9, 2),
    ("Llama-3.1-8B, A100", llama8, a100, 32e9, 2),
    ("SmolLM2, this CPU", config, machine, machine.bandwidth / 2, 4),  # a copy reads and writes
]
count = 1000
print(f"{count} tokens             copied, out and in          computed again")
for label, shape, where, link, size in rows:
    moved = 2 * count * kv.kv_bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, size)
    head = 2 * shape.vocab_size * shape.hidden_size
    flops = sum(roofline.flops_per_token(shape, i + 1) for i in range(count)) - (count - 1) * head
    seconds = roofline.roofline_seconds(flops, roofline.step_bytes(shape, [count], size, size), where)
    print(f"{label:<20}{moved / 1e6:>6.0f} MB{moved / link * 1e3:>10.1f} ms", end="")
    print(f"{flops / 1e12:>10.2f} TFLOP{seconds * 1e3:>9.1f} ms")

# %%
swapper = engine(preemption="swap")
blocks, copies, again = 500 // 16, [], []
for _ in range(3):
    start = time.perf_counter()
    for b in range(blocks):
        swapper.runner.host.copy_block(b, b, swapper.cache)
        swapper.cache.copy_block(b, b, swapper.runner.host)
    copies.append(time.perf_counter() - start)
    again.append(swapper.generate(report[: blocks * 16], greedy(1))[0].metrics.ttft)
copied, computed = statistics.median(copies), statistics.median(again)
gigabytes = 4 * blocks * 16 * swapper.cache.bytes_per_token / copied / 1e9
print(f"measured here, {blocks * 16} tokens:")
print(f"copied out and in in {copied * 1e3:.1f} ms ({gigabytes:.1f} GB/s read and written)")
print(f"computed again in {computed * 1e3:.0f} ms")

# %% [markdown]
# On a CPU the copy wins by far: the memory is near, and arithmetic is slow. On the A100 with 40 KV heads the two are of one order; the
# vLLM paper measured them as comparable for blocks of 16 to 64 tokens (arXiv:2309.06180, section 7.3; OPT-13B has this shape). Fewer
# KV heads favour the copy; smaller blocks spoil it, as a link hates small pieces. Still, vLLM V1 recomputes: no second pool to
# manage, the chunks ride along in steps that run anyway, and the prefix cache may still hold the blocks.
#
# ## Preempting the wrong one
#
# Who is thrown out? The last in the order of the policy. What if it is the *first*? `swap` puts the wrong rule into the engine.

# %%
stream = [Job(f"r{i}", 12 * i, 16, 64) for i in range(80)]


def first_of_all(self):
    return min(self.running, key=self.policy)


def report_on(label):
    run = run_counted(stream, num_kv_blocks=12, max_num_seqs=8)
    lasted = sorted(request.metrics.e2e for request in run.requests.values())
    print(f"{label:<18}{run.requests['r0'].metrics.e2e:>8.0f}{lasted[40]:>17.0f}{run.computed:>16}")


print("ticks:         the first one   one in the middle   tokens computed")
report_on("the last goes")
with swap("07.2", first_of_all):
    report_on("the first goes")

# %% [markdown]
# With the right rule nobody can throw out the first in line. It finishes, then the next one is first: everybody gets there, however
# small the pool. With the wrong rule that promise is gone, and more work is done again.
#
# ## What beginners get wrong
# - **"Chunking is there to make the long prompt faster."** It keeps the *others* steady. The prompt pays, the more the smaller the
#   chunks. (Middling ones may cost nothing; look at 256 in your table.)
# - **Rounding chunks down, say to whole blocks.** If the budget is smaller than the unit, nothing moves, for ever (sglang issue
#   36344: a chunk of 128, a unit of 4,096).
# - **Forgetting the victim's tokens in this step.** Its share must go back to the budget (vLLM issue 26661).
# - **A clock in the key.** Keys taken at different moments cannot be compared.
# - **Watching only means.** Starvation, stalls and thrashing all hide there.
#
# ## Other names for the same thing
# | here | vLLM (V1) | SGLang | llama.cpp server |
# |---|---|---|---|
# | `max_num_batched_tokens` | the same | `--chunked-prefill-size` (a prompt's chunk) | `--batch-size` |
# | `long_prefill_token_threshold` | the same, 0 by default | | |
# | `scheduling_policy` | "fcfs" (default), "priority" (lower first) | `--enable-priority-scheduling` (higher first) | first come |
# | preemption | recompute; a warning counts it | "Retract requests" in the log | |
# | goodput | `vllm bench serve --goodput` | | |
#
# ## Three quick questions

# %%
quiz(
    "Users complain: answers begin quickly, but stutter now and then. Which knob first?",
    ["A smaller max_num_batched_tokens.", "A larger max_num_batched_tokens.", "A larger max_num_seqs."],
    0,
    [
        "Stutter is long steps. A smaller budget bounds them, and the beginnings come a little later.",
        "That allows longer steps: prompts begin sooner, and streams stutter more.",
        "More streams at a time make every step longer, and bring more prompts in.",
    ],
)

# %%
quiz(
    "Half of the requests break the TTFT limit, the other half the TPOT limit. What is the goodput?",
    ["All of the throughput: each limit is kept by half.", "Half of the throughput.", "Zero."],
    2,
    [
        "No request at all kept both limits.",
        "Each limit alone is kept by half, but never by the same half.",
        "A request counts only if it keeps all limits. Two percentiles side by side cannot show this.",
    ],
)

# %%
quiz(
    "Aging with arrival + 20 x priority: when does a waiting request of priority 2 go before a new one of priority 0?",
    [
        "Never: 0 is more important than 2.",
        "Once it has waited for more than 40 ticks.",
        "Once it has waited for more than 20 ticks.",
    ],
    1,
    [
        "That is strict priority, where waiting counts for nothing.",
        "Its key is its arrival + 40. A newcomer's key is the present. So after 40 ticks it is the smaller one.",
        "That is the lead of one class. Here two classes lie between them.",
    ],
)

# %% [markdown]
# ## Now you can
# bound the pause of every stream with a budget, keep room for newcomers with a threshold, write any policy as a sort key that
# starves nobody, see thrashing in one number, and judge it all by goodput.
#
# **Next:** [exercises/07_scheduling.ipynb](../exercises/07_scheduling.ipynb). You write the engine's share, its victim, its deadlines
# and its goodput. Then comes the open one: a policy of your own, against a busy hour.
#
# From here on, tokens come out when they should. Which token it is, and how it reaches the reader, is stage 08.
