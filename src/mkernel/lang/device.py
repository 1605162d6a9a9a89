"""The few instructions that Triton has no name for. The simulator knows each of these strings, but for that of
`agreed`: it is for kernels in Gluon."""

import triton
import triton.language as tl

from mkernel.lang.context import CLOCK, state_of


@triton.jit
def clock():
    """Nanoseconds of the device's global timer. Each thread reads its own: two warps may see two
    values, so a branch on it must not contain a barrier. `now` is the same for the whole CTA."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def write_time(word):
    """A kernel: one reading of the timer, for a host that wants to know how its own clock differs."""
    tl.store(word, clock())


@triton.jit
def now(context):
    """A time in nanoseconds on which all threads of the CTA agree: one thread's reading of the timer
    goes into an atomic, and what is read back from there Triton hands to all threads."""
    newest = state_of(context) + CLOCK
    tl.atomic_max(newest, clock(), sem="relaxed", scope="gpu")
    return tl.atomic_add(newest, 0, sem="relaxed", scope="gpu")


@triton.jit
def acquire_for_descriptors():
    """Orders this thread's earlier acquires before its later reads through tensor descriptors (TMA),
    which go through another path to memory (the async proxy) than ordinary loads."""
    tl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def barrier():
    """A barrier of the whole CTA, for loops that Triton shall pipeline: it leaves a loop that contains
    `tl.debug_barrier` as it is, and sees no barrier in an instruction. Not for a part of a CTA's warps."""
    tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch(pointers):
    """Ask for the lines that the pointers lie in to be brought into the L2 cache. Changes no value."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def agreed(condition):
    """A condition on which all threads of a warp agree, told to the compiler: what is branched on afterwards may stay
    in registers that the warp has together. For one warp."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.all.pred p, p, 0xffffffff; selp.u32 $0, 1, 0, p; }",
        "=r,r", [condition.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    ) != 0  # fmt: skip


@triton.jit
def complete_descriptor_stores():
    """Wait until this thread's stores through tensor descriptors (TMA) are in memory: Triton waits only until
    what they read may be overwritten. Before the barrier and the release that signal such a tile."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, 0;",
        "=r", [], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
