"""The demo on a tiny random model: every row's tokens equal the plain path's, and the report and figure are whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from test_cli import run, tiny  # noqa: F401, a fixture
from tiny import greedy_reference, tiny_model

from minillm.course import demo

PROMPTS = [[5, 9, 3], [7, 2, 8, 1, 6], [4] * 11]
SHARED = [[*range(1, 41), end] for end in (50, 60, 70)]


def test_all_rows_equal_the_plain_path() -> None:
    model = tiny_model()
    rows = demo.measure(model, PROMPTS, SHARED, max_tokens=6, shared_tokens=4, repeats=3)
    assert [row.equal for row in rows] == [True] * 5
    for row in rows[:3]:
        assert row.tokens == [greedy_reference(model, prompt, 6) for prompt in PROMPTS]
    for row in rows[3:]:
        assert row.tokens == [greedy_reference(model, prompt, 4) for prompt in SHARED[1:]]
    recompute, alone, together, cold, warm = rows
    assert recompute.kv_bytes == 0 < alone.kv_bytes < together.kv_bytes
    assert warm.kv_bytes < cold.kv_bytes
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 2 * 32)  # whole blocks of 16
    for row in rows:
        assert [len(times) for times in row.token_times] == [len(tokens) for tokens in row.tokens]
        assert 0 < row.ttft <= row.seconds and row.tpot > 0 and row.bytes_read > 0
    lines = demo.table(rows, bandwidth=1e10).splitlines()
    assert len(lines) == 7 and all(len(line) < 100 for line in lines)


def test_the_plain_check_refuses_other_tokens() -> None:
    model = tiny_model()
    answer = greedy_reference(model, SHARED[0], 4)
    assert demo.is_greedy(model, SHARED[0], answer)
    for place in range(4):
        changed = [*answer[:place], (answer[place] + 1) % 96, *answer[place + 1 :]]
        assert not demo.is_greedy(model, SHARED[0], changed)


def test_command_writes_report_and_figure(tiny: str, tmp_path: Path) -> None:  # noqa: F811
    figure, file = tmp_path / "demo.png", tmp_path / "demo.json"
    result = run("demo", "--model", tiny, "--out", str(figure), "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "Every line gave the same tokens." in result.stdout and "What do bees make?" in result.stdout
    after_answers = result.stdout[result.stdout.index(" in float32 on ") :].splitlines()[1:]
    assert all(len(line) <= 100 or line.startswith("Figure:") for line in after_answers)
    assert figure.read_bytes().startswith(b"\x89PNG")
    report = json.loads(file.read_text())
    assert {"command", "commit", "versions", "threads", "machine", "model", "equal", "rows", "texts"} <= set(report)
    assert report["machine"]["bandwidth"] > 0 and len(report["rows"]) == 5 and report["equal"]
    assert all(row["gb_per_second"] > 0 and row["share_of_bandwidth"] > 0 for row in report["rows"])


def test_different_tokens_and_a_missing_matplotlib(
    tiny: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "is_greedy", lambda *arguments: False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("demo", "--model", tiny, "--out", str(tmp_path / "demo.png"))
    assert result.exit_code == 1 and "DIFFER" in result.stdout
    assert "pip install matplotlib" in result.stdout and not (tmp_path / "demo.png").exists()
