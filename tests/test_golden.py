"""Today's commands give the golden outputs; `python benchmarks/golden.py` writes them anew."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Digests, of recordings elsewhere and of compiled code.
DIGESTS = {"shared", "compiled_code"}
CASES = sorted({path.stem for path in (ROOT / "tests" / "golden").glob("*.json")} - DIGESTS)
SHARED = ROOT.parent / "shared" / "traces"


@pytest.fixture(scope="module")
def golden():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("golden")


@pytest.fixture(scope="module")
def outputs(golden, tmp_path_factory):
    return golden.Outputs(tmp_path_factory.mktemp("golden"))


def test_every_case_has_its_golden_output(golden):
    assert {*CASES} == {*golden.CASES}


@pytest.mark.parametrize("case", CASES)
def test_a_command_gives_its_golden_output(golden, outputs, case):
    stored = (golden.GOLDEN / f"{case}.json").read_text()
    assert golden.canonical(outputs.of(case)) == stored


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="the recordings of others are not here")
@pytest.mark.parametrize("name", json.loads((ROOT / "tests/golden/shared.json").read_text()))
def test_a_recording_of_others_gives_the_output_of_this_digest(golden, outputs, name):
    stored = json.loads((golden.GOLDEN / "shared.json").read_text())[name]
    made = golden.canonical(outputs.open(golden.shared_recordings()[name]))
    assert golden.digest(made) == stored


def test_a_changed_result_changes_the_canonical_text_and_its_key_order_does_not(golden):
    one = golden.canonical({"a": 1, "b": 0.1 + 0.2})
    assert golden.canonical({"b": 0.3, "a": 1}) == one
    assert golden.canonical({"b": 0.3, "a": 2}) != one
