"""The runner for a GPU: the whole step, sampling included, without waiting; decode steps as CUDA graphs.

A graph replays the same kernels on the same addresses. So there are graphs for some batch sizes (`buckets`), each with
its inputs in persistent buffers; a smaller batch is padded with rows that write to the cache's spare block and read no
context. All graphs share one memory pool, the largest captured first.

The CPU fills a pinned buffer, starts one copy and one replay, and goes on. What a step has sampled stays on the device
too, where the next step can begin with it (`sources`) before the CPU has seen it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import fused, kernels, kv, runner
from .config import EngineConfig
from .model import Transformer
from .request import Request, Status
from .scheduler import Plan

SHORT = 8  # sequences with at most so many queries are one tile of 16 rows for each KV head
PROMPT_TILE = 128  # rows of a tile of a longer one

# name, dtype, value of a padding row. What the host sends for each sequence of a decode step.
FIELDS = (
    ("tokens", np.int64, 0),
    ("sources", np.int64, -1),
    ("positions", np.int64, 0),
    ("slots", np.int64, 0),  # but padding goes to the spare block
    ("seeds", np.int64, 0),
    ("draws", np.int64, 0),
    ("lengths", np.int32, 0),
    ("seats", np.int32, 0),
    ("top_ks", np.int32, 0),
    ("temperatures", np.float32, 0.0),
    ("top_ps", np.float32, 1.0),
    ("min_ps", np.float32, 0.0),
)


def buckets(most: int) -> list[int]:
    """Batch sizes that get a graph of their own: 1, 2, 4, then every 8 up to 64, every 32 up to 512."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 513, 32)]
    return [*(size for size in sizes if size < most), min(most, 512)]


def split_count(num_programs: int, num_processors: int) -> int:
    """Parts to read each context in, a power of two up to 16: at least a program for each multiprocessor, if it can."""
    parts = 1
    while parts < 16 and num_programs * parts < num_processors:
        parts *= 2
    return parts


def pad_rows(fields: dict[str, np.ndarray], count: int, padded: int, spare_slot: int) -> None:
    """Make the rows from `count` to `padded` of a graph's input harmless, in place.

    A graph computes all its rows, whatever is in them. A padding row writes its key and value to `spare_slot`, which
    belongs to no request; reads a context of 0 tokens; and takes no token from the step before (source -1).
    """
    # exercise 14.5
    for name, _, empty in FIELDS:
        fields[name][count:padded] = spare_slot if name == "slots" else empty
    # end exercise 14.5


class Fields:
    """One array for each of FIELDS, on the device, and pinned twins of all on the host that travel in one copy."""

    def __init__(self, size: int, device: torch.device) -> None:
        widths = [np.dtype(kind).itemsize * size for _, kind, _ in FIELDS]
        ends = np.cumsum(widths)
        pin = device.type == "cuda"
        self.device = torch.empty(int(ends[-1]), dtype=torch.uint8, device=device)
        # two, in turns: the copy out of one may not have begun when the next step is prepared
        self.host = [torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        self.turn = 0
        spans = [
            (name, kind, end - width, end) for (name, kind, _), width, end in zip(FIELDS, widths, ends, strict=True)
        ]
        kinds = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}
        self.on_device = {name: self.device[a:b].view(kinds[kind]) for name, kind, a, b in spans}
        self.on_host = [{name: h[a:b].numpy().view(kind) for name, kind, a, b in spans} for h in self.host]

    def send(self, count: int, padded: int, values: dict[str, Sequence], spare_slot: int) -> None:
        """Write the first `count` rows, pad up to `padded`, and start the copy."""
        self.turn ^= 1
        for name, array in self.on_host[self.turn].items():
            array[:count] = values[name]
        pad_rows(self.on_host[self.turn], count, padded, spare_slot)
        self.device.copy_(self.host[self.turn], non_blocking=True)


