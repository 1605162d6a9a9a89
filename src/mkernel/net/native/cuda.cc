#include "cuda.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "batch.h"
#include "error.h"

namespace mkernel {
namespace cuda {  // all sources are compiled as one
namespace {

using Context = void*;
using Stream = void*;
using Function = void*;
using Address = unsigned long long;

constexpr int kSuccess = 0;
constexpr int kNotReady = 600;
constexpr int kRelaxed = 2;  // of CUstreamCaptureMode
constexpr unsigned kPortableAndMapped = 1 | 2;
constexpr unsigned kNonBlocking = 1;
constexpr unsigned kWriteValue64 = 5;
constexpr int kHandleDmaBuf = 1;
constexpr int kFlushCurrentContext = 0;
constexpr int kFlushToAllDevices = 200;

// One write of a batch: CUstreamBatchMemOpParams.
struct Write {
  unsigned operation = kWriteValue64;
  Address address = 0;
  uint64_t value = 0;
  unsigned flags = 0;  // with a memory barrier before it
  Address alias = 0;
  uint64_t padding = 0;
};
static_assert(sizeof(Write) == 48);

struct Driver {
  Driver();
  int (*init)(unsigned);
  int (*device_get)(int*, int);
  int (*retain)(Context*, int);
  int (*push)(Context);
  int (*pop)(Context*);
  int (*priorities)(int*, int*);
  int (*stream_create)(Stream*, unsigned, int);
  int (*stream_destroy)(Stream);
  int (*stream_query)(Stream);
  int (*stream_synchronize)(Stream);
  int (*copy)(Address, Address, size_t, Stream);
  int (*write)(Stream, unsigned, Write*, unsigned);
  int (*load)(void**, const void*);
  int (*find_function)(Function*, void*, const char*);
  int (*launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**);
  int (*host_alloc)(void**, size_t, unsigned);
  int (*alloc)(Address*, size_t);
  int (*handle_for_range)(void*, Address, size_t, int, unsigned long long);  // null in old drivers
  int (*flush_writes)(int, int);                                             // too
  int (*exchange_capture_mode)(int*);
  int (*error_name)(int, const char**);
  int (*error_text)(int, const char**);

  void check(int result, const char* what) const {
    if (result == kSuccess) return;
    const char *name = nullptr, *text = nullptr;
    error_name(result, &name);
    error_text(result, &text);
    fail("CUDA, ", what, ": ", name ? name : "unknown error", " (", text ? text : "", ")");
  }
};

Driver::Driver() {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail("memory on a GPU needs the NVIDIA driver's library: ", ::dlerror());
  auto find = [&](auto& function, const char* name, bool optional = false) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    if (function == nullptr && !optional) fail("the NVIDIA driver is too old: it has no ", name);
  };
  find(init, "cuInit");
  find(device_get, "cuDeviceGet");
  find(retain, "cuDevicePrimaryCtxRetain");
  find(push, "cuCtxPushCurrent_v2");
  find(pop, "cuCtxPopCurrent_v2");
  find(priorities, "cuCtxGetStreamPriorityRange");
  find(stream_create, "cuStreamCreateWithPriority");
  find(stream_destroy, "cuStreamDestroy_v2");
  find(stream_query, "cuStreamQuery");
  find(stream_synchronize, "cuStreamSynchronize");
  find(copy, "cuMemcpyAsync");
  find(write, "cuStreamBatchMemOp_v2");
  find(load, "cuModuleLoadData");
  find(find_function, "cuModuleGetFunction");
  find(launch, "cuLaunchKernel");
  find(host_alloc, "cuMemHostAlloc");
  find(alloc, "cuMemAlloc_v2");
  find(handle_for_range, "cuMemGetHandleForAddressRange", true);
  find(flush_writes, "cuFlushGPUDirectRDMAWrites", true);
  find(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  find(error_name, "cuGetErrorName");
  find(error_text, "cuGetErrorString");
  check(init(0), "start");
}

const Driver& driver() {
  static const Driver opened;
  return opened;
}

Address address_of(const void* memory) { return reinterpret_cast<Address>(memory); }

// The device's primary context is current in this scope. While a thread captures a graph, CUDA forbids all threads
// calls that could disturb it, unless they opt out: nothing here concerns a stream that is being captured.
class Inside {
 public:
  explicit Inside(Context context) {
    driver().check(driver().push(context), "enter the context");
    driver().exchange_capture_mode(&capture_mode_);
  }
  ~Inside() {
    driver().exchange_capture_mode(&capture_mode_);
    Context left;
    driver().pop(&left);
  }

