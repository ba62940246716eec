"""minillm: a small, complete LLM inference engine, and the course that teaches it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams"]

if TYPE_CHECKING:
    from .async_engine import AsyncLLM
    from .llm import LLM
    from .request import RequestOutput, SamplingParams


def __getattr__(name: str) -> Any:
    """Import the engine on first use, so that `import minillm` (and `minillm --help`) stays quick."""
    modules = {"LLM": "llm", "AsyncLLM": "async_engine", "SamplingParams": "request", "RequestOutput": "request"}
    if name in modules:
        return getattr(import_module(f".{modules[name]}", __name__), name)
    raise AttributeError(f"module 'minillm' has no attribute {name!r}")
