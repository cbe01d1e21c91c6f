"""Money in the partner report: what a change saves or costs, from which price, for whom."""

from __future__ import annotations

from dataclasses import replace

from kprof.analyze.cost.price import Band
from kprof.findings import Saving, Worth
from kprof.report.partner.evidence import Evidence
from kprof.report.partner.money import (
    KEPT,
    MILLION,
    MONTH,
    STEPS,
    is_one_price,
    load_in_words,
    prices_in_words,
)
from kprof.report.partner.wording import gained
from kprof.report.units import UNKNOWN
from tests.quantities import quantities_in
from tests.report.partner_evidence import (
    comparison_of,
    costs_of,
    everything,
    figure_of,
    finding_of,
    price_of,
    run_of,
)
from tests.report.partner_pages import (
    facts_of,
    paragraphs_of,
    rows_of,
    said,
    verdict_of,
)


def test_what_a_loss_costs_is_a_sum_and_its_range_goes_upwards():
    slower = comparison_of("SLOWER", 1.04, 1.05, 1.06)
    dearer = everything(comparisons=(slower,), costs=(costs_of("4.00"), costs_of("4.20")))
    assert verdict_of(dearer)[2][3:] == ["$0.20", "$0.10", "$0.40"]
    *_, difference, result = rows_of(dearer, MILLION)[0]
    assert quantities_in(difference) == ["$0.20", "$0.10", "$0.40"]
    assert result == "✗ dearer"


def test_a_saving_is_priced_by_what_the_state_that_it_was_found_in_costs():
    before, after = run_of(finding_of()), run_of(finding_of("unfused_rope"))
    costs = (costs_of("0.40"), costs_of("0.20"))
    found = facts_of(Evidence("T", runs=(before, after), costs=costs), "In money")
    assert [quantities_in(text) for text in found] == [["$0.020", "$0.040"], ["$0.010", "$0.020"]]


def test_a_saving_is_worth_a_share_of_its_gpus_where_no_costs_were_given():
    worth = Saving(1000, 50, 100, "replayed", Worth(131.0, 274.0, 460.4))
    evidence = Evidence("T", runs=(priced_run(worth),))
    (money,) = facts_of(evidence, "In money")
    assert quantities_in(money) == ["$130", "$460"]
    assert "list prices" in money
    assert any(PRICE in text for text in paragraphs_of(evidence, "muted"))


def test_a_saving_without_a_price_says_so_and_is_no_nothing():
    (money,) = facts_of(Evidence("T", runs=(run_of(finding_of()),)), "In money")
    assert money.startswith(f"{UNKNOWN}: ")
    assert quantities_in(money) == []


def test_an_unknown_saving_has_no_money_either():
    unknown = priced_run(Saving(1000, None, None, "nobody knows"))
    assert facts_of(Evidence("T", runs=(unknown,)), "In money") == [UNKNOWN]


def test_what_savings_are_worth_is_not_public():
    worth = Saving(1000, 50, 100, "replayed", Worth(131.0, 274.0, 460.4))
    evidence = Evidence("T", runs=(priced_run(worth),))
    assert facts_of(evidence, "In money", level="public") == ["[left out]"]
    assert "$" not in said(evidence, level="public")


PRICE = "1 GPU at $5.00"


def priced_run(saving):
    """Return a run with a finding of this saving, priced by a list."""
    run = run_of(finding_of(saving=saving))
    return replace(run, diagnosis=replace(run.diagnosis, price=PRICE))


def test_money_stands_with_its_price_its_source_and_its_date():
    price = price_of()
    told = [text for text in paragraphs_of(everything(), "plain") if price.name in text]
    assert quantities_in(told[0])[:3] == ["$4.29", "$2.15", "$8.58"]
    assert str(price.oldest) in told[0] and str(price.newest) in told[0]
    assert rows_of(everything(), *price.sources) == [()]


def test_a_month_follows_from_the_volume_that_savings_were_computed_for():
    saved = Band.known(0.1)
    monthly = Band.known(200)
    figures = (
        figure_of("Gain of a token", "saved", "$/M tokens", saved, ""),
        figure_of("Gain of a token", "saved", "$/month", monthly, ""),
    )
    evidence = everything(costs=(costs_of("0.40", figures=figures),))
    # The price is half to twice the middle one, and so is all that follows from it.
    assert [quantities_in(cell) for cell in rows_of(evidence, MONTH)[0][:3]] == [
        ["$1,000", "$500", "$2,000"],
        ["$800", "$400", "$1,600"],
        ["$200", "$100", "$400"],
    ]
    assert quantities_in(load_in_words(evidence.costs[0])) == ["2,000"]
    # The summary's and the table's.
    assert said(evidence).count(load_in_words(evidence.costs[0])) == 2


def test_how_much_of_the_time_that_is_paid_serves_stands_beside_the_money():
    used = figure_of("Serving", "of use alone", "$/M tokens", Band.known(0.16), "")
    costs = costs_of("0.40", figures=(used,))
    assert quantities_in(load_in_words(costs)) == ["40 %"]
    assert load_in_words(costs) in said(everything(costs=(costs,)))
    assert load_in_words(everything().costs[-1]) == ""


