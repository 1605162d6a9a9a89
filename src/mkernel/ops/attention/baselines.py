"""Baseline of ring_attention: NCCL. PyTorch's symmetric memory has no operator for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from mkernel.bench import nccl
from mkernel.bench.problems import Calls, Problem
from mkernel.operators import Shape
from mkernel.ops.attention import bench
from mkernel.ops.attention.sequences import Pattern, Sequences


class Attention(Problem):
    def __init__(
        self, rank: int, size: int, shape: Shape, dtype: torch.dtype, device: torch.device, options: Sequence[str]
    ):
        super().__init__(rank, size, shape, dtype, device, options)
        everyone = [bench.heads_of(source, size, shape, dtype, device) for source in range(size)]
        self.query, self.key, self.value = everyone[rank]
        self.sequences = Sequences(
            size, self.query.shape[2], Pattern("causal" in options, "zigzag" if "zigzag" in options else "contiguous")
        )
        order = self.order()
        self._whole = [torch.cat([parts[i] for parts in everyone], 2)[:, :, order] for i in range(3)]

    def order(self) -> torch.Tensor:
        """For each position of the sequence, the index of its row in the concatenation of all ranks' rows."""
        positions = [torch.from_numpy(self.sequences.positions(rank)) for rank in range(self.size)]
        return torch.argsort(torch.cat(positions)).to(self.device)

    def error(self, result: torch.Tensor) -> float:
        """The largest error of some rows, as a multiple of the error bound."""
        return bench.error_of(self.sequences, self.rank, self.query, result, self._whole)

    @classmethod
    def symm_mem_refusal(cls, shape: Shape, dtype: torch.dtype) -> str | None:
        return "PyTorch has no symmetric-memory operator for attention"

    def nccl(self, group: dist.ProcessGroup) -> Calls:
        """All-gather of keys and values, then attention. Positions are the outermost dimension of the gathered tensors,
        so the all-gather needs no reordering copy. With a causal mask, a rank's rows are one or two pieces of the
        sequence, and each piece sees the keys up to its own end."""
        query, length = self.query, self.query.shape[2]
        parts = [tensor.permute(2, 0, 1, 3).contiguous() for tensor in (self.key, self.value)]
        whole = [part.new_empty(self.size * length, *part.shape[1:]) for part in parts]
        sequences, order = self.sequences, self.order()
        cuts = [0, length // 2, length] if sequences.zigzag else [0, length]
        positions = sequences.positions(self.rank).tolist()

        def call() -> torch.Tensor:
            for part, gathered in zip(parts, whole):
                nccl.all_gather(gathered, part, group=group)
            if not sequences.causal:  # the order of keys does not matter
                key, value = (gathered.permute(1, 2, 0, 3) for gathered in whole)
                return bench.cudnn(query, key, value, False)
            key, value = ((gathered[order] if sequences.zigzag else gathered).permute(1, 2, 0, 3) for gathered in whole)
            pieces = []
            for first, last in pairwise(cuts):
                end = positions[last - 1] + 1
                mask = causal_lower_right(last - first, end)
                pieces.append(
                    F.scaled_dot_product_attention(query[:, :, first:last], key[:, :, :end], value[:, :, :end], mask)
                )
            return torch.cat(pieces, 2)

        return {"all_gather, then attention": call}
