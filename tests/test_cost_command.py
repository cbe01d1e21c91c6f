"""`kprof cost`: what it takes from the line, a file and a run, and how it answers."""

import inspect
import json
import shlex
from dataclasses import fields
from datetime import date
from fractions import Fraction
from itertools import chain
from pathlib import Path

import pytest

from kprof.analyze.cost.facts import COMPANIONS, LIMITS, Facts, facts_of
from kprof.analyze.cost.measured import measured_in
from kprof.analyze.cost.price import Band
from kprof.commands.cost import cost
from kprof.cost import calculate, read_prices
from kprof.errors import KprofError
from kprof.report.costs import sections_of_costs
from kprof.report.html import render_page
from kprof.trace import Gpu, Recording
from tests.test_cli import kprof
from tests.traces import analyzed_trace_of

DOCUMENT = Path(__file__).parent.parent / "docs" / "cost.md"
H200_TRAIN = Path(__file__).parent / "data" / "h200" / "llama_train.json.gz"
TODAY = date(2026, 11, 20)
DAY = ("--as-of", "2026-11-20")
SERVING = ("--gpu", "H100", "--tokens-per-s", "5000")
OWN_LINE = {
    "gpu": "H100",
    "usd_per_gpu_hour": 2.5,
    "term": "on-demand",
    "price_list": "our contract",
    "source": "contract 7",
    "date": "2026-11-01",
}


def own_file(tmp_path, **changes):
    """Write a file of one price."""
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"quotes": [{**OWN_LINE, **changes}]}))
    return path


def answer(capsys, *words):
    """Return the JSON that `kprof cost` prints."""
    assert kprof("cost", *words, *DAY, "--json") == 0
    return json.loads(capsys.readouterr().out)


def figures(result, topic):
    """Return the figures of a topic, by name and unit."""
    return {(f["name"], f["unit"]): f for f in result["figures"] if f["topic"] == topic}


def mid(result, topic, name, unit):
    return figures(result, topic)[name, unit]["mid"]


def refusal(capsys, *words):
    """Return what `kprof cost` says when it refuses."""
    assert kprof("cost", *words, *DAY) == 2
    return capsys.readouterr().err


def test_every_option_is_a_fact_and_every_fact_an_option():
    other = {"ctx", "run", "prices", "as_of", "json"}
    assert inspect.signature(cost).parameters.keys() - other == {f.name for f in fields(Facts)}


def test_every_limit_is_of_a_fact():
    assert LIMITS.keys() <= {f.name for f in fields(Facts)}


def test_every_dollar_has_a_price_a_date_and_a_band(capsys):
    result = answer(capsys, *SERVING, "--demand", "9000", "--api-price", "1", "--gpu-hours", "9")
    dollars = [figure for figure in result["figures"] if "$" in figure["unit"]]
    assert len(dollars) == 6
    for figure in dollars:
        assert figure["low"] < figure["mid"] < figure["high"]
        assert figure["prices"][0]["oldest"] == "2026-08-26"
        assert figure["prices"][0]["sources"]


