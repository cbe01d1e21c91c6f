"""What an export says about itself: versions, command, wall time, and what went wrong."""

from __future__ import annotations

import re

from kprof.collect.readers._nsys.database import Database

# Of the warnings those that are about what kprof reads; errors count whatever they are about.
_OF_INTEREST = re.compile(
    r"CUDA|CUPTI|NVTX|GPU|drop|lost|lose|buffer|incomplete|missing|overflow|truncat", re.IGNORECASE
)
_WARNING, _ERROR = 2, 3
MOST_MESSAGES = 8


def versions_of(database: Database) -> dict[str, str]:
    """Return the versions of Nsight Systems, the driver and its CUDA."""
    exported, system = database.pairs("META_DATA_EXPORT"), database.pairs("TARGET_INFO_SYSTEM_ENV")
    cuda = system.get("CudaDriverVersion", "")
    told = {
        "nsys": exported.get("EXPORT_PRODUCT_VERSION"),
        "driver": system.get("NvDriverVersion"),
        "cuda_driver": f"{int(cuda) // 1000}.{int(cuda) % 1000 // 10}" if cuda.isdecimal() else "",
    }
    return {name: version for name, version in told.items() if version not in (None, "", "0")}


def host_of(database: Database) -> str | None:
    """Return the name of the machine."""
    return database.pairs("TARGET_INFO_SYSTEM_ENV").get("Hostname") or None


def command_of(database: Database) -> tuple[str, ...]:
    """Return the command that Nsight Systems started, where it did."""
    told = database.pairs("META_DATA_CAPTURE")
    words = [told.get("PROCESS_0:COMMAND", "")]
    while (word := told.get(f"PROCESS_0:ARGUMENT_{len(words) - 1}")) is not None:
        words.append(word)
    return tuple(words) if words[0] else ()


def base_time_ns_of(database: Database) -> int | None:
    """Return the wall time at the clock's zero, which an export may have shifted."""
    asked = database.pairs("META_DATA_EXPORT")
    if asked.get("EXPORT_PARAM_TIME_NORMALIZE") == "true":
        return 0
    table = "TARGET_INFO_SESSION_START_TIME"
    if not database.has(table, "utcEpochNs"):
        return None
    shift = asked.get("EXPORT_PARAM_TIME_SHIFT", "0")
    starts = [row[0] for row in database.rows(f"SELECT utcEpochNs FROM {table} LIMIT 1")]
    if not starts or not isinstance(starts[0], int) or not re.fullmatch(r"-?\d{1,18}", shift):
        return None
    return starts[0] - int(shift)


def messages_of(database: Database) -> list[str]:
    """Return what Nsight Systems itself complained about."""
    table = "DIAGNOSTIC_EVENT"
    if not (database.has(table, "severity") and database.has(table, "text")):
        return []
    query = f"SELECT severity, text FROM {table} WHERE severity IN ({_WARNING}, {_ERROR})"
    said = [
        " ".join(str(text).split())
        for severity, text in database.rows(query)
        if severity == _ERROR or _OF_INTEREST.search(str(text))
    ]
    distinct = list(dict.fromkeys(said))
    messages = [f"Nsight Systems says: {text}" for text in distinct[:MOST_MESSAGES]]
    if more := len(distinct) - MOST_MESSAGES:
        messages += [f"Nsight Systems has {more} more messages like these."] if more > 0 else []
    return messages
