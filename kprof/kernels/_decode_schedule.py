"""How decode attention reads a cache: as measured on an H200, and so that no register spills."""

from __future__ import annotations

from dataclasses import dataclass

from kprof.kernels._launch import next_power_of_two

# Of keys in one tile: bounded by what registers hold.
TILE_ELEMENTS = 8_192
# Rows times keys of a tile, for each byte of a key: bounded by registers, of which e4m3 takes more.
SCORES_OF_BYTE = 2_048
# Of a thread, where the compiler would rather spill than use as many.
REGISTERS_OF_TWO_WARPS, REGISTERS_OF_WIDE = 240, 168
# What an SM reads of a short cache, of one that is not long, and of a long one.
LITTLE_BYTES, MANY_BYTES, MOST_BYTES = 1 << 15, 1 << 18, 3 << 19
# Triton's least tile of a product.
LEAST_ROWS = 16
# Columns of the heads for which schedules were measured.
MOST_SMALL_DIM = 128
# Rows times columns of a sum that four warps hold.
ELEMENTS_OF_FOUR_WARPS = 4_096


@dataclass(frozen=True)
class Schedule:
    """How a cache is read: keys of a tile, tiles in flight, warps, and programs on an SM."""

    block: int
    stages: int
    warps: int
    programs: int = 2
    registers: int | None = None
    """Of a thread; None: as many as the compiler likes."""


def schedule_of(
    dim: int,
    rows: int,
    key_bytes: int,
    is_paged: bool,
    bytes_of_sm: int | None = None,
    is_crowded: bool = False,
) -> Schedule:
    """Return the schedule for heads of this dimension, such rows and such keys.

    What each SM reads decides, where that is known, and whether it is crowded: with more than half
    as many heads of keys as there are SMs, by two programs on each. As measured on an H200.
    """
    is_small = rows <= LEAST_ROWS and dim <= MOST_SMALL_DIM
    block = TILE_ELEMENTS // (dim * key_bytes)
    if bytes_of_sm is None or is_paged or not is_small:
        warps = 4 if rows * dim <= ELEMENTS_OF_FOUR_WARPS else 8
        most = SCORES_OF_BYTE * key_bytes // max(LEAST_ROWS, next_power_of_two(rows))
        is_wide = key_bytes > 1 and (dim > 128 or (is_paged and dim > 64))
        return Schedule(
            max(LEAST_ROWS, min(2 * block, most)),
            # The table's entries are on their way for two more tiles before the keys are.
            5 if is_paged else 3,
            warps,
            registers=REGISTERS_OF_WIDE if is_wide else None,
        )
    if key_bytes == 1:
        return _schedule_of_bytes(block, bytes_of_sm)
    if is_crowded:
        return Schedule(2 * block, 3, 4)
    if bytes_of_sm <= LITTLE_BYTES:
        return Schedule(2 * block, 2, 4, 1)
    if MANY_BYTES < bytes_of_sm <= MOST_BYTES:
        return Schedule(4 * block, 3, 4, 1)
    return Schedule(2 * block, 4, 4, 1)


def _schedule_of_bytes(block: int, bytes_of_sm: int) -> Schedule:
    """Return the schedule for keys in e4m3, which instructions hold up more than memory."""
    if bytes_of_sm <= LITTLE_BYTES:
        return Schedule(block, 2, 4, 1)
    if bytes_of_sm <= MANY_BYTES // 2:
        return Schedule(block, 3, 4, 1)
    return Schedule(block, 4, 2, registers=REGISTERS_OF_TWO_WARPS)
