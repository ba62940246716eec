# %% [markdown]
# # 04 Paged blocks
#
# **A cache has room for 16,384 tokens. The requests that wait need about 500 each. How many can run at once?** Thirty, says the
# division. Eight, if it is done as most engines did it before 2023. The difference is not in the model. It is in who owns
# which slot, and it was solved with an idea that operating systems have used since the sixties.
#
# **Afterwards you can** measure how a cache wastes memory, hand it out in blocks, share blocks between samples without
# anybody noticing, and read attention through a block table.
#
# *35 minutes. You need stage 02 (slots, `write_kv`) and, for one section, the online softmax of stage 03. All on the CPU.*

# %%
import random
import time
from collections import OrderedDict

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Rectangle

from minillm import LLM, SamplingParams, attention, kv, roofline
from minillm.blocks import KVPool
from minillm.course import compare, predict, quiz, show_source
from minillm.course.widgets import slider_plot, stepper

BLUE, SKY, ORANGE, GREEN, PINK, GREY = "#0072B2", "#9BC9E8", "#D55E00", "#009E73", "#CC79A7", "#D9D9D9"

# Prefix caching (stage 05) is off, and attention is the plain one that runs everywhere; the last section compares.
OPTIONS = {"enable_prefix_caching": False, "attention": "sdpa"}
llm = LLM("smollm2-135m", num_kv_blocks=128, **OPTIONS)


def engine_on_same_model(**options):
    """Another engine around the model that is loaded already."""
    return LLM.from_parts(llm.config, llm.model, llm.tokenizer, **OPTIONS, **options)


def greedy(count):
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


# %% [markdown]
# ## Sixteen slots by hand
#
# The obvious cache gives each request one contiguous piece. Nobody knows how long an answer gets, so the piece must hold
# the longest that is allowed. Say 8 tokens, and a memory of 16. A letter is a slot with a token in it, a dot is an empty slot that
# somebody owns, a line (_) is free.

# %%
print("A and B arrive, 3 and 2 tokens:   |" + "AAA.....BB......" + "|")
print("C, one token, wants to run:       |" + "AAA.....BB......" + "|  no room: 5 tokens are in, 11 slots are empty")
print("A ends after 4 tokens:            |" + "AAAA....BB......" + "|  4 of its slots were never used at all")
print("the same in blocks of 4:          |" + "AAA.BB..C...____" + "|  C runs at once, and 4 slots are still nobody's")
print()
print("pieces of other sizes; D needs 8: |" + "______EEEEE_____" + "|  no room: 11 slots are free, but not 8 in a row")

# %% [markdown]
# These are three kinds of waste (Kwon et al. 2023, arXiv:2309.06180, section 3.1):
#
# - **reserved**: will be filled later, but nobody else may use it until then;
# - **never used**: the answer ended earlier (*internal* fragmentation);
# - **free, but useless**: no gap is large enough for the next request (*external* fragmentation).
#
# ### Predict first
# Put a number in place of `None`. The measurement follows.

# %%
predict(
    "04.longest",
    None,
    "%",
    "Every request reserves the longest text allowed, 2,048 tokens; the typical one needs 500. What share of the memory holds tokens, on average?",
)
predict(
    "04.known",
    None,
    "%",
    "Now an oracle names each request's final length in advance, and exactly that is reserved. What share holds tokens?",
)
predict(
    "04.walk",
    None,
    "times",
    "Attention can copy the scattered blocks of 16 into one piece and read the copy, or read them in place, in a Python loop. Time of the loop / time with the copy?",
)

# %% [markdown]
# ## One trace, four memories
#
# 300 requests with a fixed seed. Many are short and a few are long, as with real users. (The lengths are invented.)

# %%
SLOTS, LONGEST = 16_384, 2_048


