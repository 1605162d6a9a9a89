"""Several processes on CPUs, as torchrun starts them. An example is run by torchrun itself; the others fork their
ranks, which costs less (`forked_processes.run_ranks`)."""

from pathlib import Path

import pytest
from support import forked_processes


def outputs(program, ranks):
    """What a program prints on each of so many ranks, which must end well."""
    results = forked_processes.run_ranks(program, ranks, store="apart")
    for output, code in results:
        assert code == 0, output
    return [output for output, _ in results]


def assert_right(program, ranks):
    for rank, output in enumerate(outputs(program, ranks)):
        assert f"right on rank {rank}" in output, output


def on_cluster(program, nodes, gpus_per_node):
    """The program, with the cluster's shape filled in. In one node, all ranks are on one host; several nodes on one
    machine talk over TCP."""
    given = gpus_per_node if nodes > 1 else None
    return program.format(ranks=nodes * gpus_per_node, nodes=nodes, gpus_per_node=given)


CALLS = """
    import torch
    from support.patience import WAIT
    import mkernel as mk

    group = mk.init(timeout=WAIT, gpus_per_node={gpus_per_node})
    assert (group.size, group.nodes) == ({ranks}, {nodes})
    for i, (m, n, k) in enumerate([(33, 20, 17), (5, 40, 32), (33, 20, 17)]):
        torch.manual_seed(100 * i + group.rank)
        a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
        y, gathered = mk.all_gather_matmul(a, b, return_gathered=True)
        everyone = torch.cat(group.exchange("a", a))
        assert torch.equal(gathered, everyone)
        error = (y.double() - everyone.double() @ b.double()).abs().max().item()
        assert error <= 4 * k**0.5 * torch.finfo(a.dtype).eps, error
    x = mk.empty(16, 16).fill_(1)
    half = group.split(group.rank % 2)
    assert (mk.all_gather_matmul(x, x, group=half) == 16).all()
    group.close()
    print("right on rank", group.rank)
"""


@pytest.mark.parametrize(
    ("nodes", "gpus_per_node"),
    [(1, 3), (2, 2), *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((1, 2), (3, 1)))],
)
def test_calls(nodes, gpus_per_node):
    assert_right(on_cluster(CALLS, nodes, gpus_per_node), nodes * gpus_per_node)


def test_tensors_that_all_ranks_have_dropped_are_freed():
    """The transport keeps nothing of them, although its last requests to them may have been in flight."""
    program = """
        import torch
        from support.patience import WAIT
        import mkernel as mk

        group = mk.init(timeout=WAIT, gpus_per_node=1, transport="tcp")
        transport = group.world.network.connection(group).transport
        for _ in range(20):
            x = mk.empty(16, 16).fill_(1)
            assert (mk.all_gather_matmul(x, x) == 16).all()
        assert len(transport._segments) <= 6, list(transport._segments)
        assert open("/proc/self/maps").read().count("mkernel memory") <= 6
        group.close()
        del x
        assert open("/proc/self/maps").read().count("mkernel memory") <= 1
        print("right on rank", group.rank)
    """
    assert_right(program, 2)


def test_long_exchanges():
    """torch's store takes values up to 8 MiB, and names up to 8 KiB; a trace, or a group of many ranks, has more."""
    program = """
        from support.patience import WAIT
        import mkernel as mk

        group = mk.init(timeout=WAIT)
        for nbytes in (0, 4 * 2**20, 20 * 2**20):
            told = group.exchange("long", bytes([group.rank]) * nbytes)
            assert told == [bytes([rank]) * nbytes for rank in range(2)]
        key = tuple(range(5000))
        assert group.world.exchange.all_gather(group.rank, (0, 1), key, "a long name", group.rank, WAIT) == [0, 1]
        group.close()
        print("right on rank", group.rank)
    """
    assert_right(program, 2)


def test_a_trace_over_processes():
    program = """
        import torch
        from support.patience import WAIT
        import mkernel as mk
        from mkernel.tracing.links import arrivals

        group = mk.init(timeout=WAIT)
        a, b = torch.ones(32, 32).bfloat16(), torch.ones(32, 32).bfloat16()
        with mk.trace() as trace:
            for _ in range(2):
                assert (mk.all_gather_matmul(a, b) == 32).all()
        assert {event.rank for event in trace.events} == {0, 1}
        assert [trace.calls(rank) for rank in range(2)] == [["all_gather_matmul"] * 2] * 2
        pairs = list(arrivals(trace))
        assert pairs and all(sent.start <= seen.end for sent, seen in pairs), "one clock"
        assert trace.clock_error == 0
        group.close()
        print("right on rank", group.rank)
    """
    assert_right(program, 2)


