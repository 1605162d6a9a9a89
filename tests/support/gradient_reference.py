"""Gradients of the differentiable operators, next to plain PyTorch in float64 on one device.

A case is a call on every rank. Every rank can make the inputs of all ranks, computes what all of them should get, and
compares its own results and gradients. The loss is the sum over ranks of each rank's own loss; the results of
matmul_all_reduce are the same on every rank, so their loss counts once.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, fields

import torch

import mkernel as mk
from support.operator_calls import assert_same

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
SMALL = mk.Config(tile_m=16, tile_n=16, tile_k=16)
SHARED = {GATHER: (), SCATTER: ("bias",), REDUCE: ("bias", "residual")}  # inputs that are the same on every rank

# name -> the same values in another layout; NaN lies where the tensor has gaps
LAYOUTS = {
    "plain": lambda values: values.clone(),
    "transposed": lambda values: values.mT.contiguous().mT,
    "reversed": lambda values: values.permute(*range(values.dim())[::-1]).contiguous().permute(
        *range(values.dim())[::-1]
    ),
    "gaps": lambda values: _with_gaps(values)[..., 1::2],
    "wide": lambda values: torch.nn.functional.pad(values, (3, 10), value=float("nan"))[..., 3:-10],
}  # fmt: skip


def _with_gaps(values):
    return torch.stack([torch.full_like(values, float("nan")), values], -1).flatten(-2)


@dataclass(frozen=True)
class Case:
    """A call of an operator on every rank.

    a: the shape of a, [..., k]; k may be one number per rank. n: columns of b, one number per rank for
    all_gather_matmul, or a list of numbers, which makes a list of b. adjoined: they lie side by side in memory, laid
    out as b0. requires: the inputs that require grad; of a list, b0, b1 and so on. used: which results the loss depends
    on; y, or y0, y1 and so on, and gathered. layouts: of inputs and of the gradients of results, by name.
    """

    op: str
    a: tuple
    n: object
    dtype: torch.dtype = torch.float32
    dim: int = 0
    bias: bool = False
    residual: bool = False
    requires: tuple = ("a", "b", "bias", "residual")
    used: tuple = ("y",)
    layouts: dict = field(default_factory=dict, hash=False)
    options: dict = field(default_factory=dict, hash=False)
    seed: int = 0
    adjoined: bool = False

    def __str__(self):
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "op"}
        usual = Case(self.op, self.a, self.n)
        shown = [f"{name}={value}" for name, value in given.items() if name in "an" or value != getattr(usual, name)]
        return f"{self.op}({', '.join(shown)})"

    # -- values

    @property
    def several(self):
        return isinstance(self.n, list)

    @property
    def weights(self):
        """The names of the matrices that are multiplied."""
        return [f"b{i}" for i in range(len(self.n))] if self.several else ["b"]

    def leading(self):
        return self.a[:-1]

    def depth(self, rank):
        return self.a[-1][rank] if isinstance(self.a[-1], tuple) else self.a[-1]

    def columns(self, rank, weight="b"):
        if self.several:
            return self.n[int(weight[1:])]
        return self.n[rank] if isinstance(self.n, tuple) else self.n

    def _values(self, name, rank, shape):
        key = 0 if name in SHARED[self.op] else rank + 1
        seed = zlib.crc32(repr((name, key, self.seed)).encode())
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def inputs(self, rank, size):
        """The values of the inputs of a rank, by name."""
        shapes = {"a": (*self.leading(), self.depth(rank))}
        shapes |= {name: (self.depth(rank), self.columns(rank, name)) for name in self.weights}
        if self.bias:
            shapes["bias"] = (self.columns(rank),)
        if self.residual:
            shape = [*self.leading(), self.columns(rank)]
            shape[self.dim] //= size if self.op == SCATTER else 1
            shapes["residual"] = tuple(shape)
        return {name: self._values(name, rank, shape) for name, shape in shapes.items()}

    def cotangents(self, rank, results):
        """The gradients of the results that the loss depends on. Those of matmul_all_reduce are the same everywhere."""
        key = 0 if self.op == REDUCE else rank
        return {name: self._values("d" + name, key, tuple(results[name].shape)) for name in self.used}

    # -- the call

    def tensors(self, group):
        """This rank's inputs, laid out as the case says, with what requires grad."""
        made, inputs = {}, self.inputs(group.rank, group.size)
        if self.adjoined:
            each = [inputs[name] for name in self.weights]
            whole = LAYOUTS[self.layouts.get("b0", "plain")](torch.cat(each, dim=1).to(group.device))
            columns = whole.detach().split([values.shape[1] for values in each], dim=1)
        for name, values in inputs.items():
            if self.adjoined and name in self.weights:
                made[name] = columns[self.weights.index(name)].detach()
                made[name].requires_grad_("b" in self.requires or name in self.requires)
                continue
            tensor = LAYOUTS[self.layouts.get(name, "plain")](values.to(group.device)).detach()
            all_of_a_list = "b" in self.requires and name in self.weights
            made[name] = tensor.requires_grad_(name in self.requires or all_of_a_list)
        return made

    def depends_on(self, name):
        """Does the loss depend on this input?"""
        if name == "a":
            return True
        return "y" + name[1:] in self.used if name in self.weights else "y" in self.used

    def call(self, group, tensors):
        """The results by name: y, or y0, y1 and so on, and gathered."""
        more = {name: tensors[name] for name in ("bias", "residual") if name in tensors}
        if self.dim != 0:
            more["gather_dim" if self.op == GATHER else "scatter_dim"] = self.dim
        right = [tensors[name] for name in self.weights] if self.several else tensors["b"]
        y = getattr(mk, self.op)(tensors["a"], right, group=group, **more, **self.options)
        results = {}
        if self.options.get("return_gathered"):
            y, results["gathered"] = y
        return results | ({f"y{i}": each for i, each in enumerate(y)} if self.several else {"y": y})

    # -- what it should be

    def whole(self, size, transform=lambda values: values):
        """The inputs of all ranks in float64, and the results of all ranks, in plain PyTorch."""
        leaves = [
            {name: transform(v.double()).requires_grad_() for name, v in self.inputs(rank, size).items()}
            for rank in range(size)
        ]
        for name in SHARED[self.op]:
            for rank in range(1, size):
                if name in leaves[0]:
                    leaves[rank][name] = leaves[0][name]
        return leaves, [self._reference(leaves, rank) for rank in range(size)]

    def _reference(self, leaves, rank):
        mine = leaves[rank]
        if self.op == GATHER:
            gathered = torch.cat([each["a"] for each in leaves], dim=self.dim)
            ys = [gathered @ mine[name] + mine.get("bias", 0) for name in self.weights]
            return {f"y{i}" if self.several else "y": y for i, y in enumerate(ys)} | {"gathered": gathered}
        total = sum(each["a"] @ each["b"] for each in leaves) + mine.get("bias", 0)
        if self.op == SCATTER:
            total = total.chunk(len(leaves), dim=self.dim)[rank]
        return {"y": total + mine.get("residual", 0)}

    def terms(self, size):
        """No sum in a call or in its gradients has more terms."""
        rows = 1
        for dimension in self.leading():
            rows *= dimension
        depth = sum(self.depth(rank) for rank in range(size))
        columns = sum(self.columns(rank, name) for rank in range(size) for name in self.weights)
        return max(size * rows, depth, columns) + 8

    def expected(self, rank, size):
        """What a rank should get: by name, (exact result, bound), and the same for the gradients of its inputs."""
        runs = []
        for transform in (lambda values: values, torch.Tensor.abs):
            leaves, results = self.whole(size, transform)
            runs.append((leaves, results, [
                (results[r][name] * transform(cotangent.double())).sum()
                for r in range(1 if self.op == REDUCE else size)
                for name, cotangent in self.cotangents(r, results[r]).items()
            ]))  # fmt: skip
        (leaves, results, losses), (sizes, magnitudes, total) = runs
        bound = Bound(self.dtype, self.terms(size))
        ys = {name: (y.detach(), bound(magnitudes[rank][name], self.travelled(leaves, rank, name)))
              for name, y in results[rank].items()}  # fmt: skip
        gradients = {}
        for name, leaf in leaves[rank].items():
            parts = [_gradient(loss, leaf) for loss in losses]
            magnitude = sum(_gradient(loss, sizes[rank][name]) for loss in total)
            gradients[name] = (sum(parts), bound(magnitude, sum(part.abs() for part in parts)))
        return ys, gradients

    def travelled(self, leaves, rank, name):
        """The sum of the absolute values of what ranks send each other, or round otherwise, on the way to a result."""
        if name == "gathered":
            return torch.zeros(())
        if self.op == GATHER:
            right = leaves[rank]["b" + name[1:]]
            gathered = torch.cat([each["a"] for each in leaves], dim=self.dim)
            return (gathered @ right).abs() + abs(leaves[rank].get("bias", 0))
        parts = sum((each["a"] @ each["b"]).abs() for each in leaves)
        if self.op == SCATTER:
            parts = parts.chunk(len(leaves), dim=self.dim)[rank]
        return parts + abs(leaves[rank].get("bias", 0)) + abs(leaves[rank].get("residual", 0))


