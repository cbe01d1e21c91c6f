"""Windows of real scripts' steps, on the CPU: which there are, and what lies in them."""

import json
import sys
from pathlib import Path

import pytest

from kprof.collect.trials import Schedule, Variant, run_trial
from tests.collect.trial_runs import MODEL, WRITER, never, run
from tests.quantities import quantities_in

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


def shape(trial):
    return [(window.arm, len(window.steps_ns) > 0, window.time_ns > 0) for window in trial.windows]


@pytest.fixture(scope="module")
def flipped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flipped")
    script = MODEL.replace(
        "        optimizer.zero_grad()",
        "        optimizer.zero_grad(); print(torch.nn.ReLU.forward.__name__)",
    )
    return run(folder, script + "train(10 ** 9)", "ABBA", patch="slow")


@pytest.mark.slow
def test_each_letter_of_the_schedule_is_a_window(flipped):
    assert shape(flipped) == [
        ("A", True, True),
        ("B", True, True),
        ("B", True, True),
        ("A", True, True),
    ]


def test_the_rule_is_that_of_a_recording(flipped):
    assert "optimizer step" in flipped.rule


def test_what_the_patch_adds_is_in_the_windows_of_b(flipped):
    assert all(window.time_ns >= 20e6 for window in flipped.windows if window.arm == "B")
    assert all(min(window.steps_ns) >= 20e6 for window in flipped.windows if window.arm == "B")


def test_all_windows_have_equally_many_steps(flipped):
    assert len({window.num_steps for window in flipped.windows}) == 1


def test_windows_follow_each_other_with_a_step_between(flipped):
    first, second = flipped.windows[:2]
    assert second.first_step == first.first_step + first.num_steps + 1
    assert second.start_ns > first.end_ns


def test_a_process_that_has_told_enough_is_ended(flipped):
    assert flipped.exit_code is None
    assert flipped.problems == ()


def test_what_it_printed_is_kept(flipped):
    assert "forward" in flipped.log.read_text()


def test_nothing_is_said_of_a_gpu_where_there_is_none(flipped):
    assert flipped.device_name is None
    assert (flipped.joules_per_step, "no GPU" in flipped.why_no_energy) == (None, True)


@pytest.mark.slow
def test_a_caller_may_stop_before_the_schedule_ends(tmp_path):
    trial = run(tmp_path, MODEL + "serve(10 ** 9)", "A" * 500, lambda windows: len(windows) >= 2)
    assert 2 <= len(trial.windows) < 500


def test_calls_of_a_model_that_is_not_trained_are_timed(tmp_path):
    trial = run(tmp_path, MODEL + "serve(10 ** 9)")
    assert len(trial.windows) == 2
    assert "outermost call" in trial.rule


@pytest.mark.slow
def test_a_window_holds_what_lies_between_the_steps(tmp_path):
    script = MODEL + "model.eval()\nwhile True:\n    model(torch.ones(1, 4)); time.sleep(0.02)\n"
    trial = run(tmp_path, script)
    assert all(window.time_ns >= 20e6 for window in trial.windows)
    assert all(min(window.steps_ns) < window.time_ns for window in trial.windows)


def test_generations_are_timed(tmp_path):
    trial = run(tmp_path, MODEL + WRITER)
    assert len(trial.windows) == 2
    assert "Writer.generate" in trial.rule


def test_a_step_that_the_user_named_is_timed(tmp_path):
    script = MODEL + "import kprof\nwhile True:\n    with kprof.range('step'): time.sleep(0.001)\n"
    trial = run(tmp_path, script)
    assert len(trial.windows) == 2
    assert 'range called "step"' in trial.rule


@pytest.mark.slow
def test_a_block_that_the_script_would_record_runs_as_it_is(tmp_path):
    script = MODEL + "import kprof\nwith kprof.profile('own.kprof'): serve(10 ** 9)\n"
    trial = run(tmp_path, script)
    assert len(trial.windows) == 2
    assert not Path("own.kprof").exists()


@pytest.mark.slow
def test_an_evaluation_before_the_training_is_left_out(tmp_path):
    script = (
        MODEL
        + """
model.eval()
with torch.no_grad():
    for _ in range(40): model(torch.ones(1, 4))
model.train()
train(10 ** 9)
"""
    )
    trial = run(tmp_path, script, "A" * 20, window_s=1e-9)
    assert len(trial.windows) == 20
    assert "optimizer step" in trial.rule
    assert "Left out" in trial.problems[0]


@pytest.mark.slow
def test_an_evaluation_amid_the_training_is_waited_for(tmp_path):
    script = (
        MODEL
        + """
while True:
    train(7)
    with torch.no_grad():
        model.eval()
        for _ in range(50): model(torch.ones(1, 4)); time.sleep(0.001)
        model.train()
"""
    )
    trial = run(tmp_path, script, "A" * 4, window_s=1e-9)
    assert [window.num_steps for window in trial.windows] == [2] * 4
    assert all(window.time_ns < 25e6 for window in trial.windows)


def test_the_variants_environment_reaches_the_workload(tmp_path, monkeypatch):
    monkeypatch.setenv("KPROF_TRIGGER", "/of/another/run")
    code = "import os; print(os.environ['COLOUR'], 'KPROF_TRIGGER' in os.environ)"
    variant = Variant("B", (sys.executable, "-c", code), {"COLOUR": "green"})
    trial = run_trial(variant, Schedule("B"), tmp_path / "trial", is_enough=never)
    assert (trial.label, trial.log.read_text()) == ("B", "green False\n")


@pytest.mark.slow
def test_workers_of_a_loader_are_no_ranks(tmp_path):
    script = (
        MODEL
        + """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 60
    def __getitem__(self, index):
        return model(torch.ones(4)).detach()
if __name__ == "__main__":
    how = {"multiprocessing_context": "spawn", "persistent_workers": True}
    loader = torch.utils.data.DataLoader(Data(), num_workers=1, **how)
    while True:
        for batch in loader:
            serve(1)
"""
    )
    # The worker imports torch.
    trial = run(tmp_path, script, most_s=240)
    assert len(list((tmp_path / "trial/raw").glob("rank*"))) == 1
    assert (len(trial.windows), trial.problems) == (2, ())


@pytest.mark.slow
def test_a_forked_child_is_no_rank_and_it_is_said_where_it_trains(tmp_path):
    script = (
        MODEL
        + """
import os
train(4)
if os.fork() == 0:
    train(90)
    os._exit(0)
os.wait()
train(10 ** 9)
"""
    )
    trial = run(tmp_path, script)
    assert len(trial.windows) == 2
    assert "forked after torch" in trial.problems[0]


RANKS = """
import torch, torch.distributed
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
while True:
    torch.distributed.all_reduce(model(torch.ones(2, 4)).detach())
"""


@pytest.mark.slow
def test_ranks_change_arms_at_the_same_steps(tmp_path):
    module = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = (sys.executable, *module, str(tmp_path / "script.py"))
    trial = run(tmp_path, RANKS, "ABBA", command=command, patch="slow")
    first, second = (turns_in(path) for path in sorted(trial.log.parent.glob("raw/rank*")))
    assert [window.arm for window in trial.windows] == list("ABBA")
    # Rank 0 has told the end by then; the other may not have come to it.
    assert second == first[: len(second)]
    assert len(second) >= 3
    (problem,) = trial.problems
    assert quantities_in(problem) == ["2", "0"]


def turns_in(part):
    lines = [json.loads(line) for line in (part / "windows.jsonl").read_text().splitlines()]
    return [(line["arm"], line["first_step"]) for line in lines if line["kind"] == "window"]
