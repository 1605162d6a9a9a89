"""Gradients of ring_attention through autograd: in the simulator, in processes, in registered and compiled form."""

from __future__ import annotations

import re

import pytest
import torch
from support.attention_gradients import NAMES, assert_gradients, cotangents
from support.attention_reference import Case
from support.forked_processes import run_ranks
from support.operator_calls import assert_same, cluster_name, run
from torch._subclasses.fake_tensor import FakeTensorMode

import mkernel as mk
from mkernel import nn

CASE = Case(10, heads=2, kv_heads=1, causal=True, layout="zigzag", documents=(0, 7, 20))


def leaves(case, group, turn=0):
    return [case.part(name, group.rank, turn).requires_grad_() for name in NAMES]


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)], ids=cluster_name)
def test_both_results_have_gradients(cluster):
    def work(group):
        tensors = leaves(CASE, group)
        out, lse = mk.ring_attention(*tensors, return_lse=True, **CASE.arguments())
        torch.autograd.backward([out, lse], list(cotangents(CASE, group.rank)))
        assert_gradients([tensor.grad for tensor in tensors], CASE, group.rank, group.size)
        out = mk.ring_attention(*tensors, **CASE.arguments())
        found = torch.autograd.grad(out, tensors, cotangents(CASE, group.rank)[0])
        assert_gradients(found, CASE, group.rank, group.size, with_lse=False)

    run(work, cluster=cluster)


def test_the_log_sum_exp_alone():
    def work(group):
        case = Case(8)
        tensors = leaves(case, group)
        lse = mk.ring_attention(*tensors, return_lse=True)[1]
        dq, dk, dv = torch.autograd.grad(lse.sum(), tensors)
        assert (dv == 0).all()
        assert dq.abs().sum() > 0
        assert dk.abs().sum() > 0

    run(work)


@pytest.mark.parametrize("needed", NAMES)
def test_only_what_requires_grad_gets_a_gradient(needed):
    def work(group):
        case = Case(8, causal=True)
        tensors = dict(zip(NAMES, leaves(case, group)))
        for name, tensor in tensors.items():
            tensor.requires_grad_(name == needed)
        mk.ring_attention(**tensors, is_causal=True).backward(cotangents(case, group.rank)[0])
        assert [name for name, tensor in tensors.items() if tensor.grad is not None] == [needed]
        everything = leaves(case, group)
        mk.ring_attention(*everything, is_causal=True).backward(cotangents(case, group.rank)[0])
        assert_same(tensors[needed].grad, everything[NAMES.index(needed)].grad)

    run(work)


def test_without_gradients_the_bits_are_the_same():
    def work(group):
        tensors = leaves(CASE, group)
        out = mk.ring_attention(*tensors, **CASE.arguments())
        assert out.requires_grad
        with torch.no_grad():
            plain = mk.ring_attention(*tensors, **CASE.arguments())
        assert not plain.requires_grad
        assert_same(plain, out.detach())

    run(work)


def test_autocast():
    def work(group):
        case = Case(8, causal=True)
        tensors = leaves(case, group)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = mk.ring_attention(*tensors, is_causal=True)
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        assert all(tensor.grad.dtype == torch.float32 for tensor in tensors)

    run(work)


def test_what_is_refused():
    def work(group):
        tensors = leaves(Case(8), group)
        with pytest.raises(mk.ArgumentError, match="out cannot be combined with tensors that require grad"):
            mk.ring_attention(*tensors, out=torch.empty(1, 1, 8, 64))
        out = mk.ring_attention(*tensors)
        (dq,) = torch.autograd.grad(out.square().sum(), tensors[:1], create_graph=True)
        with pytest.raises(mk.ArgumentError, match="ring_attention_backward has no backward pass"):
            dq.sum().backward()

    run(work)


@pytest.mark.parametrize("input_layout", ["bshd", "bhsd"])
def test_module(input_layout):
    """The module trains, with its inputs in either order of dimensions."""

    def work(group):
        case = Case(8, heads=4, kv_heads=2, causal=True, layout="zigzag")
        module = nn.ContextParallelAttention(is_causal=True, layout="zigzag", input_layout=input_layout)
        tensors, (dout, _) = leaves(case, group), cotangents(case, group.rank)
        swap = (lambda tensor: tensor.transpose(1, 2)) if input_layout == "bshd" else (lambda tensor: tensor)
        module(*map(swap, tensors)).backward(swap(dout))
        assert_gradients([tensor.grad for tensor in tensors], case, group.rank, group.size, with_lse=False)

    run(work)


