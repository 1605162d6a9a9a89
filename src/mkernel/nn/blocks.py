"""Blocks of a transformer that are made of several linear layers: the gated MLP, and the projections of attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mkernel.nn import functional
from mkernel.nn.linear import ColumnParallelLinear, ReplicatedShardsLinear, RowParallelLinear
from mkernel.nn.shards import check_divisible, check_gathered, check_positive
from mkernel.ops.all_gather_matmul.several import joined
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import current


def check_heads(num_heads: int, num_kv_heads: int, size: int) -> int:
    """Refuse heads that cannot be divided among the ranks so that each rank has the keys of its queries. Returns how
    many ranks have the same keys."""
    if num_heads % num_kv_heads:
        raise ArgumentError(f"num_heads is {num_heads}, which is not a multiple of num_kv_heads ({num_kv_heads})")
    check_divisible("num_heads", num_heads, size)
    if size % num_kv_heads == 0:
        return size // num_kv_heads
    check_divisible("num_kv_heads", num_kv_heads, size)
    return 1


class SharedInput(nn.Module):
    """A block whose first layers have the same input: it is gathered once, and multiplied by all their weights in one
    kernel. For that, the weights are adjacent in memory. Where they are not, as with FSDP, the results are the
    same, but only the first product overlaps with the transfers."""

    first_layers: tuple[str, ...] = ()

    @torch.no_grad()
    def _adjoin(self) -> None:
        """Make the weights adjacent in memory, unless they are."""
        weights = [getattr(self, name).weight for name in self.first_layers]
        kinds = {(type(weight), weight.dtype, weight.device) for weight in weights}
        if len(kinds) > 1 or type(weights[0]) is not nn.Parameter or joined([w.t() for w in weights]) is not None:
            return
        whole = torch.cat([weight.data for weight in weights])
        for weight, part in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
            weight.data = part

    def _made(self) -> None:
        """The last step of __init__."""
        self._adjoin()
        self.register_load_state_dict_post_hook(_adjoin_loaded)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # of `to` and the like: moves each parameter on its own
        self._adjoin()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # of a copy, or of a module from a file
        self._adjoin()

    def _apply_first(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The outputs of the first layers."""
        check_gathered(self, *self.first_layers)
        layers: list[ColumnParallelLinear] = [getattr(self, name) for name in self.first_layers]
        first = layers[0]
        return functional.column_parallel_linears(
            x, [layer.used_weight() for layer in layers], [layer.used_bias() for layer in layers], group=first.group,
            sequence_parallel=first.sequence_parallel, sequence_dim=first.sequence_dim, save=first.save, fp8=first.fp8,
            fp8_gradients=first.fp8_gradients,
        )  # fmt: skip


def _adjoin_loaded(block: SharedInput, incompatible: Any) -> None:
    """After load_state_dict, which may have replaced parameters (assign=True)."""
    block._adjoin()