 private:
  int capture_mode_ = kRelaxed;
};

// A device's primary context, which a process keeps until it ends, as PyTorch does.
struct Device {
  explicit Device(int number) {
    const Driver& cuda = driver();
    int handle;
    cuda.check(cuda.device_get(&handle, number), "find the device");
    cuda.check(cuda.retain(&context, handle), "open the device");
    Inside inside(context);
    cuda.check(cuda.alloc(&scratch, kScratch), "allocate memory");
    void* module = nullptr;
    cuda.check(cuda.load(&module, batch::kPtx), "load the kernel that copies");
    cuda.check(cuda.find_function(&kernel, module, batch::kKernel), "find the kernel that copies");
  }
  // One copy of each size and alignment that may have a kernel of its own, so that none has to be loaded later.
  void warm_up(Stream stream) {
    const Driver& cuda = driver();
    PinnedBuffer host(kScratch);
    for (uint64_t size : {uint64_t{1}, uint64_t{8}, uint64_t{100}, uint64_t{4096}, uint64_t{65536}, kScratch - 16})
      for (uint64_t shift : {0, 1, 2, 4, 8}) {
        cuda.check(cuda.copy(scratch, address_of(host.data) + shift, size, stream), "copy to the device");
        cuda.check(cuda.copy(address_of(host.data), scratch + shift, size, stream), "copy to the host");
      }
    cuda.check(cuda.stream_synchronize(stream), "warm up");
  }
  static constexpr uint64_t kScratch = 2 << 20;
  Context context = nullptr;
  Address scratch = 0;
  Function kernel = nullptr;
};

struct Process {
  std::mutex mutex;  // of all below
  std::map<int, std::unique_ptr<Device>> devices;
  std::map<uint64_t, std::vector<uint8_t*>> free_buffers;  // by size
  std::map<Device*, std::vector<Address>> free_words;
  std::mutex queues_mutex;
  std::set<CopyQueue*> copy_queues;
};

Process& process() {
  static auto* only = new Process;  // never destroyed: threads may outlive main
  return *only;
}

Device& device_of(int number) {
  Process& here = process();
  std::lock_guard<std::mutex> lock(here.mutex);
  auto& device = here.devices[number];
  if (!device) device = std::make_unique<Device>(number);
  return *device;
}

uint8_t* take_pinned(uint64_t size) {
  Process& here = process();
  std::lock_guard<std::mutex> lock(here.mutex);
  auto& pool = here.free_buffers[size];
  if (!pool.empty()) {
    uint8_t* found = pool.back();
    pool.pop_back();
    return found;
  }
  if (here.devices.empty()) fail("pinned memory was asked for before any device was opened");
  Inside inside(here.devices.begin()->second->context);
  void* memory = nullptr;
  driver().check(driver().host_alloc(&memory, size, kPortableAndMapped), "allocate pinned memory");
  return static_cast<uint8_t*>(memory);
}

// A word in device memory. It is returned to a pool, as pinned memory is.
class DeviceWord {
 public:
  explicit DeviceWord(Device& device) : device_(device) {
    Process& here = process();
    std::lock_guard<std::mutex> lock(here.mutex);
    auto& pool = here.free_words[&device];
    if (pool.empty()) {
      Inside inside(device.context);
      Address made = 0;
      driver().check(driver().alloc(&made, sizeof(uint64_t)), "allocate memory");
      pool.push_back(made);
    }
    address_ = pool.back();
    pool.pop_back();
  }
  DeviceWord(const DeviceWord&) = delete;
  DeviceWord& operator=(const DeviceWord&) = delete;
  ~DeviceWord() {
    Process& here = process();
    std::lock_guard<std::mutex> lock(here.mutex);
    here.free_words[&device_].push_back(address_);
  }
  Address address() const { return address_; }

 private:
  Device& device_;
  Address address_ = 0;
};

constexpr uint64_t kWordBytes = 64;
constexpr unsigned kLooksBetweenQueries = 4096;

// Operations are collected into a batch. A batch with copies inside the device is a launch (see batch.h), which needs
// a free SM. A batch without them is a list of writes by the front end, which needs none: kernels that occupy all SMs
// can still be notified of what has arrived over a network, and that the group gave up. All other copies are queued on
// the stream immediately, before the batch, so they are done before the signals of the batch.
class CudaCopyQueue : public CopyQueue {
 public:
  // Copies to the host have a stream of their own, to run beside those to the device.
  CudaCopyQueue(int number, std::unique_ptr<CudaCopyQueue> to_host)
      : to_host_(std::move(to_host)),
        device_(device_of(number)),
        word_(kWordBytes),
        done_word_(reinterpret_cast<uint64_t*>(word_.data)),
        counter_(device_) {
    __atomic_store_n(done_word_, 0, __ATOMIC_RELAXED);
    const Driver& cuda = driver();
    Inside inside(device_.context);
    int least, greatest;
    cuda.check(cuda.priorities(&least, &greatest), "ask for priorities");
    // streams of other priorities do not share a hardware queue with those of kernels that spin
    cuda.check(cuda.stream_create(&stream_, kNonBlocking, greatest), "make a stream");
    device_.warm_up(stream_);
    signals_[counter_.address()] = 0;
    flush_inside();
    copies_.push_back({device_.scratch, device_.scratch + Device::kScratch / 2, 1});
    flush_inside();
    cuda.check(cuda.stream_synchronize(stream_), "warm up");
    Process& here = process();
    std::lock_guard<std::mutex> lock(here.queues_mutex);
    here.copy_queues.insert(this);
  }

