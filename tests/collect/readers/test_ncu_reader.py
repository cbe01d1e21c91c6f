import gzip

import pytest

from kprof.collect.readers.ncu.reader import knows, read
from kprof.errors import TraceError
from kprof.trace import NOT_RECORDED
from tests.ncu_files import DRAM, DURATION, SM, details_page, launch, raw_page
from tests.quantities import quantities_in

FULL = {
    DURATION: "2500",
    "dram__bytes_read.sum": "4096",
    "dram__bytes_write.sum": "1024",
    DRAM: "71.25",
    SM: "12.5",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "3.5",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "88",
    "launch__registers_per_thread": "32",
}


def read_text(folder, text, name="report.csv"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read(path)


def problem_of(folder, text):
    with pytest.raises(TraceError) as caught:
        read_text(folder, text)
    return str(caught.value)


def measured(trace):
    """Return the columns of the first kernel that say something, as plain values."""
    return trace.kernels.astype(object).iloc[0].dropna().to_dict()


def test_a_launch_has_its_place_its_duration_and_what_was_counted(tmp_path):
    trace = read_text(tmp_path, raw_page(launch("gemm<int>(float *)", metrics=FULL)))
    assert measured(trace) == {
        "name": "gemm<int>(float *)",
        "activity": "kernel",
        "rank": 0,
        "device": 0,
        "stream": 7,
        "start_ns": 0,
        "duration_ns": 2500,
        "grid": "8,1,1",
        "block": "128,1,1",
        "counted_ns": 2500,
        "dram_read_bytes": 4096,
        "dram_written_bytes": 1024,
        "dram_percent": 71.25,
        "sm_percent": 12.5,
        "tensor_percent": 3.5,
        "occupancy_percent": 88.0,
        "registers": 32,
    }


def test_a_page_without_the_device_and_the_stream_names_neither(tmp_path):
    page = raw_page(launch(device="", stream=""))
    trace = read_text(tmp_path, page)
    assert trace.kernels[["device", "stream"]].to_numpy().tolist() == [[NOT_RECORDED, NOT_RECORDED]]


def test_the_details_page_tells_the_same_as_the_raw_page(tmp_path):
    wide = read_text(tmp_path, raw_page(launch(metrics=FULL)))
    long = read_text(tmp_path, details_page(launch(metrics=FULL)), "details.csv")
    assert wide.kernels.equals(long.kernels)


def test_a_number_without_a_unit_is_no_duration(tmp_path):
    text = raw_page(launch(metrics={DURATION: "7"}), launch(), has_units=False)
    with pytest.raises(TraceError, match="no duration"):
        read_text(tmp_path, text)


def test_launches_of_one_name_stay_apart_on_the_details_page(tmp_path):
    text = details_page(launch(), launch(metrics={DURATION: "300"}))
    assert read_text(tmp_path, text).kernels["duration_ns"].tolist() == [1000, 300]


def test_of_a_metric_that_several_sections_repeat_the_first_counts(tmp_path):
    text = details_page(launch(metrics={DRAM: "71.25"}))
    again = text.splitlines()[-1].replace("71.25", "9.00")
    assert read_text(tmp_path, f"{text}{again}\n").kernels["dram_percent"].tolist() == [71.25]


def test_labels_of_the_details_page_are_understood_by_their_units(tmp_path):
    labels = {"Duration": "2.50", "DRAM Throughput": "71.25", "Compute (SM) Throughput": "12.5"}
    units = {"Duration": "us", "DRAM Throughput": "%", "Compute (SM) Throughput": "%"}
    text = details_page(launch(metrics=labels), units=units).replace(DURATION, "else")
    found = measured(read_text(tmp_path, text))
    assert (found["duration_ns"], found["dram_percent"], found["sm_percent"]) == (2500, 71.25, 12.5)


def test_a_rate_with_the_label_of_a_share_is_not_taken_for_it(tmp_path):
    units = {"DRAM Throughput": "Gbyte/s"}
    text = details_page(launch(metrics={"DRAM Throughput": "3200"}), units=units)
    assert read_text(tmp_path, text).kernels["dram_percent"].isna().all()


@pytest.mark.parametrize(
    ("written", "unit", "meant"),
    [
        ("1234", "nsecond", 1234),
        ("1.50", "usecond", 1500),
        ("2.5", "ms", 2_500_000),
        ("1.25", "second", 1_250_000_000),
    ],
)
def test_times_are_whole_nanoseconds_in_every_unit(written, unit, meant, tmp_path):
    text = raw_page(launch(metrics={DURATION: written}), units={DURATION: unit})
    assert read_text(tmp_path, text).kernels["duration_ns"].tolist() == [meant]


def test_a_thousand_bytes_are_a_kilobyte(tmp_path):
    counted = {"dram__bytes_read.sum": "1.5", "dram__bytes_write.sum": "2"}
    units = {"dram__bytes_read.sum": "Kbyte", "dram__bytes_write.sum": "Gbyte"}
    kernels = read_text(tmp_path, raw_page(launch(metrics=counted), units=units)).kernels
    assert kernels["dram_read_bytes"].tolist() == [1500]
    assert kernels["dram_written_bytes"].tolist() == [2_000_000_000]


@pytest.mark.parametrize(
    ("duration", "share"),
    [
        ("1,234,567", "12.50"),
        ("1.234.567", "12,50"),
        ("1\u202f234\u202f567", "12,50"),
        ("1'234'567", "12.50"),
    ],
)
def test_numbers_are_read_in_the_language_they_were_written_in(duration, share, tmp_path):
    trace = read_text(tmp_path, raw_page(launch(metrics={DURATION: duration, DRAM: share})))
    assert trace.kernels["duration_ns"].tolist() == [1_234_567]
    assert trace.kernels["dram_percent"].tolist() == [12.5]


def test_one_number_tells_how_all_others_are_written(tmp_path):
    german = raw_page(launch(metrics={DURATION: "1.234", DRAM: "12,50"}))
    assert read_text(tmp_path, german).kernels["duration_ns"].tolist() == [1234]


@pytest.mark.parametrize("written", ["1234.567", "1234,567", "0.567", "0,567"])
def test_three_digits_are_decimals_where_they_cannot_be_thousands(written, tmp_path):
    text = raw_page(launch(metrics={DURATION: written}), units={DURATION: "us"})
    meant = int(written.replace(".", "").replace(",", ""))
    assert read_text(tmp_path, text).kernels["duration_ns"].tolist() == [meant]


def test_numbers_that_contradict_one_another_are_refused(tmp_path):
    text = raw_page(launch(metrics={DURATION: "1,234.5", DRAM: "12,50"}))
    assert "in two ways" in problem_of(tmp_path, text)


def test_what_was_not_counted_is_missing(tmp_path):
    text = raw_page(launch(metrics={DRAM: "n/a"}))
    kernels = read_text(tmp_path, text).kernels
    assert kernels[["dram_percent", "sm_percent", "tensor_percent"]].isna().all(axis=None)
    assert kernels[["dram_read_bytes", "registers"]].isna().all(axis=None)


def test_the_busiest_pipe_of_the_tensor_cores_counts(tmp_path):
    pipes = {
        f"sm__pipe_tensor_op_{pipe}_cycles_active.avg.pct_of_peak_sustained_elapsed": share
        for pipe, share in (("hmma", "40"), ("imma", "0"))
    }
    units = dict.fromkeys(pipes, "%")
    text = raw_page(launch(metrics=pipes), units=units)
    assert read_text(tmp_path, text).kernels["tensor_percent"].tolist() == [40.0]


def test_what_the_program_prints_around_the_table_is_passed_over(tmp_path):
    around = "step 1, loss 0.5\n==PROF== Connected to process 7\n"
    text = around + raw_page(launch(), launch("gemm")) + "==PROF== Disconnected\n"
    assert read_text(tmp_path, text).kernels["name"].tolist() == ["copy", "gemm"]


def test_warnings_of_the_program_are_caveats(tmp_path):
    warning = "3 launches were not profiled"
    caveats = read_text(tmp_path, f"==WARNING== {warning}\n{raw_page(launch())}").meta.caveats
    assert any(one.id == "profiler_message" and warning in one.text for one in caveats)


def test_a_table_without_a_launch_is_an_error_with_what_the_program_said(tmp_path):
    error = "ERR_NVGPUCTRPERM - The user does not have permission"
    assert error in problem_of(tmp_path, f"==ERROR== {error}\n")


def test_a_table_that_was_cut_off_is_an_error(tmp_path):
    text = raw_page(launch(), launch("gemm"))
    assert "cut off" in problem_of(tmp_path, text[: text.rindex('"1","7"') + 20])


def test_a_table_without_durations_is_an_error(tmp_path):
    text = raw_page(launch(metrics={DURATION: "n/a"}))
    assert "no duration" in problem_of(tmp_path, text)


def test_launches_without_a_duration_are_left_out_and_counted(tmp_path):
    trace = read_text(tmp_path, raw_page(launch(), launch(metrics={DURATION: ""})))
    assert len(trace.kernels) == 1
    (told,) = [one.text for one in trace.meta.caveats if one.id == "untimed_launches"]
    assert quantities_in(told) == ["1"]


def test_rounded_times_are_a_caveat(tmp_path):
    text = raw_page(launch(metrics={DURATION: "1.50"}), units={DURATION: "us"})
    assert any(one.id == "rounded_times" for one in read_text(tmp_path, text).meta.caveats)


def test_exact_times_are_none(tmp_path):
    trace = read_text(tmp_path, raw_page(launch()))
    assert not any(one.id == "rounded_times" for one in trace.meta.caveats)


def test_launches_stand_one_after_another_without_times(tmp_path):
    trace = read_text(tmp_path, raw_page(launch(), launch(metrics={DURATION: "300"}), launch()))
    assert trace.kernels["start_ns"].tolist() == [0, 1000, 1300]
    assert not trace.has_timeline


def test_processes_are_ranks_that_each_begin_at_zero(tmp_path):
    trace = read_text(tmp_path, raw_page(launch(process="90"), launch(process="80")))
    assert trace.kernels["rank"].tolist() == [1, 0]
    assert trace.kernels["start_ns"].tolist() == [0, 0]


def test_a_file_of_windows_powershell_is_read(tmp_path):
    path = tmp_path / "report.csv"
    path.write_text(raw_page(launch()), encoding="utf-16")
    assert knows(path, path.read_bytes())
    assert len(read(path).kernels) == 1


def test_a_gzipped_table_is_read(tmp_path):
    path = tmp_path / "report.csv.gz"
    path.write_bytes(gzip.compress(raw_page(launch()).encode()))
    assert len(read(path).kernels) == 1


def test_another_csv_is_not_known(tmp_path):
    assert not knows(tmp_path / "prices.csv", b'"ID","Name"\n"1","a"\n')
    assert knows(tmp_path / "no_suffix", raw_page(launch()).encode())
