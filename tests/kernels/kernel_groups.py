"""Runs a kernel in Gluon whose programs wait for one another: numpy for tensors, a thread for each.

What is asynchronous happens as late as it may: a copy to or from shared memory is made when it is
waited for, with zeros behind a tensor's end; until then there is nothing but NaN. Programs run in
any order, half a store at a time.
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

    def slice(self, start, length, dim=0):
        return self[(slice(None),) * dim + (slice(start, start + length),)]

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


class Described:
    """What the copying hardware knows of rows of numbers: boxes of (1, 1, rows, width) of them."""

    layout = None

    def __init__(self, rows, num_columns, pieces, box):
        self.boxes = rows.reshape(-1, pieces, num_columns // (pieces * box[-1]), box[-1])
        self.dtype = rows.dtype
        nbytes = int(np.prod(box)) * rows.dtype.itemsize
        self.block_type = SimpleNamespace(shape=list(box), nbytes=nbytes)

    def at(self, place, num_rows):
        row, piece, first, _ = (int(one) for one in place)
        return self.boxes[row, piece, first : first + num_rows]


class Barrier:
    """One in shared memory, that counts bytes, and has phases."""

    def __init__(self):
        self.phase, self._bytes, self._copies = 0, 0, []

    def expect(self, num_bytes):
        assert not self._bytes, "what was requested here was not waited for"
        self._bytes = num_bytes

    def request(self, desc, place, block):
        block[...] = np.nan
        self._bytes -= desc.block_type.nbytes
        self._copies.append((desc, place, block))

    def wait(self, parity):
        if self.phase % 2 != parity:
            return
        assert self._copies and not self._bytes, "waits for ever"
        for desc, place, block in self._copies:
            found = desc.at(place, block.shape[2])
            block[...] = 0
            block[0, 0, : len(found)] = found
        self.phase, self._copies = self.phase + 1, []


class Barriers(list):
    def index(self, place):
        return self[int(place)]


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
        self._stores = []
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
            allocate_shared_memory=self._allocate,
            convert_layout=lambda x, layout: x,
            inline_asm_elementwise=lambda code, kinds, given, **about: values(np.fmax(*given)),
            float32=np.float32,
            int32=np.int32,
            int64=np.int64,
            uint32=np.uint32,
            bfloat16=None,
            **dict.fromkeys(("SliceLayout", "BlockedLayout", "SwizzledSharedLayout"), _no_layout),
        )
        self._mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: "barriers",
            init=lambda barrier, count: None,
            expect=lambda barrier, num_bytes: barrier.expect(num_bytes),
            wait=lambda barrier, parity: barrier.wait(parity),
        )
        self._tma = SimpleNamespace(
            async_copy_global_to_shared=lambda desc, at, barrier, smem: barrier.request(
                desc, at, smem
            ),
            async_copy_shared_to_global=lambda *given: self._stores.append(given),
            store_wait=self._end_stores,
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
            "mbarrier": self._mbarrier,
            "product": lambda x, y: x * y,
            "tma": self._tma,
            "fence_async_shared": lambda: None,
            # All warps are one here.
            "warp": lambda: 0,
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

    def _allocate(self, dtype, shape, layout):
        if layout == "barriers":
            return Barriers(Barrier() for _ in range(shape[0]))
        return values(np.full(shape, np.nan, dtype))

    def _end_stores(self, most):
        assert most == 0
        for desc, at, block in self._stores:
            place = desc.at(at, block.shape[2])
            place[...] = block[0, 0, : len(place)]
        self._stores = []

    def end(self):
        assert not self._stores, "a program ends before its copies have begun to leave"


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
        device = Device(program, num_programs, began)
        names = device.names()
        with np.errstate(all="ignore"):
            for one in code:
                exec(one, names)
            names[name](*given)
        device.end()

    with ThreadPoolExecutor(num_programs) as pool:
        for done in [pool.submit(run, program) for program in range(num_programs)]:
            done.result()


def _body_of(module):
    """Return a module's code without its imports, and without types of arguments."""
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    tree.body = [one for one in tree.body if not isinstance(one, ast.Import | ast.ImportFrom)]
    tree = ast.fix_missing_locations(_Conversions().visit(tree))
    return compile(tree, f"{module}.py", "exec", flags=__future__.annotations.compiler_flag)
