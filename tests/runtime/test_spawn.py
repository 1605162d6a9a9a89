"""mk.spawn and mk.init: what they take, and what they refuse."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import triton
import triton.language as tl
from support.patience import HANG

import mkernel as mk
from mkernel.runtime.group import current, set_current
from mkernel.runtime.world import Launch


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """These tests are about processes without one; and no group is left behind."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield
    set_current(None)


def right(a, b, y) -> bool:
    return torch.allclose(y, a @ b, atol=1e-4)


# -- spawn


@pytest.mark.parametrize("name", ["nodes", "gpus_per_node"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", None])
def test_numbers_of_ranks(name, value):
    with pytest.raises(mk.ArgumentError, match=name):
        mk.spawn(lambda group: None, device="cpu", **{name: value})


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf")])
def test_timeouts_that_make_no_sense(timeout):
    with pytest.raises(mk.ArgumentError, match="timeout"):
        mk.spawn(mk_all_gather, device="cpu", timeout=timeout)
    with pytest.raises(mk.ArgumentError, match="timeout"):
        mk.init(timeout=timeout)


def mk_all_gather(group):
    return mk.all_gather_matmul(torch.ones(4, 16), torch.ones(16, 4))


@pytest.mark.parametrize("device", ["tpu", "", "cuda:0", None])
def test_devices_that_do_not_exist(device):
    with pytest.raises(mk.ArgumentError, match="device must be"):
        mk.spawn(lambda group: None, device=device)


def test_cuda_needs_a_gpu():
    with pytest.raises(mk.ArgumentError, match="no GPU"):
        mk.spawn(lambda group: None, device="cuda")


def test_auto_is_the_simulator_without_a_gpu():
    assert mk.spawn(lambda group: group.device.type, nodes=1, gpus_per_node=1) == ["cpu"]


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 3), (3, 1), (2, 3)])
def test_results_come_by_rank(nodes, gpus):
    def rank(group, first, second):
        return group.rank, first + second

    found = mk.spawn(rank, 3, 4, nodes=nodes, gpus_per_node=gpus, device="cpu")
    assert found == [(number, 7) for number in range(nodes * gpus)]


def test_spawn_leaves_the_current_group_alone():
    group = mk.init()
    mk.spawn(lambda group: mk_all_gather(group), device="cpu")
    assert current() is group
    assert (mk_all_gather(group) == 16).all()


def test_clusters_one_after_the_other():
    for _ in range(5):
        for y in mk.spawn(mk_all_gather, nodes=2, gpus_per_node=1, device="cpu"):
            assert (y == 16).all()


# -- init


def test_one_rank_without_a_gpu():
    group = mk.init()
    assert (group.rank, group.size, group.nodes, group.gpus_per_node, group.device.type) == (0, 1, 1, 1, "cpu")
    for m in (40, 40, 7, 100, 40):
        a, b = torch.randn(m, 32), torch.randn(32, 24)
        assert right(a, b, mk.all_gather_matmul(a, b))
    x = mk.empty(16, 32, dtype=torch.float32).normal_()
    assert right(x, b, mk.all_gather_matmul(x, b, group=group))
    group.synchronize()
    group.barrier()


def test_a_second_init_is_a_new_group():
    first, second = mk.init(), mk.init()
    a, b = torch.randn(9, 16), torch.randn(16, 8)
    assert current() is second
    for _ in range(2):
        assert right(a, b, mk.all_gather_matmul(a, b, group=first))
        assert right(a, b, mk.all_gather_matmul(a, b))
    second.close()
    with pytest.raises(mk.MKernelError, match="closed"):
        mk.all_gather_matmul(a, b)
    assert right(a, b, mk.all_gather_matmul(a, b, group=first))


def test_one_rank_can_be_split():
    group = mk.init()
    part = group.split(3)
    assert part.size == 1
    assert group.split(None) is None
    a, b = torch.randn(9, 16), torch.randn(16, 8)
    assert right(a, b, mk.all_gather_matmul(a, b, group=part))


