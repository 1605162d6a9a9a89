#include "proxy.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>

namespace mkernel {
namespace {

constexpr int kPostsPerLoop = 64;  // so that a full ring does not keep the transport from receiving
constexpr size_t kMostHeld = 1024;
// Measured: looking for work every 50 us takes 4 % of a core, and a process may have many groups that are not in use.
constexpr auto kUnused = std::chrono::seconds(1);
constexpr int kSleepWhileUnused = 20;  // times as long

void pin_to(int cpu) {
  if (cpu >= CPU_SETSIZE) fail("there is no core ", cpu);
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  if (int number = pthread_setaffinity_np(pthread_self(), sizeof(set), &set))
    fail("the proxy cannot be pinned to core ", cpu, ": ", errno_text(number));
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The thread is the only writer of its statistics.
void add(std::atomic<int64_t>& counter, int64_t value) {
  counter.store(counter.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
}

}  // namespace

Proxy::Proxy(int64_t* ring, uint64_t words, std::shared_ptr<Transport> transport, ProxyOptions options)
    : ring_(ring, words), transport_(std::move(transport)), options_(options), thread_([this] { run(); }) {}

Proxy::~Proxy() { stop(std::chrono::milliseconds(0)); }

bool Proxy::stop(std::chrono::milliseconds patience) {
  std::lock_guard<std::mutex> lock(stop_mutex_);
  if (thread_.joinable()) {
    deadline_.store((Clock::now() + patience).time_since_epoch().count());
    stopping_.store(true);
    thread_.join();
  }
  return all_served_.load();
}

std::string Proxy::error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

mkernel_net_statistics Proxy::statistics() const {
  return {requests_, bytes_, completions_, busy_loops_, idle_loops_, most_in_flight_};
}

void Proxy::run() noexcept {
  std::string what;
  try {
    pthread_setname_np(pthread_self(), "mkernel-proxy");
    if (options_.cpu >= 0) pin_to(options_.cpu);
    // Linux rounds a thread's sleeps up by 50 us unless told otherwise: that is the whole sleep here.
    prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
    serve();
    return;
  } catch (const std::exception& error) {
    what = error.what();
  } catch (...) {
    what = "unknown error";
  }
  std::lock_guard<std::mutex> lock(mutex_);
  error_ = words("network proxy of rank ", transport_->rank, ": ", what);
  for (auto& [word, device] : abort_flags_) raise_abort_flag(word, device);
}

void Proxy::set_abort_flag(int64_t* word, int device) {
  if (device >= 0) transport_->segments->copy_queue_of(device);  // made now, not while kernels wait
  std::lock_guard<std::mutex> lock(mutex_);
  abort_flags_.emplace_back(word, device);
  if (!error_.empty()) raise_abort_flag(word, device);
}

void Proxy::raise_abort_flag(int64_t* word, int device) noexcept {
  if (device < 0) {
    __atomic_store_n(word, 1, __ATOMIC_RELEASE);
    return;
  }
  try {
    transport_->segments->copy_queue_of(device).set_abort_flag(word);
  } catch (const std::exception& error) {
    error_ += words("; and the waits of kernels could not be ended: ", error.what());
  }
}

void Proxy::serve() {
  auto idle_since = Clock::now();
  bool was_idle = false;
  while (true) {
    bool posted = post_some();
    bool polled = poll_transport();
    if (posted || polled) {
      add(busy_loops_, 1);
      was_idle = false;
    } else {
      add(idle_loops_, 1);
      if (!was_idle) idle_since = Clock::now();
      was_idle = true;
    }
    if (stopping_.load(std::memory_order_acquire)) {
      if (drained()) {
        all_served_ = true;
        return;
      }
      if (Clock::now().time_since_epoch().count() >= deadline_.load()) return;
    }
    if (was_idle) rest(idle_since);
  }
}

bool Proxy::try_post(const Request& request) {
  if (!transport_->post(request)) return false;
  add(requests_, 1);
  add(bytes_, static_cast<int64_t>(request.bytes));
  most_in_flight_ = std::max<int64_t>(most_in_flight_, requests_ - completions_);
  return true;
}

// Requests to one peer keep their order.
bool Proxy::post_held() {
  bool any = false;
  for (auto it = held_.begin(); it != held_.end();) {
    auto& queue = it->second;
    for (int i = 0; i < kPostsPerLoop && !queue.empty() && try_post(queue.front()); ++i) {
      queue.pop_front();
      --held_count_;
      any = true;
    }
    it = queue.empty() ? held_.erase(it) : std::next(it);
  }
  return any;
}

bool Proxy::post_some() {
  bool any = post_held();
  for (int i = 0; i < kPostsPerLoop && held_count_ < kMostHeld; ++i) {
    auto request = ring_.take();
    if (!request) break;
    any = true;
    auto busy = held_.find(request->peer);
    if (busy == held_.end() && try_post(*request)) continue;
    held_[request->peer].push_back(*request);
    ++held_count_;
  }
  return any;
}

bool Proxy::poll_transport() {
  completed_.clear();
  bool any = transport_->poll(completed_);
  for (int64_t ticket : completed_) ring_.complete(ticket);
  add(completions_, static_cast<int64_t>(completed_.size()));
  return any || !completed_.empty();
}

bool Proxy::drained() const { return held_.empty() && requests_ == completions_ && !ring_.due(); }

// Nothing to do: poll without a pause for a while, then less and less often.
void Proxy::rest(Clock::time_point idle_since) {
  auto idle = Clock::now() - idle_since;
  if (idle < std::chrono::microseconds(options_.spin_us) || options_.idle_sleep_us <= 0) return relax();
  auto longest = std::chrono::nanoseconds(std::chrono::microseconds(options_.idle_sleep_us));
  if (idle > kUnused) longest *= kSleepWhileUnused;
  std::this_thread::sleep_for(std::min(longest, std::chrono::nanoseconds(idle / 8)));
}

}  // namespace mkernel
