#include "copy_queue.h"

#include <algorithm>
#include <cstring>

namespace mkernel {

CompletionToken start_copy(Segments::Pin to, Segments::Pin from, uint64_t bytes) {
  CopyQueue* copy_queue = to.copy_queue != nullptr ? to.copy_queue : from.copy_queue;
  if (copy_queue != nullptr) return copy_queue->copy(std::move(to), std::move(from), bytes);
  std::memmove(to.data, from.data, bytes);  // a rank may write to itself
  return {};
}

CompletionToken raise_signal(Segments::Pin signal, int64_t value) {
  if (signal.copy_queue != nullptr) return signal.copy_queue->raise(std::move(signal), value);
  auto* word = reinterpret_cast<int64_t*>(signal.data);
  int64_t old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(word, &old, std::max(old, value), true, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
  }
  return {};
}

}  // namespace mkernel
