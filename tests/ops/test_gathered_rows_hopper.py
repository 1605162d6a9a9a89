"""The gathered rows that the Hopper kernel of all_gather_matmul stores, in the simulator."""

import pytest
import torch
from support.operator_calls import assert_product
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

import mkernel as mk
from mkernel.lang.gluon_compat import async_store
from mkernel.lang.hopper import STAGES, TILE_K, TILE_M
from mkernel.ops.all_gather_matmul import hopper
from mkernel.sim.scheduler import Options

ON_HOPPER = dict(capability=(9, 0), ctas=3)


def calls(group, m, n, k, transposed):
    """(a, b, the result, the gathered rows, the plan) of the second of two calls."""
    generator = torch.Generator().manual_seed(group.rank)
    a = torch.randn(m, k, generator=generator).bfloat16()
    b = torch.randn(n, k, generator=generator).bfloat16().t()
    if not transposed:
        b = b.contiguous()
    for _ in range(2):
        y, gathered = mk.all_gather_matmul(a, b, return_gathered=True)
    return a, b, y, gathered, str(mk.explain("all_gather_matmul", a, b, return_gathered=True))


def gathers(ranks, m, n, k, transposed=True, seed=0, **options):
    return mk.spawn(
        calls, m, n, k, transposed, gpus_per_node=ranks, device="cpu", seed=seed, sim=Options(**ON_HOPPER, **options)
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ranks", "m", "n", "k", "transposed"),
    [(2, 128, 264, 136, True), (1, 256, 512, 64, False), (2, 128, 776, 64, False), (4, 128, 200, 200, True)],
)
def test_every_row_of_every_rank(ranks, m, n, k, transposed, seed):
    """Also of columns that fill no step, and of several tiles in a row of tiles."""
    results = gathers(ranks, m, n, k, transposed, seed)
    everyones = torch.cat([a for a, *_ in results])
    for _, b, y, gathered, plan in results:
        assert "stores the gathered rows" in plan
        assert torch.equal(gathered, everyones)
        assert_product(y, everyones, b)


def test_rows_that_tma_cannot_write_take_the_portable_kernel():
    """a is a view with aligned rows; what is gathered has none, because 100 elements take 200 bytes."""

    def on_rank(group):
        a = torch.randn(128, 104).bfloat16()[:, :100]
        b = torch.randn(256, 104).bfloat16()[:, :100].t()
        _, gathered = mk.all_gather_matmul(a, b, return_gathered=True)
        return torch.equal(gathered, a), str(mk.explain("all_gather_matmul", a, b, return_gathered=True))

    [(equal, plan)] = mk.spawn(on_rank, gpus_per_node=1, device="cpu", sim=Options(**ON_HOPPER))
    assert equal
    assert "Hopper" not in plan


@gluon.jit
def free_before_it_was_read(comm, call, kept, stages):
    step = 0
    for index in range(gluon.language.program_id(0), hopper._tiles(comm, call), gluon.language.num_programs(0)):
        source, block, column_block, _ = hopper._tile_at(comm, call, index)
        row = source * call.gather.m + block * TILE_M
        for depth in range(0, call.gather.k, TILE_K):
            stage = step % STAGES
            mbarrier.wait(stages.filled.index(stage), (step // STAGES) & 1)
            if column_block == 0:
                async_store(kept, [row, depth], stages.a.index(stage))
            mbarrier.arrive(stages.freed.index(stage), count=1)
            step += 1
    tma.store_wait(0)


@gluon.jit
def keep_nothing(comm, call, kept, stages):
    step = 0
    for _ in range(gluon.language.program_id(0), hopper._tiles(comm, call), gluon.language.num_programs(0)):
        for _ in range(0, call.gather.k, TILE_K):
            mbarrier.wait(stages.filled.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.arrive(stages.freed.index(step % STAGES), count=1)
            step += 1


@gluon.jit
def read_before_it_is_filled(comm, call, kept, stages):
    step = 0
    for index in range(gluon.language.program_id(0), hopper._tiles(comm, call), gluon.language.num_programs(0)):
        source, block, column_block, _ = hopper._tile_at(comm, call, index)
        row = source * call.gather.m + block * TILE_M
        for depth in range(0, call.gather.k, TILE_K):
            if column_block == 0:
                async_store(kept, [row, depth], stages.a.index(step % STAGES))
                tma.store_wait(0)
            mbarrier.wait(stages.filled.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.arrive(stages.freed.index(step % STAGES), count=1)
            step += 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        (free_before_it_was_read, mk.RaceError, "tma.store_wait"),
        (keep_nothing, mk.SimulatorError, "nobody has written kept"),
        (read_before_it_is_filled, mk.SimulatorError, "shared memory"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_broken_variants_are_found(broken, error, message, seed):
    with pytest.raises(error, match=message):
        gathers(1, 256, 256, 384, seed=seed, replace={hopper._keep: broken})
