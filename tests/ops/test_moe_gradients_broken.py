"""The backward passes of the mixture-of-experts operators, broken on purpose: what they do not share with the forward
passes. Then launches behind a lost one."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from support.broken_variants import WRONG, Broken, SimulatedCalls, assert_caught
from support.moe_gradients import Trains, gradient_of, halves_gradients
from support.moe_reference import Layer, dispatch
from support.operator_calls import run

import mkernel as mk
from mkernel.ops.moe import backward, gradient_rows, placing, redispatch, weight_grad
from mkernel.ops.moe import dispatch as moe_dispatch
from mkernel.ops.moe import ffn as moe_ffn
from mkernel.ops.moe.ffn import _keep
from mkernel.ops.moe.placing import _count_placed, _wait_origin

LAYER = Layer((9, 5), (2, 3), hidden=16, out=16, dtype=torch.float32)


@dataclass(frozen=True)
class TrainsHalves(SimulatedCalls):
    """Those of moe_dispatch_matmul and moe_combine."""

    def work(self, group):
        for turn in range(self.calls):
            halves_gradients(group, LAYER, turn, max_tokens=12)


@triton.jit
def fetch_at_once(comm, dispatch, batch, rank, holder, source, chunk, wanted):
    if dispatch.KNOWN:
        wanted = wanted * 0
    return _wait_origin(comm, dispatch, batch, rank, holder, source, chunk, wanted)


@triton.jit
def do_not_wait_for_tables(comm, batch):
    return tl.full((), True, tl.int1)


@triton.jit
def count_all_slots(counters, mask):
    _count_placed(counters, mask | True)


@triton.jit
def all_rows_from_there_on(x, end, rows, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return x.load([end - rows + ROWS, 0, column]).reshape(ROWS, COLUMNS)


@triton.jit
def store_in_all_slots(rows, i, inside, gradients):
    slot = tl.arange(0, rows.SLOTS)[None, :]
    mask = inside[:, None] & (slot < rows.K)
    tl.store(rows.gradients + i.to(tl.int64)[:, None] * rows.K + slot, gradients[:, None] + 0.0 * slot, mask=mask)


@triton.jit
def keep_gate_twice(gemms, tile, gate, up):
    _keep(gemms, tile, gate, gate)


same_counters = functools.cache(redispatch.new_counters)


NODE, NETWORK = Trains((1, 2), layer=LAYER), Trains((2, 1), layer=LAYER)
BROKEN = {
    "tokens are fetched before they are there": Broken(NODE, {placing._wait_origin: fetch_at_once}),
    "tokens are fetched before the network brought them": Broken(NETWORK, {placing._wait_origin: fetch_at_once}),
    "weights are read before they are here": Broken(NODE, {moe_dispatch._wait_tables: do_not_wait_for_tables}),
    "weights are read before the network brought them": Broken(
        NETWORK, {moe_dispatch._wait_tables: do_not_wait_for_tables}
    ),
    "counters go on where those of the launch before ended": Broken(
        NODE, {}, (WRONG, mk.SimulatorError), host={"mkernel.ops.moe.redispatch.new_counters": same_counters}
    ),
    "a sum over rows goes on behind the expert": Broken(
        NODE, {weight_grad._rows_before: all_rows_from_there_on}, (WRONG, mk.SimulatorError)
    ),
    "a weight's gradient goes to all slots": Broken(
        NODE, {gradient_rows._store_weight_gradients: store_in_all_slots}, WRONG
    ),
    "a combined row's weight goes to all slots": Broken(
        TrainsHalves((1, 2)), {gradient_rows._store_weight_gradients: store_in_all_slots}, WRONG
    ),
    "the activations that are kept are others": Broken(
        Trains((1, 2), layer=LAYER, save="activations"), {moe_ffn._keep: keep_gate_twice}, WRONG
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    assert_caught(BROKEN[name])


def lose(group, launch):
    """A launch that is lost when all were about to launch."""
    group._call = group._call or (launch.op, ())
    group.confirm()
    group._call = None


def test_backward_passes_that_were_queued_behind_a_lost_launch():
    """Its tables may be missing: nothing may look at them."""
    layer = Layer((4, 4), (1, 1), k=2, hidden=16, out=16, dtype=torch.float32)

    def work(group):
        rank, found = group.rank, []
        x, w, weights, dout = layer.x(rank), layer.w(rank), layer.weights(rank), gradient_of(layer, rank, 0, 16)
        with group.world.stream(rank, "queue"):
            for _ in range(2):
                y, handle = dispatch(group, layer, check=False, max_tokens=8)
                dy, dweights = backward.moe_combine_backward(dout, y, weights, handle, group=group)
                needed = (True, True)
                found = [dweights]
                found += backward.moe_dispatch_matmul_backward(dy, x, w, handle, group=group, needed=needed)
                if rank == 1:
                    group.synchronize()
                    group.launch = functools.partial(lose, group)
            if rank == 0:
                with pytest.raises(mk.CommTimeout):
                    group.synchronize()
                assert all(each.isnan().all() for each in found)
        return True

    assert all(run(work, cluster=(1, 2), timeout=1e-4))
