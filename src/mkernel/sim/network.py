"""The simulated network: delivers the requests in the ranks' rings in random order.

A proxy belongs to one rank of one group. It takes requests out of the ring in order. A taken request is in flight: its
bytes are written to the peer piece by piece, requests in flight overtake each other, and the signal of a request is
raised when all of its bytes have arrived. Each of these steps may be delayed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from mkernel.lang import requests as layout
from mkernel.runtime.errors import SimulatorError
from mkernel.sim.memory import Memory
from mkernel.sim.order import NOTHING, Clock, Thread, joined
from mkernel.sim.races import NETWORK, Actor
from mkernel.sim.scheduler import Scheduler
from mkernel.sim.tasks import Task

AT_ONCE = 8  # requests in flight per proxy
REQUESTS = 32  # of a proxy that the race detector distinguishes: the newest ones and those in flight
HEADER = layout.HEADER_WORDS.value
WORDS = layout.REQUEST_WORDS.value

# Speed of the network in a trace; invented, as those in scheduler.py.
BYTES_PER_NANOSECOND = 4
LATENCY = 500.0  # nanoseconds


@dataclass(eq=False)
class InFlight:
    """A request that was taken out of the ring."""

    ticket: int
    peer: int
    source: torch.Tensor
    target: torch.Tensor
    signal: torch.Tensor | None
    value: int
    pieces: list[tuple[int, int]]
    posted: float  # times of a trace, in nanoseconds
    arrives: float
    thread: Thread | None  # for the race detector; requests in flight are unordered
    number: int  # of that thread


class Proxy(Task):
    """The consumer of one rank's request ring."""

    def __init__(
        self,
        scheduler: Scheduler,
        rank: int,
        group_rank: int,
        ring: torch.Tensor,
        segment: Callable[[int, int], torch.Tensor | None],
        check: Callable[[int, int, int, str, Callable[[], str]], None],
        on_delivery: Callable[[int, int], None],
        on_arrival: Callable[[InFlight], None] = lambda request: None,
        given_up: Callable[[], bool] = lambda: False,
    ):
        super().__init__(scheduler, rank, f"rank {rank}, network proxy")
        self.label = f"{rank}.net"
        self.ring = ring
        self.words = ring.numpy()
        self.segment = segment  # (rank in the group, segment) -> its bytes
        self.check = check  # (segment, address, bytes, what, who): raises if a request may not access this
        self.on_delivery = on_delivery  # (peer, bytes)
        self.on_arrival = on_arrival
        self.given_up = given_up
        self._ended: dict[int, Clock] = {}  # ticket -> what happened before the completion of the request
        self.free = 0.0  # when the link is free again, in trace time
        self.group_rank = group_rank
        self.flying: list[InFlight] = []
        self._watched: list[int] = []
        self.consumed = 0
        self.completed_in_order = 0
        self._number = 0  # of the newest request's thread

    @property
    def memory(self) -> Memory:
        return self.scheduler.memory

    @property
    def rng(self) -> random.Random:
        return self.scheduler.rng

    def _due(self) -> bool:
        capacity = int(self.words[layout.CAPACITY.value])
        slot = HEADER + self.consumed % capacity * WORDS
        return len(self.flying) < AT_ONCE and self.words[slot] == self.consumed // capacity + 1

    def reset(self) -> None:
        """Empty the ring. Nothing is in flight."""
        assert not self.flying
        capacity = self.words[layout.CAPACITY.value]
        self.words[:] = 0
        self.words[layout.CAPACITY.value] = capacity
        self.consumed = self.completed_in_order = 0
        self._ended.clear()

    def ready(self) -> bool:
        ready = bool(self.flying) or self._due()
        if not ready:
            self.asleep = True
            self._watched = [self._posted_address()]
            self.scheduler.watch(self, self._watched)
        return ready

    def wake(self) -> None:
        if self.asleep:
            self.asleep = False
            self.scheduler.forget_watch(self, self._watched)

    def _posted_address(self) -> int:
        """The address of the word that says whether the next request has been posted."""
        capacity = int(self.words[layout.CAPACITY.value])
        return self.ring.data_ptr() + 8 * (HEADER + self.consumed % capacity * WORDS + layout.TURN.value)

    def run(self) -> None:
        choices = self.scheduler.choices
        while True:
            if self._due() and (not self.flying or choices.takes()):
                self._take()
            elif self.flying:
                self._progress(choices.moves(self.flying))
            self.scheduler.hub.switch()

    def _set_word(
        self, tensor: torch.Tensor, value: int, thread: Thread | None, clock: Clock | None, in_order: bool = False
    ) -> None:
        """Set a word, and release `clock` with it; None stands for everything that the thread has done, this change
        included. in_order: all earlier changes of the word must happen before this one."""
        word = tensor.data_ptr()
        before = int(tensor.view(torch.int64)[0])
        address = np.array([word], dtype=np.uint64)
        self.memory.write(address, np.array([value], dtype=np.int64))
        races = self.memory.races
        if races is not None and thread is not None:
            site = races.sites.named("the network's signal")
            races.scopes(NETWORK - self.rank, [word], False, site)
            for access in self.memory.accesses(address, 8, "a signal of the network"):
                races.atomic(Actor(thread, thread.clock), access, True, site, in_order)
            if clock is None:
                clock = thread.release_clock()
            races.release(thread, clock, word, before, value, site)

    def _touch(self, thread: Thread | None, tensor: torch.Tensor, stores: bool) -> None:
        """The network reads or writes this memory."""
        races = self.memory.races
        if races is None or thread is None or not tensor.numel() or self.given_up():
            return
        size = tensor.numel() * tensor.element_size()
        access = self.memory.span(tensor.data_ptr(), size, f"{thread.name}: an access")
        site = races.sites.named("the network writes what arrives" if stores else "the network reads what it sends")
        if stores:
            races.store(Actor(thread, thread.clock), access, site)
        else:
            races.load(Actor(thread, thread.clock), access, site, may_be_undefined=True)

    def _bytes_of(self, rank: int, segment: int, offset: int, size: int, what: str) -> torch.Tensor:
        memory = self.segment(rank, segment)
        if memory is None:
            raise SimulatorError(
                f"a request of rank {self.group_rank}: rank {rank} has no segment {segment}{self._posted_by()}"
            )
        if not 0 <= offset <= offset + size <= memory.numel():
            raise SimulatorError(
                f"a request of rank {self.group_rank}: {what} [{offset}, {offset + size}) is outside of "
                f"rank {rank}'s segment {segment} of {memory.numel()} bytes{self._posted_by()}"
            )
        if not self.given_up():
            self.check(segment, memory.data_ptr() + offset, size, f"the {what} of a request", self._poster)
        return memory[offset : offset + size]

    def _posted_by(self) -> str:
        return f"\n  posted by {self._poster()}"

    def _poster(self) -> str:
        """Who posted the current request."""
        races = self.memory.races
        return races.last_release(self._posted_address()) if races is not None else f"rank {self.group_rank}"

    def _take(self) -> None:
        capacity = int(self.words[layout.CAPACITY.value])
        slot = HEADER + self.consumed % capacity * WORDS
        word = [int(x) for x in self.words[slot : slot + WORDS]]
        thread = self._start_thread(slot)
        addressee = word[layout.PEER_AND_SEGMENTS.value]
        peer, segment, source_segment = addressee & 0xFFFF, addressee >> 16 & 0xFFFFFF, addressee >> 40
        size = word[layout.BYTES.value]
        source = self._bytes_of(self.group_rank, source_segment, word[layout.SOURCE.value], size, "source")
        target = self._bytes_of(peer, segment, word[layout.TARGET.value], size, "target")
        signal = self._bytes_of(peer, segment, word[layout.SIGNAL.value], 8, "signal")
        cuts = sorted({0, size, *(self.rng.randrange(size) for _ in range(3))}) if size else [0]
        pieces = list(itertools.pairwise(cuts))
        self.rng.shuffle(pieces)
        posted = self.scheduler.times.get(self.ring.data_ptr() + 8 * (slot + layout.TURN.value), 0.0)
        self.free = max(self.free, posted) + size / BYTES_PER_NANOSECOND
        value = word[layout.VALUE.value]
        self.flying.append(
            InFlight(
                self.consumed,
                peer,
                source,
                target,
                signal,
                value,
                pieces,
                posted,
                self.free + LATENCY,
                thread,
                self._number,
            )
        )
        self.consumed += 1
        self._set_word(
            self.ring[layout.CONSUMED.value :],
            self.consumed,
            thread,
            thread.release_clock() if thread is not None else NOTHING,
        )
        self.scheduler.signalled(self.ring[layout.CONSUMED.value :].data_ptr(), posted)

    def _start_thread(self, slot: int) -> Thread | None:
        """A request is a thread of its own; what happened before its posting happens before it. Threads are reused, but
        never while their request is in flight: any number of others may overtake it."""
        races = self.memory.races
        if races is None:
            return None
        taken = [request.number for request in self.flying]
        self._number = (self._number + 1) % REQUESTS
        while self._number in taken:
            self._number = (self._number + 1) % REQUESTS
        key = ("request", self.rank, self.ring.data_ptr(), self._number)
        thread = races.thread(key, f"rank {self.rank}, request {self.consumed} to the network")
        turn = self.ring[slot + layout.TURN.value :]
        thread.begin(races.clock_since(turn.data_ptr(), int(turn[0])))
        self._touch(thread, self.ring[slot + 1 : slot + WORDS], stores=False)
        return thread

    def _progress(self, request: InFlight) -> None:
        if request.pieces:
            start, end = request.pieces.pop()
            self._touch(request.thread, request.source[start:end], stores=False)
            self._touch(request.thread, request.target[start:end], stores=True)
            self.memory.copy_undefined(
                request.source.data_ptr() + start, request.target.data_ptr() + start, end - start
            )
            self.memory.write_bytes(request.target.data_ptr() + start, request.source[start:end].numpy().copy())
            self.on_delivery(request.peer, end - start)
            return
        assert request.signal is not None
        before = int(request.signal.view(torch.int64).item())
        thread = request.thread
        # with two unordered requests to one signal, a wait for one of them could be satisfied by the other
        in_order = request.target.numel() > 0 and not self.given_up()
        self._set_word(request.signal, max(before, request.value), thread, None, in_order)
        self.scheduler.signalled(request.signal.data_ptr(), request.arrives)
        self.on_arrival(request)
        self.flying.remove(request)
        self._ended[request.ticket] = thread.release_clock() if thread is not None else NOTHING
        known = NOTHING
        while self.completed_in_order in self._ended:
            known = joined(known, self._ended.pop(self.completed_in_order))
            self.completed_in_order += 1
        self._set_word(self.ring[layout.COMPLETED.value :], self.completed_in_order, thread, known)
        self.scheduler.signalled(self.ring[layout.COMPLETED.value :].data_ptr(), request.arrives)
