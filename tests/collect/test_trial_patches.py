"""A patch that a trial switches on and off between the steps of a real script."""

import pytest

from kprof.collect.trials import Schedule, TrialError, Variant, run_trial
from kprof.errors import LaunchError
from tests.collect.trial_runs import MODEL, WRITER, never, run

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


@pytest.mark.slow
def test_the_patch_holds_in_every_step_of_b_and_in_none_of_a(tmp_path):
    script = (
        MODEL
        + """
forward = torch.nn.Linear.forward
def note(self, x):
    print(torch.nn.ReLU.forward.__name__, flush=True)
    return forward(self, x)
torch.nn.Linear.forward = note
serve(10 ** 9)
"""
    )
    trial = run(tmp_path, script, "AB", patch="slow", window_s=1e-9)
    names = trial.log.read_text().split()
    inside = {
        window.arm: set(names[window.first_step : window.first_step + window.num_steps])
        for window in trial.windows
    }
    assert inside == {"A": {"forward"}, "B": {"slow_forward"}}


@pytest.mark.slow
def test_a_crash_under_the_patch_is_that_of_b(tmp_path):
    with pytest.raises(TrialError, match=r"^B: (.*\n)*.*only in B"):
        run(tmp_path, MODEL + "serve(10 ** 9)", "AB", patch="failing")


def test_a_patch_that_fails_is_the_patchs_fault(tmp_path):
    with pytest.raises(TrialError, match=r"refusing.*entered(.*\n)*.*no such kernel"):
        run(tmp_path, MODEL + "serve(10 ** 9)", "AB", patch="refusing")


def test_steps_are_heard_under_a_patch_that_replaces_the_optimizers_own(tmp_path):
    trial = run(tmp_path, MODEL + "train(10 ** 9)", "ABA", patch="Sgd")
    assert [window.arm for window in trial.windows] == ["A", "B", "A"]


@pytest.mark.slow
def test_a_step_around_the_optimizers_own_is_one_step(tmp_path):
    trial = run(tmp_path, MODEL + "train(10 ** 9)", "ABBA", patch="slow_step")
    of_b = [window for window in trial.windows if window.arm == "B"]
    assert all(min(window.steps_ns) > 20e6 for window in of_b)


@pytest.mark.slow
def test_generations_are_heard_under_a_patch_that_replaces_generate(tmp_path):
    trial = run(tmp_path, MODEL + WRITER, "ABA", patch="generating")
    assert [window.arm for window in trial.windows] == ["A", "B", "A"]


@pytest.mark.slow
def test_a_patch_under_which_no_step_can_be_heard_is_the_patchs_fault(tmp_path):
    script = (
        MODEL
        + """
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.ones(2, 4))
    optimizer.step()
"""
    )
    with pytest.raises(TrialError, match="steps are counted"):
        run(tmp_path, script, "AB", patch="stepping")


COMPILED = """
compiled = torch.compile(model, backend="eager")
with torch.no_grad():
    while True:
        compiled(torch.ones(2, 4))
"""


@pytest.mark.slow
def test_a_patch_that_compiled_code_does_not_see_is_told(tmp_path):
    trial = run(tmp_path, MODEL + COMPILED, "AB", patch="slow")
    assert "compiled nothing anew" in trial.problems[0]
    assert [window.arm for window in trial.windows] == ["A", "B"]


@pytest.mark.slow
def test_a_patch_that_has_the_model_compiled_anew_is_seen(tmp_path):
    trial = run(tmp_path, MODEL + COMPILED, "AB", patch="slow_anew")
    assert trial.problems == ()
    assert trial.windows[1].time_ns >= 20e6


def test_a_patch_that_is_not_there_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(LaunchError, match="no such file"):
        run_trial(
            Variant("A", ("true",)),
            Schedule("AB", patch="none.py:x"),
            tmp_path / "t",
            is_enough=never,
        )
    assert not (tmp_path / "t").exists()


def test_a_patch_without_a_name_is_refused(tmp_path):
    with pytest.raises(LaunchError, match="names no function"):
        run_trial(Variant("A", ("true",)), Schedule("AB", patch="x.py"), tmp_path, is_enough=never)
