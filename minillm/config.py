"""What a model looks like (`ModelConfig`) and how the engine runs it (`EngineConfig`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ModelError, RequestError

MAX_LAYERS = 10_000  # a config that claims more is damaged; believing it would cost memory
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")  # SmolLM2 files call themselves llama


# our field: (its key in config.json, its key in GGUF metadata behind "<architecture>.")
_KEYS = {
    "hidden_size": ("hidden_size", "embedding_length"),
    "intermediate_size": ("intermediate_size", "feed_forward_length"),
    "num_layers": ("num_hidden_layers", "block_count"),
    "num_heads": ("num_attention_heads", "attention.head_count"),
    "num_kv_heads": ("num_key_value_heads", "attention.head_count_kv"),
    "max_position_embeddings": ("max_position_embeddings", "context_length"),
    "vocab_size": ("vocab_size", "vocab_size"),
    "rms_norm_eps": ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
}


@dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies stretched for long contexts: "linear" divides all by `factor` (arXiv:2306.15595); "llama3"
    divides the low ones, keeps the high ones and blends those between (Llama 3.1 model release)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """One decoder; the families (Llama, SmolLM2, Mistral, Qwen2, Qwen3) differ only in these values."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] | None = None  # None: every layer, if sliding_window is set
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    rope_freq_divisors: tuple[float, ...] | None = None  # [head_dim / 2]; GGUF files store llama3 scaling this way

    def __post_init__(self) -> None:
        sizes = ["vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"]
        sizes += ["head_dim", "max_position_embeddings"] + ["sliding_window"] * (self.sliding_window is not None)
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(f"The model's {name} must be a whole number of at least 1, got {value!r}.")
        if self.num_layers > MAX_LAYERS:
            raise ModelError(f"The model claims {self.num_layers} layers; at most {MAX_LAYERS} are supported.")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ModelError(f"The model's {name} must be a finite number above 0, got {value!r}.")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} heads cannot be shared out over {self.num_kv_heads} KV heads.")
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even (rotary pairs), got {self.head_dim}.")
        for name, wanted in (("sliding_layers", self.num_layers), ("rope_freq_divisors", self.head_dim // 2)):
            values = getattr(self, name)
            if values is not None and len(values) != wanted:
                raise ModelError(f"The model's {name} must have {wanted} entries, got {len(values)}.")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read a Hugging Face `config.json` (and `generation_config.json`, which may name more end tokens).

        Absent optional keys get the default of the family's class in transformers. Raises ModelError naming what is
        missing or not supported.
        """
        arch = config.get("model_type")
        if arch not in SUPPORTED:
            raise ModelError(f"model_type {arch!r} is not supported; supported are {', '.join(SUPPORTED)}.")
        for key, wanted in (("hidden_act", "silu"), ("quantization_config", None)):
            if config.get(key, wanted) != wanted:
                raise ModelError(f"config.json: {key} {config[key]!r} is not supported, only {wanted!r}.")
        sizes = _sizes(config, {ours: key for ours, (key, _) in _KEYS.items()}, "model's config.json")
        theta, scaling = _hf_rope(config)
        window, window_layers = _hf_window(arch, config)
        attention_bias = bool(config.get("attention_bias", False)) and arch in ("llama", "qwen3")
        return cls(
            architecture=arch,
            **sizes,
            head_dim=_head_dim(config.get("head_dim", 128 if arch == "qwen3" else None), sizes),
            rope_theta=theta,
            rope_scaling=scaling,
            sliding_window=window,
            sliding_layers=window_layers,
            qkv_bias=attention_bias or arch == "qwen2",
            o_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)) and arch == "llama",
            qk_norm=arch == "qwen3",
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_token_ids(config.get("eos_token_id"), (generation_config or {}).get("eos_token_id")),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, Sequence[int]],
        rope_freq_divisors: Sequence[float] | None = None,
    ) -> ModelConfig:
        """Read a GGUF file's metadata; Mistral files say "llama". Biases and norms are read off the tensor names in
        `shapes` (numpy order); `rope_freq_divisors` is the file's `rope_freqs.weight`. Raises ModelError likewise."""
        arch = metadata.get("general.architecture")
        if arch not in ("llama", "qwen2", "qwen3"):
            raise ModelError(f"GGUF architecture {arch!r} is not supported; supported are llama, qwen2, qwen3.")
        keys = {ours: f"{arch}.{key}" for ours, (_, key) in _KEYS.items()}
        embed = shapes.get("token_embd.weight", (None,))  # its rows count the vocabulary, whatever the metadata says
        sizes = _sizes({**metadata, keys["vocab_size"]: embed[0]}, keys, "GGUF file's metadata")
        if isinstance(sizes["num_heads"], list):
            raise ModelError(f"GGUF: {keys['num_heads']} must be one number, the same in all layers.")
        head_dim = _head_dim(metadata.get(f"{arch}.attention.key_length"), sizes)
        for key, wanted in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
            if (found := metadata.get(f"{arch}.{key}", wanted)) != wanted:
                raise ModelError(f"GGUF: {arch}.{key} is {found}, but the head size is {wanted}.")
        if metadata.get(f"{arch}.expert_count"):
            raise ModelError(f"GGUF: mixture-of-experts models ({arch}.expert_count) are not supported.")
        kind, factor = (metadata.get(f"{arch}.rope.scaling.{key}") for key in ("type", "factor"))
        if kind not in (None, "none", "linear"):
            raise ModelError(f"GGUF: rope scaling {kind!r} is not supported, only none, linear and rope_freqs.")
        if kind == "linear" and not factor:
            raise ModelError(f"The GGUF file's metadata lacks {arch}.rope.scaling.factor.")
        return cls(
            architecture=arch,
            **sizes,
            head_dim=head_dim,
            rope_theta=metadata.get(f"{arch}.rope.freq_base", 10000.0),
            rope_scaling=RopeScaling("linear", factor) if kind == "linear" and factor else None,
            # llama.cpp's Qwen2 and Qwen3 graphs have no window, whatever the metadata says
            sliding_window=metadata.get("llama.attention.sliding_window") or None,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            o_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias="blk.0.ffn_down.bias" in shapes,
            qk_norm="blk.0.attn_q_norm.weight" in shapes or arch == "qwen3",
            tie_word_embeddings="output.weight" not in shapes,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=_token_ids(*(metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot"))),
            rope_freq_divisors=tuple(rope_freq_divisors) if rope_freq_divisors is not None else None,
        )

    def window(self, layer: int) -> int | None:
        """How many keys, the current one included, a query of `layer` may see; None: all of them."""
        return self.sliding_window if self.sliding_layers is None or self.sliding_layers[layer] else None


def _sizes(data: Mapping[str, Any], keys: Mapping[str, str], place: str) -> dict[str, Any]:
    """Read our fields by their keys in `data`; models without KV heads of their own have as many as heads."""
    values = {ours: data.get(key) for ours, key in keys.items()}
    if values["num_kv_heads"] is None:
        values["num_kv_heads"] = values["num_heads"]
    if missing := [keys[ours] for ours, value in values.items() if value is None]:
        raise ModelError(f"The {place} lacks {', '.join(missing)}.")
    return values


def _head_dim(given: Any, sizes: Mapping[str, Any]) -> Any:
    if given is not None:
        return given
    hidden, heads = sizes["hidden_size"], sizes["num_heads"]
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or hidden % heads:
        raise ModelError(f"hidden_size {hidden!r} cannot be shared out over {heads!r} heads.")
    return hidden // heads


def _token_ids(*values: Any) -> tuple[int, ...]:
    """Flatten ids, lists of ids and Nones into ids without repeats, first come first. ModelError: not ids."""
    flat = [i for value in values if value is not None for i in (value if isinstance(value, list) else [value])]
    if wrong := [i for i in flat if not isinstance(i, int) or isinstance(i, bool)]:
        raise ModelError(f"The model's eos_token_id must be a whole number or a list of them, got {wrong[0]!r:.50}.")
    return tuple(dict.fromkeys(flat))


def _hf_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Read the rotary settings: `rope_theta` + `rope_scaling`, or transformers 5's single `rope_parameters`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    keys = {"default": (), "linear": ("factor",), "llama3": tuple(RopeScaling.__annotations__)[1:]}.get(kind)
    if keys is None or any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(f"rope type {kind!r} ({rope}) is not supported; supported are default, linear and llama3.")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("partial_rotary_factor below 1 is not supported.")
    if missing := [key for key in keys if not isinstance(rope.get(key), int | float) or rope[key] <= 0]:
        raise ModelError(f"The model's {kind} rope settings need a number above 0 for {', '.join(missing)}.")
    scaling = RopeScaling(kind, **{key: rope[key] for key in keys}) if keys else None
    return rope.get("rope_theta", config.get("rope_theta", 10000.0)), scaling


def _hf_window(arch: str, config: Mapping[str, Any]) -> tuple[int | None, tuple[bool, ...] | None]:
    """Return the sliding window and, where only some layers have it, which ones."""
    window = config.get("sliding_window", 4096)
    if arch == "mistral":
        return window, None
    if arch == "llama" or not config.get("use_sliding_window", False) or window is None:
        return None, None
    kinds = config.get("layer_types")
    if kinds is None:  # the first max_window_layers layers see everything
        first, count = config.get("max_window_layers", 28), min(config["num_hidden_layers"], MAX_LAYERS)
        return window, tuple(layer >= first for layer in range(count))
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ModelError(f"Layer type {sorted(unknown)[0]!r} is not supported.")
    return window, tuple(kind == "sliding_attention" for kind in kinds)


@dataclass
class EngineConfig:
    """How the engine runs. Names and defaults follow vLLM's engine arguments where both have them.

    scheduling: "continuous", "dynamic" or "static", see scheduler.py; batch_delay: how many seconds a static batch that
    is not full waits for more. scheduling_policy: "priority", "fcfs", "deadline", or a function from a request to a
    sort key. preemption: "recompute", or "swap" to host memory with room for `num_swap_blocks` (None: as many as the
    pool has). long_prefill_token_threshold: most tokens of one request in a step (0: no limit but the budget).
    attention: "auto", "triton" (see gpu_runner.py), or a backend's name, see attention.py. enforce_eager: no CUDA
    graphs. kv_cache_dtype: "auto" is the model's; "int8" and "fp8" are read by the triton kernels only.
    """

    block_size: int = 16
    num_kv_blocks: int | None = None  # None: from memory_fraction
    memory_fraction: float = 0.9
    max_model_len: int | None = None  # None: the model's own limit, or what the KV pool can hold
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    scheduling: str = "continuous"
    batch_delay: float = 0.0
    scheduling_policy: str | Callable[[Any], tuple] = "priority"
    preemption: str = "recompute"
    num_swap_blocks: int | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    attention: str = "auto"
    enforce_eager: bool = False
    kv_cache_dtype: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        optional = ("num_kv_blocks", "max_model_len", "num_swap_blocks")
        from_zero = ("seed", "long_prefill_token_threshold")
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", *optional, *from_zero):
            value, least = getattr(self, name), int(name not in from_zero)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise RequestError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        if not isinstance(self.memory_fraction, int | float) or not 0.0 < self.memory_fraction <= 1.0:
            raise RequestError(f"memory_fraction must be above 0 and at most 1, got {self.memory_fraction!r}.")
        if not isinstance(self.batch_delay, int | float) or not 0.0 <= self.batch_delay < float("inf"):
            raise RequestError(f"batch_delay must be a number of seconds of at least 0, got {self.batch_delay!r}.")
        choices = {
            "scheduling": ("continuous", "dynamic", "static"),
            "scheduling_policy": ("priority", "fcfs", "deadline"),
            "preemption": ("recompute", "swap"),
            "kv_cache_dtype": ("auto", "int8", "fp8"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed and not (name == "scheduling_policy" and callable(value)):
                raise RequestError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise RequestError("long_prefill_token_threshold needs chunked prefill.")
