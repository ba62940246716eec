"""Exercises of stage 08."""

import contextlib
import hashlib
import inspect
import math

import torch

from minillm.course.exercise import Exercise, Mutant
from minillm.course.learn import make_llm
from minillm.course.learn import swap as swap_in
from minillm.request import SamplingParams
from minillm.sampler import _mix

NEVER = float("-inf")
PROMPT = "She opened the box and found a"


def sampled(llm, params, prompt=PROMPT):
    """One completion; token ids in place of the prompt where the tiny random model stands in."""
    return llm.generate(prompt if llm.tokenizer else [1, 2, 3, 4, 5], params)[0].outputs[0]


# ---- 08.1 keep_top_k


def top_k_oracle(rows, ks):
    kept = []
    for row, k in zip(rows, ks, strict=True):
        best = sorted(range(len(row)), key=lambda i: (-row[i], i))[: k or len(row)]
        kept.append([x if i in best else NEVER for i, x in enumerate(row)])
    return torch.tensor(kept)


def check_top_k(t, keep_top_k):
    def case(rows, ks, note, expected=None):
        want = top_k_oracle(rows, ks) if expected is None else torch.tensor(expected)
        t.case(keep_top_k, torch.tensor(rows), torch.tensor(ks), expected=want, note=note)

    case([[1.0, 4.0, 2.0, 3.0]], [2], "the two largest of four", [[NEVER, 4.0, NEVER, 3.0]])
    case([[1.0, 4.0, 2.0, 3.0]], [1], "k = 1", [[NEVER, 4.0, NEVER, NEVER]])
    case([[1.0, 2.0, 2.0, 2.0, 2.0, 0.0]], [2], "four equal scores, room for two: the lower ids stay")
    case([[1.0, 4.0, 2.0]], [0], "k = 0 switches the filter off", [[1.0, 4.0, 2.0]])
    case([[1.0, 4.0, 2.0]], [3], "k = V keeps all", [[1.0, 4.0, 2.0]])
    case([[1.0, 4.0, 2.0]], [9], "k above V keeps all", [[1.0, 4.0, 2.0]])
    case([[1.0, 4.0, 2.0, 3.0, 0.0]] * 4, [2, 1, 0, 4], "each row has its own k")
    case([[-5.0, -1.0, -3.0], [0.0, -0.5, 0.5]], [2, 1], "negative scores; a kept score is not changed")
    case([[0.5, NEVER, 1.5, NEVER, 0.0]], [2], "tokens that are forbidden already")
    case([[0.0] * 7] * 3, [3, 1, 6], "all equal")
    g = t.rng(8)
    for rows, size in ((3, 11), (2, 130), (5, 40)):
        ks = torch.randint(1, size, (rows,), generator=g).tolist()
        case(torch.randn(rows, size, generator=g).tolist(), ks, "random scores")
        case(torch.randint(0, 5, (rows, size), generator=g).float().tolist(), ks, "many ties")


def k_threshold(logits, k):
    ordered = logits.sort(dim=-1, descending=True).values
    last = ordered.gather(1, (k.clamp(1, logits.shape[1]) - 1)[:, None])
    return logits.masked_fill((logits < last) & (k[:, None] > 0), NEVER)


def k_strict(logits, k):
    ordered = logits.sort(dim=-1, descending=True).values
    last = ordered.gather(1, (k.clamp(1, logits.shape[1]) - 1)[:, None])
    return logits.masked_fill((logits <= last) & (k[:, None] > 0) & (k[:, None] < logits.shape[1]), NEVER)


def k_one_more(logits, k):
    order = logits.argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1)
    return logits.masked_fill((rank > k[:, None]) & (k[:, None] > 0), NEVER)


def k_zero_is_none(logits, k):
    rank = logits.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return logits.masked_fill(rank >= k[:, None], NEVER)


def k_first_row(logits, k):
    rank = logits.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return logits.masked_fill((rank >= k[0]) & (k[0] > 0), NEVER)


def k_order_as_rank(logits, k):
    order = logits.argsort(dim=-1, descending=True, stable=True)
    return logits.masked_fill((order >= k[:, None]) & (k[:, None] > 0), NEVER)


def k_higher_id(logits, k):
    order = logits.argsort(dim=-1, stable=True).flip(-1)
    return logits.masked_fill((order.argsort(dim=-1) >= k[:, None]) & (k[:, None] > 0), NEVER)


def k_torch_topk(logits, k):
    out = torch.full_like(logits, NEVER)
    for r, count in enumerate(k.tolist()):
        chosen = logits[r].topk(min(count or logits.shape[1], logits.shape[1])).indices
        out[r, chosen] = logits[r, chosen]
    return out


def k_zeros(logits, k):
    rank = logits.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return logits.masked_fill((rank >= k[:, None]) & (k[:, None] > 0), 0.0)


def k_compact(logits, k):
    return logits.topk(min(max(k.tolist()) or logits.shape[1], logits.shape[1])).values


def top_k_variant(logits, k):
    out = logits.clone()
    for row, count in zip(out, k.tolist(), strict=True):
        if 0 < count < len(row):
            last = row.kthvalue(len(row) - count + 1).values  # the count-th largest
            spare = count - int((row > last).sum())  # so many of those equal to it may stay
            row[row < last] = NEVER
            row[(row == last).nonzero().flatten()[spare:]] = NEVER
    return out


def plug_top_k(answer, swap):
    """Ties on the real model's scores, rounded as a GPU would; then a seeded run."""
    llm = make_llm(num_kv_blocks=32)
    size = llm.config.vocab_size
    all_scores = SamplingParams(max_tokens=1, temperature=0.0, logprobs=size, ignore_eos=True)
    row = sampled(llm, all_scores).logprobs[0]
    scores = torch.tensor([row.get(i, NEVER) for i in range(size)]).bfloat16().float()[None]
    best = scores.topk(size).values[0]
    k = next((k for k in range(20, size) if best[k - 1] == best[k]), 20)  # a k whose edge runs through a tie
    print(f"next token after {PROMPT!r}, scores rounded to bfloat16, top_k = {k}")
    print(f"  kept by 'as large as no. {k}':  {int((scores >= best[k - 1]).sum())} tokens")
    print(f"  kept by your keep_top_k:     {int(answer(scores, torch.tensor([k])).isfinite().sum())} tokens")
    params = SamplingParams(max_tokens=16, temperature=1.0, top_k=20, seed=8, ignore_eos=True)
    own = sampled(llm, params)
    with swap():
        yours = sampled(make_llm(num_kv_blocks=32), params)
    print(f"the engine's own:      {own.text or own.token_ids}")
    print(f"with your keep_top_k:  {yours.text or yours.token_ids}")
    print(f"tokens equal: {'yes' if own.token_ids == yours.token_ids else 'NO'}")
    if own.token_ids != yours.token_ids:
        raise AssertionError("the tokens differ")


# ---- 08.2 keep_top_p


