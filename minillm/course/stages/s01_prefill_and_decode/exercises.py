"""Exercises of stage 01: FLOPs of a token, bytes of a step, the roofline, and the decode speed that follows."""

import dataclasses
import functools
import statistics
import time

import torch

from minillm import roofline
from minillm.config import ModelConfig
from minillm.course.exercise import Exercise, Mutant
from minillm.course.learn import make_llm
from minillm.model import Transformer
from minillm.request import SamplingParams
from minillm.roofline import Machine, flops_per_token, linear_params, roofline_seconds, step_bytes

# All dimensions differ, and num_heads * head_dim is not hidden_size (as in Qwen3). None of SMALL's is 2 or 4, the
# factors of the formulas. In order: vocabulary, hidden, intermediate, layers, heads, KV heads, head_dim.
SMALL = ModelConfig("llama", 11, 8, 12, 5, 3, 1, 6)
ODD = ModelConfig("qwen3", 101, 12, 20, 3, 6, 2, 8)
LLAMA_70B = ModelConfig("llama", 128256, 8192, 28672, 80, 64, 8, 128)
LLAMA_3B = ModelConfig("llama", 128256, 3072, 8192, 28, 24, 8, 128, tie_word_embeddings=True)
# what, configuration, context, bits a weight, machine, claimed tokens/s. The claims are made up.
CLAIMS = (
    ("Llama-3.2-3B as Q8_0 (8 bits and the scales)", LLAMA_3B, 1, 8.5,
     Machine("A laptop", bandwidth=100e9, flops=3e12), 40),
    ("Llama-3.1-70B in 4 bits and scales", LLAMA_70B, 1000, 4.5,
     Machine("4 x A100-80GB, as if they were one,", bandwidth=4 * 2039e9, flops=4 * 312e12), 50),
)  # fmt: skip


@functools.cache
def matrices(config):
    """The shapes of all matrices that a token is multiplied with, read off the model itself. The oracle's weights."""
    with torch.device("meta"):  # shapes without memory
        model = Transformer(config)
    named = [(name, tuple(weight.shape)) for name, weight in model.named_parameters() if weight.dim() == 2]
    return [shape for name, shape in named if model.head is None or name != "embed.weight"]


SEEN_ADDED = (
    "the sum is the upper bound in 'How to Scale Your Model', chapter on rooflines; the least time is the maximum"
)

# ---- 01.1


def count_flops(config, context_len):
    """The oracle: every matrix, then every layer and query head."""
    flops = sum(2 * rows * columns for rows, columns in matrices(config))
    for _ in range(config.num_layers):
        for _ in range(config.num_heads):
            flops += context_len * 2 * config.head_dim  # one dot product with each key
            flops += 2 * config.head_dim * context_len  # one weighted sum of the values
    return flops


def check_flops(t, flops_per_token):
    t.case(flops_per_token, SMALL, 7, expected=9416, note="3,448 weights, 5 layers, 3 query heads of 6 numbers")
    t.case(flops_per_token, SMALL, 1, expected=7256, note="the first token attends to itself only")
    for context_len in (1, 7, 64):
        t.case(flops_per_token, ODD, context_len, expected=count_flops(ODD, context_len))
    tied = dataclasses.replace(ODD, tie_word_embeddings=True)
    t.case(
        flops_per_token,
        tied,
        7,
        expected=count_flops(tied, 7),
        note="a tied output head is multiplied with all the same",
    )
    for num_kv_heads in (1, 3, 6):
        config = dataclasses.replace(ODD, num_kv_heads=num_kv_heads)
        grown = t.call(flops_per_token, config, 1000) - t.call(flops_per_token, config, 500)
        t.equal(grown, 288000, f"500 more tokens of context, {num_kv_heads} KV heads",
                note="sharing KV heads saves memory, not multiplications")  # fmt: skip
    t.case(flops_per_token, LLAMA_70B, 8192, expected=count_flops(LLAMA_70B, 8192), note="Llama-3.1-70B")


def macs(config, context_len):
    return linear_params(config) + 2 * config.num_layers * config.num_heads * config.head_dim * context_len


def no_attention(config, context_len):
    return 2 * linear_params(config)


def kv_heads(config, context_len):
    return 2 * linear_params(config) + 4 * config.num_layers * config.num_kv_heads * config.head_dim * context_len


def one_product(config, context_len):
    return 2 * linear_params(config) + 2 * config.num_layers * config.num_heads * config.head_dim * context_len


def one_layer(config, context_len):
    return 2 * linear_params(config) + 4 * config.num_heads * config.head_dim * context_len


def hidden_size(config, context_len):
    return 2 * linear_params(config) + 4 * config.num_layers * config.hidden_size * context_len


def whole_prompt(config, context_len):
    return 2 * linear_params(config) + 4 * config.num_layers * config.num_heads * config.head_dim * context_len**2


def training(config, context_len):
    return 6 * linear_params(config) + 12 * config.num_layers * config.num_heads * config.head_dim * context_len


def embedding_too(config, context_len):
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * context_len
    return 2 * (linear_params(config) + config.vocab_size * config.hidden_size) + attention


def matrices_per_context(config, context_len):
    attention = 4 * config.num_layers * config.num_heads * config.head_dim
    return (2 * linear_params(config) + attention) * context_len


def everything_per_layer(config, context_len):
    return config.num_layers * (2 * linear_params(config) + 4 * config.num_heads * config.head_dim * context_len)


def without_itself(config, context_len):
    return flops_per_token(config, context_len - 1)


def flops_variant(config, context_len):
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    macs = config.hidden_size * config.vocab_size  # the output head
    for _ in range(config.num_layers):
        macs += config.hidden_size * (width + 2 * kv_width) + width * config.hidden_size
        macs += 3 * config.hidden_size * config.intermediate_size
        macs += width * context_len  # scores
        macs += context_len * width  # mixing
    return 2 * macs


