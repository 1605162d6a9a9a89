"""The resources of one rank, on which an operator's model carries out a plan: lanes that work and wait, and links.

The ranks of a cluster do the same, relative to their own number. So one rank is simulated: what it sends at some time
to the rank `n` after it, it also receives from the rank `n` before it. Time is in seconds.

A *lane* is what goes through a list of steps on its own: a CTA, or a warp of a CTA with a role of its own. Steps are
taken for many lanes at once, as arrays: the n-th step of every lane, then the next one of every lane. A link serves
what is sent at the same step in the order of time, after what was sent at earlier steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mkernel.scale.machine import Machine

Array = Any  # of float64 or integers
EVERYTHING = slice(None)
SLAB = 2**19  # elements


@dataclass
class Span:
    """What the lanes of a group spent some time with, for a timeline: arrays of lanes, begins and ends. index: of the
    tile, chunk or task that it is about; -1 for none."""

    lanes: str
    kind: str
    which: Array
    begin: Array
    end: Array
    index: Array


class Lanes:
    """The clocks of some lanes, and what they have spent their time with, in lane-seconds."""

    def __init__(self, name: str, count: int, start: float, spans: list[Span] | None):
        self.name = name
        self.clock: Array = np.full(count, start)
        self.spent: dict[str, float] = {}
        self.busy: dict[str, Array] = {}  # of each lane, by kind of work, in seconds
        self._worked: dict[str, list[tuple[Array, Array]]] = {}  # by kind, when lanes began and ended, besides `run`
        self._spans = spans

    def wait(self, until: Array, kind: str, which: Array = EVERYTHING) -> None:
        """Wait until these times."""
        self._advance(np.maximum(self.clock[which], until), f"wait for {kind}", which)

    def work(self, seconds: Array, kind: str, which: Array = EVERYTHING, index: Array = -1) -> None:
        """Be busy for so long. index: see `Span`."""
        begin = self.clock[which].copy()
        end = begin + seconds
        self.busy.setdefault(kind, np.zeros(len(self.clock)))[which] += seconds
        self._worked.setdefault(kind, []).append((begin, end))
        self._advance(end, kind, which, index)

    def run(
        self, ready: Array, seconds: float, counts: Array, kind: str, what: str, index: Array = -1
    ) -> None:  # fmt: skip
        """Work through a list in order: step p of lane i takes `seconds`, and begins at ready[p, i] at the earliest;
        lane i has counts[i] steps. index: of every step, see `Span`."""
        steps = len(ready)
        place = np.arange(steps)[:, None]
        valid = place < counts
        slack = np.where(valid, ready - place * seconds, -np.inf)
        begin = np.maximum(slack.max(0, initial=-np.inf), self.clock)
        end = np.where(counts > 0, begin + counts * seconds, self.clock)
        busy = counts * seconds
        if self._spans is not None and steps:
            starts = np.maximum(np.maximum.accumulate(slack, 0), self.clock) + place * seconds
            before = np.vstack([self.clock, starts[:-1] + seconds])
            lanes = np.broadcast_to(np.arange(len(self.clock)), starts.shape)
            late = valid & (starts > before + 1e-9)
            indices = np.broadcast_to(index, starts.shape)
            for name, chosen, begins, ends in (
                (f"wait for {what}", late, before, starts), (kind, valid, starts, starts + seconds)
            ):  # fmt: skip
                self._spans.append(Span(self.name, name, lanes[chosen], begins[chosen], ends[chosen], indices[chosen]))
        self.busy.setdefault(kind, np.zeros(len(self.clock)))[:] += busy
        self._add(kind, float(busy.sum()))
        self._add(f"wait for {what}", float((end - self.clock - busy).sum()))
        self.clock = end

    def any_busy(self, kinds: Collection[str]) -> float:
        """For how many seconds at least one lane does work of these kinds."""
        parts = [part for kind in kinds for part in self._worked.get(kind, ())]
        if not parts:
            return 0.0
        begin, end = (np.concatenate(side) for side in zip(*parts))
        order = np.argsort(begin)
        begin, end = begin[order], np.maximum.accumulate(end[order])
        covered = np.concatenate([[-np.inf], end[:-1]])
        return float(np.maximum(end - np.maximum(begin, covered), 0.0).sum())

    def _advance(self, until: Array, kind: str, which: Array, index: Array = -1) -> None:
        before = self.clock[which]
        self._add(kind, float(np.sum(until - before)))
        if self._spans is not None:
            lanes = np.arange(len(self.clock))[which]
            moved = (until > before) | (index != -1)
            indices = np.broadcast_to(index, moved.shape)[moved]
            self._spans.append(Span(self.name, kind, lanes[moved], before[moved], until[moved], indices))
        self.clock[which] = until

    def _add(self, kind: str, seconds: float) -> None:
        if seconds:
            self.spent[kind] = self.spent.get(kind, 0.0) + seconds


def serve(at: Array, seconds: Array, free: float) -> Array:
    """When a server is done with each of these jobs, first come, first served. free: when it is done with the last."""
    if np.size(at) == 1:
        return np.maximum(at, free) + seconds
    order = np.argsort(at, axis=None, kind="stable")
    duration = np.broadcast_to(seconds, np.shape(at)).ravel()[order]
    total = np.cumsum(duration)
    begin = np.maximum.accumulate(np.maximum(np.ravel(at)[order], free) - (total - duration))
    done = np.empty(len(order))
    done[order] = begin + total
    return done.reshape(np.shape(at))


@dataclass
class Link:
    """A link that serves one transfer after the other. busy: seconds in which it did."""

    rate: float  # bytes/s
    seconds: float = 0.0  # for each transfer, besides its bytes
    free: float = 0.0
    busy: float = 0.0
    moved: float = 0.0

    def carry(self, at: Array, nbytes: Array) -> Array:
        """When transfers that are ready at these times are through."""
        if not np.size(at):
            return np.asarray(at, dtype=float)
        duration = nbytes / self.rate + self.seconds
        done = serve(np.asarray(at, dtype=float), duration, self.free)
        self.free = float(done.max())
        self.busy += _total(duration, at)
        self.moved += _total(nbytes, at)
        return done


def _total(values: Array, at: Array) -> float:
    """The sum of a value for each of `at`, or of the same one for all."""
    return float(np.sum(values)) if np.size(values) == np.size(at) else float(values) * np.size(at)


class Shares:
    """A paced link of which each lane has an equal share: what a lane has moved takes as long as its share says."""

    def __init__(self, link: Link, lanes: int, start: float):
        self._link = link
        self._rate = link.rate / max(lanes, 1)
        self._start = start
        self._moved = np.zeros(lanes)

    def carry(self, at: Array, nbytes: Array, which: Array = EVERYTHING) -> Array:
        """When transfers of these lanes that are ready at these times are through."""
        self._moved[which] += nbytes
        total = _total(nbytes, at)
        self._link.moved += total
        self._link.busy += total / self._link.rate
        return np.maximum(at, self._start + self._moved[which] / self._rate)


class Whole:
    """A link that all lanes share, one transfer after the other."""

    def __init__(self, link: Link):
        self._link = link

    def carry(self, at: Array, nbytes: Array, which: Array = EVERYTHING) -> Array:
        return self._link.carry(at, nbytes)


class Card:
    """The network cards of a GPU, its rails. A request takes one of them, in turn; or it is divided, and takes several.
    PCIe, between the GPU and its cards, carries what they carry at the same time."""

    def __init__(self, machine: Machine):
        self.rate = machine.network * machine.network_share
        self.rails = [Link(self.rate / machine.rails, machine.fence_seconds) for _ in range(machine.rails)]
        self.pcie = Link(machine.pcie)
        self._split = machine.split_bytes
        self._next = 0  # rail

    @property
    def busy(self) -> float:
        """For how many seconds the busiest rail is."""
        return max(rail.busy for rail in self.rails)

    @property
    def moved(self) -> float:
        return sum(rail.moved for rail in self.rails)

    @property
    def free(self) -> float:
        """When everything has been sent."""
        return max(rail.free for rail in self.rails)

    def carry(self, at: Array, nbytes: Array) -> Array:
        """When requests that are handed over at these times, in this order, are sent."""
        done = self.pcie.carry(at, nbytes)
        count = len(self.rails)
        pieces = np.ones(len(at))
        if self._split:
            pieces = np.clip(np.ceil(nbytes / self._split), 1, count)
        first = self._next + np.cumsum(pieces) - pieces
        for i, rail in enumerate(self.rails):
            taken = (i - first) % count < pieces
            if taken.any():
                done[taken] = np.maximum(done[taken], rail.carry(at[taken], (nbytes / pieces)[taken]))
        self._next = int(self._next + pieces.sum()) % count
        return done

    def idle(self, seconds: float) -> None:
        """Keep all rails from sending for so long, sometime."""
        for rail in self.rails:
            rail.free += seconds
            rail.busy += seconds


@dataclass
class Network:
    """A rank's way to other nodes: its proxy, its cards, and the switches beyond its pod."""

    machine: Machine
    proxy: Link = field(init=False)
    card: Card = field(init=False)
    beyond: Link = field(init=False)
    requests: int = 0
    _sent: Array = field(init=False)

    def __post_init__(self) -> None:
        m = self.machine
        self.proxy = Link(float("inf"), m.request_seconds)
        self.card = Card(m)
        self.beyond = Link(self.card.rate / m.oversubscription)
        self._sent = np.full(max(m.in_flight, 1), -np.inf)  # when the last requests were sent

    def send(self, at: Array, nbytes: Array, offset: Array) -> tuple[Array, Array]:
        """Requests that CTAs post at these times, to the nodes `offset` nodes on. Returns when each was accepted,
        which is later if the ring is full, and when its data has arrived and its signal is set."""
        at = np.asarray(at, dtype=float)
        shape = at.shape
        order = np.argsort(at, axis=None, kind="stable")
        at = at.ravel()[order]
        sizes = np.broadcast_to(nbytes, shape).ravel()[order]
        far = np.broadcast_to(offset, shape).ravel()[order] >= (self.machine.pod_nodes or np.inf)
        accepted, arrived = np.empty(len(at)), np.empty(len(at))
        slots = len(self._sent)
        for begin in range(0, len(at), slots):
            part = slice(begin, begin + slots)
            posted = np.maximum(at[part], self._sent[: len(at[part])])
            done = self.card.carry(self.proxy.carry(posted, 0.0), sizes[part])
            self._sent = np.concatenate([self._sent[len(posted) :], done])
            if far[part].any():
                done = done.copy()
                done[far[part]] = self.beyond.carry(done[far[part]], sizes[part][far[part]])
            accepted[part], arrived[part] = posted, done + self.machine.network_seconds
        self.requests += len(at)
        back = np.empty(len(at), dtype=np.intp)
        back[order] = np.arange(len(at))
        return accepted[back].reshape(shape), arrived[back].reshape(shape)

    def signal(self, at: Array) -> Array:
        """Requests that carry nothing but a signal, posted at these times. Returns when each is set. They are not held
        up by data: that is for other signals, which requests may overtake."""
        self.requests += np.size(at)
        self.proxy.busy += np.size(at) * self.machine.request_seconds
        self.card.idle(np.size(at) * self.machine.fence_seconds)
        done = serve(np.asarray(at, dtype=float), self.machine.request_seconds, 0.0)
        return done + self.machine.network_seconds


