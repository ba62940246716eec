# %% [markdown]
# # 00 Start here
#
# Two services answer the same question. Both advertise the same number of tokens per second. With the first, words appear
# at once and trickle on. With the second, you stare at an empty screen, and then the whole answer bursts out. Nobody
# lied. **So which numbers would have told you?**
#
# **You will be able to** run a real model on your own machine, say what happens between prompt and text, and measure the
# four numbers that every inference engine is judged by: TTFT, TPOT, throughput and cost. You will also know how the
# exercises and their checks work.
#
# **Minutes:** 30. **Needs:** Python. No GPU, no account. The model (a file of about 100 MB) is fetched once.

# %% [markdown]
# ## Is everything here?
#
# The doctor looks at your machine and says what will run. `missing` is about extras; the line says whether it matters.
# (In a terminal, `minillm doctor` tells more.)

# %%
from minillm import doctor

for finding in doctor.findings():
    print(f"{finding.status:<8} {finding.name:<14} {finding.todo}")

# %% [markdown]
# ## First words
#
# Load the model, give it a beginning, watch it go on. Change the prompt and run it again.

# %%
from minillm import LLM, SamplingParams

llm = LLM("smollm2-135m")

prompt = "The secret of a good soup is"
print(prompt, end="")
for delta in llm.stream(prompt, SamplingParams(max_tokens=40, temperature=0.0)):
    print(delta.text, end="", flush=True)

# %% [markdown]
# All of that ran here. The model is tiny, so it makes things up with great confidence. We study the *engine* around it, and
# that treats large models alike.
#
# Did you notice *how* the text came? Not at once, but piece by piece. Each piece is a **token**.
#
# ## What the model sees
#
# A model does not read letters. A **tokenizer** cuts text into pieces from a fixed list, and each piece has a number.
# The space belongs to the word after it. Frequent pieces stay whole, others fall apart.

# %%
text = "Roses are red, violets are"
ids = llm.tokenizer.encode(text)
for token in ids:
    print(f"{token:>6}  {llm.tokenizer.decode([token])!r}")
print(f"{len(text)} characters became {len(ids)} tokens. The list holds {llm.tokenizer.vocab_size:,} pieces.\n")
for token in llm.tokenizer.encode(" antidisestablishmentarianism"):
    print(f"{token:>6}  {llm.tokenizer.decode([token])!r}")

# %% [markdown]
# And this is all a language model does: numbers in, and out comes a probability for *every* piece in the list to be the
# next one. The engine picks one, appends it, and asks again. One round is a **step**.
#
# Step through it. Dark grey is the prompt, blue what was made before, orange what this step picked; the pale bars were not
# picked. With temperature 0 it is always the likeliest piece. Would you have picked it?

# %%
import math

import matplotlib.pyplot as plt

from minillm.course.widgets import slider_plot, stepper

BLUE, ORANGE, GREY, PALE = "#0072B2", "#D55E00", "#8A8A8A", "#D6D6D6"
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
plt.rcParams.update({"figure.constrained_layout.use": True})

# logprobs=4: also report the four likeliest pieces. ignore_eos: go on even where the model would say "the end".
params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=4, ignore_eos=True)
out = llm.generate(ids, params)[0].outputs[0]
pieces = [llm.tokenizer.decode([t]) for t in [*ids, *out.token_ids]]


