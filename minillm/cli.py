"""The `minillm` command. Heavy modules are imported inside the commands, so that `minillm --help` is instant."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from . import __version__
from .errors import MinillmError

if TYPE_CHECKING:
    from .llm import LLM
    from .request import SamplingParams


class Group(click.Group):
    """Adds the course's commands when they are asked for, and prints our errors as one sentence with exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from .course.commands import COMMANDS

        return [*super().list_commands(ctx), *(str(command.name) for command in COMMANDS)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if own := super().get_command(ctx, name):
            return own
        from .course.commands import COMMANDS

        return next((command for command in COMMANDS if command.name == name), None)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MinillmError as error:
            click.echo(f"minillm: {error}", err=True)
            ctx.exit(2)
        except OSError as error:  # a full disk, a closed pipe
            click.echo(f"minillm: {error.strerror or error}", err=True)
            ctx.exit(2)


def _options(*options: Any) -> Any:
    """Several click options as one decorator."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
_model = click.option("--model", default="smollm2-135m", help="Known name, folder, .gguf file or hub id.")
_device = click.option("--device", default="auto", help="auto, cpu or cuda.")
_engine = _options(_model, _device, click.option("--dtype", default="auto", help="auto, float32, bfloat16, float16."))


def _sampling(max_tokens: int, temperature: float, top_p: float) -> Any:
    """Options of `generate` and `chat`. Which values are allowed is `SamplingParams`' business."""
    return _options(
        click.option("--max-tokens", type=int, default=max_tokens, help="Most tokens to generate."),
        click.option("--temperature", type=float, default=temperature, help="0 takes the likeliest token."),
        click.option("--top-p", type=float, default=top_p, help="Only the likeliest tokens up to this mass."),
        click.option("--top-k", type=int, default=0, help="Only the k likeliest tokens; 0 is off."),
        click.option("--min-p", type=float, default=0.0, help="Only tokens at least so likely, best = 1."),
        click.option("--seed", type=int, help="The same seed gives the same text."),
        click.option("--stop", multiple=True, help="Stop before this string; can be given several times."),
    )


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__)
def main() -> None:
    """minillm: a small, complete LLM inference engine, and the course that teaches it."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what cannot be shown is "?", what cannot be read U+FFFD: not an error
            stream.reconfigure(errors="replace")


@main.command()
@click.argument("prompt")
@_sampling(64, temperature=1.0, top_p=1.0)
@click.option("-n", type=int, default=1, help="Completions of the prompt.")
@click.option("--logprobs", type=int, help="With --json: log probabilities of so many likeliest tokens per place.")
@click.option("--chat", "as_chat", is_flag=True, help="Put the prompt into the model's chat template.")
@_engine
@_json
def generate(prompt: str, model: str, device: str, dtype: str, as_chat: bool, as_json: bool, **sampling: Any) -> None:
    """Complete PROMPT and show the text as it is generated. A PROMPT of "-" reads standard input."""
    from .request import SamplingParams

    params = SamplingParams(**sampling)  # a wrong value is refused before the model is loaded
    if prompt == "-":
        prompt = sys.stdin.read() if sys.stdin else ""
    llm = _load(model, device, dtype)
    text = _conversation(llm, [{"role": "user", "content": prompt}]) if as_chat else prompt
    if not as_json and params.n == 1:
        _stream(llm, text, params)
        return
    [output] = llm.generate(text, params)
    if not as_json:  # several texts cannot be streamed to one terminal
        for one in output.outputs:
            click.echo(f"[{one.index}] {one.text}")
        return
    report = {
        "model": model,
        "prompt": prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "num_cached_tokens": output.num_cached_tokens,
        "outputs": [vars(one) for one in output.outputs],
        "metrics": output.metrics.as_dict(),
    }
    click.echo(json.dumps(report, indent=2))


@main.command()
@_sampling(512, temperature=0.2, top_p=0.9)
@click.option("--system", help="Instructions for the model, before the conversation.")
@_engine
def chat(model: str, device: str, dtype: str, system: str | None, **sampling: Any) -> None:
    """Chat in the terminal. An empty line or Ctrl-D ends it."""
    from .request import SamplingParams

    params = SamplingParams(**sampling)
    llm = _load(model, device, dtype)
    messages = [{"role": "system", "content": system}] if system else []
    while line := _ask():
        messages.append({"role": "user", "content": line})
        # the prefix cache knows the conversation so far: only the new line is computed
        answer = _stream(llm, _conversation(llm, messages), params)
        messages.append({"role": "assistant", "content": answer})


def _load(model: str, device: str, dtype: str) -> LLM:
    from .llm import LLM

    return LLM(model, device=device, dtype=dtype)


def _conversation(llm: LLM, messages: list[dict[str, str]]) -> list[int]:
    assert llm.tokenizer is not None  # an LLM that was loaded has one
    return llm.tokenizer.encode_chat(messages)


def _stream(llm: LLM, prompt: str | list[int], params: SamplingParams) -> str:
    """Print the text as it comes, then one line of numbers on stderr. Returns the text."""
    from . import metrics

    arrival, times, text = time.perf_counter(), [], ""
    for delta in llm.stream(prompt, params):
        times += [time.perf_counter()] * len(delta.token_ids)
        text += delta.text
        click.echo(delta.text, nl=False)
    click.echo()
    if times:
        gap = metrics.tpot(times)
        rate = f", then {1 / gap:.1f} tokens/s" if gap else ""
        click.echo(f"[{len(times)} tokens: the first after {metrics.ttft(arrival, times):.2f} s{rate}]", err=True)
    return text


def _ask() -> str:
    """The user's next line; "" at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip() if sys.stdin else ""
    except EOFError:
        return ""


