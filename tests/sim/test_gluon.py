"""Gluon kernels: each rule of warps with roles, of mbarriers, of TMA and of the tensor cores, kept and broken. What is
kept passes in every schedule; what is broken is an error in every schedule that says where and what is missing."""

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

import mkernel as mk
from mkernel.lang.device import acquire_for_descriptors, complete_descriptor_stores
from mkernel.lang.gluon_compat import async_load, async_store
from mkernel.runtime.hopper import tma_descriptor
from mkernel.sim.dtypes import KernelError

from .harness import launch, simulate

SCHEDULES = [{"seed": seed} for seed in range(6)]
SCHEDULES += [{"schedule": name} for name in ("in-order", "reversed", "alternating")]

SIZE = gl.constexpr(64)  # rows and columns of a block
STEPS = gl.constexpr(5)
STAGES = gl.constexpr(2)
BYTES = gl.constexpr(2 * 64 * 64)  # of a block


def passes(on_rank, **cluster):
    for schedule in SCHEDULES:
        simulate(on_rank, **cluster, **schedule)


def fails(on_rank, error, match, **cluster):
    """In every schedule, with a message that matches. Returns the messages."""
    messages = []
    for schedule in SCHEDULES:
        with pytest.raises(error, match=match) as caught:
            simulate(on_rank, **cluster, **schedule)
        messages.append(str(caught.value))
    return messages


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def blocks(tensor):
    """A descriptor of a matrix, in blocks of SIZE x SIZE."""
    return tma_descriptor(tensor, *tensor.shape, tensor.stride(0), [SIZE.value, SIZE.value])


def words(count=1):
    return torch.zeros(count, dtype=torch.int64)


@gluon.constexpr_function
def sums():
    """The register layout of a product."""
    return gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


# -- a pipeline: a warp loads, a warpgroup multiplies and stores


@gluon.jit
def fill(a, b, x, y, full, empty, BROKEN: gl.constexpr):
    for step in range(STEPS):
        stage = step % STAGES
        if BROKEN != "empty":
            mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
        if BROKEN == "few bytes":
            mbarrier.expect(full.index(stage), BYTES)
        elif BROKEN == "many bytes":
            mbarrier.expect(full.index(stage), 3 * BYTES)
        else:
            mbarrier.expect(full.index(stage), 2 * BYTES)
        async_load(a, [0, step * SIZE], full.index(stage), x.index(stage))
        async_load(b, [step * SIZE, 0], full.index(stage), y.index(stage))


@gluon.jit
def use(c, x, y, z, full, empty, BROKEN: gl.constexpr):
    total = warpgroup_mma_init(gl.zeros([SIZE, SIZE], gl.float32, sums()))
    for step in range(STEPS):
        stage = step % STAGES
        if BROKEN == "other stage":
            mbarrier.wait(full.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1)
        elif BROKEN == "parity":
            mbarrier.wait(full.index(stage), 0)
        elif BROKEN != "full":
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        total = warpgroup_mma(x.index(stage), y.index(stage), total, use_acc=step > 0, is_async=True)
        if BROKEN != "early":
            total = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[total]))
        if BROKEN == "arrivals":
            mbarrier.arrive(empty.index(stage), count=2)
        else:
            mbarrier.arrive(empty.index(stage), count=1)
    result = warpgroup_mma_wait(0, deps=[total])
    if BROKEN == "rewritten":
        z.store((2 * result).to(gl.bfloat16))
        fence_async_shared()
        async_store(c, [0, 0], z)
    z.store(result.to(gl.bfloat16))
    if BROKEN != "fence":
        fence_async_shared()
    async_store(c, [0, 0], z)
    if BROKEN != "store_wait":
        tma.store_wait(0)


@gluon.jit
def pipeline(a, b, c, BROKEN: gl.constexpr):
    x = gl.allocate_shared_memory(a.dtype, [STAGES, SIZE, SIZE], a.layout)
    y = gl.allocate_shared_memory(b.dtype, [STAGES, SIZE, SIZE], b.layout)
    z = gl.allocate_shared_memory(c.dtype, [SIZE, SIZE], c.layout)
    full, empty = barriers(STAGES, 1), barriers(STAGES, 1)
    fence_async_shared()
    gl.warp_specialize([(use, (c, x, y, z, full, empty, BROKEN)), (fill, (a, b, x, y, full, empty, BROKEN))], [1], [40])


