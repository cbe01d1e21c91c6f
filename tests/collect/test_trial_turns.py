"""Switching an empty change on and off: a step costs the same in both arms, however often."""

import sys
from statistics import mode

import pytest

from kprof.collect.trials import Schedule, Variant, run_trial
from tests.collect.trial_runs import MODEL, never

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

COUNTING = (
    MODEL
    + """
num_calls = 0
def count(frame, event, argument):
    global num_calls
    num_calls += event in ("call", "c_call")
forward = torch.nn.Linear.forward
def note(self, x):
    global num_calls
    print(num_calls, flush=True)
    num_calls = 0
    return forward(self, x)
torch.nn.Linear.forward = note
sys.setprofile(count)
train(10 ** 9)
"""
)


@pytest.mark.slow
def test_a_step_makes_as_many_calls_inside_an_empty_change_as_outside_after_any_number_of_turns(
    tmp_path,
):
    script = tmp_path / "script.py"
    script.write_text(COUNTING)
    letters = "ABBAABAB" * 3
    schedule = Schedule(letters, skip=2, window_s=0.02, patch="contextlib:nullcontext")
    variant = Variant("A", (sys.executable, str(script)))
    trial = run_trial(variant, schedule, tmp_path / "trial", is_enough=never)
    calls = [int(line) for line in trial.log.read_text().split()]
    # Not the first of a window: the count begins within the step before.
    of_steps = [calls[w.first_step + 1 : w.first_step + w.num_steps] for w in trial.windows]
    assert "".join(window.arm for window in trial.windows) == letters
    assert {mode(numbers) for numbers in of_steps} == {mode(of_steps[0])}
