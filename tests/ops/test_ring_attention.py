"""ring_attention on simulated clusters: right, for every shape, mask, layout, schedule and size of buffer."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.attention_reference import Case, assert_attention, call, exact, plain_ring
from support.operator_calls import DTYPES, SENTINEL, Guards, assert_same, cluster_name, run

import mkernel as mk
from mkernel.ops.attention import prepare
from mkernel.ops.attention.run import PACKED_PLANS_KEPT
from mkernel.ops.attention.sequences import Pattern, Scoring

SMALL = mk.Config(tile_m=16, tile_n=16)
MASKS = [(False, "contiguous"), (True, "contiguous"), (True, "zigzag"), (False, "zigzag")]


def small(**more):
    return mk.Config(tile_m=16, tile_n=16, **more)


# -- right


@pytest.mark.parametrize(("causal", "layout"), MASKS)
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (1, 3), (2, 2)], ids=cluster_name)
def test_masks_and_layouts(cluster, causal, layout):
    heads = 1 if cluster == (2, 2) else 2
    case = Case(22, heads=heads, kv_heads=heads, causal=causal, layout=layout)
    run(lambda group: call(group, case, config=SMALL), cluster=cluster, seed=cluster[1])


@pytest.mark.parametrize(("causal", "layout"), [(False, "contiguous"), (True, "zigzag")])
def test_three_nodes(causal, layout):
    run(lambda group: call(group, Case(16, causal=causal, layout=layout), config=SMALL), cluster=(3, 2))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cluster", [(1, 2), (1, 3), (2, 1)], ids=cluster_name)
def test_schedules(cluster, seed):
    causal, layout = MASKS[seed % 4]
    case = Case((17, 2, 34, 6, 1, 16)[seed], causal=causal, layout=layout)
    run(lambda group: call(group, case, config=SMALL), cluster=cluster, seed=seed)


@pytest.mark.parametrize(("cluster", "heads", "kv_heads"), [((1, 2), 4, 1), ((1, 2), 8, 2), ((2, 1), 4, 2)])
def test_grouped_heads(cluster, heads, kv_heads):
    case = Case(18, heads=heads, kv_heads=kv_heads, batch=2, causal=True)
    run(lambda group: call(group, case, config=SMALL), cluster=cluster)


@pytest.mark.parametrize(("dtype", "dim"), [*zip(DTYPES * 2, [64, 96, 128, 256, 128, 96])])
def test_dtypes_and_head_dimensions(dtype, dim):
    case = Case(20, heads=2, kv_heads=1, dim=dim, dtype=dtype, causal=True)
    run(lambda group: call(group, case), cluster=(1, 2))


@pytest.mark.parametrize("length", [1, 15, 31, 33, 50])
def test_lengths(length):
    run(lambda group: call(group, Case(length, causal=length % 2 == 0), config=SMALL), cluster=(1, 2), seed=length)


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_scale(scale):
    run(lambda group: call(group, Case(20, scale=scale), config=SMALL))


def test_large_scores():
    """A row's maximum changes from block to block, by more than the exponential can hold."""
    case = Case(40, scale=20.0, causal=True, layout="zigzag")

    def work(group):
        tensors = [case.part(name, group.rank) for name in ("query", "key", "value")]
        out, lse = mk.ring_attention(*tensors, return_lse=True, config=SMALL, **case.arguments())
        expected, exact_lse, _ = exact(case, group.rank, group.size)
        # scores of some 1000, in fp32
        assert torch.allclose(out.double(), expected, atol=5e-3)
        assert torch.allclose(lse.double(), exact_lse, rtol=1e-5)

    run(work)


