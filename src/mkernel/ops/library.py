"""What the registrations with torch.library share.

An operator `mk.<name>` is registered as `torch.ops.mkernel.<name>`: schema, implementation, fake implementation and
gradient. Registered operators take two-dimensional tensors, the group by its name, and the configuration as integers.
The public functions reshape, cast and choose, and call the registered operator wherever PyTorch must see it: for
gradients, and while a graph is traced. Otherwise they call its implementation directly, which saves the dispatcher's
host time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from typing import Any

import torch
from torch.autograd import forward_ad

from mkernel import operators
from mkernel.runtime import group_names
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.matmul import check_product
from mkernel.runtime.operands import refuse_dual
from mkernel.runtime.prepared import PLAIN
from mkernel.runtime.scaling import FP8

NAMESPACE = "mkernel"
DEVICES = ("cpu", "cuda")
DEFAULT = -1  # a field of a configuration that is None


def define(
    name: str,
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> None:
    """Register an operator.

    Args:
        function: computes it on real tensors.
        fake: returns empty tensors of the results' shapes, strides and dtypes.
        save, backward: `setup_context` and `backward` of torch.library.register_autograd.
    """
    operator = f"{NAMESPACE}::{name}"
    torch.library.define(operator, schema)
    torch.library.impl(operator, DEVICES, function)
    torch.library.register_fake(operator, fake)
    if backward is not None:
        torch.library.register_autograd(operator, backward, setup_context=save)


def check_fake(a: torch.Tensor, b: torch.Tensor) -> None:
    """For fake implementations: refuse tensors that cannot be multiplied. Not while a graph is compiled: then the
    implementation refuses them when the graph runs, and tells the other ranks."""
    if torch._guards.TracingContext.try_get() is None:
        for name, tensor in (("a", a), ("b", b)):
            if tensor.dim() != 2:
                raise ArgumentError(f"{name} must have 2 dimensions, got shape {tuple(tensor.shape)}")
        check_product(a, b)


def no_backward(op: str) -> Callable[..., Any]:
    """The gradient of an operator without a backward pass. Without it, PyTorch would give none and say nothing."""

    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ArgumentError(f"{op} has no backward pass: call it under torch.no_grad(), or pass detached tensors")

    return backward


def registered(operator: str, variant: str = "") -> Any:
    """`torch.ops.mkernel.<operator><variant>`, whose package is imported first if nobody has used it yet."""
    name = operator + variant
    if not hasattr(torch.ops.mkernel, name):
        operators.find(operator).load("function")
    return getattr(torch.ops.mkernel, name)


def encoded(config: Config | None) -> list[int] | None:
    """A configuration, as an argument of a registered operator."""
    if config is None:
        return None
    if not isinstance(config, Config):
        raise ArgumentError(f"config must be a mk.Config, got {type(config).__name__}")
    return [DEFAULT if value is None else value for value in astuple(config)]


def decoded(numbers: Sequence[int] | None) -> Config | None:
    """The configuration that `encoded` has encoded."""
    if numbers is None:
        return None
    names = [field.name for field in fields(Config)]
    if len(numbers) != len(names):
        raise ArgumentError(f"config must have {len(names)} numbers ({', '.join(names)}), got {len(numbers)}")
    return Config(**{name: value for name, value in zip(names, numbers) if value != DEFAULT})


def name_of(group: Any) -> str:
    """The name of a group, for registered operators. While a graph is traced, the group is its name already."""
    return group if isinstance(group, str) else group.group_name


def size_of(group: Any) -> int:
    """How many ranks a group has, which may be given by its name."""
    return group_names.size_of(group) if isinstance(group, str) else group.size


def needs_gradients(*tensors: torch.Tensor | None) -> bool:
    """Will somebody ask for the gradient of one of these?"""
    return torch.is_grad_enabled() and any([tensor is not None and tensor.requires_grad for tensor in tensors])


def needs_dispatcher(*tensors: Any) -> bool:
    """Must PyTorch see the operator: to differentiate it, or because a graph is being traced?

    What the implementation refuses is none of the dispatcher's business: no tensors, and tensors without memory.
    """
    if torch.compiler.is_compiling():
        return True
    if all([tensor is None or type(tensor) in PLAIN for tensor in tensors]):  # a list: faster than a generator
        return (
            needs_gradients(*tensors)
            or torch._C._len_torch_dispatch_stack() > 0
            or torch._C._functorch.peek_interpreter_stack() is not None  # inside of torch.func
        )
    if not are_tensors(*tensors) or any(hasattr(tensor, "to_local") for tensor in tensors):  # a DTensor
        return False
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # nobody has a fake tensor without it
    return (
        needs_gradients(*tensors)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None  # inside of torch.func
        or (fake is not None and any(isinstance(tensor, fake.FakeTensor) for tensor in tensors))
    )


def are_tensors(*values: Any) -> bool:
    """Are all of these tensors, or not given?"""
    return all([value is None or isinstance(value, torch.Tensor) for value in values])


def are_operands(a: Any, b: Any, *others: Any) -> bool:
    """Are these a tensor, a matrix, and other tensors that may be missing? The implementation refuses anything else."""
    return are_tensors(a, b, *others) and a is not None and b is not None and b.dim() == 2


def refuse_gradients(op: str, **tensors: torch.Tensor | None) -> None:
    """For operators that multiply what is quantized, which has no gradients."""
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and needs_gradients(tensor):
            raise ArgumentError(
                f"{name} requires grad, and {op} has no backward pass: pass {name}.detach(), or, for gradients, use "
                f"mkernel.nn.functional with fp8="
            )


def refuse_transforms(**tensors: Any) -> None:
    """The dispatcher would drop the tangents of dual tensors, and PyTorch has no torch.func.grad of operators that are
    registered with torch.library: it says so in terms of an autograd.Function that the caller does not have."""
    if forward_ad._current_level >= 0:
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor):
                refuse_dual(name, tensor)
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and _is_tracked(tensor):
                raise ArgumentError(
                    f"{name} is differentiated by torch.func (grad, vjp, jacrev), which is not supported: "
                    f"differentiate with backward() or torch.autograd.grad"
                )


def _is_tracked(tensor: torch.Tensor) -> bool:
    """Does torch.func differentiate it, or what other transforms have wrapped?"""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_gradtrackingtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def refuse_out_with_gradients(out: torch.Tensor | None, *tensors: torch.Tensor | None) -> None:
    """As PyTorch does: a result that is written to a given tensor has no gradient."""
    if out is not None and needs_gradients(out, *tensors):
        raise ArgumentError(
            "out cannot be combined with tensors that require grad: call the operator without out=, or under "
            "torch.no_grad()"
        )


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors, in the dtype of torch.autocast where it is enabled, as torch.mm takes them."""
    device = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else ""
    if device not in DEVICES or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Any) -> Any:
        eligible = isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if eligible else tensor

    return tuple(cast(tensor) for tensor in tensors)


