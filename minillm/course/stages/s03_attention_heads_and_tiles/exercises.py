"""Exercises of stage 03."""

import contextlib
import math

import torch

from minillm.attention import NEVER, causal_mask, fold_heads, naive, online_update, tiled, unfold_heads, visible_keys
from minillm.course.checker import largest_tensor
from minillm.course.exercise import Exercise, Mutant
from minillm.course.learn import make_llm
from minillm.course.learn import swap as swap_in
from minillm.course.source import edited
from minillm.request import SamplingParams

DIARY = (
    "The keeper of the lighthouse has a cat called Biscuit. Every evening the keeper writes down the weather. Today the wind "
    "came from the west, and the sea was grey. A ship passed far out. In the afternoon it rained, and the lamp was cleaned. "
    "Then the oil was counted and the stairs were swept. At night the keeper called the cat by its name:"
)


def prompt_for(llm, times=1):
    """The diary, several times over; token ids where the tiny random model stands in."""
    return llm.tokenizer.encode(" ".join([DIARY] * times)) if llm.tokenizer else list(range(1, 80)) * times


def generated(llm, times=1, count=10):
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    return llm.generate(prompt_for(llm, times), params)[0].outputs[0]


def new_llm(**options):
    return make_llm(num_kv_blocks=32, enable_prefix_caching=False, **options)


def compare_tokens(expected, got):
    for who, output in (("the engine's own:", expected), ("with your code:", got)):
        print(f"{who:<18} {'...' + DIARY[-26:] + output.text if output.text else output.token_ids}")
    print(f"tokens equal: {'yes' if got.token_ids == expected.token_ids else 'NO'}")
    if got.token_ids != expected.token_ids:
        raise AssertionError("the tokens differ")


# ---- 03.1 fold_heads


def numbered(num_queries, num_heads, *more):
    """A query tensor [..., Q, num_heads, 2] whose numbers say who they are: 10 * head + query, and a half more."""
    value = 10.0 * torch.arange(num_heads)[None, :] + torch.arange(num_queries)[:, None]
    pair = torch.stack([value, value + 0.5], dim=-1)
    for extra in reversed(more):
        pair = torch.stack([pair + 1000 * (i + 1) for i in range(extra)])
    return pair


