"""Being ready sooner where nothing was compiled before: C is compiled beside kernels.

Triton has a C compiler build what launches a kernel, once for each signature on a machine. That
takes longer than compiling most kernels, and starts only once one is compiled; but a signature is
known before. What is built here lies where Triton looks for it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from triton.runtime import JITFunction, driver
from triton.runtime.jit import compute_cache_key

from kprof.kernels.runtime.launcher import HAS_KNOWN_LAUNCHER


class _State(threading.local):
    is_compiling = False


_here = _State()


@cache
def build_beside() -> None:
    """Have threads build what launches our kernels, those imported by now, from now on."""
    if not HAS_KNOWN_LAUNCHER or torch.version.hip is not None:
        return
    for name, module in [*sys.modules.items()]:
        if name.startswith("kprof.kernels."):
            for one in [*vars(module).values()]:
                # Each once: where it is defined, not where it is imported.
                if isinstance(one, JITFunction) and one.module == name:
                    one.add_pre_run_hook(partial(_build_for, one))


def _build_for(kernel: Any, *arguments: Any, **options: Any) -> None:
    """Compile for a call of this kernel, unless it is, and build what launches it beside that."""
    # What goes wrong here goes wrong where Triton does the same, which says so.
    with suppress(Exception):
        compiled, keys, _, _, bind = kernel.device_caches[driver.active.get_current_device()]
        _, given, decided = bind(*arguments, **options)
        kinds = [kind for kind, _ in given]
        # What the copying hardware is told of tensors is known once the kernel is compiled.
        is_known = not any("tensordesc" in str(kind) for kind in kinds)
        is_compiled = _here.is_compiling or compute_cache_key(keys, given, decided) in compiled
        if is_known and not is_compiled:
            thread = _start(_build, kinds)
            _here.is_compiling = True
            try:
                kernel.warmup(*arguments, grid=(1,), **options)
            finally:
                _here.is_compiling = False
            thread.join()


def _start(work: Callable[..., object], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=_quietly, args=(work, *arguments), daemon=True)
    thread.start()
    return thread


def _quietly(work: Callable[..., object], *arguments: object) -> None:
    with suppress(Exception):
        work(*arguments)


def _build(kinds: list[Any]) -> None:
    """Build a launcher for arguments of these kinds as Triton does, if it is not there yet."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.build import compile_module_from_src

    compile_module_from_src(
        src=nvidia.make_launcher({}, dict(enumerate(kinds)), None),
        name="__triton_launcher",
        library_dirs=nvidia.library_dirs(),
        include_dirs=nvidia.include_dirs,
        libraries=nvidia.libraries,
    )
