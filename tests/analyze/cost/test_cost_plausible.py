"""`kprof cost` refuses facts that cannot be true, and warns of those that hardly are."""

import pytest

from kprof.ab.pricing import calculate
from kprof.errors import KprofError
from tests.cost_answers import TODAY, answer

SERVED = {"price": "3.99", "tokens_per_s": "5000"}


def warnings(facts=None, **assumptions):
    """Return what is warned of, beside the age of prices."""
    return calculate({**SERVED, **(facts or {}), "assumptions": assumptions}, TODAY).warnings


@pytest.mark.parametrize(
    ("fact", "values"),
    [
        ("price", ("0.009", "101", "2920")),
        ("baseline_price", ("2920",)),
        ("utilisation", ("60", "600%", "-0.1")),
        ("active_parameters", ("7", "70", "1e15")),
        ("training_tokens", ("15.6",)),
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
    ("section", "field", "values"),
    [
        ("energy", "kw_per_gpu", (700, 21, 0.001)),
        ("energy", "usd_per_kwh", (8, 12)),
        ("energy", "pue", (120, 0.9)),
        ("replicas", "headroom", (20,)),
        ("training", "mfu", (40, 1.01, 0)),
        ("training", "peak_tflops", (989e12, 0.01)),
    ],
)
def test_an_assumption_in_the_wrong_unit_is_refused(section, field, values):
    for value in values:
        with pytest.raises(KprofError, match=field) as error:
            warnings(**{section: {field: value}})
        assert f"{field} in [{section}]" in error.value.fix


@pytest.mark.parametrize(
    ("facts", "assumptions", "named"),
    [
        ({}, {"spot": {"interruptions_per_hour": 20, "restart_hours": 0.5}}, "restart_hours"),
        (
            {"price": None, "gpu": "H100", "term": "owned"},
            {"owning": {"capex_usd_per_gpu": 1_000, "life_years": 4}},
            "[owning]",
        ),
        ({"tokens_per_s": "5k,900k,2M"}, {}, "--tokens-per-s"),
    ],
)
def test_what_is_hardly_true_is_warned_of(facts, assumptions, named):
    given = {name: value for name, value in {**SERVED, **facts}.items() if value is not None}
    found = calculate({**given, "assumptions": assumptions}, TODAY).warnings
    assert [one for one in found if named in one]


def test_a_demand_that_no_fleet_can_be_sized_for_is_refused():
    with pytest.raises(KprofError, match="demand"):
        warnings({"demand": "1e-320"})


def test_a_fact_at_its_limit_is_taken():
    for fact, value in (("price", "0.01"), ("price", "100"), ("active_parameters", "1e4")):
        assert calculate({**SERVED, fact: value}, TODAY).figures
    assert warnings(energy={"pue": 5}) == ()


MODEL = {"active_parameters": "7B"}
PEAK = {"training": {"peak_tflops": 1000}}


def test_a_model_that_takes_more_than_the_peak_is_refused():
    # 6 * 7e9 * 25,000 FLOP/s are 1,050 TFLOP/s.
    with pytest.raises(KprofError, match=r"MFU of 1\.05 "):
        warnings({**MODEL, "tokens_per_s": "25000"}, **PEAK)
    assert warnings({**MODEL, "tokens_per_s": "23000"}, **PEAK) == ()


def test_the_peak_holds_for_steps_and_for_hours_as_well():
    model = {**MODEL, "price": "2", "assumptions": PEAK}
    with pytest.raises(KprofError, match="MFU"):
        calculate({**model, "training_tokens": "1T", "gpu_hours": "5"}, TODAY)
    with pytest.raises(KprofError, match="MFU"):
        steps = {"tokens_per_step": "1M", "step_s": "1", "gpus": "8"}
        calculate({**model, **steps}, TODAY)


def test_an_mfu_that_no_training_has_is_warned_of():
    (warning,) = warnings({"active_parameters": "10k"}, training={"peak_tflops": 989})
    options = ("--active-parameters", "--training-tokens", "--gpu-hours", "--tokens-per-s")
    assert [option for option in ("MFU", *options) if option not in warning] == []


def test_a_given_mfu_that_contradicts_the_rate_is_refused():
    facts = {**MODEL, "tokens_per_s": "10000"}
    with pytest.raises(KprofError, match="contradicts"):
        warnings(facts, training={"peak_tflops": 1000, "mfu": 0.5})
    assert warnings(facts, training={"peak_tflops": 1000, "mfu": 0.42}) == ()


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
    assert bool(warnings({"demand": demand, "utilisation": utilisation})) is is_warned


def test_gpus_that_cannot_serve_what_is_asked_are_warned_of():
    assert "serve" in warnings({"gpus": "2", "demand": "11000"})[0]
    assert warnings({"gpus": "2", "demand": "9000"}) == ()
    month = {"gpus": "1", "speedup": "2"}
    assert "in a month" in warnings({**month, "tokens_per_month": "20T"})[0]
    assert warnings({**month, "tokens_per_month": "2B"}) == ()


def test_energy_that_no_gpu_draws_is_refused():
    with pytest.raises(KprofError, match="25 kW"):
        warnings({"joules_per_token": "5"})
    with pytest.raises(KprofError, match="kW"):
        calculate({"price": "2", "step_s": "1", "gpus": "1", "joules_per_step": "30000"}, TODAY)
    assert warnings({"joules_per_token": "0.2"}) == ()


def test_more_energy_than_is_provided_is_warned_of():
    energy = {"kw_per_gpu": 1.3}
    assert "provides" in warnings({"joules_per_token": "0.4"}, energy=energy)[0]
    assert warnings({"joules_per_token": "0.2"}, energy=energy) == ()


@pytest.mark.parametrize(
    ("fact", "slip", "near", "word"),
    [
        ("price", "31.33", "19", "server"),
        ("tokens_per_s", "2M", "1M", "of one GPU"),
        ("tokens_per_month", "2", "1M", "as 2T"),
        ("speedup", "0.77", "1", "slowdown"),
        ("speedup", "30", "20", "30 % faster is 1.3"),
        ("joules_per_token", "0.000001", "0.002", "idle"),
    ],
)
def test_a_fact_of_another_unit_is_warned_of(fact, slip, near, word):
    facts = {"speedup": "1.3"} if fact == "tokens_per_month" else {}
    (warning,) = warnings({**facts, fact: slip})
    assert word in warning
    assert warnings({**facts, fact: near}) == ()


OWNING = {"capex_usd_per_gpu": 35_000, "life_years": 4}
SPOT = {"interruptions_per_hour": 0.05, "restart_hours": 0.5}


@pytest.mark.parametrize(
    ("section", "known", "field", "slip", "near", "word"),
    [
        ("owning", OWNING, "capex_usd_per_gpu", 280_000, 140_000, "server"),
        ("owning", OWNING, "capex_usd_per_gpu", 30, 1_000, "server"),
        ("owning", OWNING, "life_years", 48, 15, "years"),
        ("energy", {}, "kw_per_gpu", 10.2, 3.9, "server"),
        ("energy", {}, "usd_per_kwh", 0.00008, 0.005, "per Wh"),
        ("spot", SPOT, "restart_hours", 30, 20, "hours of work"),
    ],
)
def test_an_assumption_of_another_unit_is_warned_of(section, known, field, slip, near, word):
    found = warnings(**{section: {**known, field: slip}})
    assert [one for one in found if word in one]
    assert warnings(**{section: {**known, field: near}}) == ()


def test_a_warning_stands_in_the_json_and_leaves_the_exit_code(capsys):
    words = ("--price", "2", "--tokens-per-s", "5000", "--demand", "9000", "--utilisation", "0.2")
    assert "contradicts" in answer(capsys, *words)["warnings"][0]


def test_an_arithmetic_that_no_gpu_has_is_refused_without_a_peak_too():
    facts = {**SERVED, "tokens_per_s": "1M"}
    with pytest.raises(KprofError, match="active parameters"):
        calculate({**facts, "active_parameters": "70B"}, TODAY)
    assert warnings({**facts, "active_parameters": "1B"}) == ()


STEP = {"tokens_per_step": "1M", "step_s": "1", "gpus": "8", "joules_per_step": "5600"}


@pytest.mark.parametrize(
    ("given", "same", "other"),
    [
        ("tokens_per_s", "125000", "5000"),
        ("joules_per_token", "0.0056", "0.5"),
    ],
)
def test_two_statements_of_one_quantity_are_compared(given, same, other):
    facts = {**STEP, "tokens_per_s": None}
    assert warnings({**facts, given: same}) == ()
    told = warnings({**facts, given: other})
    option = "--" + given.replace("_", "-")
    assert [option in one for one in told] == [True]


def test_one_number_with_separators_is_not_taken_for_a_band_in_silence():
    assert len(warnings({"tokens_per_s": "1,200,900"})) == 1
    assert warnings({"tokens_per_s": "100,200,900"}) == ()


def test_owning_beside_a_price_is_said_to_change_nothing():
    owning = {"capex_usd_per_gpu": 35_000, "life_years": 4}
    beside = calculate({**SERVED, "assumptions": {"owning": owning}}, TODAY)
    assert any("[owning]" in note for note in beside.notes)
    assert beside.figures == calculate(SERVED, TODAY).figures
