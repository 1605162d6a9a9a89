// The tcp transport: several streams to each peer, driven by epoll from the proxy's thread.
//
// A request is divided into fragments (wire.h), which use the least loaded streams. The receiving side
// counts them and raises the signal (inbox.h). For its sender, a request is complete when the kernel
// has accepted all of its bytes. A stream that ends without a FIN is an error that names the peer.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "connector.h"
#include "inbox.h"
#include "outbox.h"
#include "transport.h"

namespace mkernel {

struct TcpOptions {
  int rank = 0;
  int size = 0;
  std::vector<uint8_t> secret;
  int streams = 4;
  std::string listen = "127.0.0.1";
  int port = 0;                                  // 0: any
  std::chrono::milliseconds peer_timeout{30000};  // a peer that is silent this long is gone
};

class TcpTransport : public Transport {
 public:
  explicit TcpTransport(const TcpOptions& options);
  ~TcpTransport() override;

  int port() const { return connector_.port(); }
  // Connects to these peers, which must connect to this rank in the same way. May be called again for others.
  void connect(const std::vector<PeerAddress>& peers, std::chrono::milliseconds timeout);

  bool post(const Request& request) override;
  bool poll(std::vector<int64_t>& completed) override;
  void stop(std::chrono::milliseconds patience) override;
  Counts counts(uint32_t peer) override;
  std::vector<int> descriptors() override;

 private:
  struct Stream {
    Stream(Fd fd, uint32_t number, Inbox& inbox) : socket(std::move(fd)), number(number), reader(inbox) {}
    Fd socket;  // none once the peer has left
    const uint32_t number;
    StreamReader reader;
    Outbox outbox;
    bool watching_output = false;
  };
  struct Peer {
    uint32_t rank;
    std::string address;
    std::unique_ptr<Inbox> inbox;
    std::vector<std::unique_ptr<Stream>> streams;
    size_t in_flight = 0;
    uint64_t sent = 0;
    size_t cursor = 0;
    bool left = false;
  };

  void usable() const;
  void enqueue(const Request& request, Peer& peer);
  template <class Body>
  bool guarded(Body body);
  Peer& peer_of(uint32_t rank);
  Stream& least_loaded(Peer& peer);
  bool send(Peer& peer, Stream& stream);
  bool receive(Peer& peer, Stream& stream);
  void end_of(Peer& peer, Stream& stream, const std::string& how);
  void watch(Peer& peer, Stream& stream, int operation, bool output);
  bool poll_streams();
  void send_fins(std::chrono::steady_clock::time_point deadline);
  [[noreturn]] void lost(const Peer& peer, const Stream& stream, const std::string& how);

  const Job job_;
  const std::chrono::milliseconds peer_timeout_;
  Connector connector_;
  Fd epoll_;
  std::mutex mutex_;  // of all below; the proxy's thread holds it most of the time
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; none: not connected
  std::vector<std::shared_ptr<Outgoing>> sent_;
  std::vector<uint8_t> scratch_;
  std::string failure_;
  uint64_t transfers_ = 0;
  bool stopped_ = false;
};

}  // namespace mkernel
