"""The order of the tiles of two GEMMs, the second of which multiplies what the first computes."""

import triton
import triton.language as tl


@triton.jit
def interleaved(tile, row_blocks, first_columns, second_columns, GROUP: tl.constexpr):
    """Tile number -> (whether it belongs to the second GEMM, place in the sequence of row blocks, column block), for
    two GEMMs where the second multiplies the rows that the first computes.

    The order is: group 0 of the first GEMM, group 1 of the first, group 0 of the second, group 2 of the first, group 1
    of the second, and so on. So a tile depends only on tiles that were handed out long before it, and results come out
    early.
    """
    groups = tl.cdiv(row_blocks, GROUP)
    last = row_blocks - (groups - 1) * GROUP  # height of the last group
    first_size = GROUP * first_columns
    second_size = GROUP * second_columns
    # a turn: one group through the first GEMM, and the previous group through the second
    after = tile - tl.where(groups > 1, first_size, last * first_columns)
    turn = tl.minimum(tl.maximum(after, 0) // tl.maximum(first_size + second_size, 1), tl.maximum(groups - 2, 0))
    within = after - turn * (first_size + second_size)
    entering = tl.where(turn + 1 == groups - 1, last, GROUP) * first_columns
    group = turn * 0
    second = turn < 0
    inside = tile
    if after >= 0:
        if groups == 1:
            second = turn >= 0
            inside = after
        elif within < entering:
            group = turn + 1
            inside = within
        else:
            second = turn >= 0
            beyond = within - entering >= second_size
            group = tl.where(beyond, groups - 1, turn)
            inside = within - entering - tl.where(beyond, second_size, 0)
    height = tl.where(group == groups - 1, last, GROUP)
    return second, group * GROUP + inside % height, inside // height


@triton.jit
def interleaved_until(places, row_blocks, first_columns, second_columns, GROUP: tl.constexpr):
    """How many tiles of the order `interleaved` there are up to the last tile of the first `places` row blocks."""
    groups = tl.cdiv(places, GROUP)
    entered = tl.minimum((groups + 1) * GROUP, row_blocks)
    left = tl.minimum(groups * GROUP, row_blocks)
    return tl.where(places > 0, entered * first_columns + left * second_columns, 0)
