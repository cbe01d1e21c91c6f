"""The prices that costs are made of: lists, files of one's own, numbers as people write them."""

import json
from datetime import date

import pytest

from kprof.ab.pricing import read_prices
from kprof.analyze.cost.facts import facts_of
from tests.commands.test_cli import kprof
from tests.cost_answers import OWN_LINE, SERVING, TODAY, answer, assuming, own_file, refusal
from tests.quantities import quantities_in


def test_two_gpus_that_no_list_has_both_of_need_a_price(capsys):
    result = answer(capsys, "--gpu", "A10", "--baseline-gpu", "MI300X", "--speedup", "2")
    give = result["missing"][0]["give"][0]
    assert "MI300X" in give and "A10" in give


OWNING = {"capex_usd_per_gpu": 35_040, "life_years": 4}


def hourly(facts, **assumptions):
    return assuming(facts, **assumptions)["price"]["usd_per_gpu_hour"]["mid"]


def test_an_own_gpu_has_a_price_of_its_own():
    assert hourly({"tokens_per_s": 1000}, owning=OWNING) == 1
    assert "electricity out" in " ".join(assuming({}, owning=OWNING)["notes"])
    energy = {"kw_per_gpu": 2, "usd_per_kwh": 0.1, "pue": 1.5}
    assert hourly({}, owning=OWNING, energy=energy) == pytest.approx(1.3)


def test_a_price_of_the_line_goes_before_an_own_gpu_and_that_before_a_list():
    assert hourly({"price": 2, "gpu": "H100"}, owning=OWNING) == 2
    assert hourly({"gpu": "H100"}, owning=OWNING) == 1


def test_interruptions_make_spot_dearer():
    spot = {"interruptions_per_hour": 0.1, "restart_hours": 0.5}
    assert hourly({"price": 2}, spot=spot) == pytest.approx(2.1)


def test_an_unknown_gpu_is_answered_with_the_nearest_names(capsys):
    told = refusal(capsys, "--gpu", "H1000")
    assert "--gpu" in told and "H100; H200; H100 NVL" in told


def test_old_prices_are_warned_of_on_the_day_they_are_used(capsys, tmp_path):
    own = ("--prices", own_file(tmp_path), *SERVING, "--json")
    assert kprof("cost", *own, "--as-of", "2027-01-30") == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
    assert kprof("cost", *own, "--as-of", "2027-01-31") == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert "2026-11-01" in warning and "H100, on-demand" in warning
    assert "91" in quantities_in(warning)


def test_a_file_of_ones_own_replaces_the_prices_of_its_gpus(capsys, tmp_path):
    own = own_file(tmp_path)
    price = answer(capsys, "--prices", own, *SERVING)["price"]
    assert price["usd_per_gpu_hour"] == {"low": 2.5, "mid": 2.5, "high": 2.5}
    assert price["sources"] == [f"{OWN_LINE['price_list']}: {OWN_LINE['source']}"]
    other = answer(capsys, "--prices", own, "--gpu", "B200")["price"]
    assert other == answer(capsys, "--gpu", "B200")["price"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("{", "truncated"),
        ("{}", "`quotes`"),
        (json.dumps({"quotes": [{**OWN_LINE, "date": "yesterday"}]}), ".date"),
        (json.dumps({"quotes": [{**OWN_LINE, "currency": "EUR"}]}), "`currency`"),
        (json.dumps({"quotes": [{**OWN_LINE, "usd_per_gpu_hour": 0}]}), ".usd_per_gpu_hour"),
    ],
)
def test_a_damaged_file_of_prices_is_refused(capsys, tmp_path, content, said):
    path = tmp_path / "own.json"
    if content is not None:
        path.write_text(content)
    told = refusal(capsys, "--prices", path, *SERVING)
    assert str(path) in told and said in told


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
    assert aws.usd_per_gpu_hour == 6.88


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("15.6T", 15_600_000_000_000),
        ("100k", 100_000),
        ("281/77", 281 / 77),
        ("1e9", 10**9),
    ],
)
def test_numbers_are_read_exactly_as_people_write_them(text, number):
    assert facts_of({"tokens_per_month": text}).tokens_per_month == number
