"""The schedule of ring_attention: which CTA computes which tiles of queries, and where CTAs wait for each other."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

SYNC_MARK = 2**32  # added to a tile of the schedule before which the CTAs synchronize: see `scheduled`
SYNC_INTERVAL = 200  # minimum key blocks between two grid syncs: 0.3 ms on an H200 (estimated)
SYNC_SLACK = 16  # maximum key blocks between the start times of the tiles of a grid sync
SYNC_BYTES = 8 * 2**20  # if a unit's keys and values are larger, CTAs should read the same ones at the same time


@dataclass(frozen=True)
class Helpers:
    """CTAs that copy before they compute: the `count` CTAs with the lowest program ids. They become free at time
    `ready`, in key blocks, and take tiles of rounds from `joined` on."""

    count: int
    ready: float
    joined: int


def sync_pays(unit_bytes: int) -> bool:
    """Whether a unit's keys and values are so large that CTAs should read the same ones at the same time."""
    return unit_bytes > SYNC_BYTES


def scheduled(
    costs: Sequence[int],
    group: int,
    units: int,
    parts: int,
    ctas: int,
    helpers: Helpers,
    sync: bool,
    in_pairs: bool = True,
) -> list[int]:
    """Which CTA computes which tiles, in the format that the kernel reads: ctas + 1 words that say where the list of
    each CTA starts and where the last one ends, then the lists. Tile t of a head has the number
    (round * group + head within the group) * (tiles of a head) + t.

    The CTA that is free first takes the next tiles of a unit: the longest remaining tile together with the shortest.
    With a causal mask, all such pairs take equally long, so the CTAs stay in step and read the same keys at the same
    time. In the last units, CTAs should finish at the same time, so each takes a single tile, longest first, and the
    helpers take tiles too. If units are split into parts, all parts of a tile go to one CTA.

    costs: the key blocks of each tile of a head. group: heads of queries per head of keys. sync: mark (SYNC_MARK) some
    of the tiles that all CTAs except helpers start at the same time, according to this model. There the CTAs briefly
    wait for each other, because their actual speeds differ. in_pairs: if not, each CTA takes a single tile at a time in
    all units: then a unit occupies twice as many CTAs.
    """
    blocks = len(costs)
    order = sorted(range(group * blocks), key=lambda tile: -costs[tile % blocks])
    lists: list[list[int]] = [[] for _ in range(ctas)]
    start_times: list[list[float]] = [[] for _ in range(ctas)]  # of the tiles in the lists
    if parts > 1:
        compute = ctas - helpers.count
        for round_index in range(units * parts):
            for nth, tile in enumerate(order):
                lists[helpers.count + nth % compute].append(round_index * len(order) + tile)
    else:
        free = [(0.0, cta) for cta in range(helpers.count, ctas)]
        pairs = [(order[i], order[-1 - i])[: 1 + (2 * i + 1 < len(order))] for i in range((len(order) + 1) // 2)]
        # units whose tiles go in pairs; then one by one
        paired = units - max(2 * ctas // max(len(pairs), 1), 1) if in_pairs else 0
        for unit in range(units):
            if helpers.count and unit == helpers.joined:
                free += [(helpers.ready, cta) for cta in range(helpers.count)]
                heapq.heapify(free)
            for tiles in pairs if unit < paired else [(tile,) for tile in order]:
                time, cta = free[0]
                for tile in tiles:
                    lists[cta].append(unit * len(order) + tile)
                    start_times[cta].append(time)
                    time += costs[tile % blocks] + 1
                heapq.heapreplace(free, (time, cta))
        if sync:
            _mark_syncs(lists[helpers.count :], start_times[helpers.count :])
    words, end = [], ctas + 1
    for tiles_of_cta in lists:
        words.append(end)
        end += len(tiles_of_cta)
    return [*words, end, *(tile for tiles_of_cta in lists for tile in tiles_of_cta)]


def _mark_syncs(lists: list[list[int]], start_times: list[list[float]]) -> None:
    """Mark tiles that all these CTAs start within SYNC_SLACK key blocks of each other, at least SYNC_INTERVAL apart."""
    last = 0.0
    for time in start_times[0]:
        if time < last + SYNC_INTERVAL:
            continue
        nearest = [bisect.bisect_left(times, time - SYNC_SLACK / 2) for times in start_times]
        if all(i < len(times) and times[i] <= time + SYNC_SLACK / 2 for i, times in zip(nearest, start_times)):
            last = time
            for i, tiles_of_cta in zip(nearest, lists):
                tiles_of_cta[i] += SYNC_MARK
