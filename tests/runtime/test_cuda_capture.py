"""Captured graphs without a GPU: what stays out of a graph, the order in a graph, and calls that ranks capture or not.
The CUDA runtime and the driver are stand-ins."""

import contextlib
import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import mkernel as mk
from mkernel.runtime import cuda_capture, cuda_driver
from mkernel.sim.backend import SimLauncher

GLOBAL, RELAXED = 0, 2


class Driver:
    """A mode per thread, and the capture that each stream takes part in."""

    def __init__(self):
        self.modes = threading.local()
        self.captures = {}

    @property
    def mode(self):
        return getattr(self.modes, "value", GLOBAL)

    def exchange_capture_mode(self, mode):
        mode = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))
        mode[0], self.modes.value = self.mode, mode[0]
        return 0

    def capture_info(self, stream, status, number, *_):
        capture = self.captures.get(stream.value, 0)
        ctypes.cast(status, ctypes.POINTER(ctypes.c_int))[0] = int(capture != 0)
        ctypes.cast(number, ctypes.POINTER(ctypes.c_uint64))[0] = capture
        return 0

    def check(self, code):
        assert not code


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(cuda_driver, "driver", lambda: made)
    return made


@pytest.fixture
def stream(monkeypatch):
    """The default stream of a thread."""
    made = SimpleNamespace(synchronized=0)

    def synchronize():
        made.synchronized += 1

    made.synchronize = synchronize
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made)
    return made


def test_a_relaxed_thread(driver):
    with cuda_capture.relaxed():
        assert driver.mode == RELAXED
        with cuda_capture.relaxed():
            assert driver.mode == RELAXED
        assert driver.mode == RELAXED
    assert driver.mode == GLOBAL
    with pytest.raises(ValueError, match="no"), cuda_capture.relaxed():
        raise ValueError("no")
    assert driver.mode == GLOBAL


def test_memory_is_made_in_a_thread_of_its_own(driver, stream):
    """Whose mode is relaxed, and which waits for what it has queued."""
    seen = []

    def make(number):
        seen.append((threading.current_thread(), driver.mode, stream.synchronized))
        return 2 * number

    assert cuda_capture.apart("cuda:0", make, 21) == 42
    ((thread, mode, synchronized),) = seen
    assert thread is not threading.current_thread()
    assert (mode, synchronized, stream.synchronized) == (RELAXED, 0, 1)


def test_a_failure_in_that_thread_is_raised(driver, stream):
    def fail():
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        cuda_capture.apart("cuda:0", fail)


def test_without_a_driver(monkeypatch, stream):
    monkeypatch.setattr(cuda_driver, "driver", lambda: None)
    assert cuda_capture.apart("cuda:0", lambda: 3) == 3


class Stream:
    def __init__(self, number, log):
        self.cuda_stream, self._log = number, log

    def wait_event(self, event):
        self._log.append(("wait", self.cuda_stream, event.recorded))


def test_the_order_in_a_graph(driver, monkeypatch):
    """A launch waits for the rank's last one on another stream of the same capture, and for no other."""
    log = []

    class Event:
        def record(self, on):
            self.recorded = on.cuda_stream

    monkeypatch.setattr(torch.cuda, "Event", Event)
    one, two = Stream(1, log), Stream(2, log)
    launches = cuda_capture.CapturedLaunches()

    def launch(rank, stream):
        with launches.in_order(rank, stream):
            log.append(("launch", rank, stream.cuda_stream))

    driver.captures = {1: 7, 2: 7}
    for rank, on in ((0, one), (0, one), (0, two), (1, one), (0, one)):
        launch(rank, on)
    assert log == [
        ("launch", 0, 1), ("launch", 0, 1), ("wait", 2, 1), ("launch", 0, 2), ("launch", 1, 1), ("wait", 1, 2),
        ("launch", 0, 1),
    ]  # fmt: skip
    del log[:]
    driver.captures = {2: 8}
    launch(0, two)
    assert log == [("launch", 0, 2)]