  ~CudaCopyQueue() override {
    {
      Process& here = process();
      std::lock_guard<std::mutex> lock(here.queues_mutex);
      here.copy_queues.erase(this);
    }
    settle();
    if (driver().push(device_.context) != kSuccess) return;
    driver().stream_destroy(stream_);
    Context left;
    driver().pop(&left);
  }

  CompletionToken copy(Segments::Pin to, Segments::Pin from, uint64_t bytes) override {
    if (to.copy_queue == nullptr && to_host_) return to_host_->copy(std::move(to), std::move(from), bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    driver().check(refused_, kWhat);
    if (is_on_device(to) && is_on_device(from)) {
      make_room();
      copies_.push_back({address_of(to.data), address_of(from.data), bytes});
    } else {
      Inside inside(device_.context);
      driver().check(driver().copy(address_of(to.data), address_of(from.data), bytes, stream_), "copy");
      unmarked_ = true;
    }
    held_.push_back({issued_ + 1, std::move(to), std::move(from)});
    return {this, issued_ + 1};
  }

  CompletionToken raise(Segments::Pin signal, int64_t value) override {
    std::lock_guard<std::mutex> lock(mutex_);
    driver().check(refused_, kWhat);
    Address address = address_of(signal.data);
    auto [highest, is_new] = highest_.try_emplace(address, value);
    if (!is_new && highest->second >= value) return {this, issued_ + (is_marked() ? 0 : 1)};
    highest->second = value;
    make_room();
    signals_[address] = value;
    held_.push_back({issued_ + 1, std::move(signal), Segments::Pin(nullptr)});
    return {this, issued_ + 1};
  }

  void flush() override {
    std::lock_guard<std::mutex> lock(mutex_);
    flush_locked();
  }

  void set_abort_flag(int64_t* word) override {
    std::lock_guard<std::mutex> lock(mutex_);
    Inside inside(device_.context);
    Write set;
    set.address = address_of(word);
    set.value = 1;
    driver().check(driver().write(stream_, 1, &set, 0), "set a word");
  }

  bool done(uint64_t number) override {
    if (__atomic_load_n(done_word_, __ATOMIC_ACQUIRE) < number) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (number > issued_) flush_locked();  // or it was refused before, which this tells
      if (++looks_ % kLooksBetweenQueries == 0) {
        Inside inside(device_.context);
        int result = driver().stream_query(stream_);  // after an error of the device the word never comes
        if (result != kNotReady) driver().check(result, "wait for a copy");
      }
      return false;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    let_go();
    return true;
  }

  void settle() noexcept override {
    std::lock_guard<std::mutex> lock(mutex_);
    try {
      flush_locked();
    } catch (const std::exception&) {
      // the caller is told later; what was queued before still runs
    }
    try {
      Inside inside(device_.context);
      driver().check(driver().stream_synchronize(stream_), "wait for copies");
    } catch (const std::exception&) {
      // the device is lost, and with it all pending operations
    }
    held_.clear();
  }

  void forget(const void* base, uint64_t size) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto first = highest_.lower_bound(address_of(base));
    highest_.erase(first, highest_.lower_bound(address_of(base) + size));
  }

 private:
  struct Held {
    uint64_t number;
    Segments::Pin one, other;
  };

  // Is this memory on the device of this queue? All copy queues are for CUDA.
  bool is_on_device(const Segments::Pin& pin) const {
    return pin.copy_queue != nullptr && &static_cast<const CudaCopyQueue*>(pin.copy_queue)->device_ == &device_;
  }

  // Does the last completion number cover everything that was asked for?
  bool is_marked() const { return copies_.empty() && signals_.empty() && !unmarked_; }

  // For one more entry of the batch.
  void make_room() {
    if (copies_.size() + signals_.size() >= batch::kMostEntries) flush_locked();
  }

  void flush_locked() {
    driver().check(refused_, kWhat);
    if (is_marked()) return;
    Inside inside(device_.context);
    flush_inside();
  }

  // The batch, and behind it the number that marks it as complete. After a refused batch, there is no number:
  // it would mark copies as complete that were never made.
  void flush_inside() {
    refused_ = copies_.empty() ? write() : launch();
    copies_.clear();
    signals_.clear();
    unmarked_ = false;
    driver().check(refused_, kWhat);
    ++issued_;
  }