def make_trace(count, seed=4):
    """(prompt tokens, output tokens) of each request."""
    rng = random.Random(seed)

    def length(middle):
        return min(LONGEST // 2, 1 + int(middle * 2 ** rng.gauss(0, 1.2)))

    return [(length(120), length(240)) for _ in range(count)]


trace = make_trace(300)
totals = sorted(prompt + output for prompt, output in trace)
mean = sum(totals) / len(totals)
print("the first five (prompt, output):", trace[:5])
print(f"tokens in all, per request: median {totals[len(totals) // 2]}, mean {mean:.0f}, longest {totals[-1]}")
print(f"{SLOTS} slots / {mean:.0f} = {SLOTS / mean:.0f} requests, if nothing were wasted on complete requests")

# %% [markdown]
# A contiguous memory: it takes the first gap that is large enough. With sizes that are powers of two, and each piece at a multiple of
# its size (`aligned=True`), it is the *buddy* allocator of many operating systems.


# %%
class Contiguous:
    def __init__(self, size_of, aligned=False):
        self.size_of, self.aligned, self.taken = size_of, aligned, []

    def admit(self, prompt, output):
        size, start = self.size_of(prompt, output), 0
        for a, b in [*self.taken, (SLOTS, SLOTS)]:
            if start + size <= a:
                self.taken = sorted([*self.taken, (start, start + size)])
                return start, start + size
            start = -(-b // size) * size if self.aligned else b
        return None

    def grow(self, place, tokens):
        return True  # all that it may ever need is reserved

    def size(self, place):
        return place[1] - place[0]

    def free(self, place):
        self.taken.remove(place)


# %% [markdown]
# And the other way: cut the memory into **blocks** of 16 slots, and take a block only when a token needs it. The blocks of a request may
# lie anywhere; a list, the **block table**, says where. That is *paging*. The engine's `KVPool` does it. (`hits` are blocks that are
# shared with earlier prompts: stage 05. Here the list is empty.)

# %%
show_source(KVPool.admit)
pool = KVPool(num_blocks=8, block_size=4)
other = pool.admit([], 3)  # somebody else was here before
table = pool.admit([], 6)
print(f"a prompt of 6 tokens: {kv.blocks_needed(6, 4)} blocks, table {table}; positions 0 to 5 are in", end=" ")
print(f"slots {kv.slots_for(table, 0, 6, 4)}")
for position in (6, 8):
    pool.extend(table, position, position + 1)
    print(f"a token at position {position}: table {table}, slot {kv.slots_for(table, position, position + 1, 4)[0]}")

# %% [markdown]
# Position 6 fits into the second block. Position 8 needs a third one. `blocks_needed`, `slots_for` and `extend` are your exercises.
#
# Now the same simulation for every kind of memory. `serve` does in each step: admit while there is room, one token for each request, free
# those that are done. A paged memory can run out in the middle; then the newest request is thrown out and computed again later. (Skip the
# code if you like; its table is what counts.)


# %%
class Paged:
    def __init__(self, block_size=16, spare=40):
        self.pool = KVPool(SLOTS // block_size, block_size, enable_prefix_caching=False)
        self.spare = spare  # blocks that newcomers leave free, so that those who run can grow

    def admit(self, prompt, output):
        room = self.pool.num_free - self.spare >= kv.blocks_needed(prompt, self.pool.block_size)
        return self.pool.admit([], prompt) if room else None

    def grow(self, table, tokens):
        return self.pool.extend(table, tokens, tokens + 1) is not None

    def size(self, table):
        return len(table) * self.pool.block_size

    def free(self, table):
        self.pool.release(table)


def serve(trace, memory):
    """Averages over the steps: slots with tokens, for later, never used; requests. Then steps, tokens computed again."""
    queue, running, rows, again = list(trace), [], [], 0
    while queue:
        while queue and (place := memory.admit(*queue[0])) is not None:
            prompt, output = queue.pop(0)
            running.append([place, prompt, prompt + output])
        held = [(now, memory.size(place), final) for place, now, final in running]
        later = sum(min(size, final) - now for now, size, final in held)
        never = sum(max(0, size - final) for _, size, final in held)
        rows.append((sum(now for now, _, _ in held), later, never, len(running)))
        for request in list(running):
            while request in running and not memory.grow(*request[:2]):
                place, now, final = running.pop()
                memory.free(place)
                again += now
                queue.insert(0, (now, final - now))
            if request in running:
                request[1] += 1
                if request[1] == request[2]:
                    memory.free(request[0])
                    running.remove(request)
    return np.mean(rows, axis=0), len(rows), again


memories = {
    "longest": Contiguous(lambda prompt, output: LONGEST),
    "known length, buddy": Contiguous(lambda prompt, output: 1 << (prompt + output - 1).bit_length(), aligned=True),
    "known length, first gap": Contiguous(lambda prompt, output: prompt + output),
    "blocks of 16": Paged(16),
}
results = {name: serve(trace, memory) for name, memory in memories.items()}
print(f"{'reserve':<25}{'tokens':>8}{'later':>8}{'never':>8}{'useless':>9}{'at once':>10}{'steps':>8}")
for name, ((now, later, never, at_once), steps, _) in results.items():
    parts = [x / SLOTS for x in (now, later, never, SLOTS - now - later - never)]
    print(f"{name:<25}" + "".join(f"{p:>8.1%}" for p in parts) + f"{at_once:>11.1f}{steps:>8}")
print(
    f"with blocks, {results['blocks of 16'][2] / sum(totals):.0%} of the tokens were computed twice: thrown out, then resumed"
)
compare("04.longest", round(100 * results["longest"][0][0] / SLOTS, 1), "%")
compare("04.known", round(100 * results["known length, first gap"][0][0] / SLOTS, 1), "%")

# %% [markdown]
# **The oracle helps less than one would hope.** Even with the future known and nothing wasted at the end, about half the memory is empty: a
# request that has just begun already occupies its last slot, and the pieces leave gaps. Better guesses do not help. Not *reserving* does.
#
# With blocks, more requests run than could ever be finished together. That is a bet: most end before the memory is full. When it is
# lost, work is done again (stage 07). The steps say that it is a good bet, and as a step reads the weights once for all (stage 01), more
# requests in a step are nearly free. (The few free slots in the last row are not useless: newcomers leave them for those who run.)
#
# Beside it the figure that made vLLM known. Orca was the best engine before it; its two bars differ in what it knows of the lengths.

# %%
PUBLISHED = {  # tokens, reserved, never used, free and others: arXiv:2309.06180, figure 2, in percent
    "Orca (Max)\nlongest": (20.4, 13.3, 57.3, 8.9),
    "Orca (Oracle)\nknown length, buddy": (38.2, 25.2, 0, 36.6),
    "vLLM\nblocks of 16": (96.3, 0, 0, 3.7),
}
LABELS = {BLUE: "tokens", SKY: "reserved for later", ORANGE: "never used", GREY: "free, but useless"}
measured = {
    name.replace(", ", ",\n"): [100 * x / SLOTS for x in (now, later, never, SLOTS - now - later - never)]
    for name, ((now, later, never, _), _, _) in results.items()
}
fig, axes = plt.subplots(
    1, 2, figsize=(9, 3.6), layout="constrained", sharey=True, gridspec_kw={"width_ratios": [4, 3]}
)
for ax, bars, title in zip(
    axes, (measured, PUBLISHED), ("this trace, measured above", "published (figure 2)"), strict=True
):
    for x, parts in enumerate(bars.values()):
        bottom = 0.0
        for part, color in zip(parts, LABELS, strict=True):
            ax.bar(x, part, bottom=bottom, color=color, width=0.7)
            if part > 5:
                text = "white" if color in (BLUE, ORANGE) else "black"
                ax.text(x, bottom + part / 2, f"{part:.1f}", ha="center", va="center", color=text)
            bottom += part
    ax.set_xticks(range(len(bars)), bars, fontsize=8)
    ax.set_title(title, loc="left")
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("share of the KV memory (%)")
handles = [Rectangle((0, 0), 1, 1, color=color) for color in LABELS]
fig.legend(handles, LABELS.values(), loc="outside lower center", ncols=4, frameon=False)
plt.show()

# %% [markdown]
# Different requests, another model, and yet the same picture. (How *close* the numbers are is luck. Orca's allocator was a buddy too, and
# its rounding is in their grey part, in our orange one.) 38.2 % became 96.3 %, and with a 13B model 2.2 times as many requests ran at
# once (section 6.2).
#
# ## How large is a block?
#
# Only the last block of a request can be partly empty. On average half of it is. So smaller is better? Move the sliders and watch both
# bars.


# %%
def draw_blocks(ax, block_size, tokens):
    """Empty slots, averaged over texts about so long, and the number of places that must be looked up."""
    lengths = range(max(1, tokens // 2), tokens * 3 // 2)
    held = [kv.blocks_needed(n, block_size) * block_size for n in lengths]
    empty = 100 * (1 - sum(lengths) / sum(held))
    entries = kv.blocks_needed(tokens, block_size)
    pieces = 100 * entries / tokens
    ax.barh([1, 0], [empty, pieces], color=[ORANGE, BLUE], height=0.55)
    texts = f"{empty:.1f} % of its memory is empty", f"{entries:,} piece{'s' * (entries > 1)} for {tokens:,} tokens"
    for y, value, text in zip((1, 0), (empty, pieces), texts, strict=True):
        if value > 60:
            ax.text(value - 2, y, text, va="center", ha="right", color="white")
        else:
            ax.text(value + 2, y, text, va="center")
    ax.set_yticks([1, 0], ["waste (%)", "pieces per\n100 tokens"])
    ax.set(xlim=(0, 100), ylim=(-0.5, 1.5))
    ax.spines[["top", "right"]].set_visible(False)


slider_plot(
    draw_blocks,
    block_size=[1, 4, 16, 64, 256],
    tokens=[50, 200, 1000, 8000],
    start={"block_size": 16, "tokens": 200},
    stills=[{"block_size": b, "tokens": t} for b, t in ((1, 200), (16, 200), (256, 200), (256, 8000))],
    size=(5.2, 2.0),
)

# %% [markdown]
# 16 is vLLM's default and ours. With long texts even large blocks waste little; the short ones suffer. And only whole blocks can be
# shared by strangers (stage 05), which is another reason for small ones.
#
# ## The real model, while requests come and go
#
# Seven prompts at different times, on a pool of 20 blocks of 8. Each row of the picture is one block of memory, each colour one request.

# %%
PROMPTS = [
    "Once upon a time there was",
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n):",
    "To bake bread you need flour, water, salt and",
    "Dear customer, we are sorry to hear that your parcel",
    "The three laws of robotics say",
    "In the year 2200",
]
COUNTS = [40, 12, 60, 20, 30, 12, 34]  # tokens to generate
busy = engine_on_same_model(num_kv_blocks=20, block_size=8)
maps, tables, inside = [], {}, []
names = {}
while len(names) < len(PROMPTS) or busy.scheduler.running or busy.scheduler.waiting:
    if len(maps) % 8 == 0 and len(names) < len(PROMPTS):  # every 8 steps somebody comes
        i = len(names)
        names[busy.add_request(PROMPTS[i], greedy(COUNTS[i]))] = i
    busy.step()
    owner = np.full(20, -1)
    for request in busy.scheduler.running:
        owner[request.block_table] = names[request.id]
        tables[names[request.id]] = list(request.block_table)
    maps.append(owner)
    inside.append(sum(request.num_computed for request in busy.scheduler.running))

used = [int((owner >= 0).sum()) * 8 for owner in maps]
print("the longest answer's table at its end:", tables[COUNTS.index(max(COUNTS))])
print(f"most blocks in use: {max(used) // 8} of 20, at the end: {20 - busy.pool.num_free}")
print(f"of the slots in use, {sum(inside) / sum(used):.0%} held tokens")

# %%
colors = [BLUE, ORANGE, GREEN, PINK, "#E69F00", "#56B4E9", "#999933"]
fig, axes = plt.subplots(
    2, 1, figsize=(8, 5), layout="constrained", sharex=True, gridspec_kw={"height_ratios": [3, 1.2]}
)
image = np.ones((20, len(maps), 3))
for step, owner in enumerate(maps):
    for block, who in enumerate(owner):
        if who >= 0:
            image[block, step] = [int(colors[who][k : k + 2], 16) / 255 for k in (1, 3, 5)]
axes[0].imshow(image, aspect="auto", interpolation="none", extent=(0, len(maps), 19.5, -0.5))
for who in range(len(PROMPTS)):
    step, block = next((s, b) for s, owner in enumerate(maps) for b in range(20) if owner[b] == who)
    axes[0].text(step + 0.5, block, "ABCDEFG"[who], color="white", va="center", weight="bold")
axes[0].set_yticks(range(0, 20, 5))
axes[0].set(ylabel="block of the cache", title="who owns which block (letters: where a request begins)")
axes[1].fill_between(range(len(maps)), used, step="post", color=GREY)
axes[1].fill_between(range(len(maps)), inside, step="post", color=BLUE)
axes[1].set(xlabel="step of the engine", ylabel="slots", ylim=(0, max(used) * 1.5))
axes[1].text(len(maps) * 0.98, max(used) * 1.3, "grey: in use, blue: with a token in it", ha="right", va="center")
for ax in axes:
    ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# No request lies in one piece, and none needs to. When one ends, its blocks go to whoever comes next: no gap can be too small,
# since all pieces are equal.
#
# Does the model notice? Scramble the free list, so that every table is a jumble, and compare the text.

# %%
scrambled = engine_on_same_model(num_kv_blocks=128)
order = list(scrambled.pool.free)
random.Random(1).shuffle(order)
scrambled.pool.free = OrderedDict.fromkeys(order)
key = scrambled.add_request(PROMPTS[2], greedy(40))
while not scrambled.requests[key][0].finish_reason:
    where = list(scrambled.requests[key][0].block_table)
    scrambled.step()
plain = llm.generate(PROMPTS[2], greedy(40))[0].outputs[0]
print("its blocks:", where)
print("same tokens as with blocks in order:", scrambled.requests[key][0].output == plain.token_ids)

# %% [markdown]
# ## Sharing: copy on write
#
# You want two samples of one prompt (`n=2`). The prompt's keys and values are the same for both, so both tables can name the *same
# blocks*. Each block counts its users. But both want to write their next token into the same half-full block. Step through it; the
# numbers come from a real pool. (Skip the drawing code.)


# %%
WORDS = ["The", "old", "man", "looked", "at", "the"]


def fork_story():
    """(caption, tables, references, words in the slots) for each step; numbers by KVPool, words by us."""
    pool, words, story = KVPool(6, 4, enable_prefix_caching=False), {}, []
    pool.free = OrderedDict.fromkeys([4, 1, 3, 0, 2, 5])

    def tell(caption, hot=()):
        refs = [block.refs for block in pool.blocks]
        story.append((caption, {k: list(v) for k, v in tables.items()}, refs, dict(words), set(hot)))

    def write(name, position, word):
        copies = pool.extend(tables[name], position, position + 1)
        for source, target in copies:
            words.update({(target, i): words[source, i] for i in range(4) if (source, i) in words})
            tell(f"{name} wants to write: block {source} is shared, so it is copied to {target}", [target])
        slot = kv.slots_for(tables[name], position, position + 1, 4)[0]
        words[slot // 4, slot % 4] = word
        tell(
            f"{name} writes “{word}”" + ("" if copies or position != 6 else ": alone on its block now, no copy"),
            [slot // 4],
        )

    tables = {"A": pool.admit([], 6)}
    for slot, word in zip(kv.slots_for(tables["A"], 0, 6, 4), WORDS, strict=True):
        words[slot // 4, slot % 4] = word
    tell("a prompt of 6 tokens takes 2 blocks", tables["A"])
    pool.share(tables["A"])
    tables["B"] = list(tables["A"])
    tell("fork: B gets a copy of the table, not of the blocks", tables["B"])
    write("A", 6, "sea")
    write("B", 6, "moon")
    write("A", 7, "and")
    write("A", 8, "said")
    pool.release(tables.pop("A"))
    tell("A is done: what only A used is free again")
    return story


STORY = fork_story()


def draw_fork(ax, i):
    _, tables, refs, words, hot = STORY[i]
    for block in range(6):
        y = 5 - block
        for slot in range(4):
            used, word = refs[block] > 0, words.get((block, slot), "")
            face = "white" if not used else (SKY if refs[block] > 1 else "#F6D5BF") if word else "#F4F4F4"
            ax.add_patch(
                Rectangle(
                    (3.4 + slot * 1.1, y),
                    1.1,
                    0.8,
                    fc=face,
                    ec=ORANGE if block in hot else "#888",
                    lw=2 if block in hot else 0.8,
                )
            )
            ax.text(3.95 + slot * 1.1, y + 0.4, word if used else "", ha="center", va="center", fontsize=9)
        ax.text(3.2, y + 0.4, f"{block}", ha="right", va="center", weight="bold")
        ax.text(
            8.0,
            y + 0.4,
            f"{refs[block]} user{'s' * (refs[block] != 1)}" if refs[block] else "free",
            va="center",
            color="black" if refs[block] else "#999",
        )
    for row, name in enumerate("AB"):
        y = 4.3 - 2.6 * row
        if name in tables:
            ax.text(0, y + 0.9, f"table of {name}", weight="bold")
            for j, block in enumerate(tables[name]):
                ax.add_patch(Rectangle((j * 0.75, y), 0.7, 0.7, fc="white", ec="black"))
                ax.text(j * 0.75 + 0.35, y + 0.35, str(block), ha="center", va="center")
    ax.set(xlim=(-0.1, 9.3), ylim=(-0.1, 6))
    ax.set_axis_off()


stepper(draw_fork, len(STORY), [step[0] for step in STORY], size=(6.4, 2.9), still=[1, 2, 4, 7])

# %% [markdown]
# Blue blocks are shared, the others have one owner. The prompt's full block is never copied: nobody writes there again. Only the half-full
# one is, and only for the first of the two writers. The engine does this in `extend`; the body is yours to write.

# %%
show_source(KVPool.extend)

# %% [markdown]
# And on the real model. Look at the tables of two running samples, at the number of users, and at the copies that the engine makes. Which
# sample wrote first?

# %%
pair = engine_on_same_model(num_kv_blocks=40, block_size=4)
extend, copies = pair.pool.extend, []


def spy(table, start, end):
    told = extend(table, start, end)
    copies.extend(told or [])
    return told


pair.pool.extend = spy
story_prompt = pair.tokenizer.encode("The old man looked at the sea and thought of the day when")
request_id = pair.add_request(
    story_prompt, SamplingParams(n=2, max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
)
print(f"prompt: {len(story_prompt)} tokens in blocks of 4")
for step in range(11):
    pair.step()
    if step in (0, 1, 10):
        print(f"after step {step + 1}, copies so far {copies}:")
        for request in pair.requests[request_id]:
            users = [pair.pool.blocks[number].refs for number in request.block_table]
            print(f"   sample {request.index}: table {request.block_table}, users {users}")
separate = sum(len(request.block_table) for request in pair.scheduler.running)
print(f"blocks in use: {int(pair.stats()['blocks_used'])}; without sharing: {separate}")
pair.step()
for request in pair.requests[request_id]:
    print(f"   sample {request.index}: ...{request.text!r}")

# %% [markdown]
# Sample 1 did: its turn came first in step 2, so it moved to the copy, and sample 0 kept block 3 for itself. Nine blocks, not twelve.
#
# ## Kill the pool
#
# Counting users looks like bookkeeping. So let us get it wrong. A fisherman's story is being written. We release its blocks while it runs,
# as a cancelled request does that is cleaned up twice. Then another user sends some Python.

# %%
doomed = engine_on_same_model(num_kv_blocks=128)
tale = doomed.add_request(
    "Once upon a time, in a small village by the sea, there lived an old fisherman who", greedy(60)
)
for _ in range(12):
    doomed.step()
victim = doomed.requests[tale][0]
print("so far:       ", repr(victim.text))

doomed.pool.release(victim.block_table)  # the bug
try:
    doomed.scheduler.check()  # calls KVPool.check with all live tables
except AssertionError as error:
    print("KVPool.check():", error)

code = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n\ndef factorial(n):\n    if n"
doomed.add_request(code, greedy(40))
try:
    while doomed.scheduler.running:
        doomed.step()
except RuntimeError as error:
    print("the engine, later:", error)
print("the fisherman:", repr(victim.text))

# %% [markdown]
# Nothing crashed at first. The pool gave the fisherman's blocks to the newcomer, and **one user's text went on in another
# user's words.** In a real service this is a leak of private data. The engine noticed only when the blocks were given back for the second
# time: too late. `KVPool.check()` counts the users of every block in all live tables, and names it at once. Our tests call it after every
# step. It happens to the best: vLLM once freed a block twice (issue 1556).
#
# ## Reading through the table
#
# Attention needs keys and values of the whole context, and they lie scattered. Two ways: **gather** them into one piece and use an
# ordinary attention, or **walk** through the table and take each block where it is. The online softmax of stage 03 makes the second way
# possible: it takes keys in pieces.

# %%
show_source(attention.paged_query)

# %% [markdown]
# `rows` are the queries, stacked under the KV head that they share; `m`, `l`, `acc` are the running maximum, sum and mix of stage 03. The
# loop is yours. A slice of the cache is a view, so it copies nothing. Count the bytes: gathering reads everything, writes everything, and
# then attention reads the copy: three times as many.
#
# Let us measure one layer of SmolLM2 with 8 requests of 6,144 tokens, in scrambled blocks. That is more than most processors' own caches
# hold. The engine has both ways: `sdpa` gathers, `paged` is `paged_query` in Python, and `numba` is the same, compiled.

# %%
size, requests, context = llm.config, 8, 6144
machine = roofline.measure_machine()
generator = torch.Generator().manual_seed(0)


def measure(backend, block_size, repeats):
    """Median seconds of one layer's attention: one new token for each request."""
    per_request = kv.blocks_needed(context, block_size)
    blocks = torch.randperm(requests * per_request, generator=generator).view(requests, per_request).tolist()
    q = torch.randn(requests, size.num_heads, size.head_dim, generator=generator)
    layout = attention.Layout([1] * requests, [context] * requests, blocks, block_size)
    seconds = []
    with torch.inference_mode():
        for _ in range(repeats + 1):  # the first one warms up, and compiles
            start = time.perf_counter()
            attention.BACKENDS[backend](q, keys, values, layout, size.head_dim**-0.5, None)
            seconds.append(time.perf_counter() - start)
    return sorted(seconds[1:])[repeats // 2]


keys, values = (
    torch.randn(requests * context, size.num_kv_heads, size.head_dim, generator=generator) for _ in range(2)
)
once = keys.nbytes + values.nbytes  # bytes of all keys and values
fast = attention.pick("auto", torch.device("cpu"), torch.float32).__name__
ways = [
    ("gather, then attend", "sdpa", 16, 3 * once),
    ("walk, Python", "paged", 16, once),
    ("walk, Python", "paged", 256, once),
]
if fast == "numba":
    ways.append(("walk, compiled", "numba", 16, once))
timings = {}
print(
    f"keys and values: {once / 1e6:.0f} MB; this machine reads at most {machine.bandwidth / 1e9:.1f} GB/s, measured now"
)
print(f"{'':<22}{'block':>6}{'bytes moved':>13}{'time':>11}{'':>3}{'rate':>14}{'share of the ceiling':>22}")
for name, backend, block_size, moved in ways:
    seconds = timings[name, block_size] = measure(backend, block_size, 3 if backend == "paged" else 7)
    rate = moved / seconds
    print(
        f"{name:<22}{block_size:>6}{moved / 1e6:>10.0f} MB{seconds * 1e3:>8.1f} ms{rate / 1e9:>12.1f} GB/s{rate / machine.bandwidth:>19.0%}"
    )
compare("04.walk", timings["walk, Python", 16] / timings["gather, then attend", 16], "times")

# %%
fig, ax = plt.subplots(figsize=(6.8, 2.4), layout="constrained")
rows = list(reversed(timings.items()))
for y, ((name, _), seconds) in enumerate(rows):
    ax.barh(y, 1e3 * seconds, color=ORANGE if name.startswith("gather") else BLUE, height=0.6)
    ax.text(1e3 * seconds, y, f"  {1e3 * seconds:.0f} ms", va="center")
floor = 1e3 * once / machine.bandwidth
ax.axvline(floor, color="black", ls=":", lw=1.2)
ax.text(floor, len(rows) - 0.42, " reading each byte once, at the measured bandwidth", va="bottom", fontsize=9)
ax.set_yticks(range(len(rows)), [f"{name}, blocks of {b}" for (name, b), _ in rows])
ax.set(
    xlabel="time for one layer, 8 requests of 6,144 tokens (ms)",
    xlim=(0, 1e3 * max(timings.values()) * 1.18),
    ylim=(-0.5, len(rows)),
)
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# The walk moves a third of the bytes. In Python with blocks of 16 it may lose all the same: each small block costs a few calls, and the calls
# cost more than the bytes. That is one reason why a block is not one token. With larger blocks the overhead shrinks, and compiled it is
# nearly gone: on a quiet machine, what is left above the dotted line is arithmetic. On a GPU one kernel does it (stage 14). vLLM's first
# one paid 20 to 26 % more time than a contiguous kernel (section 7.1), and won because so many more requests fit.
#
# ## What beginners get wrong
# - **Logical for physical.** Reading block *i* of the cache in place of `table[i]`. With one request in a fresh pool both are equal, so every small test passes.
# - **`n % block_size == 1` for "a new block is needed".** Wrong for chunks of several tokens, and never true for blocks of one.
# - **Half an allocation.** Three blocks are needed, two are free, and the two are kept. Take all, or nothing.
# - **Sharing a half-full block without a copy.** Two samples overwrite each other, and the text stays fluent (Avarok-Cybersecurity/atlas, issue 1193).
# - **Masking what should not be read.** The rest of the last block may hold NaN, and 0 times NaN is NaN.
# - **"Paging makes the model faster."** A single request gets nothing from it. It makes room.
#
# ## Other names for the same thing
# | here | vLLM | SGLang | llama.cpp |
# |---|---|---|---|
# | block, `block_size` 16 | block, `--block-size` 16 | page, `--page-size` (1 by default) | cell: one token |
# | `block_table` | `block_table` | a row of `req_to_token` | cells found by sequence id |
# | `slots_for` | `slot_mapping` | `out_cache_loc` | cell indices |
# | `KVPool` | `BlockPool`, `KVCacheManager` | `TokenToKVPoolAllocator` | `llama_kv_cache` |
# | `extend` | `allocate_slots` | `alloc_extend`, `alloc_decode` | `find_slot` |
#
# ## Three quick questions

# %%
quiz(
    "An oracle tells every final length exactly. Why is the memory still half empty when each request reserves one piece?",
    [
        "Lengths are rounded up to whole blocks.",
        "The oracle is wrong for some requests.",
        "A request holds its last slot from its first step on.",
    ],
    2,
    [
        "There are no blocks in that memory. Rounding to blocks costs half a block per request.",
        "In the simulation it was exact. Nothing was 'never used' in that row.",
        "The slots for later stand empty while the answer grows. Blocks are taken only when a token needs them.",
    ],
)

# %%
quiz(
    "Four samples of a prompt with 33 tokens, blocks of 16. How many blocks are copied when all four write their next token?",
    ["0", "3", "4", "12"],
    1,
    [
        "The third block holds one token and is shared by all four. The first writer may not overwrite it.",
        "Three writers get a copy of the third block. The fourth is alone on the original by then.",
        "The last writer finds itself alone on the block and writes there.",
        "The two full blocks of the prompt are only read, so they stay shared.",
    ],
)

# %%
quiz(
    "Blocks of 16. Which request wastes the largest share of its memory?",
    ["one with 17 tokens", "one with 16 tokens", "one with 1,601 tokens"],
    0,
    [
        "2 blocks for 17 tokens: 15 of 32 slots are empty.",
        "It fills its block exactly: no waste.",
        "15 slots are empty too, but of 1,616.",
    ],
)

# %% [markdown]
# ## Now you can
# say where a cache loses its memory and measure it, hand it out in blocks, fork a request at the cost of one block, prove that no block is lost or
# shared by mistake, and follow a block table inside attention.
#
# **Next:** [exercises/04_paged_blocks.ipynb](../exercises/04_paged_blocks.ipynb). You write the table's arithmetic, the copy-on-write, and the walk.
#
# Two samples of *one* request share blocks now. What if two *strangers* send the same beginning? That is stage 05.
