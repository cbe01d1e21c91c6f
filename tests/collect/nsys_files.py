"""Builders of tiny Nsight Systems exports, so that a test shows only the rows it is about."""

import sqlite3
from contextlib import closing

PID = 100
PUSHED, STARTED, MARK = 59, 60, 34
# Columns whose numbers stand for texts; a row gives the text.
TEXTS = ("demangledName", "shortName", "nameId", "textId")


def process(pid=PID):
    return (1 << 48) | (pid << 24)


def thread(tid=PID, pid=PID):
    return process(pid) | tid


def kernel(pid=PID, **changes):
    grid = {"gridX": 8, "gridY": 1, "gridZ": 1, "blockX": 256, "blockY": 1, "blockZ": 1}
    named = {"demangledName": "gemm", "shortName": "gemm", "graphNodeId": None}
    return "CUPTI_ACTIVITY_KIND_KERNEL", _activity(pid) | grid | named | changes


def copy(pid=PID, **changes):
    what = {"bytes": 4096, "copyKind": 1, "srcKind": 1, "dstKind": 2, "graphNodeId": None}
    return "CUPTI_ACTIVITY_KIND_MEMCPY", _activity(pid) | what | changes


def fill(pid=PID, **changes):
    what = {"bytes": 64, "value": 0, "memKind": 2, "graphNodeId": None}
    return "CUPTI_ACTIVITY_KIND_MEMSET", _activity(pid) | what | changes


def whole_graph(pid=PID, **changes):
    what = {"graphId": 3, "graphExecId": 4}
    return "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", _activity(pid) | what | changes


def launch(name="cudaLaunchKernel_v7000", pid=PID, tid=PID, **changes):
    row = {"start": 50, "end": 60, "globalTid": thread(tid, pid), "correlationId": 1}
    return "CUPTI_ACTIVITY_KIND_RUNTIME", row | {"nameId": name} | changes


def nvtx(text, start=0, end=100, pid=PID, tid=PID, **changes):
    row = {"start": start, "end": end, "eventType": PUSHED, "text": text, "textId": None}
    where = {"globalTid": thread(tid, pid), "endGlobalTid": None, "domainId": 0}
    return "NVTX_EVENTS", row | where | changes


def system_call(name, start, end, pid=PID, tid=PID):
    row = {"start": start, "end": end, "globalTid": thread(tid, pid), "nameId": name}
    return "OSRT_API", row | {"correlationId": 1}


def gpu(**changes):
    row = {"id": 0, "name": "NVIDIA H200", "smCount": 132, "totalMemory": 150_000_000_000}
    return "TARGET_INFO_GPU", row | {"computeMajor": 9, "computeMinor": 0} | changes


def session(**changes):
    return "TARGET_INFO_SESSION_START_TIME", {"utcEpochNs": 1_700_000_000_000_000_000} | changes


def setting(table, name, value):
    return table, {"name": name, "value": value}


def message(severity, text):
    return "DIAGNOSTIC_EVENT", {"timestamp": 0, "severity": severity, "text": text}


def write(folder, *rows, name="trace.sqlite"):
    """Write an export; every row is a table's name and its columns."""
    path = folder / name
    texts = {}
    with closing(sqlite3.connect(path)) as connection, connection:
        for table, row in rows:
            numbered = {
                column: texts.setdefault(value, len(texts) + 1)
                if column in TEXTS and value is not None
                else value
                for column, value in row.items()
            }
            names = ", ".join(f'"{column}"' for column in row)
            connection.execute(f'CREATE TABLE IF NOT EXISTS "{table}" ({names})')
            places = ", ".join("?" * len(row))
            values = [*numbered.values()]
            connection.execute(f'INSERT INTO "{table}" ({names}) VALUES ({places})', values)
        connection.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        connection.executemany(
            "INSERT INTO StringIds VALUES (?, ?)", [(i, text) for text, i in texts.items()]
        )
    return path


def _activity(pid):
    place = {"start": 1000, "end": 1500, "deviceId": 0, "streamId": 7}
    return place | {"correlationId": 1, "globalPid": process(pid)}
