"""Money in the partner report: what a change saves or costs, from which price, for whom."""

from __future__ import annotations

from dataclasses import replace

from kprof.analyze.cost.price import Band
from kprof.findings import Saving, Worth
from kprof.report.partner.evidence import Evidence
from tests.report.partner_evidence import (
    comparison_of,
    costs_of,
    everything,
    figure_of,
    finding_of,
    price_of,
    run_of,
)
from tests.report.partner_pages import said


def test_what_a_loss_costs_is_a_sum_and_its_range_goes_upwards():
    slower = comparison_of("SLOWER", 1.04, 1.05, 1.06)
    dearer = everything(comparisons=(slower,), costs=(costs_of("4.00"), costs_of("4.20")))
    found = said(dearer)
    assert "it costs another $0.20 ($0.10 to $0.40) per million tokens" in found
    assert "costs $0.20 ($0.10 to $0.40) more" in found


def test_a_saving_is_priced_by_what_the_state_that_it_was_found_in_costs():
    before, after = run_of(finding_of()), run_of(finding_of("unfused_rope"))
    found = said(Evidence("T", runs=(before, after), costs=(costs_of("0.40"), costs_of("0.20"))))
    assert "In money $0.020 to $0.040 of a million tokens" in found
    assert "In money $0.010 to $0.020 of a million tokens" in found


def test_a_saving_is_worth_a_share_of_its_gpus_where_no_costs_were_given():
    worth = Saving(1000, 50, 100, "replayed", Worth(131.0, 274.0, 460.4))
    found = said(Evidence("T", runs=(priced_run(worth),)))
    assert "In money $130 to $460 a month, at list prices" in found
    assert "At list prices: of 1 GPU at $5.00 an hour." in found


def test_a_saving_without_a_price_says_so_and_is_no_nothing():
    found = said(Evidence("T", runs=(run_of(finding_of()),)))
    assert "In money not known: no step is marked, or no price list has this GPU" in found


def test_a_saving_that_nobody_knows_has_no_money_either():
    unknown = priced_run(Saving(1000, None, None, "nobody knows"))
    assert "In money not known Confidence" in said(Evidence("T", runs=(unknown,)))


def test_what_savings_are_worth_is_not_public():
    worth = Saving(1000, 50, 100, "replayed", Worth(131.0, 274.0, 460.4))
    found = said(Evidence("T", runs=(priced_run(worth),)), level="public")
    assert "In money [left out] Confidence" in found
    assert "$" not in found


def priced_run(saving):
    """Return a run with a finding of this saving, priced by a list."""
    run = run_of(finding_of(saving=saving))
    return replace(run, diagnosis=replace(run.diagnosis, price="1 GPU at $5.00 an hour"))


def test_money_stands_with_its_price_its_source_and_its_date():
    found = said(everything())
    assert "$4.29 (from $2.15 to $8.58), H100, on-demand, of 2026-08-26 to 2026-11-09" in found
    assert "Cloud: price list" in found


def test_a_month_follows_from_the_volume_that_savings_were_computed_for():
    saved = Band.known(0.1)
    monthly = Band.known(200)
    figures = (
        figure_of("Gain of a token", "saved", "$/M tokens", saved, ""),
        figure_of("Gain of a token", "saved", "$/month", monthly, ""),
    )
    found = said(everything(costs=(costs_of("0.40", figures=figures),)))
    # The price is half to twice the middle one, and so is all that follows from it.
    assert (
        "A month $1,000 ($500 to $2,000) $800 ($400 to $1,600) saves $200 ($100 to $400)" in found
    )
    assert found.count("A month is 2,000 million tokens.") == 2  # the summary's and the table's


def test_how_much_of_the_time_that_is_paid_serves_stands_beside_the_money():
    used = figure_of("Serving", "of use alone", "$/M tokens", Band.known(0.16), "")
    found = said(everything(costs=(costs_of("0.40", figures=(used,)),)))
    assert "GPUs serve in 40 % of the time that is paid." in found
    assert "of the time that is paid" not in said(everything())


