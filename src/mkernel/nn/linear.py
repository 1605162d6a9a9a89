"""Linear layers that are divided among the ranks of a group: by their output features, or by their input features."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import nn

from mkernel.nn import functional
from mkernel.nn.initial import agreed_generator
from mkernel.nn.replicated import replica_group, with_summed_gradient
from mkernel.nn.shards import Membership, ParallelModule, check_divisible, check_positive
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group

Linear = TypeVar("Linear", bound="ParallelLinear")


class ParallelLinear(ParallelModule):
    """What both linear layers share. `in_features` and `out_features` are those of the plain layer.

    A module starts with its shard of the values that `nn.Linear` would have with the same seed, on any number of ranks.
    Every rank draws all values and keeps its own, so all ranks must use the same seed, or pass generators in the same
    state. To build a module without a generator is collective where the ranks are threads of one process: they agree on
    the state of the default generator, which they share.
    """

    divided = ""  # the features that the ranks divide

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Any = None,
        sequence_parallel: bool = True,
        sequence_dim: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ):
        super().__init__(group)
        check_positive(in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        check_divisible(self.divided, getattr(self, self.divided), self.shards)
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        shapes = {"weight": (out_features, in_features), "bias": (out_features,)}
        for name, shape in shapes.items():
            if name == "bias" and not bias:
                self.register_parameter("bias", None)
                continue
            shard = self.shard_of(name, torch.empty(shape, device="meta"))
            self.register_parameter(name, nn.Parameter(torch.empty(shard.shape, device=device, dtype=dtype)))
        self.reset_parameters(generator)

    weight: nn.Parameter
    bias: nn.Parameter | None

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """This rank's shard of what `nn.Linear` starts with. Draws as many random numbers as `nn.Linear`."""
        like: dict[str, Any] = dict(device=self.weight.device, dtype=self.weight.dtype)
        weight = torch.empty(self.out_features, self.in_features, **like)
        bias = torch.empty(self.out_features, **like) if self.bias is not None else None
        with agreed_generator(self.membership.known_group, weight.device, generator) as generator:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
            if bias is not None:
                bound = 1 / math.sqrt(self.in_features)
                nn.init.uniform_(bias, -bound, bound, generator=generator)
        self.copy_from({"weight": weight, "bias": bias})

    @classmethod
    def from_linear(cls: type[Linear], linear: nn.Linear, *, group: Any = None, **options: Any) -> Linear:
        """This rank's shard of a plain layer, which must have the same values on every rank.

        Args:
            linear: the plain layer. Its dtype and device are kept; it may be on the meta device.
            options: sequence_parallel and the like.
        """
        if not isinstance(linear, nn.Linear):
            raise ArgumentError(f"linear must be a torch.nn.Linear, got {type(linear).__name__}")
        has_bias = linear.bias is not None
        made = cls(linear.in_features, linear.out_features, has_bias, group=group, device="meta", **options)
        for name in ("weight", *(["bias"] if has_bias else [])):
            whole = getattr(linear, name)
            shard = made.shard_of(name, whole.detach()).clone(memory_format=torch.contiguous_format)
            setattr(made, name, nn.Parameter(shard, requires_grad=whole.requires_grad))
        return made.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """The plain layer, with the shards of all ranks. Collective: every rank calls it, and gets the whole layer."""
        has_bias = self.bias is not None
        plain = nn.Linear(self.in_features, self.out_features, has_bias, device="meta")
        for name in ("weight", *(["bias"] if has_bias else [])):
            gathered = self.gathered(name)
            setattr(plain, name, nn.Parameter(gathered, requires_grad=getattr(self, name).requires_grad))
        return plain.train(self.training)

    def extra_repr(self) -> str:
        shown = [
            f"in_features={self.in_features}", f"out_features={self.out_features}", f"bias={self.bias is not None}",
            f"shard {self.shard} of {self.shards}", f"sequence_parallel={self.sequence_parallel}",
        ]  # fmt: skip
        if self.sequence_parallel:
            shown.append(f"sequence_dim={self.sequence_dim}")
        return ", ".join(shown)


