"""Several processes on one GPU, started by torchrun: symmetric memory inside of a node, TCP between nodes.

Without MPS their kernels take turns on the GPU, a few milliseconds each: shapes are small, timeouts long.
"""

import signal
import textwrap
from pathlib import Path

import pytest
from support.forked_processes import run_ranks, torchrun

CALLS = """
    import torch
    import mkernel as mk

    group = mk.init(timeout=60.0, gpus_per_node={gpus_per_node})
    assert group.device.type == "cuda"
    assert (group.size, group.nodes) == ({ranks}, {nodes})
    for i, (m, n, k) in enumerate([(256, 512, 256), (33, 20, 17), (256, 512, 256), (600, 300, 128)]):
        generator = torch.Generator(group.device).manual_seed(100 * i + group.rank)
        a = torch.randn(m, k, device=group.device, generator=generator).bfloat16()
        b = torch.randn(k, n, device=group.device, generator=generator).bfloat16()
        before = group.world.network.statistics(group)
        y, gathered = mk.all_gather_matmul(a, b, return_gathered=True)
        group.quiet()
        if group.nodes > 1 and k % 8 == 0:  # other rows are padded
            sent = group.world.network.statistics(group).bytes - before.bytes
            assert sent == (group.nodes - 1) * m * k * 2, sent
        group.synchronize()
        everyone = torch.cat(group.exchange("a", a.cpu())).to(group.device)
        assert torch.equal(gathered, everyone), (group.rank, i)
        error = (y.double() - everyone.double() @ b.double()).abs().max().item()
        assert error <= 4 * k**0.5 * torch.finfo(a.dtype).eps, error
    x = mk.empty(64, 64).fill_(1)
    half = group.split(group.rank % 2)
    for _ in range(3):
        y = mk.all_gather_matmul(x, x, group=half)
        half.synchronize()
        assert (y == 64).all()
    half.close()
    group.close()
    print("right on rank", group.rank, flush=True)
    torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(("nodes", "gpus_per_node"), [(1, 4), (2, 2), (3, 1)])
def test_calls(tmp_path, nodes, gpus_per_node):
    ranks = nodes * gpus_per_node
    given = gpus_per_node if nodes > 1 else None
    script = tmp_path / "program.py"
    program = CALLS.format(ranks=ranks, nodes=nodes, gpus_per_node=given)
    script.write_text(textwrap.dedent(program))
    output = torchrun(script, ranks, seconds=170)
    assert output.count("right on rank") == ranks, output


@pytest.mark.parametrize(
    "operator",
    ["matmul_reduce_scatter", "matmul_all_reduce", "ring_attention", "moe_dispatch_matmul", "moe_ffn"],
)
@pytest.mark.parametrize(("nodes", "gpus_per_node"), [(1, 4), (2, 2)])
def test_operators(operator, nodes, gpus_per_node):
    """Most of the time every process compiles; moe_dispatch_matmul comes with moe_combine."""
    script = Path(__file__).parents[1] / "support" / "every_operator.py"
    output = torchrun(script, 4, seconds=300, arguments=[operator, f"--gpus-per-node={gpus_per_node}"])
    for rank in range(4):
        assert f"{operator} is right on rank {rank} of {nodes} x {gpus_per_node}, cuda" in output, output


def test_example():
    example = Path(__file__).parents[2] / "examples" / "all_gather_matmul.py"
    output = torchrun(example, 4, seconds=120)
    assert output.count("of 2 x 2, cuda:0): (384, 48), largest error") == 4, output


FAULTS = """
    import os, signal, sys, time
    import torch
    import mkernel as mk

    group = mk.init(timeout={timeout}, gpus_per_node={gpus_per_node})
    a = torch.ones(64, 64, device=group.device, dtype=torch.bfloat16)
    for _ in range(2):
        y = mk.all_gather_matmul(a, a)
        group.synchronize()
        assert (y == 64).all()
    group.barrier()
    if group.rank == {victim}:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        for _ in range(3):
            mk.all_gather_matmul(a, a)
            group.synchronize()
        sys.exit("nobody noticed")
    except (mk.CommTimeout, mk.TransportError) as failure:
        took = time.monotonic() - begun
        assert took < {timeout} + 5, took
        print("noticed:", type(failure).__name__, f"{{took:.1f}} s:", failure, flush=True)
    # some hear of it at once, some only when their own time is over: nobody shall wait for them in vain
    time.sleep(max({timeout} + 1 - took, 0))
    left = group.subset([rank for rank in range(group.size) if rank != {victim}])
    y = mk.all_gather_matmul(a, a, group=left)
    left.synchronize()
    assert (y == 64).all()
    print("went on: rank", group.rank, flush=True)
    left.barrier()
    if group.rank == 0:
        time.sleep(3.0)  # the store is in this process: the others may still be reading
    os._exit(0)
"""


@pytest.mark.parametrize(("ranks", "gpus_per_node", "victim"), [(3, 3, 1), (4, 2, 3)])
def test_killed_process(ranks, gpus_per_node, victim):
    program = FAULTS.format(timeout=12.0, gpus_per_node=gpus_per_node, victim=victim)
    results = run_ranks(program, ranks, seconds=150)
    for rank, (output, code) in enumerate(results):
        if rank == victim:
            assert code == -signal.SIGKILL, output
        else:
            assert code == 0, output
            assert "noticed:" in output, output
            assert f"went on: rank {rank}" in output, output
