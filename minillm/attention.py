"""Attention over a paged KV cache, for a ragged batch: each sequence brings any number of queries.

The maths, for one sequence: `naive` is the formula; `tiled` is the same with an online softmax, tile by tile, so that
the scores of a long context never exist at once; `paged_query` reads the tiles through a block table. The engine's
backends take a whole step, and all have one signature (`Attend`):

naive, tiled, paged   the functions above, one sequence after another: slow, to read and to compare with
sdpa                  gathers each sequence's keys and values and calls torch's scaled_dot_product_attention
numba                 decode: a compiled kernel (cpu_kernel.py) that reads the cache where it is; the rest: sdpa
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from . import kv
from .errors import RequestError

NEVER = float("-inf")
SHORT = 8  # sequences with at most so many queries go to the decode kernel


def causal_mask(num_queries: int, context_len: int, window: int | None = None) -> Tensor:
    """Which keys each query may see: bool [num_queries, context_len], True where it may.

    The queries are the last `num_queries` of the `context_len` tokens: query i stands at absolute position
    context_len - num_queries + i and sees the keys up to its own position. With a window it sees only the last
    `window` of those, its own included (Mistral 7B, arXiv:2310.06825, section 2).
    """
    # exercise 02.3
    query = torch.arange(context_len - num_queries, context_len)[:, None]
    key = torch.arange(context_len)[None, :]
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    return mask
    # end exercise 02.3


def naive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The formula: softmax(q k^T * scale) v, in the clear. One sequence.

    q: [Q, num_heads, D]; k, v: [S, num_kv_heads, D]; mask: bool [Q, S]. Returns [Q, num_heads, D].
    Query head h uses KV head h // (num_heads / num_kv_heads).
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,shd->hqs", q, k) * scale
    weights = scores.masked_fill(~mask, NEVER).softmax(dim=-1)
    return torch.einsum("hqs,shd->qhd", weights, v)


def fold_heads(q: Tensor, num_kv_heads: int) -> Tensor:
    """Stack the query heads that share a KV head, as if they were more queries of it.

    q: [..., Q, num_heads, D] -> [..., num_kv_heads, share * Q, D] with share = num_heads / num_kv_heads. Query head h
    uses KV head h // share; row s * Q + i of KV head g is query i of head g * share + s. So keys and values are read
    once for each KV head and never repeated in memory (grouped-query attention, arXiv:2305.13245).
    """
    # exercise 03.1
    parts = q.unflatten(-2, (num_kv_heads, -1))  # [..., Q, num_kv_heads, share, D]
    return parts.movedim(-4, -2).flatten(-3, -2)
    # end exercise 03.1


def unfold_heads(folded: Tensor, num_queries: int) -> Tensor:
    """The way back: [..., num_kv_heads, share * Q, D] -> [..., Q, num_heads, D]."""
    return folded.unflatten(-2, (-1, num_queries)).movedim(-2, -4).flatten(-3, -2)


def visible_keys(first: int, last: int, window: int | None = None) -> tuple[int, int]:
    """The keys that a tile of queries has to look at, as a range (start, end), end not included.

    The tile's queries stand at positions first..last, both included. Keys outside the range are seen by none of them;
    inside it, some queries may still not see some keys.
    """
    # exercise 03.2
    start = 0 if window is None else max(0, first - window + 1)
    return start, last + 1
    # end exercise 03.2


def online_update(m: Tensor, l: Tensor, acc: Tensor, scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One tile of an online softmax (Milakov, Gimelshein 2018, arXiv:1805.02867; FlashAttention, arXiv:2205.14135).

    What is known of each query row so far: m [..., R, 1], the largest score (-inf before the first); l [..., R, 1],
    the sum of exp(score - m); acc [..., R, D], the sum of exp(score - m) * value. scores: [..., R, C], those of this
    tile's C keys, -inf where a key may not be seen (perhaps all of them); v: [..., C, D]. Returns the new m, l, acc;
    changes nothing. acc / l at the end is the attention's output.
    """
    # exercise 03.3
    new_m = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
    base = new_m.masked_fill(new_m == NEVER, 0.0)  # nothing seen yet: exp(-inf - 0) is 0, exp(-inf + inf) is NaN
    weights = (scores - base).exp()
    shrink = (m - base).exp()
    return new_m, l * shrink + weights.sum(dim=-1, keepdim=True), acc * shrink + weights @ v
    # end exercise 03.3


