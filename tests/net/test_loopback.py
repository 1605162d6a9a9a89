"""The loopback transport and the proxy: bytes before signals, in any order otherwise; nothing is left behind."""

import subprocess
import sys
import time

import pytest
import torch
from support.patience import HANG

from mkernel.net import LoopbackTransport, Proxy
from mkernel.runtime.errors import ArgumentError, TransportError

from .harness import CAPACITY, Producer, Rank, eventually, stop_all


@pytest.fixture
def job(request):
    return request.node.name


def make(job: str, size: int = 2, nbytes: int = 1 << 16, **options) -> list[Rank]:
    return [Rank(LoopbackTransport(job, rank, **options), nbytes) for rank in range(size)]


@pytest.mark.parametrize("shuffle", [None, 1, 2])
def test_data_and_signal(job, shuffle):
    zero, one = ranks = make(job, shuffle=shuffle)
    zero.data[:] = torch.randint(0, 256, zero.data.shape, dtype=torch.uint8)
    for i, size in enumerate([0, 1, 7, 4096, 65536 - 8000]):
        zero.put(1, 100, 200, size, signal=i, value=5)
        one.wait(i, 5)
        assert torch.equal(one.data[200 : 200 + size], zero.data[100 : 100 + size])
        assert not one.data[200 + size :].any()
        assert not one.data[:200].any()
    stop_all(ranks)


def test_a_signal_never_shrinks(job):
    zero, one = ranks = make(job)
    for value in (9, 4, -3):
        zero.put(1, 0, 0, 0, value=value)
    assert zero.proxy.stop(HANG)
    assert one.signals[0] == 9
    stop_all(ranks)


def test_shuffled_requests_overtake_each_other(job):
    """All write to one place, and are in flight together: who comes last is not who was posted last."""
    count, last = 100, []
    for seed in range(5):
        zero, one = ranks = make(f"{job}{seed}", shuffle=seed, latency=0.1)
        zero.data[:count] = torch.arange(count, dtype=torch.uint8)
        for i in range(count):
            zero.put(1, i, 0, 1, signal=i)
        stop_all(ranks)
        assert one.signals[:count].tolist() == [1] * count
        last.append(int(one.data[0]))
    assert len(set(last)) > 1


def test_shuffled_data_comes_before_its_signal(job):
    count, size = 200, 256
    zero, one = ranks = make(job, shuffle=1)
    blocks, came = zero.data.view(-1, size), one.data.view(-1, size)
    blocks[:count] = (torch.arange(count)[:, None] % 255 + 1).to(torch.uint8)
    for i in range(count):
        zero.put(1, i * size, i * size, size, signal=i)
        if one.signals[i]:
            assert (came[i] == i % 255 + 1).all()
    for i in range(count):
        one.wait(i, 1)
        assert (came[i] == i % 255 + 1).all()
    stop_all(ranks)


def test_a_rank_may_send_to_itself_and_to_many(job):
    ranks = make(job, size=3)
    for rank in ranks:
        rank.data[: 8 * 3] = rank.transport.rank + 1
        for peer in range(3):
            rank.put(peer, 0, 64 + rank.transport.rank * 8, 8, signal=rank.transport.rank)
    for rank in ranks:
        for peer in range(3):
            rank.wait(peer, 1)
        assert rank.data[64:88].tolist() == [1] * 8 + [2] * 8 + [3] * 8
    stop_all(ranks)


@pytest.mark.measures
def test_latency_and_rate(job):
    zero, one = ranks = make(job, latency=0.05, rate=1e6)
    start = time.monotonic()
    zero.put(1, 0, 0, 20_000)
    zero.put(1, 0, 0, 20_000, value=2)
    one.wait(0, 1)
    first = time.monotonic() - start
    one.wait(0, 2)
    second = time.monotonic() - start
    assert first >= 0.07
    assert 0.09 <= second < 1.0
    stop_all(ranks)


