import json

import msgspec
import pytest

from kprof.analyze.passes import analyze
from kprof.collect.readers.kineto import reader as kineto
from kprof.collect.readers.proton.reader import knows, read
from kprof.errors import TraceError
from kprof.report.summary import summarize
from kprof.trace import NOT_RECORDED
from tests.quantities import quantities_in

DEVICES = {
    "CUDA": {
        "0": {
            "arch": "90",
            "bus_width": 6144,
            "clock_rate": 1980000,
            "memory_clock_rate": 3201000,
            "num_sms": 132,
        }
    }
}


def node(name, *children, **metrics):
    return {
        "children": list(children),
        "frame": {"name": name, "type": "function"},
        "metrics": metrics,
    }


def kernel(name, time_ns, count=1, **metrics):
    told = {"count": count, "device_id": "0", "device_type": "CUDA", "time (ns)": time_ns}
    return node(name, **{**told, **metrics})


def profile(folder, *children, name="proton.hatchet"):
    root = node("ROOT", *children, count=0, **{"time (ns)": 0})
    path = folder / name
    path.write_text("\n" + json.dumps([root, DEVICES], indent=4) + "\n")
    return path


def test_a_row_adds_up_the_launches_of_a_kernel_on_one_path(tmp_path):
    trace = read(profile(tmp_path, kernel("add", 300, count=3), kernel("mul", 50)))
    kernels = trace.kernels[["name", "start_ns", "duration_ns", "launches", "device"]]
    assert kernels.to_numpy().tolist() == [["add", 0, 300, 3, 0], ["mul", 300, 50, 1, 0]]


def test_starts_of_launches_are_unknown(tmp_path):
    assert not read(profile(tmp_path, kernel("add", 300))).has_timeline


def test_several_devices_without_a_timeline_have_no_idle_time(tmp_path):
    tree = [kernel("add", 300), kernel("mul", 100, device_id="1")]
    summary = summarize(analyze(read(profile(tmp_path, *tree))))
    assert (summary.whole_ns, summary.total_ns) == (400, 400)
    assert [(one.time_ns, one.is_idle) for one in summary.time] == [(400, False)]


@pytest.mark.parametrize("declared", [{}, {"flops16": 10**9, "bytes": 10**6}])
def test_work_that_was_declared_is_not_called_unknown(tmp_path, declared):
    tree = kernel("gemm", 300_000_000, **declared)
    (found,) = analyze(read(profile(tmp_path, tree))).diagnosis.findings
    assert ("work is not known" in found.claim) == (not declared)


def test_scopes_are_modules_named_by_their_path(tmp_path):
    tree = node("layer0", node("mlp", kernel("gemm", 100)), kernel("add", 20))
    kernels = analyze(read(profile(tmp_path, tree))).kernels
    assert kernels["module"].tolist() == ["layer0.mlp", "layer0"]
    assert kernels["bucket"].tolist() == ["attributed", "attributed"]


def test_the_same_kernel_under_two_scopes_is_two_rows(tmp_path):
    trees = [node(scope, kernel("gemm", 100)) for scope in ("a", "b")]
    assert analyze(read(profile(tmp_path, *trees))).kernels["module"].tolist() == ["a", "b"]


def test_a_scope_tells_no_phase(tmp_path):
    kernels = analyze(read(profile(tmp_path, node("layer0", kernel("gemm", 100))))).kernels
    assert kernels["phase"].isna().all()


def test_frames_of_python_are_no_modules(tmp_path):
    tree = node("/app/train.py:step@12", node("mlp", kernel("gemm", 100)))
    trace = analyze(read(profile(tmp_path, tree)))
    assert trace.kernels["module"].tolist() == ["mlp"]
    assert set(trace.ranges["kind"]) == {"python", "module", "runtime"}


def test_what_a_kernel_declares_is_its_work(tmp_path):
    tree = kernel("gemm", 100, flops16=2e9, bytes=1000)
    kernels = analyze(read(profile(tmp_path, tree))).kernels
    assert kernels[["flops", "bytes", "work_from"]].to_numpy().tolist() == [
        [2_000_000_000, 1000, "declared"]
    ]


def test_flops_alone_leave_the_bytes_unknown(tmp_path):
    kernels = analyze(read(profile(tmp_path, kernel("gemm", 100, flops16=2e9)))).kernels
    assert kernels["flops"].tolist() == [2_000_000_000]
    assert kernels["bytes"].isna().all()


def test_what_a_scope_declares_is_divided_by_time_over_what_ran_in_it(tmp_path):
    tree = node("attention", kernel("qk", 100), kernel("pv", 300), bytes=1001)
    kernels = read(profile(tmp_path, tree)).kernels
    assert kernels["declared_bytes"].tolist() == [250, 751]


def test_what_an_inner_node_declares_is_not_declared_twice(tmp_path):
    tree = node("layer", kernel("gemm", 100, flops8=8), kernel("add", 50), flops16=10)
    kernels = read(profile(tmp_path, tree)).kernels
    assert kernels["declared_flops"].tolist() == [8, 10]
    assert kernels["declared_type"].tolist() == ["fp8", "fp16"]


