"""Latency and throughput of the network path between kernel and proxy: `python -m mkernel.bench.latency`.

Latency: one CTA posts a request to the ring, its rank's proxy carries it out over the loopback transport (not paced),
and the CTA waits for the signal before it posts the next one. Times are from the GPU's clock. With host memory, the
proxy copies by memcpy and sets the signal with a store: this is the cost of ring, proxy and signal alone. With GPU
memory, it launches a kernel that copies and sets the signal.

Throughput: many requests of one tile each between GPU memories, as posted by the operators that sum over nodes. Four
ranks send at once, each with its own proxy, and all proxies compete for the driver. Eight CTAs of every rank post
interleaved requests, so that adjacent ones arrive at about the same time, in any order. Measured without pacing, and
paced to a rate that it should reach.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl

from mkernel.lang import context as words
from mkernel.lang import requests
from mkernel.lang.device import clock
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import SEND
from mkernel.net import LoopbackTransport, Proxy
from mkernel.runtime import records
from mkernel.runtime.network import SPIN_SECONDS, near

ROUNDS = 2000
SIZES = (0, 8, 4096, 65536)
DATA = 64  # offset of the data, after the signal
CAPACITY = 64

RANKS = 4
POSTERS = tl.constexpr(8)  # CTAs per rank
TILE = 65536  # bytes per request
REQUESTS = 2048  # per rank
PACED = 12.5  # GB/s per rank


@triton.jit(do_not_specialize=["address", "size", "rounds"])
def _ping(context, address, size, rounds, nanoseconds):
    signal = address.to(tl.pointer_type(tl.int64))
    peer = tl.full((), 1, tl.int32)
    segment = tl.full((), 0, tl.int32)
    for i in range(rounds):
        value = tl.cast(i + 1, tl.int64)
        start = clock()
        post(context, Transfer(peer, segment, 64, segment, 64, size), 0, value, SEND)
        while tl.atomic_add(signal, 0, sem="acquire", scope="sys") < value:
            pass
        tl.store(nanoseconds + i, clock() - start)


@triton.jit(do_not_specialize=["count", "epoch"])
def _flood(contexts, memories, count, size, epoch, times, RANKS: tl.constexpr):
    """Every rank posts `count` requests to the rank two after it, and waits for those that are sent to it."""
    rank = tl.program_id(0) // POSTERS
    poster = tl.program_id(0) % POSTERS
    context = tl.load(contexts + rank).to(tl.pointer_type(tl.int64))
    signals = tl.load(memories + rank).to(tl.pointer_type(tl.int64))
    segment = tl.full((), 0, tl.int32)
    value = tl.cast(epoch, tl.int64)
    tl.store(times + tl.program_id(0) * 2, clock())
    for i in range(poster, count, POSTERS):
        source = count * 8 + tl.cast(i, tl.int64) * size
        target = source + tl.cast(count, tl.int64) * size
        post(
            context,
            Transfer((rank + 2) % RANKS, segment, source, segment, target, size),
            tl.cast(i, tl.int64) * 8,
            value,
            SEND,
        )
    for i in range(poster, count, POSTERS):
        while tl.atomic_add(signals + i, 0, sem="acquire", scope="sys") < value:
            pass
    tl.store(times + tl.program_id(0) * 2 + 1, clock())


class _Rank:
    """A ring, and the parts of a context that `post` needs."""

    def __init__(self, device: torch.device, rank: int, size: int, capacity: int):
        self.ring = torch.zeros(
            requests.HEADER_WORDS.value + capacity * requests.REQUEST_WORDS.value, dtype=torch.int64, device="cpu"
        ).pin_memory()
        self.ring[requests.CAPACITY.value] = capacity
        self._kept = [
            torch.zeros(8, dtype=torch.int64, device=device),  # the state
            torch.zeros(records.COUNT * records.WORDS, dtype=torch.int64, device="cpu").pin_memory(),
            torch.zeros(1, dtype=torch.int64, device=device),  # the abort flag
            torch.tensor([0, capacity, capacity], device=device),  # state shared by the ring's producers
        ]
        state, waits, flag, posting = (memory.data_ptr() for memory in self._kept)
        table = [0] * (words.TABLE.value + 2 * size)
        table[words.RANK.value] = rank
        table[words.SIZE_WORD.value] = size
        table[words.TIMEOUT.value] = 10**10
        table[words.STATE.value] = state
        table[words.RECORDS.value] = waits
        table[words.RING.value] = self.ring.data_ptr()
        table[words.POSTING.value] = posting
        table[words.ABORTED.value] = flag
        table[words.TABLE.value + size + rank] = flag
        self.context = torch.tensor(table, dtype=torch.int64, device=device)


def measure(on_host: bool, size: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Microseconds from request to signal, for transfers of `size` bytes between host or GPU memories."""
    device = torch.device("cuda", torch.cuda.current_device())
    rank = _Rank(device, 0, 2, CAPACITY)
    memories = [torch.zeros(DATA + max(SIZES), dtype=torch.uint8, device="cpu") for _ in range(2)]
    memories = [memory.pin_memory() if on_host else memory.to(device) for memory in memories]
    times = torch.zeros(rounds, dtype=torch.int64, device=device)
    with near(device), LoopbackTransport("latency", 0) as mine, LoopbackTransport("latency", 1) as other:
        mine.attach(0, memories[0])
        other.attach(0, memories[1])
        with Proxy(rank.ring, mine, spin=SPIN_SECONDS["cuda"]) as proxy:
            for count in (0, rounds):  # the first launch only loads the kernel
                _ping[(1,)](rank.context, memories[1].data_ptr(), size, count, times, num_warps=1)
                torch.cuda.synchronize()
            proxy.check()
    ordered = times.sort().values.tolist()
    return {
        "memory": "host" if on_host else "GPU",
        "bytes": size,
        "median_us": ordered[rounds // 2] / 1e3,
        "p99_us": ordered[rounds * 99 // 100] / 1e3,
    }


def throughput(rate: float | None, count: int = REQUESTS, rounds: int = 5) -> dict[str, Any]:
    """GB/s that each of four ranks sends and receives; `rate` paces the link of each, in GB/s."""
    device = torch.device("cuda", torch.cuda.current_device())
    ranks = [_Rank(device, rank, RANKS, 256) for rank in range(RANKS)]
    memories = [torch.zeros(count * 8 + 2 * count * TILE, dtype=torch.uint8, device=device) for _ in range(RANKS)]
    for rank, memory in enumerate(memories):
        memory[count * 8 : count * 8 + count * TILE].view(count, TILE)[:] = (
            torch.arange(count, device=device)[:, None] % 200 + rank + 1
        ).to(torch.uint8)
    contexts = torch.tensor([rank.context.data_ptr() for rank in ranks], dtype=torch.int64, device=device)
    addresses = torch.tensor([memory.data_ptr() for memory in memories], dtype=torch.int64, device=device)
    times = torch.zeros(RANKS * POSTERS.value, 2, dtype=torch.int64, device=device)
    spans = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(near(device))
        transports = [
            stack.enter_context(LoopbackTransport("throughput", rank, rate=rate * 1e9 if rate else None))
            for rank in range(RANKS)
        ]
        for transport, memory in zip(transports, memories):
            transport.attach(0, memory)
        proxies = [
            stack.enter_context(Proxy(rank.ring, transport, spin=SPIN_SECONDS["cuda"]))
            for rank, transport in zip(ranks, transports)
        ]
        for epoch in range(rounds + 1):
            # the first launch only loads the kernel: it posts no requests
            _flood[(RANKS * POSTERS.value,)](
                contexts, addresses, count if epoch else 0, TILE, epoch, times, RANKS, num_warps=1
            )
            torch.cuda.synchronize()
            if epoch:
                spans.append((times[:, 1].max() - times[:, 0].min()).item())
        for proxy in proxies:
            proxy.check()
    for rank, memory in enumerate(memories):
        received = memory[count * 8 + count * TILE :]
        sent = memories[(rank + 2) % RANKS][count * 8 : count * 8 + count * TILE]
        if not torch.equal(received, sent):
            raise AssertionError(f"rank {rank} did not receive what was sent to it")
    return {
        "ranks": RANKS,
        "bytes": TILE,
        "requests": count,
        "paced_gb_per_s": rate,
        "gb_per_s": count * TILE / sorted(spans)[rounds // 2],
    }


def main(path: str | None = None) -> None:
    """Print the table, and write the results as JSON to `path`, if given."""
    if not torch.cuda.is_available():
        sys.exit("the latency is measured from a kernel, which needs a GPU; this machine has none")
    results = []
    print(f"{'memory':>6} {'bytes':>7} {'median us':>10} {'p99 us':>8}   from request to signal")
    for on_host in (True, False):
        for size in SIZES:
            result = measure(on_host, size)
            results.append(result)
            print(f"{result['memory']:>6} {size:>7} {result['median_us']:>10.2f} {result['p99_us']:>8.2f}", flush=True)
    print(f"\n{'paced to':>9} {'GB/s':>7}   of each of {RANKS} ranks, {REQUESTS} requests of {TILE} bytes")
    for rate in (None, PACED):
        result = throughput(rate)
        results.append(result)
        print(f"{'-' if rate is None else f'{rate:g}':>9} {result['gb_per_s']:>7.2f}", flush=True)
    if path is not None:
        with open(path, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:2])
