"""Times windows of the workload's steps, without any profiler, and changes arms between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from .capture import is_capturing_a_graph
from .compiler import num_compiled
from .follower import Follower
from .patch import Patch, PatchError
from .ranks import rank, world_size
from .recording import now
from .schedule import Block, Schedule
from .settings import Settings
from .sheet import Sheet, describe_process
from .softly import softly
from .steps import REPLAY, Rule, Source
from .stopwatch import Stopwatch
from .turns import Turns, turns_of

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
        """Note that there is work: the first time, somebody looks at what there is."""
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
        """Give the turn to the arm of `block`; after the last one nobody has to listen."""
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
