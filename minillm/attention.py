"""Attention over a paged KV cache, for a ragged batch: each sequence brings any number of queries.

`naive` is the formula, for one sequence. `paged` is what the engine runs on CPU: it gathers the keys and values of
each sequence by its slots and calls torch's `scaled_dot_product_attention`. Sequences with equally many queries share
one call, so all decodes of a step are one call per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


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
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqs,shd->qhd", weights, v)


@dataclass
class Group:
    """Sequences of one step that bring equally many queries.

    rows: [G * Q] places of their queries in the batch; slots: [G * S] cache slots of their keys, padded to the longest
    context S by repeating a slot that is in use (what an unused slot holds is never read: it may be NaN).
    masks: for each window in the model, additive float [G, 1, Q, S].
    """

    rows: Tensor
    slots: Tensor
    masks: dict[int | None, Tensor]
    num_seqs: int
    num_queries: int


def make_groups(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_size: int,
    windows: set[int | None],
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[Group]:
    """Sort a step's sequences into groups. query_lens, context_lens and tables have one entry for each sequence."""
    starts, members = [0], {}  # type: ignore[var-annotated]
    for i, count in enumerate(query_lens):
        starts.append(starts[-1] + count)
        members.setdefault(count, []).append(i)
    groups = []
    for count, seqs in members.items():
        longest = max(context_lens[i] for i in seqs)
        rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in seqs])
        position = torch.arange(longest)
        slots, masks = [], {w: torch.full((len(seqs), 1, count, longest), float("-inf"), dtype=dtype) for w in windows}
        for row, i in enumerate(seqs):
            table = torch.tensor(tables[i])
            where = position.clamp(max=context_lens[i] - 1)
            slots.append(table[where // block_size] * block_size + where % block_size)
            for window, mask in masks.items():
                seen = causal_mask(count, context_lens[i], window)
                mask[row, 0, :, : context_lens[i]].masked_fill_(seen, 0.0)
        masks = {w: mask.to(device) for w, mask in masks.items()}
        groups.append(Group(rows.to(device), torch.cat(slots).to(device), masks, len(seqs), count))
    return groups


def paged(
    q: Tensor, keys: Tensor, values: Tensor, groups: Sequence[Group], scale: float, window: int | None = None
) -> Tensor:
    """Attention of one layer for a ragged batch.

    q: [T, num_heads, D], the queries of all sequences one after another; keys, values: [num_slots, num_kv_heads, D].
    Returns [T, num_heads, D]. The query heads that share a KV head are stacked as more queries of it, so keys and
    values are not repeated in memory.
    """
    out = torch.empty_like(q)
    num_heads, num_kv_heads, dim = q.shape[1], keys.shape[1], q.shape[2]
    share = num_heads // num_kv_heads
    for group in groups:
        n, count = group.num_seqs, group.num_queries
        k = keys.index_select(0, group.slots).view(n, -1, num_kv_heads, dim).transpose(1, 2)
        v = values.index_select(0, group.slots).view(n, -1, num_kv_heads, dim).transpose(1, 2)
        rows = q.index_select(0, group.rows).view(n, count, num_kv_heads, share, dim)
        stacked = rows.permute(0, 2, 3, 1, 4).reshape(n, num_kv_heads, share * count, dim)
        mask = group.masks[window].repeat(1, 1, share, 1) if count > 1 else group.masks[window]
        mixed = F.scaled_dot_product_attention(stacked, k.to(q.dtype), v.to(q.dtype), attn_mask=mask, scale=scale)
        mixed = mixed.view(n, num_kv_heads, share, count, dim).permute(0, 3, 1, 2, 4).reshape(n * count, num_heads, dim)
        out.index_copy_(0, group.rows, mixed)
    return out
