"""What the recorder notes beside the host: node, GPUs and process groups."""

import json
import sys

import pytest
import torch

from kprof.analyze.condense import rank_totals
from kprof.analyze.passes import analyze
from kprof.collect.launch import LaunchOptions, launch
from kprof.collect.readers.recorded.reader import read
from kprof.collect.recorder.kprof_recorder.chosen import NODE_NAMES
from kprof.collect.recorder.kprof_recorder.ranks import gpu_uuids, node, process_groups
from kprof.trace import ProcessGroup

TRAIN = """
import torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
dist.new_group([0, 1], group_desc="mesh_pp")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture
def fake_job():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def test_the_groups_of_a_mesh_have_their_names_and_ranks(fake_job):
    torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    found = {one["description"]: one["ranks"] for one in process_groups()}
    assert found == {"default_pg": [0, 1, 2, 3], "mesh_pp": [0, 2], "mesh_tp": [2, 3]}


def test_a_process_of_no_job_has_no_groups_and_one_without_cuda_no_gpu():
    assert process_groups() == []
    assert gpu_uuids() == []


@pytest.mark.parametrize("name", NODE_NAMES)
def test_the_launcher_tells_the_node(monkeypatch, name):
    for other in NODE_NAMES:
        monkeypatch.delenv(other, raising=False)
    assert node() is None
    monkeypatch.setenv(name, "3")
    assert node() == 3


def test_a_gpu_has_the_uuid_that_nvidia_smi_shows(monkeypatch):
    class Properties:
        uuid = "a6b4c7d1-0000-1111-2222-333344445555"

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())
    assert gpu_uuids() == ["GPU-a6b4c7d1-0000-1111-2222-333344445555"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: object())
    assert gpu_uuids() == [None]


@pytest.mark.slow
def test_ranks_of_a_recorded_job_have_their_stages(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    command = (*torchrun, "--nproc-per-node", "2", str(tmp_path / "train.py"))
    launched = launch(LaunchOptions(command, tmp_path / "x.kprof", skip=1, steps=2))
    assert launched.exit_code == 0
    told = [json.loads((part / "recorder.json").read_text()) for part in launched.parts]
    assert {(one["rank"], one["node"]) for one in told} == {(0, 0), (1, 0)}
    trace = analyze(read(tmp_path / "x.kprof"))
    (stages,) = (one for one in trace.meta.process_groups if one.description == "mesh_pp")
    assert stages.ranks == (0, 1)
    assert [one.place for one in rank_totals(trace)] == [{"pipeline": 0}, {"pipeline": 1}]
    assert ProcessGroup("0", (0, 1), "default_pg") in trace.meta.process_groups
