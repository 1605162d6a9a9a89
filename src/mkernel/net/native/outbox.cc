#include "outbox.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include "error.h"

namespace mkernel {
namespace {

constexpr size_t kPiecesAtOnce = 16;               // in one system call
constexpr size_t kFetchedAhead = 4;                // fragments on their way from the device
constexpr uint64_t kBytesPerFlush = 4 * kFragmentBytes;  // then other streams, and receiving, get their turn

}  // namespace

void Outbox::push(std::shared_ptr<Outgoing> owner, const Fragment& fragment, uint64_t source) {
  queue_.push_back({fragment, std::move(owner), source, 0, nullptr});
  bytes_ += sizeof(Fragment) + fragment.bytes;
}

void Outbox::push_fin() {
  Fragment fin;
  fin.kind = kFin;
  push(nullptr, fin, 0);
}

bool Outbox::Fetched::here() {
  if (!token.done()) return false;
  token = {};
  return true;
}

// Where the rest of an item's payload can be read; null: it is still on its way from the device.
const uint8_t* Outbox::payload(Item& item, uint64_t done, Segments& segments, std::vector<Segments::Pin>& pins) {
  if (!item.fetched) {
    auto pin = segments.pin(item.owner->request.source_segment, item.source + done, item.fragment.bytes - done, "source");
    if (pin.copy_queue == nullptr) {
      pins.push_back(std::move(pin));
      return pins.back().data;
    }
    item.fetched = std::make_unique<Fetched>();
    item.fetched->token = start_copy(Segments::Pin(item.fetched->bytes.data), std::move(pin), item.fragment.bytes);
  }
  return item.fetched->here() ? item.fetched->bytes.data + done : nullptr;
}

// One system call. Throws with the errno's text.
uint64_t Outbox::send_some(int fd, Segments& segments) {
  iovec parts[2 * kPiecesAtOnce];
  size_t count = 0;
  bool missing = false;
  std::vector<Segments::Pin> pins;
  pins.reserve(kPiecesAtOnce);
  for (size_t i = 0; i < queue_.size() && i < kPiecesAtOnce; ++i) {
    Item& item = queue_[i];
    uint64_t done = item.sent < sizeof(Fragment) ? 0 : item.sent - sizeof(Fragment);
    const uint8_t* bytes = item.fragment.bytes > 0 ? payload(item, done, segments, pins) : nullptr;
    missing |= item.fragment.bytes > 0 && bytes == nullptr;
    if (missing && i >= kFetchedAhead) break;
    if (missing) continue;  // but those that come next are fetched already
    if (item.sent < sizeof(Fragment))
      parts[count++] = {reinterpret_cast<uint8_t*>(&item.fragment) + item.sent, sizeof(Fragment) - item.sent};
    if (item.fragment.bytes > 0) parts[count++] = {const_cast<uint8_t*>(bytes), item.fragment.bytes - done};
  }
  fetching = missing;
  if (count == 0) return 0;
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
    if (left == 0) break;
    total += left;
    bytes_ -= left;
    while (!queue_.empty()) {
      Item& item = queue_.front();
      uint64_t part = std::min(left, sizeof(Fragment) + item.fragment.bytes - item.sent);
      item.sent += part;
      left -= part;
      if (item.sent < sizeof(Fragment) + item.fragment.bytes) break;
      if (item.owner && --item.owner->pieces_left == 0) sent.push_back(std::move(item.owner));
      queue_.pop_front();
    }
  }
  return total;
}

}  // namespace mkernel