PACKED = {
    "one document": (0, 44),
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


@pytest.mark.parametrize("steps", [None, 2])
def test_packed_documents_in_nodes(steps):
    """Documents that lie between the two pieces of a rank are sent to it, and seen by none of its rows."""
    case = Case(32, kv_heads=2, heads=2, causal=True, layout="zigzag", documents=(0, 20, 40, 90, 100, 128))

    run(lambda group: call(group, case, config=small(steps=steps)), cluster=(2, 2))


@pytest.mark.parametrize(("causal", "layout"), MASKS)
def test_agrees_with_a_plain_ring(causal, layout):
    case = Case(24, heads=2, kv_heads=1, causal=causal, layout=layout)

    def work(group):
        result, lse = call(group, case, config=SMALL)
        out, ring_lse = plain_ring(case, group.rank, group.size)
        mean = exact(case, group.rank, group.size)[2]
        assert_attention(result, lse, (out, ring_lse, mean), case)

    run(work, cluster=(1, 3))


# -- memory


def buffered(group):
    """Bytes that the operator has for the keys and values of others."""
    [workspace] = [w for (op, _), w in group._workspaces.items() if op == "ring_attention"]
    return workspace.segment.memory.numel() - workspace.data_start


@pytest.mark.parametrize(
    ("cluster", "kv_heads", "causal"), [((1, 4), 5, True), ((1, 4), 1, True), ((2, 2), 1, True), ((2, 2), 5, False)]
)
def test_two_steps_of_keys_and_values_are_enough(cluster, kv_heads, causal):
    """Slots are used again and again; with few heads a tile's state is kept between the parts of a head."""
    length = 64 if kv_heads == 1 else 32
    case = Case(length, heads=kv_heads, kv_heads=kv_heads, causal=causal, layout="zigzag")
    config = small(steps=2)

    def work(group):
        call(group, case, config=config)
        step = 2 * kv_heads * length * case.dim * 4
        assert buffered(group) <= 2 * step
        return mk.explain("ring_attention", *[case.part("key", 0)] * 3, config=config, **case.arguments())

    plan = run(work, cluster=cluster, slow={0: 0.1})[0]
    assert plan.credits
    assert (plan.parts > 1) == (kv_heads == 1)
    assert plan.window >= 2


@pytest.mark.parametrize("steps", [1, 9])
def test_steps(steps):
    case = Case(48, heads=3, kv_heads=3, causal=True)

    def work(group):
        call(group, case, config=small(steps=steps))
        assert buffered(group) <= steps * 2 * 3 * 48 * 64 * 4

    run(work, cluster=(1, 3), slow={2: 0.1})


def test_by_default_a_head_is_not_cut():
    case = Case(48)

    def work(group):
        call(group, case, config=SMALL)
        return mk.explain("ring_attention", *[case.part("key", 0)] * 3, config=SMALL)

    assert run(work, cluster=(1, 3))[0].parts == 1


# -- many schedules


LATE, SLOW, BOTH = {"late": {1: 3000}}, {"slow": {0: 0.02}}, {"late": {0: 3000}, "slow": {1: 0.02}}


@pytest.mark.parametrize(
    ("cluster", "options"),
    [((1, 2), LATE), ((1, 2), SLOW), ((1, 2), BOTH), ((2, 1), LATE), ((2, 1), SLOW), ((2, 2), BOTH)],
)
def test_stragglers(cluster, options):
    def work(group):
        for turn in range(2):
            call(group, Case(18, heads=2, kv_heads=2, causal=turn == 1), turn, config=SMALL)

    run(work, cluster=cluster, **options)


@pytest.mark.parametrize("cluster", [(1, 1), (1, 3), (2, 1)], ids=cluster_name)
def test_ctas_one_after_the_other(cluster):
    """With slots for all rounds, nothing waits for a tile."""
    case = Case(20, heads=2, kv_heads=2, causal=True, layout="zigzag")
    config = small(steps=cluster[0] * cluster[1], intra_ctas=int(cluster[1] > 1))
    run(lambda group: call(group, case, config=config), cluster=cluster, resident=1)


def test_all_schedules_give_the_same_bits():
    case = Case(20, dtype=torch.bfloat16, causal=True)
    options = [{}, {"slow": {2: 0.02}}, {"ctas": 9}]
    results = [
        run(lambda group: call(group, case, config=SMALL), cluster=(2, 2), seed=seed, **option)
        for seed, option in enumerate(options)
    ]
    for others in results[1:]:
        for (out, lse), (first, first_lse) in zip(others, results[0]):
            assert_same(out, first)
            assert_same(lse, first_lse)


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)], ids=cluster_name)
def test_many_calls(cluster):
    def work(group):
        for turn in range(8):
            call(group, Case(8, heads=2, kv_heads=2, causal=turn % 2 == 0), turn, config=small(steps=2 + turn % 2))

    run(work, cluster=cluster, seed=3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.thorough
def test_shapes_alternate_in_nodes(causal):
    """No signal and no transfer of a call is on its way when it ends: the next call uses the words and slots in another
    way."""

    def work(group):
        for turn, (length, heads, steps) in enumerate([(48, 8, 2), (16, 2, None), (32, 3, 2), (16, 8, 2)]):
            case = Case(length, heads=heads, kv_heads=heads, causal=causal)
            call(group, case, turn, config=small(steps=steps))

    run(work, cluster=(2, 2), slow={1: 0.02})


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)], ids=cluster_name)
def test_shapes_alternate(cluster, seed):
    """Counters and stamps of one shape lie where those of another do not."""

    def work(group):
        for turn, (length, heads) in enumerate([(40, 1), (3, 4), (40, 3), (18, 1), (3, 2)]):
            case = Case(length, heads=heads, kv_heads=heads, dtype=DTYPES[turn % 3], dim=64 + 64 * (turn % 2))
            call(group, case, turn, config=small(steps=2))

    run(work, cluster=cluster, seed=seed, slow={seed % 2: 0.05})


