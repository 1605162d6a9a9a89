"""Ranks as processes, started by torchrun or anything else that makes a process group.

The process group is only used to start: its store carries what ranks tell each other while they set
things up, and what they call (`runtime/messages.py`). Nodes talk over RDMA or TCP, through the native proxy. What the
ranks of a node share is another matter on GPUs (`cuda_processes`) than on CPUs (`cpu_processes`).

Names in the store. Process groups may overlap, be made in any order, on some ranks only, and more than once. So a
world's names begin with what all members know of their process group and nobody else's has: its name, the global
ranks of its members, and how many worlds its members have made of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mkernel.net.config import TransportConfig, transport_config
from mkernel.runtime import connect, liveness, messages, records, secret
from mkernel.runtime.errors import ArgumentError, CommTimeout, MKernelError, RankLost, TransportError
from mkernel.runtime.group import Group
from mkernel.runtime.network import Networked
from mkernel.runtime.printable import printable
from mkernel.runtime.spawn import simulator_is_there

log = logging.getLogger("mkernel")

# torch's store on TCP hangs up on those who give it a value of more than 8 MiB, or a name of more than 8 KiB
LONGEST_VALUE = 4 * 2**20
LOOK_SECONDS = 0.5  # that a rank waits for others in the store before it looks whether they are still there
NAMES_KEPT = 64  # in the store, before they are deleted together
LONGEST_PAUSE = 0.02  # seconds between two questions whether the others are there
TELL_SECONDS = 1.0  # for another rank to tell why it has given up
WARN_SECONDS = 30.0  # that a rank waits before it says whom it waits for


class Processes(Networked):
    """The part of a world that is the same for all kinds of processes."""

    device_type = "cpu"

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        gpus_per_node: int | None,
        transport: TransportConfig | str,
        timeout: float,
    ):
        Networked.__init__(self)
        self.rank = dist.get_rank(process_group)
        size = dist.get_world_size(process_group)
        self.job = _job_name(process_group)
        self._store = dist.PrefixStore(self.job, dist.distributed_c10d._get_default_store())
        self._key = secret.OPEN
        self._last_names: dict[tuple[int, ...], list[str]] = {}  # of what these ranks exchanged last
        self._old_names: list[str] = []  # of what all have read
        self._open_groups: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
        self._lost: dict[str, tuple[int, str]] = {}  # group -> the rank of it that was lost first, and why
        self._lock = threading.Lock()
        self._watch: liveness.Watch | None = None
        told = self._introduce(size, gpus_per_node, timeout)
        hosts = [host for host, *_ in told]
        if gpus_per_node is not None:
            if not isinstance(gpus_per_node, int) or gpus_per_node < 1 or size % gpus_per_node:
                raise ArgumentError(
                    f"gpus_per_node must be a whole number that divides the {size} ranks of the group; "
                    f"got {gpus_per_node!r}"
                )
            self._nodes = [rank // gpus_per_node for rank in range(size)]
        else:
            self._nodes = [hosts.index(host) for host in hosts]
        self._transport = transport_config(transport)
        self._peers_here = {
            rank: (process, page)
            for rank, (host, _, _, process, page) in enumerate(told)
            if host == hosts[self.rank] and rank != self.rank
        }
        self._start_watch()
        liveness.presence().worlds.add(self)

    def _start_watch(self) -> None:
        world = weakref.ref(self)

        def lost(rank: int, why: str) -> None:
            alive = world()
            if alive is not None:
                for group in list(alive._open_groups.values()):
                    alive._rank_lost(group, rank, why)

        def left(rank: int, identity: str, why: str) -> None:
            alive = world()
            group = alive._open_groups.get(identity) if alive is not None else None
            if alive is not None and group is not None:
                alive._rank_lost(group, rank, why)

        self._watch = liveness.Watch(self._peers_here, lost, left)
        weakref.finalize(self, self._watch.close)

    def _introduce(self, size: int, gpus_per_node: int | None, timeout: float) -> list[Any]:
        """Agree on the job's secret, then tell each other who and where we are."""
        everyone = range(size)
        agreement = secret.Agreement(self.job, self.rank)
        agreement.take(self.exchange(self.rank, everyone, "offers", "mk.init", agreement.offer(), timeout))
        masked = agreement.masked() if self.rank == 0 else None
        self._key = agreement.unmask(self.exchange(self.rank, everyone, "secret", "mk.init", masked, timeout)[0])
        presence = liveness.presence()
        mine = (host_name(), self.device_type, gpus_per_node, presence.process, presence.handle)
        told = self.exchange(self.rank, everyone, "hosts", "mk.init", mine, timeout)
        for name, given in (("device", [who[1] for who in told]), ("gpus_per_node", [who[2] for who in told])):
            if len(set(given)) > 1:
                by_rank = ", ".join(map(str, given))
                raise ArgumentError(f"{name} must be the same on every rank; by rank: {by_rank}")
        return told

    def node_of(self, rank: int) -> int:
        return self._nodes[rank]

    # -- what ranks tell each other

    def exchange(
        self, rank: int, members: Sequence[int], key: Hashable, what: str, value: Any, timeout: float
    ) -> list[Any]:
        names = self._names(members, key)
        place = list(members).index(rank)
        begun = time.monotonic()
        try:
            written = self._put(names[place], value)
            self._await(names, members, rank, key, what, timeout)
            values = self._get(names)
            # all members are here, so all have read what was exchanged before
            previous, self._last_names[tuple(members)] = self._last_names.get(tuple(members), []), written
            self._old_names += previous
            if len(self._old_names) >= NAMES_KEPT:
                self._forget_names()
        except (RuntimeError, dist.DistError) as silence:
            if isinstance(silence, MKernelError):
                raise
            # whoever had the store has left
            missing = [i for i, name in enumerate(names) if i != place and not self._is_here(name)]
            waited = time.monotonic() - begun
            raise records.absent(what, place, missing or [place], len(members), waited) from silence
        return values

    def publish(self, rank: int, members: Sequence[int], key: Hashable, value: Any) -> None:
        name = self._names(members, key)[list(members).index(rank)]
        self._last_names.setdefault(tuple(members), []).extend(self._put(name, value))

    def _forget_names(self) -> None:
        for old in self._old_names:
            self._store.delete_key(old)
        self._old_names.clear()

    def _names(self, members: Sequence[int], key: Hashable) -> list[str]:
        """Under which names the members put what they tell in an exchange."""
        call = hashlib.sha256(repr(key).encode()).hexdigest()  # the names of groups are long where they have many ranks
        return [f"{call}/{member}" for member in members]

    def _await(
        self, names: Sequence[str], members: Sequence[int], rank: int, key: Hashable, what: str, timeout: float
    ) -> None:
        """Return when all names are in the store. Raise when the time is over, or when one of the missing is lost."""
        begun = time.monotonic()
        place = list(members).index(rank)
        warned, pause, next_look = False, 5e-5, LOOK_SECONDS
        # not by the store's own wait: that keeps other threads from it, and logs a warning whenever it ends in vain
        while not self._store.check(list(names)):
            waited = time.monotonic() - begun
            if waited < min(next_look, timeout):
                time.sleep(pause)
                pause = min(1.5 * pause, LONGEST_PAUSE)
                continue
            next_look = waited + LOOK_SECONDS
            missing = [i for i, name in enumerate(names) if not self._is_here(name)]
            if not missing:
                return
            timed_out = records.absent(what, place, missing, len(members), waited)
            self._look_after(key, members, missing, timed_out)
            if waited >= timeout:
                raise timed_out
            if waited >= WARN_SECONDS and not warned:
                warned = True
                log.warning(
                    "%s: rank %d has waited %.0f s for %s to make the same call, and will wait up to %.0f s",
                    what, place, waited, _ranks(missing), timeout,
                )  # fmt: skip

    def _look_after(self, key: Hashable, members: Sequence[int], missing: Sequence[int], waits: CommTimeout) -> None:
        """Raise if it is known that the missing will not come."""
        name = key[0] if isinstance(key, tuple) else None
        identity = self._identity_of(name)
        lost, told = self._why_broken(identity) if self._is_here(f"broken/{identity}") else (-1, "")
        if told and lost < 0:
            self._wait_for_the_watch([members[i] for i in missing])  # which may know better who it was
        gone = self._watch.gone if self._watch is not None else {}
        for i in missing:
            if lost < 0 and members[i] in gone:
                lost, told = i, gone[members[i]]
        if lost >= 0:
            raise RankLost(f"rank {lost} is lost: {told}. {waits}", waits.records, lost, told)
        if told:
            raise CommTimeout(f"{told}. {waits}", waits.records)
        connection = self._connections.get((name, self.rank))
        if connection is not None and connection.proxy.error is not None:
            raise TransportError(f"{connection.proxy.error}. What waited for it: {waits}") from waits

    def _wait_for_the_watch(self, missing: Sequence[int]) -> None:
        """Give the system the time to tell that one of these ranks of this machine has ended."""
        deadline = time.monotonic() + TELL_SECONDS
        watched = self._peers_here.keys() & set(missing)
        while watched and self._watch is not None and not watched & self._watch.gone.keys():
            if time.monotonic() > deadline:
                return
            time.sleep(LONGEST_PAUSE)

    def _is_here(self, name: str) -> bool:
        try:
            return self._store.check([name])
        except (RuntimeError, dist.DistError):  # whoever had the store has left
            return False

    def _put(self, name: str, value: Any) -> list[str]:
        """Put a value into the store, under these names: first the pieces, if it is too long for one, then, under its
        own name, which others wait for, the beginning and how many pieces follow."""
        data = messages.encode(value, self._key, f"{self.job}/{name}")
        pieces = [data[start : start + LONGEST_VALUE] for start in range(0, len(data), LONGEST_VALUE)]
        names = [f"{name}/{place}" for place in range(1, len(pieces))]
        for piece_name, piece in zip(names, pieces[1:]):
            self._store.set(piece_name, piece)  # type: ignore[arg-type]
        self._store.set(name, len(names).to_bytes(4, "big") + pieces[0])  # type: ignore[arg-type]
        return [*names, name]

    def _get(self, names: Sequence[str]) -> list[Any]:
        """What `_put` has put there, under each of the names."""
        if self._store.has_extended_api():  # type: ignore[attr-defined]
            firsts = self._store.multi_get(list(names))
        else:
            firsts = [self._store.get(name) for name in names]
        return [self._decoded(name, first) for name, first in zip(names, firsts)]

    def _decoded(self, name: str, first: bytes) -> Any:
        count = int.from_bytes(first[:4], "big")
        if count > messages.MOST_BYTES // LONGEST_VALUE:
            raise messages.BadMessage(f"the message {name} in the store is not one of this job: it is too long")
        rest = [self._store.get(f"{name}/{place}") for place in range(1, count + 1)]
        try:
            return messages.decode(b"".join([first[4:], *rest]), self._key, f"{self.job}/{name}")
        except messages.BadMessage as problem:
            who = name.rpartition("/")[2]
            raise messages.BadMessage(
                f"what stands in the process group's store for rank {who} was not written by a rank of this job: "
                f"{problem}"
            ) from problem

    # -- ranks that are lost

    def _identity_of(self, name: Hashable) -> str:
        return hashlib.sha256(f"{self.job} {name!r}".encode()).hexdigest()[:32]

    def opened(self, group: Group) -> None:
        self._open_groups[self._identity_of(group.name)] = group
        if self._watch is None:
            self._start_watch()
        assert self._watch is not None
        for rank, why in list(self._watch.gone.items()):  # while the group was being made
            self._rank_lost(group, rank, why)

    def closed(self, group: Group) -> None:
        Networked.closed(self, group)
        self._open_groups.pop(self._identity_of(group.name), None)
        self._lost.pop(self._identity_of(group.name), None)
        if not self._open_groups and self._watch is not None:
            self._watch.close()
            self._watch = None
            with contextlib.suppress(RuntimeError, dist.DistError):  # whoever had the store has left
                self._forget_names()

    def confirm(self, group: Group, call: Any) -> None:
        group.exchange(call[0], None, call=call)

    def leave(self, group: Group, why: str) -> None:
        identity = self._identity_of(group.name)
        liveness.presence().leave(identity, why)
        self.abort(group)
        connection = self._connections.pop((group.name, group.world_rank), None)
        if connection is not None:  # so the other nodes' proxies hear of it
            connection.proxy.stop(0)
            connection.transport.close(0)
        self._tell_all(identity, group.rank, why)

    def broke(self, group: Group, failure: MKernelError) -> None:
        if isinstance(failure, RankLost):
            lost, why = failure.rank, failure.why
        else:
            lost, why = -1, f"rank {group.rank} has given up: {failure}"
        self._tell_all(self._identity_of(group.name), lost, why)

    def _tell_all(self, identity: str, lost: int, why: str) -> None:
        """Write into the store, once, that a group is broken: for those who wait there and see nothing of it."""
        try:
            if not self._is_here(f"broken/{identity}"):
                self._put(f"broken/{identity}", (lost, why))
        except (RuntimeError, dist.DistError):
            log.debug("the store is gone, too", exc_info=True)

    def lost(self, group: Group, timed_out: bool) -> tuple[int, str] | None:
        identity = self._identity_of(group.name)
        if timed_out:
            return self._lost.get(identity)
        # another rank has given up before, and knows why: it tells when it finds out
        deadline = time.monotonic() + TELL_SECONDS
        told = None
        while identity not in self._lost and time.monotonic() < deadline:
            if self._is_here(f"broken/{identity}"):
                told = self._why_broken(identity)
                if told[0] >= 0:
                    return told
            time.sleep(LONGEST_PAUSE)
        return self._lost.get(identity, told)

    def _why_broken(self, identity: str) -> tuple[int, str]:
        rank, why = self._get([f"broken/{identity}"])[0]
        return int(rank), printable(str(why))

    def _rank_lost(self, group: Group, rank: int, why: str) -> None:
        """A rank of this machine was lost: let those of our kernels end that may wait for it. In the watch's thread."""
        if rank in group.members:
            with self._lock:
                first = self._lost.setdefault(self._identity_of(group.name), (group.members.index(rank), why))
            if first == (group.members.index(rank), why):
                self.abort(group)

    def abort(self, group: Group) -> None:
        """Let the group's kernels on this rank end."""
        raise NotImplementedError

    def idle(self) -> bool:
        """Is everything done that this rank has launched?"""
        raise NotImplementedError

    def broken_groups(self) -> list[str]:
        return [identity for identity, group in self._open_groups.items() if group.broken]

    # -- the network

    def start_proxy(self, group: Group, ring: torch.Tensor) -> None:
        key = secret.derived(self._key, f"connections of group {group.name!r}")
        transport = connect.open_transport(group, self._transport, lambda: self._address(group), key)
        connect.attach(group, transport, dict(group.heap.segments()))
        # the memory of the other ranks of this node is mapped into this process
        self.connect(group, ring, transport, [group.device] * group.size)

    def _address(self, group: Group) -> str:
        """The address under which the ranks of other machines reach this one."""
        hosts = group.exchange("network", host_name())
        if len(set(hosts)) == 1:
            return "127.0.0.1"
        # the address that is used to reach the machine where the job's store is
        target = os.environ.get("MASTER_ADDR", "localhost")
        family, _, _, _, address = socket.getaddrinfo(target, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return probe.getsockname()[0]

    def attach(self, group: Group, segment: int, memory: torch.Tensor | None) -> None:
        """A segment came, or went."""
        connection = self.connection(group)
        if connection is not None and memory is not None:
            connect.attach(group, connection.transport, {segment: memory})
        elif connection is not None:
            connect.drop(connection.transport, segment)


_worlds: Counter[str] = Counter()  # how many were made of a process group


def _job_name(process_group: dist.ProcessGroup | None) -> str:
    """What a world's names in the store begin with. All members make as many worlds of a process group."""
    chosen = process_group if process_group is not None else dist.group.WORLD
    assert chosen is not None
    identity = f"{chosen.group_name} {dist.get_process_group_ranks(chosen)}"
    _worlds[identity] += 1
    return f"mkernel/{hashlib.sha256(identity.encode()).hexdigest()[:32]}/{_worlds[identity]}"


def _ranks(numbers: Sequence[int]) -> str:
    some = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"rank {some}" if len(numbers) == 1 else f"ranks {some}{more}"


def host_name() -> str:
    """Names this machine: the same in all of its processes, different from every other machine's."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()}/{file.read().strip()}"
    except OSError:
        return socket.gethostname()


def timeout_of(process_group: dist.ProcessGroup | None) -> float:
    """The timeout of a process group, in seconds: the longest of its backends'."""
    group = process_group if process_group is not None else dist.group.WORLD
    found = []
    for device in getattr(group, "_device_types", []):
        options = getattr(group._get_backend(device), "options", None)  # type: ignore[union-attr]
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            found.append(timeout.total_seconds())
    return max(found, default=dist.default_pg_timeout.total_seconds())


# The default process group that a forked child has inherited: its connections are its parent's.
_inherited: Any = None


def _after_fork() -> None:
    global _inherited
    _inherited = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


os.register_at_fork(after_in_child=_after_fork)


def init(
    process_group: dist.ProcessGroup | None,
    gpus_per_node: int | None,
    transport: TransportConfig | str,
    timeout: float | None,
) -> Group:
    """The group of all ranks of a process group: on GPUs where there are some."""
    if _inherited is not None and dist.group.WORLD is _inherited:
        raise MKernelError(
            f"process {os.getpid()} was forked from one that had called torch.distributed.init_process_group, and can "
            f"not use its connections. Start workers with the start method 'spawn', or fork before init_process_group"
        )
    timeout = timeout_of(process_group) if timeout is None else timeout
    world: Any
    if torch.cuda.is_available():
        from mkernel.runtime.cuda_processes import CudaProcessWorld

        world = CudaProcessWorld(process_group, gpus_per_node, transport, timeout)
    else:
        with simulator_is_there():
            from mkernel.runtime.cpu_processes import ProcessWorld

        world = ProcessWorld(process_group, gpus_per_node, transport, timeout)
    return Group(world, range(world.size), world.rank, timeout=timeout, name="world")
