// The verbs transport: RDMA writes over reliable connections (RC), for InfiniBand and RoCE.
//
// A request is one or more writes of data, followed by an inline write of the signal's 8 bytes on the
// same queue pair. The device executes them in order, so a reader that sees the signal sees the data.
// The receiving rank's CPU is not involved. Memory is registered without relaxed ordering, which would
// give up that order on the last hop, over PCIe.
//
// There are several queue pairs to a peer. Requests to the same signal use the same queue pair. If a value
// is lower than an earlier one, the earlier one is written again, so a signal never decreases. Neighbouring
// signals use different queue pairs. A write does not compare, so a signal must have a single sending rank.
//
// post only queues; poll passes all queued requests on, as one linked list per queue pair. The last write
// of a list is signalled, and so is every kRequestsPerSignal-th request: one completion covers all
// requests before it on that queue pair.
//
// A rank that sends to a lost peer notices: after kRetries retries, spread over the peer timeout, the
// device gives up and the completion fails. A rank that only receives does not notice, and waits until
// its own timeout.
#include <algorithm>
#include <deque>
#include <random>

#include "rdma.h"
#include "rdma_base.h"

namespace mkernel {

#if MKERNEL_HAS_VERBS

namespace {

constexpr uint32_t kVerbsMagic = 0x4252'566D;   // "mVRB"
constexpr uint32_t kQueueDepth = 512;           // writes that a queue pair holds
constexpr uint64_t kLargestWrite = 1 << 30;
constexpr int kRequestsPerSignal = 16;
constexpr uint8_t kRetries = 6;  // 7 means for ever to some devices
constexpr uint8_t kHopLimit = 64;
constexpr int kCompletionsAtOnce = 32;

// The device's exponent for the time until a retry: the largest with which all tries together stay
// within the timeout.
uint8_t retry_exponent(std::chrono::milliseconds timeout) {
  double tries = (kRetries + 1) * 4.096e-3;  // ms
  uint8_t exponent = 8;
  while (exponent < 31 && tries * static_cast<double>(1u << (exponent + 1)) <= static_cast<double>(timeout.count()))
    ++exponent;
  return exponent;
}

// What two ranks exchange about a rail and about a queue pair.
struct RailDescription {
  ibv_gid gid;
  uint32_t mtu;
  uint16_t lid;
  uint8_t link_layer;
  uint8_t unused;
};
struct QueueDescription {
  uint32_t number;
  uint32_t first_packet;
};

class VerbsTransport : public RdmaBase {
 public:
  explicit VerbsTransport(const RdmaOptions& options);
  ~VerbsTransport() override { VerbsTransport::stop(std::chrono::milliseconds(0)); }

  std::string describe(uint32_t peer) override;
  void connect(uint32_t peer, const std::string& description) override;
  void learn_segment(uint32_t peer, uint32_t number, const std::string& description) override;
  bool post(const Request& request) override;
  bool poll(std::vector<int64_t>& completed) override;

 protected:
  bool signals_by_host() const override { return false; }
  void abandon() override { peers_.clear(); }

 private:
  struct Write {
    ibv_send_wr work{};
    ibv_sge part{};
    int64_t value = 0;
  };
  struct Flight {
    int64_t ticket;
    uint64_t last;  // number of its last write on the queue pair
    std::shared_ptr<Registered> source;
  };
  struct Queue {
    size_t rail = 0;
    uint32_t first_packet = 0;
    std::vector<Write> waiting;
    std::deque<Flight> flights;
    uint64_t written = 0;    // writes so far; the number of the next one
    uint64_t completed = 0;  // those that are done
    int unsignalled = 0;     // requests since the last whose completion is reported
    Owned<ibv_qp> pair{nullptr, nullptr};  // ends first
  };
  struct Peer {
    uint32_t rank = 0;
    std::vector<Owned<ibv_cq>> completions;  // by rail
    std::vector<std::unique_ptr<Queue>> queues;
    std::vector<Queue*> connected;
    std::unordered_map<uint32_t, std::unordered_map<uint64_t, int64_t>> highest;  // by segment and signal
    size_t in_flight = 0;
  };

