"""Groups of clusters that do not exist, of any size: enough of a `Group` that an operator plans a call for it.

`plan_of` asks the operator for the plan that a call would take there, through its workload, as `mkernel compile` does.
No rank runs, and tensors have a shape and a dtype, but no memory. So this takes milliseconds for 8192 ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mkernel.compiling import PretendedGpu, pretending
from mkernel.operators import Operator, Shape
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.runtime.layout import WORD
from mkernel.runtime.topology import Topology
from mkernel.runtime.world import Links

META = torch.device("meta")


class _Addresses(TorchFunctionMode):
    """Gives tensors without memory addresses of their own, aligned, which nobody will access."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.data_ptr and args[0].device == META:
            tensor = args[0]
            return (tensor.untyped_storage()._cdata << 44) + tensor.storage_offset() * tensor.element_size()
        return func(*args, **(kwargs or {}))


class _Allocations(TorchFunctionMode):
    """Counts the bytes of tensors that are made."""

    nbytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.empty:
            self.nbytes += made.nbytes
        return made


class _WorkspaceWanted(Exception):
    """A call that is prepared has asked for a workspace of `nbytes`."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes


class _Same:
    """A sequence with the same value for every rank."""

    def __init__(self, value: Any):
        self._value = value

    def __getitem__(self, rank: int) -> Any:
        return self._value


class _Member(Group):
    """A rank of a group that does not exist."""

    def __init__(self, nodes: int, gpus_per_node: int, rank: int, ctas: int, capability: int, links: Links):
        memory = SimpleNamespace(
            empty=lambda rank, shape, dtype: torch.empty(shape, dtype=dtype, device=META),
            upload=lambda rank, values: torch.tensor(values, dtype=torch.int64, device="cpu"),
        )
        self.world = SimpleNamespace(
            devices=_Same(META), gpu_ids=range(nodes * gpus_per_node), links=links, memory=memory,
            launcher=SimpleNamespace(ctas=lambda rank: ctas, stream_key=lambda rank: 0),
        )  # fmt: skip
        self.topology = Topology(nodes, gpus_per_node)
        self.size = nodes * gpus_per_node
        self.members = range(self.size)  # type: ignore[assignment]
        self.rank = self.world_rank = rank
        self.device = self.target = PretendedGpu(capability)  # type: ignore[assignment]
        # as the benchmarks do, operands that are sent are in the symmetric heap
        self.heap = SimpleNamespace(find=lambda tensor: (None, 0))  # type: ignore[assignment]
        self.tuned: Any = SimpleNamespace(entries={})
        self._different_calls = self._broken = None
        self._closed = False
        self._agreed = set()

    @property
    def multicast(self) -> bool:
        return False

    def _check_usable(self) -> None:
        pass

    def planned(self, key: Hashable, make: Callable[[], Any], kept: int = 0) -> Any:
        return make()

    def keep_if_captured(self, used: Any) -> None:
        pass

    def workspace(self, op: str, signal_words: int, half_bytes: int) -> Any:
        raise _WorkspaceWanted(signal_words * WORD + 2 * half_bytes)

    def agree(self, what: str, **values: Hashable) -> None:
        pass


@contextmanager
def member(
    nodes: int, gpus_per_node: int, rank: int, *, ctas: int, capability: int, links: Links
) -> Iterator[Group]:  # fmt: skip
    """A rank of a cluster of such GPUs, of each of which a rank has `ctas` SMs."""
    with pretending(capability), _Addresses():
        yield _Member(nodes, gpus_per_node, rank, ctas, capability, links)


def plan_of(
    group: Group, operator: Operator, shape: Shape, dtype: torch.dtype, options: Mapping[str, Any],
    config: Config | None,
) -> Any:  # fmt: skip
    """The plan that a call of an operator would take."""
    return operator.load("workload").make(group, shape, dtype, **options).tried.explain(config)


def memory_of(
    group: Group, operator: Operator, shape: Shape, dtype: torch.dtype, options: Mapping[str, Any],
    config: Config | None,
) -> int:  # fmt: skip
    """Bytes of the operands, the result and the workspace of a call on a GPU."""
    with _Allocations() as made:
        call = operator.load("workload").make(group, shape, dtype, **options)
    try:
        call.tried.prepare(config)
    except _WorkspaceWanted as wanted:
        return made.nbytes + wanted.nbytes
    return made.nbytes
