"""ring_attention_backward on simulated clusters: right, for every shape, mask, layout, schedule and size of buffer."""

from __future__ import annotations

import pytest
import torch
from support.attention_gradients import NAMES, assert_gradients, call, cotangents
from support.attention_reference import Case
from support.operator_calls import DTYPES, Guards, assert_same, cluster_name, run

import mkernel as mk

THOROUGH = pytest.mark.thorough
SMALL = mk.Config(tile_m=16, tile_n=16)
MASKS = [(False, "contiguous"), (True, "contiguous"), (True, "zigzag"), (False, "zigzag")]


def small(**more):
    return mk.Config(tile_m=16, tile_n=16, **more)


# -- right


@pytest.mark.parametrize(("causal", "layout"), MASKS)
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (1, 3), (2, 2)], ids=cluster_name)
def test_masks_and_layouts(cluster, causal, layout):
    case = Case(22, causal=causal, layout=layout)
    run(lambda group: call(group, case, config=SMALL), cluster=cluster, seed=cluster[1])


@pytest.mark.thorough
@pytest.mark.parametrize(("causal", "layout"), MASKS)
@pytest.mark.parametrize("cluster", [(3, 2), (2, 1)], ids=cluster_name)
def test_nodes(cluster, causal, layout):
    case = Case(20, heads=2, kv_heads=1, causal=causal, layout=layout)
    run(lambda group: call(group, case, config=SMALL), cluster=cluster)


def test_three_nodes():
    run(lambda group: call(group, Case(16, causal=True, layout="zigzag"), config=SMALL), cluster=(3, 2))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cluster", [(1, 2), (1, 3), (2, 1), (2, 2)], ids=cluster_name)
def test_schedules(cluster, seed):
    causal, layout = MASKS[seed % 4]
    case = Case((17, 2, 34, 6, 1, 16)[seed], causal=causal, layout=layout)
    run(lambda group: call(group, case, config=SMALL), cluster=cluster, seed=seed)


@pytest.mark.parametrize(("cluster", "heads", "kv_heads"), [((1, 2), 4, 1), ((1, 2), 6, 2), ((2, 1), 4, 2)])
def test_grouped_heads(cluster, heads, kv_heads):
    case = Case(18, heads=heads, kv_heads=kv_heads, batch=2, causal=True)
    run(lambda group: call(group, case, config=SMALL), cluster=cluster)


@pytest.mark.parametrize(("dtype", "dim"), [*zip(DTYPES * 2, [64, 96, 128, 256, 128, 96])])
def test_dtypes_and_head_dimensions(dtype, dim):
    case = Case(20, heads=2, kv_heads=1, dim=dim, dtype=dtype, causal=True)
    run(lambda group: call(group, case), cluster=(1, 2))


@pytest.mark.parametrize("length", [1, 15, 33])
def test_lengths(length):
    run(lambda group: call(group, Case(length, causal=length % 2 == 0), config=SMALL), cluster=(1, 2), seed=length)


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_scale(scale):
    run(lambda group: call(group, Case(20, scale=scale, causal=True), config=SMALL))


def test_without_a_gradient_of_the_log_sum_exp():
    run(lambda group: call(group, Case(20, causal=True), with_lse=False, config=SMALL), cluster=(1, 2))


PACKED = {
    "by rank": (0, 22, 44),
    "one spans the ranks": (0, 7, 30, 44),
    "single positions": (0, 1, 2, 3, 21, 22, 23, 43, 44),
    "empty ones": (0, 0, 10, 10, 10, 37, 44, 44),
}


@pytest.mark.parametrize(("causal", "layout"), [(False, "contiguous"), (True, "zigzag")])
@pytest.mark.parametrize("documents", PACKED.values(), ids=PACKED)
def test_packed_documents(documents, causal, layout):
    case = Case(22, causal=causal, layout=layout, documents=documents)
    run(lambda group: call(group, case, config=SMALL), cluster=(1, 2))


