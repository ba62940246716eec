# %% [markdown]
# # 08 Sampling and streaming
#
# **You send `seed=42` twice. Why do you get two different answers?** On many servers you do, because strangers were in the same
# batch. This lesson builds a sampler that does not care who else is there. Then it turns tokens into a stream of text that
# never shows half an emoji, or half a stop string.
#
# **Afterwards you can** say what temperature, top-k, top-p and min-p do to a real distribution, and in which order; sample
# with a seed that survives batching; stream UTF-8 and stop strings correctly.
#
# *40 minutes. You need softmax, and a rough idea of what a batch is (stage 06). Everything runs on the CPU.*

# %%
import matplotlib.pyplot as plt
import torch

from minillm import LLM, SamplingParams, sampler, text
from minillm.course import compare, predict, quiz, show_source, swap
from minillm.course.widgets import slider_plot, stepper

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#9a9a9a"

# Prefix caching (stage 05) is off, so that each request computes its own prompt.
llm = LLM("smollm2-135m", num_kv_blocks=64, enable_prefix_caching=False)
V = llm.config.vocab_size


def word(token):
    return repr(llm.tokenizer.decode([token]))


# %% [markdown]
# ## Predict first
# Three guesses; a wild one is fine. `top_p = 0.9` keeps the likeliest tokens that together hold 90 % of the probability.

# %%
question = f"'She opened the box and found a', temperature 1, top_p 0.9: how many of {V:,} tokens may still be drawn?"
predict("08.open", None, "tokens", question)
question = "'The capital of France is', temperature 2, top_p 0.9: what share of the vocabulary may be drawn here?"
predict("08.sure", None, "%", question)
question = "How many tokens does SmolLM2 need for one 😀?"
predict("08.emoji", None, "tokens", question)

# %% [markdown]
# ## One step of a real model
#
# A model gives one score (*logit*) for each token of its vocabulary. Softmax makes probabilities of them. Here are two prompts:
# one where the next word is open, one where it is not.

# %%
PROMPTS = {"open": "She opened the box and found a", "sure": "The capital of France is"}


def scores_after(prompt):
    """Log probabilities of the next token [1, V]: the logits but for a constant, which softmax does not see."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=V)
    found = llm.generate(prompt, params)[0].outputs[0].logprobs[0]
    return torch.tensor([[found[i] for i in range(V)]])


scores = {name: scores_after(prompt) for name, prompt in PROMPTS.items()}
for name, prompt in PROMPTS.items():
    best = scores[name][0].exp().topk(6)
    tokens = ", ".join(f"{word(i)} {p:.0%}" for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True))
    print(f"{prompt!r}\n   {tokens}\n   all others together {1 - float(best.values.sum()):.0%}")

# %% [markdown]
# Always taking the likeliest (*greedy*, `temperature=0`) is dull and likes to go in circles. Drawing by these probabilities is
# lively, but look at "all others": tens of thousands of tokens, each nearly impossible, and together not rare at all. So one
# changes the distribution first. Four tools:
#
# - **temperature** T: divide the scores by T. Below 1 the likely get likelier, above 1 all get more alike.
# - **top-k**: keep the k likeliest.
# - **top-p**: keep the likeliest that together reach p (Holtzman et al. 2019, arXiv:1904.09751).
# - **min-p**: keep what is at least p times as likely as the likeliest (Nguyen et al. 2024, arXiv:2407.01082).
#
# By hand, with four tokens:

# %%
four = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


def show(logits):
    return [f"{p:.2f}" for p in logits.softmax(-1)[0].tolist()]


print("as they are      ", show(four))
print("temperature 0.5  ", show(four / 0.5))
print("temperature 2    ", show(four / 2))
print("top_k 1          ", show(sampler.keep_top_k(four, torch.tensor([1]))))
print("top_p 0.7        ", show(sampler.keep_top_p(four, torch.tensor([0.7]))))
print("min_p 0.2        ", show(sampler.keep_min_p(four, torch.tensor([0.2]))))

show_source(sampler.keep_min_p)
show_source(sampler.keep_top_p)

# %% [markdown]
# A filter sets the losers' scores to minus infinity (`NEVER`), and softmax shares their probability out among the survivors. Each
# row of the batch has its own parameter; `p[:, None]` is p as a column.
#
# Now the real distributions. T is the temperature; top_k 0, top_p 1 and min_p 0 mean *off*. Raise T to 2 for each prompt.

# %%
START = {"T": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def filtered(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The engine's order: temperature, top-k, top-p, min-p."""
    logits = logits / temperature
    for keep, value, off in (
        (sampler.keep_top_k, top_k, 0),
        (sampler.keep_top_p, top_p, 1),
        (sampler.keep_min_p, min_p, 0),
    ):
        if value != off:
            logits = keep(logits, torch.tensor([value]))
    return logits


