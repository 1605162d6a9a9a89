"""mk.trace: trace the calls in a `with` block."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mkernel.runtime import clocks
from mkernel.runtime.errors import ArgumentError, MKernelError
from mkernel.runtime.group import Group, current
from mkernel.runtime.tracer import EVENTS, Lane, Tracer
from mkernel.runtime.world import Transfer
from mkernel.tracing.events import Event, Share, covered, events_of, shared

COPIES = ("push", "send", "gather")
OVERLAP = (
    "the time in which CTAs of a rank copy (push, send, gather) during which the rank also computes tiles; "
    '"-" where no copy was traced'
)  # explains `Trace.overlap`, after "the share of"


class Trace:
    """A trace; complete once the block has ended.

    events: the events of all ranks, by rank and start.
    transfers: requests to the network, if the network records them (the simulator's does).
    lost: the number of events that were dropped for lack of space; `mk.trace(events=...)` makes more space.
    clock_error: nanoseconds by which times of different ranks may be off relative to each other.
    simulated: times are the simulator's; only their order and proportions are meaningful.
    emulated: ranks shared a GPU, or links were paced.
    """

    def __init__(self, group: Group | None = None, *, events: int = EVENTS):
        if not isinstance(events, int) or isinstance(events, bool) or events < 1:
            raise ArgumentError(f"events must be an integer of at least 1, got {events!r}")
        self._given = group
        self._room = events
        self.events: tuple[Event, ...] = ()
        self.transfers: tuple[Transfer, ...] = ()
        self.lost = 0
        self.clock_error = 0
        self.size = self.gpus_per_node = 1
        self.device = "?"
        self.simulated = self.emulated = False

    def __enter__(self) -> Trace:
        group = self._group = current(self._given)
        if group.tracer is not None:
            raise ArgumentError("this group is already being traced; end that trace before you begin another")
        self.size, self.gpus_per_node = group.size, group.gpus_per_node
        self.simulated = group.device.type == "cpu"
        self.device = "simulator" if self.simulated else torch.cuda.get_device_name(group.device)
        group.quiet()  # earlier network requests are not part of the trace
        group.tracer = Tracer(group, self._room)
        group.world.network.record_transfers(group, True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, where: TracebackType | None
    ) -> None:
        group, tracer = self._group, self._group.tracer
        assert tracer is not None
        group.tracer = None
        if failure is None:
            group.quiet()
            group.check()
        transfers = group.world.network.record_transfers(group, False)
        if failure is None:
            offsets = clocks.offsets(group)
            clocks_of_ranks = group.exchange("trace", str(group.world.launcher.clock(group.world_rank).name))
            self.emulated = not self.simulated and (
                len(set(clocks_of_ranks)) < group.size or group.world.links.nvlink is not None
            )
            plain = [(lane.cta, lane.lane, torch.from_numpy(lane.events), lane.lost) for lane in tracer.read()]
            everyone = group.exchange(
                "trace", (plain, tracer.launches, [dataclasses.astuple(each) for each in transfers])
            )
            collected = [
                (
                    [Lane(cta, lane, events.numpy(), lost) for cta, lane, events, lost in lanes],
                    launches,
                    [Transfer(*each) for each in theirs],
                )
                for lanes, launches, theirs in everyone
            ]
        else:
            # a rank that failed cannot count on the others, but its own events are available
            group.world.launcher.synchronize(group.world_rank)
            offsets = [clocks.Offset(0, 0)] * group.size
            collected = [([], [], [])] * group.size
            collected[group.rank] = (tracer.read(), tracer.launches, transfers)
        self._fill(collected, offsets)

    def _fill(self, collected: Sequence[Any], offsets: Sequence[clocks.Offset]) -> None:
        events = []
        for rank, (lanes, launches, _) in enumerate(collected):
            events += events_of(rank, lanes, launches, offsets[rank].nanoseconds)
            self.lost += sum(lane.lost for lane in lanes)
        first = min((event.start for event in events), default=0)
        self.events = tuple(
            dataclasses.replace(event, start=event.start - first, end=event.end - first) for event in events
        )
        self.transfers = tuple(
            dataclasses.replace(transfer, start=transfer.start - first, end=transfer.end - first)
            for rank, (_, _, transfers) in enumerate(collected)
            for transfer in transfers
        )
        self.clock_error = max(offset.error for offset in offsets)

    # -- queries

    def of(self, rank: int, *kinds: str, call: int | None = None) -> list[Event]:
        """The events of a rank, of these kinds (default: all), of one call (default: all)."""
        return [
            event for event in self.events
            if event.rank == rank and (not kinds or event.kind in kinds) and call in (None, event.call)
        ]  # fmt: skip

    def calls(self, rank: int = 0) -> list[str]:
        """The operators that the rank called, in order."""
        found = {event.call: event.op for event in self.of(rank, "launch")}
        return [found[call] for call in sorted(found)]

    def span(self, rank: int, call: int) -> tuple[int, int]:
        """When the first CTA of a call began, and when the last one ended."""
        launches = self.of(rank, "launch", call=call)
        if not launches:
            raise ArgumentError(f"rank {rank} has no call {call} in this trace")
        return min(event.start for event in launches), max(event.end for event in launches)

    def busy(self, rank: int, call: int) -> dict[int, int]:
        """CTA -> nanoseconds that it spent on tiles."""
        found: dict[int, int] = {}
        for event in self.of(rank, "tile", call=call):
            found[event.cta] = found.get(event.cta, 0) + event.duration
        return found

    def overlap(self, rank: int, call: int) -> Share:
        """The share of a rank's copy time during which the rank also computed tiles; 1.0 is complete overlap.

        Copies are the rank's events "push", "send" and "gather": bytes that its CTAs move between ranks, or to where
        the network reads them. The work of the network and its proxy is not included. Times at which several CTAs copy
        count once. NaN, printed as "-", if no copy was traced.
        """
        copies = covered(self.of(rank, *COPIES, call=call))
        total = sum(end - start for start, end in copies)
        return Share(shared(copies, covered(self.of(rank, "tile", call=call))) / total if total else math.nan)

    def summary(self) -> list[dict[str, Any]]:
        """One line for each rank and call: milliseconds of the call, how its CTAs spent their time, and how much of the
        copying was hidden behind tiles (`overlap`)."""
        lines = []
        for rank in range(self.size):
            for call, op in enumerate(self.calls(rank)):
                start, end = self.span(rank, call)
                events = self.of(rank, call=call)
                ctas = len({event.cta for event in events})

                def per_cta(chosen: list[Event]) -> float:
                    return sum(event.duration for event in chosen) / max(ctas, 1) / 1e6

                lines.append(
                    {
                        "rank": rank,
                        "call": call,
                        "op": op,
                        "ctas": ctas,
                        "ms": (end - start) / 1e6,
                        "tiles_ms_per_cta": per_cta([event for event in events if event.kind == "tile"]),
                        "copies_ms_per_cta": per_cta([event for event in events if event.kind in COPIES]),
                        "waits_ms_per_cta": per_cta([event for event in events if event.waits]),
                        "copies_hidden": self.overlap(rank, call),
                    }
                )
        return lines

    def account(self, rank: int, call: int, pieces: int = 24) -> list[dict[str, Any]]:
        """Where the time of a rank's CTAs went in a call: a line for each role and kind of event, largest total first.

        `cta_ms` is the sum over all CTAs. `first_ms` and `last_ms` are when the first event began and the last one
        ended, since the call began. `busy` is the number of CTAs in such events over time, for `pieces` equal parts of
        the call.
        """
        start, end = self.span(rank, call)
        piece = max((end - start) / pieces, 1.0)
        kinds: dict[tuple[str, str], list[Event]] = {}
        for event in self.of(rank, call=call):
            if event.kind != "launch":
                kinds.setdefault((event.role, event.kind), []).append(event)
        lines = []
        for (role, kind), events in kinds.items():
            durations = sorted(event.duration for event in events)
            lines.append(
                {
                    "role": role,
                    "kind": kind,
                    "count": len(events),
                    "cta_ms": sum(durations) / 1e6,
                    "median_us": durations[len(durations) // 2] / 1e3,
                    "longest_us": durations[-1] / 1e3,
                    "first_ms": (min(event.start for event in events) - start) / 1e6,
                    "last_ms": (max(event.end for event in events) - start) / 1e6,
                    "busy": [
                        sum(_within(event, start + i * piece, start + (i + 1) * piece) for event in events) / piece
                        for i in range(pieces)
                    ],
                }
            )
        return sorted(lines, key=lambda line: -line["cta_ms"])

    # -- files

    def save(self, path: str | Path) -> None:
        """Write the trace for Perfetto (ui.perfetto.dev) or chrome://tracing, as JSON."""
        from mkernel.tracing import chrome

        self._complete()
        chrome.write(self, Path(path))

    def html(self, path: str | Path) -> None:
        """Write the trace as a self-contained page with a zoomable timeline; it needs no network."""
        from mkernel.tracing import page

        self._complete()
        page.write(self, Path(path))

    def _complete(self) -> None:
        if not self.events:
            raise MKernelError(
                "the trace is empty: call operators in the `with` block, and use the trace after the block has ended"
            )


def _within(event: Event, start: float, end: float) -> float:
    """How much of an event is between two times."""
    return max(min(event.end, end) - max(event.start, start), 0.0)


def trace(group: Group | None = None, *, events: int = EVENTS) -> Trace:
    """Trace the calls on a group in a `with` block. Collective: every rank of the group enters and leaves the block.

        with mk.trace() as trace:
            y = mk.all_gather_matmul(a, b)
        trace.html("trace.html")

    The first call of a shape in the block compiles a separate binary of the kernel, which writes events. After the
    block, every rank has the events of all ranks; if the block raised, a rank has only its own.

    Args:
        group: the group whose calls to trace; the current one by default.
        events: the capacity of each lane of a CTA; further events are only counted.
    """
    return Trace(group, events=events)
