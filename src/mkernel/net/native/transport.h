// What a proxy asks of a network.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "ring.h"
#include "segments.h"

namespace mkernel {

// post and poll are called by the proxy's thread only and never block; the rest may be called by any
// thread at any time. After an Error of post or poll the proxy stops using the transport.
class Transport {
 public:
  explicit Transport(int rank) : rank(rank), segments(std::make_shared<Segments>(rank)) {}
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  // Memory that requests name by its number; `device` is of CUDA, -1: host memory. When detach returns
  // nobody touches it any more.
  virtual void attach(uint32_t number, void* base, uint64_t size, int device = -1) {
    segments->attach(number, base, size, device);
  }
  virtual void detach(uint32_t number) { segments->detach(number); }

  // Start a transfer. False: busy with this peer, try again after a poll; another peer's may go.
  virtual bool post(const Request& request) = 0;
  // Make progress, sending and receiving. Appends the tickets of requests whose source may be written
  // again. False: there was nothing to do.
  virtual bool poll(std::vector<int64_t>& completed) = 0;
  // Leave the job in order; what does not go within `patience` is given up. Without patience the
  // peers are not notified, so that they see a loss: for ranks that end by an error. Detaches all segments.
  virtual void stop(std::chrono::milliseconds patience) = 0;

  const int rank;
  const std::shared_ptr<Segments> segments;
};

}  // namespace mkernel
