"""Random models with and without a swap: outputs, gradients and side effects.

    python benchmarks/swap_fuzz.py 5000 --gpu --result FILE
    python benchmarks/swap_fuzz.py 200                 # on the host: Triton's interpreter
    python benchmarks/swap_fuzz.py 1 --seed 4711       # one model again

Each model is run in four phases, each with and without the swap: as it is; after an attribute, a
weight, a hook or a child has changed between two entries; after such a change within the swap; and
after the swap. Outputs, gradients, buffers, attributes, errors, random numbers drawn and other side
effects have to be those of the original. A tensor may be ROUNDINGS of its dtype, and NEAR times
either the original's error against a float64 reference or its change under a change of all weights
and inputs by a rounding, away from the original's. Every other difference is a failure: its seed is
printed and the source of the model kept.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import linecache
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
if "--gpu" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from swap_grammar import written  # noqa: E402

from kprof.kernels.swap.swapping import swapped  # noqa: E402

NEAR, ROUNDINGS, MOST_PERTURBED = 3.0, 8.0, 8
KERNELS = {
    "rmsnorm": ("eager", "aten"),
    "layernorm": ("aten",),
    "add_rmsnorm": ("eager",),
    "add_layernorm": ("eager",),
    "swiglu": ("eager",),
    "geglu": ("eager",),
    "rope": ("eager",),
    "cross_entropy": ("eager",),
}
# Without a GPU most kernels are torch's: the interpreter takes long.
OURS_ON_HOST = 0.15
# The interpreter negates bfloat16 wrongly.
NEVER_OURS_ON_HOST = ("rope",)
# Kernels save the input of a norm for gradients, where some originals save a result of it. A later
# write to that input raises torch's error instead of giving a result, as documented.
IN_PLACE = "has been modified by an inplace operation"
FAMILIES = ("attention", "cross_entropy", "decode_attention", "fp8")
SOURCES = (
    "code/kprof/kernels/swap",
    "kprof/kernels/*.py",
    *(f"kprof/kernels/{family}/*.py" for family in FAMILIES),
    "benchmarks/swap_*.py",
)


def main():
    """Fuzz, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=int, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first model")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 16))
    parser.add_argument("--gpu", action="store_true", help="with the kernels of a GPU")
    parser.add_argument("--keep", type=Path, help="folder for the sources of models that fail")
    parser.add_argument("--result", type=Path, help="JSON to write")
    parser.add_argument("--commit", help="commit of a tree that is no checkout")
    options = parser.parse_args()
    keep = options.keep or Path(tempfile.gettempdir()) / "swap_fuzz"
    begin = time.monotonic()
    seeds = range(options.seed, options.seed + options.models)
    results = list(_results(seeds, options))
    told = _summary(results, time.monotonic() - begin)
    for one in results:
        if one["failure"]:
            keep.mkdir(parents=True, exist_ok=True)
            path = keep / f"model_{one['seed']}.py"
            path.write_text(written(one["seed"]))
            print(f"seed {one['seed']}: {one['failure']} ({path})")
    print(json.dumps(told, indent=1))
    if options.result:
        from evidence import row, write_evidence

        rows = [
            row("swap-fuzz.models", told["models"], "models", "higher"),
            row("swap-fuzz.different", told["failures"], "models", "lower", 0),
            row("swap-fuzz.share-swapped", told["share_swapped"], "of models", "higher", 0.6),
        ]
        what = "random models with and without a swap: outputs, gradients, side effects"
        more = {"seed": options.seed, **told}
        write_evidence(options.result, what, rows, SOURCES, commit=options.commit, **more)
    return 1 if told["failures"] or not told["swapped"] else 0


def _results(seeds, options):
    if options.workers <= 1 or len(seeds) == 1:
        torch.set_num_threads(1)
        yield from (fuzzed(seed, is_gpu=options.gpu) for seed in seeds)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.workers, _begin) as pool:
        given = zip(seeds, itertools.repeat(options.gpu), strict=False)
        yield from pool.imap_unordered(_fuzzed, given, chunksize=4)


def _begin():
    torch.set_num_threads(1)


def _fuzzed(given):
    return fuzzed(given[0], is_gpu=given[1])


def _summary(results, seconds):
    skipped, replaced = Counter(), Counter()
    for one in results:
        skipped.update(one["skipped"])
        replaced.update(one["replaced"])
    taken = sum(bool(one["replaced"]) for one in results)
    return {
        "models": len(results),
        "failures": sum(bool(one["failure"]) for one in results),
        "failed_seeds": sorted(one["seed"] for one in results if one["failure"]),
        "raised_as_input_was_written": sum(one["in_place"] for one in results),
        "raised_unswapped": sum(one["raises"] for one in results),
        "swapped": taken,
        "share_swapped": taken / max(len(results), 1),
        "replaced_sites": dict(replaced.most_common()),
        "reasons": dict(skipped.most_common(40)),
        "seconds": round(seconds, 1),
    }


