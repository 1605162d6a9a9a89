// The sending side of tcp: what a stream has yet to pass to the kernel.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "cuda.h"
#include "copy_queue.h"
#include "ring.h"
#include "segments.h"
#include "wire.h"

namespace mkernel {

// A request that is being sent, perhaps over several streams.
struct Outgoing {
  Request request;
  uint64_t pieces_left;
};

class Outbox {
 public:
  void push(std::shared_ptr<Outgoing> owner, const Fragment& fragment, uint64_t source);
  void push_fin();
  bool empty() const { return queue_.empty(); }
  uint64_t bytes() const { return bytes_; }

  // Passes to the kernel what it accepts without blocking, up to a limit. Appends requests that have been passed
  // completely. Returns the number of bytes; `blocked` says whether the kernel would accept no more.
  uint64_t flush(int fd, Segments& segments, std::vector<std::shared_ptr<Outgoing>>& sent);
  bool blocked = false;
  // The next fragment has not been copied from the device yet.
  bool fetching = false;

 private:
  // A fragment of device memory that is copied to pinned memory, from where the kernel reads it.
  struct Fetched {
    ~Fetched() {
      if (token.copy_queue != nullptr) token.copy_queue->settle();
    }
    bool here();
    PinnedBuffer bytes{kFragmentBytes};
    CompletionToken token;
  };
  struct Item {
    Fragment fragment;
    std::shared_ptr<Outgoing> owner;  // none: a FIN
    uint64_t source;                  // of this fragment
    uint64_t sent;                    // of header and payload together
    std::unique_ptr<Fetched> fetched;  // if the source is device memory
  };

  uint64_t send_some(int fd, Segments& segments);
  const uint8_t* payload(Item& item, uint64_t done, Segments& segments, std::vector<Segments::Pin>& pins);

  std::deque<Item> queue_;
  uint64_t bytes_ = 0;
};

}  // namespace mkernel
