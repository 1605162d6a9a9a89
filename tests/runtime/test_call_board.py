"""The page on which ranks of one machine compare their calls: on plain memory, in every order of steps."""

import itertools
import mmap
import random

import pytest
import torch

from mkernel.runtime import call_board
from mkernel.runtime.call_board import IN_STORE, CallBoard, Machines, Place, digest_of, page_bytes

A, B = digest_of(("op", (("m", 1),))), digest_of(("op", (("m", 2),)))


class Wire:
    """Takes a rank's records to its readers on other machines: each reader's in order, some time after `send`."""

    def __init__(self, rank, machines, pages):
        self._own, self._pages = pages[rank], pages
        self._readers = [(reader, 1 + machines.writers(reader).index(rank)) for reader in machines.readers]
        self.sent = {reader: [] for reader in machines.readers}
        self.error = None

    def send(self, number):
        for reader, index in self._readers:
            self.sent[reader].append((number % 2, Place.number(index).records))

    def deliver(self, chosen):
        """Carry out the next request to one of the readers."""
        waiting = [reader for reader, requests in self.sent.items() if requests]
        if waiting:
            reader = chosen.choice(waiting)
            parity, records = self.sent[reader].pop(0)
            self._pages[reader][records[parity]] = self._own[Place.number(0).records[parity]]

    def poll(self):
        """What arrives is decided by the test."""


@pytest.fixture
def boards():
    """Makes the boards of so many ranks, on one machine or on these."""
    made = []

    def make(size, hosts=None):
        if hosts is None:
            pages = {rank: mmap.mmap(-1, call_board.PAGE_BYTES) for rank in range(size)}
            boards = [CallBoard(rank, pages) for rank in range(size)]
        else:
            machines = [Machines(rank, hosts) for rank in range(size)]
            pages = {rank: mmap.mmap(-1, page_bytes(len(machines[0].writers(rank)))) for rank in range(size)}
            boards = [
                CallBoard(rank, {each: pages[each] for each in here.local}, here, Wire(rank, here, pages))
                for rank, here in enumerate(machines)
            ]
        made.append(pages)
        return boards

    yield make
    for pages in made:
        for page in pages.values():
            page.close()


def test_all_ranks_must_arrive(boards):
    zero, one, two = boards(3)
    zero.write(1, A)
    assert (zero.poll(), zero.spin(), zero.poll_missing()) == (None, None, [1, 2])
    two.write(1, A)
    assert (zero.poll_missing(), two.poll_missing()) == ([1], [1])
    one.write(1, A)
    assert [board.poll() for board in (zero, one, two)] == [True] * 3
    assert zero.poll_missing() == []
    for board in (two, zero):
        board.write(2, B)
    assert zero.spin() is None, "the record of the exchange before does not count"
    one.write(2, B)
    assert [board.spin() for board in (zero, one, two)] == [True] * 3


@pytest.mark.parametrize("calls", [(A, B, A), (A, IN_STORE, A), (B, A, A), (A, B, IN_STORE)], ids=range(4))
def test_any_difference_sends_all_to_the_store(boards, calls):
    ranks = boards(3)
    for number in (7, 8):
        for board, call in zip(ranks, calls):
            board.write(number, call)
        assert [board.poll() for board in ranks] == [False] * 3
        assert ranks[0].poll_missing() == []
        assert ranks[0].poll() is False


def test_a_difference_is_seen_before_all_have_arrived(boards):
    zero, _, two = boards(3)
    zero.write(1, A)
    two.write(1, B)
    assert (zero.poll(), two.poll()) == (False, False)


@pytest.mark.parametrize("refusals", range(1, 6))
def test_a_slow_rank_confirms_what_the_others_have_confirmed(boards, refusals):
    """They then refuse several calls, and so overwrite their records."""
    slow, fast = boards(2)
    slow.write(4, A)
    fast.write(4, A)
    assert fast.poll()
    for number in range(5, 5 + refusals):
        fast.write(number, IN_STORE)
    assert slow.poll()
    slow.write(5, A)
    assert slow.poll() is False


@pytest.mark.parametrize("refusals", range(1, 6))
def test_a_slow_rank_does_not_confirm_what_another_has_refused(boards, refusals):
    slow, fast = boards(2)
    for board in (slow, fast):
        board.write(3, A)
    assert slow.poll()
    assert fast.poll()
    slow.write(4, A)
    for number in range(4, 4 + refusals):
        fast.write(number, IN_STORE)
    fast.write(4 + refusals, A)
    for number in range(4, 4 + refusals):
        slow.write(number, A)
        assert slow.poll() is False, number
    slow.write(4 + refusals, A)
    assert slow.poll()


@pytest.mark.parametrize("new", [A, B, IN_STORE], ids=["A", "B", "in the store"])
@pytest.mark.parametrize("old", [None, A, B, IN_STORE], ids=["nothing", "A", "B", "in the store"])
def test_a_record_that_is_half_written_does_not_count(boards, old, new):
    """Whichever of its words a reader sees first."""
    reader, writer = boards(2)
    slot = call_board._RECORDS[1]
    if old is not None:
        writer.write(5, old)
    before = writer._own[slot]
    writer.write(7, new)
    after = writer._own[slot]
    starts = range(0, len(after), 4)
    halves = [
        b"".join((after if each else before)[start : start + 4] for start, each in zip(starts, seen))
        for seen in itertools.product([False, True], repeat=len(starts))
    ]
    assert len(set(halves)) >= 4
    for half in halves:
        writer._own[slot] = half
        reader.write(7, A)
        complete = None if half != after else new == A
        assert reader.poll() is complete
    writer._own[slot] = after
    assert reader.poll() is (new == A)


