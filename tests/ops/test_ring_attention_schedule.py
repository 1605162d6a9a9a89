"""Which CTA of ring_attention computes which tiles, and where the CTAs wait for each other."""

from itertools import pairwise

import pytest

from mkernel.ops.attention.schedule import SYNC_INTERVAL, SYNC_MARK, SYNC_SLACK, Helpers, scheduled
from mkernel.ops.attention.sequences import Pattern, Sequences

CASES = {
    # size, length, zigzag, causal, rank; CTAs, helpers, units
    "zigzag": (4, 12288, True, True, 0, 33, 0, 64),
    "zigzag, last rank": (4, 12288, True, True, 3, 33, 0, 64),
    "no mask": (4, 12288, False, False, 1, 33, 0, 64),
    "contiguous": (4, 12288, False, True, 2, 33, 0, 64),
    "helpers": (4, 12288, True, True, 1, 33, 3, 64),
    "one rank": (1, 65536, False, True, 0, 132, 0, 16),
    "an odd number of tiles": (2, 12160, False, True, 1, 16, 0, 20),
    "fewer tiles than CTAs": (2, 256, False, False, 0, 132, 0, 4),
    "nothing": (2, 0, False, False, 0, 4, 0, 0),
}


def lists_of(case, sync):
    """(the tiles of each CTA, costs of a unit's tiles)"""
    size, length, zigzag, causal, rank, ctas, helpers, units = CASES[case]
    costs = (
        Sequences(size, length, Pattern(causal, "zigzag" if zigzag else "contiguous"))
        .key_blocks(rank, 128, 128)
        .tolist()
    )
    words = scheduled(costs, 1, units, 1, ctas, Helpers(helpers, 1000.0, units // 2), sync)
    return [words[words[cta] : words[cta + 1]] for cta in range(ctas)], costs


@pytest.mark.parametrize("case", CASES)
def test_every_tile_once_in_the_order_of_units(case):
    *_, units = CASES[case]
    lists, costs = lists_of(case, True)
    plain = [[entry % SYNC_MARK for entry in mine] for mine in lists]
    assert sorted(tile for mine in plain for tile in mine) == list(range(units * len(costs)))
    for mine in plain:
        assert all(a // len(costs) <= b // len(costs) for a, b in pairwise(mine))
    assert plain == lists_of(case, False)[0], "marks change nothing else"


@pytest.mark.parametrize(("tiles", "ctas", "units"), [(24, 33, 6), (7, 3, 5), (1, 4, 3)])
def test_one_by_one_a_unit_occupies_more_ctas(tiles, ctas, units):
    def owners(in_pairs):
        words = scheduled([9] * tiles, 1, units, 1, ctas, Helpers(0, 0.0, 0), False, in_pairs)
        lists = [words[words[cta] : words[cta + 1]] for cta in range(ctas)]
        assert sorted(tile for mine in lists for tile in mine) == list(range(units * tiles))
        assert all(mine == sorted(mine, key=lambda tile: tile // tiles) for mine in lists)
        return [sum(any(tile // tiles == unit for tile in mine) for mine in lists) for unit in range(units)]

    assert owners(False)[0] == min(tiles, ctas)
    assert all(single >= paired for single, paired in zip(owners(False), owners(True)))


@pytest.mark.parametrize("case", CASES)
def test_all_ctas_come_to_all_grid_syncs_at_the_same_time(case):
    *_, helpers, _units = CASES[case]
    lists, costs = lists_of(case, True)
    times = []  # of each CTA's grid syncs, in key blocks
    for mine in lists[helpers:]:
        time, synced = 0, []
        for entry in mine:
            if entry >= SYNC_MARK:
                synced.append(time)
            time += costs[entry % SYNC_MARK % len(costs)] + 1
        times.append(synced)
    assert len({len(synced) for synced in times}) == 1
    for together in zip(*times):
        assert max(together) - min(together) <= SYNC_SLACK
    assert all(b - a >= SYNC_INTERVAL - SYNC_SLACK for synced in times for a, b in pairwise(synced))
    assert not any(entry >= SYNC_MARK for mine in lists[:helpers] for entry in mine), "helpers have no time for that"
    if case in ("zigzag", "no mask", "one rank", "helpers"):
        work = sum(costs) * CASES[case][-1] / len(lists)
        assert len(times[0]) > work / 1000, "they would drift apart"
