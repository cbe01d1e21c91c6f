"""`kprof cost`: what it takes from the line, a file and a run, and how it answers."""

import inspect
import json
import re
import shlex
from datetime import date
from pathlib import Path

import pytest

from kprof.ab.pricing import calculate, read_assumptions, read_prices
from kprof.analyze.cost.facts import (
    FIELDS,
    Assumptions,
    Facts,
    detail,
    documented,
)
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
    assuming,
    figures,
    mid,
    refusal,
)
from tests.quantities import quantities_in

DOCUMENT = Path(__file__).parents[2] / "docs" / "cost.md"


def test_every_option_is_a_fact_and_every_fact_an_option():
    other = {"run", "prices", "assumptions", "show_assumptions", "as_of", "json"}
    facts = {name for name in Facts.__struct_fields__ if name != "assumptions"}
    assert inspect.signature(cost).parameters.keys() - other == facts


def test_every_field_is_described_and_every_number_has_a_range():
    for one in FIELDS.values():
        assert detail(one.type, "description")
        assert (detail(one.type, "ge") is None) == ("str" in str(one.type))


def test_the_assumptions_that_are_shown_are_the_defaults(capsys, tmp_path):
    assert kprof("cost", "--show-assumptions") == 0
    path = tmp_path / "assumptions.toml"
    path.write_text(capsys.readouterr().out)
    assert read_assumptions(path) == Assumptions()


def test_every_example_that_is_shown_is_valid(tmp_path):
    path = tmp_path / "assumptions.toml"
    path.write_text(re.sub(r"^# (?=\w+ = |\[)", "", documented(), flags=re.MULTILINE))
    assumed = read_assumptions(path)
    assert assumed.owning.life_years == 4
    assert assumed.spot.restart_hours == 0.5
    assert assumed.served.input_tokens == 40_000_000


@pytest.mark.parametrize(
    ("text", "said", "fix"),
    [
        (
            "[energy]\npue = 9",
            "pue in [energy]: must be at most 5",
            "pue in [energy], power of the data",
        ),
        ("[owning]\ncapex_usd_per_gpu = 9", "life_years in [owning]: is required", "years of use"),
        ("[energy]\npu = 1", "[energy]: there is no field pu", "--show-assumptions"),
        ("overhead = 'big'", "overhead: must be a number", "give overhead, the whole bill"),
        ("[energy", "Expected ']'", "--show-assumptions"),
        ("# \xff", "is not a text in UTF-8", "--show-assumptions"),
        (None, "cannot be read", "--show-assumptions"),
    ],
)
def test_wrong_assumptions_are_refused_with_file_field_and_range(capsys, tmp_path, text, said, fix):
    path = tmp_path / "assumptions.toml"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    message = refusal(capsys, "--price", "2", "--assumptions", path)
    assert str(path) in message
    assert said in message
    assert fix in message


def test_a_file_of_assumptions_counts_beside_the_options(capsys, tmp_path):
    path = tmp_path / "assumptions.toml"
    path.write_text("overhead = 1.5\n")
    words = ("--price", "2", "--tokens-per-s", "1000", "--assumptions", path)
    paid = mid(answer(capsys, *words), "Serving", "as paid", "$/M tokens")
    assert paid == pytest.approx(1.5 * 2 / 3.6)


def test_every_dollar_has_a_price_a_date_and_a_band(capsys):
    result = answer(capsys, *SERVING, "--demand", "9000", "--api-price", "1", "--gpu-hours", "9")
    dollars = [figure for figure in result["figures"] if "$" in figure["unit"]]
    assert len(dollars) == 6
    for figure in dollars:
        assert figure["low"] < figure["mid"] < figure["high"]
        assert figure["prices"][0]["oldest"] == "2026-08-26"
        assert figure["prices"][0]["sources"]


@pytest.mark.parametrize("width", ["80", "200"])
def test_the_terminal_shows_price_band_and_date_in_its_width(capsys, monkeypatch, tmp_path, width):
    aws = tmp_path / "aws.toml"
    aws.write_text("price_list = 'AWS'\n")
    monkeypatch.setenv("COLUMNS", width)
    assert kprof("cost", *SERVING, "--assumptions", aws, *DAY) == 0
    out = capsys.readouterr().out
    assert "$6.88 a GPU-hour: H100, on-demand, of 2026-11-09." in out
    assert "0.3822" in out
    assert max(len(line) for line in out.splitlines()) <= int(width)


def test_what_is_not_given_is_named_and_never_guessed(capsys):
    result = answer(capsys, "--tokens-per-s", "5000", "--joules-per-token", "0.1")
    assert [figure["unit"] for figure in result["figures"]] == ["J/token"]
    assert result["missing"] == [
        {"topic": "Serving", "give": ["--gpu or --price"]},
        {"topic": "Energy", "give": ["usd_per_kwh in [energy]"]},
    ]


