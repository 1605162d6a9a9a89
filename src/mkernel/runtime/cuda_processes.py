"""Ranks as processes, one or more processes to a GPU.

The ranks of a node share torch symmetric memory: each allocation is mapped into the processes of the node, which find
each other through a gloo group of their own. Nodes talk over TCP, through pinned memory.

Processes on one GPU share its SMs, as threads do; they recognize each other by the GPU's UUID. Their kernels
time-slice, or run concurrently under MPS.

Loading a kernel waits only for the kernels of the same process, so a rank that spins does not keep another one from
loading. But it would time out if loading took long (compiling may): a rank starts the first launch after an agreement
on new shapes only when all ranks have loaded their kernels.
"""

from __future__ import annotations

import os
import re
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group

from mkernel.net.config import TransportConfig
from mkernel.runtime.cuda import CudaLauncher, DeviceMemory
from mkernel.runtime.cuda_capture import apart
from mkernel.runtime.errors import MKernelError
from mkernel.runtime.gpus import SimulatedGpu, take_device
from mkernel.runtime.group import Group
from mkernel.runtime.network import NativeNetwork
from mkernel.runtime.processes import ProcessConnector, introduce, label_of
from mkernel.runtime.store import SignedStore
from mkernel.runtime.store_exchange import StoreExchange
from mkernel.runtime.world import Links


