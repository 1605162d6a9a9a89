"""Processes on GPUs: what can be said without one."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mkernel.ops.reduce.all_reduce.plan import why_no_multicast
from mkernel.runtime import cuda_processes
from mkernel.runtime.cuda_processes import CudaProcesses, shares_of


@pytest.fixture
def world_of(monkeypatch):
    """world_of(uuids): the world of the first of so many processes, as if it had a GPU."""

    def make(uuids):
        gpus = [(uuid, 132) for uuid in uuids]
        exchange = SimpleNamespace(all_gather=lambda *_: gpus, messages=SimpleNamespace(key=b"", number=1))
        monkeypatch.setattr(cuda_processes, "introduce", lambda *_: (exchange, [0] * len(uuids)))
        monkeypatch.setattr(cuda_processes, "label_of", lambda *_: "process group 0")
        monkeypatch.setattr(cuda_processes, "take_device", lambda: torch.device("cuda", 0))
        monkeypatch.setattr(cuda_processes.dist, "get_rank", lambda _: 0)
        monkeypatch.setattr(cuda_processes.dist, "get_world_size", lambda _: len(uuids))
        properties = SimpleNamespace(uuid=uuids[0], multi_processor_count=132, major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        for name in ("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "TORCH_SYMMMEM_ALLOW_OVERLAPPING_DEVICES"):
            monkeypatch.setenv(name, "0")  # given back as it was
        return CudaProcesses(None, None, "auto", 1.0)

    return make


def test_every_rank_knows_every_share():
    """Plans ask for the CTAs of all ranks of a group, not only of their own."""
    assert shares_of([("a", 132), ("b", 80), ("a", 132), ("a", 132)]) == {0: 44, 1: 80, 2: 44, 3: 44}
    assert shares_of([("a", 2)] * 4) == dict.fromkeys(range(4), 1), "more ranks than SMs"


def group_of(world, nodes=1, multicast=False):
    """What a plan, or the world, asks of a group of all ranks."""
    size, device = world.size, world.devices[0]
    return SimpleNamespace(
        world=world, members=tuple(range(size)), size=size, nodes=nodes, device=device, target=device,
        multicast=multicast,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("uuids", "nodes", "reason"), [("abcd", 1, "symmetric memory provides none"), ("abca", 1, "share a GPU"),
                                   ("abcd", 2, "several nodes")],
)  # fmt: skip
def test_a_plan_knows_which_ranks_share_a_gpu(world_of, uuids, nodes, reason):
    """Of the other processes' GPUs this one has no device, only a name."""
    assert reason in why_no_multicast(group_of(world_of(uuids), nodes), small=False)


def test_with_multicast_nothing_speaks_against_it(world_of):
    assert why_no_multicast(group_of(world_of("abcd"), multicast=True), small=False) is None


@pytest.mark.parametrize(
    ("pointer", "uuids", "nodes", "others", "address"),
    [
        (1 << 40, "abcd", 1, True, 1 << 40),
        (0, "abcd", 1, True, 0),
        (None, "abcd", 1, True, 0),
        (1 << 40, "abcd", 1, False, 0),
        (1 << 40, "abcd", 2, True, 0),
        (1 << 40, "abca", 1, True, 0),
        (1 << 40, "a", 1, True, 0),
    ],
)
def test_the_multicast_address_is_that_of_symmetric_memory(world_of, pointer, uuids, nodes, others, address):
    """If all ranks have one, on GPUs of their own in one node."""
    world = world_of(uuids)
    memory = torch.zeros(128, dtype=torch.uint8)
    world.memory._handles[memory.data_ptr()] = SimpleNamespace(multicast_ptr=pointer)
    group = group_of(world, nodes)
    group.exchange = lambda what, mine: [mine, mine, others, mine]
    assert world.memory.map_multicast(group, memory, []) == address


def test_turns_of_symmetric_memory_are_counted_for_each_group():
    """As torch's C++ code asks: ranks whose processes have counted differently find each other."""
    shared = dist.HashStore()
    kept = [cuda_processes.RenumberedStore(dist.PrefixStore("job", shared), 0.05) for _ in range(2)]
    zero, one = (dist.PrefixStore("", store) for store in kept)
    for mine, theirs in ((7, 12), (8, 30)):
        zero.set(f"symmetric/{mine}/0", f"zero in {mine}")
        one.set(f"symmetric/{theirs}/1", f"one in {theirs}")
        zero.wait([f"symmetric/{mine}/1"])
        one.wait([f"symmetric/{theirs}/0"])
        assert zero.get(f"symmetric/{mine}/1") == f"one in {theirs}".encode()
        assert one.get(f"symmetric/{theirs}/0") == f"zero in {mine}".encode()
    zero.set("another name", "kept")
    assert one.get("another name") == b"kept"
    with pytest.raises(RuntimeError, match="did not arrive"):
        zero.wait(["symmetric/9/1"])
