"""`minillm doctor`: what will and will not run on this machine, and what to do about it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

EXTRAS = {
    "jupyterlab": "the notebooks",
    "ipywidgets": "the lessons' sliders",
    "anywidget": "the lessons' widgets",
    "matplotlib": "plots and the demo's figure",
    "triton": "GPU kernels (stage 14)",
    "transformers": "comparing with another implementation (tests)",
    "playwright": "the browser test",
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@dataclass
class Finding:
    """One line. status: "ok", "missing" (something will not run) or "broken" (the engine will not run)."""

    name: str
    status: str
    detail: str
    todo: str = ""


def findings() -> Iterator[Finding]:
    """Look at one thing after another; each comes out as soon as it is known."""
    version, supported = platform.python_version(), (3, 11) <= sys.version_info[:2] <= (3, 14)
    yield Finding("Python", "ok" if supported else "missing", version, "" if supported else "Use Python 3.11 to 3.14.")
    try:
        yield _engine()
        import psutil
        import torch

        from . import hub, roofline
        from .config import ModelConfig
        from .errors import MinillmError
        from .weights import open_checkpoint
    except Exception as error:  # whatever it is, the reader has to see it
        todo = "Install minillm again in a fresh virtual environment."
        yield Finding("engine", "broken", f"{type(error).__name__}: {error}", todo)
        return
    yield Finding("torch", "ok", torch.__version__)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    no_gpu = "Not needed: all lessons run on the CPU. (GPU kernels come in stage 14, in Triton's interpreter.)"
    yield Finding("GPU", "ok" if gpus else "missing", ", ".join(gpus) or "no CUDA device", "" if gpus else no_gpu)
    yield Finding("CPU threads", "ok", f"{torch.get_num_threads()} used of {os.cpu_count()}")
    free = psutil.virtual_memory().available / 1e9
    yield _enough("memory", free, 2.0, "GB free", "SmolLM2 needs about 2 GB: close other programs.")

    name, config = "smollm2-135m", None
    known, folder = hub.KNOWN[name], hub.cache_dir()
    there = (folder / name / known.filename).exists()
    disk = shutil.disk_usage(next(p for p in (folder, *folder.absolute().parents) if p.exists())).free / 1e9
    todo = "Make room, or set MINILLM_CACHE to a folder on another disk."
    yield _enough("disk", disk, 0.0 if there else 2 * known.size / 1e9, f"GB free for {folder}", todo)
    if there:
        try:
            config: ModelConfig = open_checkpoint(hub.fetch(name)).config  # type: ignore[no-redef]
            yield Finding(name, "ok", "there, and its SHA-256 is right")
        except MinillmError as error:
            yield Finding(name, "missing", str(error), "Delete the file, then run: minillm fetch")
    else:
        yield Finding(name, "missing", f"not in {folder}", f"Run: minillm fetch ({known.size / 1e6:.0f} MB)")
    need = "not needed" if config else "needed once, for the model"
    yield Finding("network", "ok", need + "; hub ids such as org/name need it too")

    for module, purpose in EXTRAS.items():
        found = find_spec(module) is not None
        todo = "Install the extras: minillm[course,test]"
        if module == "triton":
            todo = "Not needed before stage 14. It comes with the GPU builds of torch for Linux."
        yield Finding(module, "ok" if found else "missing", purpose, "" if found else todo)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None) or _own_chromium()
    todo = "Only the browser test needs it: playwright install chromium"
    yield Finding("Chromium", "ok" if browser else "missing", browser or "not found", "" if browser else todo)

    machine = roofline.measure_machine()
    speed = f"{machine.bandwidth / 1e9:.1f} GB/s, {machine.flops / 1e9:.0f} GFLOP/s"
    yield Finding("CPU speed", "ok", f"measured: {speed}")
    if config:
        rate = roofline.decode_tokens_per_second(config, [256], 4, 4, machine)
        yield Finding("decode", "ok", f"at most {rate:.0f} tokens/s for one request ({name}, float32), by the roofline")


def _enough(name: str, have: float, need: float, unit: str, todo: str) -> Finding:
    good = have >= need
    return Finding(name, "ok" if good else "missing", f"{have:.1f} {unit}", "" if good else todo)


def _engine() -> Finding:
    """Generate two tokens with a tiny random model: tests every part of the engine but the model's file."""
    from . import LLM, SamplingParams
    from .config import ModelConfig
    from .model import Transformer
    from .weights import random_state_dict

    config = ModelConfig("llama", 64, 32, 64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    llm = LLM.from_parts(config, Transformer.from_state(config, random_state_dict(config)), None, num_kv_blocks=4)
    tokens = llm.generate([1, 2, 3], SamplingParams(max_tokens=2, temperature=0))[0].outputs[0].token_ids
    return Finding("engine", "ok" if len(tokens) == 2 else "broken", "a tiny random model generates")


def _own_chromium() -> str | None:
    """The browser that playwright installed for itself."""
    home = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    return next((str(path) for path in home.glob("chromium*")), None)


def main(as_json: bool) -> int:
    """Print the findings; 1 if the engine cannot run."""
    found = []
    for one in findings():
        found.append(one)
        if not as_json:
            print(f"{one.status.upper() if one.status != 'ok' else 'ok':8}{one.name:14}{one.detail}", flush=True)
            if one.todo:
                print(f"{'':22}-> {one.todo}")
    broken = any(one.status == "broken" for one in found)
    if as_json:
        print(json.dumps({"engine_runs": not broken, "findings": [asdict(one) for one in found]}, indent=2))
    elif not broken:
        print("\nThe engine runs here." + (" What is missing is named above." if any(f.todo for f in found) else ""))
    return int(broken)
