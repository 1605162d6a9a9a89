// A stand-in for libibverbs and libefa on machines without RDMA devices, and a strict one.
//
// Its devices are all in this process. What is posted waits, and is carried out when somebody polls, a
// random part at a time: in order on each reliable connection, in no order at all between connections and
// on SRD queue pairs. Sources are read only then; memory that is not registered is refused; queues that
// overflow end the program.
//
// fake_control(what, value) makes things go wrong; see Controls.
#include <infiniband/efadv.h>
#include <infiniband/verbs.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include <arpa/inet.h>
#include <sys/stat.h>

#define MUST(condition)                                                            \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "fake verbs, line %d: not so: %s\n", __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

namespace {

constexpr uint32_t kCanWrite = 1 << 3;
constexpr int kStepsPerPoll = 6;

struct Controls {
  int64_t seed = 1;
  int64_t silent = 0;           // nothing is carried out, and senders hear so
  int64_t hold = 0;             // nothing is carried out, and nobody hears anything
  int64_t refuse_memory = 0;    // an errno for all registrations by address
  int64_t refuse_dmabuf = 0;    // and by dma-buf
  int64_t dmabufs = 0;          // registrations by dma-buf
  int64_t fail_after = -1;      // so many writes, then one fails with fail_status
  int64_t fail_status = IBV_WC_RETRY_EXC_ERR;
  int64_t writes = 0;           // counted, as are:
  int64_t posts = 0;            // lists handed over
  int64_t told = 0;             // completions of what was sent
  int64_t objects = 0;          // that were made and not given back
};

struct Device {
  ibv_device base{};
  bool efa = false, active = true;
  uint32_t abilities = 0;
  uint8_t link_layer = IBV_LINK_LAYER_ETHERNET;
  ibv_gid gid{};
};

struct Context : ibv_context {
  Device* owner = nullptr;
};

struct Completions : ibv_cq {
  std::deque<ibv_wc> events;
};

struct Region : ibv_mr {};

struct Handle : ibv_ah {
  ibv_gid to{};
};

struct Work {
  uint64_t id = 0;
  ibv_wr_opcode kind{};
  bool signalled = false, inlined = false;
  std::vector<uint8_t> bytes;  // if inlined
  uint64_t address = 0;
  uint32_t length = 0, local_key = 0;
  uint64_t remote_address = 0;
  uint32_t remote_key = 0, immediate = 0;
  const Handle* to = nullptr;
  uint32_t to_number = 0, to_key = 0;
};

struct Receive {
  uint64_t id;
  uint64_t address;
  uint32_t length, local_key;
};

struct Pair {
  ibv_qp_ex extended{};  // its first part is the ibv_qp
  Device* owner = nullptr;
  Completions *sends = nullptr, *receives = nullptr;
  bool srd = false, all_signalled = false, broken = false;
  ibv_qp_cap limits{};
  uint32_t peer = 0, key = 0;
  std::vector<Work> building;
  std::deque<Work> work;
  std::deque<Receive> posted;
  std::deque<uint64_t> held;  // places of the send queue, by the work's id, in order
};

struct State {
  std::mutex mutex;
  Controls controls;
  std::mt19937_64 random{1};
  std::vector<Device> devices;
  std::map<uint32_t, Pair*> pairs;
  std::map<uint32_t, Region*> regions;  // by key
  uint32_t next = 100;

