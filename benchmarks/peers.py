"""The engines that benchmarks/cpu.py compares, each behind one method.

`run(requests, seats)` serves (prompt, number of new tokens) pairs greedily, at most `seats` at a time, and returns the
new tokens, when each of them came out (seconds after the start) and the bytes read (None where that is not known).
Every engine gets the same token ids and never stops at an end token. Bytes are counted by roofline.step_bytes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm import LLM, SamplingParams, __version__, hub, kv, roofline, weights

MODEL = "smollm2-135m"
STEP_TOKENS = 2048  # most tokens of one step, where an engine has such a limit
Ids = list[int]
Result = tuple[list[Ids], list[list[float]], float | None]


def converted(name: str, make: Callable[[Path], None]) -> Path:
    """A copy of the model in another format, made once and kept in minillm's cache."""
    path = hub.cache_dir() / "benchmarks" / name
    if not path.exists():
        part = path.with_name(name + ".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        make(part)
        part.rename(path)
    return path


class Minillm:
    """This engine, in float32. Options go to `LLM`."""

    def __init__(self, threads: int) -> None:
        llm = LLM(MODEL, device="cpu", dtype="float32", num_kv_blocks=1)
        self.config, self.model = llm.config, llm.model
        self.versions = {"minillm": __version__}

    def run(self, requests: list[tuple[Ids, int]], seats: int, reserved: int | None = None, **options: Any) -> Result:
        """reserved: the memory that so many seats would take if each had room for the longest prompt and output."""
        blocks = sum(kv.blocks_needed(len(prompt) + count, 16) for prompt, count in requests)
        if reserved is not None:
            longest = max(len(prompt) for prompt, _ in requests) + max(count for _, count in requests)
            blocks = reserved * kv.blocks_needed(longest, 16)
        llm = LLM.from_parts(self.config, self.model, None, num_kv_blocks=blocks, max_num_seqs=seats, **options)
        start = time.perf_counter()
        for i, (prompt, count) in enumerate(requests):
            llm.add_request(prompt, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True), f"{i}")
        live = [llm.requests[f"{i}"][0] for i in range(len(requests))]
        while any(request.finish_reason is None for request in live):
            llm.step()
        times = [[t - start for t in request.metrics.token_times] for request in live]
        stats = llm.stats()
        return [request.output for request in live], times, stats["gb_per_second"] * 1e9 * stats["seconds"]


class Transformers:
    """Hugging Face transformers in float32: `generate` on batches padded on the left, or its continuous batching."""

    def __init__(self, threads: int) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        load = transformers.AutoModelForCausalLM.from_pretrained
        source = hub.resolve(MODEL)

        def dequantise(target: Path) -> None:
            model = load(source.parent, gguf_file=source.name, dtype=torch.float32)
            model.hf_quantizer = None  # the tensors are plain float32 now; with it they could not be saved
            model.save_pretrained(target)

        self.model = load(converted("transformers", dequantise), dtype=torch.float32).eval()
        self.config = weights.open_checkpoint(source).config  # minillm's, for the bytes
        self.model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)  # no end token
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    def run(self, requests: list[tuple[Ids, int]], seats: int, continuous: bool = False) -> Result:
        import torch

        with torch.inference_mode():
            return self.run_continuous(requests, seats) if continuous else self.run_padded(requests, seats)

    def run_padded(self, requests: list[tuple[Ids, int]], seats: int) -> Result:
        """Batches of `seats` requests, one batch after another. Each runs until its longest request is done."""
        import torch

        class Clock(list):  # a streamer: called with the prompts, then with each step's tokens
            def put(self, _: object) -> None:
                self.append(time.perf_counter() - start)

            def end(self) -> None:
                pass

        tokens, times, moved = [], [], 0.0
        start = time.perf_counter()
        for batch in (requests[i : i + seats] for i in range(0, len(requests), seats)):
            width, steps = max(len(prompt) for prompt, _ in batch), max(count for _, count in batch)
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
            clock = Clock()
            out = self.model.generate(ids, attention_mask=mask, max_new_tokens=steps, streamer=clock)
            for row, (_, count) in zip(out[:, width:].tolist(), batch, strict=True):
                tokens.append(row[:count])
                times.append(clock[1 : 1 + count])
            moved += sum(roofline.step_bytes(self.config, [width + t] * len(batch), 4, 4) for t in range(steps))
        return tokens, times, moved

    def run_continuous(self, requests: list[tuple[Ids, int]], seats: int) -> Result:
        """ContinuousBatchingManager with a pool as large as needed; at most `seats` requests are under way."""
        from transformers.generation import ContinuousBatchingConfig, GenerationConfig

        greedy = GenerationConfig(do_sample=False, eos_token_id=-1)  # -1: none
        blocks = 8 + 2 * sum(kv.blocks_needed(len(prompt) + count, 256) for prompt, count in requests)
        config = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=STEP_TOKENS, max_requests_per_batch=seats)
        done: dict[str, Any] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=config, warmup=False
        ) as manager:

            def wait() -> None:
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("its generation thread ended")
                if result is not None and result.error:
                    raise RuntimeError(result.error)
                if result is not None and result.is_finished():
                    done[result.request_id] = result

            manager.add_request([1], "warm-up", max_new_tokens=2)  # its thread allocates the pool
            while not done:
                wait()
            done.clear()
            start = time.perf_counter()
            for i, (prompt, count) in enumerate(requests):
                while i - len(done) >= seats:
                    wait()
                manager.add_request(prompt, f"{i}", max_new_tokens=count, record_timestamps=True)
            while len(done) < len(requests):
                wait()
        results = [done[f"{i}"] for i in range(len(requests))]
        return (
            [r.generated_tokens for r in results],
            [[t - start for t in r.timestamps[: len(r.generated_tokens)]] for r in results],
            None,
        )


