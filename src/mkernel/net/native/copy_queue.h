// Moves bytes between memories and sets signals: by memcpy in host memory, by a CUDA stream where
// device memory takes part. The transports do not care which.
#pragma once

#include <cstdint>

#include "segments.h"

namespace mkernel {

class CopyQueue;

// A point in a copy_queue's work.
struct CompletionToken {
  CopyQueue* copy_queue = nullptr;  // none: it was done at once
  uint64_t number = 0;
  bool done() const;
};

// Copies in any order, sets signals after everything that was asked for before them, and holds the memory in
// place meanwhile. What it is asked for may be kept back, to be done together with what follows, until `flush`. May
// be used by any thread; nothing here waits for a kernel.
class CopyQueue {
 public:
  virtual ~CopyQueue() = default;
  virtual CompletionToken copy(Segments::Pin to, Segments::Pin from, uint64_t bytes) = 0;
  // The signal grows to `value` when everything that was asked for before is done.
  virtual CompletionToken raise(Segments::Pin signal, int64_t value) = 0;
  virtual void flush() = 0;
  // The word of the device becomes 1, after what was flushed before: also if something was refused.
  virtual void set_abort_flag(int64_t* word) = 0;
  // Is everything up to this number done? Flushes if it was kept back.
  virtual bool done(uint64_t number) = 0;
  // Return when nothing is under way, and all memory is released.
  virtual void settle() noexcept = 0;
  // Signals in this memory may be lower again: it belongs to somebody else now.
  virtual void forget(const void* base, uint64_t size) = 0;
};

inline bool CompletionToken::done() const { return copy_queue == nullptr || copy_queue->done(number); }

// Copies with the copy_queue that the memories need: the target's, else the source's, else at once.
CompletionToken start_copy(Segments::Pin to, Segments::Pin from, uint64_t bytes);

// The signal grows to `value`, or stays if it is there already. Everything that was copied to this
// memory before is seen by who sees the signal. Host memory: at once.
CompletionToken raise_signal(Segments::Pin signal, int64_t value);

}  // namespace mkernel