def run_pipeline(group, broken=""):
    a, b, c = random(64, 320), random(320, 64, seed=1), torch.zeros(64, 64, dtype=torch.bfloat16)
    launch(group, pipeline, a=blocks(a), b=blocks(b), c=blocks(c), BROKEN=broken)
    exact = a.double() @ b.double()
    assert bool(((c.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all())


def test_a_pipeline():
    passes(run_pipeline)


BROKEN_PIPELINES = {
    "empty": (mk.RaceError, r"the load is complete when mbarrier \d .* says so, which fill of .* must wait for first"),
    "full": (mk.SimulatorError, r"use of .* loads .* in shared memory, .* which nobody has written|"
                                r"the load is complete when mbarrier \d .* says so, which use of .* must wait"),
    "other stage": (mk.RaceError, r"the load is complete when mbarrier \d .* says so, which use of .* must wait"),
    "early": (mk.RaceError, r"use of .* then arrived .* at mbarrier .*, but warpgroup_mma_wait\(\) must come between"),
    "parity": ((mk.RaceError, mk.Deadlock),
               "use of .* loaded it before, and nothing orders|waits for a phase with parity 0|"
               "Nothing orders that before the end of phase 2"),
    "arrivals": (KernelError, "1 more arrivals at mbarrier 2 .* than the 1 of a phase"),
    "few bytes": (KernelError, "8192 more bytes were loaded than mbarrier 0 .* expects"),
    "many bytes": (mk.Deadlock, r"use of .* waits for a phase with parity 0 of mbarrier 0 \(initialized at .* in "
                                r"barriers.*\), .* in use \(0 have ended, and 8192 bytes of the next are missing\)"),
    "rewritten": (mk.RaceError, r"tma.store_wait\(\) must come between the two"),
    "fence": (mk.RaceError, r"fence_async_shared\(\) must come between the two"),
    "store_wait": (mk.RaceError, r"the CTA has ended[^*]* in use\n  tma.store_wait\(\) must come between the two"),
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN_PIPELINES)
def test_a_broken_pipeline(broken):
    error, match = BROKEN_PIPELINES[broken]
    for message in fails(lambda group: run_pipeline(group, broken), error, match):
        assert f"{__name__.rpartition('.')[2]}.py:" in message


# -- operands that warps store


@gluon.jit
def multiply_stored(x, y, c, BROKEN: gl.constexpr):
    """c = x @ y, with operands from ordinary loads."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    place = gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(1, rows)), 1) * SIZE
    place += gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(0, rows)), 0)
    left = gl.allocate_shared_memory(gl.bfloat16, [SIZE, SIZE], c.layout)
    right = gl.allocate_shared_memory(gl.bfloat16, [SIZE, SIZE], c.layout)
    left.store(gl.load(x + place))
    if BROKEN == "late store":
        fence_async_shared()
    right.store(gl.load(y + place))
    if BROKEN != "fence" and BROKEN != "late store":
        fence_async_shared()
    total = warpgroup_mma(left, right, gl.zeros([SIZE, SIZE], gl.float32, sums()), is_async=True)
    if BROKEN == "rewritten":
        left.store(gl.load(x + place))
    if BROKEN == "used":
        total = total + 1.0
    if BROKEN == "not waited":
        right.store(gl.zeros([SIZE, SIZE], gl.bfloat16, rows))
    total = warpgroup_mma_wait(1 if BROKEN == "other product" else 0, deps=[total])
    left.store(total.to(gl.bfloat16))
    fence_async_shared()
    async_store(c, [0, 0], left)
    tma.store_wait(0)


def run_stored(group, broken=""):
    x, y, c = random(64, 64), random(64, 64, seed=1), torch.zeros(64, 64, dtype=torch.bfloat16)
    launch(group, multiply_stored, x=x, y=y, c=blocks(c), BROKEN=broken)
    assert_rounded(c, x.double() @ y.double())


def assert_rounded(result, exact):
    """Rounded once, from a sum in fp32."""
    error = (result.double() - exact).abs()
    assert bool((error <= torch.finfo(result.dtype).eps / 2 * exact.abs() + 1e-4).all())


def test_operands_that_warps_store():
    passes(run_stored)


@pytest.mark.parametrize(
    ("broken", "error", "match"),
    [
        ("fence", mk.RaceError, r"loads it:[^*]*in multiply_stored\n  fence_async_shared\(\) must come between"),
        ("late store", mk.RaceError, r"allocation 1 [^*]*\n  fence_async_shared\(\) must come between"),
        (
            "rewritten",
            mk.RaceError,
            r"allocation 0 [^*]*stores to it:[^*]*\n  warpgroup_mma_wait\(\) must come between",
        ),
        (
            "not waited",
            mk.RaceError,
            r"allocation 1 [^*]*stores to it:[^*]*\n  warpgroup_mma_wait\(\) must come between",
        ),
        ("used", KernelError, "that may still be computed: use what warpgroup_mma_wait returns"),
        ("other product", KernelError, "that may still be computed: use what warpgroup_mma_wait returns"),
    ],
)
def test_operands_that_warps_store_too_early_or_too_late(broken, error, match):
    fails(lambda group: run_stored(group, broken), error, match)


# -- messages through global memory


@gluon.jit
def by_tma(tile, box, flags, out, STORE: gl.constexpr, BROKEN: gl.constexpr):
    """CTA 0 stores the box, and CTA 1 loads it. Then CTA 0 stores it again. One of them uses TMA."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    memory = gl.allocate_shared_memory(tile.dtype, [64, 16], tile.layout)
    loaded = barriers(1, 1).index(0)
    place = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1) * 16
    place += gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, layout)), 0)
    value = gl.full([64, 16], 1.0, gl.bfloat16, layout)
    if gl.program_id(0) == 0:
        if STORE:
            memory.store(value)
            fence_async_shared()
            async_store(tile, [0, 0], memory)
            if BROKEN == "only read":
                tma.store_wait(0)
            elif BROKEN != "complete":
                complete_descriptor_stores()
        else:
            gl.store(box + place, value)
        gl.thread_barrier()
        gl.atomic_xchg(flags, 1, sem="release")
        while gl.atomic_add(flags + 1, 0, sem="acquire") == 0:
            pass
        gl.store(box + place, 2 * value)
        if STORE:
            tma.store_wait(0)
    else:
        while gl.atomic_add(flags, 0, sem="acquire") == 0:
            pass
        if STORE:
            result = gl.load(box + place)
        else:
            if BROKEN != "fence":
                acquire_for_descriptors()
            mbarrier.expect(loaded, 64 * 16 * 2)
            async_load(tile, [0, 0], loaded, memory)
            if BROKEN == "early signal":
                gl.atomic_xchg(flags + 1, 1, sem="release")
            mbarrier.wait(loaded, 0)
            result = memory.load(layout)
        gl.thread_barrier()
        if BROKEN != "early signal":
            gl.atomic_xchg(flags + 1, 1, sem="release")
        gl.store(out + place, result)


def run_by_tma(group, store, broken):
    box, out = (torch.zeros(64, 16, dtype=torch.bfloat16) for _ in range(2))
    tile = tma_descriptor(box, 64, 16, 16, [64, 16])
    launch(group, by_tma, grid=2, tile=tile, box=box, flags=words(2), out=out, STORE=store, BROKEN=broken)
    assert bool((out == 1).all())


@pytest.mark.parametrize("store", [True, False])
def test_messages_by_tma(store):
    passes(lambda group: run_by_tma(group, store, ""))


@pytest.mark.parametrize(
    ("store", "broken", "match"),
    [
        (True, "complete", r"complete_descriptor_stores\(\) and a barrier must come between the access and that"),
        (True, "only read", r"complete_descriptor_stores\(\) and a barrier must come between the access and that"),
        (False, "fence", r"tensor descriptors need acquire_for_descriptors\(\) after the wait"),
        (False, "early signal", r"CTA 0 of all_gather_matmul stores to it:[^*]*CTA 1 of all_gather_matmul loaded it"),
    ],
)
def test_messages_by_tma_broken(store, broken, match):
    fails(lambda group: run_by_tma(group, store, broken), mk.RaceError, match)


# -- roles


@gluon.jit
def give(box, memory, ready, BROKEN: gl.constexpr, SHARED: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    value = gl.full([128], 7, gl.int32, layout)
    if SHARED:
        memory.store(value)
    else:
        gl.store(box + gl.arange(0, 128, layout), value)
    mbarrier.arrive(ready, count=1)
    if BROKEN == "order":
        if SHARED:
            memory.store(value)
        else:
            gl.store(box + gl.arange(0, 128, layout), value)


@gluon.jit
def take(box, memory, ready, out, BROKEN: gl.constexpr, SHARED: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    if BROKEN != "wait":
        mbarrier.wait(ready, 0)
    if SHARED:
        value = memory.load(layout)
    else:
        value = gl.load(box + gl.arange(0, 128, layout))
    gl.store(out + gl.arange(0, 128, layout), value)


@gluon.jit
def two_roles(box, out, BROKEN: gl.constexpr, SHARED: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = barriers(1, 1).index(0)
    gl.warp_specialize(
        [(give, (box, memory, ready, BROKEN, SHARED)), (take, (box, memory, ready, out, BROKEN, SHARED))], [1], [40]
    )
    gl.store(out + 128, 1 + gl.load(out))  # the roles have ended


def run_two_roles(group, broken, shared):
    box, out = (torch.zeros(129, dtype=torch.int32) for _ in range(2))
    launch(group, two_roles, grid=2 if broken == "CTAs" else 1, box=box, out=out, BROKEN=broken, SHARED=shared)
    assert out.tolist() == 128 * [7] + [8]


@pytest.mark.parametrize("shared", [True, False])
def test_roles(shared):
    passes(lambda group: run_two_roles(group, "", shared))


@pytest.mark.parametrize("broken", ["wait", "order"])
@pytest.mark.parametrize("shared", [True, False])
def test_roles_that_race(shared, broken):
    messages = fails(
        lambda group: run_two_roles(group, broken, shared), mk.SimulatorError, "race on|which nobody has written"
    )
    for message in messages:
        assert "give of rank 0, CTA 0" in message or "nobody has written" in message
        assert "take of rank 0, CTA 0" in message
        assert "must wait for first" in message or "has arrived at no barrier since" in message or broken == "wait"


@gluon.jit
def announce(ready, seen, BROKEN: gl.constexpr):
    for i in range(4):
        if not BROKEN:
            mbarrier.wait(seen, (i + 1) & 1)
        mbarrier.arrive(ready, count=1)


@gluon.jit
def listen(ready, seen):
    for i in range(4):
        mbarrier.wait(ready, i & 1)
        mbarrier.arrive(seen, count=1)


@gluon.jit
def announcements(BROKEN: gl.constexpr):
    made = barriers(2, 1)
    gl.warp_specialize([(announce, (made.index(0), made.index(1), BROKEN)), (listen, (made.index(0), made.index(1)))],
                       [1], [40])  # fmt: skip


@pytest.mark.parametrize("broken", [False, True])
def test_a_phase_that_could_be_missed(broken):
    """A wait only tells whether the number of phases is even: who waits for one must be back before the next ends."""

    def on_rank(group):
        launch(group, announcements, BROKEN=broken)

    if broken:
        fails(on_rank, (mk.RaceError, mk.Deadlock),
              r"listen of .* has waited for its phase \d:[^*]*in listen\n  Nothing orders that before the end of phase "
              r"\d:[^*]*in announce|listen of .* waits for a phase with parity . of mbarrier 0")  # fmt: skip
    else:
        passes(on_rank)


@gluon.constexpr_function
def at_barrier(what, threads):
    return f"bar.{what} 9, {threads}; mov.b32 $0, $1;"


@gluon.jit
def named_barrier(WHAT: gl.constexpr, THREADS: gl.constexpr):
    code: gl.constexpr = at_barrier(WHAT, THREADS)
    return gl.inline_asm_elementwise(
        code, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def take_turns(memory, out, ROLE: gl.constexpr, THREADS: gl.constexpr):
    """The roles exchange numbers."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    memory.index(ROLE).store(gl.full([128], ROLE, gl.int32, layout))
    if THREADS:
        named_barrier("sync", THREADS)
    gl.store(out + ROLE * 128 + gl.arange(0, 128, layout), memory.index(1 - ROLE).load(layout))


@gluon.jit
def two_warpgroups(out, ONE: gl.constexpr, OTHER: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.int32, [2, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([(take_turns, (memory, out, 0, ONE)), (take_turns, (memory, out, 1, OTHER))], [4], [80])


@pytest.mark.parametrize(
    ("one", "other", "error", "match"),
    [
        (256, 256, None, None),
        (256, 128, KernelError, "others use barrier 9 with (256|128) threads"),
        (
            384,
            384,
            mk.Deadlock,
            r"take_turns of .* waits for phase 1 of named barrier 9, .*128 threads of the next are",
        ),
        (128, 128, mk.SimulatorError, "race on|which nobody has written"),
        (0, 0, mk.SimulatorError, "race on|which nobody has written"),
        (200, 200, KernelError, "threads come in warps of 32"),
    ],
)
def test_named_barriers(one, other, error, match):
    def on_rank(group):
        out = torch.zeros(256, dtype=torch.int32)
        launch(group, two_warpgroups, out=out, ONE=one, OTHER=other)
        assert out.tolist() == 128 * [1] + 128 * [0]

    if error is None:
        passes(on_rank)
    else:
        fails(on_rank, error, match)
