"""The host time of an eager call: from call to return, over many calls in a row.

The shape is so small that the GPU finishes each call before the host issues the next one.

    python -m mkernel.bench.host_time --ranks 4                              # threads (mk.spawn)
    torchrun --nproc-per-node 2 -m mkernel.bench.host_time                   # processes
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import torch

import mkernel as mk
from mkernel import operators
from mkernel.environment import one_of_several_processes

M, N, K = 128, 512, 1024
CALLS = 300
WARM_UP = 10


def measure(group: mk.Group) -> dict[str, float]:
    """Microseconds per call, by operator."""
    a = torch.ones(M, K, device=group.device, dtype=torch.bfloat16)
    b = torch.ones(K, N, device=group.device, dtype=torch.bfloat16)
    ways: dict[str, Callable[[], object]] = {}
    for operator in operators.registered("bench").values():
        call = operator.load("bench").host_call
        if call is not None:
            ways[operator.name] = functools.partial(call, group, a, b)
    ways["torch.mm"] = lambda: torch.mm(a, b)
    found = {}
    for name, call in ways.items():
        for _ in range(WARM_UP):
            call()
        group.synchronize()
        group.barrier()
        begun = time.perf_counter()
        for _ in range(CALLS):
            call()
        found[name] = (time.perf_counter() - begun) / CALLS * 1e6
        group.synchronize()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="number of threads, if not started by torchrun")
    ranks = parser.parse_args().ranks
    if one_of_several_processes():
        group = mk.init(timeout=60.0)
        found, how = measure(group), f"{group.size} processes"
        rank = group.rank
        group.close()
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    else:
        found, how, rank = mk.spawn(measure, gpus_per_node=ranks)[0], f"{ranks} threads", 0
    if rank == 0:
        print(f"{how}, {M} x {N} x {K}, bf16: " + ", ".join(f"{name} {value:.0f} us" for name, value in found.items()))


if __name__ == "__main__":
    main()
