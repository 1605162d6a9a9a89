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

HELD = "            notify(segment_of(context, rank, tl.int64) + signal, epoch)\n"
PARITY = "parity = (epoch % 2).to(tl.int32)"

BROKEN = {
    # rule 1: signals grow, and are waited for with the epoch
    "a chunk of tokens is not signalled": Broken(
        NODE,
        [("dispatching", HELD, f"            if chunk != 1:\n    {HELD}")],
        mk.CommTimeout,
        {"signal": "held", "index": 1, "role": "intra", "seen": 0, "expected": 1},
    ),
    "a chunk of tokens is signalled with an old epoch": Broken(
        NETWORK,
        [("dispatching", "size, signal, epoch, SEND)", "size, signal, epoch - 1, SEND)")],
        mk.CommTimeout,
        {"signal": "held", "role": "intra", "seen": 0, "expected": 1},
    ),
    "a routing table is not signalled": Broken(
        NODE,
        [("routing", "        notify(segment_of(context, rank, tl.int64) + signal, epoch)\n", "")],
        mk.CommTimeout,
        {"signal": "routed", "seen": 0, "expected": 1},
    ),
    "an entry is not announced in the node": Broken(
        replace(NODE, calls=2),
        [("routing", "notify(segment_of(context, base + (rank + i) % GPUS, tl.int64) + rank, epoch)", "pass")],
        mk.CommTimeout,
        {"signal": "entered", "seen": 0, "expected": 1},
    ),
    "an entry is not announced to other nodes": Broken(
        replace(NETWORK, calls=2),
        [("routing", "segment, 0, segment, 0, 0, signal, epoch, ROLE)", "segment, 0, segment, 0, 0, signal, 0, ROLE)")],
        mk.CommTimeout,
        {"signal": "entered", "seen": 0, "expected": 1},
    ),
    "tokens are fetched before they are there": Broken(
        NODE, [("dispatching", "epoch, INTRA, HELD", "epoch - 2, INTRA, HELD")]
    ),
    "tokens are fetched before the network brought them": Broken(
        NETWORK, [("dispatching", "epoch, INTRA, HELD", "epoch - 2, INTRA, HELD")]
    ),
    "a tile is too short for its block": Broken(
        MANY, [("moe_dispatch_matmul", "if rows > (SHORT_M if", "if rows > (TILE_M - 1 if")], WRONG
    ),
    "a short tile is stored to its full height": Broken(
        MANY, [("grouped", "mask=(i < rows) & (j < columns)", "mask=(i < TILE_M) & (j < columns)")]
    ),
    "tiles do not wait for their rows": Broken(
        NODE, [("moe_dispatch_matmul", "placed + block, rows, COMPUTE", "placed + block, rows * 0, COMPUTE")]
    ),
    "tiles wait for all rows but one": Broken(
        NODE, [("moe_dispatch_matmul", "placed + block, rows, COMPUTE", "placed + block, rows - 1, COMPUTE")]
    ),
    "rows are counted before all tables are here": Broken(
        NODE, [("routing", "signal, epoch, ROLE, ROUTED", "signal, 0, ROLE, ROUTED")]
    ),
    "tokens are placed before they are counted": Broken(
        NODE, [("dispatching", "counted, epoch, INTRA", "counted, epoch - 1, INTRA")]
    ),
    "tiles are taken before they are ordered": Broken(
        NODE, [("moe_dispatch_matmul", "scheduled, epoch, COMPUTE", "scheduled, epoch - 1, COMPUTE")]
    ),
    # rule 2: data first, then signal
    "placed rows are not released": Broken(
        NODE, [("dispatching", 'mask=named_and_fits, sem="release"', 'mask=named_and_fits, sem="relaxed"')]
    ),
    "no barrier before placed rows are counted": Broken(
        NODE, [("dispatching", "tl.debug_barrier()\n        tl.atomic_add(placed", "tl.atomic_add(placed")]
    ),
    "counts are not released": Broken(
        NODE, [("routing", "COUNTERS_DONE, 1, sem=\"acq_rel\"", "COUNTERS_DONE, 1, sem=\"relaxed\"")]
    ),
    "no release": Broken(NODE, RELAXED_NOTIFY),
    "no acquire": Broken(NODE, RELAXED_WAIT),
    "no fence for descriptors": Broken(NODE, [("moe_dispatch_matmul", "    acquire_for_descriptors()\n", "")]),
    "tiles are handed out where the call before ended": Broken(
        Routes((1, 2), "moe_dispatch_matmul", calls=2), [("routing", "    tl.store(summary + TILES_TAKEN, 0)\n", "")],
        WRONG,
    ),
    # rule 3: buffers are reused when their readers are done
    "one half for all epochs": Broken(
        Routes((1, 2), "moe_dispatch_matmul", calls=2),
        [("routing", PARITY, PARITY.replace("%", "* 0 *")), ("dispatching", PARITY, PARITY.replace("%", "* 0 *"))],
    ),
    # rule 5: the network promises no order
    "one set of arrival signals for all epochs": Broken(
        # the second rank has no tokens, so the first does not need to hear of it before it goes on
        Routes((2, 1), "moe_dispatch_matmul", calls=2, layer=Layer((3, 0), (1, 1), hidden=16, out=16)),
        [("routing", "parity.to(tl.int64) * signals", "parity.to(tl.int64) * 0")],
    ),
    # places
    "rows of a source begin where those of another do": Broken(
        NODE, [("dispatching", "bases + expert * SIZE + source", "bases + expert * SIZE + 0 * source")]
    ),
    "a token that was not sent is counted": Broken(
        replace(NETWORK, calls=2, layer=SPARSE),
        [("routing", "number = before + tl.cumsum(crosses, 0) - crosses", "number = t")],
    ),
    "a tile is stored beyond its expert": Broken(
        MANY, [("grouped", "[row + rows, TILE_M - rows, column]", "[row + TILE_M, 0 * rows, column]")]
    ),
    # the way back
    "rows of the node are collected before they are summed": Broken(
        BACK, [("combining", "epoch, COMPUTE, RETURNED", "epoch - 2, COMPUTE, RETURNED")]
    ),
    "sums of other nodes are collected before they are here": Broken(
        BACK_FAR, [("combining", "epoch, COMPUTE, BACK", "epoch - 2, COMPUTE, BACK")]
    ),
    "a sum is not sent back": Broken(
        BACK_FAR,
        [("combining", "            post(context,", "            if chunk != 0:\n             post(context,")],
        mk.CommTimeout,
        {"signal": "back", "seen": 0, "expected": 1},
    ),
    "weights are read before they are here": Broken(
        BACK, [("routing", "signal, epoch, ROLE, ROUTED", "signal, 0, ROLE, ROUTED")]
    ),
    "a weight of another slot": Broken(BACK, [("combining", "weights + i * K + slot", "weights + i * K")], WRONG),
    # inside the layer
    "the second GEMM does not wait for the first": Broken(
        ALONE, [("moe_ffn", "counters + GATED, gates, COMPUTE", "counters + GATED, gates * 0, COMPUTE")]
    ),
    "the second GEMM waits for all tiles but one": Broken(
        ALONE, [("moe_ffn", "counters + GATED, gates, COMPUTE", "counters + GATED, gates - 1, COMPUTE")]
    ),
    "tiles are not released": Broken(
        ALONE, [("moe_ffn", 'DONE, GATED), 1, sem="release"', 'DONE, GATED), 1, sem="relaxed"')]
    ),
    "stores through descriptors are not waited for": Broken(
        ALONE, [("moe_ffn", "        complete_descriptor_stores()\n", "")]
    ),
    "rows are summed before they are computed": Broken(
        ALONE, [("moe_ffn", "mine, tl.cdiv(hidden, TILE_N), COMPUTE", "mine, tl.cdiv(hidden, TILE_N) * 0, COMPUTE")]
    ),
    "rows are summed before their places are known": Broken(
        LAYER_FEW, [("moe_ffn", "wait(context, settled, epoch, COMPUTE", "wait(context, settled, 0, COMPUTE")]
    ),
    "tiles of the layer do not wait for their rows": Broken(
        LAYER, [("moe_ffn", "_again(context, counters, rows, COMPUTE", "_again(context, counters, rows * 0, COMPUTE")]
    ),
    "tokens are collected before those that departed are numbered": Broken(
        LAYER_AWAY,
        [("moe_ffn", "GPUS), epoch, COMPUTE, NUMBERED", "GPUS), 0, COMPUTE, NUMBERED")],
    ),
    "sums of the layer are collected before they are here": Broken(
        LAYER_FAR, [("combining", "epoch, COMPUTE, BACK", "epoch - 2, COMPUTE, BACK")]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name, tmp_path):
    assert_caught(BROKEN[name], tmp_path)


def test_rows_that_have_no_room_must_not_be_placed(tmp_path):
    broken = mutated(
        tmp_path, "moe_dispatch_matmul",
        ("dispatching", "fits = tl.load(summary + VERDICT) == FITS", "fits = tl.load(summary + VERDICT) >= FITS"),
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
    Routes((1, 2), op, calls=1).run(mutated(tmp_path, op), seed=0)


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
