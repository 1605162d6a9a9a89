"""Who waited for whom: from the wait records of the ranks of a group to the one that everybody waited for.

Every record is an arrow: a rank waited for a peer, or for its own network proxy. Follow the arrows. A chain
ends at somebody who waited for nobody: a rank that left no record (it never came, or died), a proxy, or
the network itself where a rank said that it had failed. Arrows that lead back to where they began are
ranks that waited for each other: they are in different calls, or their kernels wait before they notify.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from mkernel.runtime.errors import CommTimeout
from mkernel.runtime.printable import printable
from mkernel.runtime.records import WaitRecord

SHOWN = 8  # ranks that a reason names
SAME_CALLS = "All ranks must make the same calls in the same order"
LOOK_AT_SIGNALS = (
    "No rank is missing, so look at the signals of the kernel: is each of these raised in every case, and before its "
    "writer waits for something that depends on it?"
)
FOR_THE_PROXY = ("ring space", "sent")  # signals that the rank's own proxy raises

Party = tuple[str, int]  # ("rank", 3), ("proxy", 3), ("network", 3)
Calls = Mapping[int, Sequence[str]]  # rank -> the operators that it has launched, in order


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


def find(
    records: Iterable[WaitRecord], failures: Sequence[NetworkFailure] = (), calls: Calls | None = None
) -> list[Chain]:
    """A chain for each culprit, the one that most ranks waited for first. `calls`: what each rank has launched on the
    group, where somebody knows; only then can a rank that never came be told from one that raised no signal."""
    records = tuple(records)
    calls = calls or {}
    ended = {(record.rank, record.op) for record in records if record.signal == "nothing"}
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
        reason = _reason(culprit, waits, failed, calls, ended)
        chains.append(Chain(waits, culprit, reason, _ranks_of(set(distance) - {culprit})))
        explained |= set(distance)
    chains.sort(key=lambda chain: (chain.culprit not in failed, -len(chain.waiters), chain.culprit))
    while left := sorted(set(arrows) - explained):
        cycle = _cycle(left[0], arrows)
        around = _distances(("rank", cycle[0].rank), into)
        chains.append(
            Chain(cycle, ("rank", cycle[0].rank), _reason_of_cycle(cycle, calls), _ranks_of(around), cycle=True)
        )
        explained |= set(around)
    return chains


def join(error: CommTimeout, everyone: Iterable[CommTimeout], calls: Calls | None = None) -> CommTimeout:
    """The same error, which now also knows, and says, what the other ranks of its group waited for. `calls`: what each
    rank has launched on the group, where that is known."""
    mine = set(error.records)
    others = (late.records for late in everyone if late.group == error.group)
    error.others = tuple(dict.fromkeys(record for some in others for record in some if record not in mine))
    chains = find(error.records + error.others, calls=calls)
    if chains and (error.others or calls):
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


def _reason(
    culprit: Party, waits: tuple[WaitRecord, ...], failed: dict[Party, str], calls: Calls, ended: set[tuple[int, str]]
) -> str:
    kind, rank = culprit
    if culprit in failed:
        return f"the network of rank {rank} failed: {failed[culprit]}"
    if kind == "proxy":
        return (
            f"the network proxy of rank {rank} did not go on: it was dead, or its peer took nothing. "
            f"See the output of rank {rank} and of the ranks it sends to"
        )
    wait = waits[-1]  # the one for this rank
    if wait.signal == "call":  # its host code waited
        return f"rank {rank} waited for nobody: it never came to {wait.op}, or was lost on the way"
    if _same_calls((rank, wait.rank), calls) or (rank, wait.op) in ended:
        return (
            f"rank {rank} waited for nobody. It made the same calls and is in {wait.op} too, or has left it, but rank "
            f"{wait.rank} never saw {_signal(wait)}. {LOOK_AT_SIGNALS}"
        )
    never = f"rank {rank} waited for nobody: it never came to {wait.op}"
    if different := _different_calls((rank, wait.rank), calls):
        return f"{never}. {different}"
    return (
        f"{never}, was lost on the way, or left it without raising {_signal(wait)}. If rank {rank} did make this call, "
        f"look at the kernel: who raises that signal?"
    )


def _reason_of_cycle(cycle: tuple[WaitRecord, ...], calls: Calls) -> str:
    if len(cycle) == 1:
        return f"rank {cycle[0].rank} waited for itself: other CTAs of its launch did not go on"
    ops = {wait.rank: wait.op for wait in cycle}
    if len(set(ops.values())) > 1:
        where = ", ".join(f"rank {rank} in {op}" for rank, op in sorted(ops.items()))
        return f"they waited for each other in different calls: {where}. {SAME_CALLS}"
    if different := _different_calls(tuple(ops), calls):
        return f"they waited for each other in different calls. {different}"
    who = ", ".join(f"rank {wait.rank} for {_signal(wait)} from rank {wait.peer}" for wait in cycle[:SHOWN])
    more = f", and {len(cycle) - SHOWN} more" if len(cycle) > SHOWN else ""
    return f"they waited for each other, all of them in {cycle[0].op}: {who}{more}. {LOOK_AT_SIGNALS}"


def _signal(wait: WaitRecord) -> str:
    return f"signal '{wait.signal}' (index {wait.index}, it is {wait.seen} instead of {wait.expected})"


def _same_calls(ranks: tuple[int, ...], calls: Calls) -> bool:
    """Is it known that the ranks have made the same calls?"""
    return all(rank in calls for rank in ranks) and len({tuple(calls[rank]) for rank in ranks}) == 1


def _different_calls(ranks: tuple[int, ...], calls: Calls) -> str:
    """How the calls of the ranks differ, as far as that is known; "" if they do not."""
    known = sorted(rank for rank in ranks if rank in calls)
    if len({tuple(calls[rank]) for rank in known}) < 2:
        return ""
    place = next(i for i, ops in enumerate(zip_longest(*(calls[rank] for rank in known))) if len(set(ops)) > 1)
    made = (
        f"of rank {rank} is {calls[rank][place]}" if place < len(calls[rank]) else f"of rank {rank} was not made"
        for rank in known[:SHOWN]
    )
    return f"Call {place + 1} {', '.join(made)}. {SAME_CALLS}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 12:
        return f"{len(ranks)} more ranks"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
