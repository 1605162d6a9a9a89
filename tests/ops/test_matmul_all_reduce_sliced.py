"""matmul_all_reduce in slices: few tiles, one node. What all ways share is in test_matmul_reduce.py."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from support.operator_calls import DTYPES, assert_same, run
from support.reduce_reference import Sum, call, choose

import mkernel as mk
from mkernel.lang.context import TABLE, rank_of
from mkernel.lang.layout import word_of
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import notify_each, wait_peers
from mkernel.ops.reduce.all_reduce import sliced
from mkernel.ops.reduce.kinds import FINISHED_TILE, PARTIAL
from mkernel.ops.reduce.protocol import signal_at
from mkernel.sim.dtypes import KernelError

WIDE = mk.Config(tile_m=16, tile_n=128, tile_k=16)


@pytest.fixture(autouse=True)
def in_slices(monkeypatch):
    choose("sliced", monkeypatch)


def work(group, case, turns=3, **more):
    assert mk.explain("matmul_all_reduce", case.a(group.rank), case.b(group.rank), config=WIDE).sliced
    return [call(group, "sliced", case, turn, config=WIDE, **more) for turn in range(turns)]


SHAPES = [(1, 1, 1), (17, 130, 5), (16, 128, 16), (33, 200, 7), (5, 64, 33)]


@pytest.mark.parametrize(
    ("gpus", "m", "n", "k"),
    [*((2, *shape) for shape in SHAPES), *((4, *shape) for shape in SHAPES[1:4]), (8, 5, 130, 7)],
)
def test_shapes(gpus, m, n, k):
    dtype = DTYPES[(m + gpus) % 3]
    results = run(work, Sum(m, n, k, dtype), cluster=(1, gpus), seed=m, ctas=8)
    for others in zip(*results):
        for other in others[1:]:
            assert_same(other, others[0])


def test_same_bits_on_every_schedule():
    case = Sum(20, 140, 9, torch.bfloat16)
    first = run(work, case, 1, cluster=(1, 4), seed=100, ctas=8)
    for seed in range(4):
        for one, other in zip(first[0], run(work, case, 1, cluster=(1, 4), seed=seed, ctas=8)[0]):
            assert_same(one, other)


def test_bias_residual_fp32_parts_and_a_slow_rank():
    def on_rank(group, case):
        return work(group, case, bias=True, residual=True, reduce_dtype=torch.float32)

    run(on_rank, Sum(18, 130, 9, torch.float16), cluster=(1, 4), ctas=8, slow={2: 0.02})


def test_ctas_one_after_the_other():
    run(work, Sum(40, 260, 5), cluster=(1, 2), ctas=16, resident=1)


def test_too_many_tiles_go_two_levels():
    def on_rank(group):
        a, b = torch.zeros(16, 4), torch.zeros(4, 600)
        assert not mk.explain("matmul_all_reduce", a, b, config=WIDE).sliced
        assert not mk.explain("matmul_all_reduce", a, b[:, :64], config=mk.Config(tile_n=16)).sliced

    run(on_rank, cluster=(1, 2), ctas=4)


@triton.jit
def forget(comm, exchange, tile):
    pass


@triton.jit
def notify_with_old_epoch(comm, exchange, tile):
    i = tl.arange(0, comm.WORLD_SIZE)
    peers = tl.load(comm.context + TABLE + (rank_of(comm.context) + i) % comm.WORLD_SIZE).to(tl.pointer_type(tl.int64))
    word = word_of(exchange.partial, comm.epoch, comm.WORLD_SIZE - 1 - i, tile)
    notify_each(peers + word, comm.epoch - 1, i > 0)


@triton.jit
def wait_for_old_partials(comm, words, tile, KIND: tl.constexpr):
    i = tl.arange(0, comm.WORLD_SIZE)
    signals = signal_at(comm, words, rank_of(comm.context), i, tile)
    expected = comm.epoch - 1 if KIND == PARTIAL else comm.epoch
    wait_peers(comm.context, signals, i < comm.WORLD_SIZE - 1, expected, COMPUTE, KIND, i, tile)
    return 0.0


@triton.jit
def wait_for_old_slices(comm, words, tile, KIND: tl.constexpr):
    i = tl.arange(0, comm.WORLD_SIZE)
    signals = signal_at(comm, words, rank_of(comm.context), i, tile)
    expected = comm.epoch - 1 if KIND == FINISHED_TILE else comm.epoch
    wait_peers(comm.context, signals, i < comm.WORLD_SIZE - 1, expected, COMPUTE, KIND, i, tile)
    return 0.0


BROKEN = {
    "a lost part": {sliced._notify_partial: forget},
    "a part of the wrong epoch": {sliced._notify_partial: notify_with_old_epoch},
    "a lost finished slice": {sliced._notify_finished: forget},
    "a part that is added too early": {sliced._wait_peers: wait_for_old_partials},
    "a slice that is read too early": {sliced._wait_peers: wait_for_old_slices},
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_are_caught(name):
    with pytest.raises((mk.SimulatorError, mk.CommTimeout)) as caught:
        run(work, Sum(20, 140, 9, torch.bfloat16), cluster=(1, 2), ctas=8, timeout=1e-4, replace=BROKEN[name])
    assert not isinstance(caught.value, KernelError)
