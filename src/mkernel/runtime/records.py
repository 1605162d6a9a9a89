"""Wait records: what a kernel wrote down about a wait that it gave up (see lang/signals.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mkernel.lang import context, roles, signals
from mkernel.runtime.errors import CommTimeout

MAX_CTAS = 1024  # records a group has room for, one for each CTA of a launch
WORDS = context.RECORD_WORDS.value

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
ROLES = {roles.SEND.value: "send", roles.INTRA.value: "intra", roles.COMPUTE.value: "compute"}
SIGNALS = {
    signals.ENTERED.value: "entered",
    signals.ARRIVED.value: "arrived",
    signals.RING_SPACE.value: "ring space",
    signals.SENT.value: "sent",
    signals.PARTIAL.value: "partial",
    signals.FINISHED_TILE.value: "finished tile",
}


@dataclass(frozen=True)
class WaitRecord:
    """One wait that was given up: who waited for whom, for what, and what it saw."""

    timed_out: bool  # False: it left because another wait had timed out
    op: str
    rank: int
    role: str
    cta: int
    signal: str
    peer: int
    index: int
    seen: int
    expected: int
    seconds: float

    def __str__(self) -> str:
        what = {
            "entered": f"rank {self.peer} to enter the epoch (its launch)",
            "arrived": f"chunk {self.index} of rank {self.peer}'s rows",
            "ring space": "the network proxy to take a request out of the full ring",
            "sent": "the network proxy to finish sending",
            "partial": f"rank {self.peer}'s part of tile {self.index}",
            "finished tile": f"tile {self.index}, which rank {self.peer} sums up",
            "call": f"rank {self.peer} to make the same call",
        }[self.signal]
        how = "timed out" if self.timed_out else "gave up with the group"
        who = f"role {self.role}, CTA {self.cta}" if self.cta >= 0 else f"its {self.role} code"
        return (
            f"{self.op}: rank {self.rank}, {who} waited {self.seconds:.3g} s for {what}: "
            f"signal '{self.signal}' is {self.seen}, expected {self.expected} ({how})"
        )


def absent(what: str, rank: int, missing: Sequence[int], size: int, seconds: float) -> CommTimeout:
    """The error of a rank whose host code waited for others to make the same call."""
    found = [
        WaitRecord(True, what, rank, "host", -1, "call", peer, 0, size - len(missing), size, seconds)
        for peer in missing
    ]
    more = f" Missing are ranks {list(missing)}." if len(missing) > 1 else ""
    return CommTimeout(f"{found[0]}.{more}", found)


def read(table: torch.Tensor) -> list[WaitRecord]:
    """The records in a rank's table, those that timed out first."""
    found = []
    for row in table.view(-1, WORDS)[table.view(-1, WORDS)[:, 0] != 0].tolist():
        reason, op, rank, role, cta, kind, peer, index, seen, expected, nanoseconds = row[:11]
        found.append(
            WaitRecord(
                timed_out=reason == signals.TIMED_OUT.value,
                op=OPS[op],
                rank=rank,
                role=ROLES[role],
                cta=cta,
                signal=SIGNALS[kind],
                peer=peer,
                index=index,
                seen=seen,
                expected=expected,
                seconds=nanoseconds / 1e9,
            )
        )
    return sorted(found, key=lambda record: (not record.timed_out, -record.seconds))
