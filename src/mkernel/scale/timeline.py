"""Where the time of a call goes: what the lane that ends last did, and what every group of lanes did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mkernel.scale.engine import Engine

MOST = 400  # pieces of a timeline: more could not be seen


@dataclass(frozen=True)
class Piece:
    """What a lane did from begin to end, in seconds."""

    kind: str
    begin: float
    end: float


def last_lane(engine: Engine) -> tuple[str, list[Piece]]:
    """The lane that ends last, and what it did: the critical path as far as one lane shows it; a wait names what it
    waited for. Adjacent pieces of one kind are joined, shorter ones next to each other too, until there are few."""
    assert engine.spans is not None, "the engine has kept no timeline"
    lanes = max(engine.groups, key=lambda group: float(group.clock.max(initial=0.0)))
    which = int(np.argmax(lanes.clock))
    found = [
        Piece(span.kind, float(begin), float(end))
        for span in engine.spans
        if span.lanes == lanes.name
        for begin, end in zip(span.begin[span.which == which], span.end[span.which == which])
    ]
    return f"{lanes.name} {which}", joined(sorted(found, key=lambda piece: piece.begin))


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Fewer pieces: neighbours of one kind become one, and what is shorter than can be seen joins its neighbour."""
    length = max((piece.end for piece in pieces), default=0.0) / MOST
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1].end - found[-1].begin < length:
            last = found.pop()
            longer = piece if piece.end - piece.begin > last.end - last.begin else last
            piece = Piece(longer.kind, last.begin, piece.end)
        if found and found[-1].kind == piece.kind:
            piece = Piece(piece.kind, found.pop().begin, piece.end)
        found.append(piece)
    return found
