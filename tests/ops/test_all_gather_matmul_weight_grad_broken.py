"""all_gather_matmul_weight_grad with every rule of synchronisation broken on purpose. Then peers that never come."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from support.broken_gathers import (
    notify_all_but_one,
    notify_before_copy,
    post_before_copy,
    post_too_much,
    post_with_old_epoch,
    turn_before_words,
    wait_for_epoch_before,
    wait_for_last_use,
    wait_for_no_transfer,
    wait_in_compute_only,
)
from support.broken_variants import (
    EPOCH_STAYS,
    NO_BARRIER,
    NO_FENCE_FOR_DESCRIPTORS,
    ONE_HALF,
    ONE_HALF_OF_SIGNALS,
    RACE,
    RELAXED_NOTIFY,
    RELAXED_WAIT,
    WRONG,
    Broken,
    assert_caught,
    number_from_the_end,
    store_tall_tile,
    take_slot_at_once,
    word_far_away,
)
from support.operator_calls import Canary, run
from support.scenarios import WeightGrads
from support.weight_grad_reference import Case, call

import mkernel as mk
from mkernel.lang import gemm, layout, partials, requests, roles, signals
from mkernel.lang.context import rank_of, segment_of
from mkernel.lang.layout import word_of
from mkernel.lang.order import arrival_order
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import poll_each, share_acquired
from mkernel.ops.all_gather_matmul import protocol, transfer
from mkernel.ops.all_gather_matmul.protocol import wait_chunk
from mkernel.ops.all_gather_matmul.weight_grad import kernel
from mkernel.ops.all_gather_matmul.weight_grad.kernel import POLLED, _wait_pass, blocks_of, wait_places

NODE = WeightGrads((1, 2))
NETWORK = WeightGrads((2, 1))
TWO_LEVELS = WeightGrads((2, 2))
NO_COLUMNS = dict(calls=3, n=(0, 5))


@triton.jit
def poll_for_epoch_before(comm, gather, first, end, STEP: tl.constexpr):
    rank = rank_of(comm.context)
    _, blocks, chunks = blocks_of(gather, STEP)
    nth = first + tl.arange(0, POLLED)
    source, block = arrival_order(nth // chunks, rank, blocks, comm.WORLD_SIZE, comm.RANKS_PER_NODE)
    chunk = block * chunks + nth % chunks
    inside = (nth < end) & (chunk < gather.chunks)
    segment = segment_of(comm.context, rank, tl.int64)
    seen = poll_each(segment + word_of(gather.arrived, comm.epoch, source, chunk), inside, "sys")
    share_acquired()
    return tl.min(tl.where(inside, seen, comm.epoch)) >= comm.epoch - 1


@triton.jit
def poll_nothing(comm, gather, first, end, STEP: tl.constexpr):
    return True


@triton.jit
def poll_each_relaxed(signals, mask, SCOPE: tl.constexpr):
    return tl.atomic_add(signals, 0, mask=mask, sem="relaxed", scope=SCOPE)


@triton.jit
def share_nothing():
    pass


@triton.jit
def wait_for_all_but_the_last_block(comm, gather, first, end, STEP: tl.constexpr):
    return wait_places(comm, gather, first, end - 1, STEP)


@triton.jit
def wait_for_all_but_the_last_chunk_of_a_block(comm, gather, place, STEP: tl.constexpr):
    """Each chunk of a block has a signal of its own."""
    _, blocks, chunks = blocks_of(gather, STEP)
    source, block = arrival_order(place, rank_of(comm.context), blocks, comm.WORLD_SIZE, comm.RANKS_PER_NODE)
    complete = True
    for chunk in range(block * chunks, tl.minimum((block + 1) * chunks, gather.chunks) - 1):
        complete &= wait_chunk(comm, gather, source, chunk, COMPUTE)
    return complete


@triton.jit
def wait_for_the_pass_before(comm, call, which):
    complete = True
    if which > 0:
        complete = _wait_pass(comm, call, which - 1)
    return complete


@triton.jit
def wait_only_with_columns(comm, call, which):
    complete = True
    if call.n > 0:
        complete = _wait_pass(comm, call, which)
    return complete


@triton.jit
def store_no_partial(slot, tile, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    pass


@triton.jit
def load_no_partial(slot, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    return tl.zeros((TILE_M, TILE_N), tl.float32)


BROKEN = {
    # rule 1: signals grow, and are waited for with the epoch
    "an arrival is not signalled": Broken(
        NODE,
        {protocol.notify_chunk: notify_all_but_one},
        mk.CommTimeout,
        {"signal": "arrived", "index": 1, "role": "compute"},
    ),
    "an arrival over the network is signalled with an old epoch": Broken(
        NETWORK,
        {protocol.post_chunk: post_with_old_epoch},
        mk.CommTimeout,
        {"signal": "arrived", "role": "compute", "seen": 0, "expected": 1},
    ),
    "compute waits for the epoch before": Broken(NODE, {protocol.wait_chunk: wait_for_epoch_before}),
    "compute waits for the last use of the half": Broken(NETWORK, {protocol.wait_chunk: wait_for_last_use}),
    "compute polls for the epoch before": Broken(NODE, {kernel.poll_chunks: poll_for_epoch_before}),
    "compute does not wait": Broken(NODE, {kernel.poll_chunks: poll_nothing}),
    "compute does not wait for the last block of a pass": Broken(
        NODE, {kernel.wait_places: wait_for_all_but_the_last_block}
    ),
    "compute does not wait for the last chunk of a block": Broken(
        WeightGrads((1, 2), chunk_rows=4), {kernel.wait_block: wait_for_all_but_the_last_chunk_of_a_block}
    ),
    "a pass waits for the rows of the one before": Broken(NODE, {kernel._wait_pass: wait_for_the_pass_before}),
    "intra passes rows on before they are here": Broken(TWO_LEVELS, {protocol.wait_chunk: wait_in_compute_only}),
    "the epoch does not advance": Broken(NODE, EPOCH_STAYS),
    # rule 2: data first, then signal
    "a signal before its data": Broken(NODE, {transfer.copy_chunk: notify_before_copy}),
    "a request before its words": Broken(NETWORK, {requests.write_request: turn_before_words}),
    "a request before its rows are staged": Broken(NETWORK, {transfer.copy_chunk: post_before_copy}),
    "no release": Broken(NODE, RELAXED_NOTIFY),
    "no release before the network": Broken(NETWORK, RELAXED_NOTIFY),
    "no barrier before the release": Broken(NODE, NO_BARRIER),
    "no barrier before the network": Broken(NETWORK, NO_BARRIER),
    "no acquire": Broken(NODE, RELAXED_WAIT | {signals.poll_each: poll_each_relaxed}),
    "no acquire in a poll": Broken(NODE, {signals.poll_each: poll_each_relaxed}),
    "no barrier after a poll": Broken(NODE, {signals.share_acquired: share_nothing}),
    "no acquire of what came over the network": Broken(
        NETWORK, RELAXED_WAIT | {signals.poll_each: poll_each_relaxed}
    ),
    "no acquire of what is passed on": Broken(TWO_LEVELS, RELAXED_WAIT),
    "no fence for descriptors": Broken(NODE, NO_FENCE_FOR_DESCRIPTORS),
    # rule 3: buffers are reused when their readers are done
    "a rank with no columns does not wait for the rows of others": Broken(
        WeightGrads((1, 2), **NO_COLUMNS), {kernel._wait_pass: wait_only_with_columns}
    ),
    "a rank with no columns does not wait for the rows of other nodes": Broken(
        WeightGrads((2, 1), **NO_COLUMNS), {kernel._wait_pass: wait_only_with_columns}
    ),
    "one half for all epochs": Broken(WeightGrads((1, 2), calls=2), ONE_HALF),
    "a is given back before the network has read it": Broken(
        WeightGrads((2, 1), heap=True), {requests.wait_sent: wait_for_no_transfer}
    ),
    "a slot of the ring is reused before it was taken": Broken(
        WeightGrads((2, 1), ring=2, m=80), {requests.wait_free: take_slot_at_once}
    ),
    # rule 4: no CTA waits for a later one, unless CTAs join
    "roles from the last CTA to the first": Broken(
        WeightGrads((1, 2), resident=1, join_tiles=0),
        {roles.this_cta: number_from_the_end},
        mk.CommTimeout,
        {"signal": "arrived", "role": "compute"},
    ),
    # rule 5: the network promises no order
    "one set of arrival signals for all epochs": Broken(WeightGrads((3, 1), calls=2, m=16), ONE_HALF_OF_SIGNALS),
    # memory
    "partials are not stored": Broken(NODE, {partials.store_partial: store_no_partial}, (WRONG, RACE)),
    "partials are not added": Broken(NODE, {partials.load_partial: load_no_partial}, WRONG),
    "a tile is stored beyond out": Broken(
        WeightGrads((1, 2), n=5), {gemm.store_tile: store_tall_tile}, mk.SimulatorError
    ),
    "a signal beyond the workspace": Broken(NODE, {layout.word_of: word_far_away}, mk.SimulatorError),
    "a request beyond the workspace": Broken(NETWORK, {protocol.post_chunk: post_too_much}, mk.SimulatorError),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    assert_caught(BROKEN[name])


# -- peers that never come


@pytest.mark.parametrize(("cluster", "dead"), [((1, 2), 0), ((1, 3), 1), ((2, 1), 1), ((2, 2), 3)])
def test_a_dead_peer(cluster, dead):
    """Rule 6: all others find out, with a record, and go on without it."""
    case = Case(9, 5, 8)

    def work(group):
        call(group, case)
        if group.rank == dead:
            return None
        with pytest.raises(mk.CommTimeout) as caught:
            call(group, case, 1)
        part = group.subset([rank for rank in range(group.size) if rank != dead])
        for turn in range(2):
            call(part, case, turn)
        return caught.value

    failures = [failure for failure in run(work, cluster=cluster) if failure is not None]
    assert len(failures) == cluster[0] * cluster[1] - 1
    for failure in failures:
        assert failure.record.op == WeightGrads.op
        assert failure.record.peer != failure.record.rank
        if failure.record.signal != "nothing":
            assert failure.record.signal == "arrived"
            assert failure.record.seen < failure.record.expected == 2
    assert any(record.peer == dead for failure in failures for record in failure.records)


def test_what_could_not_be_computed_is_nan():
    """Every element needs the rows of every rank."""
    case = Case(9, 5, 8)

    def work(group):
        call(group, case)
        if group.rank == 1:
            return None
        canary = Canary(case.k, 5, case.dtype)
        with pytest.raises(mk.CommTimeout):
            call(group, case, out=canary.tensor)
        canary.check()
        return canary.tensor

    assert torch.isnan(run(work, cluster=(1, 2))[0]).all()
