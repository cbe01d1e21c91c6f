"""Timed windows of the workload's steps without a profiler, with variants switched between them.

`start` puts it in the recorder's place. The blocks of a schedule are the same in every rank.
Variant B is a context manager of the user's. Each process writes a file with a line for every timed
window.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from .capture import is_capturing_a_graph, synchronize, used_devices
from .compiler import keep_from_compiler, num_compiled
from .ending import on_fork
from .hooks import Hooks, listen_to_engines
from .native import get_ident, monotonic, sleep
from .quiet import hide_from_tracebacks
from .ranks import local_rank, rank, started_by, world_size
from .recorder import MOST_STEPS, DeviceClock, Follower, now
from .schedule import SHEET, Block, Schedule, blocks_of
from .seeds import start_from
from .settings import Settings
from .softly import softly
from .step_counter import REPLAY, Rule, Source


def start(settings: Settings) -> TrialSession:
    """Return the one timer of this process, made if there was none."""
    global session
    if session is None:
        session = TrialSession(settings)
    return session


FORKED = (
    "A process that was forked after torch had been imported trained without being timed. Start "
    "it with the method spawn."
)


class TrialSession:
    """The timer of this process with all that belongs to it; nothing is recorded here."""

    is_following = True

    def __init__(self, settings: Settings) -> None:
        assert settings.schedule is not None
        schedule = Schedule.read(settings.schedule)
        self._seed = schedule.seed
        self.recorder = WindowTimer(settings, schedule)
        self.hooks = Hooks(self.recorder)

    def follow_the_process(self) -> None:
        """Follow the schedule from here to the process's end."""
        if self._seed is not None:
            start_from(self._seed)
        self.hooks.install()
        keep_from_compiler(__package__)
        hide_from_tracebacks()
        on_fork(in_child=self.in_forked_child)
        self.recorder.on_activity = self.begin
        self.recorder.on_turn = self.hooks.listen_again
        atexit.register(self.recorder.end)

    def begin(self) -> None:
        """Look at where the workload has begun its work; a loader's worker has none of its own."""
        if torch.utils.data.get_worker_info() is not None:
            self.recorder.abandon()
            return
        listen_to_engines(self.hooks)

    def in_forked_child(self) -> None:
        """Time nothing of a forked child, and say so where it trains."""
        self.recorder.abandon()
        self.hooks.on_step = self.say_forked

    def say_forked(self, source: Source) -> None:
        """Warn that a forked child trains a model and is not timed."""
        self.hooks.on_step = lambda source: None
        with contextlib.suppress(OSError):
            Sheet(self.recorder.settings.raw).write("problem", text=FORKED)

    def block_begins(self) -> None:
        """Let a block that the workload would have recorded run as it is."""

    def block_ends(self) -> None:
        """Do nothing: nothing was recorded."""


# Calls without the beginning or end of a step: accumulated gradients or a draft's tokens are fewer.
MOST_UNHEARD = 20_000
UNHEARD = (
    "replaces what steps are counted by (an optimizer's step, or a model's generate), so none was "
    'seen inside it. Name the steps in the script: kprof.range("step").'
)

NOT_COMPILED_ANEW = (
    "torch.compile had compiled a part of the workload before the patch first held, and compiled "
    "nothing anew inside it: what the patch changes in that part has no effect. Let the patch call "
    "torch.compiler.reset() where it is entered and left, or compare processes."
)


