"""mkernel behind `torch.ops.symm_mem.fused_all_gather_matmul` and `fused_matmul_reduce_scatter`, and the same for fp8
(symm_mem_scaled.py).

Inductor's async tensor parallelism (`torch._inductor.config._micro_pipeline_tp`), TorchTitan and vLLM emit these
operators. `enable()` registers an implementation of each over that of PyTorch, for tensors on GPUs and, where PyTorch
has none, on CPUs. Results have the values, shapes and strides that PyTorch's have: Inductor relies on the strides.

- All-gather of any dimension but the last: that dimension is moved to the front and the others are flattened, which
  makes a matrix of A. `all_gather_matmul` multiplies it by the largest B. If there are more, it also returns the
  gathered rows, which are then multiplied by the others.
- All-gather of the last dimension: left to PyTorch. Each rank's columns of A are multiplied by other rows of B, which
  `all_gather_matmul` does not do.
- Reduce-scatter of any dimension but the last: a matrix in the same way, and `matmul_reduce_scatter`.
- Reduce-scatter of the last dimension: the same of the transposed product, B^T @ A^T.

All ranks of a group must choose alike between mkernel and PyTorch, so only what is the same on all of them decides: the
number of dimensions, dtypes, the dimension, the reduction, the type of the device. What is wrong on one rank only, such
as a B with too few rows, is not left to PyTorch: mkernel refuses the call on all ranks.

As with PyTorch's implementations, gradients are up to the caller: compiled graphs call the operators below autograd,
and eager programs from autograd functions.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mkernel.integrations import calls
from mkernel.integrations.enabled import Enabled
from mkernel.ops.all_gather_matmul import all_gather_matmul
from mkernel.ops.reduce import matmul_reduce_scatter
from mkernel.runtime.errors import ArgumentError, MKernelError
from mkernel.runtime.group import Group, named
from mkernel.runtime.operands import DTYPES

GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
KEYS = ("CUDA", "CPU")
TORCH = "torch.distributed._symmetric_memory"  # it has PyTorch's implementations of both, with an underscore

_lock = threading.Lock()
_library: torch.library.Library | None = None  # with our implementations, while they are enabled

SCALED = ("fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter")  # symm_mem_scaled.py has them

for _name in (GATHER, SCATTER, *SCALED):
    calls.add(f"symm_mem.{_name}")


def enable() -> Enabled:
    """Serve `torch.ops.symm_mem.fused_all_gather_matmul` and `fused_matmul_reduce_scatter` with mkernel, and for fp8
    `fused_all_gather_scaled_matmul` and `fused_scaled_matmul_reduce_scatter`.

    The operators then take the names of process groups of any number of nodes, and those of mkernel's groups. The group
    of a process group is made at its first use, which is collective over its ranks; `mk.init(process_group, ...)` makes
    it earlier, and with other settings. Calls that mkernel has no kernel for go to PyTorch's implementation: on CPUs,
    that of its collectives. `mkernel.integrations.report()` counts both.

    To be called on all ranks before the first use. Calling it again changes nothing. It can be undone with `disable()`,
    or used as a context manager: `with symm_mem.enable(): ...`.
    """
    global _library
    with _lock:
        if _library is not None:
            return Enabled(None)
        module = importlib.import_module(TORCH)  # defines the operators
        for name in (GATHER, SCATTER, *SCALED):
            if not all(hasattr(module, each) for each in (f"_{name}", f"_{name}_fallback")):
                raise MKernelError(f"PyTorch {torch.__version__} has no {TORCH}._{name}: it is too old or too new")
        scaled = importlib.import_module("mkernel.integrations.symm_mem_scaled")
        library = torch.library.Library("symm_mem", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for key in KEYS:
                library.impl(GATHER, fused_all_gather_matmul, key, allow_override=True)
                library.impl(SCATTER, fused_matmul_reduce_scatter, key, allow_override=True)
                for name in SCALED:
                    library.impl(name, getattr(scaled, name), key, allow_override=True)
        _library = library
    return Enabled(disable)


def disable() -> None:
    """Restore PyTorch's implementations. Harmless if they are in place."""
    global _library
    with _lock:
        if _library is not None:
            _library._destroy()
            _library = None


def enabled() -> bool:
    """Is mkernel behind the operators?"""
    return _library is not None


