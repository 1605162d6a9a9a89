// The receiving side of tcp: writes the bytes from a peer's streams to memory, and sets signals.
//
// Nothing that a peer sends is trusted: segment, bounds, sizes, fragment numbers and the state of the
// transfer are checked before the first byte of a fragment is written.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda.h"
#include "copy_queue.h"
#include "segments.h"
#include "wire.h"

namespace mkernel {

// The transfers of one peer; their fragments come over several streams, in any order.
class Inbox {
 public:
  explicit Inbox(std::shared_ptr<Segments> segments) : segments_(std::move(segments)) {}
  ~Inbox();

  // A fragment is announced. Throws if it is not acceptable.
  void begin(const Fragment& fragment);
  // All bytes of a fragment are in memory. Raises the signal if it was the transfer's last.
  void finish(const Fragment& fragment);
  // Where to write the bytes of a fragment from `done` on.
  Segments::Pin place(const Fragment& fragment, uint64_t done, uint64_t size);
  // A socket cannot receive into device memory: such fragments are collected in pinned memory.
  bool on_device(const Fragment& fragment) { return place(fragment, 0, fragment.bytes).copy_queue != nullptr; }
  void land(const Fragment& fragment, std::shared_ptr<PinnedBuffer> bytes);
  size_t unfinished() const { return transfers_.size(); }
  uint64_t arrived() const { return arrived_; }  // transfers, in full

 private:
  struct Transfer {
    Fragment first;
    std::vector<bool> announced;
    uint64_t missing;
  };

  std::shared_ptr<Segments> segments_;
  std::unordered_map<uint64_t, Transfer> transfers_;  // those of several fragments, under way
  uint64_t arrived_ = 0;
  std::deque<std::pair<CompletionToken, std::shared_ptr<PinnedBuffer>>> landing_;  // on their way to device memory
};

// One stream's parser.
class StreamReader {
 public:
  explicit StreamReader(Inbox& inbox) : inbox_(inbox) {}

  // The next bytes of the stream.
  void feed(const uint8_t* data, size_t size);
  // How many bytes of payload come next (0: a header does); they may be received in place.
  uint64_t payload_due() const { return in_payload_ ? fragment_.bytes - done_ : 0; }
  Segments::Pin place(uint64_t size) {
    return waiting_ ? Segments::Pin(waiting_->data + done_) : inbox_.place(fragment_, done_, size);
  }
  void placed(uint64_t size);
  // The peer has said that it sends nothing more.
  bool ended() const { return ended_; }
  // In the middle of a header or a payload?
  bool unfinished() const { return in_payload_ || header_bytes_ > 0; }

 private:
  void take_header();

  Inbox& inbox_;
  Fragment fragment_;
  size_t header_bytes_ = 0;
  bool in_payload_ = false;
  bool ended_ = false;
  uint64_t done_ = 0;
  std::shared_ptr<PinnedBuffer> waiting_;  // the fragment so far, if it goes to device memory
};

}  // namespace mkernel
