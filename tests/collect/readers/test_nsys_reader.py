"""An Nsight Systems export becomes the same tables that every other trace becomes."""

import gzip

import pandas as pd
import pytest

from kprof.analyze.attribution.ledger import balance
from kprof.analyze.passes import analyze
from kprof.collect.readers.nsys import database
from kprof.collect.readers.nsys.reader import knows, read
from kprof.opened import open_trace
from kprof.opened import read as read_paths
from kprof.trace import Gpu
from tests.collect.nsys_files import (
    MARK,
    STARTED,
    copy,
    fill,
    gpu,
    kernel,
    launch,
    message,
    nvtx,
    session,
    setting,
    system_call,
    thread,
    whole_graph,
    write,
)
from tests.quantities import quantities_in


def only(frame):
    assert len(frame) == 1
    return frame.iloc[0]


def of_kind(trace, kind):
    return trace.ranges[trace.ranges["kind"] == kind]


def test_a_kernel_is_an_activity_with_its_place_and_its_launch(tmp_path):
    row = only(read(write(tmp_path, kernel(), launch())).kernels)
    assert (row["name"], row["activity"], row["rank"]) == ("gemm", "kernel", 0)
    assert (row["device"], row["stream"], row["correlation"]) == (0, 7, 1)
    assert (row["start_ns"], row["duration_ns"]) == (1000, 500)
    assert (row["grid"], row["block"]) == ("8,1,1", "256,1,1")
    assert pd.isna(row["copied_bytes"])
    assert pd.isna(row["graph_node"])


def test_a_kernel_without_a_full_name_has_its_short_one(tmp_path):
    path = write(tmp_path, kernel(demangledName=None, shortName="gemm_short"))
    assert only(read(path).kernels)["name"] == "gemm_short"


def test_copies_and_sets_say_where_and_how_much(tmp_path):
    kernels = read(write(tmp_path, copy(), fill(start=2000, end=2100))).kernels
    assert kernels["name"].tolist() == ["Memcpy HtoD (Pinned -> Device)", "Memset (Device)"]
    assert kernels["activity"].tolist() == ["memcpy", "memset"]
    assert kernels["copied_bytes"].tolist() == [4096, 64]
    assert kernels["grid"].isna().all()


def test_a_copy_of_an_unknown_kind_says_so(tmp_path):
    path = write(tmp_path, copy(copyKind=99, srcKind=None))
    assert only(read(path).kernels)["name"] == "Memcpy Unknown (Unknown -> Device)"


def test_a_kernel_of_a_graph_carries_its_node_and_zero_is_none(tmp_path):
    rows = kernel(graphNodeId=77), kernel(graphNodeId=0, start=3000, end=3001)
    nodes = read(write(tmp_path, *rows)).kernels["graph_node"]
    assert nodes[0] == 77
    assert pd.isna(nodes[1])


def test_a_graph_that_was_recorded_as_a_whole_is_time_without_names(tmp_path):
    replay = launch("cudaGraphLaunch_v10000")
    trace = analyze(read(write(tmp_path, whole_graph(), replay)))
    ledger = balance(trace)
    assert only(trace.kernels)["activity"] == "graph"
    assert ledger.buckets == {"graph": 500}
    assert ledger.num_kernels == 0
    assert any(one.id == "whole_graphs" for one in trace.meta.caveats)


def test_runtime_calls_lose_the_version_in_their_names_but_not_the_drivers_number(tmp_path):
    calls = launch(), launch("cuMemcpyDtoH_v2", start=70, end=80, correlationId=2)
    ranges = read(write(tmp_path, *calls)).ranges
    assert ranges["name"].tolist() == ["cudaLaunchKernel", "cuMemcpyDtoH_v2"]
    assert ranges["kind"].tolist() == ["runtime", "runtime"]
    assert ranges["correlation"].tolist() == [1, 2]
    assert (ranges["thread"][0], ranges["duration_ns"][0]) == (100, 10)


def test_a_launch_inside_a_range_belongs_to_it(tmp_path):
    trace = analyze(read(write(tmp_path, kernel(), launch(), nvtx("tokenize"))))
    row = only(trace.kernels)
    assert (row["range"], row["bucket"]) == ("tokenize", "attributed")


