"""The way over NCCL: its collectives before and after the library's GEMM or attention, a process for each GPU.

Tokens of the mixture of experts go once to each of their experts, as rows of an all-to-all; all counts are known
beforehand, as they are to the host-driven way.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from mkernel.bench import moe, ring_attention
from mkernel.bench.peers import Peer
from mkernel.bench.problems import Attention, Experts, Problem, Products, Ways
from mkernel.operators import Shape

TITLE = "NCCL"
BACKEND = "nccl"

# what they are called in newer PyTorch, where the old names warn
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def refusal(op: str, shape: Shape, dtype: torch.dtype) -> str | None:
    """Why it can not be measured; None if it can."""
    return None if dist.is_nccl_available() else "this PyTorch was built without NCCL"


def prepare(problem: Problem, peer: Peer) -> Ways:
    """What NCCL does, on every rank."""
    group = dist.new_group(backend=BACKEND)
    if isinstance(problem, Products):
        calls = _products(problem, group)
    elif isinstance(problem, Attention):
        calls = {"all_gather, then attention": _attention(problem, group)}
    else:
        calls = {"all_to_all, then grouped GEMM": _experts(problem, group)}
    one = torch.ones(1, device=problem.device)
    return Ways(lambda: dist.all_reduce(one, group=group), calls)


def _products(problem: Products, group: dist.ProcessGroup) -> dict[str, Callable[[], torch.Tensor]]:
    a, b, size = problem.a, problem.w.t(), problem.size

    def like(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, device=problem.device, dtype=problem.dtype)

    out = like(problem.m // size if problem.op == "matmul_reduce_scatter" else problem.m, problem.n)
    if problem.op == "all_gather_matmul":
        gathered = like(problem.m, problem.k)

        def gather_first() -> torch.Tensor:
            _all_gather(gathered, a, group=group)
            return torch.mm(gathered, b, out=out)

        return {"all_gather, then GEMM": gather_first}

    if problem.op == "matmul_reduce_scatter":
        product = like(problem.m, problem.n)

        def scatter_last() -> torch.Tensor:
            torch.mm(a, b, out=product)
            _reduce_scatter(out, product, group=group)
            return out

        return {"GEMM, then reduce_scatter": scatter_last}

    def reduce_last() -> torch.Tensor:
        torch.mm(a, b, out=out)
        dist.all_reduce(out, group=group)
        return out

    return {"GEMM, then all_reduce": reduce_last}


def _attention(problem: Attention, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Gathers keys and values, which are laid out by position, so that what is gathered is in place. With a causal
    mask, a rank's rows are one or two pieces of the sequence, each of which sees the keys up to its own end."""
    query, length = problem.query, problem.query.shape[2]
    parts = [tensor.permute(2, 0, 1, 3).contiguous() for tensor in (problem.key, problem.value)]
    whole = [part.new_empty(problem.size * length, *part.shape[1:]) for part in parts]
    sequences, order = problem.sequences, problem.order()
    cuts = [0, length // 2, length] if sequences.zigzag else [0, length]
    positions = sequences.positions(problem.rank).tolist()

    def call() -> torch.Tensor:
        for part, gathered in zip(parts, whole):
            _all_gather(gathered, part, group=group)
        if not sequences.causal:  # in any order
            key, value = (gathered.permute(1, 2, 0, 3) for gathered in whole)
            return ring_attention.cudnn(query, key, value, False)
        key, value = ((gathered[order] if sequences.zigzag else gathered).permute(1, 2, 0, 3) for gathered in whole)
        pieces = []
        for first, last in pairwise(cuts):
            end = positions[last - 1] + 1
            mask = causal_lower_right(last - first, end)
            pieces.append(
                F.scaled_dot_product_attention(query[:, :, first:last], key[:, :, :end], value[:, :, :end], mask)
            )
        return torch.cat(pieces, 2)

    return call


def _experts(problem: Experts, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    size, rank = problem.size, problem.rank
    leaving = problem.counts[rank].view(size, moe.EXPERTS).sum(1).tolist()
    arriving = problem.arriving(rank)
    received = arriving.sum(1).tolist()
    # rows arrive by source, then expert; they are computed by expert, then source
    numbers = torch.arange(sum(received), device=arriving.device).split(arriving.flatten().tolist())
    by_expert = torch.cat([numbers[s * moe.EXPERTS + e] for e in range(moe.EXPERTS) for s in range(size)])
    by_source = torch.argsort(by_expert)
    rows = problem.mine.x.new_empty(sum(received), problem.hidden)
    returned = problem.mine.x.new_empty(len(problem.token), problem.hidden)
    compute = moe.library_of(problem.matrices, rows, arriving.sum(0))

    def call() -> torch.Tensor:
        dist.all_to_all_single(rows, problem.mine.x[problem.token], received, leaving, group=group)
        done = compute(rows[by_expert])
        if problem.op == "moe_dispatch_matmul":
            return done
        dist.all_to_all_single(returned, done[by_source], leaving, received, group=group)
        return problem.combined(returned)

    return call
