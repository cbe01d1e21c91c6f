"""The page is one offline file in which no name of the trace can become markup or script."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re

import pytest

from kprof.report.html import LONGEST_CELL, embed_json, pack_plotly, render_page, write_html
from kprof.report.section import Facts, Figure, Section, Text, displayable, sections_of
from kprof.trace import Caveat
from tests.report.browser import IS_AVAILABLE, browser
from tests.traces import analyzed_trace_of

ATTACK = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'"

HOSTILE = analyzed_trace_of(
    {"name": ATTACK, "kind": ATTACK, "phase": ATTACK, "module": ATTACK, "op": ATTACK, "bytes": 9},
    {
        "name": ATTACK,
        "start_ns": 500,
        "gap_before_ns": 400,
        "gap_cause": ATTACK,
        "flops": 5,
        "bytes": 5,
    },
    idle=[
        {"start_ns": 100, "duration_ns": 400, "cause": ATTACK, "kernel_row": 1}
        | {"place": ATTACK, "module": ATTACK, "line": ATTACK}
    ],
    ranges=[{"kind": "step", "name": ATTACK}, {"kind": "module", "name": ATTACK}],
    source=ATTACK,
    command=("python", ATTACK),
    versions={ATTACK: ATTACK},
    caveats=(Caveat("recorder", ATTACK),),
)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "kprof"


def page_of(trace) -> str:
    return render_page(trace.meta.source, sections_of(trace), trace.meta.command_line)


def test_commands_between_backticks_are_set_as_code_and_nothing_in_them_is_markup():
    sections = [Section("One", 1, (Text("try `kprof <b>run</b>`, `now"),))]
    page = render_page("a", sections)
    assert "try <code>kprof &lt;b&gt;run&lt;/b&gt;</code>, `now</p>" in page


def policy_in(page: str) -> str:
    return re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]


def hash_of(script: bytes) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script).digest()).decode()


def test_no_line_of_prose_ends_between_a_number_and_its_unit():
    parts = (
        Text("Busy 8.6 %, see `--share 5 %`."),
        Facts((("Known work", "100.0 %", "for 81.2 % its FLOPs, in 3 ms"),)),
    )
    page = render_page("trace", [Section("Run", 10, parts)])
    assert "Busy 8.6\xa0%, see <code>--share 5 %</code>." in page
    assert "for 81.2\xa0% its FLOPs, in 3\xa0ms" in page


def test_a_report_is_at_most_three_megabytes(tmp_path):
    trace = analyzed_trace_of(
        *({"name": f"kernel {i} " + "x" * 200, "start_ns": 200 * i} for i in range(5000))
    )
    write_html(trace.meta.source, sections_of(trace), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size <= 3_000_000


def test_the_same_data_give_the_same_bytes(tmp_path):
    for name in ("first.html", "second.html"):
        write_html(ATTACK, sections_of(HOSTILE), tmp_path / name)
    assert (tmp_path / "first.html").read_bytes() == (tmp_path / "second.html").read_bytes()


def test_the_policy_allows_two_scripts_and_nothing_from_outside():
    page = page_of(HOSTILE)
    loader = re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1]
    packed = re.search(r'id="plotly">(.*?)</script>', page, re.DOTALL)[1]
    plotly = gzip.decompress(base64.b64decode(packed))
    assert policy_in(page) == (
        f"default-src 'none'; script-src '{hash_of(loader.encode())}' '{hash_of(plotly)}'; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def test_the_page_refers_to_nothing_outside_itself():
    page = page_of(HOSTILE)
    assert not re.search(r"https?://|url\(|@import|<link|<iframe", page)


def test_a_hostile_name_appears_only_escaped():
    page = page_of(HOSTILE)
    assert "<img" not in page
    assert "</script><" not in page.replace("</script>\n<", "").replace("</script></body>", "")
    assert page.count("<script") == page.count("</script>")
    assert "&lt;/script&gt;&lt;img src=x" in page


@pytest.mark.parametrize("character", "\x00\x1b\x7f\x9b\u200f\u202e\u2028\u2067")
def test_a_page_holds_no_control_character_and_none_that_turns_its_text(character):
    name = f"abc{character}def"
    page = page_of(analyzed_trace_of({"name": name, "op": name, "module": name}))
    assert character not in page
    assert "abc\N{REPLACEMENT CHARACTER}def" in page


def test_a_cell_of_a_hundred_thousand_letters_is_cut():
    page = page_of(analyzed_trace_of({"name": "x" * 100_000}))
    assert f"{'x' * LONGEST_CELL}…" in page
    assert f"<span>{'x' * (LONGEST_CELL + 1)}" not in page


def test_a_page_without_figures_carries_no_script():
    page = render_page("tiny.json", [Section("Empty", 1, (Text("Nothing."),))])
    assert "<script" not in page


def test_json_inside_a_page_cannot_end_its_element_and_reads_back_unchanged():
    value = {"name": '</script>&<!--\n"é'}
    text = embed_json(value)
    assert not set("<>&") & set(text)
    assert json.loads(text) == value


STEERING = (
    "\x00\x1b\x7f\x9b\u00ad\u061c\u200b\u200e\u2028\u2029\u202e\u2066\ud800\ue000\ufdd0\uffff"
)


@pytest.mark.parametrize("character", STEERING)
def test_a_character_without_a_shape_is_shown_as_one_that_has_one(character):
    assert displayable(f"a{character}b") == "a\ufffdb"


def test_letters_signs_and_ends_of_lines_are_kept_except_in_one_line():
    text = "é µ≤→░ 漢字 🙂\tx\ny"
    assert displayable(text) == text
    assert displayable(text, in_one_line=True) == "é µ≤→░ 漢字 🙂\ufffdx\ufffdy"


def test_json_inside_a_page_turns_no_text_around():
    assert json.loads(embed_json("a\u202e\u2028\ud800b")) == "a\ufffd\ufffd\ufffdb"


def test_a_name_with_half_a_surrogate_pair_can_be_written(tmp_path):
    write_html("tiny.json", [Section("Odd", 1, (Text("a\ud800b."),))], tmp_path / "report.html")
    assert "a\ufffdb." in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_packed_script_is_taken_from_the_cache(cache_folder):
    first = pack_plotly()
    (kept,) = cache_folder.iterdir()
    before = kept.stat().st_mtime_ns
    assert pack_plotly() == first
    assert kept.stat().st_mtime_ns == before


def test_a_damaged_cache_is_replaced(cache_folder):
    first = pack_plotly()
    (kept,) = cache_folder.iterdir()
    whole = kept.read_text()
    kept.write_text(whole[:-1000])
    assert pack_plotly() == first
    assert kept.read_text() == whole


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert pack_plotly().content_hash.startswith("sha256-")


@pytest.mark.slow
@pytest.mark.skipif(not IS_AVAILABLE, reason="needs Chromium and chromedriver")
def test_a_browser_draws_every_figure_runs_nothing_else_and_asks_for_nothing(tmp_path):
    sections = sections_of(HOSTILE)
    page = tmp_path / "report.html"
    write_html(ATTACK, sections, page, HOSTILE.meta.command_line)
    num_figures = sum(isinstance(part, Figure) for s in sections for part in s.parts)
    with browser(tmp_path / "profile", "--window-size=1280,9000") as session:
        session.visit(page.as_uri())
        drawn = "return document.querySelectorAll('.js-plotly-plot .main-svg').length"
        assert session.wait_until(f"{drawn} >= {num_figures}")
        assert session.run("return document.title") == f"{ATTACK} · kprof"
        assert session.run("return document.querySelectorAll('main img, .plot a').length") == 0
        assert session.complaints() == []
        # A data: address asks nobody; older scripts try with one whether the browser knows WebP.
        asked = [url for url in session.requests(page.as_uri()) if not url.startswith("data:")]
        assert asked == [page.as_uri()]


@pytest.mark.slow
@pytest.mark.skipif(not IS_AVAILABLE, reason="needs Chromium and chromedriver")
def test_a_script_that_the_page_did_not_bring_is_refused(tmp_path):
    page = tmp_path / "report.html"
    page.write_text(page_of(HOSTILE).replace("<main>", "<main><script>owned = 1</script>"))
    with browser(tmp_path / "profile") as session:
        session.visit(page.as_uri())
        assert session.run("return typeof owned") == "undefined"
        assert "Content Security Policy" in session.complaints()[0]
