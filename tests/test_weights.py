"""Checkpoints: configs of every family, our tensors from safetensors and GGUF, and a strict report of what is wrong."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
import warnings
from dataclasses import replace

import gguf
import helpers_models
import pytest
import torch
from helpers_models import FAMILIES, hf_config, hf_tensors, save_folder, save_gguf

from minillm.config import ModelConfig, RopeScaling
from minillm.errors import ModelError
from minillm.weights import open_checkpoint, parameter_shapes, random_state_dict, unpermute


def expected_state(tensors, layers=2):
    """Our names from Hugging Face's, written out by hand."""
    rename = {"attn_norm": ["input_layernorm"], "mlp_norm": ["post_attention_layernorm"],
              "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "o": ["self_attn.o_proj"],
              "q_norm": ["self_attn.q_norm"], "k_norm": ["self_attn.k_norm"],
              "gate_up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"]}  # fmt: skip
    out = {"embed.weight": tensors["model.embed_tokens.weight"], "norm.weight": tensors["model.norm.weight"]}
    for i in range(layers):
        for ours, theirs in rename.items():
            for kind in ("weight", "bias"):
                names = [f"model.layers.{i}.{name}.{kind}" for name in theirs]
                if names[0] in tensors:
                    out[f"layers.{i}.{ours}.{kind}"] = torch.cat([tensors[name] for name in names])
    if "lm_head.weight" in tensors:
        out["head.weight"] = tensors["lm_head.weight"]
    return out


def assert_same(got, expected):
    assert sorted(got) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


# --- Hugging Face folders -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_is_read(tmp_path, family):
    model = helpers_models.save_transformers(tmp_path, family)
    checkpoint = open_checkpoint(tmp_path)
    theirs = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del theirs["lm_head.weight"]
    state = checkpoint.state_dict()
    assert_same(state, expected_state(theirs))
    config = checkpoint.config
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == parameter_shapes(config)
    assert config.architecture == model.config.model_type
    assert config.head_dim == model.config.head_dim if hasattr(model.config, "head_dim") else 16
    assert config.tie_word_embeddings == model.config.tie_word_embeddings
    assert config.rope_theta == model.config.rope_parameters["rope_theta"]
    windows = {"mistral": [8, 8], "qwen2": [None, 8]}.get(family, [None, None])
    assert [config.window(i) for i in range(2)] == windows
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == {
        "llama": (True, True, True, False), "qwen2": (True, False, False, False), "qwen3": (False, False, False, True),
    }.get(family, (False, False, False, False))  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_written_by_hand(tmp_path, family):
    tensors = hf_tensors(family)
    save_folder(tmp_path, hf_config(family), tensors)
    assert_same(open_checkpoint(tmp_path).state_dict(), expected_state(tensors))


def test_dtype(tmp_path):
    tensors = hf_tensors("smollm2")
    save_folder(tmp_path, hf_config("smollm2"), {name: tensor.bfloat16() for name, tensor in tensors.items()})
    state = open_checkpoint(tmp_path).state_dict(torch.float16)
    assert_same(state, expected_state({name: tensor.bfloat16().half() for name, tensor in tensors.items()}))


def test_sharded(tmp_path):
    model = helpers_models.save_transformers(tmp_path, "mistral", max_shard_size="200KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert_same(open_checkpoint(tmp_path).state_dict(), expected_state(model.state_dict()))
    shards[1].unlink()
    with pytest.raises(ModelError, match=f"lacks {shards[1].name}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": "../a.safetensors"}}', "{}"])
def test_broken_index(tmp_path, index):
    save_folder(tmp_path, hf_config("llama"), hf_tensors("llama"))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"index.json"):
        open_checkpoint(tmp_path)