  State() {
    auto add = [&](const char* name, bool efa, bool active, uint32_t abilities, uint8_t layer) {
      Device device;
      std::strncpy(device.base.name, name, sizeof(device.base.name) - 1);
      device.efa = efa;
      device.active = active;
      device.abilities = abilities;
      device.link_layer = layer;
      device.gid.raw[15] = static_cast<uint8_t>(devices.size() + 1);
      devices.push_back(device);
    };
    add("fake0", false, true, 0, IBV_LINK_LAYER_ETHERNET);
    add("fake1", false, true, 0, IBV_LINK_LAYER_ETHERNET);
    add("fakeib", false, true, 0, IBV_LINK_LAYER_INFINIBAND);
    add("down0", false, false, 0, IBV_LINK_LAYER_ETHERNET);
    add("efa0", true, true, kCanWrite | 1, IBV_LINK_LAYER_UNSPECIFIED);
    add("efa1", true, true, kCanWrite | 1, IBV_LINK_LAYER_UNSPECIFIED);
    add("oldefa0", true, true, 1, IBV_LINK_LAYER_UNSPECIFIED);
  }
};

State& state() {
  static auto* shared = new State;
  return *shared;
}

using Lock = std::lock_guard<std::mutex>;

Pair* pair_of(ibv_qp* queue) { return reinterpret_cast<Pair*>(queue); }
Pair* pair_of(ibv_qp_ex* queue) { return reinterpret_cast<Pair*>(queue); }

void push(Completions* queue, const ibv_wc& event) {
  MUST(static_cast<int>(queue->events.size()) < queue->cqe);
  queue->events.push_back(event);
}

const Region* region_of(uint32_t key, uint64_t address, uint64_t size) {
  auto it = state().regions.find(key);
  if (it == state().regions.end()) return nullptr;
  auto begin = reinterpret_cast<uint64_t>(it->second->addr);
  return address >= begin && size <= it->second->length && address - begin <= it->second->length - size ? it->second
                                                                                                         : nullptr;
}

void place(uint64_t address, const uint8_t* bytes, uint64_t size) {
  if (size == 8 && address % 8 == 0) {  // a signal: whole, and after what came before
    int64_t value;
    std::memcpy(&value, bytes, 8);
    __atomic_store_n(reinterpret_cast<int64_t*>(address), value, __ATOMIC_RELEASE);
  } else {
    std::memcpy(reinterpret_cast<void*>(address), bytes, size);
  }
}

ibv_wc event_of(const Pair& pair, uint64_t id, ibv_wc_status status) {
  ibv_wc event{};
  event.wr_id = id;
  event.status = status;
  event.qp_num = pair.extended.qp_base.qp_num;
  event.opcode = IBV_WC_RDMA_WRITE;
  event.vendor_err = status == IBV_WC_SUCCESS ? 0 : 0x81;
  return event;
}

// What is done with the work: it leaves the queue, and is told of if that was asked for.
void told(Pair& pair, const Work& work, ibv_wc_status status) {
  if (status != IBV_WC_SUCCESS || work.signalled || pair.all_signalled) {
    ++state().controls.told;
    push(pair.sends, event_of(pair, work.id, status));
  }
  if (status != IBV_WC_SUCCESS && !pair.broken) {
    pair.broken = true;
    std::deque<Work> rest;
    rest.swap(pair.work);
    for (const Work& other : rest) push(pair.sends, event_of(pair, other.id, IBV_WC_WR_FLUSH_ERR));
  }
}

// Carry out one work of a queue pair. False: it cannot be done yet.
bool carry_out(Pair& pair, size_t index) {
  Controls& controls = state().controls;
  Work work = pair.work[index];
  auto finish = [&](ibv_wc_status status) {
    pair.work.erase(pair.work.begin() + static_cast<std::ptrdiff_t>(index));
    told(pair, work, status);
    return true;
  };
  if (controls.silent) return finish(IBV_WC_RETRY_EXC_ERR);
  if (controls.fail_after >= 0 && controls.writes >= controls.fail_after)
    return finish(static_cast<ibv_wc_status>(controls.fail_status));
  auto it = state().pairs.find(pair.srd ? work.to_number : pair.peer);
  if (it == state().pairs.end()) return finish(IBV_WC_RETRY_EXC_ERR);
  Pair& other = *it->second;
  if (pair.srd) {
    MUST(other.srd);
    if (std::memcmp(&work.to->to, &other.owner->gid, 16) != 0 || work.to_key != other.key)
      return finish(IBV_WC_RESP_TIMEOUT_ERR);
  } else if (other.peer != pair.extended.qp_base.qp_num) {
    return finish(IBV_WC_RETRY_EXC_ERR);
  }
  std::vector<uint8_t> bytes = work.bytes;
  if (!work.inlined && work.length > 0) {
    if (region_of(work.local_key, work.address, work.length) == nullptr) return finish(IBV_WC_LOC_PROT_ERR);
    auto* begin = reinterpret_cast<const uint8_t*>(work.address);
    bytes.assign(begin, begin + work.length);
  }
  bool receives = work.kind != IBV_WR_RDMA_WRITE;
  if (receives && other.posted.empty()) return false;
  if (work.kind != IBV_WR_SEND && !bytes.empty()) {
    if (region_of(work.remote_key, work.remote_address, bytes.size()) == nullptr) return finish(IBV_WC_REM_ACCESS_ERR);
    place(work.remote_address, bytes.data(), bytes.size());
  }
  if (receives) {
    Receive receive = other.posted.front();
    other.posted.pop_front();
    ibv_wc event = event_of(other, receive.id, IBV_WC_SUCCESS);
    event.opcode = work.kind == IBV_WR_SEND ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM;
    event.byte_len = static_cast<uint32_t>(bytes.size());
    if (work.kind == IBV_WR_SEND) {
      MUST(bytes.size() <= receive.length && region_of(receive.local_key, receive.address, bytes.size()) != nullptr);
      std::memcpy(reinterpret_cast<void*>(receive.address), bytes.data(), bytes.size());
    } else {
      event.wc_flags = IBV_WC_WITH_IMM;
      event.imm_data = work.immediate;
    }
    push(other.receives, event);
  }
  ++controls.writes;
  return finish(IBV_WC_SUCCESS);
}

// Some of all that waits, anywhere.
void step() {
  std::vector<Pair*> busy;
  if (state().controls.hold) return;
  for (auto& [number, pair] : state().pairs)
    if (!pair->work.empty()) busy.push_back(pair);
  if (busy.empty()) return;
  Pair& pair = *busy[state().random() % busy.size()];
  carry_out(pair, pair.srd ? state().random() % pair.work.size() : 0);
}

void enqueue(Pair& pair, const Work& work) {
  pair.work.push_back(work);
  pair.held.push_back(work.id);
}

int post_send(ibv_qp* queue, ibv_send_wr* work, ibv_send_wr** refused) {
  Lock lock(state().mutex);
  Pair& pair = *pair_of(queue);
  MUST(queue->state == IBV_QPS_RTS);
  ++state().controls.posts;
  for (; work != nullptr; work = work->next) {
    *refused = work;
    if (pair.held.size() >= pair.limits.max_send_wr) return ENOMEM;
    MUST(work->num_sge == 1 && work->opcode == IBV_WR_RDMA_WRITE);
    Work copy;
    copy.id = work->wr_id;
    copy.kind = work->opcode;
    copy.signalled = (work->send_flags & IBV_SEND_SIGNALED) != 0;
    copy.address = work->sg_list->addr;
    copy.length = work->sg_list->length;
    copy.local_key = work->sg_list->lkey;
    if (work->send_flags & IBV_SEND_INLINE) {
      MUST(copy.length <= pair.limits.max_inline_data);
      auto* begin = reinterpret_cast<const uint8_t*>(copy.address);
      copy.inlined = true;
      copy.bytes.assign(begin, begin + copy.length);
    }
    copy.remote_address = work->wr.rdma.remote_addr;
    copy.remote_key = work->wr.rdma.rkey;
    if (pair.broken) {
      push(pair.sends, event_of(pair, copy.id, IBV_WC_WR_FLUSH_ERR));
      continue;
    }
    enqueue(pair, copy);
  }
  return 0;
}

int post_recv(ibv_qp* queue, ibv_recv_wr* work, ibv_recv_wr** refused) {
  Lock lock(state().mutex);
  Pair& pair = *pair_of(queue);
  for (; work != nullptr; work = work->next) {
    *refused = work;
    if (pair.posted.size() >= pair.limits.max_recv_wr) return ENOMEM;
    pair.posted.push_back({work->wr_id, work->sg_list->addr, work->sg_list->length, work->sg_list->lkey});
  }
  return 0;
}

int poll_cq(ibv_cq* base, int most, ibv_wc* out) {
  Lock lock(state().mutex);
  auto* queue = static_cast<Completions*>(base);
  auto steps = state().random() % kStepsPerPoll;
  for (uint64_t i = 0; i < steps; ++i) step();
  int count = 0;
  for (; count < most && !queue->events.empty(); ++count) {
    out[count] = queue->events.front();
    queue->events.pop_front();
    auto it = state().pairs.find(out[count].qp_num);
    if (it == state().pairs.end() || it->second->sends != queue) continue;
    Pair& pair = *it->second;
    if (out[count].opcode == IBV_WC_RECV || out[count].opcode == IBV_WC_RECV_RDMA_WITH_IMM) continue;
    // A place is free when the completion of its work was taken; in order, also when a later one was.
    while (!pair.held.empty()) {
      uint64_t id = pair.held.front();
      pair.held.pop_front();
      if (pair.srd || id == out[count].wr_id) break;
    }
  }
  return count;
}

// the extended interface: a list is built, then posted

void wr_start(ibv_qp_ex* queue) { pair_of(queue)->building.clear(); }
Work& built(ibv_qp_ex* queue) { return pair_of(queue)->building.back(); }
void begin_work(ibv_qp_ex* queue, ibv_wr_opcode kind) {
  Work work;
  work.id = queue->wr_id;
  work.kind = kind;
  work.signalled = (queue->wr_flags & IBV_SEND_SIGNALED) != 0;
  pair_of(queue)->building.push_back(work);
}
void wr_send(ibv_qp_ex* queue) { begin_work(queue, IBV_WR_SEND); }
void wr_rdma_write_imm(ibv_qp_ex* queue, uint32_t key, uint64_t address, __be32 immediate) {
  begin_work(queue, IBV_WR_RDMA_WRITE_WITH_IMM);
  built(queue).remote_key = key;
  built(queue).remote_address = address;
  built(queue).immediate = immediate;
}
void wr_set_sge(ibv_qp_ex* queue, uint32_t key, uint64_t address, uint32_t length) {
  built(queue).local_key = key;
  built(queue).address = address;
  built(queue).length = length;
}
void wr_set_ud_addr(ibv_qp_ex* queue, ibv_ah* handle, uint32_t number, uint32_t key) {
  built(queue).to = static_cast<Handle*>(handle);
  built(queue).to_number = number;
  built(queue).to_key = key;
}
int wr_complete(ibv_qp_ex* queue) {
  Lock lock(state().mutex);
  Pair& pair = *pair_of(queue);
  MUST(queue->qp_base.state == IBV_QPS_RTS);
  ++state().controls.posts;
  for (const Work& work : pair.building) {
    if (pair.held.size() >= pair.limits.max_send_wr) return ENOMEM;
    enqueue(pair, work);
  }
  pair.building.clear();
  return 0;
}

Pair* make_pair(ibv_pd* domain, ibv_cq* sends, ibv_cq* receives, const ibv_qp_cap& limits, bool srd) {
  auto* pair = new Pair;
  ibv_qp& base = pair->extended.qp_base;
  base.context = domain->context;
  base.pd = domain;
  base.send_cq = sends;
  base.recv_cq = receives;
  base.state = IBV_QPS_RESET;
  base.qp_num = state().next++;
  pair->owner = static_cast<Context*>(domain->context)->owner;
  pair->sends = static_cast<Completions*>(sends);
  pair->receives = static_cast<Completions*>(receives);
  pair->limits = limits;
  pair->srd = srd;
  state().pairs[base.qp_num] = pair;
  ++state().controls.objects;
  return pair;
}

template <class Object>
int give_back(Object* object) {
  --state().controls.objects;
  delete object;
  return 0;
}

}  // namespace

#undef ibv_query_port
#undef ibv_reg_mr

extern "C" {

int64_t fake_control(const char* what, int64_t value) {
  Lock lock(state().mutex);
  Controls& controls = state().controls;
  std::map<std::string, int64_t*> all = {
      {"silent", &controls.silent}, {"refuse_memory", &controls.refuse_memory}, {"fail_after", &controls.fail_after},
      {"fail_status", &controls.fail_status}, {"writes", &controls.writes}, {"posts", &controls.posts},
      {"told", &controls.told}, {"hold", &controls.hold},
      {"refuse_dmabuf", &controls.refuse_dmabuf}, {"dmabufs", &controls.dmabufs}, {"objects", &controls.objects}, {"seed", &controls.seed}};
  MUST(all.count(what));
  int64_t old = *all[what];
  if (value != INT64_MIN) *all[what] = value;
  if (std::string(what) == "seed" && value != INT64_MIN) state().random.seed(static_cast<uint64_t>(value));
  return old;
}

ibv_device** ibv_get_device_list(int* count) {
  auto& devices = state().devices;
  auto** list = new ibv_device*[devices.size() + 1]();
  for (size_t i = 0; i < devices.size(); ++i) list[i] = &devices[i].base;
  *count = static_cast<int>(devices.size());
  return list;
}
void ibv_free_device_list(ibv_device** list) { delete[] list; }
const char* ibv_get_device_name(ibv_device* device) { return device->name; }

ibv_context* ibv_open_device(ibv_device* device) {
  Lock lock(state().mutex);
  auto* context = new Context;
  context->owner = reinterpret_cast<Device*>(device);
  context->device = device;
  context->cmd_fd = context->async_fd = -1;
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  context->ops.poll_cq = poll_cq;
  ++state().controls.objects;
  return context;
}
int ibv_close_device(ibv_context* context) {
  Lock lock(state().mutex);
  return give_back(static_cast<Context*>(context));
}
int ibv_query_device(ibv_context*, ibv_device_attr* out) {
  *out = {};
  out->phys_port_cnt = 1;
  out->max_cqe = 1 << 20;
  return 0;
}
int ibv_query_port(ibv_context* context, uint8_t, _compat_ibv_port_attr* raw) {
  auto* out = reinterpret_cast<ibv_port_attr*>(raw);
  Device& device = *static_cast<Context*>(context)->owner;
  out->state = device.active ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
  out->active_mtu = IBV_MTU_1024;
  out->gid_tbl_len = 2;
  out->max_msg_sz = 1 << 20;
  out->lid = device.link_layer == IBV_LINK_LAYER_INFINIBAND ? 7 : 0;
  out->link_layer = device.link_layer;
  return 0;
}
int ibv_query_gid(ibv_context* context, uint8_t, int index, ibv_gid* out) {
  *out = index == 0 ? static_cast<Context*>(context)->owner->gid : ibv_gid{};
  return 0;
}
ibv_pd* ibv_alloc_pd(ibv_context* context) {
  Lock lock(state().mutex);
  ++state().controls.objects;
  auto* domain = new ibv_pd{};
  domain->context = context;
  return domain;
}
int ibv_dealloc_pd(ibv_pd* domain) {
  Lock lock(state().mutex);
  return give_back(domain);
}
static ibv_mr* make_region(ibv_pd* domain, void* address, size_t length, int64_t refusal) {
  if (refusal != 0) {
    errno = static_cast<int>(refusal);
    return nullptr;
  }
  auto* region = new Region;
  region->context = domain->context;
  region->pd = domain;
  region->addr = address;
  region->length = length;
  region->lkey = region->rkey = state().next++;
  state().regions[region->rkey] = region;
  ++state().controls.objects;
  return region;
}
ibv_mr* ibv_reg_mr(ibv_pd* domain, void* address, size_t length, int) {
  Lock lock(state().mutex);
  return make_region(domain, address, length, state().controls.refuse_memory);
}
ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* domain, uint64_t offset, size_t length, uint64_t address, int file, int) {
  Lock lock(state().mutex);
  struct stat about;
  MUST(::fstat(file, &about) == 0 && offset + length <= static_cast<uint64_t>(about.st_size));
  ++state().controls.dmabufs;
  return make_region(domain, reinterpret_cast<void*>(address), length, state().controls.refuse_dmabuf);
}
int ibv_dereg_mr(ibv_mr* region) {
  Lock lock(state().mutex);
  state().regions.erase(region->rkey);
  return give_back(static_cast<Region*>(region));
}
ibv_cq* ibv_create_cq(ibv_context* context, int entries, void*, ibv_comp_channel*, int) {
  Lock lock(state().mutex);
  auto* queue = new Completions;
  queue->context = context;
  queue->cqe = entries;
  ++state().controls.objects;
  return queue;
}
int ibv_destroy_cq(ibv_cq* queue) {
  Lock lock(state().mutex);
  for (auto& [number, pair] : state().pairs) MUST(pair->sends != queue && pair->receives != queue);
  return give_back(static_cast<Completions*>(queue));
}
ibv_qp* ibv_create_qp(ibv_pd* domain, ibv_qp_init_attr* wanted) {
  Lock lock(state().mutex);
  MUST(wanted->qp_type == IBV_QPT_RC);
  Pair* pair = make_pair(domain, wanted->send_cq, wanted->recv_cq, wanted->cap, false);
  pair->all_signalled = wanted->sq_sig_all != 0;
  return &pair->extended.qp_base;
}
ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* queue) { return &pair_of(queue)->extended; }
int ibv_modify_qp(ibv_qp* queue, ibv_qp_attr* wanted, int mask) {
  Lock lock(state().mutex);
  Pair& pair = *pair_of(queue);
  MUST(mask & IBV_QP_STATE);
  if (wanted->qp_state == IBV_QPS_INIT) {
    MUST(queue->state == IBV_QPS_RESET && (mask & IBV_QP_PORT));
    if (mask & IBV_QP_QKEY) pair.key = wanted->qkey;
  }
  if (wanted->qp_state == IBV_QPS_RTR) {
    MUST(queue->state == IBV_QPS_INIT);
    if (!pair.srd) {
      MUST((mask & IBV_QP_AV) && (mask & IBV_QP_DEST_QPN) && wanted->path_mtu == IBV_MTU_1024);
      MUST(wanted->ah_attr.is_global == (pair.owner->link_layer == IBV_LINK_LAYER_ETHERNET));
      pair.peer = wanted->dest_qp_num;
    }
  }
  if (wanted->qp_state == IBV_QPS_RTS) {
    MUST(queue->state == IBV_QPS_RTR && (mask & IBV_QP_SQ_PSN));
    MUST(pair.srd || (wanted->retry_cnt > 0 && wanted->retry_cnt < 7 && wanted->timeout > 0));
  }
  queue->state = wanted->qp_state;
  return 0;
}
int ibv_destroy_qp(ibv_qp* queue) {
  Lock lock(state().mutex);
  state().pairs.erase(queue->qp_num);
  return give_back(pair_of(queue));
}
ibv_ah* ibv_create_ah(ibv_pd* domain, ibv_ah_attr* attributes) {
  Lock lock(state().mutex);
  auto* handle = new Handle;
  handle->context = domain->context;
  handle->pd = domain;
  handle->to = attributes->grh.dgid;
  ++state().controls.objects;
  return handle;
}
int ibv_destroy_ah(ibv_ah* handle) {
  Lock lock(state().mutex);
  return give_back(static_cast<Handle*>(handle));
}
const char* ibv_wc_status_str(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_RETRY_EXC_ERR: return "transport retry counter exceeded";
    case IBV_WC_REM_ACCESS_ERR: return "remote access error";
    case IBV_WC_WR_FLUSH_ERR: return "Work Request Flushed Error";
    default: return "another error";
  }
}