class WindowTimer(Follower):
    """Follows the steps of this process, and times windows of them as the schedule says."""

    running = None
    is_capturing = False

    def __init__(self, settings: Settings, schedule: Schedule) -> None:
        super().__init__()
        self.settings = settings
        self.is_counting = True
        self.on_activity: Callable[[], None] | None = None
        self.on_turn: Callable[[], None] = lambda: None
        self._schedule = schedule
        self._patch = Patch(schedule)
        self._sheet = Sheet(settings.raw)
        self._turns: Turns | None = None
        self._open_step: int | None = None
        self._who: tuple[Rule | None, object] = (None, None)
        self._what: tuple[Rule | None, str] = (None, "")
        self._has_windows = False
        self._block: Block | None = None
        self._block_from = 0
        self._watch: Stopwatch | None = None
        self._is_away = False
        self._num_unheard = 0
        self._num_compiled: int | None = None

    @softly
    def cuda_is_ready(self) -> None:
        """Do nothing: whether there is CUDA is asked when it matters."""

    def check_bounds(self) -> None:
        """Do nothing: nothing is recorded that could grow."""

    def activity(self) -> None:
        """Note that there is work: the first time, look for models."""
        if self.on_activity is not None:
            self._begins_to_work(self.on_activity)

    @softly
    def end(self) -> None:
        """Let arm A hold, where the process ends."""
        try:
            self._patch.leave()
        except PatchError as error:
            self._blame(error)

    def give_up(self, reason: str) -> None:
        """Time nothing more; the workload goes on in arm A, if that can be."""
        is_told = not self.is_broken
        self.abandon()
        with contextlib.suppress(PatchError):
            self._patch.leave()
        if is_told and reason:
            with contextlib.suppress(OSError):
                self._sheet.write("problem", text=reason)

    def abandon(self) -> None:
        """Listen no more."""
        self.is_broken = True
        self.is_counting = False
        self.on_change()

    @softly
    def _begins_to_work(self, look: Callable[[], None]) -> None:
        self.on_activity = None
        look()

    def _look_at(self, source: Source) -> None:
        """Let the counter follow one that is just like its leader, should that be gone."""
        leader = self.counter.leader
        if source.key != leader.key and source.name == leader.name:
            self.counter.is_settled = False

    def _follow_counter(self) -> None:
        counter = self.counter
        under_way = counter.index if counter.is_under_way else None
        if under_way == self._open_step:
            self._doubt_patch()
            return
        if self._open_step is not None and self._watch is not None:
            self._watch.step_ends(self._open_step)
        self._open_step = under_way
        self._num_unheard = 0
        if under_way is None:
            return
        try:
            self._step_begins()
        except PatchError as error:
            self._blame(error)
            return
        if self._watch is not None:
            self._watch.step_begins(under_way)

    def _doubt_patch(self) -> None:
        """Give up where work goes on inside the patch, but none of it begins or ends a step."""
        self._num_unheard += 1
        if self._num_unheard > MOST_UNHEARD and self._patch.is_entered:
            self._blame(PatchError(f"{self._schedule.patch} {UNHEARD}"))

    def _blame(self, error: PatchError) -> None:
        self._sheet.write("problem", text=str(error), is_of_patch=True)
        self.abandon()

    def _step_begins(self) -> None:
        if not self._is_of_interest():
            return
        if self._block is None:
            self._begin(self._turns_of_process().begin())
        num_done = self.counter.num_counted - self._block_from
        if self._watch is not None and num_done >= self._block_steps and self._can_turn():
            self._finish(self._watch)
            num_done = 0
        block = self._block
        if self._watch is None and block is not None and num_done >= block.settle_steps:
            self._measure(block)

    @property
    def _block_steps(self) -> int:
        return self._block.num_steps if self._block is not None else 0

    def _measure(self, block: Block) -> None:
        if is_capturing_a_graph():
            return
        self._block_from = self.counter.num_counted
        self._has_windows |= block.is_window
        self.counter.is_settled |= block.is_window
        self._watch = Stopwatch(block.num_steps, self.counter.num_counted)

    def _finish(self, watch: Stopwatch) -> None:
        assert self._block is not None
        assert self._turns is not None
        told = watch.stop(self.counter.num_counted - self._block_from)
        if self._patch.is_entered and self._num_compiled:
            if num_compiled() == self._num_compiled:
                self._sheet.write("caveat", text=NOT_COMPILED_ANEW)
            self._num_compiled = 0
        kind = "window" if self._block.is_window else "warm-up"
        self._sheet.write(kind, arm=self._block.arm, is_unsteady=self._block.is_unsteady, **told)
        self._begin(self._turns.after(told["time_ns"]))

    def _begin(self, block: Block | None) -> None:
        """Start the arm of `block`; after the last one no listener is needed."""
        self._watch = None
        before, self._block = self._block, block
        if block is None:
            self._patch.leave()
            self._sheet.write("end", time_ns=now())
            self.abandon()
            return
        self._block_from = self.counter.num_counted
        if before is None or before.arm != block.arm:
            # Before it happens: what fails then fails in that arm.
            self._sheet.write("turn", arm=block.arm, time_ns=now())
            if self._num_compiled is None and block.arm == "B":
                self._num_compiled = num_compiled()
            self._patch.turn(block.arm)
            self.on_turn()

    def _can_turn(self) -> bool:
        """Whether the GPU may be waited for, and the patch left."""
        return self._patch.can_turn_here and not is_capturing_a_graph()

    def _is_of_interest(self) -> bool:
        """Whether the step that begins is one of those that are timed.

        Until there are windows, whatever the counter takes for a step is. Then calls between
        optimizer steps are an evaluation, which is waited for, and an optimizer or model just like
        the one before is its successor; all else begins the schedule anew.
        """
        counter = self.counter
        who = (counter.rule, counter.leader.key)
        if who == self._who and not self._is_away:
            return counter.rule is not None
        is_alike = (counter.rule, counter.leader.name) == self._what
        # A window under way is lost: it would hold something else as well.
        self._watch = None
        if not is_alike and self._is_evaluation():
            self._is_away = True
            return False
        if self._has_windows and is_alike:
            self._is_away = False
            self._block_from = counter.num_counted
            counter.is_settled = True
        else:
            self._restart()
        self._who, self._what = who, (counter.rule, counter.leader.name)
        return True

    def _is_evaluation(self) -> bool:
        counter = self.counter
        return self._has_windows and counter.rule is Rule.CALL and counter.leader.key != REPLAY

    def _restart(self) -> None:
        self._patch.leave()
        self._block = None
        self._has_windows = self._is_away = False
        self.counter.is_settled = False
        self._sheet.write("begin", **describe_process(self.counter.describe()))

    def _turns_of_process(self) -> Turns:
        if self._turns is None:
            self._turns = turns_of(self._schedule, self.settings.raw, rank(), world_size())
        return self._turns


