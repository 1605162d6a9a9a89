"""The few PTX instructions that Triton does not expose. The simulator implements each of these strings except that of
`agreed`, which only Gluon kernels use."""

import triton
import triton.language as tl

from mkernel.lang.context import CLOCK, state_of


@triton.jit
def clock():
    """Nanoseconds of the device's global timer. Every thread reads it for itself, so two warps may see different
    values: a branch on it must not contain a barrier. `now` returns the same value to the whole CTA."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def write_time(word):
    """A kernel that stores the device's time, for comparing the clocks of host and device."""
    tl.store(word, clock())


@triton.jit
def now(context):
    """A time in nanoseconds, the same for all threads of the CTA: one thread puts its reading of the timer into an
    atomic, and Triton broadcasts what is read back."""
    newest = state_of(context) + CLOCK
    tl.atomic_max(newest, clock(), sem="relaxed", scope="gpu")
    return tl.atomic_add(newest, 0, sem="relaxed", scope="gpu")


@triton.jit
def acquire_for_descriptors():
    """Order this thread's earlier acquires before its later reads through tensor descriptors (TMA), which reach memory
    through another path (the async proxy) than plain loads. Call it after `wait` and before the reads."""
    tl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def barrier():
    """A CTA barrier for loops that Triton should pipeline. Triton does not pipeline a loop that contains
    `tl.debug_barrier`, but does not recognize a barrier in inline assembly. All warps of the CTA must call it."""
    tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch(pointers):
    """Prefetch the cache lines of these pointers into L2. Only affects speed."""
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
    """Tell the compiler that a condition is the same in all threads of a warp, so that what is branched on may stay in
    uniform registers. For a single warp."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.all.pred p, p, 0xffffffff; selp.u32 $0, 1, 0, p; }",
        "=r,r", [condition.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    ) != 0  # fmt: skip


@triton.jit
def complete_descriptor_stores():
    """Wait until this thread's stores through tensor descriptors (TMA) are in memory. Triton itself waits only until
    their source in shared memory may be overwritten. Call it before the `notify` that signals such a tile."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, 0;",
        "=r", [], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