def check_top_p(t, keep_top_p):
    def case(rows, ps, kept, note):
        logits = torch.tensor(rows)
        want = torch.full_like(logits, NEVER)
        for r, ids in enumerate(kept):
            want[r, ids] = logits[r, ids]
        t.case(keep_top_p, logits, torch.tensor(ps), expected=want, note=note)

    def logs(*probs):
        return [math.log(p) if p else NEVER for p in probs]

    case([logs(0.1, 0.6, 0.3)], [0.8], [[1, 2]], "0.6 is not enough, 0.6 + 0.3 is")
    case([logs(0.1, 0.6, 0.3)], [0.55], [[1]], "the likeliest alone reaches p")
    case([logs(0.1, 0.6, 0.3)], [0.95], [[0, 1, 2]], "the third is needed")
    case([logs(0.1, 0.6, 0.3)], [0.1], [[1]], "p below the likeliest: at least one stays")
    case([[0.0, 0.0, 0.0, 0.0]], [0.5], [[0, 1]], "four times 1/4: two reach p = 0.5 exactly, a third is one too many")
    case([[0.0, 0.0, 0.0, 0.0]], [0.4], [[0, 1]], "four equal: two, and the lower ids stay")
    case([[NEVER, 0.0, NEVER, 0.0]], [0.5], [[1]], "two equal among forbidden ones")
    case([[0.0, -50.0, -60.0]], [1.0], [[0, 1, 2]], "p = 1 keeps all, however unlikely")
    case([[0.0, 1.0, 0.5]], [0.0], [[1]], "p was 1e-60, which is 0 in float32: one stays")
    case([logs(0.1, 0.6, 0.3), logs(0.3, 0.1, 0.6), logs(0.25, 0.35, 0.4)], [0.8, 0.5, 0.9],
         [[1, 2], [2], [0, 1, 2]], "each row has its own p")  # fmt: skip
    case([[3.0, 5.0, 1.0, 4.0], [30.0, 31.0, 32.0, 29.0]], [0.6, 0.6], [[1], [2]], "scores are not probabilities")
    g = t.rng(88)
    for rows, size in ((3, 9), (2, 40), (5, 200)):
        logits = (2 * torch.randn(rows, size, generator=g)).tolist()
        ps, kept = [], []
        for row in logits:
            total = math.fsum(math.exp(x) for x in row)
            order = sorted(range(size), key=lambda i: -row[i])
            count = int(torch.randint(1, max(2, size // 3), (1,), generator=g))
            before = math.fsum(math.exp(row[i]) for i in order[: count - 1]) / total
            ps.append(before + 0.5 * math.exp(row[order[count - 1]]) / total)  # well between two sums
            kept.append(order[:count])
        case(logits, ps, kept, "random scores")


def _nucleus(logits, p, keep):
    """keep(probs, cumulative, p) says which of the sorted stay; the rest of the function is right."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    stays = keep(probs, probs.cumsum(dim=-1), p[:, None])
    drop = torch.zeros_like(stays).scatter(1, order, ~stays)
    return logits.masked_fill(drop & (p[:, None] < 1.0), NEVER)


def _first(stays):
    stays[:, 0] = True
    return stays


def p_crossing_lost(logits, p):
    return _nucleus(logits, p, lambda probs, total, p: total <= p)


def p_crossing_lost_but_one(logits, p):
    return _nucleus(logits, p, lambda probs, total, p: _first(total <= p))


def p_one_too_many(logits, p):
    return _nucleus(logits, p, lambda probs, total, p: total - probs <= p)


def p_tiny_is_none(logits, p):
    return _nucleus(logits, p, lambda probs, total, p: total - probs < p)


def p_one_cuts(logits, p):
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    stays = _first(probs.cumsum(dim=-1) - probs < p[:, None])
    return logits.masked_fill(torch.zeros_like(stays).scatter(1, order, ~stays), NEVER)


def p_not_scattered(logits, p):
    probs = logits.sort(dim=-1, descending=True, stable=True).values.softmax(dim=-1)
    stays = _first(probs.cumsum(dim=-1) - probs < p[:, None])
    return logits.masked_fill(~stays & (p[:, None] < 1.0), NEVER)


def p_unsorted(logits, p):
    probs = logits.softmax(dim=-1)
    stays = _first(probs.cumsum(dim=-1) - probs < p[:, None])
    return logits.masked_fill(~stays & (p[:, None] < 1.0), NEVER)


def p_no_softmax(logits, p):
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    stays = _first(ordered.cumsum(dim=-1) - ordered < p[:, None])
    drop = torch.zeros_like(stays).scatter(1, order, ~stays)
    return logits.masked_fill(drop & (p[:, None] < 1.0), NEVER)


def p_first_row(logits, p):
    return _nucleus(logits, p[:1].expand_as(p), lambda probs, total, p: _first(total - probs < p))


def p_each_alone(logits, p):
    return _nucleus(logits, p, lambda probs, total, p: probs >= 1.0 - p)


def p_threshold(logits, p):
    good = _nucleus(logits, p, lambda probs, total, p: _first(total - probs < p))
    level = logits.masked_fill(good == NEVER, math.inf).amin(dim=-1, keepdim=True)
    return logits.masked_fill((logits < level) & (p[:, None] < 1.0), NEVER)


def p_sorted_out(logits, p):
    ordered = logits.sort(dim=-1, descending=True, stable=True).values
    probs = ordered.softmax(dim=-1)
    stays = _first(probs.cumsum(dim=-1) - probs < p[:, None])
    return ordered.masked_fill(~stays & (p[:, None] < 1.0), NEVER)


def p_log_renormalised(logits, p):
    return _nucleus(logits, p, lambda probs, total, p: _first(total - probs < p)).log_softmax(dim=-1)


def p_renormalised(logits, p):
    return _nucleus(logits, p, lambda probs, total, p: _first(total - probs < p)).softmax(dim=-1)


def top_p_variant(logits, p):
    out = torch.full_like(logits, NEVER)
    for r, limit in enumerate(p.tolist()):
        probs, total = logits[r].softmax(dim=-1), 0.0
        left = probs.clone()
        while total < limit or total == 0.0:  # take the likeliest of those that are left, until they reach p
            best = int(left.argmax())
            if left[best] < 0:
                break
            out[r, best], left[best] = logits[r, best], -1.0
            total += float(probs[best])
        if limit >= 1.0:
            out[r] = logits[r]
    return out


def plug_top_p(answer, swap):
    """The nucleus breathes: how many tokens survive at each step of a real text."""
    sizes = []

    def watched(logits, p):
        kept = answer(logits, p)
        sizes.extend(kept.isfinite().sum(dim=-1).tolist())
        return kept

    params = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
    own = sampled(make_llm(num_kv_blocks=32), params)
    with swap_in("08.2", watched):
        llm = make_llm(num_kv_blocks=32)
        yours = sampled(llm, params)
    print(f"top_p = 0.9: how many of {llm.config.vocab_size:,} tokens survive, step by step")
    for token, size in zip(yours.token_ids, sizes, strict=True):
        shown = repr(llm.tokenizer.decode([token])) if llm.tokenizer else f"token {token}"
        print(f"  {size:>6}  {'#' * (1 + round(6 * math.log10(size))):<30}{shown}")
    print(f"tokens equal to the engine's own: {'yes' if own.token_ids == yours.token_ids else 'NO'}")
    if own.token_ids != yours.token_ids:
        raise AssertionError("the tokens differ")


# ---- 08.3 gumbel_noise


@contextlib.contextmanager
def every_bit(answer, value):
    """Inside, the `_mix` that the answer calls gives `value` for every input: 0, or -1 (all 64 bits set)."""
    scope = getattr(inspect.unwrap(answer), "__globals__", {})
    before = scope.get("_mix")
    if before is not None:
        scope["_mix"] = lambda x: torch.full_like(x, value)
    try:
        yield
    finally:
        if before is not None:
            scope["_mix"] = before


def check_gumbel(t, gumbel_noise):
    def noise_of(seeds, positions, size, note=""):
        return t.call(gumbel_noise, torch.tensor(seeds), torch.tensor(positions), size, note=note)

    def same(a, b):
        return a.shape == b.shape and bool((a == b).all())

    seeds, positions, call = [7, 7, 123_456_789_012], [0, 5, 5], "gumbel_noise([7, 7, 123456789012], [0, 5, 5], 11)"
    noise = noise_of(seeds, positions, 11)
    t.true(isinstance(noise, torch.Tensor), "the result is a tensor", call=call, got=type(noise).__name__)
    t.equal(list(noise.shape), [3, 11], f"the shape of {call}")
    t.equal(str(noise.dtype), "torch.float32", f"the dtype of {call}")
    t.true(noise.isfinite().all(), "every number is finite", call=call)
    t.true(same(noise, noise_of(seeds, positions, 11)), "called again, it gives the same", call=call)
    t.true(same(noise[1:2], noise_of([7], [5], 11)), "row 1 of three is the same when it is the only row",
           call="gumbel_noise([7], [5], 11)")  # fmt: skip
    t.true(same(noise.flip(0), noise_of(seeds[::-1], positions[::-1], 11)), "rows in another order are the same rows")
    t.true(same(noise[:, :4], noise_of(seeds, positions, 4)), "columns 0 to 3 do not depend on the size",
           call="gumbel_noise(..., 4)")  # fmt: skip
    t.true(len(set(noise[0].tolist())) == 11, "each column of a row has noise of its own", call=call)
    t.true(not same(noise[0], noise[1]), "another position has other noise", call="seed 7 at positions 0 and 5")
    t.true(not same(noise[1], noise[2]), "another seed has other noise", call="position 5, seeds 7 and 123456789012")
    a, b = noise_of([3, 4], [4, 3], 11)
    t.true(not same(a, b), "seed and position do not change places", call="seed 3 at position 4, seed 4 at position 3")
    a, b = noise_of([7, 7 + 2**32], [5, 5], 11)
    t.true(not same(a, b), "the high bits of a seed count", call="seeds 7 and 7 + 2**32 at position 5")
    a, b = noise_of([2**62, 2**62 + 1], [5, 5], 11)
    t.true(not same(a, b), "the low bits of a big seed count", call="seeds 2**62 and 2**62 + 1 at position 5")
    grid = noise_of([i // 16 for i in range(256)], [i % 16 for i in range(256)], 4)
    t.true(len(set(map(tuple, grid.tolist()))) == 256, "no two pairs of seed and position have the same noise",
           call="seeds 0 to 15 at positions 0 to 15")  # fmt: skip

    near = noise_of([1, 1, 1, 2, 0, 2**63 - 1], [1, 2, 3, 1, 3, 0], 20_000)
    rows = torch.cat([near[:, :-1], near[:, 1:]]).double()
    close = (torch.corrcoef(rows) - torch.eye(len(rows))).abs().max()
    t.true(close < 0.06, "neighbouring seeds and positions, also one column apart, have nothing to do with one another",
           call="gumbel_noise([1, 1, 1, 2, 0, 2**63 - 1], [1, 2, 3, 1, 3, 0], 20000)")  # fmt: skip

    for value, words in ((0, "every bit that _mix gives is 0"), (-1, "every bit that _mix gives is 1")):
        with every_bit(gumbel_noise, value):
            ends = noise_of([1, 2], [3, 4], 3, note=words)
        t.true(ends.isfinite().all(), "the noise is finite all the same: u is never 0 and never 1", call=words)

    t.true(abs(near.mean() - 0.5772) < 0.03, "the mean of Gumbel noise is 0.5772",
           call="120,000 numbers", got=round(float(near.mean()), 1))  # fmt: skip
    t.true(abs(near.var() - math.pi**2 / 6) < 0.06, "the variance of Gumbel noise is 1.645",
           call="120,000 numbers", got=round(float(near.var()), 1))  # fmt: skip
    t.true(len(near.unique()) > 110_000, "u has at least 2**20 values, so most of 120,000 numbers differ",
           call="120,000 numbers")  # fmt: skip

    probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    count = 20_000
    for what, draws in (
        ("20,000 positions", noise_of([5] * count, list(range(count)), 6)),
        ("20,000 seeds", noise_of(list(range(count)), [5] * count, 6)),
    ):
        counts = (probs.log() + draws).argmax(dim=-1).bincount(minlength=6)
        chi2 = float(((counts - probs * count) ** 2 / (probs * count)).sum())
        t.true(chi2 < 60, "log probabilities plus noise, largest wins: that draws each token as often as it should",
               call=f"probabilities 0.4, 0.3, 0.15, 0.1, 0.04, 0.01 over {what}")  # fmt: skip


def _bits(seeds, positions, size):
    return _mix(_mix(_mix(seeds) + positions)[:, None] + torch.arange(size))


def _uniform(bits):
    return (((bits >> 41) & (2**23 - 1)).float() + 0.5) / 2**23


def _gumbel(u):
    return -(-u.log()).log()


def g_stateful(seeds, positions, size):
    return _gumbel(torch.rand(len(seeds), size).clamp(1e-6, 1 - 1e-6))


def g_batch_row(seeds, positions, size):
    return _gumbel(_uniform(_bits(seeds + torch.arange(len(seeds)) * 1000003, positions, size)))


def g_flat_column(seeds, positions, size):
    columns = torch.arange(len(seeds) * size).view(len(seeds), size)
    return _gumbel(_uniform(_mix(_mix(_mix(seeds) + positions)[:, None] + columns)))


def g_first_seed(seeds, positions, size):
    return _gumbel(_uniform(_bits(seeds[:1].expand_as(seeds), positions, size)))


def g_no_position(seeds, positions, size):
    return _gumbel(_uniform(_bits(seeds, torch.zeros_like(positions), size)))


def g_no_seed(seeds, positions, size):
    return _gumbel(_uniform(_bits(torch.zeros_like(seeds), positions, size)))


def g_one_per_row(seeds, positions, size):
    return _gumbel(_uniform(_mix(_mix(seeds) + positions)))[:, None].expand(len(seeds), size).contiguous()


def g_added(seeds, positions, size):
    return _gumbel(_uniform(_mix(_mix(seeds + positions)[:, None] + torch.arange(size))))


def g_shifted(seeds, positions, size):
    return _gumbel(_uniform(_mix(_mix(seeds)[:, None] + positions[:, None] + torch.arange(size))))


def g_reaches_zero(seeds, positions, size):
    return _gumbel(((_bits(seeds, positions, size) >> 40) & (2**24 - 1)).float() / 2**24)


def g_reaches_one(seeds, positions, size):
    return _gumbel((((_bits(seeds, positions, size) >> 33) & (2**31 - 1)).float() + 0.5) / 2**31)


def g_sign_bit(seeds, positions, size):
    return _gumbel(((_bits(seeds, positions, size) >> 41).float() + 0.5) / 2**23)


def g_uniform(seeds, positions, size):
    return _uniform(_bits(seeds, positions, size))


def g_one_log(seeds, positions, size):
    return -_uniform(_bits(seeds, positions, size)).log()


def g_wrong_sign(seeds, positions, size):
    return -_gumbel(_uniform(_bits(seeds, positions, size)))


def g_symmetric(seeds, positions, size):
    return _gumbel(_uniform(_mix((_mix(seeds) ^ _mix(positions + 1))[:, None] + torch.arange(size))))


def g_seed_32(seeds, positions, size):
    return _gumbel(_uniform(_bits(seeds & (2**32 - 1), positions, size)))


def g_seed_float(seeds, positions, size):
    return _gumbel(_uniform(_bits(seeds.float().double().long(), positions, size)))


def g_size(seeds, positions, size):
    return _gumbel(_uniform(_mix(_mix(seeds)[:, None] + positions[:, None] * size + torch.arange(size))))


def g_few_bits(seeds, positions, size):
    return _gumbel((((_bits(seeds, positions, size) >> 40) & (2**16 - 1)).float() + 0.5) / 2**16)


def g_float64(seeds, positions, size):
    return _gumbel(_uniform(_bits(seeds, positions, size)).double())


def gumbel_variant(seeds, positions, size):
    rows = []
    for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True):  # a cryptographic hash, one at a time
        row = []
        for column in range(size):
            key = b"%d,%d,%d" % (seed, position, column)
            word = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big")
            row.append(-math.log(-math.log((word + 0.5) / 2**32)))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float32)


def plug_gumbel(answer, swap):
    """One seeded request in four situations, on the learner's noise."""
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=42, ignore_eos=True)
    other = SamplingParams(max_tokens=28, temperature=1.0, ignore_eos=True)
    with swap():
        first = make_llm(num_kv_blocks=32, enable_prefix_caching=False)
        if first.tokenizer:
            mine = PROMPT
            mates = ["The capital of France is", "My favourite colour is", "Once upon a time there was a little"]
        else:
            mine, mates = [1, 2, 3, 4, 5, 6, 7], [[8, 9, 10, 11, 12], [13, 14, 15, 16], [17, 18, 19, 20, 21, 22]]
        alone = sampled(first, params, mine)
        results = [("alone", alone, 0)]
        for label, row, blocks in (("row 0 of 4", 0, 32), ("row 2 of 4", 2, 32), ("last, tiny pool", 3, 6)):
            llm = make_llm(num_kv_blocks=blocks, enable_prefix_caching=False)
            prompts = [*mates[:row], mine, *mates[row:]]
            out = llm.generate(prompts, [*[other] * row, params, *[other] * (3 - row)])[row].outputs[0]
            results.append((label, out, int(llm.stats()["preemptions"])))
    print("a request with seed 42, on your noise")
    for label, out, preemptions in results:
        shown = " ".join(out.text.split())[:48] if out.text else str(out.token_ids[:9])
        note = f"({preemptions} preemptions)" if preemptions else ""
        print(f"  {label:<16}{'same' if out.token_ids == alone.token_ids else 'OTHER':<6} {shown} {note}".rstrip())
    if any(out.token_ids != alone.token_ids for _, out, _ in results):
        raise AssertionError("the tokens depend on the batch")


# ---- 08.4 held_back


def check_held_back(t, held_back):
    def case(text, stops, expected, note):
        t.case(held_back, text, stops, expected=expected, note=note)

    case("A\nUs", ["\nUser:"], 3, "the newline, U and s may be the beginning of the stop string")
    case("A\nUse!", ["\nUser:"], 0, "a beginning in the middle counts no more: the text went on differently")
    case("Hello", ["\nUser:"], 0, "nothing suspicious")
    case("Hello", [], 0, "no stop strings")
    case("", ["stop"], 0, "no text yet")
    case("\n", ["\nUser:"], 1, "text shorter than the stop string, and all of it may belong to it")
    case("aa", ["aab"], 2, "two a's: the longest possible beginning, not the shortest")
    case("xab", ["abc", "bcd"], 2, "two stop strings: the one with more to hold")
    case("xab", ["bcd", "abc"], 2, "the same two in the other order")
    case("A\nUser", ["\nUser:"], 5, "one character is missing")
    case("ab", ["abcdef", "x"], 2, "a long and a short stop string")
    case("Hello.", ["\n"], 0, "a stop string of one character is never half there")
    case("he said </", ["</s>", "END"], 2, "a stop string that is a tag")
    case("nana", ["nanas"], 4, "a stop string that repeats itself")
    case("banan", ["nanas"], 3, "... and starts again inside the text")
    g = t.rng(4)
    for _ in range(40):
        whole = "".join("ab\n"[i] for i in torch.randint(0, 3, (9,), generator=g).tolist())
        stops = [
            "".join("ab\n"[i] for i in torch.randint(0, 3, (n,), generator=g).tolist())
            for n in torch.randint(2, 6, (2,), generator=g).tolist()
        ]
        while any(stop in whole for stop in stops):  # the caller has looked for whole ones already
            whole = whole[:-1]
        ends = [whole[len(whole) - n :] for n in range(1, len(whole) + 1)]
        want = max([len(end) for end in ends if any(stop.startswith(end) for stop in stops)], default=0)
        case(whole, stops, want, "random texts and stop strings")


def h_always(text, stops):
    return min(len(text), max((len(stop) for stop in stops), default=1) - 1)


def h_nothing(text, stops):
    return max((len(stop) for stop in stops if text.endswith(stop)), default=0)


def h_shortest(text, stops):
    for n in range(1, len(text) + 1):
        if any(n < len(stop) and text.endswith(stop[:n]) for stop in stops):
            return n
    return 0


def h_first_stop(text, stops):
    for stop in stops:
        for n in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:n]):
                return n
    return 0


