#include "gpu_memory.h"

#include <dlfcn.h>
#include <unistd.h>

#include "error.h"

namespace mkernel {
namespace {

// Of CUDA's driver interface; the numbers are part of its ABI.
constexpr int kAttributeMemoryType = 2;
constexpr int kAttributeDevice = 9;
constexpr unsigned kMemoryTypeDevice = 2;
constexpr int kHandleDmaBuf = 1;
constexpr int kFlushCurrentContext = 0;
constexpr int kFlushToAllDevices = 200;

struct CudaDriver {
  int (*pointer_attribute)(void*, int, unsigned long long) = nullptr;
  int (*handle_for_range)(void*, unsigned long long, size_t, int, unsigned long long) = nullptr;
  int (*flush_writes)(int, int) = nullptr;
  int (*retain_context)(void**, int) = nullptr;
  int (*set_context)(void*) = nullptr;

  CudaDriver() {
    void* handle = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return;
    pointer_attribute = reinterpret_cast<decltype(pointer_attribute)>(::dlsym(handle, "cuPointerGetAttribute"));
    handle_for_range = reinterpret_cast<decltype(handle_for_range)>(::dlsym(handle, "cuMemGetHandleForAddressRange"));
    flush_writes = reinterpret_cast<decltype(flush_writes)>(::dlsym(handle, "cuFlushGPUDirectRDMAWrites"));
    retain_context = reinterpret_cast<decltype(retain_context)>(::dlsym(handle, "cuDevicePrimaryCtxRetain"));
    set_context = reinterpret_cast<decltype(set_context)>(::dlsym(handle, "cuCtxSetCurrent"));
  }
};

const CudaDriver& cuda_driver() {
  static const auto* driver = new CudaDriver;
  return *driver;
}

}  // namespace

bool is_gpu_memory(const void* address) {
  unsigned type = 0;
  const CudaDriver& driver = cuda_driver();
  return driver.pointer_attribute != nullptr &&
         driver.pointer_attribute(&type, kAttributeMemoryType, reinterpret_cast<uintptr_t>(address)) == 0 &&
         type == kMemoryTypeDevice;
}

void show_gpu_writes(const void* address) {
  const CudaDriver& driver = cuda_driver();
  if (driver.flush_writes == nullptr || driver.retain_context == nullptr || driver.set_context == nullptr)
    fail("the CUDA driver has no cuFlushGPUDirectRDMAWrites (it needs CUDA 11.3)");
  auto check = [](int status, const char* what) {
    if (status != 0) fail(what, ": CUDA error ", status);
  };
  int device = 0;
  check(driver.pointer_attribute(&device, kAttributeDevice, reinterpret_cast<uintptr_t>(address)), "cuPointerGetAttribute");
  thread_local int current = -1;  // the device whose context is this thread's
  if (device != current) {
    void* context = nullptr;  // the primary one, PyTorch's; kept, as that keeps it too
    check(driver.retain_context(&context, device), "cuDevicePrimaryCtxRetain");
    check(driver.set_context(context), "cuCtxSetCurrent");
    current = device;
  }
  check(driver.flush_writes(kFlushCurrentContext, kFlushToAllDevices), "cuFlushGPUDirectRDMAWrites");
}

DmaBuf dma_buf_of(const void* base, uint64_t size) {
  DmaBuf result;
  const CudaDriver& driver = cuda_driver();
  if (driver.handle_for_range == nullptr) {
    result.why = "the CUDA driver has no cuMemGetHandleForAddressRange (it needs CUDA 11.7)";
    return result;
  }
  // whole pages: memory is given out in larger units, so the neighbours are of the same allocation
  auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  auto address = reinterpret_cast<uintptr_t>(base);
  uint64_t begin = address / page * page, end = (address + size + page - 1) / page * page;
  int fd = -1;
  int status = driver.handle_for_range(&fd, begin, end - begin, kHandleDmaBuf, 0);
  if (status != 0) {
    result.why = words("cuMemGetHandleForAddressRange: CUDA error ", status);
    return result;
  }
  result.fd = Fd(fd);
  result.offset = address - begin;
  return result;
}

}  // namespace mkernel
