"""A GPU that refuses all further work in this process, because of what it was made to run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from kprof.kernels.correctness.levels import Level, not_run
from kprof.kernels.correctness.subject import Case, Function, Subject

# Errors after which CUDA answers every call with the same one, until the process ends. torch names
# device-side assertions in the advice below any error of CUDA.
STICKY = re.compile(
    "illegal memory access|misaligned address|illegal instruction|invalid program counter|"
    "invalid address space|hardware stack error|unspecified launch failure|"
    "device-side assert triggered|launch timed out"
)


class GpuBrokenError(Exception):
    """Nothing runs on the GPU any more; says whose call it was, and on what."""

    def __init__(self, is_new: bool, where: Case | str, error: Exception) -> None:
        self.is_new = is_new
        self.where = where
        whose = "the new code" if is_new else "the replaced code"
        said = STICKY.search(str(error))
        super().__init__(f"{whose} broke the GPU ({where}): {said[0] if said else error}")

    def level(self, name: str) -> Level:
        """Return what a level found: a fault of the new code, or nothing to compare it with."""
        if not self.is_new:
            return not_run(name, str(self))
        fix = "compute-sanitizer names the line"
        if isinstance(self.where, Case) and self.where.layout == "far":
            # The replaced code was called on dense rows alone: torch's GEMMs break here too.
            fix += "; if the replaced code breaks on such rows too, take far out of the layouts"
        return Level(name, "failed", f"{self}; {fix}")


def is_sticky(error: BaseException) -> bool:
    """Tell whether a GPU refuses all work after this error."""
    return isinstance(error, RuntimeError) and STICKY.search(str(error)) is not None


@contextmanager
def blaming(function: Function, subject: Subject, where: Case | str) -> Iterator[None]:
    """Wait for what `function` launches, and name it if it breaks the GPU.

    Raises:
        GpuBrokenError: it did.
    """
    import torch

    try:
        yield
        if subject.device.startswith("cuda"):
            torch.cuda.synchronize()
    except RuntimeError as error:
        if is_sticky(error):
            raise GpuBrokenError(function is not subject.replaced, where, error) from error
        raise
