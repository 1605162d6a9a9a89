"""Captured graphs on a GPU: any operator, any number of ranks, threads and processes."""

import textwrap
import time
from pathlib import Path

import pytest
import torch
from harness import check, limited, randn
from support import graph_calls
from support.forked_processes import run_python, run_ranks, torchrun

import mkernel as mk

pytestmark = pytest.mark.usefixtures("limited")
__all__ = ["limited"]
PROGRAM = Path(__file__).parents[1] / "support" / "graph_calls.py"


def spawn(on_rank, ranks, nodes=1, **options):
    return mk.spawn(on_rank, nodes=nodes, gpus_per_node=ranks, device="cuda", **{"timeout": 20.0, **options})


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", graph_calls.CASES)
def test_threads(name, ranks):
    spawn(lambda group: graph_calls.check_operator(group, name), ranks)


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_all_reduce", "moe_ffn"])
def test_several_nodes(name):
    """The replays post requests to the network."""
    spawn(lambda group: graph_calls.check_operator(group, name), ranks=2, nodes=2)


@pytest.mark.parametrize("name", graph_calls.CASES)
def test_processes(name):
    output = torchrun(PROGRAM, 2, seconds=200, arguments=[name])
    assert output.count(f"graphs of {name} are right on rank") == 2, output


EXAMPLE = Path(__file__).parents[2] / "examples" / "08_cuda_graphs.py"
SAYS = "8 replays of 2 graphs computed what eager calls compute"


def test_example():
    assert run_python([str(EXAMPLE)], seconds=120).count(SAYS) == 2
    assert torchrun(EXAMPLE, 2, seconds=120).count(SAYS) == 2


def test_streams_that_fork_in_a_graph():
    """Calls on two streams of a graph run one after the other, as eager ones do."""

    def on_rank(group):
        a, b = randn(group, 256, 256), randn(group, 256, 512, seed=1)
        main, side, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        check(group, mk.all_gather_matmul(a, b), a, b)
        results = []
        with group.capture(graph, stream=main):
            side.wait_stream(main)
            for stream in (main, side, main, side):
                with torch.cuda.stream(stream):
                    results.append(mk.all_gather_matmul(a, b))
            main.wait_stream(side)
        for seed in range(3):
            a.copy_(randn(group, 256, 256, seed=seed))
            group.synchronize()
            group.barrier()
            graph.replay()
            group.synchronize()
            for y in results:
                check(group, y, a, b)

    spawn(on_rank, ranks=2)


def test_torch_s_own_way_to_capture():
    """With its warm-up on one stream and the capture on another, and CUDA's strictest mode."""

    def on_rank(group):
        a, b = randn(group, 256, 256), randn(group, 256, 512, seed=1)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                mk.all_gather_matmul(a, b)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            y = mk.all_gather_matmul(a, b)
        for seed in range(3):
            a.copy_(randn(group, 256, 256, seed=seed))
            graph.replay()
            check(group, y, a, b)

    spawn(on_rank, ranks=1)


def test_graphed_callables():
    def on_rank(group):
        layer = mk.nn.ColumnParallelLinear(256, 512, bias=False, group=group, device=group.device, dtype=torch.bfloat16)
        x = randn(group, 128, 256).requires_grad_()
        y = layer(x)
        y.backward(torch.ones_like(y))
        expected = y.detach().clone(), x.grad.clone(), layer.weight.grad.clone()
        x.grad = layer.weight.grad = None
        graphed = torch.cuda.make_graphed_callables(layer, (x.detach().clone().requires_grad_(),))
        y = graphed(x)
        y.backward(torch.ones_like(y))
        group.synchronize()
        for one, other in zip((y, x.grad, layer.weight.grad), expected):
            assert torch.equal(one, other)

    spawn(on_rank, ranks=1)


def test_a_rank_that_does_not_capture():
    """It would wait for a kernel that is only captured."""

    def on_rank(group):
        a, b = randn(group, 256, 256), randn(group, 256, 512, seed=1)
        check(group, mk.all_gather_matmul(a, b), a, b)
        graph = torch.cuda.CUDAGraph()

        def capture():
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                mk.all_gather_matmul(a, b)

        def call():
            time.sleep(0.5)  # the other one captures already
            mk.all_gather_matmul(a, b)

        with pytest.raises(mk.ArgumentError, match="same calls in the same order"):
            (call if group.rank else capture)()
        check(group, mk.all_gather_matmul(a, b), a, b)

    spawn(on_rank, ranks=2)


def test_a_rank_that_does_not_replay():
    def on_rank(group):
        a, b = randn(group, 256, 256), randn(group, 256, 512, seed=1)
        check(group, mk.all_gather_matmul(a, b), a, b)
        graph = torch.cuda.CUDAGraph()
        with group.capture(graph):
            mk.all_gather_matmul(a, b)
        if group.rank == 1:
            group.barrier()
            return
        graph.replay()
        with pytest.raises(mk.CommTimeout, match=r"rank 0.*waited .* s for rank 1"):
            group.synchronize()
        with pytest.raises(mk.CommTimeout, match="rank 1"):
            mk.all_gather_matmul(a, b)
        graph.replay()  # ends at once
        begun = time.monotonic()
        torch.cuda.current_stream().synchronize()
        assert time.monotonic() - begun < 1.0
        with pytest.raises(mk.CommTimeout):
            group.barrier()

    with pytest.raises(mk.CommTimeout):  # rank 1 waits in the barrier
        spawn(on_rank, ranks=2, timeout=2.0)


REDUCE_OVERHEAD = """
    import torch
    import mkernel as mk

    group = mk.init(timeout=60.0)

    def layer(x, up, down):
        h = mk.all_gather_matmul(x, up)
        h = torch.nn.functional.gelu(h)
        y = mk.matmul_reduce_scatter(h, down)
        return mk.matmul_all_reduce(y, up) + 1, y

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    generator = torch.Generator().manual_seed(group.rank)
    def randn(*shape):
        return (torch.randn(*shape, generator=generator) / 8).bfloat16().to(group.device)
    up, down = randn(256, 512), randn(512, 256)
    for turn in range(6):
        x = randn(128, 256)
        with torch.no_grad():
            torch.compiler.cudagraph_mark_step_begin()
            found = [result.clone() for result in compiled(x, up, down)]
            group.synchronize()
            expected = layer(x, up, down)
            group.synchronize()
        for one, other in zip(found, expected):
            difference = (one.float() - other.float()).abs().max().item()
            assert difference <= 0.02 * other.float().abs().max().item(), (turn, difference)
    from torch._inductor import cudagraph_trees
    nodes = sum(len(roots) for roots in cudagraph_trees.get_manager(group.device.index, False).roots.values())
    assert nodes, "nothing was captured"
    print("compiled and captured on rank", group.rank, flush=True)
    group.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_reduce_overhead(ranks, tmp_path):
    if ranks == 1:
        script = tmp_path / "program.py"
        script.write_text(textwrap.dedent(REDUCE_OVERHEAD))
        assert "compiled and captured on rank 0" in torchrun(script, 1, seconds=200)
        return
    for rank, (output, code) in enumerate(run_ranks(REDUCE_OVERHEAD, ranks, seconds=200)):
        assert code == 0, output
        assert f"compiled and captured on rank {rank}" in output