@pytest.mark.measures
def test_requests_in_flight_share_the_rate_and_are_late_once(job):
    """40 requests of 1 ms each on the link, 50 ms late: 90 ms for all of them, one every millisecond."""
    zero, one = ranks = make(job, latency=0.05, rate=1e7)
    start = time.monotonic()
    for i in range(40):
        zero.put(1, 0, 0, 10_000, signal=i)
    one.wait(19, 1)
    half = time.monotonic() - start
    one.wait(39, 1)
    whole = time.monotonic() - start
    assert half >= 0.07
    assert 0.09 <= whole < 1.0
    stop_all(ranks)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"source": 1 << 20}, r"source: 8 bytes from 1048576 are not inside of rank 0's segment 0 of 69632 bytes"),
        ({"target": -1}, r"target: 8 bytes from 18446744073709551615 are not inside of rank 1's segment 0"),
        ({"size": -8}, r"source: 18446744073709551608 bytes from 0"),
        ({"signal": 69632 - 4}, r"signal: 8 bytes from 69628 are not inside"),
        ({"signal": 12}, r"signal: byte 12 of segment 0 on rank 1 is not aligned"),
        ({"segment": 9}, r"target: segment 9 is not attached on rank 1"),
        ({"source_segment": 9}, r"source: segment 9 is not attached on rank 0"),
        ({"peer": 7}, r"rank 7 of job .* is not in this process"),
    ],
)
def test_requests_that_can_not_be_served(job, wrong, words):
    zero, one = make(job)
    one.memory[:] = 3
    zero.producer.post(**{"peer": 1, "size": 8, **wrong})
    assert "network proxy of rank 0: " in zero.failure()
    with pytest.raises(TransportError, match=words):
        zero.proxy.check()
    assert (one.memory == 3).all()
    assert not zero.proxy.stop()
    with pytest.raises(TransportError, match=words):
        zero.proxy.check()  # still known afterwards
    zero.transport.close()
    stop_all([one])


def test_an_error_sets_the_abort_flag(job):
    zero, one = make(job)
    flags = torch.zeros(2, dtype=torch.int64)
    zero.proxy.set_abort_flag(flags.data_ptr(), flags.device)
    one.proxy.set_abort_flag(flags.data_ptr() + 8, flags.device)
    zero.put(1, 0, 0, 8)
    one.wait(0, 1)
    assert flags.tolist() == [0, 0]
    zero.producer.post(7)
    zero.failure()
    eventually(lambda: flags.tolist() == [1, 0], "the abort flag")
    zero.proxy.stop(0)
    zero.transport.close()
    stop_all([one])


def test_segments_come_and_go_while_requests_run(job):
    zero, one = ranks = make(job)
    for turn in range(1, 1001):
        other = torch.zeros(1024, dtype=torch.uint8)
        one.transport.attach(5, other)
        zero.put(1, 0, 0, 1000, value=turn)
        one.transport.detach(5)
    one.wait(0, turn)
    with pytest.raises(TransportError, match="segment 5 is not attached"):
        one.transport.detach(5)
    with pytest.raises(TransportError, match="segment 0 is attached already"):
        one.transport.attach(0, other)
    stop_all(ranks)


def test_detached_memory_is_not_written_any_more(job):
    zero, one = make(job, rate=2e4, shuffle=3)
    for i in range(250):  # 12 seconds: enough for this thread to come in between
        zero.put(1, 0, 0, 1000, value=i + 1)
    one.wait(0, 1)
    one.transport.detach(0)
    one.memory[:] = 77
    assert "segment 0 is not attached on rank 1" in zero.failure()
    assert (one.memory == 77).all()
    for rank in (zero, one):
        rank.proxy.stop()
        rank.transport.close()


def test_stop_gives_up_after_its_deadline(job):
    zero, one = make(job, latency=10 * HANG)
    zero.put(1, 0, 0, 8)
    eventually(lambda: zero.producer.consumed == 1, "the request is taken")
    start = time.monotonic()
    assert not zero.proxy.stop(0.2)
    assert 0.15 < time.monotonic() - start < HANG
    assert zero.proxy.error is None
    assert (zero.producer.consumed, zero.producer.completed, one.signals[0]) == (1, 0, 0)
    with pytest.raises(TransportError, match="stopped before all was served"), zero.proxy:
        pass
    zero.transport.close()
    stop_all([one])


