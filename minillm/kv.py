"""The KV cache: its arithmetic (pure functions) and its tensors (`KVCache`).

A cache is one flat array of *slots* per layer. A slot holds the keys, or the values, of one token:
[num_kv_heads, head_dim]. Slots are handed out in blocks of `block_size`; who owns which block is in `blocks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import ModelConfig


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int = 2) -> int:
    """Bytes of keys and values that one token adds to the cache, over all layers.

    `num_kv_heads`, not the number of query heads: with grouped-query attention several query heads share one KV head
    (Ainslie et al. 2023, arXiv:2305.13245). `head_dim` is what the model's configuration says; it is not always
    hidden_size / num_heads. `dtype_bytes` is 2 for fp16 and bf16, 4 for fp32.
    """
    # exercise 02.1
    return 2 * num_layers * num_kv_heads * head_dim * dtype_bytes
    # end exercise 02.1


def max_tokens_in(num_bytes: int, bytes_per_token: int) -> int:
    """How many whole tokens fit in `num_bytes` of cache memory."""
    return num_bytes // bytes_per_token


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens` tokens. The last block may be partly empty."""
    # exercise 04.1
    return -(-num_tokens // block_size)
    # end exercise 04.1


def slots_for(table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """Cache slots of the tokens at positions start..end-1 of a sequence, in order.

    table: the sequence's blocks, in order; block b holds the slots b * block_size to (b + 1) * block_size - 1.
    """
    # exercise 04.2
    return [table[p // block_size] * block_size + p % block_size for p in range(start, end)]
    # end exercise 04.2


def write_kv(cache: Tensor, new: Tensor, slots: Tensor) -> None:
    """Store the keys (or values) of new tokens, in place.

    cache: [num_slots, num_kv_heads, head_dim]; new: [T, num_kv_heads, head_dim]; slots: [T] int64, all different.
    Row t of `new` goes to row slots[t] of `cache`. Nothing else changes.
    """
    # exercise 02.2
    cache[slots] = new.to(cache.dtype)
    # end exercise 02.2


@dataclass
class LayerCache:
    """Keys and values of one layer: [num_slots, num_kv_heads, head_dim]; scales, in int8 and fp8: [heads, slots].

    A number is what is stored times its scale. There is one scale for each token and KV head, so it moves with its
    block.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


class KVCache:
    """Keys and values of all layers, for `num_blocks` blocks and one spare block that padding may write to.

    `keys[layer]` and `values[layer]` are [num_slots, num_kv_heads, head_dim]. The spare block has the number
    `num_blocks`; no request ever owns it. In int8 and fp8, `scales` is [num_layers, 2, num_kv_heads, num_slots].
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        num_slots = (num_blocks + 1) * block_size
        shape = (config.num_layers, 2, num_slots, config.num_kv_heads, config.head_dim)
        self.data = torch.empty(shape, dtype=dtype, device=device)  # unused slots are never read
        scaled = dtype.itemsize == 1
        # slots last: a kernel reads those of one head, and memory moves in pieces of 32 bytes
        scales = (*shape[:2], config.num_kv_heads, num_slots)
        self.scales = torch.empty(scales, dtype=torch.float32, device=device) if scaled else None
        self.keys = [self.data[layer, 0] for layer in range(config.num_layers)]
        self.values = [self.data[layer, 1] for layer in range(config.num_layers)]
        self.bytes_per_token = kv_bytes_per_token(
            config.num_layers, config.num_kv_heads, config.head_dim, self.data.element_size()
        )
        if scaled:
            self.bytes_per_token += 2 * config.num_layers * config.num_kv_heads * 4

    def layer(self, layer: int) -> LayerCache:
        """Views of one layer."""
        scales = (None, None) if self.scales is None else (self.scales[layer, 0], self.scales[layer, 1])
        return LayerCache(self.keys[layer], self.values[layer], *scales)

    def block(self, number: int) -> Tensor:
        """Keys and values of one block in every layer: [num_layers, 2, block_size, num_kv_heads, head_dim]. A view."""
        return self.data[:, :, number * self.block_size : (number + 1) * self.block_size]

    def copy_block(self, source: int, target: int, origin: KVCache | None = None) -> None:
        """Copy one block from another place in this cache (copy-on-write), or from another cache (swapping)."""
        origin, size = origin or self, self.block_size
        self.block(target).copy_(origin.block(source))
        if self.scales is not None and origin.scales is not None:
            there = origin.scales[..., source * size : (source + 1) * size]
            self.scales[..., target * size : (target + 1) * size].copy_(there)
