// What a network card needs to know about GPU memory. libcuda is opened at run time; without it no
// address is a GPU's.
#pragma once

#include <cstdint>
#include <string>

#include "sockets.h"

namespace mkernel {

bool is_gpu_memory(const void* address);

// The range as a dma-buf: a file descriptor, and where the range begins in it. No descriptor: `why`.
struct DmaBuf {
  Fd fd;
  uint64_t offset = 0;
  std::string why;
};
DmaBuf dma_buf_of(const void* base, uint64_t size);

// What network cards have written to the memory of the GPU that holds this address is seen by its kernels
// from now on. For writes that the host was told of: they came over another way than that news.
void show_gpu_writes(const void* address);

}  // namespace mkernel
