"""Where the time of a call goes: the critical path, from the step that ends last back to the launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mkernel.scale.engine import Array, Engine

MOST = 400  # pieces of a timeline: more could not be seen
WAIT = "wait for "
# Whose end a wait was for, by what it is called, and what lies between. What comes from another rank, that rank has
# done when this one did the same.
CAUSES = {
    "rows": (("copy", "place own rows", "place rows of the node", "place rows of other nodes"), "NVLink"),
    "keys": (("copy",), "NVLink"),
    "partials": (("push",), "NVLink"),
    "finished tiles": (("store", "reduce"), "NVLink"),
    "the network": (("copy", "reduce", "post", "sum rows", "stage"), "network"),
    "routing tables": ((), "network"),
    "slots": (("attend",), "signals"),
    "reductions": (("reduce",), "signals"),
    "counts": (("count rows",), "signals"),
    "NVLink": ((), "NVLink"),
}


@dataclass(frozen=True)
class Piece:
    """What a lane did from begin to end, in seconds. lane: "" for what is between lanes."""

    kind: str
    begin: float
    end: float
    lane: str = ""


class _Steps:
    """The steps of all lanes of an engine, by lane and time."""

    def __init__(self, engine: Engine):
        assert engine.spans is not None, "the engine has kept no timeline"
        self.groups = [group.name for group in engine.groups]
        self.kinds = list(dict.fromkeys(span.kind for span in engine.spans))
        offsets = np.cumsum([0, *(len(group.clock) for group in engine.groups)])
        begin_of = dict(zip(self.groups, offsets.tolist()))
        self.first = offsets
        spans = [span for span in engine.spans if len(span.which)]
        lane = np.concatenate([span.which + begin_of[span.lanes] for span in spans])
        end = np.concatenate([span.end for span in spans])
        order = np.lexsort((end, lane))
        self.lane, self.end = lane[order], end[order]
        self.begin = np.concatenate([span.begin for span in spans])[order]
        number = {kind: i for i, kind in enumerate(self.kinds)}
        self.kind = np.repeat([number[span.kind] for span in spans], [len(span.which) for span in spans])[order]
        self._by_kinds: dict[tuple[str, ...], Array] = {}

    def before(self, step: int) -> int | None:
        """The step of the same lane before this one."""
        return step - 1 if step and self.lane[step - 1] == self.lane[step] else None

    def last_of(self, kinds: tuple[str, ...], time: float) -> int | None:
        """The step of these kinds, of any lane, that ends last by then."""
        if kinds not in self._by_kinds:
            chosen = np.flatnonzero(np.isin(self.kind, [i for i, kind in enumerate(self.kinds) if kind in kinds]))
            self._by_kinds[kinds] = chosen[np.argsort(self.end[chosen], kind="stable")]
        steps = self._by_kinds[kinds]
        found = int(np.searchsorted(self.end[steps], time, side="right")) - 1
        return int(steps[found]) if found >= 0 else None

    def name(self, lane: int) -> str:
        group = int(np.searchsorted(self.first, lane, side="right")) - 1
        return f"{self.groups[group]} {lane - self.first[group]}"


def critical_path(engine: Engine) -> list[Piece]:
    """What the end of a call waited for, one after the other, from the launch on: steps of the lane that ends last; for
    each of its waits, steps of the lane that ended it, and so on. Where a wait began before its cause did, that is all
    there is to see: a lane that waits less than others is not on the path."""
    steps = _Steps(engine)
    least = {"NVLink": engine.machine.nvlink_seconds, "network": engine.machine.network_seconds, "signals": 0.0}
    time, found = engine.end, []
    step: int | None = int(np.argmax(steps.end))
    while step is not None and time > engine.start:
        kind, begin, lane = steps.kinds[steps.kind[step]], float(steps.begin[step]), int(steps.lane[step])
        following = steps.before(step)
        if kind.startswith(WAIT):
            kinds, kind = CAUSES.get(kind.removeprefix(WAIT), ((), kind))
            cause = steps.last_of(kinds, time - max(least.get(kind, 0.0), 1e-9)) if kinds else None
            if cause is not None and steps.end[cause] > begin:
                begin, following = float(steps.end[cause]), cause
        name = "" if kind in least or kind.startswith(WAIT) else steps.name(lane)
        if begin < time:
            found.append(Piece(kind, begin, time, name))
        time, step = min(begin, time), following
    return found[::-1]


def shares(pieces: Sequence[Piece]) -> dict[str, float]:
    """The part of the path that each kind of step takes, the largest first."""
    total = sum(piece.end - piece.begin for piece in pieces) or 1.0
    found: dict[str, float] = {}
    for piece in pieces:
        found[piece.kind] = found.get(piece.kind, 0.0) + (piece.end - piece.begin) / total
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Fewer pieces: neighbours of one kind become one, and what is shorter than can be seen joins its neighbour."""
    length = max((piece.end for piece in pieces), default=0.0) / MOST
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1].end - found[-1].begin < length:
            last = found.pop()
            longer = piece if piece.end - piece.begin > last.end - last.begin else last
            piece = replace(longer, begin=last.begin, end=piece.end)
        if found and found[-1].kind == piece.kind:
            last = found.pop()
            piece = replace(piece, begin=last.begin, lane=piece.lane if piece.lane == last.lane else "")
        found.append(piece)
    return found
