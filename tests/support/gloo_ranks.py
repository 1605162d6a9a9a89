"""What the tests of the baselines run in processes: the real code on CPUs, over gloo, where GPUs and their libraries
would be. The symmetric-memory operators are called through PyTorch's dispatcher, so their names and arguments are
those of the PyTorch that is installed; what is behind them is made here."""

import itertools
import os
import signal
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import _symmetric_memory as symmetric_memory

from mkernel import operators
from mkernel.bench import baselines, nccl, shared_gpu
from mkernel.bench.peers import Peer
from mkernel.bench.timing import Stopwatch
from mkernel.ops.attention import bench as attention_bench
from mkernel.ops.moe import bench as moe_bench
from support.patience import HANG

SPOILED = 14  # rows of a product for which one all-reduce is wrong, and another fails


class WallClock(Stopwatch):
    """Times calls, by the slowest rank, without a GPU."""

    def __init__(self, peer, barrier):
        self._peer, self.barrier = peer, barrier

    def time(self, call, repeats):
        times = []
        for _ in range(repeats):
            self.barrier()
            begun = time.perf_counter()
            call()
            times.append((time.perf_counter() - begun) * 1e3)
        return [max(each) for each in zip(*self._peer.exchange(times))]


def one_shot_all_reduce(product, reduce_op, group_name):
    total = product.clone()
    dist.all_reduce(total)
    return total + 1 if len(product) == SPOILED else total


def two_shot_all_reduce_(product, reduce_op, group_name):
    dist.all_reduce(product)
    return product


def multimem_all_reduce_(product, reduce_op, group_name):
    if len(product) == SPOILED:
        raise RuntimeError("multicast is out of order\nand more")
    return two_shot_all_reduce_(product, reduce_op, group_name)


def gathered(*tensors):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, [tensor.clone() for tensor in tensors])
    return values


def all_to_all_vdev_2d(rows, out, in_splits, out_splits_offsets, group_name, major_align=None):
    """By expert, then by source; an expert without rows keeps the room of one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = gathered(rows, in_splits)
    experts, at = len(in_splits) // size, 0
    for expert in range(experts):
        first = at
        for source, (theirs, splits) in enumerate(everyone):
            split = splits.tolist()
            index = rank * experts + expert
            begin = sum(split[:index])
            out[at : at + split[index]] = theirs[begin : begin + split[index]]
            out_splits_offsets[:, expert * size + source] = torch.tensor([split[index], at])
            at += split[index]
        at = max(at, first + 1)


def all_to_all_vdev_2d_offset(rows, out, in_splits_offsets, out_splits_offsets, group_name):
    """Back: by rank, then by expert."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = gathered(rows, in_splits_offsets)
    experts, at = in_splits_offsets.shape[1] // size, 0
    for (source, (theirs, table)), expert in itertools.product(enumerate(everyone), range(experts)):
        count, begin = table[:, expert * size + rank].tolist()
        out[at : at + count] = theirs[begin : begin + count]
        out_splits_offsets[:, source * experts + expert] = torch.tensor([count, at])
        at += count


FAKES = {
    "fused_all_gather_matmul": symmetric_memory._fused_all_gather_matmul_fallback,
    "fused_matmul_reduce_scatter": symmetric_memory._fused_matmul_reduce_scatter_fallback,
    "nvshmem_all_to_all": lambda value, out, group_name: dist.barrier() or out,
    **{
        function.__name__: function
        for function in (
            one_shot_all_reduce, two_shot_all_reduce_, multimem_all_reduce_, all_to_all_vdev_2d,
            all_to_all_vdev_2d_offset,
        )
    },
}  # fmt: skip


def without_gpus():
    """Put CPUs, gloo and the fakes where a process of a rank takes GPUs. What is returned must be kept."""
    torch.set_num_threads(1)
    library = torch.library.Library("symm_mem", "IMPL")
    for name, function in FAKES.items():
        library.impl(name, function, "CPU")
    symmetric_memory.empty = torch.empty
    symmetric_memory.set_backend = lambda name: None
    symmetric_memory.rendezvous = lambda memory, group: SimpleNamespace(
        barrier=dist.barrier, multicast_ptr=int(memory.dtype == torch.float32)
    )
    nccl.BACKEND = "gloo"
    moe_bench.faster_layout = lambda rows, w, ends, counts: w
    attention_bench.cudnn = lambda query, key, value, causal: F.scaled_dot_product_attention(query, key, value)
    baselines.device_of = lambda rank: torch.device("cpu")
    baselines.PeerStopwatch = WallClock
    return library


@dataclass(frozen=True)
class Collecting(Peer):
    """Keeps what is reported, for one report in the end."""

    reports: list = field(default_factory=list)

    def report(self, value):
        self.reports.append(value)


def measure_all(peer, cases):
    """Several measurements in one start of processes."""
    kept = without_gpus()
    collecting = Collecting(peer.rank, peer.size, peer.store)
    for name, op, *case in cases:
        baselines.measure_on_rank(collecting, name, operators.find(op).load("bench").problem, *case)
    del kept
    peer.report(collecting.reports)


def fail(peer, folder):
    """Rank 1 fails, the other one waits for it for ever."""
    write_pid(peer, folder)
    if peer.rank == 1:
        raise ValueError("no such memory\nat all")
    time.sleep(10 * HANG)


def be_killed(peer, folder):
    write_pid(peer, folder)
    peer.say("out of memory")
    os.kill(os.getpid(), signal.SIGKILL)


def hang(peer, folder):
    """Does not even listen to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write_pid(peer, folder)
    peer.say("hanging")
    peer.exchange(None)
    (folder / f"hangs {peer.rank}").touch()
    time.sleep(10 * HANG)


def write_pid(peer, folder):
    (folder / f"rank {peer.rank}").write_text(str(os.getpid()))


def measure_shared(peer, cases, dtype, rounds, printing):
    """What processes that share a GPU would measure, without one."""
    kept = without_gpus()
    shared_gpu.measure_on_rank(peer, cases, dtype, rounds, printing)
    del kept
