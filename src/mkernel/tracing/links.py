"""Which copy a wait was for: pairs of a push, or a send, and the first wait on a rank that saw it arrive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mkernel.tracing.events import WAIT, Event

if TYPE_CHECKING:
    from mkernel.tracing.session import Trace

ARRIVAL = WAIT + "arrived"


def arrivals(trace: Trace) -> Iterator[tuple[Event, Event]]:
    """(what wrote a chunk, what first saw it), for each chunk and each rank that waited for it. A chunk of
    a rank of the same node was pushed by a rank of the node; otherwise the chunk was sent over the network."""

    def node(rank: int) -> int:
        return rank // trace.gpus_per_node

    pushes: dict[tuple[int, int, int, int], Event] = {}  # node, call, source, chunk
    sends: dict[tuple[int, int, int], Event] = {}
    seen: dict[tuple[int, int, int, int], Event] = {}
    for event in trace.events:
        if event.kind == "push":
            pushes[node(event.rank), event.call, event.peer, event.index] = event
        elif event.kind == "send":
            sends[event.call, event.peer, event.index] = event
        elif event.kind == ARRIVAL and event.peer != event.rank:
            key = (event.rank, event.call, event.peer, event.index)
            if key not in seen or event.end < seen[key].end:
                seen[key] = event
    for (rank, call, source, chunk), event in seen.items():
        push = pushes.get((node(rank), call, source, chunk))
        send = sends.get((call, source, chunk))
        cause = push if push is not None and push.rank != rank else send
        if cause is not None:
            yield cause, event
