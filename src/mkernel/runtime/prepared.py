"""Prepared calls: what a repeated call need not decide again.

The first calls of an operator with arguments of some kind check them, agree with the other ranks, plan, allocate a
workspace, compile a kernel and build its arguments. All that depends only on the layouts of the tensors, the other
arguments, the group and the stream: the *key*. A later call with the same key takes what was decided, allocates its
results, and launches with the addresses of its tensors. Ranks compare their calls before each launch all the same.

A call is prepared when its key is seen for the second time, since preparing costs more than a call. Unusual calls have
no key, and take the long way every time: with tensors that are not plain, or in the symmetric heap; with launches that
are traced, or captured into a graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import forward_ad

from mkernel.runtime.operands import matmul_precision, span

if TYPE_CHECKING:
    from mkernel.runtime.group import Group
    from mkernel.runtime.world import Launch

CALLS_KEPT = 256  # prepared calls of a group
SEEN_KEPT = 1024  # keys that were seen once
ALIGNMENT = 16  # bytes: Triton and TMA distinguish addresses that are multiples of it from others
PLAIN = (torch.Tensor, torch.nn.Parameter)


class Prepared(NamedTuple):
    """A call that was made before. Its tensors are those that the caller passes, then those that it allocates."""

    call: Any  # what all ranks must call
    ready: Any  # the launcher's; None if the launch cannot be repeated
    generation: tuple[int, int]  # it is outdated unless this is the group's
    spans: list[int]  # bytes from the first to the last element of each tensor
    made: list[tuple[torch.Size, torch.dtype]]  # shapes of the tensors that each call allocates


class PreparedCalls:
    """The prepared calls of a group on this rank."""

    def __init__(self, group: Group):
        self._group: Group = weakref.proxy(group)
        self._calls: dict[Hashable, Prepared] = {}
        self._seen: set[Hashable] = set()

    def key_of(self, op: str, passed: Sequence[Any], *rest: Hashable) -> Hashable | None:
        """What the call of an operator depends on besides the addresses of its tensors; None if it is unusual.

        Args:
            passed: the tensors that the caller passes, or what he passes instead.
            rest: all other arguments.
        """
        group = self._group
        launcher = group._launcher
        if launcher.repeater is None or group.tracer is not None or launcher.capturing(group.world_rank):
            return None
        if forward_ad._current_level >= 0:
            return None
        gradients = torch.is_grad_enabled()
        parts: list[Hashable] = [op, launcher.stream_key(group.world_rank), rest]
        for tensor in passed:
            if tensor is None:
                parts.append(None)
                continue
            if type(tensor) not in PLAIN or (gradients and tensor.requires_grad):
                return None
            if tensor.layout is not torch.strided or tensor.is_neg():
                return None
            dtype = tensor.dtype
            if dtype is torch.float32:
                parts.append(matmul_precision(dtype))
            parts.append((tensor.shape, tensor.stride(), dtype, tensor.get_device(), tensor.data_ptr() % ALIGNMENT))
        return tuple(parts)

    def repeat(
        self, key: Hashable | None, passed: Sequence[torch.Tensor | None], out: int | None = None
    ) -> list[torch.Tensor] | None:
        """Repeat a call, and return the tensors that it allocated, in the order of `keep`. None, and nothing is
        launched, if the call is not prepared, or unusual: a tensor is in the symmetric heap, or overlaps the result.

        Args:
            key: of the call.
            passed: the tensors that were passed to `key_of`.
            out: which of them is a result that the caller passes.
        """
        if key is None:
            return None
        try:
            prepared = self._calls.get(key)
        except TypeError:  # an argument without a hash, which the checks refuse
            return None
        if prepared is None or prepared.ready is None:
            return None
        group = self._group
        if prepared.generation != group.generation:
            self._calls.clear()
            return None
        addresses = [tensor.data_ptr() if tensor is not None else 0 for tensor in passed]
        if group.heap.holds_one_of(addresses):
            return None
        if out is not None and passed[out] is not None and _overlaps(out, addresses, prepared.spans):
            return None
        empty, rank = group.world.memory.empty, group.world_rank
        made = [empty(rank, shape, dtype) for shape, dtype in prepared.made]
        for tensor in made:
            addresses.append(tensor.data_ptr())
        group._call, group._confirmed = prepared.call, False
        repeater = group._launcher.repeater
        assert repeater is not None
        repeater.launch(rank, group, prepared.ready, addresses)
        group._call, group._confirmed = None, False
        return made

    def keep(
        self, key: Hashable | None, launch: Launch, passed: Sequence[torch.Tensor | None], made: Sequence[torch.Tensor]
    ) -> None:
        """A call with this key was launched: prepare the next one. `made`: contiguous tensors that were allocated for
        it."""
        if key is None or key in self._calls:
            return
        if key not in self._seen:
            if len(self._seen) >= SEEN_KEPT:
                self._seen.clear()
            self._seen.add(key)
            return
        group = self._group
        made = [*made, *launch.scratch]
        tensors = [*passed, *made]
        if group.heap.holds_one_of([tensor.data_ptr() for tensor in tensors if tensor is not None]):
            return
        if len(self._calls) >= CALLS_KEPT:
            self._calls.clear()
        repeater = group._launcher.repeater
        assert repeater is not None  # the call has a key
        ready = repeater.prepare(group.world_rank, launch, tensors)
        spans = [span(tensor) if tensor is not None else 0 for tensor in tensors]
        shapes = [(tensor.shape, tensor.dtype) for tensor in made]
        self._calls[key] = Prepared(launch.call, ready, group.generation, spans, shapes)


def _overlaps(out: int, addresses: Sequence[int], spans: Sequence[int]) -> bool:
    """Does tensor number `out` overlap another one?"""
    start, end = addresses[out], addresses[out] + spans[out]
    return any(
        i != out and address < end and start < address + nbytes
        for i, (address, nbytes) in enumerate(zip(addresses, spans))
    )
