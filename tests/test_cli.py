"""The command line: what it prints, and that every mistake of a user is one sentence and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from helpers_models import hf_tensors, save_gguf

from minillm.cli import main
from minillm.vocabulary import byte_alphabet

TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}{% endfor %}<|start|>"
TOKENS = [*byte_alphabet(), "he", "<|start|>", "<|end|>"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random model with a tokenizer of bytes, as a GGUF file."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 2) + [3, 3],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.eos_token_id": len(TOKENS) - 1,
        "tokenizer.chat_template": TEMPLATE,
    }
    changes = {"vocab_size": len(TOKENS), "max_position_embeddings": 2048}
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    save_gguf(path, "smollm2", hf_tensors("smollm2", **changes), metadata=metadata, **changes)
    return str(path)


def run(*arguments: str, input: str | bytes | None = None) -> Result:
    result = CliRunner().invoke(main, list(arguments), input=input)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_generate_json_has_text_tokens_and_metrics(tiny: str) -> None:
    arguments = ("--model", tiny, "--max-tokens", "5", "--temperature", "0", "--json")
    report = json.loads(run("generate", "hello", *arguments).stdout)
    [output] = report["outputs"]
    assert len(output["token_ids"]) == 5 and output["finish_reason"] == "length" and isinstance(output["text"], str)
    assert len(report["prompt_token_ids"]) == 4  # he l l o
    assert 0 < report["metrics"]["ttft"] <= report["metrics"]["e2e"] and report["metrics"]["tpot"] > 0
    assert json.loads(run("generate", "-", *arguments, input="hello").stdout)["outputs"] == report["outputs"]


def test_input_that_is_not_utf8_is_read_with_replacements(tiny: str) -> None:
    arguments = ("--model", tiny, "--max-tokens", "2", "--json")
    report = json.loads(run("generate", "-", *arguments, input=b"caf\xe9 \xf0\x9f\n").stdout)
    assert report["prompt"] == "caf\ufffd \ufffd\n"
    assert run("chat", "--model", tiny, "--max-tokens", "2", input=b"caf\xe9\n\n").exit_code == 0


def test_generate_streams_text_and_prints_one_line_of_numbers(tiny: str) -> None:
    arguments = ("generate", "hello", "--model", tiny, "--max-tokens", "9", "--temperature", "0")
    result, text = run(*arguments), json.loads(run(*arguments, "--json").stdout)["outputs"][0]["text"]
    assert result.stdout == text + "\n"
    assert "9 tokens: the first after" in result.stderr and result.stderr.count("\n") == 1


def test_options_reach_the_engine(tiny: str) -> None:
    drawn = ["--model", tiny, "--max-tokens", "6", "--seed", "3", "--temperature", "30"]
    drawn += ["--top-k", "20", "--top-p", "0.9", "--min-p", "0.01"]
    report = json.loads(run("generate", "hi", *drawn, "-n", "3", "--logprobs", "2", "--json").stdout)
    assert [one["index"] for one in report["outputs"]] == [0, 1, 2]
    assert len({tuple(one["token_ids"]) for one in report["outputs"]}) > 1
    assert all(len(one["logprobs"]) == 6 for one in report["outputs"])
    assert run("generate", "hi", *drawn, "-n", "2").stdout.startswith("[0] ")
    chat = json.loads(run("generate", "hi", *drawn, "--chat", "--json").stdout)
    start = TOKENS.index("<|start|>")
    assert chat["prompt_token_ids"][0] == start == chat["prompt_token_ids"][-1]
    text = json.loads(run("generate", "hi", *drawn, "--json").stdout)["outputs"][0]["text"]
    stopped = json.loads(run("generate", "hi", *drawn, "--stop", "nowhere", "--stop", text[2], "--json").stdout)
    assert stopped["outputs"][0]["text"] == text[: text.index(text[2])]


def test_chat_answers_each_line_until_an_empty_one(tiny: str) -> None:
    result = run("chat", "--model", tiny, "--max-tokens", "3", "--system", "Be kind.", input="hello\nagain\n\nnever\n")
    assert result.exit_code == 0 and result.stderr.count("the first after") == 2
    assert run("chat", "--model", tiny, input="").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x", "--model", "smollm3"], ["smollm3", "smollm2-135m"]),
        (["fetch", "smollm3"], ["smollm3", "smollm2-135m"]),
        (["inspect", "/no/such.gguf"], ["/no/such.gguf"]),
        (["generate", "x", "--temperature", "-1"], ["temperature", "-1"]),
        (["generate", "x", "--temperature", "warm"], ["--temperature", "warm"]),
        (["generate", "x", "--max-tokens", "-3"], ["max_tokens", "-3"]),
        (["generate", "x", "--top-p", "0"], ["top_p"]),
        (["generate", "x", "--stop", ""], ["stop"]),
        (["generate", "", "--model", "TINY"], ["prompt is empty"]),
        (["generate", "x" * 3000, "--model", "TINY"], ["3000", "2047"]),
        (["generate", "x", "--model", "TINY", "--device", "abacus"], ["abacus"]),
        (["generate", "x", "--model", "TINY", "--dtype", "int3"], ["int3", "bfloat16"]),
        (["generate"], ["PROMPT"]),
        (["demo", "--out", "/no/such/folder/x.png"], ["/no/such/folder"]),
        (["nonsense"], ["nonsense"]),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(tiny: str, arguments: list[str], words: list[str]) -> None:
    result = run(*(tiny if one == "TINY" else one for one in arguments))
    assert result.exit_code == 2 and not result.stdout
    assert all(word in result.stderr for word in words), result.stderr
    assert "Traceback" not in result.stderr


def test_inspect(tiny: str) -> None:
    report = json.loads(run("inspect", tiny, "--json", "--tensors").stdout)
    assert report["parameters"] == sum(_product(t["shape"]) for t in report["tensors"])
    assert report["kv_bytes_per_token_16_bit"] == 2 * 2 * 2 * 16 * 2
    assert report["tensor_types"] == {"F32": len(report["tensors"])}
    shown = run("inspect", tiny, "--tensors").stdout
    assert "num_kv_heads" in shown and "blk.1.attn_q.weight" in shown and "96 x 96" in shown


def _product(values: list[int]) -> int:
    return values[0] * (_product(values[1:]) if values[1:] else 1)


def test_help_lists_the_engine_and_the_course() -> None:
    shown = run("--help").stdout
    names = ("demo", "generate", "chat", "fetch", "inspect", "doctor", "check", "hint", "progress", "reset", "build")
    for name in names:
        assert f"\n  {name} " in shown


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import minillm, minillm.cli", ["transformers", "torch", "numpy", "tokenizers", "tqdm"]),
        ("from minillm.cli import main; main(['--help'], standalone_mode=False)", ["transformers", "torch", "numpy"]),
        ("import minillm.llm, minillm.course.demo; minillm.LLM", ["transformers", "matplotlib", "accelerate"]),
    ],
)
def test_what_is_not_imported(code: str, absent: list[str]) -> None:
    code = f"import sys; {code}; print('found', [name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("found []\n")


def test_the_command_itself_exits_with_2_and_no_traceback() -> None:
    code = "from minillm.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "inspect", "nope"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("minillm: No model 'nope'") and done.stderr.count("\n") == 1


def test_doctor_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "empty"))
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    found = {one["name"]: one for one in report["findings"]}
    assert result.exit_code == 0 and report["engine_runs"]
    assert found["smollm2-135m"]["status"] == "missing" and "minillm fetch" in found["smollm2-135m"]["todo"]
    assert all(one["todo"] for one in report["findings"] if one["status"] != "ok")
    assert "GB/s" in found["CPU speed"]["detail"] and "needed once" in found["network"]["detail"]
    assert not (tmp_path / "empty").exists()


def test_doctor_names_an_altered_model_and_a_broken_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm import hub, roofline

    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    monkeypatch.setattr(roofline, "measure_machine", lambda: roofline.Machine("test", 1e10, 1e11))
    path = tmp_path / "smollm2-135m" / hub.KNOWN["smollm2-135m"].filename
    path.parent.mkdir()
    path.write_bytes(b"GGUF")
    shown = run("doctor").stdout
    assert "MISSING smollm2-135m" in shown and "expected SHA-256" in shown and "The engine runs here." in shown

    monkeypatch.setattr("minillm.doctor._engine", lambda: 1 / 0)
    result = run("doctor")
    assert result.exit_code == 1 and "BROKEN" in result.stdout and "ZeroDivisionError" in result.stdout
