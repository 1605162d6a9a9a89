"""Triton functions as Python functions: the same kernel source, run on numpy.

Triton brings an interpreter, which runs the CTAs of one kernel one after the other. This module
takes its arithmetic (`InterpreterBuilder`) and replaces what the simulator needs to be different:

- memory operations go to the running CTA's view of memory, atomics are points where another task
  may run, and the few inline-assembly strings of lang/device.py are known;
- bf16 is right: Triton's interpreter multiplies its raw 16-bit integers in `tl.dot` and truncates
  where the GPU rounds to nearest even;
- scalars work with every numpy (int() of a one-element array is an error since 2.4);
- infinities and NaN are values like others, as on a GPU: numpy does not warn of them. Each operation sees to that for
  itself, since other tasks, and the user's own code, run between two of them;
- any @triton.jit function can be run, whether or not TRITON_INTERPRET was set when it was defined,
  so a process with a GPU can simulate too.

While `interpreting()` is active, Triton's language is patched process-wide: no kernel can be
compiled for a GPU meanwhile.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import triton
import triton.compiler.code_generator  # keeps functions of the language: must not see patched ones
import triton.language as tl
import triton.runtime.interpreter as base
from triton._C.libtriton import interpreter as _native
from triton._C.libtriton import ir as _ir
from triton.language.semantic import TritonSemantic
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from mkernel.runtime.errors import SimulatorError

SEMANTIC = "__mkernel_semantic__"
silently = np.errstate(all="ignore")  # a decorator, of functions in which no other task can run


class Cta(Protocol):
    """What a running CTA must provide; the simulator's tasks do."""

    program_id: int
    num_programs: int

    def load(self, addresses: Any, mask: Any, other: Any, dtype: np.dtype, descriptor: bool) -> np.ndarray: ...
    def store(self, addresses: Any, values: Any, mask: Any, descriptor: bool = False) -> None: ...
    def barrier(self) -> None: ...
    def atomic(
        self, addresses: np.ndarray, mask: np.ndarray, size: int, acquire: bool, release: bool, only_looks: bool,
        act: Callable[[], Any],
    ) -> Any: ...  # fmt: skip
    def clock(self) -> int: ...
    def acquire_for_descriptors(self) -> None: ...
    def complete_descriptor_stores(self) -> None: ...
    def store_everywhere(self, addresses: np.ndarray, values: np.ndarray) -> None: ...
    def load_from_all(self, addresses: np.ndarray, dtype: np.dtype) -> list[np.ndarray]: ...
    def fence_aliases(self) -> None: ...
    def stamp(self) -> int: ...
    def on_dot(self, products: int) -> None: ...


def _bf16_to_fp32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _fp32_to_bf16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _to_fp32(data: np.ndarray, element: Any) -> np.ndarray:
    return _bf16_to_fp32(data) if element == tl.bfloat16 else data.astype(np.float32)


def _words_of(pieces: np.ndarray) -> np.ndarray:
    """The addresses of the 32-bit words of pieces of 16 bytes."""
    if (pieces % 16).any():
        raise SimulatorError("a multicast access is not aligned to 16 bytes")
    return (pieces.reshape(-1, 1) + np.arange(0, 16, 4)).reshape(-1)


def _as_bools(mask: np.ndarray) -> np.ndarray:
    """A mask that was made from a scalar condition comes as integers."""
    return mask.astype(bool, copy=False)


class _Results:
    """What `create_inline_asm` gives back."""

    def __init__(self, *handles: base.TensorHandle):
        self.handles = handles

    def get_result(self, index: int) -> base.TensorHandle:
        return self.handles[index]