class Sheet:
    """Where a process writes what it timed: a line for everything, there at once.

    Nothing is written before the first step: a process without steps leaves nothing.
    """

    def __init__(self, raw: Path) -> None:
        self._raw = raw
        self._path: Path | None = None

    def write(self, kind: str, **told: Any) -> None:  # noqa: ANN401 - any JSON value
        """Write a line of this kind."""
        if self._path is None:
            folder = self._raw / f"rank{rank()}-pid{os.getpid()}"
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / SHEET
        # Opened for every line, so that a forked child has no part in it.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **told}) + "\n")


def describe_process(rule: str) -> dict[str, Any]:
    """Return what there is to know about this process, which counts steps by this rule."""
    gpus = _gpus()
    return {
        "schema": 1,
        "pid": os.getpid(),
        "started_by": started_by(),
        "host": platform.node(),
        "rank": rank(),
        "world_size": world_size(),
        "local_rank": local_rank(),
        "rule": rule,
        "torch": torch.__version__,
        "device_name": gpus[0]["name"] if gpus else None,
        "gpus": gpus,
        "time_ns": now(),
    }


def _gpus() -> list[dict[str, Any]]:
    """Return the GPUs that this process uses, the one first that it uses now."""
    if not torch.cuda.is_initialized():
        return []
    current = torch.cuda.current_device()
    numbers = [current, *(device for device in used_devices() if device != current)]
    found = [(number, torch.cuda.get_device_properties(number)) for number in numbers]
    # torch tells the UUID from 2.5 on.
    return [
        {"number": number, "name": gpu.name, "uuid": str(getattr(gpu, "uuid", ""))}
        for number, gpu in found
    ]


class PatchError(Exception):
    """The user's patch cannot be loaded, entered or left; the text shows where it failed."""


class Patch:
    """The context of arm B; arm A runs outside of it. Without a patch both are the same."""

    def __init__(self, schedule: Schedule) -> None:
        self._name = schedule.patch
        self._arguments = schedule.patch_arguments
        self._entered: AbstractContextManager[object] | None = None
        self._thread = 0

    @property
    def is_entered(self) -> bool:
        """Whether arm B holds."""
        return self._entered is not None

    @property
    def can_turn_here(self) -> bool:
        """Whether this thread is the one that has to leave what it entered, if any has."""
        return self._entered is None or get_ident() == self._thread

    def turn(self, arm: str) -> None:
        """Let `arm` hold from here on.

        Raises:
            PatchError: the patch failed.
        """
        if self._name is None or (arm == "B") == (self._entered is not None):
            return
        try:
            if arm == "B":
                manager = _load(self._name)(*self._arguments)
                manager.__enter__()
                self._entered, self._thread = manager, get_ident()
            elif self._entered is not None:
                entered, self._entered = self._entered, None
                entered.__exit__(None, None, None)
        except Exception as error:  # Any exception of the user's code.
            doing = "entered" if arm == "B" else "left"
            shown = "".join(traceback.format_exception(error)).rstrip()
            raise PatchError(f"{self._name} cannot be {doing}.\n{shown}") from error

    def leave(self) -> None:
        """Let arm A hold from now on."""
        self.turn("A")


def _load(name: str) -> Callable[..., AbstractContextManager[object]]:
    place, _, attribute = name.rpartition(":")
    module = _module_in(place) if place.endswith(".py") else importlib.import_module(place)
    made_by: Callable[..., AbstractContextManager[object]] = attrgetter(attribute)(module)
    return made_by


