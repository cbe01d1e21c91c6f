import pytest

from kprof.device import CATALOGUE, device_of_attributes, find_device

ENTRIES = {device.name: device for _, device in CATALOGUE}
NARROWING = ("fp64", "fp32", "tf32", "fp16", "fp8", "fp4")
# What drivers report, and the entry that is meant.
REPORTED = {
    "NVIDIA H200": "H200 SXM",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H800": "H800 SXM",
    "NVIDIA H20": "H20",
    "NVIDIA GH200 480GB": "GH200 96GB",
    "NVIDIA GH200 144G HBM3e": "GH200 144GB",
    "NVIDIA B200": "B200",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA GB200": "GB200",
    "NVIDIA GB300": "GB300",
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "NVIDIA A100-PCIE-40GB": "A100 40GB",
    "NVIDIA A100-PG509-200": "A100 40GB",
    "NVIDIA A100-SXM4-80GB": "A100 SXM 80GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe 80GB",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA A30": "A30",
    "NVIDIA A40": "A40",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA RTX A5000": "RTX A5000",
    "NVIDIA RTX A6000": "RTX A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "Tesla V100-SXM2-16GB": "V100 SXM 16GB",
    "Tesla V100-SXM2-32GB": "V100 SXM 32GB",
    "Tesla V100-PCIE-16GB": "V100 PCIe 16GB",
    "Tesla T4": "T4",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI325X": "MI325X",
    "AMD Instinct MI250X": "MI250X, one die",
    "AMD Instinct MI210": "MI210",
}


def test_the_name_that_a_driver_reports_finds_its_device():
    assert {reported: find_device(reported).name for reported in REPORTED} == REPORTED


@pytest.mark.parametrize(
    "reported",
    [
        "",
        "Quadro P1000",
        "NVIDIA RTX A4000",
        "NVIDIA H100",
        "NVIDIA H20-3e",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA RTX A5000 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ],
)
def test_an_unknown_an_ambiguous_and_a_partial_device_have_no_entry(reported):
    assert find_device(reported) is None


def test_an_h200_has_its_datasheets_rates():
    device = find_device("NVIDIA H200")
    assert device.memory_bytes_per_s == 4.8e12
    assert device.flops_per_s["bf16"] == pytest.approx(989.4e12)
    assert device.flops_per_s["fp32"] == pytest.approx(66.9e12)
    assert device.num_sms == 132


# Compute capability, SMs and boost clock in MHz of GPUs whose datasheets state the rates.
ATTRIBUTES = {
    "Tesla V100-SXM2-16GB": ("7.0", 80, 1530),
    "Tesla T4": ("7.5", 40, 1590),
    "NVIDIA A100-SXM4-40GB": ("8.0", 108, 1410),
    "NVIDIA A40": ("8.6", 84, 1740),
    "NVIDIA RTX A5000": ("8.6", 64, 1695),
    "NVIDIA GeForce RTX 3090": ("8.6", 82, 1695),
    "NVIDIA RTX 6000 Ada Generation": ("8.9", 142, 2505),
    "NVIDIA GeForce RTX 4090": ("8.9", 128, 2520),
}


def test_the_attributes_of_a_gpu_imply_the_rates_of_its_datasheet():
    implied, listed = {}, {}
    for name, (capability, num_sms, mhz) in ATTRIBUTES.items():
        rates = device_of_attributes(name, capability, num_sms, mhz * 1_000_000, 1).flops_per_s
        implied |= {(name, dtype): rate for dtype, rate in rates.items()}
        listed |= {(name, dtype): find_device(name).flops_per_s[dtype] for dtype in rates}
    assert implied == pytest.approx(listed, rel=0.01)


@pytest.mark.parametrize(
    ("name", "fp16_over_fp32"),
    [
        ("Tesla T4", 8),
        ("Tesla T40", 8),
        ("Tesla T10", 8),
        ("Quadro RTX 6000", 8),
        ("NVIDIA GeForce RTX 2080 Ti", 4),
        ("NVIDIA GeForce GTX 1660 SUPER", 2),
        ("NVIDIA GeForce MX450", 2),
        ("NVIDIA T400 4GB", 2),
        ("NVIDIA T1000", 2),
        ("Quadro T2000", 2),
    ],
)
def test_of_turing_only_gpus_with_tensor_cores_have_their_rates(name, fp16_over_fp32):
    rates = device_of_attributes(name, "7.5", 16, 1_500_000_000, 1).flops_per_s
    assert rates == {"fp32": 3.072e12, "fp16": fp16_over_fp32 * 3.072e12}


@pytest.mark.parametrize(
    "attributes", [("9.9", 80, 1), ("8.6", 0, 1), ("8.6", 80, 0), (None, 1, 1)]
)
def test_attributes_that_say_too_little_imply_no_rates(attributes):
    assert device_of_attributes("GPU", *attributes, 1) is None


def test_every_entry_names_its_source_and_is_no_measurement():
    bare = [n for n, one in ENTRIES.items() if len(one.source) <= 10 or one.is_measured]
    assert bare == []


def test_narrower_types_are_never_slower():
    rates = {
        name: [device.flops_per_s[d] for d in NARROWING if d in device.flops_per_s]
        for name, device in ENTRIES.items()
    }
    assert rates == {name: sorted(ordered) for name, ordered in rates.items()}


def test_rates_are_of_the_size_that_such_devices_have():
    odd = [
        name
        for name, device in ENTRIES.items()
        if not 30 < device.flops_per_s["fp16"] / device.memory_bytes_per_s < 450
        or not 3e11 <= device.memory_bytes_per_s <= 1e13
        or not 15 * 2**30 < device.memory_bytes < 300 * 2**30
    ]
    assert odd == []


def test_bf16_is_as_fast_as_fp16_where_there_is_both():
    rates = {n: one.flops_per_s for n, one in ENTRIES.items() if "bf16" in one.flops_per_s}
    assert len(rates) > 20
    assert [name for name, one in rates.items() if one["bf16"] != one["fp16"]] == []
