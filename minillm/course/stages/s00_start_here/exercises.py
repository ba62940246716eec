"""Exercises of stage 00: the four numbers, and a warm-up that shows how checks work."""

import itertools
import statistics
from fractions import Fraction

from minillm import SamplingParams, metrics
from minillm.course.exercise import Exercise, Mutant
from minillm.course.learn import make_llm

ANIMALS = ("snail", "whale", "robin", "camel")
READING = 238  # words a minute: Brysbaert 2019, J. Memory and Language 109, mean of silent reading, English non-fiction


def run(seats, num_requests=4, num_tokens=8):
    """Generate for `num_requests` users who arrive together on an engine with so many seats; their outputs."""
    llm = make_llm(max_num_seqs=seats, num_kv_blocks=64)
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    prompts: list[str | list[int]] = [f"A short story about a {animal}:" for animal in ANIMALS[:num_requests]]
    if llm.tokenizer is None:  # the tiny random model speaks in token ids
        prompts = [[3 + i, 1, 4, 1, 5] for i in range(num_requests)]
    llm.generate(prompts[0], SamplingParams(max_tokens=2, temperature=0.0))  # the first run is slower: not measured
    return llm.generate(prompts, params, progress=False)


def counts_and_spans(outputs):
    return [len(o.outputs[0].token_ids) for o in outputs], [(o.metrics.arrival, o.metrics.finished) for o in outputs]


def bar(value, largest, width=36):
    return "█" * max(1, round(width * value / largest))


# ---- 00.0


def check_gaps(t, gaps):
    if isinstance(gaps, float) and gaps.is_integer():
        gaps = int(gaps)
    t.equal(gaps, 11, "gaps between 12 tokens", hide=True)


def plug_gaps(answer, swap):
    times = run(seats=1, num_requests=1, num_tokens=12)[0].metrics.token_times
    ticks = [round(60 * (time - times[0]) / (times[-1] - times[0])) for time in times]
    line = "".join("|" if place in ticks else "·" for place in range(61))
    dot = 1000 * (times[-1] - times[0]) / 60
    print(f"the engine's next 12 tokens, each one a |; from one sign to the next it is {dot:.0f} ms")
    print(f"  {line}")
    gaps = [b - a for a, b in itertools.pairwise(times)]
    print(f"{len(times)} tokens, and between them {len(gaps)} gaps: {sum(gaps):.2f} s together")


# ---- 00.1


def check_ttft(t, ttft):
    t.case(ttft, 2.0, [2.5, 2.7, 2.9], expected=0.5, note="the example")
    t.case(ttft, 100.0, [100.25], expected=0.25, note="one token is enough")
    t.case(ttft, 0.0, [0.75, 0.8], expected=0.75, note="the clock happens to start at 0")
    t.case(ttft, 7.0, [7.0, 7.1], expected=0.0, note="no wait at all")
    t.case(ttft, 40.0, [49.0, 49.05, 49.1], expected=9.0, note="most of the wait was in the queue")
    for shift in (0.0, 3600.0, 86400.0):
        times = [1.5 + shift, 9.0 + shift, 9.5 + shift]
        t.case(ttft, 1.0 + shift, times, expected=0.5, note="when the clock was started does not matter")
    t.case(ttft, 3.0141592, [3.9876543, 4.1], expected=0.9734951, note="many decimals: round only when you print")


def ttft_clock(arrival, token_times):
    return token_times[0]


def ttft_last(arrival, token_times):
    return token_times[-1] - arrival


def ttft_gap(arrival, token_times):
    return token_times[1] - token_times[0]


def ttft_sign(arrival, token_times):
    return arrival - token_times[0]


def ttft_milliseconds(arrival, token_times):
    return (token_times[0] - arrival) * 1000


def ttft_shared(arrival, token_times):
    return (token_times[0] - arrival) / len(token_times)


def ttft_variant(arrival, token_times):
    waits = [time - arrival for time in token_times]
    return sorted(waits)[0]


def plug_ttft(answer, swap):
    with swap():
        waits = [output.metrics.ttft for output in run(seats=1)]  # the engine's property calls your function
    print("Four users arrive together, but there is one seat (max_num_seqs=1). TTFT by your function:")
    for i, wait in enumerate(waits):
        print(f"  user {i}  {wait:6.3f} s  {bar(wait, max(waits))}")
    print("The model is equally fast for all four. The queue is not, and your number sees it.")
    if waits != sorted(waits):
        raise AssertionError("users who wait longer must have a longer TTFT")


