"""What must not change a verdict on a service, and what may only make it less sure."""

import json
from pathlib import Path

import numpy as np
import pytest

from kprof.collect.load_results import read_result
from tests.responses import judged

TARGETS = (
    "ttft_p50<=60ms",
    "ttft_p50<=30ms",
    "ttf8_p50<=200ms",
    "e2e_p50<=300ms",
    "e2e_p50<=100ms",
    "gap_p50<=20ms",
    "stall_p50<=60ms",
    "tpot_p50<=15ms",
    "errors<=50%",
    "requests>=2req/s",
)
LESS = {"MET": {"MET"}, "MISSED": {"MISSED"}, "NOT PROVEN": {"MET", "MISSED", "NOT PROVEN"}}
LESS["NOT MEASURED"] = LESS["NOT PROVEN"] | {"NOT MEASURED"}


def vllm_result(num=240, *, rate="inf", limit=4, wait_s=0.0):
    """Return a result of vLLM for 120 s: two requests a second, 16 tokens each."""
    rng = np.random.default_rng(7)
    starts = np.arange(num) / 2
    ttfts = rng.gamma(9, 0.005, num).tolist()
    itls = rng.gamma(9, 0.001, (num, 15)).tolist()
    return {
        "backend": "openai",
        "request_rate": rate,
        "max_concurrency": limit,
        "request_throughput": 2.0,
        "output_lens": [16] * num,
        "input_lens": [8] * num,
        "ttfts": ttfts,
        "itls": itls,
        "latencies": [first + sum(gaps) for first, gaps in zip(ttfts, itls, strict=True)],
        "start_times": (100 + starts).tolist(),
        "queue_times": [wait_s] * num,
        "errors": [""] * num,
    }


def verdicts(result, tmp_path, name="r.json"):
    path = Path(tmp_path) / name
    path.write_text(json.dumps(result))
    run = read_result(str(path))
    return [judged(target, run, spell_s=10).verdict for target in TARGETS]


def test_the_verdicts_of_the_whole_result_are_of_every_kind(tmp_path):
    found = verdicts(vllm_result(), tmp_path)
    assert {"MET", "MISSED"} <= {*found}


@pytest.mark.parametrize("wait_s", [0.0, 5.0])
@pytest.mark.parametrize("rate", ["inf", 2.0])
@pytest.mark.parametrize(
    "lost", ["queue_times", "start_times", "latencies", "input_lens", "errors", "max_concurrency"]
)
def test_a_file_without_a_column_proves_nothing_that_the_whole_one_does_not(
    lost, rate, wait_s, tmp_path
):
    whole = vllm_result(rate=rate, wait_s=wait_s)
    # Without a limit of concurrency no request waits for a place.
    if lost == "max_concurrency" and wait_s:
        pytest.skip("a wait without a limit is the client's own")
    rest = {name: value for name, value in whole.items() if name != lost}
    found = zip(verdicts(whole, tmp_path), verdicts(rest, tmp_path), strict=True)
    assert all(with_all in LESS[without] for with_all, without in found)


def test_the_order_of_the_answers_in_the_file_changes_nothing(tmp_path):
    whole = vllm_result()
    order = np.random.default_rng(1).permutation(len(whole["ttfts"]))
    mixed = {
        name: [value[i] for i in order] if isinstance(value, list) else value
        for name, value in whole.items()
    }
    assert verdicts(mixed, tmp_path) == verdicts(whole, tmp_path)


def test_unknown_fields_and_another_origin_of_the_clock_change_nothing(tmp_path):
    whole = vllm_result()
    other = {"team": {"x": [1]}, **whole, "goodput_of_tomorrow": 3}
    other["start_times"] = [start + 86_400 for start in whole["start_times"]]
    assert verdicts(other, tmp_path) == verdicts(whole, tmp_path)


def test_times_and_limits_in_another_unit_change_nothing(tmp_path):
    path = Path(tmp_path) / "r.json"
    path.write_text(json.dumps(vllm_result()))
    run = read_result(str(path))
    for text, other in (("e2e_p50<=300ms", "e2e_p50<=0.3s"), ("ttft_p50<=60ms", "ttft_p50<=6e4us")):
        assert judged(text, run, spell_s=10).verdict == judged(other, run, spell_s=10).verdict


def test_a_file_cut_into_two_proves_no_more(tmp_path):
    whole = vllm_result()
    halves = []
    for i, part in enumerate((slice(0, 120), slice(120, None))):
        half = {n: v[part] if isinstance(v, list) else v for n, v in whole.items()}
        path = Path(tmp_path) / f"{i}.json"
        path.write_text(json.dumps(half))
        halves.append(read_result(str(path)))
    found = [judged(target, *halves, spell_s=10).verdict for target in TARGETS]
    together = verdicts(whole, tmp_path)
    assert all(one in LESS[cut] for one, cut in zip(together, found, strict=True))
