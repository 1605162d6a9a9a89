"""Ranks as processes, started by torchrun or anything else that makes a process group.

The process group is only used to start: its store carries what ranks tell each other while they set
things up. Nodes talk over RDMA or TCP, through the native proxy. What the ranks of a node share is another
matter on GPUs (`cuda_processes`) than on CPUs (`cpu_processes`).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
import socket
import time
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mkernel.net import connect
from mkernel.runtime import records
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group
from mkernel.runtime.network import Networked
from mkernel.runtime.spawn import simulator_is_there

# torch's store on TCP hangs up on those who give it a value of more than 8 MiB, or a name of more than 8 KiB
LONGEST_VALUE = 4 * 2**20


class Processes(Networked):
    """The part of a world that is the same for all kinds of processes."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        gpus_per_node: int | None,
        transport: connect.Wish | str,
        timeout: float,
    ):
        Networked.__init__(self)
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        size = dist.get_world_size(process_group)
        self._store = dist.PrefixStore(_job_name(), dist.distributed_c10d._get_default_store())
        self._last_names: dict[tuple[int, ...], list[str]] = {}  # of what these ranks exchanged last
        told = self.exchange(self.rank, range(size), "hosts", "mk.init", (host_name(), gpus_per_node), timeout)
        hosts, given = zip(*told)
        if any(theirs != gpus_per_node for theirs in given):
            raise ArgumentError(f"gpus_per_node must be the same on every rank; by rank: {', '.join(map(str, given))}")
        if gpus_per_node is not None:
            if not isinstance(gpus_per_node, int) or gpus_per_node < 1 or size % gpus_per_node:
                raise ArgumentError(
                    f"gpus_per_node must be a whole number that divides the {size} ranks of the group; "
                    f"got {gpus_per_node!r}"
                )
            self._nodes = [rank // gpus_per_node for rank in range(size)]
        else:
            self._nodes = [hosts.index(host) for host in hosts]
        self._transport = connect.wish_of(transport)

    def node_of(self, rank: int) -> int:
        return self._nodes[rank]

    def exchange(
        self, rank: int, members: Sequence[int], key: Hashable, what: str, value: Any, timeout: float
    ) -> list[Any]:
        call = hashlib.sha256(repr(key).encode()).hexdigest()  # the names of groups are long where they have many ranks

        def name(member: int) -> str:
            return f"{call}/{member}"

        def is_here(member: int) -> bool:
            try:
                return self._store.check([name(member)])
            except (RuntimeError, dist.DistError):  # whoever had the store has left
                return False

        begun = time.monotonic()
        values = []
        try:
            names = self._put(name(rank), pickle.dumps(value))
            for member in members:
                left = max(timeout - (time.monotonic() - begun), 0.001)
                self._store.wait([name(member)], timedelta(seconds=left))
                values.append(pickle.loads(self._get(name(member))))
            # all members are here, so all have read what was exchanged before
            previous, self._last_names[tuple(members)] = self._last_names.get(tuple(members), []), names
            for old in previous:
                self._store.delete_key(old)
        except (RuntimeError, dist.DistError) as silence:
            missing = [i for i, member in enumerate(members) if member != rank and not is_here(member)]
            waited = time.monotonic() - begun
            place = list(members).index(rank)
            raise records.absent(what, place, missing or [place], len(members), waited) from silence
        return values

    def _put(self, name: str, data: bytes) -> list[str]:
        """Put data into the store, under these names: first the pieces, if it is too long for one, then, under its
        own name, which others wait for, the beginning and how many pieces follow."""
        pieces = [data[start : start + LONGEST_VALUE] for start in range(0, len(data), LONGEST_VALUE)]
        names = [f"{name}/{place}" for place in range(1, len(pieces))]
        for piece_name, piece in zip(names, pieces[1:]):
            self._store.set(piece_name, piece)  # type: ignore[arg-type]
        self._store.set(name, len(names).to_bytes(4, "big") + pieces[0])  # type: ignore[arg-type]
        return [*names, name]

    def _get(self, name: str) -> bytes:
        """What `_put` has put there."""
        first = self._store.get(name)
        rest = [self._store.get(f"{name}/{place}") for place in range(1, int.from_bytes(first[:4], "big") + 1)]
        return b"".join([first[4:], *rest])

    # -- the network

    def start_proxy(self, group: Group, ring: torch.Tensor) -> None:
        transport = connect.open_transport(group, self._transport, lambda: self._address(group))
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


_jobs = itertools.count()


def _job_name() -> str:
    """Every mk.init() of a process has its own names in the store; ranks make them in the same order."""
    return f"mkernel/{next(_jobs)}"


def host_name() -> str:
    """Names this machine: the same in all of its processes, different from every other machine's."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()}/{file.read().strip()}"
    except OSError:
        return socket.gethostname()


def init(
    process_group: dist.ProcessGroup | None, gpus_per_node: int | None, transport: connect.Wish | str, timeout: float
) -> Group:
    """The group of all ranks of a process group: on GPUs where there are some."""
    world: Any
    if torch.cuda.is_available():
        from mkernel.runtime.cuda_processes import CudaProcessWorld

        world = CudaProcessWorld(process_group, gpus_per_node, transport, timeout)
    else:
        with simulator_is_there():
            from mkernel.runtime.cpu_processes import ProcessWorld

        world = ProcessWorld(process_group, gpus_per_node, transport, timeout)
    return Group(world, range(world.size), world.rank, timeout=timeout, name="world")
