"""Gluon in the simulator: the functions that interpreted Gluon kernels call, beside those of language.py.

Layouts of registers are ignored: a tensor is its elements, whichever thread holds them. Layouts of shared memory are
not (`shared.py`). What warps do at the same time, and what TMA and the tensor cores do meanwhile, is in `warps.py`.

This module is imported when the first Gluon kernel is about to run. It covers what the kernels for Hopper use; anything
else raises an error that names it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from mkernel.lang import gluon_compat
from mkernel.sim import language
from mkernel.sim.access import Descriptor
from mkernel.sim.blocks import arange as make_arange
from mkernel.sim.blocks import dot
from mkernel.sim.blocks import full as make_full
from mkernel.sim.cta import running
from mkernel.sim.dtypes import FLOAT32, INT32, KernelError, describe, info
from mkernel.sim.order import only
from mkernel.sim.shared import MOST_BYTES, Allocation, SharedBlock, places_of
from mkernel.sim.tensors import Tensor, to_tensor
from mkernel.sim.warps import WARP, Barrier, GluonCta, WarpOrder, WarpTask

Warps = GluonCta | WarpTask


def _warps() -> Warps:
    task = running.get()
    assert isinstance(task, (GluonCta, WarpTask))
    return task


def _order(task: Warps) -> WarpOrder | None:
    order = task.checked
    assert order is None or isinstance(order, WarpOrder)
    return order


# -- tensors


def arange(start: Any, end: Any, layout: Any = None) -> Tensor:
    return make_arange(start, end)


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Tensor:
    return make_full(shape, value, dtype)


def zeros(shape: Any, dtype: Any, layout: Any = None) -> Tensor:
    return make_full(shape, 0, dtype)


def convert_layout(value: Any, layout: Any, assert_trivial: bool = False) -> Tensor:
    return to_tensor(value)


def num_warps() -> int:
    return _warps().warps


# -- shared memory and barriers


def allocate_shared_memory(element_ty: Any, shape: Any, layout: Any, value: Any = None) -> SharedBlock:
    task = _warps()
    places = places_of(layout, shape, info(element_ty).bits)
    nbytes = places.size * info(element_ty).memory.itemsize
    block = task.block
    used = sum(each.data.size for each in block.allocations)
    if used + nbytes > MOST_BYTES:
        raise KernelError(f"{used + nbytes} bytes of shared memory, of which a CTA has {MOST_BYTES}")
    name = f"{element_ty}{list(shape)} in shared memory, allocation {len(block.allocations)}"
    allocation = Allocation(task.scheduler.memory, task.rank, nbytes, name)
    block.allocations.append(allocation)
    made = SharedBlock(allocation, 0, places, element_ty, layout)
    if value is not None:
        made.store(value)
    return made


def fence_async_shared(cluster: bool = False) -> None:
    order = _order(_warps())
    if order is not None:
        order.fence_shared()


def _barrier_at(word: SharedBlock) -> Barrier:
    found = _warps().block.barriers.get(word.address)
    if found is None:
        raise KernelError(f"there is no mbarrier in {word}: call mbarrier.init first")
    return found


def init_barrier(word: SharedBlock, count: int) -> None:
    task = _warps()
    number = task.block.mbarriers = task.block.mbarriers + 1
    sites = task.scheduler.memory.sites
    site = sites.here(2)
    task.block.barriers[word.address] = Barrier(
        f"mbarrier {number - 1}", number, count, "arrivals", lambda: sites.long(site, 2)
    )


def invalidate_barrier(word: SharedBlock) -> None:
    _barrier_at(word)
    del _warps().block.barriers[word.address]


def expect(word: SharedBlock, nbytes: int, pred: Any = True) -> None:
    if _holds(pred):
        task, barrier = _warps(), _barrier_at(word)
        task.scheduler.pause(task)
        barrier.nbytes += nbytes
        barrier.arrive(task, 1)


def arrive(word: SharedBlock, *, count: int = 1, pred: Any = True) -> None:
    if _holds(pred):
        task = _warps()
        task.scheduler.pause(task)
        _barrier_at(word).arrive(task, count)


def wait_barrier(word: SharedBlock, phase: Any, pred: Any = True, deps: Sequence[Any] = ()) -> None:
    if _holds(pred):
        barrier, parity = _barrier_at(word), int(to_tensor(phase)._data)
        if parity not in (0, 1):
            raise KernelError(f"the phase of an mbarrier is 0 or 1, got {parity}")
        barrier.wait(_warps(), lambda: barrier.phase & 1 != parity, f"a phase with parity {parity}")


def _holds(pred: Any) -> bool:
    condition = to_tensor(pred)
    if condition.shape:
        raise KernelError(f"expected a condition, got {describe(condition)}")
    return bool(condition._data)


# -- TMA


class BlockType(NamedTuple):
    """The type of a descriptor's blocks."""

    element_ty: Any
    shape: tuple[int, ...]
    nbytes: int


