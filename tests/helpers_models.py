"""Writers of tiny model files for the tests: Hugging Face folders and GGUF files, all made on the spot."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from minillm.config import ModelConfig

# dimensions all differ, so that a swapped axis cannot go unnoticed; rows are multiples of 32 for the block formats
TINY = {
    "vocab_size": 101,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 32, "rope_theta": 500000.0},
    "smollm2": {"model_type": "llama", "tie_word_embeddings": True, "rope_theta": 100000.0},
    "mistral": {"model_type": "mistral", "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True},
}


def hf_config(family: str, **changes: Any) -> dict[str, Any]:
    """A `config.json` as a dict."""
    return {**TINY, **FAMILIES[family], **changes}


def save_transformers(folder: Path, family: str, seed: int = 0, max_shard_size: str = "1GB", **changes: Any) -> Any:
    """Save a random transformers model of the family, biases and norms randomised too; return the model."""
    import transformers

    torch.manual_seed(seed)
    config = dict(hf_config(family, **changes))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(0.1 * torch.randn_like(parameter) + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def save_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write a Hugging Face folder by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def hf_tensors(family: str, seed: int = 0, **changes: Any) -> dict[str, torch.Tensor]:
    """Random tensors under Hugging Face names, from the names' own rules (not from the engine's table)."""
    c = hf_config(family, **changes)
    g = torch.Generator().manual_seed(seed)
    h, inter, heads, kv = (c[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads",
                                          "num_key_value_heads"))  # fmt: skip
    d = c.get("head_dim") or h // heads
    linears = {
        "self_attn.q_proj": (heads * d, h),
        "self_attn.k_proj": (kv * d, h),
        "self_attn.v_proj": (kv * d, h),
        "self_attn.o_proj": (h, heads * d),
        "mlp.gate_proj": (inter, h),
        "mlp.up_proj": (inter, h),
        "mlp.down_proj": (h, inter),
    }
    out = {"model.embed_tokens.weight": torch.randn(c["vocab_size"], h, generator=g)}
    for i in range(c["num_hidden_layers"]):
        for name, shape in linears.items():
            out[f"model.layers.{i}.{name}.weight"] = torch.randn(shape, generator=g) / shape[1] ** 0.5
            qkv = name.rpartition(".")[2][0] in "qkv"
            attention = "self_attn" in name and c.get("attention_bias", False)
            if (c["model_type"] == "qwen2" and qkv) or attention or ("mlp" in name and c.get("mlp_bias", False)):
                out[f"model.layers.{i}.{name}.bias"] = torch.randn(shape[0], generator=g)
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"model.layers.{i}.{name}.weight"] = 1 + 0.1 * torch.randn(h, generator=g)
        for name in ("q_norm", "k_norm") if c["model_type"] == "qwen3" else ():
            out[f"model.layers.{i}.self_attn.{name}.weight"] = 1 + 0.1 * torch.randn(d, generator=g)
    out["model.norm.weight"] = 1 + 0.1 * torch.randn(h, generator=g)
    if not c.get("tie_word_embeddings", False):
        out["lm_head.weight"] = torch.randn(c["vocab_size"], h, generator=g)
    return out


def permute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's row order of a Llama q or k, row by row (the converter's rule, written out)."""
    half = tensor.shape[0] // heads // 2
    order = [head * 2 * half + member * half + i for head in range(heads) for i in range(half) for member in (0, 1)]
    return tensor[order]


@functools.cache
def _name_map() -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 4)  # a superset of the others' names


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor, from the gguf package's own map."""
    found = _name_map().get_name(name, try_suffixes=(".weight", ".bias"))
    assert found, name
    return found


def save_gguf(
    path: Path,
    family: str,
    tensors: Mapping[str, torch.Tensor],
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    rope_freqs: torch.Tensor | None = None,
    **changes: Any,
) -> Path:
    """Write Hugging Face tensors as a GGUF file the way llama.cpp's converter does. Norms and biases stay F32.

    `metadata` (str, int, float, bool or list values) is added or replaces; None as a value leaves a key out.
    """
    c = hf_config(family, **changes)
    arch = "llama" if c["model_type"] in ("llama", "mistral") else c["model_type"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    head_dim = c.get("head_dim") or c["hidden_size"] // heads
    values: dict[str, Any] = {
        f"{arch}.block_count": c["num_hidden_layers"],
        f"{arch}.context_length": c["max_position_embeddings"],
        f"{arch}.embedding_length": c["hidden_size"],
        f"{arch}.feed_forward_length": c["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.rope.freq_base": float(c.get("rope_theta", 10000.0)),
        f"{arch}.attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, arch)
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
           list: writer.add_array}  # fmt: skip
    for key, value in values.items():
        if value is not None:
            add[type(value)](key, value)
    for name, tensor in tensors.items():
        if arch == "llama" and ".q_proj." in name:
            tensor = permute(tensor, heads)
        if arch == "llama" and ".k_proj." in name:
            tensor = permute(tensor, kv_heads)
        array = tensor.float().contiguous().numpy()
        kind = quantisation if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), _quantise(array, kind), raw_dtype=kind)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _quantise(array: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    return array if kind == gguf.GGMLQuantizationType.F32 else gguf.quantize(array, kind)


def tiny_config(**changes: Any) -> ModelConfig:
    """A small Llama, as the engine's own config."""
    values = {"architecture": "llama", "vocab_size": 101, "hidden_size": 96, "intermediate_size": 160, "num_layers": 2,
                  "num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "max_position_embeddings": 64}  # fmt: skip
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]
