"""Which ranks of this machine are still alive.

The others would wait in vain for a rank that has died, or has left a call with an exception. Timeouts end such waits,
but a timeout that allows for a ten-minute checkpoint is a long time to wait for a dead process. So each process has a
page of shared memory on which it reports its state. It watches the pages of its peers on the same machine and, through
a pidfd, whether they still run. The network proxy detects the loss of ranks on other machines.

Entries of a page:
- `ended`: the process exits with no unfinished work in its groups. Its peers need nothing more from it. They may still
  be computing with its data, so they are left alone.
- `left`: group -> why this process left it in the middle of a call.
A process that has exited without writing `ended` was killed, or exited with work unfinished.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mkernel.runtime import shared_files

PAGE_BYTES = 32768  # the longest status, with every character of the reasons escaped
POLL_SECONDS = 0.25  # between two polls of the pages
LONGEST_REASON = 200  # characters
MOST_REASONS = 8
ENDED = "its process has ended"
_HEAD = struct.Struct("<II")  # version (odd while the page is being written), length of the JSON text


class Page:
    """The page of one process: its own, which it writes, or that of a peer, which it reads."""

    def __init__(self, process: int, handle: int):
        self._memory = shared_files.map_page(process, handle, PAGE_BYTES)

    def write(self, status: Mapping[str, Any]) -> None:
        text = json.dumps(status).encode()
        version, _ = _HEAD.unpack_from(self._memory)
        _HEAD.pack_into(self._memory, 0, version + 1, 0)
        self._memory[_HEAD.size : _HEAD.size + len(text)] = text
        _HEAD.pack_into(self._memory, 0, version + 2, len(text))

    def read(self) -> dict[str, Any]:
        """The entries of the page; none if it has not been written, or is being written now."""
        version, length = _HEAD.unpack_from(self._memory)
        text = self._memory[_HEAD.size : _HEAD.size + min(length, PAGE_BYTES - _HEAD.size)]
        if version % 2 or not length or _HEAD.unpack_from(self._memory)[0] != version:
            return {}
        try:
            status = json.loads(text)
        except ValueError:
            return {}
        return status if isinstance(status, dict) else {}


class Presence:
    """This process, as its peers see it."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.handle = shared_files.create("presence", PAGE_BYTES)
        self._page = Page(self.process, self.handle)
        self._left: dict[str, str] = {}
        self.worlds: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process
        weakref.finalize(self, lambda: None)  # so that finalizers at exit run after `_end`
        atexit.register(self._end)

    def leave(self, group: str, why: str) -> None:
        """Tell the peers that this process has left a group in the middle of a call."""
        if len(self._left) < MOST_REASONS:  # the first ones matter most
            self._left.setdefault(group, why[:LONGEST_REASON])
            self._page.write({"left": self._left})

    def _end(self) -> None:
        if os.getpid() == self.process and all(world.launcher.poll_idle(world.rank) for world in self.worlds):
            for world in self.worlds:
                for group in world.exchange.lost.broken_groups():
                    self.leave(group, "its process has ended, after the group had broken")
                world.network.shut_down()
                world.exchange.shut_down()
            self._page.write({"left": self._left, "ended": True})


_presence: Presence | None = None


def presence() -> Presence:
    """The presence of this process. A forked child gets its own."""
    global _presence
    if _presence is None or _presence.process != os.getpid():
        _presence = Presence()
    return _presence


class Watch:
    """Watches the peers on this machine, in a thread of its own.

    Args:
        peers: rank -> its process, and the file descriptor of its page in that process.
        lost: called with a rank and a reason when its process was killed or exited with work unfinished.
        left: called with a rank, a group and a reason when it left that group.
    """

    def __init__(
        self,
        peers: Mapping[int, tuple[int, int]],
        lost: Callable[[int, str], None],
        left: Callable[[int, str, str], None],
    ):
        self._lost, self._left = lost, left
        self._pages: dict[int, Page] = {}
        self._handles: dict[int, int] = {}  # pidfd -> rank
        self._reported: set[tuple[int, str]] = set()
        self.gone: dict[int, str] = {}  # ranks whose process has exited, and how
        for rank, (process, handle) in peers.items():
            try:
                self._handles[os.pidfd_open(process)] = rank
            except ProcessLookupError:
                self.gone[rank] = ENDED
            except OSError:
                pass  # the system does not let us watch it: timeouts have to do
            with contextlib.suppress(OSError):
                self._pages[rank] = Page(process, handle)
        self._wake, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._run, name="mkernel watch", daemon=True)
        self._process = os.getpid()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and release its resources."""
        if self._stop < 0 or os.getpid() != self._process:
            return
        os.close(self._stop)
        self._stop = -1
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        poll = select.poll()
        for handle in (self._wake, *self._handles):
            poll.register(handle, select.POLLIN)
        running = True
        while running:
            for handle, _ in poll.poll(POLL_SECONDS * 1000):
                if handle == self._wake:
                    running = False
                else:
                    poll.unregister(handle)
                    self._process_ended(self._handles[handle])
            if running:
                self._poll_pages(self._pages)
        for handle in (self._wake, *self._handles):
            os.close(handle)

    def _poll_pages(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            for group, why in self._pages[rank].read().get("left", {}).items():
                if (rank, group) not in self._reported:
                    self._reported.add((rank, group))
                    self._left(rank, group, str(why))

    def _process_ended(self, rank: int) -> None:
        self.gone[rank] = ENDED
        if rank in self._pages:
            self._poll_pages([rank])
            if self._pages[rank].read().get("ended") is not True:
                self._lost(rank, self.gone[rank])
