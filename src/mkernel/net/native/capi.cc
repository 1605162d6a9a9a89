#include <algorithm>
#include <cstring>
#include <map>

#include "loopback.h"
#include "mkernel_net.h"
#include "proxy.h"
#include "rdma.h"
#include "sha256.h"
#include "tcp.h"

using namespace mkernel;

struct mkernel_net_transport {
  std::shared_ptr<Transport> transport;
  TcpTransport* tcp = nullptr;
  RdmaTransport* rdma = nullptr;
};

struct mkernel_net_proxy {
  Proxy proxy;
};

namespace {

thread_local std::string last_error;

// Runs `body`; no exception leaves the library.
template <class Result, class Body>
Result guarded(Result on_failure, Body body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "unknown error";
  }
  return on_failure;
}

std::chrono::milliseconds milliseconds(int64_t count) {
  constexpr int64_t kLongest = int64_t{1000} * 3600 * 24 * 365;  // sums with the clock must not overflow
  return std::chrono::milliseconds(std::clamp<int64_t>(count, 0, kLongest));
}

TcpTransport& tcp_of(const mkernel_net_transport* transport) {
  if (transport->tcp == nullptr) fail("this is not a tcp transport");
  return *transport->tcp;
}

RdmaTransport& rdma_of(const mkernel_net_transport* transport) {
  if (transport->rdma == nullptr) fail("this is not an RDMA transport");
  return *transport->rdma;
}

int64_t copy_out(const std::string& bytes, void* out, size_t size) {
  std::memcpy(out, bytes.data(), std::min(bytes.size(), size));
  return static_cast<int64_t>(bytes.size());
}

}  // namespace

const char* mkernel_net_last_error() { return last_error.c_str(); }

int64_t mkernel_net_constant(const char* name) {
  using namespace layout;
  static const std::map<std::string, int64_t> constants = {
      {"CONSUMED", kConsumed},         {"COMPLETED", kCompleted},      {"CAPACITY", kCapacity},
      {"HEADER_WORDS", kHeaderWords},  {"REQUEST_WORDS", kRequestWords},
      {"PEER_AND_SEGMENTS", kPeerAndSegments},
      {"TURN", kTurn},                 {"SOURCE", kSource},            {"TARGET", kTarget},
      {"BYTES", kBytes},               {"SIGNAL", kSignal},            {"VALUE", kValue},
  };
  auto it = constants.find(name);
  return it == constants.end() ? -1 : it->second;
}

void mkernel_net_hmac(const void* key, size_t key_size, const void* data, size_t size, uint8_t* out) {
  Digest digest = hmac_sha256(key, key_size, data, size);
  std::memcpy(out, digest.data(), digest.size());
}

mkernel_net_transport* mkernel_net_loopback_create(const char* job, int rank, int64_t latency_ns, double bytes_per_s,
                                                   int64_t shuffle_seed) {
  return guarded<mkernel_net_transport*>(nullptr, [&] {
    LoopbackOptions options{latency_ns, bytes_per_s, shuffle_seed};
    return new mkernel_net_transport{std::make_shared<LoopbackTransport>(job, rank, options)};
  });
}

mkernel_net_transport* mkernel_net_tcp_create(int rank, int size, const void* secret, size_t secret_size, int streams,
                                              const char* listen_host, int listen_port, int64_t peer_timeout_ms) {
  return guarded<mkernel_net_transport*>(nullptr, [&] {
    auto* bytes = static_cast<const uint8_t*>(secret);
    TcpOptions options;
    options.rank = rank;
    options.size = size;
    options.secret.assign(bytes, bytes + secret_size);
    options.streams = streams;
    options.listen = listen_host;
    options.port = listen_port;
    options.peer_timeout = milliseconds(peer_timeout_ms);
    auto tcp = std::make_shared<TcpTransport>(options);
    return new mkernel_net_transport{tcp, tcp.get()};
  });
}

int mkernel_net_tcp_port(const mkernel_net_transport* transport) {
  return guarded(-1, [&] { return tcp_of(transport).port(); });
}

int mkernel_net_tcp_connect(mkernel_net_transport* transport, const mkernel_net_address* peers, int count,
                            int64_t timeout_ms) {
  return guarded(-1, [&] {
    TcpTransport& tcp = tcp_of(transport);
    std::vector<PeerAddress> addresses;
    for (int i = 0; i < count; ++i) {
      if (peers[i].peer < 0) fail("there is no rank ", peers[i].peer);
      addresses.push_back({static_cast<uint32_t>(peers[i].peer), parse_address(peers[i].host, peers[i].port)});
    }
    tcp.connect(addresses, milliseconds(timeout_ms));
    return 0;
  });
}