@main.command()
@click.option("--num-requests", type=click.IntRange(1), default=32, help="Requests to send.")
@click.option("--input-len", type=(int, int), default=(16, 256), help="Least and most prompt tokens of each request.")
@click.option("--output-len", type=(int, int), default=(8, 128), help="Least and most output tokens.")
@click.option(
    "--prefix-len", type=click.IntRange(0), default=0, help="Prompt tokens, in front, that all requests share."
)
@click.option("--request-rate", type=click.FloatRange(0, min_open=True), help="Open loop: Poisson arrivals a second.")
@click.option("--concurrency", type=click.IntRange(1), help="Closed loop: so many users, one request each at a time.")
@click.option("--slo", type=(float, float), metavar="TTFT TPOT", help="Goodput counts requests within these seconds.")
@click.option("--scheduling", default="continuous", help="continuous, dynamic or static.")
@click.option("--max-num-seqs", type=int, default=256, help="Most requests in a step.")
@click.option("--max-num-batched-tokens", type=int, default=2048, help="Most tokens in a step.")
@click.option("--num-kv-blocks", type=int, help="Size of the KV cache, in blocks of 16 tokens.")
@click.option("--attention", default="auto", help="auto, triton, numba, sdpa, paged, tiled or naive.")
@click.option("--kv-cache-dtype", default="auto", help="auto, or int8 or fp8 on a GPU.")
@click.option("--enforce-eager", is_flag=True, help="No CUDA graphs.")
@click.option("--seed", type=int, default=0, help="Of the workload.")
@_engine
@_json
def bench(
    model: str,
    device: str,
    dtype: str,
    as_json: bool,
    slo: tuple[float, float] | None,
    concurrency: int | None,
    scheduling: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_kv_blocks: int | None,
    attention: str,
    kv_cache_dtype: str,
    enforce_eager: bool,
    **load: Any,
) -> None:
    """Send a load to the engine and measure it. Without a rate or concurrency all requests are there at the start."""
    from . import LLM, bench, roofline
    from .runner import pick_device

    for name in ("input_len", "output_len"):
        least, most = load[name]
        if not 1 <= least <= most:
            raise click.UsageError(f"--{name.replace('_', '-')} needs two whole numbers, 1 <= least <= most.")
    if load["request_rate"] and concurrency:
        raise click.UsageError("--request-rate is an open loop, --concurrency a closed one: give one of them.")
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    how = {"attention": attention, "kv_cache_dtype": kv_cache_dtype, "enforce_eager": enforce_eager}
    machine = roofline.measure_machine(pick_device(device))  # first: the KV cache will leave little memory
    llm = LLM(model, device=device, dtype=dtype, scheduling=scheduling, num_kv_blocks=num_kv_blocks, **limits, **how)
    items = bench.workload(vocab_size=llm.num_ids, **load)
    bench.run(llm, items[:1])  # warm-up: compiles kernels, touches memory
    llm.pool.discard(range(len(llm.pool.blocks)))  # and leaves nothing in the prefix cache
    report = bench.run(llm, items, concurrency=concurrency, slo=slo, progress=sys.stderr.isatty())
    if as_json:
        click.echo(json.dumps(report.as_dict() | {"bandwidth": machine.bandwidth, "stats": llm.stats()}, indent=2))
        return
    share = f"{report.gb_per_second / machine.bandwidth * 1e9:.0%} of {machine.bandwidth / 1e9:.1f} GB/s measured"
    for label, value in (
        ("requests", f"{report.num_requests} ({report.num_refused} refused, {report.num_timed_out} timed out)"),
        ("seconds", f"{report.seconds:.2f}"),
        ("output tokens/s", f"{report.output_tokens_per_second:.1f} ({report.output_tokens} tokens)"),
        ("requests/s", f"{report.requests_per_second:.2f}"),
        ("goodput, requests/s", "-" if report.goodput is None else f"{report.goodput:.2f}"),
        ("weights and KV read", f"{report.gb_per_second:.1f} GB/s ({share})"),
        ("KV cache used", f"{report.kv_usage_mean:.0%} in the mean, {report.kv_usage_max:.0%} at most"),
        ("prefix hit rate", f"{report.prefix_hit_rate:.0%}"),
        ("preemptions", f"{report.preemptions:.0f}"),
        ("useful share", f"{report.useful_share:.0%} of the tokens computed"),
    ):
        click.echo(f"{label:22}{value}")
    click.echo(f"{'milliseconds':22}{''.join(f'p{p:<9}' for p in bench.PERCENTILES)}")
    for name, values in report.percentiles.items():
        click.echo(f"{name:22}{''.join(f'{_milliseconds(value):<10}' for value in values.values())}")


