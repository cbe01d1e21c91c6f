"""Compiles the persistent kernel for a model, and launches it: N tokens a launch.

NVRTC compiles, which torch brings; the driver loads and launches. Nothing else is needed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kprof.errors import KprofError
from kprof.kernels.decode._model import Decoder, Weight
from kprof.kernels.decode.persistent.executor import LOG2_E, SPLIT_KEYS, Memory
from kprof.kernels.decode.persistent.schedule import (
    MOST_SPLITS,
    PARTS,
    Op,
    Schedule,
    Sizes,
    schedule_of,
    why_wrong,
)
from kprof.kernels.runtime import num_sms as num_sms_of

SOURCE = Path(__file__).with_name("kernel.cu")
ARCHITECTURE = "sm_90a"
# Warps that multiply a tile together, and how many such teams a CTA has.
# Of those measured on an H100, the fastest: one team, and four stages of 16 KiB in flight.
WARPS, GROUPS = 8, 1
AHEAD = 4
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
COUNTER_STRIDE = 32
# Numbers of a profile for each operator.
MARKS = 8
MOST_STOPS = 16
# Bytes of an instruction, and of the pointers of a layer.
INSTRUCTION_BYTES, LAYER_BYTES = 32, 160
# Seconds that a wait may take: longer than any other process has the GPU for.
PATIENCE_S = 2.0
FAULTS = {
    1: "results of other CTAs were late",
    2: "a load of weights was late",
    3: "a stage was not freed in time",
    4: "a load was not done in time",
    5: "an SM has a number that is too large",
}
MAX_DYNAMIC_SHARED = 8


class Parameters(ctypes.Structure):
    """The argument of the kernel, as in `kernel.cu`."""

    POINTERS = (
        *("instructions", "layers", "embedding", "norm", "head", "cosines", "sines", "qkv"),
        *("partial", "lse", "middle", "output", "logits", "gated", "bests", "counters"),
        *("state", "stops", "tokens", "fault", "host_fault", "profile"),
    )
    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("patience", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("steps", "length", "window", "kept", "ahead")),
    ]


def sizes_of(decoder: Decoder, num_sms: int) -> Sizes:
    """Return the dimensions of a model, with as many splits of attention as there are SMs for."""
    return Sizes(
        layers=len(decoder.layers),
        hidden=decoder.hidden,
        inner=decoder.inner,
        heads=decoder.heads,
        group=decoder.group,
        dim=decoder.dim,
        vocabulary=decoder.vocabulary,
        splits=max(1, min(MOST_SPLITS, num_sms // (decoder.heads * decoder.group))),
    )


def why_not(decoder: Decoder) -> str | None:
    """Return why the persistent kernel does not support a model on its device; None: it does."""
    if decoder.dtype != torch.bfloat16:
        return f"its weights are in {decoder.dtype}, not in bfloat16"
    if len({(one.window, one.rotation) for one in decoder.layers}) > 1:
        return "its layers have several windows or rotations"
    if decoder.score_cap or decoder.logit_cap or decoder.layers[0].after_attention is not None:
        return "its scores or logits have a cap, or its layers have four norms"
    if decoder.dim > PARTS * 2 or decoder.dim < 16:
        return f"its heads have {decoder.dim} columns"
    if any(one.data_ptr() % 16 for one in decoder.weights()):
        return "its weights are not aligned to 16 bytes"
    if decoder.device.type != "cuda":
        return f"it is on {decoder.device}, not on a GPU"
    if torch.cuda.get_device_capability(decoder.device) != (9, 0):
        return "its GPU is not Hopper"
    return None


def shared_bytes(schedule: Schedule, stages: int, warps: int, groups: int) -> int:
    """Return at least the shared memory of a CTA: its stages, and what it keeps beside them."""
    sizes = schedule.sizes
    kept = (
        schedule.length * INSTRUCTION_BYTES
        + sizes.layers * LAYER_BYTES
        + 2 * PARTS * warps * 4
        + warps * groups * (sizes.dim + 4) * 4
        + stages * 16
        + 1_024
    )
    return stages * sizes.stage_bytes + -(-kept // 128) * 128


def stages_of(schedule: Schedule, warps: int, groups: int, device: torch.device) -> int:
    """Return how many stages fit into the shared memory of an SM; a stage belongs to one team."""
    limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    stages = groups
    while shared_bytes(schedule, stages + groups, warps, groups) <= limit:
        stages += groups
    return stages


def definitions(schedule: Schedule, decoder: Decoder, **others: Any) -> dict[str, Any]:
    """Return what the source needs to be defined."""
    sizes = schedule.sizes
    return {
        "HIDDEN": sizes.hidden,
        "INNER": sizes.inner,
        "HEADS": sizes.heads,
        "GROUP": sizes.group,
        "DIM": sizes.dim,
        "VOCABULARY": sizes.vocabulary,
        "LAYERS": sizes.layers,
        "SPLITS": sizes.splits,
        "SPLIT_KEYS": SPLIT_KEYS,
        "STAGE_BYTES": sizes.stage_bytes,
        "INSTRUCTIONS": schedule.length,
        "EPSILON": f"{decoder.eps!r}f",
        "SCALE": f"{decoder.scale * LOG2_E!r}f",
        "EMBEDDING_SCALE": f"{float(decoder.embedding_scale)!r}f",
        "ACTIVATION": ACTIVATIONS[decoder.activation],
        "ADD_ONE": int(decoder.adds_one),
        "HAS_BIAS": int(any(one.bias is not None for one in _linears(decoder))),
        "HAS_QK_NORM": int(decoder.layers[0].q_norm is not None),
        "WARPS": WARPS,
        "GROUPS": GROUPS,
        "SKIP_LOADS": 0,
        "SKIP_MATH": 0,
        "PROFILE": 0,
        **others,
    }


def _linears(decoder: Decoder) -> Iterable[Weight]:
    for one in decoder.layers:
        yield from (one.q, one.k, one.v, one.o, one.gate, one.up, one.down)


@functools.lru_cache
def checked(sizes: Sizes, speeds: tuple[float, ...]) -> Schedule:
    """Return the schedule of a model for SMs that read at these rates, in any unit.

    Raises:
        RuntimeError: it is wrong.
    """
    schedule = schedule_of(sizes, speeds)
    why = why_wrong(schedule)
    if why is not None:
        raise RuntimeError(f"the schedule is wrong: {why}")
    return schedule


@functools.lru_cache
def compiled(defined: tuple[tuple[str, Any], ...]) -> bytes:
    """Return the machine code of the kernel with these definitions.

    Raises:
        KprofError: NVRTC is not there, or fails.
    """
    library = _nvrtc()
    lines = "".join(f"#define {name} {value}\n" for name, value in defined)
    source = (lines + SOURCE.read_text()).encode()
    program = ctypes.c_void_p()

    def call(name: str, *arguments: Any) -> int:
        code: int = getattr(library, name)(*arguments)
        return code

    call("nvrtcCreateProgram", ctypes.byref(program), source, b"decode.cu", 0, None, None)
    options = [f"--gpu-architecture={ARCHITECTURE}".encode(), b"--std=c++17"]
    code = call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * 2)(*options))
    size = ctypes.c_size_t()
    if code:
        call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        call("nvrtcGetProgramLog", program, log)
        raise KprofError(
            f"NVRTC cannot compile the persistent kernel: {log.value.decode()}",
            fix="decode without it: `generate` of a swapped model uses CUDA graphs then",
        )
    call("nvrtcGetCUBINSize", program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    call("nvrtcGetCUBIN", program, cubin)
    call("nvrtcDestroyProgram", ctypes.byref(program))
    return cubin.raw


def _nvrtc() -> ctypes.CDLL:
    """Return NVRTC: of the packages that torch depends on, or of the loader's path."""
    major = (torch.version.cuda or "13").split(".")[0]
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or ()) if found else ():
        for library in Path(folder).glob(f"*/lib/libnvrtc.so.{major}"):
            # Which NVRTC looks for by name alone.
            for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
            return ctypes.CDLL(str(library))
    try:
        return ctypes.CDLL(f"libnvrtc.so.{major}")
    except OSError:
        raise KprofError(
            "NVRTC is not found", fix="install torch for CUDA, which depends on nvidia-cuda-nvrtc"
        ) from None


