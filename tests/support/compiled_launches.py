"""Launches of operators, for tests that compile them with no GPU."""

import torch

from mkernel.compiling import launched
from mkernel.ops import all_gather_matmul
from mkernel.ops.all_gather_matmul import weight_grad
from mkernel.ops.reduce import all_reduce, reduce_scatter
from mkernel.ops.reduce.call import Sum
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
