// The format of a stream: fragments of transfers, each after a header of 64 bytes, and a FIN.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mkernel {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "headers are sent as they lie in memory");

constexpr uint32_t kFragment = 0x4345'4950;  // "PIEC"
constexpr uint32_t kFin = 0x2145'5942;    // "BYE!": the sender leaves the job in order; all else is zero

struct Fragment {
  uint32_t kind = 0;
  uint32_t segment = 0;
  uint64_t transfer = 0;  // which of the sender's transfers
  uint64_t target = 0;    // of the whole transfer, as are total, signal and value
  uint64_t total = 0;
  uint64_t signal = 0;
  int64_t value = 0;
  uint64_t index = 0;
  uint64_t bytes = 0;  // that follow this header
};
static_assert(sizeof(Fragment) == 64);

constexpr uint64_t kFragmentBytes = 1 << 20;

// How a transfer is divided: into fragments of almost equal size, all larger than half of kFragmentBytes if
// there are several. Sender and receiver compute the same sizes. Because there is no tiny last fragment, the
// bytes that the kernel holds bound the number of unfinished transfers that a receiver may see.
class Fragmentation {
 public:
  explicit Fragmentation(uint64_t total)
      : fragments(total <= kFragmentBytes ? 1 : (total - 1) / kFragmentBytes + 1),
        size_(total / fragments),
        larger_(total % fragments) {}
  uint64_t begin(uint64_t index) const { return index * size_ + std::min(index, larger_); }
  uint64_t bytes(uint64_t index) const { return size_ + (index < larger_ ? 1 : 0); }
  const uint64_t fragments;

 private:
  uint64_t size_, larger_;
};

}  // namespace mkernel
