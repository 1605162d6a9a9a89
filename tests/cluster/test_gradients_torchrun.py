"""Gradients on ranks that are processes, as torchrun starts them."""

import textwrap

import pytest
from support.forked_processes import run_ranks, torchrun

START = """
    import sys, time
    import pytest, torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from support import gradient_cases, second_gradients
    from support.gradient_reference import GATHER, REDUCE, SCATTER, Case, check
    from support.patience import WAIT
    import mkernel as mk

    group = mk.init(timeout=WAIT, gpus_per_node={gpus_per_node})
    assert (group.nodes, group.gpus_per_node) == ({nodes}, {gpus})
"""
END = """
    print("right on rank", group.rank)
    group.close()
"""


def start(cluster):
    nodes, gpus = cluster
    return START.format(nodes=nodes, gpus=gpus, gpus_per_node=gpus if nodes > 1 else None)


def assert_right(program, cluster):
    ranks = cluster[0] * cluster[1]
    for rank, (output, code) in enumerate(run_ranks(start(cluster) + program + END, ranks, store="apart")):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output


MAIN = """
    for case in gradient_cases.main_cases(group.size):
        check(group, case, twice=group.nodes == 1)
"""
# Some of each: the simulator has all cases. 5, and not 4, which is how many calls tiled_cases makes in each layout.
SOME = """
    first = group.nodes + group.size
    for cases in ("small_cases", "frozen_cases", "tiled_cases"):
        for case in getattr(gradient_cases, cases)(group.size)[first % 5 :: 5]:
            check(group, case, twice=cases != "tiled_cases")
    for case in gradient_cases.second_cases(group.size)[first % 4 :: 4]:
        second_gradients.check(group, case)
"""


def test_every_operator():
    assert_right(MAIN, (1, 3))


@pytest.mark.thorough
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (1, 3), (2, 2)])
def test_more_cases(cluster):
    """And of the main ones those that test_every_operator and test_torchrun do not run on such a cluster."""
    assert_right(SOME if cluster in [(1, 2), (1, 3)] else MAIN + SOME, cluster)


@pytest.mark.thorough
def test_torchrun(tmp_path):
    script = tmp_path / "gradients.py"
    script.write_text(textwrap.dedent(start((1, 2)) + MAIN + END))
    assert torchrun(script, 2).count("right on rank") == 2


MESH = """
    # tensor parallel over the columns of the mesh, data parallel over its rows, in every notation
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = group.split(group.rank // 2), group.split(group.rank % 2)
    notations = [
        (mesh["tp"], mesh["dp"]),
        (mesh["tp"].get_group(), mesh["dp"].get_group()),
        (mesh["tp"].get_group().group_name, mesh["dp"].get_group().group_name),
        (tp, dp),
        (tp.group_name, dp.group_name),
    ]

    def make(rank):
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(4, 4, generator=generator) for _ in range(3)]

    leaves = [[tensor.double().requires_grad_() for tensor in make(rank)] for rank in range(4)]
    sums = []
    for pair in ([0, 1], [2, 3]):
        everyone = torch.cat([leaves[rank][0] for rank in pair])
        hidden = [(everyone @ leaves[rank][1].t()).relu() for rank in pair]
        sums.append(sum(h @ leaves[rank][2].t() for h, rank in zip(hidden, pair)))
    (sums[0] + sums[1]).square().sum().backward()

    def loss(a, w, v, tp, dp):
        y = mk.all_gather_matmul(a, w.t(), group=tp).relu()
        z = mk.matmul_reduce_scatter(y, v.t(), group=tp)
        return mk.matmul_all_reduce(z, torch.eye(4), group=dp).square().sum()

    for across, along in notations:
        for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
            mine = [tensor.requires_grad_() for tensor in make(group.rank)]
            function(*mine, across, along).backward()
            for tensor, exact in zip(mine, leaves[group.rank]):
                torch.testing.assert_close(tensor.grad.double(), exact.grad, rtol=1e-5, atol=1e-4)
"""


@pytest.mark.thorough
def test_tensor_and_data_parallel_groups():
    """Without a graph, and in one."""
    assert_right(MESH, (1, 4))


ERRORS = """
    def inputs():
        torch.manual_seed(group.rank)
        return torch.randn(6, 8, requires_grad=True), torch.randn(8, 5, requires_grad=True)

    def works():
        check(group, Case(GATHER, (3, 8), 5), twice=False)

    # rank 1 refuses its arguments in the backward pass: what it has saved comes back in another dtype
    works()
    a, b = inputs()
    for op, inner in ((mk.all_gather_matmul, SCATTER), (mk.matmul_reduce_scatter, GATHER)):
        unpack = torch.Tensor.double if group.rank == 1 else torch.clone
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
            y = op(a, b)
        begun = time.monotonic()
        words = "b has dtype torch.float64" if group.rank == 1 else f"rank 1 refused its call of {inner}"
        with pytest.raises(mk.ArgumentError, match=words):
            y.sum().backward()
        assert time.monotonic() - begun < WAIT / 4
        works()

    # autograd refuses what rank 1 passes, after the call; the other rank is told in its next call
    with torch.inference_mode():
        c = torch.randn(8, 5)
    if group.rank == 1:
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            mk.all_gather_matmul(a, c)
    else:
        y = mk.all_gather_matmul(a, b)
        with pytest.raises(mk.ArgumentError, match="rank 1 refused its call of all_gather_matmul: .*Inference tensors"):
            y.sum().backward()
    works()

    # rank 1 skips the backward pass, and calls something else
    y = mk.all_gather_matmul(a, b)
    with pytest.raises(mk.ArgumentError, match="the same calls in the same order"):
        if group.rank == 1:
            mk.matmul_all_reduce(a, b)
        else:
            y.sum().backward()
    works()

    # a group that nobody kept is gone when the backward pass wants it
    y = mk.all_gather_matmul(a, b, group=group.subset([0, 1]))
    with pytest.raises(mk.MKernelError, match="no group named"):
        y.sum().backward()
    works()

    # rank 1 skips the backward pass, and does nothing
    y = mk.all_gather_matmul(a, b)
    group.barrier()
    if group.rank == 0:
        group.timeout = 2.0
        with pytest.raises(mk.CommTimeout, match="rank 1") as caught:
            y.sum().backward()
        assert caught.value.record.op == SCATTER and caught.value.record.peer == 1, caught.value
        print("right on rank 0")
        dist.barrier()
    else:
        print("right on rank 1")
        dist.barrier()  # longer than the other one waits
    import os
    sys.stdout.flush()
    os._exit(0)
"""


def test_errors():
    assert_right(ERRORS, (1, 2))


LEAVES = """
    a, b = torch.randn(4, 8, requires_grad=True), torch.randn(8, 5, requires_grad=True)
    y = mk.all_gather_matmul(a, b)
    if group.rank == 1:
        print("right on rank 1")
        sys.exit()
    with pytest.raises(mk.RankLost, match="rank 1 is lost"):
        y.sum().backward()
    print("right on rank", group.rank)
    sys.exit()
"""


def test_a_rank_that_ends_before_the_backward_pass():
    assert_right(LEAVES, (1, 3))