mkernel_net_transport* mkernel_net_rdma_create(const char* kind, int rank, const mkernel_net_rdma_port* ports,
                                               int count, int queues, int traffic_class, int64_t peer_timeout_ms,
                                               const char* library, const char* efa_library) {
  return guarded<mkernel_net_transport*>(nullptr, [&] {
    RdmaOptions options;
    options.rank = rank;
    for (int i = 0; i < count; ++i) options.ports.push_back({ports[i].device, ports[i].port, ports[i].gid_index});
    options.queues = queues;
    options.traffic_class = traffic_class;
    options.peer_timeout = milliseconds(peer_timeout_ms);
    if (library != nullptr) options.library = library;
    if (efa_library != nullptr) options.efa_library = efa_library;
    bool efa = std::string(kind) == "efa";
    auto rdma = efa ? make_efa_transport(options) : make_verbs_transport(options);
    return new mkernel_net_transport{rdma, nullptr, rdma.get()};
  });
}

int64_t mkernel_net_describe(mkernel_net_transport* transport, uint32_t peer, void* out, size_t size) {
  return guarded<int64_t>(-1, [&] { return copy_out(rdma_of(transport).describe(peer), out, size); });
}

int mkernel_net_connect(mkernel_net_transport* transport, uint32_t peer, const void* description, size_t size) {
  return guarded(-1, [&] {
    rdma_of(transport).connect(peer, std::string(static_cast<const char*>(description), size));
    return 0;
  });
}

int64_t mkernel_net_describe_segment(mkernel_net_transport* transport, uint32_t segment, void* out, size_t size) {
  return guarded<int64_t>(-1, [&] { return copy_out(rdma_of(transport).describe_segment(segment), out, size); });
}

int mkernel_net_learn_segment(mkernel_net_transport* transport, uint32_t peer, uint32_t segment,
                              const void* description, size_t size) {
  return guarded(-1, [&] {
    rdma_of(transport).learn_segment(peer, segment, std::string(static_cast<const char*>(description), size));
    return 0;
  });
}

int mkernel_net_attach(mkernel_net_transport* transport, uint32_t segment, void* base, uint64_t size, int device) {
  return guarded(-1, [&] {
    transport->transport->attach(segment, base, size, device);
    return 0;
  });
}

int mkernel_net_detach(mkernel_net_transport* transport, uint32_t segment) {
  return guarded(-1, [&] {
    transport->transport->detach(segment);
    return 0;
  });
}

int mkernel_net_counts(mkernel_net_transport* transport, uint32_t peer, int64_t* sent, int64_t* arrived) {
  return guarded(-1, [&] {
    auto counts = transport->transport->counts(peer);
    *sent = static_cast<int64_t>(counts.sent);
    *arrived = static_cast<int64_t>(counts.arrived);
    return 0;
  });
}

int mkernel_net_descriptors(mkernel_net_transport* transport, int* out, int size) {
  return guarded(-1, [&] {
    auto found = transport->transport->descriptors();
    std::copy_n(found.begin(), std::min<size_t>(found.size(), static_cast<size_t>(std::max(size, 0))), out);
    return static_cast<int>(found.size());
  });
}

int mkernel_net_post(mkernel_net_transport* transport, const int64_t* request) {
  return guarded(-1, [&] { return transport->transport->post(request_of(request, 0)) ? 1 : 0; });
}

int mkernel_net_poll(mkernel_net_transport* transport) {
  return guarded(-1, [&] {
    std::vector<int64_t> completed;
    return transport->transport->poll(completed) ? 1 : 0;
  });
}

int mkernel_net_transport_stop(mkernel_net_transport* transport, int64_t timeout_ms) {
  return guarded(-1, [&] {
    transport->transport->stop(milliseconds(timeout_ms));
    return 0;
  });
}

void mkernel_net_transport_destroy(mkernel_net_transport* transport) {
  if (transport == nullptr) return;
  mkernel_net_transport_stop(transport, 0);
  delete transport;
}

mkernel_net_proxy* mkernel_net_proxy_start(int64_t* ring, uint64_t words, mkernel_net_transport* transport, int cpu,
                                           int idle_sleep_us, int spin_us) {
  return guarded<mkernel_net_proxy*>(nullptr, [&] {
    ProxyOptions options{cpu, idle_sleep_us, spin_us};
    return new mkernel_net_proxy{Proxy(ring, words, transport->transport, options)};
  });
}

int mkernel_net_proxy_set_abort_flag(mkernel_net_proxy* proxy, int64_t* word, int device) {
  return guarded(-1, [&] {
    proxy->proxy.set_abort_flag(word, device);
    return 0;
  });
}

int mkernel_net_proxy_stop(mkernel_net_proxy* proxy, int64_t timeout_ms) {
  return guarded(0, [&] { return proxy->proxy.stop(milliseconds(timeout_ms)) ? 1 : 0; });
}

size_t mkernel_net_proxy_error(const mkernel_net_proxy* proxy, char* text, size_t size) {
  return guarded<size_t>(0, [&] {
    std::string error = proxy->proxy.error();
    if (size > 0) {
      size_t part = std::min(error.size(), size - 1);
      std::memcpy(text, error.data(), part);
      text[part] = 0;
    }
    return error.size();
  });
}

void mkernel_net_proxy_statistics(const mkernel_net_proxy* proxy, mkernel_net_statistics* out) {
  *out = proxy->proxy.statistics();
}

void mkernel_net_proxy_destroy(mkernel_net_proxy* proxy) { delete proxy; }