def survivors(logits):
    return int(logits.isfinite().sum())


def draw_filters(ax, prompt, T, top_k, top_p, min_p):
    """The likeliest tokens before (black line) and after (bar), and how many survive."""
    before = scores[prompt][0]
    after = filtered(before[None], T, top_k, top_p, min_p)[0]
    ids = before.topk(10).indices.tolist()
    p, q = before.softmax(-1), after.softmax(-1)
    for y, i in enumerate(ids):
        ax.barh(y, 100 * float(q[i]), color=BLUE, height=0.7)
        ax.plot([100 * float(p[i])] * 2, [y - 0.4, y + 0.4], color="black", lw=1.5)
    ax.barh(10.4, 100 * (1 - float(q[ids].sum())), color=ORANGE, height=0.7)
    ax.plot([100 * (1 - float(p[ids].sum()))] * 2, [10, 10.8], color="black", lw=1.5)
    ax.set_yticks([*range(10), 10.4], [*(word(i) for i in ids), "all others"])
    ax.text(0.98, 0.2, f"{survivors(after):,} tokens survive", transform=ax.transAxes, ha="right", weight="bold")
    ax.text(0.98, 0.1, "black: before", transform=ax.transAxes, ha="right")
    ax.set(xlabel="probability (%)", xlim=(0, 100), ylim=(11, -0.7))
    ax.spines[["top", "right"]].set_visible(False)


slider_plot(
    draw_filters,
    prompt=["open", "sure"],
    T=[0.2, 0.5, 0.7, 1.0, 1.5, 2.0],
    top_k=[0, 1, 5, 20, 50],
    top_p=[1.0, 0.95, 0.9, 0.5],
    min_p=[0.0, 0.02, 0.05, 0.1, 0.3],
    start={"T": 1.0, "top_p": 0.9},
    stills=[
        {"prompt": "open", **START, "top_p": 0.9},
        {"prompt": "sure", **START, "top_p": 0.9},
        {"prompt": "sure", **START, "T": 2.0, "top_p": 0.9},
        {"prompt": "sure", **START, "T": 2.0, "min_p": 0.1},
    ],
    size=(6.6, 3.5),
)

# %%
heats = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]
SETTINGS = {"top_k 50": {"top_k": 50}, "top_p 0.9": {"top_p": 0.9}, "min_p 0.1": {"min_p": 0.1}}
fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.3), layout="constrained", sharey=True)
for ax, (name, logits) in zip(axes, scores.items(), strict=True):
    for (label, setting), color in zip(SETTINGS.items(), (GREY, BLUE, ORANGE), strict=True):
        counts = [survivors(filtered(logits, heat, **setting)) for heat in heats]
        ax.plot(heats, counts, "o-", color=color, lw=2, ms=4)
        ax.text(2.05, counts[-1], label, color=color, va="top" if "k" in label else "bottom")
    ax.set(title=PROMPTS[name], xlabel="temperature", yscale="log", xlim=(0.2, 2.65), xticks=[0.5, 1, 1.5, 2])
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", alpha=0.3)
axes[0].set_ylabel("tokens that survive")
plt.show()
compare("08.open", survivors(filtered(scores["open"], 1.0, top_p=0.9)), "tokens")
compare("08.sure", round(100 * survivors(filtered(scores["sure"], 2.0, top_p=0.9)) / V, 1), "%")

# %% [markdown]
# Surprised by the right-hand picture? At temperature 1, top-p is the clever one: a few tokens where the model is sure, hundreds
# where it is not; top-k cannot tell. But at temperature 2 it lets *thousands* through: the long tail now weighs more than the best
# word. min-p asks only how far a token is behind the best, and stays calm.
#
# ## The order matters
#
# Our engine divides by the temperature first and filters then. vLLM and SGLang do the same. llama.cpp's default chain has the
# temperature *last*. Same numbers, same names:

