"""Processes that watch each other."""

import os
import queue
import threading
from types import SimpleNamespace

import pytest
from support.forked_processes import SOURCE, Fork

import mkernel as mk
from mkernel.runtime import liveness, shared_files
from mkernel.runtime.store_exchange import LostRanks, StoreExchange

PEER = """
import sys
from mkernel.runtime import liveness
me = liveness.presence()
print(me.process, me.handle, flush=True)
for line in sys.stdin:
    exec(line)
"""
SECONDS = 120  # that end what hangs


class Peer:
    """A process with a presence, which does as it is told."""

    def __init__(self):
        (stdin, our_stdin), (our_stdout, stdout) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(our_stdin, "w"), os.fdopen(our_stdout)
        with open(stdin) as theirs, open(stdout, "w") as told:
            self.process = Fork(["-c", PEER], dict(os.environ, PYTHONPATH=SOURCE), stdin=theirs, stdout=told)
        self.address = tuple(map(int, self.stdout.readline().split()))

    def do(self, line):
        self.stdin.write(line + "\n")
        self.stdin.flush()


@pytest.fixture
def peer():
    made = Peer()
    yield made
    made.process.kill()
    made.process.wait()
    made.stdin.close()
    made.stdout.close()


@pytest.fixture
def watched(peer):
    """A watch of the peer as rank 3, and what it tells."""
    told = queue.Queue()
    watch = liveness.Watch({3: peer.address}, lambda rank, why: told.put((rank, why)), lambda *left: told.put(left))
    yield watch, told
    watch.close()


@pytest.mark.thorough
def test_a_killed_process_is_lost(peer, watched):
    watch, told = watched
    peer.process.kill()
    assert told.get(timeout=SECONDS) == (3, "its process has ended")
    assert watch.gone == {3: "its process has ended"}


def test_a_process_that_ends_in_order_disturbs_nobody(peer, watched):
    watch, told = watched
    peer.stdin.close()
    peer.process.wait(SECONDS)
    while not watch.gone:
        pass
    assert told.empty()


def test_a_process_that_leaves_groups_tells_which_and_why(peer, watched):
    _, told = watched
    peer.do("me.leave('the group', 'it was interrupted')")
    assert told.get(timeout=SECONDS) == (3, "the group", "it was interrupted")
    peer.do("me.leave('the group', 'something that follows from it')")
    peer.do("me.leave('another', 'x' * 10000)")
    rank, group, why = told.get(timeout=SECONDS)
    assert (rank, group, len(why)) == (3, "another", liveness.LONGEST_REASON)


def test_a_process_that_has_left_something_undone_is_lost(peer, watched):
    _, told = watched
    peer.do("Launcher = type('Launcher', (), dict(poll_idle=lambda self, rank: False))")
    peer.do("world = type('World', (), dict(rank=0, launcher=Launcher()))(); me.worlds.add(world)")
    peer.stdin.close()
    assert told.get(timeout=SECONDS) == (3, "its process has ended")


def test_a_process_that_is_gone_already(peer):
    peer.process.kill()
    peer.process.wait(SECONDS)
    watch = liveness.Watch({3: peer.address}, print, print)
    assert watch.gone == {3: "its process has ended"}
    watch.close()


def test_nothing_is_left_of_a_watch(peer):
    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        watch = liveness.Watch({3: peer.address}, print, print)
        watch.close()
        watch.close()
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_a_page_that_is_damaged_says_nothing():
    handle = shared_files.create("page", liveness.PAGE_BYTES)
    page = liveness.Page(os.getpid(), handle)
    assert page.read() == {}
    page.write({"left": {"a": "b"}})
    assert page.read() == {"left": {"a": "b"}}
    for damage in (
        b"\x01\x00\x00\x00\x05\x00\x00\x00",
        b"\x02\x00\x00\x00\xff\xff\xff\xff",
        b"\x02\x00\x00\x00\x03\x00\x00\x00[1]",
    ):
        os.pwrite(handle, damage, 0)
        assert page.read() == {}
    os.close(handle)


def test_the_longest_reasons_fit_on_the_page(peer, watched):
    _, told = watched
    peer.do(
        f"[me.leave(str(i) * 32, chr(0x1F600) * {liveness.LONGEST_REASON}) for i in range({liveness.MOST_REASONS})]"
    )
    groups = [told.get(timeout=SECONDS)[1] for _ in range(liveness.MOST_REASONS)]
    assert sorted(groups) == [str(i) * 32 for i in range(liveness.MOST_REASONS)]
    peer.stdin.close()
    peer.process.wait(SECONDS)
    assert told.empty(), "a process that has ended in order is not lost"


def test_the_rank_that_ended_first_is_the_one_that_was_lost():
    """Others may have ended because of it, before anybody looked."""
    lost = LostRanks(SimpleNamespace(job="job", poll=lambda name: False))
    lost._watch = SimpleNamespace(gone={12: "first", 11: "second"})
    with pytest.raises(mk.RankLost) as caught:
        lost.check(("group", 1), members=[10, 11, 12], missing=[1, 2], timed_out=mk.CommTimeout("late", ()))
    assert (caught.value.rank, caught.value.why) == (2, "first")


def test_a_network_that_failed_with_a_rank_is_reported_as_the_loss_of_the_rank():
    reports = []
    exchange = SimpleNamespace(lost=SimpleNamespace(report=lambda *report: reports.append(report[1:])))
    failure = mk.TransportError("the peer closed the connection")
    StoreExchange.report_failure(exchange, SimpleNamespace(rank=1), failure)
    failure.__cause__ = mk.RankLost("rank 2 is lost", (), 2, "its process has ended")
    StoreExchange.report_failure(exchange, SimpleNamespace(rank=1), failure)
    assert reports == [
        (-1, "rank 1 has given up: the peer closed the connection"), (2, "its process has ended"),
    ]  # fmt: skip