def plug_flops(answer, swap):
    """torch counts the multiplications of a real decode step; so does the learner's function."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    def attention(query, key, value, *_, out_shape=None, **__):
        return sdpa_flop_count(query, key, value)

    def linear(x, packed, *_, out_shape=None, **__):
        return 2 * x[0] * packed[0] * packed[1]  # shapes: [rows, in], [out, in]

    llm = make_llm(enable_prefix_caching=False, attention="sdpa")
    prompt = list(range(1, 41))
    llm.add_request(prompt, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    llm.step()  # reads the prompt
    on_cpu = {  # the counter lacks these two
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
        torch.ops.mkldnn._linear_pointwise: linear,
    }
    with FlopCounterMode(display=False, custom_mapping=on_cpu) as torchs:
        llm.step()  # writes one token, which attends to the prompt and itself
    with swap():
        yours = roofline.flops_per_token(llm.config, len(prompt) + 1)
    print(f"torch's own counter, during a real decode step   {torchs.get_total_flops():>15,} FLOPs")
    print(f"your function, from the configuration alone      {yours:>15,} FLOPs")
    if yours != torchs.get_total_flops():
        raise AssertionError("the two counts differ")
    print("Equal to the last FLOP.")


# ---- 01.2


def count_bytes(config, context_lens, weight_dtype_bytes, kv_dtype_bytes):
    """The oracle: every matrix once, then every token, layer and KV head."""
    total = sum(rows * columns * weight_dtype_bytes for rows, columns in matrices(config))
    for context_len in context_lens:
        for _ in range(context_len):
            for _ in range(config.num_layers * config.num_kv_heads):
                total += config.head_dim * kv_dtype_bytes  # a key
                total += config.head_dim * kv_dtype_bytes  # a value
    return float(total)


def check_bytes(t, step_bytes):
    t.case(step_bytes, SMALL, [4, 7, 2], 0.5, 2, expected=3284.0,
           note="3,448 weights of half a byte, 13 tokens of 120 bytes")  # fmt: skip
    t.case(step_bytes, SMALL, [1], 4, 2, expected=13912.0, note="one request, one token")
    t.case(step_bytes, ODD, [9, 4, 30], 2, 4, expected=count_bytes(ODD, [9, 4, 30], 2, 4),
           note="three requests share a step")  # fmt: skip
    t.case(step_bytes, SMALL, [5], 4.5 / 8, 2, expected=2539.5, note="4.5 bits a weight: half a byte may remain")
    t.case(step_bytes, ODD, [17] * 8, 2, 2, expected=count_bytes(ODD, [17] * 8, 2, 2), note="eight requests")
    t.case(step_bytes, ODD, [12, 40], 0.5, 2, expected=count_bytes(ODD, [12, 40], 0.5, 2),
           note="4-bit weights, 16-bit KV cache")  # fmt: skip
    tied = dataclasses.replace(ODD, tie_word_embeddings=True)
    t.case(
        step_bytes, tied, (6,), 2, 2, expected=count_bytes(tied, [6], 2, 2), note="a tied output head is read as well"
    )
    one, eight = t.call(step_bytes, ODD, [50], 2, 2), t.call(step_bytes, ODD, [50] * 8, 2, 2)
    t.true(eight < 8 * one, "eight requests in one step read less than eight steps of one", got=eight)
    weights = sum(2 * rows * columns for rows, columns in matrices(LLAMA_70B))
    t.case(step_bytes, LLAMA_70B, [8000], 2, 2, expected=weights + 8000 * 327680.0,
           note="Llama-3.1-70B, 8,000 tokens: 327,680 bytes of KV for each")  # fmt: skip
    t.case(step_bytes, SMALL, [], 4, 2, expected=13792.0, note="an empty list: the weights alone")


def _kv(config, tokens, kv_dtype_bytes, heads=None):
    return 2 * config.num_layers * (heads or config.num_kv_heads) * config.head_dim * kv_dtype_bytes * tokens


def weights_each(config, context_lens, weight_dtype_bytes, kv_dtype_bytes):
    weights = linear_params(config) * weight_dtype_bytes * len(context_lens)
    return weights + _kv(config, sum(context_lens), kv_dtype_bytes)


def query_heads(config, context_lens, weight_dtype_bytes, kv_dtype_bytes):
    weights = linear_params(config) * weight_dtype_bytes
    return weights + _kv(config, sum(context_lens), kv_dtype_bytes, heads=config.num_heads)


def weights_only(config, context_lens, weight_dtype_bytes, kv_dtype_bytes):
    return linear_params(config) * weight_dtype_bytes


def padded(config, context_lens, weight_dtype_bytes, kv_dtype_bytes):
    tokens = len(context_lens) * max(context_lens)
    return linear_params(config) * weight_dtype_bytes + _kv(config, tokens, kv_dtype_bytes)


def longest_only(config, context_lens, weight_dtype_bytes, kv_dtype_bytes):
    return linear_params(config) * weight_dtype_bytes + _kv(config, max(context_lens), kv_dtype_bytes)


def keys_only(config, context_lens, weight_dtype_bytes, kv_dtype_bytes):
    return linear_params(config) * weight_dtype_bytes + _kv(config, sum(context_lens), kv_dtype_bytes) / 2


def one_dtype(config, context_lens, weight_dtype_bytes, kv_dtype_bytes):
    return linear_params(config) * weight_dtype_bytes + _kv(config, sum(context_lens), weight_dtype_bytes)


def whole_table(config, context_lens, weight_dtype_bytes, kv_dtype_bytes):
    weights = (linear_params(config) + config.vocab_size * config.hidden_size) * weight_dtype_bytes
    return weights + _kv(config, sum(context_lens), kv_dtype_bytes)


def swapped_dtypes(config, context_lens, weight_dtype_bytes, kv_dtype_bytes):
    return step_bytes(config, context_lens, kv_dtype_bytes, weight_dtype_bytes)


def doubled_kv(config, context_lens, weight_dtype_bytes, kv_dtype_bytes):
    return linear_params(config) * weight_dtype_bytes + 2 * _kv(config, sum(context_lens), kv_dtype_bytes)


def one_layers_kv(config, context_lens, weight_dtype_bytes, kv_dtype_bytes):
    kv_bytes = _kv(config, sum(context_lens), kv_dtype_bytes) // config.num_layers
    return linear_params(config) * weight_dtype_bytes + kv_bytes


def no_weights(config, context_lens, weight_dtype_bytes, kv_dtype_bytes):
    return _kv(config, sum(context_lens), kv_dtype_bytes)


def as_bits(config, context_lens, weight_dtype_bytes, kv_dtype_bytes):
    return step_bytes(config, context_lens, weight_dtype_bytes / 8, kv_dtype_bytes / 8)


def in_gigabytes(config, context_lens, weight_dtype_bytes, kv_dtype_bytes):
    return step_bytes(config, context_lens, weight_dtype_bytes, kv_dtype_bytes) / 1e9


def bytes_variant(config, context_lens, weight_dtype_bytes, kv_dtype_bytes):
    total = linear_params(config) * weight_dtype_bytes
    row = config.num_kv_heads * config.head_dim * kv_dtype_bytes  # keys of one token in one layer
    for context_len in context_lens:
        for _ in range(config.num_layers):
            total += context_len * row  # keys
            total += context_len * row  # values
    return total


def plug_bytes(answer, swap):
    """The engine's GB/s meter calls step_bytes at every step."""
    machine = roofline.measure_machine()
    print(f"your machine reads {machine.bandwidth / 1e9:.1f} GB/s at best. The engine's meter, on your step_bytes:")
    with swap():
        for batch in (1, 4, 16):
            llm = make_llm(enable_prefix_caching=False)
            prompts = [[1 + i, 2, 3, 4] for i in range(batch)]
            llm.generate(prompts, SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True), progress=False)
            stats = llm.stats()
            share = stats["gb_per_second"] * 1e9 / machine.bandwidth
            print(f"  batch {batch:>2}: {stats['gb_per_second']:6.2f} GB/s ({share:4.0%} of that), "
                  f"{stats['tokens_per_second']:7.1f} tokens/s")  # fmt: skip
    print(
        "A larger batch reads few bytes more and yields many more tokens. Where its GB/s fall, that is why: nearly the"
    )
    print("same bytes, but more arithmetic and more small work for each request, so the step takes longer.")


