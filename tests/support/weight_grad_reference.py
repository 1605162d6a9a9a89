"""Calls of all_gather_matmul_weight_grad on a simulated cluster, checked against float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import mkernel as mk
from support import operator_calls
from support.operator_calls import assert_same, bound


@dataclass(frozen=True)
class Case(operator_calls.Case):
    """The shape of a call; n may be one number per rank."""

    def gradient(self, rank, size, turn=0):
        """A rank's dy."""
        return self._values(size * self.m, self.columns(rank), (3, rank, turn))


def assert_weight_grad(y, gathered, dy):
    """Every element within the bound of a product, and fp32 sums are rounded after every term; NaN never passes."""
    rows = len(dy)
    assert y.dtype == dy.dtype
    exact = gathered.double().t() @ dy.double()
    assert y.shape == exact.shape
    error = (y.double() - exact).abs()
    most = bound(rows, y.dtype) + rows * torch.finfo(torch.float32).eps
    assert bool((error <= most).all()), f"largest error {error.max().item()}, bound {most}"


def call(group, case, turn=0, *, a=None, dy=None, **arguments):
    """One call on this rank, with the case's values; the result and the inputs are checked."""
    a = case.rows(group.rank, turn) if a is None else a
    dy = case.gradient(group.rank, group.size, turn) if dy is None else dy
    before = a.clone(), dy.clone()
    y = mk.all_gather_matmul_weight_grad(a, dy, group=group, **arguments)
    assert_same(a, before[0])
    assert_same(dy, before[1])
    assert_weight_grad(y, case.gathered(group.size, turn), dy)
    return y