class Builder(base.InterpreterBuilder):
    """Triton's interpreter with memory, atomics and bf16 replaced."""

    def __init__(self) -> None:
        super().__init__()
        # checking every integer operation for overflow takes half of the time
        self.options = base.InterpreterOptions(sanitize_overflow=False)
        self.cta: Cta | None = None

    def running(self) -> Cta:
        assert self.cta is not None
        return self.cta

    def create_get_program_id(self, axis):
        return base.TensorHandle(np.array([self.running().program_id if axis == 0 else 0], dtype=np.int32), tl.int32)

    def create_get_num_programs(self, axis):
        return base.TensorHandle(np.array([self.running().num_programs if axis == 0 else 1], dtype=np.int32), tl.int32)

    # memory; newer Tritons pass one cache policy where older ones pass two hints

    def create_masked_load(self, ptrs, mask, other, *hints, descriptor=False, volatile=False, **named_hints):
        element = ptrs.get_element_ty()
        dtype = base._get_np_dtype(element)
        fill = np.zeros((), dtype=dtype) if other is None else other.data
        if isinstance(mask, np.ndarray):  # descriptors of older Tritons bring a plain array
            mask = base.TensorHandle(mask, tl.int1)
        chosen = _as_bools(mask.data)
        return base.TensorHandle(self.running().load(ptrs.data, chosen, fill, dtype, descriptor, volatile), element)

    def create_masked_store(self, ptrs, value, mask, *hints, descriptor=False):
        plain = _as_bools(mask if isinstance(mask, np.ndarray) else mask.data)
        element = base._get_np_dtype(ptrs.get_element_ty())
        self.running().store(ptrs.data, value.data.astype(element, copy=False), plain, descriptor)

    def create_load(self, ptr, cache, eviction, volatile=False):
        return self.create_masked_load(
            ptr, base.TensorHandle(np.ones_like(ptr.data, dtype=bool), tl.int1), None, volatile=volatile
        )

    def create_store(self, ptr, val, *hints):
        self.create_masked_store(ptr, val, np.ones_like(ptr.data, dtype=bool))

    def create_descriptor_load(self, desc, indices, *hints):
        ptrs, mask = desc.materialize_pointers(indices)
        end = self.running().unused_from.get(int(desc.base.data[0]))
        mask = _as_bools(mask if isinstance(mask, np.ndarray) else mask.data)
        if end is None:
            return self.create_masked_load(ptrs, mask, None, descriptor=True)
        used = max(end - int(indices[-2].data[0]), 0)
        mask = np.array(np.broadcast_to(mask, ptrs.data.shape))
        unused = mask[..., used:, :].copy()
        mask[..., used:, :] = False
        block = self.create_masked_load(ptrs, mask, None, descriptor=True)
        block.data[..., used:, :].view(np.uint8)[...] = np.where(np.repeat(unused, block.data.itemsize, -1), 255, 0)
        return block

    def create_descriptor_store(self, desc, value, indices):
        ptrs, mask = desc.materialize_pointers(indices)
        self.create_masked_store(ptrs, value, mask, descriptor=True)

    def create_barrier(self, *scope):
        self.running().barrier()

    def waited_for(self, signals, mask, expected):
        pointers, chosen, wanted = (semantic.to_tensor(x).handle.data for x in (signals, mask, expected))
        self.running().waited_for(pointers, _as_bools(chosen), wanted)

    def used_below(self, descriptor, row):
        self.running().unused_from[int(descriptor.handle.base.data[0])] = int(semantic.to_tensor(row).handle.data[0])

    # atomics

    def create_atomic_rmw(self, rmwOp, ptr, val, mask, sem, scope):
        operation = self.ir_rmw_op_to_interpreter_rmw_op[rmwOp]
        # waiting CTAs read by adding nothing, and keep the newest time by a maximum
        only_looks = (rmwOp == _ir.ATOMIC_OP.ADD and not val.data.any()) or rmwOp == _ir.ATOMIC_OP.MAX
        order = self.ir_sem_to_interpreter_sem[sem]

        chosen = _as_bools(mask.data)

        def act():
            return _native.atomic_rmw(operation, ptr.data, val.data, chosen, order)

        return base.TensorHandle(self._atomic(ptr, chosen, sem, only_looks, act), val.dtype.scalar)

    def create_atomic_cas(self, ptr, cmp, val, sem, scope):
        order = self.ir_sem_to_interpreter_sem[sem]

        def act():
            return _native.atomic_cas(ptr.data, cmp.data, val.data, order)

        everything = np.ones(ptr.data.shape, dtype=bool)
        return base.TensorHandle(self._atomic(ptr, everything, sem, False, act), cmp.dtype.scalar)

    def _atomic(self, ptr, mask, sem, only_looks, act):
        both = sem == _ir.MEM_SEMANTIC.ACQUIRE_RELEASE
        acquire = both or sem == _ir.MEM_SEMANTIC.ACQUIRE
        release = both or sem == _ir.MEM_SEMANTIC.RELEASE
        size = base._get_np_dtype(ptr.get_element_ty()).itemsize
        return self.running().atomic(ptr.data, mask, size, acquire, release, only_looks, act)

    def create_inline_asm(self, inlineAsm, constraints, values, type, isPure, pack):
        if "/* trace */" in inlineAsm:
            return _Results(base.TensorHandle(np.array([self.running().stamp()], dtype=np.int64), tl.int64))
        if "%globaltimer" in inlineAsm:
            return _Results(base.TensorHandle(np.array([self.running().clock()], dtype=np.int64), tl.int64))
        if "cp.async.bulk.wait_group" in inlineAsm:
            self.running().complete_descriptor_stores()
            return _Results(base.TensorHandle(np.zeros(1, dtype=np.int32), tl.int32))
        if "multimem.st" in inlineAsm:
            pieces, *words = (value.data for value in values)
            self.running().store_everywhere(_words_of(pieces), np.stack(words, axis=-1).reshape(-1))
            return _Results(base.TensorHandle(np.zeros(pieces.shape, dtype=np.int32), tl.int32))
        if "multimem.ld_reduce" in inlineAsm:
            return _Results(*(base.TensorHandle(words, tl.int32) for words in self._sums(inlineAsm, values[0].data)))
        if "fence.proxy.alias" in inlineAsm:
            self.running().fence_aliases()
            return _Results(base.TensorHandle(np.zeros(1, dtype=np.int32), tl.int32))
        if "fence.proxy.async" in inlineAsm:
            self.running().acquire_for_descriptors()
            return _Results(base.TensorHandle(np.zeros(1, dtype=np.int32), tl.int32))
        if "bar.sync" in inlineAsm:
            self.running().barrier()
            return _Results(base.TensorHandle(np.zeros(1, dtype=np.int32), tl.int32))
        if "prefetch" in inlineAsm:
            return _Results(base.TensorHandle(np.zeros(values[0].data.shape, dtype=np.int32), tl.int32))
        raise NotImplementedError(f"the simulator does not know the instruction {inlineAsm!r}")

    @silently
    def _sums(self, instruction: str, pieces: np.ndarray) -> list[np.ndarray]:
        """The four words of each piece of 16 bytes that multimem.ld_reduce loads: sums over all members."""
        kind = {"bf16x2": tl.bfloat16, "f16x2": tl.float16, "v4.f32": tl.float32}
        element = next(kind[name] for name in kind if f"{name} " in instruction)
        parts = self.running().load_from_all(_words_of(pieces), np.dtype(np.uint32))
        widened = [_to_fp32(part.view(base._get_np_dtype(element)), element) for part in parts]
        total = widened[0]
        for more in widened[1:]:
            total = total + more
        rounded = _fp32_to_bf16(total) if element == tl.bfloat16 else total.astype(base._get_np_dtype(element))
        words = rounded.view(np.int32).reshape(*pieces.shape, 4)
        return [np.ascontiguousarray(words[..., place]) for place in range(4)]

    # numbers

    @silently
    def cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        data = src.data
        if source == target:
            return base.TensorHandle(data, target)
        if source == tl.bfloat16:
            data = _bf16_to_fp32(data)
        if target == tl.bfloat16:
            return base.TensorHandle(_fp32_to_bf16(data.astype(np.float32, copy=False)), target)
        return base.TensorHandle(data.astype(base._get_np_dtype(dst_type)), target)

    @silently
    def binary_op(self, lhs, rhs, op):
        if lhs.dtype.scalar != tl.bfloat16:
            return super().binary_op(lhs, rhs, op)
        result = op(_bf16_to_fp32(lhs.data), _bf16_to_fp32(rhs.data))
        return base.TensorHandle(result if result.dtype == bool else _fp32_to_bf16(result), tl.bfloat16)

    @silently
    def unary_op(self, arg, op):
        if arg.dtype.scalar != tl.bfloat16:
            return super().unary_op(arg, op)
        return base.TensorHandle(_fp32_to_bf16(op(_bf16_to_fp32(arg.data))), tl.bfloat16)

    ternary_op = silently(base.InterpreterBuilder.ternary_op)
    create_idiv = silently(base.InterpreterBuilder.create_idiv)
    create_fma = silently(base.InterpreterBuilder.create_fma)
    create_erf = silently(base.InterpreterBuilder.create_erf)
    create_rsqrt = silently(base.InterpreterBuilder.create_rsqrt)
    create_si_to_fp = create_ui_to_fp = create_fp_to_si = create_fp_to_ui = cast_impl
    create_fp_ext = create_fp_trunc = cast_impl

    def create_int_cast(self, src, dst_type, is_signed):
        return self.cast_impl(src, dst_type)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        return self.cast_impl(src, dst_type)

    @silently
    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        """Products and their sum are exact, like a tensor core's; the accumulator is rounded once."""

        def widen(operand):
            data = _bf16_to_fp32(operand.data) if operand.dtype.scalar == tl.bfloat16 else operand.data
            return data.astype(np.float64)

        self.running().on_dot(a.data.size * b.data.shape[-1])
        total = (np.matmul(widen(a), widen(b)) + d.data).astype(d.data.dtype)
        return base.TensorHandle(total, d.dtype.scalar)


