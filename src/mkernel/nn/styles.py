"""Plans for `torch.distributed.tensor.parallel.parallelize_module`: they turn the `nn.Linear`s of a model into this
package's layers, in place, with DTensors as parameters.

    parallelize_module(model, mesh["tp"], {
        "mlp.w1": mkernel.nn.ColwiseParallel(input_layouts=Shard(1)),
        "mlp.w2": mkernel.nn.RowwiseParallel(output_layouts=Shard(1)),
    })

Arguments are those of PyTorch's styles of the same names, so a plan changes by its import. What differs: the
all-gather, reduce-scatter or all-reduce that a layout implies happens in the kernel that multiplies.

torch.compile works with them. With DTensors as inputs of the compiled module, pass dynamic=False: AOTAutograd of torch
2.13 fails on some graphs with DTensor inputs of symbolic sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from mkernel.nn import functional
from mkernel.nn.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from mkernel.nn.shards import Membership, check_divisible
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import current


class DTensorLinear(ParallelLinear):
    """A parallel layer that was an `nn.Linear` and has DTensors as parameters. Inputs are DTensors, or local tensors of
    the style's layout."""

    dtensors_are_whole = True
    input_layout: Placement
    use_local_output: bool

    def _local_input(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor):
            return x.redistribute(self._mesh, [self.input_layout]).to_local()
        return x

    def _output(self, y: torch.Tensor, layout: Placement) -> torch.Tensor:
        return y if self.use_local_output else DTensor.from_local(y, self._mesh, [layout], run_check=False)

    @property
    def _mesh(self) -> DeviceMesh:
        return self.weight.device_mesh  # type: ignore[attr-defined]


class ColwiseLinear(DTensorLinear, ColumnParallelLinear, nn.Linear):  # type: ignore[misc]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.column_parallel_linear(
            self._local_input(x), *_local(self.weight, self.bias), group=self.group,
            sequence_parallel=self.sequence_parallel, sequence_dim=self.sequence_dim, save=self.save, fp8=self.fp8,
            fp8_gradients=self.fp8_gradients,
        )  # fmt: skip
        if self.gather_output:
            return self._output(functional.gather_features(y, group=self.group), Replicate())
        return self._output(y, Shard(y.dim() - 1))


class RowwiseLinear(DTensorLinear, RowParallelLinear, nn.Linear):  # type: ignore[misc]
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y = functional.row_parallel_linear(
            self._local_input(x), *_local(self.weight, self.bias), group=self.group,
            sequence_parallel=self.sequence_parallel, sequence_dim=self.sequence_dim, reduce_dtype=self.reduce_dtype,
            fp8=self.fp8, fp8_gradients=self.fp8_gradients,
        )  # fmt: skip
        if self.sequence_parallel:
            return self._output(y, Shard(self.sequence_dim % y.dim()))
        return self._output(y, Replicate())


def _local(*parameters: Any) -> list[Any]:
    return [parameter if parameter is None else parameter.to_local() for parameter in parameters]


class _LinearStyle(ParallelStyle):
    """What both styles share. `input_layout`, `output_layout` and `use_local_output`: as in PyTorch's."""

    def __init__(self, input_layout: Placement, output_layout: Placement, use_local_output: bool):
        super().__init__()
        self.input_layout, self.output_layout, self.use_local_output = input_layout, output_layout, use_local_output

    def _convert(self, module: nn.Module, mesh: DeviceMesh, kind: type[DTensorLinear], **attributes: Any) -> nn.Module:
        """Make a plain layer a parallel one, in place: `parallelize_module` keeps the object."""
        name = type(self).__name__
        if type(module) is not nn.Linear:
            raise ArgumentError(
                f"{name} of mkernel.nn is for torch.nn.Linear, not for {type(module).__name__}: use "
                f"torch.distributed.tensor.parallel.{name} for other modules"
            )
        group = current(mesh)
        check_divisible(kind.divided, getattr(module, kind.divided), group.size)
        for parameter_name, parameter in list(module.named_parameters()):
            dim = kind.shard_dims.get(parameter_name)
            placement = Replicate() if dim is None else Shard(dim)
            sharded = distribute_tensor(parameter, mesh, [placement], src_data_rank=self.src_data_rank)
            module.register_parameter(parameter_name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        module.__class__ = kind  # type: ignore[assignment]
        module.membership = Membership(group)  # type: ignore[assignment]
        for attribute, value in attributes.items():
            setattr(module, attribute, value)
        module.input_layout, module.use_local_output = self.input_layout, self.use_local_output  # type: ignore[assignment]
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layout}, output_layouts={self.output_layout}, "
            f"use_local_output={self.use_local_output})"
        )


