"""Triton's language on numpy: numbers as a GPU's, and a process that is left as it was found."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import triton
import triton.language as tl
from patience import HANG

import mkernel as mk
from mkernel.lang.order import grouped

from .harness import run, simulate


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


# -- what is left behind


def language() -> dict[str, object]:
    owners = {"tl": tl, "core": tl.core, "math": tl.math, "tensor": tl.tensor,
              "descriptor": tl.core.tensor_descriptor_base, "jit": type(grouped)}  # fmt: skip
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
        grouped(0, 1, 1, 1)


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
