"""Multicast: stores reach everybody, loads bring the sum, and nothing else may be done at such an address."""

import pytest
import torch
import triton
import triton.language as tl

import mkernel as mk
from mkernel.lang.context import rank_of, segment_of
from mkernel.lang.partials import load_partial, store_partial
from mkernel.ops.reduce.all_reduce.multimem import everywhere, load_sum, store_everywhere

from .harness import launch, simulate, workspace_of

NAMES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
TILE = (16, 32)


@triton.jit
def _tile(TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Offsets of a tile's elements in a tensor [TILE_M, TILE_N]."""
    return tl.arange(0, TILE_M)[:, None] * TILE_N + tl.arange(0, TILE_N)[None, :]


@triton.jit
def hand_out(context, sender, values, offset, DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    if rank_of(context) == sender:
        tile = tl.load(values + _tile(TILE_M, TILE_N))
        store_everywhere(everywhere(context, offset, DTYPE), tile, TILE_M, TILE_N)


@triton.jit
def take(context, out, offset, DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    start = segment_of(context, rank_of(context), tl.int8) + offset
    tile = load_partial(start.to(tl.pointer_type(DTYPE)), TILE_M, TILE_N)
    tl.store(out + _tile(TILE_M, TILE_N), tile)


@triton.jit
def put(context, values, offset, DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    start = segment_of(context, rank_of(context), tl.int8) + offset
    store_partial(start.to(tl.pointer_type(DTYPE)), tl.load(values + _tile(TILE_M, TILE_N)), TILE_M, TILE_N)


@triton.jit
def add(context, out, offset, DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    like = tl.zeros((TILE_M, TILE_N), tl.float32)
    tl.store(
        out + _tile(TILE_M, TILE_N), load_sum(everywhere(context, offset, DTYPE), like, TILE_M, TILE_N)
    )  # fmt: skip


def constants(dtype):
    return dict(DTYPE=NAMES[dtype], TILE_M=TILE[0], TILE_N=TILE[1])


def values_of(rank):
    return torch.randn(*TILE, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("gpus", [2, 4])
def test_a_store_reaches_every_rank(gpus, dtype):
    values = values_of(7)

    def on_rank(group):
        workspace = workspace_of(group, half_bytes=4096)
        place = dict(offset=workspace.data_start + 64, **constants(dtype))
        launch(group, workspace, hand_out, sender=1, values=values, **place)
        group.barrier()
        out = torch.zeros(TILE)
        launch(group, workspace, take, out=out, **place)
        used = 64 + TILE[0] * TILE[1] * dtype.itemsize
        assert not workspace.data[:64].any()
        assert not workspace.data[used:].any()
        return out

    for out in simulate(on_rank, gpus=gpus, multicast=True):
        assert torch.equal(out, values.to(dtype).float())


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("gpus", [2, 3])
def test_a_load_brings_the_sum(gpus, dtype):
    """In fp32, rounded once to the dtype."""

    def on_rank(group):
        workspace = workspace_of(group, half_bytes=4096)
        place = dict(offset=workspace.data_start + 32, **constants(dtype))
        launch(group, workspace, put, values=values_of(group.rank), **place)
        group.barrier()
        out = torch.zeros(TILE)
        launch(group, workspace, add, out=out, **place)
        return out

    parts = [values_of(rank).to(dtype).double() for rank in range(gpus)]
    exact, size = sum(parts), sum(part.abs() for part in parts)
    for out in simulate(on_rank, gpus=gpus, multicast=True):
        assert torch.equal(out, out.to(dtype).float())
        bound = torch.finfo(dtype).eps / 2 * exact.abs() + gpus * 2**-24 * size
        assert bool(((out.double() - exact).abs() <= bound).all())


def test_the_order_of_a_sum_is_anybodys_guess():
    """The simulator adds in any order, so that nobody comes to rely on one."""
    values = [2.0**24, 1.0, -(2.0**24), 1.0]

    def on_rank(group):
        workspace = workspace_of(group, half_bytes=4096)
        place = dict(offset=workspace.data_start, **constants(torch.float32))
        launch(group, workspace, put, values=torch.full(TILE, values[group.rank]), **place)
        group.barrier()
        out = torch.zeros(TILE)
        launch(group, workspace, add, out=out, **place)
        return out

    found = {out[0, 0].item() for seed in range(5) for out in simulate(on_rank, gpus=4, seed=seed, multicast=True)}
    assert len(found) > 1


# -- what must not be done


@triton.jit
def store_plainly(context, offset):
    tl.store(everywhere(context, offset, tl.int32), 1)


@triton.jit
def load_plainly(context, offset):
    tl.store(segment_of(context, 0, tl.int32), tl.load(everywhere(context, offset, tl.int32)))


@triton.jit
def hand_out_at_home(context, offset):
    slot = segment_of(context, rank_of(context), tl.float32)
    store_everywhere(slot, tl.zeros((16, 16), tl.float32) + offset, 16, 16)


@triton.jit
def hand_out_at(context, offset):
    store_everywhere(everywhere(context, offset, tl.float32), tl.zeros((16, 16), tl.float32), 16, 16)


@pytest.mark.parametrize(
    ("kernel", "offset", "message"),
    [
        (store_plainly, 0, "outside of every tensor"),
        (load_plainly, 0, "outside of every tensor"),
        (hand_out_at_home, 0, "outside of every multicast range"),
        (hand_out_at, 1 << 20, "outside of every multicast range"),
        (hand_out_at, -16, "outside of every multicast range"),
        (hand_out_at, 8, "not aligned to 16 bytes"),
    ],
)
def test_misuse_is_an_error(kernel, offset, message):
    def on_rank(group):
        launch(group, workspace_of(group), kernel, offset=offset)

    with pytest.raises(mk.SimulatorError, match=message):
        simulate(on_rank, gpus=2, multicast=True)


# -- who has it


def test_who_has_multicast():
    def on_rank(group):
        pair = group.split(group.rank // 2)
        alone = group.split(group.rank)
        return group.multicast, pair.multicast, alone.multicast

    assert simulate(on_rank, gpus=4, multicast=True) == [(True, True, False)] * 4
    assert simulate(on_rank, gpus=4) == [(False, False, False)] * 4
    assert simulate(on_rank, nodes=2, gpus=2, multicast=True) == [(False, True, False)] * 4


def test_ranges_end_with_their_memory():
    def on_rank(group):
        ranges = group.world.scheduler.memory._multicasts
        before = len(ranges)
        kept = group.empty(16)
        group.barrier()
        assert len(ranges) == before + group.size
        group.barrier()
        del kept
        group.barrier()
        other = group.empty(16)
        group.barrier()
        assert len(ranges) == before + group.size
        return other

    simulate(on_rank, gpus=2, multicast=True)