def test_the_bill_is_given_in_micro_dollars_that_add_up():
    served = {"input_tokens": 3e6, "output_tokens": 1e6, "prefill_gpu_s": 100}
    served |= {"decode_gpu_s": 200, "cached_share": 1 / 3, "cached_weight": 0.1}
    bill = assuming({"price": "7"}, served=served)["bill"]
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
    assert ("paid back after", "months") not in figures(none, "Gain in cash")
    assert len([note for note in none["notes"] if note not in one["notes"]]) == 1
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


def test_the_rest_of_the_bill_is_a_factor_of_every_cost():
    facts = {"price": 3.6, "tokens_per_s": 1000, "gpus": 2, "demand": 1000}
    facts |= {"gpu_hours": 5, "step_s": 1}
    plain, whole = (assuming(facts, overhead=factor) for factor in (1, 1.5))
    costs = [(a, b) for a, b in zip(plain["figures"], whole["figures"], strict=True) if a["prices"]]
    assert len(costs) == 8
    assert [b["mid"] for _, b in costs] == pytest.approx([1.5 * a["mid"] for a, _ in costs])


def test_use_alone_is_told_apart_from_what_is_paid(capsys):
    result = answer(capsys, "--price", "3.6", "--tokens-per-s", "1000", "--utilisation", "0.5")
    assert mid(result, "Serving", "as paid", "$/M tokens") == 2
    assert mid(result, "Serving", "of use alone", "$/M tokens") == 1


def test_an_unknown_utilisation_is_said_to_be_taken_as_one(capsys):
    result = answer(capsys, "--price", "3.6", "--tokens-per-s", "1000")
    told = answer(capsys, "--price", "3.6", "--tokens-per-s", "1000", "--utilisation", "1")
    (note,) = [one for one in result["notes"] if one not in told["notes"]]
    assert quantities_in(note)[0] == "1"


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
    assert len([one for one in cheap["notes"] if "API" in one]) == 1
    assert [one for one in dear["notes"] if "API" in one] == []


def test_energy_is_told_as_measured_and_as_provisioned():
    energy = {"kw_per_gpu": 1.73, "usd_per_kwh": 0.08, "pue": 1.5}
    result = assuming({"tokens_per_s": 1000, "joules_per_token": 0.5}, energy=energy)
    shown = figures(result, "Energy")
    assert shown["measured", "J/token"]["mid"] == 0.5
    assert shown["provisioned", "J/token"]["mid"] == pytest.approx(1.73)
    dollars = shown["electricity, provisioned", "$/M tokens"]["mid"]
    assert dollars == pytest.approx(0.05767, rel=1e-3)
    assert "no money saved" in " ".join(result["notes"])


def test_training_takes_the_peak_of_the_gpu_unless_one_is_given():
    facts, training = {"gpu": "H100", "active_parameters": "1B"}, {"mfu": 0.5}
    where = ("Training", "tokens per second of a GPU", "tokens/s")
    listed = mid(assuming(facts, training=training), *where)
    own = mid(assuming(facts, training={**training, "peak_tflops": 12}), *where)
    assert listed == pytest.approx(989.4e12 * 0.5 / 6e9)
    assert own == pytest.approx(1000)


NONSENSE = [
    (("--price", "-1"), "--price -1: must be at least 0.01"),
    (("--price", "2920"), "--price 2920: must be at most 100"),
    (("--tokens-per-s", "0"), "--tokens-per-s 0: must be above 0"),
    (("--tokens-per-s", "1/0"), "--tokens-per-s 1/0: must be a number"),
    (("--tokens-per-s", "1e-99"), "--tokens-per-s 1e-99: must be above 0"),
    (("--tokens-per-s", "1e99T"), "--tokens-per-s 1e99T: must be at most"),
    (("--price", "nan"), "--price nan: must be at least"),
    (("--price", "inf"), "--price inf: must be at most"),
    (("--price", "cheap"), "$ per GPU-hour (of a server: divide it by its GPUs)"),
    (("--utilisation", "1.2"), "share served of the SLA's capacity (above 0 to 1, "),
    (("--gpus", "2.5"), "--gpus 2.5: must be a whole number"),
    (("--price", "3,2,1"), "LOW,MID,HIGH in this order"),
    (("--price", "1,2"), "--price 1,2: must be one number, or LOW,MID,HIGH"),
    (("--demand", "0,0"), "--demand 0,0: demand must be above 0"),
    (("--demand", "2M/month"), "--demand 2M/month: must be a number"),
    (
        ("--gpu", "H100", "--baseline-gpu", "B20", "--speedup", "2"),
        "--baseline-gpu takes one of: B200; ",
    ),
    (("--gpu", "H1000"), "no price list has the GPU 'H1000'"),
    (("--gpu", "H100", "--term", "weekly"), "no price list has H100 at the term 'weekly'"),
]


def test_nonsense_is_refused_with_a_fix(capsys):
    told = [(words, said, refusal(capsys, *words)) for words, said in NONSENSE]
    assert [(words, message) for words, said, message in told if said not in message] == []
    assert [words for words, _, message in told if "what to do: " not in message] == []