# ---- 01.3

SLOW = Machine("a toy", bandwidth=10e9, flops=100e9)  # ridge: 10 FLOP/B


def check_roofline(t, roofline_seconds):
    t.case(roofline_seconds, 2e9, 1e9, SLOW, expected=0.1, note="0.02 s of computing, 0.1 s of moving")
    t.case(roofline_seconds, 50e9, 1e9, SLOW, expected=0.5, note="0.5 s of computing, 0.1 s of moving")
    t.case(roofline_seconds, 10e9, 1e9, SLOW, expected=0.1, note="at the ridge both take equally long")
    t.case(roofline_seconds, 0, 4e9, SLOW, expected=0.4, note="a copy computes nothing")
    t.case(roofline_seconds, 5e9, 0, SLOW, expected=0.05, note="all in the chip already: nothing moves")
    a100 = Machine("A100-80GB", bandwidth=2039e9, flops=312e12)
    for intensity in (1, 152, 154, 2000):
        seconds = 3e9 / 2039e9 if intensity < 153 else intensity * 3e9 / 312e12
        t.case(
            roofline_seconds,
            intensity * 3e9,
            3e9,
            a100,
            expected=seconds,
            note=f"{intensity} FLOP/B; the ridge is at 153",
        )
    fast = t.call(roofline_seconds, 2e9, 1e9, dataclasses.replace(SLOW, flops=1e15))
    t.equal(
        fast, 0.1, "2 FLOP/B on a chip that computes 10,000 times faster", note="memory-bound work does not notice it"
    )


def added(flops, num_bytes, machine):
    return flops / machine.flops + num_bytes / machine.bandwidth


def the_faster(flops, num_bytes, machine):
    return min(flops / machine.flops, num_bytes / machine.bandwidth)


def crossed(flops, num_bytes, machine):
    return max(flops / machine.bandwidth, num_bytes / machine.flops)


def attainable(flops, num_bytes, machine):
    return min(machine.flops, flops / num_bytes * machine.bandwidth)


def inverted(flops, num_bytes, machine):
    return max(machine.flops / flops, machine.bandwidth / num_bytes)


def memory_only(flops, num_bytes, machine):
    return num_bytes / machine.bandwidth


def compute_only(flops, num_bytes, machine):
    return flops / machine.flops


def roofline_variant(flops, num_bytes, machine):
    if flops > machine.ridge * num_bytes:  # more work for each byte than the machine needs to stay busy
        return flops / machine.flops
    return num_bytes / machine.bandwidth