def test_a_saving_has_the_range_of_the_price_and_that_of_the_gain():
    saved = Band(0.08, 0.10, 0.12)
    figures = (figure_of("Gain of a token", "saved", "$/M tokens", saved, ""),)
    found = rows_of(everything(costs=(costs_of("0.40", figures=figures),)), MILLION)
    # From 8 cents at half the price to 12 cents at twice the price; so nothing saves more than
    # it cost, which was 40 cents and 8 to 12 more, at half to twice the price.
    assert [quantities_in(cell) for cell in found[0][:3]] == [
        ["$0.50", "$0.24", "$1.04"],
        ["$0.40", "$0.20", "$0.80"],
        ["$0.10", "$0.04", "$0.24"],
    ]


def given(costs):
    """Return the costs as of a price that was given by `--price`."""
    return replace(costs, price=replace(costs.price, name="as given", sources=("--price",)))


def test_a_saving_at_two_prices_has_the_room_of_both_and_no_tick_where_it_may_be_none():
    one, other = given(costs_of("0.40")), given(costs_of("0.20"))
    evidence = everything(costs=(one, other))
    # From 20 cents less 40 to 80 cents less 10.
    saving = ["$0.20", "-$0.20", "$0.70"]
    *_, difference, result = rows_of(evidence, MILLION)[0]
    assert (quantities_in(difference), result) == (saving, "? inconclusive")
    assert verdict_of(evidence)[2][3:] == saving
    assert not is_one_price(one, other)
    assert prices_in_words(evidence) in said(evidence)


def test_a_saving_at_two_prices_is_one_where_all_of_its_range_is():
    evidence = everything(costs=(costs_of("1.00", "4.29"), costs_of("0.20", "2.00")))
    *_, difference, result = rows_of(evidence, MILLION)[0]
    assert (quantities_in(difference), result) == (["$0.80", "$0.10", "$1.90"], "✓ cheaper")


def test_a_saving_at_one_price_moves_with_it():
    evidence = everything(costs=(costs_of("0.40"), costs_of("0.20")))
    *_, difference, result = rows_of(evidence, MILLION)[0]
    assert (quantities_in(difference), result) == (["$0.20", "$0.10", "$0.40"], "✓ cheaper")
    assert is_one_price(*evidence.costs)
    assert prices_in_words(evidence) in said(evidence)


def test_what_it_cost_at_an_old_price_given_apart_is_what_it_was():
    before, saved = Band(2, 4, 8), Band(0, 2, 6)
    figures = tuple(
        figure_of("Gain of a token", name, "$/M tokens", band, "")
        for name, band in (("before", before), ("saved", saved))
    )
    found = rows_of(everything(costs=(costs_of("2", figures=figures),)), MILLION)
    # A million tokens cost 1 to 4 now.
    assert [quantities_in(cell) for cell in found[0][:3]] == [
        ["$4.00", "$2.00", "$8.00"],
        ["$2.00", "$1.00", "$4.00"],
        ["$2.00", "-$2.00", "$7.00"],
    ]


def test_costs_that_do_not_change_are_no_saving():
    evidence = everything(costs=(costs_of("0.40"), costs_of("0.40")))
    assert rows_of(evidence, MILLION)[0][2:] == ("none", "? the same")
    assert not [amount for amount in verdict_of(evidence)[2] if "$" in amount]


def test_what_is_saved_of_a_thousand_steps_stands_in_the_verdict_where_nothing_else_is_known():
    price = price_of()
    steps = figure_of("Steps", "a thousand steps", "$", Band.known(2), "", (price,))
    gain = figure_of("Gain of a token", "a token gets cheaper by", "times", Band.known(3), "")
    evidence = everything(costs=(replace(costs_of(), figures=(steps, gain)),))
    assert verdict_of(evidence)[2][-1] == "$4.00"
    assert rows_of(evidence, STEPS)[0][2:] == ("saves $4.00", "✓ cheaper")
    # Nobody said how many tokens a step has.
    assert [row[:2] for row in rows_of(evidence, gained(gain.topic, []))] == [
        (gained(gain.name, []), "")
    ]
    assert rows_of(evidence, gain.topic) == []


def test_gpus_that_are_kept_cost_what_they_cost_before_where_the_gain_is_of_time_alone():
    kept = Band.known(3600)
    figures = (figure_of("Serving", "all GPUs, kept for a month", "$/month", kept, ""),)
    # A step takes 80 % of the time in the comparison.
    same, other = (
        (*figures, figure_of("Gain of a token", "a token gets cheaper by", "times", gain, ""))
        for gain in (Band.known(1.25), Band.known(2))
    )
    found = rows_of(everything(costs=(costs_of(figures=same),)), KEPT)
    assert found[0] == ("$3,600", "$3,600", "none", "? the same")
    found = rows_of(everything(costs=(costs_of(figures=other),)), KEPT)
    assert found[0][:2] == ("missing", "$3,600")
