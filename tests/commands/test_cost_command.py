"""`kprof cost`: what it takes from the line, a file and a run, and how it answers."""

import inspect
import shlex
from dataclasses import fields
from fractions import Fraction
from itertools import chain
from pathlib import Path

import pytest

from kprof.ab.pricing import calculate
from kprof.analyze.cost.facts import COMPANIONS, LIMITS, Facts
from kprof.analyze.cost.price import Band
from kprof.commands.cost import cost
from kprof.errors import KprofError
from kprof.report.costs import sections_of_costs
from kprof.report.html import render_page
from tests.commands.test_cli import kprof
from tests.cost_answers import (
    DAY,
    SERVING,
    TODAY,
    answer,
    figures,
    mid,
    refusal,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "cost.md"


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


def test_the_same_gpu_at_the_same_price_gains_its_speedup(capsys):
    result = answer(capsys, "--speedup", "2")
    assert mid(result, "Gain of a token", "a token gets cheaper by", "times") == 2


def test_cash_counts_the_old_gpus_at_their_own_price(capsys):
    words = ("--price", "2", "--baseline-price", "6", "--tokens-per-s", "1000")
    result = answer(capsys, *words, "--demand", "2000", "--speedup", "2")
    assert mid(result, "Gain in cash", "saved", "$/month") == (4 * 6 - 2 * 2) * 730


def ends_of(figure):
    return [figure[end] for end in ("low", "mid", "high")]


def test_cash_has_the_bands_of_both_prices(capsys):
    words = ("--price", "2", "--speedup", "1.5", "--tokens-per-s", "1000", "--demand", "50000")
    saved = answer(capsys, *words, "--baseline-price", "2,4,8")
    # 75 old GPUs and 50 new ones, 730 hours.
    cash = figures(saved, "Gain in cash")["saved", "$/month"]
    assert ends_of(cash) == [36_500, 146_000, 365_000]
    words = ("--price", "1,2,3", *words[2:])
    both = figures(answer(capsys, *words, "--baseline-price", "2,4,8"), "Gain in cash")
    assert ends_of(both["saved", "$/month"]) == [0, 146_000, (75 * 8 - 50) * 730]


def test_cash_has_the_band_of_the_ratio_between_price_lists(capsys):
    words = ("--gpu", "H100", "--price", "2", "--speedup", "1.5", "--tokens-per-s", "1000")
    result = answer(capsys, *words, "--baseline-gpu", "B200", "--demand", "50000")
    gain = figures(result, "Gain of a token")["a token gets cheaper by", "times"]
    cash = figures(result, "Gain in cash")["saved", "$/month"]
    # 75 old GPUs at $2 times the ratio, which is the gain over 1.5, and 50 new ones at $2.
    assert ends_of(cash) == pytest.approx([100_000 * 0.73 * (g - 1) for g in ends_of(gain)])


def test_prices_that_are_given_apart_do_not_move_together(capsys):
    words = ("--price", "3.6,7.2,14.4", "--baseline-price", "7.2,14.4,28.8")
    gain = figures(
        answer(capsys, *words, "--tokens-per-s", "1000", "--speedup", "1"), "Gain of a token"
    )
    assert ends_of(gain["a token gets cheaper by", "times"]) == [0.5, 2, 8]
    assert ends_of(gain["before", "$/M tokens"]) == [2, 4, 8]
    # At the middle of the new price, which makes a million tokens cost $2.
    assert ends_of(gain["saved", "$/M tokens"]) == [0, 2, 6]


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--price", "-1"), "--price -1: must be $ for one GPU and one hour"),
        (("--tokens-per-s", "0"), "--tokens-per-s 0: must be a number above 0"),
        (("--tokens-per-s", "1/0"), "must be a number above 0"),
        (("--price", "1e999999999"), "must be $ for one GPU and one hour"),
        (("--price", "0e999999999"), "must be $ for one GPU and one hour"),
        (("--price", "9" * 61), "must be $ for one GPU and one hour"),
        (("--life", "101"), "must be a number of years above 0 and at most 100"),
        (("--gpu", "H100", "--baseline-gpu", "B20", "--speedup", "2"), "--baseline-gpu takes B200"),
        (("--price", "nan"), "must be $ for one GPU and one hour"),
        (("--price", "inf"), "must be $ for one GPU and one hour"),
        (("--price", "cheap"), "must be $ for one GPU and one hour"),
        (("--utilisation", "1.2"), "must be a share above 0 and at most 1"),
        (("--utilisation", "0"), "must be a share above 0 and at most 1"),
        (("--overhead", "0.9"), "must be a factor from 1 to 10"),
        (("--gpus", "2.5"), "must be a whole number of at least 1"),
        (("--price", "3,2,1"), "must be LOW,MID,HIGH in this order"),
        (("--price", "1,2"), "must be one number or LOW,MID,HIGH"),
        (("--kw", "1,2,3"), "must be one number"),
        (("--demand", "0,0"), "--demand is 0 in every hour"),
        (("--demand", "2M/month"), "--demand 2M/month: must be a rate of at least 0 in tokens/s"),
        (("--price", "1", "--capex", "9"), "two prices of the same hour"),
        (("--cached-share", "1"), "looking it up costs nothing"),
        (("--gpu", "H1000"), "no price is known for the GPU 'H1000'"),
        (("--gpu", "H100", "--term", "weekly"), "no price is known for the term for H100"),
        (("--price", "1", "--tokens-per-s", "1e-99"), "as paid: what follows from these facts"),
        (("--price", "1", "--tokens-per-s", "1e99T"), "is too small for a number"),
        (("--price", "1", "--interruptions", "1e99", "--restart", "1e99"), "price of a GPU-hour"),
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
