"""host_stalls: the GPU waits while the host does one long thing that launches nothing."""

from __future__ import annotations

from kprof.analyze.findings.claims import idle_places, in_words, percent, times_in_words
from kprof.analyze.findings.one_offs import SILENCE_NS
from kprof.analyze.findings.queries import count_steps, idle_of, per_step, share_of_whole, whole_of
from kprof.analyze.idle.causes import LAUNCH_BOUND
from kprof.findings import Finding, Fix
from kprof.trace import Trace

# A run of a few steps may hold one such pause by accident; a twentieth of the time is none.
LEAST_SHARE = 0.05


def check(trace: Trace) -> list[Finding]:
    """Find long silences of the host; many short ones are another rule's."""
    idle_rows, lost_ns = idle_of(trace, LAUNCH_BOUND, least_ns=SILENCE_NS)
    share = share_of_whole(trace, lost_ns)
    if share < LEAST_SHARE:
        return []
    longest_ns = int(trace.idle["duration_ns"].iloc[idle_rows].max())
    number = len(idle_rows) / count_steps(trace)
    silent = (
        f"The host launches nothing for {in_words(SILENCE_NS)} and more {times_in_words(number)} "
        f"in {whole_of(trace)}, at worst for {in_words(longest_ns)}"
    )
    if len(idle_rows) == 1:
        silent = f"The host launches nothing for {in_words(longest_ns)}, once in the recording"
    claim = (
        f"{silent}, and the GPU idles for {in_words(per_step(trace, lost_ns))} of "
        f"{whole_of(trace)} ({percent(share)} of it)"
    )
    return [
        Finding(
            rule="host_stalls",
            claim=claim,
            confidence="medium",
            effort="medium",
            idle_rows=tuple(idle_rows.tolist()),
            details=idle_places(trace, idle_rows),
            fix=Fix(idle_cause=LAUNCH_BOUND),
        )
    ]