class Engine:
    """One rank: its lanes, its part of NVLink, and its way to other nodes."""

    def __init__(self, machine: Machine, nodes: int, gpus_per_node: int, *, rank: int = 0, timeline: bool = False):
        self.machine = machine
        self.nodes, self.gpus_per_node, self.rank = nodes, gpus_per_node, rank
        self.ranks = nodes * gpus_per_node
        self.start = machine.launch_seconds
        self.nvlink = Link(machine.nvlink_of(gpus_per_node))
        self.network = Network(machine)
        self.spans: list[Span] | None = [] if timeline else None
        self.groups: list[Lanes] = []
        self.marks: dict[str, float] = {}  # when something was over

    def lanes(self, name: str, count: int) -> Lanes:
        """A new group of lanes, which begin when the launch does."""
        made = Lanes(name, count, self.start, self.spans)
        self.groups.append(made)
        return made

    def link(self, lanes: int) -> Shares | Whole:
        """NVLink, as `lanes` lanes use it that each have a fixed share of it where it is paced."""
        return Shares(self.nvlink, lanes, self.start) if self.machine.paced else Whole(self.nvlink)

    def post(self, lanes: Lanes, lane: int, nbytes: float, offsets: Array) -> Array:
        """Let a lane post a request to each of the nodes that are so many nodes on, one after the other. Returns when
        they arrive: those of the ranks so many nodes before this one, too. Without bytes, they carry only a signal."""
        which = slice(lane, lane + 1)
        posted = lanes.clock[lane] + self.machine.post_seconds * (1 + np.arange(len(offsets)))
        if nbytes:
            accepted, arrived = self.network.send(posted, nbytes, offsets)
        else:
            accepted, arrived = posted, self.network.signal(posted)
        lanes.wait(accepted.max(initial=lanes.clock[lane]), "the network", which)
        return arrived

    @property
    def end(self) -> float:
        """When the last lane is done."""
        return max((float(group.clock.max()) for group in self.groups if len(group.clock)), default=self.start)


def in_slabs(count: int, lanes: int) -> Sequence[Array]:
    """The steps 0..count-1 as columns, in slabs of at most SLAB elements for all lanes."""
    size = max(SLAB // max(lanes, 1), 1)
    return [np.arange(begin, min(begin + size, count))[:, None] for begin in range(0, count, size)]
