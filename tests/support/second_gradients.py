"""Gradients of gradients, next to plain PyTorch in float64 on one device."""

from __future__ import annotations

import torch

from support.gradient_reference import REDUCE, SHARED


def _first_loss(case, rank, results):
    """Not linear, so that its gradient depends on the inputs."""
    cotangents = case.cotangents(rank, results)
    return sum((results[name].sin() * value.to(results[name].dtype)).sum() for name, value in cotangents.items())


def _second_loss(case, rank, loss, leaves):
    """A sum of the gradients of the loss, by random weights. Those of inputs that matmul_all_reduce wants to be the
    same on every rank have the same weights on every rank."""
    gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    second = 0
    for name, gradient in zip(leaves, gradients):
        key = 0 if case.op == REDUCE and name in SHARED[REDUCE] else rank + 1
        second = second + (gradient * case._values("dd" + name, key, tuple(gradient.shape)).to(gradient.dtype)).sum()
    return second


def expected(case, rank, size, names):
    """The gradients of the sum over ranks of their second losses, with respect to a rank's inputs of these names."""
    leaves, results = case.whole(size)
    total = sum(_first_loss(case, r, results[r]) for r in range(1 if case.op == REDUCE else size))
    second = 0
    for r in range(size):
        once = SHARED[case.op] if case.op == REDUCE and r > 0 else ()
        second = second + _second_loss(case, r, total, {name: leaves[r][name] for name in names if name not in once})
    return dict(zip(names, torch.autograd.grad(second, [leaves[rank][name] for name in names])))


def check(group, case):
    """The gradients of a loss that depends on the gradients of a call are right on this rank."""
    tensors = {name: tensor for name, tensor in case.tensors(group).items()}
    loss = _first_loss(case, group.rank, case.call(group, tensors))
    needed = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    _second_loss(case, group.rank, loss, needed).backward()
    exact = expected(case, group.rank, group.size, list(needed))
    # three products follow each other, of sums of at most so many terms of magnitude 1
    bound = 8 * case.terms(group.size) ** 1.5 * torch.finfo(case.dtype).eps
    for name, tensor in needed.items():
        assert tensor.grad is not None, f"{case}: {name} has no gradient"
        error = (tensor.grad.double() - exact[name]).abs().max().item()
        assert error <= bound, f"rank {group.rank}: {case}: second gradient of {name} is off by {error} > {bound}"
        assert exact[name].abs().max() > 1000 * bound, f"{case}: the gradient of {name} is too small to tell"