@THOROUGH
@pytest.mark.parametrize("steps", [None, 2])
def test_packed_documents_in_nodes(steps):
    """Documents that lie between the two pieces of a rank are sent to it, and seen by none of its rows."""
    case = Case(32, kv_heads=2, heads=2, causal=True, layout="zigzag", documents=(0, 20, 40, 90, 100, 128))
    run(lambda group: call(group, case, config=small(steps=steps)), cluster=(2, 2))


@pytest.mark.parametrize("shape", [(0, 1, 8), (1, 0, 8), (1, 1, 0)])
def test_nothing_to_do(shape):
    batch, heads, length = shape

    def work(group):
        tensors = [torch.zeros(batch, heads, length, 64) for _ in range(5)]
        found = mk.ring_attention_backward(*tensors, torch.zeros(batch, heads, length))
        assert all(gradient.shape == tensors[0].shape for gradient in found)

    run(work)


# -- memory


def buffered(group):
    """Bytes that the operator has for keys, values and partials of others."""
    [workspace] = [w for (op, _), w in group._workspaces.items() if op == "ring_attention_backward"]
    return workspace.segment.memory.numel() - workspace.data_start


@pytest.mark.parametrize(
    ("cluster", "kv_heads", "dtype"),
    [((1, 4), 5, torch.bfloat16), pytest.param((2, 2), 1, torch.float32, marks=THOROUGH)],
)
def test_memory_is_bounded(cluster, kv_heads, dtype):
    """Two steps of keys and values, and for as many rounds a partial in fp32 from every rank of the node and every
    other node. Slots are used again and again; with few heads sums of dq are kept between the parts of a head."""
    length = 64 if kv_heads == 1 else 32
    case = Case(length, heads=kv_heads, kv_heads=kv_heads, causal=True, layout="zigzag", dtype=dtype)
    config = small(steps=2)

    def work(group):
        call(group, case, config=config)
        step = 2 * kv_heads * length * case.dim
        slots = group.size - 1 if group.nodes == 1 else group.size
        partials = (group.size + group.nodes - 1) / slots * 2 * step * 4
        assert buffered(group) <= 2 * step * dtype.itemsize + partials + 3 * 256  # buffers are aligned
        given = [case.part("query", 0)] * 5
        return mk.explain("ring_attention_backward", *given, torch.zeros(1, kv_heads, length), config=config)

    plan = run(work, cluster=cluster, slow={0: 0.1})[0]
    assert plan.credits
    assert (plan.parts > 1) == (kv_heads == 1)
    assert plan.window >= 2


# -- many schedules


LATE, SLOW, BOTH = {"late": {1: 3000}}, {"slow": {0: 0.02}}, {"late": {0: 3000}, "slow": {1: 0.02}}


@pytest.mark.parametrize(
    ("cluster", "options"),
    [
        ((1, 2), LATE), ((1, 2), BOTH), ((2, 1), SLOW), pytest.param((1, 2), SLOW, marks=THOROUGH),
        pytest.param((2, 1), LATE, marks=THOROUGH), pytest.param((2, 2), BOTH, marks=THOROUGH),
    ],
)  # fmt: skip
def test_stragglers(cluster, options):
    def work(group):
        for turn in range(2):
            steps = 1 + turn if group.size == 2 else None
            call(group, Case(18, heads=2, kv_heads=2, causal=turn == 1), turn, config=small(steps=steps))

    run(work, cluster=cluster, **options)


@pytest.mark.thorough
def test_all_schedules_give_the_same_bits():
    case = Case(20, heads=2, dtype=torch.bfloat16, causal=True)
    options = [{}, {"slow": {2: 0.02}}, {"ctas": 9}]
    results = [
        run(lambda group: call(group, case, config=SMALL), cluster=(2, 2), seed=seed, **option)
        for seed, option in enumerate(options)
    ]
    for others in results[1:]:
        for found, first in zip(others, results[0]):
            for gradient, expected in zip(found, first):
                assert_same(gradient, expected)


