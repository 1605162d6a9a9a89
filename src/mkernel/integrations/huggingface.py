"""`mk.ring_attention` as an attention implementation of Hugging Face transformers, for context parallelism.

    from mkernel.integrations import huggingface

    huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="mkernel")
    logits = model(**huggingface.part_of(input_ids)).logits  # of this rank's part of the sequence

Every rank has the whole model and a part of the sequence. All other layers work on a token at a time, so attention is
all that communicates.

transformers asks two things of an implementation: a function that attends, and one that makes the mask. Without the
second, transformers drops masks silently, so one is registered here. It makes none, or a `Window` for layers with a
sliding window, and refuses those that would be needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mkernel.ops.attention import ring_attention
from mkernel.ops.attention.run import check_layout
from mkernel.ops.attention.sequences import to_zigzag
from mkernel.ops.library import size_of
from mkernel.runtime.collective import collective, traceable
from mkernel.runtime.errors import ArgumentError, MKernelError
from mkernel.runtime.group import Group, current

# What a model may pass to its attention function that changes the result, and what it is.
UNSUPPORTED = {
    "s_aux": "attention sinks",
    "position_bias": "a bias of the scores",
    "head_mask": "a mask of heads",
    "cache": "a paged cache",
    "cu_seq_lens_q": "packed documents",
    "cu_seq_lens_k": "packed documents",
}


def register(
    name: str = "mkernel", *, layout: str = "contiguous", group: Any = None, check_positions: bool = True
) -> None:
    """Register `mk.ring_attention` with transformers: models made with `attn_implementation=name` use it.

    Each rank passes its part of the sequence and of the positions to the model; see `part_of`. Gradients work.
    Sliding windows of causal attention, and capped scores, are taken from the model. Refused, with the reason: other
    masks (padding, packed documents, chunks), dropout, decoding with a cache.

    Args:
        name: of the implementation. Register several under different names to use several layouts or groups.
        layout: which positions of the sequence a rank holds: "contiguous" or "zigzag", see `mk.ring_attention`.
        group: the group whose ranks share the sequence: a mk.Group, a ProcessGroup, a DeviceMesh of one dimension, or
            the name of a group; None is the current group at the time of the call.
        check_positions: refuse position_ids other than those of this rank's part. Models number positions from 0 on
            every rank if they are passed none, and rotary embeddings are then wrong. On a GPU, the check costs a
            synchronization for each forward pass of the model.
    """
    check_layout(layout)
    interfaces = _interfaces()
    attention = RingAttention(layout, group, check_positions)
    for interface, function in zip(interfaces, (attention.attend, attention.make_mask)):
        interface.register(name, function)


def _interfaces() -> tuple[Any, Any]:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as missing:
        raise MKernelError("this needs transformers 4.53 or newer: pip install 'mkernel-gpu[huggingface]'") from missing
    return AttentionInterface, AttentionMaskInterface


class Window(NamedTuple):
    """What layers with a sliding window are passed as their mask: how many positions a position sees, its own included.
    transformers and its models only pass masks on."""

    size: int


class RingAttention:
    """The two functions that `register` registers."""

    def __init__(self, layout: str, group: Any, check_positions: bool):
        self._layout, self._group, self._check_positions = layout, group, check_positions
        self._checked: weakref.ref[torch.Tensor] | None = None  # the positions that were checked last: all layers'

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | Window | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention, with the signature that transformers calls.

        Args:
            module: the layer; its `is_causal` counts if is_causal is None.
            query: [batch, heads, seq_local, dim], this rank's part of the sequence.
            key, value: [batch, kv_heads, seq_local, dim].
            attention_mask: what `make_mask` made; no other mask.
            scaling: the factor of the scores.
            dropout: must be 0.
            others: what the model passes besides: sliding_window and softcap are used, position_ids are checked.

        Returns:
            ([batch, seq_local, heads, dim], None). There are no weights of attention to return.
        """
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        call = (query, key, value, attention_mask, dropout, others)
        return attend(self, call, causal, scaling, group=self._group), None

    def make_mask(self, **arguments: Any) -> Window | None:
        """The mask of a model's forward pass, with the arguments that transformers passes."""
        return make_mask(group=self._group, **arguments)

    def refuse(self, call: tuple[Any, ...], group: Any) -> None:
        """Reject what `mk.ring_attention` does not support, or would not be passed."""
        query, key, _, attention_mask, dropout, others = call
        if attention_mask is not None and not isinstance(attention_mask, Window):
            raise ArgumentError(
                f"attention_mask must be None, got a mask of shape {tuple(attention_mask.shape)}: ring_attention takes "
                f"no mask but is_causal and sliding windows"
            )
        if dropout:
            raise ArgumentError(
                f"dropout must be 0, got {dropout}: call model.eval(), or set the model's attention_dropout to 0"
            )
        for name, what in UNSUPPORTED.items():
            if others.get(name) is not None:
                raise ArgumentError(f"{name} was passed, but ring_attention has no support for {what}")
        if others.get("output_attentions"):
            raise ArgumentError("output_attentions must be False: ring_attention computes no matrix of weights")
        if key.shape[2] != query.shape[2]:
            raise ArgumentError(
                f"key has {key.shape[2]} positions and query has {query.shape[2]}, as in decoding with a cache: "
                f"ring_attention is for whole sequences. Decode with another attn_implementation"
            )
        if isinstance(group, Group) and group.size > 1 and self._check_positions:
            self._refuse_positions(others.get("position_ids"), query.shape[2], group)

    def _refuse_positions(self, given: torch.Tensor | None, length: int, group: Group) -> None:
        if given is None or given.dim() != 2 or (self._checked is not None and self._checked() is given):
            return
        if given.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # the values cannot be read now
        expected = positions_of(length, self._layout, group).to(given.device, given.dtype).expand_as(given)
        if not torch.equal(given, expected):
            row, token = (given != expected).nonzero()[0].tolist()
            raise ArgumentError(
                f"position_ids[{row}, {token}] is {given[row, token]}, but in the {self._layout} layout token {token} "
                f"of rank {group.rank} is at position {expected[row, token]} of the whole sequence: pass the model "
                f"what huggingface.part_of returns, or register with check_positions=False"
            )
        self._checked = weakref.ref(given)