class GluonDescriptor(Descriptor):
    """A tensor descriptor with the layout that its blocks have in shared memory."""

    __slots__ = ("layout",)

    def __init__(self, base: Tensor, shape: Sequence[Tensor], strides: Sequence[Tensor], made_of: Any):
        super().__init__(base, shape, strides, made_of.block_shape, made_of.padding)
        self.layout = made_of.layout

    @property
    def block_type(self) -> BlockType:
        shape = tuple(self.block_shape)
        return BlockType(self.dtype, shape, math.prod(shape) * info(self.dtype).memory.itemsize)


def _check_block(descriptor: Any, memory: SharedBlock, what: str) -> None:
    if type(descriptor) is not GluonDescriptor:
        raise KernelError(f"{what} needs a tensor descriptor, got {describe(descriptor)}")
    if tuple(memory.shape) != tuple(descriptor.block_shape) or memory.dtype is not descriptor.dtype:
        raise KernelError(f"{what} moves blocks {descriptor.dtype}{list(descriptor.block_shape)}, got {memory}")
    if memory.layout != descriptor.layout:
        raise KernelError(f"{what} needs memory with the layout of its descriptor, {descriptor.layout}, "
                          f"got {memory.layout}")  # fmt: skip


def async_load(
    tensor_desc: Any, coord: Any, barrier: SharedBlock, result: SharedBlock, pred: Any = True, **options: Any
) -> None:
    _check_block(tensor_desc, result, "a load by TMA")
    if not _holds(pred):
        return
    task, counted = _warps(), _barrier_at(barrier)
    order = _order(task)
    loads = None
    if order is not None:
        loads = order.descriptor_reads = order.loads_of(counted)
    value = tensor_desc.load(coord)
    if order is None or loads is None:
        result.write(value)
    else:
        result.write(value, order.asynchronous(loads))
        counted.pass_on((only(loads, loads.last),) * 2)
    counted.nbytes -= result.numel * info(result.dtype).memory.itemsize
    if counted.nbytes < 0:
        raise KernelError(f"{-counted.nbytes} more bytes were loaded than {counted} expects")
    counted.end_phase(task)


def async_store(tensor_desc: Any, coord: Any, src: SharedBlock) -> None:
    _check_block(tensor_desc, src, "a store by TMA")
    order = _order(_warps())
    if order is None:
        value = src.read()
    else:
        value = src.read(order.asynchronous(order.stores))
        order.store_groups.append(order.stores.last)
    tensor_desc.store(coord, value)


def store_wait(pendings: int, read_only: bool = True) -> None:
    order = _order(_warps())
    if order is not None:
        order.complete(order.store_groups, order.stores, pendings)
        if not read_only and not pendings:
            order.complete_descriptors()


# -- tensor cores


class Product:
    """A product that the tensor cores are computing. groups: how many products were started before it was done."""

    __slots__ = ("_group", "_value")

    def __init__(self, value: Tensor, group: int):
        self._value, self._group = value, group

    @property
    def shape(self) -> tuple[int, ...]:
        return self._value.shape

    @property
    def dtype(self) -> Any:
        return self._value.dtype

    def __str__(self) -> str:
        return f"{self._value} of a product"

    def __getattr__(self, name: str) -> Any:
        raise KernelError(f"`{name}` of a product that may still be computed: use what warpgroup_mma_wait returns")

    def _early(self, *others: Any) -> Any:
        raise KernelError("a product is used that may still be computed: use what warpgroup_mma_wait returns")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _early
    __neg__ = __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = _early


def warpgroup_mma_init(value: Any) -> Product:
    return value if isinstance(value, Product) else Product(value, 0)


def warpgroup_mma(
    a: Any, b: SharedBlock, acc: Any, *, use_acc: Any = True, precision: Any = None,
    max_num_imprecise_acc: Any = None, is_async: bool = False,
) -> Any:  # fmt: skip
    task = _warps()
    order = _order(task)
    if not isinstance(b, SharedBlock):
        raise KernelError(f"the right operand of warpgroup_mma must be in shared memory, got {describe(b)}")
    for part, axis in ((a, 1), (b, 0)):
        if isinstance(part, SharedBlock) and info(part.dtype).bits == 8 and not part.is_contiguous_along(axis):
            raise KernelError(f"the tensor cores need k contiguous in shared memory for 8-bit types: transpose {part}")
    reader = None if order is None else order.asynchronous(order.products)
    left, right = (part.read(reader) if isinstance(part, SharedBlock) else part for part in (a, b))
    total = acc._value if isinstance(acc, Product) else acc
    value = dot(left, right, total if _holds(use_acc) else None, max_num_imprecise_acc=max_num_imprecise_acc)
    task.products_started += 1
    if order is not None:
        order.product_groups.append(order.products.last)
    product = Product(value, task.products_started)
    return product if is_async else warpgroup_mma_wait(0, [product])


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    if deps is None:
        raise KernelError("warpgroup_mma_wait needs deps")
    task = _warps()
    order = _order(task)
    if order is not None:
        order.complete(order.product_groups, order.products, num_outstanding)
    done = task.products_started - num_outstanding
    results = [dep._value if isinstance(dep, Product) and dep._group <= done else dep for dep in deps]
    return results[0] if len(results) == 1 else tuple(results)