def test_pickles_and_empty_folders(tmp_path):
    with pytest.raises(ModelError, match=r"Cannot read .*config.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config("llama")))
    with pytest.raises(ModelError, match=r"neither model.safetensors nor"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ModelError, match=r"pickle"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelError, match=r"neither a folder nor"):
        open_checkpoint(tmp_path / "pytorch_model.bin")


# --- the strict report ----------------------------------------------------------------------------------------------


def changed(tmp_path, change, family="llama", **changes):
    tensors = hf_tensors(family, **changes)
    change(tensors)
    return save_folder(tmp_path, hf_config(family, **changes), tensors)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.bias",
                                  "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])  # fmt: skip
def test_missing_tensor_is_named(tmp_path, name):
    changed(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"missing tensors: {name}"):
        open_checkpoint(tmp_path).state_dict()


def test_unexpected_tensor_is_named_but_known_buffers_are_not(tmp_path):
    changed(tmp_path / "a", lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}))
    with pytest.raises(ModelError, match=r"unexpected tensors: model.layers.2.mlp.up_proj.weight"):
        open_checkpoint(tmp_path / "a").state_dict()
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    changed(tmp_path / "b", lambda t: t.update(buffer))
    open_checkpoint(tmp_path / "b").state_dict()
    changed(tmp_path / "c", lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
    with pytest.raises(ModelError, match=r"unexpected tensors: model.layers.0.self_attn.q_norm.weight"):
        open_checkpoint(tmp_path / "c").state_dict()


def test_wrong_shape_is_named_with_both_shapes(tmp_path):
    name = "model.layers.0.self_attn.o_proj.weight"  # [96, 192] because head_dim is 32
    changed(tmp_path, lambda t: t.update({name: t[name].T}))
    with pytest.raises(ModelError, match=rf"wrong shapes: {name} is \(192, 96\) instead of \(96, 192\)"):
        open_checkpoint(tmp_path).state_dict()


def test_long_reports_are_shortened(tmp_path):
    changed(tmp_path, lambda t: [t.pop(name) for name in list(t) if "layers" in name])
    with pytest.raises(ModelError, match=r"and [0-9]+ more") as error:
        open_checkpoint(tmp_path).state_dict()
    assert len(str(error.value)) < 900


def test_integer_weights_are_refused(tmp_path):
    changed(tmp_path, lambda t: t.update({"model.norm.weight": torch.ones(96, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"model.norm.weight has type I8"):
        open_checkpoint(tmp_path)


def test_tied_and_untied_heads(tmp_path):
    """Case 6: four files."""
    expected = expected_state(hf_tensors("smollm2"))
    embed = expected["embed.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed(tmp_path / "absent", lambda t: None, "smollm2")
        assert_same(open_checkpoint(tmp_path / "absent").state_dict(), expected)
        changed(tmp_path / "equal", lambda t: t.update({"lm_head.weight": embed.clone()}), "smollm2")
        assert_same(open_checkpoint(tmp_path / "equal").state_dict(), expected)
    changed(tmp_path / "different", lambda t: t.update({"lm_head.weight": embed + 1}), "smollm2")
    with pytest.warns(UserWarning, match=r"lm_head.weight to model.embed_tokens.weight, but the two differ"):
        assert_same(open_checkpoint(tmp_path / "different").state_dict(), expected)
    changed(tmp_path / "untied", lambda t: t.pop("lm_head.weight", None), "smollm2", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"missing tensors: lm_head.weight"):
        open_checkpoint(tmp_path / "untied").state_dict()


# --- safetensors headers that lie -----------------------------------------------------------------------------------


def write_safetensors(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
LIES = {
    "empty file": b"",
    "length beyond the file": struct.pack("<Q", 2**40) + b"{}",
    "largest length": struct.pack("<Q", 2**64 - 1) + b"{}",
    "offset beyond the file": ({"a": {**ENTRY, "data_offsets": [0, 2**40], "shape": [2**38]}}, bytes(8)),
    "data missing": ({"a": ENTRY}, bytes(4)),
    "data left over": ({"a": ENTRY}, bytes(12)),
    "overlap": ({"a": ENTRY, "b": ENTRY}, bytes(8)),
    "hole": ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [12, 20]}}, bytes(20)),
    "negative": ({"a": {**ENTRY, "data_offsets": [-8, 0]}}, bytes(8)),
    "shape is not the size": ({"a": {**ENTRY, "shape": [3]}}, bytes(8)),
    "shape overflows": ({"a": {**ENTRY, "shape": [2**33, 2**33]}}, bytes(8)),
    "unknown dtype": ({"a": {**ENTRY, "dtype": "PICKLE"}}, bytes(8)),
    "not JSON": (b"{", b""),
    "not UTF-8": (b'{"\xff": 1}', b""),
    "a list": (b"[]", b""),
    "deep JSON": (b'{"a":' * 20000, b""),
}


@pytest.mark.parametrize("lie", LIES)
def test_lying_safetensors_are_refused(tmp_path, lie):
    save_folder(tmp_path, hf_config("llama"), {"a": torch.ones(1)})
    path = tmp_path / "model.safetensors"
    content = LIES[lie]
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        write_safetensors(path, *content)
    with pytest.raises(ModelError, match=r"model.safetensors is not a sound safetensors file"):
        open_checkpoint(tmp_path)


def test_fuzzed_safetensors_headers(tmp_path):
    """300 mutated headers: each is refused with ModelError, or gives tensors of the right names and shapes."""
    changes = {"num_hidden_layers": 1, "vocab_size": 13}
    save_folder(tmp_path, hf_config("smollm2", **changes), hf_tensors("smollm2", **changes))
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + struct.unpack_from("<Q", whole)[0]
    shapes = parameter_shapes(open_checkpoint(tmp_path).config)
    rng = random.Random(2)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        at = rng.randrange(header) if rng.random() < 0.8 else rng.randrange(8)
        match rng.randrange(3):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at : at + 1] = rng.choice([b"9", b"99999999999999", b"-", b"]", b""])
            case 2:
                data = data[: rng.randrange(len(data))]
        path.write_bytes(data)
        tracemalloc.start()
        try:
            state = open_checkpoint(tmp_path).state_dict()
        except ModelError as error:
            refused += 1
            assert str(tmp_path) in str(error)
        else:
            assert {name: tuple(tensor.shape) for name, tensor in state.items()} == shapes
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 2_000_000
    assert refused > 200


# --- GGUF -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_equals_safetensors(tmp_path, family):
    tensors = hf_tensors(family)
    save_folder(tmp_path / "hf", hf_config(family), tensors)
    save_gguf(tmp_path / "model.gguf", family, tensors)
    ours, theirs = open_checkpoint(tmp_path / "model.gguf"), open_checkpoint(tmp_path / "hf")
    assert_same(ours.state_dict(), theirs.state_dict())
    same_but = {"rms_norm_eps": ours.config.rms_norm_eps, "bos_token_id": None, "eos_token_ids": ()}
    if family in ("mistral", "qwen2"):  # the file says llama; llama.cpp's converter stores no window for either
        same_but.update(architecture=ours.config.architecture, sliding_window=None, sliding_layers=None)
    assert ours.config == replace(theirs.config, **same_but)
    assert ours.config.rms_norm_eps == pytest.approx(theirs.config.rms_norm_eps)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0,
                                  gguf.GGMLQuantizationType.Q4_1], ids=lambda kind: kind.name)  # fmt: skip
