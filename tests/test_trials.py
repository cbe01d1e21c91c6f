"""Windows of real scripts' steps, on the CPU, and what happens when a script goes wrong."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from kprof.collect.trials import Schedule, TrialError, Variant, run_trial
from kprof.errors import LaunchError

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

MODEL = """
import sys, time, torch
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
def train(num_steps):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
PATCH = """
import contextlib, sys, time, torch
ORIGINAL = torch.nn.ReLU.forward
def slow_forward(self, x):
    time.sleep(0.02)
    return ORIGINAL(self, x)
@contextlib.contextmanager
def slow():
    torch.nn.ReLU.forward = slow_forward
    try:
        yield
    finally:
        torch.nn.ReLU.forward = ORIGINAL
@contextlib.contextmanager
def failing():
    def fail(self, x):
        raise ValueError("only in B")
    torch.nn.ReLU.forward = fail
    yield
def refusing():
    raise KeyError("no such kernel")
@contextlib.contextmanager
def generating():
    writer = sys.modules["__main__"].Writer
    before = writer.generate
    writer.generate = lambda self, x: self(x)
    yield
    writer.generate = before
@contextlib.contextmanager
def stepping():
    optimizer = sys.modules["__main__"].optimizer
    optimizer.step = lambda: None
    yield
    del optimizer.step
@contextlib.contextmanager
def slow_anew():
    with slow():
        torch.compiler.reset()
        yield
    torch.compiler.reset()
@contextlib.contextmanager
def slow_step():
    before = torch.optim.AdamW.step
    def step(optimizer):
        time.sleep(0.02)
        return before(optimizer)
    torch.optim.AdamW.step = step
    yield
    torch.optim.AdamW.step = before
class Sgd:
    def __enter__(self):
        self.before = torch.optim.AdamW.step
        torch.optim.AdamW.step = lambda optimizer: None
    def __exit__(self, *error):
        torch.optim.AdamW.step = self.before
"""
SHORT = {"skip": 2, "window_s": 0.01}


def never(windows):
    return False


def run(folder, script, letters="AA", is_enough=never, most_s=60, command=None, **schedule):
    (folder / "script.py").write_text(script)
    (folder / "patch.py").write_text(PATCH)
    if "patch" in schedule:
        schedule["patch"] = f"{folder}/patch.py:{schedule['patch']}"
    variant = Variant("A", command or (sys.executable, str(folder / "script.py")))
    plan = Schedule(letters, **{**SHORT, **schedule})
    return run_trial(variant, plan, folder / "trial", is_enough=is_enough, most_s=most_s)


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


def test_each_letter_of_the_schedule_is_a_window(flipped):
    assert shape(flipped) == [
        ("A", True, True),
        ("B", True, True),
        ("B", True, True),
        ("A", True, True),
    ]


def test_the_rule_is_that_of_a_recording(flipped):
    assert "from the end of one optimizer step" in flipped.rule


def test_what_the_patch_adds_is_in_the_windows_of_b(flipped):
    assert all(window.time_ns >= 20e6 for window in flipped.windows if window.arm == "B")
    assert all(min(window.steps_ns) >= 20e6 for window in flipped.windows if window.arm == "B")


def test_the_patch_holds_in_every_step_of_b_and_in_none_of_a(tmp_path):
    script = (
        MODEL
        + """
forward = torch.nn.Linear.forward
def note(self, x):
    print(torch.nn.ReLU.forward.__name__, flush=True)
    return forward(self, x)
torch.nn.Linear.forward = note
train(10 ** 9)
"""
    )
    trial = run(tmp_path, script, "AB", patch="slow", window_s=1e-9)
    names = trial.log.read_text().split()
    inside = {
        window.arm: set(names[window.first_step : window.first_step + window.num_steps])
        for window in trial.windows
    }
    assert inside == {"A": {"forward"}, "B": {"slow_forward"}}


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
    assert (flipped.joules_per_step, flipped.why_no_energy) == (None, "no GPU took part")


def test_whoever_asks_for_windows_may_stop_before_the_schedule_ends(tmp_path):
    trial = run(tmp_path, MODEL + "train(10 ** 9)", "A" * 500, lambda windows: len(windows) >= 2)
    assert 2 <= len(trial.windows) < 500


