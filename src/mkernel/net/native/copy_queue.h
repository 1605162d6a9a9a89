// Copies bytes between memories and sets signals: by memcpy in host memory, on a CUDA stream if device
// memory is involved. The transports need not know which.
#pragma once

#include <cstdint>

#include "segments.h"

namespace mkernel {

class CopyQueue;

// A point in the work of a copy queue.
struct CompletionToken {
  CopyQueue* copy_queue = nullptr;  // null: it was done immediately
  uint64_t number = 0;
  bool done() const;
};

// Makes copies in any order, and sets a signal after all operations that were queued before it. It pins the memory
// meanwhile. It may delay operations, to batch them with later ones, until `flush`. Any thread may use it; no function
// waits for a kernel.
class CopyQueue {
 public:
  virtual ~CopyQueue() = default;
  virtual CompletionToken copy(Segments::Pin to, Segments::Pin from, uint64_t bytes) = 0;
  // The signal grows to `value` when all operations that were queued before are done.
  virtual CompletionToken raise(Segments::Pin signal, int64_t value) = 0;
  virtual void flush() = 0;
  // Sets the device's word to 1 after everything that was flushed before, even if an operation was rejected.
  virtual void set_abort_flag(int64_t* word) = 0;
  // Is everything up to this number done? Flushes delayed operations up to it.
  virtual bool done(uint64_t number) = 0;
  // Returns when no operation is pending and all memory is released.
  virtual void settle() noexcept = 0;
  // Forgets the values of signals in this memory, which has a new owner: they may be lower again.
  virtual void forget(const void* base, uint64_t size) = 0;
};

inline bool CompletionToken::done() const { return copy_queue == nullptr || copy_queue->done(number); }

// Copies with the copy queue of the target's memory, or else of the source's, or else immediately.
CompletionToken start_copy(Segments::Pin to, Segments::Pin from, uint64_t bytes);

// The signal grows to `value`, or stays if it is not less. A reader that sees the signal sees everything that
// was copied to this memory before. In host memory, this is immediate.
CompletionToken raise_signal(Segments::Pin signal, int64_t value);

}  // namespace mkernel
