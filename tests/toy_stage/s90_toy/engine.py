"""The "engine" of the toy stage."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROOM = 4


def pages_needed(num_items: int, page_size: int) -> int:
    """How many pages of page_size hold num_items."""
    # exercise 90.1
    return math.ceil(num_items / page_size)
    # end exercise 90.1


def scale_rows(x: Tensor, factors: Tensor) -> Tensor:
    """x [N, D] with row i multiplied by factors[i]; x stays as it is."""
    # exercise 90.2
    spread = factors[:, None]
    return x * spread
    # end exercise 90.2


@dataclass
class Shelf:
    """Holds at most `ROOM` items."""

    items: list[int]

    def put(self, item: int) -> None:
        """Add one item; OverflowError when there is no room."""
        # exercise 90.3
        if len(self.items) >= ROOM:
            raise OverflowError("the shelf is full")
        self.items.append(item)
        # end exercise 90.3

    def take(self) -> int:
        """Remove and return the oldest item."""
        # exercise 90.3
        return self.items.pop(0)
        # end exercise 90.3


def total_pages(counts: list[int], page_size: int) -> int:
    """Pages for several lists; calls pages_needed through its module, as the engine does."""
    from minillm.course.stages.s90_toy import engine

    return sum(engine.pages_needed(n, page_size) for n in counts)


def noise() -> Tensor:
    return torch.rand(2)