def fuzzed(seed, *, is_gpu=False):
    """Return what became of one model."""
    result = {"seed": seed, "failure": None, "replaced": [], "skipped": []}
    result |= {"raises": False, "in_place": False}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        path = Path(folder) / f"model_{seed}.py"
        path.write_text(written(seed))
        try:
            _Trial(_loaded(path), seed, "cuda" if is_gpu else "cpu", result).run()
        except DifferentError as error:
            result["failure"] = str(error)
        except Exception:  # noqa: BLE001 - the next models are tried all the same.
            result["failure"] = f"the trial itself failed: {traceback.format_exc()[-900:]}"
        finally:
            sys.modules.pop(path.stem, None)
            linecache.cache.pop(str(path), None)
    return result


class DifferentError(Exception):
    """A swapped model does something else."""


def _loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


class _Trial:
    """One model and its copy, which is swapped."""

    def __init__(self, module, seed, device, result):
        self._module, self._seed, self._device, self._result = module, seed, device, result
        # Copies share what closures hold: each is built by itself.
        self._plain, self._swapped, self._exact = (self._built() for _ in range(3))
        self._random = torch.Generator().manual_seed(seed)
        length = module.SHAPE
        is_cast = module.AUTOCAST is not None or "torch.autocast(" in written(seed)
        dtypes = (module.DTYPE, torch.bfloat16 if is_cast else module.DTYPE)
        self._unit = max(torch.finfo(one).eps for one in dtypes)
        self._x = torch.randn(*length, module.HIDDEN, generator=self._random).to(device)
        self._labels = torch.randint(module.VOCABULARY, length, generator=self._random).to(device)

    def _built(self):
        """Return the model: weights as they begin in one of four, random ones in the others."""
        module, drawing = self._module, torch.Generator().manual_seed(self._seed)
        torch.manual_seed(self._seed)
        model = module.Model()
        if self._seed % 4:
            with torch.no_grad():
                for one in model.parameters():
                    drawn = torch.randn(one.shape, generator=drawing)
                    one.add_((0.3 if one.dim() < 2 else 0.1) * drawn)
        model.to(self._device)
        module.prepare(model)
        if torch.float32 != module.DTYPE:
            model.to(module.DTYPE)
        return model.train(module.TRAINS)

    def run(self):
        """Compare in four phases."""
        swap = swapped(self._swapped, *self._names())
        with swap:
            self._compare("as it is")
        self._change("change")
        with swap:
            self._compare("changed between two entries")
            self._change("amid")
            self._compare("changed within the swap")
        self._compare("left")
        for site in swap.sites:
            if site.num_replaced:
                self._result["replaced"].append(site.kernel)
            reasons = [site.skipped, *(one.why for one in site.calls)]
            self._result["skipped"] += [f"{site.kernel}: {why}"[:120] for why in reasons if why]

    def _change(self, name):
        errors, before = [], self._module.GAIN
        for model in (self._plain, self._swapped, self._exact):
            self._module.GAIN = before
            torch.manual_seed(1)
            try:
                getattr(self._module, name)(model)
                errors.append(None)
            except Exception as error:  # noqa: BLE001 - the model's own, of any type.
                errors.append(type(error).__name__)
        if errors[0] != errors[1]:
            raise DifferentError(f"{name} raised {errors[1]} instead of {errors[0]}")

    def _names(self):
        names = []
        for kernel, others in KERNELS.items():
            # Of a GPU that nobody measured ours is the default.
            is_ours = self._device == "cuda" or self._draw() < OURS_ON_HOST
            if self._device != "cuda" and kernel in NEVER_OURS_ON_HOST:
                is_ours = False
            chosen = others[int(self._draw() * len(others))]
            names.append(kernel if is_ours else f"{kernel}={chosen}")
        return names

    def _draw(self):
        return torch.rand((), generator=self._random).item()

    def _compare(self, phase):
        plain, swapped_ = self._ran(self._plain), self._ran(self._swapped)
        if plain["error"] is not None:
            self._result["raises"] = True
        if plain["error"] is None and IN_PLACE in swapped_["trace"]:
            self._result["in_place"] = True
            return
        if plain["error"] != swapped_["error"]:
            raise DifferentError(
                f"{phase}: {swapped_['error'] or 'no error'} instead of"
                f" {plain['error'] or 'no error'} {swapped_['trace']}"
            )
        if plain["seen"] != swapped_["seen"]:
            raise DifferentError(f"{phase}: other side effects")
        if plain["error"] is None:
            self._compare_tensors(phase, plain["tensors"], swapped_["tensors"])

    def _compare_tensors(self, phase, plain, swapped_):
        if plain.keys() != swapped_.keys():
            names = sorted(plain.keys() ^ swapped_.keys())
            raise DifferentError(f"{phase}: {', '.join(names)} are missing, or are new")
        scales = None
        for name, old in plain.items():
            new = swapped_[name]
            if _kind(old) != _kind(new):
                raise DifferentError(f"{phase}: {name} is {_kind(new)} instead of {_kind(old)}")
            if old is None or torch.equal(old, new):
                continue
            unit, apart = max(torch.finfo(old.dtype).eps, self._unit), _apart(new, old)
            if apart <= unit:
                continue
            scales = scales or [self._reference()]
            noise = self._noise(name, old, scales)
            while len(scales) <= MOST_PERTURBED and not apart <= NEAR * noise + ROUNDINGS * unit:
                scales.append(self._perturbed(unit))
                noise = self._noise(name, old, scales)
            if not apart <= NEAR * noise + ROUNDINGS * unit:
                raise DifferentError(
                    f"{phase}: {name} differs by {apart:.3g}, noise is {noise:.3g}"
                )

    @staticmethod
    def _noise(name, old, scales):
        """Return how far results of the original that differ in roundings alone are apart."""
        others = [one[name] for one in scales if one.get(name) is not None]
        others = [one for one in others if one.shape == old.shape]
        return max((_apart(one, old) for one in others), default=0.0)

    def _perturbed(self, unit):
        """Return the tensors of the original where weights and inputs are rounded otherwise."""
        x, before = self._x, []
        with torch.no_grad():
            for one in (self._x, *self._plain.parameters()):
                before.append(one.detach().clone())
                drawn = torch.randn(one.shape, generator=self._random).to(one.device)
                one.copy_(one * (1 + 0.5 * unit * drawn))
        try:
            ran = self._ran(self._plain)
        finally:
            for one, value in zip((x, *self._plain.parameters()), before, strict=True):
                one.data.copy_(value)
        return {} if ran["error"] is not None else ran["tensors"]

    def _reference(self):
        """Return the tensors of the original in float64; none where it draws random numbers."""
        ran = self._ran(self._exact.double(), dtype=torch.float64)
        return {} if ran["error"] is not None or ran["drew"] else ran["tensors"]

    def _ran(self, model, dtype=None):
        module = self._module
        own = next(model.layers[0].attn.parameters()).dtype
        x = self._x.detach().to(dtype or own).requires_grad_()
        cast = contextlib.nullcontext()
        if module.AUTOCAST is not None and dtype is None:
            cast = torch.autocast(self._device, dtype=module.AUTOCAST)
        module.SEEN.clear()
        model.zero_grad()
        counts_before = _counts(model)
        torch.manual_seed(self._seed)
        before = _random_state(self._device)
        error, found, trace = None, None, ""
        try:
            with cast:
                found = model(x, self._labels)
            weights = torch.linspace(-1, 2, found.numel(), device=found.device)
            (found * weights.view(found.shape).to(found.dtype)).sum().backward()
        except Exception as raised:  # noqa: BLE001 - the model's own, of any type.
            error, trace = type(raised).__name__, traceback.format_exc()[-500:]
        drew = not torch.equal(before, _random_state(self._device))
        tensors = {"result": found, "x.grad": x.grad}
        tensors.update((f"{name}.grad", one.grad) for name, one in model.named_parameters())
        tensors.update(
            (name, one) for name, one in model.named_buffers() if one.is_floating_point()
        )
        for name, one in model.named_modules():
            tensors.update(
                (f"{name}.{key}", value)
                for key, value in one.__dict__.items()
                if isinstance(value, torch.Tensor) and value.is_floating_point()
            )
        copies = {k: None if v is None else v.detach().clone() for k, v in tensors.items()}
        counts = [new - old for new, old in zip(_counts(model), counts_before, strict=True)]
        seen = [*module.SEEN, counts, model.training, drew]
        return {"error": error, "tensors": copies, "seen": seen, "drew": drew, "trace": trace}


def _counts(model):
    """Return how often modules that count their calls were called."""
    return [one.__dict__.get("num_calls", 0) for one in model.modules()]


def _random_state(device):
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


def _kind(one):
    return "None" if one is None else f"{tuple(one.shape)} of {one.dtype}"


def _apart(new, old):
    """Return how far two tensors are from each other, as a share of the norm of the second."""
    new, old = new.double(), old.double()
    if not bool(torch.isfinite(old).all()):
        same = torch.equal(torch.isfinite(new), torch.isfinite(old))
        old, new = (torch.nan_to_num(one, 0.0, 0.0, 0.0) for one in (old, new))
        if not same:
            return float("inf")
    size = float(old.norm())
    apart = float((new - old).norm())
    return apart / size if size else apart


if __name__ == "__main__":
    sys.exit(main())
