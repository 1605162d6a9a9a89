// The proxy: one thread that serves one rank's request ring with a transport.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "mkernel_net.h"
#include "copy_queue.h"
#include "ring.h"
#include "transport.h"

namespace mkernel {

struct ProxyOptions {
  int cpu = -1;             // pin the thread to this core; -1: no
  int idle_sleep_us = 50;   // the longest sleep when there is nothing to do, until a second has passed; 0: never sleep
  int spin_us = 20;         // how long to look for work all the time before the first sleep
};

class Proxy {
 public:
  Proxy(int64_t* ring, uint64_t words, std::shared_ptr<Transport> transport, ProxyOptions options);
  ~Proxy();  // stops at once

  // Serves what is in the ring and in flight, for at most `patience`, and ends the thread. Returns true if everything
  // was served, and false if requests were given up or there had been an error.
  bool stop(std::chrono::milliseconds patience);

  // A word that the proxy sets to 1 when it stops because of an error, so that kernels stop waiting for it.
  // `device` as in Segments::attach.
  void set_abort_flag(int64_t* word, int device);
  // Why it stopped serving; empty if there was no error.
  std::string error() const;
  mkernel_net_statistics statistics() const;

 private:
  using Clock = std::chrono::steady_clock;

  void run() noexcept;
  void serve();
  bool post_some();
  bool post_held();
  bool try_post(const Request& request);
  bool poll_transport();
  bool drained() const;
  void rest(Clock::time_point idle_since);
  void raise_abort_flag(int64_t* word, int device) noexcept;

  Ring ring_;
  const std::shared_ptr<Transport> transport_;
  const ProxyOptions options_;

  // the thread's own
  // Requests that were taken out of the ring while the transport was busy with their peer, so that a slow peer
  // does not delay the others. Bounded, so that a full ring still makes its producers wait.
  std::map<uint32_t, std::deque<Request>> held_;  // by peer; none are empty
  size_t held_count_ = 0;
  std::vector<int64_t> completed_;

  std::atomic<int64_t> requests_{0}, bytes_{0}, completions_{0}, busy_loops_{0}, idle_loops_{0}, most_in_flight_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<Clock::rep> deadline_{0};
  std::atomic<bool> all_served_{false};

  mutable std::mutex mutex_;  // of error_ and the abort_flags
  std::string error_;
  std::vector<std::pair<int64_t*, int>> abort_flags_;
  std::mutex stop_mutex_;
  std::thread thread_;
};

}  // namespace mkernel
