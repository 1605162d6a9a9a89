#include "connector.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <set>

namespace mkernel {
namespace {

constexpr size_t kMaxPending = 128;
constexpr int kAcceptsPerRound = 32;
constexpr auto kHandshakeTime = std::chrono::seconds(5);
constexpr auto kRetry = std::chrono::milliseconds(50);

}  // namespace

Connector::Connector(const Job& job, const Address& listen) : job_(job), listener_(listen_on(listen)), handed_over_(job.size) {
  port_ = port_of(local_address(listener_.get()));
}

int Connector::descriptor() {
  std::lock_guard<std::mutex> lock(mutex_);
  return listener_.get();
}

void Connector::close() {
  closing_ = true;
  std::lock_guard<std::mutex> lock(mutex_);
  pending_.clear();
  arrivals_.clear();
  listener_.reset();
}

std::vector<Arrival> Connector::connect(const std::vector<PeerAddress>& peers, std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto start = Clock::now();
  auto deadline = start + timeout;
  struct ClosePending {  // connections that did not authenticate are closed, however this ends
    std::list<PendingConnection>& pending;
    ~ClosePending() { pending.clear(); }
  } close_pending{pending_};
  std::list<Dial> dials;
  std::set<uint32_t> named;
  for (const PeerAddress& peer : peers) {
    if (peer.peer >= job_.size || peer.peer == job_.rank)
      fail("rank ", job_.rank, " of ", job_.size, " has no peer ", peer.peer);
    if (!named.insert(peer.peer).second) fail("rank ", peer.peer, " is named twice");
    if (handed_over_[peer.peer]) fail("rank ", job_.rank, " is connected to rank ", peer.peer, " already");
    if (peer.peer > job_.rank) continue;  // it calls us
    for (uint32_t stream = 0; stream < job_.streams; ++stream)
      if (!arrivals_.count({peer.peer, stream})) dials.push_back({peer.peer, stream, peer.address, start, {}});
  }
  while (!all_here(peers)) {
    if (closing_) fail("rank ", job_.rank, " has left the job");
    auto now = Clock::now();
    if (now >= deadline) complain(peers, std::chrono::duration<double>(now - start).count());
    try_dials(dials, now);
    wait_for_events(dials, deadline);
  }
  auto streams = hand_over(peers);
  auto connected = std::count(handed_over_.begin(), handed_over_.end(), true);
  if (connected + 1 == static_cast<std::ptrdiff_t>(job_.size)) listener_.reset();
  return streams;
}

bool Connector::all_here(const std::vector<PeerAddress>& peers) const {
  for (const PeerAddress& peer : peers)
    for (uint32_t stream = 0; stream < job_.streams; ++stream)
      if (!arrivals_.count({peer.peer, stream})) return false;
  return true;
}

std::vector<Arrival> Connector::hand_over(const std::vector<PeerAddress>& peers) {
  std::vector<Arrival> streams;
  for (const PeerAddress& peer : peers) {
    for (uint32_t stream = 0; stream < job_.streams; ++stream) {
      auto it = arrivals_.find({peer.peer, stream});
      streams.push_back(std::move(it->second));
      arrivals_.erase(it);
    }
    handed_over_[peer.peer] = true;
  }
  return streams;
}

void Connector::try_dials(std::list<Dial>& dials, Clock::time_point now) {
  for (Dial& dial : dials) {
    if (!dial.connection.empty() || now < dial.next_try) continue;
    dial.next_try = now + kRetry;
    try {
      Fd socket = start_connecting(dial.address);
      dial.connection.push_back({std::move(socket), text_of(dial.address), Handshake::dial(job_, dial.peer, dial.stream),
                            {}, now + kHandshakeTime, true, "", false});
    } catch (const Error& error) {
      why_[dial.peer] = error.what();  // out of descriptors, no route: try again
    }
  }
}

void Connector::wait_for_events(std::list<Dial>& dials, Clock::time_point deadline) {
  std::vector<pollfd> watched;
  std::vector<PendingConnection*> whose;
  auto watch = [&](PendingConnection& connection) {
    bool writing = connection.connecting || !connection.handshake.outgoing.empty();
    watched.push_back({connection.socket.get(), static_cast<short>(writing ? POLLOUT : POLLIN), 0});
    whose.push_back(&connection);
  };
  for (PendingConnection& connection : pending_) watch(connection);
  for (Dial& dial : dials)
    for (PendingConnection& connection : dial.connection) watch(connection);
  auto now = Clock::now();
  if (now >= no_accept_before_) watched.push_back({listener_.get(), POLLIN, 0});
  auto wait = std::min<Clock::duration>(deadline - now, kRetry / 2);
  int milliseconds = static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(wait).count()) + 1;
  if (::poll(watched.data(), watched.size(), std::max(milliseconds, 0)) < 0 && errno != EINTR)
    fail("poll: ", errno_text());
  now = Clock::now();
  auto finished = [&](PendingConnection& connection, short events) {
    if (events != 0 && progress(connection)) return true;
    if (connection.failure.empty() && now >= connection.deadline && !connection.handshake.proven())
      connection.failure = "it did not finish the handshake";
    return !connection.failure.empty();
  };
  size_t index = 0;
  for (auto it = pending_.begin(); it != pending_.end(); ++index) {
    if (!finished(*it, watched[index].revents)) {
      ++it;
      continue;
    }
    if (it->failure.empty()) {
      accept_connection(*it);
    } else {
      ++refused_;
      last_refused_ = words(it->address, ": ", it->failure);
    }
    it = pending_.erase(it);
  }
  for (auto it = dials.begin(); it != dials.end();) {
    bool arrived = false;
    if (!it->connection.empty() && finished(it->connection.front(), watched[index++].revents)) {
      arrived = it->connection.front().failure.empty();
      PendingConnection& connection = it->connection.front();
      if (connection.hopeless)
        fail("rank ", job_.rank, " cannot trust rank ", it->peer, " at ", connection.address, ": ", connection.failure);
      if (arrived) {
        accept_connection(connection);
      } else {
        why_[it->peer] = connection.failure;
      }
      it->connection.clear();
    }
    it = arrived ? dials.erase(it) : std::next(it);
  }
  if (index < watched.size() && watched[index].revents != 0) accept_some();
}

