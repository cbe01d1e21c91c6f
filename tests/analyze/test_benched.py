"""What was measured of a kernel, as reports for readers take it."""

from kprof.analyze.kernel_times import Benched, Timing


def benched(direction="training", **times_ns):
    shape = (8192, 128_256)
    measured = tuple(Timing(name.replace("_", "-"), shape, ns) for name, ns in times_ns.items())
    about = ("cross_entropy", "bfloat16", direction, "kprof", "H200", "2026-11-22")
    return Benched(*about, measured)


def test_the_fastest_of_ours_stands_beside_the_fastest_of_the_others():
    found = benched(kprof=1_400.0, kprof_shared=1_200.0, liger=1_800.0, eager=9_000.0)
    assert found.ours.provider == "kprof-shared"
    assert found.best_other.provider == "liger"
    assert found.ratio == 1.5


def test_a_measurement_is_named_with_its_pass():
    assert benched(kprof=1.0).what == "cross_entropy training, 8192x128256 bfloat16"
