"""The Python code of every simulated rank has a thread: PyTorch's state per thread is the rank's own, backward passes
may wait for other ranks, and the order of tasks is still the scheduler's choice alone."""

import contextlib
import contextvars
import os
import signal
import sys
import threading
import time
import traceback
from random import Random

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import mkernel as mk
from mkernel.sim import launches, rank_thread
from mkernel.sim.choices import Choices, Systematic

from .harness import simulate

WORLDS = [(1, 2), (1, 3), (2, 2)]
HANG = 60.0  # seconds


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.fixture
def handler():
    """Python's own handler of Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# -- backward passes


class GatheredLinear(torch.autograd.Function):
    """The rows of all ranks times this rank's weight: a column-parallel layer behind a sequence-parallel one."""

    @staticmethod
    def forward(ctx, x, weight, group):
        y, x_all = mk.all_gather_matmul(x, weight.t(), group=group, return_gathered=True)
        ctx.save_for_backward(x_all, weight)
        ctx.group = group
        return y

    @staticmethod
    def backward(ctx, grad):
        x_all, weight = ctx.saved_tensors
        ctx.group.barrier()
        x_grad = mk.matmul_reduce_scatter(grad.contiguous(), weight)  # in the current group
        return x_grad, grad.t() @ x_all, None


ROWS, HIDDEN, COLUMNS = 3, 8, 6


def operands(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ROWS, HIDDEN, generator=generator), torch.randn(COLUMNS, HIDDEN, generator=generator)


def loss_of(y):
    return (y.relu().square() * torch.arange(1, y.numel() + 1, dtype=y.dtype).view_as(y)).sum() / y.numel()


def gradients(group, wrap=lambda function: function):
    x, weight = (operand.requires_grad_() for operand in operands(group.rank))
    loss_of(wrap(GatheredLinear.apply)(x, weight, group)).backward()
    return x.grad, weight.grad


def expected_gradients(size):
    """In float64, by rank."""
    xs, weights = zip(*([operand.double().requires_grad_() for operand in operands(rank)] for rank in range(size)))
    sum(loss_of(torch.cat(xs) @ weight.t()) for weight in weights).backward()
    return [(x.grad, weight.grad) for x, weight in zip(xs, weights)]


def check_gradients(found, size):
    for mine, expected in zip(found, expected_gradients(size), strict=True):
        for gradient, reference in zip(mine, expected, strict=True):
            torch.testing.assert_close(gradient.double(), reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("nodes", "gpus"), WORLDS)
@pytest.mark.thorough
def test_backward_passes_wait_for_other_ranks(nodes, gpus):
    for seed in range(10):
        found = simulate(gradients, nodes=nodes, gpus=gpus, seed=seed)
        check_gradients(found, nodes * gpus)
        if seed == 0:
            again = simulate(gradients, nodes=nodes, gpus=gpus, seed=seed)
            for mine, same in zip(found, again, strict=True):
                assert all(map(torch.equal, mine, same))


@pytest.mark.parametrize("schedule", ["in-order", "reversed", "alternating", "late:0", "stall:1.host@3"])
def test_backward_passes_in_named_schedules(schedule):
    check_gradients(simulate(gradients, gpus=2, schedule=schedule), 2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_recompute_in_the_backward_pass(reentrant):
    def checkpointed(function):
        return lambda *args: checkpoint(function, *args, use_reentrant=reentrant)

    for seed in range(2):
        check_gradients(simulate(gradients, checkpointed, gpus=3, seed=seed), 3)


class WaitsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if ctx.group.rank == 1:
            raise ValueError("rank 1 has had enough")
        ctx.group.barrier()
        return grad, None


def test_a_failure_while_others_wait_in_a_backward_pass():
    caught = []

    def on_rank(group):
        try:
            WaitsInBackward.apply(torch.ones(2, requires_grad=True), group).sum().backward()
        except Exception as failure:
            caught.append((group.rank, str(failure)))
            raise

    for seed in range(10):
        with pytest.raises(ValueError, match="rank 1 has had enough") as failure:
            simulate(on_rank, gpus=3, seed=seed)
        if sys.version_info >= (3, 11):
            assert f"seed={seed}, which reproduces" in "".join(failure.value.__notes__)
        places = [frame.name for frame in traceback.extract_tb(failure.value.__traceback__)]
        assert places.index("on_rank") < places.index("backward")
    assert caught == [(1, "rank 1 has had enough")] * 10, "other ranks must end without an Exception they could catch"


# -- PyTorch's modes


def modes():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
    )