def test_equal_correlations_of_two_processes_do_not_meet(tmp_path):
    of_other = {"pid": 200, "tid": 200}
    rows = (
        *(kernel(), kernel(pid=200, start=1200, end=1300)),
        *(launch(), launch(**of_other, start=150, end=160)),
        *(nvtx("mine"), nvtx("other", start=140, end=170, **of_other)),
    )
    kernels = analyze(read(write(tmp_path, *rows))).kernels
    assert kernels["rank"].tolist() == [0, 1]
    assert kernels["range"].tolist() == ["mine", "other"]


@pytest.mark.parametrize("text", ["forward", None])
def test_a_ranges_text_stands_in_it_or_among_the_shared_ones(tmp_path, text):
    row = nvtx(text, textId=None if text else "forward")
    assert only(read(write(tmp_path, row)).ranges)["name"] == "forward"


def test_kprofs_own_ranges_are_steps_phases_and_modules(tmp_path):
    texts = ("kprof.step#5", "kprof.phase#forward", "kprof.module#layers.0.mlp", "kprof.other#1")
    ranges = read(write(tmp_path, *(nvtx(text) for text in texts))).ranges
    assert ranges["kind"].tolist() == ["step", "phase", "module", "range"]
    assert ranges["name"].tolist() == ["5", "forward", "layers.0.mlp", "kprof.other#1"]


def test_a_range_that_torch_wrote_is_an_operator_with_its_shapes(tmp_path):
    text = "aten::mm, seq = 7, op_id = 12, sizes = [[2, 3], [3, 4], []], input_op_ids = [(1,0)]"
    row = only(read(write(tmp_path, nvtx(text))).ranges)
    assert (row["kind"], row["name"], row["sequence"]) == ("op", "aten::mm", 7)
    assert row["input_shapes"] == "[[2, 3], [3, 4], []]"


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("aten::empty, op_id = 3", "op", "aten::empty"),
        ("aten::add, seq = 3", "op", "aten::add"),
        ("aten::view", "op", "aten::view"),
        ("kprof.module#a, op_id = 9", "module", "a"),
        ("ProfilerStep#4, op_id = 9", "step", "ProfilerStep#4"),
        ("loss, sizes", "range", "loss, sizes"),
        ("", "range", ""),
    ],
)
def test_what_torch_writes_is_told_from_other_ranges(tmp_path, text, kind, name):
    row = only(read(write(tmp_path, nvtx(text))).ranges)
    assert (row["kind"], row["name"]) == (kind, name)
    assert pd.isna(row["sequence"]) == ("seq" not in text)
    assert pd.isna(row["input_shapes"])


def test_a_backward_kernel_finds_the_module_of_its_forward(tmp_path):
    rows = (
        nvtx("kprof.module#layers.0", 0, 40),
        nvtx("aten::mm, seq = 7, op_id = 1", 10, 30),
        nvtx("autograd::engine::evaluate_function: MmBackward0, op_id = 2", 45, 90, tid=101),
        nvtx("MmBackward0, seq = 7, op_id = 3", 46, 80, tid=101),
        launch(tid=101),
        kernel(),
    )
    row = only(analyze(read(write(tmp_path, *rows))).kernels)
    assert (row["module"], row["phase"], row["op"]) == ("layers.0", "backward", "MmBackward0")


def test_a_mark_is_no_range(tmp_path):
    rows = nvtx("here", end=None, eventType=MARK), nvtx("there")
    assert read(write(tmp_path, *rows)).ranges["name"].tolist() == ["there"]


def test_a_range_that_was_still_open_ends_with_the_trace(tmp_path):
    trace = read(write(tmp_path, nvtx("epoch", end=None), kernel(), launch()))
    assert only(of_kind(trace, "range"))["duration_ns"] == 1500
    (told,) = [one.text for one in trace.meta.caveats if one.id == "open_ranges"]
    assert quantities_in(told) == ["1"]


def test_a_range_that_moves_to_another_thread_is_left_out_and_counted(tmp_path):
    rows = (
        nvtx("request", eventType=STARTED, endGlobalTid=thread(101)),
        nvtx("batch", eventType=STARTED, endGlobalTid=thread()),
        kernel(),
    )
    trace = read(write(tmp_path, *rows))
    assert trace.ranges["name"].tolist() == ["batch"]
    assert any(
        one.id == "crossing_ranges" and one.text.endswith(": 1.") for one in trace.meta.caveats
    )


def test_calls_of_libraries_are_ranges(tmp_path):
    _, row = launch("cudnnConvolutionForward")
    del row["correlationId"]
    ranges = read(write(tmp_path, ("CUDNN_EVENTS", row))).ranges
    assert (only(ranges)["kind"], only(ranges)["name"]) == ("range", "cudnnConvolutionForward")


