"""The allocator's history, and whose memory it is; the GPU is pretended."""

import json
import pickle
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from kprof.collect.recorder.kprof_recorder import memory  # noqa: E402
from tests.memory_snapshots import snapshot  # noqa: E402

STATISTICS = {"allocated_bytes.all.peak": 2048, "requested_bytes.all.peak": 1700}


@pytest.fixture
def calls(monkeypatch):
    """Return the calls that switch torch's history."""
    said = []
    gpu = {
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "memory_stats": lambda device: STATISTICS,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=1 << 34),
    }
    for name, function in gpu.items():
        monkeypatch.setattr(torch.cuda, name, function)
    allocator = torch.cuda.memory
    monkeypatch.setattr(
        allocator, "_record_memory_history", lambda enabled, **options: said.append(enabled)
    )
    monkeypatch.setattr(allocator, "_snapshot", snapshot)
    return said


@pytest.fixture
def trained():
    """A model and an optimizer after a step, with gradients."""
    model = torch.nn.Linear(4, 4)
    model.register_buffer("seen", torch.zeros(1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def recorded(history, folder):
    history.write(folder)
    return json.loads((folder / "memory.json").read_text())


def test_parameters_gradients_states_and_buffers_are_noted(calls, trained, tmp_path):
    model, optimizer = trained
    history = memory.History()
    history.find_models = lambda: [model]
    history.start()
    history.note([optimizer])
    history.stop()
    _, of_step, _ = recorded(history, tmp_path)["notes"]
    addresses = of_step["addresses"]
    parameters = list(model.parameters())
    assert addresses["parameters"] == sorted(map(address, parameters))
    assert addresses["gradients"] == sorted(address(p.grad) for p in parameters)
    assert addresses["buffers"] == [address(model.seen)]
    moments = [optimizer.state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq")]
    assert set(map(address, moments)) <= set(addresses["optimizer"])


def test_the_snapshot_and_the_allocators_counters_are_written(calls, tmp_path):
    history = memory.History()
    history.start()
    history.stop()
    told = recorded(history, tmp_path)
    assert pickle.loads((tmp_path / "memory.pickle").read_bytes()) == snapshot()
    assert told["devices"]["0"]["requested_bytes.peak"] == 1700
    assert told["devices"]["0"]["capacity_bytes"] == 1 << 34
    assert calls == ["all", None]


def test_a_history_of_the_workloads_own_stays_on(calls, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    history = memory.History()
    history.start()
    history.stop()
    assert calls == []


def test_nothing_is_kept_where_cuda_is_not_in_use(calls, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    history = memory.History()
    history.start()
    history.stop()
    history.write(tmp_path)
    assert calls == list(tmp_path.iterdir()) == []


def test_a_torch_that_knows_no_such_history_fails_nothing(calls, monkeypatch, tmp_path):
    def refuse(*words, **options):
        raise TypeError("no such option")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", refuse)
    history = memory.History()
    history.start()
    history.stop()
    history.write(tmp_path)
    assert "no such option" in history.problem
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_asked_fails_nothing(calls):
    def refuse():
        raise RuntimeError("not now")

    history = memory.History()
    history.find_models = refuse
    history.start()
    history.stop()
    assert history.problem == ""
