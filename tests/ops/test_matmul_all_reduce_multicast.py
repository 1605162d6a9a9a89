"""matmul_all_reduce with multicast: chosen by itself, the bits of two levels, and, where the caller allows it, sums
made by the switch. What all ways share is in test_matmul_reduce.py."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from support.operator_calls import DTYPES, Canary, Guards, assert_same, run
from support.reduce_reference import SMALL, Sum, call, choose

import mkernel as mk
from mkernel.lang import partials
from mkernel.lang.context import Comm, rank_of
from mkernel.ops.reduce import protocol
from mkernel.ops.reduce.all_reduce import multicast, multimem
from mkernel.ops.reduce.all_reduce import protocol as all_reduce
from mkernel.ops.reduce.all_reduce.multicast import _finish_everywhere, _keep, _notify_everywhere, _slot_everywhere
from mkernel.ops.reduce.all_reduce.multimem import _pieces, _tile, fence_aliases, load_sum
from mkernel.ops.reduce.all_reduce.order import slot_number
from mkernel.ops.reduce.all_reduce.protocol import wait_finished
from mkernel.ops.reduce.protocol import notify_partial, signal_at, slot_at, wait_partials
from mkernel.sim.backend import SimMemory
from mkernel.sim.dtypes import KernelError

OP = "matmul_all_reduce"


@pytest.fixture
def chosen(monkeypatch):
    choose("multicast", monkeypatch)


def plan_of(group, case, **more):
    return mk.explain(OP, case.a(group.rank), case.b(group.rank), group=group, **more)


def work(group, case, turns=2, in_switch=False, **more):
    plan = plan_of(group, case, config=SMALL, fixed_order=not in_switch)
    assert (plan.multicast, plan.in_switch) == (True, in_switch)
    more["fixed_order"] = not in_switch
    return [call(group, "multicast", case, turn, config=SMALL, **more) for turn in range(turns)]


def assert_ranks_agree(results):
    for first, *others in zip(*results):
        for other in others:
            assert_same(other, first)


# -- which way is taken

LARGE = Sum(1024, 1024, 1, torch.bfloat16)  # too many tiles for slices


def reasons(cluster, case=LARGE, **options):
    """The last reasons of rank 0's plan, and whether the switch delivers tiles and reduces."""

    def on_rank(group):
        plan = mk.explain(
            OP, case.a(0), case.b(0), fixed_order=options.get("fixed_order", True), config=options.get("config")
        )
        return str(plan), plan.multicast, plan.in_switch

    return run(on_rank, cluster=cluster, multicast=options.get("multicast", True))[0]


def test_it_is_chosen_by_itself():
    text, multicast, in_switch = reasons((1, 4))
    assert (multicast, in_switch) == (True, False)
    assert "the switch delivers finished tiles" in text
    assert "in rank order" in text


def test_the_switch_adds_where_the_caller_allows_it():
    text, multicast, in_switch = reasons((1, 4), fixed_order=False)
    assert (multicast, in_switch) == (True, True)
    assert "the switch reduces the partials, in an unspecified order" in text


@pytest.mark.parametrize(
    ("cluster", "options", "reason"),
    [
        ((1, 4), dict(multicast=False), "CPUs have none"),
        ((2, 4), {}, "CPUs have none"),
        ((1, 3), {}, "with fewer than 4 ranks"),
        ((1, 4), dict(case=Sum(16, 64, 8, torch.bfloat16), config=mk.Config(tile_n=64)), "the result is small"),
    ],
)
@pytest.mark.parametrize("fixed_order", [True, False])
def test_it_is_never_required(cluster, options, reason, fixed_order):
    text, multicast, in_switch = reasons(cluster, fixed_order=fixed_order, **options)
    assert not multicast
    assert not in_switch
    assert f"multicast is not used: {reason}" in text


def test_fp32_sums_are_not_made_in_the_switch():
    text, multicast, in_switch = reasons((1, 4), Sum(1024, 1024, 1), fixed_order=False)
    assert (multicast, in_switch) == (True, False)
    assert "in rank order" in text


