"""What replacement kernels have to reach, and the rows of a result that say whether they do."""

from dataclasses import dataclass

from evidence import row

from kprof.kernels import OURS
from kprof.kernels.bench.choice import ranking

HOST_NS = 8_000
LOSS = (8_192, 4_096, 128_256)
# Of eager's extra memory, and of the logits; the time and the rate that go with each.
MEMORY_OF_EAGER, TIME_OF_EAGER = 0.25, 1.0
MEMORY_OF_LOGITS, RATE_OF_PRODUCT = 0.05, 0.88
# Products of the recomputing path over those that are useful.
EXECUTED = 8 / 6


@dataclass(frozen=True)
class Reach:
    """What one kernel has to reach, as a share of copy and against the best peer."""

    kernel: str
    direction: str
    share_of_copy: float | None
    of_best_peer: float | None = None
    shapes: tuple = ()
    """For which; empty: all that the kernel measures."""


REACHES = (
    Reach("rmsnorm", "forward", 0.93, 1.0),
    Reach("rmsnorm", "backward", 0.88),
    Reach("add_rmsnorm", "forward", 0.92),
    Reach("add_rmsnorm", "backward", 0.88),
    Reach("swiglu", "forward", 0.97),
    Reach("swiglu", "backward", 0.97),
    Reach("cross_entropy", "training", 0.93, shapes=((8_192, 128_256), (8_192, 32_000))),
    Reach("linear_cross_entropy", "training", None, shapes=(LOSS,)),
    Reach("adamw", "forward", 0.93, 1.0),
)


def kernels_to_reach():
    """Return the names of the kernels that have something to reach."""
    return tuple(dict.fromkeys(one.kernel for one in REACHES))


def reaches_of(kernel):
    """Return what a kernel has to reach; one that nobody set a figure for is measured as it is."""
    found = [one for one in REACHES if one.kernel == kernel.name]
    if found:
        return found
    directions = ("forward", *(("backward",) if kernel.backward_work else ()))
    return [Reach(kernel.name, one, None) for one in directions]


def wanted_of(kernel):
    """Return direction and shape of all that is measured of a kernel."""
    return [(one.direction, shape) for one, shape in _reaches_by_shape(kernel)]


def rows_of_all(kernel, done, product=None):
    """Return the rows of what is done so far.

    Args:
        kernel: Which.
        done: What each provider took, by direction, shape and provider.
        product: What a product reaches in the same run, in FLOP/s.
    """
    if kernel.name == "linear_cross_entropy":
        return rows_of_losses(list(done.values()), product)
    rows = []
    for reach, shape in _reaches_by_shape(kernel):
        here = (reach.direction, shape)
        rows += rows_of(reach, shape, [one for key, one in done.items() if key[:2] == here])
    return rows + rows_of_host(kernel, done)


def _reaches_by_shape(kernel):
    return [(one, shape) for one in reaches_of(kernel) for shape in one.shapes or kernel.shapes]


def rows_of_host(kernel, done):
    """Return what a call costs the host at best, which no shape changes; nothing: not measured."""
    times_ns = [one.host_ns for (*_, name), one in done.items() if name == OURS and one.host_ns]
    if not times_ns:
        return []
    return [row(f"{kernel.name}-host", min(times_ns), "ns", "lower", HOST_NS, times_ns=times_ns)]


def rows_of(reach, shape, measured):
    """Return the rows of one shape: everybody else's, the fastest of ours, the best peer over it.

    That of ours has the name of what is done; the others' names end in theirs.
    """
    what = f"{reach.kernel}-{reach.direction}-{'x'.join(map(str, shape))}"
    ranked = ranking(measured)
    ours = next((one for one in [*ranked, *measured] if one.provider.startswith(OURS)), None)
    rows = [
        row(
            f"{what}-{one.provider}",
            one.share_of_copy,
            "of copy",
            "higher",
            gpu_ns=one.gpu_ns,
            host_ns=one.host_ns,
            copy_ns=one.copy_ns,
            is_in_graph=one.is_in_graph,
            problem=one.problem,
        )
        for one in measured
        if one is not ours
    ]
    if ours is None:
        return rows
    best = next((one for one in ranked if not one.provider.startswith(OURS)), None)
    rows.append(
        row(
            what,
            ours.share_of_copy,
            "of copy",
            "higher",
            reach.share_of_copy,
            gpu_ns=ours.gpu_ns,
            host_ns=ours.host_ns,
            spread=ours.spread,
            copy_ns=ours.copy_ns,
            problem=ours.problem,
            provider=ours.provider,
            shape=list(shape),
            # Who would run such calls.
            router=ranked[0].provider if ranked else None,
        )
    )
    if best is not None and ours.gpu_ns:
        about = {"peer": best.provider, "peer_value": best.share_of_copy}
        ratio = best.gpu_ns / ours.gpu_ns
        rows.append(row(f"{what}-to-best", ratio, "x", "higher", reach.of_best_peer, **about))
    return rows


def rows_of_losses(measured, product):
    """Return the rows of linear + cross-entropy: time and memory of each, the product's rate."""
    by_name = {one.provider: one for one in measured}
    num_rows, num_hidden, vocabulary = LOSS
    logits_bytes = 2 * num_rows * vocabulary
    gradients_bytes = 2 * num_hidden * (num_rows + vocabulary)
    rows = [row("product", product, "FLOP/s", "higher")]
    rows += [
        row(
            f"{one.provider}-time",
            one.gpu_ns,
            "ns",
            "lower",
            problem=one.problem,
            extra_bytes=one.extra_bytes,
            flops_per_s=one.flops_per_s,
            is_in_graph=one.is_in_graph,
        )
        for one in measured
    ]
    eager, fast, lean = (by_name.get(one) for one in ("eager", OURS, f"{OURS}-lean"))
    if fast and eager and fast.gpu_ns and eager.gpu_ns:
        took = fast.gpu_ns / eager.gpu_ns
        rows.append(row("fast-time", took, "of eager", "lower", TIME_OF_EAGER))
        memory = fast.extra_bytes / eager.extra_bytes
        rows.append(row("fast-memory", memory, "of eager", "lower", MEMORY_OF_EAGER))
    if lean and lean.gpu_ns and product:
        rate = EXECUTED * lean.flops_per_s / product
        rows.append(row("lean-rate", rate, "of product", "higher", RATE_OF_PRODUCT))
        # The gradients themselves are what was asked for.
        memory = (lean.extra_bytes - gradients_bytes) / logits_bytes
        unit = "of logits, beside the gradients"
        rows.append(row("lean-memory", memory, unit, "lower", MEMORY_OF_LOGITS))
    return rows


def table_of(rows):
    """Return what was to be reached, a line each."""
    lines = []
    for one in rows:
        if one["reach"] is not None or one["peer"]:
            met = {True: "met", False: "NOT MET", None: "?" if one["reach"] else ""}[one["met"]]
            peer = f"best peer {one['peer']}" if one["peer"] else ""
            value = "not measured" if one["value"] is None else f"{one['value']:g} {one['unit']}"
            lines.append(f"{one['name']:44} {value:20} of {one['reach'] or '-':<8} {met:8} {peer}")
    return "\n".join(lines)