@pytest.mark.parametrize("width", ["80", "200"])
def test_the_terminal_shows_price_band_and_date_in_its_width(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    assert kprof("cost", *SERVING, "--price-list", "AWS", *DAY) == 0
    out = capsys.readouterr().out
    assert "$6.88 a GPU-hour: H100, on-demand, of 2026-11-09." in out
    assert "0.3822" in out
    assert max(len(line) for line in out.splitlines()) <= int(width)


def test_what_is_not_given_is_named_and_never_guessed(capsys):
    result = answer(capsys, "--tokens-per-s", "5000", "--kwh-price", "0.1")
    assert result["figures"] == []
    assert result["missing"] == [
        {"topic": "Serving", "give": ["--gpu or --price"]},
        {"topic": "Energy", "give": ["--joules-per-token"]},
    ]


def test_the_bill_is_given_in_micro_dollars_that_add_up(capsys):
    words = ("--input-tokens", "3M", "--output-tokens", "1M", "--prefill-gpu-s", "100")
    words += ("--decode-gpu-s", "200", "--cached-share", "1/3", "--cached-weight", "0.1")
    bill = answer(capsys, "--price", "7", *words)["bill"]
    parts = [bill[f"{name}_microusd"] for name in ("input", "cached_input", "output")]
    # 300 GPU seconds at $7 an hour; a cached token weighs a tenth, so 2 and 0.1 of 2.1 parts.
    assert bill["total_microusd"] == sum(parts) == 583_333
    assert parts == [185_185, 9_259, 388_889]


def test_a_voice_agent_gains_seven_times_where_the_old_gpu_costs_twice_as_much(capsys):
    twice = ("--price", "1", "--baseline-price", "2")
    exactly = answer(capsys, *twice, "--speedup", "281/77")
    rounded = answer(capsys, *twice, "--speedup", "3.6")
    gain = ("Gain of a token", "a token gets cheaper by", "times")
    assert mid(exactly, *gain) == pytest.approx(7.3, rel=0.005)
    assert mid(rounded, *gain) == 7.2


def test_the_gain_of_a_voice_agent_has_the_band_of_the_price_lists(capsys):
    result = answer(capsys, "--gpu", "H100", "--baseline-gpu", "B200", "--speedup", "281/77")
    gain = figures(result, "Gain of a token")["a token gets cheaper by", "times"]
    assert (gain["low"], gain["high"]) == pytest.approx((5.1, 8.1), rel=0.01)
    by_list = {name: f["mid"] for (name, _), f in figures(result, "Gain by price list").items()}
    assert by_list["InferenceX, hyperscaler, owned"] == pytest.approx(5.47, rel=0.005)
    assert by_list["InferenceX, neocloud, owned"] == pytest.approx(5.05, rel=0.005)
    assert by_list["InferenceX, rental, reserved-3y"] == pytest.approx(8.14, rel=0.005)
    assert by_list["CoreWeave, on-demand"] == pytest.approx(5.10, rel=0.005)
    assert by_list["CoreWeave, spot"] == pytest.approx(6.32, rel=0.005)
    assert by_list["Lambda, 8 GPUs, on-demand"] == pytest.approx(6.12, rel=0.005)
    assert by_list["RunPod, community, on-demand"] == pytest.approx(8.11, rel=0.005)


def test_cash_is_saved_only_by_whole_gpus_that_are_given_back(capsys):
    words = ("--price", "2", "--tokens-per-s", "1100", "--speedup", "1.1", "--fee", "146")
    words += ("--tokens-per-month", "1B")
    # One GPU serves 900 tokens/s before and after; two serve 1,050 before, one after.
    none = answer(capsys, *words, "--demand", "900")
    one = answer(capsys, *words, "--demand", "1050")
    assert mid(none, "Gain of a token", "saved", "$/month") > 0
    assert mid(none, "Gain in cash", "saved", "$/month") == 0
    assert "never paid back" in " ".join(none["notes"])
    assert mid(one, "Gain in cash", "saved", "$/month") == 2 * 730
    assert mid(one, "Gain in cash", "paid back after", "months") == 0.1


def test_the_interval_of_a_speedup_becomes_that_of_the_saving(capsys):
    words = ("--price", "3.6", "--tokens-per-s", "1000", "--speedup", "1.5,2,3")
    saved = figures(answer(capsys, *words), "Gain of a token")["saved", "$/M tokens"]
    assert [saved[end] for end in ("low", "mid", "high")] == [0.5, 1.0, 2.0]


def test_two_gpus_that_no_list_has_both_of_need_a_price(capsys):
    result = answer(capsys, "--gpu", "A10", "--baseline-gpu", "MI300X", "--speedup", "2")
    assert "no list has MI300X and A10" in result["missing"][0]["give"][0]


def test_the_same_gpu_at_the_same_price_gains_its_speedup(capsys):
    result = answer(capsys, "--speedup", "2")
    assert mid(result, "Gain of a token", "a token gets cheaper by", "times") == 2


def test_cash_counts_the_old_gpus_at_their_own_price(capsys):
    words = ("--price", "2", "--baseline-price", "6", "--tokens-per-s", "1000")
    result = answer(capsys, *words, "--demand", "2000", "--speedup", "2")
    assert mid(result, "Gain in cash", "saved", "$/month") == (4 * 6 - 2 * 2) * 730


def test_the_interval_of_a_speedup_becomes_that_of_the_cash(capsys):
    words = ("--price", "1,2,4", "--tokens-per-s", "1000", "--demand", "1000")
    cash = figures(answer(capsys, *words, "--speedup", "1.5,3,4"), "Gain in cash")
    before, saved = cash["GPUs before", "GPUs"], cash["saved", "$/month"]
    assert [before[end] for end in ("low", "mid", "high")] == [2, 3, 4]
    assert [saved[end] for end in ("low", "mid", "high")] == [730, 2 * 2 * 730, 3 * 4 * 730]


def test_each_uncertain_fact_moves_the_cost_alone(capsys):
    words = ("--price", "1,2,4", "--tokens-per-s", "1000", "--utilisation", "0.25,0.5,1")
    moved = figures(answer(capsys, *words), "What moves it")
    widths = [figure["high"] - figure["low"] for figure in moved.values()]
    assert [name for name, _ in moved] == ["price", "utilisation"]
    assert widths == sorted(widths, reverse=True)
    assert moved["utilisation", "$/M tokens"]["mid"] == pytest.approx(2 / 3.6 / 0.5)


def test_the_rest_of_the_bill_is_a_factor_of_every_cost(capsys):
    words = ("--price", "3.6", "--tokens-per-s", "1000", "--gpus", "2", "--demand", "1000")
    words += ("--gpu-hours", "5", "--step-s", "1")
    plain, whole = (answer(capsys, *words, "--overhead", factor) for factor in ("1", "1.5"))
    costs = [(a, b) for a, b in zip(plain["figures"], whole["figures"], strict=True) if a["prices"]]
    assert len(costs) == 8
    assert [b["mid"] for _, b in costs] == pytest.approx([1.5 * a["mid"] for a, _ in costs])


def test_use_alone_is_told_apart_from_what_is_paid(capsys):
    result = answer(capsys, "--price", "3.6", "--tokens-per-s", "1000", "--utilisation", "0.5")
    assert mid(result, "Serving", "as paid", "$/M tokens") == 2
    assert mid(result, "Serving", "of use alone", "$/M tokens") == 1


def test_an_unknown_utilisation_is_said_to_be_taken_as_one(capsys):
    result = answer(capsys, "--price", "3.6", "--tokens-per-s", "1000")
    assert "Utilisation is taken as 1" in " ".join(result["notes"])


def test_the_demand_tells_the_utilisation(capsys):
    words = ("--price", "3.6", "--tokens-per-s", "1000", "--demand", "1000,500")
    result = answer(capsys, *words)
    # One GPU is kept for two hours, of which one and a half are used.
    assert mid(result, "Serving", "as paid", "$/M tokens") == pytest.approx(1 / 0.75)
    assert mid(result, "Fleet", "kept at the peak", "$/M tokens") == pytest.approx(1 / 0.75)
    own = answer(capsys, *words, "--utilisation", "0.5")
    assert mid(own, "Serving", "as paid", "$/M tokens") == 2


def test_an_api_that_is_cheaper_at_any_load_is_said_to_be(capsys):
    words = ("--price", "36", "--tokens-per-s", "1000", "--gpus", "1", "--api-price")
    dear, cheap = (answer(capsys, *words, usd) for usd in ("10.1", "9.9"))
    assert "cheaper at any load" not in " ".join(dear["notes"])
    assert "cheaper at any load" in " ".join(cheap["notes"])


def test_energy_is_told_as_measured_and_as_provisioned(capsys):
    words = ("--kw", "1.73", "--tokens-per-s", "1000", "--joules-per-token", "0.5")
    result = answer(capsys, *words, "--kwh-price", "0.08", "--pue", "1.5")
    energy = figures(result, "Energy")
    assert energy["measured", "J/token"]["mid"] == 0.5
    assert energy["provisioned", "J/token"]["mid"] == 1.73
    assert energy["current, provisioned", "$/M tokens"]["mid"] == pytest.approx(0.05767, rel=1e-3)
    assert "no money saved" in " ".join(result["notes"])


def test_training_takes_the_peak_of_the_gpu_unless_one_is_given(capsys):
    words = ("--gpu", "H100", "--active-parameters", "1B", "--mfu", "0.5")
    listed = mid(answer(capsys, *words), "Training", "tokens per second of a GPU", "tokens/s")
    own = answer(capsys, *words, "--peak-tflops", "12")
    assert listed == pytest.approx(989.4e12 * 0.5 / 6e9)
    assert mid(own, "Training", "tokens per second of a GPU", "tokens/s") == 1000


def test_an_own_gpu_has_a_price_of_its_own(capsys):
    words = ("--capex", "35040", "--life", "4", "--tokens-per-s", "1000")
    result = answer(capsys, *words)
    assert result["price"]["usd_per_gpu_hour"]["mid"] == 1
    assert "current out" in " ".join(result["notes"])
    powered = answer(capsys, *words, "--kw", "2", "--kwh-price", "0.1", "--pue", "1.5")
    assert powered["price"]["usd_per_gpu_hour"]["mid"] == pytest.approx(1.3)


def test_capital_without_a_life_is_no_price(capsys):
    result = answer(capsys, "--capex", "35040", "--tokens-per-s", "1000")
    assert result["price"] is None
    assert {"topic": "Price of an own GPU", "give": ["--life"]} in result["missing"]


def test_interruptions_make_spot_dearer(capsys):
    words = ("--price", "2", "--interruptions", "0.1", "--tokens-per-s", "1000")
    spot = answer(capsys, *words, "--restart", "0.5")
    assert spot["price"]["usd_per_gpu_hour"]["mid"] == 2.1
    assert answer(capsys, *words)["price"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--price", "-1"), "--price -1: not a number above 0"),
        (("--tokens-per-s", "0"), "--tokens-per-s 0: not a number above 0"),
        (("--tokens-per-s", "1/0"), "not a number above 0"),
        (("--price", "1e999999999"), "not a number above 0"),
        (("--price", "0e999999999"), "not a number above 0"),
        (("--price", "9" * 61), "not a number above 0"),
        (("--life", "101"), "not a number of years above 0 and at most 100"),
        (("--gpu", "H100", "--baseline-gpu", "B20", "--speedup", "2"), "--baseline-gpu takes B200"),
        (("--price", "nan"), "not a number above 0"),
        (("--price", "inf"), "not a number above 0"),
        (("--price", "cheap"), "not a number above 0"),
        (("--utilisation", "1.2"), "not a share above 0 and at most 1"),
        (("--utilisation", "0"), "not a share above 0 and at most 1"),
        (("--overhead", "0.9"), "not a factor of at least 1"),
        (("--gpus", "2.5"), "not a whole number of at least 1"),
        (("--price", "3,2,1"), "not LOW,MID,HIGH in this order"),
        (("--price", "1,2"), "not one number or LOW,MID,HIGH"),
        (("--kw", "1,2,3"), "not one number"),
        (("--demand", "0,0"), "--demand is 0 in every hour"),
        (("--price", "1", "--capex", "9"), "two prices of the same hour"),
        (("--cached-share", "1"), "looking it up costs nothing"),
        (("--gpu", "H1000"), "no price is known for the GPU 'H1000'"),
        (("--gpu", "H100", "--term", "weekly"), "no price is known for the term for H100"),
        (("--pue", "1"), "nothing follows from what is given"),
    ],
)
def test_nonsense_is_refused_with_a_way_out(capsys, words, said):
    message = refusal(capsys, *words)
    assert said in message
    assert "what to do: " in message


