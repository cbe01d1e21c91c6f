"""What kprof's recorder calls its own ranges, in whoever's trace they are."""

from __future__ import annotations

import re

# A step has a number of at most 18 digits, which an int64 holds; anything else is a name.
_STEP = re.compile(r"(?:kprof\.step|ProfilerStep)#([0-9]{1,18})")
_PART = re.compile(r"kprof\.(phase|module|capture|graph)#(.+)", re.DOTALL)


def mark_in(text: str) -> tuple[str, str] | None:
    """Return kind and name of a range that kprof's recorder made; None for others.

    A step of torch's own schedule counts too.
    """
    if step := _STEP.fullmatch(text):
        return "step", step[1]
    if part := _PART.fullmatch(text):
        return part[1], part[2]
    return None
