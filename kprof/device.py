"""Devices that kprof knows: peak rates, each with its source."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Bits of NVML's reasons for clocks below the maximum, as nvml.h names them.
THROTTLE_REASONS = {
    0x1: "idle",
    0x2: "clocks set by an application",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}
# Idle clocks and clocks that the user set slow no work that should be fast.
HARMLESS_REASONS = 0x1 | 0x2 | 0x100
# Heat, or a fault of the supply. The power cap is not among them: under it large products run.
BRAKES = 0x8 | 0x20 | 0x40 | 0x80


# Source of rates that follow from the attributes of a GPU that no datasheet here lists.
OF_ATTRIBUTES = "SMs, clock and memory bandwidth in the trace, the architecture's rates per SM"
DERIVED = "derived from the GPU's attributes"


@dataclass(frozen=True)
class Links:
    """Links between the GPUs of one host, as an all-reduce over all of them used them."""

    bus_bytes_per_s: float
    """Bus bandwidth as nccl-tests defines it, of a message of hundreds of MB."""
    num_gpus: int


@dataclass(frozen=True)
class Device:
    """Ceilings of one kind of device; a rate neither published nor measured is absent."""

    name: str
    memory_bytes_per_s: float
    """DRAM bandwidth."""
    flops_per_s: dict[str, float]
    """Dense peak by dtype: bf16, fp16, tf32, fp8, int8, fp32, fp64, fp4."""
    source: str
    """Where the figures come from: datasheet with its revision, measurement, or attributes."""
    is_measured: bool = False
    num_sms: int | None = None
    memory_bytes: int | None = None
    cache_bytes: int | None = None
    """Size of the last cache before the memory; None where unknown."""
    cached_copies: tuple[tuple[int, float], ...] = ()
    """Bytes read and written, and ns, of copies that stay in that cache; empty if unmeasured."""
    links: Links | None = None
    """Links to the other GPUs of its host; None where not measured."""

    @property
    def is_derived(self) -> bool:
        """Whether the rates follow from the GPU's attributes: neither published nor measured."""
        return self.source == OF_ATTRIBUTES

    @property
    def origin(self) -> str:
        """The kind of `source`, for reports."""
        if self.is_derived:
            return DERIVED
        return "measured" if self.is_measured else "datasheet"

    @property
    def listed_name(self) -> str:
        """The name in price lists, which do not mention SXM."""
        return " ".join(word for word in self.name.split() if word != "SXM")


def find_device(name: str) -> Device | None:
    """Return the datasheet entry for a GPU as its driver names it, or None for an unknown one.

    A MIG slice has only a part of its GPU's rates, and no driver's name says which: it is unknown.
    """
    if re.search(r"\bMIG\b", name):
        return None
    for pattern, device in CATALOGUE:
        if re.search(pattern, name):
            return device
    return None


# FLOPs of an SM in a clock, dense, by compute capability: float32 on CUDA cores (128 or 64 lanes),
# 16 bits and TF32 on tensor cores with float32 sums. CUDA C++ Programming Guide, "Arithmetic
# Instructions"; architecture white papers of Volta, Turing, GA100, GA102, Ada and Blackwell.
_PER_SM_AND_CLOCK = {
    "7.0": {"fp32": 128, "fp16": 1024},
    "7.5": {"fp32": 128, "fp16": 1024},
    "8.0": {"fp32": 128, "fp16": 2048, "bf16": 2048, "tf32": 1024},
    "8.6": {"fp32": 256, "fp16": 1024, "bf16": 1024, "tf32": 512},
    "8.9": {"fp32": 256, "fp16": 1024, "bf16": 1024, "tf32": 512},
    "12.0": {"fp32": 256, "fp16": 1024, "bf16": 1024, "tf32": 512},
}
# Tensor cores of these add float32 sums at half the rate of workstation and server GPUs.
_CONSUMER = re.compile(r"GeForce|TITAN RTX")
# Of compute capability 7.5 these have tensor cores. TU116 and TU117 have none: GeForce GTX 16,
# MX450 and MX550, T400 to T2000; their CUDA cores compute float16 at twice the rate of float32.
_TURING_WITH_TENSOR_CORES = re.compile(r"RTX|\bT(?:4|4G|10|40)\b")
_TURING_WITHOUT = {"fp32": 128, "fp16": 256}