# ---- 00.2


def check_tpot(t, tpot):
    t.case(tpot, [1.0, 1.2, 1.4, 1.6], expected=0.2, note="4 tokens, 3 gaps of 0.2 s")
    t.case(tpot, [3.0, 3.1, 3.3, 4.5], expected=0.5, note="gaps of 0.1, 0.2 and 1.2 s")
    t.case(tpot, [5.0, 5.25], expected=0.25, note="two tokens, one gap")
    t.case(tpot, [7.5], expected=0.0, note="one token: there is no gap")
    t.case(tpot, [], expected=0.0, note="no token")
    generator = t.rng(0)
    import torch

    for n in (3, 10, 65):
        gaps = (torch.rand(n - 1, generator=generator, dtype=torch.float64) + 0.01).tolist()
        times = [2.0]
        for gap in gaps:
            times.append(times[-1] + gap)
        t.case(tpot, times, expected=statistics.fmean(gaps), note=f"{n} tokens, uneven gaps")


def tpot_by_n(token_times):
    return (token_times[-1] - token_times[0]) / len(token_times) if token_times else 0.0


def tpot_with_wait(token_times):
    if len(token_times) < 2:
        return 0.0
    return token_times[-1] / len(token_times)


def tpot_no_guard(token_times):
    return (token_times[-1] - token_times[0]) / (len(token_times) - 1)


def tpot_none(token_times):
    if len(token_times) < 2:
        return None
    return (token_times[-1] - token_times[0]) / (len(token_times) - 1)


def tpot_median(token_times):
    if len(token_times) < 2:
        return 0.0
    return statistics.median(b - a for a, b in itertools.pairwise(token_times))


def tpot_first_gap(token_times):
    return token_times[1] - token_times[0] if len(token_times) > 1 else 0.0


def tpot_total(token_times):
    return token_times[-1] - token_times[0] if token_times else 0.0


def tpot_clock(token_times):
    return token_times[-1] / (len(token_times) - 1) if len(token_times) > 1 else 0.0


def tpot_single(token_times):
    if len(token_times) == 1:
        return token_times[0]
    return tpot_variant(token_times)


def tpot_rate(token_times):
    if len(token_times) < 2:
        return 0.0
    return (len(token_times) - 1) / (token_times[-1] - token_times[0])


def tpot_milliseconds(token_times):
    if len(token_times) < 2:
        return 0.0
    return 1000 * (token_times[-1] - token_times[0]) / (len(token_times) - 1)


def tpot_variant(token_times):
    gaps = [later - earlier for earlier, later in itertools.pairwise(token_times)]
    return statistics.fmean(gaps) if gaps else 0.0


def plug_tpot(answer, swap):
    alone, together = run(seats=1, num_requests=1, num_tokens=16), run(seats=4, num_requests=4, num_tokens=16)
    with swap():
        times = [statistics.median(output.metrics.tpot for output in outputs) for outputs in (alone, together)]
    print("TPOT by your function, on the real engine")
    for label, time in zip(("one user", "four users at once"), times, strict=True):
        print(f"  {label:<20}{1000 * time:6.1f} ms  {bar(time, max(times))}")
    text = alone[0].outputs[0].text
    if text.strip():
        words, tokens = len(text.split()), len(alone[0].outputs[0].token_ids)
        speed = 60 / times[0] * words / tokens
        side = "faster" if speed > READING else "slower"
        print(
            f"The one user's {tokens} tokens were {words} words. At that rate {60 / times[0]:.0f} tokens a minute are"
        )
        print(f"about {speed:.0f} words a minute, {side} than people read (about {READING}).")


# ---- 00.3


