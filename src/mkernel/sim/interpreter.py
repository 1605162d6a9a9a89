"""Triton functions as Python functions: the same kernel source, run on numpy.

`python_function` compiles the source of a @triton.jit function, once, into a Python function with its own globals, in
which triton.language is replaced by language.py, other @triton.jit functions by their Python functions, and
tl.constexpr by plain values. A run may replace some functions by others (`Options.replace`). Triton itself is not
patched, so a process can compile for a GPU while it simulates. File names and line numbers are those of the kernel.

Statements have the semantics of Triton's compiler: `x = 3` makes a tensor, `range` counts in tensors, `and` and `or` of
conditions are conditions. What the compiler refuses is refused here: a kernel that reads a global variable which is not
tl.constexpr, calls a Python function, or needs the value of a tensor on the host raises `mk.SimulatorError`, as it
would fail to compile for a GPU.
"""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import ConstexprFunction, JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from mkernel.runtime.errors import MKernelError
from mkernel.sim import dtypes, statements, tensors
from mkernel.sim.access import Descriptor
from mkernel.sim.cta import Cta, running
from mkernel.sim.dtypes import INT32, INT64, UINT64, KernelError, same_dtype
from mkernel.sim.language import BUILTINS, GIVES_TENSOR, HINTS, device_assert, native
from mkernel.sim.tensors import Tensor, to_tensor

JIT = (JITFunction, InterpretedFunction)
_MARK = "__mkernel_kernel__"  # in the globals of compiled functions
_TRITON = os.path.dirname(triton.__file__) + os.sep
_RANGES = (statements.counted, statements.unrolled)
_PLAIN = (bool, int, float, str, type(None))
_NOTHING: Mapping[Any, Any] = {}
MOST_PROGRAMS = 8  # that are kept, of those with replacements: a check runs one many times


# -- names


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields")


def _host_function(name: str, function: Callable) -> Callable:
    """A Python function that a kernel accesses through a module: as in Triton, it may be called with constants."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, (Tensor, Descriptor)) for arg in (*args, *kwargs.values())):
            raise KernelError(f"`{name}` is a Python function, which a kernel cannot call with tensors: "
                              "use triton.language, or make it a @triton.jit function")  # fmt: skip
        return function(*args, **kwargs)

    return call


_REFUSED = object()


def _translated(value: Any) -> Any:
    """The value of a global of the module in the kernel; _REFUSED if Triton's compiler refuses it."""
    if isinstance(value, tl.constexpr):
        return _constant(value)
    if isinstance(value, tl.dtype):
        return same_dtype(value)
    found = native(value)
    if found is not None:
        return found
    if isinstance(value, JIT):
        hint = None if value.fn in _program.replace else HINTS.get(value.fn.__name__)
        return hint or _compiled(value).function
    if isinstance(value, ConstexprFunction):
        return value.fn
    if isinstance(value, ModuleType) or _is_named_tuple(value):
        return value
    if getattr(value, "__triton_aggregate__", False):
        return value
    if str(getattr(value, "__module__", "")).startswith(("triton.language", "triton.experimental.gluon")):
        return value
    return _REFUSED


def _constant(value: Any) -> Any:
    """A compile-time constant as kernels see it."""
    if isinstance(value, tl.constexpr):
        return _constant(value.value)
    if isinstance(value, tl.dtype):
        return same_dtype(value)
    if isinstance(value, (tuple, list)):
        return _tuple_like(value, [_constant(part) for part in value])
    if isinstance(value, JIT):
        return _compiled(value).function
    return value


def _tuple_like(value: Any, parts: list[Any]) -> tuple[Any, ...]:
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _refuse(message: str) -> Any:
    raise KernelError(message)


def _value_of(value: Any) -> Any:
    """`x.value` of a constant, which Triton would keep in a tl.constexpr, is the constant."""
    return value if isinstance(value, (*_PLAIN, tl.dtype)) else value.value


# -- source


