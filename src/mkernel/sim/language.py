"""triton.language on `Tensor`: the functions that interpreted kernels call.

`native` maps a function of Triton to its implementation. Those that kernels use are implemented here, on numpy. Library
functions of Triton that are kernels themselves (tl.sort, tl.softmax, ...) are interpreted from their source. Any other
builtin is passed to Triton's own interpreter, with tensors converted in both directions (`_Elsewhere`).

Memory, atomics, barriers and the clock belong to the running CTA, which is in `running`, a context variable; each
greenlet has a context of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl

from mkernel.runtime.errors import SimulatorError
from mkernel.sim import statements, tensors
from mkernel.sim.access import (
    Descriptor,
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_xchg,
    atomic_xor,
    load,
    load_tensor_descriptor,
    make_tensor_descriptor,
    mask_of,
    store,
    store_tensor_descriptor,
)
from mkernel.sim.blocks import (
    abs_,
    add,
    arange,
    argmax,
    argmin,
    associative_scan,
    broadcast,
    broadcast_to,
    builtin_max,
    builtin_min,
    cast,
    cdiv,
    ceil,
    clamp,
    cos,
    cumprod,
    cumsum,
    dot,
    exp,
    exp2,
    expand_dims,
    floor,
    fma,
    full,
    in_common_shape,
    item,
    join,
    log,
    log2,
    map_elementwise,
    max_,
    maximum,
    min_,
    minimum,
    mul,
    num_programs,
    permute,
    program_id,
    promoted,
    reduce,
    reduce_or,
    reduce_with_indices,
    reshape,
    rsqrt,
    sin,
    split,
    sqrt,
    sqrt_rn,
    sub,
    sum_,
    trans,
    where,
    xor_sum,
    zeros,
    zeros_like,
)
from mkernel.sim.cta import running
from mkernel.sim.dtypes import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT32,
    INT64,
    KernelError,
    describe,
    from_memory,
    info,
    pointer_type,
    to_memory,
)
from mkernel.sim.elsewhere import BlockPointer, elsewhere
from mkernel.sim.tensors import Tensor, convert, to_tensor

# -- inline assembly


def _clock() -> Tensor:
    return Tensor(np.int64(running.get().clock()), INT64)


def _trace_time() -> Tensor:
    return Tensor(np.int64(running.get().trace_time()), INT64)


def _nothing_after(action: str) -> Callable[[], Tensor]:
    def instruction() -> Tensor:
        getattr(running.get(), action)()
        return Tensor(np.int32(0), INT32)

    return instruction


def _prefetch(pointers: Tensor) -> Tensor:
    return Tensor(np.zeros(pointers.shape, dtype=np.int32) if pointers.shape else np.int32(0), INT32)


def _words_of(pieces: np.ndarray) -> np.ndarray:
    """The addresses of the 32-bit words of pieces of 16 bytes."""
    if (pieces % 16).any():
        raise SimulatorError("a multicast access is not aligned to 16 bytes")
    return (pieces.reshape(-1, 1) + np.arange(0, 16, 4)).reshape(-1)


def _store_everywhere(pieces: Tensor, *words: Tensor) -> Tensor:
    values = np.stack(in_common_shape(*(word._data for word in words)), axis=-1)
    running.get().store_everywhere(_words_of(pieces._data), values.reshape(-1))
    return Tensor(np.zeros(pieces.shape, dtype=np.int32), INT32)


def _sums(dtype: Any) -> Callable[..., tuple[Tensor, ...]]:
    """The four words of each piece of 16 bytes: sums over all members."""

    def instruction(pieces: Tensor, *unused: Tensor) -> tuple[Tensor, ...]:
        parts = running.get().load_from_all(_words_of(pieces._data), np.dtype(np.uint32))
        total: Any = None
        for part in parts:
            wide = from_memory(part.view(info(dtype).memory), dtype).astype(np.float32)
            total = wide if total is None else total + wide
        rounded = to_memory(convert(total, FLOAT32, dtype), dtype)
        words = rounded.view(np.int32).reshape(*pieces.shape, 4)
        return tuple(Tensor(np.ascontiguousarray(words[..., place]), INT32) for place in range(4))

    return instruction


_SUM = "multimem.ld_reduce.relaxed.sys.global.add{} {{$0, $1, $2, $3}}, [$4];"
INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov.u64 $0, %globaltimer;": _clock,
    "/* trace */ mov.u64 $0, %globaltimer;": _trace_time,
    "fence.proxy.async.global; mov.u32 $0, 0;": _nothing_after("acquire_for_descriptors"),
    "bar.sync 0; mov.u32 $0, 0;": _nothing_after("barrier"),
    "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, 0;": _nothing_after(
        "complete_descriptor_stores"
    ),
    "fence.proxy.alias; mov.u32 $0, 0;": _nothing_after("fence_aliases"),
    "prefetch.global.L2 [$1]; mov.u32 $0, 0;": _prefetch,
    "multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;": _store_everywhere,
    _SUM.format(".acc::f32.v4.bf16x2"): _sums(BFLOAT16),
    _SUM.format(".acc::f32.v4.f16x2"): _sums(FLOAT16),
    _SUM.format(".v4.f32"): _sums(FLOAT32),
}


def inline_asm_elementwise(asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
    instruction = INSTRUCTIONS.get(" ".join(asm.split()))
    if instruction is None:
        raise KernelError(
            f"the simulator does not know the instruction {asm!r}: it knows those of mkernel.lang.device, .trace and "
            ".multicast"
        )
    return instruction(*(to_tensor(arg) for arg in args))


# -- hints and checks


def debug_barrier() -> None:
    running.get().barrier()


def waited_for(signals: Any, mask: Any, expected: Any) -> None:
    """See lang/hints.py."""
    addresses, chosen, wanted = (np.atleast_1d(to_tensor(each)._data) for each in (signals, mask, expected))
    running.get().waited_for(addresses, chosen, wanted)


def used_below(descriptor: Descriptor, row: Any) -> None:
    """See lang/hints.py."""
    running.get().unused_from[descriptor] = int(to_tensor(row)._data)


HINTS = {"waited_for": waited_for, "used_below": used_below}


def hint(input: Any, values: Any) -> Any:
    """tl.multiple_of and the like: promises to the compiler."""
    return input


def assume(cond: Any) -> None:
    if not to_tensor(cond)._data.all():
        raise KernelError("what tl.assume promises does not hold")


def static_assert(cond: Any, msg: str = "") -> None:
    if type(cond) is Tensor:
        raise KernelError(f"tl.static_assert needs a constant, got {describe(cond)}")
    if not cond:
        raise KernelError(f"static assertion failed{f': {msg}' if msg else ''}")


def device_assert(cond: Any, msg: Any = "", mask: Any = None) -> None:
    holds = to_tensor(cond)._data if mask is None else to_tensor(cond)._data | ~mask_of(mask)
    if not np.all(holds):
        raise KernelError(f"assertion failed{f': {msg}' if msg else ''}")


def device_print(prefix: str, *args: Any, hex: bool = False) -> None:
    cta = running.get()
    for arg in args or ("",):
        data = to_tensor(arg)._data if args else ""
        print(f"CTA {cta.program_id}: {prefix} {np.vectorize('{:#x}'.format)(data) if hex and args else data}")


def static_print(*values: Any, sep: str = " ", end: str = "\n", **unused: Any) -> None:
    print(*(str(value) for value in values), sep=sep, end=end)


# -- which function stands for which


class _Constants(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return not isinstance(value, (Tensor, Descriptor, BlockPointer, tuple))

    def __call__(cls, value: Any) -> Any:
        return value


class Constexpr(metaclass=_Constants):
    """tl.constexpr in a kernel: constants are plain Python values."""


class _PointerTypes(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, tl.pointer_type)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return pointer_type(*args, **kwargs)


class Pointers(metaclass=_PointerTypes):
    """tl.pointer_type in a kernel."""


def _as_tuple(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values)


FUNCTIONS: dict[str, Any] = {
    "tensor": Tensor, "constexpr": Constexpr, "pointer_type": Pointers, "tuple": tuple,
    "tensor_descriptor": Descriptor, "range": statements.counted, "static_range": statements.unrolled,
    "condition": lambda condition, disable_licm=False: condition, "to_tensor": to_tensor,
    "abs": abs_, "sum": sum_, "max": max_, "min": min_, "view": reshape,
    "multiple_of": hint, "max_contiguous": hint, "max_constancy": hint,
    **{function.__name__: function for function in (
        program_id, num_programs, arange, full, zeros, zeros_like, reshape, expand_dims, broadcast_to, broadcast,
        clamp, permute, trans, join, split, item, cast, where, cdiv, add, sub, mul, fma, argmax, argmin, reduce,
        associative_scan, cumsum, cumprod, map_elementwise, dot, load, store, atomic_cas, make_tensor_descriptor,
        load_tensor_descriptor, store_tensor_descriptor, inline_asm_elementwise, debug_barrier, assume, static_assert,
        device_assert, device_print, static_print,
    )},
    "minimum": minimum, "maximum": maximum, "xor_sum": xor_sum, "reduce_or": reduce_or, "exp": exp, "exp2": exp2,
    "log": log, "log2": log2, "cos": cos, "sin": sin, "sqrt": sqrt, "sqrt_rn": sqrt_rn, "floor": floor, "ceil": ceil,
    "rsqrt": rsqrt, "atomic_add": atomic_add, "atomic_max": atomic_max, "atomic_min": atomic_min,
    "atomic_and": atomic_and, "atomic_or": atomic_or, "atomic_xor": atomic_xor, "atomic_xchg": atomic_xchg,
}  # fmt: skip
_PRIVATE = {"_promote_bfloat16_to_float32": promoted, "_reduce_with_indices": reduce_with_indices,
            "builtin_min": builtin_min, "builtin_max": builtin_max}  # fmt: skip
_STANDS_FOR = {
    **{id(getattr(tl, name, None) or getattr(tl.core, name)): function for name, function in FUNCTIONS.items()},
    # each version of Triton has some of these
    **{id(getattr(tl.core, name)): function for name, function in _PRIVATE.items() if hasattr(tl.core, name)},
}
# Python's builtins that Triton knows
BUILTINS: dict[str, Any] = {
    "range": statements.counted, "min": builtin_min, "max": builtin_max, "print": device_print, "list": _as_tuple,
    "len": len, "float": float, "int": int, "isinstance": isinstance, "getattr": getattr, "hasattr": hasattr,
}  # fmt: skip
# what always gives a tensor
GIVES_TENSOR = {id(function) for name, function in FUNCTIONS.items() if name in {
    "program_id", "num_programs", "arange", "full", "zeros", "reshape", "expand_dims", "broadcast_to", "cast", "where",
    "cdiv", "sum", "cumsum", "dot", "load", "minimum", "maximum", "exp", "exp2", "log2", "atomic_add", "atomic_xchg",
    "atomic_max", "atomic_cas", "join",
}}  # fmt: skip


def implement(functions: Mapping[Any, Any]) -> None:
    """Implementations of functions and classes of a language that is imported only if a kernel is written in it."""
    _STANDS_FOR.update((id(function), implementation) for function, implementation in functions.items())


def native(value: Any) -> Any:
    """What stands for a function or class of Triton's in an interpreted kernel; None if Triton's source does."""
    found = _STANDS_FOR.get(id(value))
    if found is None and tl.core.is_builtin(value):

        def call(*args: Any, **kwargs: Any) -> Any:
            return elsewhere(value, *args, **kwargs)

        call.__name__ = value.__name__
        return call
    return found


tensors.methods["cast_fp8"] = partial(elsewhere, tl.cast)
for _name in dir(tl.tensor):
    if _name in FUNCTIONS and _name not in Tensor.__dict__:
        tensors.methods[_name] = FUNCTIONS[_name]