def device_of_attributes(
    name: str, capability: str | None, num_sms: int, clock_hz: int, memory_bytes_per_s: int
) -> Device | None:
    """Return the ceilings that follow from attributes; None for an architecture not known here.

    `clock_hz` is the highest clock that the driver reports.
    """
    per_sm = _PER_SM_AND_CLOCK.get(capability or "")
    slowed = 2 if _CONSUMER.search(name) else 1
    if capability == "7.5" and not _TURING_WITH_TENSOR_CORES.search(name):
        per_sm, slowed = _TURING_WITHOUT, 1
    if per_sm is None or min(num_sms, clock_hz, memory_bytes_per_s) <= 0:
        return None
    rates = {
        dtype: float(flops * num_sms * clock_hz) / (1 if dtype == "fp32" else slowed)
        for dtype, flops in per_sm.items()
    }
    return Device(name, float(memory_bytes_per_s), rates, OF_ATTRIBUTES, num_sms=num_sms)


def listed_name(driver_name: str) -> str:
    """Return a GPU's name as price lists have it; an unknown one stays as its driver names it."""
    device = find_device(driver_name)
    return device.listed_name if device else driver_name


# Second-level caches: of the H200 as CUDA tells it (cudaDevAttrL2CacheSize), of the others as
# their architecture's white paper does.
_CACHE_BYTES = {
    "H200 SXM": 60 << 20,
    "H200 NVL": 60 << 20,
    "H100 SXM": 50 << 20,
    "A100 SXM 80GB": 40 << 20,
    "A100 PCIe 80GB": 40 << 20,
    "A100 40GB": 40 << 20,
}


def _listed(
    name: str,
    gb_per_s: float,
    teraflops: dict[str, float],
    sms_and_gib: tuple[int | None, int],
    source: str,
) -> Device:
    """Return an entry from the units of datasheets: GB/s, dense Tflop/s, SMs and GiB."""
    num_sms, gib = sms_and_gib
    return Device(
        cache_bytes=_CACHE_BYTES.get(name),
        name=name,
        memory_bytes_per_s=gb_per_s * 1e9,
        flops_per_s={dtype: rate * 1e12 for dtype, rate in teraflops.items()},
        source=source,
        num_sms=num_sms,
        memory_bytes=gib * 2**30,
    )


def _rates(half: float, **others: float) -> dict[str, float]:
    """Return Tflop/s by dtype where bf16 and fp16 share one rate."""
    return {"bf16": half, "fp16": half, **others}


# Rates are dense. Where a datasheet prints only the rate with structured sparsity, half of it
# stands here. fp64 is the tensor core's rate where there is one; fp32 is the vector units'.
_HOPPER_SXM = _rates(989.4, tf32=494.7, fp8=1978.9, int8=1978.9, fp32=66.9, fp64=66.9)
_HOPPER_NVL = _rates(835.5, tf32=417.5, fp8=1670.5, int8=1670.5, fp32=60.0, fp64=60.0)
_H100_PCIE = _rates(756.0, tf32=378.0, fp8=1513.0, int8=1513.0, fp32=51.2, fp64=51.2)
_H20 = _rates(148.0, tf32=74.0, fp8=296.0, int8=296.0, fp32=44.0, fp64=1.0)
_H800 = {**_HOPPER_SXM, "fp64": 1.0}
_B200 = _rates(2250.0, tf32=1125.0, fp8=4500.0, int8=4500.0, fp4=9000.0, fp32=75.0, fp64=37.0)
_GB200 = _rates(2500.0, tf32=1250.0, fp8=5000.0, int8=5000.0, fp4=10000.0, fp32=80.0, fp64=40.0)
_B300 = _rates(2250.0, tf32=1125.0, fp8=4500.0, fp4=13500.0, fp32=75.0, fp64=1.2)
_GB300 = _rates(2500.0, tf32=1250.0, fp8=5000.0, fp4=15000.0, fp32=80.0, fp64=1.3)
_A100 = _rates(312.0, tf32=156.0, int8=624.0, fp32=19.5, fp64=19.5)
_A10 = _rates(125.0, tf32=62.5, int8=250.0, fp32=31.2)
_A10G = _rates(70.0, tf32=35.0, int8=140.0, fp32=35.0)
_A30 = _rates(165.0, tf32=82.0, int8=330.0, fp32=10.3, fp64=10.3)
_A40 = _rates(149.7, tf32=74.8, int8=299.3, fp32=37.4)
_A6000 = _rates(154.8, tf32=77.4, int8=309.7, fp32=38.7)
_A5000 = _rates(111.1, tf32=55.6, int8=222.2, fp32=27.8)
_L4 = _rates(121.0, tf32=60.0, fp8=242.5, int8=242.5, fp32=30.3)
_L40 = _rates(181.0, tf32=90.5, fp8=362.0, int8=362.0, fp32=90.5)
_L40S = _rates(362.0, tf32=183.0, fp8=733.0, int8=733.0, fp32=91.6)
_ADA6000 = _rates(364.2, tf32=182.1, fp8=728.5, int8=728.5, fp32=91.1)
_RTX4090 = _rates(165.2, tf32=82.6, fp8=330.3, int8=660.6, fp32=82.6)
_RTX3090 = _rates(71.0, tf32=35.6, int8=284.0, fp32=35.6)
_V100 = {"fp16": 125.0, "fp32": 15.7, "fp64": 7.8}
_V100_PCIE = {"fp16": 112.0, "fp32": 14.0, "fp64": 7.0}
_V100S = {"fp16": 130.0, "fp32": 16.4, "fp64": 8.2}
_T4 = {"fp16": 65.0, "int8": 130.0, "fp32": 8.1}
_MI210 = _rates(181.0, int8=181.0, fp32=45.3, fp64=45.3)
_MI250X_DIE = _rates(191.5, int8=191.5, fp32=47.9, fp64=47.9)
_MI250_DIE = _rates(181.0, int8=181.0, fp32=45.3, fp64=45.3)
_MI300 = _rates(1307.4, tf32=653.7, fp8=2614.9, int8=2614.9, fp32=163.4, fp64=163.4)
_MI350X = _rates(2306.9, fp8=4613.7, int8=4613.7, fp4=9227.5, fp32=144.2, fp64=72.1)
_MI355X = _rates(2516.6, fp8=5033.2, int8=5033.2, fp4=10066.3, fp32=157.3, fp64=78.6)

