"""Exercises of stage 14. Kernels run in Triton's interpreter, on a CPU; `interpreted` watches what they touch."""

import functools
import math
from contextlib import contextmanager

from .interpreted import (
    interpreted,
    launch,
    run_cache_rows,
    run_merge_parts,
    run_online_softmax,
    watch,
)  # first: it turns the interpreter on

# isort: split
import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from minillm import LLM, SamplingParams, attention, kernels
from minillm.config import ModelConfig
from minillm.course.exercise import Exercise, Mutant
from minillm.course.learn import swap as swap_in
from minillm.course.source import edited
from minillm.gpu_inputs import GROUPS, HARMLESS, Shape
from minillm.model import Transformer
from minillm.weights import random_state_dict

NEVER = float("-inf")
PROMPTS = ([5, 17, 3, 60, 8], [11, 2, 44], [9, 9, 31, 7])


def kernel(t, answer):
    """The answer for the interpreter. Its file is where the tester looks for the learner's own line."""
    fn = interpreted(answer)
    t._files.add(fn.fn.__code__.co_filename)
    return fn


@contextmanager
def undefined_is_nan():
    """A masked load without `other` leaves its places undefined on a GPU; here they become NaN, not the interpreter's 0."""
    builder = interpreter.interpreter_builder
    load = builder.create_masked_load

    def careful(pointers, mask, other, *rest):
        got = load(pointers, mask, other, *rest)
        if other is None and np.issubdtype(got.data.dtype, np.floating):
            got.data = np.where(mask.data.astype(bool), got.data, np.nan).astype(got.data.dtype)
        return got

    builder.create_masked_load = careful
    try:
        yield
    finally:
        builder.create_masked_load = load


# ---- a tiny engine in the interpreter


@functools.lru_cache(maxsize=1)
def tiny_model():
    config = ModelConfig("llama", 97, 48, 80, 2, 6, 2, 8, max_position_embeddings=64)
    return config, Transformer.from_state(config, random_state_dict(config), pack=False)


def tiny_llm(backend="triton", **options):
    options = {"num_kv_blocks": 24, "block_size": 4, "max_num_seqs": 4, "enable_prefix_caching": False, **options}
    return LLM.from_parts(*tiny_model(), None, attention=backend, **options)


def generated(llm, prompts=PROMPTS, count=4):
    with np.errstate(all="ignore"):
        outputs = llm.generate(list(prompts), SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True))
    return [out.outputs[0].token_ids if out.error is None else out.error for out in outputs]


def plug(id, answer, prompts=PROMPTS):
    """Generate with plain torch and with the kernels, the learner's among them; say what was launched."""
    want = generated(tiny_llm("sdpa"), prompts)
    with swap_in(id, interpreted(answer)), watch() as seen:
        got = generated(tiny_llm(), prompts)
    names = [name for name, _ in seen.launches]
    print(
        f"a model of 2 layers, {len(prompts)} requests, on the GPU's kernels (products by torch): {len(names)} launches"
    )
    for name in sorted(set(names), key=names.index):
        programs = sum(n for other, n in seen.launches if other == name)
        print(f"   {names.count(name):>4} x {name:<12} {programs:>5} programs")
    print(f"plain torch on the CPU:   {want}")
    print(f"kernels with your code:   {got}")
    print(f"tokens equal: {'yes' if got == want else 'NO'}")
    if got != want:
        raise AssertionError("the tokens differ")


# ---- 14.1 _rms_norm


def check_rms_norm(t, answer):
    fn = kernel(t, answer)

    def rms_norm(x, weight, eps):
        """Launch the kernel, with memory around x and out that belongs to somebody else."""
        size, around = x.shape[1], triton.next_power_of_2(x.shape[1])
        memory = torch.cat([torch.full((around,), torch.nan), x.flatten().float(), torch.full((around,), torch.nan)])
        memory, result = memory.to(x.dtype), torch.full((x.numel() + 2 * around,), 7.0, dtype=x.dtype)
        inner, out = (m[around : around + x.numel()].view(x.shape) for m in (memory, result))
        with undefined_is_nan(), watch(strict=True, x=memory, weight=weight, out=result):
            launch(fn, (len(x),), inner, weight, out, size, eps, around, False, guard=False)
        strangers = (result[:around] != 7).sum() + (result[around + x.numel() :] != 7).sum()
        return out.clone(), int(strangers)

    rms_norm.__name__ = "_rms_norm"

    def case(x, weight, eps, note, want=None, half=False):
        if want is None:
            wide = x.double()  # the oracle: number by number
            rows = [[v / math.sqrt(sum(u * u for u in row) / len(row) + eps) for v in row] for row in wide.tolist()]
            want = torch.tensor(rows, dtype=torch.float64) * weight.double()
        want = torch.as_tensor(want).to(x.dtype)
        call = f"_rms_norm[({len(x)},)](x of shape {list(x.shape)}, ..., eps={eps})"
        got = t.call(rms_norm, x, weight, eps, note=note)
        if got is None:
            return
        t.equal(got[0], want, f"out after {call}", note=note, tol=2e-3 if half else None)
        t.equal(got[1], 0, f"numbers changed outside of out by {call}", note=note)

    g, ones = t.rng(14), torch.ones
    case(torch.tensor([[3.0, 0.0, 4.0, 0.0]]), ones(4), 0.0, "one row: the mean square is 25 / 4, so divide by 2.5",
         want=[[1.2, 0.0, 1.6, 0.0]])  # fmt: skip
    case(torch.tensor([[3.0, 0.0, 4.0, 0.0]]), torch.tensor([1.0, 5.0, -2.0, 1.0]), 0.0, "with a weight",
         want=[[1.2, 0.0, -3.2, 0.0]])  # fmt: skip
    case(torch.tensor([[1.0, -1.0], [2.0, 6.0]]), ones(2), 3.0, "eps is 3, and it stands under the root",
         want=[[0.5, -0.5], [2 / 23**0.5, 6 / 23**0.5]])  # fmt: skip
    case(torch.zeros(1, 4), ones(4), 1e-5, "a row of zeros stays zeros: eps prevents 0 / 0")
    case(torch.randn(3, 8, generator=g), torch.randn(8, generator=g), 1e-5, "three rows, three programs")
    case(torch.randn(4, 1, generator=g) + 2, ones(1), 1e-5, "rows of a single number")
    case(
        torch.randn(3, 6, generator=g),
        torch.randn(6, generator=g),
        1e-5,
        "rows of 6: SIZE is 8, so two columns are not there",
    )
    case(torch.randn(2, 37, generator=g) * 3, torch.randn(37, generator=g), 1e-5, "rows of 37, SIZE 64")
    big = (torch.randn(2, 5, generator=g) * 400).half()
    case(
        big,
        torch.randn(5, generator=g).half(),
        1e-5,
        "float16 numbers near 400: their squares are too large for float16",
        half=True,
    )


RMS = "minillm.kernels:_rms_norm"
RMS_LOAD = "tl.load(x + row * size + column, inside, 0.0).to(tl.float32)"
RMS_SCALE = "tl.rsqrt(tl.sum(values * values) / size + eps)"
RMS_STORE = "values.to(out.dtype.element_ty), inside)"


def rms_variant(x, weight, out, size, eps, SIZE: tl.constexpr, PDL: tl.constexpr):
    # in tiles of 4: two passes over the row, for rows that are too long for one program's registers
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, 4)
    total = tl.zeros((4,), tl.float32)
    for start in range(0, size, 4):
        part = tl.load(x + row * size + start + i, start + i < size, 0.0).to(tl.float32)
        total += part * part
    scale = 1.0 / tl.sqrt(tl.sum(total, 0) / size + eps)
    for start in range(0, size, 4):
        real = start + i < size
        part = tl.load(x + row * size + start + i, real, 0.0).to(tl.float32)
        gain = tl.load(weight + start + i, real, 0.0).to(tl.float32)
        tl.store(out + row * size + start + i, (part * scale * gain).to(out.dtype.element_ty), real)


def plug_rms_norm(answer, swap):
    """What fusion saves, in bytes and launches, and the engine on the learner's kernel."""
    x, weight = torch.randn(4, 48), torch.randn(48)
    out = torch.empty_like(x)
    with watch(x=x, weight=weight, out=out) as seen:
        launch(answer, (4,), x, weight, out, 48, 1e-5, 64, False)
    print("RMSNorm of 4 rows of 48 numbers:")
    print(f"   your kernel: {len(seen.launches)} launch, {seen.bytes_moved():,} bytes read and written")
    big, tiny, gain = x.nbytes, 4 * len(x), 4 * x.nbytes // len(x) // 4
    steps = [2 * big, big + tiny, 2 * tiny, 2 * tiny, 2 * big + tiny, 2 * big + gain]  # pow, mean, + eps, rsqrt, *, *
    print(f"   operator by operator: {len(steps)} launches, {sum(steps):,} bytes")
    plug("14.1", answer)


# ---- 14.2 online_softmax


def softmax_state(m, l, scores):
    """The oracle: number by number, in float64."""
    out = {"m": [], "l": [], "weights": [], "shrink": []}
    for old, total, row in zip(m.tolist(), l.tolist(), scores.tolist(), strict=True):
        top = max([old, *row])
        weights = [0.0 if s == NEVER else 2.0 ** (s - top) for s in row]
        shrink = 2.0 ** (old - top) if total else 0.0
        for name, value in zip(out, (top, total * shrink + sum(weights), weights, shrink), strict=True):
            out[name].append(value)
    return {name: torch.tensor(values, dtype=torch.float32) for name, values in out.items()}


