// What the parts of the self test share.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "ring.h"
#include "tcp.h"

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                             \
    }                                                                           \
  } while (false)

namespace selftest {

using namespace mkernel;
using std::chrono::milliseconds;

// Only ends what hangs: many times what a busy machine needs.
constexpr milliseconds kHang(600000);

template <class Condition>
bool eventually(Condition condition, milliseconds patience = kHang) {
  auto deadline = std::chrono::steady_clock::now() + patience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

inline int64_t poll_word(const int64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

// A ring and its producers' side, as lang/requests.py does it.
struct Producer {
  explicit Producer(int64_t capacity) : words(layout::kHeaderWords + capacity * layout::kRequestWords) {
    words[layout::kCapacity] = capacity;
  }

  int64_t post(const Request& request) {
    using namespace layout;
    int64_t* ring = words.data();
    int64_t capacity = ring[kCapacity];
    int64_t ticket = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
    CHECK(eventually([&] { return poll_word(ring + kConsumed) > ticket - capacity; }));
    int64_t* slot = ring + kHeaderWords + ticket % capacity * kRequestWords;
    slot[kPeerAndSegments] = static_cast<int64_t>(request.peer | uint64_t{request.segment} << kSegmentShift |
                                                  uint64_t{request.source_segment} << kSourceSegmentShift);
    slot[kSource] = static_cast<int64_t>(request.source);
    slot[kTarget] = static_cast<int64_t>(request.target);
    slot[kBytes] = static_cast<int64_t>(request.bytes);
    slot[kSignal] = static_cast<int64_t>(request.signal);
    slot[kValue] = request.value;
    __atomic_store_n(slot + kTurn, ticket / capacity + 1, __ATOMIC_RELEASE);
    return ticket;
  }

  std::vector<int64_t> words;
  int64_t taken = 0;
};

// Two tcp ranks of one process, connected.
struct Pair {
  explicit Pair(int streams) {
    for (int rank = 0; rank < 2; ++rank) {
      TcpOptions options;
      options.rank = rank;
      options.size = 2;
      options.secret = std::vector<uint8_t>(32, 7);
      options.streams = streams;
      ranks.push_back(std::make_shared<TcpTransport>(options));
    }
    std::thread other([&] { connect(0); });
    connect(1);
    other.join();
  }
  void connect(int rank) {
    auto peer = static_cast<uint32_t>(1 - rank);
    ranks[rank]->connect({{peer, parse_address("127.0.0.1", ranks[peer]->port())}}, kHang);
  }
  std::vector<std::shared_ptr<TcpTransport>> ranks;
};

void counting();
void frames();
void fuzz_frames(double seconds);
void fuzz_handshake(double seconds);

}  // namespace selftest
