#include "rdma_base.h"

#if MKERNEL_HAS_VERBS

#include <unistd.h>

#include <algorithm>
#include <thread>

#include "cuda.h"

namespace mkernel {
namespace {

constexpr uint32_t kSegmentMagic = 0x4745'536D;  // "mSEG"
constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

const char* port_state(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_DOWN: return "down";
    case IBV_PORT_INIT: return "initialising: is there a subnet manager?";
    case IBV_PORT_ARMED: return "armed";
    case IBV_PORT_ACTIVE: return "active";
    default: return "in an unknown state";
  }
}

}  // namespace

RdmaBase::RdmaBase(const RdmaOptions& options)
    : RdmaTransport(options.rank), options_(options), library_(VerbsLibrary::load(options.library)) {
  if (options.ports.empty()) fail("no RDMA device was named");
  if (options.queues < 1 || options.queues > 64) fail("queues must be from 1 to 64, got ", options.queues);
  if (options.traffic_class < 0 || options.traffic_class > 255)
    fail("traffic_class must be from 0 to 255, got ", options.traffic_class);
  open_rails();
}

void RdmaBase::open_rails() {
  int count = 0;
  std::unique_ptr<ibv_device*, void (*)(ibv_device**)> devices(library_.get_device_list(&count),
                                                               library_.free_device_list);
  if (!devices) fail("the RDMA devices cannot be listed: ", errno_text());
  std::string names;
  for (int i = 0; i < count; ++i) names += (i > 0 ? ", " : "") + std::string(library_.get_device_name(devices.get()[i]));
  for (const RdmaPort& wanted : options_.ports) {
    ibv_device* device = nullptr;
    for (int i = 0; i < count; ++i)
      if (wanted.device == library_.get_device_name(devices.get()[i])) device = devices.get()[i];
    if (device == nullptr && count == 0)
      fail("there is no RDMA device '", wanted.device, "': libibverbs finds none on this machine");
    if (device == nullptr) fail("there is no RDMA device '", wanted.device, "'; there are: ", names);
    Rail rail;
    rail.name = wanted.device;
    rail.port = wanted.port;
    rail.gid_index = wanted.gid_index;
    rail.context = {library_.open_device(device), library_.close_device};
    if (!rail.context)
      fail("RDMA device ", rail.name, " cannot be opened: ", errno_text(), ". Are its files in /dev/infiniband there?");
    if (int problem = library_.query_device(rail.context.get(), &rail.limits))
      fail("RDMA device ", rail.name, " cannot be asked for its limits: ", errno_text(problem));
    if (wanted.port < 1 || wanted.port > rail.limits.phys_port_cnt)
      fail("RDMA device ", rail.name, " has no port ", wanted.port, ", only ", int{rail.limits.phys_port_cnt});
    if (int problem = library_.query_port(rail.context.get(), static_cast<uint8_t>(wanted.port), &rail.attributes))
      fail("port ", wanted.port, " of RDMA device ", rail.name, " cannot be asked for its state: ", errno_text(problem));
    if (rail.attributes.state != IBV_PORT_ACTIVE)
      fail("port ", wanted.port, " of RDMA device ", rail.name, " is not active: it is ",
           port_state(rail.attributes.state));
    if (wanted.gid_index < 0 || wanted.gid_index >= rail.attributes.gid_tbl_len)
      fail("RDMA device ", rail.name, " has no GID ", wanted.gid_index, ": its table has ", rail.attributes.gid_tbl_len);
    if (library_.query_gid(rail.context.get(), static_cast<uint8_t>(wanted.port), wanted.gid_index, &rail.gid) != 0)
      fail("GID ", wanted.gid_index, " of RDMA device ", rail.name, " cannot be read: ", errno_text());
    ibv_gid nothing{};
    if (std::memcmp(&rail.gid, &nothing, sizeof(nothing)) == 0 && rail.attributes.link_layer == IBV_LINK_LAYER_ETHERNET)
      fail("GID ", wanted.gid_index, " of RDMA device ", rail.name, " is empty: its network interface has no such address");
    rail.domain = {library_.alloc_pd(rail.context.get()), library_.dealloc_pd};
    if (!rail.domain) fail("RDMA device ", rail.name, ": no protection domain: ", errno_text());
    rails_.push_back(std::move(rail));
  }
}

void RdmaBase::usable() const {
  if (stopped_) fail("rank ", rank, " has left the job");
  if (!failure_.empty()) throw Error(failure_);
}

// GPU memory by dma-buf, which needs nothing but a new kernel and driver; else through the module that
// lets the device look the address up.
ibv_mr* RdmaBase::register_memory(Rail& rail, void* base, uint64_t size, int device) {
  bool gpu = device >= 0;
  std::string why;
  if (gpu) {
    DmaBuf buffer = dma_buf_of(device, base, size);
    why = buffer.why;
    if (buffer.fd && library_.reg_dmabuf_mr == nullptr) {
      why = "libibverbs has no ibv_reg_dmabuf_mr (it needs rdma-core 34)";
    } else if (buffer.fd) {
      auto* region = library_.reg_dmabuf_mr(rail.domain.get(), buffer.offset, size, reinterpret_cast<uintptr_t>(base),
                                            buffer.fd.get(), kAccess);
      if (region != nullptr) return region;
      why = words("ibv_reg_dmabuf_mr: ", errno_text());
    }
  }
  auto* region = library_.reg_mr(rail.domain.get(), base, size, kAccess);
  if (region != nullptr) return region;
  int problem = errno;
  if (gpu)
    fail("GPU memory cannot be registered with RDMA device ", rail.name, ". By dma-buf: ", why, ". By peer memory: ",
         errno_text(problem), ". Load the kernel module nvidia_peermem (modprobe nvidia-peermem), or use NVIDIA's open "
         "kernel modules, whose memory can be shared by dma-buf (Linux 5.12 or newer)");
  fail(size, " bytes cannot be registered with RDMA device ", rail.name, ": ", errno_text(problem),
       problem == ENOMEM ? ". The limit on locked memory must allow it (ulimit -l unlimited)" : "");
}

