"""torch.ops.mkernel.moe_*: opcheck, tensors without values, torch.compile, autocast."""

import pytest
import torch
import torch.distributed as dist
from support.forked_processes import run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import mkernel as mk

PROGRAM = """
    from support import moe_registered_checks
    from support.patience import WAIT
    import mkernel as mk

    group = mk.init(timeout=WAIT)
    moe_registered_checks.run(group)
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
            x, weights = torch.empty(6, 16, requires_grad=True), torch.empty(6, 2, requires_grad=True)
            ids = torch.empty(6, 2, dtype=torch.int64)
            gate_up, down = torch.empty(3, 16, 8, requires_grad=True), torch.empty(3, 4, 16, requires_grad=True)
            common = dict(group=dist.group.WORLD, max_tokens=6)
            out = mk.moe_ffn(x, ids, weights, gate_up, down, **common)
            y, handle = mk.moe_dispatch_matmul(x, ids, gate_up, **common)
            assert y.shape == (8 * 6 * 2, 8)
            assert (handle.capacity, handle.counts.shape, handle.token.shape) == (96, (3,), (96,))
            (out.sum() + mk.moe_combine(y, handle, weights, group=dist.group.WORLD).sum()).backward()
            for each in (x, weights, gate_up, down):
                assert each.grad.shape == each.shape
            with pytest.raises(mk.ArgumentError, match="max_tokens must be given"):
                mk.moe_ffn(x, ids, weights, gate_up, down, group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_a_backward_pass_may_run_twice():
    """What is kept is not overwritten: by moe_ffn, which could compute in its place, too."""

    def on_rank(group):
        torch.manual_seed(group.rank)
        x, weights = torch.randn(5, 8, requires_grad=True), torch.rand(5, 2, requires_grad=True)
        ids = torch.rand(5, 4).topk(2).indices
        gate_up, down = torch.randn(2, 8, 12, requires_grad=True), torch.randn(2, 6, 8, requires_grad=True)
        for save in ("inputs", "activations"):
            loss = mk.moe_ffn(x, ids, weights, gate_up, down, save=save).square().sum()
            first = torch.autograd.grad(loss, (x, weights, gate_up, down), retain_graph=True)
            for one, other in zip(first, torch.autograd.grad(loss, (x, weights, gate_up, down)), strict=True):
                assert torch.equal(one, other)
        with pytest.raises(mk.ArgumentError, match="out cannot be combined with tensors that require grad"):
            mk.moe_ffn(x, ids, weights, gate_up, down, out=torch.empty(5, 8))
        return True

    assert all(mk.spawn(on_rank, nodes=1, gpus_per_node=2, device="cpu"))


NEEDS = [(("x", "down"), ("weights", "gate_up")), (("x",), ("x", "gate_up", "down")), (("weights", "b_down"), ("x",))]


@pytest.mark.parametrize("save", ["inputs", "activations"])
@pytest.mark.parametrize("needs", NEEDS)
def test_ranks_that_need_other_gradients(needs, save):
    """All ranks make the same calls, whatever is frozen where."""

    def on_rank(group):
        torch.manual_seed(group.rank)
        ids = torch.rand(5, 4).topk(2).indices
        leaves = dict(x=torch.randn(5, 8), weights=torch.rand(5, 2), gate_up=torch.randn(2, 8, 12))
        leaves |= dict(down=torch.randn(2, 6, 8), b_down=torch.randn(2, 8))
        found = []
        for some in (needs[group.rank], leaves):
            for name in some:
                leaves[name].requires_grad_().grad = None
            x, weights, gate_up, down, b_down = leaves.values()
            mk.moe_ffn(x, ids, weights, gate_up, down, b_down=b_down, save=save).square().sum().backward()
            found.append([leaves[name].grad for name in needs[group.rank]])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        return True

    assert all(mk.spawn(on_rank, nodes=1, gpus_per_node=2, device="cpu"))


@pytest.mark.parametrize("save", ["inputs", "activations"])
def test_ranks_with_frozen_matrices_and_ranks_without_experts(save):
    """Gradients of moe_dispatch_matmul where rank 0 has no experts, and rank 1 has frozen theirs."""

    def on_rank(group):
        torch.manual_seed(group.rank)
        x, ids, weights = torch.randn(5, 8, requires_grad=True), torch.rand(5, 4).topk(2).indices, torch.rand(5, 2)
        experts = (0, 2, 2)[group.rank]
        w, bias = torch.randn(experts, 8, 12), torch.randn(experts, 12)
        found = []
        for learns in (group.rank == 2, True):
            for each in (x, w, bias):
                each.grad = None
            w.requires_grad_(learns)
            bias.requires_grad_(learns)
            y, handle = mk.moe_dispatch_matmul(x, ids, w, bias=bias, save=save)
            mk.moe_combine(y, handle, weights).square().sum().backward()
            found.append([x.grad, *([w.grad, bias.grad] if group.rank == 2 else ())])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        return True

    assert all(mk.spawn(on_rank, nodes=1, gpus_per_node=3, device="cpu"))