@traceable()
def attend(
    attention: RingAttention, call: tuple[Any, ...], causal: bool, scaling: float | None, *, group: Any = None
) -> torch.Tensor:
    attention.refuse(call, group)
    query, key, value, *_ = call
    window = _window_of(call[3], call[-1].get("sliding_window"), causal, size_of(group) * key.shape[2])
    result = ring_attention(
        query, key, value, is_causal=causal, scale=scaling, enable_gqa=True,
        layout=attention._layout, softcap=call[-1].get("softcap") or 0.0, window_size=window, group=group,
    )  # fmt: skip
    return result.transpose(1, 2).contiguous()


def _window_of(mask: Window | None, given: int | None, causal: bool, length: int) -> tuple[int, int] | None:
    """The window of a call over so many positions, from its mask and its sliding_window; None if there is none."""
    if mask is not None and given is not None and mask.size != given:
        raise ArgumentError(f"sliding_window is {given}, but the layer's mask is for a window of {mask.size}")
    size = given if mask is None else mask.size
    if size is None or size >= length:
        return None
    if size < 1:
        raise ArgumentError(f"sliding_window must be at least 1, or None, got {size}")
    if not causal:
        raise ArgumentError(
            f"sliding_window is {size}, but the sequence has {length} positions: windows are supported in causal "
            f"attention only"
        )
    return size - 1, 0