@THOROUGH
@pytest.mark.parametrize(("cluster", "causal"), [((1, 3), False), ((2, 2), True)], ids=cluster_name)
def test_shapes_alternate(cluster, causal):
    """Signals, counters and slots of one shape lie where other ones of another shape do. Nothing of one call may be on
    its way when the next one begins."""
    shapes = [(48, 8, 2), (16, 2, None), (32, 3, 2), (48, 1, None), (16, 8, 1 + (cluster[0] > 1))]

    def work(group):
        for turn, (length, heads, steps) in enumerate(shapes):
            call(group, Case(length, heads=heads, kv_heads=heads, causal=causal), turn, config=small(steps=steps))

    run(work, cluster=cluster, slow={1: 0.02})


@pytest.mark.thorough
def test_groups_and_streams():
    case = Case(18, causal=True)

    def work(group):
        part = group.split(group.rank % 2)
        call(part, case, config=SMALL)
        results = []
        for turn in range(4):
            tensors = [case.part(name, group.rank, turn) for name in NAMES]
            dout, dlse = cotangents(case, group.rank, turn)
            with group.world.stream(group.world_rank, turn % 2):
                out, lse = mk.ring_attention(*tensors, is_causal=True, return_lse=True)
                found = mk.ring_attention_backward(dout, *tensors, out, lse, dlse=dlse, is_causal=True, config=SMALL)
                results.append((found, tensors, dout, dlse, out, lse))
        group.synchronize()
        for turn, (found, *_) in enumerate(results):
            assert_gradients(found, case, group.rank, group.size, turn)

    run(work, cluster=(2, 2))


# -- layouts in memory, and what is around


def test_strided_tensors():
    case = Case(18, heads=2, kv_heads=2, dtype=torch.bfloat16, causal=True)

    def work(group):
        tensors = [case.part(name, group.rank).transpose(1, 2).contiguous().transpose(1, 2) for name in NAMES]
        dout = cotangents(case, group.rank)[0].mT.contiguous().mT
        call(group, case, tensors=tensors, dout=dout, config=SMALL)

    run(work)


@pytest.mark.parametrize("cluster", [(1, 2), pytest.param((2, 2), marks=THOROUGH)], ids=cluster_name)
def test_nothing_beside_the_workspace_is_written(cluster, monkeypatch):
    guards = Guards(monkeypatch)

    def work(group):
        for turn, length in enumerate([3, 35, 18]):
            case = Case(length, causal=turn == 1)
            call(group, case, turn, config=small(chunk_rows=16 + 16 * (turn % 2)))

    run(work, cluster=cluster)
    guards.check()


# -- what moves


def traffic_of(case, cluster):
    """What the backward call alone moves and multiplies: (NVLink, network, products)."""

    def work(group):
        tensors = [case.part(name, group.rank) for name in NAMES]
        dout, _ = cotangents(case, group.rank)
        out, lse = mk.ring_attention(*tensors, return_lse=True, config=SMALL, **case.arguments())
        group.barrier()
        traffic = group.world.traffic
        before = [[*row] for row in traffic.nvlink], [[*row] for row in traffic.network], [*traffic.multiplications]
        group.barrier()
        mk.ring_attention_backward(dout, *tensors, out, lse, config=SMALL, **case.arguments())
        group.barrier()
        nvlink, network = (
            [[now - old for now, old in zip(*rows)] for rows in zip(after, earlier)]
            for after, earlier in zip((traffic.nvlink, traffic.network), before)
        )
        return nvlink, network, [now - old for now, old in zip(traffic.multiplications, before[2])]

    return run(work, cluster=cluster)[0]


