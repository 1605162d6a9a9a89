"""Benchmarks of backward passes, without measuring: bytes, floors, errors, and what is compared."""

import types

import pytest
import torch

import mkernel as mk
from mkernel import operators
from mkernel.bench import backward, baselines, timing
from mkernel.cli_checks import options_of
from mkernel.ops import all_gather_matmul
from mkernel.ops.all_gather_matmul import bench as gather_bench
from mkernel.ops.reduce.reduce_scatter import bench as scatter_bench
from mkernel.runtime.world import Launch, Links

TIMES = {"library": 2.0, "fused": 4.0, "in order": 8.0, "overlapped": 5.0}


class NoLink:
    def __init__(self, device):
        pass

    def open(self):
        pass

    def hold(self, nanoseconds):
        pass


@pytest.fixture
def timed(monkeypatch):
    """Nothing is timed. Returns the ways that should have been, by rank."""
    found = {}

    def time_ways(group, ways, repeats):
        found[group.rank] = ways
        times = {name: TIMES[name] for name in ways}
        return times, times

    stream = types.SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(backward, "time_ways", time_ways)
    monkeypatch.setattr(backward, "Link", NoLink)
    for bench in (gather_bench, scatter_bench):
        monkeypatch.setattr(bench, "beside", lambda device, one, other: lambda: (one(), other()), raising=False)
        monkeypatch.setattr(bench, "add_up", lambda *given: None)
    return found


def measure(op, shape, cluster):
    """The figures of a cluster whose links take so many bytes in a millisecond."""
    nodes, gpus = cluster
    run = operators.find(op, "bench").load("bench").measure
    links = Links(nvlink=1e-6 * 1024, network=1e-6 * 512)

    def on_rank(group):
        group.world.links = links
        return run(group, *shape, torch.float32, None, 4, backward=True)

    return mk.spawn(on_rank, nodes=nodes, gpus_per_node=gpus, device="cpu")


@pytest.mark.parametrize("cluster", [(1, 2), (2, 2)])
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_figures(timed, op, cluster):
    (nodes, gpus), shape = cluster, (32, 16, 24)
    size = nodes * gpus
    results = measure(op, shape, cluster)
    assert all(result == results[0] for result in results)
    figures = results[0]
    assert 0 < figures["max_error"] <= 1 == figures["error_bound"], figures["errors"]
    # one matrix travels: the gradient of a's rows and a itself, or the gradient of the result
    rows, columns, transfers = (32 // size, 24, 2) if op == "all_gather_matmul" else (32 // size, 16, 1)
    block = rows * columns * 4
    assert figures["wire_ms"] == pytest.approx(transfers * nodes * (gpus - 1) * block / 1024)
    assert figures["network_ms"] == pytest.approx(transfers * (nodes - 1) * block / 512)
    assert figures["floor_fraction"] == max(2.0, figures["wire_ms"], figures["network_ms"]) / 4.0
    assert figures["host_driven_ms"] == (5.0 if op == "all_gather_matmul" else 8.0)
    fused = timed[0]["fused"]
    assert [isinstance(step, Launch) for step in fused] == [True, op == "all_gather_matmul"]


def test_libraries_in_processes_have_no_backward_pass():
    assert "--backward" in baselines.refusal("nccl", 2, 1, ["backward"])


def test_only_the_benchmark_has_the_option():
    operator = operators.find("all_gather_matmul")
    assert options_of(operator, {}, bench=True) == {"backward": False}
    assert options_of(operator, {}) == {}


def test_a_launch_with_a_workspace_that_was_replaced_is_refused():
    """The stale launch would read and write memory that was freed."""

    def on_rank(group):
        def prepared(rows):
            a, b = torch.zeros(rows, 16), torch.zeros(16, 16)
            return all_gather_matmul.prepare(group, a, b, torch.empty(group.size * rows, 16), None, None)

        small, large = prepared(64), prepared(256)
        timing.check_current(large)
        timing.check_current(prepared(64))
        with pytest.raises(mk.MKernelError, match="all_gather_matmul uses a workspace that was freed"):
            timing.time_ways(group, {"one": large, "both": [large, small]}, 4)

    mk.spawn(on_rank, nodes=2, gpus_per_node=1, device="cpu")
