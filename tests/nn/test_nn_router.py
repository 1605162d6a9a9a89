"""The router: scores, groups, and the bias that balances the load, beside loops over tokens."""

import pytest
import torch
from support.nn_reference import values

import mkernel as mk
from mkernel import nn

TOKENS, HIDDEN, EXPERTS = 20, 12, 8
KINDS = [
    dict(),
    dict(normalize=False),
    dict(scores="sigmoid", scale=2.5),
    dict(scores="sigmoid", groups=4, top_groups=2, correction_bias=True, scale=2.5),
    dict(groups=2, top_groups=1, normalize=False),
    dict(groups=8, top_groups=3),
]


def routed(router, x, k):
    """(ids, weights) of each token, in float64."""
    logits = x.double() @ router.weight.detach().double().t()
    all_scores = logits.softmax(-1) if router.scores == "softmax" else logits.sigmoid()
    for scores in all_scores:
        ranked = scores.clone()
        if router.e_score_correction_bias is not None:
            ranked += router.e_score_correction_bias.double()
        size = EXPERTS // router.groups
        best = [
            float(ranked[g * size : (g + 1) * size].sort(descending=True).values[:2].sum())
            for g in range(router.groups)
        ]
        kept = sorted(range(router.groups), key=lambda g: -best[g])[: router.top_groups]
        allowed = [e for e in range(EXPERTS) if e // size in kept or router.top_groups == router.groups]
        ids = sorted(allowed, key=lambda e: -float(ranked[e]))[:k]
        weights = scores[ids]
        yield ids, (weights / weights.sum() if router.normalize else weights) * router.scale


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_routes(kind):
    router, x, k = nn.TopKRouter(HIDDEN, EXPERTS, 3, **kind), values(TOKENS, HIDDEN, seed=1), 3
    if kind.get("correction_bias"):
        router.e_score_correction_bias.copy_(values(EXPERTS, seed=2))
    ids, weights = router(x)
    for token, (expected, share) in enumerate(routed(router, x, k)):
        assert ids[token].tolist() == expected
        torch.testing.assert_close(weights[token].double(), share, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        again, same = router(x)
    assert torch.equal(again, ids)
    assert torch.equal(same, weights)
    weights.square().sum().backward()
    assert router.weight.grad.isfinite().all()
    assert router.weight.grad.any()


def test_the_bias_balances_the_load_and_is_saved():
    torch.manual_seed(0)
    router, x = nn.TopKRouter(HIDDEN, EXPERTS, 2, scores="sigmoid", correction_bias=True), values(400, HIDDEN, seed=1)

    def load():
        return torch.bincount(router(x)[0].flatten(), minlength=EXPERTS)

    before = load().max() - 100  # more than the average
    for _ in range(200):
        router.adjust_bias(load(), 0.01)
    assert 2 * (load().max() - 100) < before
    other = nn.TopKRouter(HIDDEN, EXPERTS, 2, scores="sigmoid", correction_bias=True)
    other.load_state_dict(router.state_dict())
    assert torch.equal(other(x)[0], router(x)[0])
    assert list(nn.TopKRouter(HIDDEN, EXPERTS, 2).state_dict()) == ["weight"]


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 2), (2, 1), (1, 1)])
def test_the_load_of_all_ranks(nodes, gpus):
    """Exact, also beyond what TF32 can count to, and under autocast; the same on every rank, and so are biases that
    follow it."""

    def ids_of(rank):
        ids = torch.randint(-1, EXPERTS, (40 + rank, 3), generator=torch.Generator().manual_seed(rank))
        return torch.cat([ids, torch.full((5000, 3), 2)])

    def on_rank(group):
        router = nn.TopKRouter(HIDDEN, EXPERTS, 3, correction_bias=True)
        load = nn.expert_load(ids_of(group.rank), EXPERTS)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(nn.expert_load(ids_of(group.rank), EXPERTS), load)
        router.adjust_bias(load)
        return load, router.e_score_correction_bias

    everyone = torch.cat([ids_of(rank).flatten() for rank in range(nodes * gpus)])
    for load, bias in mk.spawn(on_rank, nodes=nodes, gpus_per_node=gpus, device="cpu"):
        assert torch.equal(load, torch.bincount(everyone[everyone >= 0], minlength=EXPERTS))
        assert torch.equal(bias.sign(), (load.double().mean() - load).sign().float())


def test_a_layer_with_such_a_router():
    options = dict(scores="sigmoid", groups=4, top_groups=2, correction_bias=True)

    def on_rank(group):
        torch.manual_seed(0)
        layer = nn.ExpertParallelMoE(HIDDEN, 8, EXPERTS, 2, **options)
        layer(values(5, HIDDEN, seed=group.rank)).sum().backward()
        return list(nn.full_state_dict(layer)), layer.gate.weight.grad

    (names, gradient), (_, other) = mk.spawn(on_rank, nodes=1, gpus_per_node=2, device="cpu")
    assert "gate.e_score_correction_bias" in names
    assert torch.equal(gradient, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(scores="relu"), "scores must be one of softmax, sigmoid; got 'relu'"),
        (dict(groups=3), "groups is 3 and top_groups 1: groups must divide num_experts"),
        (dict(groups=4, top_groups=5), "top_groups of them must exist"),
        (dict(groups=8, top_groups=2), "and hold top_k"),
        (dict(groups=0), "groups must be a whole number, 1 or more; got 0"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(mk.ArgumentError, match=message):
        nn.TopKRouter(HIDDEN, EXPERTS, 3, **options)


def test_a_bias_that_is_not_there():
    router = nn.TopKRouter(HIDDEN, EXPERTS, 3)
    with pytest.raises(mk.ArgumentError, match="build it with correction_bias=True"):
        router.adjust_bias(torch.ones(EXPERTS))
    router = nn.TopKRouter(HIDDEN, EXPERTS, 3, correction_bias=True)
    with pytest.raises(mk.ArgumentError, match=r"load has shape \(3,\), but must have \(8,\)"):
        router.adjust_bias(torch.ones(3))


def test_the_bias_stays_in_fp32():
    """In bf16, steps of 0.001 would be lost on biases above 0.5."""
    router = nn.TopKRouter(HIDDEN, EXPERTS, 3, correction_bias=True)
    router.e_score_correction_bias.fill_(3.001)
    for moved in (router.to(torch.bfloat16), router.half(), router.to("meta"), router.to_empty(device="cpu")):
        assert moved.e_score_correction_bias.dtype == torch.float32
    assert router.weight.dtype == torch.float16
    assert router.load_state_dict(nn.TopKRouter(HIDDEN, EXPERTS, 3, correction_bias=True).state_dict())
