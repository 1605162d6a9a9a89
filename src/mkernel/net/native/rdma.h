// The transports over RDMA devices: `verbs` (InfiniBand, RoCE) and `efa` (AWS).
//
// Ranks do not discover each other here. A rank describes its connection, and each of its segments, as a
// string of bytes. The caller passes these descriptions to the other ranks over a channel that it trusts.
// Without a description, nobody can write to a rank's memory.
//
//   all ranks:  describe(peer)            -> to that peer ->  connect(peer, its description)
//   all ranks:  attach, describe_segment  -> to all peers ->  learn_segment(peer, number, description)
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "transport.h"

namespace mkernel {

struct RdmaPort {
  std::string device;
  int port = 1;
  int gid_index = 0;
};

struct RdmaOptions {
  int rank = 0;
  std::vector<RdmaPort> ports;  // the rails: the n-th of a rank talks to the n-th of its peers
  int queues = 2;               // queue pairs to a peer on each rail; efa has one for all peers
  int traffic_class = 0;        // of packets with a global header; RoCE networks sort by it
  std::chrono::milliseconds peer_timeout{30000};
  std::string library = "libibverbs.so.1";
  std::string efa_library = "libefa.so.1";
};

class RdmaTransport : public Transport {
 public:
  using Transport::Transport;
  virtual std::string describe(uint32_t peer) = 0;
  // Call it once for each peer, with the peer's description.
  virtual void connect(uint32_t peer, const std::string& description) = 0;
  virtual std::string describe_segment(uint32_t number) = 0;
  virtual void learn_segment(uint32_t peer, uint32_t number, const std::string& description) = 0;
};

std::shared_ptr<RdmaTransport> make_verbs_transport(const RdmaOptions& options);
std::shared_ptr<RdmaTransport> make_efa_transport(const RdmaOptions& options);

}  // namespace mkernel