def check_online_softmax(t, answer):
    fn = kernel(t, answer)

    def online_softmax(m, l, scores):
        got = run_online_softmax(fn, m, l, scores)
        # what is free: how far below all scores the largest of no scores is, and the factor for a sum that is still 0
        got["m"] = torch.where(got["m"] <= -1e20, NEVER, got["m"])
        got["shrink"] = torch.where((l == 0) & got["shrink"].isfinite(), 0.0, got["shrink"])
        return got

    def case(m, l, scores, note, want=None):
        m, l, scores = (torch.tensor(x) if isinstance(x, list) else x for x in (m, l, scores))
        t.case(online_softmax, m, l, scores, expected=want or softmax_state(m, l, scores), note=note)

    def state(m, l, weights, shrink):
        return dict(zip(("m", "l", "weights", "shrink"), map(torch.tensor, (m, l, weights, shrink)), strict=True))

    case([NEVER], [0.0], [[1.0, 3.0, NEVER, 2.0]], "the first tile; one key is masked",
         state([3.0], [1.75], [[0.25, 1.0, 0.0, 0.5]], [0.0]))  # fmt: skip
    case([3.0], [1.75], [[5.0, NEVER, 4.0, NEVER]], "the next tile has a larger score: older sums shrink by 1/4",
         state([5.0], [1.9375], [[1.0, 0.0, 0.5, 0.0]], [0.25]))  # fmt: skip
    case([5.0], [2.0], [[4.0, 2.0]], "the largest score was in an older tile",
         state([5.0], [2.625], [[0.5, 0.125]], [1.0]))  # fmt: skip
    case([3.0], [1.75], [[NEVER, NEVER]], "a tile that is all masked changes nothing",
         state([3.0], [1.75], [[0.0, 0.0]], [1.0]))  # fmt: skip
    case([NEVER], [0.0], [[NEVER] * 4], "nothing seen so far, and nothing in this tile: no NaN",
         state([NEVER], [0.0], [[0.0] * 4], [0.0]))  # fmt: skip
    case([2.0, -1.0, NEVER, 0.5], [1.0, 3.0, 0.0, 2.0], [[1.0, 0.0], [4.0, NEVER], [NEVER, NEVER], [-3.0, 0.5]],
         "four rows, each with a maximum of its own")  # fmt: skip
    case([0.0], [1.0], [[-2.0, 1.0]], "base 2: exp2(-3) is 1/8")
    case([600.0, -600.0], [2.0, 1.5], [[599.0, 601.0, 0.0, 590.0], [-601.0, -599.0, NEVER, -605.0]],
         "scores of 600: exp2(600) is too large for float32")  # fmt: skip
    g = t.rng(2)
    scores = torch.randn(4, 32, generator=g) * 6
    scores[0, :24] = NEVER  # as with a sliding window: the first tiles hold nothing for this row
    scores[2, 5:30] = NEVER
    values, whole = torch.randn(32, 3, generator=g), torch.softmax(scores.double() * math.log(2), dim=1)
    m, l, acc = torch.full((4,), NEVER), torch.zeros(4), torch.zeros(4, 3)
    for j in range(0, 32, 8):
        got = t.call(online_softmax, m, l, scores[:, j : j + 8].contiguous(), note="tile by tile over 32 keys")
        if got is None:
            return
        m, l, acc = got["m"], got["l"], acc * got["shrink"][:, None] + got["weights"] @ values[j : j + 8]
    t.equal(acc / l[:, None], (whole @ values.double()).float(), "acc / l after four tiles, against a softmax over all keys",
            tol=1e-4, note="acc is carried as the kernel does it: acc * shrink + weights @ values")  # fmt: skip


SOFTMAX = "minillm.kernels:online_softmax"


def softmax_base_e(m, l, scores):
    new_m = tl.maximum(m, tl.max(scores, 1))
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    weights, shrink = tl.exp(scores - base[:, None]), tl.exp(m - base)
    return new_m, l * shrink + tl.sum(weights, 1), weights, shrink


def softmax_no_max(m, l, scores):
    weights, shrink = tl.exp2(scores), tl.where(l == 0.0, 0.0, 1.0)
    return tl.maximum(m, tl.max(scores, 1)), l + tl.sum(weights, 1), weights, shrink


def softmax_own_tile(m, l, scores):
    tile = tl.max(scores, 1)
    new_m = tl.maximum(m, tile)
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    own = tl.where(tile == float("-inf"), 0.0, tile)
    weights, shrink = tl.exp2(scores - own[:, None]), tl.exp2(m - base)
    return new_m, l * shrink + tl.sum(weights, 1), weights, shrink


def softmax_masked_as_zero(m, l, scores):
    scores = tl.where(scores == float("-inf"), 0.0, scores)
    new_m = tl.maximum(m, tl.max(scores, 1))
    weights, shrink = tl.exp2(scores - new_m[:, None]), tl.exp2(m - new_m)
    return new_m, l * shrink + tl.sum(weights, 1), weights, shrink


def softmax_sentinel(m, l, scores):
    scores = tl.where(scores == float("-inf"), -1e30, scores)
    new_m = tl.maximum(m, tl.max(scores, 1))
    weights, shrink = tl.exp2(scores - new_m[:, None]), tl.exp2(m - new_m)
    return new_m, l * shrink + tl.sum(weights, 1), weights, shrink


def softmax_normalised(m, l, scores):
    new_m = tl.maximum(m, tl.max(scores, 1))
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    weights, shrink = tl.exp2(scores - base[:, None]), tl.exp2(m - base)
    total = l * shrink + tl.sum(weights, 1)
    return new_m, total, weights / tl.where(total == 0.0, 1.0, total)[:, None], shrink


def softmax_variant(m, l, scores):
    # the tile gets a softmax of its own; then the two states are merged as equals
    top = tl.max(scores, 1)
    own = tl.exp2(scores - tl.where(top == float("-inf"), 0.0, top)[:, None])
    new_m = tl.maximum(m, top)
    old_factor = tl.where(m == float("-inf"), 0.0, tl.exp2(m - new_m))
    own_factor = tl.where(top == float("-inf"), 0.0, tl.exp2(top - new_m))
    return new_m, l * old_factor + tl.sum(own, 1) * own_factor, own * own_factor[:, None], old_factor


# ---- 14.3 cache_rows


def check_cache_rows(t, answer):
    fn = kernel(t, answer)

    def cache_rows(table, key, inside, g, PAGE, KV_HEADS):
        return run_cache_rows(fn, table, key, inside, g, PAGE, KV_HEADS)

    def case(table, positions, g, page, kv_heads, note, end=None):
        """Positions at or beyond `end` are not inside; the table may not be read for them."""
        end = max(positions) + 1 if end is None else end
        key, inside = torch.tensor(positions, dtype=torch.int32), torch.tensor([p < end for p in positions])
        want = []
        for p in positions:  # the oracle: walk through the pages
            place, left = 0, p
            while left >= page:
                place, left = place + 1, left - page
            want.append(sum([table[place] * page * kv_heads, left * kv_heads, g]) if p < end else -1)
        t.case(cache_rows, torch.tensor(table, dtype=torch.int32), key, inside, g, page, kv_heads,
               expected=torch.tensor(want), note=note)  # fmt: skip

    case([5, 2, 7], [6], 1, 4, 3, "position 6 is in page 2, slot 10; three heads a slot: row 31")
    case([5, 2, 7], [4, 5, 6, 7], 0, 4, 1, "one KV head: the row is the slot")
    case([5, 2, 7], [0, 1, 2, 3, 8, 9, 10, 11], 2, 4, 3, "head 2 of 3, the first page and the last")
    case([5, 2, 7], [2, 3, 4, 5], 1, 4, 3, "a tile that crosses from one page into the next")
    case([3, 1, 4, 0], [0, 1, 2, 3], 1, 1, 2, "pages of one slot")
    case([6], [0, 9], 3, 16, 5, "a single page")
    case([1, 0, 2], [10, 7, 2, 5], 0, 4, 2, "positions in any order")
    case(
        [5, 2, 7],
        list(range(8, 16)),
        1,
        4,
        3,
        "the context ends at 9; the table has 3 entries, and a 4th may not be read",
        end=9,
    )
    case([4, 9], [0, 1, 2, 3, 4, 5, 6, 7], 0, 3, 2, "pages of 3 slots; the context ends at 5", end=5)
    case([2, 40_000_000], [17, 31], 6, 16, 8, "page 40,000,000: the row does not fit into 32 bits")
    g = t.rng(3)
    table = torch.randperm(50, generator=g)[:10].tolist()
    case(table, list(range(32, 64)), 4, 7, 5, "32 keys in scrambled pages of 7")


ROWS = "minillm.kernels:cache_rows"
ROWS_LOAD = "tl.load(table + key // PAGE, inside, 0).to(tl.int64)"
ROWS_RESULT = "(page * PAGE + key % PAGE) * KV_HEADS + g"


