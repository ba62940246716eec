"""Makes the toy stage 90 a part of the course, for the tests of the course's framework."""

from pathlib import Path

import pytest

from minillm.course import exercise, stages

FOLDER = Path(__file__).parent / "toy_stage"


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """The course with stage 90 in it, and a progress file of its own. Kernels that are started see it too."""
    monkeypatch.setattr(stages, "__path__", [*stages.__path__, str(FOLDER)])
    monkeypatch.setenv("MINILLM_STAGES", str(FOLDER))
    monkeypatch.setenv("MINILLM_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.delenv("MINILLM_STRICT", raising=False)
    exercise.all_stages.cache_clear()
    yield exercise.get_stage("90")
    exercise.all_stages.cache_clear()