def _step_seconds(llm, batch, prompt_tokens, new_tokens):
    """Seconds of each step: the first reads the prompts, each later one writes a token for every request."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    ids = [llm.add_request([1 + (i + j) % 90 for j in range(prompt_tokens)], params) for i in range(batch)]
    seconds = []
    while llm.scheduler.waiting or llm.scheduler.running:
        start = time.perf_counter()
        llm.step()
        seconds.append(time.perf_counter() - start)
    for request_id in ids:
        llm.abort(request_id)
    return seconds


def plug_roofline(answer, swap):
    """The learner's roofline against real steps of the engine on this machine."""
    llm, machine = make_llm(enable_prefix_caching=False), roofline.measure_machine()
    config, element = llm.config, llm.model.embed.weight.element_size()
    print(
        f"measured: {machine.bandwidth / 1e9:.1f} GB/s, {machine.flops / 1e9:.0f} GFLOP/s, "
        f"ridge {machine.ridge:.1f} FLOP/B"
    )
    _step_seconds(llm, 1, 8, 2)  # warm-up
    rows = [("write, 1 request", 1, 8, statistics.median(_step_seconds(llm, 1, 8, 8)[1:])),
            ("write, 16 requests", 16, 8, statistics.median(_step_seconds(llm, 16, 8, 5)[1:])),
            ("read 128 tokens", 1, 128, _step_seconds(llm, 1, 128, 1)[0])]  # fmt: skip
    print(f"{'':<20}{'FLOP/B':>8}{'your least ms':>15}{'measured ms':>13}")
    for name, batch, tokens, seconds in rows:
        if name.startswith("read"):  # only the last token of a prompt needs the output head
            flops = sum(roofline.flops_per_token(config, p + 1) for p in range(tokens))
            flops -= 2 * config.vocab_size * config.hidden_size * (tokens - 1)
            contexts = [tokens]
        else:
            flops, contexts = batch * roofline.flops_per_token(config, tokens + 1), [tokens + 1] * batch
        num_bytes = roofline.step_bytes(config, contexts, element, element)
        with swap():
            least = roofline.roofline_seconds(flops, num_bytes, machine)
        print(f"{name:<20}{flops / num_bytes:>8.1f}{least * 1e3:>15.1f}{seconds * 1e3:>13.1f}")
    print("A real step cannot be faster than the true roofline. How close it comes is the engine's work.")


# ---- 01.4


def count_rate(config, context_lens, weight_dtype_bytes, kv_dtype_bytes, machine):
    """The oracle: from the matrices' shapes, with numbers only."""
    weights = sum(rows * columns for rows, columns in matrices(config))
    tokens, batch = sum(context_lens), len(context_lens)
    flops = batch * 2 * weights + 4 * config.num_layers * config.num_heads * config.head_dim * tokens
    moved = (
        weights * weight_dtype_bytes
        + 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_dtype_bytes * tokens
    )
    seconds = moved / machine.bandwidth if moved * machine.flops > flops * machine.bandwidth else flops / machine.flops
    return batch / seconds


def check_rate(t, decode_tokens_per_second):
    even = Machine("even", bandwidth=1e6, flops=4e6)  # both times are of the same size
    memory = Machine("slow memory", bandwidth=1e6, flops=1e12)
    compute = Machine("slow arithmetic", bandwidth=1e12, flops=1e6)
    small, rate = [4, 7, 2], decode_tokens_per_second
    t.case(rate, SMALL, [7], 0.5, 2, even, expected=1e6 / 2564,
           note="one request: 2,564 bytes take 2.564 ms, 9,416 FLOPs take 2.354 ms")  # fmt: skip
    t.case(rate, SMALL, small, 0.5, 2, memory, expected=3e6 / 3284,
           note="three requests, memory-bound: 3,284 bytes for three tokens")  # fmt: skip
    t.case(rate, SMALL, small, 0.5, 2, compute, expected=3e6 / 25368,
           note="compute-bound: 8,336 + 9,416 + 7,616 FLOPs for three tokens")  # fmt: skip
    t.case(rate, SMALL, small, 0.5, 2, even, expected=12e6 / 25368, note="3.284 ms of moving, 6.342 ms of computing")
    for contexts in ([9, 4, 30], [200], [17] * 8, [3000] * 5):
        for machine in (memory, compute, SLOW):
            t.case(rate, ODD, contexts, 2, 4, machine, expected=count_rate(ODD, contexts, 2, 4, machine))
    one = t.call(rate, ODD, [50], 2, 2, compute)
    many = t.call(rate, ODD, [50] * 10, 2, 2, compute)
    t.equal(
        many, one, "ten requests against one, compute-bound", note="beyond the ridge a larger batch yields nothing more"
    )
    four = Machine("4 x A100-80GB as one", bandwidth=4 * 2039e9, flops=4 * 312e12)
    t.case(rate, LLAMA_70B, [1000], 2, 2, four, expected=count_rate(LLAMA_70B, [1000], 2, 2, four),
           note="Llama-3.1-70B in bf16 on four A100s")  # fmt: skip


def _flops(config, context_lens):
    return sum(flops_per_token(config, length) for length in context_lens)


def steps_per_second(config, context_lens, weight_dtype_bytes, kv_dtype_bytes, machine):
    num_bytes = step_bytes(config, context_lens, weight_dtype_bytes, kv_dtype_bytes)
    return 1 / roofline_seconds(_flops(config, context_lens), num_bytes, machine)


def one_after_another(config, context_lens, weight_dtype_bytes, kv_dtype_bytes, machine):
    seconds = 0.0
    for length in context_lens:
        num_bytes = step_bytes(config, [length], weight_dtype_bytes, kv_dtype_bytes)
        seconds += roofline_seconds(flops_per_token(config, length), num_bytes, machine)
    return len(context_lens) / seconds


def flops_of_one(config, context_lens, weight_dtype_bytes, kv_dtype_bytes, machine):
    num_bytes = step_bytes(config, context_lens, weight_dtype_bytes, kv_dtype_bytes)
    return len(context_lens) / roofline_seconds(flops_per_token(config, context_lens[0]), num_bytes, machine)


def one_long_token(config, context_lens, weight_dtype_bytes, kv_dtype_bytes, machine):
    num_bytes = step_bytes(config, context_lens, weight_dtype_bytes, kv_dtype_bytes)
    return len(context_lens) / roofline_seconds(flops_per_token(config, sum(context_lens)), num_bytes, machine)


def no_context(config, context_lens, weight_dtype_bytes, kv_dtype_bytes, machine):
    num_bytes = step_bytes(config, [], weight_dtype_bytes, kv_dtype_bytes)
    return len(context_lens) / roofline_seconds(_flops(config, context_lens), num_bytes, machine)


