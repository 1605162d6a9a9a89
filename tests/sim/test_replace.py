"""Device functions replaced for one run (`Options.replace`): by the function that is named, not by its source."""

import pytest
import torch
import triton
import triton.language as tl
from support.operator_calls import run

import mkernel as mk
from mkernel.lang import hints, signals
from mkernel.ops.all_gather_matmul import protocol
from mkernel.runtime.world import Launch
from mkernel.sim.scheduler import Options
from mkernel.testing import check


@triton.jit
def number():
    return 1


@triton.jit
def another_number():
    return 20


@triton.jit
def one_more():
    return number() + 1


@triton.jit
def twice():
    return number() + number()


@triton.jit
def apply(FUNCTION: tl.constexpr):
    return FUNCTION()


@triton.jit
def write(out):
    tl.store(out, number())
    tl.store(out + 1, twice())
    tl.store(out + 2, apply(number))


@triton.jit
def write_given(out, FUNCTION: tl.constexpr):
    tl.store(out, FUNCTION())


@triton.jit
def write_nothing(out):
    tl.store(out, -1)


def results(kernel=write, replace=None, **constants):
    def on_rank(group):
        out = torch.zeros(3)
        arguments = {"out": out, **constants}
        group.launch(Launch(op="write", group=group, kernel=kernel, grid=1, arguments=arguments))
        return out.tolist()

    return run(on_rank, cluster=(1, 1), replace=replace or {})[0]


def test_a_function_is_replaced_wherever_it_is_called():
    assert results(replace={number: another_number}) == [20, 40, 20]
    assert results(write_given, {number: another_number}, FUNCTION=number)[0] == 20


def test_other_runs_are_not_touched():
    assert results() == [1, 2, 1]
    results(replace={number: another_number})
    assert results() == [1, 2, 1]
    assert results(replace={twice: another_number}) == [1, 20, 1]


def test_a_replacement_may_call_what_it_replaces():
    assert results(replace={number: one_more}) == [2, 4, 2]


def test_two_functions_may_change_places():
    assert results(replace={number: twice, twice: number}) == [2, 1, 2]


def test_a_kernel_is_replaced():
    assert results(replace={write: write_nothing})[0] == -1


def test_names_of_the_kernel_s_module_are_looked_up_again(monkeypatch):
    assert results(replace={twice: another_number}) == [1, 20, 1]
    monkeypatch.setitem(globals(), "number", one_more.__class__(another_number.fn))
    assert results(replace={twice: another_number}) == [20, 20, 20]


@triton.jit
def promise_nothing(signals, mask, expected):
    pass


def test_a_hint_is_replaced():
    """Without it, the simulator believes that a wait guarantees all that its signal has reached."""

    def on_rank(group):
        return mk.all_gather_matmul(torch.ones(16, 16), torch.ones(16, 16))

    run(on_rank, cluster=(1, 2), replace={hints.waited_for: promise_nothing})


@triton.jit
def refuse_nothing(context, reason, peer, seen, expected):
    pass


def test_a_function_that_is_never_called_is_an_error():
    with pytest.raises(mk.ArgumentError, match=r"replace: .*signals\.refuse was never called in this run.*nothing"):
        results(replace={number: another_number, signals.refuse: refuse_nothing})


def test_that_is_said_even_if_the_run_failed():
    def on_rank(group):
        raise ValueError("something else")

    with pytest.raises(mk.ArgumentError, match=r"signals\.refuse was never called") as caught:
        run(on_rank, cluster=(1, 1), replace={signals.refuse: refuse_nothing})
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_function_that_is_called_under_its_new_name_alone_was_not_reached():
    """`twice` calls `number` itself: that it runs does not mean that it stood for `one_more`."""
    with pytest.raises(mk.ArgumentError, match="one_more was never called"):
        results(replace={one_more: number})


def not_for_devices():
    return 1


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        ({"number": another_number}, "'number'.*must be a @triton.jit function"),
        ({not_for_devices: another_number}, "not_for_devices.*must be a @triton.jit function"),
        ({number: not_for_devices}, "not_for_devices.*must be a @triton.jit function"),
        ({number: number}, "number.*itself"),
        ({signals.notify: another_number}, r"another_number.*signal, value.*signals\.notify"),
    ],
)
def test_refusals(replace, message):
    with pytest.raises(mk.ArgumentError, match=message):
        Options(replace=replace)


@triton.jit
def wait_for_nothing(comm, gather, source, chunk, ROLE: tl.constexpr):
    return True


def gathers(group):
    y = mk.all_gather_matmul(torch.full((16, 16), group.rank + 1.0), torch.eye(16))
    assert torch.equal(y[:, 0], torch.arange(1.0, group.size + 1).repeat_interleave(16))


def test_check_finds_a_broken_protocol():
    """The one that is not broken passes, in the same schedules."""
    check(gathers, nodes=2, gpus_per_node=1, schedules=5)
    with pytest.raises(mk.SimulatorError) as caught:
        check(gathers, nodes=2, gpus_per_node=1, sim=Options(replace={protocol.wait_chunk: wait_for_nothing}))
    assert caught.value.schedule == "in-order"


def test_check_does_not_compile_again_for_every_schedule():
    from mkernel.sim import interpreter

    compiled = []
    compile_one = interpreter._compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_compile", lambda *args: compiled.append(args[0]) or compile_one(*args))
        check(writes, gpus_per_node=1, schedules=3, sim=Options(replace={number: one_more}))
    assert len(compiled) == len(set(compiled))


def writes(group):
    out = torch.zeros(3)
    group.launch(Launch(op="write", group=group, kernel=write, grid=1, arguments={"out": out}))