class ColumnParallelLinear(ParallelLinear):
    """A linear layer whose output features are divided among the ranks: rank r has rows r*out_features/world to
    (r+1)*out_features/world-1 of the plain layer's weight, and these elements of its bias.

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`, for the plain layer. out_features must
            be divisible by the number of ranks.
        group: the group whose ranks share the layer: a `mk.Group`, a process group, a one-dimensional DeviceMesh, or
            the name of a group. None is the current group.
        sequence_parallel: True: the input is this rank's part of the sequence. The layer gathers the parts and
            multiplies them, in one kernel (`mk.all_gather_matmul`); the backward pass scatters the gradient
            (`mk.matmul_reduce_scatter`). False: the input is the whole sequence, the same on every rank. The layer
            multiplies it without communication; the backward pass sums the gradient (`mk.matmul_all_reduce`).
        sequence_dim: the dimension of the input in which the sequence is divided: 0 for [seq, ..., features], 1 or -2
            for [batch, seq, features].
        save: what sequence_parallel keeps for the backward pass: "sharded", the input of this rank, which is gathered
            again for the gradient of the weight; or "gathered", all ranks' input.
        fp8: multiply in fp8 what is quantized in each forward pass: "TensorWise", "RowWise" or "BlockWise", for what
            shares a scale. None: no. Only with save="sharded".
        fp8_gradients: torch.float8_e5m2 or torch.float8_e4m3fn: also multiply the gradient by the weight in fp8. None:
            in the dtype of the input. See `mkernel.nn.fp8`.
        gather_output: return all output features on every rank, by an all-gather of its own, with which nothing
            overlaps. The backward pass then expects the same gradient on every rank, as it is if all ranks compute the
            same loss.
        generator: what the initial values are drawn from; in the same state on every rank. None is torch's default
            generator.

    Input: [..., in_features]. Output: [..., out_features/world] for the whole sequence, or [..., out_features] with
    gather_output.
    """

    divided = "out_features"
    shard_dims = {"weight": 0, "bias": 0}  # noqa: RUF012

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, group: Any = None,
        sequence_parallel: bool = True, sequence_dim: int = 0, save: str = "sharded", gather_output: bool = False,
        fp8: str | None = None, fp8_gradients: torch.dtype | None = None, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, generator: torch.Generator | None = None,
    ):  # fmt: skip
        if save not in ("sharded", "gathered"):
            raise ArgumentError(f"save must be 'sharded' or 'gathered', got {save!r}")
        functional.check_fp8(fp8, fp8_gradients, save)
        super().__init__(
            in_features, out_features, bias, group=group, sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim, device=device, dtype=dtype, generator=generator,
        )  # fmt: skip
        self.save, self.gather_output = save, gather_output
        self.fp8, self.fp8_gradients = fp8, fp8_gradients

    def used_weight(self) -> torch.Tensor:
        """The weight, as products take it."""
        return self.weight

    def used_bias(self) -> torch.Tensor | None:
        return self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.column_parallel_linear(
            x, self.used_weight(), self.used_bias(), group=self.group, sequence_parallel=self.sequence_parallel,
            sequence_dim=self.sequence_dim, save=self.save, fp8=self.fp8, fp8_gradients=self.fp8_gradients,
        )  # fmt: skip
        return functional.gather_features(y, group=self.group) if self.gather_output else y

    def extra_repr(self) -> str:
        return super().extra_repr() + ", gather_output=True" * self.gather_output + _shown(self.fp8, self.fp8_gradients)


class ReplicatedShardsLinear(ColumnParallelLinear):
    """A `ColumnParallelLinear` with fewer shards than ranks: `replicas` consecutive ranks have the same one, with the
    same output features. Their gradients are summed, because each of them uses the output for something else.

    Args:
        replicas: how many; divides the number of ranks. The others are as in `ColumnParallelLinear`.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, replicas: int, **options: Any):
        self.replicas = replicas
        super().__init__(in_features, out_features, bias, **options)
        self._replicas = Membership(replica_group(self.group, replicas))

    @property
    def replica_group(self) -> Group:
        """The ranks that have the same shard. Not known of a module from another process's file: made again."""
        known = self._replicas.known_group
        return known if known is not None else replica_group(self.group, self.replicas)

    def used_weight(self) -> torch.Tensor:
        return with_summed_gradient(self.weight, self.replica_group)

    def used_bias(self) -> torch.Tensor | None:
        return None if self.bias is None else with_summed_gradient(self.bias, self.replica_group)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, on {self.replicas} ranks"


class RowParallelLinear(ParallelLinear):
    """A linear layer whose input features are divided among the ranks: rank r has columns r*in_features/world to
    (r+1)*in_features/world-1 of the plain layer's weight. The bias is replicated, and added once.

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`, for the plain layer. in_features must
            be divisible by the number of ranks.
        group, generator: as in `ColumnParallelLinear`.
        sequence_parallel: True: the output is this rank's part of the sequence. The layer multiplies, sums over the
            ranks and scatters, in one kernel (`mk.matmul_reduce_scatter`). False: the output is the whole sequence, the
            same on every rank (`mk.matmul_all_reduce`).
        sequence_dim: as in `ColumnParallelLinear`. Its size must be divisible by the number of ranks.
        reduce_dtype: the dtype in which products travel between ranks: torch.float32, or that of the input (default).
        fp8, fp8_gradients: as in `ColumnParallelLinear`.

    Input: [..., in_features/world], for the whole sequence: the output of a `ColumnParallelLinear`. Output:
    [..., out_features]. `forward(x, residual)` also adds a residual, which has the shape of the output, in the same
    kernel.
    """

    divided = "in_features"
    shard_dims = {"weight": 1}  # noqa: RUF012

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, group: Any = None,
        sequence_parallel: bool = True, sequence_dim: int = 0, reduce_dtype: torch.dtype | None = None,
        fp8: str | None = None, fp8_gradients: torch.dtype | None = None, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, generator: torch.Generator | None = None,
    ):  # fmt: skip
        functional.check_fp8(fp8, fp8_gradients)
        super().__init__(
            in_features, out_features, bias, group=group, sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim, device=device, dtype=dtype, generator=generator,
        )  # fmt: skip
        self.reduce_dtype, self.fp8, self.fp8_gradients = reduce_dtype, fp8, fp8_gradients

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return functional.row_parallel_linear(
            x, self.weight, self.bias, residual, group=self.group, sequence_parallel=self.sequence_parallel,
            sequence_dim=self.sequence_dim, reduce_dtype=self.reduce_dtype, fp8=self.fp8,
            fp8_gradients=self.fp8_gradients,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return super().extra_repr() + _shown(self.fp8, self.fp8_gradients)


def _shown(fp8: str | None, fp8_gradients: torch.dtype | None) -> str:
    """Options of fp8 in the description of a layer."""
    shown = "" if fp8 is None else f", fp8={fp8!r}"
    return shown if fp8_gradients is None else f"{shown}, fp8_gradients={fp8_gradients}"
