"""minillm beside transformers and llama.cpp: one run, one CPU, SmolLM2-135M, the same token ids, greedy.

    python benchmarks/cpu.py --json benchmarks/results/cpu.json --png docs/cpu_peers.png
    python benchmarks/report.py

About 40 minutes on two cores, 25 with `--longest 256`; `--tiny` tries the script, `--only '^a/'` runs a part.
It needs `pip install -e '.[course,test]'` (transformers, accelerate, matplotlib). llama.cpp is optional: built from its
source, with a C++ compiler, in some minutes; here without AVX-512 and AMX, for any CPU with AVX2:

    export CMAKE_ARGS="-DLLAVA_BUILD=OFF -DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON"
    pip install llama-cpp-python

Three workloads. Prompts are pieces of the LICENSE file; the end token is ignored, so that all do the same work.
  a  one stream: one prompt, 64 new tokens
  b  mixed lengths: 32 requests at once, prompts of 16 to 256 tokens, outputs of 8 to 512, both log-uniform, so that few
     requests are long: in real traces lengths have such a tail (BurstGPT, arXiv:2401.17644, models them as Zipf).
     "Memory of 8 seats": blocks for 8 requests of the longest prompt and output, what 8 seats of a static batch reserve
  c  shared prefix: 32 requests, one after another, with the same 512 tokens and then 16 of their own; 16 new tokens

Each engine runs in a process of its own, with a limit for each run: a crash, a hang or a missing package becomes a row
that says so. Engines take turns, so that a slow minute of the machine hits all of them; the run with the median time is
kept. On b the rows that claims are made of run three times, the others once. The f32 weights of transformers and
llama.cpp are the model's 4-bit file, expanded, as minillm does on loading.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import peers
import plot
import psutil
import torch

from minillm import hub, metrics, roofline, weights

ROOT = Path(__file__).resolve().parent.parent
LOAD_LIMIT = 300.0  # seconds to load a model, and to convert it the first time


@dataclass
class Workload:
    title: str
    requests: list[tuple[list[int], int]]  # prompt, number of new tokens
    repeats: int
    limit: float  # seconds that one run may take
    in_turn: bool = False  # a request arrives when the one before it is done; else all arrive at the start


@dataclass
class Row:
    """One line of the result. ttft and tpot are medians over the requests, waiting in the queue included.

    On workload c, ttft_cold is the first request's and ttft_warm the median of the others.
    same_tokens: share of the requests that got the tokens of minillm's first row. relative: tokens/s against that row.
    """

    workload: str
    peer: str
    mode: str
    options: dict[str, Any]
    weights: str
    most: int | None = None  # only so many of the requests, where all would take too long; then there is no ttft
    repeats: int | None = None  # runs, if not as many as the workload says
    error: str | None = None
    runs: list[float] = field(default_factory=list)  # seconds of each run
    requests: int = 0
    output_tokens: int = 0
    seconds: float | None = None
    tokens_per_second: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    ttft_cold: float | None = None
    ttft_warm: float | None = None
    gb_per_second: float | None = None
    share_of_bandwidth: float | None = None
    same_tokens: float | None = None
    relative: float | None = None

    @property
    def name(self) -> str:
        return f"{self.workload}/{self.peer}" + (f", {self.mode}" if self.mode else "")


def rows() -> list[Row]:
    """Everything that is measured. The first row of minillm in a workload is what the others are compared with."""

    def row(
        workload: str, peer: str, mode: str, most: int | None = None, repeats: int | None = None, **options: Any
    ) -> Row:
        return Row(workload, peer, mode, options, "Q4_1" if "Q4_1" in peer else "float32", most, repeats)

    llamas = ("llama.cpp f32", "llama.cpp Q4_1")
    return [
        row("a", "minillm", "", seats=1),
        row("a", "transformers", "generate", seats=1),
        row("a", "transformers", "continuous batching", seats=1, continuous=True),
        *(row("a", peer, "", seats=1) for peer in llamas),
        row("b", "minillm", "continuous, 32 seats", repeats=3, seats=32, scheduling="continuous"),
        row("b", "minillm", "continuous, memory of 8 seats", seats=32, reserved=8, scheduling="continuous"),
        row("b", "minillm", "continuous, 8 seats", repeats=3, seats=8, scheduling="continuous"),
        row("b", "minillm", "dynamic, 8 seats", seats=8, scheduling="dynamic"),
        row("b", "minillm", "static, 8 seats", repeats=3, seats=8, scheduling="static"),
        row("b", "transformers", "generate, one by one (first 8 requests)", most=8, seats=1),
        row("b", "transformers", "generate, batches of 8", seats=8),
        row("b", "transformers", "generate, batch of 32", seats=32),
        row("b", "transformers", "continuous batching, 32 seats", repeats=3, seats=32, continuous=True),
        *(row("b", peer, "continuous, 32 slots", seats=32) for peer in llamas),
        row("c", "minillm", "prefix cache", seats=1),
        row("c", "minillm", "no prefix cache", seats=1, enable_prefix_caching=False),
        row("c", "transformers", "generate (no prefix cache)", seats=1),
        row("c", "transformers", "continuous batching, block sharing", seats=1, continuous=True),
        *(row("c", peer, "slot's prompt cache", seats=1) for peer in llamas),
    ]


def workloads(longest: int, tiny: bool) -> dict[str, Workload]:
    """The requests, always the same. longest: the most output tokens of b. tiny: a small version to try the script."""
    tokenizer = weights.open_checkpoint(hub.resolve(peers.MODEL)).tokenizer()
    text, rng = tokenizer.encode((ROOT / "LICENSE").read_text(encoding="utf-8")), random.Random(0)

    def between(low: int, high: int) -> int:  # log-uniform
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    count, prompt, prefix = (6, 32, 64) if tiny else (32, 256, 512)
    mixed = []
    for _ in range(count):
        length, start = between(16, prompt), rng.randrange(len(text) - prompt)
        mixed.append((text[start : start + length], between(8, longest)))
    own = [text[prefix + 16 * i : prefix + 16 * (i + 1)] for i in range(count)]
    return {
        "a": Workload("one stream", [(text[:128], 8 if tiny else 64)], 2 if tiny else 5, 60.0),
        "b": Workload("mixed lengths", mixed, 1, 600.0),
        "c": Workload("shared prefix", [(text[:prefix] + tail, 16) for tail in own], 1, 300.0, in_turn=True),
    }


class Worker:
    """One engine in a process of its own. `ask` raises RuntimeError, with the reason, if there is no answer.

    Between its runs the process is suspended, so that idle threads which spin take nothing from the others.
    """

    def __init__(self, peer: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=serve, args=(peer, threads, end), daemon=True)
        self.process.start()
        end.close()
        self.versions, self.failure = {}, ""
        try:
            self.versions = self.answer(LOAD_LIMIT, "loading it")
        except RuntimeError as error:
            self.failure = str(error)

    def ask(self, limit: float, **job: Any) -> Any:
        if self.failure:
            raise RuntimeError(self.failure)
        psutil.Process(self.process.pid).resume()
        self.pipe.send(job)
        return self.answer(limit, "one run")

    def answer(self, limit: float, what: str) -> Any:
        try:
            if not self.pipe.poll(limit):
                self.stop()
                raise RuntimeError(f"stopped: {what} took more than {limit:.0f} s")
            fine, value = self.pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"its process died with exit code {self.process.exitcode}") from None
        psutil.Process(self.process.pid).suspend()
        if not fine:
            raise RuntimeError(value)
        return value

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def serve(peer: str, threads: int, pipe: Any) -> None:
    """A worker's process: load the engine, warm it up, then run what is asked for."""
    torch.set_num_threads(threads)
    engine: Any = None

    def load() -> dict[str, str]:
        nonlocal engine
        engine = peers.PEERS[peer](threads)
        engine.run([(list(range(100, 116)), 4)], 1)
        return engine.versions

    def attempt(work: Callable[[], Any]) -> None:
        try:
            pipe.send((True, work()))
        except Exception as error:  # whatever a peer raises becomes a row
            name = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
            pipe.send((False, f"{name}{error}".partition("\n")[0]))

    attempt(load)
    while job := pipe.recv():
        attempt(lambda job=job: engine.run(**job))


