// The loopback transport: ranks of one process, by memcpy or on CUDA streams. For tests and for
// emulated links.
//
// An emulated link carries one request after the other, each for as long as its bytes take at the
// link's rate; the signal is set `latency` after the last byte. So requests in flight share the
// rate, and each of them is delayed by the latency once.
//
// Requests share driver calls: all requests that are due within kTogether of the first are made together, with bytes
// and signals in one batch of the target's copy queue. This delays a request in a sequence by up to kTogether, but
// does not delay a request that no other follows.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "copy_queue.h"
#include "transport.h"

namespace mkernel {

struct LoopbackOptions {
  int64_t latency_ns = 0;
  double bytes_per_s = 0;    // of this rank's link; 0: as fast as memory goes
  int64_t shuffle_seed = -1; // >= 0: requests in flight overtake each other, fragment by fragment
};

class LoopbackTransport : public Transport {
 public:
  // Ranks of the same `job` find each other; each rank exists once.
  LoopbackTransport(std::string job, int rank, LoopbackOptions options);
  ~LoopbackTransport() override;

  bool post(const Request& request) override;
  bool poll(std::vector<int64_t>& completed) override;
  void stop(std::chrono::milliseconds patience) override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Flight {
    Request request;
    std::shared_ptr<Segments> peer;
    Clock::time_point due;                              // when its signal is set
    std::vector<std::pair<uint64_t, uint64_t>> fragments;  // still to be copied: begin, end
    CompletionToken copied{}, raised{};                            // of the last copy and of the signal, once asked for
  };

  std::shared_ptr<Segments> find(uint32_t peer);
  std::vector<std::pair<uint64_t, uint64_t>> fragmentation(uint64_t bytes);
  CompletionToken flush_later(CompletionToken token);
  void copy_piece(Flight& flight);
  bool raise(size_t chosen);
  bool fly_together(Clock::time_point now);
  bool fly_shuffled(Clock::time_point now);

  const std::string job_;
  const LoopbackOptions options_;
  std::mt19937_64 random_;
  std::map<uint32_t, std::shared_ptr<Segments>> peers_;
  std::deque<Flight> flights_;  // in the order in which they are due
  std::deque<Flight> landing_;  // everything was asked for, and may be under way
  std::vector<CopyQueue*> busy_;    // copy_queues that may keep something back
  Clock::time_point link_free_{};
};

}  // namespace mkernel
