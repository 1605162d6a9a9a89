"""What whole layers call, for `mkernel plan`: the operators and the products that stay on a rank.

A layer is over all ranks of a group: tensor-parallel with the sequence divided among them (mlp), or context-parallel
(attention), or expert-parallel (moe).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

HEAD_DIM = 128
TOPK = 8  # experts of a token, as the models of the operators take it


@dataclass(frozen=True)
class Part:
    """One call of a layer. op: the operator, or "" for products that the library computes on a rank. shape: of the
    operator, as for bench; flops: of a rank, where there is no operator, and library: by which of its products."""

    name: str
    op: str = ""
    shape: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    flops: float = 0.0
    library: str = "gemm"


@dataclass(frozen=True)
class Layer:
    """dimensions: what the numbers of its shape are. parts: by what some of them must be divisible, with so many ranks.
    forward, backward: (shape, ranks) -> its parts."""

    dimensions: tuple[str, ...]
    shape: tuple[int, ...]
    forward: Callable[[tuple[int, ...], int], list[Part]]
    backward: Callable[[tuple[int, ...], int], list[Part]]
    parts: dict[str, Callable[[int], int]] = field(default_factory=dict)


def _mlp(shape: tuple[int, ...], ranks: int) -> list[Part]:
    tokens, hidden, inter = shape
    return [
        Part("gate and up", "all_gather_matmul", (tokens, 2 * inter // ranks, hidden)),
        Part("down", "matmul_reduce_scatter", (tokens, hidden, inter)),
    ]


def _mlp_backward(shape: tuple[int, ...], ranks: int) -> list[Part]:
    """Gradients of the rows. That of a weight takes another product of the same size: that of down is local, on rows
    that are gathered anyway; that of gate and up gathers once more."""
    tokens, hidden, inter = shape
    return [
        Part("rows of down", "all_gather_matmul", (tokens, inter // ranks, hidden)),
        Part("weight of down", flops=2.0 * tokens * hidden * inter / ranks),
        Part("rows of gate and up", "matmul_reduce_scatter", (tokens, hidden, 2 * inter)),
        # all_gather_matmul_weight_grad: it moves and multiplies as much as the forward call
        Part("weight of gate and up, as forward", "all_gather_matmul", (tokens, 2 * inter // ranks, hidden)),
    ]


def _attention(shape: tuple[int, ...], ranks: int) -> list[Part]:
    tokens, hidden, kv_heads = shape
    heads, own = hidden // HEAD_DIM, tokens // ranks
    options = {"causal": True, "zigzag": True, "kv_heads": kv_heads}
    return [
        Part("query, key and value", flops=2.0 * own * hidden * (heads + 2 * kv_heads) * HEAD_DIM),
        Part("attention", "ring_attention", (1, heads, tokens, HEAD_DIM), options),
        Part("output", flops=2.0 * own * hidden * hidden),
    ]


def _attention_backward(shape: tuple[int, ...], ranks: int) -> list[Part]:
    """The gradients of a product take two of its size."""
    before, attention, after = _attention(shape, ranks)
    return [
        replace(after, flops=2 * after.flops),
        replace(attention, op="ring_attention_backward"),
        replace(before, flops=2 * before.flops),
    ]


def _moe(shape: tuple[int, ...], ranks: int) -> list[Part]:
    tokens, hidden, inter = shape
    return [Part("experts", "moe_ffn", (tokens, inter, hidden))]


def _moe_backward(shape: tuple[int, ...], ranks: int) -> list[Part]:
    """The launches of ops/moe/backward.py, if only the inputs are kept. A combine is taken as a dispatch, with a
    product of few columns; the combine of the gradients of weights, 64 bytes for each row, and the pass over dgate and
    dup are left out."""
    tokens, hidden, inter = shape
    product = 2.0 * tokens * TOPK / ranks * hidden * inter
    return [
        Part("rows of down", "moe_dispatch_matmul", (tokens, inter, hidden)),
        Part("gate and up again", "moe_dispatch_matmul", (tokens, 2 * inter, hidden)),
        Part("weights", flops=3 * product, library="grouped"),
        Part("rows of gate and up", flops=2 * product, library="grouped"),
        Part("combine, as a dispatch", "moe_dispatch_matmul", (tokens, HEAD_DIM, hidden)),
    ]


def _ranks(ranks: int) -> int:
    return ranks


LAYERS = {
    "mlp": Layer(
        ("tokens", "hidden", "inter"), (32768, 8192, 28672), _mlp, _mlp_backward, {"tokens": _ranks, "inter": _ranks}
    ),
    "attention": Layer(
        ("tokens", "hidden", "kv_heads"),
        (131072, 8192, 8),
        _attention,
        _attention_backward,
        parts={"tokens": lambda ranks: 2 * ranks, "hidden": lambda ranks: HEAD_DIM},  # two chunks each: zigzag
    ),
    "moe": Layer(("tokens", "hidden", "inter"), (32768, 7168, 2048), _moe, _moe_backward, {"tokens": _ranks}),
}
