"""Open a checkpoint (a Hugging Face folder with safetensors, or a GGUF file) as our config and our tensors.

One table names every tensor three ways: ours, Hugging Face's and GGUF's. Ours are fused: `qkv` holds the rows of
q, k and v in that order, `gate_up` those of gate and up. Nothing is guessed: a tensor that is missing, unexpected or
of another shape is an error that names it. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .config import ModelConfig
from .errors import ModelError
from .gguf_file import GGUFFile
from .text import Tokenizer

# (Hugging Face name, GGUF name) of the tensors outside the layers; those inside are in `_plan`
_EMBED = ("model.embed_tokens.weight", "token_embd.weight")
_NORM = ("model.norm.weight", "output_norm.weight")
_HEAD = ("lm_head.weight", "output.weight")
_BUFFERS = ("rotary_emb.inv_freq", "rope_freqs.weight", "attn_rot_embd.weight")  # computed here, not loaded
_FLOATS = ("F32", "F16", "BF16")

Shape = tuple[int, ...]
StateDict = dict[str, torch.Tensor]


@dataclass
class Checkpoint:
    """An opened model: its `config` has been read, its tensors are read by `state_dict`."""

    path: Path
    config: ModelConfig
    source: GGUFFile | SafetensorsFiles

    @property
    def gguf(self) -> GGUFFile | None:
        return self.source if isinstance(self.source, GGUFFile) else None

    def state_dict(self, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> StateDict:
        """Return all tensors under our names, converted to `dtype` on `device`.

        Raises ModelError naming every tensor that is missing, unexpected or of another shape than the config says.
        Tied embeddings win over an output head in the file; if the two differ, there is a warning.
        """
        is_gguf, shapes = self.gguf is not None, self.source.shapes
        plan = dict(_plan(self.config, is_gguf))
        wanted = {name: shape for parts in plan.values() for name, shape in parts}
        embed, head, tied = _EMBED[is_gguf], _HEAD[is_gguf], self.config.tie_word_embeddings
        known = {*wanted, head} if tied else set(wanted)
        problems = {
            "missing tensors": [name for name in wanted if name not in shapes],
            "unexpected tensors": [name for name in shapes if name not in known and not name.endswith(_BUFFERS)],
            "wrong shapes": [f"{name} is {shapes[name]} instead of {shape}" for name, shape in wanted.items()
                             if shapes.get(name, shape) != shape],
        }  # fmt: skip
        if any(problems.values()):
            text = "; ".join(f"{title}: {_shorten(names)}" for title, names in problems.items() if names)
            raise ModelError(f"The weights in {self.path} do not fit its config: {text}.")

        if tied and head in shapes and not torch.equal(self.source.tensor(head), self.source.tensor(embed)):
            text = f"the config ties {head} to {embed}, but the two differ; {embed} is used for both"
            warnings.warn(f"{self.path}: {text}.", stacklevel=2)
        state = {}
        for ours, parts in plan.items():
            tensors = [self._tensor(name, dtype) for name, _ in parts]
            state[ours] = (torch.cat(tensors) if len(tensors) > 1 else tensors[0]).to(device)
        return state

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf(self.gguf.metadata) if self.gguf else Tokenizer.from_folder(self.path)

    def _tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = self.source.tensor(name, dtype)
        heads = {"attn_q": self.config.num_heads, "attn_k": self.config.num_kv_heads}.get(name.split(".")[-2])
        if self.gguf and self.config.architecture == "llama" and heads:
            return unpermute(tensor, heads)
        return tensor


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a .gguf file or a Hugging Face folder and read its config. Raises ModelError naming what is wrong."""
    path = Path(path)
    if path.is_dir():
        generation = path / "generation_config.json"
        more = _read_json(generation) if generation.exists() else None
        try:
            config = ModelConfig.from_hf(_read_json(path / "config.json"), more)
        except (TypeError, AttributeError, OverflowError, ValueError) as error:
            raise ModelError(f"{path / 'config.json'} holds a value of the wrong kind: {error}.") from error
        return Checkpoint(path, config, SafetensorsFiles(path))
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is neither a folder nor a .gguf file; only safetensors and GGUF are read.")
    file = GGUFFile(path)
    divisors = file.tensor("rope_freqs.weight").tolist() if "rope_freqs.weight" in file.tensors else None
    return Checkpoint(path, ModelConfig.from_gguf(file.metadata, file.shapes, divisors), file)


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return our parameter names and their shapes, in the order of the model; linears are `[out, in]`."""
    plan = _plan(config, gguf=False)
    return {ours: (sum(shape[0] for _, shape in parts), *parts[0][1][1:]) for ours, parts in plan}


def random_state_dict(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> StateDict:
    """Return random weights for tests and benchmarks: the same for the same seed, whatever `dtype` is.

    Norms are near 1 and biases near 0, but not exactly: a forgotten one changes the logits, which spread by about 1.
    """
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in parameter_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        noise = noise / shape[1] ** 0.5 if len(shape) == 2 else 0.1 * noise
        state[name] = (noise + name.endswith("norm.weight")).to(dtype)
    return state


def unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order of q and k, `[heads * D, ...]`, weight or bias.

    Llama GGUF files keep the two members of a rotary pair in neighbouring rows, we (and Hugging Face) keep them D/2
    rows apart. Loading without this raises no error; the attention is just wrong. Qwen files are not permuted.
    """
    rows, *rest = tensor.shape
    return tensor.view(num_heads, rows // num_heads // 2, 2, *rest).transpose(1, 2).reshape(tensor.shape)


def _plan(config: ModelConfig, gguf: bool) -> Iterator[tuple[str, list[tuple[str, Shape]]]]:
    """Yield each of our names with the file's tensors that it is made of, in row order, and their shapes."""
    hidden, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv, mlp_bias = config.num_heads * d, config.num_kv_heads * d, config.mlp_bias
    layer: list[tuple[str, Shape, bool, list[tuple[str, str, int]]]] = [
        # our name, columns (none: a vector), bias, and each part's Hugging Face name, GGUF name and number of rows
        ("attn_norm", (), False, [("input_layernorm", "attn_norm", hidden)]),
        ("qkv", (hidden,), config.qkv_bias, [
            ("self_attn.q_proj", "attn_q", q), ("self_attn.k_proj", "attn_k", kv), ("self_attn.v_proj", "attn_v", kv),
        ]),
        ("q_norm", (), False, [("self_attn.q_norm", "attn_q_norm", d)]),
        ("k_norm", (), False, [("self_attn.k_norm", "attn_k_norm", d)]),
        ("o", (q,), config.o_bias, [("self_attn.o_proj", "attn_output", hidden)]),
        ("mlp_norm", (), False, [("post_attention_layernorm", "ffn_norm", hidden)]),
        ("gate_up", (hidden,), mlp_bias, [("mlp.gate_proj", "ffn_gate", inner), ("mlp.up_proj", "ffn_up", inner)]),
        ("down", (inner,), mlp_bias, [("mlp.down_proj", "ffn_down", hidden)]),
    ]  # fmt: skip
    yield "embed.weight", [(_EMBED[gguf], (config.vocab_size, hidden))]
    for i in range(config.num_layers):
        prefix = f"blk.{i}." if gguf else f"model.layers.{i}."
        for ours, columns, biased, parts in layer:
            if ours in ("q_norm", "k_norm") and not config.qk_norm:
                continue
            theirs = [(prefix + (part[1] if gguf else part[0]), part[2]) for part in parts]
            yield f"layers.{i}.{ours}.weight", [(f"{name}.weight", (rows, *columns)) for name, rows in theirs]
            if biased:
                yield f"layers.{i}.{ours}.bias", [(f"{name}.bias", (rows,)) for name, rows in theirs]
    yield "norm.weight", [(_NORM[gguf], (hidden,))]
    if not config.tie_word_embeddings:
        yield "head.weight", [(_HEAD[gguf], (config.vocab_size, hidden))]


class SafetensorsFiles:
    """The safetensors files of a folder; the safetensors library checks each header against its file."""

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, Shape] = {}
        self._files: dict[str, Any] = {}  # tensor name -> the open file that holds it
        for path in _shards(folder):
            try:
                file = safe_open(path, framework="pt")
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, the file is not a dict
            except (SafetensorError, OSError, ValueError) as error:
                raise ModelError(f"{path} is not a sound safetensors file: {error}.") from error
            for name, part in slices.items():
                if part.get_dtype() not in _FLOATS and not name.endswith(_BUFFERS):
                    raise ModelError(f"{path}: {name} has type {part.get_dtype()}; supported are {', '.join(_FLOATS)}.")
                self.shapes[name], self._files[name] = tuple(part.get_shape()), file

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor converted to `dtype` (a new tensor, never a view of the file)."""
        return self._files[name].get_tensor(name).to(dtype, copy=True)


def _shards(folder: Path) -> list[Path]:
    """Return the folder's safetensors files; a shard that the index lists and the folder lacks is an error."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise ModelError(f"{folder} has neither {single.name} nor {index.name}; a pickle (.bin, .pt) is never read.")
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
        raise ModelError(f"{index} needs a weight_map from tensor names to file names in the same folder.")
    shards = [folder / name for name in sorted(set(names.values()))]
    if missing := [path.name for path in shards if not path.is_file()]:
        raise ModelError(f"{folder} lacks {_shorten(missing)}, which its index lists; download it again.")
    return shards


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"Cannot read {path}: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return value


def _shorten(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
