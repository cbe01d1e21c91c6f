"""Playbooks: one for each rule, all of one form, shown by a command from anywhere."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from kprof.cli import app, run_command_line
from kprof.commands.report import read_evidence
from kprof.errors import KprofError, modules_in
from kprof.kernels import HOMES
from kprof.report.playbooks import HEADINGS, all_playbooks, find_playbook
from kprof.storage import save
from tests.report.partner_evidence import finding_of, run_of

ROOT = Path(__file__).parents[2]
PAGES = all_playbooks()
# The command, with all of its commands: it takes long to build.
KPROF = typer.main.get_command(app)
NAMES = [page.name for page in PAGES]


def commands_in(text):
    """Return the command lines of kprof in a page's code blocks."""
    lines = [line.strip() for block in text.split("```")[1::2] for line in block.splitlines()]
    return [line for line in lines if line.startswith("kprof ")]


def test_a_page_has_all_parts_in_their_order_and_none_is_empty():
    assert {page.name for page in PAGES if not page.title} == set()
    assert {tuple(heading for heading, _ in page.parts) for page in PAGES} == {HEADINGS}
    parts = [(page.name, heading, text) for page in PAGES for heading, text in page.parts]
    assert [(name, heading) for name, heading, text in parts if len(text) <= 20] == []


def test_a_command_of_a_page_is_one_that_kprof_understands():
    lines = {line for page in PAGES for line in commands_in(page.text)}
    split = {line: shlex.split(line)[1:] for line in lines}
    known = {
        line: KPROF.get_command(None, name).make_context(name, words, ignore_unknown_options=True)
        for line, (name, *words) in split.items()
    }
    assert len(lines) > 30
    assert {line: (found.info_name,) for line, found in known.items()} == {
        line: (name,) for line, (name, *_) in split.items()
    }


def test_a_page_says_on_what_its_rule_fires_from_which_threshold_on_and_what_to_change():
    told = {page.name: (page.fires_on, page.threshold, page.change) for page in PAGES}
    assert {name for name, words in told.items() if not all(words)} == set()


def test_a_page_refers_to_files_and_pages_that_exist():
    text = " ".join(page.text for page in PAGES)
    words = text.replace("`", " ").replace(",", " ").split()
    files = {word for word in words if word.startswith(("docs/", "kprof/"))}
    pages = {line.split("`")[0].split()[0] for line in text.split("kprof playbook ")[1:]}
    assert files
    assert {name for name in files if not (ROOT / name).exists()} == set()
    assert pages <= set(NAMES)


def test_the_list_names_every_page(capsys):
    with pytest.raises(SystemExit) as left:
        run_command_line(["playbook", "--json"])
    assert left.value.code == 0
    assert [page["name"] for page in json.loads(capsys.readouterr().out)] == NAMES


def test_a_page_is_printed_with_its_parts(capsys):
    with pytest.raises(SystemExit) as left:
        run_command_line(["playbook", "unfused-norm"])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert all(heading in printed for heading in HEADINGS)
    assert "kprof ab --swap rmsnorm train.py" in printed


def test_a_page_that_does_not_exist_names_the_nearest():
    with pytest.raises(KprofError, match="unfused_nrm") as error:
        find_playbook("unfused_nrm")
    assert "unfused_norm" in error.value.fix


def test_pages_are_found_from_another_folder(tmp_path):
    code = "from kprof.report.playbooks import all_playbooks; print(len(all_playbooks()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(len(PAGES))


def test_every_kernel_that_a_rule_would_swap_in_is_one_of_the_library():
    text = "".join(Path(module.__file__).read_text() for module in modules_in(RULES_PACKAGE))
    named = set(re.findall(r'(?:swap=|fix, |recommend\(trace, )"(\w+)"', text))
    assert named >= {"rope", "cross_entropy", "linear_cross_entropy", "adamw", "fp8_linear"}
    assert named | {"rmsnorm", "layernorm", "swiglu", "geglu"} <= HOMES.keys()


RULES_PACKAGE = "kprof.analyze.findings.rules"


def test_a_fix_says_in_words_what_to_do_first(tmp_path):
    # A card of the partner report shows the first sentence, and no commands.
    save(run_of(*(finding_of(rule=name) for name in NAMES)), tmp_path)
    advice = read_evidence([tmp_path]).advice
    first = {name: one.how[0] for name, one in advice.items()}
    assert sorted(first) == sorted(NAMES)
    bare = ("For GeGLU", "Both are needed")
    assert {name: one for name, one in first.items() if len(one) <= 25} == {}
    assert {name: one for name, one in first.items() if one.startswith(bare)} == {}
