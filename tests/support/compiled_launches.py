"""Launches of operators, for tests that compile them with no GPU."""

from dataclasses import replace

import torch

from mkernel.compiling import launched
from mkernel.ops import all_gather_matmul
from mkernel.ops.all_gather_matmul import weight_grad
from mkernel.ops.reduce import all_reduce, reduce_scatter
from mkernel.ops.reduce.call import Sum
from mkernel.runtime.scaling import Scaling, blocks_of
from mkernel.runtime.world import Links

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
REDUCTIONS = {"reduce_scatter": reduce_scatter, "all_reduce": all_reduce}


def paced_links(paced):
    return Links(nvlink=100.0 if paced else None)


def gathers(
    cluster, capability=90, config=None, dtype=torch.bfloat16, m=256, n=2048, k=2048,
    paced=False, gathered=False, strided=False, transposed=True, heap=False, described=True, module=all_gather_matmul,
):  # fmt: skip
    """The launch of a call of all_gather_matmul. strided: TMA cannot read a; described: it can read b and out."""

    def prepare(group):
        a = group.heap.tensor((m, k), dtype) if heap else torch.empty(m, k + 3 * strided, dtype=dtype)[:, :k]
        b = torch.empty(n, k + 3 * (not described), dtype=dtype)[:, :k].t()
        if not transposed:
            b = torch.empty(k, n, dtype=dtype)
        out = torch.empty(m * group.size, n + 3 * (not described), dtype=dtype)[:, :n]
        everyone = torch.empty(m * group.size, k, dtype=dtype) if gathered else None
        return module.prepare(group, a, b, out, everyone, config)

    return launched(prepare, cluster, capability, links=paced_links(paced))


def weight_grads(
    cluster, capability=90, config=None, dtype=torch.bfloat16, m=256, n=2048, k=2048,
    paced=False, strided=False, column_major=True, heap=False, described=True, module=weight_grad,
):  # fmt: skip
    """The launch of a call of all_gather_matmul_weight_grad. strided: TMA cannot read a; described: it can read dy and
    write out."""

    def tensor(rows, columns):
        return torch.empty(rows, columns + 3 * (not described), dtype=dtype)[:, :columns]

    def prepare(group):
        a = group.heap.tensor((m, k), dtype) if heap else torch.empty(m, k + 3 * strided, dtype=dtype)[:, :k]
        out = tensor(n, k).t() if column_major else tensor(k, n)
        return module.prepare(group, a, tensor(m * group.size, n), out, config)

    return launched(prepare, cluster, capability, links=paced_links(paced))


def reduces(
    op, cluster, capability=90, config=None, dtype=torch.bfloat16, reduce_dtype=None, m=4096, n=4096, k=1024,
    paced=False, bias=False, residual=False, transposed=True, described=True, fixed_order=True, multicast=False,
    module=None,
):  # fmt: skip
    """The launch of a sum over ranks. described: TMA can read and write all tensors."""

    def tensor(rows, columns):
        return torch.empty(rows, columns + 3 * (not described), dtype=dtype)[:, :columns]

    def prepare(group):
        rows = m // group.size if op == "reduce_scatter" else m
        call = Sum(
            a=tensor(m, k),
            b=tensor(n, k).t() if transposed else tensor(k, n),
            out=tensor(rows, n),
            bias=torch.empty(n, dtype=dtype) if bias else None,
            residual=tensor(rows, n) if residual else None,
            reduce_dtype=reduce_dtype,
            config=config,
            fixed_order=fixed_order,
        )
        return (module or REDUCTIONS[op]).prepare(group, call)

    return launched(prepare, cluster, capability, links=paced_links(paced), multicast=multicast)


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def scales(m, n, k, recipe, fast=False):
    """The scales of a product of this size."""
    if recipe == "blocks":
        return Scaling(torch.empty(m, blocks_of(k)), torch.empty(blocks_of(n), blocks_of(k)).t(), True, False)
    rows, columns = (m, n) if recipe == "rows" else (1, 1)
    return Scaling(torch.empty(rows, 1), torch.empty(1, columns), False, fast)


def scaled_gathers(
    cluster, recipe, config=None, m=4096, n=2048, k=2048, gathered=False, fast=False, wide=None
):  # fmt: skip
    """The launch of a call of all_gather_scaled_matmul. wide: the dtype of rows that the kernel quantizes."""

    def prepare(group):
        scaling = scales(m, n, k, recipe, fast)
        if wide is not None:
            scaling = replace(scaling, a=None, quantizes=E4M3)
        rows = m * group.size
        everyone = torch.empty(rows, k, dtype=E4M3) if gathered else None
        its_scales = torch.empty(rows, scaling.count) if gathered else None
        operands = torch.empty(m, k, dtype=wide or E4M3), torch.empty(n, k, dtype=E4M3).t()
        out = torch.empty(rows, n, dtype=torch.bfloat16)
        return all_gather_matmul.prepare(group, *operands, out, everyone, config, scaling, its_scales)

    return launched(prepare, cluster, 90)


def scaled_reduces(
    op, cluster, recipe, config=None, m=4096, n=4096, k=1024, kind=E4M3, described=True, transposed=True, fast=False,
    bias=True, residual=False, paced=False,
):  # fmt: skip
    """The launch of a sum over ranks of products of fp8. described: TMA can read and write all tensors."""

    def tensor(rows, columns, dtype=E4M3):
        return torch.empty(rows, columns + 3 * (not described), dtype=dtype)[:, :columns]

    def prepare(group):
        rows = m // group.size if op == "reduce_scatter" else m
        b = tensor(n, k).t() if transposed else tensor(k, n)
        out = tensor(rows, n, torch.bfloat16)
        call = Sum(
            tensor(m, k, kind), b, out,
            bias=torch.empty(n, dtype=torch.bfloat16) if bias else None,
            residual=tensor(rows, n, torch.bfloat16) if residual else None,
            config=config,
            scaling=scales(m, n, k, recipe, fast),
        )  # fmt: skip
        return REDUCTIONS[op].prepare(group, call)

    return launched(prepare, cluster, 90, links=paced_links(paced))
