"""Prepared calls: decisions that a repeated call reuses.

The first calls of an operator check their arguments, agree with the other ranks, plan, allocate a workspace, compile a
kernel and build its arguments. All of this depends only on the layouts of the tensors, the other arguments, the group
and the stream: the *key*. A later call with the same key reuses these decisions: it allocates its results and launches
with the addresses of its tensors. Ranks still compare their calls before each launch.

A call is prepared when its key is seen for the second time, because preparing costs more than a call. Unusual calls
have no key and are never prepared: calls with tensors that are not plain or that are in the symmetric heap, and
launches that are traced or captured into a graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
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
    """A call that was made before. Its tensors are those that the caller passes, then those that it allocates: results,
    then scratch memory."""

    call: Any  # what all ranks must call
    ready: Any  # the launcher's; None if the launch cannot be repeated
    spans: list[int]  # bytes from the first to the last element of each tensor
    makers: list[Callable[[], torch.Tensor]]  # allocate the results and the scratch memory of a call
    results: int  # how many of these are results


class PreparedCalls:
    """The prepared calls of a group on this rank."""

    def __init__(self, group: Group):
        self._group = weakref.ref(group)
        self._rank, self._heap, self._memory = group.world_rank, group.heap, group.world.memory
        self._repeater = group._launcher.repeater
        self._calls: dict[Hashable, Prepared] = {}
        self._seen: set[Hashable] = set()

    def forget(self) -> None:
        """What was prepared may no longer hold: workspaces, or agreements between ranks, have changed."""
        self._calls.clear()

    def repeat(
        self, op: str, passed: Sequence[Any], rest: Hashable, out: int
    ) -> tuple[Hashable | None, list[torch.Tensor] | None]:
        """Repeat a call if it is prepared.

        Args:
            op: the operator.
            passed: the tensors that the caller passes, or what the caller passes instead.
            rest: all other arguments.
            out: which of the tensors is a result, if the caller passes one.

        Returns:
            The key: what the call depends on besides the addresses of its tensors; None if it is unusual. And the
            results that were allocated for the call, in the order of `keep`. These are None, and nothing is launched,
            if the call is not prepared, or if a tensor is in the symmetric heap, or overlaps the result.
        """
        group, repeater = self._group(), self._repeater
        assert group is not None  # it makes the call
        if repeater is None or group.tracer is not None or forward_ad._current_level >= 0:
            return None, None
        stream = repeater.stream_key(self._rank)
        if stream is None:
            return None, None
        parts: list[Hashable] = [op, stream, rest]
        addresses: list[int] = []
        for tensor in passed:
            if tensor is None:
                parts.append(None)
                addresses.append(0)
                continue
            if type(tensor) not in PLAIN or (tensor.requires_grad and torch.is_grad_enabled()):
                return None, None
            if tensor.layout is not torch.strided or tensor.is_neg():
                return None, None
            dtype, address = tensor.dtype, tensor.data_ptr()
            if dtype is torch.float32:
                parts.append(matmul_precision(dtype))
            parts.append((tensor.shape, tensor.stride(), dtype, tensor.get_device(), address % ALIGNMENT))
            addresses.append(address)
        key = tuple(parts)
        try:
            prepared = self._calls.get(key)
        except TypeError:  # an argument without a hash, which the checks refuse
            return None, None
        if prepared is None or prepared.ready is None or self._heap.holds_one_of(addresses):
            return key, None
        if addresses[out] and _overlaps(out, addresses, prepared.spans):
            return key, None
        made = []
        for make in prepared.makers:
            tensor = make()
            made.append(tensor)
            addresses.append(tensor.data_ptr())
        group._call, group._confirmed = prepared.call, False
        repeater.launch(self._rank, group, prepared.ready, addresses)
        group._call, group._confirmed = None, False
        return key, made[: prepared.results]

    def keep(
        self, key: Hashable | None, launch: Launch, passed: Sequence[torch.Tensor | None], made: Sequence[torch.Tensor]
    ) -> None:
        """A call with this key was launched: prepare the next one. `made`: its results that were allocated for it,
        contiguous."""
        if key is None or key in self._calls:
            return
        if key not in self._seen:
            if len(self._seen) >= SEEN_KEPT:
                self._seen.clear()
            self._seen.add(key)
            return
        allocated = [*made, *launch.scratch]
        tensors = [*passed, *allocated]
        if self._heap.holds_one_of([tensor.data_ptr() for tensor in tensors if tensor is not None]):
            return
        if len(self._calls) >= CALLS_KEPT:
            self._calls.clear()
        assert self._repeater is not None  # the call has a key
        ready = self._repeater.prepare(self._rank, launch, tensors)
        spans = [span(tensor) if tensor is not None else 0 for tensor in tensors]
        makers = [self._memory.maker(self._rank, tensor) for tensor in allocated]
        self._calls[key] = Prepared(launch.call, ready, spans, makers, len(made))


def _overlaps(out: int, addresses: Sequence[int], spans: Sequence[int]) -> bool:
    """Does tensor number `out` overlap another one?"""
    start, end = addresses[out], addresses[out] + spans[out]
    return any(
        i != out and address < end and start < address + nbytes
        for i, (address, nbytes) in enumerate(zip(addresses, spans))
    )
