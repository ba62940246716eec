"""The runner for a GPU: the whole step, sampling included, without waiting; steps of usual sizes as CUDA graphs.

A graph replays the same kernels on the same addresses (gpu_inputs.py). There are graphs for some shapes; any other
step runs the same code without a graph. All graphs share one memory pool, the largest captured first.

The CPU fills a pinned buffer, starts one copy and one replay, and goes on. What a step has sampled stays on the device
too, where the next step can begin with it (`sources`) before the CPU has seen it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import fused, gpu_sampler, kernels, kv, runner, sampler
from .config import EngineConfig
from .gpu_inputs import GROUPS, NOTHING, Inputs, Shape, Tables
from .model import Transformer
from .request import Request
from .scheduler import Plan

LARGEST = 2048  # tokens of the largest graph: in longer steps the GPU takes longer than the launches


def buckets(most: int) -> list[int]:
    """Batch sizes of decode steps that get a graph of their own: 1, 2, 4, then every 8 up to 64, every 32 up to 512."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 513, 32)]
    return [*(size for size in sizes if size < most), min(most, 512)]


def graph_shapes(max_num_seqs: int, max_num_batched_tokens: int, queries_per_tile: int) -> list[Shape]:
    """The shapes that get a graph: those of decode steps, and of steps with prompts in them up to LARGEST tokens."""
    shapes = [Shape(size, size, 0, size) for size in buckets(max_num_seqs)]
    size = 16
    while size <= min(LARGEST, max_num_batched_tokens):
        many = min(max_num_seqs, size)
        tiles = size // queries_per_tile + min(16, many)  # every sequence may end with a tile that is not full
        shapes.append(Shape(size, many, tiles, many))
        size *= 2
    return shapes


def split_count(num_programs: int, wanted: int) -> int:
    """Parts to read each context in, a power of two up to 16: so many that `wanted` programs run, if it can."""
    parts = 1
    while parts < 16 and num_programs * parts < wanted:
        parts *= 2
    return parts


@dataclass
class Flight:
    """A step that was started. `tokens()` waits for it."""

    plan: Plan
    rows: list[Request]  # whose token each row is
    host: Tensor
    done: torch.cuda.Event | None

    def tokens(self) -> list[int]:
        """Sampled ids, one for each of `rows`; -1 where the logits were not finite."""
        if self.done is not None:
            self.done.synchronize()
        return self.host[: len(self.rows)].tolist()


