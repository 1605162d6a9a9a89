"""The thread of a simulated rank.

PyTorch keeps much of its state per thread: grad mode, inference mode, autocast, the backward pass that is running. So
the Python code of every rank has a thread. Only one of them runs at a time: the scheduler resumes a thread, and does
nothing until the thread waits or ends. All choices are the scheduler's, none are the operating system's.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatch

AUTOCAST_DEVICES = ("cpu", "cuda")
POLL_SECONDS = 1.0  # between two checks of a thread that runs for long
STUCK_SECONDS = 3.0  # after which a function that has not noticed RankExit is given up
MOST_EXITS = 100  # how often code may catch RankExit and wait again


class RankExit(BaseException):
    """Raised in the Python code of a rank to end it."""


class RankThread:
    """A thread that runs only while the thread that resumes it waits.

    Ctrl-C may raise KeyboardInterrupt anywhere in `resume`, and `end` then raises RankExit anywhere in the code of the
    rank. So `_running` says whose turn it is, and the locks only wake the thread that waits for it to change: being
    woken once too often does no harm.
    """

    def __init__(self, name: str, function: Callable[[], None]):
        """`function` sees the context variables and the PyTorch modes of the thread that calls this."""
        context, torch_state = contextvars.copy_context(), _torch_state()

        def run() -> None:
            with torch_state():
                function()

        self.ended = False
        self._function = lambda: context.run(run)
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._started = False
        self._running = False
        self._ending = False
        self._exits = 0
        self._resumed, self._waiting = threading.Lock(), threading.Lock()
        self._resumed.acquire()
        self._waiting.acquire()

    # -- in the scheduler's thread

    def resume(self) -> None:
        """Let the thread run until it waits or ends. KeyboardInterrupt, or what else a signal handler raises, is raised
        here, while the thread runs on: call `end` then."""
        if not self._started:
            self._started = True
            self._thread.start()
        self._running = True
        _wake(self._resumed)
        try:
            self._wait_for_it()
        except BaseException as interrupt:
            if hasattr(interrupt, "add_note"):
                interrupt.add_note(f"{self._thread.name} was running:\n{self._stack()}")
            raise

    def end(self) -> None:
        """Raise RankExit in the function, wherever it is, and wait until the thread has ended."""
        if not self._started:
            return
        self._ending = True
        _wake(self._resumed)  # Ctrl-C may have ended `resume` before it did this
        if self._running and not self._raise_exit():
            return  # it is inside a function that does not return: it will end when that does
        self._running = True
        _wake(self._resumed)
        self._wait_for_it()

    def _wait_for_it(self) -> None:
        """Wait until the thread waits or ends."""
        while self._running and not self.ended:
            # in steps: the scheduler may run in the thread of a rank, too, and a function cannot be interrupted there
            if not self._waiting.acquire(timeout=POLL_SECONDS) and not self._thread.is_alive():
                self.ended = True  # RankExit kept it from saying so
        if self.ended and self._thread.is_alive():
            self._thread.join()

    def _raise_exit(self) -> bool:
        """Raise RankExit in the thread, as soon as it runs Python code. Return False if it does not: it is inside a
        function that does not return."""
        before, deadline = self._position(), time.monotonic() + STUCK_SECONDS
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(RankExit))
        while self._running and not self.ended and self._position() == before:
            if time.monotonic() > deadline:
                return False
            self._waiting.acquire(timeout=0.01)
        return True

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread.ident or 0)

    def _position(self) -> tuple[FrameType | None, int]:
        """Where in its code the thread is."""
        frame = self._frame()
        return frame, frame.f_lasti if frame is not None else 0

    def _stack(self) -> str:
        return "".join(traceback.format_stack(self._frame())).rstrip()

    # -- in the thread itself

    def is_current(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def wait(self) -> None:
        """Let others run until the thread is resumed."""
        if self._ending:
            self._exits += 1
            if self._exits < MOST_EXITS:
                raise RankExit
        self._running = False
        self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        while True:
            try:
                while not self._running:
                    _wake(self._waiting)
                    self._resumed.acquire()
                break
            except RankExit:  # raised by `end`, after which it is raised below
                pass
        if self._ending:
            raise RankExit

    def _main(self) -> None:
        try:
            self._wait_for_turn()
            self._function()
        except RankExit:
            pass
        finally:
            self.ended, self._running = True, False
            _wake(self._waiting)


def _wake(lock: threading.Lock) -> None:
    """Let the thread that waits for the lock continue."""
    with contextlib.suppress(RuntimeError):  # it is not locked: nobody waits, or somebody has been woken before
        lock.release()


def _torch_state() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """The modes of PyTorch that this thread is in. The function returned enters them in another thread."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    autocast = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in AUTOCAST_DEVICES
    ]
    caches = torch.is_autocast_cache_enabled()
    function_modes = _get_current_function_mode_stack()
    dispatch_modes = dispatch._get_current_dispatch_mode_stack()

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        for device, enabled, dtype in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(caches)
        with torch.inference_mode(inference), contextlib.ExitStack() as modes:
            torch.set_grad_enabled(grad)
            for mode in function_modes:
                _push_mode(mode)
                modes.callback(_pop_mode)
            for mode in dispatch_modes:
                dispatch._push_mode(mode)
                modes.callback(dispatch._pop_mode)
            yield

    return enter
