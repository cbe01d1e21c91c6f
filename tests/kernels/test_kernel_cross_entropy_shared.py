"""Cross-entropy of rows in shared memory, of one SM or of several, by threads; float16."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import json
import re

import numpy as np
import pytest
import torch

import kprof.kernels.cross_entropy.cross_entropy as groups_module
from kprof.kernels.cross_entropy.cross_entropy import ctas_of_row
from kprof.kernels.cross_entropy.cross_entropy import (
    operator_both,
    operator_both_shared,
    operator_both_shared_over,
)
from kprof.kernels.runtime import next_power_of_two
from kprof.kernels.cross_entropy.cross_entropy import KERNEL, cross_entropy
from tests.kernels.kernel_checks import INTERPRETED, SHARED_BYTES, are_same
from tests.kernels.kernel_groups import NUM_WARPS, Described, run_together
from tests.kernels.kernel_hopper import on_hopper

pytestmark = INTERPRETED
MODULES = ("tiles/pipeline", "cross_entropy/_clusters_kernel")
LANES = 32 * NUM_WARPS
# Rows, columns, programs of a row, groups of programs.
SIZES = [(7, 1_024, 4, 1), (9, 8_256, 3, 2), (1, 1_024, 2, 1), (12, 576, 1, 4), (4, 12_032, 5, 2)]
# Many rows for each program.
SIZES += [(70, 512, 1, 1), (35, 1_024, 2, 1), (41, 512, 1, 3)]


def drawn(rows, columns):
    generator = np.random.default_rng(rows * columns)
    logits = (3 * generator.standard_normal((rows, columns))).astype(np.float16)
    return logits, generator.integers(0, columns, rows)


def losses_of(logits, targets, group, groups, over=True, **options):
    """Return losses, the gradient and the divisor; `over`: the gradient is written over logits."""
    return run(logits, targets, group, groups, over, **options)[:3]


def run(logits, targets, group, groups, over=True, **options):
    """Return letters, too: (rows, programs of a row)."""
    rows, columns = logits.shape
    divisor = options.get("divisor")
    given = logits.ravel().copy()
    gradient = given if over else np.full_like(given, np.nan)
    losses, state = np.full(rows, np.nan, np.float32), np.full(2 * rows + 1, np.nan, np.float32)
    letters = np.zeros((rows, group), np.int64)
    tensors = given, targets, divisor, losses, state, gradient, letters.ravel()
    tiles = next_power_of_two(-(-columns // (group * LANES * 8)))
    pieces = group if columns % (64 * group) == 0 else 1
    described = (Described(given, columns, pieces, (1, 1, tiles * LANES // 8, 64)),)
    described += (Described(gradient, columns, pieces, (1, 1, LANES // 8, 64)),)
    numbers = columns, columns, rows, groups
    chosen = options.get("ignore_index", -100), options.get("z_loss", 0.0)
    constants = divisor is None, columns, group
    name = "losses_cluster_kernel"
    run_together(MODULES, name, group * groups, *tensors, *described, *numbers, *chosen, *constants)
    return losses, gradient.reshape(rows, columns), state[-1], letters


def expected_of(logits, targets, ignore_index=-100, z_loss=0.0, divisor=None):
    x = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor(targets)
    losses = torch.nn.functional.cross_entropy(
        x, targets, ignore_index=ignore_index, reduction="none"
    )
    counts = targets != ignore_index
    if z_loss:
        losses = losses + torch.where(counts, z_loss * x.logsumexp(1) ** 2, 0.0)
    divisor = int(counts.sum()) if divisor is None else float(divisor[0])
    (losses.sum() / divisor).backward()
    return losses.detach().numpy(), x.grad.numpy(), divisor


def check(logits, targets, group, groups, over=True, **options):
    losses, gradient, divisor = losses_of(logits, targets, group, groups, over=over, **options)
    expected_losses, expected, expected_divisor = expected_of(logits, targets, **options)
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(gradient.astype(np.float64), expected, rtol=2e-3, atol=1e-6)
    assert divisor == expected_divisor


@pytest.mark.parametrize("over", [True, False])
@pytest.mark.parametrize(("rows", "columns", "group", "groups"), SIZES)
def test_losses_and_gradients_are_those_of_torch(rows, columns, group, groups, over):
    check(*drawn(rows, columns), group, groups, over)


@pytest.mark.parametrize("ignored", [slice(0, None, 2), slice(1, None, 2), slice(0, 5)], ids=str)
def test_ignored_rows_get_no_loss_and_a_gradient_of_zero(ignored):
    logits, targets = drawn(9, 1_024)
    targets[ignored] = -100
    check(logits, targets, 2, 2)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("before", [np.nan, np.inf, -np.inf, -1_000, 60_000], ids=str)
def test_an_ignored_row_is_zeros_whatever_the_row_before_was(before, group):
    logits, targets = drawn(6, 1_024)
    logits[[0, 2]] = before
    targets[[1, 3]] = -100
    losses, gradient, _ = losses_of(logits, targets, group, 1, z_loss=1e-3)
    assert not losses[[1, 3]].any()
    assert not gradient[[1, 3]].any()


def test_the_target_that_is_ignored_may_be_one_of_the_vocabulary():
    logits, targets = drawn(9, 1_024)
    targets[::3] = 5
    check(logits, targets, 2, 2, ignore_index=5)


def test_a_given_divisor_takes_the_place_of_the_count_and_the_z_loss_is_added():
    check(*drawn(4, 576), 2, 1, z_loss=1e-2, divisor=np.array([16.0], np.float32))


def test_a_target_outside_the_vocabulary_makes_its_row_nan():
    logits, targets = drawn(4, 576)
    targets[1], targets[2] = 576, -3
    losses, gradient, _ = losses_of(logits, targets, 2, 1)
    assert np.isnan(losses).tolist() == [False, True, True, False]
    assert np.isnan(gradient).all(1).tolist() == [False, True, True, False]


def test_masked_columns_add_nothing():
    logits, targets = drawn(4, 576)
    logits[:, 100:] = -np.inf
    logits[:2, :50] = np.finfo(np.float16).min
    check(logits, targets % 50 + 50, 3, 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_logit_that_is_no_number_makes_its_row_nan(bad):
    logits, targets = drawn(4, 576)
    logits[2, 7] = bad
    losses, gradient, _ = losses_of(logits, targets, 2, 2)
    assert np.isnan(losses).tolist() == [False, False, True, False]
    assert np.isnan(gradient).all(1).tolist() == [False, False, True, False]


def test_a_row_of_nothing_but_masked_logits_is_nan_as_in_torch():
    logits, targets = drawn(4, 576)
    logits[1] = -np.inf
    losses, gradient, _ = losses_of(logits, targets, 2, 1)
    assert np.isnan(losses).tolist() == [False, True, False, False]
    assert np.isnan(gradient[1]).all()


def test_losses_keep_their_digits_far_from_zero():
    logits, targets = drawn(4, 576)
    shifted = (np.round(logits * 4) / 4 + np.float16(1_000)).astype(np.float16)
    losses, _, _ = losses_of(shifted, targets, 2, 1)
    np.testing.assert_allclose(losses, expected_of(shifted, targets)[0], rtol=3e-7)


def test_gradients_keep_their_digits_far_from_zero():
    logits = np.full((1, 576), 50_000, np.float16)
    logits[0, [7, 300]] = 60_000
    _, gradient, _ = losses_of(logits, np.array([7]), 2, 1)
    assert gradient[0, [7, 300]].tolist() == [-0.5, 0.5]


def test_every_program_leaves_one_letter_about_its_piece():
    logits, targets = drawn(3, 1_088)
    logits[0, :576] = -np.inf
    targets[0], targets[1] = 600, -100
    *_, letters = run(logits, targets, 2, 1)
    pieces = logits[:, :576].astype(np.float64), logits[:, 576:].astype(np.float64)
    assert not letters[1].any()
    for row in 0, 2:
        for member, piece in enumerate(pieces):
            highest = piece[row].max()
            about = 0.0 if np.isinf(highest) else highest
            found = (letters[row, member : member + 1] >> 32).astype(np.int32).view(np.float32)
            total = -letters[row, member : member + 1].astype(np.int32).view(np.float32)
            assert found == highest
            np.testing.assert_allclose(total, np.exp(piece[row] - about).sum(), rtol=1e-5)
    # A sum of nothing is no zeros either.
    assert letters[0, 0].astype(np.int32) == -(2**31)


def test_a_row_does_not_depend_on_its_neighbours():
    logits, targets = drawn(7, 1_024)
    divisor = np.array([1.0], np.float32)
    _, whole, _ = losses_of(logits, targets, 4, 2, divisor=divisor)
    _, part, _ = losses_of(logits[:3], targets[:3], 4, 1, divisor=divisor)
    assert np.array_equal(whole[:3], part)


def test_as_few_programs_share_a_row_as_have_room():
    expected = {
        16: 1,
        32_000: 1,
        32_784: 2,
        65_552: 3,
        128_256: 4,
        151_936: 5,
        262_144: 8,
    }
    assert {columns: ctas_of_row(columns) for columns in expected} == expected


@pytest.fixture
def launched(monkeypatch):
    """Grids and options of launches with rows shared, which do nothing here."""
    noted = []

    def launch(key, grid, arguments, options):
        noted.append((grid, options))

    monkeypatch.setattr(groups_module, "_launcher", lambda: launch)
    return noted


@pytest.mark.parametrize("operator", [operator_both_shared, operator_both_shared_over])
def test_all_programs_of_whole_groups_begin_together(launched, operator):
    logits = torch.zeros(7, 192, dtype=torch.bfloat16)
    operator(logits, torch.zeros(7, dtype=torch.int64), None, -100, 0.0, 0.0, "none")
    # Of the four SMs that there are without a GPU.
    assert launched == [(4, {"num_warps": 32, "launch_cooperative_grid": True, "maxnreg": 64})]


@pytest.mark.parametrize("odd", ["float32", "smoothing", "columns", "rows apart", "address"])
def test_what_cannot_be_shared_is_swept_as_ever(launched, odd):
    rows = torch.randn(3, 192, generator=torch.Generator().manual_seed(0))
    rows = rows.to(torch.float32 if odd == "float32" else torch.float16)
    logits = {
        "columns": rows[:, :160].contiguous(),
        "rows apart": rows.flatten()[:408].view(3, 136)[:, :128],
        "address": rows.flatten()[1:385].view(3, 128),
    }.get(odd, rows)
    options = (-100, 0.1 if odd == "smoothing" else 0.0, 0.0, "sum")
    targets = torch.tensor([5, 0, 100])
    expected = operator_both(logits, targets, None, *options)
    assert are_same(operator_both_shared(logits, targets, None, *options), expected)
    assert not launched


def test_a_loss_without_a_gradient_is_swept_as_ever(launched):
    logits, targets = torch.randn(3, 192), torch.tensor([5, 0, 100])
    loss = cross_entropy(logits, targets, shares_rows=True)
    assert torch.equal(loss, cross_entropy(logits, targets))
    assert not launched


def test_the_provider_says_that_gluon_has_no_interpreter():
    with pytest.raises(ImportError, match="Gluon"):
        KERNEL.provider("kprof-shared").load()


def test_rows_are_shared_only_where_that_is_asked_for(launched):
    logits = torch.zeros(2, 192, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(2, dtype=torch.int64)
    cross_entropy(logits, targets)
    assert not launched
    cross_entropy(logits, targets, shares_rows=True)
    assert len(launched) == 1


WIDTHS = [192, 32_000, 128_256, 151_936, 262_144]


@pytest.fixture(scope="module")
def compiled():
    """For each of the widths: spilled bytes, those of shared memory, registers, machine code."""
    told = on_hopper(
        """
