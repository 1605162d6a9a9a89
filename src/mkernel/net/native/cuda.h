// The little that is needed of CUDA: memory on a device as the source and the target of transfers.
//
// The driver's library is opened at run time, so one build serves machines with and without GPUs, and no
// header of CUDA is needed. All work is queued on streams of the device's primary context, which is the
// one that PyTorch uses.
//
// What was measured on an H200 whose SMs are all held by a kernel that spins: copies between device and
// pinned host memory and writes of single values go on, since copy engines and the front end make them.
// Every kind of copy from the device to itself waits for the kernel to end: it is made with SMs, be it by the
// driver's kernels or by ours (batch.h). Whoever copies so must leave some SMs free (runtime/cuda_threads.py does). The
// first copy of a kind loads a kernel, which also waits; so a copy_queue makes one of each when it is made.
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

// Memory of a device as a dma-buf, by which other devices get at it: a file descriptor, and where the memory
// begins in it. No descriptor: `why`.
struct DmaBuf {
  Fd fd;
  uint64_t offset = 0;
  std::string why;
};
DmaBuf dma_buf_of(int device, const void* base, uint64_t size);

// What network cards have written to the device's memory is seen by its kernels from now on. For writes that
// the host was told of: they came over another way than that news.
void show_device_writes(int device);

// Host memory that copy engines can reach. It goes back to a pool, not to the driver: giving it back to
// the driver waits for running kernels.
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