def test_ring_attention():
    program = """
        from support.attention_reference import Case, call
        from support.patience import WAIT
        import mkernel as mk

        group = mk.init(timeout=WAIT, gpus_per_node=2)
        assert (group.size, group.nodes) == (4, 2)
        config = mk.Config(tile_m=16, tile_n=16, steps=2)
        call(group, Case(16, heads=5, kv_heads=5, causal=True, layout="zigzag"), config=config)
        call(group, Case(17, heads=2, kv_heads=1, documents=(0, 5, 40, 68)), 1)
        group.close()
        print("right on rank", group.rank)
    """
    assert_right(program, 4)


@pytest.mark.thorough
def test_example_under_torchrun():
    example = Path(__file__).parents[2] / "examples" / "all_gather_matmul.py"
    output = forked_processes.torchrun(example, 4)
    assert output.count("of 2 x 2, cpu): (384, 48), largest error") == 4


@pytest.mark.thorough
def test_example_of_reductions():
    example = Path(__file__).parents[2] / "examples" / "06_processes_reduce.py"
    for output in outputs(example, 4):
        assert "of 2 x 2, cpu): (24, 48) and (96, 48), largest error" in output


REDUCTIONS = """
    import torch
    from support.patience import WAIT
    import mkernel as mk

    group = mk.init(timeout=WAIT, gpus_per_node={gpus_per_node})
    assert (group.size, group.nodes) == ({ranks}, {nodes})
    for i, (m, n, k) in enumerate([(36, 20, 17), (12, 40, 32), (36, 20, 17)]):
        torch.manual_seed(100 * i + group.rank)
        a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
        bias = torch.full((n,), 2.0).bfloat16()
        y, z = mk.matmul_reduce_scatter(a, b, bias=bias), mk.matmul_all_reduce(a, b, bias=bias)
        parts = group.exchange("parts", a.double() @ b.double())
        exact = sum(parts) + 2.0
        bound = (2 * sum(part.abs() for part in parts) + exact.abs()) * torch.finfo(a.dtype).eps / 2 * 1.01 + 1e-4
        rows = slice(group.rank * m // group.size, (group.rank + 1) * m // group.size)
        assert bool(((y.double() - exact[rows]).abs() <= bound[rows]).all())
        assert bool(((z.double() - exact).abs() <= bound).all())
        assert all(torch.equal(z, other) for other in group.exchange("z", z)), "bits differ"
    group.close()
    print("right on rank", group.rank)
"""


@pytest.mark.parametrize(("nodes", "gpus_per_node"), [pytest.param(1, 3, marks=pytest.mark.thorough), (2, 2)])
def test_reductions(nodes, gpus_per_node):
    assert_right(on_cluster(REDUCTIONS, nodes, gpus_per_node), nodes * gpus_per_node)


def test_silent_process_is_named_and_the_others_go_on():
    program = """
        import os, time
        import torch
        from support.patience import WAIT
        import mkernel as mk

        group = mk.init(timeout=WAIT)
        a = torch.ones(16, 16)
        assert (mk.all_gather_matmul(a, a) == 16).all()
        group.barrier()
        store = torch.distributed.distributed_c10d._get_default_store()
        if group.rank == 1:
            while store.add("went on", 0) < 2:
                time.sleep(0.05)
            os._exit(0)
        group.timeout = 3.0
        begun = time.monotonic()
        try:
            mk.all_gather_matmul(a, a)
            raise AssertionError("rank 1 has not called anything")
        except mk.CommTimeout as timeout:
            assert timeout.record.peer == 1, timeout
            assert timeout.record.seen < timeout.record.expected
            assert 3.0 <= timeout.record.seconds <= time.monotonic() - begun < WAIT, timeout.record
        group.timeout = WAIT
        left = group.subset([0, 2])
        assert (mk.all_gather_matmul(a, a, group=left) == 16).all()
        print("went on without rank 1:", group.rank, flush=True)
        store.add("went on", 1)
        os._exit(0)
    """
    for rank, output in enumerate(outputs(program, 3)):
        assert (f"went on without rank 1: {rank}" in output) == (rank != 1), output


def test_nodes_must_divide_the_ranks():
    program = """
        import os
        import mkernel as mk

        by_rank = None if os.environ["RANK"] == "1" else 3
        for given, words in [(2, "divides the 3 ranks"), ("3", "whole number"), (by_rank, "by rank: 3, None, 3")]:
            try:
                mk.init(gpus_per_node=given)
            except mk.ArgumentError as refusal:
                assert words in str(refusal), refusal
                print("refused")
    """
    assert [output.count("refused") for output in outputs(program, 3)] == [3, 3, 3]