def test_calls_of_the_system_are_ranges_where_a_thread_launches_work(tmp_path):
    rows = [
        system_call("read", 10_000, 40_000),
        # A part of the call that makes it.
        system_call("ioctl", 52_000, 58_000),
        system_call("poll", 45_000, 55_000),
        # Of a thread that launches nothing.
        system_call("nanosleep", 0, 90_000, tid=7),
        # Too short to explain anything.
        system_call("write", 41_000, 42_000),
    ]
    trace = read(write(tmp_path, kernel(), launch(start=50_000, end=60_000), *rows))
    row = only(of_kind(trace, "system"))
    assert (row["name"], row["start_ns"], row["duration_ns"]) == ("read", 10_000, 30_000)
    assert pd.isna(row["correlation"])
    assert len(of_kind(trace, "runtime")) == 1


@pytest.mark.parametrize("absent", ["nameId", "globalTid"])
def test_calls_of_the_system_that_say_too_little_are_left_out(tmp_path, absent):
    table, row = system_call("read", 10_000, 40_000)
    del row[absent]
    trace = read(write(tmp_path, kernel(), launch(), (table, row)))
    assert trace.ranges["kind"].tolist() == ["runtime"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "{'mod': 'torch.nn.functional', 'op': 'conv2d', 'args': []}",
            "torch.nn.functional.conv2d",
        ),
        ("{'mod': '', 'op': 'randn', 'args': []}", "randn"),
        ("{'traceMarker': ['net.py:3'], 'funcStack': '/<module>/Net::forward/relu'}", "relu"),
        ("{'step': 3}", "{'step': 3}"),
    ],
)
def test_a_payload_of_dlprof_is_named_by_its_function(tmp_path, text, name):
    assert read(write(tmp_path, kernel(), nvtx(text))).ranges["name"].tolist() == [name]


def test_ranks_are_the_processes_that_used_a_gpu_in_the_order_of_their_ids(tmp_path):
    rows = (
        *(kernel(pid=300), kernel(pid=200, start=2000, end=2100)),
        *(nvtx("rank", pid=200, tid=200), nvtx("launcher", pid=150, tid=150)),
    )
    trace = read(write(tmp_path, *rows))
    assert trace.kernels["rank"].tolist() == [1, 0]
    assert trace.ranges["name"].tolist() == ["rank"]
    assert trace.meta.num_ranks == 2
    assert any("(200, 300)" in one.text for one in trace.meta.caveats)
    (told,) = [one.text for one in trace.meta.caveats if one.id == "processes_without_gpu"]
    assert quantities_in(told) == ["1"]


def test_who_knows_the_ranks_gives_them_by_process(tmp_path):
    path = write(tmp_path, kernel(pid=200), kernel(pid=300, start=2000, end=2100))
    trace = read(path, {200: 1, 300: 0})
    assert trace.kernels["rank"].tolist() == [1, 0]
    assert not any(one.id == "ranks_by_process" for one in trace.meta.caveats)
    assert any(one.id == "ranks_by_process" for one in read(path).meta.caveats)


def test_a_process_of_unknown_rank_takes_a_free_one(tmp_path):
    path = write(tmp_path, kernel(pid=200), kernel(pid=300, start=2000, end=2100))
    assert read(path, {300: 0}).kernels["rank"].tolist() == [1, 0]


TOLD_OF_A_SESSION = (
    *(gpu(), message(2, "CUDA events were lost")),
    setting("META_DATA_CAPTURE", "PROCESS_0:COMMAND", "train"),
    setting("META_DATA_EXPORT", "EXPORT_PRODUCT_VERSION", "2025.5"),
    ("TARGET_INFO_CUDA_DEVICE", {"gpuId": 0, "cudaId": 0, "pid": 100}),
    ("TARGET_INFO_CUDA_GPU", {"deviceId": 0, "name": "NVIDIA H200", "numMultiprocessors": 132}),
)


def test_the_gpus_are_described(tmp_path):
    gpus = read(write(tmp_path, kernel(), gpu())).meta.gpus
    assert gpus == (Gpu(0, "NVIDIA H200", 132, 150_000_000_000, "9.0"),)


