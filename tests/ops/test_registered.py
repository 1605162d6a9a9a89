"""torch.ops.mkernel: opcheck, tensors without values, and exported programs."""

import pytest
import torch
import torch.distributed as dist
from support.forked_processes import run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import mkernel as mk

PROGRAM = """
    from support import registered_checks
    from support.patience import WAIT
    import mkernel as mk

    group = mk.init(timeout=WAIT)
    registered_checks.run(group)
    print("right on rank", group.rank)
    group.close()
"""


@pytest.mark.thorough
def test_two_ranks():
    for rank, (output, code) in enumerate(run_ranks(PROGRAM, 2, store="apart")):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output


def test_groups_without_ranks():
    """Tensors without values need no other ranks: the process group may be one of PyTorch's fake ones."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        with FakeTensorMode():
            a, b = torch.empty(2, 16, 8, requires_grad=True), torch.empty(8, 6, requires_grad=True)
            for group in (dist.group.WORLD, dist.group.WORLD.group_name):
                y = mk.all_gather_matmul(a, b, gather_dim=1, group=group)
                z = mk.matmul_reduce_scatter(a, b, scatter_dim=1, group=group)
                assert (y.shape, z.shape) == ((2, 128, 6), (2, 2, 6))
                (y.sum() + z.sum()).backward()
                assert (a.grad.shape, b.grad.shape) == (a.shape, b.shape)
    finally:
        dist.destroy_process_group()


def test_graphs_that_are_saved_and_loaded(tmp_path):
    class Both(torch.nn.Module):
        def forward(self, a, b):
            return mk.all_gather_matmul(a, [b, b], config=mk.Config(tile_m=16))[1] + mk.matmul_all_reduce(a, b)

    mk.init()
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    torch.export.save(torch.export.export(Both(), (a, b)), tmp_path / "graph.pt2")
    y = torch.export.load(tmp_path / "graph.pt2").module()(a, b)
    assert torch.equal(y, Both()(a, b))
