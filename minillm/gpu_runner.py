"""The runner for a GPU: the whole step, sampling included, without waiting; steps of usual sizes as CUDA graphs.

A graph replays the same kernels on the same addresses, always for as many tokens, sequences, tiles and rows as it
was captured with (its `Shape`). There are graphs for some shapes, with their input in persistent buffers. What a step
has less of is padded: tokens that write to the cache's spare block, sequences without queries, tiles of nothing. Any
other step runs the same code without a graph. All graphs share one memory pool, the largest captured first.

The CPU fills a pinned buffer, starts one copy and one replay, and goes on. What a step has sampled stays on the device
too, where the next step can begin with it (`sources`) before the CPU has seen it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import fused, gpu_sampler, kernels, kv, runner, sampler
from .config import EngineConfig
from .model import Transformer
from .request import Request, Status
from .scheduler import Plan

LARGEST = 2048  # tokens of the largest graph: in longer steps the GPU takes longer than the launches
NOTHING = kernels.NO_TILE

# The input of a step: name, dtype and the value that makes a padding entry harmless, one array for each.
TOKENS = (
    ("tokens", np.int64, 0),
    ("sources", np.int64, -1),
    ("positions", np.int64, 0),
    ("slots", np.int64, 0),  # but padding goes to the spare block
)
SEQUENCES = (
    ("starts", np.int32, 0),
    ("counts", np.int32, 0),
    ("lengths", np.int32, 0),
    ("seats", np.int32, 0),
    ("tile_sequences", np.int32, 0),  # the longest first, so that no long one is left to the end
    ("tile_firsts", np.int32, NOTHING),  # 0 where the sequence is a tile by itself
)
TILES = (("long_sequences", np.int32, 0), ("long_firsts", np.int32, NOTHING))
ROWS = (
    ("rows", np.int64, 0),
    ("seeds", np.int64, 0),
    ("draws", np.int64, 0),
    ("top_ks", np.int32, 0),
    ("temperatures", np.float32, 0.0),
    ("top_ps", np.float32, 1.0),
    ("min_ps", np.float32, 0.0),
)
GROUPS = (TOKENS, SEQUENCES, TILES, ROWS)
HARMLESS = {name: empty for group in GROUPS for name, _, empty in group}
SAMPLING = ("seeds", "top_ks", "temperatures", "top_ps", "min_ps")  # what a request keeps from step to step


class Shape(NamedTuple):
    """Tokens, sequences, tiles of long sequences, and rows that get a token, of one step.

    A step in which each sequence brings one token and gets one has three equal numbers and no tiles (`decode`).
    """

    tokens: int
    sequences: int
    tiles: int
    rows: int

    @property
    def decode(self) -> bool:
        return self.tiles == 0 and self.tokens == self.sequences == self.rows

    def holds(self, other: Shape) -> bool:
        """Whether a step of this shape can compute that one, the rest being padding."""
        enough = self.tokens >= other.tokens and self.sequences >= other.sequences
        return enough and self.tiles >= other.tiles and self.rows >= other.rows and self.decode == other.decode


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


def pad_rows(fields: dict[str, np.ndarray], count: int, padded: int, spare_slot: int) -> None:
    """Make the entries from `count` to `padded` of a graph's input harmless, in place.

    fields: the arrays of one of the GROUPS, by name. A graph computes all its rows, whatever is in them. A padding row
    writes its key and value to `spare_slot`, which belongs to no request; reads a context of 0 tokens; and takes no
    token from the step before (source -1).
    """
    # exercise 14.5
    for name, array in fields.items():
        array[count:padded] = spare_slot if name == "slots" else HARMLESS[name]
    # end exercise 14.5


class Inputs:
    """One array for each name in GROUPS, on the device, and pinned twins of all on the host that travel in one copy."""

    def __init__(self, most: Shape, device: torch.device) -> None:
        self.most, pin = most, device.type == "cuda"
        spans, end = [], 0
        for group, size in zip(GROUPS, most, strict=True):
            for name, kind, _ in group:
                width = np.dtype(kind).itemsize * size
                spans.append((name, kind, end, end + width))
                end += -(-width // 8) * 8  # int64 begins at multiples of 8
        self.device = torch.empty(end, dtype=torch.uint8, device=device)
        # two, in turns: the copy out of one may not have begun when the next step is prepared
        self.host = [torch.empty(end, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        self.turn = 0
        kinds = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}
        self.on_device = {name: self.device[a:b].view(kinds[kind]) for name, kind, a, b in spans}
        self.on_host = [{name: h[a:b].numpy().view(kind) for name, kind, a, b in spans} for h in self.host]

    def send(self, values: dict[str, np.ndarray | int], count: Shape, padded: Shape, spare_slot: int) -> None:
        """Write what there is, pad it up to `padded`, and start the copy."""
        self.turn ^= 1
        host = self.on_host[self.turn]
        for group, size, full in zip(GROUPS, count, padded, strict=True):
            for name, _, _ in group if size else ():
                host[name][:size] = values[name]
            if size < full:
                pad_rows({name: host[name] for name, _, _ in group}, size, full, spare_slot)
        self.device.copy_(self.host[self.turn], non_blocking=True)


class Tables:
    """What is kept for each running request on a row (a seat) of its own: its block table and how it is sampled.

    data: the tables on the device, changed in place where they changed; pages: the same on the host.
    """

    def __init__(self, num_seats: int, num_pages: int, num_ids: int, device: torch.device) -> None:
        self.data = torch.zeros(num_seats, num_pages, dtype=torch.int32, device=device)
        self.pages = np.zeros((num_seats, num_pages), np.int64)
        self.sampling = {name: np.zeros(num_seats, kind) for name, kind, _ in ROWS if name in SAMPLING}
        self.row = np.zeros(num_seats, np.int64)  # in which row of the last step it was sampled
        self.num_ids = num_ids
        self.seats: dict[Request, int] = {}
        self.known: list[list[int]] = [[] for _ in range(num_seats)]
        self.free = list(range(num_seats - 1, -1, -1))

    def update(self, requests: Sequence[Request]) -> np.ndarray:
        """Their seats [N]; what is new in their tables is on its way to the device."""
        for request in [r for r in self.seats if r.status is not Status.RUNNING]:
            self.free.append(self.seats.pop(request))
        places: list[int] = []
        numbers: list[int] = []
        seats, changed = [], []
        for request in requests:
            if request not in self.seats:
                self._sit(request)
            seat, table = self.seats[request], request.block_table
            seats.append(seat)
            known, base = self.known[seat], seat * self.data.shape[1]
            if known != table:
                new = [i for i, number in enumerate(table) if i >= len(known) or known[i] != number]
                places += [base + i for i in new]
                numbers += [table[i] for i in new]
                changed.append((seat, list(table)))
        if places:
            self.pages.reshape(-1)[places] = numbers
            pairs = upload(np.array([places, numbers]), self.data.device)
            self.data.view(-1).index_copy_(0, pairs[0], pairs[1].int())
        for seat, table in changed:  # only now: an error before this must not leave an old table behind
            self.known[seat] = table
        return np.array(seats, np.int32)

    def _sit(self, request: Request) -> None:
        seat, params = self.free.pop(), request.params
        self.seats[request] = seat
        values = (request.seed, min(params.top_k, self.num_ids), params.temperature, params.top_p, params.min_p)
        for name, value in zip(SAMPLING, values, strict=True):
            self.sampling[name][seat] = value


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device, without waiting for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


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

    @torch.inference_mode()
    def _capture(self, shapes: Sequence[Shape]) -> None:
        pool = None
        for shape in sorted(shapes, key=lambda shape: -shape.tokens):
            inputs = self.inputs[shape.decode]
            inputs.send({}, Shape(0, 0, 0, 0), shape, self.spare_slot)
            self._compute(shape, inputs)  # compiles what is not compiled yet
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden = self._compute(shape, inputs)
            pool = pool or graph.pool()
            self.graphs[shape] = Graph(graph, hidden)
        self.graphs = dict(sorted(self.graphs.items(), key=lambda item: item[0].tokens))  # the first that holds is best

    # ---- any plan

    @torch.inference_mode()
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

    @torch.inference_mode()
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

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return fused.logits(self.model, hidden)

    @torch.inference_mode()
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