def test_groups_and_streams():
    case = Case(18, causal=True)

    def work(group):
        part = group.split(group.rank % 2)
        call(part, case, config=SMALL)
        call(group, case, config=SMALL)
        results = []
        for turn in range(4):
            tensors = [case.part(name, group.rank, turn) for name in ("query", "key", "value")]
            with group.world.stream(group.world_rank, turn % 2):
                results.append((mk.ring_attention(*tensors, is_causal=True, config=SMALL), tensors))
        group.synchronize()
        for turn, (out, _) in enumerate(results):
            assert_attention(out, None, exact(case, group.rank, group.size, turn), case)

    run(work, cluster=(2, 2))


# -- layouts in memory, and what is around


def frames(case, group, name, turn=0):
    """The same values in other layouts, with NaN around: heads beside rows, an odd column, every second row."""
    values = case.part(name, group.rank, turn)
    batch, heads, length, dim = values.shape
    nan = float("nan")
    beside = torch.full((batch, length, heads, dim), nan, dtype=values.dtype).transpose(1, 2)
    odd = torch.full((batch, heads, length, dim + 3), nan, dtype=values.dtype)[..., 1 : dim + 1]
    second = torch.full((batch, heads, 2 * length, dim), nan, dtype=values.dtype)[:, :, ::2]
    transposed = torch.full((batch, heads, dim, length), nan, dtype=values.dtype).transpose(2, 3)
    return [frame.copy_(values) for frame in (beside, odd, second, transposed)]


@pytest.mark.parametrize(("cluster", "which"), [((1, 2), 0), ((1, 2), 1), ((1, 2), 2), ((1, 2), 3), ((2, 1), 3)])
def test_layouts_in_memory(cluster, which):
    case = Case(18, heads=2, kv_heads=2, dtype=torch.bfloat16, causal=True)

    def work(group):
        tensors = [frames(case, group, name)[which] for name in ("query", "key", "value")]
        call(group, case, tensors=tensors, config=SMALL)

    run(work, cluster=cluster)


@pytest.mark.parametrize("which", range(4))
def test_nothing_beside_out_is_written(which):
    case = Case(18, heads=2, kv_heads=2, dim=96, dtype=torch.bfloat16)
    shapes = [(18, 4, 128), (4, 18, 131), (4, 40, 128), (4, 100, 18)]
    views = [
        lambda memory: memory[None, :, 1:3, :96].transpose(1, 2),
        lambda memory: memory[None, 1:3, :, 1:97],
        lambda memory: memory[None, 1:3, 2:38:2, 16:112],
        lambda memory: memory[None, 1:3, 2:98].transpose(2, 3),
    ]

    def work(group):
        memory = torch.full(shapes[which], SENTINEL, dtype=case.dtype)
        out = views[which](memory)
        result, _ = call(group, case, out=out, config=SMALL)
        assert result is out
        out.fill_(SENTINEL)
        assert (memory == SENTINEL).all()

    run(work)


@pytest.mark.parametrize("cluster", [(1, 2), (2, 2)], ids=cluster_name)
def test_nothing_beside_the_workspace_is_written(cluster, monkeypatch):
    guards = Guards(monkeypatch)

    def work(group):
        for turn, length in enumerate([3, 35, 18]):
            case = Case(length, causal=turn == 1)
            call(group, case, turn, config=small(chunk_rows=16 + 16 * (turn % 2)))

    run(work, cluster=cluster)
    guards.check()


