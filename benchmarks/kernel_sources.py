"""Which files of kprof's a measurement of several kernels depends on."""

from kernels import sources_of


def sources_of_kernels(names):
    """Return the files of these kernels, and all that they import."""
    found = {one for name in names for one in sources_of(name)}
    return sorted(one for one in found if one.startswith("kprof/kernels/"))
