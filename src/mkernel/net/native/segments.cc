#include "segments.h"

#include <algorithm>

#include "error.h"

namespace mkernel {

Segments::Pin::~Pin() {
  if (!segment_) return;
  std::lock_guard<std::mutex> lock(owner_->mutex_);
  if (--segment_->pins == 0 && segment_->leaving) owner_->unpinned_.notify_all();
}

void Segments::attach(uint32_t number, void* base, uint64_t size) {
  if (number >= 1u << 24) fail("segment ", number, " does not fit into a request's 24 bits");
  if (base == nullptr && size > 0) fail("segment ", number, " has no memory");
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) fail("rank ", rank_, ": segment ", number, " came after the transport was closed");
  auto segment = std::make_shared<Segment>(Segment{static_cast<uint8_t*>(base), size});
  if (!segments_.emplace(number, std::move(segment)).second)
    fail("rank ", rank_, ": segment ", number, " is attached already");
}

void Segments::leave(std::unique_lock<std::mutex>& lock,
                     std::unordered_map<uint32_t, std::shared_ptr<Segment>>::iterator it) {
  std::shared_ptr<Segment> segment = it->second;
  segments_.erase(it);  // no new pins
  segment->leaving = true;
  unpinned_.wait(lock, [&] { return segment->pins == 0; });
}

void Segments::detach(uint32_t number) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto it = segments_.find(number);
  if (it == segments_.end()) fail("rank ", rank_, ": segment ", number, " is not attached");
  leave(lock, it);
}

void Segments::close() {
  std::unique_lock<std::mutex> lock(mutex_);
  closed_ = true;
  while (!segments_.empty()) leave(lock, segments_.begin());
}

Segments::Pin Segments::pin(uint32_t number, uint64_t offset, uint64_t size, const char* what) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = segments_.find(number);
  if (it == segments_.end())
    fail(what, ": segment ", number, " is not attached on rank ", rank_, closed_ ? ", which has left" : "");
  Segment& segment = *it->second;
  if (offset > segment.size || size > segment.size - offset)
    fail(what, ": ", size, " bytes from ", offset, " are not inside of rank ", rank_, "'s segment ", number, " of ",
         segment.size, " bytes");
  ++segment.pins;
  return Pin(segment.base + offset, this, it->second);
}

Segments::Pin Segments::pin_signal(uint32_t number, uint64_t offset) {
  Pin signal = pin(number, offset, sizeof(int64_t), "signal");
  if (reinterpret_cast<uintptr_t>(signal.data) % sizeof(int64_t) != 0)
    fail("signal: byte ", offset, " of segment ", number, " on rank ", rank_, " is not aligned to 8 bytes");
  return signal;
}

void raise_signal(const Segments::Pin& signal, int64_t value) {
  auto* word = reinterpret_cast<int64_t*>(signal.data);
  int64_t old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(word, &old, std::max(old, value), true, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
  }
}

}  // namespace mkernel
