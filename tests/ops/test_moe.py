"""What holds for moe_dispatch_matmul with moe_combine and for moe_ffn alike: right, whoever runs first."""

from __future__ import annotations

import pytest
import torch
from support.moe_reference import LAYERS, Layer, combine, ffn, layer_of
from support.operator_calls import DTYPES, assert_same, cluster_name, run

import mkernel as mk

both = pytest.mark.parametrize("call", [combine, ffn])


def several(group, call, layer, calls, **arguments):
    for turn in range(calls):
        call(group, layer, turn, **arguments)


RUNS = [
    pytest.param(cluster, seed, marks=pytest.mark.thorough if seed or cluster == (3, 2) else ())
    for cluster in LAYERS
    for seed in range(2)
    if cluster != (3, 2) or seed
]


@both
@pytest.mark.parametrize(("cluster", "seed"), RUNS, ids=cluster_name)
def test_schedules(cluster, seed, call):
    """Several calls in a row, so that both halves of the workspaces are used again."""
    layer = layer_of(cluster, dtype=DTYPES[seed])
    calls = 3 if layer.size < 4 and seed else 1
    # with max_tokens ranks may be a call ahead of each other
    run(lambda group: several(group, call, layer, calls, max_tokens=24 if seed else None), cluster=cluster, seed=seed)


@both
@pytest.mark.parametrize("routing", ["zipf", "one", "none", "twice"])
@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)], ids=cluster_name)
def test_routings(cluster, routing, call):
    run(call, layer_of(cluster, routing=routing), cluster=cluster, seed=len(routing))


@both
@pytest.mark.parametrize("max_tokens", [None, 5])
@pytest.mark.parametrize("routing", ["twice", "same"])
def test_ids_that_name_an_expert_again(routing, max_tokens, call):
    """The default capacity is enough for any routing: here a rank has fewer experts than a token has ids."""
    layer = Layer((5, 4), (1, 2), k=4, routing=routing)
    run(lambda group: several(group, call, layer, 3, max_tokens=max_tokens), cluster=(1, 2))


@both
@pytest.mark.parametrize("options", [{"late": {1: 3000}}, {"slow": {0: 0.02}}])
@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)], ids=cluster_name)
def test_stragglers(cluster, options, call):
    run(lambda group: several(group, call, layer_of(cluster), 2, max_tokens=20), cluster=cluster, **options)


@both
@pytest.mark.thorough
def test_all_schedules_give_the_same_bits(call):
    layer = Layer((5, 4, 3, 6), (2, 1, 2, 1), k=4)
    expected = run(call, layer, cluster=(2, 2), seed=0)
    for seed, options in enumerate([{"slow": {2: 0.02}}, {"ctas": 4}], start=1):
        for result, same in zip(run(call, layer, cluster=(2, 2), seed=seed, **options), expected, strict=True):
            assert_same(result, same)


def test_other_layouts_are_other_binaries():
    """Triton compiles another one for other strides, dtypes and alignments. It must be loaded before any rank's kernel
    runs, which a launch whose variant is known does not do."""
    layer = Layer((4,), (2,), k=2, hidden=32, out=16, dtype=torch.float32)
    x, ids, weights, w = layer.x(0), layer.ids(0), layer.weights(0), layer.w(0)
    gate_up, down = layer.gate_up(0), layer.down(0)
    narrow = [each.to(torch.float8_e4m3fn) for each in (x, gate_up, down)]
    one, scale, of_down = torch.ones(4, 1), torch.ones(2, 1, 32), torch.ones(2, 1, 1)
    strided = torch.cat([ids, ids], dim=1)[:, 1:3]
    calls = {
        "moe_dispatch": lambda ids, turn: mk.moe_dispatch(x, ids, 2),
        "moe_dispatch_matmul": lambda ids, turn: mk.moe_dispatch_matmul(x, ids, turn(w)),
        "moe_ffn": lambda ids, turn: mk.moe_ffn(x, ids, weights, turn(gate_up), down),
        "in fp8": lambda ids, turn: mk.moe_dispatch_scaled_matmul(narrow[0], ids, turn(narrow[1]), one, scale),
        "a layer in fp8": lambda ids, turn: mk.scaled_moe_ffn(
            narrow[0], ids, weights, turn(narrow[1]), narrow[2], one, scale, of_down
        ),
    }

    def by_experts(w):
        return w.permute(1, 2, 0).contiguous().permute(2, 0, 1)

    def work(group):
        variants = []
        group.launch = lambda launch, *more: variants.append(launch.variant)  # nothing has to run
        for name, call in calls.items():
            variants.clear()
            for given in (ids, ids.int(), strided, ids):
                call(given, lambda w: w)
            assert len(set(variants)) == 3, name
            call(ids, by_experts)
            assert len(set(variants)) == (3 if name == "moe_dispatch" else 4), name

    run(work, cluster=(1, 1))