def draw_step(ax, i):  # from here on only drawing: skip it if you like
    x = 0.0
    for k, piece in enumerate(pieces[: len(ids) + i + 1]):
        shown = piece.replace("\n", "↵").replace(" ", "␣")
        color = GREY if k < len(ids) else BLUE if k < len(ids) + i else ORANGE
        box = {"facecolor": color, "edgecolor": "white", "boxstyle": "round,pad=0.3"}
        ax.text(x, 4.5, shown, va="center", color="white", family="monospace", bbox=box)
        x += 1.05 * len(shown) + 1.0
    best = sorted(out.logprobs[i].items(), key=lambda pair: -pair[1])[:4]
    for row, (token, logprob) in enumerate(best):
        p, name = math.exp(logprob), repr(llm.tokenizer.decode([token]))
        color = ORANGE if token == out.token_ids[i] else PALE
        ax.barh(3 - row, 40 * p, left=18, height=0.7, color=color)
        ax.text(17.3, 3 - row, name, ha="right", va="center", family="monospace")
        ax.text(18.6 + 40 * p, 3 - row, f"{p:.0%}", va="center")
    ax.set(xlim=(-1, 76), ylim=(-0.7, 5.3))
    ax.set_axis_off()


captions = [f"{len(ids) + i} tokens known, one new" for i in range(8)]
stepper(draw_step, 8, captions, size=(7.5, 2.4), still=[0, 3, 7])

# %% [markdown]
# Two things follow, and the whole course lives on them. The prompt is known at the start, so it goes through the model *in
# one step*. The output is not: token 8 cannot begin before token 7 is there. So a request has **two different waits**.
#
# ## Two waits, two numbers
#
# Here are the two services of the beginning, made up by hand. Each | is a token.

# %%
import itertools

from minillm import metrics

arrival = 0.0
trickle = [0.1 + 0.20 * k for k in range(9)]  # seconds
burst = [1.3 + 0.05 * k for k in range(9)]


def draw_request(ax, row, arrival, times, color=BLUE, half=0.3):
    ax.hlines(row, arrival, times[0], color=GREY, lw=3)
    ax.vlines(times, row - half, row + half, color=color, lw=2)


figure, ax = plt.subplots(figsize=(8, 2.3))
for row, (name, times) in enumerate({"burst": burst, "trickle": trickle}.items()):
    draw_request(ax, row, arrival, times)
    ax.text(-0.03, row, name, ha="right", va="center")
    ax.text(1.74, row, f"{len(times)} tokens\n{len(times) / times[-1]:.1f} tokens/s", va="center", fontsize=9)
ax.text(0.65, -0.1, "an empty screen", ha="center", va="top", fontsize=9)
ax.set(yticks=[], ylim=(-0.7, 1.6), xlim=(-0.02, 1.95), xlabel="seconds since the request arrived")
ax.spines["left"].set_visible(False)
plt.show()

# %% [markdown]
# Same tokens, same finish, same tokens per second. Yet they feel like different products. Two numbers tell them apart:
#
# - **TTFT**, *time to first token*: from the arrival to the first token. The empty screen.
# - **TPOT**, *time per output token*: the mean gap between tokens after that. The flow.

# %%
for name, times in {"trickle": trickle, "burst": burst}.items():
    gaps = [b - a for a, b in itertools.pairwise(times)]
    print(f"{name:<8} TTFT {times[0] - arrival:.2f} s   ", end="")
    print(f"TPOT = mean of {len(gaps)} gaps = {sum(gaps) / len(gaps):.2f} s")

# %% [markdown]
# The engine keeps exactly what this needs: when a request arrived, and when each token came out. This is its own code,
# without the lines that you will write yourself. `None` means: not known yet. (`e2e`, *end to end*, is the whole wait, from
# the arrival to the last token.)

# %%
from minillm.course import check, compare, explain, hint, plug_in, predict, progress, quiz, show_source

show_source(metrics.RequestMetrics)
show_source(metrics.tpot)

# %% [markdown]
# ## Your machine's numbers
#
# Before you measure: how long does *your* machine take from one token to the next? Write your guess in place of `None`.

# %%
predict("00.tpot", None, "ms", "How many milliseconds from one token to the next?")

# %%
import statistics

from minillm import roofline  # measures what this machine can do; stage 01 explains the name

