"""What a process of a trial does by itself: blocks, turns of the arms, windows of steps."""

import json
import sys
from types import SimpleNamespace

import pytest

from kprof.collect.recorder.kprof_recorder.schedule import Block, Schedule, blocks_of

MS = 1e6


def follow(schedule, took_ns, most=200):
    """Return the blocks that follow if a step of a block takes what `took_ns` says of it."""
    blocks = blocks_of(schedule)
    block, followed = next(blocks), []
    while len(followed) < most:
        followed.append(block)
        try:
            block = blocks.send(took_ns(block, len(followed)))
        except StopIteration:
            break
    return followed


def test_the_warm_up_of_slow_steps_is_what_was_asked_for():
    blocks = follow(Schedule("A", skip=5, window_s=0.25), lambda block, n: 500 * MS)
    assert blocks == [Block("A", 1, 2), Block("A", 0, 2), Block("A", 1, 2, is_window=True)]


def test_fast_steps_are_warmed_up_for_as_long_as_a_window_takes():
    blocks = follow(Schedule("A", skip=4, window_s=0.1), lambda block, n: 1 * MS)
    assert [block.num_steps for block in blocks] == [2, 2, 50, 50, 100]


def test_both_arms_are_warm_before_the_first_window():
    blocks = follow(Schedule("AB", skip=2, window_s=0.1), lambda block, n: 60 * MS)
    assert [(block.arm, block.is_window) for block in blocks] == [
        ("A", False),
        ("A", False),
        ("B", False),
        ("B", False),
        ("A", True),
        ("B", True),
    ]


def test_a_window_has_the_steps_that_the_faster_arm_needs():
    blocks = follow(
        Schedule("AB", skip=2, window_s=1.0),
        lambda block, n: (100 if block.arm == "B" else 500) * MS,
    )
    assert [block.num_steps for block in blocks if block.is_window] == [10, 10]


def test_a_window_has_at_least_two_steps():
    blocks = follow(Schedule("A", window_s=0.25, min_steps=2), lambda block, n: 9000 * MS)
    assert blocks[-1].num_steps == 2


def test_windows_wait_until_steps_get_no_faster():
    halving = [800, 400, 200, 100, 50, 50]
    blocks = follow(
        Schedule("A", skip=2, window_s=0.1), lambda block, n: halving[min(n, 6) - 1] * MS
    )
    assert [block.is_window for block in blocks] == [False] * 6 + [True]
    assert not blocks[-1].is_unsteady


def test_steps_that_never_settle_are_timed_in_the_end_and_marked():
    blocks = follow(Schedule("A", skip=2, window_s=0.1), lambda block, n: 1000 * MS * 0.5**n)
    assert blocks[-1].is_window
    assert blocks[-1].is_unsteady


def test_a_schedule_is_read_as_it_was_written(tmp_path):
    schedule = Schedule("ABBA", patch="kernels.py:swap", patch_arguments=("rmsnorm", "softmax"))
    schedule.write(tmp_path / "schedule.json")
    assert Schedule.read(tmp_path / "schedule.json") == schedule


pytest.importorskip("torch")

from kprof.collect.recorder.kprof_recorder import trial  # noqa: E402
from kprof.collect.recorder.kprof_recorder.settings import Settings  # noqa: E402
from kprof.collect.recorder.kprof_recorder.step_counter import REPLAY, Source  # noqa: E402
from kprof.collect.recorder.kprof_recorder.trial import Patch, PatchError  # noqa: E402

OPTIMIZER = Source("optimizer", "AdamW", 8)
MODEL = Source("model", "outermost call of Llama", 8)


