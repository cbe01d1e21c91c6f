"""What this host can do, measured."""

from dataclasses import replace

from kprof.collect.ceilings import (
    Ceilings,
    Figure,
    find_gpu_ceilings,
    keep_ceilings,
    keep_gpu_ceilings,
    kept_ceilings,
    measure_host,
)
from kprof.device import Links, find_device

MEASURED = Ceilings(
    gpu="NVIDIA H200",
    driver="580.1",
    date="2026-11-20",
    torch="2.11",
    num_sms=132,
    memory_bytes=1 << 37,
    took_s=30.0,
    before={"power_w": 80.0},
    after={"power_w": 600.0},
    figures=(
        Figure("DRAM read", 4.3e12, "B/s"),
        Figure("DRAM write", 4.6e12, "B/s"),
        Figure("L2 copy 8 MiB", 9e12, "B/s"),
        Figure("bf16 4096", 730e12, "FLOP/s"),
        Figure("bf16 8192", 720e12, "FLOP/s"),
        Figure("launch eager", 7000.0, "ns"),
    ),
)


def test_the_roofline_takes_the_fastest_traffic_and_the_datasheets_products():
    device = MEASURED.as_device()
    assert device.memory_bytes_per_s == 4.6e12
    assert device.flops_per_s == find_device("NVIDIA H200").flops_per_s
    assert device.is_measured
    assert "2026-11-20" in device.source


def test_without_a_datasheet_the_best_measured_product_of_each_type_is_the_ceiling():
    assert replace(MEASURED, gpu="Strange 9000").as_device().flops_per_s == {"bf16": 730e12}


def test_a_gpus_ceilings_are_found_again_by_name_and_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_gpu_ceilings(MEASURED)
    assert find_gpu_ceilings("NVIDIA H200", "580.1") == MEASURED
    assert find_gpu_ceilings("NVIDIA H200", "590.2") is None


def test_each_days_ceilings_are_kept_and_the_last_ones_that_can_be_read_count(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    later = keep_gpu_ceilings(replace(MEASURED, date="2026-12-01", took_s=40.0))
    earlier = keep_gpu_ceilings(MEASURED)
    keep_gpu_ceilings(replace(MEASURED, driver="580.1.2", date="2027-01-01"))
    assert find_gpu_ceilings("NVIDIA H200", "580.1").took_s == 40.0
    later.write_text("")
    assert earlier.exists()
    assert find_gpu_ceilings("NVIDIA H200", "580.1") == MEASURED


def test_damaged_ceilings_are_as_good_as_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_gpu_ceilings(MEASURED).write_text('{"gpu": ')
    assert find_gpu_ceilings("NVIDIA H200", "580.1") is None


def test_measured_ceilings_are_kept_with_the_recording(tmp_path):
    device = measure_host()
    keep_ceilings(tmp_path, device)
    assert kept_ceilings(tmp_path) == device
    assert device.is_measured
    assert device.memory_bytes_per_s > 0
    assert device.flops_per_s["fp32"] > 0


def test_a_recording_without_ceilings_has_none(tmp_path):
    assert kept_ceilings(tmp_path) is None


def test_copies_that_fit_the_cache_are_kept_with_the_time_that_they_took():
    larger = (*MEASURED.figures, Figure("L2 copy 64 MiB", 4e12, "B/s"))
    device = replace(MEASURED, figures=larger).as_device()
    assert device.cache_bytes == 60 << 20
    assert device.cached_copies == (((8 << 20), (8 << 20) / 9e12 * 1e9),)


def test_a_cache_that_was_measured_counts_more_than_the_catalogues():
    device = replace(MEASURED, cache_bytes=4 << 20).as_device()
    assert (device.cache_bytes, device.cached_copies) == (4 << 20, ())


def test_the_bandwidth_of_links_is_that_of_an_all_reduce_of_several_gpus():
    detail = "NCCL, 4 GPUs, 512 MiB each, bytes on the bus"
    several = replace(
        MEASURED, figures=(*MEASURED.figures, Figure("all-reduce", 354e9, "B/s", detail))
    )
    assert MEASURED.as_device().links is None
    assert several.as_device().links == Links(354e9, 4)