# %%
hot, p, k = torch.tensor([[2.0]]), torch.tensor([0.9]), torch.tensor([50])
logits = scores["sure"]
print("temperature 2, then top_p 0.9: ", f"{survivors(sampler.keep_top_p(logits / hot, p)):>6,} tokens survive")
print("top_p 0.9, then temperature 2: ", f"{survivors(sampler.keep_top_p(logits, p) / hot):>6,}")
k_then_p = sampler.keep_top_p(sampler.keep_top_k(logits, k), p)
p_then_k = sampler.keep_top_k(sampler.keep_top_p(logits, p), k)
print("top_k 50, then top_p 0.9:      ", f"{survivors(k_then_p):>6,}")
print("top_p 0.9, then top_k 50:      ", f"{survivors(p_then_k):>6,}")

# %% [markdown]
# A setting copied from one engine to another can be another sampler. (After top-k, softmax has shared out the tail's probability
# among 50 tokens, so p is reached sooner.)
#
# ## Exactly k
#
# `top_k=2`, and four tokens share the highest score. Which two stay?

# %%
ties = torch.tensor([1.0, 2.0, 2.0, 2.0, 2.0, 0.0])
level = ties.topk(2).values[-1]
print("torch.topk(2) takes ids       ", sorted(ties.topk(2).indices.tolist()))
print("'as large as the second' takes", (ties >= level).nonzero().flatten().tolist())
print(
    "keep_top_k takes              ",
    sampler.keep_top_k(ties[None], torch.tensor([2]))[0].isfinite().nonzero().flatten().tolist(),
)

half = scores["open"][0].bfloat16()  # the precision of most GPU runs
levels = half.topk(201).values
tied = int((levels[:-1] == levels[1:]).sum())  # place k is as good as place k + 1
print(f"our open prompt in bfloat16: for {tied} of the k from 1 to 200, 'as large as the k-th' keeps more than k")

# %% [markdown]
# torch promises no order among equals, so a CPU and a GPU may choose differently. The second way keeps too many (vLLM issue 50979).
# bfloat16 has few digits, so ties are common. Our rule is "the lower id first", and it is your first exercise.
#
# ## Drawing: the largest of noisy scores
#
# The textbook adds up probabilities until a random number is passed. Engines prefer the **Gumbel-max trick**: give *each token its
# own* random number u between 0 and 1, turn it into noise `-log(-log(u))`, add it to the score, take the largest. By hand:

# %%
probs, u = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.30, 0.85, 0.60])
noise = -(-u.log()).log()
print("token  probability  log p      u   noise    sum")
for i in range(3):
    print(f"{i:>5}{probs[i]:>13.2f}{probs[i].log():>7.2f}{u[i]:>7.2f}{noise[i]:>8.2f}{probs[i].log() + noise[i]:>7.2f}")
print("winner: token", int((probs.log() + noise).argmax()))

# %% [markdown]
# Is that fair? Draw 20,000 times from the six likeliest tokens and count. *Chi-square* says how far the counts are from what they
# should be; chance alone gives a few units. As yardsticks: torch's own `multinomial` in 200 such runs, and u itself as the noise,
# without the two logs.

# %%
best = scores["open"][0].topk(6)
logits6, count = best.values, 20_000
expected = logits6.softmax(-1) * count


def chi_square(draws):
    return float(((draws.bincount(minlength=6) - expected) ** 2 / expected).sum())


noise = sampler.gumbel_noise(torch.full((count,), 42), torch.arange(count), 6)  # seed 42, positions 0 to 19,999
drawn = (logits6 + noise).argmax(-1)
yardstick = torch.Generator().manual_seed(0)
usual = sorted(chi_square(torch.multinomial(logits6.softmax(-1), count, True, generator=yardstick)) for _ in range(200))
uniform = torch.rand(count, 6, generator=yardstick)
print(f"Gumbel noise:          chi-square {chi_square(drawn):>9.1f}")
print(f"torch.multinomial:     {usual[0]:.1f} to {usual[-1]:.1f} in 200 runs, the middle one {usual[100]:.1f}")
print(f"flat noise instead:    chi-square {chi_square((logits6 + uniform).argmax(-1)):>9.1f}")