@pytest.mark.parametrize("arguments", [dict(transport="tcp"), dict(gpus_per_node=2)])
def test_arguments_for_several_processes(arguments):
    with pytest.raises(mk.ArgumentError, match="several processes"):
        mk.init(**arguments)


@triton.jit
def outside(x):
    if tl.program_id(0) == 1:
        tl.load(x + 1000)


def test_a_failure_in_a_kernel_does_not_break_the_next():
    group = mk.init()
    with pytest.raises(mk.SimulatorError):
        group.launch(Launch("all_gather_matmul", group, outside, 3, dict(x=torch.zeros(1))))
    a, b = torch.randn(9, 16), torch.randn(16, 8)
    assert right(a, b, mk.all_gather_matmul(a, b))
    assert not group.world.simulator.scheduler.tasks


# -- explain


def test_explain_tells_the_plan_and_launches_nothing():
    def rank(group):
        if group.rank == 0:  # alone
            plan = mk.explain("all_gather_matmul", torch.ones(100, 32), torch.ones(32, 16))
            return str(plan), group.heap.nbytes

    (words, held), _ = mk.spawn(rank, nodes=2, gpus_per_node=1, device="cpu")
    assert words.startswith("all_gather_matmul: tiles ")
    assert "CTAs" in words
    assert "\n- " in words
    assert held == 1024


@pytest.mark.parametrize("op", ["nothing", "", None, "matmul"])
def test_explain_of_no_operator(op):
    mk.init()
    with pytest.raises(mk.ArgumentError, match="there are: all_gather_matmul"):
        mk.explain(op, torch.ones(2, 2))


def test_explain_refuses_what_the_operator_refuses():
    mk.init()
    with pytest.raises(mk.ArgumentError, match="columns"):
        mk.explain("all_gather_matmul", torch.ones(4, 5), torch.ones(6, 7))
    with pytest.raises(mk.ArgumentError, match="dtype"):
        mk.explain("all_gather_matmul", torch.ones(4, 5).int(), torch.ones(5, 7).int())
    with pytest.raises(mk.ArgumentError, match="tile_m"):
        mk.explain("all_gather_matmul", torch.ones(4, 5), torch.ones(5, 7), config=mk.Config(tile_m=17))


def test_explain_needs_a_group():
    with pytest.raises(mk.MKernelError, match="there is no group"):
        mk.explain("all_gather_matmul", torch.ones(4, 5), torch.ones(5, 7))


@pytest.mark.parametrize("join_tiles", [2**30, 2**31, 2**40])
def test_numbers_that_kernels_can_not_count_to(join_tiles):
    """The kernel multiplies join_tiles by the number of helpers, in 32 bits: such a config is cut or refused."""

    def rank(group):
        config = mk.Config(join_tiles=join_tiles, intra_ctas=2)
        try:
            plan = mk.explain("all_gather_matmul", torch.ones(64, 32), torch.ones(32, 32), config=config)
        except mk.ArgumentError as error:
            return "join_tiles" in str(error)
        return plan.config.join_tiles * (plan.config.send_ctas + plan.config.intra_ctas) < 2**31

    assert mk.spawn(rank, device="cpu") == [True, True]


@pytest.mark.parametrize(("m", "k", "n"), [(0, 32, 8), (32, 0, 8), (32, 32, 0), (0, 0, 0)])
def test_explain_of_empty_matrices(m, k, n):
    """Whatever the operator computes can be explained."""

    def rank(group):
        a, b = torch.zeros(m, k), torch.zeros(k, n)
        y = mk.all_gather_matmul(a, b)
        return tuple(y.shape), bool((y == 0).all()), str(mk.explain("all_gather_matmul", a, b))

    for shape, zero, words in mk.spawn(rank, gpus_per_node=2, device="cpu"):
        assert (shape, zero) == ((2 * m, n), True)
        assert words.startswith("all_gather_matmul")


