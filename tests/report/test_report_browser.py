"""The technical report in a real browser: its first screen, tables, themes, widths and print."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kprof.analyze.memory import DeviceHistory, Event, Frame, find_peak
from kprof.commands.diff import diff_runs
from kprof.opened import open_trace
from kprof.report.comparison_sections import sections_of_comparison
from kprof.report.difference import sections_of_difference
from kprof.report.html import write_html
from kprof.report.section import Section, sections_of
from kprof.report.sections.memory import parts_of_peaks
from tests.commands.test_cli import kprof
from tests.report.browser import AXE, IS_AVAILABLE, browser
from tests.report.partner_evidence import comparison_of
from tests.section_traces import HOST_ONLY, RICH

IS_REQUIRED = os.environ.get("KPROF_BROWSER") == "required"
RECORDINGS = Path(__file__).parents[1] / "data" / "h200"
WIDTHS, SCHEMES = (420, 1280), ("light", "dark")
FOLD_PX = 800
PAGES = (
    *("training", "launch-bound", "rich", "memory", "host", "difference", "comparison"),
    "service",
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(
        not IS_AVAILABLE and not IS_REQUIRED, reason="needs Chromium and chromedriver: make browser"
    ),
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return the addresses of the pages, written once."""
    folder = tmp_path_factory.mktemp("pages")
    training, compiled = RECORDINGS / "llama_train.json.gz", RECORDINGS / "compiled.json.gz"
    traces = {
        "training": open_trace(training),
        "launch-bound": open_trace(RECORDINGS / "hf_generate.json.gz"),
        "rich": RICH,
        "host": HOST_ONLY,
    }
    sections = {name: sections_of(trace) for name, trace in traces.items()}
    sections["difference"] = sections_of_difference(diff_runs(training, compiled), 200)
    events = [Event("alloc", at, 1 << at, frames=(Frame("/me/f.py", at, "f"),)) for at in range(9)]
    peak = find_peak(DeviceHistory(0, tuple(events), (), 1 << 21))
    sections["memory"] = [Section("Memory", 1, parts_of_peaks((peak,)))]
    comparison = comparison_of(pairs=comparison_of().pairs * 4)
    sections["comparison"] = sections_of_comparison(comparison)
    for name, of in sections.items():
        write_html(name, of, folder / f"{name}.html", "python train.py")
    answers = RECORDINGS.parent / "responses" / "vllm.json"
    service = str(folder / "service.html")
    kprof("sla", answers, "--target", "ttft_p95<=200ms", "--out", service)
    return {name: (folder / f"{name}.html").as_uri() for name in PAGES}


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def show(session, pages):
    def visit(name, scheme="light", width=1280):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        session.command("Emulation.setEmulatedMedia", media="", features=features)
        session.resize(width, FOLD_PX)
        session.visit(pages[name])

    return visit


DRAWN = "return document.querySelectorAll('.js-plotly-plot').length"
FIGURES = "return document.querySelectorAll('figure[data-figure]').length"


@pytest.mark.parametrize("name", ["training", "launch-bound"])
def test_the_first_screen_holds_the_summary_with_the_changes(session, show, name):
    show(name)
    bottoms = session.run(
        "return [...document.querySelectorAll('#summary > *')]"
        ".map((one) => one.getBoundingClientRect().bottom)"
    )
    assert len(bottoms) >= 6
    assert max(bottoms) <= FOLD_PX
    assert session.run("return document.querySelectorAll('#summary .item').length") == 3


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_column_is_cut_and_nothing_is_complained_of(session, show, name, width):
    session.complaints()
    show(name, width=width)
    beyond = (
        "return [...document.querySelectorAll('main p, main td, main th, main dd, main li')]"
        ".filter((one) => one.checkVisibility()"
        " && one.getBoundingClientRect().right > innerWidth).length"
    )
    assert session.run(beyond) == 0
    assert session.complaints() == []


def test_a_page_printed_at_once_has_all_figures_and_folded_tables(session, show):
    show("training")
    state = "[...document.querySelectorAll('details')].every((one) => one.open)"
    session.run(
        f"addEventListener('beforeprint', () => {{ window.printed = {{ drawn: {DRAWN[7:]},"
        " width: Math.max(...[...document.querySelectorAll('.plot svg')]"
        f".map((one) => one.clientWidth)), unfolded: {state} }}; }})"
    )
    assert len(session.print_pdf()) > 100_000
    printed = session.run("return window.printed")
    assert printed["drawn"] == session.run(FIGURES) >= 4
    assert 0 < printed["width"] <= 700
    assert printed["unfolded"]
    assert not session.run("return document.querySelector('details').open")


def test_a_page_in_a_sandbox_as_of_a_notebook_draws_its_figures_too(session, show, pages):
    page = Path(pages["training"].removeprefix("file://"))
    host = page.with_name("framing.html")
    host.write_text(
        f'<iframe sandbox="allow-scripts" src="{page.name}" width="900" height="700"></iframe>'
    )
    session.visit(host.as_uri())
    session.enter_frame(0)
    assert session.wait_until(f"return ({FIGURES[7:]}) > 0 && ({FIGURES[7:]}) === ({DRAWN[7:]})")
    session.leave_frame()


def column(session, number, of="top-kernels"):
    """Return the cells of a column of a section's table that are shown, in their order."""
    return session.run(
        f"return [...document.querySelector('#{of} table').tBodies[0].rows]"
        f".filter((row) => row.checkVisibility()).map((row) => row.cells[{number}].textContent)"
    )


def test_a_click_on_a_header_sorts_by_amount_and_again_the_other_way(session, show):
    show("training")
    click = "document.querySelectorAll('#top-kernels th button')[4 + 1].click()"
    before = column(session, 5)
    session.run(click)
    once = [in_ns(cell) for cell in column(session, 5) if cell != "—"]
    assert once == sorted(once, reverse=True)
    assert before != column(session, 5)
    session.run(click)
    assert column(session, 5) != once
    state = "return document.querySelectorAll('#top-kernels th')[5].ariaSort"
    assert session.run(state) == "ascending"


def in_ns(cell):
    number, unit = cell.removeprefix("≤ ").split(" ")
    return float(number.replace(",", "")) * {"ns": 1, "µs": 1e3, "ms": 1e6}[unit]


def test_words_filter_the_rows_of_a_table_also_those_that_were_not_shown(session, show):
    show("training")
    session.run(
        "const words = document.querySelector('#top-kernels .tools input');"
        "words.value = 'softmax fp32'; words.dispatchEvent(new Event('input'))"
    )
    names = column(session, 0)
    assert 0 < len(names) < 12
    assert all("softmax" in name.lower() for name in names)


def test_the_sum_stays_below_a_sorted_table(session, show):
    show("training")
    session.run("document.querySelectorAll('#where-the-time-goes th button')[0].click()")
    last = "return document.querySelector('#where-the-time-goes table').tFoot.rows[0].cells[1]"
    assert session.run(f"{last}.textContent") == "100.0 %"


@pytest.mark.skipif(AXE is None and not IS_REQUIRED, reason="needs axe: make browser")
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_nothing_that_keeps_anybody_out(session, show, width, scheme, name):
    show(name, scheme, width)
    assert session.wait_until(f"return ({FIGURES[7:]}) === ({DRAWN[7:]})")
    assert session.violations() == []
