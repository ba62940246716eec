"""Stop strings and split characters on their way through the engine: streamed text equals the final text."""

from __future__ import annotations

import pytest
from tiny import TINY, Scripted, one_hot

from minillm.llm import LLM
from minillm.request import SamplingParams


class Pieces:
    """A tokenizer whose token i is pieces[i - 1]; 0 is the end token."""

    def __init__(self, *pieces: bytes | str) -> None:
        self.pieces = [p.encode() if isinstance(p, str) else p for p in pieces]
        self.vocab_size, self.eos_ids = TINY.vocab_size, ()

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token - 2] if 2 <= token < len(self.pieces) + 2 else b""

    def encode(self, text: str) -> list[int]:
        return [1]


def said(pieces: list[bytes | str], end: bool = False, **params: object) -> tuple[str, str | None, list[int]]:
    """Generate token 2, 3, 4 ...: the pieces in order. Checks stream == no stream on the way."""
    last = len(pieces) + 1
    llm = LLM.from_parts(TINY, Scripted(lambda token, _: one_hot(0 if token == last else token + 1)), Pieces(*pieces))
    made = SamplingParams(**{"max_tokens": len(pieces) + end, "temperature": 0, **params})
    whole = llm.generate("x", made)[0].outputs[0]
    deltas = list(llm.stream("x", made))
    assert "".join(d.text for d in deltas) == whole.text
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + [whole.finish_reason]
    assert not any("\ufffd" in d.text for d in deltas[:-1])
    return whole.text, whole.finish_reason, whole.token_ids


def test_stop_strings_over_token_borders() -> None:
    """vLLM issue 3574, SwiftLM issue 126, koboldcpp pull request 1031."""
    assert said(["A", "\nUser", ": hi"], stop=["\nUser:"]) == ("A", "stop", [2, 3, 4])
    assert said(["A", "\nUser", "!"], stop=["\nUser:"])[:2] == ("A\nUser!", "length")
    assert said(["A", "\nUs"], end=True, stop=["\nUser:"])[:2] == ("A\nUs", "stop")
    assert said(["a", "a", "a", "b"], stop=["aab"])[:2] == ("a", "stop")
    assert said(["one two three"], stop=["three", "two"])[:2] == ("one ", "stop")


def test_min_tokens_and_stop_strings() -> None:
    """A stop string before min_tokens is text; one after it stops."""
    assert said(["x", "STOP", "y", "STOP", "z"], stop=["STOP"], min_tokens=3)[:2] == ("xSTOPy", "stop")


def test_split_characters() -> None:
    """ferrox issue 124, exo pull request 1691, sglang issue 31598."""
    smile = "😀".encode()
    assert said([smile[:2], smile[2:]])[0] == "😀"
    assert said(["a", smile[:2]])[0] == "a\ufffd"  # cut by max_tokens: one replacement character
    assert said([smile[:1], smile[1:3], smile[3:], "é"])[0] == "😀é"
    assert said(["a", smile[:2]], end=True)[0] == "a\ufffd"
    assert said(["x", smile[:2], smile[2:], "y"], stop=["😀"])[:2] == ("x", "stop")


def test_end_token_first_gives_empty_text() -> None:
    llm = LLM.from_parts(TINY, Scripted(lambda *_: one_hot(0)), Pieces("a"))
    out = llm.generate("x", SamplingParams(max_tokens=5, temperature=0))[0].outputs[0]
    assert (out.text, out.token_ids, out.finish_reason) == ("", [0], "stop")


def test_streaming_several_completions() -> None:
    llm = LLM.from_parts(TINY, Scripted(lambda token, _: one_hot(token + 1)), Pieces("a", "b", "c"))
    texts = {0: "", 1: ""}
    for delta in llm.stream("x", SamplingParams(max_tokens=3, temperature=0, n=2)):
        texts[delta.index] += delta.text
    assert texts == {0: "abc", 1: "abc"}


@pytest.mark.parametrize("progress", [True, False])
def test_progress_bar_is_no_part_of_the_result(progress: bool, capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM.from_parts(TINY, Scripted(lambda token, _: one_hot(token + 1)), Pieces("a", "b"))
    outs = llm.generate(["x", "y"], SamplingParams(max_tokens=2, temperature=0), progress=progress)
    assert [o.outputs[0].text for o in outs] == ["ab", "ab"]
    printed = capsys.readouterr()
    assert printed.out == "" and ("prompt" in printed.err) == progress
