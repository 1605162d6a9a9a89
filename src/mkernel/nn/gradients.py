"""Gradients of parameters that every rank has whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from mkernel.nn.shards import GATHERED_BYTES, ParallelModule, all_gather, local_of
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group, current

COLUMNS = 256  # gradients travel as a matrix of rows that kernels copy well


def replicated_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a model that belong to no parallel module of this package: those of norms, embeddings and
    routers. A parameter that is used in several places comes once.

    The parameters of parallel modules need no `all_reduce_gradients`, not even replicated biases: the backward passes
    of these modules sum what must be summed.
    """
    of_parallel = {
        id(parameter)
        for child in module.modules() if isinstance(child, ParallelModule)
        for parameter in child.parameters(recurse=False)
    }  # fmt: skip
    return (parameter for parameter in module.parameters() if id(parameter) not in of_parallel)


@torch.no_grad()
def all_reduce_gradients(parameters: Iterable[torch.Tensor], *, group: Any = None) -> None:
    """Sum the gradients of replicated parameters over the ranks of a group, in place. Collective.

    With sequence parallelism, what lies between two parallel modules sees only this rank's part of the sequence, so a
    rank has only its part of the gradient. Call this after the backward pass and before the optimizer's step:

        loss.backward()
        mkernel.nn.all_reduce_gradients(mkernel.nn.replicated_parameters(model))
        optimizer.step()

    Without sequence parallelism, every rank has the whole gradient already, and it must not be summed.

    The ranks' gradients are added in fp32 and in rank order. The sum has the same bits on every rank, so the parameters
    stay equal. A gradient that some ranks do not have counts as zero; if no rank has it, it stays None.

    Nothing overlaps with this call, and every rank receives the gradients of all others: it is for norms, routers and
    other small parameters.

    Args:
        parameters: the same parameters, in the same order, on every rank. Those that do not require grad are ignored.
        group: the group whose ranks hold the parameters; None is the current group.
    """
    group = current(group)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ArgumentError(
                f"parameters: a gradient of shape {tuple(parameter.shape)} is sparse, which all_reduce_gradients does "
                f"not support: make the embedding with sparse=False"
            )
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    if group.size > 1:
        for same_dtype in by_dtype.values():
            _all_reduce(same_dtype, group)


def _all_reduce(parameters: list[torch.Tensor], group: Group) -> None:
    """Sum the gradients of parameters of one dtype: all of them travel together."""
    dtype, device = parameters[0].dtype, group.device
    sizes = [local_of(parameter).numel() for parameter in parameters]
    present = [parameter.grad is not None for parameter in parameters]
    parts = [torch.tensor(present, dtype=dtype, device=device)]  # how many ranks have a gradient: the sum of these
    for parameter, size in zip(parameters, sizes):
        given = parameter.grad
        grad = torch.zeros(size, dtype=dtype) if given is None else local_of(given).reshape(-1)
        parts.append(grad.to(device, dtype))
    flat = torch.cat(parts)
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % COLUMNS)).view(-1, COLUMNS)
    summed = torch.empty(rows.shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
    step = max(GATHERED_BYTES // (COLUMNS * rows.element_size()), 1)
    for begin in range(0, rows.shape[0], step):
        piece = rows[begin : begin + step]
        everyone = all_gather(piece, group).view(group.size, *piece.shape)
        summed[begin : begin + step] = everyone.sum(0, dtype=summed.dtype)
    counts, *sums = summed.view(-1)[: flat.numel()].split([len(parameters), *sizes])
    for parameter, has_gradient, count, total in zip(parameters, present, counts.tolist(), sums):
        if not has_gradient and count:
            parameter.grad = torch.zeros_like(parameter)
        if count:
            grad = local_of(parameter.grad)  # type: ignore[arg-type]
            grad.copy_(total.view(grad.shape))