def check_throughput(t, throughput):
    t.case(throughput, [10], [(2.0, 4.0)], expected=5.0, note="10 tokens in 2 s; the clock does not start at 0")
    t.case(throughput, [10, 30], [(1.0, 3.0), (1.0, 5.0)], expected=10.0, note="40 tokens between 1 s and 5 s")
    t.case(throughput, [8, 8], [(0.5, 2.5), (3.5, 4.5)], expected=4.0, note="a pause of 1 s in between")
    t.case(throughput, [6, 12, 3], [(5.0, 9.0), (2.0, 6.0), (3.0, 4.0)], expected=3.0, note="not in the order of time")
    t.case(throughput, [5, 9, 7], [(0.0, 20.0), (4.0, 5.0), (6.0, 7.0)], expected=1.05, note="one outlasts the others")
    for shift in (11, 3600):
        counts, spans = [7, 5, 2, 11], [(a + shift, b + shift) for a, b in ((3, 8), (0, 2), (1, 4), (9, 12))]
        # the oracle counts the whole seconds in which somebody had come and somebody was not done
        ticks = 0
        for second in range(shift + 20):
            ticks += any(start <= second for start, _ in spans) and any(end > second for _, end in spans)
        t.case(throughput, counts, [(float(a), float(b)) for a, b in spans], expected=sum(counts) / ticks,
               note="counted second by second")  # fmt: skip


def throughput_durations(num_tokens, spans):
    return sum(num_tokens) / sum(end - start for start, end in spans)


def throughput_mean_rate(num_tokens, spans):
    return statistics.fmean(n / (end - start) for n, (start, end) in zip(num_tokens, spans, strict=True))


def throughput_sum_rates(num_tokens, spans):
    return sum(n / (end - start) for n, (start, end) in zip(num_tokens, spans, strict=True))


def throughput_from_zero(num_tokens, spans):
    return sum(num_tokens) / max(end for _, end in spans)


def throughput_list_order(num_tokens, spans):
    return sum(num_tokens) / (spans[-1][1] - spans[0][0])


def throughput_busy(num_tokens, spans):
    busy, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return sum(num_tokens) / busy


def throughput_requests(num_tokens, spans):
    return len(num_tokens) / (max(end for _, end in spans) - min(start for start, _ in spans))


def throughput_longest(num_tokens, spans):
    return sum(num_tokens) / max(end - start for start, end in spans)


def throughput_last_arrival(num_tokens, spans):
    return sum(num_tokens) / (max(end for _, end in spans) - max(start for start, _ in spans))


def throughput_max_span(num_tokens, spans):
    return sum(num_tokens) / (max(spans)[1] - min(spans)[0])


def throughput_variant(num_tokens, spans):
    edges = sorted(itertools.chain.from_iterable(spans))
    return sum(num_tokens) / (edges[-1] - edges[0])


def plug_throughput(answer, swap):
    results = []
    for seats in (1, 4):
        counts, spans = counts_and_spans(run(seats=seats, num_tokens=12))
        with swap():
            results.append((seats, metrics.throughput(counts, spans), throughput_mean_rate(counts, spans)))
    top = max(rate for _, rate, _ in results)
    print("Four users, 12 tokens each. Throughput by your function:")
    for seats, rate, mean in results:
        label = "one after another" if seats == 1 else "all four together"
        print(f"  {label}  {rate:6.1f} tokens/s  {bar(rate, top)}")
        print(f"  {'':<17}  {mean:6.1f} is what a mean of the users' own rates would say")


# ---- 00.4


def check_cost(t, cost):
    t.case(cost, 3.6, 1000.0, expected=1.0, note="3.6 million tokens an hour, for 3.60")
    t.case(cost, 2.0, 50.0, expected=100 / 9, note="0.18 million tokens an hour, for 2.00")
    t.case(cost, 0.05, 20000.0, expected=0.05 / 72, note="far less than a cent")
    t.case(cost, 0.0, 12.0, expected=0.0, note="a machine that costs nothing")
    for price, rate in ((0.125, 24.0), (1.5, 320.0), (98.0, 51200.0), (0.3, 9.53617)):
        hours = Fraction(1_000_000) / (Fraction(rate) * 3600)
        note = "" if rate.is_integer() else "a rate with decimals: round only when you print"
        t.case(cost, price, rate, expected=float(hours * Fraction(price)), note=note)
        t.case(cost, price, 2 * rate, expected=float(hours * Fraction(price) / 2), note="twice the rate, half the cost")


def cost_per_token(price_per_hour, tokens_per_second):
    return price_per_hour / (tokens_per_second * 3600)


def cost_minutes(price_per_hour, tokens_per_second):
    return price_per_hour / (tokens_per_second * 60) * 1_000_000


def cost_no_seconds(price_per_hour, tokens_per_second):
    return price_per_hour / tokens_per_second * 1_000_000


