"""The exercise notebooks as a reader has them, in strict mode: each check cell fails until it is solved.

That they run clean unsolved, and that the solutions pass in both modes, is what `make test` runs over whole folders.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from minillm.course.exercise import all_stages

ROOT = Path(__file__).parent.parent


def test_unsolved_exercises_fail_in_strict_mode():
    exercises = [ex for stage in all_stages().values() for ex in stage.exercises()]
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "-q", "--color=no", "exercises"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "MINILLM_STRICT": "1"}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 1, done.stdout + done.stderr
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)  # IPython colours its tracebacks
    for ex in exercises:
        assert f"AssertionError: TODO {ex.id} not attempted yet" in text, text
    assert f"{len(exercises)} failed" in text, "no other cell fails"
