"""The host side of ring_attention: a call, its checks, and its launch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from mkernel.ops.attention import protocol
from mkernel.ops.attention.launch import launch
from mkernel.ops.attention.plan import plan, tiles_of
from mkernel.ops.attention.sequences import Counts, Documents, Pattern, Scoring, pattern_of
from mkernel.runtime import planning
from mkernel.runtime.collective import collective
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import PLANS_KEPT, Group
from mkernel.runtime.matmul import check_out, check_tensor
from mkernel.runtime.operands import DTYPES, matmul_precision
from mkernel.runtime.operands import layout as layout_of
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

HEAD_DIMS = (64, 96, 128, 192, 256)
MLA_DIM = 192  # of queries and keys with a part for positions; values have 128 then
LAYOUTS = ("contiguous", "zigzag")
INPUT_LAYOUTS = {"bhsd": "[batch, heads, seq_local, dim]", "bshd": "[batch, seq_local, heads, dim]"}
PACKED_PLANS_KEPT = 32  # the plan of a packed sequence holds 16 bytes of device memory per row
TUNABLE = Tunable(
    "ring_attention", agreed=("batch", "heads", "kv_heads", "length", "dim", "causal", "zigzag"), own=(), shared=()
)


@collective
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    enable_gqa: bool = False,
    layout: str = "contiguous",
    cu_seqlens: Documents = None,
    window_size: tuple[int, int] | None = None,
    seq_lens: Counts = None,
    query_lens: Counts = None,
    return_lse: bool = False,
    group: Any,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result, and the log-sum-exp if it is wanted: `mk.ring_attention`, without gradients."""
    window_size = tuple(window_size) if isinstance(window_size, list) else window_size  # the key must have a hash
    passed, call_key = (query, key, value, out), None
    if cu_seqlens is None and seq_lens is None and query_lens is None:  # these may change
        options = _options(is_causal, scale, softcap, enable_gqa, layout, window_size, return_lse, config)
        call_key, made = group.prepared.repeat("ring_attention", passed, options, out=3)
        if made is not None:
            return made[0] if out is None else out, made[-1] if return_lse else None
    scoring = Scoring(scale, softcap)
    planning.check_flag("return_lse", return_lse)
    check(group, query, key, value, out, layout, enable_gqa, scoring, config)
    pattern = pattern_of(group, query, key, is_causal, layout, cu_seqlens, window_size, (seq_lens, query_lens))
    config = choose(TUNABLE, group, query, key, pattern, config, value)
    tiles = tiles_of(group, query, key, value, config)
    group.agree(
        "ring_attention", **pattern.shapes(query, key), value_dim=value.shape[3], dtype=query.dtype,
        is_causal=pattern.is_causal, layout=layout, cu_seqlens=pattern.documents, window_size=pattern.window,
        tile_n=tiles.tile_n, chunk_rows=tiles.chunk_rows, steps=tiles.steps,
    )  # fmt: skip
    empty, rank = group.world.memory.empty, group.world_rank
    result = empty(rank, result_shape(query, value), query.dtype) if out is None else out
    lse = empty(rank, query.shape[:3], torch.float32) if return_lse else None
    if not pattern.is_empty(query, key):
        given = (query, key, value, result, lse)
        query, key, value, stored, stored_lse = (with_a_row(group, tensor) for tensor in given)
        launch = prepare(group, query, key, value, stored, stored_lse, pattern, scoring, config)
        made = [result] * (out is None) + [lse] * return_lse
        group.launch(launch, call_key, passed, made)
    else:
        group.confirm()
    return result, lse


def _options(is_causal: bool, scale: float | None, softcap: float, *rest: Hashable) -> Hashable:
    """What a call depends on besides its tensors. Numbers of different types are equal, but some are refused."""
    return bool(is_causal), type(scale), scale, type(softcap), softcap, rest