def cost_bracket(price_per_hour, tokens_per_second):
    return price_per_hour / tokens_per_second * 3600 * 1_000_000


def cost_per_thousand(price_per_hour, tokens_per_second):
    return price_per_hour / (tokens_per_second * 3600) * 1000


def cost_inverted(price_per_hour, tokens_per_second):
    return tokens_per_second * 3600 / 1_000_000 / price_per_hour if price_per_hour else 0.0


def cost_multiplied(price_per_hour, tokens_per_second):
    return price_per_hour * tokens_per_second * 3600 / 1_000_000


def cost_rounded(price_per_hour, tokens_per_second):
    return round(price_per_hour / (tokens_per_second * 3600) * 1_000_000, 2)


def cost_variant(price_per_hour, tokens_per_second):
    seconds = 1_000_000 / tokens_per_second
    return seconds / 3600 * price_per_hour


def plug_cost(answer, swap):
    rate = metrics.throughput(*counts_and_spans(run(seats=4, num_tokens=12)))
    price = 0.10
    print(f"This machine, four users at once: {rate:.1f} tokens/s. At {price:.2f} an hour your function says:")
    rows = []
    with swap():
        for busy in (100, 50, 25, 10):
            rows.append((busy, metrics.cost_per_million_tokens(price, rate * busy / 100)))
    for busy, cost in rows:
        print(f"  busy {busy:3d} % of the time  {cost:8.2f} per million  {bar(cost, rows[-1][1], 24)}")
    print("An idle machine costs the same. That is why the widget in the lesson has a second slider.")


