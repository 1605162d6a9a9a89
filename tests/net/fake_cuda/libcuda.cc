// A stand-in for the NVIDIA driver's library on machines without one: a stream is a thread that does what
// it was asked to do in order, some time later. "Device" memory is any memory. The only kernel is that of batch.h.
// Used with no context, or for a copy of kForbidden bytes, it fails as the driver would. It behaves as if some thread
// were always capturing a graph: calls that could disturb it are refused to threads whose mode is not relaxed.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <memory>
#include <random>
#include <set>
#include <thread>

#include "batch.h"

namespace {

using mkernel::batch::Batch;

constexpr int kInvalidContext = 201;
constexpr int kInvalidValue = 1;
constexpr int kInvalidImage = 200;
constexpr int kIllegalAddress = 700;
constexpr int kNotReady = 600;
constexpr int kNotWhileCapturing = 900;
constexpr int kRelaxed = 2;
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
thread_local int capture_mode = 0;  // global
std::atomic<int64_t> copies{0}, writes{0}, launches{0};

struct Write {
  unsigned operation;
  unsigned long long address;
  uint64_t value;
  unsigned flags;
  unsigned long long alias;
  uint64_t padding;
};

template <class Word>
Word* word_at(unsigned long long address) {
  return reinterpret_cast<Word*>(address);
}

// Do what the kernel promises hold? So many CTAs that each has something to do, and no two signals to one word.
bool is_sound(const Batch& batch, unsigned ctas) {
  using namespace mkernel::batch;
  if (batch.copies + batch.signals > kMostEntries || batch.counter % 4 != 0 || batch.done % 8 != 0) return false;
  uint64_t chunks = 0;
  std::set<uint64_t> words;
  for (uint32_t i = 0; i < batch.copies; ++i) chunks += (batch.entries[i].bytes + kChunk - 1) / kChunk;
  for (uint32_t i = 0; i < batch.signals; ++i) words.insert(batch.entries[batch.copies + i].target);
  return words.size() == batch.signals && ctas == std::max<uint64_t>(1, std::min<uint64_t>(chunks, kMostCtas));
}

// The kernel of batch.h: the copies in some order, then the signals in some order, then the number.
void carry_out(Batch batch) {
  static thread_local std::minstd_rand random(11);
  auto* first = batch.entries;
  std::shuffle(first, first + batch.copies, random);
  std::shuffle(first + batch.copies, first + batch.copies + batch.signals, random);
  if (__atomic_load_n(word_at<uint32_t>(batch.counter), __ATOMIC_ACQUIRE) != 0) std::abort();
  for (uint32_t i = 0; i < batch.copies; ++i, ++first)
    std::memmove(word_at<void>(first->target), word_at<void>(first->source), first->bytes);
  for (uint32_t i = 0; i < batch.signals; ++i, ++first)
    __atomic_store_n(word_at<uint64_t>(first->target), first->source, __ATOMIC_RELEASE);
  __atomic_store_n(word_at<uint64_t>(batch.done), batch.number, __ATOMIC_RELEASE);
}

}  // namespace

extern "C" {

// How often the driver was called so far: to copy, to write signals, and to launch the kernel that does both.
void fake_calls(int64_t* copied, int64_t* written, int64_t* launched) {
  *copied = copies;
  *written = writes;
  *launched = launches;
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

int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return 0;
}

int cuStreamQuery(void* stream) {
  if (capture_mode != kRelaxed) return kNotWhileCapturing;
  return static_cast<Stream*>(stream)->idle() ? 0 : kNotReady;
}

int cuStreamSynchronize(void* stream) {
  if (capture_mode != kRelaxed) return kNotWhileCapturing;
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

int cuStreamBatchMemOp_v2(void* stream, unsigned count, Write* list, unsigned) {
  if (depth == 0) return kInvalidContext;
  ++writes;
  for (unsigned i = 0; i < count; ++i) {
    Write write = list[i];
    if (write.operation != 5 || write.address % 8 != 0) return kInvalidValue;
    static_cast<Stream*>(stream)->push([write] {
      __atomic_store_n(reinterpret_cast<uint64_t*>(write.address), write.value, __ATOMIC_RELEASE);
    });
  }
  return 0;
}

int cuModuleLoadData(void** module, const void* image) {
  if (depth == 0) return kInvalidContext;
  if (capture_mode != kRelaxed) return kNotWhileCapturing;
  if (std::strcmp(static_cast<const char*>(image), mkernel::batch::kPtx) != 0) return kInvalidImage;
  *module = &copies;
  return 0;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  if (module != &copies || std::strcmp(name, mkernel::batch::kKernel) != 0) return kInvalidValue;
  *function = &launches;
  return 0;
}

int cuLaunchKernel(void* function, unsigned ctas, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                   unsigned shared, void* stream, void** parameters, void**) {
  if (depth == 0) return kInvalidContext;
  if (function != &launches || y * z != 1 || threads != mkernel::batch::kThreads || shared != 0) return kInvalidValue;
  auto batch = std::make_shared<Batch>(*static_cast<const Batch*>(parameters[0]));
  if (!is_sound(*batch, ctas)) return kInvalidValue;
  for (uint32_t i = 0; i < batch->copies; ++i)
    if (batch->entries[i].bytes == kForbidden) return kIllegalAddress;
  ++launches;
  static_cast<Stream*>(stream)->push([batch] { carry_out(*batch); });
  return 0;
}

int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  if (capture_mode != kRelaxed) return kNotWhileCapturing;
  *memory = std::calloc(1, bytes);
  return 0;
}

int cuMemAlloc_v2(unsigned long long* memory, size_t bytes) {
  if (capture_mode != kRelaxed) return kNotWhileCapturing;
  void* made = std::malloc(bytes);
  std::memset(made, 0xA5, bytes);  // nobody has cleared it
  *memory = reinterpret_cast<unsigned long long>(made);
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
