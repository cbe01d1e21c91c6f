"""The interpreter's own threads, locks, clock, even where the workload has replaced them.

gevent and eventlet replace functions in `threading`, `_thread` and `time`, before or after the
recorder is imported. Such a lock or sleep switches to another greenlet, and with that changes the
order of the workload's own code. Tests that freeze the time replace the clock.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import BuiltinImporter
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _thread as _own_thread
    import time as _own_time
else:

    def _instance_of(name: str) -> ModuleType:
        """Return another, private instance of a built-in module."""
        spec = BuiltinImporter.find_spec(name)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    _own_thread, _own_time = _instance_of("_thread"), _instance_of("time")

Lock = _own_thread.allocate_lock
RLock = _own_thread.RLock
get_ident = _own_thread.get_ident
get_native_id = _own_thread.get_native_id
start_new_thread = _own_thread.start_new_thread
num_other_threads = _own_thread._count
sleep = _own_time.sleep
monotonic = _own_time.monotonic
perf_counter_ns = _own_time.perf_counter_ns
time_ns = _own_time.time_ns

# Where Linux lists the threads of this process.
THREADS = Path("/proc/self/task")
# Where the system does not number a process's first thread like the process.
_FIRST_IMPORTED_IN = get_ident()


def is_main_thread() -> bool:
    """Whether this is the thread that lives as long as Python does."""
    if sys.platform == "linux":
        return get_native_id() == os.getpid()
    return get_ident() == _FIRST_IMPORTED_IN
