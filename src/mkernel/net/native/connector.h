// The listener of a rank: makes the streams to its peers and rejects connections that do not authenticate.
//
// Of two ranks, the higher one dials. The listening socket is served only while a thread is in `connect`,
// so unwanted connections cost a running job nothing: they wait in the kernel's queue. In `connect`, a
// connection has a few seconds to finish the handshake. There are never more than kMaxPending pending
// connections: a new one replaces the oldest. A peer that is dropped in this way tries again. A dialer that has sent its
// proof waits until the acceptor answers or hangs up: the acceptor may count on the stream already.
#pragma once

#include <atomic>
#include <chrono>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "handshake.h"
#include "sockets.h"

namespace mkernel {

struct PeerAddress {
  uint32_t peer;
  Address address;
};

// A stream that both sides have authenticated.
struct Arrival {
  uint32_t peer = 0;
  uint32_t stream = 0;
  std::string address;
  Fd socket;
};

class Connector {
 public:
  Connector(const Job& job, const Address& listen);
  int port() const { return port_; }
  int descriptor();  // of the listening socket; -1: no longer

  // Returns the streams to the given peers once all of them are connected. Streams of peers that connect
  // early are kept for a later call.
  std::vector<Arrival> connect(const std::vector<PeerAddress>& peers, std::chrono::milliseconds timeout);

  // No further peers are expected. A `connect` that is running ends with an error.
  void close();

 private:
  using Clock = std::chrono::steady_clock;

  // A connection whose handshake has not finished.
  struct PendingConnection {
    Fd socket;
    std::string address;
    Handshake handshake;
    std::vector<uint8_t> message;  // the part of the next one that has arrived
    Clock::time_point deadline;
    bool connecting = false;
    std::string failure;
    bool hopeless = false;  // another try would fail too
  };
  // A stream that this rank makes; it tries until the timeout of the call.
  struct Dial {
    uint32_t peer;
    uint32_t stream;
    Address address;
    Clock::time_point next_try;
    std::list<PendingConnection> connection;  // none or one
  };
  using Name = std::pair<uint32_t, uint32_t>;  // peer, stream

  bool all_here(const std::vector<PeerAddress>& peers) const;
  std::vector<Arrival> hand_over(const std::vector<PeerAddress>& peers);
  void wait_for_events(std::list<Dial>& dials, Clock::time_point deadline);
  void accept_some();
  void try_dials(std::list<Dial>& dials, Clock::time_point now);
  bool progress(PendingConnection& connection);
  void accept_connection(PendingConnection& connection);
  [[noreturn]] void complain(const std::vector<PeerAddress>& peers, double waited_s) const;

  const Job& job_;
  Fd listener_;
  int port_ = 0;
  std::atomic<bool> closing_{false};
  std::mutex mutex_;  // one connect at a time
  std::list<PendingConnection> pending_;
  std::map<Name, Arrival> arrivals_;
  std::vector<bool> handed_over_;     // by peer
  std::map<uint32_t, std::string> why_;  // the last failure with each peer that we dialled
  std::string last_refused_;
  std::string not_accepted_;  // why the last connection could not be
  int64_t refused_ = 0;
  Clock::time_point no_accept_before_{};
};

}  // namespace mkernel