# -- what moves


def traffic_of(case, cluster, config=SMALL):
    def work(group):
        call(group, case, config=config)
        group.barrier()
        return group.world.traffic

    return run(work, cluster=cluster)[0]


@pytest.mark.parametrize("cluster", [(1, 3), (2, 2), (3, 1)], ids=cluster_name)
def test_everything_crosses_between_two_nodes_once(cluster):
    gpus = cluster[1]
    case = Case(32, heads=2, kv_heads=2)
    panel = 2 * 2 * 32 * 64 * 4
    traffic = traffic_of(case, cluster)
    for source in range(cluster[0] * gpus):
        for target in range(cluster[0] * gpus):
            same_node = source // gpus == target // gpus
            counterparts = source % gpus == target % gpus and not same_node
            assert traffic.network[source][target] == (panel if counterparts else 0)
            assert traffic.nvlink[source][target] == (panel * cluster[0] if same_node and source != target else 0)


def test_what_is_masked_is_not_sent():
    panel = 2 * 32 * 64 * 4
    contiguous = traffic_of(Case(32, causal=True), (1, 3)).nvlink
    assert contiguous == [[0, panel, panel], [0, 0, panel], [0, 0, 0]]
    zigzag = traffic_of(Case(32, causal=True, layout="zigzag"), (1, 3)).nvlink
    assert zigzag == [[0, panel // 2, panel // 2], [panel, 0, panel // 2], [panel, panel, 0]]
    documents = traffic_of(Case(32, documents=(0, 16, 48, 64, 96)), (1, 3)).nvlink
    assert documents == [[0, panel // 2, 0], [panel // 2, 0, 0], [0, 0, 0]]
    nodes = traffic_of(Case(16, causal=True), (2, 2)).network
    assert nodes == [[0, 0, panel // 2, 0], [0, 0, 0, panel // 2], [0] * 4, [0] * 4]


def test_what_is_masked_is_not_computed():
    def dots(case):
        return traffic_of(case, (1, 2)).multiplications

    # two products for each tile of queries and block of keys
    assert dots(Case(64, causal=True)) == [2 * (1 + 2 + 3 + 4), 2 * (5 + 6 + 7 + 8)]
    assert dots(Case(64, causal=True, layout="zigzag")) == [2 * (1 + 2 + 7 + 8), 2 * (3 + 4 + 5 + 6)]
    assert dots(Case(64, documents=(0, 64, 128))) == [2 * 16] * 2


def test_computing_begins_before_everything_is_there():
    traffic = traffic_of(Case(32, heads=3, kv_heads=3), (1, 2))
    assert all(0 < before < total for before, total in zip(traffic.before_last_arrival, traffic.multiplications))


# -- configurations, explain, zigzag, nothing to do


@pytest.mark.parametrize(
    "config",
    [
        mk.Config(tile_m=32, tile_n=16),
        mk.Config(tile_m=16, tile_n=64),
        mk.Config(chunk_rows=1),
        mk.Config(chunk_rows=64),
        mk.Config(intra_ctas=3),
        mk.Config(ctas=2, intra_ctas=1),
        mk.Config(copy_bytes=512),
    ],
)
def test_config(config):
    case = Case(40, heads=2, kv_heads=2, causal=True, layout="zigzag")
    run(lambda group: call(group, case, config=config), cluster=(1, 2))


def test_several_senders():
    case = Case(34)
    run(lambda group: call(group, case, config=small(intra_ctas=2, send_ctas=2)), cluster=(2, 2))


def test_ranks_may_have_different_configurations():
    """All but the block of keys, the chunk and the steps is a rank's own affair."""
    configs = [small(), small(ctas=3), mk.Config(tile_m=32, tile_n=16, intra_ctas=2)]
    case = Case(40, heads=2, kv_heads=2, causal=True)
    run(lambda group: call(group, case, config=configs[group.rank]), cluster=(1, 3))


def test_explain():
    def work(group):
        q, k = torch.zeros(2, 4, 40, 64), torch.zeros(2, 2, 40, 64)
        return [
            str(mk.explain("ring_attention", q, k, k, enable_gqa=True, config=SMALL)),
            str(mk.explain("ring_attention", q, torch.zeros(2, 4, 40, 65)[..., 1:], q)),
            str(mk.explain("ring_attention", q[:1, :1], q[:1, :1], q[:1, :1], config=small(steps=3))),
        ]

    plain, odd, cut = run(work, cluster=(1, 5))[0]
    assert "triton kernel, tiles of 16 queries x 16 keys" in plain
    assert "Triton: the Gluon kernel runs on Hopper GPUs only" in plain
    assert "slots for 2 of 4 rounds" in plain
    assert "key: rows are not contiguous and 16-byte aligned" in odd
    assert "over NVLink" in plain
    assert "parts, its state is kept in between" in cut


@pytest.mark.parametrize("shape", [(0, 1, 8, 64), (1, 0, 8, 64), (1, 1, 0, 64)], ids=str)
def test_explain_nothing(shape):
    def work(group):
        return str(mk.explain("ring_attention", *[torch.zeros(shape)] * 3, cu_seqlens=[0, 2 * shape[2]]))

    assert run(work)[0].startswith("ring_attention: triton kernel")


def test_explain_is_what_runs():
    case = Case(40)

    def work(group):
        plan = mk.explain("ring_attention", *[case.part("key", 0)] * 3)
        launched = []
        launch = group.world.launcher.launch
        group.world.launcher.launch = lambda rank, spec: (launched.append(spec.grid), launch(rank, spec))
        call(group, case)
        return plan.config.ctas, launched

    ctas, launched = run(work, cluster=(1, 1))[0]
    assert launched == [ctas]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_zigzag(size):
    sequence = torch.arange(2 * 12 * size).view(1, 2, 12 * size, 1)

    def work(group):
        part = mk.to_zigzag(sequence)
        positions = Case(12, layout="zigzag").positions(group.rank, size)
        assert torch.equal(part, sequence[:, :, positions])
        assert torch.equal(mk.to_zigzag(sequence.transpose(0, 2), dim=0), part.transpose(0, 2))
        return part

    parts = run(work, cluster=(1, size))
    assert torch.equal(mk.from_zigzag(parts), sequence)
    assert torch.equal(mk.from_zigzag([part.transpose(0, 2) for part in parts], dim=0), sequence.transpose(0, 2))
    with pytest.raises(mk.ArgumentError, match="parts must be those of"):
        mk.from_zigzag([*parts, sequence[:, :, :1]])


@pytest.mark.parametrize("shape", [(0, 2, 4, 64), (1, 0, 4, 64), (1, 2, 0, 64)])
def test_empty(shape):
    def work(group):
        x = torch.zeros(shape)
        out, lse = mk.ring_attention(x, x, x, return_lse=True)
        assert out.shape == shape
        assert lse.shape == shape[:3]
        call(group, Case(5))

    run(work)


# -- anything


@settings(
    max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    cluster=st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)]),
    length=st.integers(1, 40),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (3, 3)]),
    dtype=st.sampled_from(DTYPES),
    masks=st.sampled_from(MASKS),
    cuts=st.none() | st.lists(st.floats(0, 1), max_size=4),
    steps=st.sampled_from([None, 4, 9]),
    seed=st.integers(0, 10**6),
)
def test_anything(cluster, length, heads, dtype, masks, cuts, steps, seed):
    causal, layout = masks
    length += length % 2 if layout == "zigzag" else 0
    whole = cluster[0] * cluster[1] * length
    documents = None if cuts is None else (0, *sorted(int(cut * whole) for cut in cuts), whole)
    case = Case(
        length, heads=heads[0], kv_heads=heads[1], dtype=dtype, causal=causal, layout=layout, documents=documents
    )

    def work(group):
        call(group, case, config=small(steps=steps))

    run(work, cluster=cluster, seed=seed)


def test_other_documents_run_the_same_binary_and_are_soon_forgotten():
    """In training they are new at every step."""

    def work(group):
        tensors = [torch.ones(1, 1, 96, 64)] * 4
        variants, first = set(), None
        for step in range(2 * PACKED_PLANS_KEPT):
            launch = prepare(group, *tensors, None, Pattern(True, "contiguous", (0, step + 1, 96)), Scoring(), None)
            variants.add(launch.variant)
            first = first or weakref.ref(launch.arguments["call"].mask.spans)
            del launch
        return len(variants), first()

    assert run(work, cluster=(1, 1)) == [(1, None)]
