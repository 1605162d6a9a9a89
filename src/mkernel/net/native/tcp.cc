#include "tcp.h"

#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <thread>

namespace mkernel {
namespace {

constexpr size_t kInFlight = 512;          // requests to one peer
constexpr size_t kScratch = 64 << 10;
constexpr uint64_t kInPlace = 16 << 10;    // payloads at least this long are received where they belong
constexpr int kReceivesPerRound = 16;      // then other streams, and sending, get their turn
constexpr int kEvents = 64;
constexpr size_t kLeastSecret = 16;

Job job_of(const TcpOptions& options) {
  if (options.size < 2 || options.size > 0x10000) fail("size must be from 2 to 65536, got ", options.size);
  if (options.rank < 0 || options.rank >= options.size)
    fail("rank must be from 0 to ", options.size - 1, ", got ", options.rank);
  if (options.streams < 1 || options.streams > 64) fail("streams must be from 1 to 64, got ", options.streams);
  if (options.secret.size() < kLeastSecret)
    fail("the secret must have at least ", kLeastSecret, " bytes, got ", options.secret.size());
  return {static_cast<uint32_t>(options.rank), static_cast<uint32_t>(options.size),
          static_cast<uint32_t>(options.streams), options.secret};
}

}  // namespace

TcpTransport::TcpTransport(const TcpOptions& options)
    : Transport(options.rank),
      job_(job_of(options)),
      peer_timeout_(options.peer_timeout),
      connector_(job_, parse_address(options.listen, options.port)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      peers_(job_.size),
      scratch_(kScratch) {
  if (!epoll_) fail("epoll: ", errno_text());
}

TcpTransport::~TcpTransport() { TcpTransport::stop(std::chrono::milliseconds(0)); }

// After an error, every call fails, and no FIN is sent, so that the peers see a loss, too.
template <class Body>
bool TcpTransport::guarded(Body body) {
  std::lock_guard<std::mutex> lock(mutex_);
  usable();
  try {
    return body();
  } catch (const std::exception& error) {
    failure_ = error.what();
    throw;
  }
}

void TcpTransport::connect(const std::vector<PeerAddress>& peers, std::chrono::milliseconds timeout) {
  std::vector<Arrival> arrivals = connector_.connect(peers, timeout);
  guarded([&] {
    for (Arrival& arrival : arrivals) {
      auto& peer = peers_[arrival.peer];
      if (!peer) {
        peer = std::make_unique<Peer>();
        peer->rank = arrival.peer;
        peer->address = arrival.address;
        peer->inbox = std::make_unique<Inbox>(segments);
      }
      prepare_stream(arrival.socket.get(), peer_timeout_);
      peer->streams.push_back(std::make_unique<Stream>(std::move(arrival.socket), arrival.stream, *peer->inbox));
      watch(*peer, *peer->streams.back(), EPOLL_CTL_ADD, false);
    }
    return true;
  });
}

void TcpTransport::usable() const {
  if (stopped_) fail("rank ", rank, " has left the job");
  if (!failure_.empty()) throw Error(failure_);
}

TcpTransport::Peer& TcpTransport::peer_of(uint32_t number) {
  if (number >= peers_.size()) fail("there is no rank ", number, " in a job of ", peers_.size());
  if (!peers_[number]) fail("rank ", rank, " is not connected to rank ", number);
  return *peers_[number];
}

TcpTransport::Stream& TcpTransport::least_loaded(Peer& peer) {
  size_t count = peer.streams.size(), best = peer.cursor % count;
  for (size_t i = 1; i < count; ++i) {
    size_t other = (peer.cursor + i) % count;
    if (peer.streams[other]->outbox.bytes() < peer.streams[best]->outbox.bytes()) best = other;
  }
  peer.cursor = best + 1;
  return *peer.streams[best];
}

bool TcpTransport::post(const Request& request) {
  return guarded([&] {
    Peer& peer = peer_of(request.peer);
    if (peer.left) fail("rank ", peer.rank, " at ", peer.address, " has left the job; a request to it came later");
    if (peer.in_flight >= kInFlight) return false;
    enqueue(request, peer);
    return true;
  });
}

void TcpTransport::enqueue(const Request& request, Peer& peer) {
  segments->pin(request.source_segment, request.source, request.bytes, "source");
  Fragmentation fragmentation(request.bytes);
  auto owner = std::make_shared<Outgoing>(Outgoing{request, fragmentation.fragments});
  Fragment fragment;
  fragment.kind = kFragment;
  fragment.segment = request.segment;
  fragment.transfer = transfers_++;
  fragment.target = request.target;
  fragment.total = request.bytes;
  fragment.signal = request.signal;
  fragment.value = request.value;
  for (fragment.index = 0; fragment.index < fragmentation.fragments; ++fragment.index) {
    fragment.bytes = fragmentation.bytes(fragment.index);
    least_loaded(peer).outbox.push(owner, fragment, request.source + fragmentation.begin(fragment.index));
  }
  ++peer.in_flight;
  ++peer.sent;
}

Transport::Counts TcpTransport::counts(uint32_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  usable();
  Peer& peer = peer_of(number);
  return {peer.sent, peer.inbox->arrived()};
}

std::vector<int> TcpTransport::descriptors() {
  std::vector<int> found;
  if (int listener = connector_.descriptor(); listener >= 0) found.push_back(listener);
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& peer : peers_)
    if (peer)
      for (auto& stream : peer->streams)
        if (stream->socket) found.push_back(stream->socket.get());
  return found;
}

bool TcpTransport::poll(std::vector<int64_t>& completed) {
  return guarded([&] {
    bool any = poll_streams();
    for (const auto& outgoing : sent_) {
      completed.push_back(outgoing->request.ticket);
      --peer_of(outgoing->request.peer).in_flight;
    }
    sent_.clear();
    return any;
  });
}

bool TcpTransport::poll_streams() {
  bool any = false;
  for (auto& peer : peers_) {
    if (!peer || peer->in_flight == 0) continue;
    for (auto& stream : peer->streams) any |= send(*peer, *stream);
  }
  epoll_event events[kEvents];
  int count = ::epoll_wait(epoll_.get(), events, kEvents, 0);
  if (count < 0 && errno != EINTR) fail("epoll: ", errno_text());
  for (int i = 0; i < count; ++i) {
    Peer& peer = *peers_[events[i].data.u64 / job_.streams];
    Stream& stream = *peer.streams[events[i].data.u64 % job_.streams];
    // read what the peer has sent first: it may explain an error
    if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) any |= receive(peer, stream);
    if (events[i].events & EPOLLOUT && stream.socket) {
      stream.outbox.blocked = false;
      any |= send(peer, stream);
    }
  }
  return any;
}