  int write() {
    std::vector<Write> writes;
    auto add = [&](Address address, uint64_t value) {
      writes.emplace_back();
      writes.back().address = address;
      writes.back().value = value;
    };
    for (auto [address, value] : signals_) add(address, static_cast<uint64_t>(value));
    add(address_of(done_word_), issued_ + 1);
    return driver().write(stream_, static_cast<unsigned>(writes.size()), writes.data(), 0);
  }

  int launch() {
    batch::Batch whole{};
    whole.counter = counter_.address();
    whole.done = address_of(done_word_);
    whole.number = issued_ + 1;
    whole.copies = static_cast<uint32_t>(copies_.size());
    whole.signals = static_cast<uint32_t>(signals_.size());
    auto* next = std::copy(copies_.begin(), copies_.end(), whole.entries);
    for (auto [address, value] : signals_) *next++ = {address, static_cast<uint64_t>(value), 0};
    uint64_t chunks = 0;
    for (const auto& copy : copies_) chunks += (copy.bytes + batch::kChunk - 1) / batch::kChunk;
    auto ctas = static_cast<unsigned>(std::clamp<uint64_t>(chunks, 1, batch::kMostCtas));
    void* parameters[] = {&whole};
    return driver().launch(device_.kernel, ctas, 1, 1, batch::kThreads, 1, 1, 0, stream_, parameters, nullptr);
  }

  void let_go() {
    uint64_t done = __atomic_load_n(done_word_, __ATOMIC_ACQUIRE);
    while (!held_.empty() && held_.front().number <= done) held_.pop_front();
  }

  static constexpr const char* kWhat = "copy and set signals";
  const std::unique_ptr<CudaCopyQueue> to_host_;
  Device& device_;
  PinnedBuffer word_;
  uint64_t* done_word_;  // the device writes the number of the last batch that is done
  const DeviceWord counter_;
  Stream stream_ = nullptr;

  std::mutex mutex_;  // of all below
  uint64_t issued_ = 0;
  std::vector<batch::Entry> copies_;
  std::map<Address, int64_t> signals_;
  bool unmarked_ = false;  // other copies were queued after the last batch
  std::deque<Held> held_;
  std::map<Address, int64_t> highest_;  // what signals were raised to: a plain write could lower them
  unsigned looks_ = 0;
  int refused_ = kSuccess;  // what the driver said to the last batch
};

}  // namespace
}  // namespace cuda

PinnedBuffer::PinnedBuffer(uint64_t size) : data(cuda::take_pinned(size)), size_(size) {}

PinnedBuffer::~PinnedBuffer() {
  if (size_ == 0) return;
  cuda::Process& here = cuda::process();
  std::lock_guard<std::mutex> lock(here.mutex);
  here.free_buffers[size_].push_back(data);
}

std::unique_ptr<CopyQueue> cuda_copy_queue(int device) {
  return std::make_unique<cuda::CudaCopyQueue>(device, std::make_unique<cuda::CudaCopyQueue>(device, nullptr));
}

DmaBuf dma_buf_of(int device, const void* base, uint64_t size) {
  DmaBuf result;
  const cuda::Driver& driver = cuda::driver();
  if (driver.handle_for_range == nullptr) {
    result.why = "the NVIDIA driver has no cuMemGetHandleForAddressRange (it needs CUDA 11.7)";
    return result;
  }
  // whole pages: memory is given out in larger units, so the neighbours are of the same allocation
  auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  cuda::Address address = cuda::address_of(base);
  cuda::Address begin = address / page * page, end = (address + size + page - 1) / page * page;
  cuda::Inside inside(cuda::device_of(device).context);
  int fd = -1;
  try {
    driver.check(driver.handle_for_range(&fd, begin, end - begin, cuda::kHandleDmaBuf, 0), "share memory by dma-buf");
  } catch (const Error& error) {
    result.why = error.what();
    return result;
  }
  result.fd = Fd(fd);
  result.offset = address - begin;
  return result;
}

void show_device_writes(int device) {
  const cuda::Driver& driver = cuda::driver();
  if (driver.flush_writes == nullptr) fail("the NVIDIA driver has no cuFlushGPUDirectRDMAWrites (it needs CUDA 11.3)");
  cuda::Inside inside(cuda::device_of(device).context);
  driver.check(driver.flush_writes(cuda::kFlushCurrentContext, cuda::kFlushToAllDevices), "flush RDMA writes");
}

void settle_cuda_copy_queues() noexcept {
  cuda::Process& here = cuda::process();
  std::lock_guard<std::mutex> lock(here.queues_mutex);
  for (CopyQueue* copy_queue : here.copy_queues) copy_queue->settle();
}

}  // namespace mkernel