void RdmaBase::attach(uint32_t number, void* base, uint64_t size, int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  usable();
  segments->attach(number, base, size, signals_by_host() ? device : -1);
  try {
    auto entry = std::make_shared<Registered>();
    entry->base = static_cast<uint8_t*>(base);
    entry->size = size;
    entry->device = device;
    for (Rail& rail : rails_) entry->regions.emplace_back(register_memory(rail, base, size, device), library_.dereg_mr);
    registered_[number] = std::move(entry);
  } catch (...) {
    segments->detach(number);
    throw;
  }
}

void RdmaBase::detach(uint32_t number) {
  std::shared_ptr<Registered> entry;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = registered_.find(number);
    if (it == registered_.end()) fail("rank ", rank, ": segment ", number, " is not attached");
    entry = std::move(it->second);
    registered_.erase(it);  // no new requests
  }
  auto deadline = std::chrono::steady_clock::now() + options_.peer_timeout;
  auto in_use = [&] {
    std::lock_guard<std::mutex> lock(mutex_);  // requests in flight release it under the lock
    if (entry.use_count() > 1 && std::chrono::steady_clock::now() >= deadline) {
      if (failure_.empty()) failure_ = words("segment ", number, " was detached with requests to be read from it");
      abandon();
    }
    return entry.use_count() > 1;
  };
  while (in_use()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  entry->regions.clear();
  segments->detach(number);
}

void RdmaBase::stop(std::chrono::milliseconds) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    abandon();
    registered_.clear();
    remote_.clear();
  }
  segments->close();
}

// A device keeps its queue pairs as long as somebody has it open, and then answers writes of peers to a rank that is gone.
std::vector<int> RdmaBase::descriptors() {
  std::vector<int> found;
  for (const Rail& rail : rails_)
    for (int each : {rail.context->cmd_fd, rail.context->async_fd})
      if (each > STDERR_FILENO) found.push_back(each);
  return found;
}

std::string RdmaBase::describe_segment(uint32_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = registered_.find(number);
  if (it == registered_.end()) fail("rank ", rank, ": segment ", number, " is not attached");
  Description text;
  text.put(kSegmentMagic);
  text.put(static_cast<uint32_t>(rails_.size()));
  text.put(reinterpret_cast<uint64_t>(it->second->base));
  text.put(it->second->size);
  for (auto& region : it->second->regions) text.put(region->rkey);
  return text.bytes();
}

void RdmaBase::learn_segment(uint32_t peer, uint32_t number, const std::string& description) {
  Description text(description, words("rank ", peer, "'s segment ", number));
  if (text.take<uint32_t>() != kSegmentMagic) fail("this does not describe a segment");
  Remote remote;
  remote.keys.resize(text.take<uint32_t>() % 256);
  remote.base = text.take<uint64_t>();
  remote.size = text.take<uint64_t>();
  for (uint32_t& key : remote.keys) key = text.take<uint32_t>();
  text.end();
  std::lock_guard<std::mutex> lock(mutex_);
  usable();
  remote_[{peer, number}] = std::move(remote);
}

std::shared_ptr<RdmaBase::Registered> RdmaBase::source_of(const Request& request) const {
  segments->pin(request.source_segment, request.source, request.bytes, "source");
  auto it = registered_.find(request.source_segment);
  if (it == registered_.end())
    fail("source: segment ", request.source_segment, " is not attached on rank ", rank);
  return it->second;
}

const RdmaBase::Remote& RdmaBase::target_of(const Request& request) const {
  auto it = remote_.find({request.peer, request.segment});
  if (it == remote_.end())
    fail("target: rank ", rank, " does not know rank ", request.peer, "'s segment ", request.segment);
  const Remote& remote = it->second;
  auto check = [&](uint64_t offset, uint64_t size, const char* what) {
    if (offset > remote.size || size > remote.size - offset)
      fail(what, ": ", size, " bytes from ", offset, " are not inside of rank ", request.peer, "'s segment ",
           request.segment, " of ", remote.size, " bytes");
  };
  check(request.target, request.bytes, "target");
  check(request.signal, sizeof(int64_t), "signal");
  if ((remote.base + request.signal) % sizeof(int64_t) != 0)
    fail("signal: byte ", request.signal, " of segment ", request.segment, " on rank ", request.peer,
         " is not aligned to 8 bytes");
  return remote;
}

void RdmaBase::move_queue(ibv_qp* queue, ibv_qp_attr& attributes, int mask, const char* to, const Rail& rail) {
  if (int problem = library_.modify_qp(queue, &attributes, mask | IBV_QP_STATE))
    fail("a queue pair of RDMA device ", rail.name, " cannot be made ", to, ": ", errno_text(problem));
}

std::string RdmaBase::reason_of(const ibv_wc& completion) const {
  std::string text = words(library_.wc_status_str(completion.status), " (status ", completion.status,
                           ", vendor error ", hex_text(completion.vendor_err), ")");
  if (completion.status == IBV_WC_RETRY_EXC_ERR) text += ": it does not answer, or the way to it is cut";
  if (completion.status == IBV_WC_REM_ACCESS_ERR) text += ": the memory that was written to is not registered there";
  return text;
}

}  // namespace mkernel

#endif