_HOPPER_SHEET = "NVIDIA H100 Tensor Core GPU datasheet and architecture white paper"
_H200_SHEET = "NVIDIA H200 Tensor Core GPU datasheet"
_A100_SHEET = "NVIDIA A100 Tensor Core GPU datasheet"
_V100_SHEET = "NVIDIA V100 Tensor Core GPU datasheet"
_BLACKWELL_SHEET = "NVIDIA Blackwell datasheet, rates with sparsity halved"
_ULTRA_SHEET = "NVIDIA Blackwell Ultra datasheet (HGX B300, GB300 NVL72)"
_ADA_SHEET = "NVIDIA Ada GPU architecture white paper"
_DIE_SHEET = "AMD Instinct MI200 series datasheet, half a package: a driver's device is one die"

# First match wins, so specific names come before general ones.
CATALOGUE: tuple[tuple[str, Device], ...] = (
    (r"\bH200 NVL\b", _listed("H200 NVL", 4800, _HOPPER_NVL, (132, 141), _H200_SHEET)),
    (
        r"\bGH200 144G",
        _listed("GH200 144GB", 4900, _HOPPER_SXM, (132, 144), "NVIDIA GH200 datasheet"),
    ),
    (r"\bGH200\b", _listed("GH200 96GB", 4000, _HOPPER_SXM, (132, 96), "NVIDIA GH200 datasheet")),
    (r"\bH200\b", _listed("H200 SXM", 4800, _HOPPER_SXM, (132, 141), _H200_SHEET)),
    (r"\bH100 NVL\b", _listed("H100 NVL", 3900, _HOPPER_NVL, (132, 94), _HOPPER_SHEET)),
    (r"\bH100 PCIe\b", _listed("H100 PCIe", 2000, _H100_PCIE, (114, 80), _HOPPER_SHEET)),
    (r"\bH100 (80GB HBM3|SXM)", _listed("H100 SXM", 3350, _HOPPER_SXM, (132, 80), _HOPPER_SHEET)),
    (r"\bH800\b(?! PCIe)", _listed("H800 SXM", 3350, _H800, (132, 80), "NVIDIA H800 datasheet")),
    (r"\bH20\b(?!-)", _listed("H20", 4000, _H20, (78, 96), "NVIDIA H20 datasheet")),
    (r"\bGB300\b", _listed("GB300", 8000, _GB300, (None, 288), _ULTRA_SHEET)),
    (r"\bB300\b", _listed("B300", 8000, _B300, (None, 288), _ULTRA_SHEET)),
    (r"\bGB200\b", _listed("GB200", 8000, _GB200, (None, 186), _BLACKWELL_SHEET)),
    (r"\bB200\b", _listed("B200", 7700, _B200, (148, 180), _BLACKWELL_SHEET)),
    (r"\bA100-SXM4-80GB", _listed("A100 SXM 80GB", 2039, _A100, (108, 80), _A100_SHEET)),
    (r"\bA100-PG509-210", _listed("A100 SXM 80GB", 2039, _A100, (108, 80), _A100_SHEET)),
    (r"\bA100 80GB PCIe", _listed("A100 PCIe 80GB", 1935, _A100, (108, 80), _A100_SHEET)),
    (
        r"\bA100-(SXM4-40GB|PG509-200|PCIE-40GB)",
        _listed("A100 40GB", 1555, _A100, (108, 40), _A100_SHEET),
    ),
    (r"\bA10G\b", _listed("A10G", 600, _A10G, (80, 24), "NVIDIA A10G datasheet")),
    (r"\bA10\b", _listed("A10", 600, _A10, (72, 24), "NVIDIA A10 datasheet")),
    (r"\bA30\b", _listed("A30", 933, _A30, (56, 24), "NVIDIA A30 datasheet")),
    (r"\bA40\b", _listed("A40", 696, _A40, (84, 48), "NVIDIA A40 datasheet")),
    (r"\bL4\b", _listed("L4", 300, _L4, (58, 24), "NVIDIA L4 datasheet, sparse rates halved")),
    (r"\bL40S\b", _listed("L40S", 864, _L40S, (142, 48), "NVIDIA L40S datasheet")),
    (r"\bL40\b", _listed("L40", 864, _L40, (142, 48), "NVIDIA L40 datasheet")),
    (r"\bRTX A6000\b", _listed("RTX A6000", 768, _A6000, (84, 48), "NVIDIA RTX A6000 datasheet")),
    (
        r"\bRTX A5000\b(?! Laptop)",
        _listed("RTX A5000", 768, _A5000, (64, 24), "NVIDIA RTX A5000 datasheet"),
    ),
    (r"\bRTX 6000 Ada\b", _listed("RTX 6000 Ada", 960, _ADA6000, (142, 48), _ADA_SHEET)),
    (r"\bRTX 4090(?! (D|Laptop))\b", _listed("RTX 4090", 1008, _RTX4090, (128, 24), _ADA_SHEET)),
    (
        r"\bRTX 3090(?! (Ti|Laptop))\b",
        _listed("RTX 3090", 936, _RTX3090, (82, 24), "NVIDIA GA102 architecture white paper"),
    ),
    (r"\bV100S-PCIE-32GB", _listed("V100S PCIe 32GB", 1134, _V100S, (80, 32), _V100_SHEET)),
    (r"\bV100-SXM\d-32GB", _listed("V100 SXM 32GB", 900, _V100, (80, 32), _V100_SHEET)),
    (r"\bV100-SXM\d-16GB", _listed("V100 SXM 16GB", 900, _V100, (80, 16), _V100_SHEET)),
    (r"\bV100-PCIE-32GB", _listed("V100 PCIe 32GB", 900, _V100_PCIE, (80, 32), _V100_SHEET)),
    (r"\bV100-PCIE-16GB", _listed("V100 PCIe 16GB", 900, _V100_PCIE, (80, 16), _V100_SHEET)),
    (r"\bT4\b", _listed("T4", 320, _T4, (40, 16), "NVIDIA T4 datasheet")),
    (r"\bMI210\b", _listed("MI210", 1638, _MI210, (104, 64), "AMD Instinct MI210 datasheet")),
    (r"\bMI250X\b", _listed("MI250X, one die", 1638, _MI250X_DIE, (110, 64), _DIE_SHEET)),
    (r"\bMI250\b", _listed("MI250, one die", 1638, _MI250_DIE, (104, 64), _DIE_SHEET)),
    (r"\bMI300X\b", _listed("MI300X", 5300, _MI300, (304, 192), "AMD Instinct MI300X datasheet")),
    (r"\bMI325X\b", _listed("MI325X", 6000, _MI300, (304, 256), "AMD Instinct MI325X datasheet")),
    (r"\bMI350X\b", _listed("MI350X", 8000, _MI350X, (256, 288), "AMD Instinct MI350X datasheet")),
    (r"\bMI355X\b", _listed("MI355X", 8000, _MI355X, (256, 288), "AMD Instinct MI355X datasheet")),
)
