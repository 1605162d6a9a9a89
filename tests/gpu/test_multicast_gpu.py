"""Multicast on one GPU: a multicast object over its memory alone, made with the driver, through which kernels
store and add. That the switch reaches other GPUs it cannot show; that the instructions run, and do with bits, layouts
and fences what is expected of them, it can. The same for the kernel of matmul_all_reduce, whose only rank hands its
tiles to itself."""

import ctypes
import textwrap

import pytest
import torch
import triton
import triton.language as tl
from harness import limited  # noqa: F401
from support.forked_processes import torchrun

import mkernel as mk
from mkernel.lang.context import MULTICAST, TABLE
from mkernel.lang.partials import load_partial, store_partial
from mkernel.ops.reduce.all_reduce import plan as all_reduce_plan
from mkernel.ops.reduce.all_reduce.multimem import everywhere, fence_aliases, load_sum, store_everywhere
from mkernel.runtime.cuda import DeviceMemory

pytestmark = pytest.mark.usefixtures("limited")

MULTICAST_SUPPORTED = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
PINNED, ON_DEVICE, POSIX_FILE, READ_AND_WRITE = 1, 1, 1, 3
RECOMMENDED = 1
SIZE = 1 << 28
NAMES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
TILES = [(128, 256), (128, 128), (64, 64)]


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Flags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]  # fmt: skip


class _Allocation(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", _Location),
        ("windows", ctypes.c_void_p), ("flags", _Flags),
    ]  # fmt: skip


