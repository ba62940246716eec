"""What a model looks like (`ModelConfig`) and how the engine runs it (`EngineConfig`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ModelError, RequestError

MAX_LAYERS = 10_000  # a config that claims more is damaged; believing it would cost memory
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")  # SmolLM2 files call themselves llama


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    kind "linear": positions are divided by `factor` (Chen et al. 2023, arXiv:2306.15595).
    kind "llama3": low frequencies are divided by `factor`, high ones kept, the band between is blended
    (Llama 3.1 model release).
    """

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

        Where a key is absent, the value is the default of that family's configuration class in transformers.
        Raises ModelError for another model_type, a missing key, a quantised checkpoint or an unknown rope type.
        """
        arch = config.get("model_type")
        if arch not in SUPPORTED:
            raise ModelError(f"model_type {arch!r} is not supported; supported are {', '.join(SUPPORTED)}.")
        required = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
        required += ["max_position_embeddings", "rms_norm_eps"]
        required += ["num_key_value_heads"] * (arch != "llama")  # the first Llama files have no KV heads of their own
        if missing := [key for key in required if config.get(key) is None]:
            raise ModelError(f"The model's config.json lacks {', '.join(missing)}.")
        if quantisation := config.get("quantization_config"):
            raise ModelError(f"The checkpoint is quantised ({quantisation}); only plain safetensors can be loaded.")
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"hidden_act {config['hidden_act']!r} is not supported, only 'silu'.")
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        head_dim = config.get("head_dim", 128 if arch == "qwen3" else None)
        if head_dim is None:
            if not isinstance(heads, int) or heads < 1 or config["hidden_size"] % heads:
                raise ModelError(f"hidden_size {config['hidden_size']} cannot be shared out over {heads} heads.")
            head_dim = config["hidden_size"] // heads
        theta, scaling = _hf_rope(config)
        window, window_layers = _hf_window(arch, config)
        attention_bias = bool(config.get("attention_bias", False)) and arch in ("llama", "qwen3")
        generation = generation_config or {}
        return cls(
            architecture=arch,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            max_position_embeddings=config["max_position_embeddings"],
            rms_norm_eps=config["rms_norm_eps"],
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
            eos_token_ids=_token_ids(config.get("eos_token_id"), generation.get("eos_token_id")),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, Sequence[int]],
        rope_freq_divisors: Sequence[float] | None = None,
    ) -> ModelConfig:
        """Read a GGUF file's metadata. `shapes` maps its tensor names to shapes in numpy order; which biases and
        norms there are is read off the names. `rope_freq_divisors` is its `rope_freqs.weight`, if it has one.

        Mistral files say "llama" too. Raises ModelError for another architecture or a missing key.
        """
        arch = metadata.get("general.architecture")
        if arch not in ("llama", "qwen2", "qwen3"):
            raise ModelError(f"GGUF architecture {arch!r} is not supported; supported are llama, qwen2, qwen3.")

        def get(key: str, default: Any = None) -> Any:
            value = metadata.get(f"{arch}.{key}", default)
            if value is None:
                raise ModelError(f"The GGUF file's metadata lacks {arch}.{key}.")
            return value

        heads, hidden = get("attention.head_count"), get("embedding_length")
        if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
            raise ModelError(f"GGUF: {arch}.attention.head_count {heads!r} must be one number, the same in all layers.")
        head_dim = get("attention.key_length", hidden // heads)
        for key, wanted in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
            if get(key, wanted) != wanted:
                raise ModelError(f"GGUF: {arch}.{key} is {get(key)}, but only the head size {wanted} is supported.")
        if get("expert_count", 0):
            raise ModelError(f"GGUF: mixture-of-experts models ({arch}.expert_count) are not supported.")
        scaling_type = get("rope.scaling.type", "none")
        if scaling_type not in ("none", "linear"):
            raise ModelError(f"GGUF: rope scaling {scaling_type!r} is not supported, only none, linear and rope_freqs.")
        scaling = RopeScaling("linear", float(get("rope.scaling.factor"))) if scaling_type == "linear" else None
        embed = shapes.get("token_embd.weight")
        vocab = embed[0] if embed else get("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())) or None)
        return cls(
            architecture=arch,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=get("feed_forward_length"),
            num_layers=get("block_count"),
            num_heads=heads,
            num_kv_heads=get("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position_embeddings=get("context_length"),
            rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
            rope_theta=get("rope.freq_base", 10000.0),
            rope_scaling=scaling,
            # llama.cpp's Qwen2 and Qwen3 graphs have no window, whatever the metadata says
            sliding_window=metadata.get("llama.attention.sliding_window") or None,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            o_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias="blk.0.ffn_down.bias" in shapes,
            qk_norm="blk.0.attn_q_norm.weight" in shapes or arch == "qwen3",
            tie_word_embeddings="output.weight" not in shapes,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=_token_ids(
                metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")
            ),
            rope_freq_divisors=tuple(rope_freq_divisors) if rope_freq_divisors is not None else None,
        )

    def window(self, layer: int) -> int | None:
        """How many keys, the current one included, a query of `layer` may see; None: all of them."""
        if self.sliding_layers is not None and not self.sliding_layers[layer]:
            return None
        return self.sliding_window


def _token_ids(*values: Any) -> tuple[int, ...]:
    """Flatten ids, lists of ids and Nones into ids without repeats, first come first."""
    flat = [i for value in values if value is not None for i in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(flat))


def _hf_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Read the rotary settings: `rope_theta` + `rope_scaling`, or transformers 5's single `rope_parameters`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3") or any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(f"rope type {kind!r} ({rope}) is not supported; supported are default, linear and llama3.")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("partial_rotary_factor below 1 is not supported.")
    if kind == "default":
        return theta, None
    keys = ["factor"]
    if kind == "llama3":
        keys += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    if missing := [key for key in keys if not isinstance(rope.get(key), int | float) or rope[key] <= 0]:
        raise ModelError(f"The model's {kind} rope settings need a number above 0 for {', '.join(missing)}.")
    return theta, RopeScaling(kind, **{key: rope[key] for key in keys})


def _hf_window(arch: str, config: Mapping[str, Any]) -> tuple[int | None, tuple[bool, ...] | None]:
    """Return the sliding window and, where only some layers have it, which ones."""
    if arch == "mistral":
        return config.get("sliding_window", 4096), None
    if arch == "llama" or not config.get("use_sliding_window", False) or config.get("sliding_window", 4096) is None:
        return None, None
    kinds = config.get("layer_types")
    if kinds is None:  # the first max_window_layers layers see everything
        first = config.get("max_window_layers", 28)
        count = min(config["num_hidden_layers"], MAX_LAYERS)
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(count)]
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ModelError(f"Layer type {sorted(unknown)[0]!r} is not supported.")
    return config.get("sliding_window", 4096), tuple(kind == "sliding_attention" for kind in kinds)


@dataclass
class EngineConfig:
    """How the engine runs. Names and defaults follow vLLM's engine arguments where both have them."""

    block_size: int = 16
    num_kv_blocks: int | None = None  # None: from memory_fraction
    memory_fraction: float = 0.9
    max_model_len: int | None = None  # None: the model's own limit, or what the KV pool can hold
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "num_kv_blocks", "max_model_len", "seed"):
            value, least = getattr(self, name), 0 if name == "seed" else 1
            if value is None and name in ("num_kv_blocks", "max_model_len"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise RequestError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        if not isinstance(self.memory_fraction, int | float) or not 0.0 < self.memory_fraction <= 1.0:
            raise RequestError(f"memory_fraction must be above 0 and at most 1, got {self.memory_fraction!r}.")
