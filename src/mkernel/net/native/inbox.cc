#include "inbox.h"

#include <algorithm>
#include <cstring>

#include "error.h"

namespace mkernel {
namespace {

// See Cut: a sender that keeps to the rules stays far below.
constexpr size_t kMostUnfinished = 16384;
constexpr size_t kMostLanding = 16;  // buffers on their way to the device, before we wait for one

}  // namespace

void Inbox::begin(const Piece& piece) {
  segments_->pin(piece.segment, piece.target, piece.total, "target");
  segments_->pin_signal(piece.segment, piece.signal);
  Cut cut(piece.total);
  if (piece.index >= cut.pieces || piece.bytes != cut.bytes(piece.index))
    fail("piece ", piece.index, " of a transfer of ", piece.total, " bytes can not have ", piece.bytes, " bytes");
  if (cut.pieces == 1) return;
  auto it = transfers_.find(piece.transfer);
  if (it == transfers_.end()) {
    if (transfers_.size() >= kMostUnfinished) fail("more than ", kMostUnfinished, " transfers are unfinished");
    it = transfers_.emplace(piece.transfer, Transfer{piece, std::vector<bool>(cut.pieces), cut.pieces}).first;
  }
  Transfer& transfer = it->second;
  const Piece& first = transfer.first;
  if (piece.segment != first.segment || piece.target != first.target || piece.total != first.total ||
      piece.signal != first.signal || piece.value != first.value)
    fail("two pieces of transfer ", piece.transfer, " contradict each other");
  if (transfer.announced[piece.index]) fail("piece ", piece.index, " of transfer ", piece.transfer, " came twice");
  transfer.announced[piece.index] = true;
}

void Inbox::finish(const Piece& piece) {
  if (Cut(piece.total).pieces > 1) {
    auto it = transfers_.find(piece.transfer);
    if (--it->second.missing > 0) return;
    transfers_.erase(it);
  }
  Mark mark = raise_signal(segments_->pin_signal(piece.segment, piece.signal), piece.value);
  if (mark.mover != nullptr) mark.mover->flush();
}

void Inbox::land(const Piece& piece, std::shared_ptr<PinnedBuffer> bytes) {
  Mark mark = start_copy(place(piece, 0, piece.bytes), Segments::Pin(bytes->data), piece.bytes);
  landing_.emplace_back(mark, std::move(bytes));
  // a copy engine does not wait for kernels, so this does not last long
  while (!landing_.empty() && (landing_.front().first.done() || landing_.size() > kMostLanding))
    if (landing_.front().first.done()) landing_.pop_front();
}

Inbox::~Inbox() {
  if (!landing_.empty()) landing_.back().first.mover->settle();
}

Segments::Pin Inbox::place(const Piece& piece, uint64_t done, uint64_t size) {
  return segments_->pin(piece.segment, piece.target + Cut(piece.total).begin(piece.index) + done, size, "target");
}

void StreamReader::feed(const uint8_t* data, size_t size) {
  while (size > 0) {
    size_t part;
    if (in_payload_) {
      part = static_cast<size_t>(std::min<uint64_t>(size, payload_due()));
      std::memcpy(place(part).data, data, part);
      placed(part);
    } else {
      if (ended_) fail("something came after the farewell");
      part = std::min(size, sizeof(Piece) - header_bytes_);
      std::memcpy(reinterpret_cast<uint8_t*>(&piece_) + header_bytes_, data, part);
      header_bytes_ += part;
      if (header_bytes_ == sizeof(Piece)) take_header();
    }
    data += part;
    size -= part;
  }
}

void StreamReader::take_header() {
  header_bytes_ = 0;
  if (piece_.kind == kBye) {
    Piece bye;
    bye.kind = kBye;
    if (std::memcmp(&bye, &piece_, sizeof(Piece)) != 0) fail("a farewell of another shape");
    ended_ = true;
    return;
  }
  if (piece_.kind != kPiece) fail("something that is not a header");
  inbox_.begin(piece_);
  done_ = 0;
  in_payload_ = true;
  if (piece_.bytes > 0 && inbox_.on_device(piece_)) waiting_ = std::make_shared<PinnedBuffer>(kPieceBytes);
  placed(0);
}

void StreamReader::placed(uint64_t size) {
  done_ += size;
  if (done_ < piece_.bytes) return;
  in_payload_ = false;
  if (waiting_) inbox_.land(piece_, std::move(waiting_));
  inbox_.finish(piece_);
}

}  // namespace mkernel
