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
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .config import ModelConfig
from .errors import ModelError

if TYPE_CHECKING:
    from .gguf_file import GGUFFile
    from .text import Tokenizer

# ours -> the modules that it is made of, each as (Hugging Face name, GGUF name)
_LAYER = {
    "attn_norm": [("input_layernorm", "attn_norm")],
    "qkv": [("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v")],
    "q_norm": [("self_attn.q_norm", "attn_q_norm")],
    "k_norm": [("self_attn.k_norm", "attn_k_norm")],
    "o": [("self_attn.o_proj", "attn_output")],
    "mlp_norm": [("post_attention_layernorm", "ffn_norm")],
    "gate_up": [("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up")],
    "down": [("mlp.down_proj", "ffn_down")],
}
_TOP = {
    "embed": [("model.embed_tokens", "token_embd")],
    "norm": [("model.norm", "output_norm")],
    "head": [("lm_head", "output")],
}
_BUFFERS = ("rotary_emb.inv_freq", "rope_freqs.weight", "attn_rot_embd.weight")  # computed here, not loaded
_FLOATS = ("F64", "F32", "F16", "BF16")

Shape = tuple[int, ...]
StateDict = dict[str, torch.Tensor]


class Source(Protocol):
    """Where tensors come from: `shapes` by the file's own names, and each tensor by name."""

    gguf: bool
    shapes: dict[str, Shape]

    def tensor(self, name: str) -> torch.Tensor: ...

    def read_into(self, name: str, out: torch.Tensor) -> None: ...


