"""Traced launches: the buffer for their events, and how to read it (see lang/trace.py).

A traced rank of a group has a Tracer. Every launch of the group passes through `traced`, which replaces its context
table by one that also has the address of the buffer. The new table is a tensor of unsigned words, and that type makes
Triton compile the variant of the kernel that writes events. The launches of a rank run one after the other, so the
events of each lane are in the order of the launches: the first launch in the lane of a CTA is the first one with enough
CTAs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mkernel.lang import trace as words
from mkernel.runtime.errors import ArgumentError

if TYPE_CHECKING:
    from mkernel.runtime.group import Group
    from mkernel.runtime.world import Launch

EVENTS = 4096  # capacity of a lane, by default
WORDS = words.EVENT_WORDS.value
LANES = words.LANES.value


@dataclass(frozen=True)
class Lane:
    """The events of one lane of a CTA, in the order of their ends: rows of (start, end, what, index)."""

    cta: int
    lane: int
    events: np.ndarray
    lost: int  # events that did not fit


class Tracer:
    """Traces one rank of a group."""

    def __init__(self, group: Group, events: int):
        self._world, self._rank = group.world, group.world_rank
        self._ctas = self._world.launcher.ctas(self._rank)
        self._lane_words = (1 + events) * WORDS
        memory = self._world.memory.allocate(self._rank, self._ctas * LANES * self._lane_words * 8)
        self._buffer = memory.view(torch.int64)
        # by address; plain tables are kept so that their addresses are not reused
        self._contexts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.launches: list[tuple[str, int]] = []  # operator and number of CTAs, in order

    def traced(self, launch: Launch) -> Launch:
        """The same launch, with a kernel that writes events."""
        if self._world.launcher.capturing(self._rank):
            raise ArgumentError(
                f"{launch.op}: a traced call cannot be captured into a graph, whose replays would go on writing events "
                f"after the trace has ended; trace calls that are not captured"
            )
        if launch.grid > self._ctas:
            raise ArgumentError(f"{launch.op}: {launch.grid} CTAs cannot be traced, at most {self._ctas}")
        self.launches.append((launch.op, launch.grid))
        launch.group.fresh = True  # the binary may not be loaded yet, on any rank
        context = self._context(launch.arguments["context"])
        arguments = {**launch.arguments, "context": context}
        return dataclasses.replace(launch, arguments=arguments, variant=("traced", launch.variant))

    def _context(self, plain: torch.Tensor) -> torch.Tensor:
        address = plain.data_ptr()
        if address not in self._contexts:
            table = plain.tolist()
            table[words.TRACE.value] = self._buffer.data_ptr()
            table[words.LANE_WORDS.value] = self._lane_words
            self._contexts[address] = (plain, self._world.memory.upload(self._rank, table).view(torch.uint64))
        return self._contexts[address][1]

    def clear(self) -> None:
        """Delete all events. No kernel of the rank may be running."""
        self._buffer.zero_()
        self.launches.clear()

    def read(self) -> list[Lane]:
        """The lanes that have events. No kernel of the rank may be running."""
        lanes = self._buffer.view(self._ctas, LANES, self._lane_words)
        most = self._lane_words // WORDS - 1
        longest = int(lanes[:, :, 0].max().clamp(max=most)) if lanes.numel() else 0
        used = lanes[:, :, : (1 + longest) * WORDS].cpu().numpy()
        found = []
        for cta, lane in zip(*np.nonzero(used[:, :, 0])):
            count = int(used[cta, lane, 0])
            written = min(count, most)
            events = used[cta, lane, WORDS : (1 + written) * WORDS].reshape(written, WORDS).copy()
            found.append(Lane(int(cta), int(lane), events, count - written))
        return found
