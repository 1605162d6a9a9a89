"""Gradients of ring_attention on GPUs: through autograd, several ranks, several calls, the same bits every time."""

from dataclasses import replace

import pytest
import torch
from support.attention_gradients import NAMES, assert_gradients, cotangents
from support.attention_reference import Case

import mkernel as mk
from mkernel.ops.attention.backward import choice

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
CASES = {
    "plain": Case(256, heads=4, kv_heads=4, batch=2, dim=128, dtype=BF16),
    "causal": Case(256, heads=4, kv_heads=4, dim=128, dtype=BF16, causal=True),
    "zigzag": Case(320, heads=4, kv_heads=1, dim=128, dtype=BF16, causal=True, layout="zigzag"),
    "ragged": Case(333, heads=3, kv_heads=3, dim=128, dtype=BF16),
    "64": Case(200, heads=2, kv_heads=2, dim=64, dtype=torch.float16, causal=True),
    "96": Case(200, heads=2, kv_heads=2, dim=96, dtype=BF16, causal=True),
    "256": Case(200, heads=2, kv_heads=2, dim=256, dtype=BF16, causal=True),
    "window": Case(320, heads=4, kv_heads=2, dim=128, dtype=BF16, causal=True, layout="zigzag", window=(150, 0)),
    "capped": Case(200, heads=2, kv_heads=2, dim=64, dtype=BF16, causal=True, softcap=3.0),
    "zigzag, odd": Case(201, heads=4, kv_heads=2, dim=128, dtype=BF16, causal=True, layout="zigzag"),
    "a cache": Case(500, queries=130, heads=4, kv_heads=2, dim=128, dtype=BF16, causal=True),
    "fewer keys": Case(100, queries=233, heads=2, kv_heads=2, dim=64, dtype=BF16, causal=True),
    "192 and 128": Case(300, heads=2, kv_heads=2, dim=192, value_dim=128, dtype=BF16, causal=True),
    "64 and 128": Case(300, heads=2, kv_heads=2, dim=64, value_dim=128, dtype=torch.float16),
    "fp32": Case(200, heads=2, kv_heads=2, dim=64, dtype=torch.float32, causal=True),
}


def gradients(group, case, turn):
    """Gradients of one call, through autograd, in the memory of the host."""
    given = [case.part(name, group.rank, turn).to(group.device).requires_grad_() for name in NAMES]
    dout, dlse = (tensor.to(group.device) for tensor in cotangents(case, group.rank, turn))
    results = mk.ring_attention(*given, return_lse=True, group=group, **case.arguments())
    found = torch.autograd.grad(results, given, [dout, dlse])
    group.synchronize()
    return [gradient.cpu() for gradient in found]


@pytest.fixture
def portable(monkeypatch):
    """All calls run the portable kernel."""
    monkeypatch.setattr(choice, "why_not_gluon", lambda *arguments: "not in this test")


@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("name", CASES)
def test_the_portable_kernel(portable, name, cluster):
    case, (nodes, ranks) = CASES[name], cluster

    def on_rank(group):
        for turn in range(2):
            found = gradients(group, case, turn)
            again = gradients(group, case, turn)
            assert all(torch.equal(one, other) for one, other in zip(found, again))
            assert_gradients(found, case, group.rank, group.size, turn)

    mk.spawn(on_rank, nodes=nodes, gpus_per_node=ranks, device="cuda", timeout=30.0)


@pytest.mark.parametrize("lengths", [(300, 0, 1, 517), (64, 128, 640, 200)], ids=str)
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("kernel", ["portable", "as planned"])
def test_other_numbers_on_each_rank(kernel, nodes, lengths, request):
    if kernel == "portable":
        request.getfixturevalue("portable")
    case = Case(0, heads=4, kv_heads=2, dim=128, dtype=BF16, causal=True, seq_lens=lengths)

    def on_rank(group):
        for turn in range(2):
            assert_gradients(gradients(group, case, turn), case, group.rank, group.size, turn)

    mk.spawn(on_rank, nodes=nodes, gpus_per_node=4 // nodes, device="cuda", timeout=30.0)


# what the kernel for Hopper supports
GLUON = {
    **{name: CASES[name] for name in ("plain", "causal", "zigzag", "ragged", "64", "96", "window", "zigzag, odd")},
    "64, grouped": Case(1100, heads=4, kv_heads=2, batch=2, dim=64, dtype=BF16),
    "a cache": CASES["a cache"],
    "fewer keys": CASES["fewer keys"],
    "documents": Case(320, heads=2, kv_heads=2, dim=128, dtype=BF16, causal=True, documents=(0, 20, 150, 151, 320)),
    "long": Case(2050, heads=2, kv_heads=2, dim=128, dtype=BF16, causal=True, layout="zigzag"),
    "many heads": Case(130, heads=40, kv_heads=40, batch=2, dim=64, dtype=BF16, causal=True, layout="zigzag"),
}


@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("name", GLUON)
def test_the_kernel_for_hopper(name, cluster):
    """Within the bounds of float64, with the same bits in every call."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    case, (nodes, ranks) = GLUON[name], cluster
    if case.documents is not None:
        case = replace(case, documents=(*case.documents[:-1], case.length * nodes * ranks))

    def on_rank(group):
        query, key = (case.part(part, group.rank).to(group.device) for part in ("query", "key"))
        given = (query, query, key, key, query, torch.zeros(query.shape[:3], device=group.device))
        assert mk.explain("ring_attention_backward", *given, **case.arguments()).kernel == "gluon"
        for turn in range(2):
            found = gradients(group, case, turn)
            for _ in range(3):
                again = gradients(group, case, turn)
                assert all(torch.equal(one, other) for one, other in zip(found, again))
            assert_gradients(found, case, group.rank, group.size, turn)

    mk.spawn(on_rank, nodes=nodes, gpus_per_node=ranks, device="cuda", timeout=30.0)


def test_ranks_may_run_different_kernels():
    """Rank 1 has rows that TMA cannot read."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    case = Case(700, heads=4, kv_heads=2, dim=128, dtype=BF16, causal=True, layout="zigzag")

    def on_rank(group):
        def placed(name):
            part = case.part(name, group.rank).to(group.device)
            return torch.nn.functional.pad(part, (0, 1))[..., :-1] if group.rank == 1 else part

        given = [placed(name).requires_grad_() for name in NAMES]
        dout, dlse = (tensor.to(group.device) for tensor in cotangents(case, group.rank))
        results = mk.ring_attention(*given, return_lse=True, group=group, **case.arguments())
        found = [gradient.cpu() for gradient in torch.autograd.grad(results, given, [dout, dlse])]
        group.synchronize()
        assert_gradients(found, case, group.rank, group.size)

    mk.spawn(on_rank, nodes=1, gpus_per_node=2, device="cuda", timeout=30.0)