def test_bytes_of_an_inner_node_are_not_declared_twice(tmp_path):
    tree = node("layer", kernel("gemm", 100, bytes=8), kernel("add", 50), bytes=10)
    assert read(profile(tmp_path, tree)).kernels["declared_bytes"].tolist() == [8, 10]


def test_flops_of_no_type_are_left_out_and_counted(tmp_path):
    trace = read(profile(tmp_path, kernel("gemm", 100, flops=10)))
    assert trace.kernels["declared_flops"].isna().all()
    (told,) = [one.text for one in trace.meta.caveats if one.id == "untyped_flops"]
    assert quantities_in(told) == ["1"]


def test_launches_of_proton_itself_are_left_out_and_counted(tmp_path):
    own = node("__proton_launch_metadata", kernel("sum", 40, count=2))
    trace = read(profile(tmp_path, own, kernel("gemm", 100)))
    assert trace.kernels["name"].tolist() == ["gemm"]
    (told,) = [one.text for one in trace.meta.caveats if one.id == "metadata_launches"]
    assert quantities_in(told) == ["2", "40 ns"]


def test_names_of_metrics_in_older_versions_are_understood(tmp_path):
    old = {"Count": 2, "DeviceId": "3", "DeviceType": "CUDA", "Time (ns)": 70}
    kernels = read(profile(tmp_path, node("add", **old))).kernels
    assert kernels[["duration_ns", "launches", "device"]].to_numpy().tolist() == [[70, 2, 3]]


def test_the_device_is_known_by_its_architecture(tmp_path):
    (gpu,) = read(profile(tmp_path, kernel("add", 1))).meta.gpus
    assert (gpu.index, quantities_in(gpu.name), gpu.num_sms) == (0, ["90"], 132)


def test_a_packed_profile_tells_the_same(tmp_path):
    tree = node("layer0", kernel("gemm", 100, count=4, flops16=2e9))
    text = profile(tmp_path, tree)
    root, devices = json.loads(text.read_text())
    in_order = json.dumps([_frame_first(root), devices])
    packed = tmp_path / "proton.hatchet_msgpack"
    packed.write_bytes(msgspec.msgpack.encode(json.loads(in_order)))
    assert knows(tmp_path / "unnamed", packed.read_bytes())
    assert read(packed).kernels.equals(read(text).kernels)


def _frame_first(one):
    """Order a node as Proton packs it."""
    return {
        "frame": one["frame"],
        "metrics": one["metrics"],
        "children": [_frame_first(child) for child in one["children"]],
    }


def test_deep_paths_are_walked(tmp_path):
    tree = kernel("gemm", 100)
    for depth in range(150):
        tree = node(f"/app/a.py:f{depth}@1", tree)
    assert read(profile(tmp_path, tree)).kernels["duration_ns"].tolist() == [100]


def test_a_profile_without_times_is_an_error(tmp_path):
    with pytest.raises(TraceError, match="without the time"):
        read(profile(tmp_path, node("matmul", flops16=2e9)))


def test_a_profile_that_was_cut_off_is_an_error(tmp_path):
    path = profile(tmp_path, kernel("gemm", 100))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(TraceError, match="no whole profile"):
        read(path)


def test_a_profile_is_known_whatever_its_name(tmp_path):
    path = profile(tmp_path, kernel("gemm", 100), name="profile.json")
    head = path.read_bytes()
    assert knows(path, head)
    assert not kineto.knows(path, head)


def test_a_trace_of_kineto_is_not_known(tmp_path):
    assert not knows(tmp_path / "trace.json", b'{"traceEvents": [{"ph": "X"}]}')
    assert not knows(tmp_path / "trace.json", b'[{"ph": "X"}]')


def timeline(folder, *streams):
    path = folder / "proton.chrome_trace"
    lines = [
        {"displayTimeUnit": "us", "traceEvents": [event(stream, *one) for one in events]}
        for stream, events in streams
    ]
    path.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))
    return path


def event(stream, name, ts, dur):
    stack = ["ROOT", "layer0", name]
    told = {"name": name, "cat": "kernel", "ph": "X", "ts": ts, "dur": dur, "tid": stream}
    return {**told, "args": {"call_stack": stack}}


def test_a_timeline_of_several_streams_is_exact_to_the_nanosecond(tmp_path):
    path = timeline(tmp_path, (7, [("add", 0.0, 1.001)]), (13, [("mul", 0.5, 123456.789)]))
    trace = read(path)
    assert trace.has_timeline
    assert trace.kernels[["name", "stream", "start_ns", "duration_ns"]].to_numpy().tolist() == [
        ["add", 7, 0, 1001],
        ["mul", 13, 500, 123456789],
    ]


def test_the_device_of_a_timeline_is_not_recorded(tmp_path):
    trace = read(timeline(tmp_path, (7, [("add", 0.0, 1.001)])))
    assert trace.kernels["device"].tolist() == [NOT_RECORDED]


def test_a_timeline_of_proton_is_not_taken_for_one_of_kineto(tmp_path):
    path = timeline(tmp_path, (7, [("add", 0.0, 1.001)]))
    assert knows(path, path.read_bytes())
    assert not kineto.knows(path, path.read_bytes())
