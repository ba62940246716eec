"""The demo's figure, drawn from its JSON report: when tokens arrive, what a prefix hit saves, and the bandwidth."""

from __future__ import annotations

from typing import Any

GREY, ORANGE, BLUE = "#7a7a7a", "#d55e00", "#0072b2"  # after Okabe and Ito: distinct for colour-blind readers too


def draw(report: dict[str, Any], path: str) -> None:
    """Save the figure as `path`. Raises ModuleNotFoundError without matplotlib, OSError if it cannot be written."""
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    rows = report["rows"]
    figure = Figure(figsize=(11, 6.2), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(2, 2, width_ratios=(2.3, 1), wspace=0.08)
    _timeline(figure.add_subplot(grid[:, 0]), rows[:3])
    _first_token(figure.add_subplot(grid[0, 1]), rows[3:])
    _bandwidth(figure.add_subplot(grid[1, 1]), rows, report["machine"]["bandwidth"] / 1e9)
    title = f"The same answers, sooner: {report['model']} on {report['machine']['name']}"
    figure.suptitle(title, fontsize=15, weight="bold")
    figure.savefig(path, dpi=150)


def _timeline(axes: Any, rows: list[dict[str, Any]]) -> None:
    end, lane = max(row["seconds"] for row in rows), 0.0
    for row, colour in zip(rows, (GREY, ORANGE, BLUE), strict=True):
        gain = f", {row['faster'].split()[0]} the line above" if row["faster"] else ""
        text = f"{row['name'].capitalize()}: {row['seconds']:.1f} s, {row['tokens_per_second']:.3g} tokens/s{gain}"
        axes.text(0, lane, text.replace("Kv", "KV").replace("kv", "KV"), color=colour, weight="bold", va="bottom")
        for times in row["token_times"]:
            lane += 1.0
            axes.plot(times, [lane] * len(times), "|", color=colour, markersize=9, markeredgewidth=1.1)
        lane += 2.4
    axes.set(xlim=(-0.01 * end, 1.02 * end), ylim=(lane - 1.4, -1.4), yticks=[])
    axes.set_xlabel("seconds after all requests arrived")
    axes.set_title("When each token arrives (a row for each request, a mark for each token)", loc="left", fontsize=11)
    axes.spines[["left", "top", "right"]].set_visible(False)


def _first_token(axes: Any, rows: list[dict[str, Any]]) -> None:
    values = [row["ttft"] for row in rows]
    axes.barh(["cold", "warm"], values, color=(GREY, BLUE), height=0.6)
    for place, (value, row) in enumerate(zip(values, rows, strict=True)):
        ratio = f" ({row['faster'].split()[0]} sooner)" if row["faster"] else ""
        axes.text(value, place, f" {value:.2f} s{ratio}", va="center")
    axes.set(xlim=(0, 1.45 * max(values)), ylim=(1.6, -0.6), xticks=[])
    axes.set_title("First token, shared prefix (median)", loc="left", fontsize=11)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(left=False)


def _bandwidth(axes: Any, rows: list[dict[str, Any]], ceiling: float) -> None:
    short = ("recompute", "KV cache", "batching", "cold prefix", "warm prefix")
    colours = (GREY, ORANGE, BLUE, GREY, BLUE)
    axes.barh(short, [row["gb_per_second"] for row in rows], color=colours, height=0.65)
    for place, row in enumerate(rows):
        label = f" {row['gb_per_second']:.1f} ({row['gb_per_second'] / ceiling:.0%})"
        axes.text(row["gb_per_second"], place, label, va="center", fontsize=9)
    axes.axvline(ceiling, color="black", linewidth=1.2)
    axes.text(ceiling, -0.75, f"measured limit {ceiling:.1f} ", ha="right", va="center", fontsize=9)
    axes.set(xlim=(0, 1.05 * max(ceiling, *(row["gb_per_second"] for row in rows))), ylim=(4.6, -1.2), xlabel="GB/s")
    axes.set_title("Memory read (weights and KV)", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(left=False)