bool TcpTransport::send(Peer& peer, Stream& stream) {
  if (stream.outbox.empty() && !stream.watching_output) return false;
  uint64_t bytes = 0;
  try {
    bytes = stream.outbox.flush(stream.socket.get(), *segments, sent_);
  } catch (const Error& error) {
    lost(peer, stream, error.what());
  }
  if (stream.outbox.blocked != stream.watching_output) watch(peer, stream, EPOLL_CTL_MOD, stream.outbox.blocked);
  return bytes > 0 || stream.outbox.fetching;
}

bool TcpTransport::receive(Peer& peer, Stream& stream) {
  if (!stream.socket) return false;
  int fd = stream.socket.get();
  StreamReader& reader = stream.reader;
  bool any = false;
  try {
    for (int i = 0; i < kReceivesPerRound; ++i) {
      ssize_t got;
      uint64_t due = reader.payload_due();
      if (due >= kInPlace) {
        auto place = reader.place(due);
        got = ::recv(fd, place.data, due, MSG_DONTWAIT);
      } else {
        got = ::recv(fd, scratch_.data(), scratch_.size(), MSG_DONTWAIT);
      }
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) return any;
      if (got <= 0) {
        end_of(peer, stream, got == 0 ? "the peer closed the connection" : words("recv: ", errno_text()));
        return true;
      }
      if (due >= kInPlace) {
        reader.placed(static_cast<uint64_t>(got));
      } else {
        reader.feed(scratch_.data(), static_cast<size_t>(got));
        if (reader.ended()) peer.left = true;
      }
      any = true;
    }
  } catch (const Error& error) {
    lost(peer, stream, error.what());
  }
  return any;
}

// The stream is over: in order if the peer has said so before.
void TcpTransport::end_of(Peer& peer, Stream& stream, const std::string& how) {
  if (!stream.reader.ended() || stream.reader.unfinished()) fail(how);
  if (peer.in_flight > 0) fail("the peer has left, with ", peer.in_flight, " requests to it unsent");
  stream.socket.reset();  // which also takes it out of epoll
  bool all = std::none_of(peer.streams.begin(), peer.streams.end(), [](auto& other) { return bool(other->socket); });
  if (all && peer.inbox->unfinished() > 0) fail("the peer has left in the middle of a transfer");
}

void TcpTransport::watch(Peer& peer, Stream& stream, int operation, bool output) {
  epoll_event event{};
  event.events = EPOLLIN | (output ? EPOLLOUT : 0u);
  event.data.u64 = uint64_t{peer.rank} * job_.streams + stream.number;
  if (::epoll_ctl(epoll_.get(), operation, stream.socket.get(), &event) != 0) fail("epoll_ctl: ", errno_text());
  stream.watching_output = output;
}

void TcpTransport::lost(const Peer& peer, const Stream& stream, const std::string& how) {
  fail("rank ", peer.rank, " at ", peer.address, ", stream ", stream.number, ": ", how);
}

void TcpTransport::stop(std::chrono::milliseconds patience) {
  auto deadline = std::chrono::steady_clock::now() + patience;
  connector_.close();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!stopped_) {
      stopped_ = true;
      if (failure_.empty() && patience.count() > 0) send_fins(deadline);
      peers_.clear();
    }
  }
  segments->close();
}

// Sends what is queued and a FIN, and waits until the peers' kernels have it. A socket that is closed earlier, or
// with unread data, may be reset, and the peer would miss the end.
void TcpTransport::send_fins(std::chrono::steady_clock::time_point deadline) {
  std::vector<Stream*> open;
  for (auto& peer : peers_)
    if (peer)
      for (auto& stream : peer->streams)
        if (stream->socket) {
          stream->outbox.push_fin();
          open.push_back(stream.get());
        }
  auto gone = [&](Stream* stream) {
    int fd = stream->socket.get();
    ssize_t got = 1;
    for (int i = 0; i < kReceivesPerRound && got > 0; ++i)
      got = ::recv(fd, scratch_.data(), scratch_.size(), MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return true;  // nobody is there to hear it
    try {
      stream->outbox.blocked = false;
      stream->outbox.flush(fd, *segments, sent_);
    } catch (const Error&) {
      return true;  // the peer is gone, or the source of what was still queued
    }
    int unacknowledged = 0;
    return stream->outbox.empty() && (::ioctl(fd, SIOCOUTQ, &unacknowledged) != 0 || unacknowledged == 0);
  };
  while (true) {
    open.erase(std::remove_if(open.begin(), open.end(), gone), open.end());
    if (open.empty() || std::chrono::steady_clock::now() >= deadline) return;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

}  // namespace mkernel
