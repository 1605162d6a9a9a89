// The efa transport: RDMA writes over AWS's Elastic Fabric Adapter, whose datagrams (SRD) are reliable but
// unordered.
//
// A request is cut into fragments, written to the peer with an immediate over all rails, and announced
// by a small message; the receiving proxy counts and raises the signal (counting.h). There is one queue pair on each
// rail for all peers, with a random key that only the ranks of the job know.
//
// Devices must support RDMA writes, which the first generations do not. Old headers have no name for the
// capability bit, so its number is written here. A library that is too old fails when the queue pair is created.
//
// Data in GPU memory takes another path than the completion that announces it, so it is made visible before the
// signal is raised.
#include "counting.h"
#include "rdma.h"
#include "rdma_base.h"

#if MKERNEL_HAS_VERBS && __has_include(<infiniband/efadv.h>)
#include <infiniband/efadv.h>
#define MKERNEL_HAS_EFA 1
#else
#define MKERNEL_HAS_EFA 0
#endif

#if MKERNEL_HAS_EFA

#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <random>

#include "cuda.h"
#include "copy_queue.h"

namespace mkernel {
namespace {

constexpr uint32_t kEfaMagic = 0x4146'456D;    // "mEFA"
constexpr uint32_t kCanWrite = 1 << 3;         // EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE of newer headers
constexpr uint32_t kSendDepth = 512;           // writes on their way, on one rail
constexpr uint32_t kReceiveDepth = 1024;
static_assert(kReceiveDepth <= kMostWaiting);
constexpr uint64_t kSplitFrom = 64 << 10;      // smaller fragments are not worth another rail
constexpr int kEventsAtOnce = 32;
constexpr uint64_t kIsReceive = uint64_t{1} << 63;
constexpr uint64_t kSlots = 1 << 16;  // wr_id of what is sent: message * kSlots + slot of the announcement + 1

struct EfaLibrary {
  int (*query_device)(ibv_context*, efadv_device_attr*, uint32_t);
  ibv_qp* (*create_qp_ex)(ibv_context*, ibv_qp_init_attr_ex*, efadv_qp_init_attr*, uint32_t);

  explicit EfaLibrary(const std::string& path) {
    void* handle = open_library(path, "ibverbs-providers");
    query_device = reinterpret_cast<decltype(query_device)>(find_function(handle, path, "efadv_query_device"));
    create_qp_ex = reinterpret_cast<decltype(create_qp_ex)>(find_function(handle, path, "efadv_create_qp_ex"));
  }
};

struct EfaAddress {
  ibv_gid gid;
  uint32_t number;
  uint32_t key;
};

class EfaTransport : public RdmaBase {
 public:
  explicit EfaTransport(const RdmaOptions& options);
  ~EfaTransport() override { EfaTransport::stop(std::chrono::milliseconds(0)); }

  std::string describe(uint32_t peer) override;
  void connect(uint32_t peer, const std::string& description) override;
  bool post(const Request& request) override;
  bool poll(std::vector<int64_t>& completed) override;
  Counts counts(uint32_t peer) override;

 protected:
  bool signals_by_host() const override { return true; }
  void abandon() override {
    endpoints_.clear();  // queue pairs first
    peers_.clear();
    messages_.clear();
  }

 private:
  struct Work {
    uint64_t id = 0;
    bool announcement = false;
    ibv_ah* to = nullptr;
    uint32_t number = 0, key = 0;  // the peer's queue pair
    uint64_t address = 0;
    uint32_t bytes = 0, local_key = 0;
    uint64_t remote_address = 0;
    uint32_t remote_key = 0, label = 0;
  };
  // On pages of their own: libibverbs may keep pages with registered memory from forked children.
  class Announcements {
   public:
    void allocate(uint32_t count) {
      auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
      bytes_ = (count * sizeof(Announcement) + page - 1) / page * page;
      memory_.reset(static_cast<Announcement*>(std::aligned_alloc(page, bytes_)));
      if (!memory_) fail("no memory for ", count, " announcements");
      std::memset(static_cast<void*>(memory_.get()), 0, bytes_);
    }
    Announcement& operator[](size_t slot) { return memory_.get()[slot]; }
    Announcement* data() { return memory_.get(); }
    size_t bytes() const { return bytes_; }

