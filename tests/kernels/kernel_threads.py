"""Runs a kernel in Gluon, which has no interpreter: numpy for tensors, a thread for each partition.

What is asynchronous happens as late as it may: copies arrive after a while, products and stores are
made when they are waited for. So what is read too early or overwritten too early comes out wrong,
and who waits for ever is found out.
"""

import ast
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

import kprof.kernels

FOLDER = Path(kprof.kernels.__file__).parent
LONGEST_S = 5.0
# The hardware adds to memory as if nothing came between.
LOCK = threading.Lock()


LAYOUTS = (
    *("SliceLayout", "NVMMADistributedLayout", "DotOperandLayout"),
    *("BlockedLayout", "SwizzledSharedLayout"),
)


class Tile(np.ndarray):
    """A tensor of a kernel."""

    @property
    def type(self):
        return SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        if bitcast:
            return tile(torch.from_numpy(self.view(np.ndarray).copy()).view(dtype).float().numpy())
        return self if dtype is None else self.astype(dtype)

    def permute(self, order):
        return self.transpose(order)

    def index(self, place):
        return self[int(place)]

    def reshape(self, shape):
        return super().reshape(shape)

    def store(self, value):
        self[...] = value

    def load(self, layout):
        return self.copy()

    def slice(self, start, length, dim=0):
        return self[(slice(None),) * dim + (slice(start, start + length),)]


def tile(values):
    return np.asarray(values).view(Tile)


def _multiply_and_add(x, y, z):
    """Round once, as the hardware does: in 64 bits, products of 32 are exact."""
    return tile((np.float64(x) * np.float64(y) + np.float64(z)).astype(np.float32))


def store_permuted(smem, x):
    in_order = x.reshape((64, 2, 4, 2, 4)).transpose(0, 1, 3, 2, 4)
    smem[...] = in_order.reshape((1, 1, 64, 64))


def _round_or_move(code, constraints, numbers, **about):
    """Return four numbers rounded to 8 bits each in one of 32, or what is only moved."""
    if len(numbers) == 1:
        assert "cvt" not in code
        return numbers[0]
    assert code.count("cvt.rn.satfinite.e4m3x2.f32") == 2
    four = torch.from_numpy(np.stack(numbers, -1).astype(np.float32))
    return tile(four.to(torch.float8_e4m3fn).view(torch.int32).squeeze(-1).numpy())


def _narrowing(gluon, gl):
    """Return the functions for 8 bits as they are, with these names for what they are made of."""
    source = (FOLDER / "tiles" / "gluon.py").read_text()
    names = {"gluon": gluon, "gl": gl}
    exec(
        "from __future__ import annotations\n" + source[source.index("@gluon.jit\ndef pack_f") :],
        names,
    )
    return {name: names[name] for name in ("pack_fp8", "unpack_fp8")}


class Barrier:
    """One in shared memory, that counts arrivals and bytes, and has phases."""

    def __init__(self):
        self._changed = threading.Condition()
        self.phase = 0

    def init(self, count):
        self._count = self._left = count
        self._bytes = 0

    def arrive(self, num_bytes=0):
        with self._changed:
            self._left -= 1
            self._bytes += num_bytes
            self._end()

    def receive(self, num_bytes):
        with self._changed:
            self._bytes -= num_bytes
            self._end()

    def _end(self):
        assert self._left >= 0
        if self._left == 0 and self._bytes == 0:
            self._left, self.phase = self._count, self.phase + 1
            self._changed.notify_all()

    def wait(self, parity):
        with self._changed:
            if not self._changed.wait_for(lambda: self.phase % 2 != parity, LONGEST_S):
                raise TimeoutError("nobody came to a barrier in shared memory")


class Turn:
    """One of the hardware's barriers, where threads come or pass by."""

    def __init__(self):
        self._changed = threading.Condition()
        self._count = self._round = 0

    def come(self, coming, threads, waits):
        with self._changed:
            mine = self._round
            self._count += coming
            assert self._count <= threads
            if self._count == threads:
                self._count, self._round = 0, self._round + 1
                self._changed.notify_all()
            elif waits and not self._changed.wait_for(lambda: self._round != mine, LONGEST_S):
                raise TimeoutError("nobody came to a barrier of the hardware")


