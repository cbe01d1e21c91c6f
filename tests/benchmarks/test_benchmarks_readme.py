"""The page of the benchmarks names every script, and no option that a script does not have."""

import re
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = (BENCHMARKS / "README.md").read_text()


def test_every_script_is_on_the_page_and_every_name_on_it_is_a_script():
    named = set(re.findall(r"\b[a-z_0-9]+\.py\b", PAGE))
    assert named == {path.name for path in BENCHMARKS.glob("*.py")}


def test_a_command_on_the_page_has_only_options_of_its_script():
    commands = re.findall(r"`([a-z_0-9]+\.py) ([^`]*--[^`]*)`", PAGE)
    unknown = [
        (script, option)
        for script, words in commands
        for option in re.findall(r"--[a-z-]+", words)
        if f'"{option}"' not in (BENCHMARKS / script).read_text()
    ]
    assert commands
    assert not unknown
