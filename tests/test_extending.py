"""The excerpts of the page about extending kprof work as they stand there."""

import re
from pathlib import Path

import pytest

from kprof.report.section import Text
from kprof.trace import Trace
from tests.quantities import quantities_in
from tests.section_traces import RICH
from tests.traces import analyzed_trace_of

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()


def excerpt(heading, **given):
    """Run the Python under a heading; return what it defines."""
    part = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", part, re.DOTALL)
    code = re.sub(r"^return ", "result = ", code, flags=re.MULTILINE)
    exec(compile(code, heading, "exec"), given)
    return given


def test_the_section_renders_a_trace():
    (first, *_) = excerpt("A section of the report")["render"](RICH).parts
    assert isinstance(first, Text)
    assert quantities_in(first.text) == ["1"]


def test_the_reader_makes_a_trace():
    given = {"number": 2, "names": ["a", "b"], "starts_ns": [5, 10], "durations_ns": [4, 3]}
    trace = excerpt("A reader of a file format", path=Path("launches.csv"), **given)["result"]
    assert isinstance(trace, Trace)
    assert trace.kernels["duration_ns"].tolist() == [4, 3]


@pytest.mark.parametrize(("streams", "number"), [(7, 0), (8, 1)])
def test_the_rule_finds_what_it_says(streams, number):
    trace = analyzed_trace_of(*({"stream": stream} for stream in range(streams)))
    assert len(excerpt("A rule")["check"](trace)) == number