class _MulticastObject(ctypes.Structure):  # CUmulticastObjectProp
    _fields_ = [
        ("devices", ctypes.c_uint), ("size", ctypes.c_size_t), ("handles", ctypes.c_ulonglong),
        ("flags", ctypes.c_ulonglong),
    ]  # fmt: skip


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class Driver:
    """The driver's functions. Those that fail skip the test, with the driver's word for it."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        if status:
            word = ctypes.c_char_p()
            self.library.cuGetErrorName(status, ctypes.byref(word))
            pytest.skip(f"{name}: {(word.value or b'error').decode()} ({status})")

    def map(self, handle, size):
        """An address of what the handle stands for."""
        address = ctypes.c_ulonglong()
        self("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0),
             ctypes.c_ulonglong(0), ctypes.c_ulonglong(0))  # fmt: skip
        self("cuMemMap", address, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0))
        access = _Access(_Location(ON_DEVICE, torch.cuda.current_device()), READ_AND_WRITE)
        self("cuMemSetAccess", address, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1))
        return address.value


@pytest.fixture(scope="module")
def addresses():
    """(the memory's own address, its multicast address); kept until the process ends."""
    torch.zeros(1, device="cuda")  # makes the context
    driver, device = Driver(), torch.cuda.current_device()
    supported = ctypes.c_int(0)
    driver("cuDeviceGetAttribute", ctypes.byref(supported), MULTICAST_SUPPORTED, device)
    if not supported.value:
        pytest.skip("the driver says that this GPU has no multicast")
    wanted = _MulticastObject(devices=1, size=SIZE, handles=POSIX_FILE, flags=0)
    granularity = ctypes.c_size_t()
    driver("cuMulticastGetGranularity", ctypes.byref(granularity), ctypes.byref(wanted), RECOMMENDED)
    size = wanted.size = -(-SIZE // granularity.value) * granularity.value
    group = ctypes.c_ulonglong()
    driver("cuMulticastCreate", ctypes.byref(group), ctypes.byref(wanted))
    driver("cuMulticastAddDevice", group, device)
    kind = _Allocation(type=PINNED, handles=POSIX_FILE, location=_Location(ON_DEVICE, device))
    memory = ctypes.c_ulonglong()
    driver("cuMemCreate", ctypes.byref(memory), ctypes.c_size_t(size), ctypes.byref(kind), ctypes.c_ulonglong(0))
    driver("cuMulticastBindMem", group, ctypes.c_size_t(0), memory, ctypes.c_size_t(0), ctypes.c_size_t(size),
           ctypes.c_ulonglong(0))  # fmt: skip
    return driver.map(memory, size), driver.map(group, size)


@pytest.fixture
def context(addresses):
    table = [0] * (TABLE.value + 1)
    table[MULTICAST.value], table[TABLE.value] = addresses[1], addresses[0]
    return torch.tensor(table, dtype=torch.int64, device="cuda")


@triton.jit
def _tile(TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    return tl.arange(0, TILE_M)[:, None] * TILE_N + tl.arange(0, TILE_N)[None, :]


@triton.jit
def _product(a, b, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """A tile as the tensor cores leave it."""
    return tl.dot(tl.load(a + _tile(TILE_M, 64)), tl.load(b + _tile(64, TILE_N)))


@triton.jit
def _home(context, DTYPE: tl.constexpr):
    return tl.load(context + TABLE).to(tl.pointer_type(DTYPE))


@triton.jit
def hand_out(context, a, b, out, DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Stored through the switch, read at home."""
    store_everywhere(everywhere(context, 0, DTYPE), _product(a, b, TILE_M, TILE_N), TILE_M, TILE_N)
    fence_aliases()
    tl.debug_barrier()
    tl.store(out + _tile(TILE_M, TILE_N), load_partial(_home(context, DTYPE), TILE_M, TILE_N))


@triton.jit
def add(context, a, b, out, DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Stored at home, added by the switch: of one GPU the sum is what it has."""
    product = _product(a, b, TILE_M, TILE_N)
    store_partial(_home(context, DTYPE), product, TILE_M, TILE_N)
    tl.debug_barrier()
    total = load_sum(everywhere(context, 0, DTYPE), product, TILE_M, TILE_N)
    tl.store(out + _tile(TILE_M, TILE_N), total)


@pytest.mark.parametrize("kernel", [hand_out, add], ids=["store_everywhere", "load_sum"])
@pytest.mark.parametrize("dtype", NAMES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_through_the_switch_and_back(context, kernel, dtype, tile):
    rows, columns = tile
    generator = torch.Generator("cuda").manual_seed(rows + columns)
    for _ in range(20):
        a = torch.randn(rows, 64, generator=generator, device="cuda").bfloat16()
        b = torch.randn(64, columns, generator=generator, device="cuda").bfloat16()
        out = torch.full((rows, columns), float("nan"), device="cuda")
        kernel[(1,)](
            context, a, b, out, DTYPE=NAMES[dtype], TILE_M=rows, TILE_N=columns, num_warps=4 if rows == 64 else 8
        )
        exact = a.double() @ b.double()
        bound = torch.finfo(dtype).eps * exact.abs() + 64 * 2**-24 * (a.double().abs() @ b.double().abs())
        assert bool(((out.double() - exact).abs() <= bound).all())
        assert torch.equal(out, out.to(dtype).float()), "more bits than the slot has"


class _Bytes:
    """Memory that torch did not allocate, as torch takes it."""

    def __init__(self, address, nbytes):
        self.__cuda_array_interface__ = dict(data=(address, False), shape=(nbytes,), typestr="|u1", version=3)


@pytest.fixture
def with_multicast(addresses, monkeypatch):
    """Groups get their memory from the multicast object, and one rank is enough for the operator to use it."""
    taken = 0

    def allocate(_, rank, nbytes):
        nonlocal taken
        memory = torch.as_tensor(_Bytes(addresses[0] + taken, nbytes), device="cuda").zero_()
        taken += nbytes
        assert taken <= SIZE
        torch.cuda.current_stream().synchronize()
        return memory

    def multicast(_, group, memory, given):
        assert given == [memory.data_ptr()]
        return addresses[1] + memory.data_ptr() - addresses[0]

    monkeypatch.setattr(DeviceMemory, "allocate", allocate)
    monkeypatch.setattr(DeviceMemory, "map_multicast", multicast)
    monkeypatch.setattr(all_reduce_plan, "LARGEST_SLICED", 0)
    return lambda fewest: monkeypatch.setattr(all_reduce_plan, "FEWEST_FOR_MULTICAST", fewest)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=["16-bit parts", "fp32 parts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(4096, 4096, 1024), (1000, 777, 333)], ids=str)
def test_the_operator(with_multicast, shape, dtype, reduce_dtype):
    m, n, k = shape
    generator = torch.Generator("cuda").manual_seed(m)
    a, b, residual = (
        torch.randn(*size, generator=generator, device="cuda").to(dtype) for size in ((m, k), (k, n), (m, n))
    )
    bias = residual[0].clone()
    exact = a.double() @ b.double()
    u = torch.finfo(dtype).eps
    travelled = 2 * exact.abs() * (u if reduce_dtype is None else torch.finfo(torch.float32).eps)
    exact += bias.double() + residual.double()
    bound = travelled + u / 2 * exact.abs() * 1.01 + (k + 4) * 2**-24 * (a.double().abs() @ b.double().abs() + 10)

    def calls(group, fixed_order):
        arguments = dict(bias=bias, residual=residual, reduce_dtype=reduce_dtype, fixed_order=fixed_order)
        results = [mk.matmul_all_reduce(a, b, **arguments) for _ in range(10)]
        group.synchronize()
        plan = mk.explain("matmul_all_reduce", a, b, **arguments)
        return plan.multicast, plan.in_switch, results

    def run(fewest, fixed_order):
        with_multicast(fewest)
        return mk.spawn(calls, fixed_order, gpus_per_node=1, device="cuda")[0]

    multicast, _, plain = run(2, True)
    assert not multicast
    for fixed_order in (True, False):
        multicast, in_switch, results = run(1, fixed_order)
        assert (multicast, in_switch) == (True, not fixed_order)
        for y in results:
            assert bool(((y.double() - exact).abs() <= bound).all())
            if fixed_order:
                assert torch.equal(y, plain[0]), "not the bits of the kernel without multicast"


BETWEEN_GPUS = """
    import torch
    import mkernel as mk
    from mkernel.ops.reduce.all_reduce import plan as all_reduce_plan

    group = mk.init(timeout=60.0)
    a = torch.randn(4096, 1024, device=group.device).bfloat16()
    b = torch.randn(1024, 4096, device=group.device).bfloat16()
    exact, terms = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    travelled = exact.abs()
    for tensor in (exact, terms, travelled):
        torch.distributed.all_reduce(tensor)
    u = torch.finfo(a.dtype).eps
    bound = u / 2 * (travelled + exact.abs()) * 1.02 + 4096 * 2**-24 * terms
    plan = mk.explain("matmul_all_reduce", a, b)
    print(plan if group.rank == 0 else "", flush=True)
    assert plan.multicast
    first = mk.matmul_all_reduce(a, b)
    for fixed_order in [True] * 20 + [False] * 20:
        y = mk.matmul_all_reduce(a, b, fixed_order=fixed_order)
        group.synchronize()
        more = 0 if fixed_order else u * exact.abs()
        assert bool(((y.double() - exact).abs() <= bound + more).all())
        assert not fixed_order or torch.equal(y, first), "other bits on another run"
        others = group.exchange("y", y.view(torch.int16).sum(dtype=torch.int64).item())
        assert len(set(others)) == 1, "other bits on another rank"
    all_reduce_plan.FEWEST_FOR_MULTICAST = group.size + 1
    group._plans.clear()
    assert torch.equal(mk.matmul_all_reduce(a, b), first), "not the bits of the kernel without multicast"
    group.synchronize()
    print("right on rank", group.rank, flush=True)
    group.close()
    torch.distributed.destroy_process_group()
"""


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs, and NVSwitch between them")
def test_between_gpus(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(BETWEEN_GPUS))
    output = torchrun(script, 4, seconds=110)
    assert output.count("right on rank") == 4, output