   private:
    std::unique_ptr<Announcement, decltype(&std::free)> memory_{nullptr, std::free};
    size_t bytes_ = 0;
  };
  // The state of one rail.
  struct Endpoint {
    Announcements sent, received;
    std::vector<uint32_t> free;  // slots of `sent`
    Owned<ibv_mr> sent_region{nullptr, nullptr}, received_region{nullptr, nullptr};
    Owned<ibv_cq> completions{nullptr, nullptr};
    Owned<ibv_qp> pair{nullptr, nullptr};
    ibv_qp_ex* extended = nullptr;
    uint32_t key = 0;
    uint32_t depth = 0;
    uint64_t largest = 0;
    std::vector<Work> waiting;
    uint32_t under_way = 0;  // with those that wait
  };
  struct Peer {
    explicit Peer(uint32_t self) : labels(self) {}
    struct Route {
      Owned<ibv_ah> handle{nullptr, nullptr};
      uint32_t number = 0, key = 0;
    };
    std::vector<Route> routes;  // by rail
    Labels labels;
    uint64_t sent = 0, arrived = 0;
  };
  struct Message {
    int64_t ticket;
    uint32_t peer;
    uint32_t label;
    uint64_t left;  // writes that were not acknowledged
    std::shared_ptr<Registered> source;
  };

  Endpoint open_endpoint(Rail& rail, const EfaLibrary& efa);
  void post_receives(Endpoint& endpoint, const std::vector<uint32_t>& slots);
  void flush(size_t rail);
  bool collect(size_t rail, std::vector<int64_t>& completed);
  void acknowledged(Endpoint& endpoint, uint64_t id, std::vector<int64_t>& completed);
  void arrived(Endpoint& endpoint, const ibv_wc& event, uint32_t slot);
  Peer& known(uint32_t peer);

