"""What the savings of findings are worth: shares of what the run's GPUs cost in a month."""

import json
import re
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from kprof.ab.engagement_folder import recognise
from kprof.ab.pricing import read_prices
from kprof.analyze.cost.of_runs import with_worth
from kprof.analyze.cost.price import Quote
from kprof.findings import Diagnosis, Finding, Saving
from kprof.opened import open_run
from kprof.trace import Gpu
from tests.traces import trace_of

DAY = date(2026, 11, 1)
RECORDED = Path(__file__).parents[2] / "data" / "h200" / "llama_train.json.gz"


def quote(usd, price_list):
    return Quote("H200", float(usd), "on-demand", price_list, "https://example.com", DAY)


QUOTES = [quote(2, "Cheap"), quote(3, "Middle"), quote(5, "Dear")]


def priced(saving, gpus=("NVIDIA H200",), quotes=QUOTES, *, is_stepped=True, **changes):
    """Return the diagnosis of a run on these GPUs whose one finding saves so much."""
    rows = [{"device": i, "start_ns": 10 * i} for i in range(len(gpus))]
    named = tuple(Gpu(i, name, None) for i, name in enumerate(gpus))
    found = Finding("unfused_norm", "It is slow", "high", "low", rows=(0,), saving=saving)
    steps = [{"kind": "step", "name": "0"}] if is_stepped else []
    trace = trace_of(*rows, gpus=named, ranges=steps)
    trace = replace(trace, diagnosis=Diagnosis((found,), **changes))
    return with_worth(trace, quotes).diagnosis


def worth_of(saving, **more):
    return priced(saving, **more).findings[0].saving.worth


def test_the_least_saving_is_at_the_least_price_and_the_most_at_the_dearest():
    worth = worth_of(Saving(1000, 100, 300, "replayed"))
    assert worth.low_usd == pytest.approx(0.1 * 2 * 730)
    assert worth.middle_usd == pytest.approx(0.2 * 3 * 730)
    assert worth.high_usd == pytest.approx(0.3 * 5 * 730)


def test_every_gpu_of_the_run_is_paid():
    one, two = (worth_of(Saving(1000, 100, 300, "x"), gpus=("NVIDIA H200",) * n) for n in (1, 2))
    assert two.high_usd == 2 * one.high_usd


def test_all_together_and_all_swaps_are_priced_as_well():
    saving = Saving(1000, 0, 500, "replayed")
    found = priced(saving, together=saving, swapped=saving)
    assert found.together.worth == found.swapped.worth == found.findings[0].saving.worth
    assert found.together.worth.low_usd == 0.0


def test_what_the_money_rests_on_stands_beside_it():
    price = priced(Saving(1000, 0, 500, "replayed")).price
    assert re.findall(r"[$\d][\d.-]*", price.replace("H200", "")) == [
        *("1", "730", "$3.00", "$2.00", "$5.00"),
        "2026-11-01",
    ]
    assert "H200, on-demand" in price


def test_an_unknown_saving_is_worth_an_unknown_amount_and_not_nothing():
    assert worth_of(Saving(1000, None, None, "nobody knows")) is None


@pytest.mark.parametrize("gpus", [("Round GPU",), ("NVIDIA H200", "NVIDIA H100 80GB HBM3")])
def test_without_a_price_for_the_gpus_there_is_no_money(gpus):
    found = priced(Saving(1000, 100, 300, "replayed"), gpus=gpus)
    assert found.findings[0].saving.worth is None
    assert found.price == ""


def test_the_table_of_prices_has_on_demand_prices_of_an_h200():
    assert worth_of(Saving(1000, 100, 300, "replayed"), quotes=read_prices()).low_usd > 0


def test_a_window_that_marks_no_step_is_no_unit_of_work_and_has_no_money():
    found = priced(Saving(1000, 100, 300, "replayed"), is_stepped=False)
    assert found.findings[0].saving.worth is None
    assert found.price == ""


def test_a_trace_tells_no_money_without_a_price(tmp_path):
    opened = open_run([RECORDED], tmp_path / "run.kprof", force=False)
    told = json.loads(opened.json)["findings"]
    assert {one["saving"]["worth"] for one in told["findings"]} == {None}
    assert told["price"] == ""
    assert "$" not in opened.report.read_text(encoding="utf-8").partition("<script")[0]


def test_an_engagement_prices_the_findings_of_a_run(tmp_path):
    open_run([RECORDED], tmp_path / "run.kprof", force=False)
    content = recognise(tmp_path / "run.kprof", "before").content
    first = content.predictions[0]
    assert 0 < first.worth.low_usd < first.worth.middle_usd < first.worth.high_usd
