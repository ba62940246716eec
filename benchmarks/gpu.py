"""minillm on one NVIDIA GPU, beside transformers and a compiled static-cache decoder, in one run.

    python benchmarks/gpu.py --json benchmarks/results/gpu.json
    python benchmarks/report.py

About 12 minutes on an H200, most of it the peers' compilation and warm-up; `--only REGEX` runs a part (names are
workload/model/engine/mode), such as `--only '^a/.*minillm'`. With several GPUs several engines are measured at once,
each on a GPU of its own. SmolLM2 has its real weights; the others are shapes of real models with random weights (speed
does not depend on what they are). All in bfloat16. Greedy; the end token is ignored.

  a  one stream: a prompt of 128 tokens, 256 new ones
  b  256 requests at once, prompts and outputs uniform in 100 to 1024 tokens, seed 0 (the usual offline workload)
  c  Poisson arrivals for 15 seconds, 16, 40 or 48 a second; a tenth of the prompts have 8,000 to 12,000 tokens, the
     others 64 to 512; outputs of 64 to 256 tokens; chunked prefill on and off
  d  16 requests in turn that share a prefix of 4,096 tokens

Each row is measured in a process of its own, with a time limit: a crash or a hang becomes a row that says so. Rows that
are not measured this time stay in the file as they are; each says in which run it was made, and ratios are between rows
of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import random
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import shapes
import torch
from shapes import SHAPES, make_model

from minillm import LLM, SamplingParams, bench, fused, gpu_runner, kernels, roofline
from minillm.model import rotate
from minillm.scheduler import Scheduler

ROOT = Path(__file__).resolve().parent.parent
GREEDY = {"temperature": 0.0, "ignore_eos": True}
REPEATS = 3
SLO = (1.0, 0.03)  # c: seconds to the first token, and for each one after it
LOADS = (16, 40, 48)  # c: requests a second


@dataclass
class Row:
    """One line. Times in seconds; gb_per_second: weights and KV cache read; share_of_read: of the measured bandwidth.

    kernels_per_step, gpu_ms_per_step, cpu_ms_per_step: of a decode step; the GPU's is from the first kernel's start to
    the last one's end, the CPU's is the time in which it does not wait.
    """

    workload: str
    model: str
    engine: str
    mode: str = ""
    tokens_per_second: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    itl_p99: float | None = None
    gb_per_second: float | None = None
    share_of_read: float | None = None
    kernels_per_step: float | None = None
    gpu_ms_per_step: float | None = None
    cpu_ms_per_step: float | None = None
    goodput: float | None = None
    ttft_cold: float | None = None
    ttft_warm: float | None = None
    start_seconds: float | None = None
    error: str | None = None
    run: int = 0  # number of the run it was made in, see "runs" in the result

    @property
    def name(self) -> str:
        return f"{self.workload}/{self.model}/{self.engine}/{self.mode}"


# one technique taken away: where it is, and what stands there instead
WITHOUT = {
    "no graphs": (),
    "no overlap": ((Scheduler, "ahead", lambda self, plan: None),),
    "no PDL": ((kernels, "has_pdl", lambda device: False),),
    "no matvec kernel (cuBLAS)": ((fused, "one_row", lambda x: False),),
    "no split-KV": ((gpu_runner, "split_count", lambda programs, processors: 1),),
}


def rows() -> list[Row]:
    small, qwen, _, eight = SHAPES
    ours = "minillm"
    return [
        *(Row("a", model, ours) for model in SHAPES),
        *(Row("a", model, ours, mode) for model in (small, eight) for mode in WITHOUT),
        Row("a", small, "transformers", "static cache, compiled"),
        Row("a", small, "transformers", "eager"),
        Row("a", small, "compiled decoder", "static cache"),
        Row("a", eight, "compiled decoder", "static cache"),
        *(Row("b", qwen, ours, f"{kind} KV") for kind in ("bf16", "int8", "fp8")),
        Row("b", qwen, ours, "no graphs"),
        Row("b", qwen, ours, "no overlap"),
        Row("b", small, ours, "bf16 KV"),
        Row("b", small, "transformers", "continuous batching"),
        *(Row("c", qwen, ours, f"{mode}, {load}/s") for load in LOADS for mode in ("chunked prefill", "whole prompts")),
        Row("d", qwen, ours, "prefix cache"),
        Row("d", qwen, ours, "no prefix cache"),
    ]


# ---- minillm


@contextmanager
def waits():
    """Adds up the seconds in which the CPU waits for the GPU."""
    total, plain = [0.0], gpu_runner.Flight.tokens

    def tokens(flight: gpu_runner.Flight) -> list[int]:
        start = time.perf_counter()
        try:
            return plain(flight)
        finally:
            total[0] += time.perf_counter() - start

    with mock.patch.object(gpu_runner.Flight, "tokens", tokens):
        yield total


def engine(row: Row, **options: Any) -> LLM:
    config, start = SHAPES[row.model], time.perf_counter()
    model = make_model(row.model, torch.bfloat16, "cuda")
    llm = LLM.from_parts(config, model, None, enforce_eager=row.mode == "no graphs", **options)
    torch.cuda.synchronize()
    row.start_seconds = time.perf_counter() - start
    return llm


def profile(llm: LLM, row: Row, steps: int = 10) -> list[list[Any]]:
    """Kernels and GPU time of a decode step; the dearest kernels as [name, count for each step, microseconds each]."""
    activity = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activity) as trace:
        for _ in range(steps):
            llm.step()
        torch.cuda.synchronize()
    ran = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA and "Memcpy" not in e.name]
    row.kernels_per_step = len(ran) / steps
    # kernels overlap (PDL): the union of their spans
    spans, busy, end = sorted((e.time_range.start, e.time_range.end) for e in ran), 0.0, 0.0
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    row.gpu_ms_per_step = busy / steps / 1e3
    kinds: dict[str, list[float]] = {}
    for e in ran:
        kinds.setdefault(e.name[:60], []).append(e.time_range.elapsed_us())
    dear = sorted(kinds.items(), key=lambda kind: -sum(kind[1]))[:12]
    return [[name, len(times) / steps, statistics.mean(times)] for name, times in dear]


def one_stream(row: Row) -> dict[str, Any]:
    llm = engine(row, max_num_seqs=1, max_model_len=2048, num_kv_blocks=200, enable_prefix_caching=False)
    prompt, params = list(range(128)), SamplingParams(max_tokens=256, **GREEDY)
    llm.generate(prompt, params)
    found, before = [], llm.stats()
    with waits() as waited:
        for _ in range(REPEATS):
            start = time.perf_counter()
            out = llm.generate(prompt, params)[0]
            found.append((time.perf_counter() - start, out.metrics))
    seconds, times = sorted(found, key=lambda one: one[0])[REPEATS // 2]
    after = llm.stats()
    row.tokens_per_second, row.ttft, row.tpot = 256 / seconds, times.ttft, times.tpot
    moved = roofline.step_bytes(llm.config, [128 + 128], 2, 2)  # a decode step in the middle
    row.gb_per_second = moved / times.tpot / 1e9
    steps = after["steps"] - before["steps"]
    row.cpu_ms_per_step = (sum(one for one, _ in found) - waited[0]) / steps * 1e3
    name = llm.add_request(prompt, params)
    for _ in range(20):
        llm.step()
    dear = profile(llm, row)
    llm.abort(name)
    return {row.name: dear}


def offline(row: Row) -> dict[str, Any]:
    kind = row.mode.split()[0] if "KV" in row.mode else "bf16"
    llm = engine(
        row, max_num_seqs=256, max_model_len=2304, max_num_batched_tokens=8192, enable_prefix_caching=False,
        kv_cache_dtype="auto" if kind == "bf16" else kind,
    )  # fmt: skip
    items = bench.workload(256, (100, 1024), (100, 1024), llm.config.vocab_size)
    bench.run(llm, items)  # warm-up: every shape of the run has been compiled then
    reports, cpu = [], []
    for _ in range(1 if row.mode == "no graphs" else REPEATS):
        with waits() as waited:
            report = bench.run(llm, items)
        reports.append(report)
        cpu.append((report.seconds - waited[0]) / len(report.timeline) * 1e3)
    report = sorted(reports, key=lambda one: one.seconds)[len(reports) // 2]
    book(row, report)
    row.cpu_ms_per_step = statistics.median(cpu)
    for item in items[:128]:
        llm.add_request(item.prompt, SamplingParams(max_tokens=1000, **GREEDY))
    for _ in range(60):
        llm.step()
    return {row.name: profile(llm, row)}


def book(row: Row, report: bench.Report) -> None:
    row.tokens_per_second, row.gb_per_second = report.output_tokens_per_second, report.gb_per_second
    row.ttft, row.tpot = report.percentiles["ttft"][50], report.percentiles["tpot"][50]
    row.itl_p99, row.goodput = report.percentiles["itl"][99], report.goodput


def poisson(row: Row) -> dict[str, Any]:
    chunked, load = row.mode.startswith("chunked"), int(row.mode.split()[-1].removesuffix("/s"))
    llm = engine(
        row, max_num_seqs=128, max_model_len=16384, enable_chunked_prefill=chunked, enable_prefix_caching=False,
        max_num_batched_tokens=512 if chunked else 16384,
    )  # fmt: skip
    draw, now, items = random.Random(0), 0.0, []
    for _ in range(15 * load):
        length = draw.randint(8000, 12000) if draw.random() < 0.1 else draw.randint(64, 512)
        prompt = [draw.randrange(llm.config.vocab_size) for _ in range(length)]
        items.append(bench.Item(prompt, draw.randint(64, 256), now))
        now += draw.expovariate(load)
    bench.run(llm, items[:60])
    book(row, bench.run(llm, items, slo=SLO))
    return {}


def prefix(row: Row) -> dict[str, Any]:
    llm = engine(row, max_num_seqs=4, max_model_len=8192, enable_prefix_caching=row.mode == "prefix cache")
    draw, params = random.Random(0), SamplingParams(max_tokens=16, **GREEDY)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(llm.config.vocab_size) for _ in range(count)]

    for _ in range(2):
        llm.generate(tokens(4112), params)  # warm-up with other tokens
    llm.generate(tokens(16), params)
    shared = tokens(4096)
    found = [llm.generate(shared + tokens(16), params)[0].metrics.ttft for _ in range(16)]
    row.ttft_cold, row.ttft_warm = found[0], statistics.median(found[1:])
    row.ttft = statistics.median(found)
    return {}


# ---- peers


def hf_model(name: str, device: str = "cuda") -> Any:
    """transformers' Llama with the weights that `make_model` gives minillm."""
    import transformers

    config, ours = SHAPES[name], make_model(name, torch.bfloat16, device)
    made = transformers.LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim, rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings, tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )  # fmt: skip
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(made).eval()
        torch.set_default_dtype(torch.float32)
    sizes = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(ours.embed.weight)
        model.lm_head.weight.copy_(ours.head.weight)
        model.model.norm.weight.copy_(ours.norm.weight)
        for theirs, block in zip(model.model.layers, ours.layers, strict=True):
            attention, mlp = theirs.self_attn, theirs.mlp
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            pairs = [
                *zip(projections, block.qkv.weight.split(sizes), strict=True),
                *zip([mlp.gate_proj, mlp.up_proj], block.gate_up.weight.chunk(2), strict=True),
                (attention.o_proj, block.o.weight), (mlp.down_proj, block.down.weight),
                (theirs.input_layernorm, block.attn_norm.weight),
                (theirs.post_attention_layernorm, block.mlp_norm.weight),
            ]  # fmt: skip
            for module, weight in pairs:
                module.weight.copy_(weight)
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)  # no end token
    return model