def h_only_first(text, stops):
    for stop in stops[:1]:
        for n in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:n]):
                return n
    return 0


def h_anywhere(text, stops):
    return max((n for stop in stops for n in range(1, len(stop)) if stop[:n] in text), default=0)


def h_from_first_letter(text, stops):
    return max((len(text) - text.find(stop[0]) for stop in stops if stop[0] in text), default=0)


def h_short_by_one(text, stops):
    return max((n for stop in stops for n in range(1, len(stop) - 1) if text.endswith(stop[:n])), default=0)


def h_needs_longer_text(text, stops):
    return max((n for stop in stops for n in range(1, min(len(stop), len(text))) if text.endswith(stop[:n])), default=0)


def h_no_default(text, stops):
    return max(n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))


def h_ends(text, stops):
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[-n:])), default=0)


def h_constant(text, stops):
    return max((len(stop) for stop in stops), default=1) - 1


def h_inside(text, stops):
    return max((n for stop in stops for n in range(1, len(stop)) if text[-n:] in stop), default=0)


def h_gives_up(text, stops):
    best = 0
    for stop in stops:
        for n in range(1, len(stop)):
            if not text.endswith(stop[:n]):
                break
            best = max(best, n)
    return best


def h_from_start(text, stops):
    best = 0
    for stop in stops:
        n = 0
        while n < min(len(stop), len(text)) and stop[n] == text[n]:
            n += 1
        best = max(best, n)
    return best