class ParallelSwiGLU(SharedInput):
    """The gated MLP of Llama and its relatives, down_proj(silu(gate_proj(x)) * up_proj(x)), with its inner features
    divided among the ranks.

    The parameters have the names of Hugging Face's `LlamaMLP`: `gate_proj.weight`, `up_proj.weight`,
    `down_proj.weight`. gate_proj and up_proj are `ColumnParallelLinear`s, down_proj is a `RowParallelLinear`. The input
    is gathered once for both, and multiplied by both in one kernel.

    Args:
        hidden_size: features of the input and the output.
        intermediate_size: inner features of the whole layer; divisible by the number of ranks.
        bias: whether the three layers have a bias.
        group, sequence_parallel, sequence_dim, save, fp8, fp8_gradients, device, dtype, generator: as in
            `ColumnParallelLinear`. In fp8, gate_proj and up_proj are quantized as one weight.
        reduce_dtype: as in `RowParallelLinear`.

    Input and output: [..., hidden_size], this rank's part of the sequence; without sequence_parallel, all of it, the
    same on every rank. `forward(x, residual)` adds a residual in the last kernel.
    """

    first_layers = ("gate_proj", "up_proj")

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool = False, *, group: Any = None,
        sequence_parallel: bool = True, sequence_dim: int = 0, save: str = "sharded",
        reduce_dtype: torch.dtype | None = None, fp8: str | None = None, fp8_gradients: torch.dtype | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ):  # fmt: skip
        super().__init__()
        check_positive(hidden_size=hidden_size, intermediate_size=intermediate_size)
        group = current(group)
        check_divisible("intermediate_size", intermediate_size, group.size)
        common: dict[str, Any] = dict(
            group=group, sequence_parallel=sequence_parallel, sequence_dim=sequence_dim, fp8=fp8,
            fp8_gradients=fp8_gradients, device=device, dtype=dtype, generator=generator,
        )  # fmt: skip
        self.gate_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias, save=save, **common)
        self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias, save=save, **common)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, reduce_dtype=reduce_dtype, **common)
        self._made()

    @classmethod
    def from_linears(
        cls, gate_proj: nn.Linear, up_proj: nn.Linear, down_proj: nn.Linear, *, group: Any = None, **options: Any
    ) -> ParallelSwiGLU:
        """This rank's shard of a plain MLP that consists of these layers. options: sequence_parallel and the like."""
        inner = {"gate_proj": gate_proj.out_features, "up_proj": up_proj.out_features}
        for name, features in inner.items():
            if features != down_proj.in_features:
                raise ArgumentError(
                    f"{name} has {features} output features, but down_proj has {down_proj.in_features} input features: "
                    f"they must be the same"
                )
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        of_row = {name: options[name] for name in options if name != "save"}
        of_columns = {name: options[name] for name in options if name != "reduce_dtype"}
        group = current(group)
        made.gate_proj = ColumnParallelLinear.from_linear(gate_proj, group=group, **of_columns)
        made.up_proj = ColumnParallelLinear.from_linear(up_proj, group=group, **of_columns)
        made.down_proj = RowParallelLinear.from_linear(down_proj, group=group, **of_row)
        made._made()
        return made

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = self._apply_first(x)
        return self.down_proj(F.silu(gate) * up, residual)


class ParallelQKV(SharedInput):
    """The query, key and value projections of attention, with the heads divided among the ranks.

    The parameters have the names of Hugging Face's `LlamaAttention`: `q_proj.weight`, `k_proj.weight`, `v_proj.weight`.
    The input is gathered once for all three, and multiplied by them in one kernel. The projection that follows
    attention is a `RowParallelLinear` of num_heads*head_dim input features.

    Args:
        hidden_size: features of the input.
        num_heads: heads of the queries in the whole layer; divisible by the number of ranks.
        num_kv_heads: heads of the keys and values, in grouped-query attention; divides num_heads, so that each rank has
            the keys of its queries. Divisible by the number of ranks; or fewer, and a divisor of it: then several
            consecutive ranks have the same head, and the backward pass sums its gradients over them. None is num_heads.
        head_dim: features of a head; None is hidden_size/num_heads.
        bias: whether the three layers have a bias.
        group, sequence_parallel, sequence_dim, save, fp8, fp8_gradients, device, dtype, generator: as in
            `ColumnParallelLinear`. In fp8, the three layers are quantized as one weight.

    Input: [..., hidden_size]. Output: query [..., num_heads/world, head_dim], key and value
    [..., num_kv_heads/world, head_dim], or one head, for the whole sequence.
    """

    first_layers = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int | None = None, head_dim: int | None = None,
        bias: bool = False, *, group: Any = None, sequence_parallel: bool = True, sequence_dim: int = 0,
        save: str = "sharded", fp8: str | None = None, fp8_gradients: torch.dtype | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ):  # fmt: skip
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_positive(hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads)
        if head_dim is None:
            if hidden_size % num_heads:
                raise ArgumentError(
                    f"hidden_size is {hidden_size}, which is not a multiple of num_heads ({num_heads}): pass head_dim"
                )
            head_dim = hidden_size // num_heads
        check_positive(head_dim=head_dim)
        group = current(group)
        replicas = check_heads(num_heads, num_kv_heads, group.size)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        common: dict[str, Any] = dict(
            group=group, sequence_parallel=sequence_parallel, sequence_dim=sequence_dim, save=save, fp8=fp8,
            fp8_gradients=fp8_gradients, device=device, dtype=dtype, generator=generator,
        )  # fmt: skip
        self.q_proj = ColumnParallelLinear(hidden_size, num_heads * head_dim, bias, **common)
        for name in ("k_proj", "v_proj"):
            features = num_kv_heads * head_dim
            if replicas == 1:
                layer = ColumnParallelLinear(hidden_size, features, bias, **common)
            else:
                layer = ReplicatedShardsLinear(hidden_size, features, bias, replicas=replicas, **common)
            self.add_module(name, layer)
        self._made()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = (y.unflatten(-1, (-1, self.head_dim)) for y in self._apply_first(x))
        return query, key, value

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
