# %% [markdown]
# # 05 Prefix caching
#
# **You chat with a model. Your tenth message is "thanks, bye": two words. How many tokens does the model have to read?** All
# of them, the whole conversation from "hello", because that is what is sent. It has read nearly all of it before. This lesson
# lets it find what it has read.
#
# **Afterwards you can** give blocks of the KV cache names that survive the request, share them between requests, throw the
# right ones away, and say in advance which prompts will hit.
#
# *35 minutes. You need stage 02 (keys and values are kept) and stage 04 (they lie in blocks of 16 tokens; each request has a
# table of block numbers).*

# %%
import hashlib
import statistics
from array import array

import matplotlib.pyplot as plt
import torch

from minillm import LLM, SamplingParams, roofline
from minillm.blocks import KVPool, block_digest
from minillm.course import compare, predict, quiz, show_source, swap
from minillm.course.widgets import stepper

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"

llm = LLM("smollm2-135m", num_kv_blocks=128)
PARTS = llm.config, llm.model, llm.tokenizer
encode = llm.tokenizer.encode


def engine(**options):
    """A new engine, with an empty cache, around the same model."""
    return LLM.from_parts(*PARTS, **{"num_kv_blocks": 128, **options})


def greedy(count):
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


# %% [markdown]
# ## A chat is sent whole, every time
#
# A model has no memory of you. Each turn, the program around it sends everything that was said so far, and the new question.
# (The answers are made up here.)

# %%
chat = [{"role": "system", "content": "You are a patient teacher. Answer in one short sentence."}]
turns = [
    ("What is a prefix?", "A prefix is what stands at the beginning of something."),
    ("Give me an example.", "In the word sunflower, sun is a prefix."),
    ("And what is a suffix?", "A suffix is what stands at the end."),
]