@main.command()
@click.argument("name", default="smollm2-135m")
def fetch(name: str) -> None:
    """Download a known model and check it. Afterwards no network is needed."""
    from . import hub

    click.echo(hub.fetch(name, progress=sys.stderr.isatty()))


@main.command()
@click.argument("model", default="smollm2-135m")
@click.option("--tensors", is_flag=True, help="List every tensor of the file.")
@_json
def inspect(model: str, tensors: bool, as_json: bool) -> None:
    """Show a model's configuration, size, KV bytes per token and quantisation types."""
    import dataclasses
    import math
    from collections import Counter

    from . import hub, kv, weights

    checkpoint = weights.open_checkpoint(hub.resolve(model))
    config, gguf = checkpoint.config, checkpoint.gguf
    kinds = {name: info.type.name for name, info in gguf.tensors.items()} if gguf else {}
    shapes = checkpoint.source.shapes
    table = [{"name": n, "type": kinds.get(n, "safetensors"), "shape": shape} for n, shape in shapes.items()]
    report: dict[str, Any] = {"path": str(checkpoint.path)} | dataclasses.asdict(config)
    report["parameters"] = sum(map(math.prod, weights.parameter_shapes(config).values()))
    report["kv_bytes_per_token_16_bit"] = kv.kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim)
    report["tensor_types"] = dict(Counter(row["type"] for row in table))
    if as_json:
        click.echo(json.dumps(report | ({"tensors": table} if tensors else {}), indent=2))
        return
    for key, value in report.items():
        if value is not None:
            click.echo(f"{key:28}{format(value, ',') if isinstance(value, int) and value > 9999 else value}")
    for row in table if tensors else ():
        click.echo(f"{row['name']:44}{row['type']:12}{' x '.join(map(str, row['shape']))}")


@main.command()
@_model
@_device
@click.option("--out", default="minillm_demo.png", type=click.Path(dir_okay=False), help="The figure's file.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Write the measurements to this file.")
def demo(model: str, device: str, out: str, json_file: str | None) -> None:
    """The course in two minutes: recomputing, KV cache, batching, a shared prefix, measured on this machine."""
    from .course import demo

    sys.exit(demo.main(model, device, out, json_file))


@main.command()
@_json
def doctor(as_json: bool) -> None:
    """Explain what will and will not run on this machine, and what to do."""
    from . import doctor

    sys.exit(doctor.main(as_json))