@pytest.mark.parametrize("cluster", [(1, 3), (2, 2)], ids=cluster_name)
def test_partials_cross_between_two_nodes_once(cluster):
    gpus = cluster[1]
    panel = 2 * 32 * 64 * 4
    nvlink, network, _ = traffic_of(Case(32), cluster)
    for source in range(cluster[0] * gpus):
        for target in range(cluster[0] * gpus):
            same_node = source // gpus == target // gpus
            counterparts = source % gpus == target % gpus and not same_node
            assert network[source][target] == (2 * panel if counterparts else 0)
            assert nvlink[source][target] == (2 * panel * cluster[0] if same_node and source != target else 0)


def test_what_is_masked_is_neither_sent_nor_computed():
    panel = 2 * 32 * 64 * 4
    nvlink, _, products = traffic_of(Case(32, causal=True), (1, 3))
    assert nvlink == [[0, panel, panel], [panel, 0, panel], [panel, panel, 0]]  # keys one way, partials the other
    # three products for dq and four for dk and dv, of each tile of queries and block of keys
    assert products == [7 * (1 + 2), 7 * (3 + 4), 7 * (5 + 6)]
    documents, _, _ = traffic_of(Case(32, documents=(0, 16, 48, 64, 96)), (1, 3))
    assert documents == [[0, panel, 0], [panel, 0, 0], [0, 0, 0]]


# -- configurations


@pytest.mark.parametrize(
    "config",
    [
        mk.Config(tile_m=32, tile_n=16),
        mk.Config(tile_m=16, tile_n=32, chunk_rows=64),
        mk.Config(intra_ctas=3),
        mk.Config(ctas=2, intra_ctas=1),
    ],
)
def test_config(config):
    case = Case(40, heads=2, kv_heads=2, causal=True, layout="zigzag")
    run(lambda group: call(group, case, config=config), cluster=(1, 2))


def test_explain():
    def work(group):
        given = [Case(32).part("query", 0)] * 5
        return str(mk.explain("ring_attention_backward", *given, torch.zeros(1, 1, 32), config=SMALL))

    text = run(work)[0]
    assert "ring_attention_backward: triton kernel, tiles of 16 queries x 16 keys" in text
    assert "MiB for partials of their gradients" in text


# -- refused


REFUSED = {
    "dout has another shape": (
        dict(dout=torch.zeros(1, 1, 8, 128)),
        r"dout is \(1, 1, 8, 128\), but must be \(1, 1, 8, 64\)",
    ),
    "out has another shape": (
        dict(out=torch.zeros(1, 2, 8, 64)),
        r"out is \(1, 2, 8, 64\), but must be \(1, 1, 8, 64\)",
    ),
    "lse has no rows": (dict(lse=torch.zeros(1, 1, 8, 1)), "lse must have 3 dimensions"),
    "lse is bf16": (dict(lse=torch.zeros(1, 1, 8).bfloat16()), "lse has dtype torch.bfloat16, but must have"),
    "dlse has another shape": (dict(dlse=torch.zeros(1, 1, 9)), "a number per row and head"),
    "dout is bf16": (dict(dout=torch.zeros(1, 1, 8, 64).bfloat16()), "dout has dtype torch.bfloat16, but query has"),
    "query requires grad": (dict(query=torch.zeros(1, 1, 8, 64, requires_grad=True)), "query requires grad, and"),
    "tile_n is too large": (dict(config=mk.Config(tile_n=512)), "config.tile_n is 512, but dk and dv"),
    "tile_k": (dict(config=mk.Config(tile_k=64)), "config.tile_k does not apply to ring_attention_backward"),
    "an unknown layout": (dict(layout="striped"), "layout must be one of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changes, words = REFUSED[name]

    def work(group):
        given = {each: torch.zeros(1, 1, 8, 64) for each in ("dout", "query", "key", "value", "out")}
        given = given | dict(lse=torch.zeros(1, 1, 8)) | changes
        with pytest.raises(mk.ArgumentError, match=words):
            mk.ring_attention_backward(**given)

    run(work)