# -- packages that are not there


def without(packages: list[str], source: str) -> subprocess.CompletedProcess:
    gone = "".join(f"sys.modules[{package!r}] = None\n" for package in packages)
    return subprocess.run(
        [sys.executable, "-c", "import sys\n" + gone + textwrap.dedent(source)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )


@pytest.mark.parametrize("device", ["cpu", "auto"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(fn=3), "fn must be a function of a group.*got 3"),
        (dict(seed="7"), "seed must be an integer, got '7'"),
        (dict(links=450.0), r"links must be a mk\.Links, got float"),
        (dict(sim=dict(resident=1)), r"sim must be a mkernel\.sim\.scheduler\.Options, got dict"),
    ],
    ids=str,
)
def test_wrong_arguments_of_spawn(wrong, message, device):
    if "sim" in wrong and device == "auto":
        device = "cpu"  # GPUs do not look at it
    with pytest.raises(mk.ArgumentError, match=message):
        mk.spawn(**(dict(fn=print, device=device) | wrong))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(nvlink=0.0), "nvlink must be more than 0 GB/s"),
        (dict(network=-50.0), "network must be more than 0 GB/s"),
        (dict(network_latency=-1e-6), "network_latency must be 0 seconds or more"),
    ],
    ids=str,
)
def test_wrong_rates(wrong, message):
    with pytest.raises(mk.ArgumentError, match=message):
        mk.Links(**wrong)


def test_init_under_spawn():
    """A function written for torchrun does not continue in a group of one rank."""

    def on_rank(group):
        with pytest.raises(mk.MKernelError, match=f"this is rank {group.rank} of 2 under mk.spawn"):
            mk.init()
        return mk.all_gather_matmul(torch.ones(2, 16), torch.ones(16, 4)).shape

    assert mk.spawn(on_rank, device="cpu") == [(4, 4)] * 2


def test_a_group_of_another_rank():
    """Ranks of one process can get hold of each other's groups."""
    groups = {}

    def on_rank(group):
        groups[group.rank] = group
        part = group.split(group.rank)
        groups["part", group.rank] = part
        group.barrier()
        other = 1 - group.rank
        for wrong in (groups[other], groups["part", other]):
            with pytest.raises(mk.ArgumentError, match=f"Group of rank {other}, but this is rank {group.rank}"):
                mk.all_gather_matmul(torch.ones(2, 16), torch.ones(16, 4), group=wrong)
        return len(mk.all_gather_matmul(torch.ones(2, 16), torch.ones(16, 4), group=part))

    assert mk.spawn(on_rank, device="cpu") == [2, 2]


@pytest.mark.thorough
def test_the_package_can_be_imported_with_torch_and_triton_alone():
    done = without(
        ["greenlet", "typer", "rich"],
        """
        import mkernel as mk

        for name in mk.__all__:
            assert hasattr(mk, name), name
        print("imported")
        """,
    )
    assert done.stdout.strip() == "imported", done.stderr


@pytest.mark.parametrize("start", ["mk.spawn(print, device='cpu')", "mk.init()"])
@pytest.mark.thorough
def test_the_package_that_simulations_need_is_named(start):
    done = without(
        ["greenlet", "typer", "rich"],
        f"""
        import mkernel as mk

        try:
            {start}
        except mk.MKernelError as error:
            print(error)
        """,
    )
    assert "greenlet" in done.stdout, done.stderr
    assert "mkernel-gpu[sim]" in done.stdout


@pytest.mark.thorough
def test_the_simulator_needs_no_command_line_packages():
    done = without(
        ["typer", "rich"],
        """
        import torch, mkernel as mk
        print(mk.spawn(lambda group: mk.all_gather_matmul(torch.ones(4, 16), torch.ones(16, 4)).sum().item(),
                       device="cpu"))
        """,
    )
    assert done.stdout.strip() == "[512.0, 512.0]", done.stderr
