// What goes over a stream: pieces of transfers, each behind a header of 64 bytes, and a farewell.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mkernel {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "headers are sent as they lie in memory");

constexpr uint32_t kPiece = 0x4345'4950;  // "PIEC"
constexpr uint32_t kBye = 0x2145'5942;    // "BYE!": the sender leaves the job in order; all else is zero

struct Piece {
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
static_assert(sizeof(Piece) == 64);

constexpr uint64_t kPieceBytes = 1 << 20;

// How a transfer is cut: into pieces of almost equal size, all larger than half of kPieceBytes if
// there are several. Sender and receiver compute it alike. No tiny last piece: so the bytes that the
// kernel holds bound the number of transfers that a receiver may see unfinished.
class Cut {
 public:
  explicit Cut(uint64_t total)
      : pieces(total <= kPieceBytes ? 1 : (total - 1) / kPieceBytes + 1),
        size_(total / pieces),
        larger_(total % pieces) {}
  uint64_t begin(uint64_t index) const { return index * size_ + std::min(index, larger_); }
  uint64_t bytes(uint64_t index) const { return size_ + (index < larger_ ? 1 : 0); }
  const uint64_t pieces;

 private:
  uint64_t size_, larger_;
};

}  // namespace mkernel
