"""Who waited for whom: traces the wait records of a group's ranks back to the rank that everybody waited for.

A record is an edge of a graph: a rank waited for a peer, or for its own network proxy. A chain of edges ends at a party
that waited for nobody: a rank without a record (it never arrived, or died), a proxy, or the network, if a rank has
reported its failure. A cycle consists of ranks that waited for each other: they are in different calls, or their
kernels wait before they notify.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from mkernel.runtime.errors import CommTimeout
from mkernel.runtime.printable import printable
from mkernel.runtime.records import WaitRecord

SHOWN = 8  # ranks that a reason lists
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
    """A rank has reported a failure of its network."""

    rank: int
    message: str


@dataclass(frozen=True)
class Chain:
    """Waits, each for the rank of the next one, and the party that the last one is for."""

    waits: tuple[WaitRecord, ...]
    culprit: Party
    reason: str  # what is known about the culprit
    waiters: tuple[int, ...]  # all ranks whose waits lead to the culprit
    cycle: bool = False  # the last wait is for the rank of the first

    @property
    def short(self) -> str:
        """The chain on one line."""
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
    """A chain for each culprit, sorted by how many ranks waited for it. `calls`: what each rank has launched on the
    group, if known; without it, a rank that never arrived looks like one that raised no signal."""
    records = tuple(records)
    calls = calls or {}
    ended = {(record.rank, record.op) for record in records if record.signal == "nothing"}
    edges = _edges(records, failures)
    into: dict[Party, set[Party]] = {}
    for origin, targets in edges.items():
        for target in targets:
            into.setdefault(target, set()).add(origin)
    failed = {("network", failure.rank): failure.message for failure in failures}
    explained: set[Party] = set()
    chains = []
    ends = {party for party in into if party not in edges} | set(failed)
    for culprit in sorted(ends, key=lambda party: (party not in failed, party)):
        distance = _distances(culprit, into)
        start = max(distance, key=lambda party: (distance[party], -party[1]))
        waits = _descend(start, distance, edges)
        reason = _reason(culprit, waits, failed, calls, ended)
        chains.append(Chain(waits, culprit, reason, _ranks_of(set(distance) - {culprit})))
        explained |= set(distance)
    chains.sort(key=lambda chain: (chain.culprit not in failed, -len(chain.waiters), chain.culprit))
    while left := sorted(set(edges) - explained):
        cycle = _cycle(left[0], edges)
        around = _distances(("rank", cycle[0].rank), into)
        chains.append(
            Chain(cycle, ("rank", cycle[0].rank), _reason_of_cycle(cycle, calls), _ranks_of(around), cycle=True)
        )
        explained |= set(around)
    return chains


def join(error: CommTimeout, everyone: Iterable[CommTimeout], calls: Calls | None = None) -> CommTimeout:
    """Add what the other ranks of the group waited for to an error and to its message. `calls`: what each rank has
    launched on the group, if known."""
    mine = set(error.records)
    others = (late.records for late in everyone if late.group == error.group)
    error.others = tuple(dict.fromkeys(record for some in others for record in some if record not in mine))
    chains = find(error.records + error.others, calls=calls)
    if chains and (error.others or calls):
        error.args = (f"{error.args[0]} Who waited for whom: {chains[0].short}; {chains[0].reason}.",)
    return error


def _edges(
    records: Iterable[WaitRecord], failures: Sequence[NetworkFailure]
) -> dict[Party, dict[Party, WaitRecord | None]]:
    """The edges from each rank to everybody it waited for, with the most telling wait: one that timed out, the
    longest."""
    edges: dict[Party, dict[Party, WaitRecord | None]] = {}
    for record in records:
        if record.signal == "nothing":
            continue
        origin: Party = ("rank", record.rank)
        target: Party = ("rank", record.peer) if record.peer >= 0 else origin
        if record.signal in FOR_THE_PROXY:
            target = ("proxy", record.rank)
        known = edges.setdefault(origin, {}).get(target)
        if known is None or (record.timed_out, record.seconds) > (known.timed_out, known.seconds):
            edges[origin][target] = record
    for failure in failures:  # a rank whose network has failed waited for the network
        edges.setdefault(("rank", failure.rank), {})[("network", failure.rank)] = None
    for origin, targets in edges.items():
        # CTAs also wait for other CTAs of their rank: that matters only if the rank waited for nobody else
        if len(targets) > 1:
            targets.pop(origin, None)
    return edges


def _distances(end: Party, into: dict[Party, set[Party]]) -> dict[Party, int]:
    """The number of waits from each party to the end."""
    distance = {end: 0}
    queue = [end]
    for party in queue:
        for origin in into.get(party, ()):
            if origin not in distance:
                distance[origin] = distance[party] + 1
                queue.append(origin)
    return distance


def _descend(
    start: Party, distance: dict[Party, int], edges: dict[Party, dict[Party, WaitRecord | None]]
) -> tuple[WaitRecord, ...]:
    waits = []
    while distance[start]:
        nearer = [party for party in edges[start] if distance.get(party) == distance[start] - 1]
        best = max(nearer, key=lambda party: (_weight(edges[start][party]), -party[1]))
        record = edges[start][best]
        if record is not None:
            waits.append(record)
        start = best
    return tuple(waits)


def _cycle(start: Party, edges: dict[Party, dict[Party, WaitRecord | None]]) -> tuple[WaitRecord, ...]:
    """Follow the waits until they return to a rank."""
    seen: list[Party] = []
    waits: list[WaitRecord] = []
    while start not in seen:
        seen.append(start)
        best = max(edges[start], key=lambda party: (_weight(edges[start][party]), -party[1]))
        record = edges[start][best]
        assert record is not None  # an edge without a record leads to an end
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
            f"the network proxy of rank {rank} made no progress: it had died, or its peer accepted nothing. "
            f"See the output of rank {rank} and of the ranks it sends to"
        )
    wait = waits[-1]  # the one for this rank
    if wait.signal == "call":  # its host waited
        return f"rank {rank} waited for nobody: it never called {wait.op}, or was lost on the way"
    if _same_calls((rank, wait.rank), calls) or (rank, wait.op) in ended:
        return (
            f"rank {rank} waited for nobody. It made the same calls and is in {wait.op} too, or has left it, but rank "
            f"{wait.rank} never saw {_signal(wait)}. {LOOK_AT_SIGNALS}"
        )
    never = f"rank {rank} waited for nobody: it never called {wait.op}"
    if different := _different_calls((rank, wait.rank), calls):
        return f"{never}. {different}"
    return (
        f"{never}, was lost on the way, or left it without raising {_signal(wait)}. If rank {rank} did make this call, "
        f"look at the kernel: who raises that signal?"
    )


def _reason_of_cycle(cycle: tuple[WaitRecord, ...], calls: Calls) -> str:
    if len(cycle) == 1:
        return f"rank {cycle[0].rank} waited for itself: other CTAs of its launch made no progress"
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
    """How the calls of the ranks differ, as far as known; "" if they do not."""
    known = sorted(rank for rank in ranks if rank in calls)
    if len({tuple(calls[rank]) for rank in known}) < 2:
        return ""
    first = next(i for i, ops in enumerate(zip_longest(*(calls[rank] for rank in known))) if len(set(ops)) > 1)
    made = (
        f"of rank {rank} is {calls[rank][first]}" if first < len(calls[rank]) else f"of rank {rank} was not made"
        for rank in known[:SHOWN]
    )
    return f"Call {first + 1} {', '.join(made)}. {SAME_CALLS}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 12:
        return f"{len(ranks)} more ranks"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