import json, torch
from kprof.kernels.bench.ahead import compile_ahead, disassemble
from kprof.kernels.cross_entropy.cross_entropy import KERNEL

cross_entropy = KERNEL.provider("kprof-shared").load()
for columns in widths:
    x = torch.zeros(2, columns, dtype=torch.bfloat16, requires_grad=True)
    call = lambda: cross_entropy(x, torch.zeros(2, dtype=torch.int64))
    (one,) = (one for one in compile_ahead(call) if "cluster" in one.name)
    figures = one.spilled_bytes, one.shared_bytes, one.num_registers
    print(json.dumps([*figures, disassemble(one)]))
""",
        widths=WIDTHS,
    )
    return dict(zip(WIDTHS, map(json.loads, told.splitlines()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("columns", WIDTHS)
def test_it_compiles_for_hopper_without_spilling_and_fits_an_sm(compiled, columns):
    spilled_bytes, shared_bytes, num_registers, _ = compiled[columns]
    assert spilled_bytes == 0
    assert shared_bytes <= SHARED_BYTES
    # More than that, and 32 warps do not fit an SM.
    assert num_registers <= 64


@pytest.mark.slow
@pytest.mark.parametrize("columns", WIDTHS)
def test_warps_wait_for_each_other_three_times_a_row_once_to_add_up(compiled, columns):
    row = row_of(compiled[columns][-1])
    barriers = places(row, "BAR.SYNC")
    assert len(barriers) == 3
    # A warp's share goes to all others through shared memory.
    (left,), (taken,) = places(row, "STS.64"), places(row, "LDS.64")
    assert left < barriers[0] < taken < barriers[1]


@pytest.mark.slow
@pytest.mark.parametrize("columns", WIDTHS)
def test_lanes_that_add_the_same_two_products_have_rounded_both(compiled, columns):
    steps = row_of(compiled[columns][-1])
    between = [at for at, step in enumerate(steps) if step.startswith("SHFL.BFLY")]
    assert between
    assert not [steps[at + 1] for at in between if steps[at + 1].startswith("FFMA")]


@pytest.mark.slow
@pytest.mark.parametrize("columns", WIDTHS)
def test_rows_come_and_most_of_their_gradients_leave_by_the_copying_hardware(compiled, columns):
    row = row_of(compiled[columns][-1])
    summed, requested, written = places(row, "BAR.SYNC")
    # A row's place is free when all have summed it, not when its gradient has been written.
    (request,) = places(row, "UTMALDG")
    boxes, filled = places(row, "UTMASTG"), places(row, "STS.128")
    assert max(places(row, "LDS.128")) < summed < requested < request < min(filled, default=written)
    assert len(boxes) == len(filled)
    sent = min(boxes, default=written + 1)
    assert max(filled, default=0) < places(row, "FENCE")[-1] < written < sent
    # What they leave from is written again when it has been read, by all who copy.
    assert places(row, "DEPBAR.LE SB0, 0x0")[0] < summed
    # The other half of a gradient goes from registers.
    vectors = -(-columns // 8 // ctas_of_row(columns))
    tiles = -(-vectors // 1_024)
    assert len(boxes) == tiles // 2
    assert len(boxes) + len(places(row, "STG.E.EF.128")) == tiles
    assert not places(row, "LDGSTS")


def places(row, begin):
    return [place for place, one in enumerate(row) if one.startswith(begin)]


@pytest.mark.slow
@pytest.mark.parametrize("columns", WIDTHS)
def test_nothing_that_is_loaded_is_waited_for_before_a_row_is_summed(compiled, columns):
    row = row_of(compiled[columns][-1])
    begin = places(row, "SYNCS.PHASECHK")[0]
    loads = [place for place in places(row, "LDG.") if place < begin]
    # The next target's logit, and letters, one in a lane; a target to come may be waited for.
    loads = [place for place in loads if row[place].split()[0] != "LDG.E.64"]
    assert len(loads) == (2 if ctas_of_row(columns) > 1 else 1)
    into = [re.match(r"(\S+) R(\d+),", row[place]) for place in loads]
    names = [int(one[2]) + half for one in into for half in range(1 + (".64" in one[1]))]
    is_used = re.compile("|".join(rf"\bR{name}\b" for name in names)).search
    used = next(place for place in range(max(loads) + 1, len(row)) if is_used(row[place]))
    vectors = -(-columns // 8 // ctas_of_row(columns))
    assert exponentials_in(row[max(loads) : used]) >= 8 * -(-vectors // 1_024)


@pytest.mark.slow
@pytest.mark.parametrize("columns", WIDTHS)
def test_every_exponential_is_taken_once(compiled, columns):
    row = row_of(compiled[columns][-1])
    vectors = -(-columns // 8 // ctas_of_row(columns))
    # And a few for a lane, a warp, a program and the target.
    assert 0 <= exponentials_in(row) - 8 * -(-vectors // 1_024) <= 8


def exponentials_in(instructions):
    return sum(one.startswith("MUFU.EX2") for one in instructions)


def row_of(code):
    """Return the instructions of the loop over rows, without predicates.

    It ends at the first branch back from behind its request; what waits in vain is outside.
    """
    lines = re.findall(r"^(\.L\w+):|^\s+/\*[0-9a-f]{4,}\*/\s+(?:@\S+ )?\s*(.*?) *;", code, re.M)
    begins = {label: place for place, (label, _) in enumerate(lines) if label}
    request = max(place for place, (_, one) in enumerate(lines) if one.startswith("UTMALDG"))
    for end in range(request, len(lines)):
        to = re.match(r"BRA `\((\.L\w+)\)", lines[end][1])
        if to and begins[to[1]] < request:
            return [one for label, one in lines[begins[to[1]] : end + 1] if not label]
    raise AssertionError("no loop")