def test_the_gpus_of_an_old_export_are_described_in_another_table(tmp_path):
    row = {"deviceId": 1, "name": "NVIDIA GeForce RTX 3080", "numMultiprocessors": 68}
    row |= {"globalMemorySize": 10_495_524_864, "pid": 100}
    old = ("TARGET_INFO_CUDA_GPU", row | {"computeCapabilityMajor": 8, "computeCapabilityMinor": 6})
    without_id = ("TARGET_INFO_GPU", {"deviceId": 1, "name": "NVIDIA GeForce RTX 3080"})
    gpus = read(write(tmp_path, kernel(deviceId=1), without_id, old)).meta.gpus
    assert gpus == (Gpu(1, "NVIDIA GeForce RTX 3080", 68, 10_495_524_864, "8.6"),)


def test_the_attributes_of_the_gpu_give_its_ceilings(tmp_path):
    row = gpu(
        name="Strange 9000",
        smCount=48,
        computeMajor=8,
        computeMinor=6,
        clockRate=1_860_000_000,
        memoryBandwidth=608_064_000_000,
    )
    device = read(write(tmp_path, kernel(), row)).meta.device
    assert device.memory_bytes_per_s == 608_064_000_000
    assert device.flops_per_s["fp32"] == 48 * 256 * 1_860_000_000


def test_a_datasheet_comes_before_the_attributes_of_the_gpu(tmp_path):
    row = gpu(computeMajor=8, clockRate=1_410_000_000, memoryBandwidth=1)
    path = write(tmp_path, kernel(), row)
    assert open_trace(path).meta.device.name == "H200 SXM"


@pytest.mark.parametrize("row", TOLD_OF_A_SESSION, ids=lambda row: row[0])
def test_a_column_that_describes_the_session_may_be_absent(tmp_path, row):
    table, columns = row
    for absent in columns:
        rest = {name: value for name, value in columns.items() if name != absent}
        path = write(tmp_path, kernel(), (table, rest), name=f"{absent}.sqlite")
        assert read(path).kernels["duration_ns"].tolist() == [500]


def test_a_gpu_goes_by_the_number_under_which_its_process_saw_it(tmp_path):
    rows = (
        *(gpu(), gpu(id=5, name="NVIDIA L4", smCount=58)),
        *(kernel(pid=200), kernel(pid=300)),
        ("TARGET_INFO_CUDA_DEVICE", {"gpuId": 5, "cudaId": 0, "pid": 200}),
        ("TARGET_INFO_CUDA_DEVICE", {"gpuId": 0, "cudaId": 0, "pid": 300}),
        ("TARGET_INFO_CUDA_DEVICE", {"gpuId": 0, "cudaId": 1, "pid": 999}),
    )
    gpus = read(write(tmp_path, *rows)).meta.gpus
    assert [(g.rank, g.index, g.name) for g in gpus] == [(0, 0, "NVIDIA L4"), (1, 0, "NVIDIA H200")]


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("EXPORT_PARAM_TIME_SHIFT", "0", 1_700_000_000_000_000_000),
        ("EXPORT_PARAM_TIME_SHIFT", "-500", 1_700_000_000_000_000_500),
        ("EXPORT_PARAM_TIME_SHIFT", "soon", None),
        ("EXPORT_PARAM_TIME_NORMALIZE", "true", 0),
    ],
)
def test_wall_time_follows_what_the_export_was_asked_for(tmp_path, option, value, expected):
    path = write(tmp_path, kernel(), session(), setting("META_DATA_EXPORT", option, value))
    assert read(path).meta.base_time_ns == expected


def test_without_the_start_of_the_session_wall_time_is_unknown(tmp_path):
    assert read(write(tmp_path, kernel())).meta.base_time_ns is None


def test_command_host_and_versions_are_told(tmp_path):
    meta = read(
        write(
            tmp_path,
            kernel(),
            setting("META_DATA_CAPTURE", "PROCESS_0:COMMAND", "python"),
            setting("META_DATA_CAPTURE", "PROCESS_0:ARGUMENT_0", "train.py"),
            setting("META_DATA_CAPTURE", "PROCESS_0:ARGUMENT_1", "--lr=3"),
            setting("META_DATA_EXPORT", "EXPORT_PRODUCT_VERSION", "2025.5.2.266"),
            setting("TARGET_INFO_SYSTEM_ENV", "NvDriverVersion", "580.95.05"),
            setting("TARGET_INFO_SYSTEM_ENV", "CudaDriverVersion", "13020"),
            setting("TARGET_INFO_SYSTEM_ENV", "Hostname", "node7"),
        )
    ).meta
    assert meta.command == ("python", "train.py", "--lr=3")
    assert meta.host == "node7"
    assert meta.versions == {"nsys": "2025.5.2.266", "driver": "580.95.05", "cuda_driver": "13.2"}