@collective
def make_mask(
    *,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    mask_function: Callable[..., torch.Tensor] | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    group: Any = None,
    **others: Any,
) -> Window | None:
    """Nothing, or the window of a causal mask. Refuse what is more than causal, full or a sliding window. transformers
    says that a mask is one of these, by allowing to skip it where the sequence has fewer positions than `local_size`:
    it does not allow that for packed documents or images. `_is_sliding_window` only tells which of these it is.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ArgumentError(
            "attention_mask marks padding, which ring_attention does not support: pass sequences of equal length"
        )
    if not (allow_is_causal_skip or allow_is_bidirectional_skip):
        raise ArgumentError(
            "the model needs a mask that is neither causal nor full, and ring_attention takes none. transformers also "
            "makes one if position_ids jump, which it takes for packed documents: if they jump because of the zigzag "
            "layout, pass an attention_mask of ones, as huggingface.part_of does"
        )
    length = group.size * kv_length
    if local_size is None or local_size >= length:
        return None
    if not _is_sliding_window(mask_function, local_size, length):
        raise ArgumentError(
            f"the model's mask is local to {local_size} positions, and the sequence has {length}: of such masks, "
            f"ring_attention supports causal sliding windows, but not chunks or windows to both sides"
        )
    return Window(local_size)


def _is_sliding_window(mask_function: Callable[..., Any] | None, size: int, length: int) -> bool:
    """Whether a mask is a causal sliding window, in a sequence of so many positions. Chunks, for one, have a size, too;
    so look at what positions see: the edges of the window of every row, and all keys of the last rows and of one in the
    middle. This is of the first sequence and head; that others, and keys inside the windows of other rows, are no
    different is up to transformers (see `make_mask`)."""
    if mask_function is None:
        return False
    at = torch.arange(length, device="cpu")
    edges = [(at, (at + offset).clamp(0, length - 1)) for offset in (1, 0, 1 - size, -size)]
    whole_rows = [(torch.full_like(at, row), at) for row in (length // 2, length - 2, length - 1)]
    rows, keys = (torch.cat(tensors) for tensors in zip(*edges, *whole_rows))
    batch = torch.zeros_like(rows)
    try:
        seen = mask_function(batch, batch, rows, keys)
        return torch.equal(seen.cpu(), (keys <= rows) & (keys > rows - size))
    except Exception:  # it depends on more than positions, or is no function of tensors
        return False


def positions_of(length: int, layout: str = "contiguous", group: Any = None) -> torch.Tensor:
    """Where the `length` tokens of this rank lie in the whole sequence."""
    check_layout(layout)
    group = current(group)
    if layout == "zigzag":
        return to_zigzag(torch.arange(group.size * length), dim=0, group=group)
    return torch.arange(group.rank * length, (group.rank + 1) * length)


def part_of(input_ids: torch.Tensor, *, layout: str = "contiguous", group: Any = None) -> dict[str, torch.Tensor]:
    """What a model is to be called with, for this rank's part of sequences that every rank has whole.

    Args:
        input_ids: [batch, length], the whole sequences. length must be divisible by the number of ranks.
        layout, group: as for `register`.

    Returns:
        input_ids and position_ids of this rank's part, and an attention_mask of ones: [batch, length/world]. Take the
        part of labels or of other inputs in the same way, or with `mk.to_zigzag`.
    """
    check_layout(layout)
    group = current(group)
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2:
        got = f"shape {tuple(input_ids.shape)}" if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise ArgumentError(f"input_ids must be a tensor [batch, length], got {got}")
    length = input_ids.shape[1]
    if length % group.size:
        raise ArgumentError(
            f"input_ids has {length} positions, which is not a multiple of {group.size}: all ranks have as many"
        )
    positions = positions_of(length // group.size, layout, group).to(input_ids.device)
    part = input_ids[:, positions]
    return dict(
        input_ids=part, position_ids=positions.expand_as(part).contiguous(), attention_mask=torch.ones_like(part)
    )
