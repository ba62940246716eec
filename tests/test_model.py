"""The decoder against transformers, family by family, and the pieces of it by hand."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import full_logits

from minillm.config import ModelConfig, RopeScaling
from minillm.llm import LLM
from minillm.model import Linear, Transformer, rope_frequencies
from minillm.request import SamplingParams
from minillm.weights import open_checkpoint

COMMON = dict(
    vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3,
    bos_token_id=None, eos_token_id=2, pad_token_id=None,
)  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 20}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-mha": ("Llama", {"num_key_value_heads": 6}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 20}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """A transformers model with random weights, biases and norms, and the same in minillm, loaded from its folder."""
    import transformers

    kind, extra = FAMILIES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(COMMON | extra), attn_implementation="eager")
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if weight.ndim == 1:  # transformers starts norms at 1 and biases at 0: a bug there would not show
                weight.copy_(torch.rand_like(weight) + (0.5 if "norm" in name else -0.5))
    theirs.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    return theirs, Transformer.from_state(checkpoint.config, checkpoint.state_dict())


def test_logits_equal_transformers(family) -> None:
    theirs, ours = family
    tokens = torch.randint(0, 96, (1, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits[0]
    torch.testing.assert_close(full_logits(ours, tokens[0].tolist()), expected, atol=1e-4, rtol=1e-4)


def test_generates_what_transformers_generates(family) -> None:
    theirs, ours = family
    prompt = list(range(3, 20))
    with torch.no_grad():
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[
            0, len(prompt) :
        ].tolist()
    llm = LLM.from_parts(ours.config, ours, None, block_size=4, num_kv_blocks=16, max_num_batched_tokens=5)
    assert llm.generate(prompt, SamplingParams(max_tokens=24, temperature=0))[0].outputs[0].token_ids == expected


def test_llama3_rope_numbers() -> None:
    """cases.md 59: which pairs are kept, blended and slowed down; values worked out from the published formula."""
    base = dict(
        architecture="llama", vocab_size=8, hidden_size=64, intermediate_size=8, num_layers=1, num_heads=1,
        num_kv_heads=1, rope_theta=5e5,
    )  # fmt: skip
    small = ModelConfig(**base, head_dim=64, rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192))
    plain = rope_frequencies(ModelConfig(**base, head_dim=64))
    scaled = rope_frequencies(small)
    expected = {15: 1.290548e-3, 16: 4.295568e-4, 17: 9.708288e-5, 31: 9.418307e-8}
    for pair, value in expected.items():
        assert scaled[pair].item() == pytest.approx(value, rel=1e-5)
    assert torch.equal(scaled[:15], plain[:15])
    torch.testing.assert_close(scaled[18:], plain[18:] / 32)
    large = ModelConfig(**base, head_dim=128, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192))
    ratio = rope_frequencies(large) / rope_frequencies(ModelConfig(**base, head_dim=128))
    counts = [
        int((ratio > 0.9999).sum()),
        int(((ratio < 0.9999) & (ratio > 0.12501)).sum()),
        int((ratio < 0.12501).sum()),
    ]
    assert counts == [29, 6, 29]


def test_a_chunk_on_a_filled_cache_equals_one_pass(family) -> None:
    """cases.md 9: the mask of a second chunk is rectangular."""
    _, ours = family
    tokens = list(range(5, 21))
    llm = LLM.from_parts(ours.config, ours, None, block_size=4, num_kv_blocks=8, max_num_batched_tokens=7)
    scored = llm.generate(tokens, SamplingParams(max_tokens=0, prompt_logprobs=0))[0].prompt_logprobs
    whole = full_logits(ours, tokens).log_softmax(-1)
    for place in range(1, 16):
        assert scored[place][tokens[place]] == pytest.approx(whole[place - 1, tokens[place]].item(), abs=1e-5)


def test_unknown_rope_type_is_named(tmp_path) -> None:
    from minillm.errors import ModelError

    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, **config}))
    with pytest.raises(ModelError, match="yarn"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("inner, outer", [(5, 1), (64, 33), (576, 100)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_products(inner: int, outer: int, bias: bool) -> None:
    """`Linear.pack` changes digits only, and no row's digits depend on the other rows."""
    g = torch.Generator().manual_seed(0)
    linear = Linear(inner, outer, bias)
    linear.weight.data.normal_(generator=g)
    if linear.bias is not None:
        linear.bias.data.normal_(generator=g)
    x = torch.randn(2 * inner, 40, generator=g).t()[:, ::2]  # not contiguous
    want = linear(x)
    linear.pack()
    assert linear.packed is not None
    got = linear(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(linear(x[:rows]), got[:rows]) for rows in range(1, 40))
