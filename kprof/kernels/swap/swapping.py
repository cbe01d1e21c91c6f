"""The swap: kernels replace code in a model, or in a whole process, until it ends.

`swapped` returns a `Swap`, a context manager with a report. `all_models` swaps all models and
optimizers of a process, and functions of torch. After a swap, a model is bit for bit as it was.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule
from torch.nn import DataParallel, Module, functional
from torch.optim import Optimizer

from kprof.kernels.runtime import build_beside
from kprof.kernels.swap.dispatch import UNWANTED
from kprof.kernels.swap.kept import names_for_this_process
from kprof.kernels.swap.providers import Providers, kernels_named
from kprof.kernels.swap.site import Request, Site, Skip
from kprof.kernels.swap.sites import families_of
from kprof.kernels.swap.swap_report import AUTO, SiteReport, SwapError, SwapReport, write_report

if TYPE_CHECKING:
    from types import TracebackType


def all_roots() -> list[Any]:
    """Return the modules of this process that are in no other one, and its optimizers.

    The largest come first: compiled parts of a model come after the model.
    """
    found = [one for one in gc.get_objects() if issubclass(type(one), (Module, Optimizer))]
    modules = [one for one in found if isinstance(one, Module) and not isinstance(one, GraphModule)]
    modules = [one for one in modules if "_modules" in one.__dict__]
    inside = {id(child) for one in modules for child in one._modules.values()}
    roots = [one for one in modules if id(one) not in inside]
    sizes = {id(one): sum(1 for _ in one.modules()) for one in roots}
    roots.sort(key=lambda one: -sizes[id(one)])
    return [*roots, *(one for one in found if isinstance(one, Optimizer))]


class Swap:
    """A swap of a model's call sites: a context manager with a report.

    The first entry finds the call sites; later entries and exits take microseconds.
    """

    def __init__(
        self,
        roots: Iterable[object] | None,
        names: Iterable[str],
        *,
        providers: type[Providers] = Providers,
        most_s: float | None = None,
    ) -> None:
        """Prepare to swap these kernels.

        Args:
            roots: Modules and optimizers, referenced until the first entry; None: whole process.
            names: KERNEL or KERNEL=PROVIDER, each optionally followed by @PATTERN;!PATTERN.
            providers: How a function is chosen for a call.
            most_s: Longest search for call sites, in seconds of CPU time; None: to its end.

        Raises:
            KprofError: there is no such kernel or provider.
        """
        asked_names = list(names)
        is_auto = asked_names == [AUTO]
        if is_auto:
            asked_names = list(names_for_this_process())
        given = [name.partition("@") for name in asked_names]
        asked = dict(_parsed(name) for name, _, _ in given)
        patterns = {_parsed(name)[0]: tuple(of.split(";")) for name, _, of in given if of}
        if not asked and not is_auto:
            raise SwapError("no kernel to swap", fix="name some: kprof kernels list")
        kernels = kernels_named(asked)
        forced = {name: provider for name, provider in asked.items() if provider is not None}
        self._request = Request(kernels, providers(kernels, forced), patterns=patterns)
        self._most_s = most_s
        self.is_cut = False
        """Whether the search for call sites took longer than it may, and was ended."""
        self._roots = None if roots is None else list(roots)
        self._found: list[Site | Skip] | None = None
        self._is_everything = roots is None
        self._on: list[Site] = []
        # Identities, not references: a swapped module may be deleted.
        self._members: set[int] = set()

    @property
    def providers(self) -> Providers:
        """What chooses the functions of calls."""
        return self._request.providers

    @property
    def is_on(self) -> bool:
        """Whether the swap is on."""
        return self in _entered

    @property
    def report(self) -> SwapReport:
        """The outcome of every site so far."""
        found = self._found or ()
        sites = tuple(report for one in found for report in one.reports())
        return SwapReport(tuple(self._request.kernels), sites)

    @property
    def sites(self) -> tuple[SiteReport, ...]:
        """The outcome of every site so far."""
        return self.report.sites

    @property
    def replaced(self) -> tuple[SiteReport, ...]:
        """Sites where a kernel runs, or will run when they are called."""
        return self.report.replaced

    @property
    def fallen_back(self) -> tuple[SiteReport, ...]:
        """Sites of which all calls so far ran the original, with the reasons."""
        return self.report.fallen_back

    @property
    def skipped(self) -> tuple[SiteReport, ...]:
        """Sites that are not swapped, and why."""
        return self.report.skipped

    def __enter__(self) -> Swap:
        """Put the kernels into the model."""
        if self.is_on:
            raise SwapError("this swap is on already", fix="leave it before you enter it again")
        for other in [one for one in _entered if not one.providers.launches]:
            # A dry run gives way: the workload cannot know of it, nor leave it.
            other.__exit__(None, None, None)
        if self._found is None:
            if self.providers.launches:
                build_beside()
            self._found = _without_parts_taken(list(self._find()))
            self._roots = []
        self._on = [one for one in self._found if isinstance(one, Site)]
        try:
            for site in self._on:
                site.enter()
        except BaseException:
            for site in reversed(self._on):
                site.leave()
            raise
        _entered.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the model.

        Raises:
            SwapError: a swap of the same model that was entered later is still on.
        """
        later = _entered[_entered.index(self) + 1 :]
        if any(self._members & other._members for other in later):
            raise SwapError(
                "a swap was to be left before another of the same modules that came after it",
                fix="leave the inner one first, as with blocks do",
            )
        _entered.remove(self)
        for site in reversed(self._on):
            site.leave()
        self._on = []

    def decide_anew(self) -> None:
        """Choose functions anew for all calls, as the providers choose now; counts stay."""
        for one in self._found or ():
            if isinstance(one, Site):
                for dispatcher in one.parts.values():
                    dispatcher.forget()

    def _find(self) -> Iterator[Site | Skip]:
        roots = all_roots() if self._roots is None else self._roots
        taken: set[Hashable] = set()
        # Of this thread: a busy machine makes no search long.
        end_s = math.inf if self._most_s is None else time.thread_time() + self._most_s
        for root, one in self._find_in(roots):
            if time.thread_time() > end_s:
                self.is_cut = True
                return
            _name(one, root, is_one_of_many=len(roots) > 1)
            if one.place in taken:
                continue
            if isinstance(one, Skip) or self._is_wanted(one):
                taken.add(one.place)
                yield one
            else:
                # Other kernels may use the place.
                for what, dispatcher in one.parts.items():
                    yield Skip(one.name, dispatcher.kernel.name, what, UNWANTED)

    def _is_wanted(self, one: Site) -> bool:
        """Close the parts of a site that filters exclude; return whether any is left."""
        # A site that makes masks has no parts: it serves other sites.
        if not one.parts:
            return True
        for dispatcher in one.parts.values():
            if not self._request.is_wanted(dispatcher.kernel.name, one.name, one.shape):
                dispatcher.close()
        return any(dispatcher.is_open for dispatcher in one.parts.values())

    def _find_in(self, roots: list[Any]) -> Iterator[tuple[object, Site | Skip]]:
        families = families_of(self._request.kernels)
        for root in roots:
            check_root(root)
            modules = root.modules() if isinstance(root, Module) else [root]
            self._members.update(id(one) for one in modules)
            for family in families:
                for one in family.find(root, self._request):
                    yield root, one
        if self._is_everything:
            # Not imported by swaps of one model. Last: attention in all its dtypes loads libraries
            # that the workload may not use.
            from kprof.kernels.swap.sites.function_calls import process_sites

            self._members.add(id(functional))
            for site in process_sites(self._request):
                yield None, site


