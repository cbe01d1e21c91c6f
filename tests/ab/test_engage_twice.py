"""An A/B is added once, in whatever file it lies: twice in the ledger, it would weigh double."""

import json

import pytest

from kprof.ab import engagement_folder
from kprof.ab.engagement_folder import read_engagement
from kprof.errors import KprofError
from tests.commands.test_cli import kprof
from tests.engagements import LATER_NS, finding, write_comparison, write_run
from tests.quantities import quantities_in


@pytest.fixture
def begun(tmp_path):
    engagement_folder.init(tmp_path / "engagement")
    return tmp_path / "engagement"


def again(folder, name, where):
    """Write the comparison of a folder once more, as another folder or file; return its path."""
    content = json.loads((folder / "comparison.json").read_text())
    path = where / name
    if name.endswith(".kprof"):
        path.mkdir()
        (path / "comparison.json").write_text(json.dumps(content))
    elif name == "by-others.json":
        for pair in content["pairs"]:
            # Beyond 2**53, JavaScript and jq write the nearest float in 17 digits.
            pair["start_ns"] = int(f"{float(pair['start_ns']):.16e}".replace(".", "")[:17] + "00")
        path.write_text(json.dumps(content))
    else:
        # As `kprof ab --json` prints it: what stands besides, and other white space.
        path.write_text(json.dumps({**content, "calibration": "Not calibrated."}, indent=1))
    return path


@pytest.mark.parametrize("name", ["ab.json", "copy.kprof", "by-others.json"])
def test_the_same_comparison_is_not_added_twice_whatever_file_it_lies_in(
    begun, tmp_path, capsys, name
):
    start_ns = 1_795_409_827_943_683_757
    first = write_comparison(tmp_path / "ab.kprof", start_ns=start_ns)
    engagement_folder.add(begun, [first])
    assert kprof("engage", "add", begun, again(first, name, tmp_path)) == 2
    told = capsys.readouterr().err
    assert name in told and "ab.kprof" in told and "2" in quantities_in(told)
    assert len(read_engagement(begun).entries) == 2


def test_the_same_comparison_twice_in_one_command_adds_nothing(begun, tmp_path):
    first = write_comparison(tmp_path / "ab.kprof")
    with pytest.raises(KprofError, match=r"ab\.json .* ab\.kprof\n"):
        engagement_folder.add(begun, [first, again(first, "ab.json", tmp_path)])
    assert len(read_engagement(begun).entries) == 1
    with pytest.raises(KprofError) as error:
        engagement_folder.add(begun, [first, first])
    assert error.value.problem.count("ab.kprof") == 1
    assert len(read_engagement(begun).entries) == 1


def test_nothing_is_added_where_the_last_that_is_named_is_refused(begun, tmp_path):
    run = write_run(tmp_path / "run.kprof", finding(swap="rmsnorm"))
    engagement_folder.add(begun, [run])
    tried = write_comparison(tmp_path / "ab.kprof")
    unclear = write_comparison(tmp_path / "unclear.kprof", ratio=0.9, b="--env K=V")
    with pytest.raises(KprofError, match="--env K=V"):
        engagement_folder.add(begun, [tried, unclear])
    assert len(read_engagement(begun).entries) == 2


def test_a_comparison_done_again_is_another_even_with_the_same_plan_and_result(begun, tmp_path):
    first = write_comparison(tmp_path / "ab.kprof")
    later = write_comparison(tmp_path / "later.kprof", start_ns=LATER_NS + 10**9)
    other = write_comparison(tmp_path / "other.kprof", ratio=0.86)
    nothing = [write_comparison(tmp_path / f"{i}.kprof", name=str(i), pairs=()) for i in range(2)]
    engagement_folder.add(begun, [first, later, other, *nothing])
    assert len(read_engagement(begun).entries) == 6
