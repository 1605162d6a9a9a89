"""Gradients of parameters that every rank has whole, but uses for its part of the sequence only."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mkernel.nn.shards import ParallelModule
from mkernel.ops.reduce import matmul_all_reduce
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group, current

ROWS = 32  # of a gradient, as a matrix


def sum_gradients(module: nn.Module, *, group: Any = None) -> list[RemovableHandle]:
    """Let the backward pass sum the gradients of a plain module's parameters over the ranks.

    For modules between two sequence-parallel layers, such as norms: every rank has all their parameters, but applies
    them to its part of the sequence, so its gradients are a part of the sum. Parallel modules need no such call: they
    sum their gradients themselves. Each parameter costs a small all-reduce in every backward pass.

    Args:
        module: has no parallel modules inside, and parameters in bf16, fp16 or fp32.
        group: the group whose ranks share the sequence; None is the current group.

    Returns:
        A handle for each parameter; its `remove()` undoes the call.
    """
    for name, child in module.named_modules():
        if isinstance(child, ParallelModule):
            raise ArgumentError(
                f"module contains {name or 'itself'}, a {type(child).__name__}, which sums its gradients itself: call "
                f"sum_gradients for the plain modules between the parallel ones, such as norms"
            )
    hook = partial(_sum, current(group))
    return [parameter.register_hook(hook) for parameter in module.parameters()]


def _sum(group: Group, gradient: torch.Tensor) -> torch.Tensor:
    # The product with the identity is the gradient itself, so the operator sums the gradients of all ranks. In one row,
    # a gradient would fill only one row of each tile; in 32, it fills whole tiles.
    rows = ROWS if gradient.numel() % ROWS == 0 else 1
    identity = torch.eye(rows, dtype=gradient.dtype, device=gradient.device)
    return matmul_all_reduce(identity, gradient.reshape(rows, -1), group=group).view(gradient.shape)
