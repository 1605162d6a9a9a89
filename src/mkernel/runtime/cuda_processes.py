"""Ranks as processes with GPUs, one or more processes to a GPU.

What the ranks of a node share is torch symmetric memory: each allocation is mapped into the processes
of the node, which find each other through a gloo group of their own. Nodes talk over TCP, through pinned memory.

Processes on one GPU share its SMs, as threads do (they find each other by the GPU's UUID); their kernels
take turns on the GPU, or run at the same time where MPS serves it.

Loading a kernel waits only for the kernels of the same process, so a rank that spins does not keep another
one from loading. But it would wait in vain, and time out, if that took long (compiling may): the first
launch after ranks have agreed on new shapes is made when all have loaded their kernels.
"""

from __future__ import annotations

import os
import re
import time
import weakref
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group

from mkernel.net.config import TransportConfig
from mkernel.runtime.cuda import CudaRanks
from mkernel.runtime.errors import MKernelError
from mkernel.runtime.group import Group
from mkernel.runtime.processes import Processes
from mkernel.runtime.world import Launch, Links


class CudaProcessWorld(Processes, CudaRanks):
    """The world of processes with GPUs; see runtime/world.py for what each method promises."""

    device_type = "cuda"

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        gpus_per_node: int | None,
        transport: TransportConfig | str,
        timeout: float,
    ):
        device = _take_device()
        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
        shares: dict[int, int] = {}
        CudaRanks.__init__(self, size, Links(), {rank: device}, shares)
        Processes.__init__(self, process_group, gpus_per_node, transport, timeout)
        properties: Any = torch.cuda.get_device_properties(device)
        mine = (str(properties.uuid), properties.multi_processor_count)
        everywhere = self.exchange(rank, range(size), "devices", "mk.init", mine, timeout)
        self._uuids = [uuid for uuid, _ in everywhere]
        shares.update(shares_of(everywhere))
        if len(set(everywhere)) < size:
            # torch reads it when memory is mapped for the first time; both spellings were in use
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
            os.environ["TORCH_SYMMMEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        self._timeout = timeout
        self._node_groups: dict[tuple[int, ...], tuple[str, weakref.finalize, Any]] = {}
        self._handles: dict[int, Any] = {}  # address of symmetric memory -> torch's handle, which keeps it mapped

    def gpu(self, rank: int) -> Hashable:
        return self._uuids[rank]

    # -- memory

    def allocate(self, rank: int, nbytes: int) -> torch.Tensor:
        from torch.distributed import _symmetric_memory as symmetric_memory

        memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self.device(rank)).zero_()
        torch.cuda.current_stream(self.device(rank)).synchronize()
        return memory

    def map(self, group: Group, memory: torch.Tensor) -> list[int]:

        mates = [member for rank, member in enumerate(group.members) if group.topology.node_of(rank) == group.node]
        own = {self.rank: memory.data_ptr()}
        if len(mates) > 1:
            try:
                handle: Any = _SymmetricMemory.rendezvous(memory, self._node_group(mates))
            except RuntimeError as problem:
                raise MKernelError(
                    f"the ranks {mates} of this node can not map each other's GPU memory "
                    f"(torch symmetric memory): {problem}"
                ) from problem
            address = memory.data_ptr()
            self._handles[address] = handle
            weakref.finalize(memory.untyped_storage(), self._handles.pop, address, None)
            for place, mate in enumerate(sorted(mates)):  # torch numbers the ranks of a group in order
                if mate != self.rank:
                    own[mate] = handle.get_buffer(place, (memory.numel(),), torch.uint8).data_ptr()
        return [own.get(member, 0) for member in group.members]

    def multicast(self, group: Group, memory: torch.Tensor, addresses: Sequence[int]) -> int:
        alone = len({self.gpu(member) for member in group.members}) == group.size
        if group.nodes > 1 or group.size == 1 or not alone:
            return 0
        # what `allocate` gives is an allocation of its own in torch, too: both begin at the same place
        mine = self._handles[memory.data_ptr()].multicast_ptr or 0
        return mine if all(group.exchange("multicast", mine != 0)) else 0

    def _node_group(self, mates: Sequence[int]) -> str:
        """The name of a process group of these ranks, for torch's symmetric memory. Only they take part in making it,
        so those that are left can make one after a rank was lost. Not by `new_group` on these ranks only: that hangs
        where they have made different numbers of groups before, since torch counts them in the group's name."""
        key = tuple(sorted(mates))
        if key not in self._node_groups:
            rank, name = key.index(self.rank), f"{self.job}/{'_'.join(map(str, key))}"
            store = dist.PrefixStore(f"node {'_'.join(map(str, key))}", self._store)
            counted = Renumbered(store, self._timeout)
            made: Any = dist.ProcessGroup(counted, rank, len(key))
            gloo = dist.ProcessGroupGloo(store, rank, len(key), timedelta(seconds=self._timeout))
            made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            made._set_group_name(name)
            _register_process_group(name, made)  # type: ignore[arg-type]
            end = weakref.finalize(made, _unregister_process_group, name)  # type: ignore[arg-type]
            self._node_groups[key] = name, end, (made, counted)  # torch keeps neither of them alive
        return self._node_groups[key][0]

    def closed(self, group: Group) -> None:
        Processes.closed(self, group)
        if not self._open_groups:
            while self._node_groups:
                _, (_, end, _) = self._node_groups.popitem()
                end()

    def register(self, group: Group, segment: int, memory: torch.Tensor | None) -> None:
        self.attach(group, segment, memory)

    # -- ranks that are lost

    def opened(self, group: Group) -> None:
        self.be_able_to_abort(group.world_rank)
        Processes.opened(self, group)

    def abort(self, group: Group) -> None:
        CudaRanks.abort(self, group)

    def idle(self) -> bool:
        try:
            return all(stream.query() for stream in self._streams[self.rank])
        except RuntimeError:  # a failure of the device
            return False

    # -- launches

    def launch(self, rank: int, launch: Launch) -> None:
        stream = torch.cuda.current_stream(self.device(rank))
        self.load(rank, launch, stream)
        launch.group.confirm()
        self.start(rank, launch, stream)
        self.first_call_is_done(rank, launch.group)