params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)  # always 32 tokens
runs = [llm.generate("Once upon a time, a small computer", params)[0].metrics for _ in range(3)]
one = sorted(runs, key=lambda m: m.tpot)[1]  # the median of three runs
print(f"TTFT {1000 * one.ttft:.0f} ms, TPOT {1000 * one.tpot:.1f} ms: {1 / one.tpot:.1f} tokens/s")

machine = roofline.measure_machine(llm.model.embed.weight.device.type)
ceiling, read = machine.bandwidth / 1e9, llm.stats()["gb_per_second"]
print(f"memory read: {read:.1f} GB/s, {read / ceiling:.0%} of the {ceiling:.1f} GB/s possible here")
compare("00.tpot", 1000 * one.tpot, "ms")

# %%
times = [t - one.arrival for t in one.token_times]
figure, ax = plt.subplots(figsize=(8, 1.9))
draw_request(ax, 0, 0.0, times)
ax.annotate("", (0, 0.55), (times[0], 0.55), arrowprops={"arrowstyle": "<->", "color": ORANGE})
ax.text(0, 0.68, f"TTFT {1000 * one.ttft:.0f} ms", color=ORANGE)
ax.annotate("", (times[0], -0.55), (times[-1], -0.55), arrowprops={"arrowstyle": "<->", "color": BLUE})
label = f"{len(times) - 1} gaps, {1000 * one.tpot:.1f} ms each on average: TPOT"
ax.text((times[0] + times[-1]) / 2, -0.7, label, color=BLUE, ha="center", va="top")
ax.set(yticks=[], ylim=(-1.2, 1.1), xlim=(0, times[-1] * 1.02), xlabel="seconds since the request arrived")
ax.spines["left"].set_visible(False)
plt.show()

# %% [markdown]
# The gaps are not all equal: other programs want your processor too. That is why this was the median of three runs, and
# why the first run after loading (it warms things up) is never the one to report.
#
# Keep the line about memory in mind. For *every* token, the machine reads all **weights** (the model's numbers, 135 million
# of them) from memory. Most of this course is about that. Why is the share not 100 %? Stage 01 answers that.

# %% [markdown]
# ## Eight users
#
# Now eight people ask at the same moment. The engine has `max_num_seqs` seats. With one seat they are served in turn. With
# eight, all go through the model in the same step.
#
# The third number belongs to the machine. **Throughput** is all output tokens of all users, divided by the seconds from the
# first arrival to the last finish. How many times more is it with eight seats? 1 means no gain, 8 means that the other seven
# are free.

# %%
predict("00.together", None, "times", "How many times more tokens per second with eight seats?")

# %%
heroes = ["snail", "robot", "pirate", "whale", "wizard", "teapot", "dragon", "cloud"]
prompts = [f"A short story about a {hero}:" for hero in heroes]
params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


def serve(seats):
    """Eight users at once on an engine with so many seats: each one's metrics, GB/s read."""
    options = {"max_num_seqs": seats, "num_kv_blocks": 128}  # blocks: room for what is kept per token (stages 02, 04)
    engine = LLM.from_parts(llm.config, llm.model, llm.tokenizer, **options)  # the same model
    users = [output.metrics for output in engine.generate(prompts, params, progress=False)]
    return users, engine.stats()["gb_per_second"]


served = {seats: serve(seats) for seats in (1, 4, 8)}  # the longest wait of this lesson: half a minute or so

# %%
figure, axes = plt.subplots(2, 1, figsize=(8, 5), sharex=True)
for ax, seats in zip(axes, (1, 8), strict=True):
    users, _ = served[seats]
    start = min(m.arrival for m in users)
    for row, m in enumerate(users):
        times = [t - start for t in m.token_times]
        draw_request(ax, -row, m.arrival - start, times, BLUE if seats == 1 else ORANGE)
    ax.set(yticks=range(0, -8, -1), yticklabels=heroes)
    done = max(m.finished for m in users) - start
    ax.set_title(f"{seats} seat{'s' * (seats > 1)}: done after {done:.1f} s", loc="left")
    ax.spines["left"].set_visible(False)
    ax.tick_params(left=False)