def test_modes_are_a_ranks_own():
    own = [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
    ]

    def on_rank(group):
        before, seen = modes(), []
        with own[group.rank]():
            inside = modes()
            for _ in range(3):
                group.barrier()
                with torch.autocast("cpu", enabled=False):  # or the ranks would gather different dtypes
                    mk.all_gather_matmul(torch.ones(4, 4), torch.ones(4, 4))
                seen.append(modes() == inside)
        group.barrier()
        return before == modes(), seen, inside

    outside = modes()
    for seed in range(3):
        found = simulate(on_rank, nodes=2, gpus=2, seed=seed)
        assert [result[:2] for result in found] == [(True, [True] * 3)] * 4
        assert len({inside for _, _, inside in found}) == 4
        assert modes() == outside


@pytest.mark.parametrize(
    "of_the_caller",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.float16), torch.enable_grad],
)
def test_ranks_start_in_the_modes_of_the_caller(of_the_caller):
    def on_rank(group):
        before = modes()
        y = mk.matmul_all_reduce(torch.ones(4, 4), torch.ones(4, 4))
        with torch.inference_mode(False), torch.enable_grad():
            group.barrier()
            again = mk.matmul_all_reduce(torch.ones(4, 4), torch.ones(4, 4))
        return before, modes(), float(y.sum()), float(again.sum())

    with of_the_caller():
        mine = modes()
        assert simulate(on_rank, nodes=2, gpus=2) == [(mine, mine, 256.0, 256.0)] * 4
        assert modes() == mine


variable = contextvars.ContextVar("variable", default="default")


def test_ranks_see_the_context_and_the_settings_of_the_caller():
    def on_rank(group):
        before = variable.get()
        variable.set(f"rank {group.rank}")
        group.barrier()
        return before, variable.get(), torch.get_default_dtype(), torch.get_num_threads()

    token, threads, dtype = variable.set("caller"), torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        found = simulate(on_rank, gpus=3)
        assert variable.get() == "caller"
    finally:
        variable.reset(token)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
    assert found == [("caller", f"rank {rank}", torch.float64, 1) for rank in range(3)]


class Notes(TorchFunctionMode):
    def __init__(self):
        self.called = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.called.append((threading.current_thread().name, func))
        return func(*args, **(kwargs or {}))


def test_modes_that_see_operators_see_those_of_ranks():
    def on_rank(group):
        group.barrier()
        torch.ones(4, 4) @ torch.ones(4, 4)

    with FlopCounterMode(display=False) as flops, Notes() as notes:
        simulate(on_rank, gpus=3)
    assert flops.get_total_flops() == 3 * 2 * 4**3
    assert {name for name, func in notes.called if func is torch.ones} == {f"mkernel rank {i}" for i in range(3)}


# -- the order


@pytest.fixture
def recorded(monkeypatch):
    """Every choice that is made."""
    log = []
    for kind in (Choices, Systematic):
        pick, stays = kind.pick, kind.stays

        def record_pick(self, ready, slow, pick=pick):
            task = pick(self, ready, slow)
            log.append(([each.label for each in ready], task.label))
            return task

        def record_stays(self, task, stays=stays):
            log.append((task.label, stays(self, task)))
            return log[-1][1]

        monkeypatch.setattr(kind, "pick", record_pick)
        monkeypatch.setattr(kind, "stays", record_stays)
    return log


@pytest.mark.parametrize("options", [{"seed": 3}, {"seed": 4, "slow": {0: 0.1}}, {"schedule": "alternating"}])
def test_the_order_does_not_depend_on_the_operating_system(recorded, options):
    """Once undisturbed, and once with a thread that keeps taking the interpreter from the others."""
    simulate(gradients, nodes=2, gpus=2, **options)
    first = recorded.copy()
    recorded.clear()
    interval, over = sys.getswitchinterval(), threading.Event()

    def disturb():
        while not over.is_set():
            sum(range(100))

    thread = threading.Thread(target=disturb)
    thread.start()
    sys.setswitchinterval(1e-6)
    try:
        simulate(gradients, nodes=2, gpus=2, **options)
    finally:
        sys.setswitchinterval(interval)
        over.set()
        thread.join()
    assert any(label.endswith("host") for ready, label in first if isinstance(ready, list))
    assert recorded == first