def transformers_one(row: Row) -> dict[str, Any]:
    model, compiled = hf_model(row.model), row.mode != "eager"
    ids = torch.arange(128, device="cuda")[None]
    options = {"cache_implementation": "static"} if compiled else {}
    times = []
    with torch.inference_mode():
        for turn in range(5 if compiled else 3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            out = model.generate(ids, max_new_tokens=256, attention_mask=torch.ones_like(ids), **options)
            torch.cuda.synchronize()
            if turn:
                times.append(time.perf_counter() - start)
            else:
                row.start_seconds = time.perf_counter() - start
    assert out.shape[1] == 128 + 256
    row.tokens_per_second = 256 / statistics.median(times)
    row.gb_per_second = roofline.step_bytes(SHAPES[row.model], [256], 2, 2) * row.tokens_per_second / 1e9
    return {}


def transformers_many(row: Row) -> dict[str, Any]:
    from transformers.generation import GenerationConfig

    model = hf_model(row.model)
    model.set_attn_implementation("paged|sdpa")
    items = bench.workload(256, (100, 1024), (100, 1024), SHAPES[row.model].vocab_size)
    with model.continuous_batching_context_manager(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1)
    ) as manager:

        def collect(count: int) -> int:
            done = tokens = 0
            while done < count:
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("its generation thread ended")
                if result is not None and result.error:
                    raise RuntimeError(result.error)
                if result is not None and result.is_finished():
                    done, tokens = done + 1, tokens + len(result.generated_tokens)
            return tokens

        start = time.perf_counter()
        manager.add_request([1, 2, 3], "warm-up", max_new_tokens=4)
        collect(1)
        row.start_seconds = time.perf_counter() - start
        start = time.perf_counter()
        for i, item in enumerate(items):
            manager.add_request(item.prompt, f"{i}", max_new_tokens=item.max_tokens)
        tokens = collect(len(items))
        row.tokens_per_second = tokens / (time.perf_counter() - start)
    return {}