def test_quantised_gguf_is_close(tmp_path, kind):
    tensors = hf_tensors("llama")
    save_gguf(tmp_path / "q.gguf", "llama", tensors, kind)
    state, exact = open_checkpoint(tmp_path / "q.gguf").state_dict(), expected_state(tensors)
    assert sorted(state) == sorted(exact)
    for name, tensor in exact.items():
        error = (state[name] - tensor).abs().max() / tensor.abs().max()
        assert error < {"F16": 1e-3, "Q8_0": 0.01, "Q4_1": 0.1}[kind.name], name


def test_q_and_k_rows_are_put_back(tmp_path):
    """Case 62: one q head of 8 rows holds 0..7; the GGUF file has them as 0 4 1 5 2 6 3 7. Two KV heads likewise."""
    rows = torch.arange(8.0)
    stored = helpers_models.permute(rows, 1)
    assert stored.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert unpermute(stored, 1).tolist() == rows.tolist()
    assert unpermute(torch.tensor([0.0, 2, 1, 3, 4, 6, 5, 7]), 2).tolist() == rows.tolist()
    weight = torch.randn(12, 5)
    assert torch.equal(unpermute(helpers_models.permute(weight, 3), 3), weight)
    changes = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    for family, moved in (("llama", True), ("qwen2", False)):
        tensors = hf_tensors(family, **changes)
        path = save_gguf(tmp_path / f"{family}.gguf", family, tensors, **changes)
        checkpoint = open_checkpoint(path)
        raw = torch.cat([checkpoint.source.tensor(f"blk.0.attn_{x}.weight") for x in "qkv"])
        right = expected_state(tensors, 1)["layers.0.qkv.weight"]
        assert torch.equal(raw, right) is not moved
        assert torch.equal(checkpoint.state_dict()["layers.0.qkv.weight"], right)


def test_gguf_report_uses_the_files_names(tmp_path):
    tensors = hf_tensors("smollm2")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(ModelError, match=r"missing tensors: blk.1.ffn_down.weight"):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", "smollm2", tensors)).state_dict()


def gguf_config(tmp_path, metadata, family="smollm2", **kwargs):
    path = save_gguf(tmp_path / "c.gguf", family, hf_tensors(family), metadata=metadata, **kwargs)
    return open_checkpoint(path).config