def tiled(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, q_tile: int = 64, k_tile: int = 64
) -> Tensor:
    """Causal attention of one sequence, tile by tile: no more than q_tile x k_tile scores of a head exist at a time.

    q: [Q, num_heads, D], the last Q of the S tokens; k, v: [S, num_kv_heads, D]. Returns [Q, num_heads, D]. Tiles of
    keys that no query of a tile may see are skipped.
    """
    out, offset = torch.empty_like(q), len(k) - len(q)
    for i in range(0, len(q), q_tile):
        # exercise 03.4
        rows = fold_heads(q[i : i + q_tile] * scale, k.shape[1])
        count = min(q_tile, len(q) - i)
        first, last = offset + i, offset + i + count - 1
        mask = causal_mask(count, last + 1, window).repeat(q.shape[1] // k.shape[1], 1)
        m, l = rows.new_full((*rows.shape[:2], 1), NEVER), rows.new_zeros(*rows.shape[:2], 1)
        acc = torch.zeros_like(rows)
        start, end = visible_keys(first, last, window)
        for j in range(start, end, k_tile):
            stop = min(j + k_tile, end)
            scores = rows @ k[j:stop].permute(1, 2, 0)
            scores = scores.masked_fill(~mask[:, j:stop], NEVER)
            m, l, acc = online_update(m, l, acc, scores, v[j:stop].transpose(0, 1))
        out[i : i + count] = unfold_heads(acc / l, count)
        # end exercise 03.4
    return out


def paged_query(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Sequence[int],
    context_len: int,
    block_size: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of one query that reads keys and values where they are: block by block, nothing gathered.

    q: [num_heads, D], the query at position context_len - 1; keys, values: [num_slots, num_kv_heads, D], the whole
    cache of a layer; table: the sequence's blocks. Slots beyond the context may hold anything, NaN too. Returns
    [num_heads, D]. (PagedAttention, arXiv:2309.06180, section 4.1.)
    """
    rows = fold_heads(q[None] * scale, keys.shape[1])
    m, l, acc = rows.new_full((*rows.shape[:2], 1), NEVER), rows.new_zeros(*rows.shape[:2], 1), torch.zeros_like(rows)
    first, end = visible_keys(context_len - 1, context_len - 1, window)
    # exercise 04.4
    for i in range(first // block_size, kv.blocks_needed(end, block_size)):
        low, high = max(first, i * block_size), min(end, (i + 1) * block_size)
        slot = table[i] * block_size + low % block_size
        k, v = keys[slot : slot + high - low], values[slot : slot + high - low]
        m, l, acc = online_update(m, l, acc, rows @ k.permute(1, 2, 0), v.transpose(0, 1))
    # end exercise 04.4
    return unfold_heads(acc / l, 1)[0]


# ---- a whole step


@dataclass
class Group:
    """Sequences of one step that bring equally many queries, so that `sdpa` can take them in one call.

    rows: [G * Q] places of their queries in the batch; slots: [G * S] cache slots of their keys, padded to the longest
    context S by repeating a slot that is in use (what an unused slot holds is never read: it may be NaN).
    masks: for each window, additive float [G, 1, Q, S], made when it is first asked for.
    """

    members: list[int]
    rows: Tensor
    slots: Tensor
    num_queries: int
    masks: dict[int | None, Tensor] = field(default_factory=dict)


@dataclass
class Layout:
    """Where the sequences of a step lie, request after request: one entry for each in the three lists.

    query_lens: new tokens; context_lens: tokens in the cache, the new ones included; tables: the blocks.
    """

    query_lens: Sequence[int]
    context_lens: Sequence[int]
    tables: Sequence[Sequence[int]]
    block_size: int
    made: dict[str, object] = field(default_factory=dict)  # what a backend derives once and uses in every layer

    def sequences(self) -> Iterator[tuple[slice, int, Sequence[int]]]:
        """For each sequence the rows of its queries, its context length and its table."""
        row = 0
        for count, length, table in zip(self.query_lens, self.context_lens, self.tables, strict=True):
            yield slice(row, row + count), length, table
            row += count

    def groups(self, device: torch.device, more_than: int = 0) -> list[Group]:
        """The sequences with more than so many queries, in groups with equally many."""
        members: dict[int, list[int]] = {}
        for i, count in enumerate(self.query_lens):
            if count > more_than:
                members.setdefault(count, []).append(i)
        rows = [torch.arange(part.start, part.stop) for part, _, _ in self.sequences()]
        return [self._group(count, seqs, rows, device) for count, seqs in members.items()]

    def _group(self, count: int, seqs: list[int], rows: list[Tensor], device: torch.device) -> Group:
        position, size = torch.arange(max(self.context_lens[i] for i in seqs)), self.block_size
        slots = []
        for i in seqs:
            where = position.clamp(max=self.context_lens[i] - 1)
            slots.append(torch.tensor(self.tables[i])[where // size] * size + where % size)
        return Group(seqs, torch.cat([rows[i] for i in seqs]).to(device), torch.cat(slots).to(device), count)

    def mask(self, group: Group, window: int | None, like: Tensor) -> Tensor:
        if window not in group.masks:
            longest = max(self.context_lens[i] for i in group.members)
            mask = torch.full((len(group.members), 1, group.num_queries, longest), NEVER, dtype=like.dtype)
            for row, i in enumerate(group.members):
                seen = causal_mask(group.num_queries, self.context_lens[i], window)
                mask[row, 0, :, : self.context_lens[i]].masked_fill_(seen, 0.0)
            group.masks[window] = mask.to(like.device)
        return group.masks[window]


# (q [T, num_heads, D], keys and values [num_slots, num_kv_heads, D], layout, scale, window) -> [T, num_heads, D].
# Rows of q beyond the layout's sequences are padding: zeros.
Attend = Callable[[Tensor, Tensor, Tensor, Layout, float, int | None], Tensor]


def _gather(
    keys: Tensor, values: Tensor, table: Sequence[int], length: int, block_size: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """A contiguous copy of one sequence's keys and values, [length, num_kv_heads, D] each."""
    slots = torch.tensor(kv.slots_for(table, 0, length, block_size), dtype=torch.int64, device=like.device)
    return keys[slots].to(like.dtype), values[slots].to(like.dtype)


def each_naive(q: Tensor, keys: Tensor, values: Tensor, layout: Layout, scale: float, window: int | None) -> Tensor:
    """Backend: gather, then the formula."""
    out = torch.zeros_like(q)
    for rows, length, table in layout.sequences():
        k, v = _gather(keys, values, table, length, layout.block_size, q)
        mask = causal_mask(rows.stop - rows.start, length, window).to(q.device)
        out[rows] = naive(q[rows], k, v, mask, scale)
    return out


def each_tiled(q: Tensor, keys: Tensor, values: Tensor, layout: Layout, scale: float, window: int | None) -> Tensor:
    """Backend: gather, then online softmax over tiles."""
    out = torch.zeros_like(q)
    for rows, length, table in layout.sequences():
        k, v = _gather(keys, values, table, length, layout.block_size, q)
        out[rows] = tiled(q[rows], k, v, scale, window)
    return out


def each_paged(q: Tensor, keys: Tensor, values: Tensor, layout: Layout, scale: float, window: int | None) -> Tensor:
    """Backend: each query walks through its block table."""
    out, size = torch.zeros_like(q), layout.block_size
    for rows, length, table in layout.sequences():
        for row in range(rows.start, rows.stop):
            seen = length - (rows.stop - 1 - row)
            out[row] = paged_query(q[row], keys, values, table, seen, size, scale, window)
    return out


def sdpa(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: Layout,
    scale: float,
    window: int | None,
    out: Tensor | None = None,
    more_than: int = 0,
) -> Tensor:
    """Backend: gather each sequence's keys and values; one call of torch's attention for each group of sequences."""
    out = torch.zeros_like(q) if out is None else out
    if "groups" not in layout.made:
        layout.made["groups"] = layout.groups(q.device, more_than)
    for group in layout.made["groups"]:  # type: ignore[attr-defined]
        n, count = len(group.members), group.num_queries
        k = keys.index_select(0, group.slots).unflatten(0, (n, -1)).transpose(1, 2).to(q.dtype)
        v = values.index_select(0, group.slots).unflatten(0, (n, -1)).transpose(1, 2).to(q.dtype)
        rows = fold_heads(q.index_select(0, group.rows).unflatten(0, (n, count)), keys.shape[1])
        mask = layout.mask(group, window, q)
        if count > 1:
            mask = mask.repeat(1, 1, q.shape[1] // keys.shape[1], 1)
        mixed = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
        out.index_copy_(0, group.rows, unfold_heads(mixed, count).flatten(0, 1))
    return out


def numba(q: Tensor, keys: Tensor, values: Tensor, layout: Layout, scale: float, window: int | None) -> Tensor:
    """Backend: short sequences by the compiled kernel, which gathers nothing; prefill by `sdpa`."""
    from . import cpu_kernel

    out = torch.zeros_like(q)
    if "short" not in layout.made:
        layout.made["short"] = cpu_kernel.short_sequences(layout, SHORT, q.shape[1], q.shape[2])
    cpu_kernel.attend(q, keys, values, layout.made["short"], layout.block_size, scale, window, out)  # type: ignore[arg-type]
    return sdpa(q, keys, values, layout, scale, window, out, SHORT)


BACKENDS: dict[str, Attend] = {
    "naive": each_naive,
    "tiled": each_tiled,
    "paged": each_paged,
    "sdpa": sdpa,
    "numba": numba,
}


def pick(name: str, device: torch.device, dtype: torch.dtype) -> Attend:
    """The backend for `attention=name`. "auto" is numba on a CPU in float32 (if it is installed), else sdpa."""
    able = device.type == "cpu" and dtype == torch.float32 and find_spec("numba") is not None
    if name == "auto":
        name = "numba" if able else "sdpa"
    if name not in BACKENDS:
        raise RequestError(f"attention {name!r} is unknown; use auto, {', '.join(BACKENDS)}.")
    if name == "numba" and not able:
        raise RequestError("attention 'numba' needs a CPU, float32 and the package numba; use auto.")
    return BACKENDS[name]
