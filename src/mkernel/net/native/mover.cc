#include "mover.h"

#include <algorithm>
#include <cstring>

namespace mkernel {

Mark start_copy(Segments::Pin to, Segments::Pin from, uint64_t bytes) {
  Mover* mover = to.mover != nullptr ? to.mover : from.mover;
  if (mover != nullptr) return mover->copy(std::move(to), std::move(from), bytes);
  std::memmove(to.data, from.data, bytes);  // a rank may write to itself
  return {};
}

Mark raise_signal(Segments::Pin signal, int64_t value) {
  if (signal.mover != nullptr) return signal.mover->raise(std::move(signal), value);
  auto* word = reinterpret_cast<int64_t*>(signal.data);
  int64_t old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(word, &old, std::max(old, value), true, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
  }
  return {};
}

}  // namespace mkernel