def h_sum(text, stops):
    return sum(held_variant(text, [stop]) for stop in stops)


def h_text(text, stops):
    n = held_variant(text, stops)
    return text[len(text) - n :]


def h_one_char(text, stops):
    return int(any(len(stop) > 1 and text.endswith(stop[0]) for stop in stops))


def held_variant(text, stops):
    for start in range(len(text)):  # the first place from which the rest of the text begins a stop string
        rest = text[start:]
        if any(stop.startswith(rest) and stop != rest for stop in stops):
            return len(rest)
    return 0


def show_stream(llm, prompt, params):
    """Stream, print each delta with its tokens, and return the text."""
    shown = ""
    for delta in llm.stream(prompt, params):
        shown += delta.text
        data = b"".join(llm.tokenizer.token_bytes(i) for i in delta.token_ids)
        end = f"   <- {delta.finish_reason}" if delta.finish_reason else ""
        print(f"  token {data!s:<22} shows {delta.text!r}{end}")
    return shown


def plug_held_back(answer, swap):
    """A chat that must end at the next "\\nUser:", streamed."""
    prompt = "User: hi\nBot: hello\nUser: how are you?\nBot:"
    params = SamplingParams(max_tokens=24, temperature=0.0, stop=["\nUser:"])
    own = make_llm(num_kv_blocks=32)
    if own.tokenizer is None:
        print("this needs the real model: `minillm fetch`")
        return
    whole = sampled(own, params, prompt)
    with swap():
        shown = show_stream(make_llm(num_kv_blocks=32), prompt, params)
    print(f"streamed with your held_back:  {shown!r}")
    print(f"not streamed, engine's own:    {whole.text!r}")
    if shown != whole.text:
        raise AssertionError("streamed and not streamed differ")


# ---- 08.5 IncrementalDetokenizer


class Pieces:
    """A tokenizer of which only the bytes matter: token id i is pieces[i]."""

    def __init__(self, pieces):
        self.pieces = pieces

    def token_bytes(self, id):
        return self.pieces[id]


def check_detokenizer(t, IncrementalDetokenizer):
    def case(pieces, expected, note):
        """expected: what each push shows, and last what flush shows."""
        made = t.call(IncrementalDetokenizer, Pieces(pieces), note=note)
        for i, want in enumerate(expected[:-1]):
            t.equal(
                t.call(made.push, i, note=note), want, f"push of {pieces[i]} after {b''.join(pieces[:i])}", note=note
            )
        t.equal(t.call(made.flush, note=note), expected[-1], f"flush after {b''.join(pieces)}", note=note)

    case([b"Hi", b" you"], ["Hi", " you", ""], "plain text goes straight through")
    case([b"\xf0\x9f", b"\x98\x80"], ["", "😀", ""], "😀 has the bytes F0 9F 98 80, here cut in two")
    case([b" \xf0\x9f\x98", b"\x80", b"!"], [" ", "😀", "!", ""], "a space, and three of the four bytes")
    case([b"\xf0", b"\x9f", b"\x98", b"\x80"], ["", "", "", "😀", ""], "each byte a token")
    case([b"ca", b"f\xc3", b"\xa9s"], ["ca", "f", "és", ""], "é in the middle of words")
    case([b"", b"a", b""], ["", "a", ""], "control tokens have no bytes")
    case([b"\xf0\x9f", b"", b"\x98\x80"], ["", "", "😀", ""], "a control token inside a character")
    case([b"ok \xf0\x9f"], ["ok ", "\ufffd"], "the end comes before the character is complete")
    case([b"\xff", b"a"], ["\ufffd", "a", ""], "a byte that never occurs in UTF-8")
    case([b"\xe4\xb8", b"a"], ["", "\ufffda", ""], "another character comes instead of the rest")
    case([b"\xef\xbf\xbd", b"x"], ["\ufffd", "x", ""], "a real U+FFFD is a character like any other")
    first = t.call(IncrementalDetokenizer, Pieces([b"\xf0\x9f", b"\x98\x80"]))
    second = t.call(IncrementalDetokenizer, Pieces([b"\xc3", b"\xa9"]))
    t.call(first.push, 0)
    t.call(second.push, 0)
    t.equal(t.call(first.push, 1), "😀", "push of b'\\x98\\x80' into one of two", note="two requests at the same time")
    t.equal(t.call(second.push, 1), "é", "push of b'\\xa9' into the other", note="two requests at the same time")
    again = t.call(IncrementalDetokenizer, Pieces([b"\xf0\x9f"]))
    t.call(again.push, 0)
    t.call(again.flush)
    t.equal(t.call(again.flush), "", "flush, called a second time", note="nothing is left after the first")
    g, whole = t.rng(5), "A 世界 😀é\u00a0ñ — ok"
    data = whole.encode()
    for _ in range(12):
        cuts = sorted(torch.randperm(len(data) - 1, generator=g)[:9].add(1).tolist())
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        deltas, shown = [], ""
        for n in range(1, len(pieces) + 1):
            try:
                sure = b"".join(pieces[:n]).decode()
            except UnicodeDecodeError as error:
                sure = b"".join(pieces[:n])[: error.start].decode()
            deltas.append(sure[len(shown) :])
            shown = sure
        case(pieces, [*deltas, ""], "a text cut at random bytes")