EXERCISES = [
    Exercise(
        id="00.0",
        symbol="gaps",
        title="Warm-up: count the gaps",
        minutes=1,
        difficulty=1,
        statement="""
            The lesson has solved this one already: it is here so that you can try the tools. A request puts out
            **12** tokens, one after another. How many gaps lie between them? Put the number in place of `None`.

            Worked example: 3 tokens have 2 gaps.
        """,
        hints=(
            "Take fewer tokens: how many gaps lie between 2 of them, and between 4?",
            "A fence with 3 posts has 2 spaces. What does one more post add?",
            "Every token but the first comes after exactly one gap.",
        ),
        explanation="""
            Each token but the first ends one gap, so *n* tokens have *n* - 1 gaps: the fence-post rule. In the next
            exercises it decides whether your time per token is right or a little too small. The benchmarks of vLLM and
            SGLang count gaps; gpustack once divided by the tokens (gpustack/gpustack#3427).
        """,
        stub="gaps = None  # your number",
        solution="gaps = 11",
        check=check_gaps,
        mutants=(
            Mutant(
                "tokens",
                12,
                "12 is the number of tokens. Draw 12 dots in a row and count the spaces between them.",
                "gpustack/gpustack#3427",
            ),
            Mutant(
                "both_ends",
                13,
                "13 counts a gap before the first and after the last. Only the gaps *between* tokens count.",
                "the usual fence-post slip",
            ),
            Mutant(
                "inner",
                10,
                "You took off both ends. One token is one more than the gaps, not two.",
                "the usual fence-post slip",
            ),
        ),
        variant=12 - 1,
        scratch="""
            import itertools

            print(list(itertools.pairwise(["A", "B", "C"])))
        """,
        plug_in=plug_gaps,
    ),
    Exercise(
        id="00.1",
        symbol="minillm.metrics:ttft",
        title="Time to first token",
        minutes=3,
        difficulty=1,
        statement="""
            How long did the user look at an empty screen? `arrival` is the moment the request came in,
            `token_times` the moments its output tokens came out, in order, at least one. All are seconds on one
            clock that started at some unknown time. Return seconds.

            Worked example: arrival 2.0 and tokens at 2.5, 2.7 and 2.9. The first token took **0.5** s.
        """,
        hints=(
            "Which two moments does the user feel: when did they press enter, and when did something appear?",
            "Only one of the token times matters. The clock did not start at zero, so one moment alone is no duration.",
            "A duration is the later moment minus the earlier one. The later one is element 0 of the list.",
        ),
        explanation="""
            The clock is `time.perf_counter()`: only differences of it mean anything. The wait in the queue belongs
            to TTFT, because the user cannot tell a queue from a slow model. `min(token_times) - arrival` is right
            too.

            In vLLM's and SGLang's metrics this is `time_to_first_token_seconds`. Beware of the same name on another
            clock: vLLM's per-request field `time_to_first_token_ms` starts when the request is *scheduled*, and has
            the wait in `queue_time_ms`. llama.cpp prints `prompt eval time`, which has no queue in it.
        """,
        check=check_ttft,
        mutants=(
            Mutant(
                "clock",
                ttft_clock,
                "You return the moment of the first token. The clock did not start when the request arrived: subtract "
                "the arrival.",
                "a common slip with time.perf_counter()",
            ),
            Mutant(
                "last",
                ttft_last,
                "That is the wait for the *last* token: the end-to-end time. Look at element 0, not -1.",
                "TTFT and E2E mixed up, a common slip",
            ),
            Mutant(
                "gap",
                ttft_gap,
                "That is the gap between the first two tokens. The first wait began at the arrival, before any token.",
                "vllm-project/vllm#7242 mixed TTFT and gaps the other way round",
            ),
            Mutant(
                "sign",
                ttft_sign,
                "Your wait is negative. It is the later moment minus the earlier one.",
                "a common slip",
            ),
            Mutant(
                "milliseconds",
                ttft_milliseconds,
                "Your result is 1000 times too big: milliseconds. The engine keeps seconds and converts when it "
                "prints.",
                "a common slip",
            ),
            Mutant(
                "shared",
                ttft_shared,
                "You divide the first wait by a count. Nobody waits a fraction of it: with 3 tokens or 10 users the "
                "wait is the same.",
                "openvinotoolkit/openvino.genai#1414: TTFT was divided by the batch size",
            ),
        ),
        variant=ttft_variant,
        scratch="""
            print(ttft(2.0, [2.5, 2.7, 2.9]))
            print(ttft(100.0, [100.25]))
        """,
        plug_in=plug_ttft,
    ),
    Exercise(
        id="00.2",
        symbol="minillm.metrics:tpot",
        title="Time per output token",
        minutes=5,
        difficulty=1,
        statement="""
            How fast does the text flow once it flows? `token_times` holds the moments the output tokens came out,
            in order, in seconds. Return the mean gap in seconds. The wait for the first token is not part of it.
            With fewer than two tokens there is no gap: return 0.0.

            Worked example: tokens at 1.0, 1.2, 1.4 and 1.6 s. The gaps are 0.2, 0.2 and 0.2 s, so TPOT is **0.2** s.
        """,
        hints=(
            "How many gaps do 4 tokens have? (Exercise 00.0.) And how many do 1 and 0 tokens have?",
            "You need no loop: all gaps together reach from the first token to the last.",
            "Deal with short lists first. Then divide the time between the first and the last token by one less "
            "than their number.",
        ),
        explanation="""
            Added up, the gaps between tokens are the time from the first to the last: all moments in the middle
            cancel. Averaging the single gaps with a loop is right too. The mean is what a user feels over a whole
            answer: the sum of all gaps decides when it is done. A median would hide one long stall.

            The 0.0 for a single token is a convention, not a measurement: leave such requests out before you average
            over users, or a few short answers make you look fast. (The engine's `RequestMetrics` has None where no
            token came.)

            In `vllm bench serve` and SGLang's `bench_serving` this is TPOT: (latency - TTFT) / (output tokens - 1).
            The single gap is called ITL there (inter-token latency). llama.cpp prints it as `eval time ... ms per
            token`.
        """,
        check=check_tpot,
        mutants=(
            Mutant(
                "by_n",
                tpot_by_n,
                "You divide by the number of tokens. 4 tokens have 3 gaps: the result is too small, most of all for "
                "short answers.",
                "gpustack/gpustack#3427",
            ),
            Mutant(
                "with_wait",
                tpot_with_wait,
                "The wait before the first token is in your result. Measure from the first token, not from the start "
                "of the clock.",
                "GoogleCloudPlatform/ai-on-gke#899; vllm-project/vllm#7242",
            ),
            Mutant(
                "no_guard",
                tpot_no_guard,
                "A request with one token has no gap, and one with none has no last token. Handle short lists first: "
                "0.0.",
                "intel/xFasterTransformer#102, AI-Hypercomputer/JetStream#61: division by zero in the benchmark",
            ),
            Mutant(
                "none",
                tpot_none,
                "With fewer than two tokens you return None. The engine goes on to add and print it: return 0.0.",
                "openshift-psap/llm-load-test#54",
            ),
            Mutant(
                "median",
                tpot_median,
                "That is the median gap. It hides the one long stall in case 2; asked for is the mean.",
                "median and mean mixed up, a common slip",
            ),
            Mutant(
                "first_gap",
                tpot_first_gap,
                "That is the first gap only. One gap can be lucky: asked for is the mean of all of them.",
                "a common slip",
            ),
            Mutant(
                "total",
                tpot_total,
                "That is the time of all gaps together. Divide it by their number.",
                "the division forgotten, a common slip",
            ),
            Mutant(
                "clock",
                tpot_clock,
                "You divide by the right number, but your time begins when the clock began. It begins at the first "
                "token: subtract its moment.",
                "a common slip with time.perf_counter()",
            ),
            Mutant(
                "single",
                tpot_single,
                "For a single token you return the moment it came out. It has no gap: 0.0.",
                "a common slip",
            ),
            Mutant(
                "rate",
                tpot_rate,
                "That is tokens per second, the inverse. Asked for are seconds per token.",
                "modelscope/evalscope#320 derived one from the other",
            ),
            Mutant(
                "milliseconds",
                tpot_milliseconds,
                "Your result is 1000 times too big: milliseconds. The engine keeps seconds and converts when it "
                "prints.",
                "a common slip",
            ),
        ),
        variant=tpot_variant,
        scratch="""
            print(tpot([1.0, 1.2, 1.4, 1.6]))
            print(tpot([7.5]))
        """,
        plug_in=plug_tpot,
    ),
    Exercise(
        id="00.3",
        symbol="minillm.metrics:throughput",
        title="What the machine gets done",
        minutes=8,
        difficulty=2,
        statement="""
            How many output tokens per second does the *system* produce, for all users together? Request `i` put out
            `num_tokens[i]` tokens (ints) and lived during `spans[i] = (arrival, finish)`, in seconds. Requests may
            overlap, leave pauses, and come in any order. Return tokens per second of wall time, from the first
            arrival to the last finish.

            Worked example: 10 tokens during (1.0, 3.0) and 30 tokens during (1.0, 5.0). That is 40 tokens in the 4 s
            between 1.0 and 5.0: **10** tokens/s.
        """,
        hints=(
            "Draw the spans as bars above one time axis. How long is the axis from the first bar's start to the "
            "last bar's end?",
            "Two bars above each other use the same second. Adding up their lengths would count it twice.",
            "Earliest of all starts, latest of all ends. `min` and `max` over a generator such as `(s for s, _ in "
            "spans)` find them.",
        ),
        explanation="""
            All users share one clock on the wall, so there is one duration: from the first arrival to the last
            finish. Sums of durations count a shared second once per user; means of rates answer another question
            (how fast was it for *one* user?), and that one falls when more users share the machine, while the
            system's output rises.

            In `vllm bench serve` this is "Output token throughput (tok/s)", over the benchmark's duration; SGLang
            has it in `bench_serving` and, live, as `sglang:gen_throughput`. `llama-bench` measures one stream
            (`tg128`); `llama-batched-bench` measures many.
        """,
        check=check_throughput,
        mutants=(
            Mutant(
                "durations",
                throughput_durations,
                "You add up the durations. Two requests that run at once share their seconds: count each second of "
                "the wall clock once.",
                "a common slip; compare Azure/azureml-assets#1471",
            ),
            Mutant(
                "mean_rate",
                throughput_mean_rate,
                "That is the mean of the users' own rates. It says how fast it is for one user, not what the system "
                "produces.",
                "Azure/azureml-assets#1471, proposed in review",
            ),
            Mutant(
                "sum_rates",
                throughput_sum_rates,
                "You add up the requests' own rates, as if all had run all the time. A short request's rate lasts "
                "only while it runs.",
                "a common slip",
            ),
            Mutant(
                "from_zero",
                throughput_from_zero,
                "You count from time 0. The clock started long before the first request arrived: subtract the first "
                "arrival.",
                "a common slip with time.perf_counter()",
            ),
            Mutant(
                "list_order",
                throughput_list_order,
                "You trust the order of the list. The first in the list need not be first to arrive, nor the last one "
                "last to finish.",
                "a common slip",
            ),
            Mutant(
                "busy",
                throughput_busy,
                "You leave out the pauses. Wall time goes on (and is paid for) while nothing runs.",
                "jpreagan/llmnop#11 is about which time counts",
            ),
            Mutant(
                "requests",
                throughput_requests,
                "That is requests per second. Asked for are tokens per second: add up num_tokens.",
                "GoogleCloudPlatform/ai-on-gke#839",
            ),
            Mutant(
                "last_arrival",
                throughput_last_arrival,
                "You start at the last arrival. The clock runs from the first one.",
                "min and max mixed up, a common slip",
            ),
            Mutant(
                "max_span",
                throughput_max_span,
                "`max(spans)` is the request that arrived last. The last to arrive is not always the last to finish: "
                "take the largest of the ends.",
                "tuples are compared by their first element, a common slip",
            ),
            Mutant(
                "longest",
                throughput_longest,
                "You divide by the longest request. Requests that come one after another need longer than any one of "
                "them.",
                "a common slip",
            ),
        ),
        variant=throughput_variant,
        scratch="""
            print(throughput([10], [(2.0, 4.0)]))
            print(throughput([10, 30], [(1.0, 3.0), (1.0, 5.0)]))
        """,
        plug_in=plug_throughput,
    ),
    Exercise(
        id="00.4",
        symbol="minillm.metrics:cost_per_million_tokens",
        title="The price of a million tokens",
        minutes=5,
        difficulty=2,
        statement="""
            A machine costs `price_per_hour` (in any currency) and puts out `tokens_per_second` tokens, hour after
            hour. What does a million output tokens cost, in the same currency? Do not round.

            Worked example: 3.60 an hour at 1000 tokens/s. An hour makes 3.6 million tokens, so a million costs
            **1.00**.
        """,
        hints=(
            "How many tokens does one hour make? That many cost one hour's price.",
            "Write the units down: price/hour, tokens/second, and wanted is price/million tokens. What turns "
            "seconds into hours?",
            "Price of the hour, over the tokens of the hour, gives the price of *one* token. Then take a million "
            "of them.",
        ),
        explanation="""
            (price / hour) / (tokens / hour) = price / token; a million of them make the number that price lists
            use. The other way round is right too: a million tokens take 1,000,000 / rate seconds, and each hour of
            them is paid.

            The rate must be one that you can *sustain*, over idle nights as well: a machine that is busy a tenth of
            the time makes each token ten times as dear. vLLM, SGLang and llama.cpp all report rates and leave
            prices to you; API price lists state them per million tokens, input and output apart.
        """,
        check=check_cost,
        mutants=(
            Mutant(
                "per_token",
                cost_per_token,
                "That is the price of one token. Asked for is the price of a million.",
                "getsentry/sentry#94907 and NousResearch/hermes-agent#107989: per token and per million mixed up",
            ),
            Mutant(
                "minutes",
                cost_minutes,
                "Your hour has 60 seconds. An hour has 3600: your result is 60 times too big.",
                "a common slip",
            ),
            Mutant(
                "no_seconds",
                cost_no_seconds,
                "The price is per hour, the rate per second. Your result is 3600 times too big: bring both to the "
                "same time.",
                "a common slip",
            ),
            Mutant(
                "bracket",
                cost_bracket,
                "`price / rate * 3600` divides by the rate only and then *multiplies* by 3600. The tokens of an hour "
                "belong in a bracket.",
                "langchain-ai/langchain#6798 added brackets to a formula for cost",
            ),
            Mutant(
                "per_thousand",
                cost_per_thousand,
                "That is the price of a thousand tokens. Price lists now state it for a million.",
                "microsoft/autogen#3165: a price per thousand taken as a price per token",
            ),
            Mutant(
                "inverted",
                cost_inverted,
                "That is millions of tokens per unit of money, the inverse. A dearer machine must make your result "
                "bigger.",
                "a common slip",
            ),
            Mutant(
                "multiplied",
                cost_multiplied,
                "You multiply by the rate. A faster machine would then make tokens dearer: divide.",
                "a common slip",
            ),
            Mutant(
                "rounded",
                cost_rounded,
                "You round to cents. Tokens can cost far less than a cent, and then 0.00 is left. Round when you "
                "print.",
                "xn1cklas/tokenlens#6",
            ),
        ),
        variant=cost_variant,
        scratch="""
            print(cost_per_million_tokens(3.6, 1000.0))
            print(cost_per_million_tokens(2.0, 50.0))
        """,
        plug_in=plug_cost,
    ),
]
