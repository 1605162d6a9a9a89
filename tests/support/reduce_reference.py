"""What the tests of matmul_reduce_scatter and matmul_all_reduce have in common: cases, float64 references
with the documented bound, and the two operators in all ways."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import mkernel as mk
from mkernel.ops.reduce import all_reduce
from support import operator_calls
from support.operator_calls import assert_same

WAYS = ["matmul_reduce_scatter", "matmul_all_reduce", "sliced", "multicast"]
ONE_NODE = ("multicast",)  # ways that are for one node of several ranks
SMALL = mk.Config(tile_m=16, tile_n=16, tile_k=16)


def name_of(way):
    return "matmul_reduce_scatter" if way == "matmul_reduce_scatter" else "matmul_all_reduce"


def op_of(way):
    return getattr(mk, name_of(way))


def choose(way, monkeypatch):
    """Small results are cut into slices by default, and large ones take multicast from 4 ranks on: choose which way is
    tested."""
    if way != "matmul_reduce_scatter":
        monkeypatch.setattr(all_reduce.plan, "LARGEST_SLICED", 2**30 if way == "sliced" else 0)
        monkeypatch.setattr(all_reduce.plan, "FEWEST_FOR_MULTICAST", 2)
    if way == "multicast":
        monkeypatch.setitem(operator_calls.SIMULATOR, "multicast", True)


@dataclass(frozen=True)
class Sum:
    """The shape of a call: m rows in all; k may be one number per rank. `turn` numbers the calls of a test."""

    m: int
    n: int
    k: int | tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def _values(self, *shape, key):
        generator = torch.Generator().manual_seed(hash(key) % 2**31)
        return torch.randn(*shape, generator=generator).to(self.dtype)

    def depth(self, rank):
        return self.k[rank] if isinstance(self.k, tuple) else self.k

    def a(self, rank, turn=0):
        return self._values(self.m, self.depth(rank), key=(1, rank, turn))

    def b(self, rank, turn=0):
        return self._values(self.depth(rank), self.n, key=(2, rank, turn))

    def bias(self, turn=0):
        return self._values(self.n, key=(3, turn))

    def residual(self, turn=0):
        """All rows of it."""
        return self._values(self.m, self.n, key=(4, turn))

    def exact(self, group, turn=0, *, bias=None, residual=None, reduce_dtype=None, fixed_order=True):
        """The sum in float64, and how far off each element may be: every part, every node's sum and every sum
        that the switch may make travels, and is rounded once, the result once, and fp32 sums at every term."""
        inputs = [(self.a(rank, turn).double(), self.b(rank, turn).double()) for rank in range(group.size)]
        parts = [a @ b for a, b in inputs]
        terms = sum(a.abs() @ b.abs() for a, b in inputs)
        gpus = group.gpus_per_node
        nodes = [sum(parts[node * gpus : (node + 1) * gpus]) for node in range(group.nodes)]
        travelled = sum(part.abs() for part in parts)
        if group.nodes > 1 or not fixed_order:
            travelled = travelled + sum(node.abs() for node in nodes)
        y = sum(parts)
        for more in (bias, residual):
            if more is not None:
                y, terms = y + more.double(), terms + more.double().abs()
        rounded = torch.finfo(reduce_dtype or self.dtype).eps / 2 * travelled
        rounded = rounded + torch.finfo(self.dtype).eps / 2 * y.abs()
        depth = sum(self.depth(rank) for rank in range(group.size)) + group.size + 3
        return y, 1.02 * rounded + depth * 2**-24 * terms


def mine(group, way, tensor):
    """This rank's rows of something with the rows of all ranks; all-reduce keeps them all."""
    if name_of(way) == "matmul_all_reduce":
        return tensor
    rows = tensor.shape[0] // group.size
    return tensor[group.rank * rows : (group.rank + 1) * rows]


def call(group, way, case, turn=0, *, a=None, b=None, bias=False, residual=False, **arguments):
    """One call on this rank, with the case's values; the result and the inputs are checked. bias, residual:
    True for the case's, or the same values in another layout."""
    a = case.a(group.rank, turn) if a is None else a
    b = case.b(group.rank, turn) if b is None else b
    more = {}
    if bias is not False:
        more["bias"] = case.bias(turn) if bias is True else bias
    if residual is not False:
        more["residual"] = mine(group, way, case.residual(turn)).clone() if residual is True else residual
    before = {name: tensor.clone() for name, tensor in (more | {"a": a, "b": b}).items()}
    y = op_of(way)(a, b, group=group, **more, **arguments)
    for name, tensor in (more | {"a": a, "b": b}).items():
        if tensor is not arguments.get("out"):
            assert_same(tensor, before[name])
    check(group, way, case, y, turn, bias="bias" in more, residual="residual" in more,
          reduce_dtype=arguments.get("reduce_dtype"), fixed_order=arguments.get("fixed_order", True))  # fmt: skip
    return y


def check(group, way, case, y, turn=0, *, bias=False, residual=False, reduce_dtype=None, fixed_order=True):
    """Every element within its bound of float64; NaN never passes."""
    exact, bound = case.exact(
        group, turn, bias=case.bias(turn) if bias else None, residual=case.residual(turn) if residual else None,
        reduce_dtype=reduce_dtype, fixed_order=fixed_order,
    )  # fmt: skip
    exact, bound = mine(group, way, exact), mine(group, way, bound)
    assert y.dtype == case.dtype
    assert y.shape == exact.shape
    error = (y.double() - exact).abs()
    assert bool((error <= bound).all()), f"rank {group.rank}: {(error - bound).max().item()} over the bound"
