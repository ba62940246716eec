"""The load generator: the load is what was asked for, and the numbers add up."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import pytest
from tiny import TINY, tiny_llm

from minillm import bench
from minillm.metrics import RequestMetrics, StepRecord, goodput, useful_share
from minillm.request import SamplingParams

ENDLESS = replace(TINY, eos_token_ids=())


def test_workload() -> None:
    items = bench.workload(400, (3, 9), (2, 5), 96, request_rate=10.0, prefix_len=7, seed=1)
    assert {tuple(item.prompt[:7]) for item in items} == {tuple(items[0].prompt[:7])}
    assert {len(item.prompt) for item in items} == set(range(10, 17))
    assert {item.max_tokens for item in items} == {2, 3, 4, 5}
    gaps = [b.arrival - a.arrival for a, b in itertools.pairwise(items)]
    assert items[0].arrival == 0.0 and statistics.mean(gaps) == pytest.approx(0.1, rel=0.2)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.3)  # exponential: mean = standard deviation
    assert items == bench.workload(400, (3, 9), (2, 5), 96, request_rate=10.0, prefix_len=7, seed=1)


def test_a_run_that_breaks_off_leaves_nothing_behind(monkeypatch) -> None:
    llm = tiny_llm(ENDLESS, num_kv_blocks=64, max_num_seqs=4)
    items, step = bench.workload(6, (3, 20), (5, 9), 96), llm.step
    left = iter(range(3))
    monkeypatch.setattr(llm, "step", lambda: step() if next(left, None) is not None else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.run(llm, items)
    assert not llm.requests and llm.timeline is None and llm.pool.num_free == len(llm.pool.blocks)


@pytest.mark.parametrize("load", ["offline", "open", "closed"])
@pytest.mark.parametrize("scheduling", ["static", "dynamic", "continuous"])
def test_run(load, scheduling) -> None:
    llm = tiny_llm(ENDLESS, num_kv_blocks=64, max_num_seqs=4, scheduling=scheduling)
    items = bench.workload(10, (3, 20), (2, 9), 96, request_rate=300.0 if load == "open" else None)
    report = bench.run(llm, items, concurrency=2 if load == "closed" else None, slo=(10.0, 10.0))
    assert report.output_tokens == sum(item.max_tokens for item in items)
    assert report.input_tokens == sum(len(item.prompt) for item in items)
    assert report.goodput == pytest.approx(10 / report.seconds)
    work = [(name, end) for step in report.timeline for name, _, _, end in step.work]
    assert len({name for name, _ in work}) == 10
    assert max(len(step.work) for step in report.timeline) <= (2 if load == "closed" else 4)
    assert all(a.end <= b.start for a, b in itertools.pairwise(report.timeline))
    assert (report.useful_share == 1.0) == (scheduling == "continuous")
    assert 0 < report.kv_usage_mean <= report.kv_usage_max <= 1
    for name, most in (("ttft", report.seconds), ("tpot", report.seconds), ("itl", report.seconds)):
        assert 0 < report.percentiles[name][50] <= report.percentiles[name][99] <= most
    assert "requests" not in report.as_dict() and report.as_dict()["num_requests"] == 10
    assert llm.timeline is None and not llm.requests


def test_what_cannot_be_served_is_counted() -> None:
    llm = tiny_llm(ENDLESS, num_kv_blocks=4)
    items = [bench.Item([1] * 200, 3), bench.Item([1, 2], 3), bench.Item([1, 2], 40, timeout=1e-9)]
    report = bench.run(llm, items)
    assert (report.num_refused, report.num_timed_out, report.output_tokens) == (1, 1, 3)


def test_useful_share_and_goodput() -> None:
    step = StepRecord(0, 1, [("a", 0, 0, 6), ("b", 0, 4, 5)], 3, 2, 0)
    assert useful_share([step, step]) == 0.7 and useful_share([]) == 1.0
    good = RequestMetrics(0.0, [1.0, 1.5, 2.0], 2.0)
    slow, lost = RequestMetrics(0.0, [3.0, 3.5], 3.5), RequestMetrics(0.0, [0.1])
    assert goodput([good, slow, lost], 4.0, max_ttft=1.0, max_tpot=0.5) == 0.25
    assert goodput([good], 4.0, 1.0, 0.5, max_e2e=1.9) == 0.0


def test_a_request_counts_once_however_many_completions_it_has() -> None:
    llm = tiny_llm(ENDLESS, num_kv_blocks=64)
    items = bench.workload(10, (3, 3), (2, 2), 96)[::-1]
    report = bench.run(llm, items, SamplingParams(n=3, temperature=1.0, ignore_eos=True), slo=(10.0, 10.0))
    assert report.requests_per_second == report.goodput == pytest.approx(10 / report.seconds)
    assert (report.input_tokens, report.output_tokens) == (30, 60)


def test_what_there_is_no_number_for_has_none() -> None:
    """One token has no gap to another; a request that timed out is not served; all refused is not fast."""
    llm = tiny_llm(ENDLESS, num_kv_blocks=4)
    one, two = bench.Item([1, 2], 1), bench.Item([1, 2], 2)
    assert bench.run(llm, [one, one, one, two]).percentiles["tpot"][50] > 0
    late = bench.run(llm, [bench.Item([1, 2], 40, timeout=1e-9)], slo=(1.0, 1.0))
    assert late.requests_per_second == late.goodput == 0.0 and late.num_timed_out == 1
    refused = bench.run(llm, [bench.Item([1] * 200, 3)])
    assert refused.num_refused == 1 and set(refused.percentiles["ttft"].values()) == {None}


def test_a_layer_reads_no_more_than_its_window() -> None:
    read = {}
    for window, layers in ((None, None), (4, None), (4, (True, False))):
        llm = tiny_llm(replace(ENDLESS, sliding_window=window, sliding_layers=layers), num_kv_blocks=64)
        llm.generate([1] * 40, SamplingParams(max_tokens=3, temperature=0.0))
        read[window, layers] = llm.stats()["bytes_moved"]
    weights = read[4, None] - 3 * 4 * llm.cache.bytes_per_token
    assert read[None, None] - weights == (40 + 41 + 42) * llm.cache.bytes_per_token
    assert read[4, (True, False)] - weights == pytest.approx((22 + 22.5 + 23) * llm.cache.bytes_per_token)
