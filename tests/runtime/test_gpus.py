"""GPUs that cannot run the kernels are refused before anything is launched."""

import pytest
import torch

import mkernel as mk
from mkernel.ops.moe.arguments import check_tokens
from mkernel.runtime import gpus
from mkernel.runtime.cuda import DeviceMemory

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def pretend(monkeypatch):
    def become(name, capability, hip=None):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "hip", hip)

    return become


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_supported(pretend, capability):
    pretend("NVIDIA GPU", capability)
    gpus.check_gpu(DEVICE)


@pytest.mark.parametrize(
    ("name", "capability", "hip"), [("Tesla T4", (7, 5), None), ("AMD Instinct MI300X", (9, 4), "6.4")]
)
def test_refused(pretend, name, capability, hip):
    """Where a world of GPUs is made, be it of threads or of processes."""
    pretend(name, capability, hip)
    with pytest.raises(mk.ArgumentError, match=rf"{name} \(cuda:0.*compute capability 8\.0 \(Ampere\) or newer.*'cpu'"):
        DeviceMemory({0: DEVICE})


def test_mixture_of_experts_needs_hopper(pretend):
    pretend("NVIDIA A100", (8, 0))

    class Group:
        device = target = DEVICE

    with pytest.raises(mk.ArgumentError, match=r"moe_ffn .* NVIDIA A100 \(cuda:0, compute capability 8\.0\) .* Hopper"):
        check_tokens("moe_ffn", Group(), torch.zeros(1, 16), torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize(("current", "local_rank", "taken"), [(0, None, 0), (0, "3", 3), (2, "3", 2), (0, "9", 1)])
def test_the_gpu_of_a_process(monkeypatch, current, local_rank, taken):
    """The current one, if it was chosen; a group of one rank is there, too."""
    chosen = [current]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert gpus.take_device() == torch.device("cuda", taken)
    assert chosen[-1] == taken
