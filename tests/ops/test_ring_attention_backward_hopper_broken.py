"""The Gluon kernel of ring_attention_backward with rules of synchronisation broken on purpose: those between the warps
of a CTA, and those between CTAs and ranks that this kernel follows in its own way."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import triton.language as tl
from support import attention_gradients, operator_calls
from support.attention_reference import Case
from support.broken_variants import NO_BARRIER, NO_FENCE_FOR_DESCRIPTORS, RELAXED_NOTIFY, WRONG, Broken, assert_caught
from support.scenarios import AttendsBackward
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

import mkernel as mk
from mkernel.ops.attention.backward import hopper, hopper_load, protocol
from mkernel.ops.attention.backward.hopper_load import ROWS, STAGES, rows_of_block
from mkernel.ops.attention.mask import Blocks


@dataclass(frozen=True)
class OnHopper(AttendsBackward):
    """Calls that take the Gluon kernel."""

    def run(self, seed, replace=None):
        return operator_calls.run(
            self.work, cluster=self.cluster, seed=seed, timeout=1e-4, ctas=self.ctas, capability=(9, 0),
            replace=replace or {},
        )  # fmt: skip

    def work(self, group):
        for turn in range(self.calls):
            given, dlse = attention_gradients.inputs(group, self.case, turn)
            config = mk.Config(steps=self.steps)
            found = mk.ring_attention_backward(*given, dlse=dlse, config=config, **self.case.arguments())
            attention_gradients.assert_gradients(found, self.case, group.rank, group.size, turn)


ONE = OnHopper((1, 1), Case(130, heads=2, kv_heads=2, dim=64, dtype=torch.bfloat16, causal=True), ctas=3)
LONG = OnHopper((1, 1), Case(290, dim=64, dtype=torch.bfloat16), ctas=2)  # more steps than stages
NODE = OnHopper((1, 2), Case(70, heads=2, kv_heads=2, dim=64, dtype=torch.bfloat16), calls=2, ctas=3)
# every CTA begins with a tile of dq
DQ_FIRST = OnHopper((1, 2), Case(260, heads=1, kv_heads=1, dim=64, dtype=torch.bfloat16, window=(0, 260)), ctas=2)
REUSE = OnHopper((1, 3), Case(70, heads=4, kv_heads=4, dim=64, dtype=torch.bfloat16), steps=1, ctas=3)


@gluon.jit
def do_not_wait_until_prepared(comm, call):
    return 0.0


@gluon.jit
def do_not_wait_for_a_free_stage(ring, loaded):
    return loaded % STAGES


@gluon.jit
def do_not_wait_for_the_place_of_held_rows(held, number):
    return held.full.index(number % 2)


@gluon.jit
def release_before_rows_are_stored(shared, number):
    mbarrier.arrive(shared.held.empty.index(number % 2), count=1)
    tma.store_wait(0)


@gluon.jit
def store_without_a_fence(out, stage, batch, head, row, rows):
    stage.store(rows.to(out.dtype))
    block = hopper.reinterpret(stage, out.dtype, out.block_type.shape, out.layout)
    hopper.async_store(out, [batch, head, row, 0], block)
    fence_async_shared()


@gluon.jit
def do_not_wait_for_a_chunk(comm, call, round_index, source, key):
    pass


@gluon.jit
def everything_has_arrived(comm, call, task, row):
    return row == row


@gluon.jit
def push_without_waiting(comm, call, round_index, owner, reducer):
    pass


@gluon.jit
def reduce_without_waiting(comm, call, round_index, source, index, tile):
    return 0.0


@gluon.jit
def see_all(mask, weights, place, TRANSPOSED: gl.constexpr):
    return weights


@gluon.jit
def no_step_needs_a_mask(call, rank, which):
    blocks = rows_of_block(call, rank, which)
    return Blocks(blocks.first, blocks.first, blocks.end, blocks.end)


@gluon.jit
def never_a_partial_of_the_second_half(call, rank, source, key):
    return (key < call.mask.length) & (key % (2 * ROWS) == 0)


@gluon.jit
def finish_without_counting(comm, rounds, round_index, ROLE: tl.constexpr):
    pass


BROKEN = {
    # between the warps of a CTA
    "a stage is loaded while it is read": Broken(LONG, {hopper_load._wait_stage: do_not_wait_for_a_free_stage}),
    "held rows are loaded while others are read": Broken(
        ONE, {hopper_load._wait_held: do_not_wait_for_the_place_of_held_rows}
    ),
    "held rows are released while results are stored": Broken(ONE, {hopper._release: release_before_rows_are_stored}),
    "results are stored without a fence": Broken(ONE, {hopper._store_rows: store_without_a_fence}),
    # between CTAs
    "nobody waits for delta": Broken(ONE, {protocol.wait_prepared: do_not_wait_until_prepared}),
    "delta is loaded without a fence": Broken(ONE, NO_FENCE_FOR_DESCRIPTORS),
    # between ranks
    "a block of keys does not wait for its keys": Broken(NODE, {hopper_load._wait_chunk: do_not_wait_for_a_chunk}),
    "a tile of dq does not wait for keys": Broken(DQ_FIRST, {hopper_load._poll_tile: everything_has_arrived}),
    "a partial is pushed before its slot is free": Broken(
        REUSE, {protocol.wait_partial_writable: push_without_waiting}
    ),
    "nobody waits for partials": Broken(NODE, {protocol.wait_partial: reduce_without_waiting}),
    "no release": Broken(NODE, RELAXED_NOTIFY),
    "no barrier before the release": Broken(NODE, NO_BARRIER),
    "rounds are not finished": Broken(REUSE, {hopper.finish_task: finish_without_counting}, mk.CommTimeout),
    "one warpgroup does not push": Broken(
        NODE, {hopper_load.has_partial: never_a_partial_of_the_second_half}, mk.CommTimeout,
        {"signal": "partial gradients", "index": 1},
    ),
    # what is computed
    "nothing is masked": Broken(ONE, {hopper._where_seen: see_all}, WRONG),
    "no step of a block of keys is masked": Broken(ONE, {hopper_load.rows_of_block: no_step_needs_a_mask}, WRONG),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    assert_caught(BROKEN[name])
