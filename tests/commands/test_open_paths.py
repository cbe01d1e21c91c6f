"""What `kprof open` makes of any path: a run, or one clear error and nothing left behind."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from kprof.cli import run_command_line
from tests import memory_snapshots
from tests.kineto_files import kernel, launch, operator, write

FULL = Path("/dev/full")
EVENTS = operator(ts=0, dur=10), launch(ts=1), kernel(ts=5, dur=20)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder with a good trace in it."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, *EVENTS, name="good.json")
    return tmp_path


@pytest.fixture
def kprof(capfd):
    """Return a function that runs `kprof open` here and gives exit code and stderr."""

    def run(*words):
        with pytest.raises(SystemExit) as stopped:
            run_command_line(["open", *map(str, words)])
        return stopped.value.code, capfd.readouterr().err

    return run


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def one_clear_error(answer):
    code, err = answer
    assert code == 2
    assert err.count("kprof: ") == err.count("what to do: ") == 1
    return err


@pytest.mark.parametrize(
    ("words", "named", "why"),
    [
        (["nowhere.json"], "nowhere.json", "exist"),
        (["good.json/deeper.json"], "good.json/deeper.json", "exist"),
        (["broken.json"], "broken.json", "exist"),
        (["pipe.json"], "pipe.json", "device"),
        (["/dev/null"], "/dev/null", "device"),
        (["folder.json"], "folder.json", "trace"),
        (["empty.json"], "empty.json", "empty"),
        (["empty.json.gz"], "empty.json.gz", "empty"),
        (["good.json", "good.json"], "good.json", "twice"),
        (["good.json", "link.json"], "link.json", "good.json"),
        (["n" * 300 + ".json"], "nnn.json", "too long"),
        (["good.json", "--out", "readme.txt"], "readme.txt", "file"),
        (["good.json", "--out", "readme.txt/below"], "readme.txt/below", "directory"),
        (["good.json", "--out", "mixed"], "mixed", "run"),
        (["good.json", "--out", "mixed", "--force"], "mixed", "run"),
        (["good.json", "--out", "recorded.kprof", "--force"], "recorded.kprof", "recording"),
    ],
)
def test_a_path_that_cannot_be_opened_is_one_clear_error(here, kprof, words, named, why):
    (here / "broken.json").symlink_to("gone")
    (here / "link.json").symlink_to("good.json")
    os.mkfifo(here / "pipe.json")
    (here / "folder.json").mkdir()
    (here / "empty.json").touch()
    (here / "empty.json.gz").write_bytes(gzip.compress(b""))
    (here / "readme.txt").write_text("not mine to touch")
    (here / "mixed").mkdir()
    write(here / "mixed", *EVENTS, name="rank0.json")
    (here / "mixed" / "config.json").write_text('{"hidden_size": 64}')
    (here / "recorded.kprof" / "raw").mkdir(parents=True)
    before = {path: names_in(path) for path in [here, here / "mixed", here / "recorded.kprof"]}
    told = one_clear_error(kprof(*words))
    assert named in told and why in told.replace(named, "")
    assert {path: names_in(path) for path in before} == before


@pytest.mark.parametrize("name", ["we ird [red]é.json", "tr\udcffce.json", "--", ".json"])
def test_a_file_of_any_name_opens(here, kprof, name):
    (here / "good.json").rename(here / name)
    assert kprof(f"./{name}")[0] == 0


@pytest.mark.parametrize("words", [["ranks"], ["ranks/rank0.json", "ranks/rank1.json"]])
@pytest.mark.parametrize("content", ["", '{"hidden_size": 64}'])
def test_among_several_files_one_that_cannot_be_read_is_left_out_and_told(
    here, kprof, words, content
):
    (here / "ranks").mkdir()
    write(here / "ranks", *EVENTS, name="rank0.json")
    (here / "ranks" / "rank1.json").write_text(content)
    assert kprof(*words, "--out", "run.kprof")[0] == 0
    result = json.loads((here / "run.kprof" / "summary.json").read_text())
    told = {one["id"]: one["text"] for one in result["caveats"]}
    assert "rank1.json" in told["files_left_out"]


def test_hidden_files_of_a_folder_are_left_alone(here, kprof):
    (here / "ranks").mkdir()
    write(here / "ranks", *EVENTS, name="rank0.json")
    (here / "ranks" / "._rank0.json").write_bytes(b"\x00\x05\x16\x07")
    assert kprof("ranks")[0] == 0


def test_rank_files_are_taken_in_the_order_of_their_numbers(here, kprof):
    (here / "ranks").mkdir()
    for number in (10, 9, 2):
        write(here / "ranks", operator(), kernel(name=f"of {number}"), name=f"r{number}.json")
    assert kprof("ranks")[0] == 0
    table = pd.read_parquet(here / "ranks.kprof" / "kernels.parquet")
    assert table.sort_values("rank")["name"].tolist() == ["of 2", "of 9", "of 10"]


def test_a_saved_run_opens_from_elsewhere_and_into_another_folder(here, kprof, monkeypatch):
    kprof("good.json")
    (here / "good.json").unlink()
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert kprof("../good.kprof")[0] == 0
    assert names_in(here / "elsewhere") == []
    assert kprof("../good.kprof", "--out", "copy")[0] == 0
    assert names_in(here / "elsewhere" / "copy") == names_in(here / "good.kprof")
    assert "copy" in one_clear_error(kprof("../good.kprof", "--out", "copy"))


def test_a_saved_run_without_its_recording_cannot_be_analyzed_again(here, kprof):
    kprof("good.json")
    before = names_in(here / "good.kprof")
    assert "good.kprof" in one_clear_error(kprof("good.kprof", "--force"))
    assert names_in(here / "good.kprof") == before
    assert kprof("good.kprof")[0] == 0


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("meta.json", b'{"format": 0}', "version"),
        ("meta.json", b'{"format": 3}', "good.kprof"),
        ("meta.json", None, "good.kprof"),
        ("kernels.parquet", b"PAR1", "kernels.parquet"),
        ("ranges.parquet", None, "ranges.parquet"),
    ],
)
def test_a_damaged_saved_run_is_one_clear_error(here, kprof, name, content, said):
    kprof("good.json")
    (here / "good.kprof" / name).unlink()
    if content is not None:
        (here / "good.kprof" / name).write_bytes(content)
    assert said in one_clear_error(kprof("good.kprof"))


def test_a_report_that_was_deleted_is_drawn_again(here, kprof):
    kprof("good.json")
    before = names_in(here / "good.kprof")
    (here / "good.kprof" / "report.html").unlink()
    assert kprof("good.kprof")[0] == 0
    assert names_in(here / "good.kprof") == before


def command(words):
    return [sys.executable, "-m", "kprof", "open", *words]


@pytest.mark.slow
def test_a_full_disk_is_one_clear_error_and_leaves_nothing(here):
    limited = ["bash", "-c", 'ulimit -f 20; exec "$@"', "-", *command(["good.json"])]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    told = one_clear_error((done.returncode, done.stderr))
    assert "good.kprof" in told and "File too large" in told
    assert names_in(here) == ["good.json"]


def test_a_full_disk_while_unpacking_says_where(here):
    events = [kernel(name=f"kernel {i}") for i in range(20_000)]
    packed = gzip.compress(write(here, *events).read_bytes())
    (here / "big.json.gz").write_bytes(packed)
    limited = ["bash", "-c", 'ulimit -f 1000; exec "$@"', "-", *command(["big.json.gz"])]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    told = one_clear_error((done.returncode, done.stderr))
    assert "big.json.gz" in told and "TMPDIR" in told


@pytest.mark.slow
@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_output_that_cannot_be_written_is_one_clear_error(here):
    with FULL.open("w") as full:
        done = subprocess.run(
            command(["good.json", "--json"]), stdout=full, stderr=-1, text=True, check=False
        )
    assert "No space left" in one_clear_error((done.returncode, done.stderr))


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error(here):
    pipe = ["bash", "-o", "pipefail", "-c", '"$@" | head -1', "-", *command(["good.json"])]
    done = subprocess.run(pipe, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_names_print_where_only_ascii_is_known(here):
    write(here, operator(), kernel(name="gemm 日本 🚀 </script>"), name="tr\udcffce.json")
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    words = command(["tr\udcffce.json"])
    done = subprocess.run(words, env=ascii_only, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_two_saved_runs_are_not_taken_for_one_job_and_written_over_the_first(here, kprof):
    write(here, *EVENTS, name="other.json")
    for name in ("good", "other"):
        assert kprof(f"{name}.json")[0] == 0
    before = (here / "good.kprof" / "kernels.parquet").read_bytes()
    err = one_clear_error(kprof("good.kprof", "other.kprof"))
    assert "kprof diff good.kprof other.kprof" in err
    assert (here / "good.kprof" / "kernels.parquet").read_bytes() == before


def test_a_timeline_for_perfetto_is_written_beside_the_run(here, kprof):
    assert kprof("good.json", "--perfetto", "good.pftrace")[0] == 0
    assert names_in(here) == ["good.json", "good.kprof", "good.pftrace"]


def test_a_file_in_the_way_of_the_timeline_is_found_before_anything_is_written(here, kprof):
    (here / "good.pftrace").write_text("mine")
    err = one_clear_error(kprof("good.json", "--perfetto", "good.pftrace"))
    assert "--perfetto" in err
    assert names_in(here) == ["good.json", "good.pftrace"]


def test_a_memory_snapshot_is_opened_without_a_run_folder(here, capfd):
    blocks = [memory_snapshots.block(0, 1_000), memory_snapshots.block(1024, 24)]
    memory_snapshots.write(here / "a.pickle", memory_snapshots.snapshot((), blocks))
    with pytest.raises(SystemExit) as stopped:
        run_command_line(["open", "a.pickle", "--json"])
    (peak,) = json.loads(capfd.readouterr().out)["memory"]
    assert stopped.value.code == 0
    assert (peak["requested_bytes"], peak["rounded_bytes"]) == (1_024, 1_536)
    assert names_in(here) == ["a.pickle", "good.json"]


def test_a_pickle_that_is_no_snapshot_is_one_clear_error(here, kprof):
    memory_snapshots.write(here / "a.pickle", {"segments": 3})
    assert "a.pickle" in one_clear_error(kprof("a.pickle"))


def test_an_option_that_a_memory_snapshot_has_no_use_for_is_refused(here, kprof):
    memory_snapshots.write(here / "a.pickle", memory_snapshots.snapshot())
    assert "--out" in one_clear_error(kprof("a.pickle", "--out", "b.kprof"))


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.sqlite", "a.nsys-rep", "a.csv"])
def test_what_git_lfs_has_not_fetched_is_to_be_fetched(here, kprof, name):
    (here / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert f"git lfs pull --include {name}" in one_clear_error(kprof(name))