def test_warnings_about_cuda_and_all_errors_are_caveats(tmp_path):
    dropped, failed = "Some CUDA events\nwere dropped.", "The daemon failed."
    rows = (
        message(1, "CUDA injection initialized successfully."),
        message(2, dropped),
        message(2, "Scheduling information is absent."),
        message(3, failed),
    )
    caveats = list(map(str, read(write(tmp_path, kernel(), *rows)).meta.caveats))
    said = [c.removeprefix("Nsight Systems says: ") for c in caveats if "says" in c]
    assert said == [dropped.replace("\n", " "), failed]


def test_many_different_messages_are_counted_not_all_repeated(tmp_path):
    rows = [message(3, f"CUDA buffer {i} was lost") for i in range(10)]
    caveats = list(map(str, read(write(tmp_path, kernel(), *rows)).meta.caveats))
    assert sum("says" in caveat for caveat in caveats) == 8
    (rest,) = [caveat for caveat in caveats if "more messages" in caveat]
    assert quantities_in(rest) == ["2"]


def test_what_a_trace_without_operators_cannot_answer_is_said(tmp_path):
    caveats = {one.id for one in read(write(tmp_path, kernel(), launch())).meta.caveats}
    assert {"no_operators", "no_nvtx"} <= caveats


def test_operators_without_shapes_are_said(tmp_path):
    trace = read(write(tmp_path, kernel(), nvtx("aten::mm, op_id = 1")))
    caveats = {one.id for one in trace.meta.caveats}
    assert "no_shapes" in caveats
    assert "no_operators" not in caveats


def test_operators_alone_are_analyzed_as_the_hosts(tmp_path):
    path = write(tmp_path, nvtx("aten::mm, op_id = 1", 0, 70))
    trace = analyze(read_paths([path]))
    assert trace.is_host_only
    assert trace.kernels["duration_ns"].sum() == 70


def test_rows_are_read_in_batches_as_in_one(tmp_path, monkeypatch):
    rows = [
        row
        for i in range(7)
        for row in (kernel(start=i * 10, end=i * 10 + 5, correlationId=i), nvtx(f"r{i}", i, i + 1))
    ]
    path = write(tmp_path, *rows)
    whole = read(path)
    monkeypatch.setattr(database, "BATCH_ROWS", 2)
    parts = read(path)
    pd.testing.assert_frame_equal(parts.kernels, whole.kernels)
    pd.testing.assert_frame_equal(parts.ranges, whole.ranges)
    assert whole.ranges["name"].tolist() == [f"r{i}" for i in range(7)]


def test_a_gzipped_export_is_read_as_a_plain_one(tmp_path):
    plain = write(tmp_path, kernel(), launch())
    packed = tmp_path / "trace.sqlite.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    pd.testing.assert_frame_equal(read(packed).kernels, read(plain).kernels)


def test_a_name_of_any_characters_is_opened(tmp_path):
    path = write(tmp_path, kernel(), name="50% of #1?.sqlite")
    assert len(read(path).kernels) == 1


def test_nothing_is_written_beside_an_export(tmp_path):
    read(path := write(tmp_path, kernel()))
    assert list(tmp_path.iterdir()) == [path]


def test_exports_are_known_by_their_names_or_their_beginning(tmp_path):
    assert knows(tmp_path / "a.sqlite", b"")
    assert knows(tmp_path / "a.sqlite.gz", b"")
    assert knows(tmp_path / "a.nsys-rep", b"")
    assert knows(tmp_path / "a.db", b"SQLite format 3\x00rest")
    assert not knows(tmp_path / "a.json", b"{}")
    assert not knows(tmp_path, b"")


def test_a_folder_of_exports_is_a_distributed_job(tmp_path):
    rows = kernel(pid=7), kernel(pid=8, start=2000, end=2001)
    for node in ("node0", "node1"):
        write(tmp_path, *rows, name=f"{node}.sqlite")
    trace = read_paths([tmp_path])
    assert sorted(trace.kernels["rank"].tolist()) == [0, 1, 2, 3]


def test_a_report_in_a_folder_is_left_to_the_export_beside_it(tmp_path):
    write(tmp_path, kernel(), name="run.sqlite")
    (tmp_path / "run.nsys-rep").touch()
    assert len(read_paths([tmp_path]).kernels) == 1