axes[1].set_xlabel("seconds since all eight arrived (grey line: waiting, each | a token)")
plt.show()

# %% [markdown]
# Read the two pictures as a user would. With one seat, the snail (of all heroes) is served at once, and the cloud waits for
# everybody else. With eight seats, all start together. Now look at the *gaps*. And then at when everything is done.
#
# Here are the numbers, from one run each: run the two cells again and see how much they move.

# %%
rows = []
print("seats  median TTFT  median TPOT  one user gets  the machine makes  memory read")
for seats, (users, read) in served.items():
    ttft = statistics.median(m.ttft for m in users)
    tpot = statistics.median(m.tpot for m in users)
    spans = [(m.arrival, m.finished) for m in users]
    total = metrics.throughput([len(m.token_times) for m in users], spans)
    rows.append((seats, 1 / tpot, total))
    print(f"{seats:>5}{ttft:>11.2f} s{1000 * tpot:>10.0f} ms{1 / tpot:>10.1f} tok/s", end="")
    print(f"{total:>14.1f} tok/s{read:>8.1f} GB/s ({read / ceiling:.0%})")
alone, together = rows[0][2], rows[-1][2]
compare("00.together", together / alone, "times")

# %% [markdown]
# **This is the surprise on which every serving engine is built.** Eight users on one machine do not each get an eighth of
# it. Each one's text flows more slowly, and still far more tokens come out in the same time. (With one seat the machine makes
# a little less than its one user gets: its seconds include the waits for first tokens.)
#
# How? Look at the last column: the bytes per second did not rise, more tokens came out. One reading of the weights now serves
# eight users. The step did get longer, because eight users are also more arithmetic; that is why the gain is not 8.
#
# So there is no single speed. There is a curve, and running an engine means choosing a point on it.

# %%
figure, ax = plt.subplots(figsize=(6, 3.4))
ax.plot([user for _, user, _ in rows], [total for _, _, total in rows], color=GREY, lw=1, zorder=1)
for seats, user, total in rows:
    ax.scatter(user, total, s=45, color=BLUE, zorder=2)
    ax.annotate(f"{seats} seat{'s' * (seats > 1)}", (user, total), (8, 4), textcoords="offset points")
ax.set(xlabel="what one user gets: 1 / TPOT (tokens/s)", ylabel="what the machine makes\n(tokens/s)")
ax.set_xlim(0, 1.25 * max(user for _, user, _ in rows))
ax.set_ylim(0, 1.2 * max(total for _, _, total in rows))
plt.show()

# %% [markdown]
# TPOT alone says: one seat is best. Throughput alone says: as many seats as you can get. TTFT says how long the queue is.
# Report all three. Where the curve is steep, the machine gains much and each user loses little: add seats. Where it is flat,
# the users pay and hardly anything is gained.
#
# ## The mean hides somebody
#
# One number for eight users is a summary. Which one? The *p*-th **percentile** (p50, p95) is the value that *p* percent of
# users stay below (between two values we interpolate).

# %%
print("seconds to the first token                                     to the last")
print("seats     mean      p50      p95    snail    cloud       snail    cloud")
for seats in (1, 8):
    users, _ = served[seats]
    waits, ends = [m.ttft for m in users], [m.e2e for m in users]
    p50, p95 = metrics.percentile(waits, 50), metrics.percentile(waits, 95)
    print(f"{seats:>5}{statistics.fmean(waits):>9.2f}{p50:>9.2f}{p95:>9.2f}{waits[0]:>9.2f}{waits[-1]:>9.2f}", end="")
    print(f"{ends[0]:>12.2f}{ends[-1]:>9.2f}")

