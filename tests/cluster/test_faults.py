"""Processes that die: the others hear of it in time, say who it was, and go on."""

import signal

from processes import run_ranks

PROGRAM = """
    import os, signal, sys, time
    import torch
    import mkernel as mk
    from mkernel.runtime import processes

    host = int(os.environ["RANK"]) // {gpus_per_node}  # as if the nodes were machines
    processes.host_name = lambda: f"host {{host}}"
    group = mk.init(timeout={timeout}, gpus_per_node={gpus_per_node})
    a = torch.ones(16, 16)
    for _ in range(2):
        assert (mk.all_gather_matmul(a, a) == 16).all()
    group.barrier()
    if group.rank == {victim}:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        for _ in range(3):
            mk.all_gather_matmul(a, a)
        sys.exit("nobody noticed")
    except (mk.CommTimeout, mk.TransportError) as failure:
        took = time.monotonic() - begun
        assert took < {timeout} + 3, took
        print("noticed:", type(failure).__name__, failure, flush=True)
    # some hear of it at once, some only when their own time is over: nobody shall wait for them in vain
    time.sleep(max({timeout} + 1 - took, 0))
    left = group.subset([rank for rank in range(group.size) if rank != {victim}])
    assert (mk.all_gather_matmul(a, a, group=left) == 16).all()
    print("went on: rank", group.rank, flush=True)
    left.barrier()
    if group.rank == 0:
        time.sleep(3.0)  # the store is in this process: the others may still be reading
    os._exit(0)
"""


def check(results, victim):
    for rank, (output, code) in enumerate(results):
        if rank == victim:
            assert code == -signal.SIGKILL
        else:
            assert code == 0, output
            assert "noticed:" in output, output
            assert f"went on: rank {rank}" in output, output


def test_killed_process_in_one_node():
    results = run_ranks(PROGRAM.format(timeout=4.0, gpus_per_node=3, victim=1), 3)
    check(results, victim=1)
    assert all("rank 1" in output for rank, (output, _) in enumerate(results) if rank != 1)


def test_killed_process_in_another_node():
    results = run_ranks(PROGRAM.format(timeout=10.0, gpus_per_node=2, victim=3), 4)
    check(results, victim=3)
    counterpart = results[1][0]
    assert "TransportError" in counterpart, counterpart
    assert "rank 3" in counterpart, counterpart


PATIENT = """
    import time
    import torch
    import mkernel as mk

    group = mk.init(timeout=3.0)
    a = torch.ones(16, 16)
    mk.all_gather_matmul(a, a)
    time.sleep(4.0)  # of the host, which no wait of a kernel may be charged with
    if group.rank == 1:
        time.sleep(1.0)
    assert (mk.all_gather_matmul(a, a) == 16).all()
    print("patient: rank", group.rank, flush=True)
    group.barrier()
    group.close()
    torch.distributed.destroy_process_group()
"""


def test_a_wait_is_as_long_as_it_lasts():
    for rank, (output, code) in enumerate(run_ranks(PATIENT, 2)):
        assert code == 0, output
        assert f"patient: rank {rank}" in output, output
