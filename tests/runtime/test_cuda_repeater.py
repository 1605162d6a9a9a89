"""Repeated launches on GPUs, in the order of a rank's calls. Streams, events and launches are stand-ins."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from mkernel.runtime.cuda import CudaLauncher, DeviceMemory
from mkernel.runtime.cuda_repeater import CudaRepeater, Repeated
from mkernel.runtime.world import Launch

DEVICE = torch.device("cuda", 1)


class Gpu:
    """The state of PyTorch's CUDA runtime that matters here, and a log of what was done."""

    def __init__(self):
        self.log, self.device, self.stream, self.capturing = [], DEVICE.index, 7, False

    @contextlib.contextmanager
    def on(self, device):
        before, self.device = self.device, device.index
        yield
        self.device = before


class Stream:
    def __init__(self, gpu, name):
        self._gpu, self.name = gpu, name

    def __eq__(self, other):
        return self.name == other.name

    def __hash__(self):
        return hash(self.name)

    def wait_event(self, event):
        self._gpu.log.append(("wait", self.name))


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: made.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: (index, made.stream), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: made.capturing, raising=False)
    monkeypatch.setattr(torch.cuda, "device", made.on)
    return made


def repeater_of(gpu, stream):
    event = SimpleNamespace(record=lambda on: gpu.log.append(("record", on.name)))
    launcher = CudaLauncher({0: DEVICE}, {0: 8}, network=None)
    launcher.last[0] = (stream, event)
    return CudaRepeater(launcher, {0: DEVICE}, threads=None), launcher


def ready_on(gpu, stream):
    def start(addresses):
        gpu.log.append(("launch", gpu.device, addresses))

    return SimpleNamespace(stream=stream, start=start)


GROUP = SimpleNamespace(size=1)


def test_launches_on_one_stream(gpu):
    stream = Stream(gpu, "s")
    repeater, _ = repeater_of(gpu, stream)
    for ready in (ready_on(gpu, stream), ready_on(gpu, Stream(gpu, "s"))):
        repeater.launch(0, GROUP, ready, [1, 2])
    assert gpu.log == 2 * [("launch", 1, [1, 2]), ("record", "s")]


def test_a_launch_on_another_stream_waits_for_the_last_one(gpu):
    streams = [Stream(gpu, name) for name in "st"]
    repeater, launcher = repeater_of(gpu, streams[0])
    for stream in (streams[1], streams[1], streams[0]):
        repeater.launch(0, GROUP, ready_on(gpu, stream), [])
        assert launcher.last[0][0] is stream
    steps = [("wait", "t"), ("launch", 1, []), ("record", "t")]
    assert gpu.log == [*steps, *steps[1:], ("wait", "s"), ("launch", 1, []), ("record", "s")]


def test_the_rank_s_device_is_current_during_a_launch(gpu):
    stream = Stream(gpu, "s")
    repeater, _ = repeater_of(gpu, stream)
    gpu.device = 0
    repeater.launch(0, GROUP, ready_on(gpu, stream), [])
    assert gpu.log[0] == ("launch", DEVICE.index, [])
    assert gpu.device == 0


def test_ranks_confirm_before_the_launch(gpu):
    stream = Stream(gpu, "s")
    repeater, _ = repeater_of(gpu, stream)
    group = SimpleNamespace(size=2, confirm=lambda: gpu.log.append("confirm"))
    repeater.launch(0, group, ready_on(gpu, stream), [])
    assert gpu.log[:2] == ["confirm", ("launch", 1, [])]


def test_a_stream_that_captures_has_no_key(gpu):
    repeater, _ = repeater_of(gpu, Stream(gpu, "s"))
    assert repeater.stream_key(0) == (1, 7)
    gpu.capturing = True
    assert repeater.stream_key(0) is None


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("current", [0, 1])
def test_tensors_are_allocated_on_the_rank_s_device(gpu, monkeypatch, private, current):
    """PyTorch's quickest function allocates on the current device; it may be missing in other versions."""
    allocated = []

    def on_current(*layout):
        allocated.append((gpu.device, *layout))

    def on_device(*layout, dtype, device):
        allocated.append((device.index, *layout, dtype))

    name = "_empty_strided_cuda"
    if private:
        monkeypatch.setattr(torch._C._dynamo.guards, name, on_current)
    else:
        monkeypatch.delattr(torch._C._dynamo.guards, name)
    monkeypatch.setattr(torch, "empty_strided", on_device)
    monkeypatch.setattr("mkernel.runtime.cuda.check_gpu", lambda device: None)
    gpu.device = current
    DeviceMemory({0: DEVICE}).maker(0, torch.zeros(3, 5, 2, dtype=torch.float16))()
    assert allocated == [(DEVICE.index, (3, 5, 2), (10, 2, 1), torch.float16)]


def test_pytorch_s_quickest_allocation_takes_these_arguments():
    made = torch._C._dynamo.guards._empty_strided_cpu((3, 5), (5, 1), torch.float16)
    assert (made.shape, made.stride(), made.dtype) == ((3, 5), (5, 1), torch.float16)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("new", [False, True])
def test_ranks_wait_for_each_other_after_the_first_launch_of_a_kernel(monkeypatch, new, repeats):
    """What follows it may have to be loaded, on any rank, while kernels wait for a proxy. But a rank that repeats a
    launch does not wait for the others."""
    launcher = CudaLauncher({0: DEVICE, 1: DEVICE}, {0: 8, 1: 8}, network=None)
    monkeypatch.setattr(launcher, "start", lambda *args: None)
    monkeypatch.setattr(launcher.loader, "load", lambda rank, launch, stream: new and rank == 0)
    launcher.repeater = SimpleNamespace(start=lambda *args: None)
    groups = [SimpleNamespace(fresh=False) for _ in range(2)]
    launches = {rank: (Launch("op", group, None, 1, {}), None) for rank, group in enumerate(groups)}
    if repeats:
        launches[1] = (Repeated(None, []), None)
    launcher.launch_together(launches)
    assert [group.fresh for group in groups] == 2 * [new and not repeats]
