"""Triton's language on numpy: numbers as a GPU's, and a process that is left as it was found."""

import gc
import inspect
import math
import os
import subprocess
import sys
import textwrap
import warnings
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support.patience import HANG
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

import mkernel as mk
from mkernel.lang.order import swizzle_tile
from mkernel.sim.interpreter import _plain, argument, python_function
from mkernel.sim.interpreter import run as run_kernel

from .harness import launch, run, simulate


@triton.jit
def cast(source, target, N: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, N, BLOCK):
        place = start + tl.arange(0, BLOCK)
        values = tl.load(source + place, mask=place < N)
        tl.store(target + place, values.to(target.dtype.element_ty), mask=place < N)


def casted(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    target = torch.zeros(source.shape, dtype=dtype)
    run(cast, source=source, target=target, N=source.numel(), BLOCK=1024)
    return target


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bits, except that one NaN is as good as another."""
    bits = {2: torch.int16, 4: torch.int32}[found.element_size()]
    both = found.isnan() & expected.isnan()
    return bool((both | (found.view(bits) == expected.view(bits))).all())


def awkward_numbers() -> torch.Tensor:
    """fp32 bit patterns: random ones, subnormals, infinities, NaN, and ties between two bf16 or fp16."""
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**31), 2**31, (4000,), generator=generator).int()
    subnormal = torch.randint(0, 2**23, (500,), generator=generator).int()
    halves = (torch.randint(-(2**15), 2**15, (1000,), generator=generator) * 65536 + 0x8000).int()
    around = torch.cat([halves - 1, halves, halves + 1])
    special = torch.tensor([0, -(2**31), 0x7F800000, -0x800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7F7FFFFF, 1,
                            0x7F7F8000, 0x7F7F7FFF, 0x00800000, 0x007FFFFF]).int()  # fmt: skip
    fp16 = torch.arange(-(2**15), 2**15, 7).short().view(torch.float16).float()
    step = torch.nextafter(fp16.half(), torch.full_like(fp16, torch.inf).half()).float()
    between = ((fp16 + step) / 2).view(torch.int32)
    edges = torch.tensor([65504.0, 65519.0, 65520.0, 65536.0, -65520.0, 2.0**-24, 2.0**-25, 2.0**-25 * 1.001])
    return torch.cat([anything, subnormal, around, special, between, edges.view(torch.int32)]).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_torch_s(dtype):
    numbers = awkward_numbers()
    assert same(casted(numbers, dtype), numbers.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widening_is_exact(dtype):
    numbers = torch.arange(-(2**15), 2**15).short().view(dtype)
    assert same(casted(numbers, torch.float32), numbers.float())


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_between_the_two_short_types(source, target):
    numbers = torch.arange(-(2**15), 2**15).short().view(source)
    assert same(casted(numbers, target), numbers.to(target))


def test_ties_go_to_even():
    below, tie, above = (torch.tensor([1 + x / 256]) for x in (0.99, 1.0, 1.01))
    assert casted(below, torch.bfloat16).item() == 1.0
    assert casted(tie, torch.bfloat16).item() == 1.0
    assert casted(above, torch.bfloat16).item() == 1 + 2 / 256
    assert casted(torch.tensor([1 + 3 / 256]), torch.bfloat16).item() == 1 + 4 / 256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_integers_become_floats(dtype):
    numbers = torch.tensor([0, 1, -1, 255, 256, 257, -1000, 32767], dtype=torch.int32)
    assert same(casted(numbers, dtype), numbers.to(dtype))


def test_floats_become_integers():
    numbers = torch.tensor([0.0, 1.9, -1.9, 255.0, -7.5])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert casted(numbers.to(dtype), torch.int32).tolist() == numbers.to(dtype).int().tolist()


@triton.jit
def dot(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + i[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + j[None, :])
    z = tl.load(c + i[:, None] * N + j[None, :])
    tl.store(c + i[:, None] * N + j[None, :], tl.dot(x, y, z, input_precision=PRECISION))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_is_as_good_as_float64(dtype, scale):
    m, n, k = 16, 32, 64
    a, b, c = (scale * torch.randn(m, k)).to(dtype), torch.randn(k, n).to(dtype), torch.randn(m, n)
    exact = a.double() @ b.double() + c.double()
    run(dot, a=a, b=b, c=c, M=m, N=n, K=k, PRECISION="ieee")
    bound = 2 * torch.finfo(torch.float32).eps * (a.double().abs() @ b.double().abs() + exact.abs())
    assert ((c.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dot_knows_infinity_and_nan(dtype):
    a, b, c = torch.ones(16, 16, dtype=dtype), torch.ones(16, 16, dtype=dtype), torch.zeros(16, 16)
    a[0, 0], a[1, 0] = float("inf"), float("nan")
    run(dot, a=a, b=b, c=c, M=16, N=16, K=16, PRECISION="ieee")
    assert c[0].isinf().all()
    assert c[1].isnan().all()
    assert (c[2:] == 16).all()


@triton.jit
def arithmetic(x, y, out, N: tl.constexpr, HOW: tl.constexpr):
    place = tl.arange(0, N)
    a, b = tl.load(x + place), tl.load(y + place)
    if HOW == "add":
        tl.store(out + place, a + b)
    elif HOW == "multiply":
        tl.store(out + place, a * b)
    elif HOW == "less":
        tl.store(out + place, tl.where(a < b, a, b))
    elif HOW == "negate":
        tl.store(out + place, -a)
    else:
        tl.store(out + place, tl.maximum(a, b))


@pytest.mark.parametrize("how", ["add", "multiply", "less", "maximum", "negate"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_arithmetic_element_by_element(dtype, how):
    x, y = torch.randn(64).to(dtype), torch.randn(64).to(dtype)
    out = torch.zeros(64, dtype=dtype)
    run(arithmetic, x=x, y=y, out=out, N=64, HOW=how)
    expected = {
        "add": lambda: x + y,
        "multiply": lambda: x * y,
        "less": lambda: torch.where(x < y, x, y),
        "maximum": lambda: torch.maximum(x, y),
        "negate": lambda: -x,
    }[how]()
    assert same(out, expected)


@triton.jit
def strange_instruction(out):
    value = tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out, value)


def test_unknown_assembly_is_refused():
    with pytest.raises(mk.SimulatorError, match=r"test_interpreter\.py:\d+: .*laneid"):
        run(strange_instruction, out=torch.zeros(1, dtype=torch.int32))


@triton.jit
def where_am_i(out):
    place = tl.program_id(0)
    tl.store(out + place * 2, place + 10 * tl.program_id(1) + 100 * tl.program_id(2))
    tl.store(out + place * 2 + 1, tl.num_programs(0) + 10 * tl.num_programs(1) + 100 * tl.num_programs(2))


def test_program_ids():
    out = torch.zeros(8, dtype=torch.int32)
    run(where_am_i, grid=4, out=out)
    assert out.tolist() == [0, 114, 1, 114, 2, 114, 3, 114]


@triton.jit
def atomics(x, before):
    tl.store(before + 0, tl.atomic_add(x + 0, 5))
    tl.store(before + 1, tl.atomic_max(x + 1, 5))
    tl.store(before + 2, tl.atomic_min(x + 2, 5))
    tl.store(before + 3, tl.atomic_xchg(x + 3, 5))
    tl.store(before + 4, tl.atomic_cas(x + 4, 7, 5))
    tl.store(before + 5, tl.atomic_cas(x + 5, 8, 5))
    tl.store(before + 6, tl.atomic_or(x + 6, 8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_atomics_do_what_they_say(dtype):
    x, before = torch.full((7,), 7, dtype=dtype), torch.zeros(7, dtype=dtype)
    run(atomics, x=x, before=before)
    assert x.tolist() == [12, 7, 5, 5, 5, 7, 15]
    assert before.tolist() == [7] * 7


@triton.jit
def atomics_of_floats(x, before):
    tl.store(before + 0, tl.atomic_add(x + 0, 1.5))
    tl.store(before + 1, tl.atomic_max(x + 1, 1))
    tl.store(before + 2, tl.atomic_max(x + 2, -5.0))
    tl.store(before + 3, tl.atomic_max(x + 3, -1.0))
    tl.store(before + 4, tl.atomic_min(x + 4, -5.0))
    tl.store(before + 5, tl.atomic_min(x + 5, 1.0))
    tl.store(before + 6, tl.atomic_xchg(x + 6, 1))
    i = tl.arange(0, 4)
    tl.store(before + 8 + i, tl.atomic_max(x + 8 + i, tl.where(i < 2, 1.0, -5.0), mask=i != 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_atomics_of_floats(dtype):
    x, before = torch.full((12,), -3, dtype=dtype), torch.zeros(12, dtype=dtype)
    run(atomics_of_floats, x=x, before=before)
    assert x.tolist() == [-1.5, 1, -3, -1, -5, -3, 1, -3, 1, 1, -3, -3]
    assert before[:7].tolist() == [-3] * 7
    assert before[8:11].tolist() == [-3] * 3


# -- what is left behind


def language() -> dict[str, object]:
    owners = {"tl": tl, "core": tl.core, "math": tl.math, "tensor": tl.tensor,
              "descriptor": tl.core.tensor_descriptor_base, "jit": type(swizzle_tile)}  # fmt: skip
    return {f"{owner}.{name}": member for owner, place in owners.items() for name, member in vars(place).items()}


def test_nothing_of_triton_is_patched():
    """So a process can compile for a GPU while it simulates."""
    before = language()

    def on_rank(group):
        after = language()
        return before.keys() == after.keys() and all(before[name] is after[name] for name in before)

    assert simulate(on_rank, gpus=2) == [True, True]


def test_jit_functions_can_not_be_called_outside():
    simulate(lambda group: None)
    with pytest.raises(RuntimeError):
        swizzle_tile(0, 1, 1, 1)


def test_a_simulation_inside_a_simulation():
    """A rank may simulate something of its own; the outer one goes on."""

    def inner(group):
        return mk.all_gather_matmul(torch.ones(8, 16), torch.ones(16, 8)).sum().item()

    def outer(group):
        first = inner(group)
        nested = mk.spawn(inner, nodes=1, gpus_per_node=2, device="cpu")
        return first, nested, inner(group)

    size = 2 * 8 * 8 * 16
    assert simulate(outer, gpus=2) == [(size, [size, size], size)] * 2


def test_scalars_work_with_every_numpy():
    """int() of an array of one element is an error since numpy 2.4."""

    @triton.jit
    def loops(n, out):
        total = 0
        for i in range(n):
            if i > 2:
                total += i
        tl.store(out, total)

    out = torch.zeros(1, dtype=torch.int64)
    run(loops, n=6, out=out)
    assert out.item() == 12


@triton.jit
def many_kinds(x, number, ratio, nothing, NAME: tl.constexpr, out):
    value = (tl.load(x) + number) * ratio
    if nothing is None:
        value += 1000
    if NAME == "here":
        value += 10000
    tl.store(out, value)


def test_arguments_of_every_kind():
    x, out = torch.tensor([1]), torch.zeros(1)
    run(many_kinds, x=x, number=5, ratio=0.5, nothing=None, NAME="here", out=out)
    assert out.item() == 11003


@triton.jit
def choose(flag, out):
    if flag:
        tl.store(out, 1)
    else:
        tl.store(out, 2)


@pytest.mark.parametrize(("flag", "expected"), [(True, 1), (False, 2)])
def test_a_truth_value_as_argument(flag, expected):
    out = torch.zeros(1, dtype=torch.int32)
    run(choose, flag=flag, out=out)
    assert out.item() == expected


def kernel_with(step: tl.constexpr):
    @triton.jit
    def kernel(out):
        tl.store(out, step + 1)

    return kernel


def test_kernels_may_use_constants_around_them():
    """Triton's compiler knows the names of the function that a kernel was defined in."""
    for step in (4, 7):
        out = torch.zeros(1, dtype=torch.int32)
        run(kernel_with(tl.constexpr(step)), out=out)
        assert out.item() == step + 1


def in_a_new_process(source: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )


@pytest.mark.thorough
def test_it_works_under_triton_interpret():
    done = in_a_new_process(
        """
        import torch, mkernel as mk

        def rank(group):
            a, b = torch.randn(40, 32), torch.randn(32, 24)
            y, gathered = mk.all_gather_matmul(a, b, return_gathered=True)
            return torch.allclose(y, gathered @ b, atol=1e-4)

        assert mk.spawn(rank, nodes=2, gpus_per_node=1, device="cpu") == [True, True]
        print("right")
        """,
        TRITON_INTERPRET="1",
    )
    assert done.stdout.strip() == "right", done.stderr


# -- what a GPU refuses


LIMIT = 5
TABLE = [1, 2]


def helper(x):
    return x + 1


@triton.jit
def reads_a_global(out):
    tl.store(out, LIMIT)


@triton.jit
def reads_a_global_in_a_branch(out, WANTED: tl.constexpr):
    if WANTED:
        tl.store(out, LIMIT)
    else:
        tl.store(out, 1)


@triton.jit
def calls_python(out):
    tl.store(out, helper(1))


@triton.jit
def calls_numpy(out):
    tl.store(out, np.maximum(tl.load(out), 1))


@triton.jit
def calls_torch(out):
    tl.store(out, torch.relu(tl.load(out)))


@triton.jit
def calls_an_unknown_builtin(out):
    tl.store(out, sorted([1, 2]))


@triton.jit
def takes_int(out):
    tl.store(out, int(tl.load(out)))


@triton.jit
def takes_float(out):
    tl.store(out, float(tl.load(out)))


@triton.jit
def takes_handle(out):
    tl.store(out, tl.load(out).handle)


@triton.jit
def takes_data(out):
    tl.store(out, tl.load(out).data)


@triton.jit
def takes_array(out):
    tl.store(out, tl.load(out)._data)


@triton.jit
def takes_items(out):
    tl.store(out, tl.load(out + tl.arange(0, 4)).item())


@triton.jit
def uses_item_as_a_number(out):
    tl.store(out + tl.arange(0, tl.load(out).item()), 1)


@triton.jit
def takes_list(out):
    tl.store(out, tl.load(out).tolist())


@triton.jit
def unpacks(out):
    a, b = tl.arange(0, 2)
    tl.store(out, a + b)


@triton.jit
def shows_a_value(out):
    tl.device_print(f"value {tl.load(out)}")


@triton.jit
def indexes(out):
    tl.store(out, tl.arange(0, 4)[1])


@triton.jit
def sizes_of_tensors(out):
    tl.store(out + tl.arange(0, tl.load(out)), 0)


@triton.jit
def three_elements(out):
    tl.store(out + tl.arange(0, 3), 0)


@triton.jit
def blocks_that_do_not_fit(out):
    tl.store(out, tl.sum(tl.arange(0, 4) + tl.arange(0, 8)))


@triton.jit
def block_into_scalar(out):
    tl.store(out, tl.arange(0, 4))


@triton.jit
def branches_on_a_block(out):
    if tl.arange(0, 4) > 2:
        tl.store(out, 1)


@triton.jit
def loops_on_a_block(out):
    while tl.arange(0, 4) > 2:
        tl.store(out, 1)


@triton.jit
def loops_over_a_tuple(out):
    for x in (1, 2):
        tl.store(out, x)


@triton.jit
def compares_twice(out):
    if 0 < tl.load(out) < 3:
        tl.store(out, 1)


@triton.jit
def negates_a_number(out):
    if not tl.load(out):
        tl.store(out, 1)


@triton.jit
def masks_with_numbers(out):
    tl.store(out, 1, mask=tl.load(out))


@triton.jit
def loads_a_number(out):
    tl.store(out, tl.load(tl.load(out)))


@triton.jit
def partial_barrier(out):
    tl.inline_asm_elementwise("bar.sync 1, 64; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def too_few_arguments(out):
    choose(out)


@triton.jit
def unknown_function(out):
    tl.store(out, tl.median(tl.arange(0, 4)))


REFUSED = [
    (reads_a_global, "`LIMIT`.*tl.constexpr"),
    (calls_python, "`helper`.*@triton.jit"),
    (calls_numpy, "`np.maximum` is a Python function"),
    (calls_torch, "`torch.relu` is a Python function"),
    (calls_an_unknown_builtin, "`sorted` is not defined"),
    (takes_int, "not known when the kernel is compiled"),
    (takes_float, "not known when the kernel is compiled"),
    (takes_handle, "no attribute `handle`"),
    (takes_data, "no attribute `data`"),
    (takes_array, "memory of a tensor"),
    (takes_items, "one element"),
    (uses_item_as_a_number, "tl.arange needs constants"),
    (takes_list, "no attribute `tolist`"),
    (unpacks, "not known when the kernel is compiled"),
    (shows_a_value, "f-string"),
    (indexes, "indexed with"),
    (sizes_of_tensors, "tl.arange needs constants"),
    (three_elements, "power of two, it is 3"),
    (blocks_that_do_not_fit, r"shapes \[4\] and \[8\] do not broadcast"),
    (block_into_scalar, "scalar pointer"),
    (branches_on_a_block, "a condition must be a scalar"),
    (loops_on_a_block, "a condition must be a scalar"),
    (loops_over_a_tuple, "tl.static_range"),
    (compares_twice, "two comparisons"),
    (negates_a_number, "compare it"),
    (masks_with_numbers, "a mask must be a condition"),
    (loads_a_number, "tl.load needs a pointer"),
    (partial_barrier, "bar.sync 1, 64"),
    (too_few_arguments, "missing 1 required positional argument"),
    (unknown_function, "`tl.median`"),
]


@pytest.mark.parametrize(("kernel", "message"), REFUSED, ids=[kernel.fn.__name__ for kernel, _ in REFUSED])
def test_what_a_gpu_refuses(kernel, message):
    """The error names the line of the kernel."""
    lines, first = inspect.getsourcelines(kernel.fn)
    with pytest.raises(mk.SimulatorError, match=message) as caught:
        run(kernel, out=torch.zeros(4, dtype=torch.int32))
    file, line, _ = str(caught.value).split(":", 2)
    assert file == __file__
    assert first < int(line) < first + len(lines)


def test_what_is_not_compiled_is_not_refused():
    out = torch.zeros(1, dtype=torch.int32)
    run(reads_a_global_in_a_branch, out=out, WANTED=False)
    assert out.item() == 1
    with pytest.raises(mk.SimulatorError, match="LIMIT"):
        run(reads_a_global_in_a_branch, out=out, WANTED=True)


def test_the_error_names_the_function_that_made_it():
    """And not the kernel that called it, nor Triton's library."""

    @triton.jit
    def inner(out):
        return tl.sort(out)

    @triton.jit
    def outer(out):
        inner(out)

    _, first = inspect.getsourcelines(inner.fn)
    with pytest.raises(mk.SimulatorError, match=f"test_interpreter.py:{first + 2}: "):
        run(outer, out=torch.zeros(1))


def test_a_replaced_function_is_used(monkeypatch):
    """Globals of a kernel are looked up anew at every launch."""

    @triton.jit
    def two(x):
        return x + 2

    out = torch.zeros(1, dtype=torch.int32)
    run(calls_another, out=out)
    assert out.item() == 1
    monkeypatch.setitem(globals(), "one", two)
    run(calls_another, out=out)
    assert out.item() == 3
    monkeypatch.undo()
    run(calls_another, out=out)
    assert out.item() == 4


def test_a_kernel_that_is_gone_leaves_nothing_behind():
    before = len(_plain.compiled)
    for step in range(20):
        run(kernel_with(tl.constexpr(step)), out=torch.zeros(1, dtype=torch.int32))
    gc.collect()
    assert len(_plain.compiled) < before + 10


@triton.jit
def one(x):
    return x + 1


@triton.jit
def calls_another(out):
    tl.store(out, one(tl.load(out)))


# -- what Triton allows


class View(NamedTuple):
    pointer: object
    stride: object


class Problem(NamedTuple):
    source: object
    views: tuple
    rows: object
    SIZE: object


@triton.jit
def every_other(view):
    return View(view.pointer, view.stride * 2)


@triton.jit
def structured(problem, scale, N: tl.constexpr):
    i = tl.arange(0, N)
    total = tl.sum(problem.source.load([0, 0]), 1)
    view = every_other(problem.views[0])
    total += tl.load(view.pointer + i * view.stride)
    for _ in tl.static_range(problem.SIZE):
        total += scale
    _, (target, last) = problem.views
    tl.store(target.pointer + i * target.stride, total, mask=i < problem.rows)
    tl.store(last, problem.SIZE)


def test_structures_as_arguments():
    a, b, out, last = torch.randn(8, 16), torch.randn(32), torch.zeros(8), torch.zeros(1)
    problem = Problem(TensorDescriptor.from_tensor(a, [8, 16]), (View(b, 2), (View(out, 1), last)), 6, tl.constexpr(3))
    run(structured, problem=problem, scale=0.5, N=8)
    expected = (a.double().sum(1) + b.double()[::4] + 1.5)[:6]
    torch.testing.assert_close(out[:6], expected.float())  # sums of 18 numbers, some of which may cancel
    assert (out[6:] == 0).all()
    assert last.item() == 3


DEFAULT = tl.constexpr(7)


@triton.jit
def with_defaults(x, by=2, MORE: tl.constexpr = DEFAULT):
    return x * by + MORE


@triton.jit
def many_statements(out, n, FLAG: tl.constexpr, NOTHING: tl.constexpr = None):
    x, y = 3, (4, 5.5)
    WIDTH: tl.constexpr = len(out.shape) + 4
    z: tl.int32 = WIDTH
    z += 1
    tl.static_assert(WIDTH == 4, "a scalar has no shape")
    tl.store(out + 0, x + y[0])
    tl.store(out + 1, with_defaults(n) + with_defaults(n, 3, MORE=1))
    if NOTHING is not None and NOTHING.shape[0] == 3:
        tl.store(out + 2, 100)
    if (n > 2 and n < 9) or n == 100:
        tl.store(out + 2, 1)
    tl.store(out + 3, n if n > 100 else min(n, 3) + max(2, 5))
    total = 0
    for i in range(n):
        for j in tl.range(0, i, 2, num_stages=3):
            total += j
        if not (i < 3):
            total += 10
    tl.store(out + 4, total)
    for i in tl.static_range(2):
        tl.store(out + 5 + i, tl.full((1,), i + 1, tl.int32).item())
    while z < 20:
        z = z * 2
    tl.store(out + 7, z)
    if isinstance(x, tl.tensor) and not isinstance(WIDTH, tl.tensor) and hasattr(x, "dtype"):
        tl.store(out + 8, 1 if FLAG == "yes" else 2)
    assert n > 0, "n is positive"
    tl.store(out + 9, triton.cdiv(WIDTH, 3) + math.gcd(WIDTH, 6))
    for i in range(n, 0, -2):
        tl.store(out + 10, i)
    a, b = y
    tl.store(out + 11, a + b.to(tl.int32))


def test_statements_mean_what_triton_makes_of_them():
    out = torch.zeros(12, dtype=torch.int32)
    run(many_statements, out=out, n=5, FLAG="yes")
    triangle = sum(j for i in range(5) for j in range(0, i, 2))
    assert out.tolist() == [7, 17 + 16, 1, 8, triangle + 20, 1, 2, 20, 1, 2 + 2, 1, 9]


@triton.jit
def makes_a_descriptor(source, target, rows, columns, R: tl.constexpr, C: tl.constexpr):
    a = tl.make_tensor_descriptor(source, shape=[rows, columns], strides=[columns, 1], block_shape=[R, C])
    b = tl.make_tensor_descriptor(target, [rows, columns], [columns, 1], [R, C])
    for i in range(0, rows, R):
        for j in range(0, columns, C):
            b.store([i, j], a.load([i, j]) * 2)


def test_descriptors_made_by_a_kernel():
    source = torch.randn(10, 12)
    target = torch.zeros_like(source)
    run(makes_a_descriptor, source=source, target=target, rows=10, columns=12, R=4, C=8)
    assert torch.equal(target, 2 * source)


@triton.jit
def block_pointers(source, target, n, m, R: tl.constexpr, C: tl.constexpr):
    a = tl.make_block_ptr(source, (n, m), (m, 1), (0, 0), (R, C), (1, 0))
    b = tl.make_block_ptr(target, (n, m), (m, 1), (0, 0), (R, C), (1, 0))
    for _ in range(tl.cdiv(m, C)):
        tl.store(b, tl.load(a, boundary_check=(0, 1), padding_option="zero") + 1, boundary_check=(0, 1))
        a, b = tl.advance(a, (0, C)), b.advance((0, C))


def test_block_pointers():
    """Triton's own interpreter does these, in the simulator's memory, as long as it has them."""
    if not hasattr(triton.runtime.interpreter, "BlockPointerHandle"):
        with pytest.raises(mk.SimulatorError, match=r"use tl\.make_tensor_descriptor"):
            run(block_pointers, source=torch.zeros(3, 10), target=torch.zeros(3, 10), n=3, m=10, R=4, C=4)
        return
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        source = torch.arange(30).reshape(3, 10).to(dtype)
        target = torch.zeros_like(source)
        run(block_pointers, source=source, target=target, n=3, m=10, R=4, C=4)
        assert torch.equal(target, source + 1)


def test_warnings_are_as_the_user_set_them():
    """A kernel's infinities are silent; numpy's error state outside of it is untouched."""

    @triton.jit
    def overflows(out):
        x = tl.load(out)
        tl.store(out, tl.exp(x * 1e30) - tl.exp(x * 1e30) + tl.log(x - x))
        tl.store(out + 1, (tl.full((4,), 2**31 - 1, tl.int32) + 1).max())

    def on_rank(group):
        with np.errstate(over="raise", invalid="raise"):
            launch(group, overflows, out=torch.ones(2))
            launch(group, overflows, out=torch.ones(2))
            return np.geterr()

    before = np.geterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for state in simulate(on_rank, gpus=2):
            assert state["over"] == state["invalid"] == "raise"
    assert np.geterr() == before


def test_it_compiles_for_a_gpu_meanwhile():
    """While ranks simulate, in the same process."""

    def on_rank(group):
        source = ASTSource(choose, {"flag": "i1", "out": "*i32"}, {}, {})
        text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
        mk.all_gather_matmul(torch.ones(8, 16), torch.ones(16, 8))
        return "tt.store" in text

    assert simulate(on_rank, gpus=2) == [True, True]


def test_frames_between_kernel_and_memory_are_the_simulator_s():
    """Whoever walks the frames finds the kernel's line."""
    seen = []

    class Cta(SimpleNamespace):
        def constant(self, address, dtype):
            return None

        def load(self, addresses, mask, other, dtype, descriptor, volatile):
            frame = sys._getframe(1)
            while os.path.dirname(frame.f_code.co_filename).endswith(os.path.join("mkernel", "sim")):
                frame = frame.f_back
            seen.append((frame.f_code.co_filename, frame.f_lineno, volatile, addresses.dtype, mask.dtype))
            return np.zeros(np.broadcast_shapes(addresses.shape, mask.shape), dtype=dtype)

    @triton.jit
    def loads(pointer):
        tl.load(pointer)
        tl.load(pointer + tl.arange(0, 4), mask=tl.arange(0, 4) < 2, volatile=True)

    run_kernel(Cta(program_id=0, num_programs=1), python_function(loads), argument(torch.zeros(4)))
    _, first = inspect.getsourcelines(loads.fn)
    assert seen == [(__file__, first + 2, False, np.uint64, bool), (__file__, first + 3, True, np.uint64, bool)]
