"""Draw benchmarks/results/cpu.json (benchmarks/cpu.py --png does it too): python benchmarks/plot.py [JSON] [PNG]"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BLUE, ORANGE, GREEN, GREY = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#8a8a8a",
)  # after Okabe and Ito: for colour-blind readers too
COLOURS = {"minillm": BLUE, "transformers": ORANGE, "llama.cpp f32": GREEN, "llama.cpp Q4_1": GREEN}


def draw(report: dict[str, Any], path: str) -> None:
    """Save the figure: tokens/s on workloads a and b, and time to first token, cold and warm, on c."""
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    groups = [[row for row in report["rows"] if row["workload"] == key] for key in "abc"]
    figure = Figure(figsize=(11, 2.4 + 0.3 * sum(max(1, len(group)) for group in groups)), layout="constrained")
    figure.set_facecolor("white")
    heights = [max(1, len(group)) + 1.2 for group in groups]
    axes = figure.subplots(3, 1, height_ratios=heights)
    titles = (
        "One stream: tokens per second",
        "{requests} requests of mixed length at once: tokens per second",
        "{requests} requests with the same first {shared} tokens: seconds to the first token",
    )
    for axis, group, title, key in zip(axes, groups, titles, "abc", strict=True):
        work = report["workloads"][key]
        shared = max(0, work["prompt_tokens"][0] - 16)
        axis.set_title(title.format(requests=work["requests"], shared=shared), loc="left", fontsize=11, weight="bold")
        (_first_token if key == "c" else _speed)(axis, group)
    machine = report["machine"]
    figure.suptitle(f"{report['model']} on a {machine['name']}, greedy", fontsize=14)
    figure.savefig(path, dpi=150)


def _name(row: dict[str, Any]) -> str:
    return row["peer"].replace(" f32", " float32") + (f": {row['mode']}" if row["mode"] else "")


def _lanes(axis: Any, group: list[dict[str, Any]], longest: float) -> None:
    """One lane for each row, the first on top; the engine's name in its colour; what did not run says so."""
    axis.set(xlim=(0, 1.75 * (longest or 1)), ylim=(len(group) - 0.4, -0.6), xticks=[])
    axis.set_yticks(range(len(group)), [_name(row) for row in group])
    for label, row in zip(axis.get_yticklabels(), group, strict=True):
        label.set_color(COLOURS[row["peer"]])
    for lane, row in enumerate(group):
        if row["error"]:
            axis.text(0, lane, " did not run", va="center", color=GREY, style="italic")
    axis.tick_params(left=False)
    axis.spines[["top", "right", "bottom"]].set_visible(False)


def _speed(axis: Any, group: list[dict[str, Any]]) -> None:
    _lanes(axis, group, max((row["tokens_per_second"] or 0 for row in group), default=0))
    for lane, row in enumerate(group):
        if not row["error"]:
            # 4-bit weights are less work, so these bars are hollow
            fill = (
                {"color": COLOURS[row["peer"]]} if row["weights"] == "float32" else {"color": "white", "hatch": "///"}
            )
            axis.barh(lane, row["tokens_per_second"], height=0.65, edgecolor=COLOURS[row["peer"]], **fill)
            share = "" if row["share_of_bandwidth"] is None else f"  ({row['share_of_bandwidth']:.0%} of bandwidth)"
            weights = "" if row["weights"] == "float32" else f", {row['weights']} weights"
            axis.text(row["tokens_per_second"], lane, f" {row['tokens_per_second']:.3g}{weights}{share}", va="center")


def _first_token(axis: Any, group: list[dict[str, Any]]) -> None:
    _lanes(axis, group, max((max(row["ttft_cold"] or 0, row["ttft_warm"] or 0) for row in group), default=0))
    for lane, row in enumerate(group):
        if not row["error"]:
            cold, warm, colour = row["ttft_cold"], row["ttft_warm"], COLOURS[row["peer"]]
            axis.plot([cold, warm], [lane, lane], color=colour, linewidth=2)
            axis.plot(cold, lane, "o", color=colour, markerfacecolor="white", markersize=9, markeredgewidth=2)
            axis.plot(warm, lane, "o", color=colour, markersize=9)
            text = f"   first {cold:.2f} s, others {warm:.2f} s  (all: {row['seconds']:.0f} s)"
            axis.text(max(cold, warm), lane, text, va="center")
    axis.set_xlabel("hollow: the first request; filled: median of the others", loc="left", fontsize=9)


if __name__ == "__main__":
    arguments = dict(enumerate(sys.argv))
    source = arguments.get(1, ROOT / "benchmarks/results/cpu.json")
    draw(json.loads(Path(source).read_text(encoding="utf-8")), str(arguments.get(2, ROOT / "docs/cpu_peers.png")))
