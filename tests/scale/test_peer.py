"""mKernel's own schedules in the model. How they compare with its times is in test_model.py."""

from dataclasses import replace

import numpy as np
import pytest

from mkernel import operators
from mkernel.bench import published
from mkernel.ops.all_gather_matmul.peer import _blocks
from mkernel.scale.engine import Engine, Lanes, Link
from mkernel.scale.peer import claim, load_peer, move, run_list
from mkernel.scale.validation import flops_of

TIMED = [(op, row["size"]) for op in operators.registered("model") for row in published.rows(op)]


@pytest.fixture(scope="module")
def peer():
    return load_peer()


def run(peer, op, size):
    engine = Engine(peer.machine, 2, 8)
    operators.find(op).load("model").peer(engine, peer, size)
    return engine


def test_tiles_are_dealt_in_turn():
    lanes = Lanes("CTAs", 2, 0.0, None)
    run_list(lanes, np.array([0.0, 3.0, 0.0, 0.0, 9.0]), 1.0)
    assert lanes.clock.tolist() == [10.0, 5.0]


def test_chunks_wait_for_their_lane_and_the_link():
    lanes = Lanes("warps", 2, 0.0, None)
    done = move(lanes, np.array([0.0, 0.0, 0.0, 20.0]), 1.0, Link(10.0), 30.0)
    assert done.tolist() == [3.0, 6.0, 9.0, 23.0]
    assert move(Lanes("warps", 1, 0.0, None), np.zeros(2), 5.0, Link(10.0), 30.0).tolist() == [5.0, 10.0]


def test_jobs_are_claimed_in_order():
    lanes = Lanes("CTAs", 2, 0.0, None)
    lanes.work(np.array([4.0]), "multiply", slice(1, 2))
    assert claim(lanes, np.array([1.0, 0.0, 0.0]), 2.0, "reduce").tolist() == [3.0, 5.0, 6.0]
    assert lanes.clock.tolist() == [5.0, 6.0]
    assert lanes.busy["reduce"].tolist() == [4.0, 2.0]


@pytest.mark.parametrize(("blocks", "columns"), [(16, 1), (32, 2), (96, 6), (24, 3)])
def test_bands_have_every_tile(blocks, columns):
    found = _blocks(blocks, columns)
    assert np.bincount(found).tolist() == [columns] * blocks
    assert found[: 12 * columns].max() == 11


def test_what_multiplies_is_bound_by_an_sm_or_by_the_cache(peer):
    assert peer.tile(4096, 1) == peer.tile(4096, 64) == peer.machine.tile(128, 256, 4096)
    assert peer.tile(4096, 132) > 1.2 * peer.tile(4096, 1)


def test_every_constant_is_calibrated_by_a_time_of_its_own(peer):
    used = [what for sizes in peer.calibration.values() for what in sizes.values()]
    assert sorted(used) == sorted([*peer.sources, "sm_flops"])  # of which there are two
    assert all("calibrated" in source for source in peer.sources.values())
    for op, sizes in peer.calibration.items():
        assert {int(size) for size in sizes} <= {row["size"] for row in published.rows(op)}


@pytest.mark.parametrize(("op", "size"), TIMED[::3])
def test_a_late_network_is_waited_for(peer, op, size):
    """But not by the FFN, whose calls find the flags of the first one."""
    late = replace(peer, machine=replace(peer.machine, network_seconds=0.2))
    assert run(peer, op, size).end < 0.2
    assert (run(late, op, size).end > 0.2) == (op != "moe_ffn")


@pytest.mark.parametrize("op", dict(TIMED))
def test_everything_is_computed(peer, op):
    """With the largest size, CTAs are busy for as long as its operations take at the rate of an SM, or somewhat
    longer."""
    size = dict(TIMED)[op]
    kind, rate = ("attend", "attention") if op == "ring_attention" else ("multiply", "gemm")
    busy = sum(lanes.busy[kind].sum() for lanes in run(peer, op, size).groups if kind in lanes.busy)
    flops = flops_of(operators.find(op), operators.find(op).load("bench").published.shape(size, 16))
    most = 1.17 if op == "moe_ffn" else 1.0  # rows of the rank that is simulated
    assert most <= busy * peer.machine.sm_flops[rate] / flops < 1.35 * most