@dataclass
class Checkpoint:
    """An opened model: its `config` has been read, its tensors are read by `state_dict`."""

    path: Path
    config: ModelConfig
    source: Source
    gguf: GGUFFile | None = None

    def state_dict(self, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> StateDict:
        """Return all tensors under our names, converted to `dtype` on `device`.

        Raises ModelError naming every tensor that is missing, unexpected or of another shape than the config says.
        Tied embeddings win over an output head in the file; if the two differ, there is a warning.
        """
        config, shapes = self.config, self.source.shapes
        plan = dict(_plan(config, self.source.gguf))
        wanted = {name: shape for parts in plan.values() for name, shape in parts}
        head, embed = (_top_name(ours, self.source.gguf) for ours in ("head", "embed"))
        known = set(wanted) | ({head} if config.tie_word_embeddings else set())
        missing = [name for name in wanted if name not in shapes]
        surplus = [name for name in shapes if name not in known and not name.endswith(_BUFFERS)]
        wrong = [f"{name} is {shapes[name]} instead of {shape}" for name, shape in wanted.items()
                 if name in shapes and shapes[name] != shape]  # fmt: skip
        reports = (("missing tensors", missing), ("unexpected tensors", surplus), ("wrong shapes", wrong))
        if any(names for _, names in reports):
            text = "; ".join(f"{title}: {_shorten(names)}" for title, names in reports if names)
            raise ModelError(f"The weights in {self.path} do not fit its config: {text}.")

        tied_twice = config.tie_word_embeddings and head in shapes
        if tied_twice and not torch.equal(self.source.tensor(head), self.source.tensor(embed)):
            text = f"the config ties {head} to {embed}, but the two differ; {embed} is used for both"
            warnings.warn(f"{self.path}: {text}.", stacklevel=2)
        state = {}
        for ours, parts in plan.items():
            rows = sum(shape[0] for _, shape in parts)
            out = torch.empty((rows, *parts[0][1][1:]), dtype=dtype, device=device)
            start = 0
            for name, shape in parts:
                self._read_into(name, out[start : start + shape[0]])
                start += shape[0]
            state[ours] = out
        return state

    def tokenizer(self) -> Tokenizer:
        """Return the checkpoint's tokenizer (imported only now: listing a checkpoint does not need it)."""
        from .text import Tokenizer

        return Tokenizer.from_gguf(self.gguf.metadata) if self.gguf else Tokenizer.from_folder(self.path)

    def _read_into(self, name: str, out: torch.Tensor) -> None:
        permuted = {"attn_q": self.config.num_heads, "attn_k": self.config.num_kv_heads}
        module = name.split(".")[-2]
        if self.source.gguf and self.config.architecture == "llama" and module in permuted:
            out.copy_(unpermute(self.source.tensor(name), permuted[module]))
        else:
            self.source.read_into(name, out)


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
        return Checkpoint(path, config, _SafetensorsSource(path))
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is neither a folder nor a .gguf file; only safetensors and GGUF are read.")
    from .gguf_file import GGUFFile

    file = GGUFFile(path)
    source = _GGUFSource(file)
    divisors = file.tensor("rope_freqs.weight").tolist() if "rope_freqs.weight" in file.tensors else None
    return Checkpoint(path, ModelConfig.from_gguf(file.metadata, source.shapes, divisors), source, file)


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return our parameter names and their shapes, in the order of the model; linears are `[out, in]`."""
    plan = _plan(config, gguf=False)
    return {ours: (sum(shape[0] for _, shape in parts), *parts[0][1][1:]) for ours, parts in plan}


def random_state_dict(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> StateDict:
    """Return random weights for tests and benchmarks: the same for the same seed, whatever `dtype` is.

    Linears keep the size of what passes through them (std 1 / sqrt(in)), norms lie around 1 and biases around 0
    without being exactly that, so that a forgotten norm or bias changes the logits, which spread by about 1.
    """
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in parameter_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            noise /= shape[1] ** 0.5
        else:
            noise = 0.1 * noise + (1.0 if name.endswith("norm.weight") else 0.0)
        state[name] = noise.to(dtype)
    return state


def unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order of q and k, `[heads * D, ...]`, weight or bias.

    Llama GGUF files keep the two members of a rotary pair in neighbouring rows, we (and Hugging Face) keep them D/2
    rows apart. Loading without this raises no error; the attention is just wrong. Qwen files are not permuted.
    """
    rows, *rest = tensor.shape
    return tensor.view(num_heads, rows // num_heads // 2, 2, *rest).transpose(1, 2).reshape(tensor.shape)


def _top_name(ours: str, gguf: bool) -> str:
    """Return the file's name of one of the three tensors that are outside the layers."""
    return f"{_TOP[ours][0][gguf]}.weight"


def _plan(config: ModelConfig, gguf: bool) -> Iterator[tuple[str, list[tuple[str, Shape]]]]:
    """Yield each of our names with the file's tensors that it is made of, in row order, and their shapes."""
    hidden, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * d, config.num_kv_heads * d
    rows = {"attn_norm": [hidden], "qkv": [q_rows, kv_rows, kv_rows], "q_norm": [d], "k_norm": [d], "o": [hidden],
            "mlp_norm": [hidden], "gate_up": [inner, inner], "down": [hidden]}  # fmt: skip
    columns = {"qkv": hidden, "o": q_rows, "gate_up": hidden, "down": inner}
    biased = {"qkv": config.qkv_bias, "o": config.o_bias, "gate_up": config.mlp_bias, "down": config.mlp_bias}

    yield "embed.weight", [(_top_name("embed", gguf), (config.vocab_size, hidden))]
    for i in range(config.num_layers):
        prefix = f"blk.{i}." if gguf else f"model.layers.{i}."
        for module, names in _LAYER.items():
            if module in ("q_norm", "k_norm") and not config.qk_norm:
                continue
            width = (columns[module],) if module in columns else ()
            theirs = [(prefix + pair[gguf], n) for pair, n in zip(names, rows[module], strict=True)]
            yield f"layers.{i}.{module}.weight", [(f"{name}.weight", (n, *width)) for name, n in theirs]
            if biased.get(module):
                yield f"layers.{i}.{module}.bias", [(f"{name}.bias", (n,)) for name, n in theirs]
    yield "norm.weight", [(_top_name("norm", gguf), (hidden,))]
    if not config.tie_word_embeddings:
        yield "head.weight", [(_top_name("head", gguf), (config.vocab_size, hidden))]


class _GGUFSource:
    gguf = True

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.shapes = {name: info.shape for name, info in file.tensors.items()}

    def tensor(self, name: str) -> torch.Tensor:
        return self.file.tensor(name)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        if out.device.type == "cpu":
            self.file.read_into(name, out)
        else:
            out.copy_(self.file.tensor(name, out.dtype))


class _SafetensorsSource:
    """The safetensors files of a folder: `model.safetensors`, or the shards that the index lists.

    The safetensors library checks each header against its file before it reads on; its errors come out as ModelError.
    """

    gguf = False

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, Shape] = {}
        self.files: dict[str, Any] = {}  # tensor name -> the open file that holds it
        for path in _shards(folder):
            self._open(path)

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file = safe_open(path, framework="pt")
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, the file is not a dict
            described = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path} is not a sound safetensors file: {error}.") from error
        for name, (shape, kind) in described.items():
            if name in self.shapes:
                raise ModelError(f"{path} holds {name}, which another shard holds too.")
            if kind not in _FLOATS and not name.endswith(_BUFFERS):
                raise ModelError(f"{path}: {name} has type {kind}; supported are {', '.join(_FLOATS)}.")
            self.shapes[name], self.files[name] = shape, file

    def tensor(self, name: str) -> torch.Tensor:
        return self.files[name].get_tensor(name)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self.tensor(name))


def _shards(folder: Path) -> list[Path]:
    """Return the folder's safetensors files; a shard that the index lists and the folder lacks is an error."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
            raise ModelError(
                f"{folder} has its weights only as a pickle (.bin or .pt), which can run code when it is read; "
                "convert them to safetensors first."
            )
        raise ModelError(f"{folder} has neither model.safetensors nor model.safetensors.index.json.")
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
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}; is it a Hugging Face model folder?") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"Cannot read {path}: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return value


def _shorten(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
