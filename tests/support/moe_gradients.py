"""Gradients of the mixture-of-experts operators: references in float64, and calls that check every gradient."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

import mkernel as mk
from support.broken_variants import SimulatedCalls
from support.moe_reference import Layer, activation_of, assert_sum

SLOPE = (
    1.2  # bound on the derivative of an activation; those of silu and gelu change by less than 1.2 of their argument
)


def gradient_of(layer: Layer, rank, turn, columns):
    """The gradient of a result with a row for each token."""
    return layer._values(layer.tokens[rank], columns, key=(7, rank, turn))


def leaves(layer, names, turn):
    """The inputs of all ranks in float64: name -> tensors by rank."""
    made = {name: [getattr(layer, name)(rank, turn).double() for rank in range(layer.size)] for name in names}
    if "weights" in made:
        made["weights"] = [each.nan_to_num(0.0) for each in made["weights"]]
    return {name: [each.requires_grad_() for each in everyone] for name, everyone in made.items()}


def _with_biases(layer, names, biases):
    return (*names, *biases) if layer.has_bias else names


def _bias(values, name, owner, expert):
    return values[name][owner][expert] if name in values else torch.zeros((), dtype=torch.float64)


def _slots(layer, turn):
    """(source, token, slot, owner, expert of the owner) of every row."""
    for source in range(layer.size):
        ids = layer.ids(source, turn)
        for token, slot in (ids >= 0).nonzero().tolist():
            expert = int(ids[token, slot])
            owner = max(rank for rank in range(layer.size) if layer.first(rank) <= expert and layer.experts[rank])
            yield source, token, slot, owner, expert - layer.first(owner)


def _grads(values):
    return {name: [each.grad if each.grad is not None else torch.zeros_like(each) for each in everyone]
            for name, everyone in values.items()}  # fmt: skip


@functools.cache
def exact_ffn(layer: Layer, turn=0):
    """name -> (exact gradients, bounds on the sizes of the terms that they are sums of), by rank."""
    names = _with_biases(layer, ("x", "weights", "gate_up", "down"), ("b_gate_up", "b_down"))
    values = leaves(layer, names, turn)
    sizes = {name: [torch.zeros_like(each) for each in everyone] for name, everyone in values.items()}
    loss = torch.zeros((), dtype=torch.float64)
    for source, token, slot, owner, expert in _slots(layer, turn):
        dout = gradient_of(layer, source, turn, layer.hidden)[token].double()
        x, p = values["x"][source][token], values["weights"][source][token, slot]
        gate_up, down = values["gate_up"][owner][expert], values["down"][owner][expert]
        before, after = (_bias(values, name, owner, expert) for name in ("b_gate_up", "b_down"))
        gate, up = (x @ gate_up + before).chunk(2)
        loss = loss + p * ((activation_of(layer.activation)(gate) * up) @ down + after) @ dout
        with torch.no_grad():
            gate, up = (x.abs() @ gate_up.abs() + before.abs()).chunk(2)
            value, slope = (gate.square(), 2 * gate) if layer.activation == "relu2" else (gate, SLOPE * (1 + gate))
            d, inner = down.abs() @ dout.abs(), value * up
            dpre = p.abs() * torch.cat([d * up * slope, d * value])
            sizes["x"][source][token] += gate_up.abs() @ dpre
            sizes["weights"][source][token, slot] += d @ inner + (after.abs() * dout.abs()).sum()
            if layer.has_bias:
                sizes["b_gate_up"][owner][expert] += dpre
                sizes["b_down"][owner][expert] += p.abs() * dout.abs()
            sizes["gate_up"][owner][expert] += torch.outer(x.abs(), dpre)
            sizes["down"][owner][expert] += torch.outer(p.abs() * inner, dout.abs())
    if loss.requires_grad:
        loss.backward()
    return _grads(values), sizes


@functools.cache
def exact_halves(layer: Layer, turn=0):
    """The same of a dispatch with GEMM, then a combine."""
    values = leaves(layer, _with_biases(layer, ("x", "weights", "w"), ("bias",)), turn)
    sizes = {name: [torch.zeros_like(each) for each in everyone] for name, everyone in values.items()}
    loss = torch.zeros((), dtype=torch.float64)
    for source, token, slot, owner, expert in _slots(layer, turn):
        dout = gradient_of(layer, source, turn, layer.out)[token].double()
        x, p, w = values["x"][source][token], values["weights"][source][token, slot], values["w"][owner][expert]
        bias = _bias(values, "bias", owner, expert)
        loss = loss + p * (x @ w + bias) @ dout
        with torch.no_grad():
            sizes["x"][source][token] += p.abs() * (w.abs() @ dout.abs())
            sizes["weights"][source][token, slot] += ((x.abs() @ w.abs() + bias.abs()) * dout.abs()).sum()
            if layer.has_bias:
                sizes["bias"][owner][expert] += p.abs() * dout.abs()
            sizes["w"][owner][expert] += p.abs() * torch.outer(x.abs(), dout.abs())
    if loss.requires_grad:
        loss.backward()
    return _grads(values), sizes


def assert_gradient(name, gradient, exact, size, dtype):
    """Values are rounded a few times on their way, and sums in fp32 at every term."""
    eps = torch.finfo(dtype).eps
    bound = (40 if dtype == torch.float32 else 8) * eps * size + 1e-30
    assert gradient.shape == exact.shape, name
    error = (gradient.double() - exact).abs()
    assert bool((error <= bound).all()), f"{name}: largest error {error.max()}, bound there {bound[error > bound][:1]}"


def check_all(layer, rank, gradients, exact):
    found, sizes = exact
    for name, gradient in gradients.items():
        assert_gradient(name, gradient.cpu(), found[name][rank], sizes[name][rank], layer.dtype)


@functools.cache
def exact_rows(layer: Layer, turn=0):
    """The same of a dispatch, a function of each element (`some_function`), then a combine."""
    values = leaves(layer, ("x", "weights"), turn)
    sizes = {name: [torch.zeros_like(each) for each in everyone] for name, everyone in values.items()}
    loss = torch.zeros((), dtype=torch.float64)
    for source, token, slot, _, _ in _slots(layer, turn):
        dout = gradient_of(layer, source, turn, layer.hidden)[token].double()
        x, p = values["x"][source][token], values["weights"][source][token, slot]
        loss = loss + p * some_function(x) @ dout
        with torch.no_grad():
            sizes["x"][source][token] += p.abs() * 2 * (1 + x.abs()) * dout.abs()
            sizes["weights"][source][token, slot] += (some_function(x).abs() * dout.abs()).sum()
    if loss.requires_grad:
        loss.backward()
    return _grads(values), sizes


def some_function(x):
    return x * x + x


# -- calls on one rank


def leaf(group, tensor):
    return tensor.to(group.device).requires_grad_()


def ffn_gradients(group, layer, turn=0, *, transposed=False, **arguments):
    """Forward and backward pass of moe_ffn, with every gradient checked."""
    rank = group.rank
    x, weights = leaf(group, layer.x(rank, turn)), leaf(group, layer.weights(rank, turn))
    ids, dout = layer.ids(rank, turn).to(group.device), gradient_of(layer, rank, turn, layer.hidden).to(group.device)
    gate_up, down = layer.gate_up(rank, turn), layer.down(rank, turn)
    if transposed:
        gate_up, down = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (gate_up, down))
    gate_up, down = leaf(group, gate_up), leaf(group, down)
    biases = {name: leaf(group, bias) for name, bias in layer.biases(rank, turn).items() if bias is not None}
    out = mk.moe_ffn(x, ids, weights, gate_up, down, group=group, activation=layer.activation, **biases, **arguments)
    out.backward(dout)
    group.synchronize()
    if layer.tokens[rank]:
        assert_sum(out.detach().cpu(), *layer.ffn(rank, turn), layer.hidden + layer.out)
    gradients = dict(x=x.grad, weights=weights.grad, gate_up=gate_up.grad, down=down.grad)
    gradients |= {name: bias.grad for name, bias in biases.items()}
    check_all(layer, rank, gradients, exact_ffn(layer, turn))
    for w in (gate_up, down):
        assert w.grad.stride() == w.stride()
    return [out.detach(), *gradients.values()]


def halves_gradients(group, layer, turn=0, **arguments):
    """The same of moe_dispatch_matmul and moe_combine."""
    rank = group.rank
    x, weights, w = (leaf(group, each(rank, turn)) for each in (layer.x, layer.weights, layer.w))
    ids, dout = layer.ids(rank, turn).to(group.device), gradient_of(layer, rank, turn, layer.out).to(group.device)
    bias = leaf(group, layer.bias(rank, turn)) if layer.has_bias else None
    y, handle = mk.moe_dispatch_matmul(x, ids, w, group=group, bias=bias, **arguments)
    y.retain_grad()
    out = mk.moe_combine(y, handle, weights, group=group)
    out.backward(dout)
    group.synchronize()
    if layer.tokens[rank]:
        assert_sum(out.detach().cpu(), *layer.combined(rank, turn), layer.hidden)
    assert not y.grad[int(handle.counts.sum()) :].any()
    gradients = dict(x=x.grad, weights=weights.grad, w=w.grad) | (dict(bias=bias.grad) if layer.has_bias else {})
    check_all(layer, rank, gradients, exact_halves(layer, turn))
    return [out.detach(), *gradients.values()]


def rows_gradients(group, layer, turn=0, **arguments):
    """The same of moe_dispatch, `some_function`, and moe_combine."""
    rank = group.rank
    x, weights = (leaf(group, each(rank, turn)) for each in (layer.x, layer.weights))
    ids, dout = layer.ids(rank, turn).to(group.device), gradient_of(layer, rank, turn, layer.hidden).to(group.device)
    y, handle = mk.moe_dispatch(x, ids, layer.experts[rank], group=group, **arguments)
    out = mk.moe_combine(some_function(y), handle, weights, group=group)
    out.backward(dout)
    group.synchronize()
    check_all(layer, rank, dict(x=x.grad, weights=weights.grad), exact_rows(layer, turn))
    return [out.detach(), x.grad, weights.grad]


@dataclass(frozen=True)
class Trains(SimulatedCalls):
    """Forward and backward passes of moe_ffn, for broken variants."""

    layer: Layer | None = None
    save: str = "inputs"
    op = "moe_dispatch_matmul"

    def work(self, group):
        for turn in range(self.calls):
            ffn_gradients(group, self.layer, turn, save=self.save, max_tokens=12)
