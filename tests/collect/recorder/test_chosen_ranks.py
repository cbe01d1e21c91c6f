"""`kprof run --ranks`: the ranks of a job that are recorded, under any launcher."""

import json
import sys

import pytest

from kprof.collect.launch import LaunchOptions, launch
from kprof.collect.process_folders import leave_out_other_ranks
from kprof.collect.recorder.kprof_recorder.chosen import (
    LOCAL_RANK_NAMES,
    RANK_NAMES,
    is_this_process_chosen,
    spans_in,
)
from kprof.collect.recorder.kprof_recorder.settings import Settings
from kprof.errors import KprofError
from kprof.run import RunOptions, run, run_service


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("0", [0]), ("0,8-10", [0, 8, 9, 10]), (" 1 , 3-3", [1, 3]), ("0-2,1", [0, 1, 2, 1])],
)
def test_a_text_names_ranks_and_spans_of_them(text, ranks):
    assert [rank for span in spans_in(text) for rank in span] == ranks


@pytest.mark.parametrize("text", ["", "a", "1-", "-2", "5-3", "²", "1;2", "9" * 30, "0,,1"])
def test_what_is_no_rank_is_an_error_before_anything_starts(tmp_path, text):
    out = tmp_path / "run.kprof"
    options = RunOptions((sys.executable,), form="command", out=out, ranks=text)
    with pytest.raises(KprofError, match="--ranks"):
        run(options)
    with pytest.raises(KprofError, match="--ranks"):
        run_service(options, "file")
    assert not out.exists()


@pytest.mark.parametrize("name", RANK_NAMES)
def test_every_launcher_tells_a_process_whether_it_is_recorded(monkeypatch, name):
    for other in (*RANK_NAMES, *LOCAL_RANK_NAMES):
        monkeypatch.delenv(other, raising=False)
    # Nothing tells: it may be any.
    assert is_this_process_chosen("3")
    monkeypatch.setenv(name, "9")
    assert [is_this_process_chosen(text) for text in ("0,8-15", "9", "3", "10-11")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("name", LOCAL_RANK_NAMES)
def test_one_of_each_host_is_the_first_of_its_host(monkeypatch, name):
    for other in LOCAL_RANK_NAMES:
        monkeypatch.delenv(other, raising=False)
    assert is_this_process_chosen("per-host")
    monkeypatch.setenv(name, "0")
    assert is_this_process_chosen("per-host")
    monkeypatch.setenv(name, "3")
    assert not is_this_process_chosen("per-host")


def test_a_run_inside_another_does_not_find_its_ranks(tmp_path):
    settings = Settings(tmp_path, ranks="0,2")
    assert Settings.from_environment(settings.to_environment()).ranks == "0,2"
    assert "KPROF_RANKS" not in Settings(tmp_path).to_environment()


def test_other_ranks_of_a_launcher_that_does_not_tell_them_are_left_out(tmp_path):
    for rank in range(4):
        part = tmp_path / f"rank{rank}-pid{rank + 1}"
        part.mkdir()
        (part / "recorder.json").write_text(json.dumps({"rank": rank}))
    leave_out_other_ranks(tmp_path, "1,3-9")
    assert sorted(part.name for part in tmp_path.iterdir()) == ["rank1-pid2", "rank3-pid4"]


TRAIN = """
import sys
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
START = """
import os, subprocess, sys
ranks = [
    subprocess.Popen([sys.executable, "train.py"], env={**os.environ, "RANK": str(rank)})
    for rank in range(3)
]
sys.exit(sum(rank.wait() for rank in ranks))
"""


def test_where_no_chosen_rank_recorded_the_message_names_the_choice(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    command = (sys.executable, "-c", "pass")
    launched = launch(LaunchOptions(command, tmp_path / "x.kprof", ranks="7"))
    (message,) = launched.messages
    assert launched.parts == ()
    assert "--ranks 7" in message


@pytest.mark.slow
def test_only_the_ranks_that_are_asked_for_are_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "start.py").write_text(START)
    command = (sys.executable, "start.py")
    launched = launch(LaunchOptions(command, tmp_path / "x.kprof", skip=1, steps=2, ranks="0,2"))
    assert launched.exit_code == 0
    assert sorted(part.name.partition("-")[0] for part in launched.parts) == ["rank0", "rank2"]