def test_a_fact_that_changes_nothing_is_named_with_what_it_needs(capsys):
    result = answer(capsys, "--gpu", "H100", "--fee", "9", "--pue", "1.2", "--speedup", "2")
    alone = {"topic": "--pue alone changes nothing", "give": ["--kwh-price"]}
    assert [one for one in result["missing"] if "alone" in one["topic"]] == [alone]
    (fee,) = answer(capsys, "--fee", "9")["missing"]
    assert fee == {"topic": "--fee alone changes nothing", "give": ["--speedup"]}


def test_every_companion_is_a_fact():
    names = {f.name for f in fields(Facts)}
    assert {*COMPANIONS, *chain(*COMPANIONS.values())} <= names


def test_a_run_that_knows_nothing_says_why(capsys, tmp_path):
    path = tmp_path / "host.json"
    operator = {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::mm",
        "pid": 1,
        "tid": 1,
        "ts": 1,
        "dur": 5,
    }
    path.write_text(json.dumps({"traceEvents": [operator]}))
    assert "host.json ran on no GPU" in refusal(capsys, path)


def test_an_unknown_gpu_is_answered_with_the_nearest_names(capsys):
    assert "--gpu takes H100, H200, H100 NVL" in refusal(capsys, "--gpu", "H1000")


def test_old_prices_are_warned_of_on_the_day_they_are_used(capsys, tmp_path):
    own = ("--prices", own_file(tmp_path), *SERVING, "--json")
    assert kprof("cost", *own, "--as-of", "2027-01-30") == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
    assert kprof("cost", *own, "--as-of", "2027-01-31") == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert "of 2026-11-01, 91 days ago: H100, on-demand" in warning