def test_calls_of_a_model_that_is_not_trained_are_timed(tmp_path):
    script = (
        MODEL + "model.eval()\nwith torch.no_grad():\n    while True: model(torch.ones(1, 4))\n"
    )
    trial = run(tmp_path, script)
    assert len(trial.windows) == 2
    assert "outermost call" in trial.rule


def test_a_window_holds_what_lies_between_the_steps(tmp_path):
    script = MODEL + "model.eval()\nwhile True:\n    model(torch.ones(1, 4)); time.sleep(0.02)\n"
    trial = run(tmp_path, script)
    assert all(window.time_ns >= 20e6 for window in trial.windows)
    assert all(min(window.steps_ns) < window.time_ns for window in trial.windows)


WRITER = """
class Writer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, x):
        return self.model(x)
    def generate(self, x):
        for _ in range(3):
            x = self(x)
        return x
writer = Writer().eval()
while True:
    writer.generate(torch.ones(1, 4))
"""


def test_generations_are_timed(tmp_path):
    trial = run(tmp_path, MODEL + WRITER)
    assert len(trial.windows) == 2
    assert "Writer.generate" in trial.rule


def test_a_step_that_the_user_named_is_timed(tmp_path):
    script = MODEL + "import kprof\nwhile True:\n    with kprof.range('step'): time.sleep(0.001)\n"
    trial = run(tmp_path, script)
    assert len(trial.windows) == 2
    assert 'range called "step"' in trial.rule


def test_a_block_that_the_script_would_record_runs_as_it_is(tmp_path):
    script = MODEL + "import kprof\nwith kprof.profile('own.kprof'): train(10 ** 9)\n"
    trial = run(tmp_path, script)
    assert len(trial.windows) == 2
    assert not Path("own.kprof").exists()


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
    assert "windows of another kind of step are left out" in trial.problems[0]


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


def test_a_script_that_ends_by_itself_leaves_what_there_was(tmp_path):
    trial = run(tmp_path, MODEL + "train(40)", "A" * 500, window_s=1e-9)
    assert 0 < len(trial.windows) < 500
    assert trial.exit_code == 0


def test_a_script_without_steps_has_its_whole_time(tmp_path):
    trial = run(tmp_path, "import torch, time; time.sleep(0.2)")
    assert (trial.windows, trial.rule, trial.exit_code) == ((), "", 0)
    assert trial.wall_ns >= 200e6
    assert not list((tmp_path / "trial/raw").glob("rank*"))


def test_a_run_is_bounded(tmp_path):
    trial = run(tmp_path, "import torch, time; time.sleep(600)", most_s=0.5)
    assert trial.exit_code is None
    assert trial.problems == ("It was ended after 0.5 s, its longest time.",)


def test_a_crash_of_the_workload_tells_its_last_words_and_keeps_what_was_measured(tmp_path):
    script = MODEL + "train(40)\nraise ValueError('out of luck')"
    with pytest.raises(TrialError, match=r"A: .*exit code 1.*\n(.*\n)*.*out of luck") as caught:
        run(tmp_path, script, "A" * 500, window_s=1e-9)
    assert caught.value.trial.windows
    assert caught.value.trial.exit_code == 1


def test_a_crash_under_the_patch_is_that_of_b(tmp_path):
    with pytest.raises(TrialError, match=r"^B: (.*\n)*.*only in B"):
        run(tmp_path, MODEL + "train(10 ** 9)", "AB", patch="failing")


def test_a_death_by_a_signal_is_named(tmp_path):
    script = MODEL + "train(9)\nimport os; os.kill(os.getpid(), 11)"
    with pytest.raises(TrialError, match="SIGSEGV"):
        run(tmp_path, script)


def test_a_patch_that_fails_is_the_patchs_fault(tmp_path):
    with pytest.raises(TrialError, match=r"refusing cannot be entered(.*\n)*.*no such kernel"):
        run(tmp_path, MODEL + "train(10 ** 9)", "AB", patch="refusing")


def test_steps_are_heard_under_a_patch_that_replaces_the_optimizers_own(tmp_path):
    trial = run(tmp_path, MODEL + "train(10 ** 9)", "ABA", patch="Sgd")
    assert [window.arm for window in trial.windows] == ["A", "B", "A"]


def test_a_step_around_the_optimizers_own_is_one_step(tmp_path):
    trial = run(tmp_path, MODEL + "train(10 ** 9)", "ABBA", patch="slow_step")
    of_b = [window for window in trial.windows if window.arm == "B"]
    assert all(min(window.steps_ns) > 20e6 for window in of_b)


