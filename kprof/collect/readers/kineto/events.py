"""The fields of a Kineto event that kprof reads, with the role of each category."""

from __future__ import annotations

from decimal import Decimal
from enum import IntEnum
from functools import cache
from typing import Any, Union

import msgspec

# An id that the event does not carry; no recorder writes it, so integers stay in plain arrays.
MISSING = -(2**63)


class Role(IntEnum):
    """How kprof treats events of a category."""

    OTHER = 0
    OPERATOR = 1
    ANNOTATION = 2
    RUNTIME = 3
    PYTHON = 4
    KERNEL = 5
    MEMCPY = 6
    MEMSET = 7
    MEMORY = 8
    OVERHEAD = 9


# All of Kineto's ActivityType that take time, by what they are. Capitalised names are those of
# files from before 2022.
ROLE_OF_CATEGORY = {
    "cpu_op": Role.OPERATOR,
    "Operator": Role.OPERATOR,
    "user_annotation": Role.ANNOTATION,
    "cuda_runtime": Role.RUNTIME,
    "cuda_driver": Role.RUNTIME,
    "hpu_op": Role.RUNTIME,
    "Runtime": Role.RUNTIME,
    "python_function": Role.PYTHON,
    "kernel": Role.KERNEL,
    "Kernel": Role.KERNEL,
    "mtia_ccp_events": Role.KERNEL,
    "gpu_memcpy": Role.MEMCPY,
    "Memcpy": Role.MEMCPY,
    "gpu_memset": Role.MEMSET,
    "Memset": Role.MEMSET,
    "cpu_instant_event": Role.MEMORY,
    "overhead": Role.OVERHEAD,
}
# Calls of any other device, as xpu_runtime, mtia_runtime and privateuse1_driver.
OF_CALLS = ("_runtime", "_driver")
# Categories that take no time of their own: marks of the file, arrows, what repeats other events.
WITHOUT_TIME = frozenset(
    {
        *("", "Trace", "ac2g", "async_cpu_to_gpu", "fwdbwd", "forward_backward"),
        *("gpu_user_annotation", "cuda_sync", "cuda_event", "xpu_sync", "cuda_profiler_range"),
        *(
            "mtia_ccp_events",
            "external_correlation",
            "mtia_counters",
            "hardware_counters",
            "xpu_scope_profiler",
        ),
    }
)
# MTIA's notes on its streams: waits are not work, and copies have only a name.
MTIA_EVENTS = "mtia_ccp_events"
ROLE_OF_MTIA_NAME = {
    "event_wait": Role.OTHER,
    "event_record": Role.OTHER,
    "dma_request": Role.MEMCPY,
}
# Phases of flow events, which are read only where nothing else joins; see joins.py.
ARROWS = ("s", "f", "t")
OPERATOR_ROLES = (Role.OPERATOR, Role.ANNOTATION)
HOST_ROLES = (*OPERATOR_ROLES, Role.RUNTIME, Role.PYTHON, Role.OVERHEAD)
DEVICE_ROLES = (Role.KERNEL, Role.MEMCPY, Role.MEMSET)

_NOTHING = msgspec.Raw()


class Args(msgspec.Struct, gc=False):
    """An event's `args`, in the order in which Kineto writes them most often.

    Ids are `Any` because files hold them as integers, as numeric strings and as null; a value that
    is none of these is another program's and counts as missing.
    """

    external_id: Any = msgspec.field(name="External id", default=MISSING)
    sequence: Any = msgspec.field(name="Sequence number", default=MISSING)
    forward_thread: Any = msgspec.field(name="Fwd thread id", default=MISSING)
    values: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=_NOTHING)
    dtypes: msgspec.Raw = msgspec.field(name="Input type", default=_NOTHING)
    strides: msgspec.Raw = msgspec.field(name="Input Strides", default=_NOTHING)
    shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=_NOTHING)
    device: Any = MISSING
    stream: Any = MISSING
    correlation: Any = MISSING
    queue: Any = msgspec.field(name="sycl queue", default=MISSING)
    bytes: Any = MISSING
    grid: msgspec.Raw = _NOTHING
    block: msgspec.Raw = _NOTHING
    graph_node: Any = msgspec.field(name="graph node id", default=MISSING)
    collective: msgspec.Raw = msgspec.field(name="Collective name", default=_NOTHING)
    group_name: msgspec.Raw = msgspec.field(name="Process Group Name", default=_NOTHING)
    group_ranks: msgspec.Raw = msgspec.field(name="Process Group Ranks", default=_NOTHING)
    group_sequence: Any = msgspec.field(name="Seq", default=MISSING)
    message_in: msgspec.Raw = msgspec.field(name="In msg nelems", default=_NOTHING)
    message_out: msgspec.Raw = msgspec.field(name="Out msg nelems", default=_NOTHING)
    message_dtype: msgspec.Raw = msgspec.field(name="dtype", default=_NOTHING)
    group_size: msgspec.Raw = msgspec.field(name="Group size", default=_NOTHING)
    reserved_bytes: Any = msgspec.field(name="Total Reserved", default=MISSING)
    allocated_bytes: Any = msgspec.field(name="Total Allocated", default=MISSING)
    device_id: Any = msgspec.field(name="Device Id", default=MISSING)
    device_type: Any = msgspec.field(name="Device Type", default=MISSING)
    old_external_id: Any = msgspec.field(name="external id", default=MISSING)
    noted_range: msgspec.Raw = msgspec.field(name="name", default=_NOTHING)
    noted_range_before_2_14: msgspec.Raw = msgspec.field(name="str", default=_NOTHING)
    noted_module: msgspec.Raw = msgspec.field(name="module_fqn", default=_NOTHING)