class Clock:
    """A clock that only the workload moves, and a record of which arm held in each step."""

    def __init__(self, folder, monkeypatch, schedule):
        self.now_ns = 0
        monkeypatch.setattr(trial, "now", lambda: self.now_ns)
        self.folder = folder
        self.timer = trial.WindowTimer(Settings(folder), schedule)

    def train(self, num_steps, took_ns=10, source=OPTIMIZER):
        for _ in range(num_steps):
            self.now_ns += took_ns
            self.timer.optimizer_ends(source)

    def call(self, num_calls, took_ns=10, between_ns=0, source=MODEL):
        for _ in range(num_calls):
            self.timer.call_begins(source, is_training=False)
            self.now_ns += took_ns
            self.timer.call_ends(source)
            self.now_ns += between_ns

    def lines(self, kind):
        path = next(self.folder.glob("rank*/windows.jsonl"))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]


# Warm-up of a step: two blocks of one step each.
QUICK = {"skip": 2, "window_s": 1e-9, "min_steps": 3}


def test_a_window_is_timed_from_edge_to_edge(tmp_path, monkeypatch):
    clock = Clock(tmp_path, monkeypatch, Schedule("A", **QUICK))
    clock.train(20)
    window = clock.lines("window")[0]
    assert (window["num_steps"], window["end_ns"] - window["start_ns"]) == (3, 30)
    assert (window["time_ns"], window["steps_ns"], window["steps_clock"]) == (10, [10] * 3, "host")
    assert window["peak_memory_bytes"] is None


def test_time_between_calls_is_in_the_window_and_in_no_step(tmp_path, monkeypatch):
    clock = Clock(tmp_path, monkeypatch, Schedule("A", **QUICK))
    clock.call(20, took_ns=10, between_ns=5)
    window = clock.lines("window")[0]
    assert (window["time_ns"], window["steps_ns"]) == (15, [10, 10, 10])


def test_a_step_before_each_window_belongs_to_none(tmp_path, monkeypatch):
    clock = Clock(tmp_path, monkeypatch, Schedule("AA", **QUICK))
    clock.train(20)
    # Steps 0 and 1 are warm-up, 2 and 6 belong to none.
    assert [window["first_step"] for window in clock.lines("window")] == [3, 7]


def test_the_end_of_the_schedule_is_told_and_the_hooks_are_removed(tmp_path, monkeypatch):
    clock = Clock(tmp_path, monkeypatch, Schedule("A", **QUICK))
    clock.train(20)
    assert len(clock.lines("end")) == 1
    assert (clock.timer.is_counting, clock.timer.is_broken) == (False, True)


def test_a_window_that_an_evaluation_cuts_is_taken_again(tmp_path, monkeypatch):
    clock = Clock(tmp_path, monkeypatch, Schedule("AA", **QUICK))
    clock.train(9)
    clock.call(60, took_ns=1000)
    clock.train(10)
    # The second had begun at 7; step 8 follows the evaluation and belongs to none.
    assert [window["first_step"] for window in clock.lines("window")] == [3, 9]
    assert [window["time_ns"] for window in clock.lines("window")] == [10, 10]


def test_an_evaluation_before_the_training_begins_the_schedule_anew(tmp_path, monkeypatch):
    clock = Clock(tmp_path, monkeypatch, Schedule("AAA", **QUICK))
    clock.call(9)
    clock.train(30)
    kinds = ["optimizer" in line["rule"] for line in clock.lines("begin")]
    assert kinds == [False, True]
    assert len(clock.lines("window")) >= 3


def test_replays_of_graphs_after_eager_warm_up_begin_the_schedule_anew(tmp_path, monkeypatch):
    clock = Clock(tmp_path, monkeypatch, Schedule("AAA", **QUICK))
    clock.train(9)
    clock.call(30, source=Source(REPLAY, REPLAY))
    assert ["CUDA graph" in line["rule"] for line in clock.lines("begin")] == [False, True]


def test_what_a_step_is_does_not_change_amid_the_windows(tmp_path, monkeypatch):
    clock = Clock(tmp_path, monkeypatch, Schedule("AAA", **QUICK))
    clock.call(5)
    larger = Source("larger", "outermost call of a larger model", 99)
    for _ in range(20):
        clock.call(1, source=larger)
        clock.call(1)
    assert len(clock.lines("begin")) == 1
    assert len(clock.lines("window")) == 3


