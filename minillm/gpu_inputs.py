"""The input of a step on a GPU: arrays that stay where they are, padding that harms nobody, tables kept by request.

A CUDA graph reads its input from fixed addresses, always for as many tokens, sequences, tiles and rows as it was
captured with (its `Shape`). What a step has less of is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import kernels
from .request import Request, Status

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