fig, ax = plt.subplots(figsize=(6.4, 3.0), layout="constrained")
ax.bar(range(6), drawn.bincount(minlength=6) / count * 100, color=BLUE, width=0.6)
ax.plot(range(6), expected / count * 100, "D", color="black", ms=6)
ax.text(0.45, float(expected[0]) / count * 100, "softmax", va="center")
ax.text(0.45, float(expected[0]) / count * 88, "20,000 draws", color=BLUE, va="center")
ax.set_xticks(range(6), [word(i) for i in best.indices.tolist()])
ax.set(ylabel="share (%)", xlabel="next token")
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Our number is one that `multinomial` gets too; flat noise is far outside. The trick needs no running sum, and **no token's noise
# depends on any other token.** That is what makes the next part possible.
#
# ## A seed that survives company
#
# Where does u come from? The usual answer is a generator: an object with a *state*, which moves on with every number taken. But
# who takes the next number depends on who is in the batch. Our engine has no generator. Its noise is a *hash*: a function that
# scrambles its inputs so well that the result looks random, and is always the same for the same inputs.

# %%
show_source(sampler.gumbel_noise)

# %% [markdown]
# Seed, position and token id go in, noise comes out. No memory, so nothing can disturb it. The proof: one request with seed 42, in
# five situations. The last has only 6 blocks of memory for four requests. They run out, so the engine *preempts* one: it throws
# away its KV cache and computes it again later (stage 07).

# %%
MATES = ["The capital of France is", "My favourite colour is", "Once upon a time there was a little"]
mine = SamplingParams(max_tokens=16, temperature=0.9, seed=42, ignore_eos=True)
theirs = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)  # no seed


def run(row=None, blocks=64, params=mine):
    """Our request alone (row None) or as row `row` of four. Returns its output, and the engine's preemptions."""
    engine = LLM.from_parts(llm.config, llm.model, llm.tokenizer, num_kv_blocks=blocks, enable_prefix_caching=False)
    if row is None:
        return engine.generate(PROMPTS["open"], params)[0].outputs[0], 0
    prompts = [*MATES[:row], PROMPTS["open"], *MATES[row:]]
    outs = engine.generate(prompts, [*[theirs] * row, params, *[theirs] * (3 - row)])
    return outs[row].outputs[0], int(engine.stats()["preemptions"])


SITUATIONS = {"alone": {}, "first of four": {"row": 0}, "third of four": {"row": 2}, "last of four": {"row": 3},
              "last, tiny pool": {"row": 3, "blocks": 6}}  # fmt: skip


def five_times(prepare=lambda: None):
    prepare()
    alone, _ = run()
    for label, situation in SITUATIONS.items():
        prepare()
        out, preemptions = run(**situation)
        same = "same" if out.token_ids == alone.token_ids else "OTHER"
        print(f"{label:<16} preemptions {preemptions}   {same:<6}{' '.join(out.text.split())[:52]!r}")


five_times()

# %% [markdown]
# Five times the same tokens, also after the recomputation. Now a generator with a state: `swap` puts one `torch.Generator` in the
# engine's place, set back to 42 before each run.

# %%
generator = torch.Generator()


def stateful_noise(seeds, positions, size):
    u = torch.rand(len(seeds), size, generator=generator).clamp(1e-7, 1 - 1e-7)
    return -(-u.log()).log()


with swap("08.3", stateful_noise):
    five_times(prepare=lambda: generator.manual_seed(42))

# %% [markdown]
# The seed is the same, the story is not: every neighbour takes numbers from the same drawer. One generator *per request* would
# survive the neighbours (vLLM long did that, and still had a bug of this kind: issue 51226), but its state must travel with the
# request. A pure function has nothing to carry. Anybody can check a token years later, without drawing those before it:


# %%
def row_of(found):
    return torch.tensor([found[v] for v in range(V)])


asked = SamplingParams(max_tokens=16, temperature=0.9, seed=42, ignore_eos=True, logprobs=V)
out = llm.generate(PROMPTS["open"], asked)[0]
first = len(out.prompt_token_ids)
right, gaps = 0, []
for i, (token, found) in enumerate(zip(out.outputs[0].token_ids, out.outputs[0].logprobs, strict=True)):
    noisy = row_of(found) / 0.9 + sampler.gumbel_noise(torch.tensor([42]), torch.tensor([first + i]), V)[0]
    right += int(noisy.argmax()) == token
    best_two = noisy.topk(2).values
    gaps.append(float(best_two[0] - best_two[1]))
