"""Sizes of one, compiled with no GPU: Triton makes constants of them, and its compiler takes other ways then."""

import pytest
import torch
from support.compiled_launches import compile_launch, pretending
from support.operator_calls import run

from mkernel.workloads import workload_of

ALONE, LARGE = [(1, 1), (2, 1)], [(1, 1), (2, 2)]
CASES = [
    ("all_gather_matmul", LARGE, [(8, 1, 16), (8, 16, 1), (4, 1, 1)]),
    ("matmul_reduce_scatter", LARGE, [(4, 1, 16), (4, 16, 1), (4, 1, 1)]),
    ("matmul_all_reduce", ALONE, [(1, 1, 1), (1, 64, 64), (64, 1, 64), (64, 64, 1)]),
    ("matmul_all_reduce", [(1, 2)], [(1, 1, 1), (2000, 2000, 1)]),
    ("ring_attention", LARGE, [(1, 1, 4, 128)]),
    ("moe_dispatch_matmul", [(2, 2)], [(1, 1, 1)]),
    ("moe_combine", [(2, 2)], [(1, 1)]),
    ("moe_ffn", [(1, 1)], [(1, 1, 1)]),
]


def launch_of(operator, cluster, shape):
    """What rank 0 of a cluster of Hopper GPUs would launch."""

    def work(group):
        call = workload_of(operator).make(group, shape, torch.bfloat16)
        with pretending(90):
            group.device = torch.device("cuda")
            return call.tried.prepare(None)

    return run(work, cluster=cluster)[0]


@pytest.mark.parametrize(
    ("operator", "cluster", "shape"),
    [(operator, cluster, shape) for operator, clusters, shapes in CASES for cluster in clusters for shape in shapes],
)
@pytest.mark.thorough
def test_sizes_of_one(operator, cluster, shape):
    compiled = compile_launch(launch_of(operator, cluster, shape))
    assert ".target sm_90a" in compiled.ptx
    assert compiled.spilled <= 64
