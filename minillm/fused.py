"""The decoder's forward pass with the kernels of `kernels.py`: the same numbers as `model.Transformer`, fewer launches.

With one row each layer is six kernels, and every product a `matvec`, which reads its weights once and does norm,
activation and residual on the way. With more rows the products are cuBLAS's, and the rest has a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from . import kernels, kv
from .model import Block, Linear, RMSNorm, Transformer


@dataclass
class DeviceBatch:
    """One step's input as tensors on the device. T rows; see `model.Batch` for the first three.

    logit_rows: [R] int64, or None if every row is wanted. sources, previous: see `kernels.embed`.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    tiles: kernels.Tiles
    sources: Tensor
    previous: Tensor
    logit_rows: Tensor | None = None


def forward(model: Transformer, batch: DeviceBatch, cache: kv.KVCache) -> Tensor:
    """Hidden states [R, hidden] before the final norm. Writes the keys and values of the T rows into the cache."""
    config, frequencies = model.config, model.frequencies
    x = kernels.embed(batch.token_ids, batch.sources, batch.previous, model.embed.weight)
    single = one_row(x)
    for layer, block in enumerate(cast(Sequence[Block], model.layers)):
        qkv = _product(x, block.qkv, block.attn_norm)
        gains = None
        if block.q_norm is not None and block.k_norm is not None:
            gains = (block.q_norm.weight, block.k_norm.weight)
        kernels.rope_store(
            qkv, batch.positions, batch.slots, frequencies, cache.layer(layer), config.num_heads, gains,
            config.rms_norm_eps,
        )  # fmt: skip
        mixed = x.new_empty(len(x), config.num_heads * config.head_dim)
        kernels.paged_attention(
            qkv, cache.layer(layer), batch.tiles, mixed, cache.block_size, config.num_heads, config.head_dim**-0.5,
            block.window,
        )  # fmt: skip
        x = _product(mixed, block.o, residual=x)
        if single:
            hidden = _product(x, block.gate_up, block.mlp_norm, gated=True)
        else:
            hidden = kernels.swiglu(_product(x, block.gate_up, block.mlp_norm))
        x = _product(hidden, block.down, residual=x)
    return x if batch.logit_rows is None else x[batch.logit_rows]


def logits(model: Transformer, hidden: Tensor) -> Tensor:
    """[R, vocab] float32 from the hidden states that `forward` gave."""
    assert model.head is not None
    return _product(hidden, model.head, model.norm, dtype=torch.float32)


def one_row(x: Tensor) -> bool:
    """Whether products of x are `matvec`'s."""
    return len(x) == 1 and x.dtype != torch.float32


def _product(
    x: Tensor,
    linear: Linear,
    norm: RMSNorm | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """residual + linear(norm(x)), by `matvec` for one row and by cuBLAS for more. dtype: of the result.

    The residual may be overwritten.
    """
    weight, bias = linear.weight, linear.bias
    assert weight is not None
    if one_row(x):
        gain = (norm.weight, norm.eps) if norm is not None else None
        return kernels.matvec(x, weight, bias, gain, gated, residual, dtype)
    if norm is not None:
        x = kernels.rms_norm(x, norm.weight, norm.eps)
    if residual is not None and bias is None:
        return residual.addmm_(x, weight.t())  # in place: cuBLAS would copy it first
    if dtype is not None and dtype != x.dtype and x.is_cuda and bias is None:
        return torch.mm(x, weight.t(), out_dtype=dtype)
    out = F.linear(x, weight, bias)
    out = out if residual is None else out + residual
    return out if dtype is None else out.to(dtype)
