"""The schedule of ring_attention: which CTA computes which tiles of queries, and where CTAs wait for each other."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

SYNC_MARK = 2**32  # added to a tile of a schedule at which the CTAs synchronise: see `scheduled`
SYNC_INTERVAL = 200  # key blocks between two grid syncs, at least: 0.3 ms on an H200 (estimated)
SYNC_SLACK = 16  # key blocks that the tiles of a grid sync may begin apart
SYNC_BYTES = 8 * 2**20  # of a head's keys and values: with more it matters that CTAs read the same ones at a time


@dataclass(frozen=True)
class Helpers:
    """CTAs that copy before they compute, those with the lowest numbers. They are free at time `ready`, in key blocks,
    for tiles of rounds from `joined` on."""

    count: int
    ready: float
    joined: int


def sync_pays(unit_bytes: int) -> bool:
    """Are a head's keys and values so many that CTAs should read the same ones at the same time?"""
    return unit_bytes > SYNC_BYTES


def scheduled(
    costs: Sequence[int],
    group: int,
    units: int,
    parts: int,
    ctas: int,
    helpers: Helpers,
    sync: bool,
) -> list[int]:
    """Which CTA computes which tiles, as the kernel reads it: for each CTA where its list starts and the
    next one's does, then the lists. A tile is numbered (round * group + head of the group) * tiles + tile.

    Tiles go to the CTA that is free first, the longest of a unit with the shortest: with a causal mask all such pairs
    are equally long, so the CTAs stay in step and read the same keys at the same time. In the last units, where they
    shall end together, tiles go one by one, long ones first, to the helpers too. Where units have parts, a tile stays
    with one CTA.

    sync: tiles that all CTAs but helpers begin at the same time, by this reckoning, are marked now and then
    (SYNC_MARK). There the CTAs wait for each other a little, as none is as fast as the next one.
    """
    blocks = len(costs)
    order = sorted(range(group * blocks), key=lambda tile: -costs[tile % blocks])
    lists: list[list[int]] = [[] for _ in range(ctas)]
    begun: list[list[float]] = [[] for _ in range(ctas)]  # when the tiles of the lists are
    if parts > 1:
        compute = ctas - helpers.count
        for round_index in range(units * parts):
            for place, tile in enumerate(order):
                lists[helpers.count + place % compute].append(round_index * len(order) + tile)
    else:
        free = [(0.0, cta) for cta in range(helpers.count, ctas)]
        pairs = [(order[i], order[-1 - i])[: 1 + (2 * i + 1 < len(order))] for i in range((len(order) + 1) // 2)]
        singly = units - max(2 * ctas // max(len(pairs), 1), 1)  # from here on tiles are dealt one by one
        for unit in range(units):
            if helpers.count and unit == helpers.joined:
                free += [(helpers.ready, cta) for cta in range(helpers.count)]
                heapq.heapify(free)
            for tiles in pairs if unit < singly else [(tile,) for tile in order]:
                time, cta = free[0]
                for tile in tiles:
                    lists[cta].append(unit * len(order) + tile)
                    begun[cta].append(time)
                    time += costs[tile % blocks] + 1
                heapq.heapreplace(free, (time, cta))
        if sync:
            _mark_syncs(lists[helpers.count :], begun[helpers.count :])
    words, end = [], ctas + 1
    for mine in lists:
        words.append(end)
        end += len(mine)
    return [*words, end, *(tile for mine in lists for tile in mine)]


def _mark_syncs(lists: list[list[int]], begun: list[list[float]]) -> None:
    """Mark tiles that all these CTAs begin within SYNC_SLACK blocks of each other, every SYNC_INTERVAL or more."""
    last = 0.0
    for time in begun[0]:
        if time < last + SYNC_INTERVAL:
            continue
        places = [bisect.bisect_left(times, time - SYNC_SLACK / 2) for times in begun]
        if all(at < len(times) and times[at] <= time + SYNC_SLACK / 2 for at, times in zip(places, begun)):
            last = time
            for at, mine in zip(places, lists):
                mine[at] += SYNC_MARK