class Barriers(list):
    def index(self, place):
        return self[int(place)]


class Descriptor:
    """What the copying hardware knows of a tensor."""

    def __init__(self, values, rows, columns=None):
        self.values, self.dtype, self.layout = values, values.dtype, None
        shape = [1, 1, rows, columns or values.shape[3]]
        nbytes = rows * shape[3] * values.dtype.itemsize
        self.block_type = SimpleNamespace(shape=shape, nbytes=nbytes)


class Device:
    """All that Gluon offers, for one program at a time."""

    def __init__(self, program, num_programs):
        self._turns = {}
        self._own = threading.local()
        self._random = random.Random(program)
        number = {"maximum": np.maximum, "minimum": np.minimum, "exp2": np.exp2, "log2": np.log2}
        self.gl = SimpleNamespace(
            constexpr=lambda value: value,
            program_id=lambda axis: program,
            num_programs=lambda axis: num_programs,
            cdiv=lambda a, b: -(-a // b),
            arange=lambda start, end, layout=None: tile(np.arange(start, end)),
            zeros=lambda shape, dtype, layout=None: tile(np.zeros(shape, np.float32)),
            full=lambda shape, value, dtype, layout=None: tile(np.full(shape, value, np.float32)),
            where=lambda a, b, c: tile(np.where(a, b, c)),
            max=lambda x, axis: tile(np.max(x, axis)),
            sum=lambda x, axis: tile(np.sum(x, axis)),
            fma=_multiply_and_add,
            split=lambda x: (x[..., 0], x[..., 1]),
            join=lambda a, b: tile(np.stack([a, b], -1)),
            load=lambda at: at.values[at.places],
            inline_asm_elementwise=_round_or_move,
            int8=np.int8,
            int32=np.int32,
            float8e4nv=torch.float8_e4m3fn,
            convert_layout=lambda x, layout: x,
            store=self._store,
            static_range=range,
            allocate_shared_memory=self._allocate,
            warp_specialize=self._specialize,
            float32=np.float32,
            tensor=None,
            int64="barrier",
            bfloat16=None,
            **dict.fromkeys(LAYOUTS, lambda *about: None),
            NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *about: None),
            **number,
        )
        self.mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=lambda barrier, count: barrier.init(count),
            wait=lambda barrier, phase: barrier.wait(phase),
            expect=lambda barrier, num_bytes: barrier.arrive(num_bytes),
            arrive=lambda barrier, count: barrier.arrive(),
        )
        self.tma = SimpleNamespace(
            async_copy_global_to_shared=self._load,
            async_copy_shared_to_global=self._begin_to_store,
            store_wait=self._end_stores,
        )

    def names(self):
        """Return the names that a kernel's modules import."""
        jit = SimpleNamespace(jit=lambda f=None, **about: f if f else lambda g: g)
        jit.constexpr_function = jit.jit
        return {
            "NamedTuple": NamedTuple,
            "gl": self.gl,
            "tl": self.gl,
            "gluon": jit,
            "triton": jit,
            "mbarrier": self.mbarrier,
            "tma": self.tma,
            "add_shared_to_global": partial(self._begin_to_store, adds=True),
            "fence_async_shared": lambda: None,
            "named_barrier_sync": lambda number, threads: self._come(number, threads, True),
            "named_barrier_arrive": lambda number, threads: self._come(number, threads, False),
            "semaphore_wait": lambda told, number: told.wait(number),
            "semaphore_release": self._tell,
            "store_permuted": store_permuted,
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._wait,
            "hold": lambda x: None,
            "pack": lambda x, dtype: x.astype(dtype),
            "unpack": lambda x, dtype, layout: x,
        } | _narrowing(jit, self.gl)

    def _come(self, number, threads, waits):
        with LOCK:
            turn = self._turns.setdefault(number, Turn())
        turn.come(32 * self._own.num_warps, threads, waits)

    def _tell(self, told, number):
        self._end_stores(0)
        told.tell(number)

    def _allocate(self, dtype, shape, layout):
        if dtype == "barrier":
            return Barriers(Barrier() for _ in range(shape[0]))
        return tile(np.full(shape, np.nan, dtype))

    def _load(self, desc, at, barrier, block):
        block[...] = np.nan

        def arrive():
            time.sleep(self._random.random() * 2e-4)
            batch, head, row, _ = (int(one) for one in at)
            found = desc.values[batch, head, row : row + block.shape[2]]
            block[...] = 0
            block[0, 0, : len(found)] = found
            barrier.receive(desc.block_type.nbytes)

        threading.Thread(target=arrive).start()

    def _begin_to_store(self, desc, at, block, adds=False):
        self._own.pending = [*getattr(self._own, "pending", []), (desc, at, block, adds)]

    def _end_stores(self, most):
        pending = getattr(self._own, "pending", [])
        ended = len(pending) - most
        for desc, at, block, adds in pending[: max(ended, 0)]:
            batch, head, row, column = (int(one) for one in at)
            columns = slice(column, column + block.shape[3])
            with LOCK:
                place = desc.values[batch, head, row : row + block.shape[2], columns]
                place[...] = block[0, 0, : len(place)] + (place if adds else 0)
        self._own.pending = pending[max(ended, 0) :]

    def _multiply(self, a, b, sums, use_acc=True, is_async=False):
        def product():
            found = np.matmul(a.astype(np.float32), b.astype(np.float32))
            before = sums() if callable(sums) else sums
            return tile(found + before if use_acc else found)

        return product

    def _wait(self, most, given):
        found = tuple(one() if callable(one) else one for one in given)
        return found if len(found) > 1 else found[0]

    def _store(self, at, values, mask):
        values_at, places = at
        values_at[places[mask]] = values[mask]

    def _specialize(self, partitions, warps, registers):
        def run(function, arguments, num_warps):
            self._own.num_warps = num_warps
            # Which holds for a thread alone.
            with np.errstate(all="ignore"):
                function(*arguments)
            assert not getattr(self._own, "pending", []), "nobody waits for what is stored"

        several = zip(partitions, (4, *warps), strict=True)
        with ThreadPoolExecutor(len(partitions)) as pool:
            for done in [pool.submit(run, *one, n) for one, n in several]:
                done.result()
        assert all(turn._count == 0 for turn in self._turns.values())


