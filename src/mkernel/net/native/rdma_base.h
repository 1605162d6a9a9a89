// What the RDMA transports share: rails, registered memory, and the descriptions of peers.
#pragma once

#include "verbs_library.h"

#if MKERNEL_HAS_VERBS

#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

#include "rdma.h"

namespace mkernel {

// A description that is being written or read: one field after the other, in their memory representation.
class Description {
 public:
  Description() = default;
  Description(std::string bytes, std::string whose) : bytes_(std::move(bytes)), whose_(std::move(whose)) {}
  template <class Field>
  void put(const Field& field) {
    bytes_.append(reinterpret_cast<const char*>(&field), sizeof(Field));
  }
  template <class Field>
  Field take() {
    Field field;
    if (bytes_.size() - at_ < sizeof(Field)) fail("the description of ", whose_, " is too short");
    std::memcpy(&field, bytes_.data() + at_, sizeof(Field));
    at_ += sizeof(Field);
    return field;
  }
  void end() const {
    if (at_ != bytes_.size()) fail("the description of ", whose_, " is too long");
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_, whose_;
  size_t at_ = 0;
};

// One port of one device.
struct Rail {
  std::string name;
  int port = 1;
  int gid_index = 0;
  Owned<ibv_context> context{nullptr, nullptr};
  Owned<ibv_pd> domain{nullptr, nullptr};
  ibv_device_attr limits{};
  ibv_port_attr attributes{};
  ibv_gid gid{};
};

class RdmaBase : public RdmaTransport {
 public:
  explicit RdmaBase(const RdmaOptions& options);

  void attach(uint32_t number, void* base, uint64_t size, int device = -1) override;
  // Waits for the requests that read from the segment. At the peer timeout, it gives them up, and the transport
  // stops.
  void detach(uint32_t number) override;
  void stop(std::chrono::milliseconds patience) override;
  std::vector<int> descriptors() override;
  std::string describe_segment(uint32_t number) override;
  void learn_segment(uint32_t peer, uint32_t number, const std::string& description) override;

 protected:
  // A segment of this rank, registered with every rail. Requests in flight share it.
  struct Registered {
    uint8_t* base = nullptr;
    uint64_t size = 0;
    int device = -1;
    std::vector<Owned<ibv_mr>> regions;  // by rail
  };
  // A segment of a peer.
  struct Remote {
    uint64_t base = 0;
    uint64_t size = 0;
    std::vector<uint32_t> keys;  // by rail
  };

  // Runs `body` with the lock held. An error destroys the queue pairs, so that no device accesses memory that its
  // owner may free; afterwards, every call fails.
  template <class Body>
  auto guarded(Body body) {
    std::lock_guard<std::mutex> lock(mutex_);
    usable();
    try {
      return body();
    } catch (const std::exception& error) {
      failure_ = error.what();
      abandon();
      throw;
    }
  }
  void usable() const;
  // Does this transport write signals itself, and therefore need a stream of the device?
  virtual bool signals_by_host() const = 0;
  // Releases all queue pairs and what is in flight.
  virtual void abandon() = 0;

  // Both check that the range is inside the segment; the second also checks the signal.
  std::shared_ptr<Registered> source_of(const Request& request) const;
  const Remote& target_of(const Request& request) const;
  ibv_mr* register_memory(Rail& rail, void* base, uint64_t size, int device = -1);
  void move_queue(ibv_qp* queue, ibv_qp_attr& attributes, int mask, const char* to, const Rail& rail);
  // The message for a failed completion.
  std::string reason_of(const ibv_wc& completion) const;

  const RdmaOptions options_;
  const VerbsLibrary& library_;
  std::vector<Rail> rails_;
  std::mutex mutex_;  // of all below, and of what the transports add
  std::unordered_map<uint32_t, std::shared_ptr<Registered>> registered_;
  std::map<std::pair<uint32_t, uint32_t>, Remote> remote_;  // by peer and number
  std::string failure_;
  bool stopped_ = false;

 private:
  void open_rails();
};

}  // namespace mkernel

#endif
