"""Device functions on arrays: the same as the simulator's interpreter says, one number at a time."""

import numpy as np
import pytest
import triton
import triton.language as tl
from lang.harness import as_cta

from mkernel.lang.order import arrival_order, swizzle_tile
from mkernel.lang.roles import other_tiles_of
from mkernel.ops.moe.tile_order import interleaved
from mkernel.ops.reduce.all_reduce.order import count_rounds, round_at
from mkernel.ops.reduce.reduce_scatter.order import deal_tiles, tile_at
from mkernel.scale.evaluate import call

CTAS = 5


def one_by_one(function, places, *numbers, cta=0, ctas=1, **constants):
    with as_cta(cta, ctas) as interpret:
        return [interpret(function, int(place), *map(int, numbers), **constants) for place in places]


def same(found, expected):
    parts = found if isinstance(found, tuple) else (found,)
    rows = [row if isinstance(row, tuple) else (row,) for row in expected]
    for part, column in zip(parts, zip(*rows)):
        assert np.broadcast_to(part, len(rows)).tolist() == list(column)


@pytest.mark.parametrize(("function", "count", "numbers", "constants"), [
    (swizzle_tile, 30, (5, 6), dict(GROUP=4)),
    (arrival_order, 18, (3, 3), dict(WORLD_SIZE=6, RANKS_PER_NODE=2)),
    (interleaved, 40, (5, 3, 5), dict(GROUP=2)),
])  # fmt: skip
def test_orders_of_places(function, count, numbers, constants):
    places = np.arange(count)
    same(call(function, places, *numbers, **constants), one_by_one(function, places, *numbers, **constants))


@pytest.mark.parametrize("tiles", [3, 7, 11])
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 3), (2, 2), (3, 2), (3, 1)])
def test_orders_of_ctas_with_branches(nodes, gpus, tiles):
    ranks = nodes * gpus
    cta = np.arange(CTAS)
    dealt = call(deal_tiles, tiles, WORLD_SIZE=ranks, cta=cta, ctas=CTAS)
    rounds, early, late = (np.broadcast_to(part, CTAS) for part in dealt)
    length = rounds * ranks + early + late
    place = np.arange(length.max())[:, None]
    found = call(tile_at, place, tiles, rounds, early, WORLD_SIZE=ranks, RANKS_PER_NODE=gpus, cta=cta, ctas=CTAS)
    for i in range(CTAS):
        own = (tiles, rounds[i], early[i])
        expected = one_by_one(tile_at, range(length[i]), *own, cta=i, ctas=CTAS, WORLD_SIZE=ranks, RANKS_PER_NODE=gpus)
        same(tuple(part[: length[i], i] for part in found), expected)
    rounds = call(count_rounds, tiles, cta=cta, ctas=CTAS)
    for i in range(CTAS):
        places = np.arange(rounds[i])
        found = call(round_at, places, rounds[i], 0, RANKS_PER_NODE=gpus, cta=i, ctas=CTAS)
        same(found, one_by_one(round_at, places, rounds[i], 0, cta=i, ctas=CTAS, RANKS_PER_NODE=gpus))


def test_shares_of_all_ctas_at_once():
    found = call(other_tiles_of, np.arange(CTAS), 2, 4, 17, cta=np.arange(CTAS), ctas=CTAS)
    expected = [one_by_one(other_tiles_of, [i], 2, 4, 17, cta=i, ctas=CTAS)[0] for i in range(CTAS)]
    same(found, expected)


@triton.jit
def _returns_early(x):
    if x > 1:
        return x
    return x + 1


@triton.jit
def _adds(x, LARGE: tl.constexpr):
    if LARGE:
        x += 10
    return x


def test_what_cannot_be_run_on_arrays_is_refused():
    with pytest.raises(NotImplementedError, match="returns from inside an if"):
        call(_returns_early, np.arange(3))


def test_arguments_are_not_changed_and_constants_choose():
    numbers = np.arange(3)
    assert call(_adds, numbers, True).tolist() == [10, 11, 12]
    assert call(_adds, numbers, False).tolist() == numbers.tolist() == [0, 1, 2]
