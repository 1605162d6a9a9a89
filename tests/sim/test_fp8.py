"""fp8 in the simulator: the numbers that its bits stand for, products, memory, and how a mistake shows."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import mkernel as mk
from mkernel.lang.context import current_epoch, rank_of, segment_of
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import ARRIVED, finish, notify, wait
from mkernel.runtime.operands import descriptor
from mkernel.runtime.world import Launch
from mkernel.sim.dtypes import KernelError, fp8_bits, fp8_values
from mkernel.sim.interpreter import python_function
from mkernel.sim.interpreter import run as interpret
from mkernel.sim.launches import POISON
from mkernel.sim.tensors import Tensor

from .harness import run, simulate

KINDS = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
CTA = SimpleNamespace(program_id=0, num_programs=1, on_dot=lambda products: None)


def numbers(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- numbers


@triton.jit
def cast_to(x, DTYPE: tl.constexpr):
    return x.to(DTYPE)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_bits_stand_for_the_numbers_that_pytorch_has(dtype):
    bits = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(bits.copy()).view(KINDS[dtype]).float().numpy()
    assert np.array_equal(fp8_values(bits, dtype), expected, equal_nan=True)
    wide = interpret(CTA, python_function(cast_to), Tensor(bits, dtype), DTYPE=tl.float32)
    assert np.array_equal(wide._data, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_casts_round_to_nearest_and_saturate(dtype):
    """Every number, the middle between it and the next one, and what is just beside the middle."""
    most = torch.finfo(KINDS[dtype]).max
    exact = np.sort(fp8_values(np.arange(256, dtype=np.uint8), dtype))
    exact = exact[np.isfinite(exact)]
    middle = (exact[1:] + exact[:-1]) / 2
    values = np.concatenate([exact, middle, np.nextafter(middle, np.float32(0)), [1e9, -1e9, np.inf, -np.inf, 1e-30]])
    values = values.astype(np.float32)
    expected = torch.from_numpy(values).clamp(-most, most).to(KINDS[dtype]).view(torch.uint8).numpy()
    narrow = interpret(CTA, python_function(cast_to), Tensor(values, tl.float32), DTYPE=dtype)
    assert narrow.dtype is dtype
    assert np.array_equal(narrow._data, expected)
    assert np.isnan(fp8_values(fp8_bits(np.float32("nan"), dtype), dtype))


def test_poison_is_no_number():
    for dtype in KINDS:
        assert np.isnan(fp8_values(np.uint8(POISON), dtype))


# -- products


@triton.jit
def product(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PROMOTED: tl.constexpr):
    i, j, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    x = tl.load(a + i * K + k[None, :], mask=i < M - 1, other=0.0)
    y = tl.load(b + k[:, None] * N + j)
    total = tl.full((M, N), 1.0, tl.float32)
    if PROMOTED:
        total = tl.dot(x, y, total, max_num_imprecise_acc=PROMOTED)
    else:
        total = tl.dot(x, y, total)
    tl.store(c + i * N + j, total)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(KINDS.values(), repeat=2)), ids=str)
def test_products_are_exact(first, second):
    """Of both kinds and of one of each; a row that is masked is zero."""
    a, b = numbers(16, 32, dtype=first), numbers(32, 16, dtype=second, seed=1)
    exact = a.double() @ b.double() + 1
    exact[-1] = 1
    for promoted in (0, 32):
        c = torch.zeros(16, 16)
        run(product, a=a, b=b, c=c, M=16, N=16, K=32, PROMOTED=promoted)
        assert torch.equal(c, exact.float())


@triton.jit
def described_product(a, b, c, M: tl.constexpr, N: tl.constexpr):
    """Through tensor descriptors, with b transposed, and everything beyond the end zero."""
    total = tl.dot(a.load([0, 0]), b.load([0, 0]).T)
    tl.store(c + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], total)


def test_products_of_described_blocks():
    a, b = numbers(13, 48, dtype=torch.float8_e4m3fn), numbers(15, 48, dtype=torch.float8_e5m2, seed=1)
    c = torch.zeros(16, 16)
    run(
        described_product, a=descriptor(a, [13, 48], [48, 1], [16, 64]), b=descriptor(b, [15, 48], [48, 1], [16, 64]),
        c=c, M=16, N=16,
    )  # fmt: skip
    assert torch.equal(c[:13, :15], (a.double() @ b.double().t()).float())
    assert not c[13:].any()
    assert not c[:, 15:].any()


@pytest.mark.parametrize(("depth", "promoted", "said"), [(16, 0, "32 columns"), (32, 64, "at most the depth")])
def test_what_triton_refuses_is_refused(depth, promoted, said):
    a, b = numbers(16, depth, dtype=torch.float8_e4m3fn), numbers(depth, 16, dtype=torch.float8_e4m3fn)
    with pytest.raises(KernelError, match=said):
        run(product, a=a, b=b, c=torch.zeros(16, 16), M=16, N=16, K=depth, PROMOTED=promoted)


@triton.jit
def sum_of(a, c):
    i = tl.arange(0, 16)
    tl.store(c + i, tl.load(a + i) + tl.load(a + i))


def test_there_is_no_arithmetic():
    with pytest.raises(KernelError, match="cast them first"):
        run(sum_of, a=numbers(16, dtype=torch.float8_e4m3fn), c=torch.zeros(16))


# -- memory


@triton.jit
def push(context, x, y, start, SIZE: tl.constexpr, WAITS: tl.constexpr):
    epoch, i = current_epoch(context), tl.arange(0, 8)
    signal, data = segment_of(context, 1, tl.int64), segment_of(context, 1, tl.float8e4nv) + start
    if rank_of(context) == 0:
        tl.store(data + i, tl.load(x + i))
        notify(signal, epoch)
    else:
        if WAITS:
            wait(context, signal, epoch, COMPUTE, ARRIVED, 0, 0)
        tl.store(y + i, tl.load(data + i))
    finish(context, epoch, SIZE)


def pushed(group, waits):
    workspace = group.workspace("push", signal_words=1, half_bytes=8)
    x = torch.arange(8.0).to(torch.float8_e4m3fn)
    y = group.world.memory.empty(group.world_rank, (8,), torch.float8_e4m3fn)
    arguments = dict(context=workspace.context, x=x, y=y, start=workspace.data_start, SIZE=group.size, WAITS=waits)
    results = ("y",) if group.rank else ()
    group.launch(
        Launch(op="push", group=group, kernel=push, grid=1, arguments=arguments, inputs=("x",), results=results)
    )
    return y


def test_races_of_single_bytes():
    assert torch.equal(simulate(pushed, True, gpus=2)[1].float(), torch.arange(8.0))
    with pytest.raises(mk.RaceError, match="nothing orders the two"):
        simulate(pushed, False, gpus=2, schedule="in-order")  # so that the bytes are there by chance


@triton.jit
def leave_one_out(x, y):
    i = tl.arange(0, 8)
    tl.store(y + i, tl.load(x + i), mask=i != 3)


def test_a_result_that_is_not_written_shows():
    def on_rank(group):
        y = group.world.memory.empty(group.world_rank, (8,), torch.float8_e5m2)
        assert y.isnan().all()
        x = torch.ones(8).to(torch.float8_e5m2)
        group.launch(Launch(op="push", group=group, kernel=leave_one_out, grid=1, arguments=dict(x=x, y=y),
                            inputs=("x",), results=("y",)))  # fmt: skip

    with pytest.raises(mk.SimulatorError, match=r"nobody has written y\[3\]"):
        simulate(on_rank)