class Address:
    """Where numbers are read."""

    def __init__(self, values, places=0):
        self.values, self.places = values, places

    def __add__(self, places):
        return Address(self.values, self.places + places)


class Told(Address):
    """Where programs tell others a number, of which those before have told theirs."""

    def __init__(self, values, places=0, waited=None):
        super().__init__(values, places)
        self.waited = set() if waited is None else waited

    def __add__(self, places):
        return Told(self.values, self.places + int(places), self.waited)

    def wait(self, number):
        assert self.values[self.places] == number, "it waits for a program that comes later"
        self.waited.add((self.places, int(number)))

    def tell(self, number):
        before = int(self.values[self.places])
        assert before == 0 or (self.places, before) in self.waited, "it has not waited"
        assert number > before
        self.values[self.places] = number


class Results:
    """Where single numbers are stored: adding to it is an address."""

    def __init__(self, values):
        self._values = values

    def __add__(self, places):
        return self._values, places


def run_in_threads(modules, name, num_programs, *arguments):
    """Run every program of the kernel `name`, found in the last of these modules."""
    for program in range(num_programs):
        names = Device(program, num_programs).names()
        for module in modules:
            exec(compile(_body_of(module), f"{module}.py", "exec"), names)
        names[name](*arguments)


def _body_of(module):
    """Return a module without its imports; of numbers that are Python's there is no type."""
    text = (FOLDER / f"{module}.py").read_text()
    imports = (ast.Import, ast.ImportFrom, ast.Expr)
    first = next(one for one in ast.parse(text).body if not isinstance(one, imports))
    above = [one.lineno for one in getattr(first, "decorator_list", [])]
    kept = ["from __future__ import annotations"]
    kept += text.splitlines()[min([first.lineno, *above]) - 1 :]
    return "\n".join(kept).replace(".to(gl.int64)", "")