class DPerToken:
    def __init__(self, tokenizer):
        self._token_bytes = tokenizer.token_bytes

    def push(self, id):
        return self._token_bytes(id).decode(errors="replace")

    def flush(self):
        return ""


class DIgnores(DPerToken):
    def push(self, id):
        return self._token_bytes(id).decode(errors="ignore")


class DLatin(DPerToken):
    def push(self, id):
        return self._token_bytes(id).decode("latin-1")


class Buffered:
    """Right, and the base of what is wrong below: bytes wait in `_held` until they are a whole character."""

    def __init__(self, tokenizer):
        self._token_bytes, self._held = tokenizer.token_bytes, b""

    def push(self, id):
        data = self._held + self._token_bytes(id)
        self._held = self._tail(data)
        return data[: len(data) - len(self._held)].decode(errors="replace")

    def _tail(self, data):
        """The bytes at the end that begin a character and do not finish it."""
        for n in (1, 2, 3):
            try:
                data[-n:].decode()
            except UnicodeDecodeError as error:
                if error.start == 0 and error.reason == "unexpected end of data":
                    return data[-n:]
        return b""

    def flush(self):
        rest, self._held = self._held, b""
        return rest.decode(errors="replace")


class DLosesTheEnd(Buffered):
    def flush(self):
        return ""


class DFlushKeeps(Buffered):
    def flush(self):
        return self._held.decode(errors="replace")


class DWholeText(Buffered):
    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self._text = ""

    def push(self, id):
        self._text += super().push(id)
        return self._text


class DStrict(Buffered):
    def push(self, id):
        data = self._held + self._token_bytes(id)
        try:
            text, self._held = data.decode(), b""
        except UnicodeDecodeError:
            text, self._held = "", data
        return text


class DJams(Buffered):
    """Shows what decodes and keeps everything from the first error on, also what can never become a character."""

    def push(self, id):
        data = self._held + self._token_bytes(id)
        try:
            text, self._held = data.decode(), b""
        except UnicodeDecodeError as error:
            text, self._held = data[: error.start].decode(), data[error.start :]
        return text


class DByLength(Buffered):
    """Believes the first byte about the length, whatever follows."""

    def _tail(self, data):
        for n in (1, 2, 3):
            if len(data) >= n and data[-n] >= 0xC0:
                length = 2 if data[-n] < 0xE0 else 3 if data[-n] < 0xF0 else 4
                return data[-n:] if n < length else b""
        return b""


class DIgnoresLater(Buffered):
    """Waits rightly, but drops what is no character."""

    def push(self, id):
        data = self._held + self._token_bytes(id)
        self._held = self._tail(data)
        return data[: len(data) - len(self._held)].decode(errors="ignore")

    def flush(self):
        rest, self._held = self._held, b""
        return rest.decode(errors="ignore")


class DStrictErrors(DIgnoresLater):
    """Waits rightly, and raises at what is no character."""

    def push(self, id):
        data = self._held + self._token_bytes(id)
        self._held = self._tail(data)
        return data[: len(data) - len(self._held)].decode()

    def flush(self):
        rest, self._held = self._held, b""
        return rest.decode()


class DWaitsAtReplacement:
    """The heuristic: decode everything again, and wait while it ends in U+FFFD."""

    def __init__(self, tokenizer):
        self._token_bytes, self._data, self._shown = tokenizer.token_bytes, b"", 0

    def push(self, id):
        self._data += self._token_bytes(id)
        text = self._data.decode(errors="replace")
        if text.endswith("\ufffd"):
            return ""
        new, self._shown = text[self._shown :], len(text)
        return new

    def flush(self):
        text = self._data.decode(errors="replace")
        new, self._shown = text[self._shown :], len(text)
        return new


class DRetracts(DWaitsAtReplacement):
    """Shows U+FFFD at once and corrects nothing later."""

    def push(self, id):
        self._data += self._token_bytes(id)
        text = self._data.decode(errors="replace")
        new, self._shown = text[self._shown :], len(text)
        return new


class DShared(Buffered):
    waiting = bytearray()

    def push(self, id):
        data = bytes(self.waiting) + self._token_bytes(id)
        tail = self._tail(data)
        self.waiting[:] = tail
        return data[: len(data) - len(tail)].decode(errors="replace")

    def flush(self):
        rest = bytes(self.waiting)
        self.waiting.clear()
        return rest.decode(errors="replace")


class DAllAtTheEnd(Buffered):
    def push(self, id):
        self._held += self._token_bytes(id)
        return ""


def plug_detokenizer(answer, swap):
    """The model writes emoji, whose bytes come token by token."""
    prompt = "Emoji: 😀 😀 😀 😀 😀"
    params = SamplingParams(max_tokens=11, temperature=0.0, ignore_eos=True)
    own = make_llm(num_kv_blocks=32)
    if own.tokenizer is None:
        print("this needs the real model: `minillm fetch`")
        return
    whole = sampled(own, params, prompt)
    with swap():
        shown = show_stream(make_llm(num_kv_blocks=32), prompt, params)
    print(f"streamed with your class:    {shown!r}")
    print(f"all tokens decoded at once:  {own.tokenizer.decode(whole.token_ids)!r}")
    if shown != own.tokenizer.decode(whole.token_ids):
        raise AssertionError("the streamed text is not the decoded text")


