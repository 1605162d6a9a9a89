"""Functions that all ranks of a group call together."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch

from mkernel.runtime import group_names
from mkernel.runtime.group import GroupLike, resolve

# C functions, looked up once: every call asks them
frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback  # None unless torch.compile runs
count_modes = torch._C._len_torch_dispatch_stack
current_transform = torch._C._functorch.peek_interpreter_stack
is_autocasting = torch._C._is_any_autocast_enabled
FAKE_MODE = torch._C._TorchDispatchModeKey.FAKE  # of FakeTensorMode
Function = TypeVar("Function", bound=Callable[..., Any])
Runner: TypeAlias = "Callable[[GroupLike | None, tuple[Any, ...], dict[str, Any]], Any]"


def collective(function: Function, repeat: Callable[..., Any] | None = None) -> Function:
    """Decorates functions that all ranks of a group call together: if the call fails on one rank before its launch, it
    fails on the others, too. `group` is anything that stands for a group (`GroupLike`), and defaults to the current
    group. A function that another one of them calls leaves it to the outer one to tell the other ranks.

    Args:
        repeat: takes some of the function's arguments, and returns what the function would return for them if the call
            is prepared (`PreparedCalls`), otherwise None. It is asked first, unless PyTorch has to see the call.
    """
    run, run_untraced = _runners(function, repeat)

    @functools.wraps(function)
    def call(*args: Any, group: GroupLike | None = None, **kwargs: Any) -> Any:
        if frame_callback() is None:  # nobody compiles what this calls
            return run(group, args, kwargs)
        return run_untraced(group, args, kwargs)

    return call  # type: ignore[return-value]


def _runners(function: Callable[..., Any], repeat: Callable[..., Any] | None) -> tuple[Runner, Runner]:
    """Two functions that make a collective call, given the group, the positional and the other arguments. The second
    one is for calls while torch.compile runs: it keeps it from compiling what they call."""
    parameters = list(inspect.signature(repeat).parameters.values()) if repeat is not None else []
    taken = frozenset(parameter.name for parameter in parameters)
    positional = sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in parameters)

    def run(group: GroupLike | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        resolved = resolve(group)
        if resolved._in_call:
            return function(*args, group=resolved, **kwargs)
        resolved._in_call = True
        try:
            resolved._check_usable()
            if repeat is not None and len(args) == positional and taken.issuperset(kwargs) and not is_watched():
                result = repeat(*args, group=resolved, **kwargs)
                if result is not None:
                    return result
            return function(*args, group=resolved, **kwargs)
        except BaseException as failure:
            resolved.failed(function.__name__, failure)
            raise
        finally:
            resolved._in_call = False

    untraced: Any = None

    def run_untraced(group: GroupLike | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal untraced
        if untraced is None:
            dynamo = sys.modules["torch._dynamo"]
            untraced = dynamo.disable(run, reason=f"{function.__name__} runs between graphs")
        return untraced(group, args, kwargs)

    return run, run_untraced


def is_watched() -> bool:
    """Does PyTorch have to see the calls that are made now: to cast their arguments, or for a mode or a transform?
    (Calls on tensors that require grad are another matter.)"""
    return count_modes() > 0 or current_transform() is not None or is_autocasting()


def traceable(repeat: Callable[..., Any] | None = None) -> Callable[[Function], Function]:
    """`collective`, for functions that PyTorch can also trace into a graph, or run on tensors without values. While it
    does, there is nothing to tell other ranks, and the function is passed the name of its group, because a graph can
    hold no Python object."""
    return functools.partial(_traceable, repeat)


def _traceable(repeat: Callable[..., Any] | None, function: Function) -> Function:
    run, run_untraced = _runners(function, repeat)

    @functools.wraps(function)
    def call(*args: Any, group: GroupLike | None = None, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, group=group_names.name_in_graph(group), **kwargs)
        if count_modes() and torch._C._get_dispatch_mode(FAKE_MODE) is not None:
            return function(*args, group=group_names.name_in_graph(resolve(None) if group is None else group), **kwargs)
        if frame_callback() is None:  # nobody compiles what this calls
            return run(group, args, kwargs)
        return run_untraced(group, args, kwargs)

    return call  # type: ignore[return-value]
