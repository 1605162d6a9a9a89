"""Tile order: nothing is left out, nothing comes twice, and near data comes before far data."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mkernel.lang.order import arrival_order, swizzle_tile
from mkernel.ops.moe.tile_order import interleaved, interleaved_until

from .harness import as_cta


def all_tiles(row_blocks: int, column_blocks: int, group: int) -> list[tuple[int, int]]:
    with as_cta() as call:
        return [
            call(swizzle_tile, tile, row_blocks, column_blocks, GROUP=group)
            for tile in range(row_blocks * column_blocks)
        ]


def all_places(rank: int, blocks: int, size: int, gpus: int) -> list[tuple[int, int]]:
    with as_cta() as call:
        return [
            call(arrival_order, place, rank, blocks, WORLD_SIZE=size, RANKS_PER_NODE=gpus)
            for place in range(blocks * size)
        ]


@settings(max_examples=60, deadline=None)
@given(row_blocks=st.integers(1, 14), column_blocks=st.integers(1, 9), group=st.integers(1, 16))
@example(row_blocks=1, column_blocks=1, group=8)
@example(row_blocks=9, column_blocks=3, group=8)  # a last group of one row block
@example(row_blocks=7, column_blocks=2, group=16)  # one group, larger than the rows
def test_grouped_is_a_bijection(row_blocks, column_blocks, group):
    tiles = all_tiles(row_blocks, column_blocks, group)
    assert sorted(tiles) == [(row, column) for row in range(row_blocks) for column in range(column_blocks)]


@pytest.mark.parametrize(("row_blocks", "column_blocks", "group"), [(8, 3, 4), (10, 5, 4), (3, 7, 8), (5, 4, 1)])
def test_a_group_is_finished_before_the_next_begins(row_blocks, column_blocks, group):
    groups = [row // group for row, _ in all_tiles(row_blocks, column_blocks, group)]
    assert groups == sorted(groups)


@pytest.mark.parametrize(("row_blocks", "column_blocks", "group"), [(8, 3, 4), (10, 5, 4), (3, 7, 8)])
def test_neighbours_in_time_share_a_column_of_b(row_blocks, column_blocks, group):
    tiles = all_tiles(row_blocks, column_blocks, group)
    height = min(group, row_blocks)
    assert tiles[:height] == [(row, 0) for row in range(height)]


@pytest.mark.parametrize(("row_blocks", "column_blocks", "group"), [(8, 3, 4), (10, 5, 4), (7, 4, 2), (5, 1, 2)])
def test_a_group_begins_with_the_columns_that_the_last_one_ended_with(row_blocks, column_blocks, group):
    tiles = all_tiles(row_blocks, column_blocks, group)
    for (row, column), (next_row, next_column) in pairwise(tiles):
        if row // group != next_row // group:
            assert column == next_column


@settings(max_examples=60, deadline=None)
@given(nodes=st.integers(1, 4), gpus=st.integers(1, 5), blocks=st.integers(1, 5), data=st.data())
@example(nodes=1, gpus=1, blocks=3, data=None)
@example(nodes=3, gpus=1, blocks=2, data=None)
@example(nodes=1, gpus=3, blocks=1, data=None)
def test_arriving_is_a_bijection_near_to_far(nodes, gpus, blocks, data):
    size = nodes * gpus
    rank = data.draw(st.integers(0, size - 1)) if data is not None else size - 1
    places = all_places(rank, blocks, size, gpus)
    assert sorted(places) == [(source, block) for source in range(size) for block in range(blocks)]
    node = rank // gpus
    own, here, elsewhere = places[:blocks], places[blocks : blocks * gpus], places[blocks * gpus :]
    assert own == [(rank, block) for block in range(blocks)]
    assert all(source // gpus == node and source != rank for source, _ in here)
    assert all(source // gpus != node for source, _ in elsewhere)
    # all of them send at the same time, so their blocks are taken in turn
    for part in (here, elsewhere):
        assert [block for _, block in part] == sorted(block for _, block in part)


@pytest.mark.parametrize(("nodes", "gpus"), [(2, 2), (3, 2), (2, 4), (4, 3)])
def test_counterparts_come_first_among_the_other_nodes(nodes, gpus):
    size = nodes * gpus
    for rank in range(size):
        elsewhere = all_places(rank, 2, size, gpus)[2 * gpus :]
        first = {source for source, _ in elsewhere[: nodes - 1]}
        assert first == {source for source in range(size) if source % gpus == rank % gpus and source != rank}


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 4), (3, 2)])
def test_ranks_do_not_all_begin_with_the_same_peer(nodes, gpus):
    size = nodes * gpus
    firsts = [all_places(rank, 1, size, gpus)[1][0] for rank in range(gpus)]
    assert len(set(firsts)) == gpus


@settings(max_examples=25, deadline=None)
@given(nodes=st.integers(1, 3), gpus=st.integers(1, 3), blocks=st.integers(1, 3), columns=st.integers(1, 3),
       group=st.integers(1, 5))  # fmt: skip
def test_both_together_give_every_tile_once(nodes, gpus, blocks, columns, group):
    size = nodes * gpus
    rank = size // 2
    places = all_places(rank, blocks, size, gpus)
    tiles = [(*places[place], column) for place, column in all_tiles(blocks * size, columns, group)]
    assert sorted(tiles) == [(s, b, c) for s in range(size) for b in range(blocks) for c in range(columns)]


def test_large_numbers():
    with as_cta() as call:
        row_blocks, column_blocks = 8192, 4096
        last = row_blocks * column_blocks - 1
        row, column = call(swizzle_tile, last, row_blocks, column_blocks, GROUP=8)
        assert row == row_blocks - 1
        assert column in (0, column_blocks - 1)
        assert call(arrival_order, 72 * 1024 - 1, 0, 1024, WORLD_SIZE=72, RANKS_PER_NODE=8)[1] == 1023


@pytest.mark.parametrize(
    ("row_blocks", "first", "second", "group"),
    [(1, 1, 1, 8), (8, 2, 3, 8), (9, 3, 1, 8), (7, 1, 4, 2), (12, 2, 2, 4), (15, 3, 2, 8), (5, 2, 1, 1)],
)
def test_two_gemms_take_turns(row_blocks, first, second, group):
    """Every tile of both comes once, and a tile of the second after all tiles of the first that it needs."""
    with as_cta() as call:
        count = row_blocks * (first + second)
        tiles = [call(interleaved, tile, row_blocks, first, second, GROUP=group) for tile in range(count)]
        until = [call(interleaved_until, row, row_blocks, first, second, GROUP=group) for row in range(row_blocks + 1)]
    columns = {0: first, 1: second}
    expected = [(gemm, row, column) for gemm in (0, 1) for row in range(row_blocks) for column in range(columns[gemm])]
    assert sorted(tiles) == expected
    when = {tile: place for place, tile in enumerate(tiles)}
    for row in range(row_blocks):
        done = max(when[0, row, column] for column in range(first))
        assert done < min(when[1, row, column] for column in range(second))
    assert until[0] == 0
    for row in range(row_blocks):
        group_of_row = range(row // group * group, min((row // group + 1) * group, row_blocks))
        assert until[row + 1] == 1 + max(when[1, mate, column] for mate in group_of_row for column in range(second))
    if row_blocks > 2 * group:
        assert min(when[1, row, 0] for row in range(row_blocks)) < max(when[0, row, 0] for row in range(row_blocks))
