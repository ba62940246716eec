"""Exercises of the toy stage: a function, a tensor function, a class with two regions, and answers that are data."""

import torch

from minillm.course.exercise import Exercise, Mutant
from minillm.course.source import edited

from . import engine

ENGINE = "minillm.course.stages.s90_toy.engine"


def check_pages(t, pages_needed):
    t.case(pages_needed, 9, 4, expected=3, note="one item more than two full pages")
    t.case(pages_needed, 8, 4, expected=2, note="an exact multiple")
    t.case(pages_needed, 0, 4, expected=0)
    t.case(pages_needed, 3, 1, expected=3)


def plug_pages(answer, swap):
    with swap():
        print(f"total pages with your code: {engine.total_pages([9, 8], 4)}")


def check_rows(t, scale_rows):
    x = torch.randn(3, 2, generator=t.rng(1))
    factors = torch.tensor([1.0, 2.0, -1.0])
    want = torch.stack([x[0], x[1] * 2, -x[2]])
    t.case(scale_rows, x, factors, expected=want, max_elements=6)


def in_place(x, factors):
    return x.mul_(factors[:, None])


def by_columns(x, factors):
    return x * factors[: x.shape[1]]


def outer(x, factors):
    return (x[None] * factors[:, None, None])[torch.arange(len(x)), torch.arange(len(x))]


def check_shelf(t, Shelf):
    shelf = t.call(Shelf, [])
    for item in (5, 6, 7):
        t.call(shelf.put, item)
    t.equal(t.call(shelf.take), 5, "put 5, 6, 7, then take()")
    with t.unchanged(shelf.items, what="the items, when take() is not called"):
        len(shelf.items)
    for item in (8, 9):
        t.call(shelf.put, item)
    t.raises(OverflowError, shelf.put, 1, note="a full shelf")
    t.raises(OverflowError, shelf.put, 2)
    t.true(len(shelf.items) == 4, "a refused item is not stored", got=len(shelf.items))


def check_verdicts(t, verdicts):
    t.equal(verdicts["a"], True, 'verdicts["a"]', hide=True)
    t.equal(verdicts["b"], False, 'verdicts["b"]', hide=True)


class OtherShelf(engine.Shelf):
    def put(self, item):
        if len(self.items) == 4:
            raise OverflowError
        self.items += [item]

    def take(self):
        first, *self.items = self.items
        return first


EXERCISES = [
    Exercise(
        id="90.1",
        symbol=f"{ENGINE}:pages_needed",
        title="Pages",
        minutes=1,
        difficulty=1,
        statement="""
            How many pages hold `num_items`?

            Worked example: 9 items, 4 a page: `pages_needed(9, 4)` is 3.
        """,
        hints=("Draw it.", "The last page may be half empty.", "Divide and round up."),
        explanation="Rounding up. In vLLM this is `cdiv`.",
        check=check_pages,
        mutants=(
            Mutant("floor", lambda n, size: n // size, "You round down: the last, partial page is lost.", "toy"),
            Mutant("plus_one", lambda n, size: n // size + 1, "An exact multiple gets a page too many.", "toy"),
            Mutant("float", lambda n, size: float(-(-n // size)), "A count is an int.", "toy"),
        ),
        variant=lambda num_items, page_size: -(-num_items // page_size),
        scratch="print(pages_needed(9, 4))",
        plug_in=plug_pages,
    ),
    Exercise(
        id="90.2",
        symbol=f"{ENGINE}:scale_rows",
        title="Rows",
        minutes=2,
        difficulty=2,
        statement="Multiply row i of `x` [N, D] by `factors[i]`. Example: rows `[1, 1]`, factor 2 give `[2, 2]`.",
        hints=("Shapes.", "Broadcast.", "Give `factors` a second axis of length 1."),
        explanation="Broadcasting.",
        check=check_rows,
        mutants=(
            Mutant("in_place", in_place, "You changed x itself.", "toy"),
            Mutant("columns", by_columns, "You scaled columns, not rows.", "toy"),
            Mutant("outer", outer, "You made every product and threw most away.", "toy"),
        ),
        variant=lambda x, factors: torch.einsum("nd,n->nd", x, factors),
    ),
    Exercise(
        id="90.3",
        symbol=f"{ENGINE}:Shelf",
        title="Shelf",
        minutes=3,
        difficulty=3,
        statement="A shelf. Example: put 5, put 6, take gives 5.",
        hints=("One.", "Two.", "Three."),
        explanation="First in, first out.",
        check=check_shelf,
        mutants=(
            Mutant("lifo", edited(f"{ENGINE}:Shelf", "pop(0)", "pop()"), "You take the newest.", "toy"),
            Mutant("no_limit", edited(f"{ENGINE}:Shelf", ">= ROOM", ">= 99"), "The shelf is never full.", "toy"),
            Mutant("late", edited(f"{ENGINE}:Shelf", ">= ROOM", "> ROOM"), "It is full one too late.", "toy"),
            Mutant(
                "peek", edited(f"{ENGINE}:Shelf", "items.pop(0)", "items[0]"), "take() leaves the item there.", "toy"
            ),
        ),
        variant=OtherShelf,
        plug_in=lambda answer, swap: print("nothing to run"),
    ),
    Exercise(
        id="90.4",
        symbol="verdicts",
        title="Verdicts",
        minutes=1,
        difficulty=1,
        statement="Is it true? a: 1 < 2. b: 2 < 1. Example: write True or False.",
        hints=("Read.", "Count.", "One is true."),
        explanation="1 < 2.",
        check=check_verdicts,
        mutants=(
            Mutant("both", {"a": True, "b": True}, "You believed b.", "toy"),
            Mutant("none", {"a": False, "b": False}, "You did not believe a.", "toy"),
            Mutant("swapped", {"a": False, "b": True}, "You read them the other way round.", "toy"),
        ),
        variant={"b": False, "a": 1 < 2},
        stub='verdicts = {\n    "a": None,\n    "b": None,\n}',
        solution='verdicts = {\n    "a": True,  # one is less than two\n    "b": False,\n}',
    ),
]
