"""Continuous batching against static batching on workload b of cpu.py, at equal seats and at equal KV memory.

    python benchmarks/batching.py --json benchmarks/results/batching.json
    python benchmarks/report.py

About 20 minutes on two cores. A run takes one to two minutes, and a shared machine changes its speed within that time,
so runs one after the other cannot be compared to a tenth. Here each step is given to the engine that had least time
until now: all get the same minutes of the machine. An engine that is done begins again. They use the same model in
memory; the result counts whole runs only.

A static batch needs memory for its longest prompt and output in each of its 8 seats. That memory is what all three get:
static batching with 8 seats, continuous batching with 8, and continuous batching with as many as fit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import cpu
import peers
import torch

from minillm import LLM, SamplingParams, kv, roofline

SEATS, MANY = 8, 32


@dataclass
class Engine:
    """One way to batch: its whole runs in seconds, and what its steps were like."""

    scheduling: str
    seats: int
    runs: list[float] = field(default_factory=list)
    decode_steps: int = 0  # of one run
    decode_ms: float = 0.0  # mean of a decode step
    prefill_seconds: float = 0.0  # of one run: steps with prompts in them
    padding_tokens: int = 0  # of one run: dead tokens computed


class Turns:
    """An engine that serves the requests again and again, one step at a time."""

    def __init__(
        self, model: peers.Minillm, requests: list[tuple[list[int], int]], scheduling: str, seats: int
    ) -> None:
        longest = max(len(prompt) for prompt, _ in requests) + max(count for _, count in requests)
        self.requests, self.row, self.spent = requests, Engine(scheduling, seats), 0.0
        self.llm = LLM.from_parts(
            model.config, model.model, None, num_kv_blocks=SEATS * kv.blocks_needed(longest, 16), max_num_seqs=seats,
            scheduling=scheduling,
            enable_prefix_caching=False,
        )  # fmt: skip
        self.tokens: list[list[int]] = []
        self.begin()

    def begin(self) -> None:
        self.llm.timeline, self.start = [], self.spent
        for i, (prompt, count) in enumerate(self.requests):
            self.llm.add_request(prompt, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True), f"{i}")

    def step(self) -> None:
        start = time.perf_counter()
        self.llm.step()
        self.spent += time.perf_counter() - start
        if all(self.llm.is_done(name) for name in self.llm.requests):
            self.book()
            self.begin()

    def book(self) -> None:
        row, steps = self.row, self.llm.timeline or []
        decodes = [s for s in steps if all(end - first == 1 for *_, first, end in s.work)]
        row.runs.append(self.spent - self.start)
        row.decode_steps = len(decodes)
        row.decode_ms = statistics.mean(s.end - s.start for s in decodes) * 1e3
        row.prefill_seconds = sum(s.end - s.start for s in steps) - sum(s.end - s.start for s in decodes)
        row.padding_tokens = sum(s.padding for s in steps)
        self.tokens = [self.llm.requests[f"{i}"][0].output for i in range(len(self.requests))]
        for name in list(self.llm.requests):
            self.llm.abort(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="whole runs of each")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script; the numbers mean nothing")
    parser.add_argument("--json", metavar="FILE", help="store the result")
    args = parser.parse_args()
    started = time.perf_counter()
    requests = cpu.workloads(24 if args.tiny else 512, args.tiny)["b"].requests
    model = peers.Minillm(torch.get_num_threads())
    static = Turns(model, requests, "static", SEATS)
    others = [Turns(model, requests, "continuous", seats) for seats in (SEATS, MANY)]
    while any(len(one.row.runs) < args.runs for one in (static, *others)):
        min((static, *others), key=lambda one: one.spent).step()
    ratios = {}
    for one in others:
        ratios[f"{one.row.seats} seats"] = statistics.median(static.row.runs) / statistics.median(one.row.runs)
    for row in (static.row, *(one.row for one in others)):
        print(row, file=sys.stderr)
    same = all(one.tokens == static.tokens for one in others)
    print(f"continuous batching to static, tokens/s: {ratios}; the same tokens: {same}")
    result = {
        "command": " ".join(["python benchmarks/batching.py", *sys.argv[1:]]),
        "commit": cpu.commit(),
        "versions": {**model.versions, "torch": torch.__version__},
        "machine": asdict(roofline.measure_machine()),
        "seconds": time.perf_counter() - started,
        "output_tokens": sum(count for _, count in requests),
        "ratios": ratios,  # to static
        "same_tokens": same,
        "rows": [asdict(row) for row in (static.row, *(one.row for one in others))],
    }
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