class LlamaCpp:
    """llama.cpp through llama-cpp-python's low-level API: one batch with many sequences, each in a slot of its own.

    As in llama.cpp's server, a slot keeps the tokens of its last request, and the next one reuses a common beginning.
    """

    def __init__(self, threads: int, float32: bool) -> None:
        try:
            import llama_cpp as api
        except ImportError as error:
            raise RuntimeError("llama_cpp is not installed (benchmarks/cpu.py says how)") from error
        import gguf

        source = hub.resolve(MODEL)

        def dequantise(target: Path) -> None:
            reader = gguf.GGUFReader(source)
            writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
            for name, entry in reader.fields.items():
                if not name.startswith(("GGUF.", "general.architecture")):
                    writer.add_key_value(name, entry.contents(), entry.types[0], entry.types[-1])
            for tensor in reader.tensors:
                writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()

        path = converted("float32.gguf", dequantise) if float32 else source
        self.quiet = api.llama_log_callback(lambda level, text, data: None)  # kept: C holds no reference
        api.llama_log_set(self.quiet, None)
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        if not self.model:
            raise RuntimeError("it could not load the model")
        self.api, self.threads = api, threads
        self.cache_type, self.kv_bytes = (0, 4) if float32 else (1, 2)  # GGML_TYPE_F32, GGML_TYPE_F16
        self.config = weights.open_checkpoint(source).config
        self.weight_bytes = api.llama_model_size(self.model) / roofline.linear_params(self.config)
        self.versions = {"llama-cpp-python": api.__version__}

    def run(self, requests: list[tuple[Ids, int]], seats: int, **options: Any) -> Result:
        api, params = self.api, self.api.llama_context_default_params()
        params.n_ctx = seats * max(len(prompt) + count for prompt, count in requests)
        params.n_batch, params.n_seq_max, params.n_outputs_max = STEP_TOKENS, seats, seats
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = self.cache_type
        params.kv_unified = True
        for name, value in options.items():
            setattr(params, name, value)
        context = api.llama_init_from_model(self.model, params)
        if not context:
            raise RuntimeError("it could not make a context")
        batch = api.llama_batch_init(STEP_TOKENS, 0, 1)
        try:
            return self.serve(requests, seats, context, batch)
        finally:
            api.llama_batch_free(batch)
            api.llama_free(context)

    def serve(self, requests: list[tuple[Ids, int]], seats: int, context: Any, batch: Any) -> Result:
        import numpy as np

        api, memory = self.api, self.api.llama_get_memory(context)
        tokens: list[Ids] = [[] for _ in requests]
        times: list[list[float]] = [[] for _ in requests]
        slots, waiting = [Slot(number) for number in range(seats)], list(range(len(requests)))
        moved, start = 0.0, time.perf_counter()
        while True:
            for slot in slots:
                if slot.request is None and waiting:
                    slot.request = waiting.pop(0)
                    slot.take(requests[slot.request][0])
                    api.llama_memory_seq_rm(memory, slot.number, len(slot.cached), -1)
            busy = sorted((slot for slot in slots if slot.request is not None), key=lambda slot: len(slot.pending))
            if not busy:
                return tokens, times, moved
            rows, n = [], 0
            for slot in busy:
                chunk = slot.pending[: STEP_TOKENS - n]
                for token in chunk:
                    batch.token[n], batch.pos[n], batch.logits[n] = token, len(slot.cached), 0
                    batch.n_seq_id[n], batch.seq_id[n][0] = 1, slot.number
                    slot.cached.append(token)
                    n += 1
                slot.pending = slot.pending[len(chunk) :]
                if not slot.pending:
                    batch.logits[n - 1] = 1
                    rows.append((slot, n - 1))
            batch.n_tokens = n
            if code := api.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode returned {code}")
            moved += roofline.step_bytes(self.config, [len(s.cached) for s in busy], self.weight_bytes, self.kv_bytes)
            for slot, row in rows:
                logits = api.llama_get_logits_ith(context, row)
                token, i = int(np.ctypeslib.as_array(logits, (self.config.vocab_size,)).argmax()), slot.request
                tokens[i].append(token)
                times[i].append(time.perf_counter() - start)
                slot.pending = [token]
                if len(tokens[i]) == requests[i][1]:
                    slot.request, slot.pending = None, []


@dataclass
class Slot:
    """A sequence of llama.cpp's KV cache."""

    number: int
    request: int | None = None
    cached: Ids = field(default_factory=list)  # tokens whose keys and values it holds
    pending: Ids = field(default_factory=list)  # tokens still to compute

    def take(self, prompt: Ids) -> None:
        """Start on a prompt: keep what it shares with the tokens held, but not its last token, whose logits count."""
        shared = 0
        while shared < min(len(prompt) - 1, len(self.cached)) and prompt[shared] == self.cached[shared]:
            shared += 1
        self.cached, self.pending = self.cached[:shared], prompt[shared:]


PEERS: dict[str, Callable[[int], Any]] = {
    "minillm": Minillm,
    "transformers": Transformers,
    "llama.cpp f32": functools.partial(LlamaCpp, float32=True),
    "llama.cpp Q4_1": functools.partial(LlamaCpp, float32=False),
}