def check_dim(name: str, dim: Any, tensor: torch.Tensor, what: str) -> int:
    """A dimension of the rows of a tensor [..., columns], counted from 0."""
    rows = tensor.dim() - 1
    if rows < 1:
        raise ArgumentError(f"{what} must have at least 2 dimensions, [..., k], got shape {tuple(tensor.shape)}")
    if not isinstance(dim, int) or isinstance(dim, bool) or not -tensor.dim() <= dim < tensor.dim():
        raise ArgumentError(f"{name} must be a dimension of {what}, which has {tensor.dim()} of them; got {dim!r}")
    if dim % tensor.dim() == rows:
        raise ArgumentError(
            f"{name} must not be the last dimension of {what}, shape {tuple(tensor.shape)}: its columns are multiplied"
        )
    return dim % tensor.dim()


def as_rows(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """A tensor [..., columns] as a matrix whose rows begin with dimension `dim`; a view wherever there is one."""
    if tensor.dim() == 2 and dim == 0:
        return tensor
    return tensor.movedim(dim, 0).reshape(rows_of(tensor), tensor.shape[-1])


def rows_to_refuse(a: Any) -> Any:
    """a [..., k], where another argument is wrong: as a matrix, so that the checks find the other one."""
    plain = type(a) in PLAIN and a.layout is torch.strided and not a.is_nested
    return as_rows(a) if plain and a.dim() > 2 else a


def rows_of(tensor: torch.Tensor) -> int:
    """How many rows a tensor [..., columns] has, also if it has no columns."""
    return math.prod(tensor.shape[:-1])


def scale_as_rows(scale: Any, a: torch.Tensor, dim: int = 0) -> Any:
    """The scales of a [..., k] for its `as_rows`; those that are not laid out like a as they are."""
    if not isinstance(scale, torch.Tensor) or scale.dim() != a.dim():
        return scale
    if scale.numel() == 1:  # of the only row, or of all
        return scale.reshape(1, 1)
    return as_rows(scale, dim) if scale.shape[:-1] == a.shape[:-1] else scale


def check_scaled_fake(a: torch.Tensor, b: torch.Tensor) -> None:
    """`check_fake` for fp8 matrices."""
    if torch._guards.TracingContext.try_get() is None:
        for name, tensor in (("a", a), ("b", b)):
            if tensor.dim() != 2:
                raise ArgumentError(f"{name} must have 2 dimensions, got shape {tuple(tensor.shape)}")
            if tensor.dtype not in FP8:
                raise ArgumentError(f"{name} has dtype {tensor.dtype}, it must be one of {', '.join(map(str, FP8))}")
        if a.shape[1] != b.shape[0]:
            raise ArgumentError(f"a is {tuple(a.shape)} and b is {tuple(b.shape)}: a's columns must be b's rows")


def from_rows(matrix: torch.Tensor, leading: Sequence[int], dim: int, size: int) -> torch.Tensor:
    """The tensor [..., columns] whose `as_rows` is the matrix. leading: the dimensions of its rows before the call;
    dimension `dim` has become `size`."""
    if len(leading) == 1:
        return matrix
    rest = [*leading[:dim], *leading[dim + 1 :]]
    return matrix.view(size, *rest, matrix.shape[-1]).movedim(0, dim)


def out_as_rows(out: torch.Tensor | None, shape: Sequence[int], dim: int) -> torch.Tensor | None:
    """A given result of this shape as a matrix, which must be a view of it."""
    if out is None or (len(shape) == 2 and dim == 0) or not isinstance(out, torch.Tensor):
        return out
    if tuple(out.shape) != tuple(shape):
        raise ArgumentError(f"out has shape {tuple(out.shape)}, but the result has {tuple(shape)}")
    moved = out.movedim(dim, 0)
    try:
        return moved.view(rows_of(out), out.shape[-1])
    except RuntimeError:
        raise ArgumentError(
            f"out has shape {tuple(out.shape)} and strides {out.stride()}, which no matrix of rows has: pass a tensor "
            f"that is contiguous with dimension {dim} first"
        ) from None


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A gradient in a layout that kernels read fast: autograd also makes expanded and oddly strided ones."""
    return tensor if 1 in tensor.stride() and 0 not in tensor.stride() else tensor.contiguous()


def by_columns(matrix: torch.Tensor) -> bool:
    """Is a matrix laid out by columns, as `w.t()` is? Its gradient is best laid out likewise."""
    return matrix.stride(0) == 1 and matrix.stride(1) >= matrix.shape[0] and matrix.shape[1] > 1


def saved_for_product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What the gradients of a @ b need: b for that of a, a for that of b. What is frozen needs nothing."""
    return a if b.requires_grad else None, b if a.requires_grad else None


def weight_gradient(rows: torch.Tensor, gradient: torch.Tensor, by_columns: bool) -> torch.Tensor:
    """rows.t() @ gradient, laid out by columns if the weight is."""
    return (gradient.t() @ rows).t() if by_columns else rows.t() @ gradient
