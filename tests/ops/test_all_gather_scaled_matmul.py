"""all_gather_scaled_matmul on simulated clusters, against float64 of what the fp8 rows of all ranks stand for; every
synchronisation rule that scales add, broken; and what is refused."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from support.broken_variants import ONE_HALF, Broken, assert_caught
from support.operator_calls import CLUSTERS, cluster_name, run
from support.scaled_reference import (
    BLOCKS,
    E4M3,
    E5M2,
    RECIPES,
    ROWS,
    TENSORS,
    Quantized,
    ScaledGather,
    call_gather,
    recipe_name,
)
from support.scenarios import ScaledGathers

import mkernel as mk
from mkernel.lang import scaling
from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.layout import row_of, word_of
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import SEND
from mkernel.ops.all_gather_matmul import kernel, transfer
from mkernel.ops.all_gather_matmul.protocol import notify_chunk, wait_rows
from mkernel.ops.all_gather_matmul.transfer import copy_scales

TILES = mk.Config(tile_m=16, tile_n=64, tile_k=64, chunk_rows=8)
WIDE = mk.Config(tile_m=16, tile_n=256, tile_k=64, chunk_rows=3)  # columns of several blocks
# which recipe, kinds, result and configuration go together
CASES = [
    (TENSORS, (E4M3, E4M3), torch.bfloat16, TILES),
    (ROWS, (E5M2, E4M3), torch.float32, TILES),
    (("TensorWise", "RowWise"), (E4M3, E5M2), torch.float16, None),
    (("RowWise", "TensorWise"), (E4M3, E4M3), torch.bfloat16, WIDE),
    (BLOCKS, (E4M3, E4M3), torch.bfloat16, TILES),
    (BLOCKS, (E5M2, E4M3), torch.float32, WIDE),
]
PLACES = [
    (cluster, number)
    for number in range(len(CASES))
    for cluster in sorted({(1, 2), CLUSTERS[number], CLUSTERS[(number + 4) % 7]})
]


@pytest.mark.parametrize(("cluster", "number"), PLACES, ids=cluster_name)
def test_recipes(cluster, number):
    """Three blocks of k and three of n, all of them with a remainder; k that TMA reads and k that it does not; twice,
    for both halves of the workspace. Every third rank has no columns."""
    recipe, kinds, dtype, config = CASES[number]
    columns = tuple(0 if rank % 3 == 2 else 270 - rank for rank in range(cluster[0] * cluster[1]))
    case = ScaledGather(13, columns, (272, 261)[number % 2], dtype, Quantized(recipe, kinds))

    def work(group):
        for turn in range(2):
            call_gather(group, case, turn, config=config, return_gathered=turn == 1)

    run(work, cluster=cluster, seed=number)


@pytest.mark.parametrize("recipe", [ROWS, BLOCKS], ids=recipe_name)
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2)], ids=cluster_name)
def test_teams(cluster, recipe):
    """The kernel for few rows, whose tiles have rows of several ranks, and whose CTAs share k."""
    config = mk.Config(tile_m=16, tile_n=16, tile_k=32, team_ctas=2)
    for k in (300, 304):
        case = ScaledGather(5, 40, k, torch.float32, Quantized(recipe))
        run(lambda group: [call_gather(group, case, turn, config=config) for turn in range(3)], cluster=cluster)


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_name)
def test_shapes(recipe):
    def work(group):
        for m, n, k in ((1, 1, 1), (3, 2, 128), (16, 128, 129), (1, 129, 17)):
            call_gather(group, ScaledGather(m, n, k, how=Quantized(recipe)), bias=torch.ones(n).bfloat16())
        for m, n, k in ((0, 3, 4), (3, 0, 130), (3, 4, 0)):
            call_gather(group, ScaledGather(m, n, k, how=Quantized(recipe)), return_gathered=bool(m))

    run(work, cluster=(1, 2))


LAYOUTS = {
    "column-major": lambda x: x.t().contiguous().t() if x.dim() == 2 else x,
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x,
    "wide rows": lambda x: torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]] if x.dim() else x,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    for cluster in ((1, 2), (2, 1)):
        for recipe in (TENSORS, BLOCKS):
            case = ScaledGather(6, 140, 144, how=Quantized(recipe))
            run(lambda group: call_gather(group, case, lay_out=LAYOUTS[layout], return_gathered=True), cluster=cluster)


def test_ranks_may_have_one_scale_or_one_for_each_row():
    """What travels is the same: a scale with each row."""
    case = ScaledGather(9, 20, 130)

    def work(group):
        (a, scale_a), (b, scale_b) = case.rows(group.rank), case.columns(group.rank)
        its = torch.tensor(2.0) if group.rank else scale_a
        y, rows, scales = mk.all_gather_scaled_matmul(a, b, its, scale_b, out_dtype=torch.float32, return_gathered=True)
        assert torch.equal(scales, torch.cat([case.rows(0)[1], torch.full((9, 1), 2.0)]))
        exact = mk.dequantize(rows, scales, torch.float64) @ mk.dequantize(b, scale_b, torch.float64)
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-4)

    run(work, cluster=(1, 2))


def test_more_dimensions_and_a_given_result():
    case = ScaledGather(12, 10, 140, torch.float32, Quantized(BLOCKS))

    def work(group):
        (a, scale_a), (b, scale_b) = case.rows(group.rank), case.columns(group.rank)
        given = a.view(3, 4, 140), b, scale_a.view(3, 4, 2), scale_b
        y = call_gather(group, case)
        z, rows, scales = mk.all_gather_scaled_matmul(
            *given, out_dtype=torch.float32, gather_dim=1, return_gathered=True
        )
        assert torch.equal(z, y.view(group.size, 3, 4, 10).transpose(0, 1).flatten(1, 2))
        assert (rows.shape, scales.shape) == ((3, 4 * group.size, 140), (3, 4 * group.size, 2))
        out = torch.empty(3 * group.size, 4, 10)
        assert mk.all_gather_scaled_matmul(*given, out=out) is out
        assert torch.equal(out.view(-1, 10), y)

    run(work, cluster=(1, 2))


def test_what_moves():
    """Within the node, exactly the rows and their scales; between nodes, what lies between them, too."""
    case = ScaledGather(16, 8, 144, how=Quantized(BLOCKS))

    def work(group):
        call_gather(group, case, config=TILES)
        group.barrier()
        return group.world.traffic

    traffic = run(work, cluster=(2, 2))[0]
    row = 144 + 2 * 4
    for source in range(4):
        for target in range(4):
            same_node = source // 2 == target // 2 and source != target
            counterparts = source % 2 == target % 2 and source != target
            assert traffic.nvlink[source][target] == (2 * 16 * row if same_node else 0)
            assert traffic.network[source][target] == (2 * (7 * 256 + row) if counterparts else 0)


def test_ctas_one_after_the_other():
    case = ScaledGather(17, 20, 140, how=Quantized(BLOCKS))
    for cluster in ((1, 2), (2, 2)):
        run(
            lambda group: [call_gather(group, case, turn, config=TILES) for turn in range(2)],
            cluster=cluster,
            resident=1,
        )


# -- broken on purpose


CASE = ScaledGather(12, 5, 144, how=Quantized(BLOCKS))
NODE, NETWORK, TWO_LEVELS = (ScaledGathers(cluster, CASE) for cluster in ((1, 2), (2, 1), (2, 2)))
AT = tl.constexpr(144)  # where scales begin in a row of these cases
TAKEN = tl.constexpr(144 + 2 * 4)


@triton.jit
def notify_before_scales(comm, call, chunk, peers):
    rank = rank_of(comm.context)
    base = rank // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE
    for i in range(1, comm.RANKS_PER_NODE):
        notify_chunk(comm, call.gather, base + (rank + i) % comm.RANKS_PER_NODE, chunk.source, chunk.index)
    copy_scales(comm, call, chunk, peers)


@triton.jit
def post_before_scales(comm, call, chunk, peers):
    rank = rank_of(comm.context)
    segment = tl.load(comm.context + SEGMENT)
    signal = word_of(call.gather.arrived, comm.epoch, rank, chunk.index) * 8
    size = (chunk.rows - 1) * call.gather.rows.row_stride + TAKEN
    for i in range(1, comm.WORLD_SIZE // comm.RANKS_PER_NODE):
        peer = (rank + i * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
        whole = Transfer(peer, segment, chunk.offset, segment, chunk.offset, size.to(tl.int64))
        post(comm.context, whole, signal, comm.epoch, SEND)
    copy_scales(comm, call, chunk, peers)


@triton.jit
def no_scales_behind_the_last_row(call):
    return AT


@triton.jit
def look_at_scales_first(comm, gather, source, row, rows):
    segment = segment_of(comm.context, rank_of(comm.context), tl.float32)
    scale = tl.load(segment + (row_of(gather.rows, comm.epoch, source * gather.m + row) + AT) // 4)
    return wait_rows(comm, gather, source, row, rows) & (scale != 0)


@triton.jit
def pass_on_own_scales(comm, call, chunk, peers):
    if chunk.source == rank_of(comm.context):
        copy_scales(comm, call, chunk, peers)


@triton.jit
def scales_of_the_other_half(scales, part, first, end, block, SIZE: tl.constexpr):
    i = first + tl.arange(0, SIZE)
    place = (i // scales.GROUP).to(tl.int64) * scales.row + (1 - tl.cast(part, tl.int64)) * scales.part
    return tl.load(scales.data + place + tl.cast(block, tl.int64) * scales.block, mask=i < end, other=0.0)


BROKEN = {
    "a signal before the scales": Broken(NODE, {transfer.copy_scales: notify_before_scales}),
    "a request before the scales are staged": Broken(NETWORK, {transfer.copy_scales: post_before_scales}),
    "a request that is too short for the last scales": Broken(
        NETWORK, {transfer.row_bytes: no_scales_behind_the_last_row}
    ),
    "scales are read before their signal": Broken(NODE, {kernel.wait_rows: look_at_scales_first}),
    "scales that came over the network are read before their signal": Broken(
        NETWORK, {kernel.wait_rows: look_at_scales_first}
    ),
    "scales of other nodes are not passed on": Broken(TWO_LEVELS, {transfer.copy_scales: pass_on_own_scales}),
    "scales of the half before": Broken(
        ScaledGathers((1, 2), CASE, calls=3), {scaling.load_scales: scales_of_the_other_half}
    ),
    "one half for all epochs": Broken(ScaledGathers((1, 2), CASE, calls=2), ONE_HALF),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    assert_caught(BROKEN[name])


def test_a_dead_peer():
    """All others find out, with a record, and nothing that never came is in a result."""
    case = ScaledGather(9, 5, 140, how=Quantized(BLOCKS))

    def work(group):
        call_gather(group, case)
        if group.rank == 1:
            return None
        with pytest.raises(mk.CommTimeout) as late:
            call_gather(group, case)
        return late.value.record

    record = run(work, cluster=(1, 2), timeout=1e-4)[0]
    assert (record.rank, record.peer, record.signal) == (0, 1, "arrived")


# -- what is refused: what is not checked in common with the sums over ranks


def test_what_is_refused():
    a, b = torch.ones(4, 300).to(E4M3), torch.ones(200, 300).to(E4M3).t()
    right = dict(a=a, b=b, scale_a=torch.ones(4, 1), scale_b=torch.ones(1, 200))
    for changes, words in (
        (dict(a=a.float()), "call all_gather_matmul, which has no scales"),
        (dict(scale_a=torch.ones(8, 1)), "scale_a has shape .8, 1., but a is 4 x 300"),
        (dict(scale_a=torch.ones(4, 3)), "it must have 3 x 2, one for each block of 128 x 128"),
        (dict(out=torch.empty(4, 200).bfloat16()), r"out has shape \(4, 200\), but the result has \(8, 200\)"),
        (dict(bias=torch.ones(200)), "bias is torch.float32 .* but the result is torch.bfloat16"),
        (dict(out_dtype=torch.int8), "out_dtype must be one of"),
        (dict(gather_dim=1), "must not be the last dimension"),
        (dict(config=mk.Config(tile_k=16)), "must be at least 32"),
    ):

        def work(group):
            with pytest.raises(mk.ArgumentError, match=words):
                mk.all_gather_scaled_matmul(**(right | changes))
            mk.all_gather_scaled_matmul(**right)

        run(work, cluster=(1, 2))


def test_ranks_that_disagree_about_blocks():
    def work(group):
        a, b = torch.ones(4, 300).to(E4M3), torch.ones(200, 300).to(E4M3).t()
        scales = (torch.ones(4, 3), torch.ones(3, 2)) if group.rank else (torch.ones(4, 1), torch.ones(1, 200))
        with pytest.raises(mk.ArgumentError, match="scales"):
            mk.all_gather_scaled_matmul(a, b, *scales)

    run(work, cluster=(1, 2))