def compiled_decoder(row: Row) -> dict[str, Any]:
    """In the style of gpt-fast: a static KV cache, one compiled step with CUDA graphs, attention over the whole."""
    config, length = SHAPES[row.model], 384
    model = make_model(row.model, torch.bfloat16, "cuda")
    share = config.num_heads // config.num_kv_heads

    class Decoder(torch.nn.Module):
        """The cache is a buffer: torch.compile makes no CUDA graph of a step that changes anything else in place."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model
            shape = (1, config.num_kv_heads, length, config.head_dim)
            for i in range(config.num_layers):
                for kind in ("keys", "values"):
                    self.register_buffer(f"{kind}{i}", torch.zeros(shape, dtype=torch.bfloat16, device="cuda"))
            self.register_buffer("frequencies", model.frequencies)
            self.register_buffer("places", torch.arange(length, device="cuda"))

        def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            x = torch.nn.functional.embedding(ids, self.model.embed.weight)
            angles = (positions[:, None].float() * self.frequencies)[:, None]
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            mask = (self.places[None] <= positions[:, None])[None, None]
            for i, block in enumerate(self.model.layers):
                qkv = block.qkv(block.attn_norm(x)).unflatten(-1, (-1, config.head_dim))
                q, k, v = qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
                keys, values = getattr(self, f"keys{i}"), getattr(self, f"values{i}")
                keys[:, :, positions] = k.transpose(0, 1)[None]
                values[:, :, positions] = v.transpose(0, 1)[None]
                keys, values = keys.repeat_interleave(share, dim=1), values.repeat_interleave(share, dim=1)
                mixed = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, mask)
                x = x + block.o(mixed[0].transpose(0, 1).flatten(1))
                gate, up = block.gate_up(block.mlp_norm(x)).chunk(2, dim=-1)
                x = x + block.down(torch.nn.functional.silu(gate) * up)
            return self.model.head(self.model.norm(x[-1:])).argmax(-1)

    decoder = Decoder()
    decode = torch.compile(decoder, mode="reduce-overhead", fullgraph=True)
    start_at, times = torch.arange(128, device="cuda"), []
    with torch.inference_mode():
        for turn in range(6):
            torch.cuda.synchronize()
            start = time.perf_counter()
            token, position = decoder(start_at, start_at), start_at[-1:] + 1
            for _ in range(255):
                token, position = decode(token, position).clone(), position + 1
            torch.cuda.synchronize()
            if turn:
                times.append(time.perf_counter() - start)
            else:
                row.start_seconds = time.perf_counter() - start
    row.tokens_per_second = 256 / statistics.median(times)
    row.gb_per_second = roofline.step_bytes(config, [256], 2, 2) * row.tokens_per_second / 1e9
    return {}


# ---- the run


def work(row: Row) -> Any:
    if row.engine == "compiled decoder":
        return compiled_decoder
    if row.engine == "transformers":
        return transformers_many if row.workload == "b" else transformers_one
    return {"a": one_stream, "b": offline, "c": poisson, "d": prefix}[row.workload]


def run_rows(names: list[str]) -> None:
    """In a process of its own: measure these rows, one after another; a line of JSON for each."""
    for row in rows():
        if row.name not in names:
            continue
        found: dict[str, Any] = {}
        patches = [mock.patch.object(*one) for one in WITHOUT.get(row.mode, ())]
        try:
            for patch in patches:
                patch.start()
            found = work(row)(row)
        except Exception as error:  # whatever goes wrong becomes a row
            row.error = f"{type(error).__name__}: {error}".partition("\n")[0]
        for patch in patches:
            patch.stop()
        print("ROW " + json.dumps([asdict(row), found]), flush=True)
        torch.cuda.empty_cache()


def measure(todo: list[Row], limit: float, limit_at: float, profiles: dict[str, Any]) -> list[Row]:
    """Run all rows, those of a workload, model and engine in one process, each process on a GPU of its own."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in todo:
        groups.setdefault((row.workload, row.model, row.engine), []).append(row)
    # the longest first, so that several GPUs end at about the same time
    order = sorted(groups.values(), key=lambda group: (group[0].workload != "b", group[0].engine == "minillm"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for device in visible:
        free.put(device)

    def job(group: list[Row]) -> list[Row]:
        device = free.get()
        try:
            return measure_group(group, device, limit, limit_at, profiles)
        finally:
            free.put(device)

    with ThreadPoolExecutor(len(visible)) as pool:
        return [row for part in pool.map(job, order) for row in part]


def measure_group(group: list[Row], device: str, limit: float, limit_at: float, profiles: dict[str, Any]) -> list[Row]:
    command = [sys.executable, __file__, "--rows", *(row.name for row in group)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
    most = max(1.0, min(limit * len(group), limit_at - time.perf_counter()))
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, problem = child.communicate(timeout=most)
    except subprocess.TimeoutExpired:
        child.kill()
        out, problem = child.communicate()
        problem = f"stopped after {most:.0f} s"
    found = [json.loads(line[4:]) for line in out.splitlines() if line.startswith("ROW ")]
    done = [Row(**values) for values, _ in found]
    for _, more in found:
        profiles |= more
    for row in group[len(found) :]:
        row.error = problem.strip().rpartition("\n")[2] or f"exit code {child.returncode}"
        done.append(row)
    for row in done:
        print(f"[{time.perf_counter() - STARTED:4.0f} s] {describe(row)}", flush=True)
    return done


def describe(row: Row) -> str:
    """One line of text."""
    if row.error:
        return f"{row.name:60} {row.error}"
    parts = [f"{row.tokens_per_second:9.0f} tok/s" if row.tokens_per_second else ""]
    parts += [f"TTFT {row.ttft * 1e3:.1f} ms" if row.ttft else "", f"TPOT {row.tpot * 1e3:.2f} ms" if row.tpot else ""]
    parts += [f"p99 ITL {row.itl_p99 * 1e3:.1f} ms" if row.itl_p99 else ""]
    parts += [f"{row.gb_per_second:.0f} GB/s" if row.gb_per_second else ""]
    parts += [f"{row.kernels_per_step:.0f} kernels" if row.kernels_per_step else ""]
    parts += [f"GPU {row.gpu_ms_per_step:.2f} ms" if row.gpu_ms_per_step else ""]
    parts += [f"CPU {row.cpu_ms_per_step:.2f} ms" if row.cpu_ms_per_step else ""]
    parts += [f"cold {row.ttft_cold * 1e3:.1f}, warm {row.ttft_warm * 1e3:.1f} ms" if row.ttft_warm else ""]
    return f"{row.name:60} " + "  ".join(part for part in parts if part)


def measure_gpu() -> dict[str, float]:
    """Ceilings in bytes/s and FLOP/s: reading (a sum), copying (read and write), a bf16 matrix product; medians."""

    def seconds(job: Any) -> float:
        times = []
        for turn in range(12):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            job()
            last.record()
            last.synchronize()
            times += [first.elapsed_time(last) / 1e3] if turn > 1 else []
        return statistics.median(times)

    array = torch.randn(2**30, device="cuda")
    other = torch.empty_like(array)
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return {
        "read": array.numel() * 4 / seconds(lambda: array.sum()),
        "copy": 2 * array.numel() * 4 / seconds(lambda: other.copy_(array)),
        "flops": 2 * 8192**3 / seconds(lambda: left @ right),
    }


def ratios(done: list[Row]) -> dict[str, float]:
    """The comparisons that the README and benchmarks/README.md speak of."""
    by = {row.name: row for row in done if not row.error}
    small, qwen, eight = "SmolLM2-135M", "Qwen3-0.6B", "Llama-3.1-8B"

    def against(first: str, second: str, field: str = "tokens_per_second") -> dict[str, float]:
        if first not in by or second not in by:
            return {}
        return {f"{field}: {first} : {second}": getattr(by[first], field) / getattr(by[second], field)}

    found = against(f"a/{small}/minillm/", f"a/{small}/transformers/static cache, compiled")
    for model in (small, eight):
        found |= against(f"a/{model}/minillm/", f"a/{model}/compiled decoder/static cache")
        for mode in WITHOUT:
            found |= against(f"a/{model}/minillm/", f"a/{model}/minillm/{mode}")
    found |= against(f"b/{small}/minillm/bf16 KV", f"b/{small}/transformers/continuous batching")
    for mode in ("int8 KV", "fp8 KV"):
        found |= against(f"b/{qwen}/minillm/{mode}", f"b/{qwen}/minillm/bf16 KV")
    for mode in ("no graphs", "no overlap"):
        found |= against(f"b/{qwen}/minillm/bf16 KV", f"b/{qwen}/minillm/{mode}")
    for load in LOADS:
        chunked, whole = (f"c/{qwen}/minillm/{mode}, {load}/s" for mode in ("chunked prefill", "whole prompts"))
        found |= against(whole, chunked, "itl_p99") | against(chunked, whole)
    if (row := by.get(f"d/{qwen}/minillm/prefix cache")) is not None:
        found["d: TTFT, first : others"] = row.ttft_cold / row.ttft_warm
    return found


def merge(before: dict[str, Any], run: dict[str, Any], done: list[Row]) -> dict[str, Any]:
    """The result with this run's rows in place of older ones of the same names."""
    runs = [*before.get("runs", []), run]
    for row in done:
        row.run = len(runs) - 1
    found = {Row(**row).name: row for row in before.get("rows", [])} | {row.name: asdict(row) for row in done}
    kept = [found[row.name] for row in rows() if row.name in found]
    ratios = before.get("ratios", {}) | run["ratios"]
    return {**run, "ratios": ratios, "runs": runs, "rows": kept, "profile": before.get("profile", {})}


STARTED = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="only rows whose name matches")
    parser.add_argument("--json", metavar="FILE", help="store the result")
    parser.add_argument("--limit", type=float, default=220.0, help="seconds for each row")
    parser.add_argument("--deadline", type=float, default=900.0, help="seconds for everything")
    parser.add_argument("--commit", default=shapes.commit(), help="which code this is, if git here does not know")
    parser.add_argument("--rows", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU; benchmarks/cpu.py measures a CPU")
    if args.rows:
        run_rows(args.rows)
        return
    todo = [row for row in rows() if re.search(args.only, row.name)]
    machine, profiles = measure_gpu(), {}
    torch.cuda.empty_cache()
    done = measure(todo, args.limit, STARTED + args.deadline, profiles)
    for row in done:
        row.share_of_read = row.gb_per_second * 1e9 / machine["read"] if row.gb_per_second else None
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": kernels.triton.__version__}
    try:
        import transformers

        versions["transformers"] = transformers.__version__
    except ImportError:
        pass
    run = {
        "command": " ".join(["python benchmarks/gpu.py", *sys.argv[1:]]),
        "commit": args.commit,
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "versions": versions,
        "machine": machine,
        "seconds": time.perf_counter() - STARTED,
        "ratios": ratios(done),
    }
    report = merge(json.loads(Path(args.json).read_text()) if args.json and Path(args.json).exists() else {}, run, done)
    report["profile"] |= profiles
    for name, value in run["ratios"].items():
        print(f"{value:8.2f}  {name}")
    print(machine, f"{run['seconds']:.0f} s")
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
