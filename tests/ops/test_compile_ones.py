"""Sizes of one, compiled with no GPU: Triton makes constants of them, and its compiler takes other ways then. Sums in
one node: test_compile_reduce.py; few rows: test_few_rows_compile.py."""

import pytest
import torch
from support.workloads import workload_of

from mkernel.compiling import compile_launch, launched

ALONE, NODES = [(1, 1)], [(2, 2)]
CASES = [
    ("all_gather_matmul", ALONE, [(4, 1, 1)]),
    ("all_gather_matmul", NODES, [(8, 16, 1), (4, 1, 1)]),
    ("all_gather_matmul_weight_grad", NODES, [(8, 16, 1), (4, 1, 1)]),
    ("matmul_reduce_scatter", NODES, [(4, 16, 1), (4, 1, 1)]),
    ("matmul_all_reduce", ALONE, [(1, 1, 1)]),
    ("matmul_all_reduce", [(2, 1)], [(1, 1, 1), (64, 64, 1)]),
    ("ring_attention", NODES, [(1, 1, 4, 128)]),
    ("ring_attention_backward", [*ALONE, *NODES], [(1, 1, 4, 128), (1, 1, 8, 128)]),
    ("moe_dispatch_matmul", [(2, 2)], [(1, 1, 1)]),
    ("moe_combine", [(2, 2)], [(1, 1)]),
    ("moe_dispatch", [(2, 2)], [(1, 1)]),
    ("moe_ffn", [(1, 1)], [(1, 1, 1)]),
]
# bytes: dk and dv of 64 x 128 keys take half of a thread's registers (see test_ring_attention_backward_compile.py)
SPILLED = {"ring_attention_backward": 512}


def launch_of(operator, cluster, shape):
    """What rank 0 of a cluster of Hopper GPUs would launch."""

    options = dict(experts=2, topk=2) if operator.startswith("moe") else {}

    def prepare(group):
        return workload_of(operator).make(group, shape, torch.bfloat16, **options).tried.prepare(None)

    return launched(prepare, cluster, ctas=6)


@pytest.mark.parametrize(
    ("operator", "cluster", "shape"),
    [(operator, cluster, shape) for operator, clusters, shapes in CASES for cluster in clusters for shape in shapes],
)
@pytest.mark.thorough
def test_sizes_of_one(operator, cluster, shape):
    compiled = compile_launch(launch_of(operator, cluster, shape))
    assert ".target sm_90a" in compiled.ptx
    assert compiled.spilled <= SPILLED.get(operator, 64)
