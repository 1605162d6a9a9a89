"""Modules that hold a shard of a plain module's parameters: which group they belong to, and how a checkpoint of the
plain module becomes this rank's shard of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mkernel.ops.all_gather_matmul import all_gather_matmul
from mkernel.runtime.errors import ArgumentError, MKernelError
from mkernel.runtime.group import Group, current, named
from mkernel.runtime.operands import DTYPES

GATHERED_BYTES = 64 << 20  # of one call, per rank: what a parameter larger than this is gathered in pieces of


class Membership:
    """The group of a module, and this rank's place in it.

    Copies of a module share its group. A file cannot hold a group: it holds the group's name and this rank's place, and
    loading finds the group with that name, or else the current one, in which this rank has the same place. If there is
    none, the module loads and its parameters can be read, but it cannot be called.
    """

    def __init__(self, group: Group):
        self._group: Group | None = group
        self.group_name, self.rank, self.size = group.group_name, group.rank, group.size

    @property
    def group(self) -> Group:
        if self._group is None:
            raise MKernelError(
                f"this module was loaded from a file as shard {self.rank} of {self.size}, and there was no group in "
                f"which this process is rank {self.rank} of {self.size}: call mk.init() before torch.load, or build "
                f"the module again and load its state_dict"
            )
        return self._group

    @property
    def known_group(self) -> Group | None:
        """The group; None if a file was loaded where there was none."""
        return self._group

    def __deepcopy__(self, memo: Any) -> Membership:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.group_name, self.rank, self.size)


def _restored(name: str, rank: int, size: int) -> Membership:
    """The membership that a file has. The group is that of the process that reads the file, if there is one."""
    membership = Membership.__new__(Membership)
    membership.group_name, membership.rank, membership.size = name, rank, size
    membership._group = None
    for find in (lambda: named(name), current):
        try:
            group = find()
        except MKernelError:
            continue
        if (group.rank, group.size) == (rank, size):
            membership._group = group
            break
    return membership


def check_divisible(what: str, number: int, size: int) -> None:
    """Refuse a number of features or heads that the ranks cannot divide equally."""
    if number % size:
        below, above = number - number % size, number + -number % size
        multiples = f"{below} or {above}" if below else f"{above}"
        ranks = ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0 and divisor < size)
        raise ArgumentError(
            f"{what} is {number}, which {size} ranks cannot divide equally: it must be a multiple of {size}, such as "
            f"{multiples}; {number} can be divided among {ranks} ranks"
        )


def check_positive(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ArgumentError(f"{name} must be a whole number, 1 or more; got {value!r}")


def is_dtensor(tensor: Any) -> bool:
    """Is it a DTensor? Does not import torch.distributed.tensor."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def check_gathered(block: nn.Module, *layers: str) -> None:
    """Refuse layers of a block, which uses their weights without calling them, that FSDP has divided on their own."""
    for name in layers:
        if is_dtensor(getattr(block, name).weight):
            kind = type(block).__name__
            raise ArgumentError(
                f"{name}.weight is divided by FSDP, which gathers it where {name} is called; but {kind} uses it "
                f"without calling {name}: apply fully_shard to the whole {kind}, not to {name}"
            )


def distributed_as(parameter: Any, values: torch.Tensor) -> torch.Tensor:
    """What every rank has whole, divided like a parameter that is a DTensor."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)


@torch.no_grad()
def copy_into(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values to a parameter, which FSDP may have divided."""
    parameter.copy_(distributed_as(parameter, values) if is_dtensor(parameter) else values)