def _without_parts_taken(found: list[Site | Skip]) -> list[Site | Skip]:
    """Drop the reason why a whole module is skipped if a function that it calls is replaced."""
    taken = {
        (one.name, dispatcher.kernel.name)
        for one in found
        if isinstance(one, Site)
        for what, dispatcher in one.parts.items()
        if dispatcher.is_open and PART in what
    }
    return [
        one
        for one in found
        if isinstance(one, Site) or PART in one.what or (one.name, one.kernel) not in taken
    ]


# Separates the class of a module from the function that it calls, in reports.
PART = ": "
# Swaps that are on, in the order of entry.
_entered: list[Swap] = []


def is_any_on() -> bool:
    """Return whether any swap of this process is on."""
    return bool(_entered)


def swapped(model: object, *names: str) -> Swap:
    """Return a swap to enter: `with kprof.swapped(model, "rmsnorm", "swiglu=liger") as swap:`.

    Args:
        model: A module or an optimizer, several in a list, or None: all of this process.
        names: KERNEL, or KERNEL=PROVIDER; with the names of sites behind an @, such as
            "fp8_linear@*.mlp.*;!*.down_proj", it is for these alone; "fp8_linear@14336x*" is for
            linear layers of 14,336 outputs. "auto" alone: the kernels that `kprof run --swap auto`
            has chosen for this script, arguments, versions and GPUs.

    Raises:
        KprofError: there is no such kernel or provider, or none was chosen yet.
    """
    if model is None:
        return Swap(None, names)
    roots = list(model) if isinstance(model, (list, tuple)) else [model]
    for root in roots:
        if not isinstance(root, (Module, torch.optim.Optimizer)):
            raise SwapError(
                f"a {type(root).__name__} cannot be swapped", fix="give a module or an optimizer"
            )
    return Swap(roots, names)


