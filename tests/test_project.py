"""The project's own files agree with each other."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~;\[ ]", r)[0].lower().replace("_", "-") for r in requirements}


def test_constraints_pin_every_dependency_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[\w.\-]+==[\w.!+]+", line) for line in lines)
    wanted = names(PROJECT["dependencies"]).union(*map(names, PROJECT["optional-dependencies"].values()))
    assert wanted <= {line.split("==")[0].lower().replace("_", "-") for line in lines}
    assert "torch==2.13.0" in lines


def test_conda_environment_is_in_step() -> None:
    text = (ROOT / "environment.yml").read_text()
    assert f"- python{PROJECT['requires-python']}" in text and "--constraint constraints.txt" in text
    extras = re.search(r"--editable \.\[([\w,]+)\]", text)
    assert extras and set(extras[1].split(",")) == set(PROJECT["optional-dependencies"])


def test_generated_tables_match_the_measurements() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/report.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_links_in_the_documents_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_no_machine_is_named_in_tracked_files() -> None:
    pattern = r"/(work|root|farm|tmp)/[a-z.]"
    command = ["git", "-C", str(ROOT), "grep", "-nIE", pattern, "--", ".", ":!.ci/*", ":!tests/test_project.py"]
    found = subprocess.run(command, capture_output=True, text=True).stdout
    assert found == ""