def test_only_one_rank_runs_at_a_time():
    running = []

    def on_rank(group):
        for _ in range(50):
            running.append(group.rank)
            assert running == [group.rank]
            time.sleep(0)  # lets another thread run, if there were one
            running.pop()
            group.barrier()

    for seed in range(3):
        simulate(on_rank, gpus=4, seed=seed)


# -- the end


def test_threads_end_with_ranks_that_succeed():
    names = simulate(lambda group: threading.current_thread().name, gpus=3)
    assert names == ["mkernel rank 0", "mkernel rank 1", "mkernel rank 2"]


def test_threads_end_when_ranks_time_out():
    def on_rank(group):
        if group.rank:
            mk.all_gather_matmul(torch.ones(4, 4), torch.ones(4, 4))

    with pytest.raises(mk.CommTimeout):
        simulate(on_rank, gpus=3, timeout=1e-4)


def wait_for_nothing(group):
    group.world.scheduler.current_host().wait_until(lambda: False, "nothing")


def test_threads_end_in_a_deadlock():
    with pytest.raises(mk.Deadlock, match="rank 2, Python waits for nothing"):
        simulate(wait_for_nothing, gpus=3)


def test_code_that_ends_cleans_up_and_cannot_wait_again():
    log = []

    def on_rank(group):
        if group.rank == 1:
            group.barrier()
            raise ValueError("the end")
        try:
            group.barrier()
            wait_for_nothing(group)
        except Exception:
            log.append("an Exception")
            raise
        finally:
            try:
                group.barrier()
            finally:
                log.append("cleaned up")

    with pytest.raises(ValueError, match="the end"):
        simulate(on_rank, gpus=2)
    assert log == ["cleaned up"]


def test_code_that_never_gives_up_does_not_keep_the_others():
    attempts, threads, over = [], [], threading.Event()

    def on_rank(group):
        group.barrier()
        if group.rank == 1:
            raise ValueError("the end")
        threads.append(group.world.scheduler.current_host().thread)
        while not over.is_set():
            attempts.append(None)
            with contextlib.suppress(BaseException):
                wait_for_nothing(group)

    with pytest.raises(ValueError, match="the end"):
        simulate(on_rank, gpus=2, schedule="in-order")
    assert len(attempts) == rank_thread.MOST_EXITS + 1
    over.set()
    threads[0].resume()  # it has been waiting since


def test_a_group_that_a_rank_closes_ends_its_proxy():
    """Proxies are greenlets of another thread."""

    def on_rank(group):
        everyone = group.subset(range(group.size))
        y = mk.matmul_all_reduce(torch.ones(4, 4), torch.ones(4, 4), group=everyone)
        everyone.close()
        return float(y.sum()), sum(task.label.endswith("net") for task in group.world.scheduler.tasks)

    for seed in range(5):
        found = simulate(on_rank, nodes=2, gpus=1, seed=seed)
        assert [total for total, _ in found] == [128.0] * 2
        assert sorted(proxies for _, proxies in found) in ([2, 2], [2, 3])  # those of the world remain


@pytest.mark.parametrize("waits", [False, True])
def test_a_rank_may_simulate_a_cluster(waits):
    def inner(group):
        return float(mk.all_gather_matmul(torch.ones(4, 4), torch.ones(4, 4)).sum())

    def on_rank(group):
        if waits:
            group.barrier()
        found = simulate(inner, gpus=2, seed=group.rank)
        return found, float(mk.all_gather_matmul(torch.ones(4, 4), torch.ones(4, 4)).sum())

    assert simulate(on_rank, gpus=3) == [([128.0, 128.0], 192.0)] * 3