def rows_first_page_only(table, key, inside, g, PAGE: tl.constexpr, KV_HEADS: tl.constexpr):
    page = tl.load(table + tl.min(key, 0) // PAGE).to(tl.int64)
    return (page * PAGE + key % PAGE) * KV_HEADS + g


def rows_neighbours(table, key, inside, g, PAGE: tl.constexpr, KV_HEADS: tl.constexpr):
    first = tl.load(table).to(tl.int64)
    return (first * PAGE + key) * KV_HEADS + g


def rows_variant(table, key, inside, g, PAGE: tl.constexpr, KV_HEADS: tl.constexpr):
    # where the key would lie without paging, moved by as far as its page was moved
    logical = key // PAGE
    moved = tl.load(table + logical, inside, 0).to(tl.int64) - logical
    return moved * (PAGE * KV_HEADS) + key * KV_HEADS + g


def plug_cache_rows(answer, swap):
    """The rows of one sequence, and the engine on scrambled pages."""
    table, heads = torch.tensor([5, 2, 7], dtype=torch.int32), 2
    key, inside = torch.arange(16, dtype=torch.int32), torch.arange(16) < 9
    print("table [5, 2, 7], pages of 4, 9 tokens, 2 KV heads; -1: not there")
    for g in range(heads):
        print(f"   rows of head {g}: {run_cache_rows(answer, table, key, inside, g, 4, heads).tolist()}")
    plug("14.3", answer)


# ---- 14.4 merge_parts


def check_merge_parts(t, answer):
    fn = kernel(t, answer)

    def merge_parts(each, lse):
        return run_merge_parts(fn, each, lse)

    def case(each, lse, want, note, tol=None):
        each, lse, want = (torch.as_tensor(x, dtype=torch.float32) for x in (each, lse, want))
        t.case(merge_parts, each, lse, expected=want, note=note, tol=tol)

    case([[3.0, 7.0]], [4.0], [3.0, 7.0], "a single part is the result")
    case([[1.0, 0.0], [0.0, 1.0]], [3.0, 1.0], [0.8, 0.2], "weights 2**3 and 2**1: 8/10 and 2/10")
    case([[1.0, 0.0, 4.0, 0.0], [0.0, 1.0, 0.0, 8.0]], [2.0, 2.0], [0.5, 0.5, 2.0, 4.0], "equal log-sums: the average")
    case([[2.0, 6.0], [0.0, 0.0]], [1.0, NEVER], [2.0, 6.0], "an empty part has no say")
    case(
        [[0.0, 0.0], [5.0, 1.0], [0.0, 0.0], [1.0, 5.0]],
        [NEVER, 0.0, NEVER, 0.0],
        [3.0, 3.0],
        "two empty parts of four",
    )
    case([[0.0, 0.0]] * 4, [NEVER] * 4, [0.0, 0.0], "no part has keys: zeros, not NaN")
    case([[1.0, 3.0], [5.0, 7.0]], [500.0, 501.0], [11 / 3, 17 / 3], "log-sums of 500: exp2 of them is too large")
    case([[1.0, 3.0], [5.0, 7.0]], [-500.0, -501.0], [7 / 3, 13 / 3], "log-sums of -500: exp2 of them is 0")
    g = t.rng(4)
    for counts, note in (((5, 1, 9, 3), "18 keys in four parts"), ((7, 0, 12, 0), "19 keys, two of the parts empty")):
        scores = torch.randn(sum(counts), generator=g, dtype=torch.float64) * 3
        values = torch.randn(sum(counts), 8, generator=g, dtype=torch.float64)
        each, lse = [], []
        for s, v in zip(scores.split(list(counts)), values.split(list(counts)), strict=True):
            each.append(torch.softmax(s * math.log(2), 0) @ v)
            lse.append(torch.logsumexp(s * math.log(2), 0) / math.log(2) if len(s) else torch.tensor(NEVER))
        want = torch.softmax(scores * math.log(2), 0) @ values  # the oracle: all keys at once
        case(torch.stack(each), torch.stack(lse), want, f"{note}, against a softmax over all of them", tol=1e-4)


MERGE = "minillm.kernels:merge_parts"
MERGE_WEIGHTS = 'tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))'
MERGE_RESULT = "tl.sum(each * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)"


def merge_average(each, lse):
    return tl.sum(each, 0) / each.shape[0]


def merge_average_of_filled(each, lse):
    filled = tl.where(lse == float("-inf"), 0.0, 1.0)
    count = tl.sum(filled, 0)
    return tl.sum(each * filled[:, None], 0) / tl.where(count == 0.0, 1.0, count)


def merge_winner(each, lse):
    top = tl.max(lse, 0)
    wins = tl.where((lse == top) & (lse != float("-inf")), 1.0, 0.0)
    count = tl.sum(wins, 0)
    return tl.sum(each * wins[:, None], 0) / tl.where(count == 0.0, 1.0, count)


def merge_by_log(each, lse):
    weights = tl.where(lse == float("-inf"), 0.0, lse)
    total = tl.sum(weights, 0)
    return tl.sum(each * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)


def merge_no_max(each, lse):
    weights = tl.exp2(lse)
    total = tl.sum(weights, 0)
    return tl.sum(each * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)


def merge_variant(each, lse):
    # in logarithms: first the log-sum-exp of the whole, then each part's share of it
    top = tl.max(lse, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    whole = tl.log2(tl.sum(tl.exp2(lse - safe), 0)) + safe
    shares = tl.where(lse == float("-inf"), 0.0, tl.exp2(lse - whole))
    return tl.sum(tl.where(shares[:, None] > 0.0, each * shares[:, None], 0.0), 0)


def plug_merge_parts(answer, swap):
    """One sequence, its context read in 1, 2, 4 and 8 parts, against `attention.paged_query`."""
    g = torch.Generator().manual_seed(14)
    heads, kv_heads, dim, page, length = 6, 2, 16, 4, 150
    cache = kernels.LayerCache(*torch.randn(2, 200, kv_heads, dim, generator=g))
    table, q = torch.randperm(50, generator=g)[:38], torch.randn(heads, dim, generator=g)
    want = attention.paged_query(q, cache.keys, cache.values, table.tolist(), length, page, dim**-0.5)
    print(f"one query, {length} keys, {heads} heads that share {kv_heads} KV heads")
    for splits in (1, 2, 4, 8):
        one, zero = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        tiles = kernels.Tiles(zero, one, one * length, zero, table[None].int(), zero, zero, 16, splits)
        out = torch.empty(1, heads * dim)
        with swap_in("14.4", interpreted(answer)), watch() as seen, np.errstate(all="ignore"):
            kernels.paged_attention(q.reshape(1, -1), cache, tiles, out, page, heads, dim**-0.5, None)
        off = float((out.view(heads, dim) - want).abs().max())
        print(
            f"   {splits} part{'s' * (splits > 1)}: {seen.launches[0][1]:>3} programs read the cache, largest difference {off:.0e}"
        )
        if off > 1e-4:
            raise AssertionError(f"with {splits} parts the result is another")


# ---- 14.5 pad_rows


def check_pad_rows(t, answer):
    every = tuple(field for group in GROUPS for field in group)

    def stale(size, names):
        """What an older, larger batch left: every number says its row."""
        return {name: (np.arange(size) * 3 + 11 + i).astype(kind) for i, (name, kind, _) in enumerate(names)}

    def rows(fields, padded):
        return {name: torch.from_numpy(array[:padded].copy()) for name, array in fields.items()}

    def pad_rows(fields, count, padded, spare_slot):
        memory = dict(fields)  # the graph reads these arrays, whatever the dictionary holds afterwards
        answer(fields, count, padded, spare_slot)
        return rows(memory, padded)  # rows from `padded` on are not used in this step

    def case(size, count, padded, spare_slot, note, names=every):
        want = rows(stale(size, names), padded)
        for name, _, empty in names:
            for row in range(count, padded):  # the oracle: row by row
                want[name][row] = {"slots": spare_slot}.get(name, empty)
        t.case(pad_rows, stale(size, names), count, padded, spare_slot, expected=want, writes=(0,), note=note)

    case(4, 1, 2, 640, "one request in a graph of two rows")
    case(8, 3, 8, 96, "three requests in a graph of eight")
    case(16, 5, 8, 64, "a graph of 8 rows; the buffer has 16")
    case(4, 4, 4, 96, "the batch fills its graph: nothing to pad")
    case(4, 0, 4, 32, "no request at all: that is how a graph is captured")
    case(1, 1, 1, 8, "a graph of one row")
    case(64, 33, 40, 4096, "33 requests in a graph of 40")
    case(8, 3, 6, 96, "the arrays of tokens alone", GROUPS[0])
    case(8, 2, 5, 96, "the arrays of sequences alone", GROUPS[1])


PAD = "minillm.gpu_inputs:pad_rows"


def pad_some(fields, count, padded, spare_slot):
    for name, value in (("slots", spare_slot), ("lengths", 0), ("counts", 0)):
        if name in fields:
            fields[name][count:padded] = value


def pad_slots_only(fields, count, padded, spare_slot):
    if "slots" in fields:
        fields["slots"][count:padded] = spare_slot


def pad_repeat(fields, count, padded, spare_slot):
    for array in fields.values():
        array[count:padded] = array[count - 1]


def pad_slots_count_up(fields, count, padded, spare_slot):
    for name, array in fields.items():
        array[count:padded] = HARMLESS[name]
    if "slots" in fields:
        fields["slots"][count:padded] = np.arange(spare_slot, spare_slot + padded - count)


def pad_new_arrays(fields, count, padded, spare_slot):
    out = {}
    for name, array in fields.items():
        fill = np.full(padded - count, spare_slot if name == "slots" else HARMLESS[name], dtype=array.dtype)
        out[name] = np.concatenate([array[:count], fill])
    return out


def pad_all_names(fields, count, padded, spare_slot):
    for name, empty in HARMLESS.items():
        fields[name][count:padded] = spare_slot if name == "slots" else empty


def pad_variant(fields, count, padded, spare_slot):
    harmless = HARMLESS | {"slots": spare_slot}
    for row in range(count, padded):
        for name in fields:
            fields[name][row] = harmless[name]


class Replay:
    """Stands for a CUDA graph where there is no GPU: it computes all its rows, whatever is in them."""

    def __init__(self, runner, shape):
        self.runner, self.shape = runner, shape

    def replay(self):
        return self.runner._compute(self.shape, self.runner.inputs[self.shape.decode])


def graphed_llm(size=4):
    """The tiny engine, whose decode steps all run as a "graph" of `size` rows."""
    llm, shape = tiny_llm(), Shape(size, size, 0, size)
    llm.runner.graphs = {shape: Replay(llm.runner, shape)}
    return llm


def plug_pad_rows(answer, swap):
    """Four requests in a graph of four rows; as they end, rows become padding, with an older batch's numbers in them."""
    prompts, lengths = (*PROMPTS, [70, 1]), (7, 2, 4, 3)

    def run(llm):
        params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]
        return [out.outputs[0].token_ids for out in llm.generate(prompts, params)]

    padded = []

    def watched(fields, count, size, spare_slot):
        answer(fields, count, size, spare_slot)
        if "slots" in fields:
            padded.append((count, size))

    want = run(tiny_llm("sdpa"))
    with swap_in("14.5", watched), np.errstate(all="ignore"):
        got = run(graphed_llm())
    print("steps with padding, live rows and rows of the graph: " + ", ".join(f"{a}/{b}" for a, b in padded))
    for prompt, own, yours in zip(prompts, want, got, strict=True):
        print(f"   {prompt!s:<20} without graphs {own!s:<32} padded by you {yours}")
    print(f"tokens equal: {'yes' if got == want else 'NO'}")
    if got != want:
        raise AssertionError("the tokens differ: padding has touched somebody's cache")


# ---- 14.6 decode_attention: a kernel of one's own

DECODE_HEAD = '''
import triton.language as tl
from minillm import kernels


def decode_attention(
    q, keys, values, out, tables, lengths, scale, pages,
    KV_HEADS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr,
):
    """One program for each sequence and KV head: the SHARE query heads that share it attend to the whole context.

    q, out: [N, KV_HEADS * SHARE, DIM]; keys, values: [num_slots, KV_HEADS, DIM]; tables: [N, pages]; lengths: [N].
    """
    sequence, g = tl.program_id(0), tl.program_id(1)
    rows, columns, d = tl.arange(0, ROWS), tl.arange(0, TILE), tl.arange(0, DIM)
    good = (rows < SHARE)[:, None]  # a tile has ROWS rows; the last ones are empty
    place_q = ((sequence * KV_HEADS + g) * SHARE + rows)[:, None] * DIM + d[None, :]
    q_tile = tl.load(q + place_q, good, 0.0) * (scale * 1.4426950408889634)  # log2(e): scores for exp2
    length, table = tl.load(lengths + sequence), tables + sequence * pages
    m, l = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
'''
DECODE_LOOP = """
    for j in range(0, length, TILE):
        key = j + columns
        inside = key < length
        place = kernels.cache_rows(table, key, inside, g, PAGE, KV_HEADS)[:, None] * DIM + d[None, :]
        k = tl.load(keys + place, inside[:, None], 0.0)
        v = tl.load(values + place, inside[:, None], 0.0)
        scores = tl.where(inside[None, :], tl.dot(q_tile, tl.trans(k)), float("-inf"))
        m, l, weights, shrink = kernels.online_softmax(m, l, scores)
        acc = acc * shrink[:, None] + tl.dot(weights, v)
"""
DECODE_END = """
    tl.store(out + place_q, acc / l[:, None], good)
"""
DECODE = DECODE_HEAD.strip() + DECODE_LOOP.rstrip() + DECODE_END.rstrip()
DECODE_STUB = DECODE_HEAD.strip() + '\n    raise NotImplementedError("exercise 14.6")' + DECODE_END.rstrip()


def decode_mutant(old, new):
    assert DECODE.count(old) == 1, old
    space = {"__name__": __name__}
    exec(compile(DECODE.replace(old, new), "<mutant of decode_attention>", "exec"), space)
    return space["decode_attention"]


def run_decode(fn, q, keys, values, tables, lengths, page, tile=8):
    """Launch a decode kernel: out [N, heads, D], and what was read."""
    out, (count, heads, dim), kv_heads = torch.full_like(q, torch.nan), q.shape, keys.shape[1]
    with undefined_is_nan(), watch(keys=keys, values=values) as seen:
        launch(fn, (count, kv_heads), q, keys, values, out, tables, lengths, dim**-0.5, tables.shape[1],
               kv_heads, heads // kv_heads, dim, page, tile, 16)  # fmt: skip
    return out, seen


def check_decode_attention(t, answer):
    fn = kernel(t, answer)

    def decode_attention(q, keys, values, tables, lengths, page, tile):
        return run_decode(fn, q, keys, values, tables, lengths, page, tile)

    def case(lengths, kv_heads, share, dim, page, tile, note, loud=1.0, old=torch.nan):
        g = t.rng(sum(lengths) + dim)
        pages = [-(-n // page) for n in lengths]
        order = (torch.randperm(sum(pages), generator=g) + 1).tolist()
        tables = torch.full((len(lengths), max(pages)), 0, dtype=torch.int32)
        keys, values = torch.full((2, (sum(pages) + 1) * page, kv_heads, dim), old)
        last = []  # rows of the sequences' last keys
        q, want = torch.randn(len(lengths), kv_heads * share, dim, generator=g) * loud, []
        for i, n in enumerate(lengths):
            own = [order.pop() for _ in range(pages[i])]
            tables[i, : len(own)] = torch.tensor(own)
            k, v = torch.randn(2, n, kv_heads, dim, generator=g)
            for p in range(n):
                slot = own[p // page] * page + p % page
                keys[slot], values[slot] = k[p], v[p]
            last += [slot * kv_heads + h for h in range(kv_heads)]
            for h in range(kv_heads * share):  # the oracle: one head at a time, its keys in order
                weights = torch.softmax(k[:, h // share].double() @ q[i, h].double() * dim**-0.5, 0)
                want.append(weights @ v[:, h // share].double())
        call = f"decode_attention[({len(lengths)}, {kv_heads})] with lengths {list(lengths)}, {kv_heads * share} heads, pages of {page}, TILE {tile}"
        got = t.call(
            decode_attention, q, keys, values, tables, torch.tensor(lengths, dtype=torch.int32), page, tile, note=note
        )
        if got is None:
            return
        out, seen = got
        t.equal(out, torch.stack(want).float().view(q.shape), f"out of {call}", note=note, tol=1e-4)
        # the last key may be read again where none is left (the engine does that); every other one is read once
        for name in ("keys", "values"):
            often = np.bincount(seen.elements(name) // dim, minlength=len(keys) * kv_heads) // dim
            often[last] = np.minimum(often[last], 1)
            rows, needed = int(often.sum()), sum(lengths) * kv_heads
            t.true(rows <= needed, f"each one is read once for all heads that share it: {needed} rows", call=call, got=rows,
                   note=f"rows of {name} read (counted in the interpreter)")  # fmt: skip

    case((3,), 1, 1, 8, 4, 4, "one sequence of 3 tokens, one head, one tile that is not full")
    case((8,), 1, 1, 8, 4, 4, "two full tiles")
    case((11,), 1, 1, 8, 4, 4, "three tiles, the last not full; louder scores", loud=4.0)
    case((5, 1), 2, 1, 4, 2, 4, "two sequences, two KV heads; slots that are nobody's hold NaN")
    case((6,), 1, 3, 4, 4, 8, "three heads share one KV head")
    case((13, 4, 9), 2, 3, 8, 4, 8, "three sequences, six heads that share two KV heads, tiles of two pages", loud=2.0)
    case((7, 10), 3, 2, 4, 8, 4, "a page holds two tiles", loud=2.0)
    case((5, 3), 1, 2, 4, 4, 8, "behind the last key lie an older request's numbers", old=0.5)


def decode_per_head(
    q, keys, values, out, tables, lengths, scale, pages,
    KV_HEADS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    sequence, g, columns, d = tl.program_id(0), tl.program_id(1), tl.arange(0, TILE), tl.arange(0, DIM)
    length, table = tl.load(lengths + sequence), tables + sequence * pages
    for s in range(SHARE):
        place_q = ((sequence * KV_HEADS + g) * SHARE + s) * DIM + d
        one = tl.load(q + place_q) * (scale * 1.4426950408889634)
        m, l = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32)
        acc = tl.zeros((1, DIM), tl.float32)
        for j in range(0, length, TILE):
            key = j + columns
            inside = key < length
            place = kernels.cache_rows(table, key, inside, g, PAGE, KV_HEADS)[:, None] * DIM + d[None, :]
            k, v = tl.load(keys + place, inside[:, None], 0.0), tl.load(values + place, inside[:, None], 0.0)
            scores = tl.where(inside, tl.sum(one[None, :] * k, 1), float("-inf"))
            m, l, weights, shrink = kernels.online_softmax(m, l, scores[None, :])
            acc = acc * shrink[:, None] + tl.dot(weights, v)
        tl.store(out + place_q[None, :], acc / l[:, None])


def decode_variant(
    q, keys, values, out, tables, lengths, scale, pages,
    KV_HEADS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # page by page, with one softmax state for each tile row kept by hand; TILE is not used
    sequence, g = tl.program_id(0), tl.program_id(1)
    rows, slot, d = tl.arange(0, ROWS), tl.arange(0, PAGE), tl.arange(0, DIM)
    good = (rows < SHARE)[:, None]
    place_q = ((sequence * KV_HEADS + g) * SHARE + rows)[:, None] * DIM + d[None, :]
    q_tile = tl.load(q + place_q, good, 0.0) * scale
    length = tl.load(lengths + sequence)
    top, total = tl.full((ROWS,), -1e30, tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    for i in range(tl.cdiv(length, PAGE)):
        page = tl.load(tables + sequence * pages + i).to(tl.int64)
        real = i * PAGE + slot < length
        place = ((page * PAGE + slot) * KV_HEADS + g)[:, None] * DIM + d[None, :]
        scores = tl.dot(q_tile, tl.trans(tl.load(keys + place, real[:, None], 0.0)))
        scores = tl.where(real[None, :], scores, -1e30)
        new = tl.maximum(top, tl.max(scores, 1))
        weights = tl.where(real[None, :], tl.exp(scores - new[:, None]), 0.0)
        total = total * tl.exp(top - new) + tl.sum(weights, 1)
        acc = acc * tl.exp(top - new)[:, None] + tl.dot(weights, tl.load(values + place, real[:, None], 0.0))
        top = new
    tl.store(out + place_q, acc / total[:, None], good)


def plug_decode_attention(answer, swap):
    """The engine's decode steps on the learner's kernel, and the bytes that sharing saves."""
    own, calls = kernels.paged_attention, [0, 0]

    def paged_attention(qkv, cache, tiles, out, page_size, num_heads, scale, window):
        kv_heads, dim = cache.keys.shape[1:]
        if int(tiles.counts.max()) > 1:  # a prompt: the engine's own
            calls[1] += 1
            return own(qkv, cache, tiles, out, page_size, num_heads, scale, window)
        calls[0] += 1
        q, tables = qkv[:, : num_heads * dim].contiguous(), tiles.tables[tiles.seats.long()]
        launch(answer, (len(q), kv_heads), q, cache.keys, cache.values, out, tables, tiles.lengths, scale,
               tables.shape[1], kv_heads, num_heads // kv_heads, dim, page_size, 16, 16)  # fmt: skip

    want = generated(tiny_llm("sdpa"))
    kernels.paged_attention = paged_attention
    try:
        got = generated(tiny_llm())
    finally:
        kernels.paged_attention = own
    print(f"attention: {calls[0]} launches of your kernel in decode steps, {calls[1]} of the engine's own for prompts")
    print(f"plain torch on the CPU:   {want}")
    print(f"kernels with yours:       {got}")
    print(f"tokens equal: {'yes' if got == want else 'NO'}")
    if got != want:
        raise AssertionError("the tokens differ")
    q, (keys, values) = torch.randn(1, 9, 64), torch.randn(2, 64, 3, 64)  # the heads of SmolLM2
    for name, fn in (("your kernel", answer), ("one head at a time", decode_per_head)):
        _, seen = run_decode(
            fn, q, keys, values, torch.arange(4, dtype=torch.int32)[None], torch.tensor([50], dtype=torch.int32), 16, 16
        )
        print(
            f"50 tokens, 9 heads that share 3: {name:<19} reads {seen.bytes_moved('read'):>9,} bytes of keys and values"
        )


# ---- the list

EXERCISES = [
    Exercise(
        id="14.1",
        symbol=RMS,
        title="A fused RMSNorm",
        minutes=10,
        difficulty=1,
        statement="""
            RMSNorm divides each row by the root of its mean square (plus `eps`) and multiplies by a weight. Operator by operator
            that is six kernels, each reading and writing whole rows. Write it as one: each program takes one row from load to store.

            What is there: `row`, this program's number; `column`, 0 to SIZE - 1; `inside`, which columns exist; `w`, the weight in
            float32. **Write the rest:** load the row, scale it, store it. `x`, `weight` and `out` are pointers, so
            `tl.load(pointer + numbers, mask, other)` takes a whole array of places; where the mask is False it gives `other`, and
            without `other` anything. Row r begins at `r * size`. `SIZE` is `size`
            rounded up to a power of two, because a tile must be one. Compute in float32, store as `out.dtype.element_ty`. You need
            `tl.sum(values)`, `tl.rsqrt(x)` (1 / root) and `tl.store(addresses, values, mask)`. (The two lines with `PDL` are for a GPU; here they do nothing.)

            Worked example: the row `[3, 0, 4, 0]`, weight 1, eps 0. Mean square 25 / 4, root 2.5, result `[1.2, 0, 1.6, 0]`.
        """,
        hints=(
            "Look at how `w` is loaded. Your row is loaded the same way, only from further on.",
            "Three steps: load (places beyond the row give 0, which adds nothing to a sum), multiply by `tl.rsqrt` of the mean "
            "square plus eps and by w, store with the same mask. How many numbers is the mean over?",
            "A row begins at x plus row times size; add column. Cast with .to(tl.float32) at once. The sum of values times values, "
            "divided by size and not by SIZE, plus eps, goes into tl.rsqrt.",
        ),
        explanation="""
            The numbers stay in registers between the steps. Operator by operator, each step reads its input from memory and writes
            its output back: several times the bytes, and six launches. On one row of a small model the launches are what costs.

            The squares are taken in float32 because 400 squared does not fit into float16, and bfloat16 has too few digits for a sum.
            The mask is needed because a tile is a power of two and a row need not be.

            Also right: a loop over pieces of the row, which is what longer rows need (two passes: the second reads the row again,
            mostly from the cache). The engine fuses further: for a single row the norm goes into the product that follows
            (`_matvec`). In vLLM it is `rms_norm` and `fused_add_rms_norm`; SGLang and FlashInfer have the same pair; in llama.cpp
            it is `ggml_rms_norm`, fused with the multiplication on a GPU.
        """,
        check=check_rms_norm,
        mutants=(
            Mutant(
                "padded_mean",
                edited(RMS, "/ size + eps", "/ SIZE + eps"),
                "You divide by SIZE, the power of two. The mean is over the `size` numbers that exist.",
                "a tile taken for the row",
            ),
            Mutant(
                "load_unmasked",
                edited(RMS, RMS_LOAD, "tl.load(x + row * size + column).to(tl.float32)"),
                "The load has no mask: behind the row you read the next one's numbers, or nobody's. Give it `inside`.",
                "a common slip; on a GPU: illegal memory access, or silence",
            ),
            Mutant(
                "store_unmasked",
                edited(RMS, RMS_STORE, "values.to(out.dtype.element_ty))"),
                "The store has no mask: it writes SIZE numbers, and the last of them belong to somebody else.",
                "a common slip",
            ),
            Mutant(
                "eps_outside",
                edited(RMS, RMS_SCALE, "(1.0 / (tl.sqrt(tl.sum(values * values) / size) + eps))"),
                "eps belongs under the root. Behind it, it is another function.",
                "a common slip",
            ),
            Mutant(
                "no_eps",
                edited(RMS, RMS_SCALE, "tl.rsqrt(tl.sum(values * values) / size)"),
                "eps is missing: a row of zeros becomes 0 times infinity, NaN.",
                "a common slip",
            ),
            Mutant(
                "layer_norm",
                edited(
                    RMS,
                    "    values = values * tl.rsqrt(",
                    "    values = tl.where(inside, values - tl.sum(values) / size, 0.0)\n    values = values * tl.rsqrt(",
                ),
                "You subtract the mean first: that is LayerNorm. RMSNorm does not.",
                "LayerNorm remembered",
            ),
            Mutant(
                "no_weight",
                edited(RMS, "/ size + eps) * w", "/ size + eps)"),
                "The weight is missing: multiply each column by its `w`.",
                "a common slip",
            ),
            Mutant(
                "in_float16",
                edited(RMS, RMS_LOAD, "tl.load(x + row * size + column, inside, 0.0)"),
                "The squares are taken in float16, where 400 squared is infinite. Cast to float32 right after the load.",
                "a common slip; models trained in bfloat16 norm in float32",
            ),
            Mutant(
                "sum_for_mean",
                edited(RMS, "tl.sum(values * values) / size", "tl.sum(values * values)"),
                "You take the sum of the squares, not their mean: divide by `size`.",
                "a common slip",
            ),
            Mutant(
                "root",
                edited(RMS, "tl.rsqrt(", "tl.sqrt("),
                "You multiply by the root; you want to divide by it. tl.rsqrt is one over the root.",
                "sqrt for rsqrt",
            ),
            Mutant(
                "not_rooted",
                edited(RMS, RMS_SCALE, "(1.0 / (tl.sum(values * values) / size + eps))"),
                "You divide by the mean square itself. The root is missing.",
                "a common slip",
            ),
            Mutant(
                "row_not_scaled",
                edited(RMS, "tl.load(x + row * size + column", "tl.load(x + row + column"),
                "You read from `row`, not from `row * size`: program 1 starts one number further on, not one row.",
                "pointer arithmetic counts elements",
            ),
            Mutant(
                "rows_of_SIZE",
                edited(RMS, "tl.load(x + row * size + column", "tl.load(x + row * SIZE + column"),
                "Rows lie `size` apart in memory. SIZE is only how wide your tile is.",
                "a common slip",
            ),
            Mutant(
                "first_row",
                edited(RMS, "tl.load(x + row * size + column", "tl.load(x + column"),
                "Every program reads row 0. Use `row`, the program's number.",
                "a kernel written for one row",
            ),
            Mutant(
                "no_other",
                edited(RMS, RMS_LOAD, "tl.load(x + row * size + column, inside).to(tl.float32)"),
                "A load with a mask but no third argument: on a GPU, what is masked away may be anything, and you sum it. Give it 0.0.",
                "a common slip; the interpreter gives 0 there, so it shows only on a GPU (the check puts NaN)",
            ),
            Mutant(
                "store_first_row",
                edited(RMS, "tl.store(out + row * size + column", "tl.store(out + column"),
                "Every program writes row 0. The store needs `row * size` as well.",
                "half of the pointer arithmetic",
            ),
            Mutant(
                "not_stored",
                edited(RMS, "tl.store(out + row * size + column, " + RMS_STORE, "pass"),
                "Nothing is written to `out`. A kernel returns nothing: tl.store the result.",
                "return instead of a store",
            ),
            Mutant(
                "one_plus_weight",
                edited(RMS, "/ size + eps) * w", "/ size + eps) * (1.0 + w)"),
                "You multiply by 1 + w. Gemma does that; this norm multiplies by w.",
                "Gemma's RMSNorm remembered",
            ),
            Mutant(
                "SIZE_everywhere",
                edited(
                    RMS,
                    RMS_LOAD,
                    "tl.load(x + row * SIZE + column, inside, 0.0).to(tl.float32)\n    out += row * (SIZE - size)",
                ),
                "Rows lie `size` apart in memory, in x and in out. SIZE is only how wide your tile is.",
                "a common slip",
            ),
        ),
        variant=rms_variant,
        scratch="""
            import torch
            from minillm.course.stages.s14_gpu_kernels.interpreted import launch

            x, out = torch.tensor([[3.0, 0.0, 4.0], [1.0, 1.0, 1.0]]), torch.empty(2, 3)
            launch(_rms_norm, (2,), x, torch.ones(3), out, 3, 1e-5, 4, False)  # 2 programs, tiles of 4
            print(out)
        """,
        plug_in=plug_rms_norm,
    ),
    Exercise(
        id="14.2",
        symbol=SOFTMAX,
        title="A tile of softmax",
        minutes=15,
        difficulty=2,
        statement="""
            The heart of the attention kernel. It walks over the keys in tiles of C, for R rows (queries) at a time, and carries
            for each row the largest score so far, `m`, and the sum `l` of `exp2(score - m)`. Take in one tile: `scores` `[R, C]`.
            A key that may not be seen has the score -inf. Everything is base 2 (`tl.exp2`), which a GPU computes fastest.

            Return four things: the new `m` `[R]`, the new `l` `[R]`, the tile's `weights` `[R, C]` (relative to the *new* m), and
            `shrink` `[R]`, the factor by which older sums are multiplied. The kernel then does
            `acc = acc * shrink[:, None] + dot(weights, values)`.

            Worked example, one row. First tile `[1, 3, -inf, 2]`, with m = -inf and l = 0: m = 3, weights `[1/4, 1, 0, 1/2]`,
            l = 1.75. Next tile `[5, -inf, 4, -inf]`: m = 5, weights `[1, 0, 1/2, 0]`, shrink = 2**(3 - 5) = **1/4**,
            l = 1.75 / 4 + 1.5 = **1.9375**.

            A row may have seen nothing yet, and see nothing in this tile (a sliding window does that). Then the weights and l are
            0 and m stays -inf. Nothing may be NaN.
        """,
        hints=(
            "Stage 03 had the same in torch. Each row's new m is the larger of two things. What does everything older have to be "
            "multiplied with when m grows?",
            "new m = maximum of m and the row's largest score (tl.max with axis 1). Weights are exp2 of the score minus new m, shrink is "
            "exp2 of old m minus new m. Now put m = -inf and a tile of -inf into that: -inf minus -inf is NaN.",
            "Subtract something finite where new m is -inf: tl.where(condition, 0.0, new_m). Then exp2 of (-inf - 0) is 0, as it "
            "should be. New l is l times shrink plus tl.sum of the weights along axis 1.",
        ),
        explanation="""
            The sum l and the output acc are both relative to the m of the time when they were made. When m grows by d, all of that is
            too large by 2**d, so both shrink. This is the online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) inside
            FlashAttention (arXiv:2205.14135).

            -inf is honest: exp2(-inf) is exactly 0. But -inf - (-inf) is NaN, and one NaN in acc stays for ever, because
            NaN * 0 is NaN. So the subtraction gets a finite base. A large negative number like -1e30 instead of -inf works too, if
            rows without any key are handled in the end.

            Base 2: exp(x) is exp2(x * log2(e)), and the factor is put into the scale once. In vLLM's Triton kernels, in FlashInfer
            and in FlashAttention it is the same trick, under the name `sm_scale_log2` or `LOG2E`. llama.cpp's `fattn` kernels carry
            `KQ_max` and `KQ_sum`.
        """,
        check=check_online_softmax,
        mutants=(
            Mutant(
                "not_rescaled",
                edited(SOFTMAX, "l * shrink + tl.sum", "l + tl.sum"),
                "The old sum is not rescaled: it was made relative to the old m. Multiply l by shrink.",
                "TorchCode, flash attention without rescaling",
            ),
            Mutant(
                "all_shrunk",
                edited(SOFTMAX, "l * shrink + tl.sum(weights, 1)", "(l + tl.sum(weights, 1)) * shrink"),
                "You shrink the new weights too. They are relative to the new m already; only the old sum shrinks.",
                "a common slip",
            ),
            Mutant(
                "upside_down",
                edited(SOFTMAX, "tl.exp2(m - base)", "tl.exp2(base - m)"),
                "shrink is upside down: when m grows, older sums get smaller. exp2(old - new).",
                "a sign",
            ),
            Mutant(
                "empty_nan",
                edited(SOFTMAX, 'tl.where(new_m == float("-inf"), 0.0, new_m)', "new_m"),
                "When nothing has been seen, -inf - (-inf) is NaN. Subtract a finite number where the new m is -inf.",
                "flashinfer-ai/flashinfer#4401: rows whose every key is masked",
            ),
            Mutant(
                "base_returned",
                edited(SOFTMAX, "return new_m,", "return base,"),
                "You return the finite stand-in, 0, as the new m. It is for the subtraction only: after it, scores of -200 would all "
                "get the weight 0. m stays -inf until a key is seen.",
                "the guard carried too far",
            ),
            Mutant(
                "old_base",
                edited(SOFTMAX, "scores - base[:, None]", 'scores - tl.where(m == float("-inf"), 0.0, m)[:, None]'),
                "The weights are relative to the old m. Subtract the new one: m first, then the weights.",
                "the update in the wrong order",
            ),
            Mutant(
                "order",
                edited(SOFTMAX, "weights, 1), weights, shrink", "weights, 1), shrink, weights"),
                "One of the four has the wrong shape. In this order: m [R], l [R], weights [R, C], shrink [R]; the sum over keys goes along axis 1.",
                "results exchanged, or an axis",
            ),
            Mutant(
                "three_results",
                edited(SOFTMAX, "weights, 1), weights, shrink", "weights, 1), weights"),
                "Return four things: m, l, weights, shrink. The kernel needs shrink for acc.",
                "a common slip",
            ),
            Mutant(
                "shrink_nan",
                edited(SOFTMAX, "tl.exp2(m - base)", "tl.exp2(m - new_m)"),
                "Your weights are safe, but shrink is not: m - new_m is -inf - (-inf) for a row that has seen nothing.",
                "half of the guard",
            ),
            Mutant(
                "base_e",
                softmax_base_e,
                "You use exp, base e. Here everything is base 2: the caller has put log2(e) into the scores.",
                "kernels that mix exp and exp2",
            ),
            Mutant(
                "tile_only",
                edited(SOFTMAX, "tl.maximum(m, tl.max(scores, 1))", "tl.max(scores, 1)"),
                "The new m is only this tile's largest score. An older tile may hold a larger one.",
                "a common slip",
            ),
            Mutant(
                "one_for_all",
                edited(SOFTMAX, "tl.max(scores, 1)", "tl.max(scores)"),
                "You take the largest score of the whole tile. Each row needs its own: axis 1.",
                "an axis forgotten",
            ),
            Mutant(
                "own_tile",
                softmax_own_tile,
                "The weights are relative to the tile's own maximum, not to the new m. When an older m is larger, they are too large.",
                "a common slip",
            ),
            Mutant(
                "old_m",
                edited(SOFTMAX, "return new_m,", "return m,"),
                "You return the old m. The next tile then shrinks by the wrong factor.",
                "a common slip",
            ),
            Mutant(
                "no_max",
                softmax_no_max,
                "No maximum is subtracted: exp2 of a large score is infinite in float32.",
                "softmax without its maximum",
            ),
            Mutant(
                "masked_as_zero",
                softmax_masked_as_zero,
                "A masked key counts as a key with score 0. Its weight must be 0.",
                "masks that multiply instead of adding -inf",
            ),
            Mutant(
                "sentinel",
                softmax_sentinel,
                "A large negative number in place of -inf: if a row has nothing else, its weight is exp2(0) = 1. Such rows need care too.",
                "NVIDIA/TensorRT-LLM#17477: fully masked rows count with weight 1",
            ),
            Mutant(
                "normalised",
                softmax_normalised,
                "You divide by the sum in each tile. The sum is not complete yet: the kernel divides once, at the end.",
                "softmax called per tile",
            ),
        ),
        variant=softmax_variant,
        scratch="""
            import torch
            from minillm.course.stages.s14_gpu_kernels.interpreted import run_online_softmax

            never = float("-inf")
            m, l = torch.tensor([never]), torch.tensor([0.0])
            for tile in ([1.0, 3.0, never, 2.0], [5.0, never, 4.0, never]):
                state = run_online_softmax(online_softmax, m, l, torch.tensor([tile]))
                m, l = state["m"], state["l"]
                print(state)
        """,
        plug_in=lambda answer, swap: plug("14.2", answer),
    ),
    Exercise(
        id="14.3",
        symbol=ROWS,
        title="Through the page table, inside the kernel",
        minutes=10,
        difficulty=2,
        statement="""
            A program reads keys of one sequence for one KV head. It has positions, `key` `[C]`, and the sequence's block table
            in memory: `table` is a pointer to int32. Where do these keys lie?

            The cache is seen as rows of D numbers, `[num_slots * num_kv_heads, D]`: slot by slot, and in each slot head by head.
            Return the row numbers, int64 `[C]`, for KV head `g`. `PAGE` is the block size. Where `inside` is False there is no such
            position: what you return there does not matter, but **the table may not be read there**, because it may end.

            Worked example: table `[5, 2, 7]`, pages of 4, 3 KV heads, head 1. Position 6 is in the sequence's page 1, which is page
            **2** of the cache, at offset 2: slot 2 * 4 + 2 = **10**, row 10 * 3 + 1 = **31**.
        """,
        hints=(
            "Two steps of arithmetic around one load. For one position you did it in stage 04 (slots_for). Here `key` is an array, and so "
            "is everything that you compute from it.",
            "The entry is at table plus the number of the position's page. Load it with a mask, so that places beyond the context "
            "are not touched. From page and offset to a slot; from a slot to a row there are KV_HEADS rows in each slot.",
            "tl.load(where, inside, 0) for the entry, then .to(tl.int64), as a large cache has more rows than 2**31. The slot is page times "
            "PAGE plus the remainder of key; multiply by KV_HEADS and add g.",
        ),
        explanation="""
            The kernel never sees a contiguous sequence, and nothing is gathered first: a tile's rows are computed and loaded directly.
            A tile of 64 keys spans four pages of 16, so the page is looked up for each key. That is cheap: neighbours ask for the same
            entry. It also frees the tile's size from the page's size (Ringlein et al. 2025, arXiv:2511.11581, call this out).

            The mask on the table is as important as that on the keys. Behind a sequence's last entry stands an old entry, or another
            sequence's table, or the end of the memory. int64, because page * PAGE * KV_HEADS * D passes 2**31 in a cache of a few GB.

            Also right: move the unpaged row by as far as its page was moved. vLLM's Triton attention does the same as here (`physical_block_idx`);
            FlashInfer's `paged_kv_t` has the strides inside, with layouts NHD (ours) and HND (a head's keys of a page lie together).
        """,
        check=check_cache_rows,
        mutants=(
            Mutant(
                "logical",
                edited(ROWS, ROWS_RESULT, "key.to(tl.int64) * KV_HEADS + g"),
                "The table is not used: the sequence's position is not its place in the cache.",
                "code that was right before paging",
            ),
            Mutant(
                "offset_lost",
                edited(ROWS, "(page * PAGE + key % PAGE)", "(page * PAGE)"),
                "Every key of a page gets the page's first slot. Add the offset in the page, key % PAGE.",
                "a common slip",
            ),
            Mutant(
                "offset_whole",
                edited(ROWS, "key % PAGE", "key"),
                "You add the whole position to the page's first slot. Add only the offset in the page, key % PAGE.",
                "a common slip",
            ),
            Mutant(
                "table_by_position",
                edited(ROWS, "table + key // PAGE", "table + key"),
                "You read table[position]. The table has one entry for each page: table[position // PAGE].",
                "table indexed by slot",
            ),
            Mutant(
                "entry_by_offset",
                edited(ROWS, "table + key // PAGE", "table + key % PAGE"),
                "You look up the entry by key % PAGE. Quotient: which page; remainder: where in it.",
                "// and % exchanged",
            ),
            Mutant(
                "mask_forgotten",
                edited(ROWS, "tl.load(table + key // PAGE, inside, 0)", "tl.load(table + key // PAGE)"),
                "You read the table where `inside` is False, past its end. Give the load its mask.",
                "slwang-ustc/nano-vllm-v1#3: stale entries behind a table",
            ),
            Mutant(
                "head_forgotten",
                edited(ROWS, "* KV_HEADS + g", "* KV_HEADS"),
                "Every head reads head 0's keys: add g.",
                "a common slip",
            ),
            Mutant(
                "heads_not_scaled",
                edited(ROWS, "(page * PAGE + key % PAGE) * KV_HEADS + g", "(page * PAGE + key % PAGE) + g"),
                "A slot holds KV_HEADS rows, one for each head: multiply the slot by KV_HEADS before you add g.",
                "the stride of a head forgotten",
            ),
            Mutant(
                "slot_only",
                edited(ROWS, ROWS_RESULT, "page * PAGE + key % PAGE"),
                "That is the slot. Each slot holds KV_HEADS rows: multiply by KV_HEADS and add g.",
                "slots_for copied from stage 04",
            ),
            Mutant(
                "brackets",
                edited(ROWS, ROWS_RESULT, "page * PAGE + key % PAGE * KV_HEADS + g"),
                "Only the offset is multiplied by KV_HEADS. The whole slot must be: brackets around page * PAGE + offset.",
                "a common slip",
            ),
            Mutant(
                "exchanged",
                edited(
                    ROWS,
                    "    page = " + ROWS_LOAD + "\n    return " + ROWS_RESULT,
                    "    page = tl.load(table + key % PAGE, inside, 0).to(tl.int64)\n"
                    "    return (page * PAGE + key // PAGE) * KV_HEADS + g",
                ),
                "// and % are exchanged, both times. Quotient: which page; remainder: where in it.",
                "// and % exchanged",
            ),
            Mutant(
                "divided",
                edited(ROWS, "table + key // PAGE", "table + key / PAGE"),
                "`/` makes a float, and an address plus a float is no address. Divide with `//`.",
                "a common slip",
            ),
            Mutant(
                "subscript",
                edited(ROWS, ROWS_LOAD, "table[key // PAGE]"),
                "table is a pointer, not an array: no [ ]. tl.load(table + number, mask, other) reads it.",
                "Python habits",
            ),
            Mutant(
                "head_first",
                edited(ROWS, ROWS_RESULT, "(page * KV_HEADS + g) * PAGE + key % PAGE"),
                "That is the layout page, head, slot (FlashInfer's HND). Ours is page, slot, head.",
                "two cache layouts mixed up",
            ),
            Mutant(
                "int32",
                edited(ROWS, ROWS_LOAD, "tl.load(table + key // PAGE, inside, 0)"),
                "The row number does not fit into 32 bits in a large cache, and wraps around. Cast the page to int64 first.",
                "vllm-project/vllm#47671, and #50427: page numbers times strides in int32",
            ),
            Mutant(
                "page_not_scaled",
                edited(ROWS, "page * PAGE + key % PAGE", "page + key % PAGE"),
                "The number of a page is not yet a slot: page p begins at slot p * PAGE.",
                "a common slip",
            ),
            Mutant(
                "one_page",
                rows_first_page_only,
                "You look up one page for the whole tile. A tile may span several pages: look it up for each key.",
                "kernels that take a tile for a page",
            ),
            Mutant(
                "neighbours",
                rows_neighbours,
                "You take the first page's neighbours. Each page is wherever the table says.",
                "contiguous caches",
            ),
        ),
        variant=rows_variant,
        scratch="""
            import torch
            from minillm.course.stages.s14_gpu_kernels.interpreted import run_cache_rows

            table, key = torch.tensor([5, 2, 7], dtype=torch.int32), torch.arange(8, 16, dtype=torch.int32)
            inside = key < 9  # the context ends at 9
            print(run_cache_rows(cache_rows, table, key, inside, 1, 4, 3))  # head 1, pages of 4, 3 heads
        """,
        plug_in=plug_cache_rows,
    ),
    Exercise(
        id="14.4",
        symbol=MERGE,
        title="Put the parts together",
        minutes=10,
        difficulty=2,
        statement="""
            One long sequence, and 132 multiprocessors: if one program reads the whole context, 131 stand idle. So the context is cut
            into S parts, each with a program (split-KV). Each part leaves its own attention output, normalised as if it were alone,
            and how much weight it had in all: `lse`, log2 of its sum of exp2(scores).

            Merge them: `each` `[S, D]` and `lse` `[S]` give `[D]`. Both are tiles that are loaded already, not pointers; `tl.max(x, 0)`
            and `tl.sum(x, 0)` go over the parts. A part may be empty (no keys): its lse is -inf, its row in
            `each` is zeros. If all are empty, the result is zeros.

            Worked example: outputs `[1, 0]` and `[0, 1]`, lse 3 and 1. The sums behind them are 8 and 2, so the weights are 8/10 and
            2/10: `[0.8, 0.2]`.
        """,
        hints=(
            "It is a weighted average. A part whose sum was 8 has four times the say of one whose sum was 2. What is the sum behind an lse?",
            "The weights are exp2(lse), but that overflows for large ones: subtract the largest lse from all. Divide by the sum of the "
            "weights at the end. Then try lse = -inf in all parts.",
            "Where the largest is -inf, subtract 0. Where the sum of the weights is 0, divide by 1. tl.sum(..., 0) adds over the parts; "
            "the weights need [:, None] to multiply rows.",
        ),
        explanation="""
            Each part is a complete softmax with a known sum. Multiplying a part's output by its sum undoes its division, and what is
            left is what one long loop would have had. So it is exact up to rounding, in any number of parts. It is also the same
            merge that joins a shared prefix with a private rest, or two GPUs with half of the context each.

            lse travels instead of m and l because the output is already divided: one number is enough.

            Dao et al. called it Flash-Decoding (2023). In vLLM: `merge_attn_states`, and the `_v2` paged attention's reduce kernel; in
            FlashInfer: `merge_state`, the "cascade"; in llama.cpp: `flash_attn_combine_results`.
        """,
        check=check_merge_parts,
        mutants=(
            Mutant(
                "average",
                merge_average,
                "A plain average: every part has the same say, whether it saw important keys or none at all.",
                "TorchCode: means of per-block softmaxes",
            ),
            Mutant(
                "average_of_filled",
                merge_average_of_filled,
                "You leave out empty parts, but average the others. A part's say is its sum of weights, exp2(lse).",
                "half of the repair",
            ),
            Mutant(
                "winner",
                merge_winner,
                "Only the part with the largest lse counts. The others have smaller weights, not none.",
                "weights by max only",
            ),
            Mutant(
                "by_log",
                merge_by_log,
                "You weigh by lse itself. It is a logarithm: the weight is exp2(lse).",
                "a common slip",
            ),
            Mutant(
                "base_e",
                edited(MERGE, "tl.exp2(", "tl.exp("),
                "The lse is a log2, so undo it with exp2, not with exp.",
                "sgl-project/sglang#40903: FlashInfer's lse is base 2, the merge took it for base e",
            ),
            Mutant(
                "not_normalised",
                edited(MERGE, MERGE_RESULT, "tl.sum(each * weights[:, None], 0)"),
                "The weights do not add up to 1: divide by their sum.",
                "a common slip",
            ),
            Mutant(
                "by_count",
                edited(MERGE, MERGE_RESULT, "tl.sum(each * weights[:, None], 0) / each.shape[0]"),
                "You divide by the number of parts. Divide by the sum of their weights.",
                "a common slip",
            ),
            Mutant(
                "no_max",
                merge_no_max,
                "exp2 of the lse itself: infinite for large ones, and all 0 for very small ones. Subtract the largest first.",
                "softmax without its maximum",
            ),
            Mutant(
                "empty_nan",
                edited(MERGE, "tl.where(total == 0.0, 1.0, total)", "total"),
                "With no keys in any part you get NaN: -inf - (-inf), or 0 / 0. The rows of a graph's padding look like that.",
                "flashinfer-ai/flashinfer#2883 (NaN in padded output)",
            ),
            Mutant(
                "zero_at_least",
                edited(MERGE, 'tl.where(top == float("-inf"), 0.0, top)', "tl.maximum(top, 0.0)"),
                "You subtract 0 whenever the largest lse is below 0. It may be -500: replace it only if it is -inf.",
                "the guard carried too far",
            ),
            Mutant(
                "wrong_axis",
                edited(MERGE, "tl.sum(each * weights[:, None], 0)", "tl.sum(each * weights[:, None], 1)"),
                "You add up each part's own numbers. The sum goes over the parts: axis 0.",
                "an axis mixed up",
            ),
            Mutant(
                "not_spread",
                edited(MERGE, "each * weights[:, None]", "each * weights"),
                "each is [S, D] and the weights are [S]: without [:, None] they multiply the columns, not the rows.",
                "broadcasting goes to the last axis",
            ),
            Mutant(
                "empty_counts",
                edited(
                    MERGE,
                    MERGE_WEIGHTS,
                    'tl.exp2(tl.where(lse == float("-inf"), 0.0, lse) - tl.where(top == float("-inf"), 0.0, top))',
                ),
                "An empty part counts as one with lse 0. Its weight must be exp2(-inf), which is 0.",
                "-inf replaced by 0 too early",
            ),
        ),
        variant=merge_variant,
        scratch="""
            import torch
            from minillm.course.stages.s14_gpu_kernels.interpreted import run_merge_parts

            each = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
            print(run_merge_parts(merge_parts, each, torch.tensor([3.0, 1.0])))
            print(run_merge_parts(merge_parts, each * 0, torch.tensor([float("-inf")] * 2)))
        """,
        plug_in=plug_merge_parts,
    ),
    Exercise(
        id="14.5",
        symbol=PAD,
        title="Harmless padding",
        minutes=10,
        difficulty=2,
        statement="""
            A CUDA graph replays the same kernels on the same memory, for a fixed number of rows. Three requests run in a graph of
            four; row 3 is computed too, whatever stands in its input. The buffers still hold what an older, larger batch left.

            Make the rows from `count` to `padded` harmless, **in place**. `fields` is a dictionary of numpy arrays, some of the
            input's (those of its tokens, or of its sequences, ...); `HARMLESS` says for each name what a padding row gets. One value
            depends on the cache: a padding row's `slots` is `spare_slot`, a place that no request owns. Leave the rows of the
            requests alone. (Rows from `padded` on are not in this graph: what you leave there does not matter.)

            Worked example: count 1, padded 3, spare slot 64. `slots` was `[7, 12, 3, 9]` and becomes `[7, 64, 64, 9]`; `lengths` was
            `[5, 8, 2, 2]` and becomes `[5, 0, 0, 2]`; `sources` gets -1, and so on. `HARMLESS` has all the others: print it.
        """,
        hints=(
            "What does the row do? It writes a key and a value to its slot, reads a context of `lengths` tokens, and may take its token "
            "from the step before. Each of these must hit nobody.",
            "Loop over `fields.items()` and assign to a slice of each array. Assigning to a slice changes the array itself.",
            "For each name, the rows from count to padded become HARMLESS[name]; only for the name 'slots' it is spare_slot.",
        ),
        explanation="""
            All rows are computed. A padding row with slot 0 writes its key over slot 0, which belongs to somebody; with slot -1, many
            kernels wrap around to the last slot, or write in front of the cache. The text of the victim goes on, fluent and wrong, and
            only when the batch does not fill its graph. A context of 0 tokens reads nothing, so no stale table entry is followed. Source
            -1 says: no token from the step before.

            Also right: keep the rows beyond the batch harmless all the time, and clean up what shrinks. In vLLM the padding slot is
            `PAD_SLOT_ID = -1`, which its kernel skips (pull request 43869 shows what happens with one that does not); SGLang reserves slot 0 of its
            pool for padding ("the padded slot 0"); lmdeploy reserves block 0 (pull request 4569).
        """,
        check=check_pad_rows,
        mutants=(
            Mutant(
                "slot_minus_one",
                edited(PAD, "spare_slot if", "-1 if"),
                "Padding writes to slot -1: in front of the cache, or into its last slot. Use spare_slot.",
                "vllm-project/vllm#43869",
            ),
            Mutant(
                "slot_zero",
                edited(PAD, 'spare_slot if name == "slots" else HARMLESS[name]', "HARMLESS[name]"),
                "Padding writes to slot 0, and that belongs to a live request. Use spare_slot.",
                "rvllm#32: padded rows reuse slot 0",
            ),
            Mutant(
                "context_one",
                edited(PAD, "else HARMLESS[name]", 'else 1 if name == "lengths" else HARMLESS[name]'),
                "Padding reads a context of one token, through whatever table its seat has. Its length is 0.",
                "gty111/gLLM#174 pads lengths with 1, against a division by zero",
            ),
            Mutant(
                "source_left",
                pad_some,
                "Only slots, lengths and counts are set. What is left from the older batch, such as `sources`, still acts.",
                "slwang-ustc/nano-vllm-v1#3; InternLM/lmdeploy#4569: data of the step before in a graph's buffers",
            ),
            Mutant(
                "source_zero",
                edited(PAD, "else HARMLESS[name]", 'else 0 if name == "sources" else HARMLESS[name]'),
                "Source 0 means: take the token of row 0 of the step before. No source is -1.",
                "0 as 'nothing'",
            ),
            Mutant(
                "slots_only",
                pad_slots_only,
                "Only `slots` is set. The old length, counts and sources still act: set every array, from HARMLESS.",
                "the first half of the problem",
            ),
            Mutant(
                "neighbour",
                edited(PAD, "else HARMLESS[name]", "else array[count - 1]"),
                "The slot is right, but the rest is copied from the last request: its context would be read again. Take HARMLESS[name].",
                "np.pad with mode 'edge', repaired for slots",
            ),
            Mutant(
                "by_hand",
                edited(PAD, "else HARMLESS[name]", 'else -1 if name == "sources" else 0'),
                "0 is not harmless everywhere: look at tile_firsts and top_ps. Take HARMLESS[name].",
                "zeros as a habit",
            ),
            Mutant(
                "all_spare",
                edited(PAD, 'spare_slot if name == "slots" else HARMLESS[name]', "spare_slot"),
                "spare_slot is a place in the cache. It belongs into `slots` only; the others get HARMLESS[name].",
                "a common slip",
            ),
            Mutant(
                "begins_late",
                edited(PAD, "[count:padded]", "[count + 1 : padded]"),
                "Row `count` itself is padding: the requests are the rows 0 to count - 1.",
                "an off-by-one",
            ),
            Mutant(
                "one_row",
                edited(PAD, "[count:padded]", "[count : count + 1]"),
                "Only the first padding row is clean. An older, larger batch has left numbers in all of them.",
                "a test with one padding row",
            ),
            Mutant(
                "last_row_lost",
                edited(PAD, "[count:padded]", "[count : padded - 1]"),
                "The last padding row is not touched: a slice ends before its second number.",
                "an off-by-one",
            ),
            Mutant(
                "all_rows",
                edited(PAD, "[count:padded]", "[:padded]"),
                "You overwrite the requests' own rows too. Begin at `count`.",
                "a common slip",
            ),
            Mutant(
                "repeated",
                pad_repeat,
                "Padding repeats the last request: it writes to that request's slot, and reads its whole context again.",
                "np.pad with mode 'edge'",
            ),
            Mutant(
                "slots_count_up",
                pad_slots_count_up,
                "Each padding row gets a slot of its own, spare_slot + i. They run out of the spare block. One place is enough for all.",
                "fear of two rows writing to one place",
            ),
            Mutant(
                "all_names",
                pad_all_names,
                "KeyError: you loop over all names that HARMLESS knows. `fields` holds only some of them: loop over it.",
                "an earlier version of this exercise",
            ),
            Mutant(
                "new_arrays",
                pad_new_arrays,
                "The arrays that came in are unchanged: you build new ones, and the graph reads the old memory. Assign to a slice, array[a:b] = value.",
                "CUDA graphs replay addresses",
            ),
        ),
        variant=pad_variant,
        scratch="""
            fields = {name: np.arange(4) + 7 for name in ("slots", "positions", "sources")}
            pad_rows(fields, 1, 3, 64)
            print(fields)
        """,
        plug_in=plug_pad_rows,
    ),
    Exercise(
        id="14.6",
        symbol="decode_attention",
        title="Your own paged decode kernel",
        minutes=25,
        difficulty=3,
        statement="""
            Put it together: paged attention for decoding, in one kernel. It is launched with one program for each sequence and **KV
            head**. The SHARE query heads that share the KV head are the rows of one tile, so each key is read once for all of them.

            Beginning and end are there: `q_tile` `[ROWS, DIM]` holds the queries (scaled, for base 2; rows from SHARE on are zeros),
            `length` and `table` are this sequence's. **Write the loop** over the context in tiles of TILE keys. In each turn: the
            positions (`columns` are 0 to TILE - 1) and which of them are inside; `kernels.cache_rows(table, key, inside, g, PAGE, KV_HEADS)`
            for their rows; keys and values `[TILE, DIM]`; scores `[ROWS, TILE]` by `tl.dot(a, tl.trans(b))`;
            `kernels.online_softmax(m, l, scores)`; and acc. (Or call your own two functions: they are in this notebook.)

            Worked example: 11 tokens, TILE 4, PAGE 2. Three turns, for the positions 0 to 3, 4 to 7, and **8 to 10**: the last key of
            the last tile is not there. Its slot may hold NaN, so it is not loaded (or the last real key instead of it), and its
            score is -inf.

            Write it as a plain function; the check puts `@triton.jit` on it. The check also counts: reading a key once for *each*
            query head gives the right result and fails.
        """,
        hints=(
            "Eight short lines in a loop `for j in range(0, length, TILE)`. You have written two of the functions that it calls. "
            "What is different in the last turn?",
            "A row of the cache is DIM numbers: rows[:, None] * DIM + d[None, :] are the places of a tile [TILE, DIM]. Loads need the mask "
            "inside[:, None]. Scores of keys that are not inside must become -inf, or they count with score 0.",
            "Mask the scores with tl.where(inside[None, :], ..., -inf). Keep the m and l that online_softmax returns. Then acc is acc times "
            "shrink[:, None], plus the product of weights and values.",
        ),
        explanation="""
            This is the engine's `_attention` without its options (prompts, windows, split-KV, 8-bit caches). The grid is
            sequences x KV heads. One program per *query* head would ask for each key SHARE times; a cache on the chip may catch some of
            that, but it has to move all of it. Small engines often get this wrong first.

            Rows are padded to 16 because the matrix units take at least 16 rows; with one query per head most of them are empty, and it does
            not matter: the kernel waits for memory, not for arithmetic.

            Also right: walk page by page, with tiles as large as a page; or read the last key again where none is left, so that no load
            needs a mask (the engine does that). In vLLM: `kernel_unified_attention_2d` (Triton), in FlashInfer
            `BatchDecodeWithPagedKVCacheWrapper`, in llama.cpp the `fattn-vec` and `fattn-mma` kernels.
        """,
        check=check_decode_attention,
        mutants=(
            Mutant(
                "per_head",
                decode_per_head,
                "Right, but each query head reads all keys again. The heads that share a KV head are rows of one tile: load k and v once.",
                "reference/engines.md: 4 of 5 small engines get this wrong the first time",
            ),
            Mutant(
                "score_zero",
                decode_mutant(
                    'tl.where(inside[None, :], tl.dot(q_tile, tl.trans(k)), float("-inf"))',
                    "tl.dot(q_tile, tl.trans(k))",
                ),
                "Keys that do not exist have score 0 and take part. Their score must be -inf.",
                "a mask on the load only",
            ),
            Mutant(
                "values_unmasked",
                decode_mutant("tl.load(values + place, inside[:, None], 0.0)", "tl.load(values + place)"),
                "You load values that are not there. Their weight is 0, but 0 times NaN is NaN: mask the load.",
                "flashinfer-ai/flashinfer#2883 (NaN in padding)",
            ),
            Mutant(
                "values_undefined",
                decode_mutant(
                    "tl.load(values + place, inside[:, None], 0.0)", "tl.load(values + place, inside[:, None])"
                ),
                "The values' load has a mask but no third argument: on a GPU the masked places may be anything, NaN too. Give it 0.0.",
                "shows only on a GPU (the check puts NaN there)",
            ),
            Mutant(
                "one_too_many",
                decode_mutant("inside = key < length", "inside = key <= length"),
                "`inside` lets one key too many in: the positions are 0 to length - 1.",
                "an off-by-one",
            ),
            Mutant(
                "row_for_place",
                decode_mutant("PAGE, KV_HEADS)[:, None] * DIM + d", "PAGE, KV_HEADS)[:, None] + d"),
                "A row is not yet a place in memory: a row has DIM numbers, so row r begins at r * DIM.",
                "pointer arithmetic counts elements",
            ),
            Mutant(
                "mask_upside_down",
                decode_mutant(
                    'tl.where(inside[None, :], tl.dot(q_tile, tl.trans(k)), float("-inf"))',
                    'tl.where(inside[None, :], float("-inf"), tl.dot(q_tile, tl.trans(k)))',
                ),
                "tl.where(condition, then, else): yours gives -inf to the keys that are there.",
                "a common slip",
            ),
            Mutant(
                "not_transposed",
                decode_mutant("tl.trans(k)", "k"),
                "q_tile is [ROWS, DIM] and k is [TILE, DIM]: turn k over, tl.trans(k), for scores [ROWS, TILE].",
                "a common slip",
            ),
            Mutant(
                "scaled_twice",
                decode_mutant("tl.dot(q_tile, tl.trans(k)), float", "tl.dot(q_tile, tl.trans(k)) * scale, float"),
                "The scores are scaled twice: q_tile has the scale already.",
                "a common slip",
            ),
            Mutant(
                "divided_early",
                decode_mutant("tl.dot(weights, v)\n", "tl.dot(weights, v)\n        acc = acc / l[:, None]\n"),
                "You divide by l in every turn. It is done once, after the loop: the store does it.",
                "softmax called per tile",
            ),
            Mutant(
                "all_shrunk",
                decode_mutant(
                    "acc * shrink[:, None] + tl.dot(weights, v)", "(acc + tl.dot(weights, v)) * shrink[:, None]"
                ),
                "You shrink the new products too. Their weights are relative to the new m already; only the old acc shrinks.",
                "a common slip",
            ),
            Mutant(
                "values_for_keys",
                decode_mutant("tl.load(keys + place", "tl.load(values + place"),
                "The scores come from q times keys. You multiply by the values.",
                "copy and paste",
            ),
            Mutant(
                "step_of_a_page",
                decode_mutant("range(0, length, TILE)", "range(0, length, PAGE)"),
                "The loop's step is TILE: a tile need not be a page. With another step keys are read twice, or left out.",
                "kernels that take a tile for a page",
            ),
            Mutant(
                "nothing_kept",
                decode_mutant("m, l, weights, shrink = kernels", "_, _, weights, shrink = kernels"),
                "You do not keep the new m and l: l stays 0, and the store divides by it.",
                "a common slip",
            ),
            Mutant(
                "acc_not_rescaled",
                decode_mutant("acc = acc * shrink[:, None] + tl.dot", "acc = acc + tl.dot"),
                "acc is not rescaled: when m grows, what was summed before must shrink.",
                "TorchCode, flash attention without rescaling",
            ),
            Mutant(
                "state_dropped",
                decode_mutant("m, l, weights, shrink = kernels", "_, l, weights, shrink = kernels"),
                "You do not keep the new m: every tile then counts as the first.",
                "a common slip",
            ),
            Mutant(
                "last_tile_lost",
                decode_mutant("range(0, length, TILE)", "range(0, length // TILE * TILE, TILE)"),
                "The last tile, which is not full, is missing. Go on until j reaches length.",
                "rounding down",
            ),
            Mutant(
                "one_tile",
                decode_mutant("range(0, length, TILE)", "range(0, TILE, TILE)"),
                "Only the first tile is read. Loop over the whole context.",
                "a kernel tested on short contexts",
            ),
            Mutant(
                "same_tile",
                decode_mutant("key = j + columns", "key = columns"),
                "Every turn reads the same keys: the positions begin at j.",
                "a common slip",
            ),
            Mutant(
                "keys_for_values",
                decode_mutant("tl.load(values + place", "tl.load(keys + place"),
                "You add up keys. The weights belong to the values.",
                "copy and paste",
            ),
            Mutant(
                "head_zero",
                decode_mutant("inside, g, PAGE", "inside, 0, PAGE"),
                "Every program reads KV head 0. Hand g to cache_rows.",
                "a test with one KV head",
            ),
        ),
        variant=decode_variant,
        stub=DECODE_STUB,
        solution=DECODE,
        scratch="""
            import torch
            from minillm.course.stages.s14_gpu_kernels.exercises import run_decode

            q, (keys, values) = torch.randn(1, 6, 4), torch.randn(2, 16, 2, 4)  # 6 heads share 2; 8 pages of 2 slots
            tables, lengths = torch.tensor([[5, 2, 7, 0, 1, 3]], dtype=torch.int32), torch.tensor([11], dtype=torch.int32)
            out, seen = run_decode(decode_attention, q, keys, values, tables, lengths, 2, 4)
            print(out, seen.bytes_moved("read"), "bytes of keys and values; needed are", 11 * 2 * 4 * 4 * 2)
        """,
        plug_in=plug_decode_attention,
    ),
]