def repeat(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: Group,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    enable_gqa: bool = False,
    layout: str = "contiguous",
    window_size: tuple[int, int] | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor | None:
    """The result of a prepared call of `mk.ring_attention`; None for others."""
    options = _options(is_causal, scale, softcap, enable_gqa, layout, window_size, False, config)
    _, made = group.prepared.repeat("ring_attention", (query, key, value, out), options, out=3)
    return None if made is None else made[0] if out is None else out


def refuse_mask_and_dropout(attn_mask: Any, dropout_p: Any) -> None:
    """Reject arguments of F.scaled_dot_product_attention that ring_attention does not support."""
    if attn_mask is not None:
        raise ArgumentError(
            "attn_mask must be None: a rank holds only its part of the sequence. Describe the mask by is_causal, "
            "cu_seqlens (packed documents) and window_size"
        )
    if dropout_p:
        raise ArgumentError(f"dropout_p must be 0, got {dropout_p!r}: ring_attention has no dropout of weights")


def check_input_layout(input_layout: Any) -> None:
    if input_layout not in tuple(INPUT_LAYOUTS):
        raise ArgumentError(f"input_layout must be one of {', '.join(map(repr, INPUT_LAYOUTS))}; got {input_layout!r}")


def heads_first(input_layout: str, *tensors: torch.Tensor | None) -> Any:
    """query, key, value and out as [batch, heads, seq_local, dim], if input_layout is what they are."""
    check_input_layout(input_layout)
    if input_layout == "bhsd":
        return tensors
    for name, tensor in zip(("query", "key", "value", "out"), tensors):
        if isinstance(tensor, torch.Tensor) and tensor.dim() != 4:
            raise ArgumentError(f"{name} must be {INPUT_LAYOUTS[input_layout]}, got shape {tuple(tensor.shape)}")
    query, _, value, out = tensors
    if isinstance(query, torch.Tensor) and isinstance(value, torch.Tensor) and isinstance(out, torch.Tensor):
        shape = result_shape(query, value)
        if out.shape != shape:  # `check` would name it in another order of dimensions than the caller's
            raise ArgumentError(f"out has shape {tuple(out.shape)}, but the result has {shape}")
    return [tensor.transpose(1, 2) if isinstance(tensor, torch.Tensor) else tensor for tensor in tensors]


def check(
    group: Group, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor | None,
    layout: str, enable_gqa: bool, scoring: Scoring, config: Config | None,
) -> None:  # fmt: skip
    """Reject invalid arguments. The error names the argument and the rule."""
    check_config(config, "ring_attention")
    given = dict(query=query, key=key, value=value)
    check_heads("ring_attention", group, given | ({} if out is None else dict(out=out)))
    check_options(group, query, key, layout, enable_gqa, scoring)
    if out is not None:
        check_out(out, result_shape(query, value), "as query, with value's dim", query.dtype, given)


def with_a_row(group: Group, tensor: torch.Tensor | None) -> Any:
    """A tensor, or a row of zeros if it has none: the kernels of a rank without positions need addresses, too."""
    if tensor is None or tensor.shape[2]:
        return tensor
    shape = (*tensor.shape[:2], 1, *tensor.shape[3:])
    return group.world.memory.empty(group.world_rank, shape, tensor.dtype).zero_()


def result_shape(query: torch.Tensor, value: torch.Tensor) -> tuple[int, ...]:
    """[batch, heads, queries of this rank, dim of value]"""
    return (*query.shape[:3], value.shape[3])


def are_alike(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether there are as many queries as keys, and values have as many columns as keys."""
    return query.shape[2] == key.shape[2] and value.shape[3] == key.shape[3] != MLA_DIM


def check_config(config: Config | None, op: str) -> None:
    """Reject fields that the operator does not use."""
    planning.check_given(config)
    for name in ("tile_k", "group_m", "join_tiles", *(() if op == "ring_attention" else ("team_ctas",))):
        if config is not None and getattr(config, name) is not None:
            raise ArgumentError(f"config.{name} does not apply to {op}: leave it unset")
    if config is not None and config.steps == 0:
        raise ArgumentError("config.steps must be at least 1; got 0")


def check_heads(op: str, group: Group, given: Mapping[str, Any]) -> None:
    """Reject invalid [batch, heads, seq_local, dim] tensors, among them query, key and value."""
    query = given["query"]
    for name, tensor in given.items():
        if isinstance(tensor, torch.Tensor) and tensor.dim() != 4:
            raise ArgumentError(f"{name} must be [batch, heads, seq_local, dim], got shape {tuple(tensor.shape)}")
        check_tensor(op, group, name, tensor, dimensions=4)
    for name, tensor in given.items():
        if query.dtype not in DTYPES:
            raise ArgumentError(f"query has dtype {query.dtype}; supported: {', '.join(str(d) for d in DTYPES)}")
        if tensor.dtype != query.dtype:
            raise ArgumentError(f"{name} has dtype {tensor.dtype}, but query has {query.dtype}: they must be the same")
    key, value = given["key"], given["value"]
    _check_dim("query", query.shape[3])
    if key.shape[:3] != value.shape[:3]:
        raise ArgumentError(
            f"key is {tuple(key.shape)} and value is {tuple(value.shape)}: all dimensions but the last must be the same"
        )
    _check_dim("value", value.shape[3])
    if (key.shape[0], key.shape[3]) != (query.shape[0], query.shape[3]):
        raise ArgumentError(
            f"key is {tuple(key.shape)} and query is {tuple(query.shape)}: batch and dim must be the same"
        )


def _check_dim(name: str, dim: int) -> None:
    if dim not in HEAD_DIMS:
        raise ArgumentError(
            f"{name} has head dimension {dim}; supported head dimensions: {', '.join(map(str, HEAD_DIMS))}. "
            f"Pad query, key and value with zeros to one of these, and pass scale={dim}**-0.5"
        )


def check_options(
    group: Group, query: torch.Tensor, key: torch.Tensor, layout: str, enable_gqa: bool, scoring: Scoring
) -> None:
    """Reject invalid options of a call with valid query and key."""
    heads, length = query.shape[1], key.shape[2]
    if key.shape[1] != heads:
        if not enable_gqa:
            raise ArgumentError(
                f"query has {heads} heads and key has {key.shape[1]}: these must be the same, unless enable_gqa=True"
            )
        if key.shape[1] == 0 or heads % key.shape[1]:
            raise ArgumentError(f"query has {heads} heads, which is not a multiple of key's {key.shape[1]}")
    check_layout(layout)
    if layout == "zigzag" and query.shape[2] != length:
        raise ArgumentError(
            f"query has {query.shape[2]} positions on each rank and key has {length}: layout='zigzag' needs as many "
            f"queries as keys; layout='contiguous' does not"
        )
    check_scoring(scoring)


def check_layout(layout: Any) -> None:
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}; got {layout!r}")


def check_scoring(scoring: Scoring) -> None:
    scale, softcap = scoring
    if scale is not None and not is_scale(scale):
        raise ArgumentError(
            f"scale must be a number greater than 0 and finite; got {scale!r}. For a negative scale, negate query"
        )
    if not (
        isinstance(softcap, (int, float)) and not isinstance(softcap, bool) and (softcap == 0 or 1e-3 <= softcap <= 1e6)
    ):
        raise ArgumentError(f"softcap must be 0, which is off, or a number from 1e-3 to 1e6; got {softcap!r}")


def is_scale(scale: Any) -> bool:
    """Whether attention takes this as the factor of scores."""
    return isinstance(scale, (int, float)) and not isinstance(scale, bool) and 1e-30 < scale < 1e30


def choose(
    tunable: Tunable, group: Group, query: torch.Tensor, key: torch.Tensor, pattern: Pattern,
    given: Config | None, value: torch.Tensor | None = None,
) -> Config | None:  # fmt: skip
    """The configuration of a call: the same on every rank, because it depends only on arguments that are the same on
    every rank. Document boundaries vary too much for tuning, so packed sequences use no tuned configuration. Nor do
    calls with windows, and calls whose query, key and value, or whose ranks, differ in positions or columns."""
    if pattern.has_spans or not are_alike(query, key, key if value is None else value):
        return given
    batch, heads, length, dim = query.shape
    return tunable.choose(
        group, query.dtype, given, batch=batch, heads=heads, kv_heads=key.shape[1], length=length, dim=dim,
        causal=pattern.is_causal, zigzag=pattern.layout == "zigzag",
    )  # fmt: skip


def prepare(
    group: Group, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None, pattern: Pattern, scoring: Scoring, config: Config | None,
) -> Launch:  # fmt: skip
    """The launch of a call with valid arguments. Collective if the workspace must grow."""
    config = choose(TUNABLE, group, query, key, pattern, config, value)
    layouts = tuple(layout_of(tensor) for tensor in (query, key, value, out))
    plan_key = (
        "ring_attention", layouts, pattern.is_causal, pattern.layout, scoring.softcap > 0, config,
        matmul_precision(query.dtype),
    )  # fmt: skip
    decided = group.planned(
        # documents may change with every call, and such a plan owns device memory: use it on one stream only
        (*plan_key, pattern, group.world.launcher.stream_key(group.world_rank) if pattern.has_spans else None),
        lambda: plan(group, query, key, value, out, pattern, scoring.softcap, config),
        kept=PACKED_PLANS_KEPT if pattern.has_spans else PLANS_KEPT,
    )
    group.keep_if_captured(decided)
    memory = protocol.layout(decided, query.dtype)
    # to the kernel, documents and windows are data; and a plan with documents must not live as long as the binary
    variant = (plan_key, pattern.binary, decided.config, lse is not None)
    return launch(group, decided, memory, query, key, value, out, lse, scoring, variant)
