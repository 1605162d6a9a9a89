#include "verbs_library.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

namespace mkernel {

void* open_library(const std::string& path, const char* package) {
  void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr)
    fail(path, " cannot be opened (", ::dlerror(), "). Install it (Debian, Ubuntu: apt install ", package,
         "; Fedora: dnf install rdma-core), or use transport='tcp'");
  return handle;
}

void* find_function(void* library, const std::string& path, const char* name, bool optional) {
  void* found = ::dlsym(library, name);
  if (found == nullptr && !optional) fail(path, " has no function ", name, ": it is too old");
  return found;
}

void fail_without_headers(const char* transport, const char* header) {
  fail("the network layer was compiled without ", header, ", which the ", transport,
       " transport needs. Install the header (Debian, Ubuntu: apt install libibverbs-dev; Fedora: dnf install "
       "rdma-core-devel); it is compiled again by itself then. Or use transport='tcp'");
}

#if MKERNEL_HAS_VERBS

namespace {

std::unique_ptr<VerbsLibrary> read_library(const std::string& path) {
  void* handle = open_library(path, "libibverbs1 ibverbs-providers");
  auto library = std::make_unique<VerbsLibrary>();
  auto find = [&](auto& function, const char* name, bool optional = false) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(
        find_function(handle, path, name, optional));
  };
  find(library->fork_init, "ibv_fork_init", true);
  // Before Linux 5.12, a fork would part registered memory from its device: the parent gets new pages when it writes.
  // Where this is not needed, or another library was here first, it fails or does nothing.
  if (library->fork_init != nullptr) library->fork_init();
  find(library->get_device_list, "ibv_get_device_list");
  find(library->free_device_list, "ibv_free_device_list");
  find(library->get_device_name, "ibv_get_device_name");
  find(library->open_device, "ibv_open_device");
  find(library->close_device, "ibv_close_device");
  find(library->query_device, "ibv_query_device");
  find(library->query_port, "ibv_query_port");
  find(library->query_gid, "ibv_query_gid");
  find(library->alloc_pd, "ibv_alloc_pd");
  find(library->dealloc_pd, "ibv_dealloc_pd");
  find(library->reg_mr, "ibv_reg_mr");
  find(library->reg_dmabuf_mr, "ibv_reg_dmabuf_mr", true);
  find(library->dereg_mr, "ibv_dereg_mr");
  find(library->create_cq, "ibv_create_cq");
  find(library->destroy_cq, "ibv_destroy_cq");
  find(library->create_qp, "ibv_create_qp");
  find(library->qp_to_qp_ex, "ibv_qp_to_qp_ex", true);
  find(library->modify_qp, "ibv_modify_qp");
  find(library->destroy_qp, "ibv_destroy_qp");
  find(library->create_ah, "ibv_create_ah");
  find(library->destroy_ah, "ibv_destroy_ah");
  find(library->wc_status_str, "ibv_wc_status_str");
  return library;
}

}  // namespace

const VerbsLibrary& VerbsLibrary::load(const std::string& path) {
  static auto* mutex = new std::mutex;  // never destroyed: threads may outlive main
  static auto* libraries = new std::map<std::string, std::unique_ptr<VerbsLibrary>>;
  std::lock_guard<std::mutex> lock(*mutex);
  auto& entry = (*libraries)[path];
  if (!entry) entry = read_library(path);
  return *entry;
}

#endif

}  // namespace mkernel