def _gradient(loss, leaf):
    (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True, retain_graph=True)
    return torch.zeros_like(leaf) if gradient is None else gradient


@dataclass(frozen=True)
class Bound:
    """How far a result may be off: what travels between ranks is rounded once on its way to its node's sum and once
    behind it, the result twice, and sums in fp32 at every term."""

    dtype: torch.dtype
    terms: int

    def __call__(self, magnitude, travelled):
        kind = torch.finfo(self.dtype)
        rounded = 1.02 * kind.eps / 2 * 4 * travelled
        return (rounded + self.terms * 2**-24 * magnitude + kind.smallest_normal * kind.eps).detach()


def assert_within(what, actual, exact, bound, dtype):
    """Every element is within its bound; NaN never passes."""
    assert actual is not None, f"{what} is missing"
    assert actual.dtype == dtype, f"{what} is {actual.dtype}"
    assert actual.shape == exact.shape, f"{what} has shape {tuple(actual.shape)}, not {tuple(exact.shape)}"
    error = (actual.detach().double().cpu() - exact).abs()
    assert bool((error <= bound).all()), f"{what} is off by {error.max():.3g}, {(error - bound).max():.3g} too much"


def check(group, case, *, twice=True):
    """The results and gradients of a call on this rank are within bounds, the inputs are untouched, and the gradients
    are laid out as the inputs are; the same bits once more. Returns the gradients by name."""
    before = case.inputs(group.rank, group.size)
    found = run(group, case)
    group.synchronize()
    ys, gradients = case.expected(group.rank, group.size)
    for name, y in found.results.items():
        assert_within(f"rank {group.rank}: {case}: {name}", y, *ys[name], case.dtype)
    for name, tensor in found.tensors.items():
        assert_same(tensor.detach().cpu(), before[name])
        if tensor.requires_grad and case.depends_on(name):
            what = f"rank {group.rank}: {case}: gradient of {name}"
            assert_within(what, tensor.grad, *gradients[name], case.dtype)
            dense = not (case.adjoined and name in case.weights) or tensor.stride(0) == 1
            if case.layouts.get(name, "plain") in ("plain", "transposed", "reversed") and dense:
                assert strides(tensor.grad) == strides(tensor), f"{what} has strides {tensor.grad.stride()}"
        else:
            others = case.several and name in case.weights and any(each != "gathered" for each in case.used)
            if others and tensor.requires_grad:  # other results are used: all of them have one gradient
                assert not tensor.grad.any(), f"{case}: {name} has a gradient"
            else:
                assert tensor.grad is None, f"{case}: {name} has a gradient"
    if twice:
        again = run(group, case)
        for name, y in found.results.items():
            assert_same(again.results[name].detach(), y.detach())
        for name, tensor in found.tensors.items():
            if tensor.grad is not None:
                assert_same(again.tensors[name].grad, tensor.grad)
    return {name: tensor.grad for name, tensor in found.tensors.items()}


def strides(tensor):
    """Those that matter."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape) if size > 1]


@dataclass
class Run:
    tensors: dict
    results: dict


def run(group, case):
    """One call, forward and backward."""
    tensors = case.tensors(group)
    results = case.call(group, tensors)
    cotangents = case.cotangents(group.rank, results)
    layout = LAYOUTS[case.layouts.get("dy", "plain")]
    ys = [results[name] for name in cotangents]
    torch.autograd.backward(ys, [layout(value.to(group.device)) for value in cotangents.values()])
    return Run(tensors, results)