class Renumbered(dist.Store):
    """A store for torch's symmetric memory, whose ranks tell each other things under names that end in
    `<turn>/<rank>`. torch counts turns for the whole process, so two ranks that are in different numbers of groups
    never find each other. Here turns are counted for the group."""

    def __init__(self, store: dist.Store, timeout: float):
        super().__init__()
        self._store, self._timeout = store, timeout
        self._turns: dict[str, dict[str, int]] = {}

    def _name(self, key: str) -> str:
        found = re.fullmatch(r"(.*)/(\d+)/(\d+)", key)
        if found is None:
            return key
        turns = self._turns.setdefault(found[1], {})
        return f"{found[1]}/{turns.setdefault(found[2], len(turns))}/{found[3]}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._name(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._name(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        names = [self._name(key) for key in keys]
        deadline = time.monotonic() + (timeout.total_seconds() if timeout is not None else self._timeout)
        while not self._store.check(names):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the other ranks of the node did not come within {self._timeout:g} s")
            time.sleep(1e-4)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check([self._name(key) for key in keys])


def shares_of(gpus: Sequence[tuple[str, int]]) -> dict[int, int]:
    """How many CTAs each rank may have, from every rank's GPU: its UUID and its SMs."""
    return {rank: max(gpu[1] // gpus.count(gpu), 1) for rank, gpu in enumerate(gpus)}


def _take_device() -> torch.device:
    """The current GPU; or, as nobody may have chosen the first one, the one with this process' number."""
    if torch.cuda.current_device() == 0:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())
