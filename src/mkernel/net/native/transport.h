// The interface between a proxy and a network.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "ring.h"
#include "segments.h"

namespace mkernel {

// Only the proxy's thread calls post and poll, which never block. Any thread may call the other functions at
// any time. After an Error from post or poll, the proxy stops using the transport.
class Transport {
 public:
  explicit Transport(int rank) : rank(rank), segments(std::make_shared<Segments>(rank)) {}
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  // Memory that requests refer to by number. `device` is the CUDA device, or -1 for host memory. When detach
  // returns, nothing accesses the memory any more.
  virtual void attach(uint32_t number, void* base, uint64_t size, int device = -1) {
    segments->attach(number, base, size, device);
  }
  virtual void detach(uint32_t number) { segments->detach(number); }

  // Starts a transfer. Returns false if it is busy with this peer: try again after a poll. Requests to other peers
  // may be accepted meanwhile.
  virtual bool post(const Request& request) = 0;
  // Makes progress, sending and receiving. Appends the tickets of requests whose source may be overwritten.
  // Returns false if there was nothing to do.
  virtual bool poll(std::vector<int64_t>& completed) = 0;
  // Where a request may be complete before all of it has arrived: how many requests to this peer were accepted, and how
  // many from it have arrived in full. Other transports count none.
  struct Counts {
    uint64_t sent = 0, arrived = 0;
  };
  virtual Counts counts(uint32_t) { return {}; }
  // File descriptors that must not outlive this process in a forked child: peers would miss the loss of this rank.
  virtual std::vector<int> descriptors() { return {}; }

  // Leaves the job in order; requests that cannot be sent within `patience` are given up. Without patience, the
  // peers are not notified and see a loss, which is meant for ranks that end with an error. Detaches all segments.
  virtual void stop(std::chrono::milliseconds patience) = 0;

  const int rank;
  const std::shared_ptr<Segments> segments;
};

}  // namespace mkernel
