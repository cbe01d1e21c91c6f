"""The steps of a workload: their rule, chosen while it runs, and their times.

Training counts the steps of the optimizer with most parameters; inference the outermost calls of
the model with most parameters (or of its `generate`, or replays of a CUDA graph); a range that the
user named "step" wins over both. Nothing here knows torch: callers say what they saw, and when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum


class Rule(Enum):
    """The event that delimits a step."""

    OPTIMIZER = "optimizer"
    CALL = "call"
    RANGE = "range"


# Calls of one model in training mode before any backward pass: after so many it is inference.
CALLS_WITHOUT_BACKWARD = 3
# Calls in training mode with backward passes, but without any torch optimizer.
CALLS_WITHOUT_OPTIMIZER = 32
# Calls outside training since the last optimizer step: after so many the training is over.
CALLS_AFTER_TRAINING = 20
# Replays of a CUDA graph tell it sooner: the optimizer's steps were its warm-up.
REPLAYS_AFTER_TRAINING = 3
REPLAY = "replay of a CUDA graph"
# A leader that is none of so many calls, or optimizer steps, in a row has had its time.
NUM_RECENT = 8
LONGEST_LOG = 1_000
# Calls that are kept while it is open whether they belong to training; more are rare.
MOST_UNDECIDED = 256


@dataclass(frozen=True)
class Source:
    """The owner of a step: an optimizer, a model, `generate`, or graphs; `size` ranks them."""

    key: Hashable
    name: str
    size: int = 0


@dataclass
class Call:
    """An outermost call of which it is not known yet whether it is a step; times in ns."""

    source: Source
    start_ns: int
    end_ns: int | None = None


@dataclass(frozen=True)
class Step:
    """One completed step; times in ns since 1970."""

    index: int
    start_ns: int
    end_ns: int


class StepCounter:
    """Turns what the workload does into steps.

    `index` numbers the step under way, from 0, and never goes back, whatever the rule turns out to
    be; `num_counted` counts the completed steps of the rule and leader that hold now. Once
    `is_settled`, the recorded steps are known: only training may still replace calls.
    """

    def __init__(self) -> None:
        self.rule: Rule | None = None
        self.leader = Source(None, "")
        self.index = 0
        self.num_counted = 0
        self.is_settled = False
        self._start_ns: int | None = None
        self._first: list[Step] = []
        self._kept: list[Step] = []
        self._last: deque[Step] = deque(maxlen=LONGEST_LOG)
        self._undecided: list[Call] = []
        self.last_completed: int | None = None
        """Index of the last step that was counted from its beginning to its end."""
        self._counted_before: dict[Hashable, int] = {}
        self._recent_calls: deque[Hashable] = deque(maxlen=NUM_RECENT)
        self._recent_optimizers: deque[Hashable] = deque(maxlen=NUM_RECENT)
        self._num_calls = 0
        self._is_backward_seen = False
        self._patience = 1

    @property
    def steps(self) -> list[Step]:
        """The first, the kept and the last completed steps of the rule that holds now."""
        known = {step.index: step for step in (*self._first, *self._kept, *self._last)}
        return [known[index] for index in sorted(known)]

    @property
    def has_trained(self) -> bool:
        """Whether an optimizer has stepped."""
        return bool(self._recent_optimizers)

    def keep_last(self) -> None:
        """Keep the step that was completed last, however many follow."""
        self._kept.append((self._last or self._first)[-1])

    @property
    def is_under_way(self) -> bool:
        """Whether a step has begun and not yet ended."""
        return self._start_ns is not None

    def backward(self) -> None:
        """Note a backward pass: calls in training mode are training indeed."""
        self._is_backward_seen = True

    def optimizer_ends(self, source: Source, now_ns: int) -> None:
        """Note the end of an optimizer's step."""
        self._num_calls = 0
        self._recent_optimizers.append(source.key)
        if self.rule is Rule.RANGE:
            return
        if self.rule is Rule.CALL:
            # Calls alternate with optimizer steps here: do not take them for inference again soon.
            self._patience = 64
        if self.rule is not Rule.OPTIMIZER:
            self._follow(Rule.OPTIMIZER, source)
        elif source.key != self.leader.key:
            if not self._is_new_leader(source, self._recent_optimizers):
                return
            self._follow(Rule.OPTIMIZER, source)
        if self.is_under_way:
            self._end(now_ns)
        self._start_ns = now_ns

    def call_begins(self, source: Source, now_ns: int, *, is_training: bool) -> None:
        """Note the beginning of an outermost call of a model."""
        self._recent_calls.append(source.key)
        if self.rule is Rule.RANGE:
            return
        if self.rule is not Rule.CALL and self._is_training_still(source, is_training):
            if not self.is_under_way:
                self._start_ns = now_ns
            if self.rule is None and len(self._undecided) < MOST_UNDECIDED:
                self._undecided.append(Call(source, now_ns))
            return
        if self.rule is not Rule.CALL or self._is_new_leader(source, self._recent_calls):
            self._follow(Rule.CALL, source)
        if source.key == self.leader.key:
            self._start_ns = now_ns

    def call_ends(self, source: Source, now_ns: int) -> None:
        """Note the end of an outermost call of a model."""
        if self.rule is Rule.CALL and source.key == self.leader.key and self.is_under_way:
            self._end(now_ns)
        for call in self._undecided:
            if call.source.key == source.key and call.end_ns is None:
                call.end_ns = now_ns

    def conclude(self) -> None:
        """Take calls for steps that were left open, because nothing more is to come."""
        if self.rule is None and self._undecided:
            self._follow(Rule.CALL, max((c.source for c in self._undecided), key=lambda s: s.size))

    def range_begins(self, now_ns: int) -> None:
        """Note the beginning of a range named "step"; it begins a step of the workload."""
        if self.rule is not Rule.RANGE:
            if self.is_settled:
                return
            self._follow(Rule.RANGE, Source("range", "step"))
        self._start_ns = now_ns

    def range_ends(self, now_ns: int) -> None:
        """Note the end of a range named "step"."""
        if self.rule is Rule.RANGE and self.is_under_way:
            self._end(now_ns)

    def counting_anew(self) -> StepCounter:
        """Count from 0 by the rule and leader that hold now; a step under way counts no more."""
        self.num_counted = 0
        self.is_settled = False
        self._counted_before.clear()
        self._first.clear()
        self._kept.clear()
        self._last.clear()
        if self.is_under_way:
            self.index += 1
            self._start_ns = None
        return self

    def rebase(self, now_ns: int) -> None:
        """Let the step under way begin now."""
        if self.is_under_way:
            self._start_ns = now_ns

    def describe(self) -> str:
        """Return the rule as a sentence for the report."""
        if self.rule is Rule.OPTIMIZER:
            return (
                "Training: a step lasts from the end of one optimizer step to the end of the next "
                f"({self.leader.name})."
            )
        if self.rule is Rule.CALL:
            is_training = self._is_backward_seen and not self._recent_optimizers
            what = "Training without an optimizer of torch's" if is_training else "Inference"
            return f"{what}: a step is one {self.leader.name}."
        if self.rule is Rule.RANGE:
            return 'Named by the user: a step is one range called "step".'
        return "No step was seen: neither an optimizer step nor an outermost call of a model."

    def _is_training_still(self, source: Source, is_training: bool) -> bool:
        """Whether this outermost call is to be taken as a part of training."""
        self._num_calls += 1
        if self.rule is Rule.OPTIMIZER:
            if is_training:
                self._num_calls = 0
            most = REPLAYS_AFTER_TRAINING if source.key == REPLAY else CALLS_AFTER_TRAINING
            return self._num_calls < most * self._patience
        if self._is_backward_seen:
            return is_training and self._num_calls <= CALLS_WITHOUT_OPTIMIZER
        return is_training and self._recent_calls.count(source.key) <= CALLS_WITHOUT_BACKWARD

    def _is_new_leader(self, source: Source, recent: deque[Hashable]) -> bool:
        if source.key == self.leader.key or self.is_settled:
            return False
        is_leader_gone = len(recent) == NUM_RECENT and self.leader.key not in recent
        return source.size > self.leader.size or is_leader_gone

    def _follow(self, rule: Rule, source: Source) -> None:
        """Count by another rule or leader, going on from where it was left before."""
        self._counted_before[self.leader.key] = self.num_counted
        self.num_counted = self._counted_before.get(source.key, 0)
        self._first.clear()
        self._kept.clear()
        self._last.clear()
        if self.is_under_way and (rule is not Rule.OPTIMIZER or self.rule is rule):
            # A step of another owner has no end now; its number is not used again.
            self.index += 1
            self._start_ns = None
        if rule is Rule.CALL:
            self._count_undecided(source)
        self._undecided.clear()
        self.rule, self.leader = rule, source
        self._num_calls = 0

    def _count_undecided(self, leader: Source) -> None:
        """Count the calls before it was known that calls are steps: nothing else can they be."""
        ended = [call for call in self._undecided if call.end_ns is not None]
        for call in ended:
            key = call.source.key
            self._counted_before[key] = self._counted_before.get(key, 0) + 1
        own = [call for call in ended if call.source.key == leader.key]
        self.num_counted += len(own)
        self._first += [Step(i, c.start_ns, c.end_ns or c.start_ns) for i, c in enumerate(own)]
        self.index = max(self.index, len(own))

    def _end(self, now_ns: int) -> None:
        assert self._start_ns is not None
        step = Step(self.index, self._start_ns, now_ns)
        (self._first if len(self._first) < LONGEST_LOG else self._last).append(step)
        self._start_ns = None
        self.last_completed = self.index
        self.index += 1
        self.num_counted += 1
