"""Who waited for whom: from the wait records of the ranks of a group to the one that everybody waited for.

Every record is an arrow: a rank waited for a peer, or for its own network proxy. Follow the arrows. A chain
ends at somebody who waited for nobody: a rank that left no record (it never came, or died), a proxy, or
the network itself where a rank said that it had failed. Arrows that lead back to where they began are
ranks that waited for each other, which ranks in different calls do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mkernel.runtime.errors import CommTimeout
from mkernel.runtime.printable import printable
from mkernel.runtime.records import WaitRecord

FOR_THE_PROXY = ("ring space", "sent")  # signals that the rank's own proxy raises

Party = tuple[str, int]  # ("rank", 3), ("proxy", 3), ("network", 3)


@dataclass(frozen=True)
class NetworkFailure:
    """A rank's network layer failed, and said how."""

    rank: int
    message: str


@dataclass(frozen=True)
class Chain:
    """Waits of which each is for the rank of the next, and whom the last one is for."""

    waits: tuple[WaitRecord, ...]
    culprit: Party
    reason: str  # what is known about the culprit
    waiters: tuple[int, ...]  # all ranks whose waits lead to the culprit
    cycle: bool = False  # the last wait is for the rank of the first

    @property
    def short(self) -> str:
        """The chain in a line."""
        names = [f"rank {wait.rank}" for wait in self.waits] + [name(self.culprit)]
        return " -> ".join(dict.fromkeys(names) if not self.cycle else names)

    def __str__(self) -> str:
        lines = [self.short]
        # records may come from a file, whose text must not control the terminal
        lines += [f"  {printable(str(wait))}" for wait in self.waits]
        lines.append(f"  {printable(self.reason)}")
        others = [rank for rank in self.waiters if rank not in {wait.rank for wait in self.waits}]
        if others:
            lines.append(f"  {_ranks(others)} waited for {name(self.culprit)} too, directly or through others")
        return "\n".join(lines)


def name(party: Party) -> str:
    kind, rank = party
    return {
        "rank": f"rank {rank}",
        "proxy": f"the network proxy of rank {rank}",
        "network": f"the network of rank {rank}",
    }[kind]


def find(records: Iterable[WaitRecord], failures: Sequence[NetworkFailure] = ()) -> list[Chain]:
    """A chain for each culprit, the one that most ranks waited for first."""
    arrows = _arrows(records, failures)
    into: dict[Party, set[Party]] = {}
    for origin, targets in arrows.items():
        for target in targets:
            into.setdefault(target, set()).add(origin)
    failed = {("network", failure.rank): failure.message for failure in failures}
    explained: set[Party] = set()
    chains = []
    ends = {party for party in into if party not in arrows} | set(failed)
    for culprit in sorted(ends, key=lambda party: (party not in failed, party)):
        distance = _distances(culprit, into)
        start = max(distance, key=lambda party: (distance[party], -party[1]))
        waits = _descend(start, distance, arrows)
        chains.append(Chain(waits, culprit, _reason(culprit, waits, failed), _ranks_of(set(distance) - {culprit})))
        explained |= set(distance)
    chains.sort(key=lambda chain: (chain.culprit not in failed, -len(chain.waiters), chain.culprit))
    while left := sorted(set(arrows) - explained):
        cycle = _cycle(left[0], arrows)
        around = _distances(("rank", cycle[0].rank), into)
        chains.append(Chain(cycle, ("rank", cycle[0].rank), _reason_of_cycle(cycle), _ranks_of(around), cycle=True))
        explained |= set(around)
    return chains


def join(error: CommTimeout, everyone: Iterable[CommTimeout]) -> CommTimeout:
    """The same error, which now also knows, and says, what the other ranks of its group waited for."""
    mine = set(error.records)
    others = (late.records for late in everyone if late.group == error.group)
    error.others = tuple(dict.fromkeys(record for some in others for record in some if record not in mine))
    chains = find(error.records + error.others)
    if error.others and chains:
        error.args = (f"{error.args[0]} Who waited for whom: {chains[0].short}; {chains[0].reason}.",)
    return error