def test_statistics(job):
    zero, one = ranks = make(job)
    for i in range(10):
        zero.put(1, 0, 0, 100, value=i + 1)
    one.wait(0, 10)
    eventually(lambda: zero.proxy.statistics.completions == 10, "completions")
    eventually(lambda: zero.proxy.statistics.idle_loops > 100, "idle loops")
    stop_all(ranks)
    statistics = zero.proxy.statistics
    assert (statistics.requests, statistics.bytes, statistics.completions) == (10, 1000, 10)
    assert 1 <= statistics.most_in_flight <= 10
    assert statistics.busy_loops >= 1
    assert one.proxy.statistics.requests == 0


def test_an_idle_proxy_takes_little_time(job):
    (rank,) = make(job, size=1)
    eventually(lambda: rank.proxy.statistics.idle_loops > 1000, "idle loops")
    before, used, start = rank.proxy.statistics.idle_loops, time.process_time(), time.monotonic()
    time.sleep(0.5)
    rounds, used, passed = (
        rank.proxy.statistics.idle_loops - before,
        time.process_time() - used,
        time.monotonic() - start,
    )
    assert rounds < passed / 40e-6
    assert used < 0.5 * passed
    time.sleep(1.0)
    before, start = rank.proxy.statistics.idle_loops, time.monotonic()
    time.sleep(0.3)
    assert rank.proxy.statistics.idle_loops - before < (time.monotonic() - start) / 0.8e-3
    rank.data[:8] = 5
    rank.put(0, 0, 8, 8)
    rank.wait(0, 1)  # it has not fallen asleep
    stop_all([rank])


def test_pinning(job):
    with LoopbackTransport(job, 0) as transport:
        producer = Producer()
        with Proxy(producer.ring, transport, cpu=0) as proxy:
            eventually(lambda: proxy.statistics.idle_loops > 0, "a round")
        proxy = Proxy(producer.ring, transport, cpu=1000)
        eventually(lambda: proxy.error is not None, "an error")
        assert "cannot be pinned to core 1000" in proxy.error
        with pytest.raises(ArgumentError, match="cpu"):
            Proxy(producer.ring, transport, cpu=-2)


def test_what_is_refused(job):
    with LoopbackTransport(job, 0) as transport:
        with pytest.raises(TransportError, match="has a rank 0 in this process already"):
            LoopbackTransport(job, 0)
        with pytest.raises(ArgumentError, match="contiguous"):
            transport.attach(1, torch.zeros(4, 4).t()[1:])
        with pytest.raises(ArgumentError, match="segment must be from 0"):
            transport.attach(1 << 24, torch.zeros(4))
        with pytest.raises(ArgumentError, match="rate must be positive"):
            LoopbackTransport(job, 1, rate=-1.0)
    with pytest.raises(TransportError, match="was closed"):
        transport.attach(1, torch.zeros(4))
    LoopbackTransport(job, 0).close()  # the number is free again


def test_nothing_hangs_or_leaks_when_it_is_just_dropped(job):
    for _ in range(3):
        rank = Rank(LoopbackTransport(job, 0))
        rank.put(0, 0, 0, 8)
        del rank
    LoopbackTransport(job, 0).close()


@pytest.mark.parametrize("end", ["", "import os\nif os.fork(): os.wait()"])
@pytest.mark.thorough
def test_the_interpreter_ends_with_a_proxy_running(end):
    program = f"""
import torch
from mkernel.net import LoopbackTransport, Proxy, TcpTransport
ring = torch.zeros(72, dtype=torch.int64)
ring[{CAPACITY}] = 8
one, two = LoopbackTransport("end", 0, latency=60.0), TcpTransport(0, 2, b"s" * 16)
proxies = [Proxy(ring, one), Proxy(ring.clone(), two)]
{end}
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stderr) == (0, "")
