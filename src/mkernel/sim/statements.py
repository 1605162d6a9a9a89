"""What Triton's compiler makes of Python's statements: assignments, conditions, loops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mkernel.sim.dtypes import INT1, INTEGER, KernelError, describe, info
from mkernel.sim.tensors import Tensor, _promoted, to_tensor


def assigned(value: Any) -> Any:
    """What a variable holds after `x = value`: numbers become tensors, in tuples, too."""
    if type(value) is Tensor or value is None:
        return value
    if isinstance(value, (bool, int, float)):
        return to_tensor(value)
    if isinstance(value, tuple):
        parts = [assigned(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def shown(value: Any) -> Any:
    """A part of an f-string."""
    if isinstance(value, Tensor):
        raise KernelError(f"an f-string in a kernel can show constants only, got {describe(value)}")
    return value


def chosen(condition: Any, value: Any) -> Any:
    """The value of `a if condition else b`."""
    return to_tensor(value) if type(condition) is Tensor else value


def negated(value: Any) -> Any:
    """`not value`"""
    return ~_truth(value) if type(value) is Tensor else not value


def decides(value: Any, conjunction: bool) -> bool:
    """Does this operand of `and` (or of `or`) settle the result, so that what follows is not evaluated?"""
    return type(value) is not Tensor and bool(value) is not conjunction


def combined(left: Any, right: Any, conjunction: bool) -> Any:
    """`left and right`, or `left or right`, where `left` did not settle it."""
    if type(left) is not Tensor:
        return right
    if type(right) is not Tensor:
        return right if decides(right, conjunction) else left
    return _truth(left) & _truth(right) if conjunction else _truth(left) | _truth(right)


def _truth(value: Tensor) -> Tensor:
    if value.dtype is not INT1:
        raise KernelError(f"`and`, `or` and `not` are for conditions, got {describe(value)}: compare it (x != 0)")
    return value


def counted(first: Any, end: Any = None, step: Any = None, **hints: Any) -> Iterator[Tensor]:
    """`range` and `tl.range`: the loop variable is a tensor."""
    low, high = (0, first) if end is None else (first, end)
    bounds = [to_tensor(bound) for bound in (low, high, 1 if step is None else step)]
    for bound in bounds:
        if bound.shape or info(bound.dtype).kind > INTEGER:
            raise KernelError(f"the bounds and the step of a loop must be integer scalars, got {describe(bound)}")
    dtype = _promoted(_promoted(bounds[0].dtype, bounds[1].dtype), bounds[2].dtype)
    make = info(dtype).data.type
    start, stop, stride = (int(bound._data) for bound in bounds)
    if stride == 0:
        raise KernelError("the step of a loop must not be 0")
    for number in range(start, stop, stride):
        yield Tensor(make(number), dtype)


def unrolled(first: Any, end: Any = None, step: Any = None) -> range:
    """`tl.static_range`: the loop variable is a constant."""
    for bound in (first, end, step):
        if bound is not None and not isinstance(bound, int):
            raise KernelError(f"the bounds of tl.static_range must be constants, got {describe(bound)}")
    return range(first) if end is None else range(first, end, step or 1)