print(f"{right} of {len(gaps)} tokens found again, each on its own")
print(f"the closest of these {len(gaps)} races was won by {min(gaps):.4f}")

# %% [markdown]
# ## The honest limit
#
# So is a seeded request the same to the last bit, whoever is there? The noise is. **A stable seed is not a stable score.** Take a
# matrix product, the stuff of which models are made, and one and the same row: alone, and with three others.

# %%
g = torch.Generator().manual_seed(8)
weight, four_rows = torch.randn(576, 4096, generator=g), torch.randn(4, 576, generator=g)
alone, among = four_rows[:1] @ weight, (four_rows @ weight)[:1]
print(f"torch's product, one row alone and among four: largest difference {float((alone - among).abs().max()):.7f}")
print("why: 0.1 + 0.2 + 0.3 - 0.6 =", 0.1 + 0.2 + 0.3 - 0.6, "but 0.3 + 0.2 + 0.1 - 0.6 =", 0.3 + 0.2 + 0.1 - 0.6)


def wobble(rows, others):
    """The largest difference between two runs' log probabilities."""
    return max(float((row_of(a) - row_of(b)).abs().max()) for a, b in zip(rows, others, strict=True))


rows = out.outputs[0].logprobs  # of the request above, alone
for label, situation in (("in a batch of four", {"row": 3}), ("preempted as well", {"row": 3, "blocks": 6})):
    found, _ = run(**situation, params=asked)
    print(f"our engine, alone and {label}: largest difference {wobble(rows, found.logprobs):.7f}")

# %% [markdown]
# Where a line is not zero, other code ran, which adds in another order, and that changes the last digits. Is "in a batch of four"
# exactly zero? Then our engine's packed matrix products (`model.Linear.pack`) and its decode kernel are at work: on a CPU in float32
# they give each row the same bits, whatever its batch. Other libraries do not (the first line). And a preemption computes in one
# prefill what was decoded token by token, so then even our digits change.
#
# Where digits change, a seed is safe only while each draw is won by more than that. bfloat16 keeps 8 binary digits where float32
# keeps 24, and a long answer will meet a close race. (A line further up said "OTHER"? You met one.)
#
# It needs no sampling: Thinking Machines Lab asked Qwen3-235B one question 1,000 times at temperature *0* and got 80 different
# answers (He et al., "Defeating Nondeterminism in LLM Inference", September 2025). The cure is *batch-invariant* kernels, which add
# in one order whatever the batch and cost some speed: `VLLM_BATCH_INVARIANT=1`, SGLang's `--enable-deterministic-inference`.
#
# ## Two things about scores
#
# Most engines report the log probabilities of the *model*, before temperature and filters. And the **repetition penalty** (Keskar
# et al. 2019, arXiv:1909.05858) divides the scores of tokens that occurred by, say, 2. What does that do to a *negative* score?

# %%
for heat in (0.5, 2.0):
    asked = SamplingParams(max_tokens=1, temperature=heat, top_k=5, seed=3, logprobs=0)
    out = llm.generate(PROMPTS["sure"], asked)[0].outputs[0]
    token = out.token_ids[0]
    chance = float(filtered(scores["sure"], heat, top_k=5).softmax(-1)[0, token])
    reported = float(torch.tensor(out.logprobs[0][token]).exp())
    print(f"temperature {heat}, top_k 5: {word(token)}, reported {reported:.3f}, drawn with probability {chance:.3f}")

print()
four = torch.tensor([2.0, -2.0, 1.0, 0.0])
seen = [0, 1]  # tokens 0 and 1 occurred
naive = four.clone()
naive[seen] /= 2.0
repetition, presence, frequency = torch.tensor([[2.0], [0.0], [0.0]])
engine = sampler.penalize(four[None], [seen], [[0, 0]], repetition, presence, frequency)[0]
for label, x in (("no penalty", four), ("always divide", naive), ("the engine", engine)):
    print(f"{label:<14}scores {x.tolist()!s:<24}probability of token 1: {float(x.softmax(-1)[1]):.3f}")

