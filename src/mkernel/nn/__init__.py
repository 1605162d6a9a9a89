"""Modules for tensor, sequence, context and expert parallelism, made of this package's operators.

Each module takes the arguments of the plain PyTorch module that it replaces, and has its parameters under the same
names; a rank holds its shard of them. A checkpoint of the plain module loads, and is sharded on loading.
"""

from typing import TYPE_CHECKING, Any

from mkernel.nn import functional
from mkernel.nn.attention import ContextParallelAttention
from mkernel.nn.blocks import ParallelQKV, ParallelSwiGLU
from mkernel.nn.linear import ColumnParallelLinear, RowParallelLinear
from mkernel.nn.moe import ExpertParallelMoE, ParallelExperts
from mkernel.nn.replicated import check_replicated, sum_gradients
from mkernel.nn.router import TopKRouter, expert_load
from mkernel.nn.shards import ParallelModule, full_state_dict

if TYPE_CHECKING:
    from mkernel.nn.styles import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "ContextParallelAttention",
    "ExpertParallelMoE",
    "ParallelExperts",
    "ParallelModule",
    "ParallelQKV",
    "ParallelSwiGLU",
    "RowParallelLinear",
    "RowwiseParallel",
    "TopKRouter",
    "check_replicated",
    "expert_load",
    "full_state_dict",
    "functional",
    "sum_gradients",
]


def __getattr__(name: str) -> Any:
    if name in ("ColwiseParallel", "RowwiseParallel"):  # torch.distributed.tensor takes a second to import
        from mkernel.nn import styles

        return getattr(styles, name)
    raise AttributeError(f"module 'mkernel.nn' has no attribute {name!r}")
