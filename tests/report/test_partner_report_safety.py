"""The partner report is one safe file: it leaks nothing, runs nothing, loads nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from kprof.analyze.cost.sheet import Costs
from kprof.cli import run_command_line
from kprof.commands.report import read_evidence
from kprof.comparison import save
from kprof.errors import KprofError
from kprof.kernels.correctness.levels import GateReport
from kprof.report.partner.disclosure import LEVELS
from kprof.report.partner.evidence import Source
from kprof.report.partner.parts import read_template
from kprof.trace import Caveat
from tests.report.partner_evidence import (
    comparison_of,
    costs_of,
    everything,
    finding_of,
    gate_of,
    run_of,
)
from tests.report.partner_pages import page_of

ATTACK = "</script><img src=x onerror=\"document.title='owned'\"></style><script>owned=1</script>'"
TURNED = "safe\u202egnp.exe\u2066"
LONG = "n" * 10_000


def hostile(name):
    """Return evidence in which everything that has a name has this one."""
    gate = gate_of()
    return everything(
        title=name,
        runs=(
            run_of(
                finding_of(rule=name, claim=name, details=(name,), command=name),
                source=name,
                command=("python", name),
                versions={name: name},
                caveats=(Caveat("recorder", name),),
                host=name,
                kernel=name.encode("utf-8", "replace").decode(),
            ),
        ),
        comparisons=(
            comparison_of(name=name, a=name, b=name, why=name, doubts=(Caveat("trial", name),)),
        ),
        costs=(Costs(costs_of().as_of, None, (), (), (name,), (name,)),),
        gates=(GateReport(name, gate.levels, gate.asked),),
        sources=(Source(name, name, name),),
    )


class Elements(HTMLParser):
    """The elements and attributes of a page."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.attributes = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)
        self.attributes += [name for name, _ in attrs]


def elements_of(name, level, template):
    return Elements(page_of(hostile(name), level, template))


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("template", ["partner", "engineer"])
def test_a_hostile_name_adds_no_element_and_no_attribute(template, level):
    plain = elements_of("plain", level, template)
    found = elements_of(f"\"'><b onclick=x>a\ud800b\x00\x07{ATTACK}", level, template)
    assert found.found == plain.found
    assert found.attributes == plain.attributes


def test_a_name_is_shown_as_it_is_written():
    page = page_of(hostile(ATTACK), "internal")
    assert "&lt;/script&gt;&lt;img src=x" in page
    assert "<title>&lt;/script&gt;" in page


def test_an_empty_name_makes_a_page():
    assert "<main" in page_of(hostile(""))


def test_a_name_cannot_turn_the_text_around_it():
    page = page_of(hostile(TURNED))
    assert "\u202e" not in page
    assert "\u2066" not in page
    assert "safe\ufffdgnp.exe" in page


@pytest.mark.parametrize("level", LEVELS)
def test_a_name_of_ten_thousand_characters_is_cut(level):
    page = page_of(hostile(LONG), level)
    assert "n" * 1_000 not in page
    assert len(page) < 500_000


def test_the_policy_allows_one_script_and_one_style_sheet_and_nothing_from_outside():
    page = page_of(everything())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    hashes = [
        base64.b64encode(
            hashlib.sha256(re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1].encode()).digest()
        ).decode()
        for tag in ("script", "style")
    ]
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )


def test_the_page_refers_to_nothing_outside_itself():
    page = page_of(everything())
    assert not re.search(r"src=|@import|<link|<iframe|<form|url\((?!#)|href=\"(?!#)", page)
    assert " style=" not in page


def test_an_own_template_chooses_and_names_the_sections(tmp_path):
    template = tmp_path / "short.toml"
    template.write_text('sections = ["time", "cover"]\n[titles]\ntime = "Zeit"\n')
    page = page_of(everything(), template=str(template))
    assert re.findall(r"<h2[^>]*>([^<]*)<", page) == ["Zeit", "Verdict"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("sections = ['nowhere']", "'nowhere'"),
        ("sections = ['time', 'time']", "twice"),
        ("sections = []", "own.toml"),
        ("sections = [", "own.toml"),
        ("title = 'x'", "`sections`"),
        ("sections = ['time']\ncolour = 'red'", "colour"),
    ],
)
def test_a_template_that_is_wrong_is_refused_with_the_reason(tmp_path, content, problem):
    path = tmp_path / "own.toml"
    path.write_text(content)
    with pytest.raises(KprofError, match=problem):
        read_template(str(path))


def test_a_template_that_is_not_there_is_refused():
    with pytest.raises(KprofError, match="elsewhere"):
        read_template("elsewhere")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"a": 1}', "result"),
        ("[1]", "result"),
        ('[{"a": 1}]', "result"),
        ("3", "result"),
        ('{"as_of": "2026-11-20", "figures": [{}], "missing": []}', "incomplete"),
        ('{"targets": 3, "percentiles": "", "verdict": ""}', "incomplete"),
        ("{", "JSON"),
        ("", "JSON"),
    ],
)
def test_a_file_that_is_nothing_of_kprofs_is_refused(tmp_path, content, problem):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(KprofError, match=rf"other\.json .*{problem}"):
        read_evidence([path])


@pytest.fixture
def compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ab.kprof").mkdir()
    save(comparison_of(), tmp_path / "ab.kprof")
    return tmp_path


def kprof(*words):
    with pytest.raises(SystemExit) as stopped:
        run_command_line(["report", *words])
    return stopped.value.code


def test_the_command_writes_the_page_and_prints_the_verdict(compared, capsys):
    assert kprof("ab.kprof") == 0
    assert "20.0 %" in capsys.readouterr().out
    assert "<main" in (compared / "report.html").read_text()


def test_the_command_replaces_a_page_only_when_told_to(compared, capsys):
    (compared / "report.html").write_text("mine")
    assert kprof("ab.kprof") == 2
    assert "--force" in capsys.readouterr().err
    assert (compared / "report.html").read_text() == "mine"
    assert kprof("ab.kprof", "--force") == 0


def test_the_command_says_where_it_cannot_write(compared, capsys):
    assert kprof("ab.kprof", "--out", "nowhere/report.html") == 2
    assert "nowhere/report.html" in capsys.readouterr().err
