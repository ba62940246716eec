"""`minillm demo`: what the course is about, measured in two minutes on the reader's own machine.

The same prompts are answered without a cache, with a KV cache, and in a batch; then questions that share a long
beginning, without and with that beginning in the prefix cache. The answers must be the same everywhere.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .. import __version__, attention, kv, metrics, roofline
from ..errors import MinillmError
from ..llm import LLM
from ..model import Batch, Transformer
from ..request import SamplingParams
from .demo_figure import draw

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three kinds of fruit.",
    "What does a computer's memory do?",
    "Give me a tip for sleeping well.",
    "What do bees make?",
    "How many days are in a week?",
    "Tell me a fun fact about cats.",
)
EXAMPLES = {"Italy": "Rome", "Norway": "Oslo", "Greece": "Athens", "Austria": "Vienna", "Portugal": "Lisbon",
            "Poland": "Warsaw", "Ireland": "Dublin", "Cuba": "Havana", "Peru": "Lima", "Kenya": "Nairobi",
            "Iraq": "Baghdad", "Finland": "Helsinki", "Hungary": "Budapest", "Canada": "Ottawa"}  # fmt: skip
COUNTRIES = ("Sweden", "Japan", "Spain", "Egypt", "Germany")
SLOW = 45.0  # seconds that the first row may take

Ids = list[int]
Tick = Callable[[int], object]


@dataclass
class Row:
    """One line of the table. Times in seconds after the start; token_times[i] are those of request i.

    ttft and tpot are medians over the requests. All requests arrive at the start, so ttft includes waiting in the
    queue. kv_bytes: most KV cache in use at once. bytes_read: weights and KV of all steps (roofline.step_bytes).
    runs: how many there were; this is the one with the median time.
    """

    name: str
    says: str
    tokens: list[Ids]
    token_times: list[list[float]]
    kv_bytes: int
    bytes_read: float
    cached_tokens: int = 0
    runs: int = 1
    equal: bool = True
    faster: str = ""  # against the line above
    seconds: float = field(init=False)
    tokens_per_second: float = field(init=False)
    ttft: float = field(init=False)
    tpot: float = field(init=False)
    gb_per_second: float = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = max(times[-1] for times in self.token_times)
        self.tokens_per_second = metrics.throughput([len(t) for t in self.tokens], [(0.0, self.seconds)])
        self.ttft = statistics.median(metrics.ttft(0.0, times) for times in self.token_times)
        self.tpot = statistics.median(metrics.tpot(times) for times in self.token_times)
        self.gb_per_second = self.bytes_read / self.seconds / 1e9


def forward(model: Transformer, tokens: Ids) -> torch.Tensor:
    """The plain path: hidden states [T, hidden] of a whole sequence, with a scratch cache that is thrown away."""
    count, weight = len(tokens), model.embed.weight
    cache = kv.KVCache(model.config, 1, count, weight.dtype, weight.device)
    ids, places = torch.tensor(tokens, device=weight.device), torch.arange(count, device=weight.device)
    layout = attention.Layout([count], [count], [[0]], count)
    return model(Batch(ids, places, places, layout, places[-1:]), cache)


@torch.inference_mode()
def recompute(model: Transformer, prompts: Sequence[Ids], max_tokens: int, tick: Tick) -> Row:
    """Greedy decoding with no cache: for each new token, the whole sequence goes through the model again."""
    config, size, start = model.config, model.embed.weight.element_size(), time.perf_counter()
    answers, times, moved = [], [], 0.0
    for prompt in prompts:
        tokens, stamps = list(prompt), []  # type: ignore[var-annotated]
        while len(stamps) < max_tokens and not (stamps and tokens[-1] in config.eos_token_ids):
            moved += roofline.step_bytes(config, [len(tokens)], size, size)
            tokens.append(int(model.logits(forward(model, tokens)[-1:]).argmax()))
            stamps.append(time.perf_counter() - start)
            tick(1)
        answers.append(tokens[len(prompt) :])
        times.append(stamps)
    says = "Every token sends the whole text so far through the model again."
    return Row("full recompute", says, answers, times, 0, moved)


@torch.inference_mode()
def is_greedy(model: Transformer, prompt: Ids, answer: Ids) -> bool:
    """Whether the plain path would choose `answer`: one pass over both shows its choice at every place."""
    hidden = forward(model, prompt + answer[:-1])[len(prompt) - 1 :]
    return model.logits(hidden).argmax(-1).tolist() == answer


def serve(llm: LLM, name: str, says: str, prompts: Sequence[Ids], max_tokens: int, tick: Tick) -> Row:
    """All prompts arrive at once; run the engine until they are answered."""
    start, before = time.perf_counter(), _bytes_read(llm)
    ids = [llm.add_request(prompt, SamplingParams(max_tokens=max_tokens, temperature=0)) for prompt in prompts]
    requests = [llm.requests[one][0] for one in ids]
    blocks = 0
    while any(request.finish_reason is None for request in requests):
        tick(len(llm.step()))
        blocks = max(blocks, int(llm.stats()["blocks_used"]))
    for one in ids:
        llm.abort(one)  # forget it
    times = [[t - start for t in request.metrics.token_times] for request in requests]
    kv_bytes = blocks * llm.engine_config.block_size * llm.cache.bytes_per_token
    cached = sum(request.num_cached for request in requests)
    return Row(name, says, [r.output for r in requests], times, kv_bytes, _bytes_read(llm) - before, cached)


def _bytes_read(llm: LLM) -> float:
    stats = llm.stats()
    return stats["gb_per_second"] * 1e9 * stats["seconds"] if stats["steps"] else 0.0


def measure(
    model: Transformer,
    prompts: Sequence[Ids],
    shared: Sequence[Ids],
    max_tokens: int = 32,
    shared_tokens: int = 8,
    repeats: int = 3,
    progress: bool = False,
) -> list[Row]:
    """The five rows. shared: prompts with a common beginning; the first only fills the prefix cache.

    The quick rows are run `repeats` times (once if the first row was slow); the run with the median time is kept.
    """
    longest = max(max(map(len, prompts)) + max_tokens, max(map(len, shared)) + shared_tokens)
    num_blocks = kv.blocks_needed(longest, 16) * max(len(prompts), len(shared))
    questions = shared[1:]
    guess = len(prompts) * max_tokens * (2 + repeats) + len(questions) * shared_tokens * 2 * repeats
    bar = tqdm(total=guess, unit="token", disable=not progress, leave=False, mininterval=0.5)

    def engine(**options: Any) -> LLM:
        return LLM.from_parts(model.config, model, None, num_kv_blocks=num_blocks, **options)

    def median(run: Callable[[], Row], runs: int) -> Row:
        row = sorted((run() for _ in range(runs)), key=lambda row: row.seconds)[runs // 2]
        row.runs = runs
        return row

    def alone() -> Row:
        says = "Keys and values are kept: a step computes one token. Requests wait in line."
        return serve(engine(max_num_seqs=1), "KV cache, one by one", says, prompts, max_tokens, bar.update)

    def together() -> Row:
        says = "All requests share each step: the weights are read once for all of them."
        return serve(engine(), "continuous batching", says, prompts, max_tokens, bar.update)

    def cold() -> Row:
        says = "Prompts with a long common beginning; each request computes all of it."
        llm = engine(enable_prefix_caching=False)
        return serve(llm, "shared prefix, cold", says, questions, shared_tokens, bar.update)

    def warm() -> Row:
        llm = engine()
        llm.generate(list(shared[0]), SamplingParams(max_tokens=1, temperature=0))
        says = "An earlier request left that beginning in the cache: only the rest is new."
        return serve(llm, "shared prefix, warm", says, questions, shared_tokens, bar.update)

    with bar:
        serve(engine(), "warm-up", "", [prompts[0][:4]], 2, lambda count: None)
        bar.set_description("full recompute")
        rows = [recompute(model, prompts, max_tokens, bar.update)]
        for title, run in (("KV cache", alone), ("batching", together), ("cold prefix", cold), ("warm prefix", warm)):
            bar.set_description(title)
            rows.append(median(run, 1 if run is alone or rows[0].seconds > SLOW else repeats))
        bar.set_description("comparing")
        for row in rows[1:3]:
            row.equal = row.tokens == rows[0].tokens
        for row in rows[3:]:
            row.equal = all(is_greedy(model, p, a) for p, a in zip(questions, row.tokens, strict=True))
    for above, row in ((rows[0], rows[1]), (rows[1], rows[2])):
        row.faster = f"{row.tokens_per_second / above.tokens_per_second:.1f}x tok/s"
    rows[4].faster = f"{rows[3].ttft / rows[4].ttft:.1f}x TTFT"
    return rows


def table(rows: Sequence[Row], bandwidth: float) -> str:
    """The rows as plain text, less than 100 columns wide. bandwidth: measured, bytes/s."""
    head = ("", "tok/s", "vs above", "TTFT s", "TPOT ms", "KV MB", "GB/s", "of max", "tokens")
    form = "{:22}{:>7}{:>12}{:>9}{:>9}{:>8}{:>7}{:>8}   {}"
    lines = [form.format(*head), "-" * 91]
    for row in rows:
        share = f"{row.gb_per_second * 1e9 / bandwidth:.0%}"
        numbers = (f"{row.tokens_per_second:.1f}", row.faster, f"{row.ttft:.2f}", f"{row.tpot * 1e3:.0f}",
                   f"{row.kv_bytes / 1e6:.1f}", f"{row.gb_per_second:.1f}", share,
                   "equal" if row.equal else "DIFFER")  # fmt: skip
        lines.append(form.format(row.name, *numbers))
    return "\n".join(lines)


def main(model: str, device: str, out: str, json_file: str | None) -> int:
    """Run the demo and print it; 1 if any row's tokens differ from the plain path's."""
    start = time.perf_counter()
    for path in (out, json_file):
        if path and not Path(path).absolute().parent.is_dir():
            raise MinillmError(f"there is no folder {Path(path).absolute().parent} to write {path} into.")
    print("Loading the model and measuring this machine ...", file=sys.stderr)
    # float32 everywhere: rounding is then too small to change a token, whatever a token is computed together with
    llm = LLM(model, device=device, dtype="float32", num_kv_blocks=1)
    tokenizer = llm.tokenizer
    assert tokenizer is not None  # an LLM that was loaded has one
    machine = roofline.measure_machine(llm.model.embed.weight.device.type)
    system = {"role": "system", "content": "You are a helpful assistant."}
    prompts = [tokenizer.encode_chat([system, {"role": "user", "content": text}]) for text in QUESTIONS]
    asked = {country: f"Question: What is the capital of {country}?\nAnswer:" for country in (*EXAMPLES, *COUNTRIES)}
    known = "".join(f"{asked[a]} The capital of {a} is {b}.\n\n" for a, b in EXAMPLES.items())
    shared = [tokenizer.encode(known + asked[country]) for country in COUNTRIES]
    rows = measure(llm.model, prompts, shared, progress=True)

    after_prefix = ("Answers after a shared prefix", rows[4], [asked[country] for country in COUNTRIES[1:]])
    for title, row, texts in (("Answers", rows[2], QUESTIONS), after_prefix):
        print(f"\n{title}")
        for text, tokens in zip(texts, row.tokens, strict=True):
            print(f"  {text.splitlines()[0]}\n      {' '.join(tokenizer.decode(tokens).split())}")
    speed = f"{machine.bandwidth / 1e9:.1f} GB/s, {machine.flops / 1e9:.0f} GFLOP/s"
    print(f"\n{model} in float32 on {machine.name}: {speed}")
    prefix = len(tokenizer.encode(known))
    print(f"{len(prompts)} questions at once; then {len(shared) - 1} whose first {prefix} tokens are the same.\n")
    print(table(rows, machine.bandwidth) + "\n")
    for row in rows:
        print(f"{row.name + ':':23}{row.says}")
    print("\nTTFT: median time to first token, waiting included. TPOT: median time per further token.")
    print("of max: share of the measured bandwidth. tokens: compared with the plain path, full recompute.")
    equal = all(row.equal for row in rows)
    print("\nEvery line gave the same tokens." if equal else "\nTOKENS DIFFER from the plain path: this is a bug.")
    report = {
        "command": " ".join(["minillm", *sys.argv[1:]]),
        "commit": _commit(),
        "versions": {"minillm": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "machine": asdict(machine),
        "model": model,
        "dtype": "float32",
        "equal": equal,
        "seconds": time.perf_counter() - start,
        "rows": [asdict(row) | {"share_of_bandwidth": row.gb_per_second * 1e9 / machine.bandwidth} for row in rows],
        "texts": [[tokenizer.decode(tokens) for tokens in row.tokens] for row in rows],
    }
    try:
        if json_file:
            Path(json_file).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        draw(report, out)
        print(f"Figure: {out}")
    except ModuleNotFoundError:
        print("No figure: it needs matplotlib (pip install matplotlib).")
    except OSError as error:
        raise MinillmError(f"Cannot write {error.filename}: {error.strerror}.") from error
    print(f"All of it took {time.perf_counter() - start:.0f} s.")
    return 0 if equal else 1


def _commit() -> str | None:
    """The commit of this checkout, with -dirty if files changed; None outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
