/* The network layer's C interface.
 *
 * Functions that can fail return 0 (or a handle) on success and -1 (or NULL) on failure; the words are
 * then in mkernel_net_last_error(), for the calling thread. All functions may be called by any thread;
 * a handle must not be used after it was destroyed. */
#ifndef MKERNEL_NET_H
#define MKERNEL_NET_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MKERNEL_NET_API __attribute__((visibility("default")))
#else
#define MKERNEL_NET_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mkernel_net_transport mkernel_net_transport;
typedef struct mkernel_net_proxy mkernel_net_proxy;

typedef struct {
  int64_t requests;       /* taken by the transport */
  int64_t bytes;          /* of those */
  int64_t completions;    /* whose source may be overwritten */
  int64_t busy_loops;     /* iterations of the proxy's thread that did something */
  int64_t idle_loops;     /* iterations that did not */
  int64_t most_in_flight; /* the largest number of requests at the same time */
} mkernel_net_statistics;

typedef struct {
  int32_t peer;
  int32_t port;
  const char* host; /* a numeric IPv4 or IPv6 address */
} mkernel_net_address;

typedef struct {
  const char* device;
  int32_t port;
  int32_t gid_index;
} mkernel_net_rdma_port;

MKERNEL_NET_API const char* mkernel_net_last_error(void);

/* A constant of the ring's layout by its name in lang/requests.py; -1: unknown. */
MKERNEL_NET_API int64_t mkernel_net_constant(const char* name);

/* HMAC-SHA256, as the handshake uses it; 32 bytes of output. */
MKERNEL_NET_API void mkernel_net_hmac(const void* key, size_t key_size, const void* data, size_t size, uint8_t* out);

/* Ranks of one process. bytes_per_s 0: not paced; shuffle_seed < 0: in order. */
MKERNEL_NET_API mkernel_net_transport* mkernel_net_loopback_create(const char* job, int rank, int64_t latency_ns,
                                                                   double bytes_per_s, int64_t shuffle_seed);

/* Listens at once; port 0: any. A peer that is silent for peer_timeout_ms is an error. */
MKERNEL_NET_API mkernel_net_transport* mkernel_net_tcp_create(int rank, int size, const void* secret,
                                                              size_t secret_size, int streams, const char* listen_host,
                                                              int listen_port, int64_t peer_timeout_ms);
MKERNEL_NET_API int mkernel_net_tcp_port(const mkernel_net_transport* transport);
/* Returns when all streams to these peers are there; the peers must call it too. The higher rank of
 * two dials, so the address of a higher rank is not used. */
MKERNEL_NET_API int mkernel_net_tcp_connect(mkernel_net_transport* transport, const mkernel_net_address* peers,
                                            int count, int64_t timeout_ms);

/* RDMA: kind is "verbs" or "efa". `library` (libibverbs) and `efa_library` may be NULL: the usual ones. */
MKERNEL_NET_API mkernel_net_transport* mkernel_net_rdma_create(const char* kind, int rank,
                                                               const mkernel_net_rdma_port* ports, int count,
                                                               int queues, int traffic_class, int64_t peer_timeout_ms,
                                                               const char* library, const char* efa_library);
/* What peers have to know of this rank and of its segments, and what they have sent of theirs. `describe`
 * returns how many bytes there are (also if they do not fit into `size`), -1 for an error. */
MKERNEL_NET_API int64_t mkernel_net_describe(mkernel_net_transport* transport, uint32_t peer, void* out, size_t size);
MKERNEL_NET_API int mkernel_net_connect(mkernel_net_transport* transport, uint32_t peer, const void* description,
                                        size_t size);
MKERNEL_NET_API int64_t mkernel_net_describe_segment(mkernel_net_transport* transport, uint32_t segment, void* out,
                                                     size_t size);
MKERNEL_NET_API int mkernel_net_learn_segment(mkernel_net_transport* transport, uint32_t peer, uint32_t segment,
                                              const void* description, size_t size);

/* Memory that requests name by its number; device: of CUDA, -1: host memory. When detach returns nobody
 * touches the memory any more. */
MKERNEL_NET_API int mkernel_net_attach(mkernel_net_transport* transport, uint32_t segment, void* base, uint64_t size,
                                       int device);
MKERNEL_NET_API int mkernel_net_detach(mkernel_net_transport* transport, uint32_t segment);

/* Where a request may be complete before all of it has arrived: how many were posted to this peer, and how many from it
 * have arrived in full. Other transports count none. */
MKERNEL_NET_API int mkernel_net_counts(mkernel_net_transport* transport, uint32_t peer, int64_t* sent,
                                       int64_t* arrived);
/* The file descriptors that a forked child should close, so that peers notice the end of this process. Returns how many
 * there are (also if `size` is smaller), -1 for an error. */
MKERNEL_NET_API int mkernel_net_descriptors(mkernel_net_transport* transport, int* out, int size);

/* For a thread that uses a transport by itself, without a proxy. post takes the words of a request in the ring's layout
 * and returns 1, or 0 if the peer is busy: poll and try again. poll sends and receives; 0: there was nothing to do. */
MKERNEL_NET_API int mkernel_net_post(mkernel_net_transport* transport, const int64_t* request);
MKERNEL_NET_API int mkernel_net_poll(mkernel_net_transport* transport);

/* Leaves the job in order and detaches everything; stop its proxy before. */
MKERNEL_NET_API int mkernel_net_transport_stop(mkernel_net_transport* transport, int64_t timeout_ms);
MKERNEL_NET_API void mkernel_net_transport_destroy(mkernel_net_transport* transport);

/* Serve a ring of `words` 64-bit words. cpu -1: not pinned; idle_sleep_us 0: never sleeps; spin_us: how
 * long it looks for work all the time before the first sleep. */
MKERNEL_NET_API mkernel_net_proxy* mkernel_net_proxy_start(int64_t* ring, uint64_t words,
                                                           mkernel_net_transport* transport, int cpu,
                                                           int idle_sleep_us, int spin_us);
/* A word that becomes 1 when the proxy stops serving because of an error; device as for attach. */
MKERNEL_NET_API int mkernel_net_proxy_set_abort_flag(mkernel_net_proxy* proxy, int64_t* word, int device);
/* Ends the thread. 1: everything was served; 0: the timeout came first, or an error had. */
MKERNEL_NET_API int mkernel_net_proxy_stop(mkernel_net_proxy* proxy, int64_t timeout_ms);
/* Why the proxy stopped serving, cut to `size` bytes with the final zero. Returns the length of it
 * all; 0: all is well. */
MKERNEL_NET_API size_t mkernel_net_proxy_error(const mkernel_net_proxy* proxy, char* text, size_t size);
MKERNEL_NET_API void mkernel_net_proxy_statistics(const mkernel_net_proxy* proxy, mkernel_net_statistics* out);
MKERNEL_NET_API void mkernel_net_proxy_destroy(mkernel_net_proxy* proxy);

#ifdef __cplusplus
}
#endif

#endif
