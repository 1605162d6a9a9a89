#include "segments.h"

#include <chrono>

#include "cuda.h"
#include "error.h"
#include "copy_queue.h"

namespace mkernel {

Segments::~Segments() { close(); }

Segments::Pin::~Pin() {
  if (!segment_) return;
  std::lock_guard<std::mutex> lock(owner_->mutex_);
  if (--segment_->pins == 0 && segment_->leaving) owner_->unpinned_.notify_all();
}

void Segments::attach(uint32_t number, void* base, uint64_t size, int device) {
  if (number >= 1u << 24) fail("segment ", number, " does not fit into a request's 24 bits");
  if (base == nullptr && size > 0) fail("segment ", number, " has no memory");
  CopyQueue* copy_queue = device >= 0 ? &copy_queue_of(device) : nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) fail("rank ", rank_, ": segment ", number, " came after the transport was closed");
  auto segment = std::make_shared<Segment>(Segment{static_cast<uint8_t*>(base), size, copy_queue});
  if (!segments_.emplace(number, std::move(segment)).second)
    fail("rank ", rank_, ": segment ", number, " is attached already");
}

CopyQueue& Segments::copy_queue_of(int device) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (auto found = copy_queues_.find(device); found != copy_queues_.end()) return *found->second;
  }
  auto made = cuda_copy_queue(device);  // without the lock: it waits for the device
  std::lock_guard<std::mutex> lock(mutex_);
  return *copy_queues_.try_emplace(device, std::move(made)).first->second;
}

void Segments::leave(std::unique_lock<std::mutex>& lock,
                     std::unordered_map<uint32_t, std::shared_ptr<Segment>>::iterator it) {
  std::shared_ptr<Segment> segment = it->second;
  segments_.erase(it);  // no new pins
  segment->leaving = true;
  auto free = [&] { return segment->pins == 0; };
  if (segment->copy_queue == nullptr) return unpinned_.wait(lock, free);
  while (!free()) {
    // copy queues release memory when asked; a peer's queue may hold ours
    lock.unlock();
    settle_cuda_copy_queues();
    lock.lock();
    unpinned_.wait_for(lock, std::chrono::milliseconds(1), free);
  }
  lock.unlock();  // copy queues release pins, which takes our lock: never both the other way round
  segment->copy_queue->forget(segment->base, segment->size);
  lock.lock();
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

}  // namespace mkernel