def test_damaged_records_do_not_count(boards):
    reader, writer = boards(2)
    writer.write(9, B)
    slot, chosen = call_board._RECORDS[1], random.Random(0)
    right = writer._own[slot]
    for _ in range(2000):
        wrong = bytearray(right)
        for _ in range(chosen.randrange(1, 6)):
            wrong[chosen.randrange(len(wrong))] = chosen.randrange(256)
        writer._own[slot] = bytes(wrong)
        reader.write(9, A)
        assert reader.poll() is (None if wrong != right else False)


def steps_of(rank, board, program, store, size, seen):
    """What a rank does, call by call; it yields wherever others may take their steps."""
    for number, call in enumerate(program, 1):
        board.write(number, call if call in (A, B) else IN_STORE)
        yield
        if call in (A, B):
            while (agreed := board.poll()) is None:
                yield
            seen[rank].append(agreed)
            if agreed:
                continue
            board.write(number, IN_STORE)
            yield
        store.setdefault(number, set()).add(rank)
        yield
        while call != "refused" and len(store[number]) < size:
            yield


@pytest.mark.parametrize("hosts", ["aa", "aaa", "aaaa", "ab", "aabb", "abc", "abab", "aaabb", "aabc"])
def test_no_order_of_steps_makes_ranks_disagree_or_wait_forever(boards, hosts):
    size = len(hosts)
    for seed in range(150 if "b" not in hosts else 60):
        chosen = random.Random(seed)
        programs = [[] for _ in range(size)]
        for _ in range(12):
            alike = chosen.random() < 0.6
            for program in programs:
                program.append(A if alike else chosen.choice([A, A, B, "refused", "refused", "barrier"]))
        ranks, store, seen = boards(size, hosts if "b" in hosts else None), {}, [[] for _ in range(size)]
        running = {
            rank: steps_of(rank, board, program, store, size, seen)
            for rank, (board, program) in enumerate(zip(ranks, programs))
        }
        speeds = [chosen.choice([1, 1, 20]) for _ in range(size)]  # so that some are far ahead
        for _ in range(100_000):
            (rank,) = chosen.choices(list(running), [speeds[rank] for rank in running])
            for board in ranks if "b" in hosts else ():
                if chosen.random() < 0.3:
                    board._link.deliver(chosen)
            try:
                next(running[rank])
            except StopIteration:
                del running[rank]
            if not running:
                break
        assert not running, f"seed {seed}: ranks {list(running)} wait forever"
        agreed = [len(set(calls)) == 1 and calls[0] in (A, B) for calls in zip(*programs)]
        for rank, program in enumerate(programs):
            compared = [same for same, call in zip(agreed, program) if call in (A, B)]
            assert seen[rank] == compared, f"seed {seed}, rank {rank}"


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaaab", "abbbb", "aabbbccccc", "abcdefgh"])
def test_every_rank_reaches_every_machine(hosts):
    everyone = [Machines(rank, hosts) for rank in range(len(hosts))]
    for rank, machines in enumerate(everyone):
        assert sorted(hosts[reader] for reader in machines.readers) == sorted({*hosts} - {hosts[rank]})
        assert all(rank in machines.writers(reader) for reader in machines.readers)
        assert all(rank in everyone[writer].readers for writer in machines.writers(rank))
        # what the ranks of a machine keep is one record of every rank elsewhere
        kept = [writer for local in machines.local for writer in machines.writers(local)]
        assert sorted(kept) == [other for other, host in enumerate(hosts) if host != hosts[rank]]
        places = [Place.number(index) for index in range(1 + len(machines.writers(rank)))]
        used = [(part.start, part.stop) for place in places for part in place.records]
        used += [(place.signal, place.signal + 8) for place in places]
        used.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(used))
        assert call_board._TOKEN.stop <= used[0][0]
        assert used[-1][1] <= page_bytes(len(machines.writers(rank)))
        assert all(place.signal % 8 == 0 for place in places)


def test_a_record_of_another_machine_counts_once_it_has_arrived(boards):
    zero, one, two = boards(3, "aab")
    for board in (zero, one, two):
        board.write(1, A)
    assert (zero.poll(), two.poll()) == (None, None)
    assert (zero.poll_missing(), two.poll_missing()) == ([2], [0, 1])
    two._link.deliver(random.Random(0))
    assert (zero.poll(), one.poll(), two.poll()) == (True, True, None)
    one._link.deliver(random.Random(0))
    zero._link.deliver(random.Random(0))
    assert two.poll() is True


def test_digests():
    def call(**values):
        return "op", tuple(values.items())

    calls = [
        call(m=1, n=2), call(m=2, n=1), call(n=2, m=1), call(m=1), call(m="1", n=2), call(m=1, n=2.0),
        call(m=(1, 2)), call(m=((1, 2),)), call(dtype=torch.float16), call(dtype=torch.bfloat16), call(m=None),
        ("other", ()),
    ]  # fmt: skip
    digest_of.cache_clear()
    assert len({digest_of(each) for each in calls}) == len(calls) - 1, "only 2 and 2.0 are equal"
    assert digest_of(call(m=1, n=2)) == digest_of(call(m=1, n=2)) != IN_STORE
    misses = digest_of.cache_info().misses
    digest_of(call(m=1, n=2))
    assert digest_of.cache_info().misses == misses
    for m in range(2 * call_board.DIGESTS_KEPT):
        digest_of(call(m=m))
    assert digest_of.cache_info().currsize == call_board.DIGESTS_KEPT
