"""all_gather_scaled_matmul that quantizes its rows, on simulated clusters: bit for bit what it returns for rows that
`mk.quantize` has quantized; every synchronisation rule that this adds, broken; and what is refused."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import pytest
import torch
import triton
from support.broken_variants import Broken, SimulatedCalls, assert_caught
from support.operator_calls import cluster_name, run
from support.scaled_reference import E4M3, E5M2

import mkernel as mk
from mkernel.lang.context import SEGMENT, rank_of
from mkernel.lang.layout import word_of
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import SEND
from mkernel.ops.all_gather_matmul import kernel, transfer
from mkernel.ops.all_gather_matmul.protocol import notify_chunk
from mkernel.ops.all_gather_matmul.scaled import explain
from mkernel.ops.all_gather_matmul.transfer import quantize_chunk
from mkernel.sim.scheduler import Options

tl = triton.language
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WEIGHTS = {"RowWise": "RowWise", "BlockWise1x128": "BlockWise128x128"}
TILES = mk.Config(tile_m=16, tile_n=64, tile_k=64, chunk_rows=4)
CTAS = mk.Config(tile_m=16, tile_n=16, tile_k=32, chunk_rows=3, send_ctas=2, intra_ctas=2, ctas=6)


@dataclass(frozen=True)
class Rows:
    """m rows of each rank, before they are quantized, and how that is done."""

    m: int = 13
    n: int = 40
    k: int = 261
    recipe: str = "RowWise"
    dtype: torch.dtype = BF16
    kind: torch.dtype = E4M3

    def of(self, rank, turn=0):
        """Rows of very different sizes: one of zeros, one that is tiny, and one with a block of zeros."""
        generator = torch.Generator().manual_seed(100 * turn + rank)
        size = 2.0 ** torch.randint(-9, 9, (self.m, 1), generator=generator)
        rows = torch.randn(self.m, self.k, generator=generator) * size
        for row, factor in ((2, 0.0), (3, 2.0**-149 if self.dtype == FP32 else 2.0**-24)):
            rows[row : row + 1] *= factor
        rows[4:5, 128:256] = 0
        return rows.to(self.dtype)

    def weight(self, rank):
        """(b, scale_b)"""
        w, scale = mk.quantize(torch.randn(self.n, self.k, generator=torch.Generator().manual_seed(-rank)), self.right)
        return w.t(), scale.t()

    @property
    def right(self):
        return WEIGHTS[self.recipe]

    @property
    def how(self):
        return dict(recipe_a=self.recipe, dtype_a=self.kind)


def bits(tensor):
    """A tensor of any dtype for a comparison in which NaN is NaN."""
    return torch.nan_to_num(tensor.float(), nan=123.0)


def assert_same_calls(group, case, turn=0, *, lay_out=lambda rows: rows, rows=None, **more):
    """One call on rows that are quantized before it, and one that does it."""
    rows = case.of(group.rank, turn) if rows is None else rows
    b, scale_b = case.weight(group.rank)
    a, scale_a = mk.quantize(rows, case.recipe, dtype=case.kind)
    expected = mk.all_gather_scaled_matmul(a, b, scale_a, scale_b, return_gathered=True, **more)
    given = lay_out(rows)
    found = mk.all_gather_scaled_matmul(given, b, None, scale_b, return_gathered=True, **case.how, **more)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(bits(one), bits(other))
    assert torch.equal(bits(given), bits(rows))
    return found


CASES = [
    Rows(),
    Rows(recipe="BlockWise1x128", dtype=FP16, kind=E5M2),
    Rows(recipe="BlockWise1x128", dtype=FP32, k=272),
    Rows(kind=E5M2, dtype=FP32, k=1040, m=9),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.recipe}-{case.k}")
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)], ids=cluster_name)
def test_bits(cluster, case):
    def work(group):
        for turn, config in enumerate((TILES, None, CTAS)):
            assert_same_calls(group, case, turn, config=config)

    run(work, cluster=cluster)


@pytest.mark.parametrize("m", [64, 256])
def test_ranks_of_which_only_some_quantize(m):
    """On a Hopper GPU, where the others have a kernel for few rows, or one for many."""

    def work(group):
        case = Rows(m=m, n=136, k=272)
        b, scale_b = case.weight(0)
        for turn in range(2):
            quantized = [mk.quantize(case.of(rank, turn), case.recipe) for rank in range(group.size)]
            if group.rank == 0:
                y = mk.all_gather_scaled_matmul(case.of(0, turn), b, None, scale_b, **case.how)
            else:
                y = mk.all_gather_scaled_matmul(quantized[1][0], b, quantized[1][1], scale_b)
            exact = torch.cat([mk.dequantize(*each, torch.float64) for each in quantized])
            exact = exact @ mk.dequantize(b, scale_b, torch.float64)
            assert ((y.double() - exact).abs() <= 2**-7 * exact.abs() + 1e-3 * exact.abs().amax(1, keepdim=True)).all()

    sim = Options(capability=(9, 0), ctas=8)
    mk.spawn(work, gpus_per_node=2, device="cpu", timeout=5.0, sim=sim)


@pytest.mark.parametrize("recipe", WEIGHTS)
def test_shapes_and_layouts(recipe):
    """Also without columns or rows, and where a row has one block."""

    def work(group):
        for m, n, k in ((1, 1, 1), (5, 3, 128), (16, 128, 129), (3, 0, 130), (0, 3, 4), (3, 4, 0)):
            assert_same_calls(group, Rows(m, n, k, recipe))
        case = Rows(6, 8, 144, recipe)
        assert_same_calls(group, case, lay_out=lambda rows: rows.t().contiguous().t())
        assert_same_calls(group, case, lay_out=lambda rows: rows.repeat_interleave(3, 1)[:, ::3])
        assert_same_calls(group, case, rows=case.of(0)[:1].expand(6, -1))

    run(work, cluster=(1, 2))


@pytest.mark.parametrize("recipe", WEIGHTS)
def test_what_is_not_finite(recipe):
    """NaN of everything that shares a scale."""
    case = Rows(4, 8, 300, recipe)

    def work(group):
        rows = case.of(group.rank)
        rows[0, 5], rows[1, 299] = float("nan"), -float("inf")
        y, narrow, scales = assert_same_calls(group, case, rows=rows)
        assert y[:2].isnan().all()
        assert not y[2:4].isnan().any()
        blocks = recipe != "RowWise"
        assert int(mk.dequantize(narrow, scales)[:2].isnan().sum()) == (128 + 44 if blocks else 600)

    run(work, cluster=(1, 2))


def test_ranks_may_do_otherwise():
    """What travels is the same."""
    case = Rows(recipe="BlockWise1x128")

    def work(group):
        rows, (b, scale_b) = case.of(group.rank), case.weight(group.rank)
        a, scale_a = mk.quantize(rows, case.recipe)
        expected = mk.all_gather_scaled_matmul(a, b, scale_a, scale_b)
        if group.rank:
            found = mk.all_gather_scaled_matmul(rows, b, None, scale_b, **case.how)
        else:
            found = mk.all_gather_scaled_matmul(a, b, scale_a, scale_b)
        assert torch.equal(found, expected)

    run(work, cluster=(2, 2))


def test_more_dimensions_a_given_result_and_names():
    case = Rows(12, 10, 140, "BlockWise1x128", FP32)

    def work(group):
        rows, (b, scale_b) = case.of(group.rank), case.weight(group.rank)
        y, narrow, scales = assert_same_calls(group, case, out_dtype=FP32)
        shaped = rows.view(3, 4, 140), b, None, scale_b
        recipe = torch.nn.functional.ScalingType.BlockWise1x128
        z, *others = mk.all_gather_scaled_matmul(
            *shaped, out_dtype=FP32, gather_dim=1, return_gathered=True, recipe_a=recipe
        )
        for one, other in zip((z, *others), (y, narrow, scales)):
            turned = other.view(group.size, 3, 4, -1).transpose(0, 1).flatten(1, 2)
            assert torch.equal(one.float(), turned.float())
        out = torch.empty(12 * group.size, 10)
        for _ in range(3):  # the last one is prepared where calls are
            assert mk.all_gather_scaled_matmul(rows, b, None, scale_b, out=out.zero_(), recipe_a=recipe) is out
            assert torch.equal(out, y)

    run(work, cluster=(1, 2))


def test_what_moves():
    """As much as of rows that are quantized before the call."""

    def work(group, quantizes):
        case = Rows(16, 8, 144, "BlockWise1x128")
        rows, (b, scale_b) = case.of(group.rank), case.weight(group.rank)
        if quantizes:
            mk.all_gather_scaled_matmul(rows, b, None, scale_b, **case.how, config=TILES)
        else:
            a, scale_a = mk.quantize(rows, case.recipe)
            mk.all_gather_scaled_matmul(a, b, scale_a, scale_b, config=TILES)
        group.barrier()
        return group.world.traffic.nvlink, group.world.traffic.network

    one, other = (run(work, quantizes, cluster=(2, 2))[0] for quantizes in (True, False))
    assert one == other


def test_ctas_one_after_the_other():
    """None waits for one with a higher number."""
    for cluster in ((1, 2), (2, 2)):
        run(
            lambda group: [assert_same_calls(group, CASES[1], turn, config=CTAS) for turn in range(2)],
            cluster=cluster, resident=1,
        )  # fmt: skip


def test_the_plan():
    def work(group):
        case = Rows()
        plan = explain(case.of(0), *case.weight(0)[:1], None, case.weight(0)[1], **case.how)
        assert "a scale for each row of a" in str(plan)
        assert "a is quantized by the kernel, into the workspace" in str(plan)
        assert plan.config.send_ctas >= 1
        assert plan.config.join_tiles == 0
        asked = dict(case.how, config=mk.Config(join_tiles=2))
        plan = explain(case.of(0), *case.weight(0)[:1], None, case.weight(0)[1], **asked)
        assert plan.config.join_tiles == 0, "no tiles of own rows depend on nothing"

    run(work, cluster=(1, 2))


# -- broken on purpose


@dataclass(frozen=True)
class Gathers(SimulatedCalls):
    op: ClassVar = "all_gather_matmul"
    _: KW_ONLY
    case: Any = Rows(12, 5, 144, "BlockWise1x128")

    def work(self, group):
        for turn in range(self.calls):
            assert_same_calls(group, self.case, turn, config=mk.Config(tile_m=16, tile_n=16, tile_k=32, chunk_rows=4))


ALONE, NODE, NETWORK = Gathers((1, 1)), Gathers((1, 2)), Gathers((2, 1))
TAKEN = tl.constexpr(144 + 2 * 4)  # bytes of a row and its scales, in these cases


@triton.jit
def notify_before_quantizing(comm, call, chunk):
    rank = rank_of(comm.context)
    notify_chunk(comm, call.gather, rank, rank, chunk.index)
    quantize_chunk(comm, call, chunk)


@triton.jit
def post_before_quantizing(comm, call, chunk):
    segment = tl.load(comm.context + SEGMENT)
    signal = word_of(call.gather.arrived, comm.epoch, chunk.source, chunk.index) * 8
    size = (chunk.rows - 1) * call.gather.rows.row_stride + TAKEN
    peer = (chunk.source + comm.RANKS_PER_NODE) % comm.WORLD_SIZE
    whole = Transfer(peer, segment, chunk.offset, segment, chunk.offset, size.to(tl.int64))
    post(comm.context, whole, signal, comm.epoch, SEND)
    quantize_chunk(comm, call, chunk)


@triton.jit
def push_at_once(comm, gather, source, chunk, ROLE: tl.constexpr):
    return True


@triton.jit
def compute_at_once(comm, gather, source, row, rows):
    return True


BROKEN = {
    "a signal before the rows are quantized": Broken(ALONE, {transfer.quantize_chunk: notify_before_quantizing}),
    "a push of rows that are not yet quantized": Broken(NODE, {transfer.wait_chunk: push_at_once}),
    "a product of rows that are not yet quantized": Broken(ALONE, {kernel.wait_rows: compute_at_once}),
    "a request before the rows are quantized": Broken(NETWORK, {transfer.quantize_chunk: post_before_quantizing}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    assert_caught(BROKEN[name])


def test_a_dead_peer():
    case = Rows(9, 5, 140)

    def work(group):
        rows, (b, scale_b) = case.of(group.rank), case.weight(group.rank)
        mk.all_gather_scaled_matmul(rows, b, None, scale_b, **case.how)
        if group.rank == 1:
            return None
        with pytest.raises(mk.CommTimeout) as late:
            mk.all_gather_scaled_matmul(rows, b, None, scale_b, **case.how)
        return late.value.record

    record = run(work, cluster=(1, 2), timeout=1e-4)[0]
    assert (record.rank, record.peer, record.signal) == (0, 1, "arrived")


# -- what is refused

A, B = torch.ones(4, 300).bfloat16(), torch.ones(200, 300).to(E4M3).t()
RIGHT = dict(a=A, b=B, scale_a=None, scale_b=torch.ones(1, 200), recipe_a="RowWise")
REFUSED = {
    "one scale": (dict(recipe_a="TensorWise"), "its scale depends on all rows, so quantize a with mk.quantize"),
    "another recipe": (dict(recipe_a="BlockWise128x128"), "recipe_a must be one of RowWise, BlockWise1x128; got"),
    "scales and a recipe": (dict(scale_a=torch.ones(4, 1)), "pass a and its scales, or scale_a=None"),
    "neither": (dict(recipe_a=None), "scale_a is None, and so is recipe_a: pass a and its scales"),
    "rows in fp8": (dict(a=A.to(E4M3)), "to be quantized, it must be one of torch.bfloat16"),
    "another dtype": (dict(dtype_a=FP16), "dtype_a must be torch.float8_e4m3fn or torch.float8_e5m2"),
    "scales of blocks of b alone": (dict(scale_b=torch.ones(3, 2)), "1 x 200, one for each column"),
    "scales of columns with blocks": (dict(recipe_a="BlockWise1x128"), "it must have 3 x 2, one for each block"),
    "b in bf16": (dict(b=torch.ones(300, 200).bfloat16()), "b has dtype torch.bfloat16"),
    "no send CTAs": (dict(config=mk.Config(send_ctas=0)), "send_ctas"),
    "gradients": (dict(a=A.clone().requires_grad_()), "use mkernel.nn.functional with fp8="),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    changes, words = REFUSED[what]

    def work(group):
        with pytest.raises(mk.ArgumentError, match=words):
            mk.all_gather_scaled_matmul(**(RIGHT | changes))
        mk.all_gather_scaled_matmul(**RIGHT)  # the group can be used

    run(work, cluster=(1, 1))


def test_ranks_that_disagree():
    def work(group):
        with pytest.raises(mk.ArgumentError, match="dtype"):
            mk.all_gather_scaled_matmul(**RIGHT, dtype_a=(E4M3, E5M2)[group.rank])
        mk.all_gather_scaled_matmul(**RIGHT)

    run(work, cluster=(1, 2))
