"""Overrides for TorchTitan: its fused tensor-parallel layers, with mkernel's operators in them.

    --override.imports mkernel.integrations.torchtitan.attention_qkv \\
        mkernel.integrations.torchtitan.attention_output mkernel.integrations.torchtitan.feed_forward

They are for models that are built with `tp_gemm_backend="dist_gemm"`, whose layers fold tensor-parallel communication
into their GEMMs. Those layers call `torch.ops.symm_mem`; these ones call `mk.all_gather_matmul` and
`mk.matmul_reduce_scatter`, which have their own gradients: the gradient of a weight gathers while it multiplies, and
batches need not be transposed first. Groups may span nodes, and layers run on CPUs, too. Parameters, their names and
their sharding are those of the layers that are replaced, so checkpoints are, too.

This module imports TorchTitan (0.3 or newer), so nothing else here imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torchtitan.config import derive, override
from torchtitan.distributed.spmd_types import current_spmd_mesh
from torchtitan.models.common import dist_gemm
from torchtitan.models.common.decoder_sharding import dense_activation_placement, dense_sequence_parallel_placement

from mkernel.nn import functional

SEQUENCE = 1  # the dimension of the sequence: activations are [batch, sequence, features]


def _tensor_parallel_group() -> Any:
    """The process group of tensor parallelism, from the mesh of the current training context. None without one, or with
    one rank: there is nothing to communicate then, and the layers that are replaced do the work."""
    mesh = current_spmd_mesh()
    if mesh is None or "tp" not in (mesh.mesh_dim_names or ()):
        return None
    group = mesh.get_group("tp")
    return group if group.size() > 1 else None


def _check_input(x: torch.Tensor, layout: Any) -> None:
    """With TorchTitan's type checking of layouts (`debug.spmd_typechecking`), check that of an input."""
    if spmd.is_type_checking():
        spmd.assert_type(x, layout.axis_types, layout.partition_spec)


def _typed(y: torch.Tensor, layout: Any) -> torch.Tensor:
    """With type checking of layouts, declare that of an output: the checker knows no operators of ours."""
    if spmd.is_type_checking():
        spmd.assert_type(y, layout.axis_types, layout.partition_spec)
    return y


class QKVLinear(dist_gemm.AllGatherFusedQKVLinear):
    """The projections of queries, keys and values: gathers the sequence while it multiplies.

    Input: [batch, this rank's part of the sequence, features]. Output: query, key and value, each
    [batch, sequence, heads of this rank, head_dim].
    """

    @dataclass(kw_only=True, slots=True)
    class Config(dist_gemm.AllGatherFusedQKVLinear.Config):
        """As that of the layer that is replaced; it builds this one."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        group = _tensor_parallel_group()
        if group is None:
            return super().forward(x)
        _check_input(x, dense_sequence_parallel_placement())
        with spmd.no_typecheck():
            qkv = functional.column_parallel_linear(
                x, self.wqkv.weight, self.wqkv.bias, group=group, sequence_dim=SEQUENCE
            )
            # [batch, sequence, heads of keys, queries of such a head + key + value, head_dim]
            heads = qkv.unflatten(-1, (-1, self.r_dim, self.head_dim))
            parts = [part.flatten(2, 3).contiguous() for part in heads.split([self.heads_per_kv, 1, 1], dim=-2)]
        query, key, value = (_typed(part, dense_activation_placement(tp=spmd.S(2))) for part in parts)
        return query, key, value


class OutputLinear(dist_gemm.RowParallelLinear):
    """The projection of attention's result: sums over the ranks and scatters the sequence while it multiplies.

    Input: [batch, sequence, features of this rank]. Output: [batch, this rank's part of the sequence, features].
    """

    @dataclass(kw_only=True, slots=True)
    class Config(dist_gemm.RowParallelLinear.Config):
        """As that of the layer that is replaced; it builds this one."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        group = _tensor_parallel_group()
        if group is None:
            return super().forward(input)
        _check_input(input, dense_activation_placement(tp=spmd.S(2)))
        with spmd.no_typecheck():
            y = functional.row_parallel_linear(input, self.weight, self.bias, group=group, sequence_dim=SEQUENCE)
        return _typed(y, dense_sequence_parallel_placement())


class FeedForward(dist_gemm.AllGatherFusedFeedForward):
    """SwiGLU: gathers the sequence once for w1 and w3, and scatters it in w2.

    Input and output: [batch, this rank's part of the sequence, features].
    """

    @dataclass(kw_only=True, slots=True)
    class Config(dist_gemm.AllGatherFusedFeedForward.Config):
        """As that of the layer that is replaced; it builds this one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = _tensor_parallel_group()
        if group is None:
            return super().forward(x)
        _check_input(x, dense_sequence_parallel_placement())
        with spmd.no_typecheck():
            gate, up = functional.column_parallel_linears(
                x, [self.w1.weight, self.w3.weight], [self.w1.bias, self.w3.bias], group=group, sequence_dim=SEQUENCE
            )
            y = functional.row_parallel_linear(
                F.silu(gate) * up, self.w2.weight, self.w2.bias, group=group, sequence_dim=SEQUENCE
            )
        return _typed(y, dense_sequence_parallel_placement())


@override(
    target=dist_gemm.AllGatherFusedQKVLinear.Config, description="mkernel: all-gather of the sequence in the QKV GEMM"
)
def attention_qkv(config: dist_gemm.AllGatherFusedQKVLinear.Config) -> QKVLinear.Config:
    """Replace the projections of queries, keys and values."""
    return derive(config, QKVLinear.Config)


@override(target=dist_gemm.RowParallelLinear.Config, description="mkernel: reduce-scatter in attention's output GEMM")
def attention_output(config: dist_gemm.RowParallelLinear.Config) -> OutputLinear.Config:
    """Replace the projection of attention's result."""
    return derive(config, OutputLinear.Config)


@override(
    target=dist_gemm.AllGatherFusedFeedForward.Config, description="mkernel: all-gather and reduce-scatter in the FFN"
)
def feed_forward(config: dist_gemm.AllGatherFusedFeedForward.Config) -> FeedForward.Config:
    """Replace the feed-forward layer."""
    return derive(config, FeedForward.Config)