def test_threads_begin_and_end_their_captures_one_by_one(monkeypatch):
    """PyTorch then changes the random generator of the GPU, which they share. They capture at the same time."""
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
    together, inside, log = threading.Barrier(2, timeout=10), threading.Lock(), []

    class Graph:
        def change(self, what):
            assert inside.acquire(blocking=False), "two threads at the same time"
            time.sleep(0.05)
            log.append(what)
            inside.release()

        def capture_begin(self, pool, capture_error_mode):
            self.change("begin")

        def capture_end(self):
            self.change("end")

    def capture(fails):
        failures = []
        group = SimpleNamespace(
            device=torch.device("cuda"), synchronize=lambda: None, barrier=together.wait,
            failed=lambda what, failure: failures.append(failure),
        )  # fmt: skip
        with contextlib.suppress(ValueError), cuda_capture.capture(group, Graph(), None, "stream"):
            together.wait()
            if fails:
                raise ValueError
        return failures

    for fails in (False, True):
        del log[:]
        with ThreadPoolExecutor(2) as pool:
            for failures in pool.map(capture, [fails] * 2):
                assert len(failures) == fails
        assert log == ["begin", "begin", "end", "end"]


def test_only_gpus_capture():
    def on_rank(group):
        with pytest.raises(mk.ArgumentError, match="CUDA graphs need a GPU"), group.capture(None):
            pass
        return True

    assert all(mk.spawn(on_rank, gpus_per_node=2, device="cpu"))


@pytest.fixture
def capturing(monkeypatch):
    """Ranks of the simulator that take their calls for captured ones."""
    ranks = set()
    monkeypatch.setattr(SimLauncher, "capturing", lambda self, rank: rank in ranks)
    return ranks


def operands(m=8):
    return torch.ones(m, 16), torch.ones(16, 16)


def test_ranks_that_capture_and_ranks_that_call(capturing):
    def on_rank(group):
        mk.all_gather_matmul(*operands())
        group.barrier()
        if group.rank == 1:
            capturing.add(1)
        with pytest.raises(mk.ArgumentError, match=r"pass the same values.*captured=True"):
            mk.all_gather_matmul(*operands())
        capturing.discard(1)
        return mk.all_gather_matmul(*operands())

    for y in mk.spawn(on_rank, gpus_per_node=2, device="cpu"):
        assert torch.equal(y, torch.full((16, 16), 16.0))


def test_workspaces_of_graphs_are_kept(capturing):
    """Also if they were made while the graph was captured; nothing is freed meanwhile."""

    def on_rank(group):
        freed = []
        real = group.heap._free
        group.heap._free = lambda numbers: (freed.append((group.capturing, set(numbers))), real(numbers))
        mk.all_gather_matmul(*operands())
        group.barrier()
        capturing.add(group.world_rank)
        mk.all_gather_matmul(*operands(200))  # a larger one
        (captured,) = group._captured
        assert not any(numbers for during, numbers in freed if during)
        capturing.discard(group.world_rank)
        group.barrier()
        mk.all_gather_matmul(*operands(600))
        assert group.heap.holds(captured.segment)
        assert any(numbers for _, numbers in freed)  # the one before it
        return True

    assert all(mk.spawn(on_rank, gpus_per_node=2, device="cpu"))


def test_first_calls_with_a_network_are_not_captured(capturing):
    def on_rank(group):
        capturing.add(group.world_rank)
        with pytest.raises(mk.ArgumentError, match="make a call of this shape before"):
            mk.all_gather_matmul(*operands())
        capturing.discard(group.world_rank)
        mk.all_gather_matmul(*operands())
        group.fresh = False  # as the launcher of GPUs does
        group.barrier()
        capturing.add(group.world_rank)
        return mk.all_gather_matmul(*operands())

    for y in mk.spawn(on_rank, nodes=2, gpus_per_node=1, device="cpu"):
        assert torch.equal(y, torch.full((16, 16), 16.0))