def fused_all_gather_matmul(
    A_shard: torch.Tensor, Bs: list[torch.Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The all-gather of A along a dimension, if it is asked for, and its products with all Bs."""
    check_dimension("gather_dim", gather_dim, "A_shard", A_shard)
    why = _why_not(A_shard, group_name)
    if not Bs:
        why = "Bs is empty: there is nothing to multiply"
    elif gather_dim == A_shard.dim() - 1:
        why = "gather_dim is the last dimension of A: each rank's columns meet other rows of B"
    if why:
        return fall_back(GATHER, why, A_shard.device)(A_shard, Bs, gather_dim, group_name, return_A=return_A)
    group = named(group_name)
    rows, leading = as_rows(A_shard, gather_dim)
    largest = max(range(len(Bs)), key=lambda index: Bs[index].numel())
    gathered: torch.Tensor | None = None
    with _without_autocast(A_shard.device):
        if return_A or len(Bs) > 1:
            product, gathered = all_gather_matmul(rows, Bs[largest], group=group, return_gathered=True)
        else:
            product = all_gather_matmul(rows, Bs[largest], group=group)
        products = [product if index == largest else torch.mm(gathered, B) for index, B in enumerate(Bs)]  # type: ignore[arg-type]
    calls.count_fused(f"symm_mem.{GATHER}")
    leading[0] *= group.size
    results = [from_rows(product, leading, gather_dim) for product in products]
    return from_rows(gathered, leading, gather_dim) if return_A and gathered is not None else None, results


def fused_matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    """The sum, or the average, of all ranks' A @ B, of which this rank gets its part of a dimension."""
    check_dimension("scatter_dim", scatter_dim, "A", A)
    why = _why_not(A, group_name)
    if reduce_op not in ("sum", "avg"):
        why = f"reduce_op is {reduce_op!r}: sum and avg are fused"
    elif reduce_op == "avg" and A.dtype == torch.float16:
        why = "the average of torch.float16: the sum before it can overflow"
    elif B.dim() != 2:
        why = f"B has {B.dim()} dimensions: it must be a matrix"
    if why:
        return fall_back(SCATTER, why, A.device)(A, B, reduce_op, scatter_dim, group_name)
    group = named(group_name)
    _check_divisible(group, A, B, scatter_dim)
    with _without_autocast(A.device):
        if scatter_dim == A.dim() - 1:
            columns = matmul_reduce_scatter(B.t(), A.flatten(0, -2).t(), group=group)
            result = columns.t().reshape(*A.shape[:-1], columns.shape[0])
        else:
            rows, leading = as_rows(A, scatter_dim)
            leading[0] //= group.size
            result = from_rows(matmul_reduce_scatter(rows, B, group=group), leading, scatter_dim)
        if reduce_op == "avg":
            result = result.div_(group.size)
    calls.count_fused(f"symm_mem.{SCATTER}")
    return result.contiguous()


def _why_not(tensor: torch.Tensor, group_name: str) -> str:
    """Why mkernel has no kernel for a call with this A, or "". Only by what is the same on all ranks."""
    if tensor.dtype not in DTYPES:
        return f"A is {tensor.dtype}: {', '.join(map(str, DTYPES))} are fused"
    return why_not_here(tensor, group_name)


def why_not_here(tensor: torch.Tensor, group_name: str) -> str:
    """Why mkernel multiplies no tensor that is where this A is, or ""."""
    place = named(group_name).device.type
    if tensor.device.type != place:
        return f"A is on a {tensor.device.type} device, and the group is on {place}"
    return ""


def fall_back(name: str, why: str, device: torch.device) -> Callable[..., Any]:
    """PyTorch's implementation of an operator. Counts the call."""
    calls.count_fallback(f"symm_mem.{name}", why)
    module = importlib.import_module(TORCH)
    return getattr(module, f"_{name}" if device.type == "cuda" else f"_{name}_fallback")


def check_dimension(argument: str, dimension: int, name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() < 2:
        raise ArgumentError(f"{name} must have 2 dimensions or more, got shape {tuple(tensor.shape)}")
    if not 0 <= dimension < tensor.dim():
        raise ArgumentError(
            f"{argument} must be a dimension of {name}, 0 to {tensor.dim() - 1}, got {dimension}; {name} has shape "
            f"{tuple(tensor.shape)}"
        )


def _check_divisible(group: Group, A: torch.Tensor, B: torch.Tensor, dimension: int) -> None:
    size = B.shape[1] if dimension == A.dim() - 1 else A.shape[dimension]
    if size % group.size:
        raise ArgumentError(
            f"dimension {dimension} of A @ B has size {size}: reduce-scatter needs a multiple of the group's "
            f"{group.size} ranks"
        )


def as_rows(tensor: torch.Tensor, dimension: int) -> tuple[torch.Tensor, list[int]]:
    """The tensor as a matrix with this dimension first, and the sizes of which its rows are made. No copy if the tensor
    lies in memory in this order, as Inductor arranges it."""
    moved = tensor.movedim(dimension, 0)
    return moved.flatten(0, -2), list(moved.shape[:-1])


def from_rows(matrix: torch.Tensor, leading: list[int], dimension: int) -> torch.Tensor:
    """What `as_rows` would turn into this matrix."""
    return matrix.view(*leading, matrix.shape[1]).movedim(0, dimension)


@contextlib.contextmanager
def _without_autocast(device: torch.device) -> Iterator[None]:
    """The dtypes of results are those of the operands: these operators are below autocast."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield
