"""Calls of operators on a simulated cluster, and checks of what they return and of memory around it."""

import contextlib
import signal
from dataclasses import dataclass

import torch

import mkernel as mk
from support.patience import HANG

SENTINEL = -77.0


def bound(k, dtype):
    return 4 * max(k, 1) ** 0.5 * torch.finfo(dtype).eps


def assert_close(y, exact, k):
    """Every element within 4*sqrt(k)*eps of float64; NaN never passes."""
    assert y.shape == exact.shape
    error = (y.double() - exact).abs()
    assert bool((error <= bound(k, y.dtype)).all()), f"largest error {error.max().item()}, bound {bound(k, y.dtype)}"


CLUSTERS = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL_TILES = mk.Config(tile_m=16, tile_n=16, tile_k=16)
SIMULATOR = {}  # options of the simulator that tests have set for `run`
TIMEOUT = 1e-3  # simulated seconds; nothing that is alive ever times out in the simulator


def run(function, *args, cluster=(1, 2), seed=0, timeout=TIMEOUT, **options):
    """mk.spawn in the simulator; `options` are those of the simulator."""
    from mkernel.sim.scheduler import Options  # not at the top: tests on GPUs use this module, without the simulator

    nodes, gpus = cluster
    sim = Options(**(SIMULATOR | options))
    return mk.spawn(function, *args, nodes=nodes, gpus_per_node=gpus, device="cpu", seed=seed, timeout=timeout, sim=sim)


def cluster_name(value):
    """For the names of tests: nodes x GPUs, or None for what is no cluster."""
    return f"{value[0]}x{value[1]}" if isinstance(value, tuple) and len(value) == 2 else None


@dataclass(frozen=True)
class Case:
    """The shape of a call; n may be one number per rank. `turn` numbers the calls of a test."""

    m: int
    n: int | tuple[int, ...]
    k: int
    dtype: torch.dtype = torch.float32

    def _values(self, rows, columns, key):
        generator = torch.Generator().manual_seed(hash(key) % 2**31)
        return torch.randn(rows, columns, generator=generator).to(self.dtype)

    def columns(self, rank):
        return self.n[rank] if isinstance(self.n, tuple) else self.n

    def rows(self, rank, turn=0):
        return self._values(self.m, self.k, (1, rank, turn))

    def gathered(self, size, turn=0):
        return torch.cat([self.rows(rank, turn) for rank in range(size)])

    def weights(self, rank, turn=0):
        return self._values(self.k, self.columns(rank), (2, rank, turn))


def call(group, case, turn=0, *, a=None, b=None, **arguments):
    """One call on this rank, with the case's values; the result and the inputs are checked."""
    a = case.rows(group.rank, turn) if a is None else a
    b = case.weights(group.rank, turn) if b is None else b
    before = a.clone(), b.clone()
    y = mk.all_gather_matmul(a, b, group=group, **arguments)
    assert_same(a, before[0])
    assert_same(b, before[1])
    assert_product(y, case.gathered(group.size, turn), b)
    return y


# -- results


def bits(tensor):
    """The tensor's bits as integers, so that NaN equals NaN."""
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def assert_same(actual, expected):
    """Bit for bit."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert torch.equal(bits(actual), bits(expected))


def assert_product(y, a, b):
    """y is a @ b: every element as close to float64 as `assert_close` asks for."""
    assert y.dtype == a.dtype
    assert_close(y, a.double() @ b.double(), a.shape[1])


# -- layouts: how a tensor lies in memory


def _up(columns):
    return -(-columns // 16) * 16


# name -> (shape of the memory around a [rows, columns] tensor, the tensor in it)
LAYOUTS = {
    "plain": (lambda r, c: (r, c), lambda memory, r, c: memory),
    "transposed": (lambda r, c: (c, r), lambda memory, r, c: memory.t()),
    "transposed in wide rows": (lambda r, c: (c, _up(r) + 16), lambda memory, r, c: memory[:, :r].t()),
    "every second column": (lambda r, c: (r, 2 * c), lambda memory, r, c: memory[:, ::2]),
    "every second row": (lambda r, c: (2 * r, c), lambda memory, r, c: memory[::2]),
    "odd column": (lambda r, c: (r, c + 5), lambda memory, r, c: memory[:, 3 : 3 + c]),
    "wide rows": (lambda r, c: (r + 3, _up(c) + 32), lambda memory, r, c: memory[1 : 1 + r, 16 : 16 + c]),
    "off by one": (lambda r, c: (r * c + 2,), lambda memory, r, c: memory[1 : 1 + r * c].view(r, c)),
}


def lay_out(values, layout):
    """The same values in another layout, with NaN between and around them."""
    rows, columns = values.shape
    shape, view = LAYOUTS[layout]
    result = view(torch.full(shape(rows, columns), float("nan"), dtype=values.dtype), rows, columns)
    result.copy_(values)
    return result


class Canary:
    """An output tensor inside of memory that nobody may touch."""

    def __init__(self, rows, columns, dtype, layout="wide rows"):
        shape, view = LAYOUTS[layout]
        self.memory = torch.full(shape(rows, columns), SENTINEL, dtype=dtype)
        self.tensor = view(self.memory, rows, columns)
        self._outside = torch.ones(self.memory.shape, dtype=torch.bool)
        view(self._outside, rows, columns).fill_(False)

    def check(self):
        assert (self.memory[self._outside] == SENTINEL).all(), "memory around out was written"


class Guards:
    """Bytes around everything that a simulated world allocates: workspaces, signals, rings, records."""

    BYTES = 1024
    VALUE = 0xA5

    def __init__(self, monkeypatch):
        from mkernel.sim.backend import SimMemory

        self.blocks = []
        allocate = SimMemory.allocate

        def guarded(memory, rank, nbytes):
            block = allocate(memory, rank, nbytes + 2 * self.BYTES)
            block[: self.BYTES] = self.VALUE
            block[self.BYTES + nbytes :] = self.VALUE
            self.blocks.append(block)
            return block[self.BYTES : self.BYTES + nbytes]

        monkeypatch.setattr(SimMemory, "allocate", guarded)

    def check(self):
        assert self.blocks
        for block in self.blocks:
            assert (block[: self.BYTES] == self.VALUE).all(), "bytes before an allocation were written"
            assert (block[-self.BYTES :] == self.VALUE).all(), "bytes behind an allocation were written"


# -- time


@contextlib.contextmanager
def time_limit(seconds=HANG):
    """Fail, instead of running on for ever."""

    def ring(*_):
        raise TimeoutError(f"not done after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