class Event(msgspec.Struct, gc=False):
    """An entry of `traceEvents` whose times may be doubles."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    ts: Any = None
    dur: Any = None
    args: Args | None = None


class ExactEvent(Event, gc=False):
    """An entry whose times are decoded from their text."""

    ts: Decimal | None = None
    dur: Decimal | None = None


# The fields of `Args` that are read of events of a role; of all others the sequence alone.
_EXTERNAL = ("external_id", "old_external_id", "sequence")
_MESSAGE = ("collective", "message_in", "message_out", "message_dtype", "group_size")
_OF_OPERATORS = (
    *(*_EXTERNAL, *_MESSAGE, "forward_thread"),
    *("values", "dtypes", "strides", "shapes"),
)
_OF_DEVICES = (
    *(*_EXTERNAL, "correlation", "device", "stream", "queue", "bytes", "grid", "block"),
    *("graph_node", "noted_range", "noted_range_before_2_14", "noted_module"),
    *("collective", "group_name", "group_ranks", "group_sequence"),
)
_OF_MEMORY = ("sequence", "reserved_bytes", "allocated_bytes", "device_id", "device_type")
ARGS_OF_ROLE = {
    **dict.fromkeys(OPERATOR_ROLES, _OF_OPERATORS),
    **dict.fromkeys(DEVICE_ROLES, _OF_DEVICES),
    Role.RUNTIME: (*_EXTERNAL, "correlation"),
    Role.MEMORY: _OF_MEMORY,
}


def _event_type(category: str) -> type:
    """Return `Event` for one category, with only the `args` that its role needs."""
    role = ROLE_OF_CATEGORY.get(category, Role.OTHER)
    args = _args_type(ARGS_OF_ROLE.get(role, ("sequence",)))
    fields = [(one.name, one.type, one.default) for one in msgspec.structs.fields(Event)]
    return msgspec.defstruct(
        f"{category}_event",
        [one for one in fields if one[0] not in ("cat", "args")] + [("args", args | None, None)],
        tag_field="cat",
        tag=category,
        namespace={"cat": category},
        gc=False,
    )


@cache
def _args_type(names: tuple[str, ...]) -> Any:  # noqa: ANN401 - a type that is made here
    """Return `Args` with some of its fields; the others have their defaults."""
    fields = msgspec.structs.fields(Args)
    return msgspec.defstruct(
        "Args",
        [
            (one.name, one.type, msgspec.field(name=one.encode_name, default=one.default))
            for one in fields
            if one.name in names
        ],
        namespace={one.name: one.default for one in fields if one.name not in names},
        gc=False,
    )


NO_ARGS = Args()
# MTIA's notes are of several roles.
KNOWN_CATEGORIES = (ROLE_OF_CATEGORY.keys() | WITHOUT_TIME) - {"", MTIA_EVENTS}
# Decodes the events of known categories alone, in about three quarters of the time.
KNOWN_DECODER: msgspec.json.Decoder[list[Event]] = msgspec.json.Decoder(
    list[Union[tuple(map(_event_type, sorted(KNOWN_CATEGORIES)))]]  # type: ignore[misc]  # noqa: UP007
)
FAST_DECODER = msgspec.json.Decoder(list[Event])
EXACT_DECODER = msgspec.json.Decoder(list[ExactEvent])


def role_of(category: str) -> Role | None:
    """Return what events of a category are; None where nothing tells."""
    role = ROLE_OF_CATEGORY.get(category)
    return Role.RUNTIME if role is None and category.endswith(OF_CALLS) else role
