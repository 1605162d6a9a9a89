"""Bounds that grow with the expected load, what a call allocates, and a small fixed capacity for decoding."""

from __future__ import annotations

import math

import pytest
import torch
from support.moe_gradients import ffn_gradients, halves_gradients, rows_gradients
from support.moe_reference import SMALL, Layer, combine, dispatch, dispatch_rows, ffn
from support.operator_calls import run

import mkernel as mk

# ids are balanced to within a token: rank r gets every second one
BALANCED = Layer((8, 8), (2, 2), k=2, dtype=torch.float32)


def balanced_ids(rank, turn=0):
    return torch.arange(16).view(8, 2) % 4


@pytest.fixture
def balanced(monkeypatch):
    monkeypatch.setattr(Layer, "ids", lambda layer, rank, turn=0: balanced_ids(rank, turn))
    return BALANCED


@pytest.mark.parametrize("call", [ffn, dispatch, dispatch_rows, combine])
def test_a_capacity_that_grows_with_the_load(call, balanced):
    """1.0 is exactly enough for a balanced routing; less is an error on all ranks, behind which the group goes on."""

    def work(group):
        call(group, balanced, max_tokens=8, capacity_factor=1.0)
        with pytest.raises(mk.CapacityError, match=r"16 rows go to rank \d, whose capacity is 15"):
            call(group, balanced, max_tokens=8, capacity_factor=15 / 16)
        call(group, balanced, max_tokens=8, capacity_factor=100)

    run(work, cluster=(1, 2))


@pytest.mark.parametrize("call", [ffn_gradients, halves_gradients, rows_gradients])
def test_gradients(call, balanced):
    run(lambda group: call(group, balanced, max_tokens=8, capacity_factor=1.25), cluster=(1, 2))


def test_what_is_refused():
    layer = BALANCED

    def work(group):
        for error, arguments in {
            "pass one of them": dict(capacity=20, capacity_factor=1.0, max_tokens=8),
            "capacity_factor needs max_tokens": dict(capacity_factor=1.0),
            "capacity_factor needs max_tokens, the largest": dict(capacity_factor=1.0, max_tokens=-1),
            "capacity_factor must be a number above 0, got 0": dict(capacity_factor=0, max_tokens=8),
            "capacity_factor must be a number above 0, got inf": dict(capacity_factor=math.inf, max_tokens=8),
            "capacity_factor must be a number above 0, got True": dict(capacity_factor=True, max_tokens=8),
        }.items():
            for call in (ffn, dispatch, dispatch_rows):
                with pytest.raises(mk.ArgumentError, match=error):
                    call(group, layer, **arguments)

    run(work, cluster=(1, 2))


def allocations(monkeypatch, group):
    """The bytes of the tensors and the workspaces that calls of a group allocate from now on."""
    memory, heap, found = type(group.world.memory), type(group.heap), []
    empty, allocate = memory.empty, heap.allocate

    def counted(self, rank, shape, dtype):
        tensor = empty(self, rank, shape, dtype)
        if rank == 0:
            found.append(tensor.nbytes)
        return tensor

    def counted_segment(self, nbytes, *arguments):
        if self is group.heap:
            found.append(nbytes)
        return allocate(self, nbytes, *arguments)

    monkeypatch.setattr(memory, "empty", counted)
    monkeypatch.setattr(heap, "allocate", counted_segment)
    return found


@pytest.mark.parametrize("op", ["moe_ffn", "moe_dispatch_matmul", "moe_dispatch", "moe_combine"])
@pytest.mark.parametrize("bounds", [dict(max_tokens=8), dict(max_tokens=9, capacity_factor=1.5)])
def test_explain_says_what_a_call_allocates(op, bounds, monkeypatch):
    layer = Layer((8, 8), (2, 2), hidden=40, out=24, dtype=torch.float32)

    def work(group):
        rank = group.rank
        x, ids, weights = layer.x(rank), layer.ids(rank), layer.weights(rank)
        given = {
            "moe_ffn": (x, ids, weights, layer.gate_up(rank), layer.down(rank)),
            "moe_dispatch_matmul": (x, ids, layer.w(rank)),
            "moe_dispatch": (x, ids, 2),
        }
        if op == "moe_combine":
            given[op] = (*mk.moe_dispatch_matmul(*given["moe_dispatch_matmul"], **bounds), weights)
        arguments = {} if op == "moe_combine" else dict(bounds, config=SMALL)
        plan = mk.explain(op, *given[op], **arguments)
        assert "its workspace, kept for later calls, has" in str(plan)
        group.barrier()
        found = allocations(monkeypatch, group) if rank == 0 else []
        group.barrier()
        getattr(mk, op)(*given[op], **arguments)
        return plan.memory.total, sum(found)

    said, allocated = run(work, cluster=(1, 2))[0]
    assert said == allocated


def test_what_is_kept_for_a_backward_pass_is_counted():
    def work(group):
        given = (torch.ones(8, 16), torch.zeros(8, 2, dtype=torch.int64), torch.ones(8, 2))
        matrices = torch.ones(2, 16, 24), torch.ones(2, 12, 16)
        less, more = (mk.explain("moe_ffn", *given, *matrices, save=save).memory for save in ("inputs", "activations"))
        # rows, with ROWS_BEFORE, then gate and up, in lines of 64 bytes
        assert more.own - less.own == 4 * ((64 + 16) * 16 + 16 * 32)

    run(work, cluster=(1, 1))


def test_decoding_with_a_fixed_small_capacity():
    """A batch of fixed size, as in a CUDA graph: what is no token names no expert, and costs no row."""
    layer = Layer((6, 6), (2, 2), k=2, hidden=16, out=16, dtype=torch.float32)

    def work(group):
        rank = group.rank
        given = layer.x(rank), layer.ids(rank), layer.weights(rank).nan_to_num(0.0)
        matrices = layer.gate_up(rank), layer.down(rank)
        expected = mk.moe_ffn(*given, *matrices)
        batch = 16
        x, ids = torch.full((batch, 16), float("nan")), torch.full((batch, 2), -1)
        weights, out = torch.zeros(batch, 2), torch.empty(batch, 16)
        for tokens in (6, 0, 3):
            ids.fill_(-1)
            for whole, part in zip((x, ids, weights), given):
                whole[:tokens] = part[:tokens]
            mk.moe_ffn(x, ids, weights, *matrices, max_tokens=batch, capacity=24, out=out)
            if tokens == 6:
                assert torch.equal(out[:6], expected)
            assert not out[tokens:].any()

    run(work, cluster=(1, 2))
