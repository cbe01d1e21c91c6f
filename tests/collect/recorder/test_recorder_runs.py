"""The recorder inside real scripts, on the CPU."""

import sys

import pytest

from tests.recorded import MODEL, record, record_command

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

TRAINING = """
optimizer = torch.optim.AdamW(model.parameters())
data = [torch.ones(4) for _ in range(40)]
for batch in torch.utils.data.DataLoader(data, batch_size=2, num_workers=2):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("argv", sys.argv[1:], __name__)
print("to stderr", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    return record(folder, MODEL + TRAINING, "--lr", "3")


@pytest.mark.slow
def test_a_training_loop_is_recorded_after_its_warm_up(training):
    assert training.description["num_steps_seen"] == 20
    assert training.recorded_steps() == [5, 6, 7]
    assert training.ranges("kprof.step#") == ["5", "6", "7"]


def test_the_rule_names_the_optimizer(training):
    assert "optimizer step" in training.description["step_rule"]
    assert "AdamW" in training.description["optimizer"]


def test_a_training_step_has_its_four_phases(training):
    assert training.ranges("kprof.phase#") == ["backward", "data", "forward", "optimizer"]


def test_modules_are_named_by_their_path(training):
    assert training.ranges("kprof.module#") == [
        "Llama",
        "layers.0",
        "layers.0.attn",
        "layers.1",
        "layers.1.attn",
    ]


def test_workers_of_a_loader_leave_nothing(training):
    assert len(training.result.parts) == 1


def test_shapes_are_recorded_with_the_operators(training):
    addmm = next(e for e in training.events if e.get("name") == "aten::addmm")
    assert addmm["args"]["Input Dims"][1] == [2, 4]


COMPILERS = (
    'print([name for name in sys.modules if name.startswith(("torch._dyn", "torch._ind"))])\n'
)


@pytest.mark.slow
def test_each_generation_is_one_step_whatever_it_calls_inside(tmp_path, capfd):
    script = MODEL + "for _ in range(9): model.generate(torch.ones(1, 4), 4)\n"
    run = record(tmp_path, script + COMPILERS)
    assert "Llama.generate" in run.description["step_rule"]
    assert run.description["num_steps_seen"] == 9
    assert run.count("kprof.module#Llama") == 3 * 4
    # Importing torch's compilers takes as long as torch: the recorder does without.
    assert capfd.readouterr().out == "[]\n"


def test_a_script_shorter_than_its_warm_up_is_recorded_from_the_beginning(tmp_path):
    script = MODEL + "model.eval()\nfor _ in range(4): model(torch.ones(2, 4))\nsys.exit(7)\n"
    run = record(tmp_path, script)
    assert run.result.exit_code == 7
    assert run.recorded_steps() == [0, 1]
    assert any("fewer than --skip 5 + 1" in text for text in run.description["caveats"])


def test_a_script_without_steps_is_recorded_from_the_beginning(tmp_path):
    run = record(tmp_path, "import torch\na = torch.ones(8, 8)\nprint((a @ a).sum())\n")
    assert run.count("aten::mm") == 1
    assert any("no step" in text for text in run.description["caveats"])


TERMINATED = """
import os, signal, time
model.eval()
for _ in range(7): model(torch.ones(2, 4))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(30)
"""


def test_a_signal_to_the_launcher_reaches_the_script_and_loses_no_recording(tmp_path):
    run = record(tmp_path, MODEL + TERMINATED)
    assert run.result.exit_code == 143
    assert run.recorded_steps() == [5, 6]


def test_a_module_and_a_command_are_recorded_like_a_script(tmp_path, monkeypatch):
    (tmp_path / "job.py").write_text("import torch\ntorch.ones(2, 2) @ torch.ones(2, 2)\n")
    monkeypatch.chdir(tmp_path)
    run = record_command(tmp_path, ("sh", "-c", f"{sys.executable} -m job"))
    assert run.count("aten::mm") == 1