def _module_in(path: str) -> ModuleType:
    """Import a file once, by a name that takes no other module's place."""
    name = "kprof_patch"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Stopwatch:
    """Times a block, and steps in it: on the GPU where one is used, else on the host."""

    def __init__(self, num_steps: int, first_step: int) -> None:
        synchronize()
        self.first_step = first_step
        self._every = -(-num_steps // MOST_STEPS)
        self._device = DeviceClock()
        self._host: list[int] = []
        self._began_ns = 0
        for device in used_devices():
            torch.cuda.reset_peak_memory_stats(device)
        self.start_ns = now()

    def step_begins(self, index: int) -> None:
        """Note the beginning of a step."""
        if index % self._every == 0:
            self._device.begin(index)
            self._began_ns = now()

    def step_ends(self, index: int) -> None:
        """Note the end of a step."""
        if index % self._every == 0 and self._began_ns:
            self._host.append(now() - self._began_ns)
            self._device.end(index)

    def stop(self, num_steps: int) -> dict[str, Any]:
        """Return what there is to say, now that the GPU has done all."""
        synchronize()
        end_ns = now()
        is_on_device = torch.cuda.is_initialized()
        steps_ns = list(self._device.durations_ns().values()) if is_on_device else self._host
        peaks = [torch.cuda.max_memory_allocated(device) for device in used_devices()]
        return {
            "first_step": self.first_step,
            "num_steps": num_steps,
            "start_ns": self.start_ns,
            "end_ns": end_ns,
            "time_ns": (end_ns - self.start_ns) / num_steps,
            "steps_ns": steps_ns,
            "steps_clock": "device" if is_on_device else "host",
            "peak_memory_bytes": sum(peaks) if peaks else None,
        }


FILE = "turns.jsonl"
PATIENCE_S = 60.0
LOOK_S = 0.001


class Turns(Protocol):
    """Blocks, one after the other; None after the last."""

    def begin(self) -> Block | None:
        """Return the first block of the schedule, also when it begins anew."""

    def after(self, time_ns: float) -> Block | None:
        """Return the block that follows one whose steps took `time_ns` each."""


def turns_of(schedule: Schedule, raw: Path, rank: int, world_size: int) -> Turns:
    """Return the turns of a process: rank 0 decides, and others follow where arms change."""
    if len(schedule.arms) == 1:
        return OwnTurns(schedule) if rank == 0 else NoTurns()
    if rank == 0:
        return OwnTurns(schedule, raw / FILE if world_size > 1 else None)
    return FollowedTurns(raw / FILE)


class OwnTurns:
    """The turns of a process that decides itself, and tells others in a file if it has any."""

    def __init__(self, schedule: Schedule, told: Path | None = None) -> None:
        self._schedule = schedule
        self._told = told
        self._blocks: Generator[Block, float, None] = blocks_of(schedule)

    def begin(self) -> Block | None:
        """Return the first block of the schedule, also when it begins anew."""
        self._blocks = blocks_of(self._schedule)
        return self._tell(next(self._blocks, None))

    def after(self, time_ns: float) -> Block | None:
        """Return the block that follows one whose steps took `time_ns` each."""
        try:
            return self._tell(self._blocks.send(time_ns))
        except StopIteration:
            return self._tell(None)

    def _tell(self, block: Block | None) -> Block | None:
        if self._told is not None:
            with self._told.open("a") as file:
                file.write(json.dumps(block and asdict(block)) + "\n")
        return block


class NoTurns:
    """The turns of a rank whose own timing would only disturb that of rank 0."""

    def begin(self) -> Block | None:
        """Return that there is nothing to time."""
        return None

    def after(self, time_ns: float) -> Block | None:
        """Return that there is nothing to time."""
        return None


class FollowedTurns:
    """The turns that rank 0 has decided: who comes to the same step first waits for it.

    Rank 0 needs nothing of the others for that step any more: all have begun it.
    """

    def __init__(self, told: Path) -> None:
        self._told = told
        self._num_followed = 0

    def begin(self) -> Block | None:
        """Return the first block of the schedule, also when it begins anew."""
        return self._next()

    def after(self, time_ns: float) -> Block | None:
        """Return the block that follows, independent of this rank's own steps."""
        return self._next()

    def _next(self) -> Block | None:
        end = monotonic() + PATIENCE_S
        while monotonic() < end:
            lines = self._told.read_text().splitlines(keepends=True) if self._told.exists() else []
            if len(lines) > self._num_followed and lines[self._num_followed].endswith("\n"):
                block = json.loads(lines[self._num_followed])
                self._num_followed += 1
                return Block(**block) if block else None
            sleep(LOOK_S)
        raise TimeoutError(f"rank 0 did not come to the same step within {PATIENCE_S:.0f} s")


session: TrialSession | None = None
