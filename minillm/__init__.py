"""minillm: a small, complete LLM inference engine, and the course that teaches it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams"]

if TYPE_CHECKING:
    from .engine import LLM
    from .request import RequestOutput, SamplingParams


def __getattr__(name: str) -> Any:
    """Import the engine on first use, so that `import minillm` (and `minillm --help`) stays quick."""
    if name == "LLM":
        from .engine import LLM

        return LLM
    if name in ("SamplingParams", "RequestOutput"):
        from . import request

        return getattr(request, name)
    raise AttributeError(f"module 'minillm' has no attribute {name!r}")