def check_fold_heads(t, fold_heads):
    def case(q, num_kv_heads, note, **more):
        *lead, num_queries, num_heads, dim = q.shape
        share = num_heads // num_kv_heads
        want = torch.empty(*lead, num_kv_heads, share * num_queries, dim, dtype=q.dtype)
        for h in range(num_heads):  # the oracle: place after place
            for i in range(num_queries):
                want[..., h // share, h % share * num_queries + i, :] = q[..., i, h, :]
        t.case(fold_heads, q, num_kv_heads, expected=want, note=note, **more)

    one = torch.tensor([[[0.0], [1.0], [2.0], [3.0]]])
    t.case(fold_heads, one, 2, expected=torch.tensor([[[0.0], [1.0]], [[2.0], [3.0]]]),
           note="one query, heads 0 1 2 3: KV head 0 gets 0 and 1")  # fmt: skip
    case(numbered(2, 6), 3, "the numbers are 10 * head + query: KV head 0 gets 0, 1, 10, 11")
    case(numbered(3, 4), 4, "as many KV heads as query heads (MHA)")
    case(numbered(3, 4), 1, "a single KV head (MQA)")
    case(numbered(4, 9), 3, "the heads of SmolLM2")
    case(numbered(1, 12), 2, "decode: one query")
    case(numbered(0, 6), 2, "no queries")
    case(numbered(5, 6, 2), 3, "a batch of 2 in front")
    case(numbered(3, 8, 2, 3), 2, "two dimensions in front")
    case(torch.randn(7, 10, 3, generator=t.rng(3)), 5, "random numbers")
    case(torch.randn(6, 5, 3, generator=t.rng(4)).transpose(0, 1), 2, "q is not contiguous in memory",
         max_elements=90)  # fmt: skip


def fold_modulo(q, num_kv_heads):
    parts = q.unflatten(-2, (-1, num_kv_heads)).transpose(-3, -2)
    return parts.movedim(-4, -2).flatten(-3, -2)


def fold_divided(q, num_kv_heads):
    parts = q.unflatten(-2, (-1, num_kv_heads))
    return parts.movedim(-4, -2).flatten(-3, -2)


def fold_query_first(q, num_kv_heads):
    parts = q.unflatten(-2, (num_kv_heads, -1))
    return parts.movedim(-4, -3).flatten(-3, -2)


def fold_reshape(q, num_kv_heads):
    return q.reshape(*q.shape[:-3], num_kv_heads, q.shape[-3] * q.shape[-2] // num_kv_heads, q.shape[-1])


def fold_transpose(q, num_kv_heads):
    return q.transpose(-3, -2)


def fold_no_batch(q, num_kv_heads):
    parts = q.unflatten(1, (num_kv_heads, -1))
    return parts.permute(1, 2, 0, 3).flatten(1, 2)


def fold_first_of_group(q, num_kv_heads):
    return q[..., :: q.shape[-2] // num_kv_heads, :].transpose(-3, -2)


def fold_average(q, num_kv_heads):
    return q.unflatten(-2, (num_kv_heads, -1)).mean(dim=-2).transpose(-3, -2)


def fold_variant(q, num_kv_heads):
    share = q.shape[-2] // num_kv_heads
    groups = [[q[..., g * share + s, :] for s in range(share)] for g in range(num_kv_heads)]
    return torch.stack([torch.cat(group, dim=-2) for group in groups], dim=-3)


def plug_fold_heads(answer, swap):
    """Which KV head serves which query head, then the whole model on it."""
    expected = generated(new_llm())
    with swap():
        llm = new_llm(attention="tiled")
        got = generated(llm)
    heads, shared = llm.config.num_heads, llm.config.num_kv_heads
    rows = answer(torch.arange(heads).float()[None, :, None], shared)
    for g, row in enumerate(rows[:, :, 0].int().tolist()):
        print(f"KV head {g} serves the query heads {', '.join(map(str, row))}")
    print(f"the cache keeps {shared} heads for {heads}: every key is read once for {heads // shared} queries")
    compare_tokens(expected, got)


# ---- 03.2 visible_keys


def check_visible_keys(t, visible_keys):
    def case(first, last, *window, note=""):
        width = window[0] if window and window[0] is not None else last + 1
        seen = set()  # the oracle: ask every query
        for query in range(first, last + 1):
            seen |= {key for key in range(last + 5) if key <= query and query - key < width}
        t.case(visible_keys, first, last, *window, expected=(min(seen), max(seen) + 1), note=note)

    case(4, 7, note="four queries, no window")
    case(4, 7, 3, note="window 3: the query at 4 sees 2, 3 and 4")
    case(0, 0, note="the very first token")
    case(0, 0, 1, note="the very first token, window 1")
    case(3, 3, 1, note="one query that sees only itself")
    case(9, 9, 4, note="window 4: the query at 9 sees 6, 7, 8 and 9")
    case(7, 9, 8, note="the window reaches back to key 0 exactly")
    case(8, 9, 8, note="one further: key 0 is out of sight")
    case(2, 5, 10, note="a window longer than the text so far")
    case(6, 8, None, note="window=None: no window")
    for first, last, window in ((0, 63, 32), (64, 127, 32), (100, 131, 200), (1000, 1063, 256), (17, 17, 5)):
        case(first, last, window)


def keys_from_last(first, last, window=None):
    return (0 if window is None else max(0, last - window + 1)), last + 1


def keys_one_early(first, last, window=None):
    return (0 if window is None else max(0, first - window)), last + 1


def keys_one_late(first, last, window=None):
    return (0 if window is None else max(0, first - window + 2)), last + 1


def keys_end_included(first, last, window=None):
    return (0 if window is None else max(0, first - window + 1)), last


def keys_negative(first, last, window=None):
    return (0 if window is None else first - window + 1), last + 1


def keys_from_zero(first, last, window=None):
    return 0, last + 1


def keys_of_first_query(first, last, window=None):
    return (0 if window is None else max(0, first - window + 1)), first + 1


def keys_local(first, last, window=None):
    start, end = visible_keys(first, last, window)
    return 0, end - start


def keys_only_window(first, last, window=None):
    start = 0 if window is None else max(0, first - window + 1)
    return start, min(last + 1, start + (window or last + 1))


def keys_own_tile(first, last, window=None):
    return first, last + 1


def keys_variant(first, last, window=None):
    seen = [key for key in range(last + 1) if window is None or first - key < window]
    return seen[0], seen[-1] + 1


@contextlib.contextmanager
def windows(llm, size):
    """Every layer with a sliding window, for the block only: the model is shared."""
    before = [layer.window for layer in llm.model.layers]
    for layer in llm.model.layers:
        layer.window = size
    try:
        yield
    finally:
        for layer, old in zip(llm.model.layers, before, strict=True):
            layer.window = old


def plug_visible_keys(answer, swap):
    """The real model with a sliding window: the plain formula, and tiles that skip what your function says."""
    looked_at = []

    def watched(first, last, window=None):
        start, end = answer(first, last, window)
        looked_at.append((end - start, last + 1))
        return start, end

    llm = new_llm(attention="naive")
    with windows(llm, 24):
        expected = generated(llm)
        with swap_in("03.2", watched):
            got = generated(new_llm(attention="tiled"))
    seen, full = map(sum, zip(*looked_at, strict=True))
    print(f"window 24, prompt of {len(prompt_for(llm))} tokens; your function was called {len(looked_at)} times")
    print(f"keys looked at: {seen} of {full} without a window ({seen / full:.0%})")
    compare_tokens(expected, got)


# ---- 03.3 online_update


def update_oracle(tiles, v_tiles):
    """From all scores at once, in float64: the maximum, the sum of exp, the weighted sum of values."""
    scores, v = torch.cat(tiles, dim=-1).double(), torch.cat(v_tiles, dim=-2).double()
    m = scores.max(dim=-1, keepdim=True).values
    weights = torch.where(scores.isinf(), 0.0, (scores - m).exp())
    out = [m, weights.sum(dim=-1, keepdim=True), (weights[..., None] * v.unsqueeze(-3)).sum(dim=-2)]
    return tuple(x.to(tiles[0].dtype) for x in out)


def check_online_update(t, online_update):
    def start(rows, dim, *lead, dtype=torch.float32):
        return (
            torch.full((*lead, rows, 1), NEVER, dtype=dtype),
            torch.zeros(*lead, rows, 1, dtype=dtype),
            torch.zeros(*lead, rows, dim, dtype=dtype),
        )

    def case(tiles, v_tiles, note, **more):
        """Bring the state to where the last tile begins (by the oracle), then ask for that tile."""
        state = update_oracle(tiles[:-1], v_tiles[:-1]) if tiles[1:] else start(
            tiles[0].shape[-2], v_tiles[0].shape[-1], *tiles[0].shape[:-2], dtype=tiles[0].dtype)  # fmt: skip
        t.case(online_update, *state, tiles[-1], v_tiles[-1], expected=update_oracle(tiles, v_tiles), note=note, **more)

    def row(*numbers):
        return torch.tensor([numbers])

    def column(*numbers):
        return torch.tensor(numbers)[:, None]

    a, b = row(1.0, 3.0), row(2.0, 5.0)
    x, y = column(10.0, 20.0), column(30.0, 40.0)
    case([a], [x], "the first tile: scores 1 and 3, values 10 and 20")
    case([a, b], [x, y], "then scores 2 and 5: the maximum grows from 3 to 5")
    case([b, a], [y, x], "the other way round: the maximum stays 5")
    case([a, a], [x, y], "the same maximum twice")
    case([row(4.0)], [column(7.0)], "a tile with one key")
    case([row(-200.0, -201.0)], [x], "the first tile has very low scores: they are still the largest so far")
    case([row(-200.0, -201.0), row(-203.0, -199.0)], [x, y], "very low scores twice")
    high = {"tol": 3e-4}  # near 1000 float32 has steps of 6e-5: who keeps m + log l loses that much
    case([row(1000.0, 998.0)], [x], "very high scores: exp(1000) would be inf", **high)
    case([row(1000.0, 998.0), row(1002.0, 3.0)], [x, y], "very high scores twice", **high)
    case([row(1000.0, 998.0), row(0.0, 1.0)], [x, y], "a low tile after a high one: its weight is 0, not its maximum",
         **high)  # fmt: skip
    never = row(NEVER, NEVER)
    case([never], [x], "nothing may be seen, and nothing was seen before")
    case([never, b], [x, y], "nothing was seen before")
    case([a, never], [x, y], "nothing may be seen in this tile: nothing changes")
    case([row(NEVER, 3.0)], [x], "one of two keys may be seen")
    case([row(-3e4, NEVER)], [x], "a key that may be seen, with a score of -30000, beside one that may not")
    g = t.rng(3)
    for lead, rows, keys, dim, dtype in (((), 3, 4, 2, torch.float32), ((2,), 5, 3, 7, torch.float32),
                                         ((2, 3), 4, 5, 2, torch.float64)):  # fmt: skip
        tiles = [torch.randn(*lead, rows, keys, generator=g).to(dtype) * 4 for _ in range(4)]
        values = [torch.randn(*lead, keys, dim, generator=g).to(dtype) for _ in range(4)]
        tiles[0][..., 0, :] = NEVER  # the first row begins later than the others
        tiles[1][..., 0, 1:] = NEVER
        tiles[2][..., 1:3, :] = NEVER
        for count in (1, 2, 3, 4):
            case(tiles[:count], values[:count], f"several rows, tile {count} of 4", tol=2e-5)


def update_acc_kept(m, l, acc, scores, v):
    new_m, new_l, new_acc = online_update(m, l, acc, scores, v)
    return new_m, new_l, new_acc - acc * torch.where(m == NEVER, 0.0, (m - new_m).exp()) + acc


def update_l_kept(m, l, acc, scores, v):
    new_m, new_l, new_acc = online_update(m, l, acc, scores, v)
    return new_m, new_l - l * torch.where(m == NEVER, 0.0, (m - new_m).exp()) + l, new_acc


def update_both_kept(m, l, acc, scores, v):
    new_m = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
    weights = torch.where(scores == NEVER, 0.0, (scores - new_m).exp())
    return new_m, l + weights.sum(dim=-1, keepdim=True), acc + weights @ v


def update_nan(m, l, acc, scores, v):
    new_m = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
    weights, shrink = (scores - new_m).exp(), (m - new_m).exp()
    return new_m, l * shrink + weights.sum(dim=-1, keepdim=True), acc * shrink + weights @ v


def update_from_zero(m, l, acc, scores, v):
    new_m = torch.maximum(m, scores.amax(dim=-1, keepdim=True)).clamp(min=0)
    weights, shrink = (scores - new_m).exp(), (m - new_m).exp()
    return new_m, l * shrink + weights.sum(dim=-1, keepdim=True), acc * shrink + weights @ v


def update_tile_maximum(m, l, acc, scores, v):
    new_m = scores.amax(dim=-1, keepdim=True)
    base = new_m.masked_fill(new_m == NEVER, 0.0)
    weights, shrink = (scores - base).exp(), (m - base).exp()
    return new_m, l * shrink + weights.sum(dim=-1, keepdim=True), acc * shrink + weights @ v


def update_inverse(m, l, acc, scores, v):
    new_m = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
    weights = torch.where(scores == NEVER, 0.0, (scores - new_m).exp())
    grow = torch.where(m == NEVER, 0.0, (new_m - m).exp())
    return new_m, l * grow + weights.sum(dim=-1, keepdim=True), acc * grow + weights @ v


def update_inverse_nan(m, l, acc, scores, v):
    new_m = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
    base = new_m.masked_fill(new_m == NEVER, 0.0)
    weights, grow = (scores - base).exp(), (base - m).exp()
    return new_m, l * grow + weights.sum(dim=-1, keepdim=True), acc * grow + weights @ v


def update_each_divided(m, l, acc, scores, v):
    new_m = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
    base = new_m.masked_fill(new_m == NEVER, 0.0)
    weights, shrink = (scores - base).exp(), (m - base).exp()
    new_l = l * shrink + weights.sum(dim=-1, keepdim=True)
    return new_m, new_l, (acc * shrink + weights @ v) / new_l


def update_softmax(m, l, acc, scores, v):
    new_m, weights = torch.maximum(m, scores.amax(dim=-1, keepdim=True)), scores.softmax(dim=-1)
    return new_m, l + weights.sum(dim=-1, keepdim=True), acc + weights @ v


def update_guard_for_tile(m, l, acc, scores, v):
    return (m, l, acc) if bool((scores == NEVER).all()) else update_nan(m, l, acc, scores, v)


def update_finite_maximum(m, l, acc, scores, v):
    new_m = torch.maximum(m, scores.amax(dim=-1, keepdim=True)).nan_to_num()
    weights, shrink = (scores - new_m).exp(), (m - new_m).exp()
    return new_m, l * shrink + weights.sum(dim=-1, keepdim=True), acc * shrink + weights @ v


def update_clamped_base(m, l, acc, scores, v):
    new_m = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
    weights, shrink = (scores - new_m.clamp(min=-1e4)).exp(), (m - new_m.clamp(min=-1e4)).exp()
    return new_m, l * shrink + weights.sum(dim=-1, keepdim=True), acc * shrink + weights @ v


def update_no_keepdim(m, l, acc, scores, v):
    new_m, _, new_acc = online_update(m, l, acc, scores, v)
    base = new_m.masked_fill(new_m == NEVER, 0.0)
    return new_m, l * (m - base).exp() + (scores - base).exp().sum(dim=-1), new_acc


def update_no_maximum(m, l, acc, scores, v):
    new_m = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
    return new_m, l + scores.exp().sum(dim=-1, keepdim=True), acc + scores.exp() @ v


def update_divided(m, l, acc, scores, v):
    new_m, new_l, new_acc = online_update(m, l, acc * l, scores, v)
    return new_m, new_l, new_acc / new_l.clamp(min=1e-30)


def update_one_maximum(m, l, acc, scores, v):
    new_m = torch.maximum(m, scores.amax())
    base = new_m.masked_fill(new_m == NEVER, 0.0)
    weights, shrink = (scores - base).exp(), (m - base).exp()
    return new_m, l * shrink + weights.sum(dim=-1, keepdim=True), acc * shrink + weights @ v


def update_sentinel(m, l, acc, scores, v):
    return online_update(m.clamp(min=-1e4), l, acc, scores.clamp(min=-1e4), v)


def update_own_weights(m, l, acc, scores, v):
    tile = scores.amax(dim=-1, keepdim=True)
    new_m = torch.maximum(m, tile)
    weights = torch.where(scores == NEVER, 0.0, (scores - tile).exp())
    shrink = torch.where(m == NEVER, 0.0, (m - new_m).exp())
    return new_m, l * shrink + weights.sum(dim=-1, keepdim=True), acc * shrink + weights @ v


def update_in_place(m, l, acc, scores, v):
    new_m, new_l, new_acc = online_update(m, l, acc, scores, v)
    l.copy_(new_l), acc.copy_(new_acc)
    return new_m, l, acc


def update_variant(m, l, acc, scores, v):
    """The tile on its own first, then two finished parts put together (as split-KV kernels do)."""
    tile = scores.amax(dim=-1, keepdim=True)
    weights = torch.where(scores == NEVER, 0.0, (scores - tile).exp())
    new_m = torch.maximum(m, tile)
    old_part = torch.where(m == NEVER, 0.0, (m - new_m).exp())
    new_part = torch.where(tile == NEVER, 0.0, (tile - new_m).exp())
    return new_m, old_part * l + new_part * weights.sum(-1, keepdim=True), old_part * acc + new_part * (weights @ v)


def plug_online_update(answer, swap):
    """The real model on the learner's online softmax."""
    sizes, grew = [], [0, 0]

    def watched(m, l, acc, scores, v):
        new = answer(m, l, acc, scores, v)
        sizes.append(scores.numel())
        again = m > NEVER  # rows that had seen something before
        grew[0] += int((again & (new[0] > m)).sum())
        grew[1] += int(again.sum())
        return new

    expected = generated(new_llm(), 3)
    with swap_in("03.3", watched):
        llm = new_llm(attention="tiled")
        got = generated(llm, 3)
    length = len(prompt_for(llm, 3))
    print(f"your code was called {len(sizes)} times")
    print(f"of {grew[1]} rows that had a maximum already, {grew[0]} met a larger one and had to be rescaled")
    print(
        f"scores that exist at once: {llm.config.num_heads * length**2} with the plain formula, {max(sizes)} in tiles"
    )
    compare_tokens(expected, got)


# ---- 03.4 tiled


def attention_oracle(q, k, v, scale, window=None):
    """One query after another, each with just the keys that it may see, in float64."""
    share, rows = q.shape[1] // k.shape[1], []
    k, v = (x.double().repeat_interleave(share, dim=1) for x in (k, v))
    for i, query in enumerate(q.double()):
        end = len(k) - len(q) + i + 1
        keys = slice(0 if window is None else max(0, end - window), end)
        weights = ((k[keys] * query).sum(dim=-1) * scale).softmax(dim=0)
        rows.append((weights[..., None] * v[keys]).sum(dim=0))
    return torch.stack(rows).to(q.dtype) if rows else torch.empty_like(q)


def check_tiled(t, tiled):
    g = t.rng(34)

    def case(queries, context, heads, kv_heads, dim, window, tiles, note, scale=0.6, change=None, **more):
        q = torch.randn(queries, heads, dim, generator=g)
        k, v = (torch.randn(context, kv_heads, dim, generator=g) for _ in range(2))
        if change:
            change(q, k, v)
        sizes = dict(zip(("q_tile", "k_tile"), tiles, strict=False))
        t.case(tiled, q, k, v, scale, window, kwargs=sizes, expected=attention_oracle(q, k, v, scale, window),
               note=note, tol=3e-5, **more)  # fmt: skip

    ones = torch.ones(3, 1, 1)
    t.case(tiled, ones, ones, torch.tensor([[[3.0]], [[5.0]], [[10.0]]]), 1.0, None, 1, 1,
           expected=torch.tensor([[[3.0]], [[4.0]], [[6.0]]]),
           note="all scores equal, so each query gets the mean of the values so far")  # fmt: skip
    case(1, 1, 1, 1, 4, None, (2, 2), "one token")
    case(2, 2, 2, 2, 3, None, (2, 2), "a single tile", scale=2.0)
    case(6, 6, 4, 2, 3, None, (3, 2), "whole tiles")
    case(7, 7, 6, 3, 5, None, (3, 2), "the last tiles are smaller")
    case(4, 5, 2, 1, 3, None, (4, 4), "5 keys in tiles of 4: one key over")
    case(2, 9, 6, 2, 5, None, (4, 3), "2 new tokens behind 7 cached ones")
    case(5, 12, 6, 2, 4, None, (2, 3), "5 new tokens, three tiles of queries, all behind a cache")
    case(1, 10, 4, 2, 3, None, (4, 4), "decode: one query")
    case(0, 4, 4, 2, 3, None, (4, 4), "no queries: a result without rows")
    case(5, 11, 4, 2, 3, 4, (2, 3), "window 4")
    case(9, 9, 6, 3, 2, 1, (4, 2), "window 1: each token sees itself")
    case(8, 8, 6, 2, 3, 50, (3, 3), "a window longer than the text")
    case(5, 8, 4, 2, 3, 3, (1, 1), "tiles of one query and one key")
    case(70, 75, 4, 2, 3, None, (), "the default tiles, 64 x 64")
    case(70, 75, 4, 2, 3, 20, (), "the default tiles and a window")

    def low(q, k, v):
        q.fill_(-20.0)
        k.abs_().add_(5.0)

    case(5, 7, 4, 2, 3, None, (2, 3), "all scores far below zero", scale=1.0, change=low)
    case(6, 6, 4, 2, 3, None, (2, 3), "large scores", scale=60.0)
    case(96, 96, 4, 2, 8, None, (8, 24), "96 x 96 in tiles of 8 x 24: the whole matrix is never needed",
         max_elements=6144)  # fmt: skip
    case(8, 512, 6, 3, 5, None, (8, 64), "8 queries, 512 keys: not all keys at once either", max_elements=16_384)

    def old_keys(q, k, v):
        k[:12], v[:12] = math.nan, math.nan

    def late_keys(q, k, v):
        k[6:], v[6:] = math.nan, math.nan

    case(2, 20, 4, 2, 3, 4, (2, 3), "keys before the window hold NaN: whole tiles that nobody may see are not read",
         change=old_keys)  # fmt: skip
    case(9, 9, 4, 2, 3, None, (3, 3), "keys 6 to 8 hold NaN: the queries before them never read those tiles",
         change=late_keys)  # fmt: skip


def mutant_of_tiled(old, new):
    return edited("minillm.attention:tiled", old, new)


def tiled_state_kept(q, k, v, scale, window=None, q_tile=64, k_tile=64):
    share, offset, state, out = q.shape[1] // k.shape[1], len(k) - len(q), None, torch.empty_like(q)
    for i in range(0, len(q), q_tile):
        rows = fold_heads(q[i : i + q_tile] * scale, k.shape[1])
        count, last = len(q[i : i + q_tile]), offset + min(i + q_tile, len(q)) - 1
        mask = causal_mask(count, last + 1, window).repeat(share, 1)
        if state is None or state[0].shape[1] != rows.shape[1]:
            state = rows.new_full((*rows.shape[:2], 1), NEVER), rows.new_zeros(*rows.shape[:2], 1), rows * 0
        start, end = visible_keys(offset + i, last, window)
        for j in range(start, end, k_tile):
            part = slice(j, min(j + k_tile, end))
            scores = (rows @ k[part].permute(1, 2, 0)).masked_fill(~mask[:, part], NEVER)
            state = online_update(*state, scores, v[part].transpose(0, 1))
        out[i : i + count] = unfold_heads(state[2] / state[1], count)
    return out


def tiled_state_outside(q, k, v, scale, window=None, q_tile=64, k_tile=64):
    out, offset = torch.empty_like(q), len(k) - len(q)
    first_rows = fold_heads(q[:q_tile], k.shape[1])
    m, l = first_rows.new_full((*first_rows.shape[:2], 1), NEVER), first_rows.new_zeros(*first_rows.shape[:2], 1)
    acc = torch.zeros_like(first_rows)
    for i in range(0, len(q), q_tile):
        rows = fold_heads(q[i : i + q_tile] * scale, k.shape[1])
        count, last = len(q[i : i + q_tile]), offset + min(i + q_tile, len(q)) - 1
        mask = causal_mask(count, last + 1, window).repeat(q.shape[1] // k.shape[1], 1)
        start, end = visible_keys(offset + i, last, window)
        for j in range(start, end, k_tile):
            part = slice(j, min(j + k_tile, end))
            scores = (rows @ k[part].permute(1, 2, 0)).masked_fill(~mask[:, part], NEVER)
            m, l, acc = online_update(m, l, acc, scores, v[part].transpose(0, 1))
        out[i : i + count] = unfold_heads(acc / l, count)
    return out


def tiled_whole_matrix(q, k, v, scale, window=None, q_tile=64, k_tile=64):
    return naive(q, k, v, causal_mask(len(q), len(k), window), scale)


def tiled_no_window(q, k, v, scale, window=None, q_tile=64, k_tile=64):
    return tiled(q, k, v, scale, None, q_tile, k_tile)


def tiled_whole_mask(q, k, v, scale, window=None, q_tile=64, k_tile=64):
    causal_mask(len(q), len(k), window)  # the cost; the numbers are right
    return tiled(q, k, v, scale, window, q_tile, k_tile)


def tiled_all_tiles(q, k, v, scale, window=None, q_tile=64, k_tile=64):
    out, offset = torch.empty_like(q), len(k) - len(q)
    for i in range(0, len(q), q_tile):
        rows, count = fold_heads(q[i : i + q_tile] * scale, k.shape[1]), len(q[i : i + q_tile])
        m, l, acc = rows.new_full((*rows.shape[:2], 1), NEVER), rows.new_zeros(*rows.shape[:2], 1), rows * 0
        query = torch.arange(offset + i, offset + i + count)[:, None]
        for j in range(0, len(k), k_tile):
            key = torch.arange(j, min(j + k_tile, len(k)))
            seen = (key <= query) & (query - key < (window or len(k)))
            scores = rows @ k[j : j + k_tile].permute(1, 2, 0)
            scores = scores.masked_fill(~seen.repeat(q.shape[1] // k.shape[1], 1), NEVER)
            m, l, acc = online_update(m, l, acc, scores, v[j : j + k_tile].transpose(0, 1))
        out[i : i + count] = unfold_heads(acc / l, count)
    return out


def tiled_each_softmax(q, k, v, scale, window=None, q_tile=64, k_tile=64):
    """A softmax in every tile, then the mean of the tiles."""
    out, offset, share = torch.zeros_like(q), len(k) - len(q), q.shape[1] // k.shape[1]
    for i in range(0, len(q), q_tile):
        part, parts = q[i : i + q_tile], []
        first, last = offset + i, offset + i + len(part) - 1
        mask = causal_mask(len(part), last + 1, window)
        start, end = visible_keys(first, last, window)
        for j in range(start, end, k_tile):
            keys, values = (x[j : min(j + k_tile, end)].repeat_interleave(share, dim=1) for x in (k, v))
            scores = torch.einsum("qhd,shd->qhs", part, keys) * scale
            scores = scores.masked_fill(~mask[:, None, j : min(j + k_tile, end)], NEVER)
            parts.append(torch.einsum("qhs,shd->qhd", scores.softmax(dim=-1).nan_to_num(0.0), values))
        out[i : i + len(part)] = sum(parts) / len(parts)
    return out


def tiled_variant(q, k, v, scale, window=None, q_tile=64, k_tile=64):
    """Key tiles that begin at multiples of k_tile, keys repeated, and log-sum-exp in place of maximum and sum."""
    out, offset, share = torch.empty_like(q), len(k) - len(q), q.shape[1] // k.shape[1]
    for i in range(0, len(q), q_tile):
        part = q[i : i + q_tile]
        query = torch.arange(offset + i, offset + i + len(part))[:, None]
        done, total = torch.zeros_like(part), part.new_full(part.shape[:2], NEVER)
        low = 0 if window is None else max(0, offset + i - window + 1) // k_tile * k_tile
        for j in range(low, offset + i + len(part), k_tile):
            stop = min(j + k_tile, offset + i + len(part))
            keys, values = (x[j:stop].repeat_interleave(share, dim=1) for x in (k, v))
            key = torch.arange(j, stop)
            hidden = (key > query) | (query - key >= (window or len(k)))
            scores = torch.einsum("qhd,shd->qhs", part, keys) * scale
            scores = scores.masked_fill(hidden[:, None], NEVER)
            both = torch.logaddexp(total, scores.logsumexp(dim=-1))
            weights = (scores - both[..., None]).exp().nan_to_num(0.0)  # nothing seen: -inf + inf
            done = done * (total - both).exp().nan_to_num(0.0)[..., None]
            done, total = done + torch.einsum("qhs,shd->qhd", weights, values), both
        out[i : i + len(part)] = done
    return out


def plug_tiled(answer, swap):
    """The real model on the learner's loop, and the largest tensors that the plain formula and the loop make."""
    peaks = {"naive": 0, "tiled": 0}

    def watch(name, fn):
        def watched(q, *args):
            with largest_tensor() as peak:
                out = fn(q, *args)
            peaks[name] = max(peaks[name], peak[0])
            return out

        return watched

    own = new_llm(attention="naive")
    attend = own.runner.attend
    own.runner.attend = watch("naive", attend)
    generated(own, 3, 1)
    expected = generated(new_llm(), 3)
    with swap_in("03.4", watch("tiled", answer)):
        llm = new_llm(attention="tiled")
        got = generated(llm, 3)
    length, heads = len(prompt_for(llm, 3)), llm.config.num_heads
    print(f"prompt of {length} tokens, {heads} heads. The largest tensor made in one layer's attention:")
    print(
        f"   plain formula  {peaks['naive']:>8} numbers ({heads} x {length} x {length} scores are {heads * length**2})"
    )
    print(
        f"   your tiles     {peaks['tiled']:>8} numbers (the result alone has {length * heads * llm.config.head_dim})"
    )
    compare_tokens(expected, got)


EXERCISES = [
    Exercise(
        id="03.1",
        symbol="minillm.attention:fold_heads",
        title="Heads that share",
        minutes=10,
        difficulty=1,
        statement="""
            With grouped-query attention several query heads read the same keys. So they may be treated as *more
            queries of one head*: then every key is read once for all of them, and nothing is copied.

            `q` has the shape `[..., Q, num_heads, D]`; the dots stand for any leading dimensions, or none. Return
            `[..., num_kv_heads, share * Q, D]` with `share = num_heads / num_kv_heads`. Query head `h` belongs to KV
            head `h // share`. In each group the rows go **head by head**: first all Q queries of its first head, then
            all Q of its second.

            Worked example: Q = 2 queries, 4 heads, 2 KV heads (share 2). Call the vector of query i in head h "h.i".

                in:   query 0: [0.0  1.0  2.0  3.0]      out:  KV head 0: [0.0  0.1  1.0  1.1]
                      query 1: [0.1  1.1  2.1  3.1]            KV head 1: [2.0  2.1  3.0  3.1]

            The engine then computes all scores of a KV head with one matrix product, `[share * Q, D] @ [D, S]`.
        """,
        hints=(
            "First split the heads into groups, then decide in which order the axes must stand, and only then merge.",
            "`unflatten` splits the heads axis in two, KV head and member of the group: five names, `[..., Q, KV head, "
            "member, D]`. In which order must they stand so that merging two neighbours gives rows head by head?",
            "Wanted is `[..., KV head, member, Q, D]`. So the Q axis has to travel (with `movedim`, counted from the end "
            "because of the dots) to the place just before D. Then `flatten` joins member and Q.",
        ),
        explanation="""
            Split, move, merge. The split puts *neighbouring* heads into a group, because that is how the checkpoints
            are made: head `h` uses KV head `h // share`. The modulo version computes something just as fast, never
            crashes, and talks nonsense.

            Also right: `permute` or `einops.rearrange(q, "... q (g s) d -> ... g (s q) d", g=num_kv_heads)`. Right,
            but dearer: `k.repeat_interleave(share)`, as in `naive`; it writes every key `share` times. (`k.repeat`
            is the modulo bug.)

            The order head by head inside a group is the engine's own choice; `unfold_heads` and the mask in `tiled`
            rely on it. vLLM's Triton kernel and FlashAttention do the same folding and call it GQA packing
            (`pack_gqa`); torch has `enable_gqa=True`; transformers repeats (`repeat_kv`); in llama.cpp the matrix
            product broadcasts over the group.
        """,
        check=check_fold_heads,
        mutants=(
            Mutant(
                "modulo",
                fold_modulo,
                "You deal the heads out in turn (h % num_kv_heads). Neighbours share a KV head: h // share.",
                "ekzhang/jax-js#180, onnx/onnx#7274: tile in place of repeat_interleave",
            ),
            Mutant(
                "divided",
                fold_divided,
                "You have `share` groups of num_kv_heads heads. It must be num_kv_heads groups of `share`.",
                "PSAL-POSTECH/ONNXim#34: h // num_kv_heads",
            ),
            Mutant(
                "query_first",
                fold_query_first,
                "Right heads, wrong order of rows: yours go query by query. Put the queries of one head together.",
                "two axes merged in the wrong order",
            ),
            Mutant(
                "reshape",
                fold_reshape,
                "A reshape alone keeps the order in memory, so it mixes queries and heads. The Q axis must move first.",
                "view in place of transpose, the classic of every attention exercise",
            ),
            Mutant(
                "transpose",
                fold_transpose,
                "You moved the heads to the front, but each query head is still alone. Merge the members of a group.",
                "multi-head code reused for GQA",
            ),
            Mutant(
                "no_batch",
                fold_no_batch,
                "That works without leading dimensions only. Count the axes from the end: -2 is the heads.",
                "positive axis numbers",
            ),
            Mutant(
                "first_of_group",
                fold_first_of_group,
                "Only the first head of each group is left. All query heads stay; it is the KV heads that are few.",
                "sharing taken for dropping",
            ),
            Mutant(
                "average",
                fold_average,
                "You averaged the query heads of a group. Nothing is averaged: each keeps its own row.",
                "mean pooling of KV heads (arXiv:2305.13245, section 2.1), applied to queries",
            ),
        ),
        variant=fold_variant,
        scratch="""
            q = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.1, 1.1, 2.1, 3.1]])[:, :, None]  # the worked example, D = 1
            print(fold_heads(q, 2)[:, :, 0])
        """,
        plug_in=plug_fold_heads,
    ),
    Exercise(
        id="03.2",
        symbol="minillm.attention:visible_keys",
        title="Which keys does a tile need?",
        minutes=8,
        difficulty=1,
        statement="""
            A tile of neighbouring queries stands at positions `first` to `last`, both included. Return the range of
            keys that **at least one** of them may see, as a tuple `(start, end)` of ints, `end` not included. All
            other tiles of keys are skipped.

            A query at position p sees the keys up to p. With a `window` it sees only the last `window` of those, its
            own included.

            Worked example: queries 4, 5, 6, 7. Without a window: `(0, 8)`. With window 3, query 4 sees 2, 3, 4 and
            query 7 sees 5, 6, 7. Together: `(2, 8)`.
        """,
        hints=(
            "Two queries decide it. Which one sees the earliest key? Which one the latest?",
            "The *first* query looks back furthest, the *last* one sees the latest key: itself. `end` is not included.",
            "A window of W at position p begins at p - W + 1. Take that for the first query, and let it not fall "
            "below 0.",
        ),
        explanation="""
            The first query sets the start, the last one the end. Inside the range some queries may still not see some
            keys, so the mask stays necessary: this function only says what can be skipped *whole*.

            An error to the left costs little (a tile is computed and masked away); an error to the right loses keys,
            silently. That is why this off-by-one is so common: the tests stay green when the range is too wide, and
            long contexts get slowly slower or worse. FlashAttention's `window_size` counts the keys *before* the
            query, so it is `window - 1` here.

            Also right: a start that is rounded down to a multiple of the tile, if the mask is applied. vLLM's
            `compute_tile_loop_bounds` did that, and an issue measured the extra tile (vllm-project/vllm#44575). In
            SGLang's Triton kernel the loop began at 0 (sgl-project/sglang#39769).
        """,
        check=check_visible_keys,
        mutants=(
            Mutant(
                "from_last",
                keys_from_last,
                "You take the window back from the *last* query. The first one sees earlier keys, and they are lost.",
                "the window of the newest token, as in decode, used for a whole tile",
            ),
            Mutant(
                "one_early",
                keys_one_early,
                "One key too many: the window counts the query's own key, so it begins at first - window + 1.",
                "zml/zml#763, huggingface/transformers#39408: FlashAttention counts the keys before the query",
            ),
            Mutant(
                "one_late",
                keys_one_late,
                "One key too few at the start: `window` keys, the query's own among them.",
                "lightseekorg/tokenspeed#578",
            ),
            Mutant(
                "end_included",
                keys_end_included,
                "`end` is not included, so it is one more than the last key. Yours loses the last query's own key.",
                "a common slip",
            ),
            Mutant(
                "negative",
                keys_negative,
                "The start may not fall below 0. As a slice, k[-3:8] would begin at the *end* of the cache.",
                "tile-ai/TileOPs#292: a negative loop range",
            ),
            Mutant(
                "from_zero",
                keys_from_zero,
                "Right results, but the window saves nothing: you begin at key 0 every time.",
                "tile-ai/TileOPs#295, sgl-project/sglang#39769",
            ),
            Mutant(
                "of_first_query",
                keys_of_first_query,
                "You stop at the first query's key. The later queries of the tile see more.",
                "one query in mind",
            ),
            Mutant(
                "local",
                keys_local,
                "Those are positions inside the range. Wanted are the keys' own positions, counted from 0.",
                "local and absolute positions mixed up",
            ),
            Mutant(
                "only_window",
                keys_only_window,
                "The range is as long as one window. But each query has its own, and together they reach up to `last`.",
                "one query in mind",
            ),
            Mutant(
                "own_tile",
                keys_own_tile,
                "Only the tile's own keys are left. A query sees all earlier tokens as well.",
                "causal only within the tile: assignments on FlashAttention",
            ),
        ),
        variant=keys_variant,
        scratch="""
            print(visible_keys(4, 7), visible_keys(4, 7, 3))
        """,
        plug_in=plug_visible_keys,
    ),
    Exercise(
        id="03.3",
        symbol="minillm.attention:online_update",
        title="Online softmax: one tile",
        minutes=20,
        difficulty=3,
        statement="""
            The heart of FlashAttention. For each query row three things are known from the tiles so far:

            | | shape | is |
            |---|---|---|
            | `m` | `[..., R, 1]` | the largest score; `-inf` before the first one |
            | `l` | `[..., R, 1]` | the sum of `exp(score - m)` |
            | `acc` | `[..., R, D]` | the sum of `exp(score - m) * value` |

            Now a tile arrives: `scores` `[..., R, C]` (`-inf` where a key may not be seen) and `v` `[..., C, D]`. Return
            the new `(m, l, acc)`, as if all scores had been there from the start. Change nothing in place.

            Worked example, one row: scores 1 and 3 with values 10 and 20 give m = 3, l = e^-2 + 1 = 1.135,
            acc = 10 e^-2 + 20 = 21.35. Then 2 and 5 arrive, with values 30 and 40. Now m = 5. What was added up
            relative to 3 must shrink by e^-2: l = 1.135 x 0.135 + e^-3 + 1 = **1.203**, acc = 21.35 x 0.135 +
            30 e^-3 + 40 = **44.38**. acc / l = 36.88 is what softmax over all four gives.

            One trap: a row may have seen nothing at all, now or before. Then its new m is `-inf`, l and acc stay 0,
            and no NaN may appear: `-inf` minus `-inf` is NaN.
        """,
        hints=(
            "Do the worked example on paper with three tiles. Each time, ask: relative to which maximum were the old sums "
            "added up, and relative to which one do I add now?",
            "Four steps: the new maximum (of the old one and of this tile, row by row, `keepdim=True`); the weights of "
            "this tile, relative to the *new* maximum; one factor that brings the old sums to the new maximum; add.",
            "The factor is exp(old m minus new m), never above 1, and both `l` and `acc` get it. For the trap: subtract "
            "not the new maximum itself but a copy of it in which `-inf` is replaced by 0. Then everything in such a row "
            "is exp(-inf) = 0.",
        ),
        explanation="""
            exp(s - new) = exp(s - old) x exp(old - new), so one factor per row moves all earlier terms to the new
            maximum, without knowing them any more. That is the whole trick. It is exact, not an approximation: only
            the order of the additions changes.

            Also right: `torch.where` in place of the replaced maximum; keeping the log-sum-exp (m + log l) in place of
            m and l; or treating the tile as a finished part of its own and merging two parts. The last one is how
            split-KV ("flash decoding") and ring attention put their pieces together: the operation is associative.
            FlashAttention 1 kept acc divided by l after each tile; FlashAttention 2 (arXiv:2307.08691, section 3.1)
            divides once at the end, as here.

            A large negative number in place of `-inf` avoids the NaN but is a bug in waiting: a real score below it
            loses against a masked one (flashinfer-ai/flashinfer#4401). GPU kernels use exp2 and scale by log2(e)
            beforehand, as that is one instruction. vLLM and SGLang have the same lines in their Triton kernels
            (names `m_i`/`e_max`, `l_i`/`e_sum`, `acc`); llama.cpp has them in its flash attention operator.
        """,
        check=check_online_update,
        mutants=(
            Mutant(
                "acc_kept",
                update_acc_kept,
                "acc was added up relative to the old maximum. When the maximum grows it must shrink, as l does.",
                "assignments on FlashAttention (CS336, TorchCode): accumulator not rescaled",
            ),
            Mutant(
                "l_kept",
                update_l_kept,
                "l was added up relative to the old maximum. When the maximum grows it must shrink, as acc does.",
                "assignments on FlashAttention: the sum not rescaled",
            ),
            Mutant(
                "both_kept",
                update_both_kept,
                "Nothing old is rescaled. Look at the step in which the maximum grows from 3 to 5.",
                "online softmax written as a plain running sum",
            ),
            Mutant(
                "nan",
                update_nan,
                "A row that has seen nothing gives -inf - (-inf) = NaN. What you subtract must be finite there.",
                "flashinfer-ai/flashinfer#4401, ohdearquant/lattice#373",
            ),
            Mutant(
                "from_zero",
                update_from_zero,
                "Your maximum never falls below 0. With all scores at -200 every exp is 0, and so is l.",
                "m initialised with 0 in place of -inf",
            ),
            Mutant(
                "tile_maximum",
                update_tile_maximum,
                "You take this tile's maximum alone. A low tile after a high one makes m fall, and the factor explodes.",
                "tile-ai/tilelang#1148",
            ),
            Mutant(
                "inverse",
                update_inverse,
                "Your factor is exp(new m - old m): it grows. It must be exp(old m - new m), at most 1.",
                "deepseek-ai/FlashMLA#177 (the formula in its documentation)",
            ),
            Mutant(
                "inverse_nan",
                update_inverse_nan,
                "Your factor is exp(new m - old m). Before the first tile that is exp(inf), and inf times 0 is NaN. Turn the "
                "difference round.",
                "the same, met at the first tile",
            ),
            Mutant(
                "each_divided",
                update_each_divided,
                "You divide acc by l after every tile. The next tile then takes an average for a sum. Leave it a sum: "
                "the caller divides once, at the end.",
                "softmax finished in every tile",
            ),
            Mutant(
                "softmax",
                update_softmax,
                "You take a softmax of this tile alone, so every tile weighs the same. Wanted are plain exp(score - m).",
                "softmax called on each tile",
            ),
            Mutant(
                "guard_for_tile",
                update_guard_for_tile,
                "Your guard against NaN looks at the tile as a whole. One row can be empty while its neighbours are not.",
                "an if in place of a mask",
            ),
            Mutant(
                "finite_maximum",
                update_finite_maximum,
                "The m that you return is finite where nothing was seen. Replace -inf only in what you subtract.",
                "nan_to_num on the state itself",
            ),
            Mutant(
                "clamped_base",
                update_clamped_base,
                "What you subtract has a lower bound, but real scores may lie below it; then every exp is 0. Replace -inf only.",
                "flashinfer-ai/flashinfer#4401: a bound in place of -inf",
            ),
            Mutant(
                "no_keepdim",
                update_no_keepdim,
                "The sum over the keys lost its dimension, so rows and columns were mixed. keepdim=True keeps [..., R, 1].",
                "broadcasting [R] against [R, 1]",
            ),
            Mutant(
                "no_maximum",
                update_no_maximum,
                "No maximum is subtracted before exp. Scores of 1000 give inf.",
                "softmax as in the textbook",
            ),
            Mutant(
                "divided",
                update_divided,
                "acc is divided by l already. Here it stays a plain sum; the caller divides once, at the end.",
                "FlashAttention 1's recurrence (arXiv:2205.14135, algorithm 1) with FlashAttention 2's contract",
            ),
            Mutant(
                "one_maximum",
                update_one_maximum,
                "One maximum for all rows. Each row has its own: the maximum goes over the last dimension only.",
                "amax without dim",
            ),
            Mutant(
                "sentinel",
                update_sentinel,
                "-inf was replaced by a big negative number. Then a hidden key weighs exp(0) = 1 in a row that saw nothing.",
                "ohdearquant/lattice#373 (-10000), flashinfer-ai/flashinfer#4401 (-50000)",
            ),
            Mutant(
                "own_weights",
                update_own_weights,
                "This tile's weights are relative to the tile's own maximum. They must be relative to the new one.",
                "the old part rescaled, the new part forgotten",
            ),
            Mutant(
                "in_place",
                update_in_place,
                "You changed m, l or acc in place. Return new tensors.",
                "mul_ and add_ on the caller's state",
            ),
        ),
        variant=update_variant,
        scratch="""
            state = torch.full((1, 1), float("-inf")), torch.zeros(1, 1), torch.zeros(1, 1)
            for scores, values in (([1.0, 3.0], [10.0, 20.0]), ([2.0, 5.0], [30.0, 40.0])):
                state = online_update(*state, torch.tensor([scores]), torch.tensor(values)[:, None])
                print([round(x.item(), 3) for x in state])
        """,
        plug_in=plug_online_update,
    ),
    Exercise(
        id="03.4",
        symbol="minillm.attention:tiled",
        title="The loop over tiles",
        minutes=25,
        difficulty=3,
        statement="""
            Now the whole of it. The outer loop over tiles of queries is given; you write its body. `i` is where the
            tile begins, `out` has the result's shape, and `offset` is the number of tokens that lie before the first
            query.

            - `q` is `[Q, num_heads, D]`, the **last** Q of S tokens; `k`, `v` are `[S, num_kv_heads, D]`.
            - For this tile of queries: which positions do they have? Which keys do they need (`visible_keys`)? Walk through
              those keys, `k_tile` at a time. The last tiles may be smaller, on both sides.
            - Compute a tile's scores (times `scale`), hide what may not be seen (`NEVER`), hand it to `online_update`.
            - When all tiles are done, write the result of these queries into `out`.

            What you need is there: `fold_heads(q, num_kv_heads)`, its way back `unfold_heads(rows, num_queries)`,
            `visible_keys(first, last, window)`, `online_update(m, l, acc, scores, v)`, and from stage 02
            `causal_mask(num_queries, context_len, window)`: bool, **True where a query may look**, for queries that are
            the *last* of `context_len` tokens.

            Memory: a tile's scores, `[num_kv_heads, share * queries, keys]`, and a mask for one tile of queries are fine. A
            whole S x S matrix, or the scores of all keys at once, is not. A tile of keys that none of these queries may
            see is not read.

            Worked example: 3 tokens, one head, D = 1, all queries and keys are 1, the values 3, 5, 10. All scores are
            equal, so each token gets the mean of the values up to itself: **3, 4, 6**, whatever the tiles.
        """,
        hints=(
            "Write it for one tile of queries and *one* tile of all its keys first. Then put the inner loop in.",
            "Rows: fold `q[i : i + q_tile]`. The first of these queries stands at offset + i. Begin with m = NEVER, l = 0, "
            "acc = 0, in shapes that fit the folded rows. Keys of a tile are [C, num_kv_heads, D]; for the product with "
            "the rows they must become [num_kv_heads, D, C].",
            "One mask for these queries and all keys up to the last of them: its context ends at the last query's position, "
            "so it has last position + 1 columns. Repeat it `share` times downwards (the folded rows are head by head) and "
            "cut out the columns of the tile, by their absolute positions. At the end divide acc by l, unfold, and write it to out[i : i + number of queries].",
        ),
        explanation="""
            Nothing here is new: the pieces are yours, and the loop only says in which order. What it buys is memory.
            The formula needs `num_heads x Q x S` scores; the loop never has more than one tile of them, so attention's
            memory grows with S and no longer with S squared. The work is the same, minus the tiles that nobody sees.

            Also right: key tiles that begin at multiples of `k_tile`; a mask computed from positions tile by tile
            (as GPU kernels do; then no mask is ever wider than a tile); the loops the other way round
            (FlashAttention 1 has keys outside; version 2 swapped them, so that each tile of queries is finished by
            one thread block: arXiv:2307.08691, section 3.2). No mask is needed in tiles that lie wholly below the
            diagonal: kernels use that, as the mask costs time.

            The two places where such code breaks are the *last tile* (a remainder that is dropped, or padded with
            keys that are not masked) and *positions* (a mask from the tile's own row and column numbers, right only
            where both begin at 0). vLLM: `unified_attention` (Triton) and the FlashAttention backend; SGLang:
            `extend_attention`; llama.cpp: `ggml_flash_attn_ext`, switched on with `-fa`.
        """,
        check=check_tiled,
        mutants=(
            Mutant(
                "rest_dropped",
                mutant_of_tiled("range(start, end, k_tile)", "range(start, end - k_tile + 1, k_tile)"),
                "The last, smaller tile of keys is never visited. Look at 5 keys in tiles of 4.",
                "jax-ml/jax#27224, intel/sycl-tla#489",
            ),
            Mutant(
                "from_zero",
                mutant_of_tiled("offset + i, offset + i + count - 1", "i, i + count - 1"),
                "Your queries begin at position 0. They are the *last* Q tokens: add the offset.",
                "Dao-AILab/flash-attention#436; gittensor-ai-lab/sparkinfer#3",
            ),
            Mutant(
                "local_columns",
                mutant_of_tiled("~mask[:, j:stop]", "~mask[:, : stop - j]"),
                "Every tile gets the first columns of the mask. Take the columns of this tile's keys: absolute positions.",
                "mask from the tile's own row and column numbers",
            ),
            Mutant(
                "columns_from_start",
                mutant_of_tiled("~mask[:, j:stop]", "~mask[:, j - start : stop - start]"),
                "The mask's columns count from key 0, yours from the first visible key. With a window these differ.",
                "local and absolute positions mixed up",
            ),
            Mutant(
                "no_scale",
                mutant_of_tiled(" * scale, k.shape[1]", ", k.shape[1]"),
                "`scale` is not used. Without it large head dimensions give a softmax that is far too sharp.",
                "a common slip",
            ),
            Mutant(
                "scale_twice",
                mutant_of_tiled(
                    "scores = rows @ k[j:stop].permute(1, 2, 0)", "scores = rows @ k[j:stop].permute(1, 2, 0) * scale"
                ),
                "`scale` comes in twice: once on q and once on the scores.",
                "q scaled before the kernel, and in it again",
            ),
            Mutant(
                "not_divided",
                mutant_of_tiled("acc / l, count", "acc, count"),
                "acc is the sum of weights times values. At the end it must be divided by l.",
                "the last line of online softmax forgotten",
            ),
            Mutant(
                "m_from_zero",
                mutant_of_tiled("(*rows.shape[:2], 1), NEVER)", "(*rows.shape[:2], 1), 0.0)"),
                "m begins at 0. If all scores are far below that, every exp is 0 and you divide 0 by 0. Begin at NEVER.",
                "m initialised with 0 in place of -inf",
            ),
            Mutant(
                "state_kept",
                tiled_state_kept,
                "m, l and acc of the previous tile of queries are still in there. Each tile of queries begins anew.",
                "initialised before the outer loop",
            ),
            Mutant(
                "state_outside",
                tiled_state_outside,
                "m, l and acc are made once, before the loop. Each tile of queries begins anew, in the shape of its own rows.",
                "initialised before the outer loop",
            ),
            Mutant(
                "past_end",
                mutant_of_tiled("min(j + k_tile, end)", "j + k_tile"),
                "Your last slice of keys runs past `end`: more keys than the mask has columns. Stop at `end`.",
                "a slice that is only cut off where the tensor ends",
            ),
            Mutant(
                "past_last_query",
                mutant_of_tiled("count = min(q_tile, len(q) - i)", "count = q_tile"),
                "The last tile of queries may be smaller than q_tile. Count the queries that are really there.",
                "the remainder on the side of the queries",
            ),
            Mutant(
                "mask_at_the_end",
                mutant_of_tiled("causal_mask(count, last + 1, window)", "causal_mask(count, len(k), window)"),
                "causal_mask takes its queries for the LAST of the context. This tile's context ends at its own last query.",
                "the context of the text taken for that of the tile",
            ),
            Mutant(
                "mask_inverted",
                mutant_of_tiled("~mask[:, j:stop]", "mask[:, j:stop]"),
                "The mask is True where a query MAY look; masked_fill hides where it is True. Turn it round with ~.",
                "True means opposite things in different libraries",
            ),
            Mutant(
                "mask_row_by_row",
                mutant_of_tiled(
                    ".repeat(q.shape[1] // k.shape[1], 1)", ".repeat_interleave(q.shape[1] // k.shape[1], dim=0)"
                ),
                "The folded rows go head by head, so the mask is repeated as a whole. You repeat each of its rows.",
                "repeat_interleave, which is right for heads and wrong here",
            ),
            Mutant(
                "mask_not_repeated",
                mutant_of_tiled(".repeat(q.shape[1] // k.shape[1], 1)", ""),
                "The mask has a row for each query, but the folded rows are `share` times as many. Repeat it downwards.",
                "folding forgotten in the mask",
            ),
            Mutant(
                "unfold_by_heads",
                mutant_of_tiled("unfold_heads(acc / l, count)", "unfold_heads(acc / l, q.shape[1])"),
                "unfold_heads wants the number of QUERIES of this tile as its second argument, not the number of heads.",
                "a beginner's run of this stage: fold_heads takes a number of heads there",
            ),
            Mutant(
                "no_window",
                tiled_no_window,
                "`window` is not used at all. It belongs in two places: which keys to visit, and the mask.",
                "a default argument forgotten",
            ),
            Mutant(
                "whole_mask",
                tiled_whole_mask,
                "The scores come in tiles, but the mask of all queries and all keys exists at once. Make it for one tile of queries.",
                "the mask sliced, not made, for each tile",
            ),
            Mutant(
                "window_not_masked",
                mutant_of_tiled("causal_mask(count, last + 1, window)", "causal_mask(count, last + 1)"),
                "The window only chose the range. Inside it, later queries of the tile still see keys that are too old.",
                "skipping taken for masking",
            ),
            Mutant(
                "whole_matrix",
                tiled_whole_matrix,
                "Right numbers, but a whole matrix (of scores, or of the mask) exists at once. The tiles are there to avoid that.",
                "TorchCode's flash attention check accepts a plain softmax",
            ),
            Mutant(
                "all_keys",
                mutant_of_tiled(
                    "for j in range(start, end, k_tile)", "k_tile = len(k)\n        for j in range(start, end, k_tile)"
                ),
                "You cut the queries into tiles, but take all their keys at once. Walk through the keys in steps of k_tile.",
                "query chunking: half of the idea",
            ),
            Mutant(
                "before_window",
                mutant_of_tiled("start, end = visible_keys(first, last, window)", "start, end = 0, last + 1"),
                "You visit tiles of keys that lie before every query's window. Ask visible_keys where to begin.",
                "tile-ai/TileOPs#295, sgl-project/sglang#39769",
            ),
            Mutant(
                "all_tiles",
                tiled_all_tiles,
                "You visit tiles that lie after all queries of the tile, and mask them whole. That is half of all the work.",
                "causality only as a mask",
            ),
            Mutant(
                "reshaped",
                mutant_of_tiled("unfold_heads(acc / l, count)", "(acc / l).reshape(count, q.shape[1], -1)"),
                "A reshape does not undo the folding: it mixes heads and queries. Use unfold_heads.",
                "view in place of transpose",
            ),
            Mutant(
                "softmax_in_tiles",
                tiled_each_softmax,
                "Each tile has its own softmax, and you average them. A tile with high scores must weigh more.",
                "tiling without the online part",
            ),
        ),
        variant=tiled_variant,
        scratch="""
            ones, values = torch.ones(3, 1, 1), torch.tensor([3.0, 5.0, 10.0])[:, None, None]
            print(tiled(ones, ones, values, 1.0, q_tile=2, k_tile=2).flatten())
        """,
        plug_in=plug_tiled,
    ),
]