@pytest.mark.parametrize("facts", [(), ("--price", "3"), ("--tokens-per-s", "5000")])
def test_a_price_list_that_there_is_not_is_refused_with_all_that_there_are(capsys, tmp_path, facts):
    path = tmp_path / "assumptions.toml"
    path.write_text("price_list = 'Nope'\n")
    message = refusal(capsys, "--gpu", "H100", *facts, "--assumptions", path)
    lists = {quote.price_list for quote in read_prices()}
    assert [name for name in lists if name not in message] == []


def test_a_gpu_before_the_change_that_no_list_has_is_refused_also_without_a_speedup(capsys):
    assert "--baseline-gpu" in refusal(capsys, "--gpu", "H100", "--baseline-gpu", "nosuch")


@pytest.mark.parametrize(("day", "number"), [("1999-01-01", 1), ("2026-11-20", 0)])
def test_prices_of_a_later_day_than_asked_for_are_warned_of(capsys, day, number):
    assert kprof("cost", *SERVING, "--as-of", day, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["warnings"]) == number


def test_a_fact_that_changes_nothing_is_named_with_what_it_needs(capsys):
    result = answer(capsys, "--gpu", "H100", "--utilisation", "0.5", "--fee", "9")
    (fee,) = result["missing"]
    assert [one["topic"] for one in result["figures"]] == ["Kept GPUs"] * 3
    assert fee["topic"].split()[0] == "--fee"
    assert fee["give"] == ["--speedup"]


def test_a_price_alone_is_the_cost_of_a_gpu_that_is_kept(capsys):
    figures = answer(capsys, "--price", "2.5")["figures"]
    assert [(one["topic"], one["mid"]) for one in figures] == [
        ("Kept GPUs", 2.5),
        ("Kept GPUs", pytest.approx(2.5 * 730)),
    ]


def test_python_gives_facts_as_numbers():
    costs = calculate({"price": 3.99, "tokens_per_s": 5000, "utilisation": 0.6}, TODAY)
    (as_paid,) = [figure for figure in costs.figures if figure.name == "as paid"]
    assert as_paid.mid == pytest.approx(3.99 * 10**6 / (5000 * 3600) / 0.6)
    assert as_paid.values.is_known


def test_assumptions_alone_are_no_question():
    with pytest.raises(KprofError, match="no figure follows"):
        assuming({}, energy={"pue": 1.2})


def test_a_fact_that_does_not_exist_is_refused():
    with pytest.raises(KprofError, match="tokens_per_second"):
        calculate({"tokens_per_second": 5}, TODAY)


def test_costs_render_on_a_page_with_their_sources():
    costs = calculate({"gpu": "H100", "tokens_per_s": 5000, "utilisation": 0.5}, TODAY)
    page = render_page("cost", sections_of_costs(costs))
    assert "https://www.coreweave.com/pricing" in page
    assert "P * overhead / (T * 3,600 / 10^6 * utilisation)" in page


# The document.


def blocks_of(document):
    """Return the commands of a document with what it shows of their output, and its files."""
    blocks = [block.strip("\n") for block in document.read_text().split("```")[1::2]]
    shown = [block.partition("\n") for block in blocks if block.startswith("kprof cost ")]
    files = [block.partition("\n")[2] for block in blocks if block.startswith("toml\n# ")]
    commands = {command: output for command, _, output in shown if output}
    return commands, {text.split()[1]: text for text in files}


COMMANDS, FILES = blocks_of(DOCUMENT)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_document_shows_what_the_command_prints(capsys, monkeypatch, tmp_path, command):
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "tests").symlink_to(DOCUMENT.parent.parent / "tests")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert kprof(*shlex.split(command)[1:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert COMMANDS[command] in "\n".join(printed)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"price": "2", "gpus": "8"}, {"an hour of 8": 16, "a month of 8": 11_680}),
        ({"price": "2", "utilisation": "50%"}, {"a GPU-hour in use": 4}),
    ],
)
def test_two_options_are_enough_for_an_answer(given, names):
    found = calculate(given, date(2026, 11, 1))
    figures = {one.name: one.mid for one in found.figures}
    assert {name: pytest.approx(figures[name]) for name in names} == names
    assert found.missing == ()


@pytest.mark.parametrize("share", ["0.5", "50%", "50 %"])
def test_a_share_is_written_as_a_number_or_in_percent(share):
    facts = {"price": "2", "tokens_per_s": "5000", "utilisation": share}
    figures = calculate(facts, date(2026, 11, 1)).figures
    half = calculate({**facts, "utilisation": "0.5"}, date(2026, 11, 1)).figures
    assert figures == half


def test_what_is_no_share_takes_no_percent():
    with pytest.raises(KprofError, match="50%"):
        calculate({"price": "50%", "gpus": "8"}, date(2026, 11, 1))
