// The consumer's side of the request ring between a kernel and its proxy.
//
// The layout is that of mkernel/lang/requests.py, where it is described; the constants below are
// exported by the C interface and a test compares them with that file.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include "error.h"

namespace mkernel {

namespace layout {
// words of the header
constexpr int64_t kConsumed = 0;
constexpr int64_t kCompleted = 1;
constexpr int64_t kCapacity = 2;
constexpr int64_t kHeaderWords = 8;
// words of a request
constexpr int64_t kRequestWords = 8;
constexpr int64_t kTurn = 0;
constexpr int64_t kPeerAndSegments = 1;
constexpr int64_t kSource = 2;
constexpr int64_t kTarget = 3;
constexpr int64_t kBytes = 4;
constexpr int64_t kSignal = 5;
constexpr int64_t kValue = 6;
// inside kPeerAndSegments: peer | segment << 16 | source_segment << 40
constexpr int kSegmentShift = 16;
constexpr int kSourceSegmentShift = 40;
}  // namespace layout

// Copies `bytes` bytes at `source` of this rank's `source_segment` to `target` of the peer's `segment`. When
// they are written, the peer's signal at byte `signal` of that segment grows to `value`.
struct Request {
  int64_t ticket = 0;
  uint32_t peer = 0;
  uint32_t segment = 0;
  uint32_t source_segment = 0;
  uint64_t source = 0;
  uint64_t target = 0;
  uint64_t bytes = 0;
  uint64_t signal = 0;
  int64_t value = 0;
};

// A request in the layout of a slot.
inline Request request_of(const int64_t* word, int64_t ticket) {
  using namespace layout;
  auto addressee = static_cast<uint64_t>(word[kPeerAndSegments]);
  Request request;
  request.ticket = ticket;
  request.peer = addressee & 0xFFFF;
  request.segment = addressee >> kSegmentShift & 0xFFFFFF;
  request.source_segment = static_cast<uint32_t>(addressee >> kSourceSegmentShift);
  request.source = static_cast<uint64_t>(word[kSource]);
  request.target = static_cast<uint64_t>(word[kTarget]);
  request.bytes = static_cast<uint64_t>(word[kBytes]);
  request.signal = static_cast<uint64_t>(word[kSignal]);
  request.value = word[kValue];
  return request;
}

class Ring {
 public:
  // `words`: the size of the memory in 64-bit words. A ring that was served before continues where it was left.
  // Requests that were in flight then are lost.
  Ring(int64_t* memory, uint64_t words) : memory_(memory) {
    using namespace layout;
    if (memory == nullptr || words < kHeaderWords) fail("the ring is too small for its header");
    capacity_ = load(kCapacity);
    uint64_t most = (words - kHeaderWords) / kRequestWords;
    if (capacity_ < 1 || static_cast<uint64_t>(capacity_) > most)
      fail("the ring's capacity is ", capacity_, " requests, its memory has space for ", most);
    consumed_ = load(kConsumed);
    completed_ = load(kCompleted);
    if (consumed_ < 0 || consumed_ != completed_)
      fail("the ring was left with ", consumed_ - completed_, " requests in flight; make a new one");
  }

  // Is the next request complete in its slot? Its turn number says so, and slots need not be cleared.
  bool due() const {
    return __atomic_load_n(slot() + layout::kTurn, __ATOMIC_ACQUIRE) == consumed_ / capacity_ + 1;
  }

  // Copies the next request out of its slot, which is then free for a producer.
  std::optional<Request> take() {
    if (!due()) return std::nullopt;
    Request request = request_of(slot(), consumed_);
    __atomic_store_n(memory_ + layout::kConsumed, ++consumed_, __ATOMIC_RELEASE);
    return request;
  }

  // The source of the request may be overwritten. Call it in any order; COMPLETED counts in order.
  void complete(int64_t ticket) {
    if (ticket < completed_ || ticket >= consumed_) fail("request ", ticket, " completed, but it is not in flight");
    auto index = static_cast<size_t>(ticket - completed_);
    if (index >= done_.size()) done_.resize(index + 1, false);
    if (done_[index]) fail("request ", ticket, " completed twice");
    done_[index] = true;
    if (index != 0) return;
    while (!done_.empty() && done_.front()) {
      done_.pop_front();
      ++completed_;
    }
    __atomic_store_n(memory_ + layout::kCompleted, completed_, __ATOMIC_RELEASE);
  }

 private:
  int64_t load(int64_t word) const { return __atomic_load_n(memory_ + word, __ATOMIC_ACQUIRE); }
  const int64_t* slot() const {
    return memory_ + layout::kHeaderWords + consumed_ % capacity_ * layout::kRequestWords;
  }

  int64_t* memory_;
  int64_t capacity_ = 0;
  int64_t consumed_ = 0;
  int64_t completed_ = 0;
  std::deque<bool> done_;  // of the tickets from completed_ on
};

}  // namespace mkernel
