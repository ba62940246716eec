"""The course: what a notebook needs. `from minillm.course import check, hint, explain, plug_in` and so on."""

from .learn import (
    attempt,
    check,
    compare,
    explain,
    hint,
    plug_in,
    predict,
    progress,
    quiz,
    reset,
    show_source,
    swap,
)

__all__ = [
    "attempt",
    "check",
    "compare",
    "explain",
    "hint",
    "plug_in",
    "predict",
    "progress",
    "quiz",
    "reset",
    "show_source",
    "swap",
]