# %% [markdown]
# With one seat, mean and p50 are nearly the same, and both hide the cloud, who waited about twice as long. From one seat to
# eight, both fall, and hide the snail: her first word comes later, and she is done later. Seven gained, one paid.
#
# So services promise percentiles: "95 % of users see a first word within a second". The unlucky ones are the ones who leave.
#
# ## What does a million tokens cost?
#
# Prices are per million tokens. What would yours be? The rule: the price of one hour buys the tokens of one hour.

# %%
price_per_hour = 0.10  # in your money: rent, or power and wear
question = f"{price_per_hour:.2f} an hour, one user at a time, {alone:.1f} tokens/s: what does a million tokens cost?"
predict("00.cost", None, "per million tokens", question)

# %%
for label, rate in (("one at a time", alone), ("eight together", together)):
    cost = metrics.cost_per_million_tokens(price_per_hour, rate)
    print(f"{label:<15} {rate:6.1f} tokens/s, {rate * 3600:>9,.0f} an hour, {cost:6.2f} per million")
compare("00.cost", metrics.cost_per_million_tokens(price_per_hour, alone), "per million tokens")

# %% [markdown]
# Same machine, same model, same bill per hour. Only the schedule changed.
#
# One catch is left: at night nobody asks, and the bill goes on. Move the second slider.


# %%
def draw_cost(ax, price_per_hour, busy_percent):
    rates = [10 ** (k / 20) for k in range(81)]
    full = [metrics.cost_per_million_tokens(price_per_hour, rate) for rate in rates]
    ax.plot(rates, [cost * 100 / busy_percent for cost in full], color=BLUE, lw=2)
    if busy_percent < 100:
        ax.plot(rates, full, color=GREY, lw=1, ls="--")
        ax.text(rates[50], full[55], "busy all day", color="#666666", ha="right", va="top")
    for label, rate in (("one at a time", alone), ("eight together", together)):
        cost = metrics.cost_per_million_tokens(price_per_hour, rate * busy_percent / 100)
        ax.scatter(rate, cost, s=45, color=ORANGE, zorder=3)
        ax.annotate(f"{label}: {cost:.2f}", (rate, cost), (7, 17 if rate == alone else 4), textcoords="offset points")
    ax.set(xscale="log", yscale="log", xlim=(1, 10_000), ylim=(1e-3, top))
    ax.set_xticks([1, 10, 100, 1000, 10_000], ["1", "10", "100", "1,000", "10,000"])
    ax.set_yticks([10.0**k for k in range(-3, round(math.log10(top)) + 1)])
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.set(xlabel="tokens/s while busy", ylabel="cost of a million tokens")


prices = sorted({0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, price_per_hour})
top = 10 ** max(3, math.ceil(math.log10(metrics.cost_per_million_tokens(prices[-1], alone / 10))))
now = {"price_per_hour": price_per_hour, "busy_percent": 100}
slider_plot(
    draw_cost,
    start=now,
    stills=[now, now | {"busy_percent": 10}],
    price_per_hour=prices,
    busy_percent=[10, 25, 50, 75, 100],
)

# %% [markdown]
# Busy a tenth of the time makes each token ten times as dear. Both axes are logarithmic: ten times the rate is a tenth of
# the cost. The rest of this course moves you to the right on this picture.

# %% [markdown]
# ## How the checks work
#
# After each lesson you write parts of the engine yourself. A check then runs your answer on many cases. When it fails, it
# shows one case, and if your mistake is one that people often make, it *names* it. Let us be wrong on purpose.
# Exercise 00.0 asks: 12 tokens come out one after another; how many gaps lie between them?

# %% tags=["raises-exception"]
gaps = 12
check("00.0", gaps)

# %% [markdown]
# Each exercise has three hints, from a nudge to nearly the answer. Hints are counted for you, not against you.

# %%
hint("00.0")

# %%
gaps = 11
check("00.0", gaps)

