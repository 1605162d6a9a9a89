// A batch of copies on one device, and the signals that announce them, as one launch of a kernel.
//
// A driver call takes some 4 us, and the proxies of a process make their calls one after the other. So copies and
// signals must share a call. The kernel is PTX, which the driver compiles for the installed device; no CUDA compiler
// is needed.
//
// The CTAs share the chunks of the copies round-robin. Each CTA counts itself when its chunks are copied. The last one
// writes the signals, and then the number that tells the host that the batch is complete. So the data is written
// before its signal. No CTA waits for another, so they need not all be resident.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mkernel::batch {

constexpr unsigned kThreads = 256;
constexpr uint64_t kChunk = 16384;  // four vectors of 16 bytes for each thread
constexpr unsigned kMostCtas = 32;  // fill four SMs, which is what operators leave free
constexpr size_t kMostEntries = 64;

// A copy or a signal. For a signal, `source` is the value, and `bytes` is unused.
struct Entry {
  uint64_t target, source, bytes;
};

// The kernel's only parameter.
struct Batch {
  uint64_t counter;  // address of a 32-bit word of the device that is zero, before and after
  uint64_t done;     // address of the word that becomes `number` when all is done
  uint64_t number;
  uint32_t copies;
  uint32_t signals;  // each to another word: they are written at the same time
  Entry entries[kMostEntries];  // the copies, in any order and at the same time; then the signals
};
static_assert(offsetof(Batch, copies) == 24 && offsetof(Batch, entries) == 32 && sizeof(Entry) == 24);
static_assert(sizeof(Batch) == 1568 && kChunk == 4 * 16 * kThreads && kMostEntries <= kThreads);

constexpr const char* kKernel = "mkernel_carry_out";
constexpr const char* kPtx = R"ptx(
.version 6.0
.target sm_70
.address_size 64

.visible .entry mkernel_carry_out(.param .align 8 .b8 batch[1568])
.maxntid 256, 1, 1
{
  .reg .pred out, unaligned, in0, in1, in2, in3;
  .reg .b32 thread, cta, ctas, copies, signals, limit, old, last;
  .reg .b32 a<4>, b<4>, c<4>, d<4>;
  .reg .b64 entry, source, target, bytes, begin, stride, left, from, to, at, rest, address, value;
  .shared .align 4 .b32 is_last;

  mov.u32 thread, %tid.x;
  mov.u32 cta, %ctaid.x;
  mov.u32 ctas, %nctaid.x;
  mov.b64 entry, batch;
  add.u64 entry, entry, 32;
  ld.param.u32 copies, [batch+24];
  // where this CTA's next chunk begins in the current copy
  mul.wide.u32 begin, cta, 16384;
  mul.wide.u32 stride, ctas, 16384;

NEXT_COPY:
  setp.eq.u32 out, copies, 0;
  @out bra COPIED;
  ld.param.u64 target, [entry];
  ld.param.u64 source, [entry+8];
  ld.param.u64 bytes, [entry+16];

NEXT_CHUNK:
  setp.ge.u64 out, begin, bytes;
  @out bra END_OF_COPY;
  sub.u64 left, bytes, begin;
  min.u64 left, left, 16384;
  add.u64 from, source, begin;
  add.u64 to, target, begin;
  add.u64 begin, begin, stride;
  or.b64 at, from, to;
  and.b64 at, at, 15;
  setp.ne.u64 unaligned, at, 0;
  @unaligned bra BY_BYTES;

  // vectors of 16 bytes, as many as are whole
  and.b64 rest, left, 15;
  sub.u64 left, left, rest;
  mul.wide.u32 at, thread, 16;
  setp.lt.u64 in0, at, left;
  add.u64 address, at, 4096;
  setp.lt.u64 in1, address, left;
  add.u64 address, at, 8192;
  setp.lt.u64 in2, address, left;
  add.u64 address, at, 12288;
  setp.lt.u64 in3, address, left;
  add.u64 address, from, at;
  @in0 ld.global.cg.v4.u32 {a0, a1, a2, a3}, [address];
  @in1 ld.global.cg.v4.u32 {b0, b1, b2, b3}, [address+4096];
  @in2 ld.global.cg.v4.u32 {c0, c1, c2, c3}, [address+8192];
  @in3 ld.global.cg.v4.u32 {d0, d1, d2, d3}, [address+12288];
  add.u64 address, to, at;
  @in0 st.global.cg.v4.u32 [address], {a0, a1, a2, a3};
  @in1 st.global.cg.v4.u32 [address+4096], {b0, b1, b2, b3};
  @in2 st.global.cg.v4.u32 [address+8192], {c0, c1, c2, c3};
  @in3 st.global.cg.v4.u32 [address+12288], {d0, d1, d2, d3};
  // and the bytes behind them
  add.u64 from, from, left;
  add.u64 to, to, left;
  mov.b64 left, rest;

BY_BYTES:
  cvt.u64.u32 at, thread;
NEXT_BYTES:
  setp.ge.u64 out, at, left;
  @out bra NEXT_CHUNK;
  add.u64 address, at, 256;
  setp.lt.u64 in1, address, left;
  add.u64 address, at, 512;
  setp.lt.u64 in2, address, left;
  add.u64 address, at, 768;
  setp.lt.u64 in3, address, left;
  add.u64 address, from, at;
  ld.global.cg.u8 a0, [address];
  @in1 ld.global.cg.u8 b0, [address+256];
  @in2 ld.global.cg.u8 c0, [address+512];
  @in3 ld.global.cg.u8 d0, [address+768];
  add.u64 address, to, at;
  st.global.cg.u8 [address], a0;
  @in1 st.global.cg.u8 [address+256], b0;
  @in2 st.global.cg.u8 [address+512], c0;
  @in3 st.global.cg.u8 [address+768], d0;
  add.u64 at, at, 1024;
  bra NEXT_BYTES;

END_OF_COPY:
  // chunks are counted on into the next copy
  add.u64 bytes, bytes, 16383;
  and.b64 bytes, bytes, -16384;
  sub.u64 begin, begin, bytes;
  add.u64 entry, entry, 24;
  sub.u32 copies, copies, 1;
  bra NEXT_COPY;

COPIED:
  // all threads' bytes, then one count with a release; the last CTA resets it to zero
  bar.sync 0;
  setp.ne.u32 out, thread, 0;
  @out bra COUNTED;
  ld.param.u64 address, [batch];
  sub.u32 limit, ctas, 1;
  atom.acq_rel.gpu.global.inc.u32 old, [address], limit;
  setp.eq.u32 in0, old, limit;
  selp.u32 last, 1, 0, in0;
  st.shared.u32 [is_last], last;
COUNTED:
  bar.sync 0;
  ld.shared.u32 last, [is_last];
  setp.eq.u32 out, last, 0;
  @out bra END;

  // a signal for each thread: `entry` is the first
  ld.param.u32 signals, [batch+28];
  setp.ge.u32 out, thread, signals;
  @out bra TOLD;
  mul.wide.u32 at, thread, 24;
  add.u64 at, at, entry;
  ld.param.u64 address, [at];
  ld.param.u64 value, [at+8];
  st.release.sys.global.u64 [address], value;
TOLD:
  bar.sync 0;
  setp.ne.u32 out, thread, 0;
  @out bra END;
  ld.param.u64 address, [batch+8];
  ld.param.u64 value, [batch+16];
  st.release.sys.global.u64 [address], value;
END:
  ret;
}
)ptx";

}  // namespace mkernel::batch