def test_a_saving_has_the_range_of_the_price_and_that_of_the_gain():
    saved = Band(0.08, 0.10, 0.12)
    figures = (figure_of("Gain of a token", "saved", "$/M tokens", saved, ""),)
    found = said(everything(costs=(costs_of("0.40", figures=figures),)))
    # From 8 cents at half the price to 12 cents at twice the price; so nothing saves more than
    # it cost, which was 40 cents and 8 to 12 more, at half to twice the price.
    assert "$0.50 ($0.24 to $1.04) $0.40 ($0.20 to $0.80) saves $0.10 ($0.04 to $0.24)" in found


def given(costs):
    """Return the costs as of a price that was given by `--price`."""
    return replace(costs, price=replace(costs.price, name="as given", sources=("--price",)))


def test_a_saving_at_two_prices_has_the_room_of_both_and_no_tick_where_it_may_be_none():
    one, other = given(costs_of("0.40")), given(costs_of("0.20"))
    found = said(everything(costs=(one, other)))
    # From 20 cents less 40 to 80 cents less 10.
    assert "saves $0.20 (-$0.20 to $0.70) ? inconclusive" in found
    assert "whether it saves money is not known: $0.20 (-$0.20 to $0.70)" in found
    assert "each may lie anywhere in its band" in found
    assert "cheaper" not in found


def test_a_saving_at_two_prices_is_one_where_all_of_its_range_is():
    found = said(everything(costs=(costs_of("1.00", "4.29"), costs_of("0.20", "2.00"))))
    assert "saves $0.80 ($0.10 to $1.90) ✓ cheaper" in found


def test_a_saving_at_one_price_moves_with_it():
    found = said(everything(costs=(costs_of("0.40"), costs_of("0.20"))))
    assert "saves $0.20 ($0.10 to $0.40) ✓ cheaper" in found
    assert "Both rest on the same price" in found


def test_what_it_cost_at_an_old_price_given_apart_is_what_it_was():
    before, saved = Band(2, 4, 8), Band(0, 2, 6)
    figures = tuple(
        figure_of("Gain of a token", name, "$/M tokens", band, "")
        for name, band in (("before", before), ("saved", saved))
    )
    found = said(everything(costs=(costs_of("2", figures=figures),)))
    # A million tokens cost 1 to 4 now.
    assert "$4.00 ($2.00 to $8.00) $2.00 ($1.00 to $4.00) saves $2.00 (-$2.00 to $7.00)" in found


def test_costs_that_do_not_change_are_no_saving():
    found = said(everything(costs=(costs_of("0.40"), costs_of("0.40"))))
    assert "; that saves" not in found
    assert "✓ cheaper" not in found


def test_what_is_saved_of_a_thousand_steps_stands_in_the_verdict_where_nothing_else_is_known():
    price = price_of()
    steps = figure_of("Steps", "a thousand steps", "$", Band.known(2), "", (price,))
    gain = figure_of("Gain of a token", "a token gets cheaper by", "times", Band.known(3), "")
    found = said(everything(costs=(replace(costs_of(), figures=(steps, gain)),)))
    assert "it saves $4.00 per thousand steps." in found[: found.index("Change ")]
    # Nobody said how many tokens a step has.
    assert "a step gets cheaper by" in found
    assert "Gain of a token" not in found


def test_gpus_that_are_kept_cost_what_they_cost_before_where_the_gain_is_of_time_alone():
    kept = Band.known(3600)
    figures = (figure_of("Serving", "all GPUs, kept for a month", "$/month", kept, ""),)
    # A step takes 80 % of the time in the comparison.
    same, other = (
        (*figures, figure_of("Gain of a token", "a token gets cheaper by", "times", gain, ""))
        for gain in (Band.known(1.25), Band.known(2))
    )
    found = said(everything(costs=(costs_of(figures=same),)))
    assert "A month, all GPUs kept $3,600 $3,600 none ? the same" in found
    found = said(everything(costs=(costs_of(figures=other),)))
    assert "A month, all GPUs kept missing $3,600" in found