# numpy's own functions warn, by themselves, where all elements are NaN
_WITHOUT_NAN = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}


def _min_max(self, input, val_reduce_op, idx_reduce_op=None, plain=base.ReduceOps.min_max):
    """`ReduceOps.min_max`; NaN is left out, unless there is nothing else."""
    return plain(self, input, _WITHOUT_NAN.get(val_reduce_op, val_reduce_op), idx_reduce_op)


builder = Builder()
semantic = TritonSemantic(builder)


class _Rewriter(ast.NodeTransformer):
    """`x = value` becomes `x = to_tensor(value)`, as Triton's compiler does it."""

    def visit_Assign(self, node):
        self.generic_visit(node)
        if isinstance(node.targets[0], ast.Tuple):
            return node
        wrapper = ast.Attribute(value=ast.Name(id=SEMANTIC, ctx=ast.Load()), attr="to_tensor", ctx=ast.Load())
        node.value = ast.Call(func=wrapper, args=[node.value, ast.Constant(value=False)], keywords=[])
        return node


_python_functions: dict[Any, Callable] = {}


def python_function(jit: Any) -> Callable:
    """The Python function that does what a @triton.jit function does."""
    function = jit.fn
    if function.__name__ in ("waited_for", "used_below"):  # of lang/hints.py
        return getattr(builder, function.__name__)
    if function not in _python_functions:
        lines, first = inspect.getsourcelines(function)
        start = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
        tree = ast.parse(textwrap.dedent("".join(lines[start:])))
        tree = ast.fix_missing_locations(_Rewriter().visit(tree))
        ast.increment_lineno(tree, first + start - 1)
        names: dict[str, Any] = {}
        around = function.__globals__
        enclosing = inspect.getclosurevars(function).nonlocals
        if enclosing:
            around = {**around, **enclosing}
        around[SEMANTIC] = semantic
        exec(compile(tree, inspect.getsourcefile(function) or "<kernel>", "exec"), around, names)
        _python_functions[function] = names[function.__name__]
    return _python_functions[function]


