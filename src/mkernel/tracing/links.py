"""Which copy a wait was for: pairs of a push or send and the first wait on a rank that saw it arrive."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mkernel.tracing.events import WAIT, Event

if TYPE_CHECKING:
    from mkernel.tracing.session import Trace

ARRIVAL = WAIT + "arrived"


def arrivals(trace: Trace) -> Iterator[tuple[Event, Event]]:
    """Yield (the event that wrote a chunk, the wait that first saw it), for each chunk and each rank that waited for
    it. The writer is a push by a rank of the same node or, if there is none, a send over the network. If a chunk was
    written several times in a call (in rounds), each write is paired with the first wait that ends after it."""

    def node(rank: int) -> int:
        return rank // trace.gpus_per_node

    pushes: dict[tuple[int, int, int, int], list[Event]] = {}  # node, call, source, chunk
    sends: dict[tuple[int, int, int], list[Event]] = {}
    waits: dict[tuple[int, int, int, int], list[Event]] = {}
    for event in trace.events:
        if event.kind == "push":
            pushes.setdefault((node(event.rank), event.call, event.peer, event.index), []).append(event)
        elif event.kind == "send":
            sends.setdefault((event.call, event.peer, event.index), []).append(event)
        elif event.kind == ARRIVAL and event.peer != event.rank:
            waits.setdefault((event.rank, event.call, event.peer, event.index), []).append(event)
    for (rank, call, source, chunk), seen in waits.items():
        written = [push for push in pushes.get((node(rank), call, source, chunk), []) if push.rank != rank]
        written = sorted(written or sends.get((call, source, chunk), []), key=lambda event: event.end)
        ends = [event.end for event in written]
        known = set()
        for event in sorted(seen, key=lambda event: event.end) if written else ():
            latest = max(bisect.bisect_right(ends, event.end) - 1, 0)
            if latest not in known:
                known.add(latest)
                yield written[latest], event