def _arrows(
    records: Iterable[WaitRecord], failures: Sequence[NetworkFailure]
) -> dict[Party, dict[Party, WaitRecord | None]]:
    """From each rank to everybody it waited for, with the wait that says most: one that ran out, the longest."""
    arrows: dict[Party, dict[Party, WaitRecord | None]] = {}
    for record in records:
        if record.signal == "nothing":
            continue
        origin: Party = ("rank", record.rank)
        target: Party = ("rank", record.peer) if record.peer >= 0 else origin
        if record.signal in FOR_THE_PROXY:
            target = ("proxy", record.rank)
        known = arrows.setdefault(origin, {}).get(target)
        if known is None or (record.timed_out, record.seconds) > (known.timed_out, known.seconds):
            arrows[origin][target] = record
    for failure in failures:  # where the network is known to have failed, it is what the rank waited for
        arrows.setdefault(("rank", failure.rank), {})[("network", failure.rank)] = None
    for origin, targets in arrows.items():
        # CTAs wait for other CTAs of their rank, too: that leads on only if the rank waited for nobody else
        if len(targets) > 1:
            targets.pop(origin, None)
    return arrows


def _distances(end: Party, into: dict[Party, set[Party]]) -> dict[Party, int]:
    """How many waits each party is away from the end."""
    distance = {end: 0}
    queue = [end]
    for party in queue:
        for origin in into.get(party, ()):
            if origin not in distance:
                distance[origin] = distance[party] + 1
                queue.append(origin)
    return distance


def _descend(
    start: Party, distance: dict[Party, int], arrows: dict[Party, dict[Party, WaitRecord | None]]
) -> tuple[WaitRecord, ...]:
    waits = []
    while distance[start]:
        nearer = [party for party in arrows[start] if distance.get(party) == distance[start] - 1]
        best = max(nearer, key=lambda party: (_weight(arrows[start][party]), -party[1]))
        record = arrows[start][best]
        if record is not None:
            waits.append(record)
        start = best
    return tuple(waits)


def _cycle(start: Party, arrows: dict[Party, dict[Party, WaitRecord | None]]) -> tuple[WaitRecord, ...]:
    """Follow the waits until they come back."""
    seen: list[Party] = []
    waits: list[WaitRecord] = []
    while start not in seen:
        seen.append(start)
        best = max(arrows[start], key=lambda party: (_weight(arrows[start][party]), -party[1]))
        record = arrows[start][best]
        assert record is not None  # an arrow without a record leads to an end
        waits.append(record)
        start = best
    return tuple(waits[seen.index(start) :])


def _weight(record: WaitRecord | None) -> tuple[bool, float]:
    return (True, float("inf")) if record is None else (record.timed_out, record.seconds)


def _ranks_of(parties: Iterable[Party]) -> tuple[int, ...]:
    return tuple(sorted({rank for kind, rank in parties if kind == "rank"}))


def _reason(culprit: Party, waits: tuple[WaitRecord, ...], failed: dict[Party, str]) -> str:
    kind, rank = culprit
    if culprit in failed:
        return f"the network of rank {rank} failed: {failed[culprit]}"
    if kind == "proxy":
        return (
            f"the network proxy of rank {rank} did not go on: it was dead, or its peer took nothing. "
            f"See the output of rank {rank} and of the ranks it sends to"
        )
    calls = sorted({wait.op for wait in waits if wait.peer == rank})
    return f"rank {rank} waited for nobody: it never came to {' or '.join(calls)}, or was lost on the way"


def _reason_of_cycle(cycle: tuple[WaitRecord, ...]) -> str:
    if len(cycle) == 1:
        return f"rank {cycle[0].rank} waited for itself: other CTAs of its launch did not go on"
    calls = {wait.rank: wait.op for wait in cycle}
    if len(set(calls.values())) > 1:
        where = ", ".join(f"rank {rank} in {op}" for rank, op in sorted(calls.items()))
        return f"they waited for each other in different calls: {where}. All ranks must make the same calls in order"
    return "they waited for each other: the ranks must make the same calls in the same order, with the same shapes"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 12:
        return f"{len(ranks)} more ranks"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