def kernel_arguments(jit: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a launch as the kernel sees them: tensors become pointers, integers scalars."""
    annotations = inspect.get_annotations(jit.fn)
    constants = {name for name, kind in annotations.items() if kind is tl.constexpr or "constexpr" in str(kind)}
    return {name: value if name in constants else _convert(value) for name, value in arguments.items()}


def _convert(value: Any) -> Any:
    if isinstance(value, TensorDescriptor):
        strides = [_convert(stride) for stride in value.strides]
        strides[-1] = tl.constexpr(1)
        return semantic.make_tensor_descriptor(
            base=_convert(value.base),
            shape=[_convert(size) for size in value.shape],
            strides=strides,
            block_shape=[tl.constexpr(size) for size in value.block_shape],
            padding_option=value.padding,
        )
    if isinstance(value, bool):
        return tl.tensor(base.TensorHandle(np.array([value]), tl.int1), tl.int1)
    if isinstance(value, (int, np.integer)) or hasattr(value, "data_ptr"):
        return base._implicit_cvt(value)
    return value


def _scalar(tensor: tl.tensor) -> Any:
    return tensor.handle.data.reshape(-1)[0].item()


_one_thread = threading.RLock()


@contextlib.contextmanager
def interpreting() -> Iterator[Builder]:
    """Inside, Triton's language acts on numpy arrays, and jit functions can be called: everywhere in the process, so
    one thread at a time can be inside."""
    scope = base._LangPatchScope()

    def patch_builtins(owner: Any) -> None:
        for name, member in inspect.getmembers(owner):
            if tl.core.is_builtin(member):

                def call(*args, member=member, **kwargs):
                    kwargs.pop("_semantic", None)
                    return member(*args, **kwargs, _semantic=semantic)

                scope.set_attr(owner, name, call)

    with _one_thread:
        try:
            for owner in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
                patch_builtins(owner)
            for module in (tl, tl.core):
                base._patch_lang_core(module, scope)
            base._patch_lang_tensor(tl.tensor, scope)
            scope.set_attr(base.ReduceOps, "min_max", _min_max)
            scope.set_attr(base.ReduceScanOpInterface, "apply", silently(base.ReduceScanOpInterface.apply))
            scope.set_attr(tl.tensor, "__index__", lambda self: int(_scalar(self)))
            scope.set_attr(tl.tensor, "__bool__", lambda self: bool(_scalar(self)))
            for kind in (JITFunction, base.InterpretedFunction):
                scope.set_attr(kind, "__call__", lambda self, *args, **kwargs: python_function(self)(*args, **kwargs))
            yield builder
        finally:
            scope.restore()
            builder.cta = None


assert triton.__version__ >= "3.6"