class Tables:
    """Block tables on the device, one row (a seat) for each running request, changed in place where they changed."""

    def __init__(self, num_seats: int, num_pages: int, device: torch.device) -> None:
        self.data = torch.zeros(num_seats, num_pages, dtype=torch.int32, device=device)
        self.seats: dict[Request, int] = {}
        self.known: list[list[int]] = [[] for _ in range(num_seats)]
        self.free = list(range(num_seats - 1, -1, -1))

    def update(self, requests: Sequence[Request]) -> list[int]:
        """Their seats; what is new in their tables is on its way to the device."""
        for request in [r for r in self.seats if r.status is not Status.RUNNING]:
            self.free.append(self.seats.pop(request))
        places: list[int] = []
        numbers: list[int] = []
        seats = []
        for request in requests:
            if request not in self.seats:
                self.seats[request] = self.free.pop()
            seat, table = self.seats[request], request.block_table
            known, base = self.known[seat], seat * self.data.shape[1]
            if known != table:
                new = [i for i, number in enumerate(table) if i >= len(known) or known[i] != number]
                places += [base + i for i in new]
                numbers += [table[i] for i in new]
                self.known[seat] = list(table)
            seats.append(seat)
        if places:
            pairs = upload(np.array([places, numbers]), self.data.device)
            self.data.view(-1).index_copy_(0, pairs[0], pairs[1].int())
        return seats


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
    first = torch.arange(0, count, PROMPT_TILE // share, dtype=torch.int32, device=device)
    tiles = kernels.Tiles(one * 0, one * count, one * count, one * 0, table, first * 0, first, PROMPT_TILE)
    rows = whole[: min(engine.max_num_seqs, count)]
    batch = fused.DeviceBatch(whole * 0, whole, whole, [tiles], whole * 0 - 1, whole, rows)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    fused.forward(model, batch, cache)
    peak = torch.cuda.max_memory_allocated(device) - before
    del cache
    torch.cuda.empty_cache()
    return peak


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
        self.num_ids, self.most = num_ids, engine.max_num_seqs
        self.fields = Fields(self.most, self.device)
        self.tables = Tables(self.most, kv.blocks_needed(max_model_len, cache.block_size), self.device)
        self.sampled = torch.zeros(self.most, dtype=torch.int64, device=self.device)
        on_gpu = self.device.type == "cuda"
        self.results = [torch.empty(self.most, dtype=torch.int64, pin_memory=on_gpu) for _ in range(2)]
        self.turn = 0
        self.rows = torch.arange(self.most, dtype=torch.int32, device=self.device)
        self.zeros, self.ones = torch.zeros_like(self.rows), torch.ones_like(self.rows)
        share = model.config.num_heads // model.config.num_kv_heads
        self.short_tile = max(16, kernels.triton.next_power_of_2(share))
        self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count if on_gpu else 1
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if on_gpu and not engine.enforce_eager:
            self._capture()

    # ---- decode: fixed shapes

    @torch.inference_mode()
    def _decode(self, size: int) -> None:
        """One step of `size` rows, all from persistent buffers, to `sampled`."""
        on = {name: array[:size] for name, array in self.fields.on_device.items()}
        rows, ones, zeros = self.rows[:size], self.ones[:size], self.zeros[:size]
        splits = split_count(size * self.model.config.num_kv_heads, self.processors)
        tiles = kernels.Tiles(
            rows, ones, on["lengths"], on["seats"], self.tables.data, rows, zeros, self.short_tile, splits
        )  # fmt: skip
        batch = fused.DeviceBatch(on["tokens"], on["positions"], on["slots"], [tiles], on["sources"], self.sampled)
        logits = fused.forward(self.model, batch, self.cache)
        draws = kernels.Draws(
            on["seeds"], on["draws"], on["temperatures"], on["top_ks"], on["top_ps"], on["min_ps"]
        )  # fmt: skip
        kernels.sample(logits, draws, self.num_ids, self.sampled[:size])

    def _capture(self) -> None:
        pool = None
        for size in reversed(buckets(self.most)):
            self.fields.send(
                0, size, {name: [] for name, _, _ in FIELDS}, self.cache.num_blocks * self.cache.block_size
            )
            self._decode(size)  # compiles what is not compiled yet
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.inference_mode(), torch.cuda.graph(graph, pool=pool):
                self._decode(size)
            pool = pool or graph.pool()
            self.graphs[size] = graph

    # ---- any plan

    @torch.inference_mode()
    def start(self, plan: Plan, after: runner.Flight | None = None) -> Flight:
        """Start a plan, sampling included. `after`: the flight whose tokens it begins with."""
        self.move(plan)
        requests = [chunk.request for chunk in plan.chunks]
        seats = self.tables.update(requests)
        rows = [chunk.request for chunk in plan.chunks if chunk.num_logits]
        single = all(chunk.end - chunk.start == 1 == chunk.num_logits for chunk in plan.chunks) and not plan.num_padding
        if single:
            self._start_decode(plan, seats, after)
        else:
            self._start_ragged(plan, seats)
        self.turn ^= 1
        host, done = self.results[self.turn], None
        host[: len(rows)].copy_(self.sampled[: len(rows)], non_blocking=True)
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return Flight(plan, rows, host, done)

    def _start_decode(self, plan: Plan, seats: list[int], after: runner.Flight | None) -> None:
        size, count = self.cache.block_size, len(plan.chunks)
        places = {r: i for i, r in enumerate(after.rows)} if after is not None else {}
        positions = np.array([chunk.start for chunk in plan.chunks])
        requests = [chunk.request for chunk in plan.chunks]
        pages = np.array([c.request.block_table[c.start // size] for c in plan.chunks])
        params = [request.params for request in requests]
        values = {
            "tokens": [0 if r in places else r.tokens[-1] for r in requests],
            "sources": [places.get(r, -1) for r in requests],
            "positions": positions,
            "slots": pages * size + positions % size,
            "seeds": [r.seed for r in requests],
            "draws": positions + 1,
            "lengths": positions + 1,
            "seats": seats,
            "top_ks": [min(p.top_k, self.num_ids) for p in params],
            "temperatures": [p.temperature for p in params],
            "top_ps": [p.top_p for p in params],
            "min_ps": [p.min_p for p in params],
        }
        padded = next((bucket for bucket in sorted(self.graphs) if bucket >= count), count)
        self.fields.send(count, padded, values, self.cache.num_blocks * size)
        if padded in self.graphs:
            self.graphs[padded].replay()
        else:
            self._decode(count)

    def _start_ragged(self, plan: Plan, seats: list[int]) -> None:
        logits = fused.forward(self.model, self._ragged(plan, seats), self.cache)
        owners = [chunk.request for chunk in plan.chunks if chunk.num_logits]
        if not owners:
            return
        whole = np.array([[r.seed, len(r.tokens), min(r.params.top_k, self.num_ids)] for r in owners])
        real = np.array([[r.params.temperature, r.params.top_p, r.params.min_p] for r in owners], np.float32)
        seeds, positions, top_ks = upload(np.ascontiguousarray(whole.T), self.device)
        temperatures, top_ps, min_ps = upload(np.ascontiguousarray(real.T), self.device)
        draws = kernels.Draws(seeds, positions, temperatures, top_ks.int(), top_ps, min_ps)
        kernels.sample(logits, draws, self.num_ids, self.sampled[: len(owners)])

    def _ragged(self, plan: Plan, seats: list[int]) -> fused.DeviceBatch:
        """Lay the chunks one after another; short sequences and prompts get tiles of their own shape."""
        size, chunks = self.cache.block_size, plan.chunks
        counts = np.array([c.end - c.start for c in chunks], np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int32)
        positions = np.concatenate([np.arange(c.start, c.end) for c in chunks])
        pages = np.concatenate([np.array(c.request.block_table)[np.arange(c.start, c.end) // size] for c in chunks])
        tokens = np.concatenate([np.array(c.request.tokens[c.start : c.end]) for c in chunks])
        slots = pages * size + positions % size
        dead = plan.num_padding
        flat = np.stack([np.pad(tokens, (0, dead)), np.pad(positions, (0, dead)),
                         np.pad(slots, (0, dead), constant_values=self.cache.num_blocks * size)])  # fmt: skip
        token_ids, places, where = upload(flat, self.device)
        lengths = np.array([c.end for c in chunks], np.int32)
        each = upload(np.stack([starts, counts, lengths, np.array(seats, np.int32)]), self.device)
        groups = []
        share = self.model.config.num_heads // self.model.config.num_kv_heads
        for block_m, members in ((self.short_tile, counts <= SHORT), (PROMPT_TILE, counts > SHORT)):
            per_tile = block_m // share
            numbers = np.flatnonzero(members)
            if len(numbers) == 0:
                continue
            tiles = -(-counts[numbers] // per_tile)
            first = np.concatenate([np.arange(n) for n in tiles]) * per_tile
            both = upload(np.stack([np.repeat(numbers, tiles), first]).astype(np.int32), self.device)
            groups.append(
                kernels.Tiles(each[0], each[1], each[2], each[3], self.tables.data, both[0], both[1], block_m)
            )
        ends = starts + counts
        wanted = [range(e - c.num_logits, e) for c, e in zip(chunks, ends.tolist(), strict=True)]
        rows = upload(np.array([row for span in wanted for row in span], np.int64), self.device)
        return fused.DeviceBatch(token_ids, places, where, groups, torch.full_like(token_ids, -1), self.sampled, rows)

    @torch.inference_mode()
    def run(self, plan: Plan) -> Tensor:
        """Logits, for requests that need more than a token; see `runner.Runner.run`."""
        self.move(plan)
        seats = self.tables.update([chunk.request for chunk in plan.chunks])
        return fused.forward(self.model, self._ragged(plan, seats), self.cache)
