"""Gluon kernels: what the tensor cores and TMA compute, how layouts place elements in shared memory, and what is
refused."""

from __future__ import annotations

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mkernel.lang.gluon_compat import async_load, async_store, reinterpret
from mkernel.runtime.hopper import tma_descriptor
from mkernel.sim.dtypes import KernelError

from .harness import run

ROWS, COLUMNS = gl.constexpr(64), gl.constexpr(128)


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@gluon.constexpr_function
def sums(columns):
    """The register layout of a product."""
    return gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def positions(columns):
    """Offsets of the elements of a matrix of ROWS rows in memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
    j = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
    return i * columns + j


# -- products


@gluon.jit
def two_products(a, b, c, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr, HOW: gl.constexpr):
    """c = a @ b, or twice that: in shared memory by TMA, b and, unless it is in registers, a."""
    x = gl.allocate_shared_memory(a.dtype, a.block_type.shape, a.layout)
    y = gl.allocate_shared_memory(b.dtype, b.block_type.shape, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(full, a.block_type.nbytes + b.block_type.nbytes)
    async_load(a, [0, 0], full, x)
    async_load(b, [0, 0], full, y)
    mbarrier.wait(full, 0)
    left, right = x, y
    if A_TRANSPOSED:
        left = left.permute((1, 0))
    if B_TRANSPOSED:
        right = right.permute((1, 0))
    layout: gl.constexpr = sums(right.shape[1])
    total = gl.full([ROWS, right.shape[1]], 3.0, gl.float32, layout)
    if HOW == "registers":
        operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
        product = warpgroup_mma(left.load(operand), right, total, use_acc=False)
    else:
        product = warpgroup_mma(left, right, warpgroup_mma_init(total), use_acc=HOW == "added", is_async=True)
        if HOW == "twice":
            product = warpgroup_mma(left, right, product, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
    i = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
    j = gl.expand_dims(gl.arange(0, right.shape[1], gl.SliceLayout(0, layout)), 0)
    gl.store(c + i * right.shape[1] + j, product)


FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
NAMES = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5, torch.float16: gl.float16,
         torch.bfloat16: gl.bfloat16}  # fmt: skip


def whole(x):
    """A descriptor of a matrix that is one block."""
    shape = list(x.shape)
    return TensorDescriptor.from_tensor(x, shape, gl.NVMMASharedLayout.get_default_for(shape, NAMES[x.dtype]))


def run_product(a, b, a_transposed, b_transposed, how):
    left, right = (x.T.contiguous() if flip else x for x, flip in ((a, a_transposed), (b, b_transposed)))
    c = torch.zeros(64, 256)
    run(two_products, a=whole(left), b=whole(right), c=c, A_TRANSPOSED=a_transposed, B_TRANSPOSED=b_transposed,
        HOW=how)  # fmt: skip
    exact = a.double() @ b.double()
    exact = 2 * exact if how == "twice" else exact + 3 if how == "added" else exact
    assert bool(((c.double() - exact).abs() <= 2**-22 * exact.abs().clamp(min=1)).all())


@pytest.mark.parametrize("how", ["", "added", "twice", "registers"])
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *FP8])
def test_products(dtype, b_transposed, a_transposed, how):
    a, b = random(64, 128, dtype=dtype), random(128, 256, dtype=dtype, seed=1)
    if dtype in FP8 and (not b_transposed or (a_transposed and how != "registers")):
        with pytest.raises(KernelError, match="the tensor cores need k contiguous in shared memory for 8-bit types"):
            run_product(a, b, a_transposed, b_transposed, how)
    else:
        run_product(a, b, a_transposed, b_transposed, how)


# -- TMA at the edges of a tensor


@gluon.jit
def move(source, target, row, column, to_row, to_column):
    """Copy a block by TMA."""
    memory = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(full, source.block_type.nbytes)
    async_load(source, [row, column], full, memory)
    mbarrier.wait(full, 0)
    async_store(target, [to_row, to_column], memory)
    tma.store_wait(0)


@pytest.mark.parametrize("row", [-8, 0, 40, 100])
@pytest.mark.parametrize("column", [-16, 0, 96, 200])
@pytest.mark.parametrize("padded", [0, 24])
def test_blocks_beyond_the_edges(row, column, padded):
    """What is outside of the tensor is loaded as zeros and not stored, also if there is memory behind its rows."""
    whole = random(72, 104 + padded)
    source, block = whole[:, :104], [32, 64]
    read, copy = torch.full((32, 64), 5.0).bfloat16(), torch.full((72, 104 + padded), 5.0).bfloat16()
    inside = torch.zeros(72 + 256, 104 + 512).bfloat16()
    inside[128:200, 256:360] = source
    exact = inside[128 + row : 160 + row, 256 + column : 320 + column]
    of_source = tma_descriptor(source, 72, 104, source.stride(0), block)
    run(move, source=of_source, target=tma_descriptor(read, 32, 64, 64, block), row=row, column=column,
        to_row=0, to_column=0)  # fmt: skip
    assert torch.equal(read, exact)
    of_copy = tma_descriptor(copy[:, :104], 72, 104, copy.stride(0), block)
    run(move, source=of_source, target=of_copy, row=0, column=0, to_row=row, to_column=column)
    where = torch.zeros(72 + 256, 104 + 512, dtype=torch.bool)
    where[128 + row : 160 + row, 256 + column : 320 + column] = True
    stored = where[128:200, 256:360]
    assert bool((copy[:, :104][~stored] == 5).all())
    assert bool((copy[:, 104:] == 5).all())
    taken = torch.zeros(72 + 256, 104 + 512).bfloat16()
    taken[128 + row : 160 + row, 256 + column : 320 + column] = source[:32, :64]
    assert torch.equal(copy[:, :104][stored], taken[128:200, 256:360][stored])


# -- layouts of shared memory


@gluon.jit
def viewed(x, out, FROM: gl.constexpr, SHAPE: gl.constexpr, TO: gl.constexpr):
    """Store a matrix with one layout, and load the same memory with another."""
    memory = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], FROM)
    memory.store(gl.load(x + positions(COLUMNS)))
    view = reinterpret(memory, gl.bfloat16, SHAPE, TO)
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place = gl.arange(0, ROWS * COLUMNS, flat)
    gl.store(out + place, view.load(flat).reshape([ROWS * COLUMNS]))


def mma_layout(swizzle, rank=2, transposed=False):
    return gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle, element_bitwidth=16, rank=rank, transposed=transposed
    )  # fmt: skip


def plain(*order):
    return gl.SwizzledSharedLayout(1, 1, 1, list(order))


def halves(x):
    """Blocks of 64 columns, which are 128 bytes, one after the other."""
    return x.reshape(64, 2, 64).permute(1, 0, 2)


LINEAR = gl.SharedLinearLayout([[0, 1 << i] for i in range(7)] + [[1 << i, 0] for i in range(6)])


@pytest.mark.parametrize(
    ("first", "shape", "second", "expected"),
    [
        (mma_layout(128), [64 * 128], plain(0), halves),
        (mma_layout(64), [64 * 128], plain(0), lambda x: x.reshape(64, 4, 32).permute(1, 0, 2)),
        (mma_layout(0), [64 * 128], plain(0), lambda x: x),
        (plain(1, 0), [64 * 128], plain(0), lambda x: x),
        (plain(0, 1), [64 * 128], plain(0), lambda x: x.T),
        (LINEAR, [64 * 128], plain(0), lambda x: x),
        (mma_layout(128, transposed=True), [64 * 128], plain(0), lambda x: x.T),
        (mma_layout(128), [64, 128], mma_layout(128), lambda x: x),
        (mma_layout(128), [1, 1, 64, 128], mma_layout(128, 4), lambda x: x),
        (mma_layout(128), [128, 64], mma_layout(128), halves),
        (mma_layout(128), [2, 64, 64], mma_layout(128), halves),  # an array of blocks
        (mma_layout(0), [8, 16, 64], plain(2, 1, 0), lambda x: x),
        (plain(1, 0), [64, 128], mma_layout(128), lambda x: x.reshape(2, 64, 64).permute(1, 0, 2)),
    ],
)
def test_the_same_memory_with_another_layout(first, shape, second, expected):
    x, out = random(64, 128), torch.zeros(64 * 128).bfloat16()
    run(viewed, x=x, out=out, FROM=first, SHAPE=shape, TO=second)
    assert torch.equal(out, expected(x).reshape(-1))


@gluon.jit
def parts(x, out):
    """Views of views."""
    memory = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, COLUMNS], plain_layout())
    value = gl.load(x + positions(COLUMNS))
    memory.index(1).store(value + value)
    memory.index(0).store(value)
    right = memory.index(1).slice(32, 16).slice(64, 32, dim=1)
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place = gl.arange(0, 512, flat)
    gl.store(out + place, right.permute((1, 0)).load(flat).reshape([512]))
    gl.store(out + 512 + place, memory.index(0).slice(8, 8).reshape([2, 4, 128]).index(1).load(flat).reshape([512]))


@gluon.constexpr_function
def plain_layout():
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


def test_views():
    x, out = random(64, 128), torch.zeros(1024).bfloat16()
    run(parts, x=x, out=out)
    assert torch.equal(out[:512], 2 * x[32:48, 64:96].T.reshape(-1))
    assert torch.equal(out[512:], x[12:16].reshape(-1))


# -- what is refused


@gluon.jit
def mistakes(tile, out, WHICH: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.bfloat16, [ROWS, ROWS], tile.layout)
    layout: gl.constexpr = sums(64)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, layout)
    if WHICH == "index":
        memory.index(64)
    elif WHICH == "index below":
        memory.index(gl.program_id(0) - 1)
    elif WHICH == "slice":
        memory.slice(32, 64)
    elif WHICH == "columns":
        memory.slice(0, 64, dim=1).slice(16, 64, dim=1)
    elif WHICH == "larger view":
        reinterpret(memory, gl.float32, [ROWS, ROWS], plain_layout())
    elif WHICH == "view of gaps":
        reinterpret(memory.slice(0, 32, dim=1), gl.bfloat16, [ROWS, 32], plain_layout())
    elif WHICH == "dtype":
        memory.store(zeros)
    elif WHICH == "shape":
        memory.store(zeros.to(gl.bfloat16).reshape([32, 128]))
    elif WHICH == "bits":
        gl.allocate_shared_memory(gl.float32, [ROWS, ROWS], tile.layout)
    elif WHICH == "bytes":
        gl.allocate_shared_memory(gl.float32, [ROWS, 1024], plain_layout())
    elif WHICH == "bytes in all":
        gl.allocate_shared_memory(gl.float32, [ROWS, 512], plain_layout())
        gl.allocate_shared_memory(gl.float32, [ROWS, 512], plain_layout())
    elif WHICH == "no barrier":
        mbarrier.wait(memory.index(0), 0)
    elif WHICH == "layout of TMA":
        async_store(tile, [0, 0], gl.allocate_shared_memory(gl.bfloat16, [ROWS, ROWS], plain_layout()))
    elif WHICH == "block of TMA":
        async_store(tile, [0, 0], memory.slice(0, 32))
    elif WHICH == "right operand":
        warpgroup_mma(memory, zeros.to(gl.bfloat16), zeros)
    elif WHICH == "shared memory":
        memory.gather(zeros, 0)
    elif WHICH == "function":
        gl.histogram(zeros, 64)
    elif WHICH == "function of TMA":
        tma.make_tensor_descriptor(out, [8, 8], [8, 1], [8, 8], tile.layout)
    elif WHICH == "assembly":
        gl.inline_asm_elementwise("bar.red 1;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    elif WHICH == "roles":
        gl.warp_specialize([(mistakes, (tile, out, "index"))], [4], [40])


@pytest.mark.parametrize(
    ("which", "match"),
    [
        ("index", r"index\(64\) is not in shared memory bf16\[64, 64\]"),
        ("index below", r"index\(-1\) is not in shared memory bf16\[64, 64\]"),
        ("slice", r"slice\(32, 64, dim=0\) is not in shared memory bf16\[64, 64\]"),
        ("columns", r"slice\(16, 64, dim=1\) is not in shared memory bf16\[64, 64\]"),
        ("larger view", r"cannot be reinterpreted as fp32\[64, 64\]"),
        ("view of gaps", r"cannot be reinterpreted as bf16\[64, 32\]: it has gaps"),
        ("dtype", r"fp32\[64, 64\] is stored to shared memory bf16\[64, 64\]: cast it first"),
        ("shape", r"bf16\[32, 128\] does not fit shared memory bf16\[64, 64\]"),
        ("bits", "a layout of elements of 16 bits for elements of 32 bits"),
        ("bytes", "270336 bytes of shared memory, of which a CTA has 232448"),
        ("bytes in all", "270336 bytes of shared memory, of which a CTA has 232448"),
        ("no barrier", r"there is no mbarrier in shared memory bf16\[64\]: call mbarrier.init first"),
        ("layout of TMA", "a store by TMA needs memory with the layout of its descriptor"),
        ("block of TMA", r"a store by TMA moves blocks bf16\[64, 64\], got shared memory bf16\[32, 64\]"),
        ("right operand", "the right operand of warpgroup_mma must be in shared memory"),
        ("shared memory", "shared memory has no attribute `gather` in the simulator"),
        ("function", "the simulator does not know gl.histogram"),
        ("function of TMA", "the simulator does not know tma.make_tensor_descriptor"),
        ("assembly", "the simulator does not know the instruction 'bar.red 1;'"),
        ("roles", "gl.warp_specialize needs numbers of warps for 0 roles, got 1"),
    ],
)
def test_mistakes(which, match):
    tile, out = tma_descriptor(torch.zeros(64, 64).bfloat16(), 64, 64, 64, [64, 64]), torch.zeros(8)
    with pytest.raises(KernelError, match=match) as caught:
        run(mistakes, tile=tile, out=out, WHICH=which)
    assert "test_gluon_values.py:" in str(caught.value)