# %% [markdown]
# Dividing -2 by 2 *rewards* the repetition. So negative scores are multiplied (transformers issue 2302 had this bug). The rule needs raw
# scores: log probabilities are never positive.
#
# ## Streaming: characters in pieces
#
# Show each token's text as it comes? Tokens are *bytes*, and a character can have up to four.

# %%
for sample in ("😀", "é", "世", "👩‍🚀"):
    pieces = [llm.tokenizer.token_bytes(i) for i in llm.tokenizer.encode(sample)]
    print(f"{sample}  {len(pieces)} tokens: {' | '.join(p.hex(' ') for p in pieces)}")
compare("08.emoji", len(llm.tokenizer.encode("😀")), "tokens")

ids = llm.tokenizer.encode("Hi 😀, café in 世界!")
alone = [llm.tokenizer.token_bytes(i).decode(errors="replace") for i in ids]
detokenizer = text.IncrementalDetokenizer(llm.tokenizer)
pushed = [detokenizer.push(i) for i in ids] + [detokenizer.flush()]
print("each token by itself:   ", "".join(alone))
print("IncrementalDetokenizer: ", "".join(pushed))
print(pushed)

# %% [markdown]
# Half a character is no character, and Python writes `�` (U+FFFD). The cure: bytes *wait* until the character is complete. An empty
# string in the list means that nothing is certain yet.
#
# ## Streaming: stop strings in pieces
#
# `stop=["\nUser:"]` ends the answer where the model begins to write the user's part, and is not shown. But it arrives in pieces
# too, and what was sent cannot be taken back. So whatever *could* be its beginning waits.

# %%
show_source(text.held_back)
show_source(text.StopStrings.push)

# %% [markdown]
# Both at once, on SmolLM2's own tokens for `Sure 😀\nUser!\nUser: hi`. Watch what waits, and why.

# %%
STOP = "\nUser:"
tokens = llm.tokenizer.encode("Sure 😀\nUser!\nUser: hi")


def follow(tokens):
    """What is shown, what text waits and which bytes wait, after each token until the stop string is met."""
    detokenizer, stops = text.IncrementalDetokenizer(llm.tokenizer), text.StopStrings(STOP)
    states, decoded, shown, data = [], "", "", b""
    for token in tokens:
        new = detokenizer.push(token)
        data, decoded = data + llm.tokenizer.token_bytes(token), decoded + new
        emitted, met = stops.push(new)
        shown += emitted
        states.append((shown, "" if met else decoded[len(shown) :], data[len(decoded.encode()) :], met))
        if met:
            break
    return states


states = follow(tokens)


def label_of(token):
    data = llm.tokenizer.token_bytes(token)
    try:
        return repr(data.decode())[1:-1].replace(" ", "␣")
    except UnicodeDecodeError:
        return data.hex(" ").upper()


def draw_stream(ax, i):
    shown, waits, half, met = states[i]
    ax.set(xlim=(0, 10), ylim=(0, 4.2))
    ax.set_axis_off()
    x = 0.0
    for n, token in enumerate(tokens):
        label = label_of(token)
        width = 0.32 + 0.115 * len(label)
        color = BLUE if n == i else "#d8d8d8" if n < i else "white"
        ax.add_patch(plt.Rectangle((x, 3.3), width, 0.7, facecolor=color, edgecolor="#888888"))
        ax.text(
            x + width / 2,
            3.65,
            label,
            ha="center",
            va="center",
            color="white" if n == i else "black" if n < i else GREY,
        )
        x += width + 0.08
    rows = (
        (2.35, "shown", repr(shown)[1:-1], GREEN),
        (1.4, "text waits", "stop string met: dropped" if met else repr(waits)[1:-1], ORANGE),
        (0.45, "bytes wait", half.hex(" ").upper(), ORANGE),
    )
    for y, label, value, color in rows:
        ax.text(1.5, y, label, ha="right", va="center")
        ax.add_patch(plt.Rectangle((1.65, y - 0.35), 8.0, 0.7, facecolor="white", edgecolor="#cccccc"))
        ax.text(1.8, y, value, va="center", color=color, weight="bold")


