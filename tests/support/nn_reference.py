"""What the tests of mkernel.nn have in common: plain modules in float64, and bounds of what may differ from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mkernel import nn

WORLDS = [(1, 1), (1, 2), (1, 3), (2, 2)]
FEATURES = 24, 36  # in, out: both divisible by 1, 2, 3 and 4


def assert_within(actual, exact, magnitude, terms, what=""):
    """Every element within its bound of float64; NaN never passes. A sum of `terms` products, whose absolute values add
    up to `magnitude`, is accumulated in fp32, and rounded to the result's dtype up to four times: as the partial of a
    rank, of a node, as the sum, and with what is added to it."""
    assert actual.shape == exact.shape, f"{what}: {tuple(actual.shape)} is not {tuple(exact.shape)}"
    eps = torch.finfo(actual.dtype).eps
    bound = (2 * eps + (terms + 8) * torch.finfo(torch.float32).eps) * magnitude
    error = (actual.detach().double() - exact).abs()
    assert bool((error <= bound).all()), f"{what}: {(error / bound).max().item():.3g} of the bound"


def assert_near(actual, exact, what=""):
    """For results of several layers: the largest error is small beside the largest value, in fp32."""
    assert actual.dtype == torch.float32
    assert actual.shape == exact.shape, f"{what}: {tuple(actual.shape)} is not {tuple(exact.shape)}"
    error = (actual.detach().double() - exact).abs().max()
    bound = 64 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert bool(error <= bound), f"{what}: {(error / bound).item():.3g} of the bound"


def values(*shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class Linear:
    """A parallel linear layer and its input. shape: of the whole input, without the features."""

    kind: str
    sequence_parallel: bool = True
    shape: tuple[int, ...] = (12,)
    sequence_dim: int = 0
    bias: bool = True
    residual: bool = False
    dtype: torch.dtype = torch.float32
    save: str = "sharded"

    def plain(self):
        torch.manual_seed(7)
        return torch.nn.Linear(*FEATURES, self.bias, dtype=self.dtype)

    def module(self, group):
        kind = nn.ColumnParallelLinear if self.kind == "column" else nn.RowParallelLinear
        more = {"save": self.save} if self.kind == "column" else {}
        torch.manual_seed(7)
        return kind(
            *FEATURES, self.bias, group=group, sequence_parallel=self.sequence_parallel,
            sequence_dim=self.sequence_dim, dtype=self.dtype, **more,
        )  # fmt: skip

    def part(self, group, whole, which):
        """This rank's part of the whole input, output or residual, or of their gradients."""
        if which == ("output" if self.kind == "column" else "input"):
            dim = -1
        elif self.sequence_parallel:
            dim = self.sequence_dim
        else:
            return whole
        return whole.chunk(group.size, dim)[group.rank]

    def check(self, group, backward):
        """Run the layer, and compare it with the plain one."""
        plain, module = self.plain(), self.module(group)
        x = values(*self.shape, FEATURES[0], seed=1, dtype=self.dtype)
        grad = values(*self.shape, FEATURES[1], seed=2, dtype=self.dtype)
        residual = values(*self.shape, FEATURES[1], seed=3, dtype=self.dtype) if self.residual else None
        mine = self.part(group, x, "input").clone().requires_grad_(backward)
        given = [mine]
        if residual is not None:
            given.append(self.part(group, residual, "output").clone().requires_grad_(backward))
        with torch.set_grad_enabled(backward):
            y = module(*given)
        assert y.dtype == self.dtype
        x64, w64, grad64 = x.double(), plain.weight.detach().double(), grad.double()
        b64 = plain.bias.detach().double() if self.bias else torch.zeros(FEATURES[1], dtype=torch.float64)
        added = residual.double() if residual is not None else torch.zeros((), dtype=torch.float64)
        exact, magnitude = F.linear(x64, w64, b64) + added, F.linear(x64.abs(), w64.abs(), b64.abs()) + added.abs()
        assert_within(y, *(self.part(group, each, "output") for each in (exact, magnitude)), FEATURES[0], "output")
        if not backward:
            return
        y.backward(self.part(group, grad, "output"))
        rows, grads = x64.flatten(0, -2), grad64.flatten(0, -2)
        exact, magnitude = grad64 @ w64, grad64.abs() @ w64.abs()
        assert_within(
            mine.grad,
            *(self.part(group, each, "input") for each in (exact, magnitude)),
            FEATURES[1],
            "input's gradient",
        )
        exact = {"weight": grads.t() @ rows, "bias": grads.sum(0)}
        magnitude = {"weight": grads.abs().t() @ rows.abs(), "bias": grads.abs().sum(0)}
        for name, parameter in module.named_parameters():
            whole = (module.shard_of(name, each[name]) for each in (exact, magnitude))
            assert_within(parameter.grad, *whole, len(rows), f"{name}'s gradient")
        if residual is not None:
            assert torch.equal(given[1].grad, self.part(group, grad, "output"))


LINEARS = [
    Linear(kind, sequence_parallel, *more)
    for kind in ("column", "row")
    for sequence_parallel in (True, False)
    for more in [((12,), 0), ((2, 12), 1), ((12, 2), 0, False), ((2, 12), -2)]
] + [
    Linear("row", residual=True),
    Linear("row", sequence_parallel=False, residual=True, bias=False),
    Linear("column", shape=(2, 12), sequence_dim=1, save="gathered"),
    *(Linear(kind, sp, dtype=torch.bfloat16) for kind in ("column", "row") for sp in (True, False)),
]  # fmt: skip