def test_an_optimizer_like_the_one_before_is_its_successor(tmp_path, monkeypatch):
    clock = Clock(tmp_path, monkeypatch, Schedule("AAA", **QUICK))
    clock.train(9)
    clock.train(20, source=Source("of the next fold", OPTIMIZER.name, 8))
    assert len(clock.lines("begin")) == 1
    assert [window["num_steps"] for window in clock.lines("window")] == [3, 3, 3]


def test_a_process_without_steps_leaves_nothing(tmp_path, monkeypatch):
    clock = Clock(tmp_path, monkeypatch, Schedule("A"))
    clock.timer.activity()
    clock.timer.end()
    assert not list(tmp_path.iterdir())


def test_of_many_steps_some_are_timed_evenly_spread(tmp_path, monkeypatch):
    clock = Clock(tmp_path, monkeypatch, Schedule("A", skip=2, window_s=1e-9, min_steps=600))
    clock.train(700)
    assert len(clock.lines("window")[0]["steps_ns"]) == 200


def test_nothing_is_waited_for_while_a_graph_is_captured(tmp_path, monkeypatch):
    clock = Clock(tmp_path, monkeypatch, Schedule("A", **QUICK))
    clock.train(6)
    monkeypatch.setattr(trial, "is_capturing_a_graph", lambda: True)
    clock.train(4)
    assert clock.lines("window") == []
    monkeypatch.setattr(trial, "is_capturing_a_graph", lambda: False)
    clock.train(1)
    # It has become longer, and says so.
    assert clock.lines("window")[0]["num_steps"] > 3


def test_no_window_begins_while_a_graph_is_captured(tmp_path, monkeypatch):
    clock = Clock(tmp_path, monkeypatch, Schedule("A", **QUICK))
    clock.train(3)
    monkeypatch.setattr(trial, "is_capturing_a_graph", lambda: True)
    clock.train(4)
    monkeypatch.setattr(trial, "is_capturing_a_graph", lambda: False)
    clock.train(10)
    assert clock.lines("window")[0]["first_step"] == 7
    assert clock.lines("window")[0]["num_steps"] == 3


def test_a_failure_of_the_timer_is_told_and_is_none_of_the_workload(tmp_path, monkeypatch):
    clock = Clock(tmp_path, monkeypatch, Schedule("A", **QUICK))
    clock.train(5)
    monkeypatch.setattr(trial, "is_capturing_a_graph", lambda: 1 / 0)
    clock.train(5)
    assert "ZeroDivisionError" in clock.lines("problem")[0]["text"]
    assert clock.timer.is_broken


class DeviceClockOf:
    """Events on a GPU, 7 ns apart."""

    def __init__(self):
        self.ended = []

    def begin(self, index):
        pass

    def end(self, index):
        self.ended.append(index)

    def durations_ns(self):
        return dict.fromkeys(self.ended, 7)


