"""`mk.ring_attention` behind PyTorch's context parallelism, `torch.distributed.tensor.experimental.context_parallel`.

    from mkernel.integrations import context_parallel

    context_parallel.enable()
    with torch.distributed.tensor.experimental.context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        loss = model(x)  # which calls F.scaled_dot_product_attention
        loss.backward()

PyTorch divides the buffers among the ranks and makes DTensors, sharded along the sequence, of what is passed to
`F.scaled_dot_product_attention`. It does the same for modules with its `_ContextParallel` style. `enable()` puts a
function in the place of `F.scaled_dot_product_attention` that passes the local tensors of such DTensors to one fused
kernel, and everything else to PyTorch. Its head-tail load balancer is the zigzag layout; without a load balancer, the
layout is contiguous.

`context_parallel` is a prototype in PyTorch. `_Torch` is all that knows of its private names.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias

from mkernel.integrations import calls
from mkernel.integrations.enabled import Enabled
from mkernel.ops.attention import ring_attention
from mkernel.ops.attention.run import HEAD_DIMS, is_scale
from mkernel.runtime.errors import MKernelError
from mkernel.runtime.operands import DTYPES

NAME = "scaled_dot_product_attention"
REPORTED = f"context_parallel.{NAME}"

_lock = threading.Lock()
_installed: Callable[..., Any] | None = None  # in the place of PyTorch's function, while it is enabled
_original: Callable[..., Any] | None = None


class _Torch:
    """What this needs of PyTorch beside its public functions."""

    MODULE = "torch.distributed.tensor.experimental._attention"

    def __init__(self) -> None:
        try:
            module = importlib.import_module(self.MODULE)
            tensors = importlib.import_module("torch.distributed.tensor")
            self._options = module._cp_options
            self._options.enable_load_balance  # noqa: B018
            self.DTensor, self.Shard = tensors.DTensor, tensors.Shard
            self._dispatcher = self.DTensor._op_dispatcher
            self._dispatcher._custom_op_handlers  # noqa: B018
        except (ImportError, AttributeError) as problem:
            raise MKernelError(
                f"PyTorch {torch.__version__} has no context parallelism that mkernel knows ({problem}): it is too old "
                f"or too new"
            ) from problem

    def is_active(self) -> bool:
        """Whether PyTorch now shards attention over a sequence. It then handles attention of DTensors by itself."""
        return torch.ops.aten._scaled_dot_product_flash_attention.default in self._dispatcher._custom_op_handlers

    @property
    def layout(self) -> str:
        """Which positions of the sequence a rank holds."""
        return "zigzag" if self._options.enable_load_balance else "contiguous"


def enable() -> Enabled:
    """Serve `F.scaled_dot_product_attention` in PyTorch's `context_parallel` with `mk.ring_attention`, on GPUs and on
    CPUs, with gradients.

    The group of the mesh's ranks is made at its first use, which is collective over them; `mk.init(process_group, ...)`
    makes it earlier, and with other settings. Masks, dropout, dtypes, head dimensions, numbers of heads and scales that
    `ring_attention` does not take go to PyTorch's implementation, which has no causal mask on CPUs.
    `mkernel.integrations.report()` counts both. Lengths that are not a multiple of the number of ranks are refused: a
    rank does not know those of the others, so it cannot leave such a call to PyTorch.

    To be called on all ranks, and not inside of `context_parallel`. Calling it again changes nothing. It can be undone
    with `disable()`, or used as a context manager: `with context_parallel.enable(): ...`.
    """
    global _installed, _original
    with _lock:
        if _installed is not None:
            return Enabled(None)
        pytorch = _Torch()
        if pytorch.is_active():
            raise MKernelError("context_parallel.enable() must be called before PyTorch's context_parallel is entered")
        calls.add(REPORTED)
        _original = getattr(F, NAME)
        _installed = functools.wraps(_original)(functools.partial(_attend, pytorch, _original))
        setattr(F, NAME, _installed)
    return Enabled(disable)


def disable() -> None:
    """Restore PyTorch's function. Harmless if it is in place."""
    global _installed, _original
    with _lock:
        if _installed is None:
            return
        if getattr(F, NAME) is not _installed:
            raise MKernelError(
                f"F.{NAME} was replaced after context_parallel.enable(): leave PyTorch's context_parallel, or whatever "
                f"replaced it, before context_parallel.disable()"
            )
        setattr(F, NAME, _original)
        _installed = _original = None


