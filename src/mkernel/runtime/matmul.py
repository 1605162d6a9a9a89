"""What the host code of the operators shares: checks of tensors, and how GEMMs read b."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mkernel.lang.matrix import Strides
from mkernel.lang.scaling import Scales
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group
from mkernel.runtime.operands import (
    DTYPES,
    check_device,
    check_plain,
    constants,
    describable,
    descriptor,
    overlap,
    overlaps_itself,
)
from mkernel.runtime.scaling import FP8, with_scales


def check_tensor(op: str, group: Group, name: str, tensor: Any, dimensions: int = 2) -> None:
    """Refuse anything but a tensor with this many dimensions on this rank's device that needs no gradient."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dim() != dimensions:
        plural = "s" if dimensions > 1 else ""
        raise ArgumentError(f"{name} must have {dimensions} dimension{plural}, got shape {tuple(tensor.shape)}")
    check_device(name, tensor, group.device)
    check_plain(name, tensor)
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise ArgumentError(
            f"{name} requires grad, and {op} has no backward pass: call it under torch.no_grad(), "
            f"or pass {name}.detach()"
        )


def check_product(a: torch.Tensor, b: torch.Tensor) -> None:
    """Refuse matrices that cannot be multiplied."""
    if a.dtype not in DTYPES:
        hint = ". fp8 is multiplied by the operators with scales: see docs/how-to/fp8.md" if a.dtype in FP8 else ""
        raise ArgumentError(f"a has dtype {a.dtype}; supported are {', '.join(str(d) for d in DTYPES)}{hint}")
    if b.dtype != a.dtype:
        raise ArgumentError(f"b has dtype {b.dtype}, but a has {a.dtype}: they must be the same")
    if a.shape[1] != b.shape[0]:
        raise ArgumentError(
            f"a is {tuple(a.shape)} and b is {tuple(b.shape)}: "
            f"a's columns ({a.shape[1]}) must be b's rows ({b.shape[0]})"
        )


def check_out(
    out: torch.Tensor, shape: tuple[int, ...], meaning: str, dtype: torch.dtype, inputs: Mapping[str, torch.Tensor]
) -> None:
    """Refuse an output that has not this shape (`meaning`: of which sizes) and dtype, or overlaps itself or an
    input."""
    if tuple(out.shape) != shape:
        raise ArgumentError(f"out has shape {tuple(out.shape)}, but the result has {shape} ({meaning})")
    if out.dtype != dtype:
        raise ArgumentError(f"out has dtype {out.dtype}, but the result has {dtype}")
    if overlaps_itself(out):
        expanded = any(stride == 0 and size > 1 for size, stride in zip(shape, out.stride()))
        raise ArgumentError(
            f"out {'is an expanded tensor' if expanded else f'has strides {out.stride()}'}: several of its elements "
            f"share one place in memory. Pass one in which each has its own: torch.empty({shape}, dtype={dtype}), or "
            f"any slice or permutation of such a tensor"
        )
    for name, tensor in inputs.items():
        if overlap(out, tensor):
            raise ArgumentError(
                f"out overlaps {name} in memory: it would be overwritten while it is read. Pass one that shares no "
                f"memory with an input: torch.empty({shape}, dtype={dtype})"
            )


@dataclass(frozen=True)
class RhsLayout:
    """How the right operand b [k, n] is read: through a descriptor of b, or of the [n, k] matrix that b
    is a transposed view of, or through pointers."""

    uses_tma: bool
    transposed: bool

    @staticmethod
    def of(b: torch.Tensor, descriptors: bool) -> RhsLayout:
        transposed = descriptors and not describable(b) and describable(b.t())
        return RhsLayout(descriptors and (describable(b) or transposed), transposed)

    def operand(self, b: torch.Tensor, tile_n: int, tile_k: int) -> Any:
        """The argument of the kernel: a descriptor, or b itself."""
        k, n = b.shape
        if not self.uses_tma:
            return b
        if self.transposed:
            return descriptor(b, [n, k], [b.stride(1), 1], [tile_n, tile_k])
        return descriptor(b, [k, n], [b.stride(0), 1], [tile_k, tile_n])

    def strides(self, b: torch.Tensor, scales: Scales | None = None) -> Strides:
        """How the kernel reads b."""
        read = Strides(0, b.stride(0), b.stride(1), *constants(self.uses_tma, self.transposed))
        return with_scales(read, scales)
