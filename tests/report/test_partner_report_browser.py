"""The partner report in a real browser: what it draws, runs, asks for and prints."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kprof.report.partner.evidence import Evidence
from kprof.report.partner.page import ROWS_SHOWN
from tests.report.browser import AXE, IS_AVAILABLE, browser
from tests.report.partner_evidence import comparison_of, everything, finding_of, run_of
from tests.report.partner_pages import page_of
from tests.report.test_partner_report_safety import ATTACK, LONG, TURNED, hostile

# `make browser` wants all of it to run: what is missing there is a failure, not a reason to skip.
IS_REQUIRED = os.environ.get("KPROF_BROWSER") == "required"
A4, LETTER = (8.27, 11.69), (8.5, 11.0)
WIDTHS = (400, 1000, 1600)
EXAMPLES = sorted(Path(__file__).parents[2].glob("docs/examples/*/report.html"))

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(
        not IS_AVAILABLE and not IS_REQUIRED, reason="needs Chromium and chromedriver: make browser"
    ),
]


def many_findings():
    """Return evidence with several cards and a table that is longer than what is shown of it."""
    rules = ("unfused_norm", "unfused_rope", "sync_in_loop", "data_loading")
    findings = [finding_of(rule=rule, high_ns=60 + 40 * i) for i, rule in enumerate(rules)]
    comparison = comparison_of(pairs=comparison_of().pairs * 4)
    return everything(runs=(run_of(*findings),), comparisons=(comparison,))


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def show(session, tmp_path):
    """Open the report of some evidence, and return the address that it has."""

    def visit(evidence, template="partner", scheme="light", width=1280):
        page = tmp_path / "report.html"
        page.write_bytes(page_of(evidence, template=template).encode("utf-8", "replace"))
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        session.command("Emulation.setEmulatedMedia", media="", features=features)
        session.resize(width)
        session.visit(page.as_uri())
        return page.as_uri()

    yield visit
    session.command("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.parametrize("template", ["partner", "engineer"])
@pytest.mark.parametrize("name", ["plain", ATTACK, TURNED, LONG])
def test_a_page_runs_nothing_else_complains_of_nothing_and_asks_for_nothing(
    session, show, name, template
):
    session.complaints()
    address = show(hostile(name), template)
    assert session.run("return document.querySelectorAll('main img').length") == 0
    assert session.run("return typeof owned") == "undefined"
    assert session.run("return document.title.endsWith('· report')")
    assert session.complaints() == []
    assert session.requests(address) == [address]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["plain", LONG])
def test_no_page_is_wider_than_its_window(session, show, name, width):
    show(hostile(name), width=width)
    assert session.run("return document.documentElement.scrollWidth <= innerWidth")


def test_verdict_money_and_what_next_stand_on_the_first_two_screens(session, show):
    show(many_findings())
    bottom = "return document.querySelector('.steps').getBoundingClientRect().bottom"
    assert session.run(bottom) < 2 * 900


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_written_too_small_to_read(session, show, width):
    show(many_findings(), width=width)
    sizes = session.run(
        "return [...document.querySelectorAll('main p, main td, main dd, figure svg text')]"
        ".filter((e) => e.checkVisibility()).map((e) => parseFloat(getComputedStyle(e).fontSize)"
        " * (e.ownerSVGElement ? e.ownerSVGElement.getBoundingClientRect().width"
        " / e.ownerSVGElement.viewBox.baseVal.width : 1))"
    )
    assert min(sizes) >= 11


def test_without_script_every_section_drawing_and_number_is_there(session, show):
    session.command("Emulation.setScriptExecutionDisabled", value=True)
    show(many_findings())
    page = session.command("DOM.getOuterHTML", backendNodeId=document_of(session))["outerHTML"]
    assert "Unfold all" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    figures = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    assert len(figures) >= 4
    assert all("<svg" in figure and "<table" in figure for figure in figures)
    assert " hidden" not in re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.DOTALL)


def document_of(session):
    """Return the number that the browser has for the document.

    Those of its protocol are void as soon as the document is told of anew, as after loading.
    """
    return session.command("DOM.getDocument")["root"]["backendNodeId"]


def test_with_script_a_long_table_shows_its_rest_on_demand(session, show):
    show(many_findings())
    rows = "[...document.querySelector('table.long').tBodies[0].rows]"
    shown = f"return {rows}.filter((row) => !row.hidden).length"
    assert session.run(shown) == ROWS_SHOWN
    session.run("document.querySelector('.more').click()")
    assert session.run(shown) == 32


def test_a_click_on_a_header_sorts_numbers_with_their_units(session, show):
    show(many_findings())
    order = (
        "const t = document.querySelector('table.long');"
        "const i = [...t.tHead.rows[0].cells].findIndex(c => c.textContent === 'Pair');"
        "t.tHead.rows[0].cells[i].querySelector('button').click();"
        "return [t.tHead.rows[0].cells[i].ariaSort, t.tBodies[0].rows[0].cells[i].textContent]"
    )
    assert session.run(order) == ["descending", "32"]
    assert session.run(order) == ["ascending", "1"]


def test_cards_can_be_ordered_by_what_they_save(session, show):
    show(many_findings())
    first = "return document.querySelector('.card h3').textContent"
    assert "Unfused norm" in session.run(first)
    session.run(
        "const s = document.querySelector('.sorter select'); s.selectedIndex = 1;"
        "s.dispatchEvent(new Event('change'))"
    )
    assert "Data loading" in session.run(first)


def test_light_and_dark_follow_the_system_until_the_reader_chooses(session, show):
    paper = "return getComputedStyle(document.body).backgroundColor"
    show(everything(), scheme="dark")
    assert session.run(paper) == "rgb(21, 24, 29)"
    session.run("document.querySelector('.tools button').click()")
    assert session.run(paper) == "rgb(255, 255, 255)"


@pytest.mark.parametrize("size", [A4, LETTER])
def test_a_page_is_printed_whole_on_either_paper(session, show, size):
    show(many_findings())
    paper = {"paperWidth": size[0], "paperHeight": size[1], "printBackground": True}
    pdf = session.print_pdf(**paper)
    assert pdf.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 14
    session.command("Emulation.setEmulatedMedia", media="print", features=[])
    wide = "return [...document.querySelectorAll('details .table')].every(e => e.checkVisibility())"
    session.run("dispatchEvent(new Event('beforeprint'))")
    assert session.run(wide)


@pytest.mark.skipif(AXE is None and not IS_REQUIRED, reason="needs axe: make browser")
@pytest.mark.parametrize("template", ["partner", "engineer"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 1280])
def test_axe_finds_nothing_that_keeps_anybody_out(session, show, width, scheme, template):
    show(many_findings(), template, scheme, width)
    assert session.violations() == []
    assert session.run("return found.passes.length") > 20


@pytest.mark.skipif(AXE is None and not IS_REQUIRED, reason="needs axe: make browser")
@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.parent.name)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 1280])
def test_axe_finds_nothing_in_the_examples_either(session, width, scheme, page):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    session.command("Emulation.setEmulatedMedia", media="", features=features)
    session.resize(width)
    session.visit(page.as_uri())
    assert session.violations() == []
    assert session.run("return found.passes.length") > 20


def huge():
    """Return evidence with hundreds of findings and thousands of pairs."""
    findings = [finding_of(rule=f"rule_{i}", high_ns=60 + 40 * i) for i in range(300)]
    comparison = comparison_of(pairs=comparison_of().pairs * 500)
    return everything(runs=(run_of(*findings),) * 3, comparisons=(comparison,))


@pytest.mark.parametrize(
    "of", [huge, lambda: Evidence("Tiny", runs=(run_of(),))], ids=["huge", "tiny"]
)
def test_huge_and_tiny_runs_are_pages_that_fit_and_complain_of_nothing(session, show, of):
    session.complaints()
    address = show(of(), width=400)
    assert session.run("return document.documentElement.scrollWidth <= innerWidth")
    assert session.complaints() == []
    assert session.requests(address) == [address]
    assert Path(address.removeprefix("file://")).stat().st_size <= 3_000_000


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.parent.name)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_examples_fit_and_ask_for_nothing(session, page, width):
    session.complaints()
    session.resize(width)
    session.visit(page.as_uri())
    assert session.run("return document.documentElement.scrollWidth <= innerWidth")
    assert session.complaints() == []
    assert session.requests(page.as_uri()) == [page.as_uri()]


def test_an_empty_report_is_a_page_too(session, show):
    session.complaints()
    show(Evidence("Nothing"))
    assert session.run("return document.querySelector('.verdict .word').textContent") == "? No data"
    assert session.complaints() == []
