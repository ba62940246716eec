"""Write the README's measured tables from benchmarks/results/*.json. --check: say whether they are current."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def demo_table(report: dict) -> str:
    """The demo's rows as a Markdown table, with what they were measured on."""
    machine, versions = report["machine"], report["versions"]
    lines = [
        "| what | tokens/s | against the line above | TTFT, s | TPOT, ms | KV cache, MB | share of bandwidth |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        numbers = (f"{row['tokens_per_second']:.1f}", row["faster"], f"{row['ttft']:.2f}", f"{row['tpot'] * 1e3:.0f}",
                   f"{row['kv_bytes'] / 1e6:.1f}", f"{row['share_of_bandwidth']:.0%}")  # fmt: skip
        lines.append(f"| {row['name']} | " + " | ".join(numbers) + " |")
    lines.append("")
    ceilings = f"{machine['bandwidth'] / 1e9:.0f} GB/s and {machine['flops'] / 1e9:.0f} GFLOP/s"
    same = "yes" if report["equal"] else "NO"
    lines.append(
        f"{report['model']} in {report['dtype']} on a {machine['name']}, measured {ceilings}; "
        f"torch {versions['torch']}, Python {versions['python']}. Every line gave the same tokens: {same}. "
        "Made by `minillm demo`, stored in `benchmarks/results/demo_cpu.json`."
    )
    return "\n".join(lines)


def render(text: str) -> str:
    """The README with the generated parts replaced."""
    report = json.loads((ROOT / "benchmarks/results/demo_cpu.json").read_text())
    pattern = r"(<!-- demo -->\n).*?(<!-- /demo -->)"
    return re.sub(pattern, lambda m: m[1] + demo_table(report) + "\n" + m[2], text, flags=re.S)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    before = readme.read_text()
    after = render(before)
    if "--check" in sys.argv:
        sys.exit("README.md does not match benchmarks/results: run benchmarks/report.py" if after != before else 0)
    readme.write_text(after)
