"""A confidence sequence: an interval for the shift that holds after every pair at once.

The order inside a pair is a fair coin, so a difference less the true shift is as likely + as -,
given all before it and its own size. A gambler who stakes on + with the right odds,
2 / (1 + exp(-2 bet x)), then has an expected gain of exactly 1 under any noise: the capital
is a martingale, and one that starts at 1 ever reaches 1/alpha with a chance of at most alpha
(Ville 1939). Shifts against which a gambler would have won so much are left out of the interval.

Among tests of symmetry this martingale dominates the self-normalised normal mixture of de la Peña
(Ramdas, Ruf, Larsson and Koolen 2020, arXiv 2009.03167; Vovk and Wang 2024, arXiv 2208.08925).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kprof.analyze.verdict.ranks import Floats

# In standard deviations of a difference, as is what it is clipped to: within 3 % of the fewest
# pairs among 24 choices (benchmarks/sequence_designs.py); two, for small effects and for large.
BETS_AT_40_PAIRS = (0.6, 1.2)
CLIP = 1.5
MAD_OF_NORMAL = 0.6745
NUM_HALVINGS = 80


def bets(max_pairs: int) -> tuple[float, ...]:
    """Return the stakes, smaller the more pairs are planned: a longer run seeks less."""
    smaller = (40 / max_pairs) ** 0.5
    return tuple(bet * smaller for bet in BETS_AT_40_PAIRS)


def scales(differences: Floats) -> Floats:
    """Return the spread of the differences *before* each, 0 for the first two.

    Known before the coin falls, so that it cannot favour a side: the median distance from the
    median, as a standard deviation.
    """
    found = np.zeros_like(differences)
    for i in range(2, differences.shape[-1]):
        earlier = differences[..., :i]
        away = np.abs(earlier - _median(earlier)[..., None])
        found[..., i] = _median(away) / MAD_OF_NORMAL
    return found


def _median(values: Floats) -> Floats:
    """Return the median of the last axis, as `np.median` without its checks of each call."""
    upper = values.shape[-1] // 2
    lower = upper if values.shape[-1] % 2 else upper - 1
    parted = np.partition(values, (lower, upper), axis=-1)
    middle: Floats = (parted[..., lower] + parted[..., upper]) / 2
    return middle


@dataclass(frozen=True)
class Course:
    """Differences in the order in which they came, with what was known before each."""

    differences: Floats
    scale: Floats
    stakes: tuple[float, ...]

    @classmethod
    def of(cls, differences: Floats, max_pairs: int) -> Course:
        """Return the course of a plan of so many pairs."""
        return cls(differences, scales(differences), bets(max_pairs))

    def mirrored(self) -> Course:
        """Return the course with A and B swapped."""
        return Course(-self.differences, self.scale, self.stakes)

    def evidence_above(self, shift: Floats | float) -> Floats:
        """Return after each pair the log of the most capital yet against "at most `shift`".

        It falls as `shift` rises, for every term does: what is left out is an end of the line.
        """
        away = self.differences - shift
        # Where nothing is known of the spread, a sign alone is worth the most that any is.
        size = np.sign(away) * CLIP
        # Beside a spread near 0 a difference may be beyond all numbers, and is clipped as well.
        with np.errstate(over="ignore"):
            np.divide(away, self.scale, out=size, where=self.scale > 0)
        clipped = np.clip(size, -CLIP, CLIP)
        gains = [np.log(2) - np.logaddexp(0.0, -2 * bet * clipped) for bet in self.stakes]
        capitals = [np.cumsum(gain, axis=-1) for gain in gains]
        together = np.logaddexp.reduce(capitals) - np.log(len(capitals))
        return np.asarray(np.maximum.accumulate(together, axis=-1))

    def evidence_below(self, shift: Floats | float) -> Floats:
        """Return the same against "at least `shift`"."""
        return self.mirrored().evidence_above(-shift)


def threshold(alpha: float) -> float:
    """Return the log capital at which a side is left out; each of the two has half of `alpha`."""
    return float(np.log(2 / alpha))


def interval(course: Course, alpha: float) -> tuple[float, float]:
    """Return the ends of the sequence after one comparison's pairs, infinite where none is yet.

    What was left out once stays out, so it is the intersection over all looks; low > high means
    that no one shift fits: it changed on the way.
    """
    return _lower_end(course, alpha), -_lower_end(course.mirrored(), alpha)


def _lower_end(course: Course, alpha: float) -> float:
    """Return the highest shift that is left out from below, by halving."""

    def is_left_out(shift: float) -> bool:
        return bool(course.evidence_above(shift)[-1] >= threshold(alpha))

    differences = course.differences
    spread = float(np.ptp(differences) + CLIP * course.scale.max()) or 1.0
    low, high = float(differences.min()) - spread, float(differences.max())
    if not is_left_out(low):
        return -np.inf
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_left_out(middle) else (low, middle)
    return low