class PlainSwiGLU(torch.nn.Module):
    """As in Hugging Face's Llama."""

    def __init__(self, hidden, inner, bias=False):
        super().__init__()
        self.gate_proj = torch.nn.Linear(hidden, inner, bias)
        self.up_proj = torch.nn.Linear(hidden, inner, bias)
        self.down_proj = torch.nn.Linear(inner, hidden, bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainQKV(torch.nn.Module):
    def __init__(self, hidden, heads, kv_heads, head_dim, bias=False):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = torch.nn.Linear(hidden, heads * head_dim, bias)
        self.k_proj = torch.nn.Linear(hidden, kv_heads * head_dim, bias)
        self.v_proj = torch.nn.Linear(hidden, kv_heads * head_dim, bias)

    def forward(self, x):
        return tuple(layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))


@dataclass(frozen=True)
class Block:
    """A SwiGLU or the projections of attention, and its input [batch, sequence, features]."""

    kind: str
    sequence_parallel: bool = True
    bias: bool = True
    save: str = "sharded"
    shape: tuple[int, int] = (2, 12)
    kv_heads: int = 12

    def plain(self):
        torch.manual_seed(7)
        return (
            PlainSwiGLU(24, 36, self.bias) if self.kind == "swiglu" else PlainQKV(24, 24, self.kv_heads, 4, self.bias)
        )

    def module(self, group):
        common = dict(sequence_parallel=self.sequence_parallel, sequence_dim=1, save=self.save, group=group)
        torch.manual_seed(7)
        if self.kind == "swiglu":
            return nn.ParallelSwiGLU(24, 36, self.bias, **common)
        return nn.ParallelQKV(24, 24, self.kv_heads, 4, self.bias, **common)

    def part(self, group, whole, which):
        """This rank's part of the input or of an output, or of their gradients: of the sequence, or of the heads."""
        if which == "output" and self.kind == "qkv":
            replicas = max(group.size // whole.shape[-2], 1)  # of a head of the keys
            return whole.chunk(group.size // replicas, -2)[group.rank // replicas]
        return whole.chunk(group.size, 1)[group.rank] if self.sequence_parallel else whole

    def check(self, group, backward):
        """Run the block, and compare it with the plain one."""
        plain, module = self.plain().double(), self.module(group)
        x = values(*self.shape, 24, seed=1)
        mine = self.part(group, x, "input").clone().requires_grad_(backward)
        whole = x.double().requires_grad_()
        with torch.set_grad_enabled(backward):
            results, exact = module(mine), plain(whole)
        if self.kind == "swiglu":
            results, exact = [results], [exact]
        grads = [values(*each.shape, seed=20 + i) for i, each in enumerate(exact)]
        for i, (result, each) in enumerate(zip(results, exact, strict=True)):
            assert_near(result, self.part(group, each.detach(), "output"), f"output {i}")
        if not backward:
            return
        # ranks that have the same keys use them for different queries, so their gradients differ
        replicas = [max(group.size // each.shape[-2], 1) if self.kind == "qkv" else 1 for each in exact]
        shares = [self.part(group, grad, "output") * (1 + group.rank % each) for grad, each in zip(grads, replicas)]
        torch.autograd.backward(results, shares)
        sums = [grad.double() * (each * (each + 1) / 2) for grad, each in zip(grads, replicas)]
        torch.autograd.backward(exact, sums)
        assert_near(mine.grad, self.part(group, whole.grad, "input"), "input's gradient")
        for name, parameter in module.named_parameters():
            owner, _, own = name.rpartition(".")
            shard = module.get_submodule(owner).shard_of(own, plain.get_parameter(name).grad)
            assert_near(parameter.grad, shard, f"gradient of {name}")


BLOCKS = [
    *(Block(kind, sequence_parallel) for kind in ("swiglu", "qkv") for sequence_parallel in (True, False)),
    Block("swiglu", bias=False, save="gathered"),
    Block("qkv", sequence_parallel=False, bias=False),
    Block("qkv", kv_heads=1),
    Block("qkv", sequence_parallel=False, kv_heads=1, bias=False),
]


class Residual(torch.nn.Module):
    """A layer of a transformer without its attention: x + mlp(norm(x))."""

    def __init__(self, mlp):
        super().__init__()
        self.norm = torch.nn.RMSNorm(24)
        self.mlp = mlp

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def check_two_layers(group, sequence_parallel, wrap=lambda module: module):
    """Two layers with norms between them, as `wrap` returns them: twice forward and backward."""
    torch.manual_seed(1)
    plain = torch.nn.Sequential(*(Residual(PlainSwiGLU(24, 36)) for _ in range(2))).double()
    torch.manual_seed(1)
    common = dict(sequence_parallel=sequence_parallel, sequence_dim=1, group=group)
    layers = torch.nn.Sequential(*(Residual(nn.ParallelSwiGLU(24, 36, **common)) for _ in range(2)))
    if sequence_parallel:
        for layer in layers:
            nn.sum_gradients(layer.norm, group=group)
    x, grad = values(2, 12, 24, seed=1), values(2, 12, 24, seed=2)
    exact = plain(x.double())
    exact.backward(grad.double())

    def part(whole):
        return whole.chunk(group.size, 1)[group.rank] if sequence_parallel else whole

    wrapped = wrap(layers)
    for _ in range(2):
        layers.zero_grad()
        y = wrapped(part(x))
        assert_near(y, part(exact.detach()), "output")
        y.backward(part(grad))
        for name, parameter in layers.named_parameters():
            owner, _, own = name.rpartition(".")
            module, whole = layers.get_submodule(owner), plain.get_parameter(name).grad
            shard = module.shard_of(own, whole) if isinstance(module, nn.ParallelModule) else whole
            assert_near(parameter.grad, shard, f"gradient of {name}")