def test_deterministic_algorithms_keep_the_order():
    torch.use_deterministic_algorithms(True)
    try:
        text, multicast, in_switch = reasons((1, 4), fixed_order=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (multicast, in_switch) == (True, False)
    assert "torch.use_deterministic_algorithms is on" in text


def test_ranks_must_agree_on_the_order(chosen):
    def on_rank(group):
        case = Sum(20, 20, 8, torch.bfloat16)
        with pytest.raises(mk.ArgumentError, match="fixed_order=False"):
            mk.matmul_all_reduce(case.a(0), case.b(0), fixed_order=group.rank == 0)
        with pytest.raises(mk.ArgumentError, match="fixed_order must be True or False"):
            mk.matmul_all_reduce(case.a(0), case.b(0), fixed_order="no")

    run(on_rank)


def test_a_workspace_without_multicast(chosen, monkeypatch):
    """There are only so many multicast objects: the group got one, and its workspace none."""
    given = SimMemory.map_multicast

    def few(backend, group, memory, addresses):
        return given(backend, group, memory, addresses) if memory.numel() <= 1024 else 0

    monkeypatch.setattr(SimMemory, "map_multicast", few)

    def on_rank(group):
        assert group.multicast
        for turn in range(3):
            call(group, "multicast", Sum(37, 20, 9, torch.bfloat16), turn, config=SMALL)
        return group.world.traffic.to_switch

    assert not any(run(on_rank, cluster=(1, 3))[0])


# -- bits


@pytest.mark.parametrize("gpus", [2, 3, 4])
def test_the_bits_of_two_levels(gpus, monkeypatch):
    """Choosing multicast changes nothing about the result."""
    case = Sum(50, 41, 17, DTYPES[gpus % 3])

    def on_rank(group):
        return call(group, "multicast", case, bias=True, residual=True, config=SMALL)

    choose("matmul_all_reduce", monkeypatch)
    expected = run(on_rank, cluster=(1, gpus))
    choose("multicast", monkeypatch)
    for seed in range(3):
        for one, other in zip(run(on_rank, cluster=(1, gpus), seed=seed), expected):
            assert_same(one, other)


def test_all_schedules_give_the_same_bits_with_four_ranks(chosen):
    case = Sum(33, 20, 8, torch.bfloat16)
    expected = run(work, case, 1, cluster=(1, 4), seed=100, ctas=1)
    assert_ranks_agree(expected)
    for seed in range(6):
        options = [{}, {"ctas": 1}, {"slow": {2: 0.02}, "ctas": 1}][seed % 3]
        for one, other in zip(run(work, case, 1, cluster=(1, 4), seed=seed, **options), expected):
            assert_same(one[0], other[0])


def test_sums_of_the_switch_differ_and_agree(chosen):
    """The simulated switch adds in any order, and with these values orders differ: so schedules show several
    results; each is the same on all ranks."""
    values = [2.0**24, 1.0, -(2.0**24), 1.0]

    def on_rank(group):
        a, b = torch.full((16, 1), values[group.rank]), torch.ones(1, 16)
        y = mk.matmul_all_reduce(a.bfloat16(), b.bfloat16(), reduce_dtype=torch.float32, fixed_order=fixed_order)
        return [y]

    found = {True: set(), False: set()}
    for fixed_order in (True, False):
        for seed in range(6):
            results = run(on_rank, cluster=(1, 4), seed=seed)
            assert_ranks_agree(results)
            found[fixed_order] |= set(results[0][0].flatten().tolist())
    assert len(found[True]) == 1
    assert len(found[False]) > 1


# -- sums made by the switch: shapes, schedules, arguments

SHAPES = [(1, 1, 1), (33, 7, 17), (16, 16, 16), (70, 40, 20), (49, 33, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gpus", [2, 3, 4])
def test_in_switch_shapes(chosen, gpus, shape):
    case = Sum(*shape, DTYPES[1 + gpus % 2])
    arguments = dict(bias=gpus != 3, residual=gpus != 4, reduce_dtype=torch.float32 if gpus == 2 else None)
    results = run(lambda group: work(group, case, in_switch=True, **arguments), cluster=(1, gpus), seed=sum(shape))
    assert_ranks_agree(results)


@pytest.mark.parametrize(
    "options", [{"resident": 1}, {"ctas": 1}, {"late": {1: 3000}}, {"late": {0: 3000}, "slow": {1: 0.02}}], ids=str
)
def test_in_switch_stragglers(chosen, options):
    case = Sum(70, 40, 9, torch.bfloat16)
    assert_ranks_agree(run(lambda group: work(group, case, 3, True), cluster=(1, 3), **options))


def test_in_switch_out_and_layouts(chosen):
    case = Sum(36, 18, 24, torch.bfloat16)

    def on_rank(group):
        for layout in ("wide rows", "transposed"):
            canary = Canary(case.m, case.n, case.dtype, layout)
            canary.tensor.copy_(case.residual())
            call(
                group, "multicast", case, residual=canary.tensor, out=canary.tensor, config=SMALL, fixed_order=False
            )  # fmt: skip
            canary.check()

    run(on_rank, cluster=(1, 4))


@pytest.mark.parametrize("in_switch", [False, True])
def test_nothing_beside_the_workspace_is_written(chosen, monkeypatch, in_switch):
    guards = Guards(monkeypatch)

    def on_rank(group):
        for turn, (m, n) in enumerate([(3, 5), (37, 17), (1, 17)]):
            case = Sum(m, n, 7, torch.bfloat16)
            call(group, "multicast", case, turn, config=SMALL, fixed_order=not in_switch)

    run(on_rank, cluster=(1, 3))
    guards.check()


def test_ways_alternate(chosen):
    """All keep to one workspace, with different slots in it."""

    def on_rank(group):
        for turn, in_switch in enumerate([True, False, True, True, False]):
            case = Sum(20 + 30 * (turn % 2), 20, 8, torch.bfloat16)
            call(group, "multicast", case, turn, config=SMALL, fixed_order=not in_switch)

    for seed in range(3):
        run(on_rank, cluster=(1, 3), seed=seed, slow={seed: 0.05})


@pytest.mark.parametrize("in_switch", [False, True])
def test_groups_that_are_subsets(chosen, in_switch):
    case = Sum(40, 20, 8, torch.bfloat16)

    def on_rank(group):
        part = group.split(group.rank % 2)
        for turn in range(2):
            call(group, "multicast", case, turn, config=SMALL, fixed_order=not in_switch)
            call(part, "multicast", case, turn, config=SMALL, fixed_order=not in_switch)
        odd = group.subset([3, 1]) if group.rank % 2 else None  # in another order, too
        return call(odd, "multicast", case, config=SMALL, fixed_order=not in_switch) if odd else None

    run(on_rank, cluster=(1, 4))


@pytest.mark.parametrize("in_switch", [False, True])
def test_a_dead_peer(chosen, in_switch):
    case = Sum(64, 32, 8, torch.bfloat16)

    def on_rank(group):
        call(group, "multicast", case, config=SMALL, fixed_order=not in_switch)
        if group.rank == 1:
            return None
        canary = Canary(case.m, case.n, case.dtype)
        with pytest.raises(mk.CommTimeout) as caught:
            call(group, "multicast", case, 1, out=canary.tensor, config=SMALL, fixed_order=not in_switch)
        canary.check()
        assert caught.value.record.signal in ("partial", "finished tile")
        return canary.tensor

    results = run(on_rank, cluster=(1, 3))
    assert torch.isnan(results[0]).any()
    assert torch.isnan(results[2]).any()


# -- what moves


@pytest.mark.parametrize("in_switch", [False, True])
def test_what_moves(chosen, in_switch):
    """As the docstring says, with one tile of every owner."""
    gpus, tile = 4, 16 * 16 * 2
    case = Sum(16 * gpus, 16, 8, torch.bfloat16)

    def on_rank(group):
        config = mk.Config(tile_m=16, tile_n=16, ctas=1)
        call(group, "multicast", case, config=config, fixed_order=not in_switch)
        group.barrier()
        return group.world.traffic

    traffic = run(on_rank, cluster=(1, gpus))[0]
    pushed = 0 if in_switch else tile
    for source in range(gpus):
        assert traffic.nvlink[source] == [pushed if target != source else 0 for target in range(gpus)]
        gives = traffic.to_switch[source] + sum(traffic.nvlink[source])
        takes = traffic.from_switch[source] + sum(row[source] for row in traffic.nvlink)
        if in_switch:
            assert gives == takes == (gpus + 1) * tile
        else:
            assert gives == gpus * tile
            assert takes == (2 * gpus - 1) * tile


# -- kernels that are broken on purpose


@triton.jit
def forget_partial(comm, signal, IN_LOOP: tl.constexpr):
    pass


@triton.jit
def fence_only(comm, exchange, block):
    fence_aliases()


@triton.jit
def notify_before_finish(comm, call, total, tile, block):
    _notify_everywhere(comm, call.exchange, block)
    _finish_everywhere(comm, call, total, tile, block)


@triton.jit
def wait_for_old_tile(comm, exchange, i, block, tile):
    return wait_finished(
        Comm(comm.context, comm.epoch - 2, comm.WORLD_SIZE, comm.RANKS_PER_NODE), exchange, i, block, tile
    )


@triton.jit
def own_slot(comm, slots, i, j):
    return slot_at(comm, slots, rank_of(comm.context), i, j)


@triton.jit
def wait_for_old_partials(comm, exchange, first, j, tile):
    return wait_partials(
        Comm(comm.context, comm.epoch - 2, comm.WORLD_SIZE, comm.RANKS_PER_NODE), exchange, first, j, tile
    )


@triton.jit
def add_without_release(comm, exchange, total, block, tile):
    rank = rank_of(comm.context)
    _keep(comm, exchange, total, rank, block)
    missing = wait_partials(comm, exchange, 0, slot_number(block), tile)
    slot = _slot_everywhere(comm, exchange.partials, rank, slot_number(block))
    return load_sum(slot, total, total.shape[0], total.shape[1]) + missing


@triton.jit
def add_tile_of_another(comm, exchange, total, block, tile):
    rank = rank_of(comm.context)
    notify_partial(comm, _keep(comm, exchange, total, rank, block), True)
    missing = wait_partials(comm, exchange, 0, slot_number(block), tile)
    slot = _slot_everywhere(comm, exchange.partials, (rank + 1) % comm.WORLD_SIZE, slot_number(block))
    return load_sum(slot, total, total.shape[0], total.shape[1]) + missing


@triton.jit
def notify_before_keep(comm, exchange, total, owner, block):
    rank = rank_of(comm.context)
    place = (rank + 2 * comm.WORLD_SIZE - 1 - owner) % comm.WORLD_SIZE
    signal = signal_at(comm, exchange.partial, owner, place, slot_number(block)).to(tl.int64)
    own = signal_at(comm, exchange.own_partial, rank, 0, slot_number(block)).to(tl.int64)
    notify_partial(comm, tl.where(owner == rank, own, signal), True)
    return _keep(comm, exchange, total, owner, block)


@triton.jit
def swap_words(first, second, third, fourth, DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    return _tile(first, third, second, fourth, DTYPE, TILE_M, TILE_N)


@triton.jit
def pieces_behind(slot, BYTES: tl.constexpr):
    return _pieces(slot, BYTES) + 16


# name -> (does the switch add, what is replaced)
BROKEN = {
    "a part is not signalled": (False, {protocol.notify_partial: forget_partial}),
    "a finished tile is not announced": (False, {multicast._notify_everywhere: fence_only}),
    "a finished tile is announced too early": (False, {multicast._finish_everywhere: notify_before_finish}),
    "no fence behind multicast stores": (False, {multicast._notify_everywhere: all_reduce.notify_finished}),
    "a finished tile is read too early": (False, {all_reduce.wait_finished: wait_for_old_tile}),
    "a finished tile goes into the owner's memory alone": (
        False, {multicast._slot_everywhere: own_slot, multimem.store_everywhere: partials.store_partial},
    ),
    "in switch: parts are added too early": (True, {protocol.wait_partials: wait_for_old_partials}),
    "in switch: the owner does not release its own part": (True, {multicast._add_in_switch: add_without_release}),
    "in switch: a part is signalled before it is stored": (True, {multicast._keep: notify_before_keep}),
    "in switch: the sum of another rank's tile": (True, {multicast._add_in_switch: add_tile_of_another}),
    # instructions
    "no fence before the sum": (True, {multimem._pieces_behind_fence: multimem._pieces}),
    "words are swapped": (True, {multimem._tile: swap_words}),
    "a piece is stored at the next one's place": (False, {multimem._pieces: pieces_behind}),
}  # fmt: skip


SEEDS = 4


def calls(in_switch, seed, replace=None):
    """Checked calls on three ranks, which must agree."""
    case = Sum(60, 20, 8, torch.bfloat16)

    def on_rank(group):
        return [
            call(group, "multicast", case, turn, config=SMALL, fixed_order=not in_switch) for turn in range(4)
        ]  # fmt: skip

    slow = {1: 0.02} if seed % 2 else {}
    options = dict(seed=seed, ctas=2, timeout=1e-4, slow=slow, replace=replace or {})
    assert_ranks_agree(run(on_rank, cluster=(1, 3), **options))


@pytest.mark.parametrize("in_switch", [False, True])
def test_unbroken_kernels_pass(chosen, in_switch):
    for seed in range(SEEDS):
        calls(in_switch, seed)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_are_caught(chosen, name):
    in_switch, replace = BROKEN[name]
    with pytest.raises((AssertionError, mk.CommTimeout, mk.Deadlock, mk.SimulatorError)) as caught:
        calls(in_switch, seed=0, replace=replace)
    assert not isinstance(caught.value, KernelError)
