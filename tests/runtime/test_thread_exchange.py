"""The exchange of ranks that are threads, without a GPU: who is woken, who launches, and what is raised where."""

import threading
import time

import pytest

import mkernel as mk
from mkernel.runtime.cuda_threads import ThreadExchange

RANKS = 4


class FakeGroup:
    """What the exchange needs of a group."""

    def __init__(self, rank, timeout=20.0):
        self.world_rank, self.members, self.timeout = rank, tuple(range(RANKS)), timeout
        self._exchanges = 0

    def next_exchange(self):
        self._exchanges += 1
        return ("group", self._exchanges)

    def check_same_call(self, calls):
        raise mk.ArgumentError(f"different calls: {calls}")

    def mark_out_of_sync(self, why):
        self.why = why


def on_threads(function, ranks=range(RANKS)):
    """function(rank) in a thread for each rank; what each returned or raised."""
    results = {}

    def run(rank):
        try:
            results[rank] = function(rank)
        except Exception as failure:
            results[rank] = failure

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return results


def test_all_gather():
    exchange = ThreadExchange(RANKS)

    def work(rank):
        group, found = FakeGroup(rank), []
        for turn in range(50):
            if (turn + rank) % 7 == 0:
                time.sleep(0.001)
            found.append(exchange.all_gather(rank, group.members, ("key", turn), "a value", (rank, turn), 20.0))
        return found

    for found in on_threads(work).values():
        assert found == [[(rank, turn) for rank in range(RANKS)] for turn in range(50)]
    assert not exchange._mail._boxes


def test_a_published_value_is_not_waited_for():
    exchange = ThreadExchange(RANKS)

    def work(rank):
        members = tuple(range(RANKS))
        if rank == 2:
            return exchange.publish(rank, members, "key", "refused")
        return exchange.all_gather(rank, members, "key", "a value", rank, 20.0)

    results = on_threads(work)
    assert results.pop(2) is None
    assert all(found == [0, 1, "refused", 3] for found in results.values())


def test_the_last_rank_launches_for_all():
    exchange, launched = ThreadExchange(RANKS), []

    def work(rank):
        group = FakeGroup(rank)
        for turn in range(50):
            if (turn + rank) % 5 == 0:
                time.sleep(0.001)
            exchange.run_together(group, "op", ("op", turn), (rank, turn), launched.append)

    assert on_threads(work) == dict.fromkeys(range(RANKS))
    assert [sorted(values.values()) for values in launched] == [[(r, turn) for r in range(RANKS)] for turn in range(50)]


@pytest.mark.parametrize("other", range(RANKS))
def test_different_calls(other):
    exchange, launched = ThreadExchange(RANKS), []

    def work(rank):
        exchange.run_together(FakeGroup(rank), "op", ("op", rank == other), rank, launched.append)

    results = on_threads(work)
    assert all(isinstance(failure, mk.ArgumentError) for failure in results.values()), results
    assert not launched


def test_a_launch_that_fails_fails_on_all_ranks():
    exchange = ThreadExchange(RANKS)

    def launch(values):
        raise mk.MKernelError("no such kernel")

    results = on_threads(lambda rank: exchange.run_together(FakeGroup(rank), "op", "call", rank, launch))
    assert all("no such kernel" in str(failure) for failure in results.values()), results


def test_a_rank_that_never_comes_is_named():
    exchange = ThreadExchange(RANKS)

    def work(rank):
        exchange.run_together(FakeGroup(rank, timeout=0.5), "op", "call", rank, lambda values: None)

    results = on_threads(work, ranks=(0, 1, 3))
    assert all(isinstance(failure, mk.CommTimeout) and "rank 2" in str(failure) for failure in results.values()), (
        results
    )


def test_one_that_has_given_up_does_not_keep_the_others_asleep():
    exchange, timeouts, given_up = ThreadExchange(RANKS), {0: 0.2, 1: 20.0, 2: 0.2, 3: 20.0}, threading.Semaphore(0)

    def work(rank):
        if rank == 3:
            for _ in range(2):
                given_up.acquire(timeout=20.0)
        begun = time.monotonic()
        try:
            exchange.run_together(FakeGroup(rank, timeouts[rank]), "op", "call", rank, lambda values: None)
        except mk.CommTimeout:
            given_up.release()
            raise
        return time.monotonic() - begun

    results = on_threads(work)
    assert all(isinstance(results[rank], mk.CommTimeout) for rank in (0, 2)), results
    assert all(results[rank] < 15.0 for rank in (1, 3)), results


def test_a_refusal_wakes_those_that_wait():
    """Whoever refuses a call waits for nobody, also if it comes last."""
    exchange, launched, waiting = ThreadExchange(RANKS), [], threading.Semaphore(0)

    def work(rank):
        if rank == 1:
            for _ in range(RANKS - 1):
                waiting.acquire(timeout=20.0)
            while len(exchange._mail._boxes["group", 1].bells) < RANKS - 1:
                time.sleep(0.001)
            return exchange.publish(rank, tuple(range(RANKS)), ("group", 1), (("refused", "op", "why"), None))
        waiting.release()
        return exchange.run_together(FakeGroup(rank), "op", "call", rank, launched.append)

    results = on_threads(work)
    assert results.pop(1) is None
    assert all("refused" in str(failure) for failure in results.values()), results
    assert not launched
    assert not exchange._mail._boxes


def test_threads_that_end_while_others_wait():
    """Those that ended without a failure are not launched; the others are not kept from it."""
    exchange, launched = ThreadExchange(RANKS), []

    def work(rank):
        if rank == 2:
            time.sleep(0.05)
            return exchange.mark_ended(rank, None)
        return exchange.run_together(FakeGroup(rank), "op", "call", rank, launched.append)

    assert on_threads(work) == dict.fromkeys(range(RANKS))
    assert launched == [{0: 0, 1: 1, 3: 3}]
    assert not exchange._mail._boxes


def test_an_interrupt_wakes_those_that_wait():
    exchange = ThreadExchange(RANKS)

    def work(rank):
        if rank == 2:
            time.sleep(0.05)
            return exchange.interrupt()
        with pytest.raises(KeyboardInterrupt):
            exchange.all_gather(rank, tuple(range(RANKS)), "key", "a value", rank, 20.0)
        return None

    assert on_threads(work) == dict.fromkeys(range(RANKS))