class _Compiler(ast.NodeTransformer):
    """Rewrites the body of a @triton.jit function, and collects the values of its names."""

    def __init__(self, function: FunctionType, definition: ast.FunctionDef):
        self.around: dict[str, Any] = function.__globals__
        self.enclosing = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
        self.trusted = function.__code__.co_filename.startswith(_TRITON)
        self.local = {node.id for node in ast.walk(definition)
                      if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}  # fmt: skip
        self.local |= {node.arg for node in ast.walk(definition) if isinstance(node, ast.arg)}
        self.names: dict[str, Any] = {
            _MARK: True, "__builtins__": {}, "(assigned)": statements.assigned, "(refuse)": _refuse,
            "(chosen)": statements.chosen, "(not)": statements.negated, "(decides)": statements.decides,
            "(combined)": statements.combined, "(value)": _value_of, "(assert)": device_assert,
            "(tuple)": tuple, "(shown)": statements.shown,
        }  # fmt: skip
        self.uses: list[tuple[dict[str, Any], str, Any]] = []  # which names were looked up where
        self.temporaries = 0

    def _call(self, node: ast.AST, name: str, *args: ast.expr) -> ast.Call:
        function = ast.Name(id=name, ctx=ast.Load())
        return ast.copy_location(ast.Call(func=ast.copy_location(function, node), args=list(args), keywords=[]), node)

    def _refusal(self, node: ast.AST, message: str) -> ast.Call:
        return self._call(node, "(refuse)", ast.copy_location(ast.Constant(value=message), node))

    def _temporary(self, node: ast.expr) -> tuple[ast.NamedExpr, ast.Name]:
        """An expression that keeps its value, and the value."""
        self.temporaries += 1
        name = f"({self.temporaries})"
        kept = ast.NamedExpr(target=ast.copy_location(ast.Name(id=name, ctx=ast.Store()), node), value=node)
        return ast.copy_location(kept, node), ast.copy_location(ast.Name(id=name, ctx=ast.Load()), node)

    # names

    def _look_up(self, node: ast.expr) -> tuple[str, Any] | None:
        """The value of a global name, or of an attribute of a module: its source and Triton's object."""
        if isinstance(node, ast.Name) and node.id not in self.local:
            if node.id in self.enclosing:
                return node.id, self.enclosing[node.id]
            if node.id in self.around:
                self.uses.append((self.around, node.id, self.around[node.id]))
                return node.id, self.around[node.id]
            if node.id in BUILTINS:
                return node.id, None
            return node.id, _REFUSED
        if isinstance(node, ast.Attribute):
            owner = self._look_up(node.value)
            if owner is not None and isinstance(owner[1], ModuleType):
                value = getattr(owner[1], node.attr, _REFUSED)
                self.uses.append((vars(owner[1]), node.attr, value))
                return f"{owner[0]}.{node.attr}", value
        return None

    def _resolved(self, node: ast.expr) -> tuple[str, Any] | None:
        """The value of a name in the kernel that is not local."""
        found = self._look_up(node)
        if found is None:
            return None
        name, value = found
        if value is None and name in BUILTINS and name not in self.around and name not in self.enclosing:
            return name, BUILTINS[name]
        if value is _REFUSED:
            return found
        meaning = _translated(value)
        if meaning is _REFUSED and isinstance(node, ast.Attribute) and callable(value):
            return name, _host_function(name, value)
        return name, meaning

    def _global(self, node: ast.expr) -> ast.expr | None:
        found = self._resolved(node)
        if found is None:
            return None
        name, value = found
        if isinstance(value, ModuleType):
            return self._refusal(node, f"a kernel cannot use a module as a value: {name}")
        if value is _REFUSED:
            known = name.split(".")[0] in self.enclosing or name.split(".")[0] in self.around
            return self._refusal(
                node,
                f"a kernel cannot use the global variable `{name}`: only values that are tl.constexpr, e.g. "
                f"{name} = tl.constexpr(...), @triton.jit functions, and modules are known to it"
                if known else f"the name `{name}` is not defined in the kernel, and not a builtin that Triton knows",
            )  # fmt: skip
        if isinstance(value, _PLAIN):
            return ast.copy_location(ast.Constant(value=value), node)
        self.names[name] = value
        return ast.copy_location(ast.Name(id=name, ctx=ast.Load()), node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not isinstance(node.ctx, ast.Load) or node.id in self.local:
            return node
        return self._global(node) or node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        found = self._global(node)
        if found is not None:
            return found
        if node.attr == "_data" and not self.trusted:
            return self._refusal(node, "a kernel cannot use the memory of a tensor on the host")
        self.generic_visit(node)
        return self._call(node, "(value)", node.value) if node.attr == "value" else node

    # statements

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list = []
        node.returns = None
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            argument.annotation = None
        # the values of defaults are those of the function
        nothing = [ast.copy_location(ast.Constant(value=None), node) for _ in arguments.defaults]
        arguments.defaults = list(nothing)
        arguments.kw_defaults = [default and ast.copy_location(ast.Constant(value=None), node)
                                 for default in arguments.kw_defaults]  # fmt: skip
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def _gives_tensor(self, node: ast.expr) -> bool:
        """Is the value certainly a tensor?"""
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Call):
            found = self._resolved(node.func)
            return found is not None and id(found[1]) in GIVES_TENSOR
        if isinstance(node, ast.BinOp):
            return self._gives_tensor(node.left) or self._gives_tensor(node.right)
        return False

    def _assigned(self, node: ast.expr) -> ast.expr:
        """The value to assign for a visited expression."""
        plain = self._gives_tensor(node)
        visited = self.visit(node)
        if plain:
            return visited
        if isinstance(visited, ast.Constant) and isinstance(visited.value, (bool, int, float)):
            name = f"({visited.value!r})"
            self.names[name] = to_tensor(visited.value)
            return ast.copy_location(ast.Name(id=name, ctx=ast.Load()), visited)
        return self._call(visited, "(assigned)", visited)

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        node.value = self._assigned(node.value)
        node.targets = [self.visit(target) for target in node.targets]
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        if not isinstance(node.target, ast.Name):
            return ast.copy_location(ast.Expr(self._refusal(node, "a kernel can only assign to variables")), node)
        read = ast.copy_location(ast.Name(id=node.target.id, ctx=ast.Load()), node)
        changed = ast.copy_location(ast.BinOp(left=read, op=node.op, right=node.value), node)
        return self.visit(ast.copy_location(ast.Assign(targets=[node.target], value=changed), node))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        found = self._look_up(node.annotation)
        is_constant = found is not None and found[1] is tl.constexpr
        value = self.visit(node.value) if is_constant else self._assigned(node.value)
        return ast.copy_location(ast.Assign(targets=[node.target], value=value), node)

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        if node.value is not None:
            node.value = self._assigned(node.value)
        return node

    def visit_For(self, node: ast.For) -> ast.stmt:
        found = self._resolved(node.iter.func) if isinstance(node.iter, ast.Call) else None
        if found is None or not any(found[1] is each for each in _RANGES):
            message = f"a loop in a kernel must be over range, tl.range or tl.static_range: {ast.unparse(node.iter)}"
            return ast.copy_location(ast.Expr(self._refusal(node.iter, message)), node)
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        test = self.visit(node.test)
        message = self.visit(node.msg) if node.msg is not None else ast.copy_location(ast.Constant(value=""), node)
        return ast.copy_location(ast.Expr(self._call(node, "(assert)", test, message)), node)

    # expressions

    def visit_List(self, node: ast.List) -> ast.expr:
        self.generic_visit(node)
        return ast.copy_location(ast.Tuple(elts=node.elts, ctx=node.ctx), node)

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        self.generic_visit(node)
        return self._call(node, "(tuple)", node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and self.names.get(node.func.id) is native(tl.pointer_type):
            parts = [self.names.get(each.id) if isinstance(each, ast.Name) else None for each in node.args]
            if len(parts) == 1 and isinstance(parts[0], tl.dtype) and not node.keywords:
                name = f"({parts[0]}*)"
                self.names[name] = dtypes.pointer_type(parts[0])
                return ast.copy_location(ast.Name(id=name, ctx=ast.Load()), node)
        return node

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.expr:
        self.generic_visit(node)
        node.value = self._call(node, "(shown)", node.value)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return self._call(node, "(not)", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        conjunction = ast.copy_location(ast.Constant(value=isinstance(node.op, ast.And)), node)
        result = node.values[0]
        for value in node.values[1:]:
            kept, again = self._temporary(result)
            rest = self._call(node, "(combined)", again, value, conjunction)
            test = self._call(node, "(decides)", kept, conjunction)
            result = ast.copy_location(ast.IfExp(test=test, body=again, orelse=rest), node)
        return result

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        kept, again = self._temporary(node.test)
        node.test = again
        return self._call(node, "(chosen)", kept, node)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if len(node.ops) > 1:
            return self._refusal(node, f"write `{ast.unparse(node)}` as two comparisons joined by `&` or `and`")
        return self.generic_visit(node)  # type: ignore[return-value]


class _Compiled:
    """A Python function, and what it was compiled from. stands_for: the function that it is called in place of."""

    def __init__(self, function: FunctionType, stands_for: FunctionType | None):
        self.function = function
        self.stands_for = stands_for
        self.uses: list[tuple[dict[str, Any], str, Any]] = []
        self.calls: set[_Compiled] = set()

    def current(self) -> bool:
        """Are all names unchanged, also in the functions that are called?"""
        seen, left = {self}, [self]
        while left:
            compiled = left.pop()
            if any(owner.get(name, _REFUSED) is not value for owner, name, value in compiled.uses):
                return False
            left += compiled.calls - seen
            seen |= compiled.calls
        return True


class _Program:
    """Functions that call each other. replace: function -> the one that is called in its place."""

    def __init__(self, replace: Mapping[FunctionType, FunctionType]):
        self.replace = replace
        self.compiled: weakref.WeakKeyDictionary[FunctionType, _Compiled] = weakref.WeakKeyDictionary()
        self.stand_ins: dict[FunctionType, _Compiled] = {}  # by what they stand for

    def forget(self) -> None:
        self.compiled.clear()
        self.stand_ins.clear()


_plain = _Program({})
_replacing: OrderedDict[frozenset[Any], _Program] = OrderedDict()  # those used last, by what they replace
_program = _plain  # the one that is compiled for
_compiling: list[_Compiled] = []  # the functions being compiled, each called by the one before
_lock = threading.RLock()


@contextmanager
def _compiling_for(replace: Mapping[Any, Any]) -> Iterator[None]:
    """Inside, the keys of `replace` mean its values."""
    global _program
    with _lock:
        before = _program
        _program = _plain
        if replace:
            key = frozenset((old.fn, new.fn) for old, new in replace.items())
            _program = _replacing.setdefault(key, _Program(dict(key)))
            _replacing.move_to_end(key)
            if len(_replacing) > MOST_PROGRAMS:
                _replacing.popitem(last=False)
        try:
            yield
        finally:
            _program = before


def _compiled(jit: Any) -> _Compiled:
    """What is called where a kernel says `jit`. A function that stands for another may call that one itself."""
    function = jit.fn
    if function in _program.replace and not (_compiling and _compiling[-1].stands_for is function):
        found = _program.stand_ins.get(function) or _compile(_program.replace[function], function)
    else:
        found = _program.compiled.get(function) or _compile(function)
    if _compiling:
        _compiling[-1].calls.add(found)
    return found


def _compile(function: FunctionType, stands_for: FunctionType | None = None) -> _Compiled:
    lines, first = inspect.getsourcelines(function)
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
    tree = ast.parse(textwrap.dedent("".join(lines[start:])))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    ast.increment_lineno(tree, first + start - 1)
    compiler = _Compiler(function, definition)
    names = compiler.names
    # it may be recursive: the function exists before its names are resolved
    result = _Compiled(FunctionType(_EMPTY, names), stands_for)
    cache, key = (_program.compiled, function) if stands_for is None else (_program.stand_ins, stands_for)
    cache[key] = result
    _compiling.append(result)
    try:
        tree.body = [compiler.visit_FunctionDef(definition)]
        if stands_for is not None:
            names["(replaced)"] = lambda: running.get().replaced.add(stands_for)
            called = ast.Expr(compiler._call(definition, "(replaced)"))
            definition.body.insert(0, ast.copy_location(called, definition))
        ast.fix_missing_locations(tree)
        module = compile(tree, inspect.getsourcefile(function) or "<kernel>", "exec")
        result.function.__code__ = next(code for code in module.co_consts if isinstance(code, CodeType))
        result.function.__defaults__ = tuple(_constant(default) for default in function.__defaults__ or ()) or None
        named = (function.__kwdefaults__ or {}).items()
        result.function.__kwdefaults__ = {name: _constant(default) for name, default in named} or None
        result.function.__name__ = result.function.__qualname__ = function.__name__
        result.uses = compiler.uses
    except BaseException:
        del cache[key]
        raise
    finally:
        _compiling.pop()
    return result


def _nothing() -> None: ...


_EMPTY = _nothing.__code__


def is_gluon(jit: Any) -> bool:
    return bool(getattr(jit, "is_gluon", lambda: False)())


def _gluon() -> ModuleType:
    """The implementation of Gluon; from now on, kernels may use it."""
    from mkernel.sim import gluon

    return gluon


def python_function(jit: Any, replace: Mapping[Any, Any] = _NOTHING) -> Callable[..., Any]:
    """The Python function for a @triton.jit function, to be called by `run`. replace: @triton.jit functions, and what
    is called in their place."""
    if is_gluon(jit):
        _gluon()
    with _compiling_for(replace):
        if not _compiled(jit).current():
            _program.forget()  # a global of some kernel is something else now
        return _compiled(jit).function


def _place_in_kernel(error: BaseException) -> str:
    """The line of the innermost kernel function that is not Triton's own."""
    place, traceback = "", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if _MARK in traceback.tb_frame.f_globals and not code.co_filename.startswith(_TRITON):
            place = f"{code.co_filename}:{traceback.tb_lineno}: "
        traceback = traceback.tb_next
    return place


def run(cta: Cta, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run the Python function of a kernel as one CTA."""
    token = running.set(cta)
    try:
        with np.errstate(all="ignore"):  # infinities and NaN are ordinary values, as on a GPU
            return function(*args, **kwargs)
    except KernelError as error:
        error.args = (_place_in_kernel(error) + str(error),)
        raise
    except MKernelError:
        raise
    except Exception as error:
        raise KernelError(f"{_place_in_kernel(error)}{type(error).__name__}: {error}") from error
    finally:
        running.reset(token)


# -- arguments


def kernel_arguments(jit: Any, arguments: dict[str, Any], replace: Mapping[Any, Any] = _NOTHING) -> dict[str, Any]:
    """Arguments of a launch as the kernel sees them: tensors become pointers, numbers scalars."""
    annotations = inspect.get_annotations(jit.fn)
    constants = {name for name, kind in annotations.items() if kind is tl.constexpr or "constexpr" in str(kind)}
    with _compiling_for(replace):
        return {name: _constant(value) if name in constants else argument(value) for name, value in arguments.items()}


def argument(value: Any) -> Any:
    """A value from the host as a kernel sees it."""
    if hasattr(value, "block_shape"):
        sizes = [Tensor(np.int32(size), INT32) for size in value.shape]
        strides = [Tensor(np.int64(stride), INT64) for stride in value.strides]
        if isinstance(value, TensorDescriptor):
            return Descriptor(argument(value.base), sizes, strides, value.block_shape, value.padding)
        return _gluon().GluonDescriptor(argument(value.base), sizes, strides, value)
    if hasattr(value, "data_ptr"):
        dtype = tl.str_to_ty(triton.runtime.jit.mangle_type(value), None)
        return Tensor(np.uint64(value.data_ptr()), same_dtype(dtype))
    if isinstance(value, (tuple, list)):
        return _tuple_like(value, [argument(part) for part in value])
    if isinstance(value, (bool, np.bool_)):
        return to_tensor(bool(value))
    if isinstance(value, (int, np.integer)):
        number = int(value)
        if -(2**31) <= number < 2**31:
            return Tensor(np.int32(number), INT32)
        if number < 2**63:
            return Tensor(np.int64(number), INT64)
        return Tensor(np.uint64(number), UINT64)
    if isinstance(value, (float, np.floating)):
        return Tensor(np.float32(value), dtypes.FLOAT32)
    return _constant(value)


# -- methods of tensors that Triton implements in its own language


def _method_of_triton(name: str, *args: Any, **kwargs: Any) -> Any:
    function = getattr(tl, name)
    with _lock:
        call = native(function) or _compiled(function).function
    return call(*args, **kwargs)


for _name in dir(tl.tensor):
    _function = getattr(tl, _name, None)
    if isinstance(_function, JIT) or tl.core.is_builtin(_function):
        tensors.methods.setdefault(_name, partial(_method_of_triton, _name))


assert tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
assert int(np.__version__.split(".")[0]) >= 2, "the interpreter relies on the promotion rules of numpy 2"
