"""The example of a comparison: its verdict follows from its pairs, and its page from its files."""

import hashlib
import html
import re
from pathlib import Path

import pytest

from kprof.analyze.cost.facts import FIELDS, option_of
from kprof.analyze.verdict import judge
from kprof.commands.report import read_evidence, sections_of_summary, write_partner_report
from kprof.comparison import load
from kprof.report.partner.disclosure import LEVELS, MARKS, reduced
from kprof.report.partner.outcome import outcome_of
from tests.quantities import quantities_in

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
KEPT = sorted(path.parent for path in EXAMPLES.glob("ab_*/comparison.json"))
LARGEST_BYTES = 300_000


def words_of(page):
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page)))


@pytest.fixture(params=KEPT, ids=lambda folder: folder.name)
def folder(request):
    return request.param


def test_the_verdict_of_an_example_follows_from_its_pairs_by_the_rule_of_today(folder):
    kept = load(folder)
    for claim, now in zip(kept.claims, judge(kept.plan, kept.pairs), strict=True):
        assert (now.verdict, now.num_pairs) == (claim.verdict, claim.num_pairs)
        # Of its nine samples, today's rule adds which stalls they may have missed.
        assert now.why.startswith(claim.why)
        ends = (claim.interval.low, claim.interval.ratio, claim.interval.high)
        assert (now.interval.low, now.interval.ratio, now.interval.high) == pytest.approx(ends)


def test_the_page_of_an_example_is_small_needs_no_network_and_names_its_files(folder):
    page = (folder / "report.html").read_text()
    assert len(page.encode()) <= LARGEST_BYTES
    assert not re.search(r"""(?:src|href)=["']?https?:""", page)
    for name in ("comparison.json", "calibration.json"):
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() in page


def test_the_page_of_an_example_says_what_its_files_say(folder, tmp_path):
    evidence = read_evidence([folder / "comparison.json", folder / "calibration.json"])
    facts = {name.lower(): text for name, text in evidence.comparisons[0].facts.items()}
    assert evidence.calibration.device == facts["gpu"]
    kept, again = (folder / "report.html").read_text(), tmp_path / "again.html"
    (level,) = [level for level in LEVELS if MARKS[level] in kept]
    write_partner_report(evidence, again, "partner", level)
    for page in (kept, again.read_text()):
        assert outcome_of(reduced(evidence, level)).sentence in words_of(page)


def test_the_pages_of_examples_name_only_options_of_cost_that_there_are():
    known = {option_of(name) for name in FIELDS}
    for page in EXAMPLES.glob("*/report.html"):
        for told in re.findall(r"Not computed, for lack of \w+: ([^<]*)\.<", page.read_text()):
            named = set(re.findall(r"--[\w-]+", told))
            assert named <= known, page


def test_the_terminal_says_which_figure_was_before():
    evidence = read_evidence([EXAMPLES / "ab_llama_swap" / "comparison.json"])
    (section,) = sections_of_summary(evidence)
    (line,) = [part.text for part in section.parts if part.text.startswith("Step time")]
    before, after = line.split("; ")[:2]
    assert "before" in before and quantities_in(before) == ["86.2 ms"]
    assert "after" in after and quantities_in(after) == ["63.4 ms"]
