"""`kprof.profile` and `kprof.range`, for those who edit their script."""

import contextlib
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kprof.api
from kprof.errors import LaunchError
from tests.recorded import LEAN_TORCH

ROOT = Path(__file__).parents[3]

BLOCKS = f"""{LEAN_TORCH}
from kprof.api import profile, range as named
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
layer(torch.ones(1, 4)).sum().backward()
optimizer.step()
for folder in ("first.kprof", "second.kprof"):
    with profile(folder):
        for _ in (1, 2):
            with named("step"), named("mine"):
                layer(torch.ones(2, 4)).sum().backward()
                optimizer.step()
"""


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("blocks")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (folder / "stderr.txt").open("w") as stderr:
        command = (sys.executable, "-c", BLOCKS)
        subprocess.run(command, cwd=folder, env=environment, stderr=stderr, check=True)
    return folder


def read(folder):
    (part,) = folder.glob("raw/rank0-pid*")
    with gzip.open(part / "window-0.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    return names, json.loads((part / "recorder.json").read_text())


@pytest.mark.slow
def test_a_block_is_recorded_with_the_users_ranges_and_phases(blocks):
    names, description = read(blocks / "first.kprof")
    assert names.count("mine") == 2
    assert names.count("kprof.phase#optimizer") == 2
    assert description["num_steps_seen"] == 2
    assert description["caveats"] == []


@pytest.mark.slow
def test_a_block_says_nothing_on_the_scripts_stderr(blocks):
    assert (blocks / "stderr.txt").read_text() == ""


@pytest.mark.slow
def test_a_second_block_is_a_recording_of_its_own(blocks):
    names, description = read(blocks / "second.kprof")
    assert names.count("mine") == 2
    assert description["window"] == [0, 1]


@pytest.mark.slow
def test_a_block_can_be_opened_like_a_run(blocks):
    description = json.loads((blocks / "first.kprof/raw/launch.json").read_text())
    assert description["exit_code"] == 0


def test_a_range_costs_nothing_where_torch_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert isinstance(kprof.api.range("mine"), contextlib.nullcontext)


def test_a_folder_with_a_recording_is_not_recorded_over(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "run.kprof/raw/rank0-pid1").mkdir(parents=True)
    with (
        pytest.raises(LaunchError, match=r"run\.kprof: .*already"),
        kprof.api.profile(tmp_path / "run.kprof"),
    ):
        pass
