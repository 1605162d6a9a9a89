"""mk.trace: trace the calls of a block."""

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
)  # what `Trace.overlap` is the share of, for people


class Trace:
    """What was traced; complete when the block has ended.

    events: of all ranks, by rank and start.
    transfers: requests to the network, where the network tells (the simulator's does).
    lost: events for which there was no room; `mk.trace(events=...)` makes more.
    clock_error: nanoseconds by which times of different ranks may be wrong against each other.
    simulated: times are the simulator's, and only their order and proportions mean something.
    emulated: ranks shared a GPU, or links were paced.
    """

    def __init__(self, group: Group | None = None, *, events: int = EVENTS):
        if not isinstance(events, int) or isinstance(events, bool) or events < 1:
            raise ArgumentError(f"events must be a whole number, 1 or more; got {events!r}")
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
            raise ArgumentError("this group is being traced already; one trace at a time")
        self.size, self.gpus_per_node = group.size, group.gpus_per_node
        self.simulated = group.device.type == "cpu"
        self.device = "simulator" if self.simulated else torch.cuda.get_device_name(group.device)
        group.quiet()  # what was asked of the network before is no part of the trace
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
            alike = group.exchange("trace", str(group.world.launcher.clock(group.world_rank).name))
            self.emulated = not self.simulated and (
                len(set(alike)) < group.size or group.world.links.nvlink is not None
            )
            plain = [(lane.cta, lane.lane, torch.from_numpy(lane.events), lane.lost) for lane in tracer.read()]
            everyone = group.exchange(
                "trace", (plain, tracer.launches, [dataclasses.astuple(each) for each in transfers])
            )
            told = [
                (
                    [Lane(cta, lane, events.numpy(), lost) for cta, lane, events, lost in lanes],
                    launches,
                    [Transfer(*each) for each in theirs],
                )
                for lanes, launches, theirs in everyone
            ]
        else:
            # a rank that failed can not count on the others: its own events are there all the same
            group.world.launcher.synchronize(group.world_rank)
            offsets = [clocks.Offset(0, 0)] * group.size
            told = [([], [], [])] * group.size
            told[group.rank] = (tracer.read(), tracer.launches, transfers)
        self._take(told, offsets)

    def _take(self, told: Sequence[Any], offsets: Sequence[clocks.Offset]) -> None:
        events = []
        for rank, (lanes, launches, _) in enumerate(told):
            events += events_of(rank, lanes, launches, offsets[rank].nanoseconds)
            self.lost += sum(lane.lost for lane in lanes)
        first = min((event.start for event in events), default=0)
        self.events = tuple(
            dataclasses.replace(event, start=event.start - first, end=event.end - first) for event in events
        )
        self.transfers = tuple(
            dataclasses.replace(transfer, start=transfer.start - first, end=transfer.end - first)
            for rank, (_, _, transfers) in enumerate(told)
            for transfer in transfers
        )
        self.clock_error = max(offset.error for offset in offsets)

    # -- what it says

    def of(self, rank: int, *kinds: str, call: int | None = None) -> list[Event]:
        """The events of a rank, of these kinds (all if none is named), of one call or of all."""
        return [
            event for event in self.events
            if event.rank == rank and (not kinds or event.kind in kinds) and call in (None, event.call)
        ]  # fmt: skip

    def calls(self, rank: int = 0) -> list[str]:
        """The operators that the rank called, in order."""
        found = {event.call: event.op for event in self.of(rank, "launch")}
        return [found[call] for call in sorted(found)]

    def span(self, rank: int, call: int) -> tuple[int, int]:
        """When the first CTA of a call began and when the last one ended."""
        launches = self.of(rank, "launch", call=call)
        if not launches:
            raise ArgumentError(f"rank {rank} has no call {call} in this trace")
        return min(event.start for event in launches), max(event.end for event in launches)

    def busy(self, rank: int, call: int) -> dict[int, int]:
        """CTA -> nanoseconds in which it computed tiles."""
        found: dict[int, int] = {}
        for event in self.of(rank, "tile", call=call):
            found[event.cta] = found.get(event.cta, 0) + event.duration
        return found

    def overlap(self, rank: int, call: int) -> Share:
        """The share of the time of a rank's copies during which it computed tiles as well; 1.0 is all of it.

        Copies are the events "push", "send" and "gather" of the rank: bytes that its CTAs move between ranks, or to
        where the network reads them. What the network and its proxy do is not among them. Times at which several CTAs
        copy count once. NaN, printed as "-", if no copy was traced.
        """
        copies = covered(self.of(rank, *COPIES, call=call))
        total = sum(end - start for start, end in copies)
        return Share(shared(copies, covered(self.of(rank, "tile", call=call))) / total if total else math.nan)

    def summary(self) -> list[dict[str, Any]]:
        """One line for each rank and call: milliseconds of the call, what its CTAs spent on what, and how much
        of the copying was hidden behind tiles (`overlap`)."""
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
        """Where the time of a rank's CTAs went in a call: a line for each role and kind of event, the most time first.

        `cta_ms` is the sum over all CTAs, `first_ms` and `last_ms` when the first one began and the last one ended,
        since the call began; `busy` how many CTAs were at it at a time, in so many pieces of the call.
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
        """Write the trace as a page of its own: a timeline to zoom into; it loads nothing from anywhere."""
        from mkernel.tracing import page

        self._complete()
        page.write(self, Path(path))

    def _complete(self) -> None:
        if not self.events:
            raise MKernelError("the trace is empty: it is filled when the `with` block ends, by operators called in it")


def _within(event: Event, start: float, end: float) -> float:
    """How much of an event lies between two times."""
    return max(min(event.end, end) - max(event.start, start), 0.0)


def trace(group: Group | None = None, *, events: int = EVENTS) -> Trace:
    """Trace the calls on a group inside a `with` block. Collective: every rank of the group.

        with mk.trace() as trace:
            y = mk.all_gather_matmul(a, b)
        trace.html("trace.html")

    The first call of a shape inside the block compiles another binary of the kernel, one that writes events.
    After the block every rank has the events of all; if it raised, a rank has its own.

    Args:
        group: whose calls; the current one by default.
        events: how many each lane of a CTA has room for; further ones are only counted.
    """
    return Trace(group, events=events)
