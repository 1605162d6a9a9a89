"""The schedule of ring_attention_backward: which CTA has which tasks, in which order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mkernel.ops.attention.schedule import Helpers


@dataclass(frozen=True)
class Tasks:
    """The tasks of a round. They are numbered in this order: tiles of dq, blocks of keys (those of rank 0 first), then
    reductions: those of this rank's own blocks, and those for its counterpart in each next node."""

    queries: Sequence[float]  # cost of each tile of dq
    keys: Sequence[float]  # cost of each block of keys
    own: int  # reductions of this rank's own blocks; 0 with one rank
    others: int  # reductions for other nodes

    def __len__(self) -> int:
        return len(self.queries) + len(self.keys) + self.own + self.others


@dataclass(frozen=True)
class _Batch:
    """Tasks of one round that are scheduled together."""

    round_index: int
    numbers: Sequence[int]
    costs: Sequence[float]


def _batches(tasks: Tasks, rounds: int, window: int) -> Iterator[_Batch]:
    """All tasks of a call, in an order in which no task waits for a later one, even on another rank. Reductions lag, so
    that the partials that they wait for can arrive during the compute of the next round: by one round, and those that
    wait for other nodes by up to two. They may not lag by the whole window, because round t + window reuses the slots.
    """
    first = len(tasks.queries) + len(tasks.keys)
    compute = range(first)
    own, others = range(first, first + tasks.own), range(first + tasks.own, len(tasks))
    lag = min(window - 1, 1)
    last_lag = min(window - 1, 2) if tasks.others else lag
    costs = [*tasks.queries, *tasks.keys]
    for step in range(rounds + last_lag):
        if step < rounds:
            yield _Batch(step, compute, costs)
        if others and lag <= step < rounds + lag:
            yield _Batch(step - lag, others, [1.0] * len(others))
        if own and last_lag <= step:
            yield _Batch(step - last_lag, own, [1.0] * len(own))


def scheduled(tasks: Tasks, rounds: int, parts: int, window: int, ctas: int, helpers: Helpers) -> list[int]:
    """Which CTA has which tasks, in the format that the kernel reads: ctas + 1 words that say where the list of each
    CTA starts and where the last one ends, then the lists. Task n of a round has the number round * len(tasks) + n.

    The CTA that is free first takes the longest remaining task of the batch. Helpers have only tasks of rounds from
    `helpers.joined` on. If units are split into parts, all parts of a tile of dq go to one CTA, which keeps its sum.
    """
    lists: list[list[int]] = [[] for _ in range(ctas)]
    compute = ctas - helpers.count
    free = [(0.0, cta) for cta in range(helpers.count, ctas)]
    joined = helpers.count == 0 or parts > 1
    for batch in _batches(tasks, rounds, window):
        base = batch.round_index * len(tasks)
        if parts > 1:
            for nth, number in enumerate(batch.numbers):
                lists[helpers.count + nth % compute].append(base + number)
            continue
        if not joined and batch.round_index >= helpers.joined:
            joined = True
            free += [(helpers.ready, cta) for cta in range(helpers.count)]
            heapq.heapify(free)
        available = free
        if joined and batch.round_index < helpers.joined:  # a reduction of an earlier round
            available = [entry for entry in free if entry[1] >= helpers.count]
            heapq.heapify(available)
        for cost, number in sorted(zip(batch.costs, batch.numbers), key=lambda each: (-each[0], each[1])):
            time, cta = available[0]
            lists[cta].append(base + number)
            heapq.heapreplace(available, (time + cost, cta))
        if available is not free:
            free = [*available, *(entry for entry in free if entry[1] < helpers.count)]
            heapq.heapify(free)
    words, end = [], ctas + 1
    for tasks_of_cta in lists:
        words.append(end)
        end += len(tasks_of_cta)
    return [*words, end, *(task for tasks_of_cta in lists for task in tasks_of_cta)]
