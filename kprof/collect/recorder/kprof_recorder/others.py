"""Whose use of torch's profiler it is: the workload's own, or the recorder's."""

from __future__ import annotations

from torch.autograd import profiler as autograd_profiler
from torch.profiler import profiler as torch_profiler

from .quiet import Quiet, Warnings


class Others:
    """Whether somebody else in this process uses torch's profiler."""

    is_active = False
    is_ours = 0
    was_seen = False


def watch_others(before_they_start: object) -> None:
    """Call `before_they_start` whenever the workload itself is about to start torch's profiler."""
    assert callable(before_they_start)
    for name in ("_prepare_profiler", "_enable_profiler"):
        setattr(
            autograd_profiler, name, _starting(getattr(autograd_profiler, name), before_they_start)
        )
    disable = autograd_profiler._disable_profiler

    def stop(*arguments: object, **options: object) -> object:
        if not Others.is_ours:
            Others.is_active = False
        return disable(*arguments, **options)

    autograd_profiler._disable_profiler = stop


def _starting(start: object, before_they_start: object) -> object:
    assert callable(start)
    assert callable(before_they_start)

    def start_after_notice(*arguments: object, **options: object) -> object:
        if not Others.is_ours:
            Others.is_active = Others.was_seen = True
            before_they_start()
        return start(*arguments, **options)

    return start_after_notice


class Ours:
    """Marks what happens inside it as the recorder's own use of the profiler.

    What torch would warn about then is none of the workload's business. (Filters of `warnings`
    would not do: to change them makes Python show old warnings again.)
    """

    quiet = Quiet()
    warnings = Warnings()
    has_begun = False
    """Whether the recorder has used the profiler, of which a thread stays."""

    def __enter__(self) -> None:
        Ours.has_begun = True
        Others.is_ours += 1
        self.quiet.__enter__()
        self._warned = self.warnings.send_to_log()
        self._warn = getattr(torch_profiler, "_warn_once", None)
        torch_profiler._warn_once = lambda *message, **options: None

    def __exit__(self, *exception: object) -> None:
        Others.is_ours -= 1
        self.warnings.send_to(self._warned)
        self.quiet.__exit__()
        torch_profiler._warn_once = self._warn
