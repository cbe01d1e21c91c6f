"""Builders of tiny Kineto files, so that a test shows only the events it is about."""

import json


def kernel(**changes):
    return _event("kernel", "gemm", {"device": 0, "stream": 7, "correlation": 1}, changes)


def operator(**changes):
    return _event("cpu_op", "aten::mm", {"External id": 1}, changes)


def launch(**changes):
    args = {"External id": 1, "correlation": 1}
    return _event("cuda_runtime", "cudaLaunchKernel", args, changes)


def annotation(name, **changes):
    return _event("user_annotation", name, {}, changes)


def python_call(name, **changes):
    return _event("python_function", name, {"Python id": 1}, changes)


def allocation(**args):
    args = {"Total Allocated": 512, "Total Reserved": 2048, "Device Id": 0, "Device Type": 1} | args
    event = _event("cpu_instant_event", "[memory]", args, {"ph": "i", "ts": 5})
    del event["dur"]
    return event


def write(folder, *events, name="trace.json", **around):
    """Write a file in the layout of Kineto; `around` are further keys of the document."""
    path = folder / name
    path.write_text(json.dumps({"schemaVersion": 1, **around, "traceEvents": list(events)}))
    return path


def _event(category, name, args, changes):
    args = args | changes.pop("args", {})
    event = {"ph": "X", "cat": category, "name": name, "pid": 10, "tid": 11, "ts": 1, "dur": 2}
    return event | changes | {"args": args}
