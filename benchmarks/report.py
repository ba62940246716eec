"""Write the READMEs' measured tables from benchmarks/results/*.json. --check: say whether they are current."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = "docs/cpu_peers.png"  # of peers_table's rows


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


def peers_table(report: dict) -> str:
    """The comparison with other engines as a Markdown table, what was asked for, and what it was measured on."""
    machine = report["machine"]
    head = ("engine", "weights", "tokens/s", "against minillm", "TTFT, s", "TPOT, ms", "share of bandwidth",
            "same tokens")  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for key, work in report["workloads"].items():
        rows = [row for row in report["rows"] if row["workload"] == key]
        lines += [f"| **{_asked(work)}** " + "| " * (len(head) - 1) + "|"] if rows else []
        lines += ["| " + " | ".join(_peers_cells(row)) + " |" for row in rows]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines += [
        "",
        f"{report['model']} on a {machine['name']}, measured "
        f"{machine['bandwidth'] / 1e9:.0f} GB/s and {machine['flops'] / 1e9:.0f} GFLOP/s; {versions}. All got the same "
        "token ids, greedy. TTFT and TPOT are medians over the requests, waiting included. Same tokens: share of the "
        f"requests whose output equals minillm's. Made by `{report['command']}`, stored in "
        "`benchmarks/results/cpu.json`.",
    ]
    if (ROOT / PICTURE).exists():
        lines[:0] = [f"![The rows of this table as a picture]({PICTURE})", ""]
    return "\n".join(lines)


def batching_table(report: dict) -> str:
    """Static and continuous batching, measured in turns of a step."""
    head = ("batching", "whole runs, s", "tokens/s", "decode steps", "ms each", "steps with prompts, s",
            "dead tokens computed")  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in report["rows"]:
        speed = report["output_tokens"] / statistics.median(row["runs"])
        cells = (f"{row['scheduling']}, {row['seats']} seats", ", ".join(f"{run:.1f}" for run in row["runs"]),
                 f"{speed:.1f}", f"{row['decode_steps']:,}", f"{row['decode_ms']:.1f}", f"{row['prefill_seconds']:.1f}",
                 f"{row['padding_tokens']:,}")  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    same = "yes" if report["same_tokens"] else "NO"
    ratios = ", ".join(f"**{ratio:.2f}** with {seats}" for seats, ratio in report["ratios"].items())
    lines += [
        "",
        f"Continuous to static, tokens/s: {ratios} (medians of whole runs). The same tokens: {same}. "
        f"{report['machine']['name']}; {versions}; code {report['commit']}. Made by `{report['command']}`, stored in "
        "`benchmarks/results/batching.json`.",
    ]
    return "\n".join(lines)


def _asked(work: dict) -> str:
    """What a workload asks for, in words."""

    def span(counts: list[int]) -> str:
        low, high = min(counts), max(counts)
        return f"{low}" if low == high else f"{low} to {high}"

    count = f"{work['requests']} requests" if work["requests"] > 1 else "one request"
    return f"{work['title']}: {count}, {span(work['prompt_tokens'])} tokens in, {span(work['output_tokens'])} out"


def _peers_cells(row: dict) -> list[str]:
    name = row["peer"].removesuffix(" f32").removesuffix(" Q4_1") + (f": {row['mode']}" if row["mode"] else "")
    if row["error"]:
        return [name, row["weights"], f"did not run: {row['error'].replace('|', '/')}", *[""] * 5]

    def show(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    ttft = show(row["ttft"], "{:.2f}")
    if row["ttft_cold"] is not None:
        ttft = f"first {row['ttft_cold']:.2f}, others {row['ttft_warm']:.2f}"
    return [name, row["weights"], show(row["tokens_per_second"], "{:.1f}"), show(row["relative"], "{:.2f}x"), ttft,
            f"{row['tpot'] * 1e3:.0f}",
            show(row["share_of_bandwidth"], "{:.0%}"), show(row["same_tokens"], "{:.0%}")]  # fmt: skip


ASKED = {
    "a": "one stream: 128 tokens in, 256 out",
    "b": "256 requests at once, 100 to 1024 tokens in and out",
    "c": "Poisson arrivals, a tenth of the prompts with 8,000 to 12,000 tokens",
    "d": "16 requests in turn, 4,096 tokens shared",
}


def gpu_table(report: dict) -> str:
    """All rows of the GPU's result as a Markdown table."""
    head = ("model", "engine", "run", "tokens/s", "TTFT, ms", "TPOT, ms", "p99 between tokens, ms", "GB/s read",
            "of bandwidth", "kernels a step", "GPU, ms a step", "CPU, ms a step")  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for key, asked in ASKED.items():
        rows = [row for row in _by_workload(report) if row["workload"] == key]
        lines += [f"| **{asked}** " + "| " * (len(head) - 1) + "|"] if rows else []
        lines += ["| " + " | ".join(_gpu_cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n\n" + _gpu_note(report)


def gpu_summary(report: dict) -> str:
    """The rows that stand in the README: each model's best, and the peers."""
    lines = ["| workload | model | engine | tokens/s | of the measured bandwidth |", "|---|---|---|---|---|"]
    for row in _by_workload(report):
        shown = row["workload"] in "ab" and not row["mode"].startswith("no ") and not row["error"]
        if shown:
            share = f"{row['share_of_read']:.0%}" if row["share_of_read"] else ""
            name = row["engine"] + (f", {row['mode']}" if row["mode"] else "")
            cells = (ASKED[row["workload"]], row["model"], name, f"{row['tokens_per_second']:,.0f}", share)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n" + _gpu_note(report)


def _by_workload(report: dict) -> list[dict]:
    """The rows in the order of workload and size of the model, minillm first."""
    sizes = ("SmolLM2-135M", "Qwen3-0.6B", "Llama-3.2-1B", "Llama-3.1-8B")
    return sorted(
        report["rows"], key=lambda row: (row["workload"], sizes.index(row["model"]), row["engine"] != "minillm")
    )


def _gpu_cells(row: dict) -> list[str]:
    name = row["engine"] + (f": {row['mode']}" if row["mode"] else "")
    if row["error"]:
        return [row["model"], name, f"{row['run'] + 1}", f"did not run: {row['error'].replace('|', '/')}", *[""] * 8]

    def show(value: float | None, form: str, scale: float = 1.0) -> str:
        return "" if value is None else form.format(value * scale)

    ttft = show(row["ttft"], "{:.0f}", 1e3)
    if row["ttft_warm"] is not None:
        ttft = f"first {row['ttft_cold'] * 1e3:.0f}, others {row['ttft_warm'] * 1e3:.0f}"
    return [row["model"], name, f"{row['run'] + 1}", show(row["tokens_per_second"], "{:,.0f}"), ttft,
            show(row["tpot"], "{:.2f}", 1e3), show(row["itl_p99"], "{:.1f}", 1e3),
            show(row["gb_per_second"], "{:,.0f}"), show(row["share_of_read"], "{:.0%}"),
            show(row["kernels_per_step"], "{:.0f}"), show(row["gpu_ms_per_step"], "{:.2f}"),
            show(row["cpu_ms_per_step"], "{:.2f}")]  # fmt: skip


def _gpu_note(report: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    runs = "; ".join(
        f"run {i + 1}: {run['machine']['read'] / 1e12:.2f} TB/s (reading) and {run['machine']['flops'] / 1e12:.0f} "
        f"TFLOP/s (bf16) measured, code {run['commit']}, `{run['command']}`"
        for i, run in enumerate(report["runs"])
    )
    return (
        f"{report['gpu']}; {versions}. All in bfloat16; SmolLM2 with its real weights, the others shapes of real "
        "models with random weights; one engine at a time has the GPU. "
        f"Stored in `benchmarks/results/gpu.json`; {runs}."
    )


# marker in a README: the stored result, and what makes text of it
PARTS = {
    "demo": ("demo_cpu.json", demo_table),
    "peers": ("cpu.json", peers_table),
    "batching": ("batching.json", batching_table),
    "gpu": ("gpu.json", gpu_summary),
    "gpu rows": ("gpu.json", gpu_table),
}
PAGES = ("README.md", "benchmarks/README.md")


def render(text: str) -> str:
    """A page with its generated parts replaced. A part whose result is not there is empty."""
    for name, (file, make) in PARTS.items():
        path = ROOT / "benchmarks/results" / file
        part = make(json.loads(path.read_text(encoding="utf-8"))) + "\n" if path.exists() else ""
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text = re.sub(pattern, lambda m, part=part: m[1] + part + m[2], text, flags=re.S)
    return text


if __name__ == "__main__":
    for name in PAGES:
        page = ROOT / name
        before = page.read_text(encoding="utf-8")
        after = render(before)
        if "--check" in sys.argv and after != before:
            sys.exit(f"{name} does not match benchmarks/results: run benchmarks/report.py")
        page.write_text(after, encoding="utf-8")
