"""Events: the meaning of the words that a kernel wrote."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mkernel.lang import trace as words
from mkernel.runtime import records
from mkernel.runtime.tracer import Lane

KINDS = {
    words.TILE.value: "tile",
    words.PUSH_CHUNK.value: "push",
    words.SEND_CHUNK.value: "send",
    words.POST.value: "post",
    words.REDUCE.value: "reduce",
    words.GATHER.value: "gather",
}
LAUNCH = "launch"
TILES = "tiles"
WAIT = "wait for "
NOBODY = 0xFFFF


@dataclass(frozen=True)
class Event:
    """Something that a CTA did. Times are nanoseconds since the first event of the trace, on one clock.

    kind: "tile" (computed a tile), "push" (wrote a chunk to a rank of its node), "send" (staged a chunk for the
        network), "post" (posted a request to the network), "reduce" (added partials), "gather" (read what another rank
        has finished), "wait for ..." (waited for a signal), or "launch", which spans the whole launch.
    lane: the lane that recorded it: "send", "intra" or "compute" for CTAs or warps with that role; "tiles" for warps
        that multiply, which have the role compute and may run concurrently with warps that wait; "cta" for launches.
    peer: the rank whose data it concerns; -1 for none. index: of the tile or chunk, the ticket, or the epoch.
    call: the number of the operator call on its rank, from 0.
    """

    rank: int
    cta: int
    lane: str
    kind: str
    peer: int
    index: int
    start: int
    end: int
    call: int
    op: str

    @property
    def role(self) -> str:
        """The role of the CTA, or of these warps, at that time: "send", "intra" or "compute"; "cta" for a launch, which
        may include several roles."""
        return "compute" if self.lane == TILES else self.lane

    @property
    def duration(self) -> int:
        return self.end - self.start

    @property
    def waits(self) -> bool:
        return self.kind.startswith(WAIT)


def lane_name(lane: int) -> str:
    """The name of a lane."""
    if lane == words.TILES.value:
        return TILES
    if lane == words.LAUNCHES.value:
        return "cta"
    return records.ROLES.get(lane, f"role {lane}")


def kind_of(code: int, op: str) -> str:
    """The name of a kind of event of an operator."""
    if code >= words.WAIT.value:
        return WAIT + records.signal_name(op, code - words.WAIT.value)
    return KINDS.get(code, f"kind {code}")


def events_of(rank: int, lanes: Sequence[Lane], launches: Sequence[tuple[str, int]], ahead: int) -> list[Event]:
    """The events of one rank, ordered by start. `launches`: operator and number of CTAs of each call; `ahead`:
    nanoseconds by which the rank's clock is ahead."""
    spans = {lane.cta: _launches(lane, launches) for lane in lanes if lane.lane == words.LAUNCHES.value}
    found = []
    for cta, of_cta in spans.items():
        for call, start, end, epoch in of_cta:
            op = launches[call][0]
            found.append(Event(rank, cta, "cta", LAUNCH, -1, epoch, start - ahead, end - ahead, call, op))
    for lane in lanes:
        if lane.lane == words.LAUNCHES.value:
            continue
        name = lane_name(lane.lane)
        of_cta = spans.get(lane.cta, [])
        current = last = 0
        for start, end, what, index in lane.events.tolist():
            while current + 1 < len(of_cta) and end >= of_cta[current + 1][1]:
                current += 1
            if start == words.LAST.value:
                start = max(last, of_cta[current][1] if of_cta else end)
            last = end
            call = of_cta[current][0] if of_cta else 0
            peer = what >> 16 & 0xFFFF
            found.append(
                Event(
                    rank, lane.cta, name, kind_of(what & 0xFFFF, launches[call][0]), -1 if peer == NOBODY else peer,
                    index, start - ahead, end - ahead, call, launches[call][0],
                )
            )  # fmt: skip
    return sorted(found, key=lambda event: (event.start, event.end, event.cta))


def _launches(lane: Lane, launches: Sequence[tuple[str, int]]) -> list[tuple[int, int, int, int]]:
    """(call, start, end, epoch) of each launch that a CTA took part in, in order."""
    calls = [call for call, (_, ctas) in enumerate(launches) if lane.cta < ctas]
    found: list[tuple[int, int, int, int]] = []
    begun: tuple[int, int] | None = None
    for start, end, what, epoch in lane.events.tolist():
        if what & 0xFFFF == words.BEGUN.value:
            begun = begun or (start, epoch)
        elif begun is not None and len(found) < len(calls):
            found.append((calls[len(found)], begun[0], end, begun[1]))
            begun = None
    return found


class Share(float):
    """A share from 0.0 to 1.0. NaN, which prints as "-", if the total is 0."""

    def __format__(self, how: str) -> str:
        return "-" if math.isnan(self) else super().__format__(how)


def covered(events: Iterable[Event]) -> list[tuple[int, int]]:
    """The times during which at least one of the events was in progress, as spans in order."""
    spans: list[tuple[int, int]] = []
    for event in sorted(events, key=lambda event: event.start):
        if spans and event.start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], event.end))
        else:
            spans.append((event.start, event.end))
    return spans


def shared(ones: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> int:
    """The total time that is covered by spans of both lists."""
    total = i = j = 0
    while i < len(ones) and j < len(others):
        total += max(min(ones[i][1], others[j][1]) - max(ones[i][0], others[j][0]), 0)
        if ones[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return total