  std::map<uint32_t, std::unique_ptr<Peer>> peers_;
  std::unordered_map<uint64_t, Message> messages_;
  std::vector<Endpoint> endpoints_;  // by rail
  Tally tally_;
  uint64_t next_message_ = 0;
  size_t cursor_ = 0;
};

EfaTransport::EfaTransport(const RdmaOptions& options) : RdmaBase(options) {
  EfaLibrary efa(options.efa_library);
  if (library_.qp_to_qp_ex == nullptr) fail(options.library, " has no ibv_qp_to_qp_ex: it is too old");
  for (Rail& rail : rails_) endpoints_.push_back(open_endpoint(rail, efa));
}

EfaTransport::Endpoint EfaTransport::open_endpoint(Rail& rail, const EfaLibrary& efa) {
  efadv_device_attr abilities{};
  if (int problem = efa.query_device(rail.context.get(), &abilities, sizeof(abilities)))
    fail("RDMA device ", rail.name, " is not an EFA device: ", errno_text(problem));
  if ((abilities.device_caps & kCanWrite) == 0)
    fail("EFA device ", rail.name, " cannot do RDMA writes (its abilities are ", hex_text(abilities.device_caps),
         "): newer instances can, if the kernel's efa module and libefa know of it too");
  if (abilities.max_rdma_size == 0) fail("EFA device ", rail.name, " says that its RDMA writes have no bytes");
  Endpoint endpoint;
  endpoint.largest = abilities.max_rdma_size;
  endpoint.depth = std::min(kSendDepth, abilities.max_sq_wr);
  uint32_t receives = std::min(kReceiveDepth, abilities.max_rq_wr);
  auto entries = static_cast<int>(std::min<uint64_t>(endpoint.depth + receives, static_cast<uint64_t>(rail.limits.max_cqe)));
  endpoint.completions = {library_.create_cq(rail.context.get(), entries, nullptr, nullptr, 0), library_.destroy_cq};
  if (!endpoint.completions) fail("EFA device ", rail.name, ": no completion queue: ", errno_text());
  ibv_qp_init_attr_ex init{};
  init.send_cq = init.recv_cq = endpoint.completions.get();
  init.qp_type = IBV_QPT_DRIVER;
  init.sq_sig_all = 1;
  init.cap.max_send_wr = endpoint.depth;
  init.cap.max_recv_wr = receives;
  init.cap.max_send_sge = init.cap.max_recv_sge = 1;
  init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  init.pd = rail.domain.get();
  init.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_SEND;
  efadv_qp_init_attr kind{};
  kind.driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD;
  endpoint.pair = {efa.create_qp_ex(rail.context.get(), &init, &kind, sizeof(kind)), library_.destroy_qp};
  if (!endpoint.pair)
    fail("EFA device ", rail.name, ": no queue pair for RDMA writes: ", errno_text(),
         errno == EOPNOTSUPP ? "; libefa is too old for them" : "");
  endpoint.extended = library_.qp_to_qp_ex(endpoint.pair.get());
  endpoint.key = std::random_device{}();
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = static_cast<uint8_t>(rail.port);
  attributes.qkey = endpoint.key;
  move_queue(endpoint.pair.get(), attributes, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, "initialised", rail);
  attributes = {};
  attributes.qp_state = IBV_QPS_RTR;
  move_queue(endpoint.pair.get(), attributes, 0, "ready to receive", rail);
  attributes.qp_state = IBV_QPS_RTS;
  move_queue(endpoint.pair.get(), attributes, IBV_QP_SQ_PSN, "ready to send", rail);
  endpoint.sent.allocate(endpoint.depth);
  endpoint.received.allocate(receives);
  auto region = [&](Announcements& memory) {
    return Owned<ibv_mr>(register_memory(rail, memory.data(), memory.bytes()), library_.dereg_mr);
  };
  endpoint.sent_region = region(endpoint.sent);
  endpoint.received_region = region(endpoint.received);
  for (uint32_t slot = 0; slot < endpoint.depth; ++slot) endpoint.free.push_back(slot);
  std::vector<uint32_t> all(receives);
  for (uint32_t slot = 0; slot < receives; ++slot) all[slot] = slot;
  post_receives(endpoint, all);
  return endpoint;
}

void EfaTransport::post_receives(Endpoint& endpoint, const std::vector<uint32_t>& slots) {
  if (slots.empty()) return;
  std::vector<ibv_recv_wr> works(slots.size());
  std::vector<ibv_sge> parts(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    parts[i].addr = reinterpret_cast<uintptr_t>(&endpoint.received[slots[i]]);
    parts[i].length = sizeof(Announcement);
    parts[i].lkey = endpoint.received_region->lkey;
    works[i].wr_id = kIsReceive | slots[i];
    works[i].sg_list = &parts[i];
    works[i].num_sge = 1;
    works[i].next = i + 1 < slots.size() ? &works[i + 1] : nullptr;
  }
  ibv_recv_wr* refused = nullptr;
  if (int problem = ibv_post_recv(endpoint.pair.get(), works.data(), &refused))
    fail("receive buffers are not taken: ", errno_text(problem));
}

std::string EfaTransport::describe(uint32_t) {
  return guarded([&] {
    Description text;
    text.put(kEfaMagic);
    text.put(static_cast<uint32_t>(rails_.size()));
    for (size_t rail = 0; rail < rails_.size(); ++rail)
      text.put(EfaAddress{rails_[rail].gid, endpoints_[rail].pair->qp_num, endpoints_[rail].key});
    return text.bytes();
  });
}

void EfaTransport::connect(uint32_t number, const std::string& description) {
  guarded([&] {
    auto& peer = peers_[number];
    if (peer) fail("rank ", rank, " is connected to rank ", number, " already");
    peer = std::make_unique<Peer>(static_cast<uint32_t>(rank));
    Description text(description, words("rank ", number));
    if (text.take<uint32_t>() != kEfaMagic) fail("rank ", number, " does not use the efa transport");
    auto rails = text.take<uint32_t>();
    if (rails < 1 || rails > 256) fail("the description of rank ", number, " has ", rails, " rails");
    for (uint32_t i = 0; i < rails; ++i) {
      auto address = text.take<EfaAddress>();
      if (i >= rails_.size()) continue;
      ibv_ah_attr attributes{};
      attributes.is_global = 1;
      attributes.port_num = static_cast<uint8_t>(rails_[i].port);
      attributes.grh.dgid = address.gid;
      attributes.grh.sgid_index = static_cast<uint8_t>(rails_[i].gid_index);
      Peer::Route route;
      route.handle = {library_.create_ah(rails_[i].domain.get(), &attributes), library_.destroy_ah};
      if (!route.handle) fail("EFA device ", rails_[i].name, " has no way to rank ", number, ": ", errno_text());
      route.number = address.number;
      route.key = address.key;
      peer->routes.push_back(std::move(route));
    }
    text.end();
    return 0;
  });
}

EfaTransport::Peer& EfaTransport::known(uint32_t number) {
  auto it = peers_.find(number);
  if (it == peers_.end()) fail("rank ", rank, " is not connected to rank ", number);
  return *it->second;
}

bool EfaTransport::post(const Request& request) {
  return guarded([&] {
    Peer& peer = known(request.peer);
    auto source = source_of(request);
    const Remote& remote = target_of(request);
    size_t rails = std::min(peer.routes.size(), remote.keys.size());
    uint64_t largest = endpoints_[0].largest;
    for (size_t rail = 0; rail < rails; ++rail) largest = std::min(largest, endpoints_[rail].largest);
    auto parts = [&](uint64_t size) { return (request.bytes + size - 1) / size; };
    uint64_t fragments = std::max(parts(largest), std::min<uint64_t>(rails, parts(kSplitFrom)));
    uint64_t each = (fragments + rails) / rails;  // writes on one rail, at most
    if (each > endpoints_[0].depth) fail(request.bytes, " bytes are too many for one request");
    if (!peer.labels.has_space()) return false;
    for (size_t rail = 0; rail < rails; ++rail)
      if (endpoints_[rail].under_way + each > endpoints_[rail].depth) return false;

    ++peer.sent;
    uint64_t message = next_message_++;
    uint32_t label = peer.labels.begin();
    auto add = [&](size_t rail) -> Work& {
      Endpoint& endpoint = endpoints_[rail];
      ++endpoint.under_way;
      endpoint.waiting.emplace_back();
      Work& work = endpoint.waiting.back();
      work.id = message * kSlots;
      work.to = peer.routes[rail].handle.get();
      work.number = peer.routes[rail].number;
      work.key = peer.routes[rail].key;
      work.label = label;
      return work;
    };
    uint64_t done = 0;
    for (uint64_t fragment = 0; fragment < fragments; ++fragment) {
      uint64_t size = (request.bytes - done) / (fragments - fragment);
      size_t rail = cursor_++ % rails;
      Work& work = add(rail);
      work.address = reinterpret_cast<uintptr_t>(source->base + request.source + done);
      work.bytes = static_cast<uint32_t>(size);
      work.local_key = source->regions[rail]->lkey;
      work.remote_address = remote.base + request.target + done;
      work.remote_key = remote.keys[rail];
      done += size;
    }
    size_t rail = cursor_++ % rails;
    Endpoint& endpoint = endpoints_[rail];
    uint32_t slot = endpoint.free.back();
    endpoint.free.pop_back();
    Announcement& announcement = endpoint.sent[slot];
    announcement.label = label;
    announcement.fragments = static_cast<uint32_t>(fragments);
    announcement.segment = request.segment;
    announcement.signal = request.signal;
    announcement.value = request.value;
    Work& work = add(rail);
    work.id += slot + 1;
    work.announcement = true;
    work.address = reinterpret_cast<uintptr_t>(&announcement);
    work.bytes = sizeof(Announcement);
    work.local_key = endpoint.sent_region->lkey;
    messages_.emplace(message, Message{request.ticket, request.peer, label, fragments + 1, std::move(source)});
    return true;
  });
}

void EfaTransport::flush(size_t rail) {
  Endpoint& endpoint = endpoints_[rail];
  if (endpoint.waiting.empty()) return;
  ibv_qp_ex* queue = endpoint.extended;
  ibv_wr_start(queue);
  for (const Work& work : endpoint.waiting) {
    queue->wr_id = work.id;
    queue->wr_flags = IBV_SEND_SIGNALED;
    if (work.announcement)
      ibv_wr_send(queue);
    else
      ibv_wr_rdma_write_imm(queue, work.remote_key, work.remote_address, htonl(work.label));
    ibv_wr_set_sge(queue, work.local_key, work.address, work.bytes);
    ibv_wr_set_ud_addr(queue, work.to, work.number, work.key);
  }
  if (int problem = ibv_wr_complete(queue))
    fail("EFA device ", rails_[rail].name, " does not take what is to be sent: ", errno_text(problem));
  endpoint.waiting.clear();
}

bool EfaTransport::poll(std::vector<int64_t>& completed) {
  return guarded([&] {
    bool any = false;
    for (size_t rail = 0; rail < endpoints_.size(); ++rail) {
      flush(rail);
      any |= collect(rail, completed);
    }
    return any;
  });
}

Transport::Counts EfaTransport::counts(uint32_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  usable();
  Peer& peer = known(number);
  return {peer.sent, peer.arrived};
}

bool EfaTransport::collect(size_t rail, std::vector<int64_t>& completed) {
  Endpoint& endpoint = endpoints_[rail];
  ibv_wc events[kEventsAtOnce];
  int count = ibv_poll_cq(endpoint.completions.get(), kEventsAtOnce, events);
  if (count < 0) fail("completions of EFA device ", rails_[rail].name, " cannot be read");
  std::vector<uint32_t> slots;
  for (int i = 0; i < count; ++i) {
    const ibv_wc& event = events[i];
    bool receive = (event.wr_id & kIsReceive) != 0;
    if (event.status != IBV_WC_SUCCESS) {
      auto it = messages_.find(event.wr_id / kSlots);
      std::string who = receive || it == messages_.end() ? "" : words("rank ", it->second.peer, ", ");
      fail(who, "by ", rails_[rail].name, ": ", reason_of(event));
    }
    if (receive) {
      auto slot = static_cast<uint32_t>(event.wr_id & ~kIsReceive);
      arrived(endpoint, event, slot);
      slots.push_back(slot);
    } else {
      acknowledged(endpoint, event.wr_id, completed);
    }
  }
  post_receives(endpoint, slots);
  return count > 0;
}

void EfaTransport::acknowledged(Endpoint& endpoint, uint64_t id, std::vector<int64_t>& completed) {
  --endpoint.under_way;
  if (id % kSlots != 0) endpoint.free.push_back(static_cast<uint32_t>(id % kSlots - 1));
  auto it = messages_.find(id / kSlots);
  if (it == messages_.end()) fail("a message was acknowledged that is not under way");
  Message& message = it->second;
  if (--message.left > 0) return;
  known(message.peer).labels.finish(message.label);
  completed.push_back(message.ticket);
  messages_.erase(it);
}

void EfaTransport::arrived(Endpoint& endpoint, const ibv_wc& event, uint32_t slot) {
  std::optional<Announcement> whole;
  uint32_t label;
  if (event.opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
    label = ntohl(event.imm_data);
    known(sender_of(label));
    whole = tally_.fragment(label);
  } else {
    if (event.opcode != IBV_WC_RECV || event.byte_len != sizeof(Announcement))
      fail("something arrived that is neither a fragment nor an announcement");
    const Announcement& announcement = endpoint.received[slot];
    known(sender_of(announcement.label));
    segments->pin_signal(announcement.segment, announcement.signal);  // refused now, whoever is missing
    whole = tally_.announce(announcement);
  }
  if (!whole) return;
  ++known(sender_of(whole->label)).arrived;
  auto it = registered_.find(whole->segment);
  if (it != registered_.end() && it->second->device >= 0) show_device_writes(it->second->device);
  CompletionToken token = raise_signal(segments->pin_signal(whole->segment, whole->signal), whole->value);
  if (token.copy_queue != nullptr) token.copy_queue->flush();
}

}  // namespace

std::shared_ptr<RdmaTransport> make_efa_transport(const RdmaOptions& options) {
  return std::make_shared<EfaTransport>(options);
}

}  // namespace mkernel

#else

namespace mkernel {

std::shared_ptr<RdmaTransport> make_efa_transport(const RdmaOptions&) {
  fail_without_headers("efa", "infiniband/efadv.h");
}

}  // namespace mkernel

#endif