# %% [markdown]
# `plug_in` is the pay-off: it takes your answer to the real engine. Here you can count for yourself; from 00.1 on the engine
# runs *your code*. `explain` says why an answer is right, and what else would be. `progress` shows where you are. (In a
# terminal: `minillm check 00`, `minillm hint 00.1` and so on.)

# %%
plug_in("00.0", gaps)
explain("00.0")
progress("00")

# %% [markdown]
# ## What beginners get wrong
#
# - **Dividing the whole time by the tokens and calling it TPOT.** Then a slow start looks like slow flow. It has happened
#   in published tools: one divided by *n* instead of *n* - 1 (gpustack/gpustack#3427), one mixed the first wait into the
#   gaps (vllm-project/vllm#7242).
# - **Counting pieces of the stream instead of tokens.** A server may send several tokens in one piece
#   (vllm-project/vllm#27485).
# - **Adding up times that overlap.** Eight users who waited 2 s *together* used 2 s, not 16.
# - **Starting the clock late.** A wait that is not measured still annoys the user. One engine's TTFT left out seconds of
#   preparation (Avarok-Cybersecurity/atlas#1042).
# - **Paying for the peak.** Cost follows the rate over the whole day, nights included.
#
# ## In other engines this is called
#
# | here | vLLM | SGLang | llama.cpp |
# |---|---|---|---|
# | TTFT | `vllm:time_to_first_token_seconds` | `sglang:time_to_first_token_seconds` | `prompt eval time` (without the queue) |
# | TPOT | TPOT in `vllm bench serve` | TPOT in `bench_serving` | `eval time`, ms per token |
# | one gap | ITL, `vllm:inter_token_latency_seconds` | ITL, `sglang:inter_token_latency_seconds` | |
# | throughput | output token throughput | `sglang:gen_throughput` | `llama-batched-bench` |
# | `max_num_seqs` | `--max-num-seqs` | `--max-running-requests` | `--parallel` |
#
# Names travel, definitions do not. Before you compare two numbers, ask where each clock starts.
#
# ## Three quick questions

# %%
quiz(
    "A service goes from 1 seat to 8. Users say: 'It starts at once now, but the words come slower.' What moved?",
    ["TTFT fell, TPOT rose", "TTFT rose, TPOT fell", "Both fell", "Throughput fell"],
    0,
    [
        "No queue, so the first word comes sooner; steps shared by eight take a little longer.",
        "The other way round: 'starts at once' is a short TTFT.",
        "'Words come slower' is a longer TPOT.",
        "Users cannot see throughput. It most likely rose: each step now makes up to eight tokens.",
    ],
)

# %%
quiz(
    "Two requests ran during the same 10 seconds. Each put out 100 tokens. What is the throughput?",
    ["5 tokens/s", "10 tokens/s", "20 tokens/s"],
    2,
    [
        "That adds both durations to 20 s. But the clock on the wall saw only 10 s, and 200 tokens.",
        "That is what each user got. The system made 200 tokens in 10 s.",
        "200 tokens in 10 s of wall time.",
    ],
)

# %%
quiz(
    "Your machine is busy a quarter of the time. Compared with busy all day, a million tokens cost ...",
    ["the same: the speed while busy did not change", "four times as much", "a quarter"],
    1,
    [
        "The speed did not, but you pay for every hour and only a quarter of them make tokens.",
        "The bill is the same and there are a quarter of the tokens to share it.",
        "You make fewer tokens for the same money, so each is dearer, not cheaper.",
    ],
)

# %% [markdown]
# ## Now you can
#
# ... answer the question from the beginning. "So many tokens per second" says nothing until you know: for one user or for
# all? After how long a wait? For which share of users? At what price?
#
# You have measured all of that on your own machine, before optimising anything. These are your baselines. Every later
# stage changes one thing and measures again.
#
# **Next:** write the four numbers yourself in [the exercises](../exercises/00_start_here.ipynb). Then stage 01 explains the
# surprise: why one token needs all that memory, and how to predict your TPOT before you measure it.