def test_a_file_of_ones_own_replaces_the_prices_of_its_gpus(capsys, tmp_path):
    own = own_file(tmp_path)
    price = answer(capsys, "--prices", own, *SERVING)["price"]
    assert price["usd_per_gpu_hour"] == {"low": 2.5, "mid": 2.5, "high": 2.5}
    assert price["sources"] == ["our contract: contract 7"]
    other = answer(capsys, "--prices", own, "--gpu", "B200")["price"]
    assert other == answer(capsys, "--gpu", "B200")["price"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "no table of prices"),
        ("{}", "no table of prices"),
        (json.dumps({"quotes": [{**OWN_LINE, "date": "yesterday"}]}), "no table of prices"),
        (json.dumps({"quotes": [{**OWN_LINE, "currency": "EUR"}]}), "no table of prices"),
        (json.dumps({"quotes": [{**OWN_LINE, "usd_per_gpu_hour": 0}]}), "H100 costs 0.0"),
    ],
)
def test_a_damaged_file_of_prices_is_refused(capsys, tmp_path, content, said):
    path = tmp_path / "own.json"
    if content is not None:
        path.write_text(content)
    assert said in refusal(capsys, "--prices", path, *SERVING)


def test_alone_it_lists_the_prices_with_date_and_source(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert kprof("cost") == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if "6.88" in line]
    assert all(part in line for part in ("H100", "AWS", "us-east-1", "2026-11-09", "https://"))


