// libibverbs, opened at run time: a machine without it can still use every other transport.
//
// The structures and the inline calls come from its headers, which must be installed when this is
// compiled. Declaring them here would spare users that package. But post_send and poll_cq go through
// tables of function pointers in those structures: a misplaced field would call an invalid address,
// and no compiler would notice.
#pragma once

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>
#define MKERNEL_HAS_VERBS 1
#else
#define MKERNEL_HAS_VERBS 0
#endif

#include <memory>
#include <string>

#include "error.h"

namespace mkernel {

// A function of a library that was opened at run time. If it is missing, an Error, unless it is `optional`.
void* open_library(const std::string& path, const char* package);
void* find_function(void* library, const std::string& path, const char* name, bool optional = false);

[[noreturn]] void fail_without_headers(const char* transport, const char* header);

#if MKERNEL_HAS_VERBS

// Owns one of the library's objects.
template <class Object>
using Owned = std::unique_ptr<Object, int (*)(Object*)>;

struct VerbsLibrary {
  // Loaded once and kept: its providers start threads and hooks of their own.
  static const VerbsLibrary& load(const std::string& path);

  int (*fork_init)();  // null in old libraries
  ibv_device** (*get_device_list)(int*);
  void (*free_device_list)(ibv_device**);
  const char* (*get_device_name)(ibv_device*);
  ibv_context* (*open_device)(ibv_device*);
  int (*close_device)(ibv_context*);
  int (*query_device)(ibv_context*, ibv_device_attr*);
  int (*query_port)(ibv_context*, uint8_t, void*);  // fills the first fields of an ibv_port_attr
  int (*query_gid)(ibv_context*, uint8_t, int, ibv_gid*);
  ibv_pd* (*alloc_pd)(ibv_context*);
  int (*dealloc_pd)(ibv_pd*);
  ibv_mr* (*reg_mr)(ibv_pd*, void*, size_t, int);
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd*, uint64_t, size_t, uint64_t, int, int);  // null in old libraries
  int (*dereg_mr)(ibv_mr*);
  ibv_cq* (*create_cq)(ibv_context*, int, void*, ibv_comp_channel*, int);
  int (*destroy_cq)(ibv_cq*);
  ibv_qp* (*create_qp)(ibv_pd*, ibv_qp_init_attr*);
  ibv_qp_ex* (*qp_to_qp_ex)(ibv_qp*);  // null in old libraries
  int (*modify_qp)(ibv_qp*, ibv_qp_attr*, int);
  int (*destroy_qp)(ibv_qp*);
  ibv_ah* (*create_ah)(ibv_pd*, ibv_ah_attr*);
  int (*destroy_ah)(ibv_ah*);
  const char* (*wc_status_str)(ibv_wc_status);
};

#endif

}  // namespace mkernel
