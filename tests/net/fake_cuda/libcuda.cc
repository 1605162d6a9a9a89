// A stand-in for the NVIDIA driver's library on machines without one: a stream is a thread that does what
// it was asked to do in order, some time later. "Device" memory is any memory. Used with no context, or
// for a copy of kForbidden bytes, it fails as the driver would.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

namespace {

constexpr int kInvalidContext = 201;
constexpr int kIllegalAddress = 700;
constexpr int kNotReady = 600;
constexpr size_t kForbidden = 666;

class Stream {
 public:
  ~Stream() {
    push([this] { ended_ = true; });
    thread_.join();
  }
  void push(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }
  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue_.empty();
  }
  void synchronize() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return queue_.empty(); });
  }

 private:
  void run() {
    std::minstd_rand random(7);
    while (!ended_) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !queue_.empty(); });
      auto work = queue_.front();
      lock.unlock();
      if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 100));
      work();
      lock.lock();
      queue_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool ended_ = false;
  std::thread thread_{[this] { run(); }};
};

thread_local int depth = 0;
std::atomic<int64_t> copies{0}, batches{0};

struct Write {
  unsigned operation;
  unsigned long long address;
  uint64_t value;
  unsigned flags;
  unsigned long long alias;
  uint64_t padding;
};

}  // namespace

extern "C" {

// How often the driver was called so far, to copy and to write signals.
void fake_calls(int64_t* copied, int64_t* written) {
  *copied = copies;
  *written = batches;
}

int cuInit(unsigned) { return 0; }

int cuDeviceGet(int* device, int number) {
  *device = number;
  return number < 2 ? 0 : 101;
}

int cuDevicePrimaryCtxRetain(void** context, int) {
  static int it;
  *context = &it;
  return 0;
}

int cuCtxPushCurrent_v2(void* context) {
  if (context == nullptr) return kInvalidContext;
  ++depth;
  return 0;
}

int cuCtxPopCurrent_v2(void**) {
  --depth;
  return 0;
}

int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}

int cuStreamCreateWithPriority(void** stream, unsigned, int) {
  if (depth == 0) return kInvalidContext;
  *stream = new Stream;
  return 0;
}

int cuStreamDestroy_v2(void* stream) {
  delete static_cast<Stream*>(stream);
  return 0;
}

int cuStreamQuery(void* stream) { return static_cast<Stream*>(stream)->idle() ? 0 : kNotReady; }

int cuStreamSynchronize(void* stream) {
  static_cast<Stream*>(stream)->synchronize();
  return 0;
}

int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes, void* stream) {
  if (depth == 0) return kInvalidContext;
  if (bytes == kForbidden) return kIllegalAddress;
  ++copies;
  static_cast<Stream*>(stream)->push([=] {
    std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  });
  return 0;
}

int cuStreamBatchMemOp_v2(void* stream, unsigned count, Write* writes, unsigned) {
  if (depth == 0) return kInvalidContext;
  ++batches;
  for (unsigned i = 0; i < count; ++i) {
    Write write = writes[i];
    if (write.operation != 5 || write.address % 8 != 0) return 1;
    static_cast<Stream*>(stream)->push([write] {
      __atomic_store_n(reinterpret_cast<uint64_t*>(write.address), write.value, __ATOMIC_RELEASE);
    });
  }
  return 0;
}

int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = std::calloc(1, bytes);
  return 0;
}

int cuMemAlloc_v2(unsigned long long* memory, size_t bytes) {
  *memory = reinterpret_cast<unsigned long long>(std::calloc(1, bytes));
  return 0;
}

// A file of the right size stands for the memory.
int cuMemGetHandleForAddressRange(void* handle, unsigned long long begin, size_t bytes, int kind, unsigned long long) {
  if (depth == 0) return kInvalidContext;
  if (begin % 4096 != 0 || bytes % 4096 != 0 || kind != 1) return 1;
  int file = ::memfd_create("device memory", 0);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(bytes)) != 0) return 1;
  *static_cast<int*>(handle) = file;
  return 0;
}

int cuFlushGPUDirectRDMAWrites(int target, int scope) {
  return depth == 0 ? kInvalidContext : target == 0 && scope == 200 ? 0 : 1;
}

int cuGetErrorName(int error, const char** name) {
  *name = error == kIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS" : error == 101 ? "CUDA_ERROR_INVALID_DEVICE" : "?";
  return 0;
}

int cuGetErrorString(int, const char** text) {
  *text = "so says the fake";
  return 0;
}

}  // extern "C"
