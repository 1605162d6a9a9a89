#include "rdma.h"
#include "verbs_library.h"
namespace mkernel {
std::shared_ptr<RdmaTransport> make_efa_transport(const RdmaOptions&) {
  fail_without_headers("efa", "infiniband/efadv.h");
}
}  // namespace mkernel
