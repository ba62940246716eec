"""The real model: the same GGUF in transformers and here gives the same greedy tokens."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tiny import full_logits

from minillm import hub, weights
from minillm.llm import LLM
from minillm.model import Transformer
from minillm.request import SamplingParams

PROMPTS = [
    "The capital of France is",
    "Write a short poem about the sea.",
    "def fibonacci(n):",
    "Once upon a time, there was a",
    "Water boils at",
    "Q: What is 12 times 12?\nA:",
    "The three primary colours are",
    "Dear Sir or Madam,\n\n",
    "Das Wetter ist heute",
    "import numpy as np\n\n",
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2-135m", num_kv_blocks=256)


@pytest.mark.timeout(600)
def test_greedy_tokens_equal_transformers(llm: LLM) -> None:
    import transformers

    path = hub.resolve("smollm2-135m")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    theirs.generation_config.eos_token_id = None  # all 64 tokens, whatever they are
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=64, temperature=0, ignore_eos=True))
    longest = max(len(o.prompt_token_ids) for o in outputs)
    padded = torch.tensor([[0] * (longest - len(o.prompt_token_ids)) + o.prompt_token_ids for o in outputs])
    mask = torch.tensor([[0] * (longest - len(o.prompt_token_ids)) + [1] * len(o.prompt_token_ids) for o in outputs])
    with torch.no_grad():
        whole = theirs.generate(padded, attention_mask=mask, max_new_tokens=64, do_sample=False, pad_token_id=0)
    for output, expected in zip(outputs, whole[:, longest:].tolist(), strict=True):
        assert output.outputs[0].token_ids == expected, output.prompt
    checkpoint = weights.open_checkpoint(path)
    plain = Transformer.from_state(checkpoint.config, checkpoint.state_dict(), pack=False)
    rows = [torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids]) for output in outputs]
    with torch.no_grad():
        expected = [theirs(row).logits[0] for row in rows]
        exact = [theirs.double()(row).logits[0] for row in rows]
    for row, logits in zip(rows, expected, strict=True):
        torch.testing.assert_close(full_logits(plain, row[0].tolist()), logits, atol=1e-4, rtol=1e-4)
    # packed products add in another order: a few times float32's own error against float64, no more
    errors = [(logits - truth).abs().max() for logits, truth in zip(expected, exact, strict=True)]
    packed = [full_logits(llm.model, row[0].tolist()) for row in rows]
    ours = [(logits - truth).abs().max() for logits, truth in zip(packed, exact, strict=True)]
    assert max(ours) <= 4 * max(errors), (max(ours), max(errors))


def test_chat_stream_and_stop_strings(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Name three colours."}]
    params = SamplingParams(max_tokens=24, temperature=0)
    whole = llm.chat(messages, params)[0].outputs[0].text
    prompt = llm.tokenizer.encode_chat(messages)
    deltas = list(llm.stream(prompt, params))
    assert "".join(d.text for d in deltas) == whole and deltas[-1].finish_reason is not None
    word = whole.split()[3]
    cut = llm.generate(prompt, SamplingParams(max_tokens=24, temperature=0, stop=[word]))[0].outputs[0]
    assert cut.text == whole[: whole.index(word)] and cut.finish_reason == "stop"


def test_one_bad_chat_of_several_gets_an_error(llm: LLM) -> None:
    good, params = [{"role": "user", "content": "Name three colours."}], SamplingParams(max_tokens=4, temperature=0)
    first, bad, last = llm.chat([good, [{"role": "user"}], good], params)
    assert "content must be a string" in bad.error and bad.outputs[0].finish_reason == "error"
    assert first.error is None and first.outputs[0].text == last.outputs[0].text != ""


def test_prefix_cache_saves_the_shared_part(llm: LLM) -> None:
    shared = "You are a helpful assistant. Answer in one short sentence. " * 8
    params = SamplingParams(max_tokens=8, temperature=0)
    llm.generate(shared + "What is the sun?", params)
    warm = llm.generate(shared + "What is the moon?", params)[0]
    assert warm.num_cached_tokens >= 80
    plain = LLM.from_parts(llm.config, llm.model, llm.tokenizer, num_kv_blocks=64, enable_prefix_caching=False)
    assert plain.generate(shared + "What is the moon?", params)[0].outputs[0].token_ids == warm.outputs[0].token_ids


def test_importing_the_engine_does_not_import_transformers() -> None:
    code = "import sys, minillm, minillm.llm, minillm.cli; minillm.LLM; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_tokens_and_errors_no_larger_than_torchs() -> None:
    """In float32 the CPU's tokens, with graphs and without; in bfloat16 log probabilities no worse than torch's."""
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    plain = LLM("smollm2-135m", num_kv_blocks=256, device="cpu")
    expected = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, params)]
    prompt = [token for output in plain.generate(PROMPTS, params) for token in output.outputs[0].token_ids]

    def gpu(**options: object) -> LLM:
        return LLM("smollm2-135m", num_kv_blocks=256, max_model_len=2048, device="cuda", **options)

    for eager in (False, True):
        fast = gpu(dtype="float32", enforce_eager=eager)
        assert bool(fast.runner.graphs) != eager
        assert [output.outputs[0].token_ids for output in fast.generate(PROMPTS, params)] == expected
        one = [fast.generate(text, params)[0].outputs[0].token_ids for text in PROMPTS[:3]]
        assert one == expected[:3]

    def scores(llm: LLM) -> torch.Tensor:
        found = llm.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0))[0].prompt_logprobs
        return torch.tensor([scores[token] for scores, token in zip(found[1:], prompt[1:], strict=True)])

    exact = scores(plain)
    torch.testing.assert_close(scores(gpu(dtype="float32")), exact, atol=2e-3, rtol=0)
    error = {"torch": (scores(gpu(attention="sdpa")) - exact).abs().mean().item()}
    for kind in ("auto", "int8", "fp8"):
        error[kind] = (scores(gpu(kv_cache_dtype=kind)) - exact).abs().mean().item()
    print("mean error of log probabilities:", error)
    assert error["auto"] <= 1.1 * error["torch"], error
    assert error["int8"] <= 2 * error["torch"] and error["fp8"] <= 4 * error["torch"], error