class ColwiseParallel(_LinearStyle):
    """Divide the output features of an `nn.Linear` among the ranks of the mesh, as `ColumnParallelLinear`. The
    parameters become DTensors with `Shard(0)`.

    Args:
        input_layouts: Replicate() (default): the input is the same on every rank. Shard(dim): it is this rank's part of
            the sequence, which is gathered in the kernel that multiplies. DTensors of another layout are redistributed.
        output_layouts: Shard(-1) (default): this rank's output features. Replicate(): all of them, by an all-gather of
            its own.
        use_local_output: return this rank's tensor; False returns a DTensor.
        save, fp8, fp8_gradients: as in `ColumnParallelLinear`.
    """

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None,
        use_local_output: bool = True, save: str = "sharded", fp8: str | None = None,
        fp8_gradients: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__(input_layouts or Replicate(), output_layouts or Shard(-1), use_local_output)
        functional.check_fp8(fp8, fp8_gradients, save)
        self.save, self.fp8, self.fp8_gradients = save, fp8, fp8_gradients
        if not isinstance(self.input_layout, Replicate | Shard) or self.input_layout == Shard(-1):
            raise ArgumentError(
                f"input_layouts must be Replicate() or Shard(dim) of the sequence's dimension, got {self.input_layout}"
            )
        if self.output_layout not in (Shard(-1), Replicate()):
            raise ArgumentError(f"output_layouts must be Shard(-1) or Replicate(), got {self.output_layout}")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        sharded = isinstance(self.input_layout, Shard)
        return self._convert(
            module, device_mesh, ColwiseLinear, sequence_parallel=sharded,
            sequence_dim=self.input_layout.dim if isinstance(self.input_layout, Shard) else 0, save=self.save,
            gather_output=self.output_layout == Replicate(), fp8=self.fp8, fp8_gradients=self.fp8_gradients,
        )  # fmt: skip


class RowwiseParallel(_LinearStyle):
    """Divide the input features of an `nn.Linear` among the ranks of the mesh, as `RowParallelLinear`. The weight
    becomes a DTensor with `Shard(1)`, the bias one with `Replicate()`.

    Args:
        input_layouts: Shard(-1), this rank's input features. DTensors of another layout are redistributed.
        output_layouts: Replicate() (default): the whole output, the same on every rank, summed in the kernel that
            multiplies. Shard(dim): this rank's part of the sequence.
        use_local_output: return this rank's tensor; False returns a DTensor.
        reduce_dtype, fp8, fp8_gradients: as in `RowParallelLinear`.
    """

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None,
        use_local_output: bool = True, reduce_dtype: torch.dtype | None = None, fp8: str | None = None,
        fp8_gradients: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__(input_layouts or Shard(-1), output_layouts or Replicate(), use_local_output)
        functional.check_fp8(fp8, fp8_gradients)
        self.reduce_dtype, self.fp8, self.fp8_gradients = reduce_dtype, fp8, fp8_gradients
        if self.input_layout != Shard(-1):
            raise ArgumentError(f"input_layouts must be Shard(-1), got {self.input_layout}")
        if not isinstance(self.output_layout, Replicate | Shard) or self.output_layout == Shard(-1):
            raise ArgumentError(
                f"output_layouts must be Replicate() or Shard(dim) of the sequence's dimension, got "
                f"{self.output_layout}"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        sharded = isinstance(self.output_layout, Shard)
        return self._convert(
            module, device_mesh, RowwiseLinear, sequence_parallel=sharded,
            sequence_dim=self.output_layout.dim if isinstance(self.output_layout, Shard) else 0,
            reduce_dtype=self.reduce_dtype, fp8=self.fp8, fp8_gradients=self.fp8_gradients,
        )  # fmt: skip
