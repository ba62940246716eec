"""The decoder. One class for Llama, SmolLM2, Mistral, Qwen2 and Qwen3: they differ by flags in `ModelConfig`.

It computes one *step*: the next tokens of several requests, one after another in a flat `Batch`, whatever their number
for each request. There is no prefill and no decode in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import attention, kv
from .config import ModelConfig


@dataclass
class Batch:
    """One step's input. T tokens of N requests, request after request.

    token_ids, positions, slots: [T] int64; slots say where in the cache each token's keys and values go.
    layout: where the sequences lie, in the batch and in the cache. logit_rows: the places in 0..T-1 whose logits are
    wanted. attend: the attention backend.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    layout: attention.Layout
    logit_rows: Tensor
    attend: attention.Attend = attention.sdpa


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Rotation speed of each pair of dimensions, radians per position: [head_dim / 2] float32.

    Su et al. 2021, arXiv:2104.09864. With scaling kind "llama3", pairs that turn less than `low_freq_factor` times
    within the original context are slowed down by `factor`, those that turn more than `high_freq_factor` times are
    kept, and the band between is blended.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if config.rope_freq_divisors is not None:  # a GGUF file stores the result of the scaling
        return frequencies / torch.tensor(config.rope_freq_divisors, device="cpu")
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_max_position_embeddings * frequencies / (2 * torch.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[..., i], x[..., i + D/2]) by its angle. x: [T, heads, D]; cos, sin: [T, 1, D/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class Linear(nn.Module):
    """x W^T + b, as torch's nn.Linear, but without random initial weights, which nobody needs."""

    def __init__(self, in_size: int, out_size: int, bias: bool = False) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = _empty(out_size, in_size)
        self.bias = _empty(out_size) if bias else None
        self.packed: Tensor | None = None

    def pack(self) -> None:
        """On a CPU in float32: keep the weight in the order in which oneDNN reads it, instead of the plain one.

        F.linear reorders it in every call, which costs more than the product where x has 2 to 32 rows. A row of the
        result is then also the same to the last bit whatever the other rows are. `packed.to_dense()` is the weight.
        """
        weight = self.weight
        if weight is None or weight.device.type != "cpu" or weight.dtype != torch.float32:
            return
        if torch.backends.mkldnn.is_available():
            self.packed, self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None), None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dimension. Zhang, Sennrich 2019, arXiv:1910.07467."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = _empty(size), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Embedding(nn.Module):
    """Row `id` of the table for each token id."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight = _empty(count, size)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Block(nn.Module):
    """Attention and MLP of one layer, each with its norm before it and a residual around it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.layer, self.window, self.dim = layer, config.window(layer), dim
        self.sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.attn_norm = RMSNorm(hidden, eps)
        self.qkv = Linear(hidden, sum(self.sizes) * dim, bias=config.qkv_bias)
        self.q_norm = RMSNorm(dim, eps) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, eps) if config.qk_norm else None
        self.o = Linear(config.num_heads * dim, hidden, bias=config.o_bias)
        self.mlp_norm = RMSNorm(hidden, eps)
        self.gate_up = Linear(hidden, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = Linear(config.intermediate_size, hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor, batch: Batch, cache: kv.KVCache, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [T, hidden] -> [T, hidden]. Writes this layer's keys and values of the T tokens into the cache."""
        qkv = self.qkv(self.attn_norm(x)).view(len(x), -1, self.dim)
        q, k, v = qkv.split(self.sizes, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        keys, values = cache.keys[self.layer], cache.values[self.layer]
        kv.write_kv(keys, k, batch.slots)
        kv.write_kv(values, v, batch.slots)
        mixed = batch.attend(q, keys, values, batch.layout, self.dim**-0.5, self.window)
        x = x + self.o(mixed.flatten(1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Transformer(nn.Module):
    """The whole decoder: embedding, blocks, final norm, head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # None: the head is the embedding, and from_state puts it here
        self.head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)
        self.frequencies = rope_frequencies(config)

    @classmethod
    def from_state(cls, config: ModelConfig, state: dict[str, Tensor], pack: bool = True) -> Transformer:
        """Build around existing weights, without first making random ones. Names and shapes must match exactly.

        pack: see `Linear.pack`; without it the products are the same, bit by bit, as F.linear's.
        """
        with torch.device("meta"):
            model = cls(config)
        model.load_state_dict(state, strict=True, assign=True)
        if model.head is None:
            model.head = Linear(0, 0)
            model.head.weight = model.embed.weight
        model.frequencies = model.frequencies.to(model.embed.weight.device)
        for module in model.modules():
            if pack and isinstance(module, Linear):
                module.pack()
        return model.requires_grad_(False).eval()

    def forward(self, batch: Batch, cache: kv.KVCache, layers: Sequence[int] | None = None) -> Tensor:
        """Hidden states after the final norm: [T, hidden]. `layers` runs only these blocks (early exit)."""
        x = self.embed(batch.token_ids)
        angles = (batch.positions[:, None].float() * self.frequencies)[:, None, :]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in range(len(self.layers)) if layers is None else layers:
            x = self.layers[layer](x, batch, cache, cos, sin)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden] -> [R, vocab] float32."""
        assert self.head is not None  # from_state put it there
        return self.head(hidden).float()