EXERCISES = [
    Exercise(
        id="08.1",
        symbol="minillm.sampler:keep_top_k",
        title="Exactly k",
        minutes=10,
        difficulty=2,
        statement="""
            Keep the `k[r]` largest scores of row `r` and forbid the rest: set them to `NEVER` (minus infinity).
            `logits` is `[R, V]`, `k` is `[R]` (int64). **Exactly** `k[r]` stay, also where scores are equal: among equals
            the lower token id stays. `k[r] = 0` means: no filter for this row. `k[r]` may be larger than V. What stays is not
            changed, and `logits` itself is left alone.

            Worked example: scores `[1, 2, 2, 2, 2, 0]` with k = 2. Four tokens share the highest score; ids 1 and 2 stay:
            `[-inf, 2, 2, -inf, -inf, -inf]`.
        """,
        hints=(
            "A token stays if fewer than k tokens come before it. So each token needs its *rank* in its row: 0 for the best.",
            "`argsort` gives an order, which is not a rank: the order says who stands at place 0, the rank says at which place "
            "a token stands. One is the inverse of the other. Ties: look at the parameter `stable` (beside it torch wants the "
            "dimension by name, `dim=-1`; its error message does not say so).",
            "Sort the ids stably, from the largest score down. Turn the order into ranks: `argsort` once more does it, or "
            "scatter 0, 1, 2 ... to the places that the order names. Then one `masked_fill` where the rank is at least k, "
            "compared with `k` as a column, but only in rows whose k is above 0.",
        ),
        explanation="""
            A stable sort keeps equals in the order they came in, so the lower id is first. The rank is the inverse
            permutation of that order: a scatter of 0, 1, 2 ... or a second `argsort`.

            Also right: `kthvalue`, then keep what is larger, and fill up with the first of those equal to it. That avoids
            the full sort, which is dear for 150,000 tokens; real engines have kernels for it (FlashInfer's samplers find
            the pivot without sorting).

            Does one token more matter? A test that says "top_k = 1 is greedy" fails, and a request gives other tokens
            when another kernel breaks the tie in another way (vLLM issue 50979). In bfloat16 ties are common.

            vLLM: `apply_top_k_top_p`; SGLang: `top_k` in `SamplingBatchInfo`, 1 << 30 when off; llama.cpp: `llama_sampler_init_top_k`.
        """,
        check=check_top_k,
        mutants=(
            Mutant(
                "threshold",
                k_threshold,
                "You keep everything as large as the k-th score. With ties that is more than k: count what is left.",
                "vLLM issue 50979",
            ),
            Mutant(
                "strict",
                k_strict,
                "You keep only what is larger than the k-th score, so the k-th itself is lost.",
                "an off-by-one at the threshold",
            ),
            Mutant("one_more", k_one_more, "One too many: ranks count from 0, so rank k is out.", "a common slip"),
            Mutant(
                "zero_is_none",
                k_zero_is_none,
                "k = 0 must switch the filter off. Yours forbids every token of that row.",
                "vLLM and llama.cpp use 0 or -1 for 'off'",
            ),
            Mutant(
                "first_row",
                k_first_row,
                "You use the k of row 0 for all rows. In a batch each request brings its own.",
                "samplers written for one request",
            ),
            Mutant(
                "order_as_rank",
                k_order_as_rank,
                "argsort says which token stands at each place. You need the inverse: at which place each token stands.",
                "argsort taken for a rank",
            ),
            Mutant(
                "higher_id",
                k_higher_id,
                "Among equals the higher id stays. An ascending sort, flipped, turns the ties round too.",
                "sort and flip",
            ),
            Mutant(
                "torch_topk",
                k_torch_topk,
                "Exactly k, but torch.topk promises no order among equals: which of them stay is up to the kernel.",
                "torch.topk's documentation",
            ),
            Mutant(
                "zeros",
                k_zeros,
                "You set the losers to 0, which is a good score (above every negative one). Use NEVER.",
                "masking scores as if they were probabilities",
            ),
            Mutant(
                "compact",
                k_compact,
                "You return only the k best. The row must keep its V columns, or ids lose their meaning.",
                "topk().values",
            ),
        ),
        variant=top_k_variant,
        scratch="""
            scores = torch.tensor([[1.0, 2.0, 2.0, 2.0, 2.0, 0.0]])
            for k in (0, 1, 2, 9):
                print(k, keep_top_k(scores, torch.tensor([k])).tolist())
        """,
        plug_in=plug_top_k,
    ),
    Exercise(
        id="08.2",
        symbol="minillm.sampler:keep_top_p",
        title="The nucleus",
        minutes=12,
        difficulty=2,
        statement="""
            Sort the tokens by probability. Keep the **smallest** number of likeliest ones whose probabilities add up to *at
            least* `p[r]`; set the rest to `NEVER`. `logits` is `[R, V]`, scores and not probabilities; `p` is `[R]`
            float32. At least one token stays, whatever p is (a tiny p is 0 in float32). `p[r] = 1` keeps all, however
            unlikely. Among equals the lower id comes first. What stays keeps its score.

            Worked example: probabilities `[0.1, 0.6, 0.3]`. With p = 0.8 ids 1 and 2 stay: 0.6 is not enough, 0.6 + 0.3 is.
            With p = 0.55 only id 1 stays.
        """,
        hints=(
            "Walk down the sorted tokens. Which token is the *first* that you would leave out?",
            "A token stays if the sum of those *before* it has not reached p yet. `cumsum` counts the token itself too: what do "
            "you have to take off? (Sorting with `stable=True`: torch then wants `dim=-1` by name.)",
            "Sort (stable, descending) and keep the order; softmax; the running sum without the token itself; compare it with p "
            "as a column. Force column 0 to stay. Then `scatter_` the decisions back to the tokens' own columns, and leave "
            "rows with p of 1 alone.",
        ),
        explanation="""
            The rule "drop a token if those before it reach p already" gives the smallest set at once, and shows the two
            classic mistakes. Compare the sum *with* the token, and the token that crosses p is lost (and, with one very
            likely token, everything is). Use `>` for `>=`, and at exact equality one token too many stays. Engines have
            had both (transformers issue 18976, llama.cpp pull request 1953).

            p = 1 needs care: in float32 the sum reaches 1.0 long before the last of 49,152 tokens.

            Also right: take the likeliest again and again until the sum is reached; or an exclusive sum by shifting.
            Sums in another order can differ in the last bit, so two right answers can disagree about one token at the
            very edge.

            Holtzman et al. 2019 (arXiv:1904.09751), section 3. vLLM: `apply_top_k_top_p`; SGLang:
            `top_p_renorm_prob`; llama.cpp: `llama_sampler_init_top_p` with `min_keep`.
        """,
        check=check_top_p,
        mutants=(
            Mutant(
                "crossing_lost",
                p_crossing_lost,
                "The token that crosses p is lost. With one very likely token, nothing at all is left.",
                "llama.cpp pull request 1953",
            ),
            Mutant(
                "crossing_lost_but_one",
                p_crossing_lost_but_one,
                "The token that crosses p belongs to the set: without it the sum is below p.",
                "the usual repair of the empty nucleus",
            ),
            Mutant(
                "one_too_many",
                p_one_too_many,
                "At exact equality you keep one too many: those before it add up to p already.",
                "transformers issue 18976",
            ),
            Mutant(
                "tiny_is_none",
                p_tiny_is_none,
                "With p = 0 nothing is left. (1e-60 is 0 in float32.) The likeliest must stay in any case.",
                "a p below the smallest float32",
            ),
            Mutant(
                "one_cuts",
                p_one_cuts,
                "p = 1 must keep all. In float32 the running sum reaches 1.0 before the end, so the tail is cut.",
                "a common slip",
            ),
            Mutant(
                "not_scattered",
                p_not_scattered,
                "Your decisions are in sorted order, the columns are not. Scatter them back to the tokens' ids.",
                "a mask in the wrong order",
            ),
            Mutant(
                "unsorted",
                p_unsorted,
                "You add up in the order of the ids. The likeliest must come first.",
                "cumsum without a sort",
            ),
            Mutant(
                "no_softmax",
                p_no_softmax,
                "You add up scores. p is a sum of probabilities: softmax first.",
                "logits taken for probabilities",
            ),
            Mutant(
                "first_row",
                p_first_row,
                "You use the p of row 0 for all rows. In a batch each request brings its own.",
                "samplers written for one request",
            ),
            Mutant(
                "each_alone",
                p_each_alone,
                "You compare each probability with 1 - p by itself. The sum decides.",
                "top-p mixed up with min-p",
            ),
            Mutant(
                "threshold",
                p_threshold,
                "You keep everything as likely as the last one that is needed. With ties that is more than the smallest set.",
                "cutting by value, not by place",
            ),
            Mutant(
                "renormalised",
                p_renormalised,
                "You return probabilities. The next step expects scores: keep those of the survivors as they are.",
                "filters that change what they pass on",
            ),
            Mutant(
                "log_renormalised",
                p_log_renormalised,
                "The right tokens stay, but with other scores (log_softmax after the filter?). Leave the scores as they are.",
                "renormalising after each filter",
            ),
            Mutant(
                "sorted_out",
                p_sorted_out,
                "You return the scores in sorted order, so column 0 is no longer token 0. Keep the columns where they are.",
                "ordered returned for logits",
            ),
        ),
        variant=top_p_variant,
        scratch="""
            scores = torch.tensor([[0.1, 0.6, 0.3]]).log()
            for p in (0.1, 0.55, 0.8, 1.0):
                print(p, keep_top_p(scores, torch.tensor([p])).softmax(-1).tolist())
        """,
        plug_in=plug_top_p,
    ),
    Exercise(
        id="08.3",
        symbol="minillm.sampler:gumbel_noise",
        title="Noise without a memory",
        minutes=15,
        difficulty=3,
        statement="""
            Return Gumbel noise of shape `[R, size]`, float32. The number in row r, column c is a **pure function** of
            `seeds[r]`, `positions[r]` and c, and of nothing else: not of R, r, `size`, or earlier calls. `seeds` and
            `positions` are int64 `[R]`; seeds go up to 2**63 - 1.

            Given: `_mix(x)`, which scrambles each int64 of a tensor (of any shape), so that inputs that differ in one bit
            give unrelated outputs. int64 arithmetic wraps round, and that is fine. Mix the three numbers with it; make
            from at least 20 of the bits a number u with 0 < u < 1, **both ends excluded**, evenly spread; then the noise is
            `-log(-log(u))`. Every bit of a seed counts, and seed 3 at position 4 must not be seed 4 at position 3. Which mixture you choose is up to you:
            the check tests properties, not numbers.

            Worked example of the last step: u = 0.5 gives `-log(0.6931) = 0.3665`; u = 0.9 gives 2.2504.
        """,
        hints=(
            "Mix one number at a time: scramble, add the next number, scramble again. Why is adding all three first not enough?",
            "Rows first: `_mix` of the seeds, plus positions, mixed again, gives one number a row, `[R]`. As a column plus "
            "`torch.arange(size)` it is `[R, size]`; scramble once more. An int64 has a sign: `>>` drags it along, so mask.",
            "Take 23 bits: shift right by 41 and `&` with `2**23 - 1`. That is a whole number from 0 to 2**23 - 1. Make it a "
            "float, add one half, divide by 2**23: then neither end is reached, and float32 holds each value exactly. Two "
            "logs, two minus signs.",
        ),
        explanation="""
            A *counter-based* generator: a hash of (key, counter) instead of a state that moves on (Salmon et al. 2011,
            "Parallel Random Numbers: As Easy as 1, 2, 3"). It needs no order and no memory, so a request draws the same
            alone, in any batch, after a preemption, or on another machine. The mixing is the finaliser of SplitMix64.

            Why one half is added: 23 bits give 2**23 values, one of which is 0, and `-log(-log(0))` is minus infinity: that
            token can never win. With more bits than float32 can hold, the largest u rounds to 1, and plus infinity always
            wins. SGLang and vLLM clamp or add an epsilon for these ends. Rare? A vocabulary of 49,152 draws 23 bits that
            often *per token*: an end comes up about every 170 tokens.

            Also right: any good hash of the three, such as blake2b (slow), or Philox (what GPUs use). A new
            `torch.Generator` for each (seed, position) is pure too, but runs row by row, and needs a well mixed seed: on a CPU it
            looks at the low 32 bits only.

            vLLM: `gumbel_sample` takes `seed` and `pos`; SGLang: `multinomial_with_seed(logprobs, seed, positions)`;
            llama.cpp: one `std::mt19937` for each sampler, a state.
        """,
        check=check_gumbel,
        mutants=(
            Mutant(
                "stateful",
                g_stateful,
                "A second call gives other numbers: there is a hidden state (torch.rand). Use only the three arguments.",
                "samplers with a torch.Generator",
            ),
            Mutant(
                "batch_row",
                g_batch_row,
                "The noise depends on the row in the batch. A request changes rows whenever a neighbour comes or goes.",
                "vLLM issue 51226",
            ),
            Mutant(
                "flat_column",
                g_flat_column,
                "You number the cells of the whole [R, size] table, so the noise depends on the row and the size.",
                "one arange for the batch",
            ),
            Mutant(
                "first_seed",
                g_first_seed,
                "All rows use seeds[0]. Each request has its own seed.",
                "one manual_seed for the batch",
            ),
            Mutant(
                "no_position",
                g_no_position,
                "The position is not used: every token of a request gets the same noise, and the text loops.",
                "reseeding with the request's seed at every step",
            ),
            Mutant("no_seed", g_no_seed, "The seed is not used: all requests draw alike.", "a common slip"),
            Mutant(
                "one_per_row",
                g_one_per_row,
                "All columns of a row get the same noise, so the largest score always wins: that is greedy.",
                "noise that is broadcast",
            ),
            Mutant(
                "added",
                g_added,
                "Your mixture adds seed and position alike: seed 3 at position 4 is seed 4 at position 3. Mix one before the other.",
                "manual_seed(seed + step); tl.rand(seed + pos) in an early vLLM kernel",
            ),
            Mutant(
                "shifted",
                g_shifted,
                "Position and column are only added up: the noise of the next position is this one's, moved by a column.",
                "a counter of position + column",
            ),
            Mutant(
                "reaches_zero",
                g_reaches_zero,
                "u can be 0: then -log(-log(0)) is minus infinity. Add half a step before you divide.",
                "nano-vllm and vLLM clamp their exponentials for this reason",
            ),
            Mutant(
                "reaches_one",
                g_reaches_one,
                "u can be 1: float32 holds 24 bits, so 31 bits and a half round up. Then the noise is plus infinity. "
                "Take fewer bits.",
                "SGLang's multinomial_with_seed before its cap",
            ),
            Mutant(
                "sign_bit",
                g_sign_bit,
                "Half of your u are negative, and their log is NaN: >> keeps the sign. Mask with & after the shift.",
                "unsigned shifts ported from C",
            ),
            Mutant(
                "uniform",
                g_uniform,
                "That is u itself. Gumbel noise is -log(-log(u)); flat noise draws with other probabilities.",
                "adding uniform noise to scores",
            ),
            Mutant(
                "one_log",
                g_one_log,
                "One log gives exponential noise. That fits probs / noise, but log probs + noise needs two logs.",
                "the exponential trick, half taken over",
            ),
            Mutant(
                "wrong_sign",
                g_wrong_sign,
                "The sign of the outer log is missing: the long tail must point up.",
                "a common slip",
            ),
            Mutant(
                "symmetric",
                g_symmetric,
                "You mix seed and position each by itself and combine them: some pairs meet. Scramble between the two.",
                "the xor of two hashes",
            ),
            Mutant(
                "seed_32",
                g_seed_32,
                "Only the low 32 bits of the seed are used (as in torch's CPU generator): seeds 7 and 7 + 2**32 draw alike.",
                "torch.Generator().manual_seed on a CPU; int32 seeds in GPU kernels",
            ),
            Mutant(
                "seed_float",
                g_seed_float,
                "The seed goes through a float, which has no room for its low bits: big neighbouring seeds draw alike.",
                "arithmetic in float32",
            ),
            Mutant(
                "size_mixed_in",
                g_size,
                "The size goes into your mixture (position * size + column). Scramble between the position and the column.",
                "a flat index as the counter",
            ),
            Mutant(
                "few_bits",
                g_few_bits,
                "Too few bits: u has so few values that many tokens get the same noise, and unlikely ones can never win.",
                "16 random bits a token",
            ),
            Mutant("float64", g_float64, "The dtype must be float32, as the scores are.", "a common slip"),
        ),
        variant=gumbel_variant,
        scratch="""
            noise = gumbel_noise(torch.tensor([7, 7]), torch.tensor([0, 1]), 5)
            print(noise)
            print(noise[1:] == gumbel_noise(torch.tensor([7]), torch.tensor([1]), 5))
        """,
        plug_in=plug_gumbel,
    ),
    Exercise(
        id="08.4",
        symbol="minillm.text:held_back",
        title="Half a stop string",
        minutes=8,
        difficulty=2,
        statement="""
            `text` is what has been generated and not shown yet. `stops` is a list of stop strings (maybe empty, none of them
            `""`). How many characters at the **end** of `text` must wait, because they could be the beginning of a stop
            string? Return an int, 0 if none. Hold no more than needed, and never less: the longest such end counts, over
            all stop strings. `text` holds no whole stop string; the caller looked for that.

            Worked example: stop `"\\nUser:"`. `"A\\nUs"` must hold **3** characters (newline, U, s). `"A\\nUse!"` holds
            **0**: the `!` settles it. Stop `"aab"`, text `"aa"`: hold **2**.
        """,
        hints=(
            "Try by hand: text `xaa`, stop `aab`. Which ends of the text are also beginnings of the stop string?",
            "For a stop string of n characters, the beginnings to try have 1 to n - 1 characters. Which string methods ask "
            "about the end of a text? What if no beginning fits?",
            "Go through all stop strings and all their proper beginnings (slices from 0). Collect the lengths of those "
            "that the text ends with, and return the largest, with 0 for an empty collection (see `default` of `max`).",
        ),
        explanation="""
            A stream can send a character but never take it back. So what *could* turn into a stop string waits, and
            nothing else. It is the overlap that string matching calls the *border* of text and pattern; Knuth-Morris-Pratt
            would keep it up to date in constant time per character, but these texts have a few characters.

            Also right: try every place of the text, from the left, and ask whether what follows begins a stop string.
            Safe but late: always hold `max(len(stop)) - 1` characters. vLLM does that (`stop_buffer_length` in its
            detokenizer): simple, and text lags behind by a few characters.

            llama.cpp's server: `string_find_partial_stop`. The bug in both directions, half a stop string shown or the held
            text lost at the end: vLLM issue 3574, SwiftLM issue 126.
        """,
        check=check_held_back,
        mutants=(
            Mutant(
                "whole_only",
                h_nothing,
                "You look for whole stop strings. Half of one must be held too, or it is shown before the rest arrives.",
                "vLLM issue 3574",
            ),
            Mutant(
                "always",
                h_always,
                "Safe, but you hold characters that cannot begin a stop string, so text comes late.",
                "vLLM's stop_buffer_length",
            ),
            Mutant(
                "shortest",
                h_shortest,
                "You stop at the shortest beginning that fits. With stop 'aab', text 'aa' must hold both.",
                "the first match taken",
            ),
            Mutant(
                "first_match",
                h_first_stop,
                "You return at the first stop string that fits. Another one may have to hold more.",
                "a return inside the loop",
            ),
            Mutant(
                "only_first",
                h_only_first,
                "Only stops[0] is looked at. There may be several.",
                "servers with one stop string",
            ),
            Mutant(
                "anywhere",
                h_anywhere,
                "You look for the beginning anywhere in the text. If other characters follow, it is settled.",
                "in for endswith",
            ),
            Mutant(
                "from_first_letter",
                h_from_first_letter,
                "You hold from the first letter of a stop string on, even if the text goes on differently.",
                "holding until a match or the end",
            ),
            Mutant(
                "short_by_one",
                h_short_by_one,
                "When only the last character is missing, you let it go: range ends before its end.",
                "an off-by-one in range",
            ),
            Mutant(
                "needs_longer_text",
                h_needs_longer_text,
                "The whole text may be the beginning of a stop string. You never hold all of it.",
                "an off-by-one in range",
            ),
            Mutant(
                "no_default",
                h_no_default,
                "max() of nothing raises. Most of the time nothing has to be held.",
                "a common slip",
            ),
            Mutant(
                "ends",
                h_ends,
                "You compare with the ends of the stop string. Its beginnings matter: the rest is still to come.",
                "a slice from the wrong side",
            ),
            Mutant(
                "constant",
                h_constant,
                "You hold the same number whatever the text is, and more than there is. Hold only what begins a stop string.",
                "vLLM's stop_buffer_length",
            ),
            Mutant(
                "inside",
                h_inside,
                "You look for the end of the text anywhere in the stop string. Only the stop string's beginning counts.",
                "in for startswith",
            ),
            Mutant(
                "gives_up",
                h_gives_up,
                "You give up at the first beginning that does not fit. A longer one may fit all the same.",
                "a break inside the loop",
            ),
            Mutant(
                "from_start",
                h_from_start,
                "You compare from the start of the text. What may have to wait is at its end.",
                "os.path.commonprefix",
            ),
            Mutant(
                "sum",
                h_sum,
                "You add up what each stop string holds. They hold the same characters: take the largest.",
                "sum for max",
            ),
            Mutant("text", h_text, "You return the text that waits. Asked is how many characters.", "a common slip"),
            Mutant(
                "one_char",
                h_one_char,
                "You hold the first character only. The longer the match, the more has to wait.",
                "checking only the newline",
            ),
        ),
        variant=held_variant,
        scratch="""
            for text in ("A", "A\\n", "A\\nUs", "A\\nUse!"):
                print(repr(text), held_back(text, ["\\nUser:"]))
        """,
        plug_in=plug_held_back,
    ),
    Exercise(
        id="08.5",
        symbol="minillm.text:IncrementalDetokenizer",
        title="A character in pieces",
        minutes=15,
        difficulty=3,
        statement="""
            Tokens are bytes, and a character may be spread over several tokens. Write the class that turns token ids into
            text, one by one. `self._token_bytes(id)` gives the bytes of a token (`b""` for a control token). `push(id)`
            returns the text that is **certain** now, and shows no part of a character. `flush()`, at the end, returns what is
            left; after it nothing is left. All pieces joined must be what `bytes.decode("utf-8", errors="replace")` makes
            of all bytes joined. So bytes that can be no character, and a character that is never finished, become U+FFFD.

            Worked example: the bytes of `" 😀!"` come as `20 F0 9F 98`, then `80`, then `21`. The pushes return `" "`, `"😀"`,
            `"!"`, and flush `""`. If the request ends after the first, flush returns `"\\ufffd"`.
        """,
        hints=(
            "What must be remembered between two pushes? At most how many bytes?",
            "Add the new bytes to those that wait. Decode all but the bytes at the end that begin a character without "
            "finishing it. The first byte of a character tells its length. Or let Python do it: look for *incremental* in "
            "the documentation of `codecs`.",
            "`codecs` has a function that gives the incremental decoder class of an encoding. Make one object of it per request, "
            'with `errors="replace"`. Its `decode(data)` keeps unfinished bytes for the next call; with '
            "`final=True` it gives up waiting.",
        ),
        explanation="""
            The state is at most three bytes. Python's incremental decoder keeps them; by hand you keep the bytes at the end
            for which decoding says "unexpected end of data".

            The popular short cut decodes everything again and waits while the text ends in U+FFFD. It costs more with each
            token, mistakes a real U+FFFD for an unfinished character, and where its offset goes wrong, it sends a
            character twice (SGLang issue 31598). Bytes are simpler: a detokenizer that works on bytes cannot retract.

            Also right: a table of lengths by first byte, as terminals use. SentencePiece tokenizers need more than bytes (a
            space in front of the first word); their decoders work on the last few tokens.

            vLLM: `DecodeStream` of the `tokenizers` library in `FastIncrementalDetokenizer`; SGLang: `DetokenizerManager`;
            llama.cpp's server holds text back while it ends in an incomplete UTF-8 sequence.
        """,
        check=check_detokenizer,
        mutants=(
            Mutant(
                "per_token",
                DPerToken,
                "Each token is decoded by itself, so half a character becomes U+FFFD. Let its bytes wait.",
                "ferrox issue 124, exo pull request 1691",
            ),
            Mutant(
                "ignores",
                DIgnores,
                "Bytes that are no whole character are dropped, and the character never appears.",
                "errors='ignore' to get rid of U+FFFD",
            ),
            Mutant(
                "latin",
                DLatin,
                "Each byte becomes a character of its own: 'Ã©' for 'é'. The bytes are UTF-8.",
                "mojibake",
            ),
            Mutant(
                "loses_the_end",
                DLosesTheEnd,
                "A character that was begun is lost when the request ends. flush must show it as U+FFFD.",
                "text lost at max_tokens",
            ),
            Mutant(
                "flush_keeps",
                DFlushKeeps,
                "After flush the bytes are still there: a second flush shows them again.",
                "a common slip",
            ),
            Mutant(
                "whole_text",
                DWholeText,
                "push returns everything so far. The stream wants only what is new.",
                "SGLang's streams were cumulative",
            ),
            Mutant(
                "strict",
                DStrict,
                "You wait until all bytes decode. One byte that is no UTF-8 and nothing is shown any more.",
                "try decode, except wait",
            ),
            Mutant(
                "jams",
                DJams,
                "You keep everything after the first error. A byte that can never be a character then waits for ever, and "
                "all the text behind it.",
                "UnicodeDecodeError.start taken for the end of the text",
            ),
            Mutant(
                "by_length",
                DByLength,
                "You wait as long as the first byte promises. Some bytes (FF) begin nothing: they are U+FFFD at once.",
                "a table of lengths without its gaps",
            ),
            Mutant(
                "ignores_later",
                DIgnoresLater,
                "Waiting is right, but what is no character is dropped (errors='ignore'). It must become U+FFFD.",
                "errors='ignore' to get rid of U+FFFD",
            ),
            Mutant(
                "strict_errors",
                DStrictErrors,
                "An unfinished or invalid character raises. A model may emit any bytes: decode with errors='replace'.",
                "errors left at its default",
            ),
            Mutant(
                "waits_at_replacement",
                DWaitsAtReplacement,
                "You wait while the text ends in U+FFFD. But an invalid byte, or a real U+FFFD, is certain at once.",
                "the check for a trailing replacement character in vLLM and transformers",
            ),
            Mutant(
                "retracts",
                DRetracts,
                "You show U+FFFD for an unfinished character, and when the rest comes it cannot be taken back.",
                "vllm-mlx pull request 109",
            ),
            Mutant(
                "shared",
                DShared,
                "Two requests share the bytes that wait: the buffer belongs to the class. Make it in __init__.",
                "a mutable class attribute",
            ),
            Mutant(
                "all_at_the_end",
                DAllAtTheEnd,
                "Nothing is shown before flush. Right text, but no stream.",
                "collecting and decoding once",
            ),
        ),
        variant=Buffered,
        scratch="""
            class Two:  # a tokenizer with two tokens
                def token_bytes(self, id):
                    return [b" \\xf0\\x9f\\x98", b"\\x80"][id]

            detokenizer = IncrementalDetokenizer(Two())
            print([detokenizer.push(0), detokenizer.push(1), detokenizer.flush()])
        """,
        plug_in=plug_detokenizer,
    ),
]
