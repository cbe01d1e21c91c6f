"""What this host can do, measured."""

from kprof.collect.ceilings import keep_host_ceilings, kept_ceilings


def test_measured_ceilings_are_kept_with_the_recording(tmp_path):
    device = keep_host_ceilings(tmp_path)
    assert kept_ceilings(tmp_path) == device
    assert device.is_measured
    assert device.memory_bytes_per_s > 0
    assert device.flops_per_s["fp32"] > 0


def test_a_recording_without_ceilings_has_none(tmp_path):
    assert kept_ceilings(tmp_path) is None