def same_beginning(a, b):
    """How many tokens at the start of a and b are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


before = []
print("turn   prompt tokens   already in the prompt of the turn before")
for i, (question, answer) in enumerate(turns):
    chat.append({"role": "user", "content": question})
    tokens = llm.tokenizer.encode_chat(chat)
    print(f"{i + 1:>4}{len(tokens):>16}{same_beginning(tokens, before):>18}")
    before = tokens
    chat.append({"role": "assistant", "content": answer})

# %% [markdown]
# Each prompt *begins* with the whole prompt before it. What is that worth? With a causal mask, the keys and values of position
# *p* depend on tokens 0 to *p* and on nothing else (stage 02). **Same tokens from the very start, same keys and values.**
# Nobody needs to compute them again, if they were kept and can be found.
#
# ### Predict first
# Put a number in place of `None`. The measurements come later.

# %%
question = "A chat of ten turns: of all the tokens in its ten prompts, what share need not be computed?"
predict("05.chat", None, "%", question)
question = (
    "A prompt of a few hundred tokens is cached, all but its last line. How many times sooner comes the first token?"
)
predict("05.ttft", None, "times", question)
question = (
    "Two chats share a long system prompt, but it begins with the time of day. What share does the second one find?"
)
predict("05.clock", None, "%", question)

# %% [markdown]
# ## Names for blocks, by hand
#
# We keep blocks, so we need a dictionary from *what a block holds* to its number. Take blocks of three words. A name is a hash of
# what is in the block: a few bytes computed from it. Obvious idea: hash its own words.

# %%
first = "the cat sat | on the mat | the cat sat | on my hat"
second = "the cat sat | on the mat | and fell asleep"
words = sorted(set(f"{first} {second}".replace("|", "").split()))


def blocks_of(text):
    return [tuple(words.index(word) for word in part.split()) for part in text.split("|")]


def show_names(text):
    print(f"{'block':<18}{'named alone':<14}named with all before it")
    parent = b""
    for part, tokens in zip(text.split("|"), blocks_of(text), strict=True):
        parent = block_digest(parent, tokens)  # the name of the block before goes into this one
        print(f"{part.strip():<18}{block_digest(b'', tokens).hex()[:4]:<14}{parent.hex()[:4]}")
    print()


show_names(first)
show_names(second)

# %% [markdown]
# Alone, "the cat sat" has one name wherever it stands. In the right column, each name is made of the block's words *and the name
# before it*, and so on to the start. This is a **chain**: sixteen bytes (four hex digits are shown) stand for the whole
# beginning. There the two texts agree for two blocks, so the second one finds two, with two look-ups in a dictionary.
#
# ### What if we forget the chain?
#
# Is it really wrong to reuse "the cat sat" from elsewhere? The words are the same! Let us do it to the real model. Two blocks of
# 16 tokens: Anna comes in, Ben comes in. The first request has Anna first, the second has Ben first. In the engine, `match` looks
# the names up. `swap` puts a broken one in its place: it names each block alone, and trusts the name.


# %%
def block(text):
    """Exactly 16 tokens: one block."""
    return (encode(text) + encode(" and so on" * 6))[:16]


anna = block("Anna came in. She sat down and said that her favourite animal is the tiger.")
ben = block("Then Ben came in. He sat down and said that he likes the piano.")
tail = encode(" Then, after")


def named_alone(parent, tokens):
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).digest()


def trusting(self, tokens):
    """`match` without any doubt: a name that is found is a hit."""
    hits, size = [], self.block_size
    for start in range(0, len(tokens) - size, size):
        number = self.published.get(self.hash_fn(b"", tokens[start : start + size]))
        if number is None:
            break
        hits.append(number)
    return hits


def ben_first(llm):
    llm.generate(anna + ben + tail, greedy(1))
    out = llm.generate(ben + anna + tail, greedy(8))[0]
    print(f"   {out.num_cached_tokens} tokens from the cache:{out.outputs[0].text!r}")


print("Ben, Anna. Then, after ...")
ben_first(engine())
broken = engine()
broken.pool.hash_fn = named_alone
with swap("05.2", trusting):
    ben_first(broken)

# %% [markdown]
# The right engine finds nothing, as it should: the prompts begin differently. The broken one "hits" both blocks, and continues
# another story. Ben's keys were turned by positions 16 to 31 (stage 02), and the block had seen Anna before it. No
# error, fluent text.
#
# ## The engine's version
#
# `block_digest`, which makes a name, and `match`, which looks it up, are yours to write. Here is what enters names. `digests` are
# those of the blocks that are done; the last of them goes into the next.

# %%
show_source(block_digest)
show_source(KVPool.publish)

# %% [markdown]
# **Only full blocks get names**: a half-full one is still being written. And a name is entered when its block is *computed*, not
# when it is planned.
#
# A hit is not a copy. The new request puts the old block's number into its own table, and the block's count of references (its
# users) goes up. That is all:

# %%
show_source(KVPool.share)

# %% [markdown]
# ## How much sooner?
#
# A *few-shot* prompt: solved examples, then the question. Everybody who uses it sends the same examples. We ask four questions,
# behind few and behind many examples, of an engine without a prefix cache ("cold") and of one that has seen the examples once
# ("warm"). Measured is the time to the first token (TTFT, stage 00): medians of four.

# %%
CAPITALS = """Italy Rome, Norway Oslo, Greece Athens, Austria Vienna, Portugal Lisbon, Poland Warsaw, Ireland Dublin, Cuba Havana,
Peru Lima, Kenya Nairobi, Iraq Baghdad, Finland Helsinki, Hungary Budapest, Canada Ottawa, Iran Tehran, Syria Damascus,
Belgium Brussels, Denmark Copenhagen, Turkey Ankara, Nepal Kathmandu, Libya Tripoli, Chile Santiago, Qatar Doha, Ghana Accra"""
examples = "".join("Question: What is the capital of {}? Answer: {}.\n".format(*c.split()) for c in CAPITALS.split(","))
examples = examples.splitlines(keepends=True)
QUESTIONS = ("Spain", "Japan", "Egypt", "Sweden")


def few_shot(count, country):
    return encode("".join(examples[:count]) + f"Question: What is the capital of {country}? Answer:")


cold, warm = engine(enable_prefix_caching=False), engine()
rows = []
for count in (3, 8, 16, 24):
    warm.generate(few_shot(count, "France"), greedy(1))  # somebody was here before
    outs = {name: [] for name in ("cold", "warm")}
    for country in QUESTIONS:
        for name, one in (("cold", cold), ("warm", warm)):
            outs[name].append(one.generate(few_shot(count, country), greedy(2))[0])
    same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(outs["cold"], outs["warm"], strict=True)]
    times = {name: statistics.median(out.metrics.ttft for out in outs[name]) for name in outs}
    length, cached = len(outs["warm"][0].prompt_token_ids), outs["warm"][0].num_cached_tokens
    rows.append((length, cached, times["cold"], times["warm"]))
    print(f"{length:>4} tokens, {cached:>3} of them cached: cold {times['cold'] * 1e3:>6.0f} ms, ", end="")
    print(f"warm {times['warm'] * 1e3:>4.0f} ms; same answers: {all(same)}")
print("the last answers:", [out.outputs[0].text.strip() for out in outs["warm"]])

# %%
fig, ax = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for column, color, label in ((2, ORANGE, "cold"), (3, BLUE, "warm")):
    ax.plot([row[0] for row in rows], [row[column] * 1e3 for row in rows], "o-", color=color, lw=2)
    ax.text(rows[-1][0] * 1.02, rows[-1][column] * 1e3, label, color=color, va="center")
ax.set(xlabel="prompt (tokens)", ylabel="time to first token (ms)", xlim=(0, rows[-1][0] * 1.15), ylim=(0, None))
ax.spines[["top", "right"]].set_visible(False)
ax.grid(axis="y", alpha=0.3)
plt.show()

# %%
length, cached, cold_s, warm_s = rows[-1]
compare("05.ttft", round(cold_s / warm_s, 1), "times")


def prefill_flops(start, end):
    """Work for the tokens at positions start..end-1; only the last needs the output head."""
    head = 2 * llm.config.vocab_size * llm.config.hidden_size
    return sum(roofline.flops_per_token(llm.config, p + 1) for p in range(start, end)) - (end - start - 1) * head


machine = roofline.measure_machine(dtype=torch.float32)
print(f"{machine.name}: at most {machine.flops / 1e9:.0f} GFLOP/s, measured now")
for name, start, seconds in (("cold", 0, cold_s), ("warm", cached, warm_s)):
    work = prefill_flops(start, length)
    print(
        f"{name}: {length - start:>3} tokens, {work / 1e9:>5.1f} GFLOP, {work / seconds / 1e9:>5.1f} GFLOP/s, ", end=""
    )
    print(f"{work / seconds / machine.flops:.0%} of that")
print(f"the work became {prefill_flops(0, length) / prefill_flops(cached, length):.1f} times less")

# %% [markdown]
# The cold line climbs with the prompt; the warm one hardly does. The warm engine still computes the last question, and for a dozen
# tokens it reads all the weights (stage 01). So the *work* shrinks more than the *time*.
#
# ## What kills it
#
# It is a *prefix* cache. Now put the time of day in front of the system prompt, as many programs do.


# %%
RULES = (
    "You are the assistant of a small library. Be friendly and brief. Never invent a book. If you do not know, say so. "
    "Loans are free for children and cost one coin for adults. The library is open from nine to six, but not on Sundays. "
    "Books go back into the box at the door. Late books cost one coin a week."
)


def ask_twice(first_system, second_system):
    """Two readers with one question each. What share of the second prompt is found?"""
    one = engine()
    for system, question in (
        (first_system, "Do you have a book on bees?"),
        (second_system, "When do you close today?"),
    ):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        out = one.generate(llm.tokenizer.encode_chat(messages), greedy(1))[0]
    return out.num_cached_tokens, len(out.prompt_token_ids)


for label, pattern in (
    ("no clock", "{rules}"),
    ("clock at the end", "{rules} {time}"),
    ("clock at the front", "{time} {rules}"),
):
    systems = [pattern.format(rules=RULES, time=f"It is {clock} o'clock.") for clock in ("10:41:07", "10:41:52")]
    found, length = ask_twice(*systems)
    print(f"{label:<20}{found:>4} of {length} tokens found")
compare("05.clock", round(100 * found / length), "%")

# %% [markdown]
# One digit in the first block, and **everything** behind it is new: each name hangs on the name before. The makers of the agent
# Manus call the hit rate their most important number, and warn of exactly this clock (Y. Ji, *Context Engineering for AI Agents*,
# 18 July 2025). What changes goes to the end.
#
# ### And the block size?
#
# Only whole blocks are found. Would smaller ones help? Eight readers, one set of rules, eight questions; the time stands at the
# end, in the middle or at the front.


# %%
def hit_rate(prompts, size):
    pool, found = KVPool(2000, size), 0
    for tokens in prompts:
        hits = pool.match(tokens)
        table = pool.admit(hits, len(tokens))
        pool.publish(table, [pool.blocks[number].digest for number in hits], tokens, len(tokens))
        pool.release(table)
        found += len(hits) * size
    return 100 * found / sum(map(len, prompts))


asked = ("Do you have a book on bees?", "When do you close?", "What does a loan cost?", "Where do I return a book?",
         "Can my son borrow this one?", "Are you open on Sunday?", "My book is late. What now?", "Any new novels?")  # fmt: skip
half = RULES.index("Loans are")
places = {
    "at the end": lambda clock, q: f"{RULES} {q} {clock}",
    "in the middle": lambda clock, q: f"{RULES[:half]}{clock} {RULES[half:]} {q}",
    "at the front": lambda clock, q: f"{clock} {RULES} {q}",
}
sizes = [1, 2, 4, 8, 16, 32, 64, 128]
rates = {}
for place, build in places.items():
    prompts = [encode(build(f"It is {10 + i}:{11 + 5 * i}.", q)) for i, q in enumerate(asked)]
    rates[place] = [hit_rate(prompts, size) for size in sizes]
    print(f"clock {place:<15}" + "".join(f"{rate:>6.0f} %" for rate in rates[place]))
print(f"{'block size':<21}" + "".join(f"{size:>8}" for size in sizes))
print(f"{'names for a prompt':<21}" + "".join(f"{len(prompts[0]) // size:>8}" for size in sizes))

# %%
fig, ax = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for (place, rate), color in zip(rates.items(), (BLUE, GREY, ORANGE), strict=True):
    ax.plot(range(len(sizes)), rate, "o-", color=color, lw=2, clip_on=False)
    ax.text(-0.1, rate[0] + 3, f"clock {place}", color=color)
ax.set(
    xlabel="block size (tokens)", ylabel="tokens found (%)", ylim=(0, 100), xticks=range(len(sizes)), xticklabels=sizes
)
ax.spines[["top", "right"]].set_visible(False)
ax.grid(axis="y", alpha=0.3)
plt.show()

# %% [markdown]
# Small blocks find a little more, blocks longer than the common part nothing. But the lowest line stays low at any size:
# **where the prompts differ matters more than how they are cut.** (The first reader finds nothing in any case.)
#
# ## Who may throw a block away, and which one?
#
# A finished request gives its blocks back (`release`). They are **free, but not empty**: until they are handed out again
# (`allocate`) they can be found. The free list decides who goes first. Step through it: blocks of 4 tokens, S is a system prompt,
# small letters are one user's tokens.

# %%
pool = KVPool(num_blocks=6, block_size=4)
LETTERS, frames, tables = {}, [], {}


def spell(text):
    return [LETTERS.setdefault(letter, len(LETTERS)) for letter in text]


def snapshot(caption):
    held = {}
    for table, text in tables.values():
        held |= {n: text[i * 4 : i * 4 + 4] for i, n in enumerate(table)}
    letters = {number: letter for letter, number in LETTERS.items()}
    rows = []
    for number, one in enumerate(pool.blocks):
        text = held.get(number) or "".join(letters[token] for token in one.tokens)
        rows.append((text, one.refs, one.digest is not None))
    frames.append((caption, rows, list(pool.free)))


def arrive(name, text):
    tables[name] = (pool.admit(pool.match(spell(text)), len(text)), text)


def compute(name):
    table, text = tables[name]
    done = [pool.blocks[number].digest for number in table]
    pool.publish(table, done[: done.index(None)] if None in done else done, spell(text), len(text))


def leave(name):
    pool.release(tables.pop(name)[0])


snapshot("six empty blocks")
arrive("Anna", "SSSSaaaaaa")
compute("Anna")
snapshot("Anna: 10 tokens. Two full blocks get names")
arrive("Ben", "SSSSbbbbb")
compute("Ben")
snapshot("Ben: S is found, so it has two users")
leave("Anna")
snapshot("Anna is done. S is still Ben's")
leave("Ben")
snapshot("Ben is done. Free, but not forgotten")
arrive("Cleo", "cccccccccccccccc")
compute("Cleo")
snapshot("Cleo takes the front: empty ones, then 'aaaa'")
leave("Cleo")
arrive("Anna", "SSSSaaaaaa")
snapshot("Cleo is done, Anna is back: only S is found")


def draw_pool(ax, i):
    _, rows, free = frames[i]

    def box(x, y, width, height, text, refs, named):
        face = BLUE if refs else "#F5C089" if named else "white"
        ax.add_patch(plt.Rectangle((x, y), width, height, facecolor=face, edgecolor="#555555"))
        ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", color="white" if refs else "black")

    for number, (text, refs, named) in enumerate(rows):
        shown = text if refs or named else ""
        box(number, 1.35, 0.9, 0.6, shown, refs, named)
        ax.text(number + 0.45, 2.08, f"block {number}", ha="center", fontsize=8, color="#555555")
        note = f"{refs} user{'s' * (refs > 1)}" if refs else "cached" if named else "empty"
        ax.text(number + 0.45, 1.13, note, ha="center", va="center", fontsize=8, color="#555555")
    ax.text(0, 0.66, "free list: handed out from the left", fontsize=8, color="#555555")
    for place, number in enumerate(free):
        text, refs, named = rows[number]
        box(place, 0.1, 0.9, 0.42, f"{number}" + (f" {text}" if named else ""), 0, named)
    ax.set(xlim=(-0.1, 6), ylim=(0, 2.3))
    ax.axis("off")


stepper(draw_pool, len(frames), captions=[caption for caption, _, _ in frames], size=(5.4, 2.2), still=[2, 4, 5, 6])

# %% [markdown]
# Blue is in use, orange is free and cached, white is empty. Three rules are in it:
#
# - **Empty blocks go first.** Nothing is lost with them.
# - **Then the least recently used** (LRU).
# - **Of one prompt, the end goes before the beginning.** "aaaa" was given up, S survived. Had S gone first, "bbbb" would
#   still fill a block, but nobody could ever reach it.
#
# A block is forgotten when it is handed out (*evicted*), not before. That moment has a famous bug.
#
# ## Four bugs, live
#
# **Bug 1: the name that stays.** nano-vllm handed out a block but left its old name in the dictionary (issue 163). Anna tells her
# password. Later Carl's prompt gets Anna's old block, and in the same step Anna asks again. `stay` makes our engine forget to
# forget.


# %%
def secret(name, word):
    return block(f"My name is {name}. The password of my safe is {word}, and it is a good one.")


question = encode(" I repeat: the password of my safe is")
somebody = [1000 + n for n in range(7 * 16)]  # fills the other seven blocks


def two_safes(stay):
    one = engine(num_kv_blocks=8)
    if stay:
        one.pool._forget = lambda number: None
    one.generate(secret("Anna", "tiger") + question, greedy(2))
    one.generate(somebody, greedy(1))
    carl, anna = one.generate(
        [secret("Carl", "piano") + question, secret("Anna", "tiger") + question], greedy(2), progress=False
    )
    print(
        f"   Carl gets:{carl.outputs[0].text!r}   Anna gets:{anna.outputs[0].text!r}   cached: {anna.num_cached_tokens}"
    )


print("the engine:")
two_safes(stay=False)
print("with the name that stays:")
two_safes(stay=True)

# %% [markdown]
# With the name that stays, Anna gets Carl's password. And the engine *did* compare the tokens: until Carl's step is over, Anna's
# are still written on the block. Only the keys and values in it are Carl's.
#
# **Bug 2: everything is cached.** What is left to compute? Nothing. And nothing has no logits. (nano-vllm issues 114 and 144, pull
# request 199.) Below, `match` may look one token further.

# %%
prompt = encode("The keeper of the lighthouse had a small dog that barked at every ship. One night, in the fog,")[:16]
right_match = KVPool.match
for label, function in (
    ("the engine", right_match),
    ("the whole prompt may hit", lambda self, tokens: right_match(self, [*tokens, 0])),
):
    with swap("05.2", function):
        one = engine()
        one.generate(prompt, greedy(1))
        try:
            out = one.generate(prompt, greedy(6))[0]
            print(f"{label}: {out.num_cached_tokens} of {len(prompt)} cached, then{out.outputs[0].text!r}")
        except Exception as error:
            print(f"{label}: {type(error).__name__}, {str(error).partition(' into')[0]}")

# %% [markdown]
# So the last token is always computed. With whole blocks, that means the last block.
#
# **Bug 3: twins.** Four users send the same examples in the *same* step. Nothing is published yet, so all four compute
# them. The engine keeps one copy, and switches the others' tables to it.

# %%
publish_block = KVPool.publish_block


def keep_twins(self, table, i, digest, content):
    taken = self.published.get(digest, table[i]) != table[i]
    return False if taken else publish_block(self, table, i, digest, content)


for label, function in (("the engine", publish_block), ("twins are kept", keep_twins)):
    with swap("05.5", function):
        one = engine()
        for country in QUESTIONS:
            one.add_request(few_shot(8, country), greedy(2))
        one.step()
        print(
            f"{label}: {one.stats()['blocks_used']:.0f} blocks for four prompts of {len(few_shot(8, 'Spain'))} tokens"
        )

# %% [markdown]
# **Bug 4: two blocks, one name.** There are fewer names than possible blocks. vllm-mlx cut each token to 8 bits (pull request
# 444). vLLM used Python's `hash()`, until somebody noticed that collisions can be made on purpose (pull requests 12621 and
# 15297). And by accident? Four bytes give four billion names; we name 200,000 blocks.

# %%
many = 200_000
numbered = [(n, n + 1, n + 2, n + 3) for n in range(many)]


def hashed(size):
    return lambda tokens: hashlib.blake2b(array("q", tokens).tobytes(), digest_size=size).digest()


print(f"of {many:,} blocks, so many get a name that is taken (in brackets: expected if names were random):")
for label, bits, name in (
    ("ids cut to 8 bits", 32, lambda tokens: bytes(token & 0xFF for token in tokens)),
    ("a hash of 4 bytes", 32, hashed(4)),
    ("a hash of 16 bytes", 128, hashed(16)),
):
    taken = many - len({name(tokens) for tokens in numbered})
    print(f"   {label:<20}{taken:>8,}   ({many * (many - 1) / 2 / 2**bits:.1g})")

# %% [markdown]
# Each *pair* of blocks is a chance to collide, so four bytes are too few long before four billion. Sixteen are enough. Our `match`
# compares tokens and parent all the same: that is cheap, and a wrong answer is not.
#
# ## The bill: a chat of ten turns
#
# Now the real thing: ten turns, the model's own answers.

# %%
one = engine()
ASKED = ("Hello! Who are you?", "What is the Sun?", "How far away is it?", "Is it bigger than the Earth?", "What is the Moon?",
         "Why does it change its shape?", "Who walked on it first?", "Can I see Mars at night?", "Is there water on it?", "Thanks, bye!")  # fmt: skip
messages = [
    {
        "role": "system",
        "content": "You are a friendly astronomer who talks with children. Answer in one short sentence.",
    }
]
bill, seen, history = [], 0, []
for asked in ASKED:
    messages.append({"role": "user", "content": asked})
    out = one.chat(messages, SamplingParams(max_tokens=20, temperature=0.0))[0]
    bill.append((len(out.prompt_token_ids), out.num_cached_tokens))
    seen += same_beginning(out.prompt_token_ids, history)
    history = out.prompt_token_ids + out.outputs[0].token_ids
    messages.append({"role": "assistant", "content": out.outputs[0].text})
print("the last answer:", repr(messages[-1]["content"]))

stats, sent = one.stats(), sum(length for length, _ in bill)
found = sum(cached for _, cached in bill)
print(
    f"sent in ten prompts: {sent} tokens; seen before: {seen} ({seen / sent:.0%}); found in whole blocks: {found} ({found / sent:.0%})"
)
print(
    f"the engine's statistics: hit rate {stats['prefix_hit_rate']:.0%}, {stats['computed_tokens']:.0f} tokens computed (prompts and answers), "
    f"{stats['output_tokens']:.0f} tokens written"
)
compare("05.chat", round(100 * found / sent), "%")
without = sum(prefill_flops(0, length) for length, _ in bill)
with_cache = sum(prefill_flops(cached, length) for length, cached in bill)
rate = prefill_flops(0, rows[-1][0]) / rows[-1][2]  # FLOP/s of the cold prompt above
print(
    f"prefill without the cache: {without / 1e9:>5.0f} GFLOP, {without / rate:.1f} s at the speed of the cold prompt above"
)
print(f"prefill with the cache:    {with_cache / 1e9:>5.0f} GFLOP: {1 - with_cache / without:.0%} saved")

# %%
fig, ax = plt.subplots(figsize=(6.6, 3.2), layout="constrained")
turn = range(1, len(bill) + 1)
from_cache, computed = [cached for _, cached in bill], [length - cached for length, cached in bill]
ax.bar(turn, from_cache, color=BLUE, width=0.7)
ax.bar(turn, computed, bottom=from_cache, color=ORANGE, width=0.7)
ax.text(10.5, from_cache[-1] / 2, "found", color=BLUE, va="center")
ax.text(10.5, from_cache[-1] + computed[-1] / 2, "computed", color=ORANGE, va="center")
ax.set(xlabel="turn", ylabel="tokens in the prompt", xticks=turn, xlim=(0.3, 12))
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Without a cache, the whole area is computed, and it grows with the *square* of the number of turns. With it, only the orange
# tops are. The model's own answers are found too: what it wrote in one turn is prompt in the next.
#
# SGLang's paper reports hit rates of 50 to 99 % (Zheng et al., arXiv:2312.07104). Short prompts with long answers gain little:
# only prefill is saved.
#
# ## What beginners get wrong
# - **Sharing the middle.** Two prompts with the same document behind different first lines share nothing.
# - **Taking free for empty.** A pool that is full of cached blocks has *all* its memory free.
# - **Editing history.** Cut an old message, sort the tools in another order, and everything behind it is new.
# - **Counting requests.** The hit rate counts tokens: those found, divided by those sent.
#
# ## In other engines this is called
# | here | vLLM | SGLang | llama.cpp |
# |---|---|---|---|
# | prefix caching | automatic prefix caching | RadixAttention | `cache_prompt` |
# | `block_digest` | `hash_block_tokens` | (tokens are compared) | (tokens are compared) |
# | `match` | `get_computed_blocks` | `match_prefix` | common prefix with what the slot holds |
# | references | `ref_cnt`, `touch`, `free_blocks` | `lock_ref` | a slot belongs to one request |
# | free list, LRU | `FreeKVCacheBlockQueue` | `evict`, leaves first | the slot is overwritten |
# | eviction in `allocate` | `_maybe_evict_cached_block` | done before allocation | |
#
# **A dictionary or a tree?** SGLang keeps a *radix tree*: each edge holds a run of tokens, and where prompts part, the edge is
# split. So a hit can end at any token, and nothing can collide. A dictionary of chained names is flat: one look-up per block. And a
# name means the same on another machine, which helps to route requests there.
#
# ## Three quick questions

# %%
quiz(
    "Blocks of 16. A prompt of 64 tokens is cached whole, and comes again. How many tokens does our engine compute?",
    ["0", "1", "16", "64"],
    2,
    [
        "Then there would be no logits, and no next token.",
        "One would be enough for the logits. But only whole blocks are shared, here and in vLLM.",
        "The last token must be computed, and blocks are taken whole: three are found, the fourth is computed.",
        "Three of the four blocks are found.",
    ],
)

# %%
quiz(
    "A system prompt of 500 tokens now begins with the user's name. 1,000 users chat, many turns each. What happens?",
    [
        "Nothing is found any more.",
        "Each user still finds their own chat, but users share nothing.",
        "Only the first block is lost for sharing.",
    ],
    1,
    [
        "Within one chat the name does not change, so each turn still finds the turns before.",
        "The prompts of two users differ in their first block, so nothing behind it is shared: the 500 tokens are kept 1,000 times.",
        "All later blocks are named after the first one too. They hold keys that have seen the name.",
    ],
)

# %%
quiz(
    "Every block of the pool is cached, and no request runs. A new prompt needs three blocks. It shares nothing.",
    [
        "It waits until one of the cached prompts is released and its blocks are freed.",
        "It takes the three at the front of the free list. Their names are forgotten.",
        "The cache is emptied, and it takes the first three blocks of the empty pool.",
    ],
    1,
    [
        "They are free already: nobody uses them. Free does not mean empty.",
        "Only these three are lost, and they are the least recently used.",
        "Then all other prompts would lose their beginnings for three blocks.",
    ],
)

# %% [markdown]
# ## Now you can
# say which prompts will hit and why, name a block with everything before it, count who uses it, evict from the right end, and
# recognise the bug that hands Anna Carl's password.
#
# **Next:** [exercises/05_prefix_caching.ipynb](../exercises/05_prefix_caching.ipynb). You write `block_digest`, `match`,
# `release`, `allocate` and `publish_block`. Then your own code tells Anna her password.
#
# So far most requests ran one after the other. Stage 06 runs many at once.