stepper(
    draw_stream,
    len(states),
    captions=["plain text goes through", "the space is shown, three bytes of 😀 wait", "the fourth byte: 😀 is whole",
              "a newline: may begin the stop string", "it may still become \\nUser:", "! settles it: all is shown", "a newline again",
              "again it may", "met: what waited is never shown"][: len(states)],
    size=(7.0, 2.3),
    still=[1, 4, 5, 8],
)  # fmt: skip

# %% [markdown]
# And if the answer ends at step 5? No stop string will come, so what waits *must* be shown; forgetting that loses the last words.
# The whole chain in the engine, on a real answer. Note the last piece of the second one:

# %%
chat = "User: hi\nBot: hello\nUser: how are you?\nBot:"
party = "Emoji: 😀 😀 😀 😀 😀"
for prompt, params in (
    (chat, SamplingParams(max_tokens=24, temperature=0.0, stop=[STOP])),
    (party, SamplingParams(max_tokens=11, temperature=0.0, ignore_eos=True)),
):
    deltas = list(llm.stream(prompt, params))
    whole = llm.generate(prompt, params)[0].outputs[0]
    print([d.text for d in deltas], deltas[-1].finish_reason)
    print("   streamed == not streamed:", "".join(d.text for d in deltas) == whole.text)

# %% [markdown]
# `max_tokens` cut the second answer in the middle of a character. Its bytes come out as `�`, in the stream and without it.
#
# ## What beginners get wrong
# - **A random state for the whole server.** Works in every test with one request. Then the seed depends on strangers.
# - **Reseeding with the same number at each step.** Each token gets the same noise, and the text circles.
# - **u = 0 or u = 1.** Infinite noise. At 49,152 draws a token and 23 bits a draw, an end comes up about every 170 tokens.
# - **Cutting the stop string off the finished text only.** Too late for `stream`.
#
# ## Other names for the same thing
# | here | vLLM | SGLang | llama.cpp |
# |---|---|---|---|
# | order | temperature, min-p, top-k, top-p | temperature, top-k, top-p, min-p | top-k, top-p, min-p, temperature |
# | `gumbel_noise` | `gumbel_sample(seed, pos)` | `multinomial_with_seed` | `std::mt19937`, a state |
# | `seed=` | `seed` | `sampling_seed` | `--seed` |
# | `held_back` | `stop_buffer_length`: always the longest stop minus 1 | in the detokenizer process | `string_find_partial_stop` |
# | `IncrementalDetokenizer` | `FastIncrementalDetokenizer` | `DetokenizerManager` | in the server |
#
# ## Three quick questions

# %%
quiz(
    "temperature 2 and top_p 0.9. Engine A applies the temperature first, engine B last. Which text is wilder?",
    ["A's", "B's", "Both alike"],
    0,
    [
        "The heat lifts the long tail before the filter looks, so thousands of tokens pass.",
        "B filters the model's own distribution, where few tokens hold 90 %. Heat only makes those more alike.",
        "They divide by the same number, but the filter sees another distribution. Count the survivors above.",
    ],
)

# %%
quiz(
    "A seeded request was preempted after 10 tokens and comes back, alone. What must the engine restore to draw token 11?",
    [
        "The state of its random generator",
        "Its tokens and its parameters, the seed among them",
        "The batch it was in",
    ],
    1,
    [
        "Our engine has none. An engine with one generator per request would have to keep it, yes.",
        "The position is the number of its tokens. Seed, position and token id give the noise; the KV cache is computed again.",
        "No neighbour goes into the noise, and into the scores in the last digits at most.",
    ],
)

# %%
quiz(
    "stop = ['\\n\\n']. The text ends in one newline, and the model emits its end token. What happens to the newline?",
    ["It is shown.", "It is dropped: it is half of a stop string.", "It waits for the next request."],
    0,
    [
        "It waited because it might have become a stop string. Now it cannot any more.",
        "Only a whole stop string is cut off. Streamed and not streamed must be the same text.",
        "Every request has a buffer of its own, and it ends with the request.",
    ],
)

# %% [markdown]
# ## Now you can
# say what each filter keeps and why the order counts, draw with noise that needs no memory, and stream text that is never taken
# back.
#
# **Next:** [exercises/08_sampling_and_streaming.ipynb](../exercises/08_sampling_and_streaming.ipynb): the engine's top-k, top-p and
# noise, and the two buffers of the stream.
#
# Noise that anybody can recompute has one more use. In stage 09 a small model guesses what the big one will draw.
