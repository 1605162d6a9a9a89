#include "outbox.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include "error.h"

namespace mkernel {
namespace {

constexpr size_t kPiecesAtOnce = 16;               // in one system call
constexpr uint64_t kBytesPerFlush = 4 * kPieceBytes;  // then other streams, and receiving, get their turn

}  // namespace

void Outbox::push(std::shared_ptr<Outgoing> owner, const Piece& piece, uint64_t source) {
  queue_.push_back({piece, std::move(owner), source, 0});
  bytes_ += sizeof(Piece) + piece.bytes;
}

void Outbox::push_bye() {
  Piece bye;
  bye.kind = kBye;
  push(nullptr, bye, 0);
}

// One system call. Throws with the errno's text.
uint64_t Outbox::send_some(int fd, Segments& segments) {
  iovec parts[2 * kPiecesAtOnce];
  size_t count = 0;
  std::vector<Segments::Pin> pins;
  pins.reserve(kPiecesAtOnce);
  for (size_t i = 0; i < queue_.size() && i < kPiecesAtOnce; ++i) {
    Item& item = queue_[i];
    if (item.sent < sizeof(Piece))
      parts[count++] = {reinterpret_cast<uint8_t*>(&item.piece) + item.sent, sizeof(Piece) - item.sent};
    if (item.piece.bytes == 0) continue;
    uint64_t done = item.sent < sizeof(Piece) ? 0 : item.sent - sizeof(Piece);
    uint64_t rest = item.piece.bytes - done;
    pins.push_back(segments.pin(item.owner->request.source_segment, item.source + done, rest, "source"));
    parts[count++] = {pins.back().data, rest};
  }
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  ssize_t sent = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0 && errno == EINTR) return 0;
  if (sent < 0 && (errno == EAGAIN || errno == ENOBUFS)) {
    blocked = true;
    return 0;
  }
  if (sent < 0) fail("send: ", errno_text());
  return static_cast<uint64_t>(sent);
}

uint64_t Outbox::flush(int fd, Segments& segments, std::vector<std::shared_ptr<Outgoing>>& sent) {
  uint64_t total = 0;
  while (!queue_.empty() && !blocked && total < kBytesPerFlush) {
    uint64_t left = send_some(fd, segments);
    total += left;
    bytes_ -= left;
    while (!queue_.empty()) {
      Item& item = queue_.front();
      uint64_t part = std::min(left, sizeof(Piece) + item.piece.bytes - item.sent);
      item.sent += part;
      left -= part;
      if (item.sent < sizeof(Piece) + item.piece.bytes) break;
      if (item.owner && --item.owner->pieces_left == 0) sent.push_back(std::move(item.owner));
      queue_.pop_front();
    }
  }
  return total;
}

}  // namespace mkernel