def test_generations_are_heard_under_a_patch_that_replaces_generate(tmp_path):
    trial = run(tmp_path, MODEL + WRITER, "ABA", patch="generating")
    assert [window.arm for window in trial.windows] == ["A", "B", "A"]


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
    with pytest.raises(TrialError, match="replaces what steps are counted by"):
        run(tmp_path, script, "AB", patch="stepping")


COMPILED = """
compiled = torch.compile(model, backend="eager")
with torch.no_grad():
    while True:
        compiled(torch.ones(2, 4))
"""


def test_a_patch_that_compiled_code_does_not_see_is_told(tmp_path):
    trial = run(tmp_path, MODEL + COMPILED, "AB", patch="slow")
    assert "compiled nothing anew inside it" in trial.problems[0]
    assert [window.arm for window in trial.windows] == ["A", "B"]


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


def test_a_folder_that_holds_a_trial_is_refused(tmp_path):
    run(tmp_path, "")
    with pytest.raises(LaunchError, match="holds a trial already"):
        run(tmp_path, "")


def test_a_command_that_is_not_there_is_a_launch_error(tmp_path):
    with pytest.raises(LaunchError, match="cannot be started"):
        run(tmp_path, "", command=("/nonexistent/program",))


def test_the_variants_environment_reaches_the_workload(tmp_path, monkeypatch):
    monkeypatch.setenv("KPROF_TRIGGER", "/of/another/run")
    code = "import os; print(os.environ['COLOUR'], 'KPROF_TRIGGER' in os.environ)"
    variant = Variant("B", (sys.executable, "-c", code), {"COLOUR": "green"})
    trial = run_trial(variant, Schedule("B"), tmp_path / "trial", is_enough=never)
    assert (trial.label, trial.log.read_text()) == ("B", "green False\n")


LEAVES_CHILDREN = """
import os, subprocess, sys
code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
ignoring = subprocess.Popen([sys.executable, "-c", code])
apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(ignoring.pid, apart.pid, flush=True)
"""


def test_all_that_the_workload_started_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("kprof.collect.processes.PATIENCE_S", 0.5)
    trial = run(tmp_path, LEAVES_CHILDREN + MODEL + "train(10 ** 9)")
    pids = trial.log.read_text().split()
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists() and not is_zombie(pid)]


def is_zombie(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_what_the_workload_left_behind_ends_as_well(tmp_path):
    trial = run(tmp_path, LEAVES_CHILDREN.replace("signal.signal(15, signal.SIG_IGN); ", ""))
    pids = trial.log.read_text().split()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists() and not is_zombie(pid)]


def test_ctrl_c_reaches_the_workload_and_the_caller(tmp_path):
    script = (
        MODEL
        + """
try:
    train(10 ** 9)
except KeyboardInterrupt:
    print("interrupted")
"""
    )
    log = tmp_path / "trial/output.log"

    def interrupt(windows):
        os.kill(os.getpid(), signal.SIGINT)
        return False

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, script, "A" * 500, interrupt)
    assert log.read_text() == "interrupted\n"


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
    loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="spawn")
    while True:
        for batch in loader:
            train(1)
"""
    )
    # Every epoch starts a worker, which imports torch.
    trial = run(tmp_path, script, most_s=240)
    assert len(list((tmp_path / "trial/raw").glob("rank*"))) == 1
    assert (len(trial.windows), trial.problems) == (2, ())


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
    assert "was forked after torch had been imported" in trial.problems[0]


RANKS = """
import torch, torch.distributed
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_ranks_change_arms_at_the_same_steps(tmp_path):
    module = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = (sys.executable, *module, str(tmp_path / "script.py"))
    trial = run(tmp_path, RANKS, "ABBA", command=command, patch="slow")
    first, second = (turns_in(path) for path in sorted(trial.log.parent.glob("raw/rank*")))
    assert [window.arm for window in trial.windows] == list("ABBA")
    # Rank 0 has told the end by then; the other may not have come to it.
    assert second == first[: len(second)]
    assert len(second) >= 3
    assert trial.problems == ("2 ranks took part; the windows are those of rank 0.",)


def turns_in(part):
    lines = [json.loads(line) for line in (part / "windows.jsonl").read_text().splitlines()]
    return [(line["arm"], line["first_step"]) for line in lines if line["kind"] == "window"]
