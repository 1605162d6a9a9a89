"""Ctrl-C while CTAs run in this process."""

import os
import signal
import threading

import pytest
import torch

import mkernel as mk
from mkernel.sim import interrupts, launches


class Swallows:
    """Python prints and forgets what is raised in here."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # where the handler runs
            pass


@pytest.fixture
def handler():
    """The handler of the test runner, given back."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("handler")
def test_an_interrupt_in_a_destructor_is_not_lost():
    ran = []

    def work():
        with interrupts.deferred() as check:
            check()
            Swallows()
            ran.append("on")
            check()
            ran.append("too far")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert ran == ["on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("handler")
def test_an_interrupt_that_nobody_looked_for_comes_at_the_end():
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        Swallows()


@pytest.mark.usefixtures("handler")
def test_a_handler_of_the_users_own_is_left_alone():
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append("mine"))
    with interrupts.deferred() as check:
        os.kill(os.getpid(), signal.SIGINT)
        check()
    assert seen == ["mine"]


def test_other_threads_have_no_handlers():
    failures = []

    def run():
        try:
            with interrupts.deferred() as check:
                check()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures


@pytest.mark.usefixtures("handler")
def test_an_interrupt_ends_a_launch_and_breaks_its_group(monkeypatch):
    group = mk.init()
    a = torch.ones(16, 16)
    mk.all_gather_matmul(a, a)
    launch_done = launches.Execution._launch_done

    def interrupted(self, running):
        os.kill(os.getpid(), signal.SIGINT)
        launch_done(self, running)

    monkeypatch.setattr(launches.Execution, "_launch_done", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mk.all_gather_matmul(a, a)
    monkeypatch.undo()
    with pytest.raises(mk.MKernelError, match="left all_gather_matmul on KeyboardInterrupt"):
        mk.all_gather_matmul(a, a)
    assert group.broken
    assert (mk.all_gather_matmul(a, a, group=mk.init()) == 16).all()
