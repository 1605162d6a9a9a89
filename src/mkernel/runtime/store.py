"""Signed messages in the store of a process group.

Process groups may overlap, be created in any order, on some ranks only, and more than once. So the names of a job begin
with what all members know of their process group and share with no other: its name, the global ranks of its members,
and how many worlds its members have made of it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch.distributed as dist

from mkernel.runtime import messages, secret

# torch's TCPStore closes the connection on a value of more than 8 MiB, or a name of more than 8 KiB
LONGEST_VALUE = 4 * 2**20
NAMES_KEPT = 64  # before they are deleted together
STORE_ERRORS = (RuntimeError, dist.DistError)  # raised when the process that hosts the store has exited

_worlds: Counter[str] = Counter()  # how many worlds were made of a process group


class SignedStore:
    """Values that the ranks of a job write for each other. `key` signs them (`runtime/messages.py`). `number`: which of
    the worlds it is that were made of the process group, from 1."""

    def __init__(self, process_group: dist.ProcessGroup | None):
        self.job, self.number = _job_name(process_group)
        self.store = dist.PrefixStore(self.job, dist.distributed_c10d._get_default_store())
        self.key = secret.OPEN
        self._last: dict[tuple[int, ...], list[str]] = {}  # members -> names of what this rank wrote for them last
        self._retired: list[str] = []  # names of what every reader has read

    def names(self, members: Sequence[int], key: Hashable) -> list[str]:
        """The names under which these members write their values for one exchange."""
        call = hashlib.sha256(repr(key).encode()).hexdigest()  # names of groups with many ranks are long
        return [f"{call}/{member}" for member in members]

    def poll(self, name: str) -> bool:
        """Has a value been written under this name? False also if the store is gone."""
        try:
            return self.store.check([name])
        except STORE_ERRORS:
            return False

    def put(self, name: str, value: Any) -> list[str]:
        """Write a value, and return the names it occupies. A value that is too long for one name is cut: first the
        pieces are written, then, under the name that readers wait for, the beginning and the number of pieces."""
        data = messages.encode(value, self.key, f"{self.job}/{name}")
        pieces = [data[start : start + LONGEST_VALUE] for start in range(0, len(data), LONGEST_VALUE)]
        names = [f"{name}/{number}" for number in range(1, len(pieces))]
        for piece_name, piece in zip(names, pieces[1:]):
            self.store.set(piece_name, piece)  # type: ignore[arg-type]
        self.store.set(name, len(names).to_bytes(4, "big") + pieces[0])  # type: ignore[arg-type]
        return [*names, name]

    def get(self, names: Sequence[str]) -> list[Any]:
        """The values under these names, all of which have been written."""
        if self.store.has_extended_api():  # type: ignore[attr-defined]
            firsts = self.store.multi_get(list(names))
        else:
            firsts = [self.store.get(name) for name in names]
        return [self._decode(name, first) for name, first in zip(names, firsts)]

    def _decode(self, name: str, first: bytes) -> Any:
        count = int.from_bytes(first[:4], "big")
        if count > messages.MOST_BYTES // LONGEST_VALUE:
            raise messages.BadMessage(f"the message {name} in the store is not one of this job: it is too long")
        rest = [self.store.get(f"{name}/{number}") for number in range(1, count + 1)]
        try:
            return messages.decode(b"".join([first[4:], *rest]), self.key, f"{self.job}/{name}")
        except messages.BadMessage as problem:
            who = name.rpartition("/")[2]
            raise messages.BadMessage(
                f"the entry for rank {who} in the process group's store was not written by a rank of this job: "
                f"{problem}"
            ) from problem

    def keep(self, members: Sequence[int], names: Sequence[str]) -> None:
        """Remember that this rank wrote these names for the members, who may not have read them yet."""
        self._last.setdefault(tuple(members), []).extend(names)

    def retire(self, members: Sequence[int], names: Sequence[str]) -> None:
        """All members have come to a new exchange, for which this rank wrote `names`: they have read what it wrote for
        them before. Names are deleted many at a time."""
        self._retired += self._last.get(tuple(members), [])
        self._last[tuple(members)] = list(names)
        if len(self._retired) >= NAMES_KEPT:
            self.delete_retired()

    def delete_retired(self) -> None:
        for name in self._retired:
            self.store.delete_key(name)
        self._retired.clear()


def _job_name(process_group: dist.ProcessGroup | None) -> tuple[str, int]:
    """The prefix of a world's names, and its number. All members make the same number of worlds of a process group."""
    chosen = process_group if process_group is not None else dist.group.WORLD
    assert chosen is not None
    identity = f"{chosen.group_name} {dist.get_process_group_ranks(chosen)}"
    _worlds[identity] += 1
    number = _worlds[identity]
    return f"mkernel/{hashlib.sha256(identity.encode()).hexdigest()[:32]}/{number}", number