class ParallelModule(nn.Module):
    """A module whose parameters are shards of those of a plain module, under the same names.

    `shard_dims` says in which dimension a parameter is divided among the ranks. Parameters that it does not name are
    replicated: each rank has them whole, with the same values.

    A parameter that is a DTensor stands for this rank's shard, which FSDP (`fully_shard`) has divided further among the
    ranks of another mesh; or, where `dtensors_are_whole`, for the parameter of the plain module.
    """

    shard_dims: Mapping[str, int] = {}
    dtensors_are_whole = False
    replicas = 1  # consecutive ranks that have the same shard

    def __init__(self, group: Any = None):
        super().__init__()
        self.membership = Membership(current(group))

    @property
    def group(self) -> Group:
        """The group whose ranks share the module."""
        return self.membership.group

    @property
    def world_size(self) -> int:
        return self.membership.size

    @property
    def shards(self) -> int:
        """Into how many shards parameters are divided."""
        return self.membership.size // self.replicas

    @property
    def shard(self) -> int:
        """Which of them is this rank's."""
        return self.membership.rank // self.replicas

    def shard_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter of the plain module, as a view."""
        dim = self.shard_dims.get(name)
        if dim is None:
            return whole
        length = whole.shape[dim] // self.shards
        return whole.narrow(dim, self.shard * length, length)

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """The shape that a parameter has in the plain module."""
        shape, dim = list(getattr(self, name).shape), self.shard_dims.get(name)
        if dim is not None and not self._stands_for_whole(name):
            shape[dim] *= self.shards
        return tuple(shape)

    def shard_shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's shard of a parameter."""
        shape, dim = list(getattr(self, name).shape), self.shard_dims.get(name)
        if dim is not None and self._stands_for_whole(name):
            shape[dim] //= self.shards
        return tuple(shape)

    def _stands_for_whole(self, name: str) -> bool:
        return self.dtensors_are_whole and is_dtensor(getattr(self, name))

    @torch.no_grad()
    def copy_from(self, whole: Mapping[str, torch.Tensor | None]) -> None:
        """Copy this rank's shard of each parameter of the plain module."""
        for name, tensor in whole.items():
            if tensor is not None:
                parameter, shard = getattr(self, name), self.shard_of(name, tensor)
                if is_dtensor(parameter):
                    if self._is_of_several_dimensions(parameter):
                        raise ArgumentError(f"{name}: {self._how_to_load(parameter)}")
                    shard = self._as_dtensor(parameter, shard.to(parameter.to_local().device))
                parameter.copy_(shard)

    @torch.no_grad()
    def gathered(self, name: str) -> torch.Tensor:
        """A parameter as the plain module has it: the shards of all ranks. Collective if it is sharded."""
        parameter = getattr(self, name).detach()
        if is_dtensor(parameter):
            if self._is_of_several_dimensions(parameter):
                return parameter.full_tensor()
            parameter = parameter.to_local() if self.dtensors_are_whole else parameter.full_tensor()
        dim = self.shard_dims.get(name)
        if dim is None or self.membership.size == 1:
            return parameter.clone()
        whole = all_gather(parameter.movedim(dim, 0), self.group)
        if self.replicas > 1:
            whole = whole.unflatten(0, (self.membership.size, -1))[:: self.replicas].flatten(0, 1)
        return whole.movedim(0, dim).contiguous()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = dict(state_dict)  # the caller's tensors stay in the caller's dict
        assigned = bool(local_metadata.get("assign_to_params_buffers", False))
        for name, parameter in self._parameters.items():
            key = prefix + name
            value = given.get(key)
            if parameter is None or not isinstance(value, torch.Tensor):
                continue  # missing, or nn.Module refuses it
            if is_dtensor(value):
                if self.dtensors_are_whole or not self._is_whole(name, value):
                    continue  # sharded already
                value = value.full_tensor()  # type: ignore[attr-defined]
            elif name not in self.shard_dims and not is_dtensor(parameter):
                continue
            given[key] = self._shard_to_load(name, value, assigned, error_msgs, key)
        super()._load_from_state_dict(given, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _is_whole(self, name: str, value: torch.Tensor) -> bool:
        """Is it the parameter of the plain module, and not this rank's shard?"""
        return tuple(value.shape) == self.whole_shape(name) != self.shard_shape(name)

    def _shard_to_load(
        self, name: str, value: torch.Tensor, assigned: bool, error_msgs: list[str], key: str
    ) -> torch.Tensor:
        """What to load into a parameter: this rank's shard of the plain module's parameter, or a shard as it is."""
        parameter = getattr(self, name)
        whole, shard = self.whole_shape(name), self.shard_shape(name)
        if tuple(value.shape) == whole:
            value = self.shard_of(name, value)
            if assigned:
                value = value.clone(memory_format=torch.contiguous_format)  # a view would keep all shards in memory
        elif tuple(value.shape) != shard:
            error_msgs.append(
                f"size mismatch for {key}: the checkpoint has {tuple(value.shape)}; it must be {whole}, as in the "
                f"plain module, or {shard}, the shard of rank {self.membership.rank} of {self.membership.size}."
            )
            return parameter  # the error is reported once, with both shapes
        if not is_dtensor(parameter):
            return value
        if self._is_of_several_dimensions(parameter):
            error_msgs.append(f"{key}: {self._how_to_load(parameter)}")
            return parameter
        # what is assigned takes the place of the parameter, which may be on the meta device
        return self._as_dtensor(parameter, value if assigned else value.to(parameter.to_local().device))

    def _is_of_several_dimensions(self, parameter: Any) -> bool:
        """Has FSDP divided a DTensor that stands for the parameter of the plain module?"""
        return self.dtensors_are_whole and parameter.device_mesh.ndim > 1

    def _how_to_load(self, parameter: Any) -> str:
        return (
            f"it is divided among the ranks of a mesh of {parameter.device_mesh.ndim} dimensions: set it before "
            f"fully_shard, or by torch.distributed.checkpoint.state_dict.set_model_state_dict"
        )

    def _as_dtensor(self, parameter: Any, shard: torch.Tensor) -> torch.Tensor:
        """This rank's shard, as the DTensor that the parameter is."""
        from torch.distributed.tensor import DTensor

        shard = shard.detach()
        if self.dtensors_are_whole:
            return DTensor.from_local(shard, parameter.device_mesh, parameter.placements, run_check=False)
        return distributed_as(parameter, shard)


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state_dict of the plain module: shards are gathered. Collective: every rank calls it, and gets all of it.

    `torch.save` it on one rank; the plain module loads it, and so does a parallel module on any number of ranks.
    """
    state = dict(module.state_dict(keep_vars=True))
    owners: dict[Any, tuple[ParallelModule, str]] = {}  # by key; by parameter, since wrappers change the keys
    for prefix, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, ParallelModule):
            for name in child.shard_dims:
                key = f"{prefix}.{name}" if prefix else name
                owners[key] = owners[id(getattr(child, name))] = child, name
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        owner = owners.get(key) or owners.get(id(value))
        whole = owner[0].gathered(owner[1]) if owner else value.detach()
        state[key] = whole.full_tensor() if is_dtensor(whole) else whole  # type: ignore[attr-defined]
    return state


def all_gather(shard: torch.Tensor, group: Group) -> torch.Tensor:
    """All ranks' shards, along the first dimension. Collective; for set-up, since nothing overlaps with it."""
    rows = shard.reshape(shard.shape[0], -1)
    if rows.dtype not in DTYPES:
        parts = group.exchange("all_gather of a shard", rows.cpu())
        return torch.cat([part.to(shard.device) for part in parts]).reshape(-1, *shard.shape[1:])
    step = max(GATHERED_BYTES // max(rows[:1].nbytes, 1), 1)
    whole = rows.new_empty(group.size, *rows.shape)
    no_columns = rows.new_empty((rows.shape[1], 0), device=group.device)
    for begin in range(0, rows.shape[0], step):
        piece = rows[begin : begin + step].to(group.device)
        with torch.autocast(group.device.type, enabled=False):  # which would round the values
            _, gathered = all_gather_matmul(piece, no_columns, group=group, return_gathered=True)
        whole[:, begin : begin + step] = gathered.view(group.size, *piece.shape)
    return whole.reshape(-1, *shard.shape[1:])
