"""Triton's launchers, built while the kernels that they launch are compiled.

Triton has a C compiler build one for each signature, once on a machine, which takes about as long
as compiling a kernel, and begins with it when that is done. A signature is known before. What is
built lies where Triton looks for it; where it is not there in time, Triton builds it as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import triton
from triton import knobs

from kprof.kernels._repeated import _prepare

# Whose launchers are made from signatures as `_build` does.
IS_KNOWN = triton.__version__.startswith("3.6.")
OURS = "kprof.kernels."

building: list[threading.Thread] = []


@cache
def begin_repeated() -> None:
    """Build what repeats calls in C, which the first call of a kernel asks for."""
    _start(_prepare)


def begin() -> None:
    """Build launchers of our kernels ahead from now on."""
    if IS_KNOWN and not isinstance(knobs.runtime.jit_cache_hook, _Ahead):
        knobs.runtime.jit_cache_hook = _Ahead(knobs.runtime.jit_cache_hook)


def end() -> None:
    """Leave Triton as it was, unless somebody else has changed it since."""
    if isinstance(knobs.runtime.jit_cache_hook, _Ahead):
        knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook.former


class _Ahead:
    """What Triton calls before it compiles; what was called there before still is."""

    def __init__(self, former: Any) -> None:
        self.former = former

    def __call__(self, **told: Any) -> Any:
        if told["fn"].module.startswith(OURS):
            kinds = dict(enumerate(told["compile"]["signature"].values()))
            # Of descriptors a launcher depends on what is known when the kernel is compiled.
            if not any("tensordesc" in str(kind) for kind in kinds.values()):
                _start(_build, kinds)
        return None if self.former is None else self.former(**told)


def _start(work: Callable[..., object], *arguments: object) -> None:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    building[:] = [*(one for one in building if one.is_alive()), thread]
    thread.start()


def _build(kinds: dict[int, Any]) -> None:
    """Build a launcher for arguments of these kinds as Triton does, if it is not there yet."""
    # What goes wrong here goes wrong where Triton does it, too, which says so.
    with suppress(Exception):
        from triton.backends.nvidia import driver
        from triton.runtime.build import compile_module_from_src

        compile_module_from_src(
            src=driver.make_launcher({}, kinds, None),
            name="__triton_launcher",
            library_dirs=driver.library_dirs(),
            include_dirs=driver.include_dirs,
            libraries=driver.libraries,
        )
