"""A trace in the format of Chrome and Perfetto: a rank becomes a process, a lane of a CTA (see `Event`) a thread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkernel.report import finite
from mkernel.tracing.events import TILES, Event
from mkernel.tracing.links import arrivals
from mkernel.version import __version__

if TYPE_CHECKING:
    from mkernel.tracing.session import Trace

LANES = ("cta", "send", "intra", "compute", TILES)  # the order of a CTA's threads
NETWORK = 1_000_000  # the first thread number of the network, which has one thread per peer


def thread(cta: int, lane: str) -> int:
    """The thread number of a lane of a CTA; never 0, which viewers treat differently."""
    index = LANES.index(lane) if lane in LANES else len(LANES)
    return cta * (len(LANES) + 1) + index + 1


def _title(event: Event) -> str:
    """The name of an event's thread: CTA and role. The role compute has two threads, because warps that multiply run
    concurrently with warps that wait, and slices of one thread may not overlap."""
    about = {"cta": "", TILES: " compute, tiles"}.get(event.lane, f" {event.lane}")
    return f"CTA {event.cta}{about}"


def events_of(trace: Trace) -> list[dict[str, Any]]:
    """The list `traceEvents`, in which times are in microseconds."""
    found: list[dict[str, Any]] = []
    threads: dict[tuple[int, int], str] = {}
    for event in trace.events:
        number = thread(event.cta, event.lane)
        threads[event.rank, number] = _title(event)
        found.append(
            {
                "ph": "X", "name": event.op if event.kind == "launch" else event.kind, "cat": event.role,
                "pid": event.rank, "tid": number, "ts": event.start / 1e3, "dur": event.duration / 1e3,
                "args": {"peer": event.peer, "index": event.index, "call": event.call, "op": event.op},
            }
        )  # fmt: skip
    for transfer in trace.transfers:
        number = NETWORK + transfer.target
        threads[transfer.source, number] = f"network to rank {transfer.target}"
        # asynchronous events, because requests to one peer overlap, and slices of a thread may not
        common = {
            "cat": "network", "name": f"{transfer.nbytes} bytes", "pid": transfer.source, "tid": number,
            "id": f"{transfer.source}.{transfer.ticket}",
            "args": {"peer": transfer.target, "ticket": transfer.ticket, "bytes": transfer.nbytes},
        }  # fmt: skip
        found.append({"ph": "b", "ts": transfer.start / 1e3, **common})
        found.append({"ph": "e", "ts": transfer.end / 1e3, **common})
    for number, (sent, seen) in enumerate(arrivals(trace)):
        common = {"cat": "arrival", "name": "arrival", "id": number}
        found.append({"ph": "s", "ts": sent.end / 1e3, "pid": sent.rank, "tid": thread(sent.cta, sent.lane), **common})
        found.append(
            {
                "ph": "f", "bp": "e", "ts": seen.end / 1e3,
                "pid": seen.rank, "tid": thread(seen.cta, seen.lane), **common,
            }
        )  # fmt: skip
    names = []
    for rank in range(trace.size):
        name = f"rank {rank} (node {rank // trace.gpus_per_node})"
        names.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        names.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
    for (rank, number), name in sorted(threads.items()):
        names.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}})
        names.append(
            {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number, "args": {"sort_index": number}}
        )
    return names + found


def write(trace: Trace, path: Path) -> None:
    """Write the file."""
    metadata = {
        "mkernel": __version__,
        "device": trace.device,
        "ranks": trace.size,
        "gpus_per_node": trace.gpus_per_node,
        "simulated": trace.simulated,
        "emulated": trace.emulated,
        "clock_error_ns": trace.clock_error,
        "events_lost": trace.lost,
        "summary": trace.summary(),
    }
    with path.open("w") as file:
        written = {"displayTimeUnit": "ns", "otherData": finite(metadata), "traceEvents": events_of(trace)}
        json.dump(written, file, allow_nan=False)