  Peer& known(uint32_t peer);
  std::unique_ptr<Queue> make_queue(Peer& peer, size_t rail);
  void connect_queue(Queue& queue, const RailDescription& there, const QueueDescription& other);
  void add(Queue& queue, const Remote& remote, uint64_t target, uint64_t size);
  void flush(Peer& peer, Queue& queue);
  bool collect(Peer& peer, size_t rail, std::vector<int64_t>& completed);

  std::map<uint32_t, std::unique_ptr<Peer>> peers_;
};

VerbsTransport::VerbsTransport(const RdmaOptions& options) : RdmaBase(options) {
  for (const Rail& rail : rails_)
    if (rail.attributes.link_layer != IBV_LINK_LAYER_INFINIBAND &&
        rail.attributes.link_layer != IBV_LINK_LAYER_ETHERNET)
      fail("RDMA device ", rail.name, " is neither InfiniBand nor RoCE; EFA devices need transport='efa'");
}

std::string VerbsTransport::describe(uint32_t number) {
  return guarded([&] {
    auto& peer = peers_[number];
    if (!peer) {
      peer = std::make_unique<Peer>();
      peer->rank = number;
      for (size_t rail = 0; rail < rails_.size(); ++rail) {
        int entries = static_cast<int>(kQueueDepth) * options_.queues;
        entries = std::min(entries, rails_[rail].limits.max_cqe);
        auto* queue = library_.create_cq(rails_[rail].context.get(), entries, nullptr, nullptr, 0);
        if (queue == nullptr) fail("RDMA device ", rails_[rail].name, ": no completion queue: ", errno_text());
        peer->completions.emplace_back(queue, library_.destroy_cq);
        for (int i = 0; i < options_.queues; ++i) peer->queues.push_back(make_queue(*peer, rail));
      }
    }
    Description text;
    text.put(kVerbsMagic);
    text.put(static_cast<uint32_t>(rails_.size()));
    text.put(static_cast<uint32_t>(options_.queues));
    for (const Rail& rail : rails_) {
      RailDescription here{};
      here.gid = rail.gid;
      here.mtu = rail.attributes.active_mtu;
      here.lid = rail.attributes.lid;
      here.link_layer = rail.attributes.link_layer;
      text.put(here);
    }
    for (auto& queue : peer->queues) text.put(QueueDescription{queue->pair->qp_num, queue->first_packet});
    return text.bytes();
  });
}

std::unique_ptr<VerbsTransport::Queue> VerbsTransport::make_queue(Peer& peer, size_t rail) {
  auto queue = std::make_unique<Queue>();
  queue->rail = rail;
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = peer.completions[rail].get();
  init.qp_type = IBV_QPT_RC;
  init.cap.max_send_wr = kQueueDepth;
  init.cap.max_recv_wr = 1;
  init.cap.max_send_sge = init.cap.max_recv_sge = 1;
  init.cap.max_inline_data = sizeof(int64_t);
  queue->pair = {library_.create_qp(rails_[rail].domain.get(), &init), library_.destroy_qp};
  if (!queue->pair) fail("RDMA device ", rails_[rail].name, ": no queue pair: ", errno_text());
  std::random_device random;
  queue->first_packet = random() & 0xFFFFFF;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = static_cast<uint8_t>(rails_[rail].port);
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  move_queue(queue->pair.get(), attributes, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "initialised",
             rails_[rail]);
  return queue;
}

void VerbsTransport::connect(uint32_t number, const std::string& description) {
  guarded([&] {
    Peer& peer = known(number);
    if (!peer.connected.empty()) fail("rank ", rank, " is connected to rank ", number, " already");
    Description text(description, words("rank ", number));
    if (text.take<uint32_t>() != kVerbsMagic) fail("rank ", number, " does not use the verbs transport");
    auto rails = text.take<uint32_t>(), queues = text.take<uint32_t>();
    if (queues != static_cast<uint32_t>(options_.queues))
      fail("rank ", number, " has ", queues, " queue pairs on each rail, rank ", rank, " has ", options_.queues);
    if (rails < 1 || rails > 256) fail("the description of rank ", number, " has ", rails, " rails");
    std::vector<RailDescription> there;
    for (uint32_t rail = 0; rail < rails; ++rail) there.push_back(text.take<RailDescription>());
    std::vector<QueueDescription> others;
    for (uint32_t i = 0; i < rails * queues; ++i) others.push_back(text.take<QueueDescription>());
    text.end();
    // if one rank has more rails than the other, its last ones stay idle
    for (size_t i = 0; i < std::min(others.size(), peer.queues.size()); ++i) {
      connect_queue(*peer.queues[i], there[peer.queues[i]->rail], others[i]);
      peer.connected.push_back(peer.queues[i].get());
    }
    return 0;
  });
}

void VerbsTransport::connect_queue(Queue& queue, const RailDescription& there, const QueueDescription& other) {
  const Rail& rail = rails_[queue.rail];
  if (there.link_layer != rail.attributes.link_layer)
    fail("RDMA device ", rail.name, " and the peer's are not both InfiniBand or both RoCE");
  bool ethernet = rail.attributes.link_layer == IBV_LINK_LAYER_ETHERNET;
  bool other_subnet = rail.gid.global.subnet_prefix != there.gid.global.subnet_prefix;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = std::min(rail.attributes.active_mtu, static_cast<ibv_mtu>(there.mtu));
  attributes.dest_qp_num = other.number;
  attributes.rq_psn = other.first_packet;
  attributes.max_dest_rd_atomic = 1;
  attributes.min_rnr_timer = 12;
  attributes.ah_attr.port_num = static_cast<uint8_t>(rail.port);
  attributes.ah_attr.dlid = there.lid;
  attributes.ah_attr.is_global = ethernet || other_subnet || there.lid == 0;
  attributes.ah_attr.grh.dgid = there.gid;
  attributes.ah_attr.grh.sgid_index = static_cast<uint8_t>(rail.gid_index);
  attributes.ah_attr.grh.hop_limit = kHopLimit;
  attributes.ah_attr.grh.traffic_class = static_cast<uint8_t>(options_.traffic_class);
  move_queue(queue.pair.get(), attributes,
             IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                 IBV_QP_MIN_RNR_TIMER,
             "ready to receive", rail);
  attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = retry_exponent(options_.peer_timeout);
  attributes.retry_cnt = kRetries;
  attributes.rnr_retry = 7;
  attributes.sq_psn = queue.first_packet;
  attributes.max_rd_atomic = 1;
  move_queue(queue.pair.get(), attributes,
             IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
             "ready to send", rail);
}

VerbsTransport::Peer& VerbsTransport::known(uint32_t number) {
  auto it = peers_.find(number);
  if (it == peers_.end()) fail("rank ", rank, " is not connected to rank ", number);
  return *it->second;
}

void VerbsTransport::learn_segment(uint32_t number, uint32_t segment, const std::string& description) {
  RdmaBase::learn_segment(number, segment, description);
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = peers_.find(number);
  if (it != peers_.end()) it->second->highest.erase(segment);  // other memory, whose signals are low again
}

void VerbsTransport::add(Queue& queue, const Remote& remote, uint64_t target, uint64_t size) {
  queue.waiting.emplace_back();
  Write& write = queue.waiting.back();
  write.part.length = static_cast<uint32_t>(size);
  write.work.wr_id = queue.written++;
  write.work.opcode = IBV_WR_RDMA_WRITE;
  write.work.num_sge = 1;
  write.work.wr.rdma.remote_addr = remote.base + target;
  write.work.wr.rdma.rkey = remote.keys[queue.rail];
}

bool VerbsTransport::post(const Request& request) {
  return guarded([&] {
    Peer& peer = known(request.peer);
    if (peer.connected.empty()) fail("rank ", rank, " is not connected to rank ", request.peer);
    auto source = source_of(request);
    const Remote& remote = target_of(request);
    Queue& queue = *peer.connected[(request.signal / sizeof(int64_t) + request.segment) % peer.connected.size()];
    if (remote.keys.size() <= queue.rail) fail("rank ", peer.rank, " described a segment without rail ", queue.rail);
    uint64_t largest = std::min<uint64_t>(kLargestWrite, rails_[queue.rail].attributes.max_msg_sz);
    uint64_t writes = (request.bytes + largest - 1) / largest + 1;
    if (writes > kQueueDepth) fail(request.bytes, " bytes are too many for one request");
    if (queue.written - queue.completed + writes > kQueueDepth) return false;
    for (uint64_t done = 0; done < request.bytes; done += largest) {
      add(queue, remote, request.target + done, std::min(largest, request.bytes - done));
      Write& write = queue.waiting.back();
      write.part.addr = reinterpret_cast<uintptr_t>(source->base + request.source + done);
      write.part.lkey = source->regions[queue.rail]->lkey;
    }
    add(queue, remote, request.signal, sizeof(int64_t));
    Write& signal = queue.waiting.back();
    auto highest = peer.highest[request.segment].try_emplace(request.signal, request.value).first;
    signal.value = highest->second = std::max(highest->second, request.value);
    signal.work.send_flags = IBV_SEND_INLINE;
    if (++queue.unsignalled >= kRequestsPerSignal) {
      signal.work.send_flags |= IBV_SEND_SIGNALED;
      queue.unsignalled = 0;
    }
    queue.flights.push_back({request.ticket, signal.work.wr_id, std::move(source)});
    ++peer.in_flight;
    return true;
  });
}

void VerbsTransport::flush(Peer& peer, Queue& queue) {
  if (queue.waiting.empty()) return;
  for (size_t i = 0; i < queue.waiting.size(); ++i) {  // now that they do not move any more
    Write& write = queue.waiting[i];
    if (write.work.send_flags & IBV_SEND_INLINE) write.part.addr = reinterpret_cast<uintptr_t>(&write.value);
    write.work.sg_list = &write.part;
    write.work.next = i + 1 < queue.waiting.size() ? &queue.waiting[i + 1].work : nullptr;
  }
  queue.waiting.back().work.send_flags |= IBV_SEND_SIGNALED;
  queue.unsignalled = 0;
  ibv_send_wr* refused = nullptr;
  if (int problem = ibv_post_send(queue.pair.get(), &queue.waiting.front().work, &refused))
    fail("rank ", peer.rank, ": ", rails_[queue.rail].name, " does not take a write: ", errno_text(problem));
  queue.waiting.clear();
}

bool VerbsTransport::poll(std::vector<int64_t>& completed) {
  return guarded([&] {
    bool any = false;
    for (auto& [number, peer] : peers_) {
      if (peer->in_flight == 0) continue;
      for (Queue* queue : peer->connected) flush(*peer, *queue);
      for (size_t rail = 0; rail < rails_.size(); ++rail) any |= collect(*peer, rail, completed);
    }
    return any;
  });
}

bool VerbsTransport::collect(Peer& peer, size_t rail, std::vector<int64_t>& completed) {
  ibv_wc completions[kCompletionsAtOnce];
  int count = ibv_poll_cq(peer.completions[rail].get(), kCompletionsAtOnce, completions);
  if (count < 0) fail("rank ", peer.rank, ": completions of ", rails_[rail].name, " cannot be read");
  for (int i = 0; i < count; ++i) {
    const ibv_wc& completion = completions[i];
    if (completion.status != IBV_WC_SUCCESS)
      fail("rank ", peer.rank, ", by ", rails_[rail].name, ", queue pair ", completion.qp_num, ": ",
           reason_of(completion));
    for (Queue* queue : peer.connected) {
      if (queue->rail != rail || queue->pair->qp_num != completion.qp_num) continue;
      queue->completed = completion.wr_id + 1;
      while (!queue->flights.empty() && queue->flights.front().last <= completion.wr_id) {
        completed.push_back(queue->flights.front().ticket);
        queue->flights.pop_front();
        --peer.in_flight;
      }
    }
  }
  return count > 0;
}

}  // namespace

std::shared_ptr<RdmaTransport> make_verbs_transport(const RdmaOptions& options) {
  return std::make_shared<VerbsTransport>(options);
}

#else

std::shared_ptr<RdmaTransport> make_verbs_transport(const RdmaOptions&) {
  fail_without_headers("verbs", "infiniband/verbs.h");
}

#endif

}  // namespace mkernel
