"""A list of b: one launch if they lie side by side in memory, with the results that they have anywhere."""

import copy

import pytest
import torch
from support.gradient_reference import SMALL
from torch.testing import assert_close

import mkernel as mk
from mkernel import nn
from mkernel.ops.all_gather_matmul import several
from mkernel.ops.all_gather_matmul.several import joined

WIDTHS = (5, 0, 8, 3)


def values(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def launches(group):
    """A list of the launches from here on."""
    launch, counted = group.launch, []

    def count(launched, *args, **more):
        counted.append(launched.op)
        return launch(launched, *args, **more)

    group.launch = count
    return counted


def run(program, nodes=1, gpus=2):
    mk.spawn(program, nodes=nodes, gpus_per_node=gpus, device="cpu")


def test_what_lies_side_by_side():
    rows, columns, narrow = torch.empty(16, 4), torch.empty(4, 16), torch.empty(16, 8)[:, :4]
    for whole in (rows.t(), columns, narrow.t(), columns[:, 1:], columns[::2]):
        parts = whole.split([5, 3, whole.shape[1] - 8], dim=1)
        found = joined(parts)
        assert (found.data_ptr(), found.shape, found.stride()) == (whole.data_ptr(), whole.shape, whole.stride())
        assert joined([parts[0], whole[:, :0], parts[1]]).shape == (len(whole), 8)
        assert joined(parts[:1]) is parts[0]
        for others in ([parts[1], parts[0]], [parts[0], parts[2]], [parts[0], parts[0]], [parts[0], parts[1].clone()]):
            assert joined(others) is None
    assert joined([rows[:, :0].t(), rows[4:, :0].t()]) is None  # no memory
    assert joined([rows.t()[:, :4], rows[4:8]]) is None  # other strides


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 3), pytest.param(2, 2, marks=pytest.mark.thorough)])
def test_one_launch(nodes, gpus, monkeypatch):
    """And the same bits as of one matrix. Elsewhere in memory, the others are products of the gathered rows."""
    mm, products = torch.mm, []
    monkeypatch.setattr(several.torch, "mm", lambda *args, **more: products.append(1) or mm(*args, **more))

    def program(group):
        x = values(2, 3, 16, seed=group.rank)
        w = values(sum(WIDTHS), 16, seed=5 + group.rank)
        for whole in (w.t(), w.t().contiguous()):
            bs = whole.split(WIDTHS, dim=1)
            expected = mk.all_gather_matmul(x, whole, gather_dim=1, config=SMALL).split(WIDTHS, dim=-1)
            counted = launches(group)
            with_rows, gathered = mk.all_gather_matmul(x, list(bs), gather_dim=1, return_gathered=True, config=SMALL)
            ys = mk.all_gather_matmul(x, bs, gather_dim=1, config=SMALL)
            group.barrier()
            assert not products
            group.barrier()
            apart = mk.all_gather_matmul(x, [b.clone() for b in bs], gather_dim=1, config=SMALL)
            del group.launch
            assert len(counted) == 3
            assert torch.equal(gathered, torch.cat(group.exchange("x", x), 1))
            assert len(products) == 3 * group.size
            group.barrier()
            products.clear()
            for y, kept, other, right in zip(ys, with_rows, apart, expected, strict=True):
                assert torch.equal(y, right)
                assert torch.equal(kept, right)
                assert y.stride() == other.stride()
                assert_close(other, right)

    run(program, nodes, gpus)


@pytest.mark.parametrize("save", ["sharded", "gathered"])
def test_launches_of_gradients(save):
    """As many as of matrices that lie apart."""

    def program(group):
        whole, found = values(sum(WIDTHS), 16, seed=5), []
        for together in (True, False):
            x = values(6, 16, seed=group.rank).requires_grad_()
            ws = [(w if together else w.clone()).detach().requires_grad_() for w in whole.split(WIDTHS)]
            counted = launches(group)
            sum(y.sin().sum() for y in mk.all_gather_matmul(x, [w.t() for w in ws], save=save)).backward()
            del group.launch
            found.append(counted)
        assert found[0] == found[1]
        assert len(found[0]) == (3 if save == "sharded" else 2)

    run(program)


def blocks(group):
    return [nn.ParallelSwiGLU(8, 6 * group.size), nn.ParallelQKV(8, 2 * group.size, head_dim=4, bias=True)]


def first_weights(block):
    return [getattr(block, name).weight.t() for name in block.first_layers]


def test_weights_of_blocks_lie_side_by_side():
    """Also of copies, of other dtypes, from checkpoints, and from plain layers. Where not, the results are the same."""

    def program(group):
        for block in blocks(group):
            x = values(4, 8, seed=group.rank)
            expected = block(x)
            other = copy.deepcopy(block).half().float()
            other.load_state_dict({name: value.clone() for name, value in block.state_dict().items()}, assign=True)
            empty = copy.deepcopy(block).to("meta").to_empty(device="cpu")
            for each in (block, copy.deepcopy(block), other, empty):
                assert joined(first_weights(each)) is not None
                assert all(type(parameter) is torch.nn.Parameter for parameter in each.parameters())
            apart = copy.deepcopy(block)
            for name in block.first_layers:
                layer = getattr(apart, name)
                layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
            assert joined(first_weights(apart)) is None
            for each in (other, apart):
                for one, right in zip(*(y if isinstance(y, tuple) else (y,) for y in (each(x), expected)), strict=True):
                    assert_close(one, right)
        plain = [torch.nn.Linear(8, 6 * group.size, bias=False) for _ in range(2)]
        made = nn.ParallelSwiGLU.from_linears(*plain, torch.nn.Linear(6 * group.size, 8, bias=False))
        assert joined(first_weights(made)) is not None

    run(program)


def test_launches_of_a_block():
    def program(group):
        x = values(4, 8, seed=group.rank).requires_grad_()
        for block, forward in zip(blocks(group), (2, 1), strict=True):
            counted = launches(group)
            y = block(x)
            assert len(counted) == forward
            sum(each.sum() for each in (y if isinstance(y, tuple) else (y,))).backward()
            assert len(counted) == forward + 2 + (forward - 1)  # the gradients of down_proj are one launch
            del group.launch

    run(program)