def test_a_window_on_a_gpu_lasts_from_idle_to_idle(tmp_path, monkeypatch):
    clock = Clock(tmp_path, monkeypatch, Schedule("A", **QUICK))

    def wait_for_gpu():
        clock.now_ns += 100

    monkeypatch.setattr(trial, "synchronize", wait_for_gpu)
    monkeypatch.setattr(trial, "used_devices", lambda: [0, 1])
    monkeypatch.setattr(trial, "DeviceClock", DeviceClockOf)
    monkeypatch.setattr(trial.torch.cuda, "is_initialized", lambda: True)
    reset = []
    monkeypatch.setattr(trial.torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(trial.torch.cuda, "max_memory_allocated", lambda device: 10 + device)
    monkeypatch.setattr(trial.torch.cuda, "current_device", lambda: 0)
    gpu = SimpleNamespace(name="H200")
    monkeypatch.setattr(trial.torch.cuda, "get_device_properties", lambda number: gpu)
    monkeypatch.setattr(trial, "is_capturing_a_graph", lambda: False)
    clock.train(20)
    window = clock.lines("window")[0]
    # Three steps of 10, and what the GPU had yet to do at the end, but not at the beginning.
    assert window["end_ns"] - window["start_ns"] == 130
    assert (window["steps_ns"], window["steps_clock"]) == ([7, 7, 7], "device")
    assert window["peak_memory_bytes"] == 21
    assert reset[-2:] == [0, 1]
    assert clock.lines("begin")[0]["device_name"] == "H200"


def patched(tmp_path, code, *arguments):
    path = tmp_path / "kernels.py"
    path.write_text("import contextlib\n" + code)
    return Patch(Schedule("AB", patch=f"{path}:swap", patch_arguments=arguments))


@pytest.fixture
def forgotten():
    """Let each test import its own patch."""
    yield
    sys.modules.pop("kprof_patch", None)


COUNTING = """
calls = []
@contextlib.contextmanager
def swap(*names):
    calls.append(("enter", *names))
    yield
    calls.append("leave")
"""


def test_a_patch_is_entered_for_b_and_left_for_a(tmp_path, forgotten):
    patch = patched(tmp_path, COUNTING, "rmsnorm")
    for arm in "AABBAB":
        patch.turn(arm)
    patch.leave()
    entered = ("enter", "rmsnorm")
    assert sys.modules["kprof_patch"].calls == [entered, "leave", entered, "leave"]


def test_after_the_schedule_the_workload_is_as_it_was(tmp_path, monkeypatch, forgotten):
    (tmp_path / "kernels.py").write_text("import contextlib" + COUNTING)
    schedule = Schedule("AB", patch=f"{tmp_path}/kernels.py:swap", **QUICK)
    clock = Clock(tmp_path, monkeypatch, schedule)
    clock.train(40)
    # Once in the warm-up, once for the window.
    assert sys.modules["kprof_patch"].calls == [("enter",), "leave"] * 2
    assert [line["arm"] for line in clock.lines("turn")] == ["A", "B", "A", "B"]


def test_what_a_patch_raises_is_shown_with_its_place(tmp_path, forgotten):
    patch = patched(tmp_path, "def swap():\n    raise KeyError('no such kernel')\n")
    with pytest.raises(PatchError, match=r"entered\.\n(.*\n)*KeyError: 'no such kernel'"):
        patch.turn("B")


def test_a_patch_that_cannot_be_left_says_so(tmp_path, forgotten):
    code = "@contextlib.contextmanager\ndef swap():\n    yield\n    raise ValueError('stuck')\n"
    patch = patched(tmp_path, code)
    patch.turn("B")
    with pytest.raises(PatchError, match=r"cannot be left\.\n(.*\n)*.*stuck"):
        patch.turn("A")


def test_a_patch_of_a_module_is_imported_by_name():
    patch = Patch(Schedule("AB", patch="contextlib:suppress"))
    patch.turn("B")
    assert patch.is_entered


def test_only_rank_0_times_where_no_arms_change(tmp_path):
    assert trial.turns_of(Schedule("AA"), tmp_path, 1, 2).begin() is None
    assert trial.turns_of(Schedule("AA"), tmp_path, 0, 2).begin() is not None


def test_ranks_follow_the_turns_of_rank_0(tmp_path):
    schedule = Schedule("AB", skip=2, window_s=0.1)
    first, second = (trial.turns_of(schedule, tmp_path, rank, 2) for rank in (0, 1))
    told = [first.begin(), first.after(60 * MS), first.after(60 * MS)]
    assert [second.begin(), second.after(1), second.after(1)] == told


def test_ranks_hear_of_the_end(tmp_path):
    schedule = Schedule("AB", skip=2, window_s=1e-9)
    first, second = (trial.turns_of(schedule, tmp_path, rank, 2) for rank in (0, 1))
    told = [first.begin()] + [first.after(10) for _ in range(6)]
    assert told[-1] is None
    assert [second.begin()] + [second.after(10) for _ in range(6)] == told


def test_a_rank_that_waits_for_no_other_rank_gives_up(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "PATIENCE_S", 0.01)
    follower = trial.turns_of(Schedule("AB"), tmp_path, 1, 2)
    with pytest.raises(TimeoutError, match="same step"):
        follower.begin()