def enabled() -> bool:
    """Is mkernel behind `F.scaled_dot_product_attention` in PyTorch's `context_parallel`?"""
    return _installed is not None


def _attend(
    pytorch: _Torch, original: Callable[..., Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """`F.scaled_dot_product_attention`."""
    if isinstance(attn_mask, CausalBias):
        # It handles calls of what has this name in F. That is not PyTorch's function now, which would ignore the bias.
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        return CausalBias.__torch_function__(getattr(F, NAME), (CausalBias,), given, options)
    if not isinstance(query, pytorch.DTensor) or not pytorch.is_active():
        return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
    why = _why_not(pytorch, (query, key, value), attn_mask, dropout_p, is_causal, options)
    if why:
        calls.count_fallback(REPORTED, why)
        return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
    tensors: Any = (query, key, value)
    mesh, placements = query.device_mesh, query.placements
    query, key, value = (each.to_local() for each in tensors)
    result = ring_attention(
        query, key, value, is_causal=is_causal, layout=pytorch.layout, group=mesh, **options
    )  # fmt: skip
    calls.count_fused(REPORTED)
    return pytorch.DTensor.from_local(result, mesh, placements, run_check=False)


def _why_not(
    pytorch: _Torch, tensors: tuple[Any, ...], attn_mask: Any, dropout_p: float, is_causal: bool,
    options: dict[str, Any],
) -> str:  # fmt: skip
    """Why a call is left to PyTorch, or "". Only by what is the same on all ranks."""
    query, key, value = tensors
    sharded = (pytorch.Shard(2),)
    unknown = options.keys() - {"scale", "enable_gqa"}
    if unknown:
        return f"{', '.join(sorted(unknown))}: mkernel does not know it"
    if any(not isinstance(each, pytorch.DTensor) or each.placements != sharded or each.dim() != 4 for each in tensors):
        return "query, key and value are not all [batch, heads, positions, dim], sharded along the positions"
    if any(each.device_mesh != query.device_mesh for each in tensors):
        return "query, key and value are not on the same mesh"
    if attn_mask is not None:
        return "attn_mask: causal or none is fused"
    if dropout_p:
        return "dropout of weights"
    if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        return f"query is {query.dtype}: {', '.join(map(str, DTYPES))} are fused"
    if query.shape[3] not in HEAD_DIMS or value.shape[3] not in HEAD_DIMS:
        return f"a head dimension of {query.shape[3]}, and {value.shape[3]} of value: {HEAD_DIMS} are fused"
    if (key.shape[0], key.shape[3]) != (query.shape[0], query.shape[3]) or value.shape[0] != key.shape[0]:
        return "batches, or head dimensions of query and key, that differ"
    heads, kv_heads = query.shape[1], key.shape[1]
    grouped = options.get("enable_gqa", False) and kv_heads and heads % kv_heads == 0
    if value.shape[1] != kv_heads or not (heads == kv_heads or grouped):
        return "numbers of heads that differ, without enable_gqa or not as multiples"
    scale = options.get("scale")
    if scale is not None and not (is_scale(scale)):
        return f"scale={scale}: numbers greater than 0 are fused"
    if query.shape[2] != key.shape[2] and (is_causal or pytorch.layout == "zigzag"):
        return "a causal mask, or a load balancer, with different numbers of queries and keys"
    return ""