class Sequence(NamedTuple):
    """The cache and the state of one sequence, in memory that stays where it is."""

    keys: Tensor
    """(layers, heads, slots, dim)."""
    values: Tensor
    cosines: Tensor
    """(slots, dim), float32."""
    sines: Tensor
    state: Tensor
    """int32, as of the engine of CUDA graphs."""
    stops: Tensor
    """Stop tokens, int32."""
    tokens: Tensor
    """Pinned memory for the tokens, int64, (slots,)."""


class Persistent:
    """The persistent kernel for one model and one sequence."""

    def __init__(
        self,
        decoder: Decoder,
        sequence: Sequence,
        *,
        patience_s: float = PATIENCE_S,
        stages: int | None = None,
        ahead: int = AHEAD,
        speeds: Iterable[float] | None = None,
        **defined: Any,
    ) -> None:
        """Compile for a model, and check the schedule.

        Args:
            decoder: The model, for which `why_not` is None.
            sequence: Its cache and its state.
            patience_s: Seconds after which a wait is a fault.
            stages: Of the ring; None: as many as fit.
            ahead: Stages in flight at most.
            speeds: The rate at which each SM reads, in any unit; None: all the same.
            defined: Definitions of the source that differ.

        Raises:
            KprofError: the kernel cannot be compiled or loaded.
            RuntimeError: the schedule is wrong.
        """
        device = decoder.device
        self.decoder, self.device = decoder, device
        num_sms = num_sms_of(device)
        speeds = tuple(speeds or [1.0] * num_sms)
        self.schedule = checked(sizes_of(decoder, num_sms), speeds)
        warps, groups = defined.get("WARPS", WARPS), defined.get("GROUPS", GROUPS)
        self.stages = stages or stages_of(self.schedule, warps, groups, device)
        self.shared = shared_bytes(self.schedule, self.stages, warps, groups)
        self.threads = 32 * (warps * groups + 1)
        source = definitions(self.schedule, decoder, STAGES=self.stages, **defined)
        self._function = _loaded(compiled(tuple(source.items())), self.shared)
        self.memory = Memory.poisoned(self.schedule.sizes, num_sms, decoder.dtype, device)
        self.counters = torch.zeros(
            self.schedule.num_counters * COUNTER_STRIDE, dtype=torch.int32, device=device
        )
        self.fault = torch.zeros(8, dtype=torch.int32, device=device)
        self.host_fault = torch.zeros(8, dtype=torch.int32).pin_memory()
        self.profile = torch.zeros(num_sms, len(Op), MARKS, dtype=torch.int64, device=device)
        # The kernel has pointers into them.
        self._sequence, self._tensors = sequence, self._tables(sequence)
        self.parameters = Parameters(
            **{name: one.data_ptr() for name, one in self._tensors.items()},
            patience=int(patience_s * 1e3 * _clock_khz(device)),
            length=sequence.keys.shape[2],
            window=decoder.layers[0].window or 0,
            kept=sequence.tokens.shape[0],
            ahead=min(ahead, self.stages),
        )

    def _tables(self, sequence: Sequence) -> dict[str, Tensor]:
        """Return the tensors of the parameters."""
        decoder, memory = self.decoder, self.memory
        layers = []
        for index, one in enumerate(decoder.layers):
            weights = (one.q, one.k, one.v, one.o, one.gate, one.up, one.down)
            tensors = [
                *(one.before_attention, one.before_mlp, one.q_norm, one.k_norm),
                *(weight.weight for weight in weights),
                *(weight.bias for weight in weights),
                *(sequence.keys[index], sequence.values[index]),
            ]
            layers.append([0 if tensor is None else tensor.data_ptr() for tensor in tensors])
        written = ("qkv", "partial", "lse", "middle", "gated", "output", "bests")
        return {
            "instructions": torch.from_numpy(self.schedule.table()).to(self.device),
            "layers": torch.tensor(layers, dtype=torch.int64).to(self.device),
            "embedding": decoder.embedding,
            "norm": decoder.norm,
            "head": decoder.head.weight,
            **{name: getattr(sequence, name) for name in Sequence._fields[2:]},
            **{name: getattr(memory, name) for name in written},
            "counters": self.counters,
            "fault": self.fault,
            "host_fault": self.host_fault,
            "profile": self.profile,
        }

    def run(self, steps: int) -> None:
        """Choose up to `steps` more tokens on the current stream, without waiting for them.

        Raises:
            KprofError: a launch before has had a fault, or this one fails.
        """
        self.check()
        self.counters.zero_()
        self.parameters.steps = steps
        argument = (ctypes.c_void_p * 1)(ctypes.addressof(self.parameters))
        stream = torch.cuda.current_stream(self.device).cuda_stream
        num_sms = len(self.schedule.queues)
        _driver_call(
            "cuLaunchCooperativeKernel",
            self._function,
            *(num_sms, 1, 1, self.threads, 1, 1, self.shared),
            ctypes.c_void_p(stream),
            argument,
        )

    def logits(self) -> Tensor:
        """Choose one more token; return its logits, float32."""
        self.parameters.logits = self.memory.logits.data_ptr()
        self.run(1)
        self.parameters.logits = None
        return self.memory.logits

    def check(self) -> None:
        """Raise an error if a wait of the kernel has exceeded its limit."""
        code, sm, place, step, seen, wanted = self.host_fault[:6].tolist()
        if code:
            raise KprofError(
                f"the persistent kernel has stopped: {FAULTS.get(code, 'a fault')} on SM {sm}, "
                f"instruction {place}, step {step}: {seen}, not {wanted}",
                fix="stop other processes on this GPU, or decode without the persistent kernel",
            )


def _clock_khz(device: torch.device) -> int:
    khz = getattr(torch.cuda.get_device_properties(device), "clock_rate", 0)
    # The boost clock of an H100 in kHz, where torch does not tell.
    return int(khz) or 1_980_000


def _driver_call(name: str, *arguments: Any) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    code = getattr(driver, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        problem = (text.value or b"unknown error").decode()
        raise KprofError(
            f"the persistent kernel fails in {name}: {problem} ({code})",
            fix="decode without it: `generate` of a swapped model uses CUDA graphs then",
        )


def _loaded(cubin: bytes, shared: int) -> ctypes.c_void_p:
    """Return the kernel in the context of torch, allowed so much shared memory."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _driver_call("cuModuleLoadData", ctypes.byref(module), cubin)
    _driver_call("cuModuleGetFunction", ctypes.byref(function), module, b"decode")
    _driver_call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, shared)
    return function