# -- Ctrl-C


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def run_for_long(seconds=HANG):
    """Python code that does not wait for other ranks."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pass
    pytest.fail("Ctrl-C has no effect")


@pytest.mark.usefixtures("handler")
def test_ctrl_c_ends_python_code_wherever_it_is():
    cleaned_up = []

    def on_rank(group):
        try:
            group.barrier()
            if group.rank == 1:
                press_ctrl_c()
                run_for_long()
            group.barrier()
        except Exception:
            pytest.fail("an Exception")
        finally:
            cleaned_up.append(group.rank)

    for seed in range(5):
        with pytest.raises(KeyboardInterrupt) as failure:
            simulate(on_rank, gpus=3, seed=seed)
        assert sorted(cleaned_up) == [0, 1, 2]
        cleaned_up.clear()
        if sys.version_info >= (3, 11):
            (note,) = failure.value.__notes__
            assert "mkernel rank 1 was running" in note
            assert "in run_for_long" in note


@pytest.mark.usefixtures("handler")
def test_ctrl_c_in_a_backward_pass():
    class Long(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            ctx.group.barrier()
            if ctx.group.rank == 1:
                press_ctrl_c()
                run_for_long()
            ctx.group.barrier()
            return grad, None

    with pytest.raises(KeyboardInterrupt):
        simulate(lambda group: Long.apply(torch.ones(2, requires_grad=True), group).sum().backward(), gpus=3)


@pytest.mark.usefixtures("handler")
def test_ctrl_c_while_a_rank_is_in_a_function_that_does_not_return(monkeypatch):
    monkeypatch.setattr(rank_thread, "STUCK_SECONDS", 0.2)
    over, threads = threading.Event(), []

    def on_rank(group):
        group.barrier()
        if group.rank == 1:
            threads.append(threading.current_thread())
            press_ctrl_c()
            over.wait()
            pytest.fail("the code of the rank continues")
        group.barrier()

    with pytest.raises(KeyboardInterrupt):
        simulate(on_rank, gpus=3)
    assert [thread for thread in threading.enumerate() if "mkernel" in thread.name] == threads
    over.set()
    threads[0].join(HANG)


@pytest.mark.usefixtures("handler")
def test_ctrl_c_in_a_kernel(monkeypatch):
    launch_done = launches.Execution._launch_done

    def interrupted(self, running):
        press_ctrl_c()
        launch_done(self, running)

    monkeypatch.setattr(launches.Execution, "_launch_done", interrupted)
    with pytest.raises(KeyboardInterrupt):
        simulate(lambda group: mk.all_gather_matmul(torch.ones(4, 4), torch.ones(4, 4)), gpus=3)


@pytest.mark.usefixtures("handler")
def test_ctrl_c_in_a_cluster_that_a_rank_simulates():
    def inner(group):
        group.barrier()
        if group.rank == 1:
            press_ctrl_c()
            run_for_long()
        group.barrier()

    with pytest.raises(KeyboardInterrupt):
        simulate(lambda group: simulate(inner, gpus=2), gpus=2)


def test_an_exception_in_a_signal_handler_of_the_users_own():
    """Such as the limit of a test runner: it is raised in the main thread, and ends the simulation."""
    cleaned_up = []

    def limit(*_):
        raise TimeoutError("that takes too long")

    def on_rank(group):
        try:
            group.barrier()
            if group.rank == 1:
                os.kill(os.getpid(), signal.SIGALRM)
                run_for_long()
            group.barrier()
        finally:
            cleaned_up.append(group.rank)

    before = signal.signal(signal.SIGALRM, limit)
    try:
        with pytest.raises(TimeoutError, match="that takes too long"):
            simulate(on_rank, gpus=3)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert sorted(cleaned_up) == [0, 1, 2]


@pytest.mark.usefixtures("handler")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_time_ends_all_threads():
    """Whatever it interrupts: the start of a thread, a handover, the end of one."""
    interrupted, random = 0, Random(0)

    def on_rank(group):
        for _ in range(20):
            group.barrier()

    for seed in range(60):
        timer = threading.Timer(random.uniform(0.0, 0.02), press_ctrl_c)
        try:
            timer.start()
            while timer.is_alive():
                simulate(on_rank, gpus=3, seed=seed)
            time.sleep(0.01)
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
        assert not [thread for thread in threading.enumerate() if "mkernel" in thread.name]
    assert interrupted > 50  # Python drops an exception that is raised in a destructor