def measure(workload: Workload, todo: list[Row], threads: int, versions: dict[str, str]) -> dict[str, list[Any]]:
    """The results of all runs, by row. The engines take turns; a row that fails gets its `error`."""
    workers: dict[str, Worker] = {}
    results: dict[str, list[Any]] = {row.name: [] for row in todo}
    try:
        times = {row.name: row.repeats or workload.repeats for row in todo}
        for turn in range(max(times.values())):
            for row in (row for row in todo if not row.error and turn < times[row.name]):
                print(f"  {row.name} ({turn + 1}/{times[row.name]}) ...", file=sys.stderr, flush=True)
                if row.peer not in workers:
                    workers[row.peer] = Worker(row.peer, threads)
                    versions |= workers[row.peer].versions
                worker = workers[row.peer]
                try:
                    requests = workload.requests[: row.most]
                    results[row.name].append(worker.ask(workload.limit, requests=requests, **row.options))
                except RuntimeError as error:
                    row.error = str(error)
                    if not worker.failure and not worker.process.is_alive():
                        del workers[row.peer]  # the next row of this engine gets a new one
    finally:
        for worker in workers.values():
            worker.stop()
    return results


def fill(row: Row, workload: Workload, results: list[Any], bandwidth: float) -> list[list[int]]:
    """Book a row from its runs: the one with the median time counts. Returns that run's tokens."""
    row.runs = [max(times[-1] for times in run[1]) for run in results]
    tokens, times, moved = sorted(results, key=lambda run: max(t[-1] for t in run[1]))[len(results) // 2]
    if [len(one) for one in tokens] != [count for _, count in workload.requests[: row.most]]:
        row.error = "it did not give each request all its tokens"
        return []
    ends = [one[-1] for one in times]
    arrivals = [0.0, *ends[:-1]] if workload.in_turn else [0.0] * len(ends)
    waits = [metrics.ttft(arrival, one) for arrival, one in zip(arrivals, times, strict=True)]
    row.requests, row.output_tokens, row.seconds = len(tokens), sum(map(len, tokens)), max(ends)
    row.tokens_per_second = metrics.throughput([len(one) for one in tokens], [(0.0, row.seconds)])
    row.tpot = statistics.median(metrics.tpot(one) for one in times)
    row.ttft = statistics.median(waits) if len(waits) == len(workload.requests) else None
    if workload.in_turn:
        row.ttft_cold, row.ttft_warm = waits[0], statistics.median(waits[1:])
    if moved is not None:
        row.gb_per_second = moved / row.seconds / 1e9
        row.share_of_bandwidth = moved / row.seconds / bandwidth
    return tokens


def describe(row: Row) -> str:
    """One line of text."""
    if row.error:
        return f"  {row.name:52} {row.error}"
    read = "" if row.gb_per_second is None else f"{row.gb_per_second:6.1f} GB/s ({row.share_of_bandwidth:.0%})"
    prefix = "" if row.ttft_cold is None else f"  TTFT cold {row.ttft_cold:.2f}, warm {row.ttft_warm:.2f} s"
    same = "" if row.same_tokens is None else f"  same tokens {row.same_tokens:.0%}"
    ttft = "" if row.ttft is None else f"TTFT {row.ttft:.2f} s"
    numbers = f"{row.tokens_per_second:8.1f} tok/s  {ttft:14} TPOT {row.tpot * 1e3:6.1f} ms"
    return f"  {row.name:52}{numbers} {read:20}{same}{prefix}"


def commit() -> str | None:
    """The commit of this checkout, with -dirty if files changed."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="only rows whose name matches, such as '^a/' or llama"
    )
    parser.add_argument("--json", metavar="FILE", help="store the result")
    parser.add_argument("--png", metavar="FILE", help="draw the result")
    parser.add_argument("--longest", type=int, default=512, help="most output tokens on b; 256 halves the time")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script; the numbers mean nothing")
    args = parser.parse_args()
    for path in (args.json, args.png):
        if path and not Path(path).absolute().parent.is_dir():
            parser.error(f"there is no folder to write {path} into")
    started, threads, versions = time.perf_counter(), torch.get_num_threads(), {"python": platform.python_version()}
    todo = [row for row in rows() if re.search(args.only, row.name)]
    loads = workloads(24 if args.tiny else args.longest, args.tiny)
    machine = roofline.measure_machine()
    ratios: dict[str, float] = {}
    for key, workload in loads.items():
        mine = [row for row in todo if row.workload == key]
        if not mine:
            continue
        print(f"{key}: {workload.title}", file=sys.stderr)
        results = measure(workload, mine, threads, versions)
        tokens = {
            row.name: [] if row.error else fill(row, workload, results[row.name], machine.bandwidth) for row in mine
        }
        ours = next((row for row in mine if row.peer == "minillm" and not row.error), None)
        for row in mine:
            if ours and not row.error:
                equal = [a == b for a, b in zip(tokens[ours.name], tokens[row.name], strict=False)]
                row.same_tokens = sum(equal) / len(equal)
                row.relative = row.tokens_per_second / ours.tokens_per_second
                ratios[f"tokens/s, {ours.name} / {row.name}"] = 1 / row.relative
            if row.ttft_warm:
                ratios[f"ttft, {row.name}, first / others"] = row.ttft_cold / row.ttft_warm
            print(describe(row), flush=True)
    report = {
        "command": " ".join(["python benchmarks/cpu.py", *sys.argv[1:]]),
        "commit": commit(),
        "versions": versions,
        "threads": threads,
        "machine": asdict(machine),
        "model": peers.MODEL,
        "seconds": time.perf_counter() - started,
        "workloads": {
            key: {
                "title": one.title,
                "requests": len(one.requests),
                "prompt_tokens": [len(prompt) for prompt, _ in one.requests],
                "output_tokens": [count for _, count in one.requests],
            }
            for key, one in loads.items()
        },
        "rows": [asdict(row) for row in todo],
        "ratios": ratios,
    }
    print(f"measured {machine.bandwidth / 1e9:.1f} GB/s, {machine.flops / 1e9:.0f} GFLOP/s; {report['seconds']:.0f} s")
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.png:
        plot.draw(report, args.png)


if __name__ == "__main__":
    main()