def test_gguf_metadata(tmp_path):
    config = gguf_config(tmp_path, {
        "llama.attention.key_length": None, "llama.attention.value_length": None, "llama.rope.dimension_count": None,
        "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0, "llama.attention.sliding_window": 32,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7,
        "llama.vocab_size": 999,  # the embedding's own shape wins
    })  # fmt: skip
    assert (config.head_dim, config.vocab_size, config.sliding_window) == (16, 101, 32)
    assert config.rope_scaling == RopeScaling("linear", 4.0)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 7))
    assert config.tie_word_embeddings and config.rope_freq_divisors is None


def test_gguf_rope_freqs(tmp_path):
    """llama.cpp's converter stores llama3 scaling as one divisor per rotary pair."""
    config = gguf_config(tmp_path, None, rope_freqs=torch.tensor([1.0, 1, 1, 2, 4, 8, 8, 8]))
    assert config.rope_freq_divisors == (1, 1, 1, 2, 4, 8, 8, 8)
    with pytest.raises(ModelError, match=r"rope_freq_divisors must have 8 entries, got 3"):
        gguf_config(tmp_path, None, rope_freqs=torch.ones(3))


def test_gguf_divisors_equal_llama3_scaling():
    """The model turns the divisors into the same frequencies as the scaling that they stand for."""
    model = pytest.importorskip("minillm.model")
    plain = helpers_models.tiny_config(rope_theta=500000.0, head_dim=32)
    scaled = replace(plain, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192))
    frequencies = model.rope_frequencies(scaled)
    divisors = tuple((model.rope_frequencies(plain) / frequencies).tolist())
    assert max(divisors) == pytest.approx(8) and min(divisors) == pytest.approx(1)
    torch.testing.assert_close(model.rope_frequencies(replace(plain, rope_freq_divisors=divisors)), frequencies)


@pytest.mark.parametrize("metadata, message", [
    ({"llama.block_count": None}, "lacks llama.block_count"),
    ({"llama.embedding_length": None}, "lacks llama.embedding_length"),
    ({"llama.attention.head_count": [6, 6]}, "one number"),
    ({"llama.attention.head_count_kv": [2, 2]}, "num_kv_heads must be a whole number"),
    ({"llama.attention.head_count_kv": 4}, "6 heads cannot be shared out over 4"),
    ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8"),
    ({"llama.attention.value_length": 8}, "value_length is 8"),
    ({"llama.rope.scaling.type": "yarn"}, "yarn"),
    ({"llama.rope.scaling.type": "linear"}, "lacks llama.rope.scaling.factor"),
    ({"llama.expert_count": 8}, "mixture-of-experts"),
    ({"llama.block_count": 2**31}, "claims 2147483648 layers"),
    ({"llama.block_count": 0}, "num_layers"),
    ({"llama.context_length": "long"}, "max_position_embeddings"),
    ({"llama.rope.freq_base": float("nan")}, "rope_theta"),
])  # fmt: skip
def test_gguf_config_that_cannot_be_used(tmp_path, metadata, message):
    with pytest.raises(ModelError, match=message):
        gguf_config(tmp_path, metadata)


def test_gguf_of_another_architecture_is_named(tmp_path):
    path = tmp_path / "g.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_tensor("t", torch.ones(1).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"'gemma3' is not supported; supported are llama, qwen2, qwen3"):
        open_checkpoint(path)


