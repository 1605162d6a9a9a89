"""How long a kernel waits for the network's software: `python -m mkernel.bench.latency`.

One CTA posts a request through the ring, the proxy of its rank carries it out over the loopback transport
(no pacing), and the CTA waits for the signal; then the next one. Times are the GPU's own. With host
memory the proxy copies by memcpy and sets the signal with a store: that is what ring, proxy and signal
cost by themselves. With GPU memory it queues a copy and a write on a stream.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl

from mkernel.lang import context as words
from mkernel.lang import requests
from mkernel.lang.context import RING
from mkernel.lang.device import clock
from mkernel.lang.requests import post
from mkernel.lang.roles import SEND
from mkernel.net import LoopbackTransport, Proxy
from mkernel.runtime import records
from mkernel.runtime.network import SPIN_SECONDS, near

ROUNDS = 2000
SIZES = (0, 8, 4096, 65536)
DATA = 64  # where the bytes begin, behind the signal
CAPACITY = 64


@triton.jit(do_not_specialize=["address", "size", "rounds"])
def _ping(context, address, size, rounds, nanoseconds):
    signal = address.to(tl.pointer_type(tl.int64))
    peer = tl.full((), 1, tl.int32)
    segment = tl.full((), 0, tl.int32)
    for i in range(rounds):
        value = tl.cast(i + 1, tl.int64)
        start = clock()
        post(context, peer, segment, 64, segment, 64, size, 0, value, SEND)
        while tl.atomic_add(signal, 0, sem="acquire", scope="sys") < value:
            pass
        tl.store(nanoseconds + i, clock() - start)


def measure(on_host: bool, size: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Nanoseconds from request to signal, for transfers of `size` bytes between host or GPU memories."""
    device = torch.device("cuda", torch.cuda.current_device())
    ring = torch.zeros(
        requests.HEADER_WORDS.value + CAPACITY * requests.REQUEST_WORDS.value, dtype=torch.int64
    ).pin_memory()
    ring[requests.CAPACITY.value] = CAPACITY
    memories = [torch.zeros(DATA + max(SIZES), dtype=torch.uint8) for _ in range(2)]
    memories = [memory.pin_memory() if on_host else memory.to(device) for memory in memories]
    state = torch.zeros(8, dtype=torch.int64, device=device)
    waits = torch.zeros(records.MAX_CTAS * records.WORDS, dtype=torch.int64).pin_memory()
    table = [0] * (words.TABLE.value + 4)
    table[words.SIZE.value] = 2
    table[words.TIMEOUT.value] = 10**10
    table[words.STATE.value] = state.data_ptr()
    table[words.RECORDS.value] = waits.data_ptr()
    table[RING.value] = ring.data_ptr()
    flag = torch.zeros(1, dtype=torch.int64, device=device)
    table[words.TABLE.value + 2] = flag.data_ptr()
    context = torch.tensor(table, dtype=torch.int64, device=device)
    times = torch.zeros(rounds, dtype=torch.int64, device=device)
    with near(device), LoopbackTransport("latency", 0) as mine, LoopbackTransport("latency", 1) as other:
        mine.attach(0, memories[0])
        other.attach(0, memories[1])
        with Proxy(ring, mine, spin=SPIN_SECONDS["cuda"]) as proxy:
            for count in (0, rounds):  # the first only loads the kernel
                _ping[(1,)](context, memories[1].data_ptr(), size, count, times, num_warps=1)
                torch.cuda.synchronize()
            proxy.check()
    ordered = times.sort().values.tolist()
    return {
        "memory": "host" if on_host else "GPU",
        "bytes": size,
        "median_us": ordered[rounds // 2] / 1e3,
        "p99_us": ordered[rounds * 99 // 100] / 1e3,
    }


def main(path: str | None = None) -> None:
    """Print the table, and write it to a file if one is named."""
    if not torch.cuda.is_available():
        sys.exit("the latency is measured from a kernel, which needs a GPU; there is none here")
    results = []
    print(f"{'memory':>6} {'bytes':>7} {'median us':>10} {'p99 us':>8}   from request to signal")
    for on_host in (True, False):
        for size in SIZES:
            result = measure(on_host, size)
            results.append(result)
            print(f"{result['memory']:>6} {size:>7} {result['median_us']:>10.2f} {result['p99_us']:>8.2f}", flush=True)
    if path is not None:
        with open(path, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:2])
