"""The mixture-of-experts operators, broken on purpose. Then peers that never come."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from broken import RELAXED_NOTIFY, RELAXED_WAIT, WRONG, Broken, assert_caught
from experts import Layer, combine, dispatch, ffn
from helpers import run
from mutation import mutated
from scenarios import EXPERT_CALLS, LITTLE, Routes

import mkernel as mk

NODE = Routes((1, 2), "moe_dispatch_matmul")
NETWORK = Routes((2, 1), "moe_dispatch_matmul")
# experts with more than one block of rows
MANY = Routes((1, 2), "moe_dispatch_matmul", layer=Layer((80, 3), (2, 3), hidden=16, out=16, dtype=torch.float32))
SPARSE = replace(LITTLE, tokens=(9, 5), experts=(2, 3))  # tokens that stay in their node
BACK = Routes((1, 2), "moe_combine")
BACK_FAR = Routes((2, 1), "moe_combine")
LAYER = Routes((1, 2), "moe_ffn")
LAYER_FAR = Routes((2, 1), "moe_ffn")
# ranks with no expert compute nothing, so no tile's counter tells them what they must wait for themselves
LAYER_FEW = replace(LAYER, layer=replace(LITTLE, experts=(2, 0)))
LAYER_AWAY = replace(LAYER_FAR, layer=replace(LITTLE, experts=(0, 2)))
ALONE = Routes((1, 1), "moe_ffn", layer=Layer((20,), (2,), hidden=40, out=40, dtype=torch.float32))

HELD = "            notify(signal_of(comm, rank, batch.signals.held, rank, chunk), comm.epoch)\n"
SIGNALS, ROWS = "(epoch % 2) * words.half", "(epoch % 2) * buffer.half"

BROKEN = {
    # rule 1: signals grow, and are waited for with the epoch
    "a chunk of tokens is not signalled": Broken(
        NODE,
        [("op/dispatch", HELD, f"            if chunk != 1:\n    {HELD}")],
        mk.CommTimeout,
        {"signal": "held", "index": 1, "role": "intra", "seen": 0, "expected": 1},
    ),
    "a chunk of tokens is signalled with an old epoch": Broken(
        NETWORK,
        [("op/dispatch", "transfer, signal, comm.epoch, SEND)", "transfer, signal, comm.epoch - 1, SEND)")],
        mk.CommTimeout,
        {"signal": "held", "role": "intra", "seen": 0, "expected": 1},
    ),
    "a routing table is not signalled": Broken(
        NODE,
        [("op/routing", "        notify(signal_of(comm, rank, batch.signals.routed, rank, 0), comm.epoch)\n", "")],
        mk.CommTimeout,
        {"signal": "routed", "seen": 0, "expected": 1},
    ),
    "an entry is not announced in the node": Broken(
        replace(NODE, calls=2),
        [("op/protocol", "notify(signal_of(comm, peer, signals.entered, rank, 0), comm.epoch)", "pass")],
        mk.CommTimeout,
        {"signal": "entered", "seen": 0, "expected": 1},
    ),
    "an entry is not announced to other nodes": Broken(
        replace(NETWORK, calls=2),
        [("op/protocol", "0, segment, 0, 0), signal, comm.epoch, ROLE)", "0, segment, 0, 0), signal, 0, ROLE)")],
        mk.CommTimeout,
        {"signal": "entered", "seen": 0, "expected": 1},
    ),
    "tokens are fetched before they are there": Broken(
        NODE, [("op/dispatch", "epoch, INTRA, HELD", "epoch - 2, INTRA, HELD")]
    ),
    "tokens are fetched before the network brought them": Broken(
        NETWORK, [("op/dispatch", "epoch, INTRA, HELD", "epoch - 2, INTRA, HELD")]
    ),
    "a tile is too short for its block": Broken(
        MANY, [("op/grouped", "if rows > (SHORT_M if", "if rows > (M - 1 if")], WRONG
    ),
    "a short tile is stored to its full height": Broken(
        MANY, [("op/grouped", "mask=(i < tile.rows - tile.row) &", "mask=(i < ROWS) &")]
    ),
    "tiles do not wait for their rows": Broken(
        NODE, [("op/grouped", "placed + block, rows, COMPUTE", "placed + block, rows * 0, COMPUTE")]
    ),
    "tiles wait for all rows but one": Broken(
        NODE, [("op/grouped", "placed + block, rows, COMPUTE", "placed + block, rows - 1, COMPUTE")]
    ),
    "rows are counted before all tables are here": Broken(
        NODE, [("op/routing", "signal, comm.epoch, ROLE, ROUTED", "signal, 0, ROLE, ROUTED")]
    ),
    "tokens are placed before they are counted": Broken(
        NODE, [("op/dispatch", "counted, comm.epoch, INTRA", "counted, comm.epoch - 1, INTRA")]
    ),
    "tiles are taken before they are ordered": Broken(
        NODE, [("op/schedule", "scheduled, comm.epoch, COMPUTE", "scheduled, comm.epoch - 1, COMPUTE")]
    ),
    # rule 2: data first, then signal
    "placed rows are not released": Broken(
        NODE, [("op/dispatch", 'mask=goes_here, sem="release"', 'mask=goes_here, sem="relaxed"')]
    ),
    "no barrier before placed rows are counted": Broken(
        NODE, [("op/dispatch", "tl.debug_barrier()\n        tl.atomic_add(tables", "tl.atomic_add(tables")]
    ),
    "counts are not released": Broken(
        NODE, [("op/routing", "COUNTERS_DONE, 1, sem=\"acq_rel\"", "COUNTERS_DONE, 1, sem=\"relaxed\"")]
    ),
    "no release": Broken(NODE, RELAXED_NOTIFY),
    "no acquire": Broken(NODE, RELAXED_WAIT),
    "no fence for descriptors": Broken(NODE, [("op/grouped", "    acquire_for_descriptors()\n", "")]),
    "tiles are handed out where the call before ended": Broken(
        Routes((1, 2), "moe_dispatch_matmul", calls=2),
        [("op/routing", "    tl.store(summary + TILES_TAKEN, 0)\n", "")],
        WRONG,
    ),
    # rule 3: buffers are reused when their readers are done
    "one half for all epochs": Broken(
        Routes((1, 2), "moe_dispatch_matmul", calls=2),
        [("layout", SIGNALS, SIGNALS.replace("%", "* 0 *")), ("layout", ROWS, ROWS.replace("%", "* 0 *"))],
    ),
    # rule 5: the network promises no order
    "one set of arrival signals for all epochs": Broken(
        # the second rank has no tokens, so the first does not need to hear of it before it goes on
        Routes((2, 1), "moe_dispatch_matmul", calls=2, layer=Layer((3, 0), (1, 1), hidden=16, out=16)),
        [("layout", SIGNALS, SIGNALS.replace("%", "* 0 *"))],
    ),
    # places
    "rows of a source begin where those of another do": Broken(
        NODE, [("op/dispatch", "comm.WORLD_SIZE + source, mask", "comm.WORLD_SIZE + 0 * source, mask")]
    ),
    "a token that was not sent is counted": Broken(
        replace(NETWORK, calls=2, layer=SPARSE),
        [("op/routing", "number = before + tl.cumsum(crosses, 0) - crosses", "number = t")],
    ),
    "a tile is stored beyond its expert": Broken(
        MANY, [("op/grouped", "[tile.rows, ROWS - (tile.rows - tile.row),", "[tile.row + ROWS, 0 * tile.rows,")]
    ),
    # combine
    "rows of the node are collected before they are summed": Broken(
        BACK, [("op/reduction", "epoch, COMPUTE, RETURNED", "epoch - 2, COMPUTE, RETURNED")]
    ),
    "sums of other nodes are collected before they are here": Broken(
        BACK_FAR, [("op/reduction", "epoch, COMPUTE, BACK", "epoch - 2, COMPUTE, BACK")]
    ),
    "a sum is not sent back": Broken(
        BACK_FAR,
        [("op/reduction", "            post(comm", "            if chunk != 0:\n             post(comm")],
        mk.CommTimeout,
        {"signal": "back", "seen": 0, "expected": 1},
    ),
    "weights are read before they are here": Broken(
        BACK, [("op/routing", "signal, comm.epoch, ROLE, ROUTED", "signal, 0, ROLE, ROUTED")]
    ),
    "a weight of another slot": Broken(BACK, [("op/reduction", "weights + i * K + slot", "weights + i * K")], WRONG),
    # inside the layer
    "the second GEMM does not wait for the first": Broken(
        ALONE, [("op/ffn", "counters + GATED, gates, COMPUTE", "counters + GATED, gates * 0, COMPUTE")]
    ),
    "the second GEMM waits for all tiles but one": Broken(
        ALONE, [("op/ffn", "counters + GATED, gates, COMPUTE", "counters + GATED, gates - 1, COMPUTE")]
    ),
    "tiles are not released": Broken(
        ALONE, [("op/ffn", 'DONE, GATED), 1, sem="release"', 'DONE, GATED), 1, sem="relaxed"')]
    ),
    "stores through descriptors are not waited for": Broken(
        ALONE, [("op/ffn", "        complete_descriptor_stores()\n", "")]
    ),
    "rows are summed before they are computed": Broken(
        ALONE, [("op/ffn", "mine, downs, COMPUTE", "mine, downs * 0, COMPUTE")]
    ),
    "rows are summed before their places are known": Broken(
        LAYER_FEW, [("op/ffn", "settled, comm.epoch, COMPUTE", "settled, 0, COMPUTE")]
    ),
    "tiles of the layer do not wait for their rows": Broken(
        LAYER, [("op/ffn", "_again(context, counters, rows, COMPUTE", "_again(context, counters, rows * 0, COMPUTE")]
    ),
    "tokens are collected before those that departed are numbered": Broken(
        LAYER_AWAY,
        [("op/ffn", "numbered, comm.epoch, COMPUTE", "numbered, 0, COMPUTE")],
    ),
    "sums of the layer are collected before they are here": Broken(
        LAYER_FAR, [("op/reduction", "epoch, COMPUTE, BACK", "epoch - 2, COMPUTE, BACK")]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name, tmp_path):
    assert_caught(BROKEN[name], tmp_path)


def test_rows_over_capacity_must_not_be_placed(tmp_path):
    broken = mutated(
        tmp_path, "moe",
        ("op/dispatch", "ok = tl.load(tables.summary + STATUS) == OK", "ok = tl.load(tables.summary + STATUS) >= OK"),
    ).moe_dispatch_matmul  # fmt: skip

    def work(group, function):
        with pytest.raises(mk.CapacityError):
            dispatch(group, NODE.layer, op=function, capacity=5)

    run(work, mk.moe_dispatch_matmul, cluster=(1, 2))
    with pytest.raises((mk.SimulatorError, AssertionError)):
        run(work, broken, cluster=(1, 2))


@pytest.mark.parametrize("op", EXPERT_CALLS)
def test_an_unbroken_copy_passes(op, tmp_path):
    """Copying alone breaks nothing."""
    Routes((1, 2), op, calls=1).run(mutated(tmp_path, "moe"), seed=0)


# -- peers that never come


@pytest.mark.parametrize(("cluster", "dead"), [((1, 2), 1), ((2, 1), 0), ((2, 2), 3)])
@pytest.mark.parametrize("call", [combine, ffn])
def test_a_dead_peer(cluster, dead, call):
    """All others find out, with a record, and go on without it."""
    size = cluster[0] * cluster[1]
    layer = Layer((4,) * size, (1,) * size, k=2, hidden=16, out=16, dtype=torch.float32)
    smaller = Layer((4,) * (size - 1), (1,) * (size - 1), k=1, hidden=16, out=16, dtype=torch.float32)

    def work(group):
        call(group, layer, max_tokens=8)
        if group.rank == dead:
            return None
        with pytest.raises(mk.CommTimeout) as caught:
            call(group, layer, 1, max_tokens=8)
        # some hear of it at once, some only when their own time is over: nobody shall wait for them in vain
        group.timeout *= 10
        part = group.subset([rank for rank in range(group.size) if rank != dead])
        call(part, smaller)
        return caught.value

    failures = [failure for failure in run(work, cluster=cluster, timeout=1e-4) if failure is not None]
    assert len(failures) == size - 1
    assert any(failure.is_cause for failure in failures)
    assert any(record.peer == dead for failure in failures for record in failure.records)


def test_what_could_not_be_computed_is_nan():
    layer = Layer((4, 4), (1, 1), k=2, hidden=16, out=16, dtype=torch.float32)

    def work(group):
        out = torch.zeros(4, 16)
        ffn(group, layer, max_tokens=8, out=out)
        if group.rank == 0:
            with pytest.raises(mk.CommTimeout):
                ffn(group, layer, 1, max_tokens=8, out=out)
            assert out.isnan().all()
        return True

    assert all(run(work, cluster=(1, 2), timeout=1e-4))


def test_a_combine_that_was_queued_behind_a_lost_dispatch():
    """Its tables may be missing: it must not look at them."""
    layer = Layer((4, 4), (1, 1), k=2, hidden=16, out=16, dtype=torch.float32)

    def work(group):
        out = torch.zeros(4, 16)
        with group.world.stream(group.rank, "queue"):
            for _ in range(2):
                y, handle = dispatch(group, layer, check=False, max_tokens=8)
                mk.moe_combine(y, handle, layer.weights(group.rank), out=out)
                if group.rank == 1:
                    group.synchronize()
                    group.launch = lambda launch: group.confirm()  # lost when all were about to launch
            if group.rank == 0:
                with pytest.raises(mk.CommTimeout):
                    group.synchronize()
                assert y.isnan().all()
                assert out.isnan().all()
        return True

    assert all(run(work, cluster=(1, 2), timeout=1e-4))
