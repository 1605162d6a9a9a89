"""Replicated parameters: sums the gradients of those that a rank applies only to its part of the sequence, and checks
that all ranks have the same values."""

from __future__ import annotations

import hashlib
import weakref
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mkernel.nn.shards import Membership, ParallelModule, is_dtensor
from mkernel.ops.reduce import matmul_all_reduce
from mkernel.runtime.errors import ArgumentError, MKernelError
from mkernel.runtime.group import Group, current

ROWS = 32  # of a gradient, as a matrix


def sum_gradients(module: nn.Module, *, group: Any = None) -> list[SummedGradient]:
    """Let the backward pass sum the gradients of a plain module's parameters over the ranks.

    For modules between two sequence-parallel layers, such as norms: every rank has all their parameters, but applies
    them to its part of the sequence, so its gradients are a part of the sum. Parallel modules need no such call: they
    sum their gradients themselves. Each parameter costs a small all-reduce in every backward pass. The sum is a matrix
    product: where PyTorch may use TF32 for those of fp32, gradients in fp32 are rounded to it.

    It holds for copies of the module, too (copy.deepcopy, torch.save), and for tensors that take the place of its
    parameters: by to_empty, load_state_dict(assign=True) or fully_shard. Those are found when the module is called.

    Args:
        module: has no parallel modules inside, and parameters in bf16, fp16 or fp32. Those that do not require grad are
            left out.
        group: the group whose ranks share the sequence; None is the current group. Its ranks sum a gradient once, even
            if they are told to twice.

    Returns:
        A handle for each of these parameters; its `remove()` undoes the call.
    """
    for name, child in module.named_modules():
        if isinstance(child, ParallelModule):
            raise ArgumentError(
                f"module contains {name or 'itself'}, a {type(child).__name__}, which sums its gradients itself: call "
                f"sum_gradients for the plain modules between the parallel ones, such as norms"
            )
    membership = Membership(current(group))
    hooks = {path: _SummingHook(membership, _trained(child)) for path, child in module.named_modules()}
    for path, child in module.named_modules():
        if hooks[path].names:
            child.register_forward_pre_hook(hooks[path])
    hooks[""].attach(module)
    return [SummedGradient(module, name, hooks) for name in hooks[""].names]


class SummedGradient:
    """The handle of a parameter whose gradient is summed. `remove()` ends that."""

    def __init__(self, module: nn.Module, name: str, hooks: dict[str, _SummingHook]):
        self._module, self._name, self._hooks = module, name, hooks

    def remove(self) -> None:
        for path, hook in self._hooks.items():
            prefix = f"{path}." if path else ""
            if self._name.startswith(prefix) and self._name[len(prefix) :] in hook.names:
                hook.names.remove(self._name[len(prefix) :])
        self._hooks[""].detach(_find(self._module, self._name))


def _trained(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def _find(module: nn.Module, name: str) -> Any:
    found: Any = module
    for attribute in name.split("."):
        found = getattr(found, attribute)
    return found


class _SummingHook:
    """Before a module is called: lets the gradients of its parameters be summed.

    That is a hook of each tensor, which also has its part where other modules use the tensor. But copies of a
    parameter, and what FSDP puts in its place, have no hook: so a module looks for them whenever it is called.
    """

    def __init__(self, membership: Membership, names: list[str]):
        self.membership, self.names = membership, names
        self.mark = f"_summed over {membership.group_name}"  # an attribute of the tensors that have a hook

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        self.attach(module)

    def attach(self, module: nn.Module) -> None:
        for name in self.names:
            parameter = _find(module, name)
            if parameter.requires_grad and getattr(parameter, self.mark, None) is None:
                if torch.compiler.is_compiling():
                    raise MKernelError(
                        "a parameter whose gradient is to be summed was replaced after sum_gradients: call the module "
                        "once before torch.compile, or call sum_gradients again"
                    )
                handle = parameter.register_hook(partial(_sum, self.membership.group))
                setattr(parameter, self.mark, _Registered(handle))

    def detach(self, parameter: Any) -> None:
        registered = getattr(parameter, self.mark, None)
        if registered is not None:
            registered.handle.remove()
            delattr(parameter, self.mark)


class _Registered:
    """The hook of a tensor. A file has none: the tensor that is loaded gets a new one."""

    def __init__(self, handle: RemovableHandle):
        self.handle = handle

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    return None


def check_replicated(module: nn.Module, *, group: Any = None) -> None:
    """Raise ArgumentError, on every rank, unless all ranks have the same values in all parameters that are replicated:
    those of plain modules, and biases of `RowParallelLinear`. Collective.

    They differ if the ranks were seeded differently, or loaded different checkpoints. The check reads all of them: call
    it once, before training. DTensors are left out.
    """
    hashes = {}
    for prefix, child in module.named_modules():
        sharded = child.shard_dims if isinstance(child, ParallelModule) else {}
        for name, parameter in child.named_parameters(recurse=False):
            if name not in sharded and not is_dtensor(parameter):
                values = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
                hashes[f"{prefix}.{name}" if prefix else name] = hashlib.sha256(values.numpy()).hexdigest()
    group = current(group)
    by_rank = group.exchange("check_replicated", hashes)
    for rank, theirs in enumerate(by_rank):
        different = [name for name in {**by_rank[0], **theirs} if by_rank[0].get(name) != theirs.get(name)]
        if different:
            raise ArgumentError(
                f"module has parameters that must be the same on every rank, but differ between ranks 0 and {rank}: "
                f"{', '.join(different[:8])}{', ...' if len(different) > 8 else ''}. Call torch.manual_seed with the "
                f"same seed on every rank before the module is built, or load the same checkpoint"
            )


def replica_group(group: Group, replicas: int) -> Group:
    """The ranks of a group that have the same shard as this one, where so many consecutive ones do. Made once, which is
    collective, and kept as long as the group."""
    made = _replica_groups.setdefault(group, {})
    if replicas not in made:
        first = group.rank - group.rank % replicas
        made[replicas] = group.subset(range(first, first + replicas))
    return made[replicas]


_replica_groups: weakref.WeakKeyDictionary[Group, dict[int, Group]] = weakref.WeakKeyDictionary()


def with_summed_gradient(parameter: torch.Tensor, group: Group) -> torch.Tensor:
    """A parameter that every rank has whole, for use on this rank's tokens: its gradient is summed over the ranks."""
    return _Replicated.apply(parameter, group)


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(ctx.group, gradient), None


def _sum(group: Group, gradient: torch.Tensor) -> torch.Tensor:
    # The product with the identity is the gradient itself, so the operator sums the gradients of all ranks. In one row,
    # a gradient would fill only one row of each tile; in 32, it fills whole tiles.
    rows = ROWS if gradient.numel() % ROWS == 0 else 1
    identity = torch.eye(rows, dtype=gradient.dtype, device=gradient.device)
    with torch.autocast(gradient.device.type, enabled=False):  # where the caller's backward pass runs under it
        return matmul_all_reduce(identity, gradient.reshape(rows, -1), group=group).view(gradient.shape)
