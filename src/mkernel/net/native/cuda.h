// The part of CUDA that transfers need: device memory as source and target.
//
// The driver's library is opened at run time, so one build serves machines with and without GPUs, and no CUDA
// header is needed. All work is queued on streams of the device's primary context, which is the one that PyTorch
// uses.
//
// Measured on an H200 whose SMs are all occupied by a spinning kernel: copies between device and pinned host memory
// and writes of single values proceed, because copy engines and the front end execute them. Every kind of copy from
// the device to itself waits for the kernel to end, because it runs on SMs, in a kernel of the driver or in ours
// (batch.h). For such copies, some SMs must stay free (runtime/cuda_threads.py sees to it). The first copy of a kind
// loads a kernel, which also waits. So a copy queue makes one copy of each kind when it is created.
#pragma once

#include <memory>
#include <string>

#include "copy_queue.h"
#include "sockets.h"

namespace mkernel {

// Queues its work on a stream of this device.
std::unique_ptr<CopyQueue> cuda_copy_queue(int device);

// Make all CUDA copy queues of the process release memory that they no longer use.
void settle_cuda_copy_queues() noexcept;

// Device memory as a dma-buf, through which other devices access it: a file descriptor, and the offset of the
// memory in it. Without a descriptor, `why` has the reason.
struct DmaBuf {
  Fd fd;
  uint64_t offset = 0;
  std::string why;
};
DmaBuf dma_buf_of(int device, const void* base, uint64_t size);

// Makes visible to the device's kernels what network cards have written to its memory. Needed for writes that the
// host was notified of, because data and notification take different paths.
void show_device_writes(int device);

// Host memory that copy engines can access. It is returned to a pool, not to the driver: freeing it waits for
// running kernels.
class PinnedBuffer {
 public:
  explicit PinnedBuffer(uint64_t size);
  PinnedBuffer(PinnedBuffer&& other) noexcept : data(other.data), size_(other.size_) { other.size_ = 0; }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  ~PinnedBuffer();
  uint8_t* const data;

 private:
  uint64_t size_;
};

}  // namespace mkernel
