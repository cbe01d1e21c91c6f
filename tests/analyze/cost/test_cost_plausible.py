"""`kprof cost` refuses facts that cannot be true, and warns of those that hardly are."""

import pytest

from kprof.ab.pricing import calculate
from kprof.errors import KprofError
from tests.commands.test_cli import kprof
from tests.cost_answers import DAY, TODAY, answer, refusal

SERVED = {"price": "3.99", "tokens_per_s": "5000"}


def warnings(**facts):
    """Return what is warned of, beside the age of prices."""
    return calculate({**SERVED, **facts}, TODAY).warnings


@pytest.mark.parametrize(
    ("fact", "values"),
    [
        ("price", ("0.009", "101", "2920")),
        ("baseline_price", ("2920",)),
        ("kw", ("700", "21", "0.001")),
        ("kwh_price", ("8", "12")),
        ("pue", ("120", "0.9")),
        ("overhead", ("30", "0.5")),
        ("headroom", ("20",)),
        ("utilisation", ("60", "60%", "-0.1")),
        ("mfu", ("40", "1.01", "0")),
        ("availability", ("99",)),
        ("interest", ("8",)),
        ("active_parameters", ("7", "70", "1e15")),
        ("training_tokens", ("15.6",)),
        ("peak_tflops", ("989e12", "0.01")),
        ("api_price", ("0.000002", "20000")),
        ("tokens_per_s", ("0", "-5", "nan", "inf")),
        ("gpus", ("0", "-8", "1.5")),
    ],
)
def test_a_fact_in_the_wrong_unit_is_refused(fact, values):
    for value in values:
        with pytest.raises(KprofError) as error:
            calculate({"price": "3.99", fact: value}, TODAY)
        assert f"--{fact.replace('_', '-')} {value}" in error.value.problem
        assert error.value.fix


@pytest.mark.parametrize(
    ("fact", "value"),
    [("price", "0.01"), ("price", "100"), ("kw", "20"), ("active_parameters", "1e4"), ("pue", "5")],
)
def test_a_fact_at_its_limit_is_taken(fact, value):
    assert calculate({**SERVED, "kwh_price": "0.1", fact: value}, TODAY).figures


def test_a_model_that_takes_more_than_the_peak_is_refused():
    # 6 * 7e9 * 25,000 FLOP/s are 1,050 TFLOP/s.
    facts = {"active_parameters": "7B", "peak_tflops": "1000", "tokens_per_s": "25000"}
    with pytest.raises(KprofError, match=r"an MFU of 1\.05 follows"):
        calculate({**SERVED, **facts}, TODAY)
    assert calculate({**SERVED, **facts, "tokens_per_s": "23000"}, TODAY).warnings == ()


def test_the_peak_holds_for_steps_and_for_hours_as_well():
    model = {"active_parameters": "7B", "peak_tflops": "1000", "price": "2"}
    with pytest.raises(KprofError, match="MFU"):
        calculate({**model, "training_tokens": "1T", "gpu_hours": "5"}, TODAY)
    with pytest.raises(KprofError, match="MFU"):
        steps = {"tokens_per_step": "1M", "step_s": "1", "gpus": "8"}
        calculate({**model, **steps}, TODAY)


def test_an_mfu_that_no_training_has_is_warned_of():
    (warning,) = warnings(active_parameters="10k", peak_tflops="989")
    assert "look for a slip" in warning


def test_a_given_mfu_that_contradicts_the_rate_is_refused():
    facts = {"active_parameters": "7B", "peak_tflops": "1000", "tokens_per_s": "10000"}
    with pytest.raises(KprofError, match="contradicts"):
        calculate({**SERVED, **facts, "mfu": "0.5"}, TODAY)
    assert calculate({**SERVED, **facts, "mfu": "0.42"}, TODAY).warnings == ()


@pytest.mark.parametrize(
    ("demand", "utilisation", "is_warned"),
    [
        ("1000,9000", "0.9", True),
        ("1000,9000", "0.3", True),
        ("1000,9000", "0.5", False),
        ("1000,9000", "0.66", False),
        ("50000", "0.5", True),
        ("50000", "1", False),
    ],
)
def test_a_utilisation_that_contradicts_the_demand_is_warned_of(demand, utilisation, is_warned):
    assert bool(warnings(demand=demand, utilisation=utilisation)) is is_warned


def test_gpus_that_cannot_serve_what_is_asked_are_warned_of():
    assert "serve" in warnings(gpus="2", demand="11000")[0]
    assert warnings(gpus="2", demand="9000") == ()
    assert "in a month" in warnings(gpus="1", tokens_per_month="20T", speedup="2")[0]
    assert warnings(gpus="1", tokens_per_month="2B", speedup="2") == ()


def test_energy_that_no_gpu_draws_is_refused():
    with pytest.raises(KprofError, match="25 kW"):
        warnings(joules_per_token="5")
    with pytest.raises(KprofError, match="kW"):
        calculate({"price": "2", "step_s": "1", "gpus": "1", "joules_per_step": "30000"}, TODAY)
    assert warnings(joules_per_token="0.2", kwh_price="0.1") == ()


def test_more_energy_than_is_provided_is_warned_of():
    assert "provides" in warnings(joules_per_token="0.4", kw="1.3", kwh_price="0.1")[0]
    assert warnings(joules_per_token="0.2", kw="1.3", kwh_price="0.1") == ()


def test_slips_in_a_single_fact_are_warned_of():
    assert "of one GPU" in warnings(tokens_per_s="2M")[0]
    assert "30 % faster is 1.3" in warnings(speedup="30")[0]
    owned = {"capex": "30", "life": "4", "tokens_per_s": "5000"}
    assert "cents" in calculate(owned, TODAY).warnings[0]


OWNED = {"price": None, "capex": "35000", "life": "4", "kw": "1.3", "kwh_price": "0.08"}
SAVED = {"speedup": "1.3", "tokens_per_month": "2T"}
SPOT = {"interruptions": "0.05", "restart": "0.5"}


@pytest.mark.parametrize(
    ("known", "fact", "slip", "near", "word"),
    [
        ({}, "price", "31.33", "19", "server"),
        (OWNED, "capex", "280000", "140000", "server"),
        (OWNED, "kw", "10.2", "3.9", "server"),
        (OWNED, "life", "48", "15", "years"),
        (OWNED, "kwh_price", "0.00008", "0.005", "per Wh"),
        (SAVED, "tokens_per_month", "2", "1M", "few"),
        (SAVED, "speedup", "0.77", "1", "slowdown"),
        (SPOT, "restart", "30", "20", "--restart in hours"),
        ({}, "joules_per_token", "0.000001", "0.002", "idle"),
    ],
)
def test_a_fact_of_another_unit_is_warned_of(known, fact, slip, near, word):
    (warning,) = warnings(**{**known, fact: slip})
    assert word in warning
    assert warnings(**{**known, fact: near}) == ()


def test_a_warning_stands_in_the_json_and_leaves_the_exit_code(capsys):
    words = ("--price", "2", "--tokens-per-s", "5000", "--demand", "9000", "--utilisation", "0.2")
    assert "contradicts" in answer(capsys, *words)["warnings"][0]


def test_a_refusal_ends_with_2_and_a_fix(capsys):
    assert "what to do" in refusal(capsys, "--price", "2", "--kw", "700", "--tokens-per-s", "9")
    assert kprof("cost", "--price", "2", "--kw", "0.7", "--tokens-per-s", "900", *DAY) == 0
