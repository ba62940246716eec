"""The stages of the course. Numbers and exercise ids never change; new ones go to the end or get a letter.

A stage is a package `sNN_slug` here, or in a folder named by the environment variable MINILLM_STAGES.
"""

import os

__path__ = [*__path__, *filter(None, os.environ.get("MINILLM_STAGES", "").split(os.pathsep))]

# number: (slug, title, what the reader can do afterwards)
PLAN: dict[str, tuple[str, str, str]] = {
    "00": (
        "start_here",
        "Start here",
        "run the doctor, generate with a real model, measure TTFT, TPOT, tokens/s and cost before optimising anything",
    ),
    "01": (
        "prefill_and_decode",
        "Prefill and decode",
        "compute arithmetic intensity, place both phases on your machine's roofline, predict decode speed from bytes",
    ),
    "02": (
        "kv_cache",
        "The KV cache",
        "turn recomputation into a cache, size it for any model, check published claims",
    ),
    "03": (
        "attention_heads_and_tiles",
        "Attention: heads and tiles",
        "explain MHA, MQA and GQA, write online softmax and FlashAttention's tiling, use a sliding window",
    ),
    "04": (
        "paged_blocks",
        "Paged blocks",
        "build block tables, measure fragmentation, copy on write, run paged attention",
    ),
    "05": (
        "prefix_caching",
        "Prefix caching",
        "chain block hashes, count references, evict by LRU, measure the hit rate of a multi-turn chat",
    ),
    "06": (
        "batching",
        "Batching",
        "compare static, dynamic and continuous batching, and say why the slowest request sets the pace",
    ),
    "07": (
        "scheduling",
        "Scheduling",
        "chunk prefills, share a token budget, preempt, use priorities and deadlines, measure goodput under an SLO",
    ),
    "08": (
        "sampling_and_streaming",
        "Sampling and streaming",
        "sample from temperature to min-p, keep seeds stable under batching, stream stop strings and UTF-8 correctly",
    ),
    "09": (
        "speculative_decoding",
        "Speculative decoding",
        "draft, verify, accept and resample, prove it lossless, say when it pays",
    ),
    "10": (
        "speculation_variants",
        "Speculation variants",
        "use prompt lookup, early exit, trees and extra heads, adapt the draft length, measure acceptance by domain",
    ),
    "11": (
        "weight_quantization",
        "Weight quantization",
        "quantise to INT8 and INT4 in groups, pack, read GGUF block formats, use kernels that really read fewer bytes",
    ),
    "12": (
        "calibrated_quantization",
        "Calibrated quantization",
        "apply GPTQ, AWQ, SmoothQuant and FP8, judge them by perplexity and task checks, mix precisions",
    ),
    "13": (
        "kv_compression",
        "KV compression",
        "quantise or drop KV entries (window, sinks, heavy hitters) and say what each costs in quality",
    ),
    "14": (
        "gpu_kernels",
        "GPU kernels",
        "write paged attention in Triton, fuse, use CUDA graphs, profile, reach for the roofline (no GPU needed)",
    ),
    "15": (
        "parallelism",
        "Parallelism",
        "split a model by tensors and by layers, count the bytes moved, say which helps latency and which capacity",
    ),
    "16": (
        "disaggregation",
        "Disaggregation",
        "run prefill and decode apart, move KV blocks between them, say when it pays",
    ),
    "17": (
        "serving",
        "Serving",
        "serve the OpenAI API, read metrics, load-test, separate traffic classes, add a semantic cache",
    ),
    "18": (
        "cost_and_choice",
        "Cost and choice",
        "combine everything, compute cost per million tokens before and after, choose for a scenario",
    ),
    "19": (
        "bug_museum",
        "Bug museum",
        "reproduce, explain and catch real bugs of real engines",
    ),
}
