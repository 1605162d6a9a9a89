"""Launches of the operators that sum over ranks, for tests that compile them with no GPU."""

import re
import subprocess
import tempfile
from pathlib import Path

import torch
from compiled import PROGRAMS, pretending
from helpers import run

from mkernel.ops.reduce import all_reduce, reduce_scatter
from mkernel.ops.reduce.call import Sum
from mkernel.runtime.world import Links

MODULES = {"reduce_scatter": reduce_scatter, "all_reduce": all_reduce}


def reduces(
    op, cluster, capability=90, config=None, dtype=torch.bfloat16, reduce_dtype=None, m=4096, n=4096, k=1024,
    paced=False, bias=False, residual=False, transposed=True, described=True, fixed_order=True, multicast=False,
    module=None,
):  # fmt: skip
    """What rank 0 of a cluster of such GPUs would launch. described: TMA can read and write all tensors."""

    def tensor(rows, columns):
        return torch.empty(rows, columns + 3 * (not described), dtype=dtype)[:, :columns]

    def work(group):
        with pretending(capability):
            group.device = torch.device("cuda")
            group.world.links = Links(nvlink=100.0 if paced else None)
            group.world.simulator.options = group.world.options.__class__(ctas=132, multicast=multicast)
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
            return (module or MODULES[op]).prepare(group, call)

    return run(work, cluster=cluster, multicast=multicast)[0]


def instructions(compiled, name):
    """How often an instruction stands in the machine code."""
    with tempfile.TemporaryDirectory() as folder:
        _, cubin = compiled._assemble(Path(folder))
        command = [PROGRAMS / "cuobjdump", "-sass", cubin]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return len(re.findall(rf"\s{name}\b", text))