def test_every_price_of_the_table_has_a_source_and_a_day_that_was():
    quotes = read_prices()
    assert len(quotes) > 50
    assert all(quote.source.startswith("https://") for quote in quotes)
    assert all(date(2026, 1, 1) < quote.date <= TODAY for quote in quotes)
    assert len({(q.gpu, q.price_list, q.term, q.date) for q in quotes}) == len(quotes)


def test_a_price_is_exact_as_it_is_written():
    (aws,) = [q for q in read_prices() if (q.gpu, q.price_list) == ("H100", "AWS")]
    assert aws.usd_per_gpu_hour == Fraction("6.88")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("15.6T", 15_600_000_000_000),
        ("100k", 100_000),
        ("281/77", Fraction(281, 77)),
        ("1e9", 10**9),
    ],
)
def test_numbers_are_read_exactly_as_people_write_them(text, number):
    assert facts_of({"tokens_per_month": text}).tokens_per_month == number


def test_python_gives_facts_as_numbers():
    costs = calculate({"price": 3.99, "tokens_per_s": 5000, "utilisation": 0.6}, TODAY)
    (as_paid,) = [figure for figure in costs.figures if figure.name == "as paid"]
    assert as_paid.values == Band.known(Fraction("3.99") * 10**6 / (5000 * 3600) / Fraction("0.6"))


def test_a_fact_that_does_not_exist_is_refused():
    with pytest.raises(KprofError, match="tokens_per_second"):
        calculate({"tokens_per_second": 5}, TODAY)


def test_costs_render_on_a_page_with_their_sources():
    costs = calculate({"gpu": "H100", "tokens_per_s": 5000, "utilisation": 0.5}, TODAY)
    page = render_page("cost", sections_of_costs(costs))
    assert "https://www.coreweave.com/pricing" in page
    assert "P * overhead / (T * 3,600 / 10^6 * utilisation)" in page


# What a run knows.