def _parsed(name: str) -> tuple[str, str | None]:
    kernel, separator, provider = name.strip().partition("=")
    return kernel, provider if separator else None


def check_root(root: object) -> None:
    """Check that a root can be swapped.

    Raises:
        SwapError: it cannot.
    """
    if isinstance(root, Module) and any(type(one) is DataParallel for one in root.modules()):
        raise SwapError(
            "DataParallel copies modules to other GPUs, and would take their methods along",
            fix="use DistributedDataParallel",
        )


def _name(one: Site | Skip, root: object, *, is_one_of_many: bool) -> None:
    """Remove wrappers of torch.compile and FSDP from a name; prefix the model's class if needed."""
    for wrapper in WRAPPERS:
        one.name = one.name.replace(f"{wrapper}.", "")
    title = type(getattr(root, "_orig_mod", root)).__name__
    if root is not None and is_one_of_many and one.name != title:
        one.name = f"{title}.{one.name}"


# Attributes of wrapped modules in torch.compile, FSDP and checkpointing.
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_prepared: dict[tuple[str, ...], Swap] = {}


def all_models(names: str, path: str | None = None) -> Leaving:
    """Return a context manager that swaps kernels in all models of this process.

    The first entry finds the call sites; later entries and exits take microseconds. Models that are
    created later are not swapped.

    Args:
        names: "KERNEL,KERNEL=PROVIDER,…".
        path: Where to write the report when it is left.

    Raises:
        KprofError: there is no such kernel or provider.
    """
    asked = tuple(names.split(","))
    if asked not in _prepared:
        _prepared[asked] = Swap(None, asked)
    return Leaving(_prepared[asked], None if path is None else Path(path))


class Leaving:
    """A swap that writes its report to a file on exit, at most once per second."""

    def __init__(self, swap: Swap, path: Path | None) -> None:
        self._swap, self._path = swap, path

    def __enter__(self) -> Swap:
        """Put the kernels into the model."""
        return self._swap.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the models."""
        self._swap.__exit__(kind, error, trace)
        if self._path is None or time.monotonic() - _written_s.get(self._path, 0.0) >= LEAST_S:
            self.tell()

    def tell(self) -> None:
        """Write the report of the swap so far."""
        if self._path is not None:
            _written_s[self._path] = time.monotonic()
            write_report(self._swap.report, self._path)


LEAST_S = 1.0
_written_s: dict[Path, float] = {}
