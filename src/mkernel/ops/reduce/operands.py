"""The kernel arguments that both operators share: what to multiply, where the result goes, how fast the links are.

Triton can compile, but not launch, a kernel with a tensor descriptor inside a structure. So the matrices are separate
parameters, `a, b, c, residual`. The `Call` that the host builds has the `Strides` of each, and `with_matrices`
combines both into a `Matrix`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.matrix import Matrix, Strides, Tiling
from mkernel.lang.order import swizzle_tile
from mkernel.ops.reduce.call import Plan, Sum
from mkernel.runtime.group import Group, Workspace
from mkernel.runtime.operands import constants, descriptor
from mkernel.runtime.scaling import with_scales


class Product(NamedTuple):
    """This rank's product, a [parts, rows, k] @ b [k, n], and its tiling."""

    a: Any  # Matrix
    b: Any  # Matrix
    rows: Any  # of one part
    n: Any
    k: Any
    tiling: Any  # Tiling


class Result(NamedTuple):
    """The result c [rows, n], and what is added to the sum. The blocks of the descriptors of c and of the residual are
    half a tile wide."""

    c: Any  # Matrix
    bias: Any  # pointer to n elements; None unless BIAS
    bias_stride: Any
    residual: Any  # Matrix like c; its data is None unless RESIDUAL
    BIAS: Any
    RESIDUAL: Any


class Link(NamedTuple):
    """The rate at which one CTA may push. Links are paced only for measurements."""

    nanoseconds_per_mib: Any
    PACED: Any


class Call(NamedTuple):
    """The arguments of a kernel, apart from the matrices."""

    product: Any  # Product
    result: Any  # Result
    exchange: Any  # the operator's arrays in its workspace: see its protocol.py
    link: Any  # Link


@triton.jit
def with_matrices(comm, call, a, b, c, residual, BODY: tl.constexpr):
    """Run BODY(comm, call) with the data of the matrices filled in."""
    BODY(
        comm,
        Call(
            Product(
                Matrix(a, call.product.a), Matrix(b, call.product.b),
                call.product.rows, call.product.n, call.product.k, call.product.tiling,
            ),
            Result(
                Matrix(c, call.result.c), call.result.bias, call.result.bias_stride,
                Matrix(residual, call.result.residual), call.result.BIAS, call.result.RESIDUAL,
            ),
            call.exchange,
            call.link,
        ),
    )  # fmt: skip


@triton.jit
def count_tiles(product):
    """The number of tiles of one part of the product."""
    return tl.cdiv(product.rows, product.tiling.M) * tl.cdiv(product.n, product.tiling.N)


@triton.jit
def count_steps(product):
    """The number of k-steps of a tile; at least one, so that a rank with an empty k still takes part."""
    return tl.maximum(tl.cdiv(product.k, product.tiling.K), 1)


@triton.jit
def tile_corner(product, tile):
    """(row, column) of a tile's upper left corner in its part."""
    row_blocks = tl.cdiv(product.rows, product.tiling.M)
    column_blocks = tl.cdiv(product.n, product.tiling.N)
    block, column_block = swizzle_tile(tile, row_blocks, column_blocks, product.tiling.GROUP)
    return block * product.tiling.M, column_block * product.tiling.N


def call_of(group: Group, plan: Plan, call: Sum, parts: int, exchange: Any) -> Call:
    """The kernel arguments of a call. The rows of a form `parts` equal parts, one below the other."""
    a, b, out, residual, c = call.a, call.b, call.out, call.residual, plan.config
    rows = a.shape[0] // parts
    strides = residual.stride() if residual is not None else (0, 0)
    scales_a, scales_b = (None, None) if call.scaling is None else (call.scaling.of_a(rows), call.scaling.of_b())
    return Call(
        Product(
            a=with_scales(Strides(rows * a.stride(0), *a.stride(), *constants(plan.a_uses_tma, False)), scales_a),
            b=plan.right.strides(b, scales_b),
            rows=rows,
            n=b.shape[1],
            k=a.shape[1],
            tiling=Tiling(*constants(c.tile_m, c.tile_n, c.tile_k, c.group_m, plan.precision)),
        ),
        Result(
            Strides(0, *out.stride(), *constants(plan.out_uses_tma, False)),
            call.bias,
            call.bias.stride(0) if call.bias is not None else 0,
            Strides(0, *strides, *constants(plan.residual_uses_tma, False)),
            *constants(call.bias is not None, residual is not None),
        ),
        exchange,
        link_of(group, plan),
    )


def matrices_of(plan: Plan, call: Sum, parts: int) -> dict[str, Any]:
    """The matrices as kernel arguments: tensor descriptors, or tensors to be accessed through pointers."""
    c = plan.config
    a, out, residual = call.a, call.out, call.residual
    m, k = a.shape
    rows = m // parts

    def by_rows(tensor: torch.Tensor) -> Any:
        return descriptor(tensor, [1, *tensor.shape], [0, tensor.stride(0), 1], [1, c.tile_m, c.tile_n // 2])

    data: Any = a
    if plan.a_uses_tma:
        data = descriptor(a, [parts, rows, k], [rows * a.stride(0), a.stride(0), 1], [1, c.tile_m, c.tile_k])
    return dict(
        a=data,
        b=plan.right.operand(call.b, c.tile_n, c.tile_k),
        c=by_rows(out) if plan.out_uses_tma else out,
        residual=by_rows(residual) if residual is not None and plan.residual_uses_tma else residual,
    )


def link_of(group: Group, plan: Plan) -> Link:
    """One CTA's share of this rank's link."""
    nvlink = group.world.links.nvlink if group.gpus_per_node > 1 else None  # GB/s
    return Link(round(2**20 * plan.config.ctas / nvlink) if nvlink else 0, *constants(nvlink is not None))


def variant_of(plan: Plan, workspace: Workspace) -> Hashable:
    """The key of a launch's binary: launches with the same key run the same one. It includes sizes of the workspace,
    because Triton specializes binaries on the divisibility of integers."""
    return plan, workspace.signal_words, workspace.half_bytes


# For the simulator: which tensors kernels only read, and which they write.
INPUTS = (
    "a", "b", "residual", "call.result.bias", "call.product.a.scales.data", "call.product.b.scales.data",
)  # fmt: skip
RESULTS = ("c",)