# -- roles


def warp_specialize(
    functions_and_args: Any, worker_num_warps: Sequence[int], worker_num_regs: Sequence[int] = ()
) -> Any:  # fmt: skip
    task = running.get()
    if not isinstance(task, GluonCta):
        raise KernelError("gl.warp_specialize inside of gl.warp_specialize is not supported")
    return task.specialize(functions_and_args, worker_num_warps)


# -- inline assembly


def _agreed(condition: Tensor) -> Tensor:
    return Tensor(np.int32(bool(np.all(condition._data != 0))), INT32)


def _where_below(scores: Tensor, index: Tensor, bound: Tensor) -> Tensor:
    kept = np.where(index._data < bound._data, scores._data, np.float32(-math.inf))
    return Tensor(kept.astype(np.float32), FLOAT32)


INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.all.pred p, p, 0xffffffff; selp.u32 $0, 1, 0, p; }": _agreed,
    "{ .reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }": _where_below,
    "{ .reg .pred p; setp.geu.f32 p, $1, 0f00000000; @!p pmevent 0; mov.b32 $0, $1; }": lambda value: value,
}


def _named_barrier(asm: str) -> Callable[[Tensor], Tensor] | None:
    """`bar.sync` and `bar.arrive` with a number of threads; the result is the operand."""
    found = re.fullmatch(r"bar\.(sync|arrive) (\d+), (\d+); mov\.b32 \$0, \$1;", asm)
    if found is None:
        return None
    blocks, number, threads = found[1] == "sync", int(found[2]), int(found[3])

    def instruction(value: Tensor) -> Tensor:
        task = _warps()
        made = Barrier(f"named barrier {number}", -number, threads, "threads")
        barrier = task.block.barriers.setdefault(-number - 1, made)
        if barrier.count != threads or threads % WARP or number > 15:
            raise KernelError(
                f"bar.{found[1]} {number}, {threads}: others use barrier {number} with {barrier.count} threads"
                if barrier.count != threads
                else f"bar.{found[1]} {number}, {threads}: barriers are 0 to 15, and threads come in warps of {WARP}"
            )
        task.scheduler.pause(task)
        phase = barrier.phase
        barrier.arrive(task, task.warps * WARP)
        if blocks:
            barrier.wait(task, lambda: barrier.phase > phase, f"phase {phase + 1}")
        return value

    return instruction


def inline_asm_elementwise(asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
    code = " ".join(asm.split())
    instruction = INSTRUCTIONS.get(code) or _named_barrier(code)
    if instruction is None:
        return language.inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack)
    return instruction(*(to_tensor(arg) for arg in args))


# -- which function stands for which


NAMES = {gl: "gl.", mbarrier: "mbarrier.", tma: "tma."}


def _unknown(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise KernelError(f"the simulator does not know {name}; it knows what the kernels for Hopper use")

    return refuse


def _implementations() -> dict[Any, Any]:
    own: dict[Any, dict[str, Any]] = {
        gl: dict(arange=arange, full=full, zeros=zeros, convert_layout=convert_layout, num_warps=num_warps,
                 allocate_shared_memory=allocate_shared_memory, warp_specialize=warp_specialize,
                 inline_asm_elementwise=inline_asm_elementwise, thread_barrier=language.debug_barrier,
                 barrier=language.debug_barrier),
        hopper: dict(fence_async_shared=fence_async_shared, warpgroup_mma=warpgroup_mma,
                     warpgroup_mma_init=warpgroup_mma_init, warpgroup_mma_wait=warpgroup_mma_wait),
        mbarrier: dict(init=init_barrier, invalidate=invalidate_barrier, expect=expect, arrive=arrive,
                       wait=wait_barrier),
        tma: dict(store_wait=store_wait),
    }  # fmt: skip
    found: dict[Any, Any] = {gluon_compat.async_load: async_load, gluon_compat.async_store: async_store}
    found[gluon_compat.reinterpret] = SharedBlock.reinterpret
    for module, functions in own.items():  # each version of Triton has some of these names
        found.update((getattr(module, name), each) for name, each in functions.items() if hasattr(module, name))
    for module in own:
        for name, value in vars(module).items():
            if tl.core.is_builtin(value) and value not in found:
                same = language.FUNCTIONS.get(name) if module is gl else None
                found[value] = same or _unknown(f"{NAMES.get(module, '')}{name}")
    for name, value in vars(gl).items():  # those that Triton's library writes in its own language
        theirs = getattr(tl, name, None)
        if name in language.FUNCTIONS and callable(value) and value is not theirs and value not in found:
            found[value] = language.FUNCTIONS[name]
    return found


language.implement(_implementations())
language.INSTRUCTIONS.update(INSTRUCTIONS)