def test_fake_tensors():
    """The same shapes, strides and dtypes, with no call on the group."""

    def work(group):
        exchanges = group._exchanges
        with FakeTensorMode():
            tensors = [torch.empty(1, heads, 8, 64, requires_grad=True) for heads in (2, 1, 1)]
            out, lse = mk.ring_attention(*tensors, enable_gqa=True, return_lse=True)
            (out.sum() + lse.sum()).backward()
        assert [tensor.grad.shape for tensor in tensors] == [tensor.shape for tensor in tensors]
        assert (out.shape, lse.shape, lse.dtype) == (tensors[0].shape, (1, 2, 8), torch.float32)
        assert group._exchanges == exchanges

    run(work)


PROGRAM = """
    import torch
    from support.attention_gradients import NAMES, assert_gradients, cotangents, inputs
    from support.attention_reference import Case
    from support.patience import WAIT
    from mkernel.ops.library import registered
    import mkernel as mk

    group = mk.init(timeout=WAIT, gpus_per_node={gpus_per_node})
    cases = [
        Case(10, heads=4, kv_heads=2, dtype=torch.bfloat16),
        Case(10, causal=True, layout="zigzag", documents=(0, 3, 10 * group.size)),
    ]
    for turn, case in enumerate(cases):
        for _ in range(2):
            tensors = [case.part(name, group.rank, turn).requires_grad_() for name in NAMES]
            out, lse = mk.ring_attention(*tensors, return_lse=True, **case.arguments())
            torch.autograd.backward([out, lse], list(cotangents(case, group.rank, turn)))
            assert_gradients([tensor.grad for tensor in tensors], case, group.rank, group.size, turn)
    {more}
    print("right on rank", group.rank)
    group.close()
"""
OPCHECK = """
    case, name = cases[1], group.group_name
    tensors = [case.part(each, group.rank).requires_grad_() for each in NAMES]
    documents = torch.tensor(case.documents)
    options = (True, None, 3.0, False, "zigzag", documents, [7, -1], [10] * group.size, None, name)
    arguments, dlse = inputs(group, case)
    plain, out = [tensor.detach() for tensor in tensors], torch.zeros_like(tensors[0])
    checked = {
        "": (*tensors, *options),
        "_out": (*plain, *options, None, out),
        "_backward": (*arguments, dlse, *options),
    }
    for variant, given in checked.items():
        outcome = torch.library.opcheck(registered("ring_attention", variant).default, given)
        assert set(outcome.values()) == {"SUCCESS"}, (variant, outcome)
    found = {each.name for each in torch._C._jit_get_all_schemas() if each.name.startswith("mkernel::ring_attention")}
    assert found == {"mkernel::ring_attention" + variant for variant in checked}, found
"""
COMPILED = """
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = mk.nn.ContextParallelAttention(is_causal=True, layout="zigzag")

        def forward(self, query, key, value):
            return self.attention(query * 2, key, value).sigmoid()

    layer, results = Layer(), []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        generator = torch.Generator().manual_seed(group.rank)
        tensors = [torch.randn(1, 10, 2, 64, generator=generator).requires_grad_() for _ in NAMES]
        y = function(*tensors)
        y.square().sum().backward()
        results.append([y.detach(), *(tensor.grad for tensor in tensors)])
    assert all(torch.equal(plain, compiled) for plain, compiled in zip(*results))

    lens, results = [7, 3], []  # of two ranks

    def attend(query, key, value):
        return mk.ring_attention(query * 2, key, value, is_causal=True, seq_lens=lens).sigmoid()

    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        tensors = [Case(0, seq_lens=tuple(lens)).part(each, group.rank).requires_grad_() for each in NAMES]
        y = function(*tensors)
        y.square().sum().backward()
        results.append([y.detach(), *(tensor.grad for tensor in tensors)])
    assert all(torch.equal(plain, compiled) for plain, compiled in zip(*results))
"""


def assert_right(cluster, more=""):
    nodes, gpus = cluster
    program = PROGRAM.format(gpus_per_node=gpus if nodes > 1 else None, more=more.strip())
    for rank, (output, code) in enumerate(run_ranks(program, nodes * gpus, store="apart")):
        assert code == 0, output
        assert re.search(rf"right on rank {rank}\b", output), output


@pytest.mark.thorough
def test_processes():
    assert_right((1, 2))


@pytest.mark.thorough
def test_opcheck():
    assert_right((1, 2), OPCHECK)


@pytest.mark.thorough
@pytest.mark.parametrize("cluster", [(1, 3), (2, 2)], ids=cluster_name)
def test_more_processes(cluster):
    assert_right(cluster)


@pytest.mark.thorough
def test_compiled():
    assert_right((1, 2), COMPILED)
