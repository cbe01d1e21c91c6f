"""Runs a kernel in Gluon whose programs wait for one another: numpy for tensors, a thread for each.

What is asynchronous happens as late as it may: a copy into shared memory is made when it is waited
for, with zeros for what is masked; until then there is nothing but NaN. Programs run in any order,
half a store at a time.
"""

import __future__

import ast
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import kprof.kernels

FOLDER = Path(kprof.kernels.__file__).parent
LONGEST_S = 20.0
NUM_WARPS = 4


class Values(np.ndarray):
    """A tensor of a kernel, or a piece of shared memory."""

    type = SimpleNamespace(layout=None)

    def index(self, place):
        return self[int(place)]

    def slice(self, start, length):
        return self[start : start + length]

    def load(self, layout):
        return self.copy()

    def store(self, values):
        self[...] = values


def values(given):
    return np.asarray(given).view(Values)


class Pointer:
    """An address, or a tensor of them, in an array of the test."""

    def __init__(self, array, at=0):
        self.array, self.at = array, at
        self.dtype = SimpleNamespace(element_ty=array.dtype)

    def __add__(self, step):
        return Pointer(self.array, self.at + step)


def _to(value, dtype, bitcast=False):
    value = np.asarray(value)
    return values(value.view(dtype) if bitcast else value.astype(dtype))


class _Conversions(ast.NodeTransformer):
    """Make x.to(...) a function of x, which may be a number of Python's."""

    def visit_Call(self, node):
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            node.args.insert(0, node.func.value)
            node.func = ast.copy_location(ast.Name("_to", ast.Load()), node.func)
        return node


class Device:
    """What Gluon offers to one program."""

    def __init__(self, program, num_programs, began):
        self._began = began
        self._pending, self._groups = [], []
        self.gl = SimpleNamespace(
            constexpr=lambda value: value,
            program_id=lambda axis: program,
            num_programs=lambda axis: num_programs,
            num_warps=lambda: NUM_WARPS,
            arange=lambda start, end, layout: values(np.arange(start, end)),
            zeros=lambda shape, dtype, layout: values(np.zeros(shape, dtype)),
            full=lambda shape, value, dtype, layout: values(np.full(shape, value, dtype)),
            where=lambda a, b, c: values(np.where(a, b, c)),
            max=lambda x, axis: values(np.fmax.reduce(x, axis)),
            min=lambda x, axis: values(np.min(x, axis)),
            sum=lambda x, axis: values(np.sum(x, axis, x.dtype)),
            fma=lambda x, y, z: values((np.float64(x) * np.float32(y) + z).astype(np.float32)),
            exp2=lambda x: values(np.exp2(np.float32(x))),
            log=lambda x: values(np.log(np.float32(x))),
            abs=np.abs,
            minimum=np.minimum,
            multiple_of=lambda x, divisor: x,
            static_range=range,
            thread_barrier=lambda: None,
            load=self._load,
            store=self._store,
            allocate_shared_memory=lambda dtype, shape, layout: values(
                np.full(shape, np.nan, dtype)
            ),
            inline_asm_elementwise=lambda code, kinds, given, **about: values(np.fmax(*given)),
            float32=np.float32,
            int32=np.int32,
            int64=np.int64,
            uint32=np.uint32,
            bfloat16=None,
            **dict.fromkeys(("SliceLayout", "BlockedLayout", "SwizzledSharedLayout"), _no_layout),
        )
        self._copies = SimpleNamespace(
            async_copy_global_to_shared=self._request,
            commit_group=self._commit,
            wait_group=self._wait,
        )

    def names(self):
        """Return the names that a kernel's module imports."""
        gluon = SimpleNamespace(
            jit=lambda f=None, **about: f if f else lambda g: g, constexpr_function=lambda f: f
        )
        return {
            "gl": self.gl,
            "tl": self.gl,
            "gluon": gluon,
            "async_copy": self._copies,
            "_to": _to,
        }

    def _load(self, pointer, mask=True, other=0, volatile=False):
        assert time.monotonic() - self._began < LONGEST_S, "waits for ever"
        if volatile:
            time.sleep(0)
        at, mask = np.broadcast_arrays(pointer.at, mask)
        found = np.full(at.shape, other, pointer.array.dtype)
        found[mask] = pointer.array[at[mask]]
        return values(found)

    def _store(self, pointer, given, mask=True, eviction_policy=""):
        at, mask = np.broadcast_arrays(pointer.at, mask)
        given = np.broadcast_to(given, at.shape)[mask].astype(pointer.array.dtype)
        for half, values_of_half in zip(
            np.array_split(at[mask], 2), np.array_split(given, 2), strict=True
        ):
            pointer.array[half] = values_of_half
            time.sleep(0)

    def _request(self, place, pointer, mask):
        at, mask = np.broadcast_arrays(pointer.at, mask)
        place[...] = np.nan
        self._pending.append((place, pointer.array, at, mask))

    def _commit(self):
        self._groups.append(self._pending)
        self._pending = []

    def _wait(self, most):
        while len(self._groups) > most:
            for place, array, at, mask in self._groups.pop(0):
                place[...] = 0
                place[mask] = array[at[mask]]


def _no_layout(*about):
    return None


def run_together(modules, name, num_programs, *arguments):
    """Run all programs of a kernel at once, found in the last of these modules.

    Arrays become addresses.
    """
    code = [_body_of(module) for module in modules]
    given = [Pointer(one) if isinstance(one, np.ndarray) else one for one in arguments]
    began = time.monotonic()

    def run(program):
        names = Device(program, num_programs, began).names()
        with np.errstate(all="ignore"):
            for one in code:
                exec(one, names)
            names[name](*given)

    with ThreadPoolExecutor(num_programs) as pool:
        for done in [pool.submit(run, program) for program in range(num_programs)]:
            done.result()


def _body_of(module):
    """Return a module's code without its imports, and without types of arguments."""
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    tree.body = [one for one in tree.body if not isinstance(one, ast.Import | ast.ImportFrom)]
    tree = ast.fix_missing_locations(_Conversions().visit(tree))
    return compile(tree, f"{module}.py", "exec", flags=__future__.annotations.compiler_flag)