def context_counted(config, context_lens, weight_dtype_bytes, kv_dtype_bytes, machine):
    num_bytes = step_bytes(config, context_lens, weight_dtype_bytes, kv_dtype_bytes)
    return sum(context_lens) / roofline_seconds(_flops(config, context_lens), num_bytes, machine)


def memory_bound_always(config, context_lens, weight_dtype_bytes, kv_dtype_bytes, machine):
    return len(context_lens) * machine.bandwidth / step_bytes(config, context_lens, weight_dtype_bytes, kv_dtype_bytes)


def seconds_per_token(config, context_lens, weight_dtype_bytes, kv_dtype_bytes, machine):
    num_bytes = step_bytes(config, context_lens, weight_dtype_bytes, kv_dtype_bytes)
    return roofline_seconds(_flops(config, context_lens), num_bytes, machine) / len(context_lens)


def longest_for_all(config, context_lens, weight_dtype_bytes, kv_dtype_bytes, machine):
    same = [max(context_lens)] * len(context_lens)
    num_bytes = step_bytes(config, same, weight_dtype_bytes, kv_dtype_bytes)
    return len(same) / roofline_seconds(_flops(config, same), num_bytes, machine)


def first_for_all(config, context_lens, weight_dtype_bytes, kv_dtype_bytes, machine):
    same = [context_lens[0]] * len(context_lens)
    num_bytes = step_bytes(config, same, weight_dtype_bytes, kv_dtype_bytes)
    return len(same) / roofline_seconds(_flops(config, same), num_bytes, machine)


def rates_summed(config, context_lens, weight_dtype_bytes, kv_dtype_bytes, machine):
    total = 0.0
    for length in context_lens:
        num_bytes = step_bytes(config, [length], weight_dtype_bytes, kv_dtype_bytes)
        total += 1 / roofline_seconds(flops_per_token(config, length), num_bytes, machine)
    return total


def times_added(config, context_lens, weight_dtype_bytes, kv_dtype_bytes, machine):
    num_bytes = step_bytes(config, context_lens, weight_dtype_bytes, kv_dtype_bytes)
    return len(context_lens) / added(_flops(config, context_lens), num_bytes, machine)


def rate_variant(config, context_lens, weight_dtype_bytes, kv_dtype_bytes, machine):
    batch = len(context_lens)
    mean = sum(context_lens) / batch  # FLOPs grow evenly with the context, so the mean request stands for all
    by_compute = machine.flops / flops_per_token(config, mean)
    by_memory = batch * machine.bandwidth / step_bytes(config, context_lens, weight_dtype_bytes, kv_dtype_bytes)
    return min(by_compute, by_memory)


def plug_rate(answer, swap):
    """Ceilings against real decode steps, then two claims."""
    llm, machine = make_llm(enable_prefix_caching=False), roofline.measure_machine()
    element = llm.model.embed.weight.element_size()
    print(f"this machine: {machine.bandwidth / 1e9:.1f} GB/s, {machine.flops / 1e9:.0f} GFLOP/s")
    print(f"{'batch':>5}{'your ceiling':>15}{'measured':>11}   tokens/s")
    _step_seconds(llm, 1, 8, 2)  # warm-up
    with swap():
        for batch in (1, 4, 16):
            seconds = statistics.median(_step_seconds(llm, batch, 8, 6)[1:])
            ceiling = roofline.decode_tokens_per_second(llm.config, [11] * batch, element, element, machine)
            print(f"{batch:>5}{ceiling:>15.1f}{batch / seconds:>11.1f}   {batch / seconds / ceiling:.0%} of it")
        rates = []
        for what, config, context, bits, one, claim in CLAIMS:
            moved = roofline.step_bytes(config, [context], bits / 8, 2)
            rates.append(roofline.decode_tokens_per_second(config, [context], bits / 8, 2, one))
            print(f"\nSuppose someone claims {claim} tokens/s for one user: {what},")
            print(f"  {bits} bits a weight, context {context:,}: {moved / 1e9:.2f} GB a token. {one.name} reads "
                  f"{one.bandwidth / 1e9:,.0f} GB/s.")  # fmt: skip
            verdict = "impossible" if claim > rates[-1] else "not ruled out"
            print(f"  Your ceiling: {rates[-1]:.1f}. The claim is {verdict}.")
    if not rates[0] < 40 or not rates[1] > 50:
        raise AssertionError("these ceilings are not those of the engine's own function")
    print("\nWith these bytes, no engine writes faster than the ceiling.")


