"""How often L5 errs where just the share is kept that it asks for: simulated, with a seed."""

from collections import Counter
from functools import cache

import numpy as np
import pytest

from kprof.kernels.correctness.model_levels import RECOVERY, check_task

NUM_SIMULATED = 4_000


@cache
def state_of(num_items, num_right, lost, won):
    """Return the state of L5 for these counts."""
    replaced = [True] * num_right + [False] * (num_items - num_right)
    new = [False] * lost + [True] * (num_right - lost + won)
    new += [False] * (num_items - len(new))
    return check_task(replaced, replaced, new).state


def states(num_items, accuracy, won, kept=RECOVERY):
    """Simulate tasks of which just this share of right answers is kept."""
    lost = 1 - kept + (1 - accuracy) * won / accuracy
    draws = np.random.default_rng(7)
    right = draws.binomial(num_items, accuracy, NUM_SIMULATED)
    counts = zip(
        right.tolist(),
        draws.binomial(right, lost).tolist(),
        draws.binomial(num_items - right, won).tolist(),
        strict=True,
    )
    return Counter(state_of(num_items, *one) for one in counts)


@pytest.mark.parametrize(
    ("num_items", "accuracy", "won"),
    [
        *((278, 1.0, 0.0), (300, 1.0, 0.0), (381, 1.0, 0.0), (600, 1.0, 0.0)),
        *((600, 0.5, 0.0), (600, 0.8, 0.01), (1500, 0.9, 0.02)),
    ],
)
def test_a_task_at_the_border_passes_in_a_fortieth_at_most(num_items, accuracy, won):
    found = states(num_items, accuracy, won)
    assert found["passed"] / NUM_SIMULATED <= 0.025
    # Where few items are lost the other end is less exact: up to 4.2 %.
    assert found["failed"] / NUM_SIMULATED <= 0.045


def test_a_task_that_is_kept_passes_and_one_that_is_not_fails():
    assert states(1500, 0.8, 0.001, kept=0.999)["passed"] > 0.9 * NUM_SIMULATED
    assert states(1500, 0.8, 0.001, kept=0.97)["failed"] > 0.9 * NUM_SIMULATED
