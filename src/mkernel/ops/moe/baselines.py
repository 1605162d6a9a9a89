"""moe_dispatch_matmul and moe_ffn with NCCL and with PyTorch's symmetric memory.

A token is sent once to each of its experts, as a row of an all-to-all. All counts are known beforehand, as in the
host-driven baseline.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from mkernel.bench import symm_mem
from mkernel.bench.problems import Calls, Problem, Ways, larger
from mkernel.operators import Shape
from mkernel.ops.moe import bench
from mkernel.ops.moe.bench import EXPERTS, SLOTS


class Experts(Problem):
    """Rows are sent in the order of their experts; `token[i]` is the token of row i, and `counts[source][expert]` is
    how many rows there are. They are computed in the order of expert, then source."""

    combines: bool  # whether rows return to their tokens

    def __init__(
        self, rank: int, size: int, shape: Shape, dtype: torch.dtype, device: torch.device, options: Sequence[str]
    ):
        super().__init__(rank, size, shape, dtype, device, options)
        tokens, self._n, self.hidden = shape
        self._everyone = [
            bench.tokens_of(source, size, tokens // size, self.hidden, dtype, device) for source in range(size)
        ]
        self.mine = self._everyone[rank]
        self.matrices = self._matrices(rank)
        chosen = self.mine.ids.flatten()
        order = torch.argsort(chosen, stable=True)
        self.token = order // SLOTS
        self.back = torch.argsort(order)  # for each token and slot, its index among the sent rows
        self.counts = torch.stack(
            [torch.bincount(each.ids.flatten(), minlength=size * EXPERTS) for each in self._everyone]
        )

    def _matrices(self, rank: int) -> list[torch.Tensor]:
        # drawn from the generator of the rank's tokens, after the tokens
        tokens = bench.tokens_of(rank, self.size, len(self.mine.x), self.hidden, self.dtype, self.device)
        return [tokens.matrices(*shape) for shape in bench.matrix_shapes(self._n, self.hidden, ffn=self.combines)]

    def arriving(self, rank: int) -> torch.Tensor:
        """[source, expert of the rank]: how many rows arrive."""
        return self.counts[:, rank * EXPERTS : (rank + 1) * EXPERTS]

    def combined(self, returned: torch.Tensor) -> torch.Tensor:
        """The weighted sums of the tokens, from rows that have returned in the order in which they were sent."""
        rows = returned[self.back].view(len(self.mine.x), SLOTS, self.hidden)
        return (rows * self.mine.weights.unsqueeze(2).to(rows.dtype)).sum(1)

    def nccl(self, group: dist.ProcessGroup) -> Calls:
        size, rank = self.size, self.rank
        leaving = self.counts[rank].view(size, EXPERTS).sum(1).tolist()
        arriving = self.arriving(rank)
        received = arriving.sum(1).tolist()
        # rows arrive in the order of source, then expert, and are computed in the order of expert, then source
        numbers = torch.arange(sum(received), device=arriving.device).split(arriving.flatten().tolist())
        by_expert = torch.cat([numbers[s * EXPERTS + e] for e in range(EXPERTS) for s in range(size)])
        by_source = torch.argsort(by_expert)
        rows = self.mine.x.new_empty(sum(received), self.hidden)
        returned = self.mine.x.new_empty(len(self.token), self.hidden)
        compute = bench.library_of(self.matrices, rows, arriving.sum(0))

        def call() -> torch.Tensor:
            dist.all_to_all_single(rows, self.mine.x[self.token], received, leaving, group=group)
            done = compute(rows[by_expert])
            if not self.combines:
                return done
            dist.all_to_all_single(returned, done[by_source], leaving, received, group=group)
            return self.combined(returned)

        return {"all_to_all, then grouped GEMM": call}

    @classmethod
    def symm_mem_refusal(cls, shape: Shape, dtype: torch.dtype) -> str | None:
        if symmetric_memory.is_nvshmem_available():
            return None
        return "torch.ops.symm_mem.all_to_all_vdev_2d needs NVSHMEM, which this PyTorch lacks or cannot find"

    def symm_mem(self) -> Ways:
        """all_to_all_vdev_2d, then the library's grouped GEMM; for the whole layer also the second GEMM, and the
        return."""
        symmetric_memory.set_backend("NVSHMEM")
        group = symm_mem.world()
        name = group.group_name
        ops, size, x = torch.ops.symm_mem, self.size, self.mine.x
        # an expert without rows gets one that is ignored; all ranks allocate as much memory as the largest one needs
        counts = [self.arriving(rank).sum(0) for rank in range(size)]
        largest = max(int(each.clamp_min(1).sum()) for each in counts)
        placed = counts[self.rank].clamp_min(1)
        total = int(placed.sum())
        starts = (placed.cumsum(0) - placed).tolist()
        valid_rows = torch.cat(
            [torch.arange(at, at + n, device="cpu") for at, n in zip(starts, counts[self.rank].tolist())]
        ).to(x.device)

        def shared(*shape: int, dtype: torch.dtype = x.dtype) -> torch.Tensor:
            memory = symm_mem.shared(*shape, device=x.device, dtype=dtype).zero_()
            symmetric_memory.rendezvous(memory, group)
            return memory

        sent, returned = (shared(len(self.token), self.hidden) for _ in range(2))
        arrived, done = (shared(largest, self.hidden) for _ in range(2))
        splits = shared(size * EXPERTS, dtype=torch.int64).copy_(self.counts[self.rank])
        there, back = (shared(2, size * EXPERTS, dtype=torch.int64) for _ in range(2))  # splits, and offsets
        barrier_buffers = [shared(size, dtype=torch.int32) for _ in range(2)]
        compute = bench.library_of(self.matrices, arrived[:total], placed)

        def dispatch() -> torch.Tensor:
            torch.index_select(x, 0, self.token, out=sent)
            ops.all_to_all_vdev_2d(sent, arrived, splits, there, name)
            return compute(arrived[:total])

        def dispatch_matmul() -> torch.Tensor:
            return dispatch() if len(valid_rows) == total else dispatch()[valid_rows]

        def ffn() -> torch.Tensor:
            done[:total].copy_(dispatch())
            ops.all_to_all_vdev_2d_offset(done, returned, there, back, name)
            return self.combined(returned)

        way = "all_to_all_vdev_2d, then grouped GEMM"
        return Ways(
            lambda: ops.nvshmem_all_to_all(*barrier_buffers, name), {way: ffn if self.combines else dispatch_matmul}
        )


class DispatchMatmul(Experts):
    combines = False

    def error(self, result: torch.Tensor) -> float:
        """The largest absolute error of an element."""
        where, _, counts = bench.rows_of([each.ids for each in self._everyone], self.rank)
        rows = torch.cat([each.x for each in self._everyone])[where]
        if len(result) != len(rows):
            raise RuntimeError(f"the result has {len(result)} rows instead of {len(rows)}")
        worst = 0.0
        for part, found, matrix in zip(rows.split(counts.tolist()), result.split(counts.tolist()), self.matrices[0]):
            if len(part):
                worst = larger(worst, (found.double() - part.double() @ matrix.double()).abs().max().item())
        return worst


class Ffn(Experts):
    combines = True

    def error(self, result: torch.Tensor) -> float:
        """The largest error relative to the sum of the magnitudes of what is added."""
        matrices = (self._matrices(rank) for rank in range(self.size))
        return bench.ffn_error(self.mine, ((gate_up, down) for gate_up, down in matrices), result)