class CudaProcesses:
    """The world of processes with GPUs."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        gpus_per_node: int | None,
        transport: TransportConfig | str,
        timeout: float,
    ):
        device = take_device()
        self.size = size = dist.get_world_size(process_group)
        self.rank = rank = dist.get_rank(process_group)
        self.links = Links()
        self.exchange, self.node_ids = introduce(process_group, gpus_per_node, transport, "cuda", timeout)
        self.label = label_of(process_group, self.exchange.messages.number)
        self.simulated_gpu: SimulatedGpu | None = None
        properties: Any = torch.cuda.get_device_properties(device)
        mine = (str(properties.uuid), properties.multi_processor_count)
        gpus = self.exchange.all_gather(rank, range(size), "devices", "mk.init", mine, timeout)
        self.gpu_ids = [uuid for uuid, _ in gpus]
        self.devices = {rank: device}
        if len(set(gpus)) < size:
            # torch reads this when it maps memory for the first time; both spellings have been in use
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
            os.environ["TORCH_SYMMMEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        self.memory = SymmetricMemory(rank, device, self.gpu_ids, self.exchange, timeout)
        self.network = NativeNetwork(ProcessConnector(transport, self.exchange))
        self.launcher = CudaLauncher(self.devices, shares_of(gpus), self.network)


class SymmetricMemory:
    """The Memory of processes with GPUs: torch symmetric memory."""

    def __init__(
        self, rank: int, device: torch.device, gpu_ids: Sequence[str], exchange: StoreExchange, timeout: float
    ):
        self._rank, self._device, self._gpu_ids = rank, device, gpu_ids
        self._node_groups = NodeGroups(rank, exchange.messages, timeout)
        exchange.on_last_leave = self._node_groups.clear
        self._handles: dict[int, Any] = {}  # address of symmetric memory -> torch's handle, which keeps it mapped
        plain = DeviceMemory({rank: device})
        self.upload, self.host_words = plain.upload, plain.host_words
        self.describe, self.empty, self.maker = plain.describe, plain.empty, plain.maker

    def allocate(self, rank: int, nbytes: int) -> torch.Tensor:
        from torch.distributed import _symmetric_memory as symmetric_memory

        return apart(
            self._device, lambda: symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self._device).zero_()
        )

    def map(self, group: Group, memory: torch.Tensor) -> list[int]:
        members = [member for rank, member in enumerate(group.members) if group.topology.node_of(rank) == group.node]
        address = memory.data_ptr()
        addresses = {self._rank: address}
        if len(members) > 1:
            try:
                name = self._node_groups.name_of(members)
                handle: Any = apart(self._device, _SymmetricMemory.rendezvous, memory, name)
            except RuntimeError as problem:
                raise MKernelError(
                    f"ranks {members} of this node cannot map each other's GPU memory (torch symmetric memory): "
                    f"{problem}"
                ) from problem
            self._handles[address] = handle
            weakref.finalize(memory.untyped_storage(), self._handles.pop, address, None)
            for index, member in enumerate(sorted(members)):  # torch numbers the ranks of a group in order
                if member != self._rank:
                    addresses[member] = handle.get_buffer(index, (memory.numel(),), torch.uint8).data_ptr()
        return [addresses.get(member, 0) for member in group.members]

    def unmap(self, memory: torch.Tensor) -> None:
        pass  # torch unmaps it with the memory

    def map_multicast(self, group: Group, memory: torch.Tensor, addresses: Sequence[int]) -> int:
        gpus = {self._gpu_ids[member] for member in group.members}
        if group.nodes > 1 or group.size == 1 or len(gpus) < group.size:
            return 0
        # `allocate` returns an allocation of its own, so torch's multicast address is that of its first byte
        mine = self._handles[memory.data_ptr()].multicast_ptr or 0
        return mine if all(group.exchange("multicast", mine != 0)) else 0


class NodeGroups:
    """Process groups of the ranks of a node, for torch symmetric memory."""

    def __init__(self, rank: int, messages: SignedStore, timeout: float):
        self._rank, self._messages, self._timeout = rank, messages, timeout
        self._groups: dict[tuple[int, ...], tuple[str, weakref.finalize, Any]] = {}

    def name_of(self, members: Sequence[int]) -> str:
        """The name of a process group of these ranks. Only they take part in creating it, so the remaining ranks can
        create one after a rank was lost. `new_group` on these ranks alone would hang where they have created different
        numbers of groups before, since torch counts groups in their names."""
        key = tuple(sorted(members))
        if key not in self._groups:
            numbers = "_".join(map(str, key))
            rank, name = key.index(self._rank), f"{self._messages.job}/{numbers}"
            store = dist.PrefixStore(f"node {numbers}", self._messages.store)
            renumbered = RenumberedStore(store, self._timeout)
            made: Any = dist.ProcessGroup(renumbered, rank, len(key))
            gloo = dist.ProcessGroupGloo(store, rank, len(key), timedelta(seconds=self._timeout))
            made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            made._set_group_name(name)
            _register_process_group(name, made)  # type: ignore[arg-type]
            unregister = weakref.finalize(made, _unregister_process_group, name)  # type: ignore[arg-type]
            self._groups[key] = name, unregister, (made, renumbered)  # torch keeps neither of them alive
        return self._groups[key][0]

    def clear(self) -> None:
        while self._groups:
            _, (_, unregister, _) = self._groups.popitem()
            unregister()


class RenumberedStore(dist.Store):
    """A store for torch symmetric memory, whose ranks exchange values under names that end in `<round>/<rank>`. torch
    counts rounds per process, so two ranks that are in different numbers of groups would wait for different names. This
    store counts rounds per group."""

    def __init__(self, store: dist.Store, timeout: float):
        super().__init__()
        self._store, self._timeout = store, timeout
        self._rounds: dict[str, dict[str, int]] = {}

    def _name(self, key: str) -> str:
        found = re.fullmatch(r"(.*)/(\d+)/(\d+)", key)
        if found is None:
            return key
        rounds = self._rounds.setdefault(found[1], {})
        return f"{found[1]}/{rounds.setdefault(found[2], len(rounds))}/{found[3]}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._name(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._name(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        names = [self._name(key) for key in keys]
        deadline = time.monotonic() + (timeout.total_seconds() if timeout is not None else self._timeout)
        while not self._store.check(names):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the other ranks of the node did not arrive within {self._timeout:g} s")
            time.sleep(1e-4)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check([self._name(key) for key in keys])


def shares_of(gpus: Sequence[tuple[str, int]]) -> dict[int, int]:
    """How many CTAs each rank may have, given the UUID and the number of SMs of every rank's GPU."""
    return {rank: max(gpu[1] // gpus.count(gpu), 1) for rank, gpu in enumerate(gpus)}
