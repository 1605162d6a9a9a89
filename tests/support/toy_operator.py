"""An operator from outside of the package, with a kernel of its own: `toy_shift` gives every rank the vector of its
left neighbour in the node. `OPERATOR` is its entry in the registry."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import mkernel as mk
from mkernel.bench.benchmark import Benchmark
from mkernel.demo.case import Case, Demo, everyones
from mkernel.lang.context import Comm, Ranks, current_epoch, rank_of, segment_of
from mkernel.lang.layout import row_of, single_word_of, word_of
from mkernel.lang.roles import COMPUTE, INTRA
from mkernel.lang.signals import ENTERED, finish, notify, wait
from mkernel.operators import Operator, Option, Signal
from mkernel.runtime.collective import collective
from mkernel.runtime.group import current
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch
from mkernel.tuning.spaces import Space
from mkernel.workloads import Call, Cost, Tried, Workload, randn

SHIFTED = tl.constexpr(40)
BLOCK = 64
TUNABLE = Tunable("toy_shift", agreed=("count",), own=(), shared=())


class Shift(NamedTuple):
    """entered[rank]: the epoch that the rank has entered. shifted: the neighbour's vector is in the row."""

    entered: Any
    shifted: Any
    row: Any


def layout(group, count):
    memory = Layout("toy_shift")
    memory.words("entered", group.size)
    memory.signals("shifted", 1)
    memory.buffer("row", torch.float32, 1, count)
    return memory


@triton.jit
def _run(comm, x, y, shift, count, BLOCK: tl.constexpr):
    rank = rank_of(comm.context)
    left, right = (rank + comm.WORLD_SIZE - 1) % comm.WORLD_SIZE, (rank + 1) % comm.WORLD_SIZE
    mine = segment_of(comm.context, rank, tl.int64)
    notify(segment_of(comm.context, left, tl.int64) + single_word_of(shift.entered, rank, 0), comm.epoch)
    word = single_word_of(shift.entered, right, 0)
    here = wait(comm.context, mine + word, comm.epoch - 1, INTRA, ENTERED, right, 0)
    target = segment_of(comm.context, right, tl.float32) + row_of(shift.row, comm.epoch, 0)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(target + i, tl.load(x + i, mask=i < count), mask=i < count)
    notify(segment_of(comm.context, right, tl.int64) + word_of(shift.shifted, comm.epoch, 0, 0), comm.epoch)
    word = word_of(shift.shifted, comm.epoch, 0, 0)
    here = wait(comm.context, mine + word, comm.epoch, COMPUTE, SHIFTED, left, 7) & here
    source = segment_of(comm.context, rank, tl.float32) + row_of(shift.row, comm.epoch, 0)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        arrived = tl.load(source + i, mask=i < count)
        tl.store(y + i, tl.where(here, arrived, float("nan")), mask=i < count)
    finish(comm.context, comm.epoch, comm.WORLD_SIZE)


@triton.jit
def toy_shift_kernel(context, ranks, x, y, shift, count, BLOCK: tl.constexpr):
    comm = Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE)
    _run(comm, x, y, shift, count, BLOCK)


def _check(group, x):
    if group.nodes > 1 or x.dim() != 1 or x.dtype != torch.float32 or not x.is_contiguous():
        raise mk.ArgumentError(f"x must be a contiguous float32 vector in a group of one node, got {tuple(x.shape)}")


@collective
def toy_shift(x, *, group=None, config=None):
    """The vector of the left neighbour in the node."""
    _check(group, x)
    group.agree("toy_shift", count=x.numel())
    y = group.world.memory.empty(group.world_rank, x.shape, x.dtype)
    group.launch(prepare(group, x, y))
    return y


def prepare(group, x, y):
    memory = layout(group, x.numel())
    workspace = memory.workspace(group)
    shift = Shift(
        memory.words_in(workspace, "entered"),
        memory.words_in(workspace, "shifted"),
        memory.buffer_in(workspace, "row"),
    )
    return Launch(
        op="toy_shift", group=group, kernel=toy_shift_kernel, grid=1,
        arguments=dict(
            context=workspace.context, ranks=Ranks(*constants(group.size, group.gpus_per_node)), x=x, y=y,
            shift=shift, count=x.numel(), BLOCK=BLOCK,
        ),
        variant=(x.numel(), workspace.signal_words, workspace.half_bytes),
        uses=memory.uses(workspace, free={"row": None}), inputs=["x"], results=["y"],
    )  # fmt: skip


class Plan(NamedTuple):
    count: int

    def __str__(self):
        return f"toy_shift: {self.count} elements go to the right"


def explain(x, *, group=None, config=None):
    """The plan that `toy_shift` with these arguments would carry out."""
    _check(current(group), x)
    return Plan(x.numel())


def make(group, shape, dtype, *, backwards=False):
    x = randn(group, *shape, dtype=torch.float32, seed=1)
    y = torch.empty_like(x)
    tried = Tried(lambda config: prepare(group, x, y), lambda config: explain(x, group=group), {"count": x.numel()})
    return Call(lambda config: toy_shift(x, group=group), tried)


def case(group, shape, seed, large):
    x = torch.arange(float(shape[0]), device=group.device) + 1000 * group.rank + seed

    def exact():
        return everyones(group, "x", x)[group.rank - 1].double(), 1e-30

    return Case(f"a vector of {shape[0]}", lambda: toy_shift(x), exact, lambda: x.clone())


def measure(group, count, dtype, config, repeats, *, backwards=False):
    y = toy_shift(torch.ones(count, device=group.device), group=group)
    times = dict.fromkeys(("fused_ms", "library_ms", "wire_ms", "network_ms", "host_driven_ms"), 0.125)
    shares = dict.fromkeys(("speedup", "floor_fraction", "sustained_floor_fraction"), 1.0)
    error = (y - 1).abs().max().item()
    named = {"op": "toy_shift", "ranks": group.size, "nodes": 1, "gpus": 1, "emulated": True}
    return {**named, **times, **shares, "max_error": error, "error_bound": 0.0}


WORKLOAD = Workload("toy_shift", (100,), (8,), make, lambda shape, ranks: Cost(ranks, 0, ranks, 3 * ranks * shape[0]))
DEMO = Demo(case, simulated=lambda ranks: (300,), large=lambda ranks: (1 << 20,))
BENCHMARK = Benchmark(measure, several_nodes=False)

OPERATOR = Operator(
    name="toy_shift",
    summary="gives each rank the vector of its left neighbour",
    function=toy_shift,
    explain="support.toy_operator:explain",
    dimensions=("count",),
    shared=(),
    shapes=((1 << 20,),),
    small=((4096,),),
    signals=(Signal(SHIFTED.value, "shifted", "the vector of rank {peer}, piece {index}"),),
    options=(Option("backwards", "toy_shift: nothing else.", bench=True),),
    workload="support.toy_operator:WORKLOAD",
    space=lambda group, plan: Space({}),
    demo="support.toy_operator:DEMO",
    bench="support.toy_operator:BENCHMARK",
)
