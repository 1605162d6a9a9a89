"""The kernel of all_gather_matmul_weight_grad for Hopper, in the simulator."""

import pytest
import torch
import triton
from support.operator_calls import assert_same
from support.weight_grad_reference import assert_weight_grad
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_init

import mkernel as mk
from mkernel.lang.hopper import ROWS, STAGES, TILE_N, accumulator_layout
from mkernel.ops.all_gather_matmul import hopper as gathers
from mkernel.ops.all_gather_matmul import protocol
from mkernel.ops.all_gather_matmul.weight_grad import hopper
from mkernel.sim.scheduler import Options

OP = "all_gather_matmul_weight_grad"
ON_HOPPER = dict(capability=(9, 0), ctas=3)
IN_PASSES, ONE_PASS = mk.Config(passes=3, held_tiles=2), mk.Config(passes=1)


def drawn(rank, rows, columns, dtype, turn):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(100 * turn + rank)).to(dtype)


def calls(group, m, n, k, column_major, dtype, config, count):
    """(a, dy, result, plan) of the last of some calls, whose values differ."""
    out = torch.empty(n, k, dtype=dtype).t() if column_major else torch.empty(k, n, dtype=dtype)
    for turn in range(count):
        a, dy = drawn(group.rank, m, k, dtype, turn), drawn(50 + group.rank, m * group.size, n, dtype, turn)
        mk.all_gather_matmul_weight_grad(a, dy, out=out, config=config)
    return a, dy, out, str(mk.explain(OP, a, dy, out=out, config=config))


def run(ranks, m, n, k, column_major=True, dtype=torch.bfloat16, config=IN_PASSES, count=2, seed=0, **options):
    return mk.spawn(
        calls, m, n, k, column_major, dtype, config, count,
        gpus_per_node=ranks, device="cpu", seed=seed, timeout=5.0, sim=Options(**ON_HOPPER | options),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("ranks", "m", "n", "k", "column_major", "config"),
    [
        (2, 128, 264, 136, True, IN_PASSES),
        (1, 128, 136, 264, False, None),
        (2, 256, 520, 200, False, mk.Config(passes=4, held_tiles=1)),
        (2, 128, 136, 776, True, None),
        (3, 128, 264, 328, True, mk.Config(passes=2, held_tiles=8)),
        (4, 128, 136, 520, True, mk.Config(passes=6, held_tiles=3, ctas=2)),
        (4, 128, 512, 384, False, mk.Config(passes=1, chunk_rows=128)),
        (4, 256, 136, 264, True, mk.Config(passes=13, held_tiles=1, chunk_rows=64)),
        (3, 256, 136, 264, True, mk.Config(passes=4, held_tiles=2, chunk_rows=8)),
    ],
)
def test_gradients(ranks, m, n, k, column_major, config, seed):
    """Ragged columns; CTAs with more tiles than they hold, with fewer, and with none; and epochs of both parities."""
    dtype = (torch.bfloat16, torch.float16)[seed]
    results = run(ranks, m, n, k, column_major, dtype, config, count=3 if ranks == 2 else 1, seed=seed)
    gathered = torch.cat([a for a, *_ in results])
    for _, dy, out, plan in results:
        assert "Hopper kernel" in plan
        assert_weight_grad(out, gathered, dy)


def test_the_same_bits_whatever_the_timing():
    first, second = (run(2, 128, 264, 136, count=1, seed=seed) for seed in (1, 2))
    for one, other in zip(first, second, strict=True):
        assert_same(one[2], other[2])


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [(192, 256, 256, None), (128, 64, 64, None), (128, 256, 250, None), (128, 256, 256, mk.Config(intra_ctas=1))],
    ids=["rows", "columns", "alignment", "configuration"],
)
def test_other_calls_take_the_portable_kernel(m, n, k, config):
    results = run(2, m, n, k, config=config, count=1)
    gathered = torch.cat([a for a, *_ in results])
    for _, dy, out, plan in results:
        assert "Hopper kernel" not in plan
        assert_weight_grad(out, gathered, dy)


# -- every rule of synchronization, broken


@gluon.jit
def tell_before_they_arrive(comm, call, arrived):
    if comm.WORLD_SIZE > 1:
        for share in range(hopper.shares(call.PASSES)):
            mbarrier.arrive(arrived.index(share), count=1)


@gluon.jit
def wait_for_all_but_the_last(comm, call, arrived):
    if comm.WORLD_SIZE > 1:
        for share in range(hopper.shares(call.PASSES)):
            end = hopper._place_of(comm, call, share + 1) - (share == 1).to(gl.int32)
            for place in range(hopper._place_of(comm, call, share), end):
                hopper.wait_block(comm, call.gather, place, hopper.TILE_K)
            mbarrier.arrive(arrived.index(share), count=1)


@triton.jit
def no_fence():
    pass


@gluon.jit
def free_while_multiplying(stages, step, steps, WARPGROUP: gl.constexpr):
    total = warpgroup_mma_init(gl.zeros([ROWS, TILE_N], gl.float32, accumulator_layout()))
    for i in range(steps):
        stage = step % STAGES
        mbarrier.wait(stages.filled.index(stage), (step // STAGES) & 1)
        x = stages.a.index(stage * 2 + WARPGROUP).permute((1, 0))
        total = warpgroup_mma(x, stages.b.index(stage), total, use_acc=i > 0, is_async=True)
        mbarrier.arrive(stages.freed.index(stage), count=1)
        step += 1
    return hopper.warpgroup_mma_wait(0, deps=[total]), step


@triton.jit
def signal_only(comm, gather, peer, source, chunk):
    """`notify_chunk` without the barrier and the release in front of the signal."""
    segment = gathers.segment_of(comm.context, peer, triton.language.int64)
    word = segment + protocol.word_of(gather.arrived, comm.epoch, source, chunk)
    triton.language.atomic_xchg(word, comm.epoch, sem="relaxed", scope="sys")


BROKEN = {
    "shares are not waited for": ({hopper._wait_arrivals: tell_before_they_arrive}, 128, IN_PASSES),
    "the last block of a share is not waited for": ({hopper._wait_arrivals: wait_for_all_but_the_last}, 128, IN_PASSES),
    "no fence before the loads": ({hopper.acquire_for_descriptors: no_fence}, 128, IN_PASSES),
    # with more steps in a row than there are stages
    "a stage is freed while it is multiplied": ({hopper._multiply_rows: free_while_multiplying}, 256, ONE_PASS),
    "a chunk is signalled without a release": ({protocol.notify_chunk: signal_only}, 128, IN_PASSES),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", BROKEN)
def test_broken_variants_are_found(name, seed):
    replaced, rows, config = BROKEN[name]
    with pytest.raises((mk.RaceError, mk.SimulatorError), match=r"nothing orders|nobody has written"):
        run(2, rows, 264, 136, config=config, seed=seed, replace=replaced)


def test_a_peer_that_does_not_come_is_named():
    def on_rank(group):
        if group.rank == 1:
            return
        a, dy = drawn(0, 128, 264, torch.bfloat16, 0), drawn(1, 256, 264, torch.bfloat16, 0)
        mk.all_gather_matmul_weight_grad(a, dy)

    with pytest.raises(mk.MKernelError, match="rank 1"):
        mk.spawn(on_rank, gpus_per_node=2, device="cpu", timeout=1.0, sim=Options(**ON_HOPPER))