# --- config.json ----------------------------------------------------------------------------------------------------

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("rope, theta, scaling", [
    ({}, 10000.0, None),
    ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
    ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, 5e5, RopeScaling("linear", 2.0)),
    ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 5e5, RopeScaling("llama3", **LLAMA3)),
    ({"rope_scaling": {"type": "default", "rope_type": "default"}}, 10000.0, None),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, **LLAMA3}}, 1e6, RopeScaling("llama3", **LLAMA3)),
])  # fmt: skip
def test_rope_in_both_spellings(rope, theta, scaling):
    config = ModelConfig.from_hf({**hf_config("smollm2"), "rope_theta": 10000.0, **rope})
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize("change, message", [
    ({"model_type": "gemma3"}, "'gemma3' is not supported; supported are llama, mistral, qwen2, qwen3"),
    ({"model_type": None}, "None is not supported"),
    ({"hidden_size": None}, "lacks hidden_size"),
    ({"vocab_size": None, "rms_norm_eps": None}, "lacks vocab_size, rms_norm_eps"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "'yarn'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "'dynamic'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 4}}, "low_freq_factor, high_freq_factor, original"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "number above 0 for factor"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"hidden_act": "gelu"}, "'gelu'"),
    ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ({"num_attention_heads": 7}, "96 cannot be shared out over 7"),
    ({"num_attention_heads": 0}, "shared out over 0"),
    ({"num_key_value_heads": 4}, "6 heads cannot be shared out over 4"),
    ({"head_dim": 15}, "even"),
    ({"num_hidden_layers": -1}, "num_layers must be"),
    ({"num_hidden_layers": 10**12}, "claims 1000000000000 layers"),
    ({"vocab_size": "many"}, "vocab_size"),
    ({"vocab_size": True}, "vocab_size"),
    ({"rope_theta": -1.0}, "rope_theta"),
    ({"intermediate_size": 1.5}, "intermediate_size"),
    ({"eos_token_id": "2"}, "eos_token_id must be a whole number or a list of them, got '2'"),
    ({"eos_token_id": [2, [3]]}, r"eos_token_id .* got \[3\]"),
    ({"eos_token_id": True}, "eos_token_id .* got True"),
])  # fmt: skip
def test_config_that_cannot_be_used(change, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf({**hf_config("smollm2"), **change})


def test_end_tokens_of_both_files(tmp_path):
    save_folder(tmp_path, {**hf_config("smollm2"), "eos_token_id": 2, "bos_token_id": 1}, hf_tensors("smollm2"))
    assert open_checkpoint(tmp_path).config.eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2, 9]}))
    config = open_checkpoint(tmp_path).config
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 5, 9))


def test_head_dim_defaults():
    """Case 1: the head size is not always hidden_size / heads, and Qwen3's default is 128."""
    assert ModelConfig.from_hf({**hf_config("mistral"), "head_dim": None}).head_dim == 16
    config = hf_config("qwen3")
    assert ModelConfig.from_hf(config).head_dim == 24
    del config["head_dim"]
    assert ModelConfig.from_hf(config).head_dim == 128


@pytest.mark.parametrize("change, windows", [
    ({"use_sliding_window": False}, [None, None]),
    ({"max_window_layers": 0}, [8, 8]),
    ({"max_window_layers": 5}, [None, None]),
    ({"layer_types": ["sliding_attention", "full_attention"]}, [8, None]),
    ({"sliding_window": None}, [None, None]),
])  # fmt: skip
def test_qwen2_windows(change, windows):
    config = ModelConfig.from_hf({**hf_config("qwen2"), **change})
    assert [config.window(layer) for layer in range(2)] == windows


def test_bad_layer_types():
    with pytest.raises(ModelError, match=r"'linear_attention'"):
        ModelConfig.from_hf({**hf_config("qwen2"), "layer_types": ["linear_attention", "full_attention"]})
    with pytest.raises(ModelError, match=r"sliding_layers must have 2 entries"):
        ModelConfig.from_hf({**hf_config("qwen2"), "layer_types": ["full_attention"]})


def test_tokenizer_comes_from_the_same_place(tmp_path, monkeypatch):
    text = pytest.importorskip("minillm.text")
    monkeypatch.setattr(text.Tokenizer, "from_gguf", lambda metadata: ("gguf", metadata["general.architecture"]))
    monkeypatch.setattr(text.Tokenizer, "from_folder", lambda path: ("folder", path))
    tensors = hf_tensors("qwen3")
    save_folder(tmp_path, hf_config("qwen3"), tensors)
    assert open_checkpoint(tmp_path).tokenizer() == ("folder", tmp_path)
    assert open_checkpoint(save_gguf(tmp_path / "m.gguf", "qwen3", tensors)).tokenizer() == ("gguf", "qwen3")


# --- random weights -------------------------------------------------------------------------------------------------


def test_random_state_dict():
    config = helpers_models.tiny_config(qkv_bias=True, qk_norm=True)
    state = random_state_dict(config, seed=3)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == parameter_shapes(config)
    assert_same(random_state_dict(config, seed=3), state)
    assert not torch.equal(random_state_dict(config, seed=4)["embed.weight"], state["embed.weight"])
    half = random_state_dict(config, seed=3, dtype=torch.bfloat16)
    assert_same(half, {name: tensor.bfloat16() for name, tensor in state.items()})
    for name, tensor in state.items():
        if name.endswith("norm.weight"):
            assert (tensor != 1).all() and (tensor - 1).abs().max() < 0.6
        elif name.endswith("bias"):
            assert (tensor != 0).all()
    hidden = torch.nn.functional.normalize(torch.randn(20, 96)) * 96**0.5  # what the last norm puts out
    assert 0.5 < (hidden @ state["head.weight"].T).std() < 2
