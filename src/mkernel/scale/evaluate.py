"""Device functions on numpy arrays, so that the model takes its orders of tiles from the kernels' own source.

`call(tile_at, places, ..., cta=ctas, ctas=132)` runs the Python source of a @triton.jit function with numpy in place of
triton.language, for all elements of its arguments at once. It is for functions that compute with numbers and touch no
memory: which tile a CTA takes, whose rows they are, when they arrive.

An `if` whose condition differs between the elements runs both branches, and each element keeps what its own branch
assigned. Conditions on constants choose a branch, as in Triton. Where a function has a context, pass the rank instead,
which is all that such functions read of it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl

from mkernel.lang.context import rank_of

_launch: ContextVar[tuple[Any, Any]] = ContextVar("_launch")  # program id, number of programs


def call(function: Any, *arguments: Any, cta: Any = 0, ctas: Any = 1, **constants: Any) -> Any:
    """What a device function returns for CTA `cta` of `ctas`. Arguments may be arrays, and so may `cta`."""
    token = _launch.set((cta, ctas))
    try:
        return on_arrays(function)(*arguments, **constants)
    finally:
        _launch.reset(token)


@functools.cache
def on_arrays(function: Any) -> Any:
    """A device function as a Python function of arrays."""
    plain = function.fn
    tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    definition.returns = None
    for argument in (*definition.args.args, *definition.args.kwonlyargs):
        argument.annotation = None
    ast.increment_lineno(tree, inspect.getsourcelines(plain)[1] - 1)  # for tracebacks
    compiled = compile(ast.fix_missing_locations(_Branches().visit(tree)), inspect.getfile(plain), "exec")
    names = {name: _translated(value) for name, value in plain.__globals__.items() if name in _names(tree)}
    names.update(tl=_LANGUAGE, _differs=_differs, _either=_either, max=max, min=min)
    exec(compiled, names)
    return names[plain.__name__]


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _translated(value: Any) -> Any:
    """What a global name of a device function means here."""
    if value is rank_of:
        return lambda context: context
    if hasattr(value, "fn") and hasattr(value, "do_not_specialize"):  # a device function
        return lambda *arguments, **constants: on_arrays(value)(*arguments, **constants)
    return value.value if isinstance(value, tl.constexpr) else value


_LANGUAGE = SimpleNamespace(
    where=np.where,
    minimum=np.minimum,
    maximum=np.maximum,
    cdiv=lambda a, b: -(-a // b),
    program_id=lambda axis: _launch.get()[0],
    num_programs=lambda axis: _launch.get()[1],
    static_range=range,
    constexpr=None,
)


def _differs(condition: Any) -> bool:
    """Whether a condition is an array."""
    return np.ndim(condition) > 0


def _either(condition: Any, first: Any, second: Any) -> Any:
    """first where the condition holds, else second; None stands for a name that has no value."""
    if first is None or second is None:
        return second if first is None else first
    return np.where(condition, first, second)


class _Branches(ast.NodeTransformer):
    """Rewrites `if` for conditions that are arrays, and `x += y` so that no argument is changed."""

    def __init__(self) -> None:
        self._count = 0

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        assert isinstance(node.target, ast.Name)
        read = ast.Name(node.target.id, ast.Load())
        return ast.copy_location(ast.Assign([node.target], ast.BinOp(read, node.op, node.value)), node)

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        assigned = sorted(
            {
                target.id
                for part in ast.walk(ast.Module([*node.body, *node.orelse], []))
                if isinstance(part, (ast.Assign, ast.AugAssign))
                for target in ast.walk(part.targets[0] if isinstance(part, ast.Assign) else part.target)
                if isinstance(target, ast.Name)
            }
        )
        if any(isinstance(part, ast.Return) for part in ast.walk(ast.Module([*node.body, *node.orelse], []))):
            raise NotImplementedError("a device function that returns from inside an if")
        self._count += 1
        mark = self._count
        body = [statement for part in node.body for statement in _flat(self.visit(part))]
        orelse = [statement for part in node.orelse for statement in _flat(self.visit(part))]
        condition, then, before = f"_if{mark}", f"_then{mark}", f"_before{mark}"
        values = "{" + ", ".join(f"{name!r}: locals().get({name!r})" for name in assigned) + "}"
        both = [
            *_statements(f"{before} = {values}"),
            *body,
            *_statements(f"{then} = {values}"),
            *_statements("\n".join(f"{name} = {before}[{name!r}]" for name in assigned)),
            *orelse,
            *_statements("\n".join(f"{name} = _either({condition}, {then}[{name!r}], {name})" for name in assigned)),
        ]
        choose = ast.If(ast.Name(condition, ast.Load()), body or [ast.Pass()], orelse)
        differs = ast.Call(ast.Name("_differs", ast.Load()), [ast.Name(condition, ast.Load())], [])
        assign = ast.Assign([ast.Name(condition, ast.Store())], self.visit(node.test))
        return [ast.copy_location(part, node) for part in (assign, ast.If(differs, both, [choose]))]


def _statements(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


def _flat(visited: Any) -> list[ast.stmt]:
    return visited if isinstance(visited, list) else [visited]