EXERCISES = [
    Exercise(
        id="01.1",
        symbol="minillm.roofline:flops_per_token",
        title="FLOPs of one token",
        minutes=8,
        difficulty=1,
        statement="""
            How many floating-point operations (FLOPs) does one token's way through the model take? Two parts:

            * **Matrices.** The token's vector meets every weight once: one multiplication and one addition for
              each. `linear_params(config)` counts these weights (it is imported above).
            * **Attention.** The token looks back at `context_len` tokens, itself counted. Every layer does this with
              several **query heads** side by side, each on `head_dim` numbers of its own. A query head takes a dot
              product with the key of each token in sight (the scores), and then adds up their values, each times a
              number that came from its score (the mixing).

            The configuration has `num_heads` query heads, and `num_kv_heads` heads that have keys and values. Norms,
            rotations and softmax are small; leave them out. The result is an int.

            Worked example: 3,448 weights, 5 layers, 3 query heads, 1 KV head, `head_dim` 6, `context_len` 7. Matrices:
            6,896. Attention: 2,520. Together **9,416**.
        """,
        hints=(
            "Do the two parts apart. Take one query head in one layer and one token in sight: how many multiplications "
            "and additions for the score, how many for the mixing?",
            "A dot product of d numbers is d multiplications and d additions; mixing takes as many. How often does "
            "that happen in the whole model?",
            "The factors of the attention part are: 4, the layers, the query heads, the head's dimension and the "
            "context. The matrices are twice `linear_params`.",
        ),
        explanation="""
            A multiply-add is two FLOPs, so a matrix of n weights takes 2n for one token. This is the well-known
            rule "2 N per token" (N: parameters). The rest is attention: scores and mixing, 2 FLOPs each, for every
            layer, query head, dimension and token in sight. PaLM's formula 6N + 12LHQT (arXiv:2204.02311, appendix
            B) is the same thing for training: forward and backward are three times the forward pass, 2N + 4LHQT.

            Query heads that share keys and values (*grouped-query attention*, stage 03) do not change the count. Sharing
            saves bytes, which is the next exercise. The embedding is a look-up, no product; a tied table, one that is
            embedding and output head at once, is still multiplied as the output head.

            The FLOPs that the model needs, per second, over the chip's peak are called *MFU* (model FLOPs utilisation).
            vLLM and SGLang report such estimates when asked (`--enable-mfu-metrics`). llama.cpp's `llama-bench` reports
            tokens/s only; multiply by this function to get FLOP/s.
        """,
        check=check_flops,
        mutants=(
            Mutant(
                "macs",
                macs,
                "You count a multiply-add as one operation. Chips' FLOP/s count two: everything is half.",
                "papers that report MACs beside data sheets that report FLOPs",
            ),
            Mutant(
                "no_attention",
                no_attention,
                "Attention is missing: your count does not grow with the context.",
                "the rule of thumb 2N, used for long contexts",
            ),
            Mutant(
                "kv_heads",
                kv_heads,
                "You took the KV heads. Every *query* head computes its own scores; sharing "
                "keys saves memory, not FLOPs.",
                "the formula of the KV cache, used for the wrong question",
            ),
            Mutant(
                "one_product",
                one_product,
                "Half of the attention is missing: the scores are a product, and the mixing of the values is another.",
                "estimates that stop at the score matrix",
            ),
            Mutant(
                "one_layer", one_layer, "Attention happens in every layer. You counted one layer's.", "a common slip"
            ),
            Mutant(
                "hidden_size",
                hidden_size,
                "hidden_size is not num_heads * head_dim in every model (Qwen3: 1024 and 16 x 128). Use the heads.",
                "estimators written for GPT-2",
            ),
            Mutant(
                "whole_prompt",
                whole_prompt,
                "context_len squared is the attention of a whole prompt. This is one token.",
                "'attention is quadratic', taken for one token",
            ),
            Mutant(
                "training",
                training,
                "The factors 6 and 12 are for training: forward *and* backward. Inference is forward only: a third.",
                "PaLM's formula, appendix B, used for inference",
            ),
            Mutant(
                "embedding_too",
                embedding_too,
                "The embedding table is not multiplied: a token picks one row of it. "
                "`linear_params` already has the output head.",
                "taking the parameter count from the model's card",
            ),
            Mutant(
                "matrices_per_context",
                matrices_per_context,
                "You multiply the matrices by context_len too. Earlier tokens met them in earlier steps; only attention "
                "looks back.",
                "the FLOPs of a whole prompt, taken for one token",
            ),
            Mutant(
                "everything_per_layer",
                everything_per_layer,
                "You multiply the matrices by the layers. `linear_params` has all layers in it.",
                "linear_params taken for one layer's weights",
            ),
            Mutant(
                "without_itself",
                without_itself,
                "You take context_len - 1. The token attends to itself too, and context_len counts it already.",
                "the cache's length before the step, taken for the context",
            ),
        ),
        variant=flops_variant,
        scratch="""
            from minillm.config import ModelConfig

            #             vocabulary, hidden, intermediate, layers, heads, KV heads, head_dim
            small = ModelConfig("llama", 11, 8, 12, 5, 3, 1, 6)
            print(linear_params(small), "weights")
            print(flops_per_token(small, 7), "should be 9416")
        """,
        plug_in=plug_flops,
    ),
    Exercise(
        id="01.2",
        symbol="minillm.roofline:step_bytes",
        title="Bytes of one step",
        minutes=8,
        difficulty=2,
        statement="""
            How many bytes must one step read from memory? A step serves `len(context_lens)` requests at once;
            `context_lens[i]` tokens of request i lie in the KV cache.

            * The weights, `linear_params(config)` of them, `weight_dtype_bytes` each.
            * Keys and values of every token in every request's cache. `kv.kv_bytes_per_token(num_layers,
              num_kv_heads, head_dim, dtype_bytes)` says how many bytes one token has (you write it in stage 02).

            `weight_dtype_bytes` may be 0.5 (4-bit weights) or 0.5625 (with scales). The result is a number of bytes, not
            of GB, and need not be whole. With an empty list it is the weights alone.

            Worked example: the model of 01.1 with weights of 4 bits and a cache of 16 bits, so 0.5 and 2 bytes. Weights:
            1,724 bytes. Three requests with 4, 7 and 2 tokens: 1,560 bytes. Together **3,284**.
        """,
        hints=(
            "Which of the two parts grows with the number of requests?",
            "Everyone in the step uses the same weights, but nobody shares a cache.",
            "Weights times their size, once; then the bytes per token (with `kv_dtype_bytes`) times all tokens in all "
            "caches.",
        ),
        explanation="""
            The weights are read once per *step*, whoever takes part. That is the whole reason for batching. The KV
            cache is private: each request adds its own context. So with many requests, or long ones, it is the
            cache that fills the bus, and then a larger batch no longer helps.

            Left out on purpose: activations (kilobytes), the norms' weights, the few embedding rows that are looked
            up, and the writing of the new keys and values.

            vLLM, SGLang and llama.cpp all live by this sum. llama.cpp users know it as "model size / bandwidth =
            tokens per second", which is right for one request with a short context. Called MBU (model bandwidth
            utilisation) when divided by time and by the memory's bandwidth.
        """,
        check=check_bytes,
        mutants=(
            Mutant(
                "weights_each",
                weights_each,
                "You read the weights once per request. They are read once per step: that is what batching is for.",
                "batch calculators that scale everything with the batch",
            ),
            Mutant(
                "query_heads",
                query_heads,
                "The cache holds num_kv_heads heads per layer, not num_heads: query heads share them.",
                "a post that gives 20 GB for 8,000 tokens of a 70B model; it is 2.6 GB",
            ),
            Mutant(
                "weights_only",
                weights_only,
                "The KV cache is missing. Each step reads all of it.",
                "model size / bandwidth, used for long contexts",
            ),
            Mutant(
                "padded",
                padded,
                "You count every request as long as the longest. Each request's cache is read as long as it is: no padding.",
                "static batching with padding",
            ),
            Mutant(
                "longest_only",
                longest_only,
                "You count one request's cache. Each request has its own: add them up.",
                "a common slip",
            ),
            Mutant(
                "keys_only",
                keys_only,
                "Half of the cache is missing: keys *and* values.",
                "memory estimators that forget the factor 2",
            ),
            Mutant(
                "one_dtype",
                one_dtype,
                "You used weight_dtype_bytes for the cache. 4-bit weights often go with a 16-bit cache: "
                "use kv_dtype_bytes.",
                "sizing a GGUF model by its file size only",
            ),
            Mutant(
                "whole_table",
                whole_table,
                "The embedding table is not read: a token looks up one row. `linear_params` already has the output head.",
                "taking the parameter count from the model's card",
            ),
            Mutant(
                "swapped_dtypes",
                swapped_dtypes,
                "The two sizes are swapped: weights take weight_dtype_bytes, the cache kv_dtype_bytes.",
                "hidden as long as both are 16 bits",
            ),
            Mutant(
                "doubled_kv",
                doubled_kv,
                "Your cache is twice too big: kv_bytes_per_token has keys *and* values in it already.",
                "the factor 2 of the KV formula, applied a second time",
            ),
            Mutant(
                "one_layers_kv",
                one_layers_kv,
                "You count the cache of one layer. Every layer has keys and values of its own.",
                "a KV formula without the layers",
            ),
            Mutant(
                "no_weights",
                no_weights,
                "The weights are missing. Every step reads all of them, once.",
                "the size of the cache, taken for the bytes of a step",
            ),
            Mutant(
                "as_bits",
                as_bits,
                "You divided by 8. The arguments are bytes already, not bits.",
                "bits and bytes mixed up in memory estimators",
            ),
            Mutant(
                "in_gigabytes",
                in_gigabytes,
                "You return GB. The function returns bytes; whoever prints may divide.",
                "GB and GiB differ by 7 %: keep bytes inside",
            ),
        ),
        variant=bytes_variant,
        scratch="""
            from minillm.config import ModelConfig

            small = ModelConfig("llama", 11, 8, 12, 5, 3, 1, 6)
            per_token = kv.kv_bytes_per_token(small.num_layers, small.num_kv_heads, small.head_dim, 2)
            print(per_token, "bytes of KV per token")
            print(step_bytes(small, [4, 7, 2], 0.5, 2), "should be 3284.0")
            print(step_bytes(small, [4], 0.5, 2), "for the first request alone: more than a third")
        """,
        plug_in=plug_bytes,
    ),
    Exercise(
        id="01.3",
        symbol="minillm.roofline:roofline_seconds",
        title="The roofline",
        minutes=5,
        difficulty=1,
        statement="""
            A machine computes at most `machine.flops` FLOP/s and reads at most `machine.bandwidth` bytes/s. It does
            both at the same time: while it multiplies, the next weights are on their way. What is the least number
            of seconds in which it can do `flops` FLOPs on `num_bytes` bytes?

            Worked example: 100 GFLOP/s and 10 GB/s. Work of 2 GFLOP on 1 GB takes **0.1** s, work of 50 GFLOP on 1 GB
            takes **0.5** s.
        """,
        hints=(
            "Compute the two times. Two people work side by side: when are both done?",
            "In the first example computing takes 0.02 s and moving 0.1 s. In the second it is 0.5 s and still 0.1 s. Which "
            "of the two times is the answer in each?",
            "Each amount over its own rate, FLOPs over FLOP/s and bytes over bytes/s. Python has a function that picks "
            "the later of two.",
        ),
        explanation="""
            The slower of the two decides, as computing and moving overlap. Divide the FLOPs by this time and you
            get the roofline's formula, min(peak, intensity x bandwidth) (Williams, Waterman, Patterson, CACM 2009).
            Asking first whether the intensity is above the ridge is right too; it picks the same branch.

            It is a *lower bound*. Code that does not overlap the two can take up to the sum of both, which is at
            most twice as long. What takes longer still has another cause, such as starting many small operators.

            Profilers draw the same picture (Nsight Compute's roofline view). vLLM and SGLang can estimate the FLOP/s
            they reach (`--enable-mfu-metrics`). In llama.cpp's `llama-bench`, `pp` usually sits under the flat roof and
            `tg` under the slope.
        """,
        check=check_roofline,
        mutants=(
            Mutant(
                "added",
                added,
                "You add the two times. They overlap: while one matrix is multiplied, the next is on its way.",
                SEEN_ADDED,
            ),
            Mutant(
                "the_faster",
                the_faster,
                "You took the smaller time (min, or the wrong side of the ridge). The work is done "
                "when *both* are done.",
                "min(peak, intensity x bandwidth), which is about rates, used for times",
            ),
            Mutant(
                "crossed", crossed, "FLOPs over bytes/s has no meaning: the two rates are swapped.", "a common slip"
            ),
            Mutant(
                "inverted",
                inverted,
                "You divide the rate by the amount. Seconds are FLOPs over FLOP/s, bytes over bytes/s: look at the units.",
                "a common slip",
            ),
            Mutant(
                "attainable",
                attainable,
                "That is a rate, the FLOP/s that can be attained. Asked for are seconds.",
                "the formula of the roofline paper",
            ),
            Mutant(
                "memory_only",
                memory_only,
                "You count moving only. Above the ridge, computing takes longer.",
                "'inference is memory-bound', taken for all of it",
            ),
            Mutant(
                "compute_only",
                compute_only,
                "You count computing only. Below the ridge the chip waits for memory.",
                "estimating decode speed from a data sheet's FLOP/s",
            ),
        ),
        variant=roofline_variant,
        scratch="""
            from minillm.roofline import Machine

            machine = Machine("toy", bandwidth=10e9, flops=100e9)
            for flops in (2e9, 10e9, 50e9):
                print(roofline_seconds(flops, 1e9, machine))  # 0.1, 0.1, 0.5
        """,
        plug_in=plug_roofline,
    ),
    Exercise(
        id="01.4",
        symbol="minillm.roofline:decode_tokens_per_second",
        title="Predict the decode speed",
        minutes=10,
        difficulty=2,
        statement="""
            Put the three together: how many output tokens per second can a machine write at most? One decode step
            writes **one** token for each entry of `context_lens`. Count the step's FLOPs and bytes, let the
            roofline say how long it takes, and turn that into tokens per second of the whole batch.

            It may use `flops_per_token`, `step_bytes` and `roofline_seconds`: yours from above, or, if you skipped
            one, the engine's (`from minillm.roofline import step_bytes`).

            Worked example, with the small model and the three requests of 01.2: 25,368 FLOPs, 3,284 bytes. On a machine
            with 4 MFLOP/s and 1 MB/s: **473.04** tokens/s. With 1 TFLOP/s and 1 MB/s: **913.52**.
        """,
        hints=(
            "First the duration of one step. Then: how many tokens does it bring?",
            "FLOPs: each request computes its own token at its own context, so add them up. Bytes: one call for the "
            "whole batch, as the weights are shared.",
            "A sum over context_lens, then `step_bytes` with the whole list, then `roofline_seconds`; the number of "
            "requests divided by that.",
        ),
        explanation="""
            Tokens per second of the system = requests / seconds per step. While the step is memory-bound, another
            request costs only its KV bytes, so the total grows almost in proportion. Beyond the ridge each request
            brings its FLOPs along and the total stands still. Each *user* sees 1 / seconds: the total grows,
            everyone waits longer.

            FLOPs grow evenly with the context, so the mean context times the batch is right as well. So is the
            smaller of two rates, one by compute, one by memory.

            This is how to test a claim: no engine (vLLM, SGLang, llama.cpp) is faster than this ceiling with these
            bytes. Whoever writes more than one token per request and step (speculative decoding, stage 09) changes
            the premise, not the law.
        """,
        check=check_rate,
        mutants=(
            Mutant(
                "steps_per_second",
                steps_per_second,
                "That is steps per second. Each step writes a token for every request: times len(context_lens).",
                "tokens/s of one user reported as tokens/s of the server, and the reverse",
            ),
            Mutant(
                "one_after_another",
                one_after_another,
                "You run the requests one after another, so each reads the weights again. One step serves them all.",
                "thinking of a batch as a loop",
            ),
            Mutant(
                "flops_of_one",
                flops_of_one,
                "FLOPs of one request only. Each request's token must be computed: add them up.",
                "hidden as long as the step is memory-bound",
            ),
            Mutant(
                "one_long_token",
                one_long_token,
                "You count one token that attends to all contexts. Each request has its own "
                "token: every one meets all the weights.",
                "hidden as long as the step is memory-bound",
            ),
            Mutant(
                "no_context",
                no_context,
                "The KV cache's bytes are missing: pass context_lens to step_bytes.",
                "model size / bandwidth, used for long contexts",
            ),
            Mutant(
                "context_counted",
                context_counted,
                "You count the tokens in the caches as output. They were computed before; "
                "a step writes one token per request.",
                "throughput figures that add input and output tokens",
            ),
            Mutant(
                "memory_bound_always",
                memory_bound_always,
                "You only look at bytes. Past the ridge the FLOPs decide, and more requests yield nothing.",
                "'decode is memory-bound', taken for every batch size",
            ),
            Mutant(
                "seconds_per_token",
                seconds_per_token,
                "That is seconds per token: turn it round.",
                "time per output token (TPOT), which benchmarks report beside tokens/s",
            ),
            Mutant(
                "longest_for_all",
                longest_for_all,
                "You give every request the longest context. Each has its own.",
                "static batching with padding",
            ),
            Mutant(
                "first_for_all",
                first_for_all,
                "You give every request the first one's context. Each has its own.",
                "calculators that ask for a batch size and one context",
            ),
            Mutant(
                "rates_summed",
                rates_summed,
                "You add up the speeds that each request would have alone. They share one machine: one step, one time, "
                "then divide.",
                "one user's tokens/s, multiplied by the number of users",
            ),
            Mutant(
                "times_added",
                times_added,
                "You add the time of computing to that of moving. They overlap: `roofline_seconds` takes both.",
                SEEN_ADDED,
            ),
        ),
        variant=rate_variant,
        scratch="""
            from minillm.config import ModelConfig
            from minillm.roofline import Machine

            small = ModelConfig("llama", 11, 8, 12, 5, 3, 1, 6)
            machine = Machine("toy", bandwidth=1e6, flops=4e6)
            for contexts in ([7], [4, 7, 2], [7] * 100):
                rate = decode_tokens_per_second(small, contexts, 0.5, 2, machine)
                print(len(contexts), "requests:", rate, "tokens/s")
        """,
        plug_in=plug_rate,
    ),
]