void Connector::accept_some() {
  for (int i = 0; i < kAcceptsPerRound; ++i) {
    Address from;
    from.size = sizeof(from.storage);
    Fd socket(::accept4(listener_.get(), reinterpret_cast<sockaddr*>(&from.storage), &from.size,
                        SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      // Out of descriptors or memory: the queue stays readable, so do not poll it for a while.
      if (errno != EAGAIN && errno != ECONNABORTED && errno != EINTR) {
        no_accept_before_ = Clock::now() + kRetry;
        not_accepted_ = errno_text();
      }
      return;
    }
    if (pending_.size() >= kMaxPending) {
      ++refused_;
      last_refused_ = words(pending_.front().address, ": too many connections");
      pending_.pop_front();
    }
    pending_.push_back(
        {std::move(socket), text_of(from), Handshake::accept(job_), {}, Clock::now() + kHandshakeTime, false, "",
         false});
  }
}

// True when the handshake is over; connection.failure says if and why it failed. Never takes more from the
// socket than the handshake's own bytes.
bool Connector::progress(PendingConnection& connection) {
  try {
    if (connection.connecting) {
      int problem = 0;
      socklen_t size = sizeof(problem);
      ::getsockopt(connection.socket.get(), SOL_SOCKET, SO_ERROR, &problem, &size);
      if (problem != 0) fail("cannot connect: ", errno_text(problem));
      connection.connecting = false;
    }
    std::string& out = connection.handshake.outgoing;
    while (true) {
      while (!out.empty()) {
        ssize_t sent = ::send(connection.socket.get(), out.data(), out.size(), MSG_NOSIGNAL);
        if (sent < 0 && (errno == EAGAIN || errno == EINTR)) return false;
        if (sent < 0) fail("send: ", errno_text());
        out.erase(0, static_cast<size_t>(sent));
      }
      if (connection.handshake.done()) return true;
      size_t have = connection.message.size(), wanted = connection.handshake.wanted();
      connection.message.resize(wanted);
      ssize_t got = ::recv(connection.socket.get(), connection.message.data() + have, wanted - have, 0);
      int problem = errno;
      connection.message.resize(have + static_cast<size_t>(std::max<ssize_t>(got, 0)));
      if (got < 0 && (problem == EAGAIN || problem == EINTR)) return false;
      if (got < 0) fail("recv: ", errno_text(problem));
      if (got == 0) fail("it closed the connection during the handshake");
      if (connection.message.size() < wanted) continue;
      connection.handshake.take(connection.message);
      connection.message.clear();
    }
  } catch (const WrongSecret& error) {
    connection.failure = error.what();
    connection.hopeless = true;
    return true;
  } catch (const Error& error) {
    connection.failure = error.what();
    return true;
  }
}

void Connector::accept_connection(PendingConnection& connection) {
  uint32_t peer = connection.handshake.peer(), stream = connection.handshake.stream();
  if (handed_over_[peer]) {
    ++refused_;
    last_refused_ = words(connection.address, ": rank ", peer, " is connected already");
    return;
  }
  // a second call replaces the first: the peer has given that one up
  arrivals_[{peer, stream}] = Arrival{peer, stream, connection.address, std::move(connection.socket)};
}

void Connector::complain(const std::vector<PeerAddress>& peers, double waited_s) const {
  std::string text = words("rank ", job_.rank, " waited ", short_text(waited_s), " s for");
  const char* separator = " ";
  for (const PeerAddress& peer : peers) {
    uint32_t here = 0;
    for (uint32_t stream = 0; stream < job_.streams; ++stream) here += arrivals_.count({peer.peer, stream}) ? 1 : 0;
    if (here == job_.streams) continue;
    text += words(separator, "rank ", peer.peer);
    if (peer.peer < job_.rank) text += words(" at ", text_of(peer.address));
    text += words(" (", here, " of ", job_.streams, " streams came");
    auto why = why_.find(peer.peer);
    if (why != why_.end()) text += words("; the last try: ", why->second);
    text += ")";
    separator = ", ";
  }
  if (!not_accepted_.empty()) text += words("; connections could not be accepted: ", not_accepted_);
  if (refused_ > 0) text += words("; ", refused_, " connections were refused, the last from ", last_refused_);
  fail(text);
}

}  // namespace mkernel