int efadv_query_device(ibv_context* context, efadv_device_attr* out, uint32_t) {
  Device& device = *static_cast<Context*>(context)->owner;
  if (!device.efa) return EOPNOTSUPP;
  out->max_sq_wr = 64;
  out->max_rq_wr = 32;
  out->device_caps = device.abilities;
  out->max_rdma_size = 1 << 18;
  return 0;
}
ibv_qp* efadv_create_qp_ex(ibv_context*, ibv_qp_init_attr_ex* wanted, efadv_qp_init_attr* kind, uint32_t) {
  Lock lock(state().mutex);
  MUST(wanted->qp_type == IBV_QPT_DRIVER && kind->driver_qp_type == EFADV_QP_DRIVER_TYPE_SRD);
  MUST(wanted->comp_mask == (IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS));
  Pair* pair = make_pair(wanted->pd, wanted->send_cq, wanted->recv_cq, wanted->cap, true);
  pair->all_signalled = wanted->sq_sig_all != 0;
  ibv_qp_ex& extended = pair->extended;
  extended.wr_start = wr_start;
  extended.wr_send = wr_send;
  extended.wr_rdma_write_imm = wr_rdma_write_imm;
  extended.wr_set_sge = wr_set_sge;
  extended.wr_set_ud_addr = wr_set_ud_addr;
  extended.wr_complete = wr_complete;
  return &extended.qp_base;
}

}  // extern "C"
