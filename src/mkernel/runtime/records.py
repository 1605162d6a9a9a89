"""Wait records: what kernels report about waits that they gave up (see lang/signals.py)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mkernel import operators
from mkernel.lang import context, roles, signals
from mkernel.runtime.errors import CapacityError, CommTimeout, RoutingError

MAX_CTAS = context.MAX_CTAS.value
PER_CTA = 2  # records
COUNT = PER_CTA * MAX_CTAS  # records of a group
WORDS = context.RECORD_WORDS.value
CLAIMED = context.CLAIMED.value
RECORDED = context.RECORDED.value  # the word of a table that says whether it has records

OPS: list[str] = []  # by number, see `number_of`
_lock = threading.Lock()  # ranks may be threads
ROLES = {roles.SEND.value: "send", roles.INTRA.value: "intra", roles.COMPUTE.value: "compute"}
SIGNALS = {
    signals.ENTERED.value: "entered",
    signals.ARRIVED.value: "arrived",
    signals.RING_SPACE.value: "ring space",
    signals.SENT.value: "sent",
    signals.PARTIAL_SUM.value: "partial sum",
    signals.NOTHING.value: "nothing",
}  # of all operators; others have those of their entry in the registry


def signal_name(op: str, kind: int) -> str:
    """What people call a signal of an operator."""
    if kind in SIGNALS:
        return SIGNALS[kind]
    own = operators.signal_of(op, kind)
    return own.name if own is not None else f"signal {kind}"


def number_of(op: str) -> int:
    """The number that stands for an operator in the records of this process. A new name gets the next number."""
    with _lock:
        if op not in OPS:
            OPS.append(op)
        return OPS.index(op)


REFUSALS = (signals.OVER_CAPACITY.value, signals.INVALID_ID.value)  # reasons other than waits


@dataclass(frozen=True)
class WaitRecord:
    """A wait that was given up: who waited for whom and for what, and what it saw."""

    timed_out: bool  # False: it ended because another wait had timed out
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
            "call": f"rank {self.peer} to make the same call",
        }.get(self.signal) or self._awaited()
        how = "timed out" if self.timed_out else "gave up with the group"
        if self.signal == "nothing":
            return f"{self.op}: rank {self.rank} ended its launch after the group had given up: its result may be wrong"
        who = f"role {self.role}, CTA {self.cta}" if self.cta >= 0 else f"its {self.role} code"
        return (
            f"{self.op}: rank {self.rank}, {who} waited {self.seconds:.3g} s for {what}: "
            f"signal '{self.signal}' is {self.seen}, expected {self.expected} ({how})"
        )

    def _awaited(self) -> str:
        """What an operator's own signal stands for."""
        own = operators.signal_named(self.op, self.signal)
        if own is not None and (self.peer >= 0 or "{peer}" not in own.awaited):
            return own.awaited.format(peer=self.peer, index=self.index)
        # of an operator that is not registered here, or of another version
        return f"rank {self.peer} (index {self.index})" if self.peer >= 0 else f"another CTA (index {self.index})"


def absent(what: str, rank: int, missing: Sequence[int], size: int, seconds: float) -> CommTimeout:
    """The error of a rank whose host waited for others to make the same call."""
    found = [
        WaitRecord(True, what, rank, "host", -1, "call", peer, 0, size - len(missing), size, seconds)
        for peer in missing
    ]
    more = f" Missing ranks: {list(missing)}." if len(missing) > 1 else ""
    return CommTimeout(f"{found[0]}.{more} The group can no longer be used.", found)


def read(table: torch.Tensor) -> list[WaitRecord]:
    """The records in a rank's table, the most telling ones first: waits that timed out before others, waits for other
    ranks before those within the rank, and a wait for a rank that never arrived before waits for data, which may only
    be its consequence. Such a wait counts as timed out if it took half as long as one that did: it may have started
    when the last late rank arrived. A launch that merely ended too late is reported once, if there is nothing else."""
    found = []
    for row in table.view(-1, WORDS)[table.view(-1, WORDS)[:, 0] != 0].tolist():
        if row[0] in REFUSALS:
            continue
        reason, op, rank, role, cta, kind, peer, index, seen, expected, nanoseconds = row[:11]
        found.append(
            WaitRecord(
                timed_out=reason == signals.TIMED_OUT.value,
                op=OPS[op],
                rank=rank,
                role=ROLES.get(role, f"role {role}"),
                cta=cta,
                signal=signal_name(OPS[op], kind),
                peer=peer,
                index=index,
                seen=seen,
                expected=expected,
                seconds=nanoseconds / 1e9,
            )
        )
    waits = [record for record in found if record.signal != "nothing"] or found[:1]
    timeout = max((record.seconds for record in waits if record.timed_out), default=float("inf"))

    def order(record: WaitRecord) -> tuple[bool, bool, bool, float]:
        never_came = record.signal == "entered"
        ran_out = record.timed_out or (never_came and record.seconds > timeout / 2)
        within = record.peer in (-1, record.rank)
        return not ran_out, within, not never_came, -record.seconds

    return sorted(waits, key=order)


def take_refusal(table: torch.Tensor) -> RoutingError | None:
    """The error of a kernel that refused its input, if there is one. Removes its record from the table."""
    table[RECORDED] = 0  # before the records are read: one that is written meanwhile sets it again
    rows = table.view(-1, WORDS)
    written = rows[:, 0].nonzero().flatten().tolist()
    refused = next((row for row in written if int(rows[row, 0]) in REFUSALS), None)
    if len(written) > (refused is not None):
        table[RECORDED] = 1  # others remain
    if refused is None:
        return None
    reason, op, _, _, _, _, peer, _, seen, expected = rows[refused, :10].tolist()
    rows[refused, 0] = rows[refused, CLAIMED] = 0
    if reason == signals.OVER_CAPACITY.value:
        return CapacityError(
            f"{OPS[op]}: {seen} rows go to rank {peer}, whose capacity is {expected}; increase it. "
            f"No rank has computed anything, and the group can be used again."
        )
    return RoutingError(
        f"{OPS[op]}: {seen} of the topk_ids of all ranks are beyond the last of the {expected} experts. "
        f"No rank has computed anything, and the group can be used again."
    )