@torch.inference_mode()
def activation_bytes(model: Transformer, engine: EngineConfig, max_model_len: int) -> int:
    """What the largest step takes beside weights and KV cache, measured: one prompt of as many tokens as fit."""
    device, size = model.embed.weight.device, engine.block_size
    count = min(engine.max_num_batched_tokens, max_model_len)
    blocks = kv.blocks_needed(count, size)
    cache = kv.KVCache(model.config, blocks, size, model.embed.weight.dtype, device)
    whole = torch.arange(count, device=device)
    table = torch.arange(blocks, dtype=torch.int32, device=device)[None]
    one = torch.ones(1, dtype=torch.int32, device=device)
    share = model.config.num_heads // model.config.num_kv_heads
    first = torch.arange(0, count, kernels.LONG_TILE // share, dtype=torch.int32, device=device)
    tiles = kernels.Tiles(
        one * 0, one * count, one * count, one * 0, table, one * 0, one * NOTHING, long=(first * 0, first)
    )  # fmt: skip
    rows = whole[: min(engine.max_num_seqs, count)]
    batch = fused.DeviceBatch(whole * 0, whole, whole, tiles, whole * 0 - 1, whole, rows)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    fused.logits(model, fused.forward(model, batch, cache))
    peak = torch.cuda.max_memory_allocated(device) - before
    del cache
    torch.cuda.empty_cache()
    return peak


def on_its_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """For methods of `GpuRunner`: without gradients, and with its GPU as the current one (kernels start there)."""

    @functools.wraps(method)
    def call(self: GpuRunner, *args: Any, **options: Any) -> Any:
        with torch.inference_mode(), torch.cuda.device(self.device if self.device.type == "cuda" else -1):
            return method(self, *args, **options)

    return call


@dataclass
class Graph:
    """A captured step."""

    graph: torch.cuda.CUDAGraph
    hidden: Tensor

    def replay(self) -> Tensor:
        """Start it. Returns its hidden states: the same memory each time."""
        self.graph.replay()
        return self.hidden


class GpuRunner(runner.Runner):
    """Runs plans on one GPU. In Triton's interpreter it runs on a CPU, without graphs; the tests do that."""

    samples = True

    def __init__(
        self,
        model: Transformer,
        cache: kv.KVCache,
        host: kv.KVCache,
        engine: EngineConfig,
        max_model_len: int,
        num_ids: int,
    ) -> None:
        super().__init__(model, cache, host, "sdpa")
        self.num_ids, self.most, config = num_ids, engine.max_num_seqs, model.config
        self.spare_slot = cache.num_blocks * cache.block_size
        self.tables = Tables(self.most, kv.blocks_needed(max_model_len, cache.block_size), num_ids, self.device)
        self.sampled = torch.zeros(self.most, dtype=torch.int64, device=self.device)
        on_gpu = self.device.type == "cuda"
        self.results = [torch.empty(self.most, dtype=torch.int64, pin_memory=on_gpu) for _ in range(2)]
        self.turn = 0
        share = config.num_heads // config.num_kv_heads
        # a sequence whose queries fit one tile of few rows is that tile; others are tiles of LONG_TILE rows. Half of
        # what the matrix unit takes (16 rows) needs fewer registers; less than that was measured not to be faster
        self.short_tile = max(8, kernels.triton.next_power_of_2(share))
        self.short, self.per_tile = self.short_tile // share, kernels.LONG_TILE // share
        self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count if on_gpu else 0
        shapes = graph_shapes(self.most, engine.max_num_batched_tokens, self.per_tile)
        # one for each kind of graph: a decode step need not copy as much as a step of many tokens
        kinds = {kind: [shape for shape in shapes if shape.decode == kind] for kind in (True, False)}
        self.inputs = {
            kind: Inputs(Shape(*map(max, zip(*members, strict=True))), self.device)
            for kind, members in kinds.items()
            if members
        }
        self.numbers = np.arange(self.most)
        self.graphs: dict[Shape, Graph] = {}
        if on_gpu and not engine.enforce_eager:
            self._capture(shapes)

    # ---- a step from its input buffers

    def _forward(self, shape: Shape, inputs: Inputs) -> Tensor:
        """Hidden states [R, hidden] of a step whose input is on the device."""
        sizes = zip(GROUPS, shape, strict=True)
        on = {name: inputs.on_device[name][:size] for group, size in sizes for name, _, _ in group}
        # a multiprocessor runs several programs of one query at once, of those with long tiles it runs one or two
        programs = shape.sequences if shape.decode else max(1, shape.tokens // self.per_tile)
        wanted = self.processors * (4 if shape.decode else 1)
        tiles = kernels.Tiles(
            on["starts"], on["counts"], on["lengths"], on["seats"], self.tables.data,
            on["tile_sequences"], on["tile_firsts"], self.short_tile,
            split_count(programs * self.model.config.num_kv_heads, wanted),
            (on["long_sequences"], on["long_firsts"]) if shape.tiles else None,
        )  # fmt: skip
        rows = None if shape.decode else on["rows"]
        batch = fused.DeviceBatch(
            on["tokens"], on["positions"], on["slots"], tiles, on["sources"], self.sampled, rows
        )  # fmt: skip
        return fused.forward(self.model, batch, self.cache)

    def _compute(self, shape: Shape, inputs: Inputs) -> Tensor:
        """A whole step, to `sampled`. Returns its hidden states too."""
        hidden, on = self._forward(shape, inputs), inputs.on_device
        columns = (on[name][: shape.rows] for name in ("seeds", "draws", "temperatures", "top_ks", "top_ps", "min_ps"))
        logits = fused.logits(self.model, hidden)
        gpu_sampler.sample(logits, gpu_sampler.Draws(*columns), self.num_ids, self.sampled[: shape.rows])
        return hidden

    @on_its_device
    def _capture(self, shapes: Sequence[Shape]) -> None:
        pool = None
        stream = torch.cuda.Stream(self.device)  # torch's own capture stream stays on the first GPU that ever used it
        for shape in sorted(shapes, key=lambda shape: -shape.tokens):
            inputs = self.inputs[shape.decode]
            inputs.send({}, Shape(0, 0, 0, 0), shape, self.spare_slot)
            self._compute(shape, inputs)  # compiles what is not compiled yet
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                hidden = self._compute(shape, inputs)
            pool = pool or graph.pool()
            self.graphs[shape] = Graph(graph, hidden)
        self.graphs = dict(sorted(self.graphs.items(), key=lambda item: item[0].tokens))  # the first that holds is best

    # ---- any plan

    @on_its_device
    def start(self, plan: Plan, after: runner.Flight | None = None) -> Flight:
        """Start a plan, sampling included. `after`: the flight whose tokens it begins with."""
        self._launch(plan, after is not None, self._compute)
        rows = [chunk.request for chunk in plan.chunks if chunk.num_logits]
        self.turn ^= 1
        host, done = self.results[self.turn], None
        host[: len(rows)].copy_(self.sampled[: len(rows)], non_blocking=True)
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return Flight(plan, rows, host, done)

    @on_its_device
    def run(self, plan: Plan) -> Tensor:
        """For requests that need more than a token; see `runner.Runner.run`. The next step overwrites the result."""
        return self._launch(plan, False, self._forward)

    def _launch(self, plan: Plan, in_flight: bool, compute: Callable[[Shape, Inputs], Tensor]) -> Tensor:
        """Start a step: by the first graph that holds it, else by `compute`. Returns the hidden states of its rows."""
        self.move(plan)
        values, count, wanted = self._values(plan, in_flight)
        for shape, graph in self.graphs.items():
            if shape.holds(wanted):
                self.inputs[shape.decode].send(values, count, shape, self.spare_slot)
                return graph.replay()[: count.rows]
        inputs = Inputs(wanted, self.device)
        inputs.send(values, count, wanted, self.spare_slot)
        return compute(wanted, inputs)

    @on_its_device
    def logits(self, hidden: Tensor) -> Tensor:
        return fused.logits(self.model, hidden)

    @on_its_device
    def sample(self, logits: Tensor, requests: Sequence[Request], num_ids: int) -> list[int]:
        logits, tokens = sampler.adjust(logits, requests, num_ids), self.sampled.new_empty(len(requests))
        gpu_sampler.sample(logits, gpu_sampler.Draws.of(requests, num_ids, self.device), num_ids, tokens)
        return tokens.tolist()

    def _values(self, plan: Plan, in_flight: bool) -> tuple[dict[str, np.ndarray | int], Shape, Shape]:
        """The input of a step, by name; its shape, without and with the dead tokens of a padded batch.

        in_flight: it begins with tokens that are on the device only.
        """
        size, chunks = self.cache.block_size, plan.chunks
        seats = self.tables.update([chunk.request for chunk in chunks])
        begins, ends = np.array([chunk.start for chunk in chunks]), np.array([chunk.end for chunk in chunks])
        counts, logits = ends - begins, np.array([chunk.num_logits for chunk in chunks])
        order = np.argsort(-ends, kind="stable")
        if len(chunks) == counts.sum() == logits.sum() and logits.all():
            # one token each: the same as below, in fewer operations, since a decode step leaves the CPU little time
            starts = whose = owners = rows = numbers = self.numbers[: len(chunks)]
            positions, firsts = begins, np.zeros_like(begins)
            long_sequences = long_firsts = numbers[:0]
        else:
            starts = np.cumsum(counts) - counts
            whose = np.repeat(np.arange(len(chunks)), counts)  # the sequence of each token
            positions = np.arange(len(whose)) - (starts - begins)[whose]
            owners = np.repeat(np.arange(len(chunks)), logits)  # the sequence of each row
            numbers = np.arange(len(owners))
            rows = numbers - (np.cumsum(logits) - (starts + counts))[owners]
            firsts, long = np.where(counts[order] > self.short, NOTHING, 0), np.flatnonzero(counts > self.short)
            tiles = -(-counts[long] // self.per_tile)
            long_sequences = np.repeat(long, tiles)
            long_firsts = (np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * self.per_tile
        flat = itertools.chain.from_iterable(chunk.request.tokens[chunk.start : chunk.end] for chunk in chunks)
        tokens = 0 if in_flight else np.fromiter(flat, np.int64, len(whose))
        sources = self.tables.row[seats] if in_flight else -1
        self.tables.row[seats[owners]] = numbers
        values: dict[str, np.ndarray | int] = {
            "tokens": tokens,
            "sources": sources,
            "positions": positions,
            "slots": self.tables.pages[seats[whose], positions // size] * size + positions % size,
            "starts": starts,
            "counts": counts,
            "lengths": ends,
            "seats": seats,
            "tile_sequences": order,
            "tile_firsts": firsts,
            "long_sequences": long_sequences,
            "long_firsts": long_firsts,
            "rows": rows,
            "draws": positions[rows] + 1,
        }
        for name, column in self.tables.sampling.items():
            values[name] = column[seats[owners]]
        count = Shape(len(whose), len(chunks), len(long_sequences), len(owners))
        return values, count, count._replace(tokens=count.tokens + plan.num_padding)