def test_a_run_gives_its_gpus_and_step_and_the_line_gives_the_tokens(capsys):
    result = answer(capsys, H200_TRAIN, "--tokens-per-step", "8192")
    assert result["price"]["name"] == "H200, on-demand"
    price = result["price"]["usd_per_gpu_hour"]["mid"]
    thousand = mid(result, "Steps", "a thousand steps", "$")
    assert thousand == pytest.approx(price * 40.3 / 3600, rel=0.005)
    paid = mid(result, "Serving", "as paid", "$/M tokens")
    assert paid == pytest.approx(thousand / 1000 / 8192 * 10**6)
    assert "its energy was not measured" in result["notes"][0]


def test_what_is_given_goes_before_what_the_run_knows(capsys):
    result = answer(capsys, H200_TRAIN, "--step-s", "3600", "--price", "2")
    assert mid(result, "Steps", "a thousand steps", "$") == 2000


def test_a_step_tells_the_rate_of_a_gpu_and_the_energy_of_a_token(capsys):
    words = ("--tokens-per-step", "8000", "--step-s", "2", "--gpus", "4", "--price", "3.6")
    result = answer(capsys, *words, "--joules-per-step", "4000")
    # 1,000 tokens/s of a GPU, at a thousandth of a dollar a second.
    assert mid(result, "Serving", "as paid", "$/M tokens") == 1
    assert mid(result, "Energy", "measured", "J/token") == 0.5
    assert mid(result, "Energy", "a step on all GPUs", "J/step") == 4000


def test_tokens_of_a_step_without_a_step_are_not_guessed(capsys):
    result = answer(capsys, "--gpu", "H100", "--tokens-per-step", "8192", "--gpus", "8")
    assert result["missing"] == [{"topic": "Tokens per second", "give": ["--step-s"]}]


def measured(*kernels, **meta):
    defaults = {
        "gpus": (Gpu(0, "NVIDIA H100 80GB HBM3", rank=0), Gpu(0, "NVIDIA H100 80GB HBM3", rank=1))
    }
    return measured_in(analyzed_trace_of(*kernels, **{**defaults, **meta}))


def test_a_run_counts_the_gpus_of_all_ranks_and_names_them_as_price_lists_do():
    found = measured({"rank": 0}, {"rank": 1})
    assert (found.gpu, found.gpus, found.step_s) == ("H100", 2, None)


def test_unrecorded_steps_go_before_recorded_ones():
    timed = Recording("a rule", 9, (5,), "device", (300_000_000,), (100_000_000, 120_000_000))
    assert measured({}, recording=timed).step_s == Fraction(11, 100)
    alone = Recording("a rule", 9, (5,), "device", (300_000_000,))
    assert measured({}, recording=alone).step_s == Fraction(3, 10)


def test_the_energy_of_a_step_comes_from_the_counter():
    steps = [
        {"kind": "step", "name": str(i), "start_ns": 200 * i, "duration_ns": 200} for i in range(2)
    ]
    samples = [
        {"quantity": "energy_mj", "time_ns": 100 * i, "value": 2_000.0 * i} for i in range(5)
    ]
    found = measured({}, ranges=steps, samples=samples)
    assert found.joules_per_step == 4.0
    assert measured({}, ranges=steps, samples=samples[:2]).joules_per_step is None
    assert measured({}, ranges=steps).joules_per_step is None


def test_gpus_of_different_kinds_have_no_one_price():
    gpus = (Gpu(0, "NVIDIA H100 80GB HBM3", rank=0), Gpu(0, "NVIDIA H200", rank=1))
    assert measured({"rank": 0}, {"rank": 1}, gpus=gpus).gpu is None


def test_a_run_without_a_gpu_says_nothing_of_its_cost():
    found = measured({"activity": "host"}, source="host.json")
    assert (found.gpu, found.gpus, found.step_s, found.joules_per_step) == (None,) * 4
    assert "host.json ran on no GPU" in found.notes[0]


# The document.


def shown_in(document):
    """Return the commands of a document with what it shows of their output."""
    blocks = [block.strip("\n") for block in document.read_text().split("```")[1::2]]
    shown = [block.partition("\n") for block in blocks if block.startswith("kprof cost ")]
    return {command: output for command, _, output in shown if output}


@pytest.mark.parametrize("command", sorted(shown_in(DOCUMENT)))
def test_the_document_shows_what_the_command_prints(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(DOCUMENT.parent.parent)
    assert kprof(*shlex.split(command)[1:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown_in(DOCUMENT)[command] in "\n".join(printed)
