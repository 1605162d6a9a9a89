// The verbs transport between two soft-RoCE devices of one machine: rxe0 and rxe1, at the two ends of
// the virtual cable v0 - v1, on which netem can lose, repeat, reorder and cut.
// Usage: rdmatest refusals | sizes | writes | growth | loss | duplication | reordering | cut | silence | detached
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "proxy.h"
#include "rdma.h"
#include "selftest.h"

namespace selftest {
namespace {

using Clock = std::chrono::steady_clock;
constexpr uint64_t kSignals = 1024;  // of a rank; 8 bytes each, then data
constexpr int kGid = 1;              // RoCE v2 with the IPv4 address; 0 is link-local

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// What the cable does from now on, in both directions; "" is nothing.
void netem(const std::string& what) {
  for (const char* end : {"v0", "v1"}) {
    std::string command = what.empty() ? "tc qdisc del dev " + std::string(end) + " root 2>/dev/null || true"
                                       : "tc qdisc replace dev " + std::string(end) + " root netem " + what;
    CHECK(std::system(command.c_str()) == 0);
  }
}

RdmaOptions options_of(int rank, milliseconds peer_timeout, int queues = 3) {
  RdmaOptions options;
  options.rank = rank;
  options.ports = {{rank == 0 ? "rxe0" : "rxe1", 1, kGid}};
  options.queues = queues;
  options.peer_timeout = peer_timeout;
  return options;
}

// Two ranks, connected, each with a segment of signals and data, and a proxy.
struct Job {
  explicit Job(uint64_t data_bytes, milliseconds peer_timeout = milliseconds(30000)) {
    for (int rank = 0; rank < 2; ++rank) {
      transports.push_back(make_verbs_transport(options_of(rank, peer_timeout)));
      memory.emplace_back(kSignals + data_bytes / 8 + 8);
      producers.push_back(std::make_unique<Producer>(64));
    }
    std::string descriptions[2] = {transports[0]->describe(1), transports[1]->describe(0)};
    for (uint32_t rank = 0; rank < 2; ++rank) transports[rank]->connect(1 - rank, descriptions[1 - rank]);
    for (int rank = 0; rank < 2; ++rank) share(rank, 0, memory[rank]);
    for (int rank = 0; rank < 2; ++rank) {
      auto& words = producers[rank]->words;
      proxies.push_back(std::make_unique<Proxy>(words.data(), words.size(), transports[rank], ProxyOptions{}));
    }
  }
  ~Job() {
    proxies.clear();
    for (auto& transport : transports) transport->stop(milliseconds(100));
  }
  void share(int rank, uint32_t number, std::vector<int64_t>& words) {
    transports[rank]->attach(number, words.data(), words.size() * 8);
    transports[1 - rank]->learn_segment(static_cast<uint32_t>(rank), number,
                                        transports[rank]->describe_segment(number));
  }
  uint8_t* data(int rank) { return reinterpret_cast<uint8_t*>(memory[rank].data() + kSignals); }
  int64_t* signal(int rank, uint64_t number) { return memory[rank].data() + number; }
  int64_t put(int from, uint64_t source, uint64_t target, uint64_t size, uint64_t signal, int64_t value,
              uint32_t segment = 0) {
    Request request;
    request.peer = static_cast<uint32_t>(1 - from);
    request.segment = segment;
    request.source = kSignals * 8 + source;
    request.target = kSignals * 8 + target;
    request.bytes = size;
    request.signal = signal * 8;
    request.value = value;
    return producers[from]->post(request);
  }
  // Without spinning: the emulated machine has little time for all that runs in it.
  bool wait(int rank, uint64_t number, int64_t value, milliseconds patience = kHang) {
    int64_t* word = signal(rank, number);
    auto deadline = Clock::now() + patience;
    while (poll_word(word) < value) {
      if (Clock::now() > deadline) return false;
      if (!proxies[1 - rank]->error().empty()) return poll_word(word) >= value;
      std::this_thread::sleep_for(milliseconds(1));
    }
    return true;
  }
  void check_errors() {
    for (auto& proxy : proxies) {
      if (!proxy->error().empty()) std::fprintf(stderr, "%s\n", proxy->error().c_str());
      CHECK(proxy->error().empty());
    }
  }

  std::vector<std::shared_ptr<RdmaTransport>> transports;
  std::vector<std::vector<int64_t>> memory;
  std::vector<std::unique_ptr<Producer>> producers;
  std::vector<std::unique_ptr<Proxy>> proxies;
};

std::string refusal(const RdmaOptions& options) {
  try {
    make_verbs_transport(options);
  } catch (const Error& error) {
    std::printf("refused: %s\n", error.what());
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

void refusals() {
  RdmaOptions options = options_of(0, milliseconds(1000));
  options.ports[0].device = "mlx5_7";
  CHECK(contains(refusal(options), "no RDMA device 'mlx5_7'; there are: rxe0, rxe1"));
  options = options_of(0, milliseconds(1000));
  options.ports[0].port = 2;
  CHECK(contains(refusal(options), "rxe0 has no port 2, only 1"));
  options.ports[0] = {"rxe0", 1, 5};
  CHECK(contains(refusal(options), "GID 5 of RDMA device rxe0 is empty"));
  options.ports[0] = {"rxe0", 1, 99999};
  CHECK(contains(refusal(options), "rxe0 has no GID 99999"));
  options.ports.clear();
  CHECK(contains(refusal(options), "no RDMA device was named"));
  options = options_of(0, milliseconds(1000));
  options.library = "libnowhere.so.1";
  CHECK(contains(refusal(options), "libnowhere.so.1 cannot be opened"));
  CHECK(std::system("ip link set v0 down") == 0);
  CHECK(contains(refusal(options_of(0, milliseconds(1000))), "port 1 of RDMA device rxe0 is not active"));
  CHECK(std::system("ip link set v0 up") == 0);
}

void sizes() {
  constexpr uint64_t kLargest = 8 << 20;
  Job job(kLargest + 4096);
  int64_t epoch = 0;
  for (uint64_t size : {0ul, 1ul, 2ul, 7ul, 8ul, 9ul, 63ul, 4095ul, 4096ul, 4097ul, 65536ul, 1ul << 20, (1ul << 20) + 1,
                        kLargest}) {
    for (int from = 0; from < 2; ++from) {
      uint8_t *source = job.data(from), *target = job.data(1 - from);
      for (uint64_t i = 0; i < size; ++i) source[11 + i] = static_cast<uint8_t>((i * 31 + size + i / 251) | 1);
      std::memset(target, 0, size + 64);
      job.put(from, 11, 13, size, 5, ++epoch);
      CHECK(job.wait(1 - from, 5, epoch));
      CHECK(poll_word(job.signal(1 - from, 5)) == epoch);
      CHECK(std::memcmp(source + 11, target + 13, size) == 0);
      for (uint64_t i = 0; i < 13; ++i) CHECK(target[i] == 0);
      for (uint64_t i = 13 + size; i < size + 64; ++i) CHECK(target[i] == 0);
    }
    std::printf("%lu bytes\n", size);
  }
  job.check_errors();
}

// So many writes in rounds; each round's data is looked at as soon as its signal is there, and the
// receiver gives the round back by a signal of its own.
void many(Job& job, int64_t count, uint64_t largest) {
  constexpr uint64_t kSlots = 250;
  std::mt19937_64 random(7);
  for (int64_t round = 0; round < count / static_cast<int64_t>(kSlots); ++round) {
    std::vector<uint64_t> size(kSlots);
    for (uint64_t slot = 0; slot < kSlots; ++slot) {
      size[slot] = 1 + random() % largest;
      uint8_t* source = job.data(0) + slot * largest;
      for (uint64_t i = 0; i < size[slot]; ++i) source[i] = static_cast<uint8_t>(random() | 1);
      std::memset(job.data(1) + slot * largest, 0, largest);
    }
    for (uint64_t slot = 0; slot < kSlots; ++slot) job.put(0, slot * largest, slot * largest, size[slot], slot, round + 1);
    for (uint64_t slot = 0; slot < kSlots; ++slot) {
      if (!job.wait(1, slot, round + 1)) job.check_errors();
      CHECK(poll_word(job.signal(1, slot)) == round + 1);
      CHECK(std::memcmp(job.data(0) + slot * largest, job.data(1) + slot * largest, size[slot]) == 0);
      for (uint64_t i = size[slot]; i < largest; ++i) CHECK(job.data(1)[slot * largest + i] == 0);
    }
    job.put(1, 0, 0, 0, 1000, round + 1);
    CHECK(job.wait(0, 1000, round + 1));
  }
  job.check_errors();
  for (auto& proxy : job.proxies) CHECK(proxy->stop(kHang));
  CHECK(job.proxies[0]->statistics().completions == count);
}

void writes() {
  Job job(250 * 2048);
  auto start = Clock::now();
  many(job, 10000, 2048);
  std::printf("10000 writes in %.1f s\n", seconds_since(start));
}

void disturbed(const std::string& how, int64_t count) {
  Job job(250 * 8192, milliseconds(8000));  // a lost last packet is sent again after a second
  netem(how);
  auto start = Clock::now();
  many(job, count, 8192);
  netem("");
  std::printf("%ld writes in %.1f s\n", static_cast<long>(count), seconds_since(start));
}

// Segments that come later, while requests run.
void growth() {
  Job job(1 << 16);
  std::vector<std::vector<int64_t>> more;
  for (uint32_t number = 1; number <= 20; ++number) {
    more.emplace_back(kSignals + 1024);
    job.share(1, number, more.back());
    job.data(0)[0] = static_cast<uint8_t>(number);
    job.put(0, 0, number, 1, 0, 1, number);
    CHECK(eventually([&] { return poll_word(more.back().data()) == 1; }));
    CHECK(reinterpret_cast<uint8_t*>(more.back().data() + kSignals)[number] == number);
    if (number % 2 == 0) job.transports[1]->detach(number);
  }
  job.check_errors();
}

// A cable that is pulled for five seconds, or a little more, in the middle.
void cut() {
  Job job(16 * 65536, milliseconds(40000));  // seven tries, four seconds apart
  auto start = Clock::now();
  std::thread cutter([&] {
    std::this_thread::sleep_for(milliseconds(500));
    netem("loss 100%");
    double from = seconds_since(start);
    std::this_thread::sleep_for(milliseconds(5000));
    std::printf("cut for at least %.1f s\n", seconds_since(start) - from);
    netem("");
  });
  int64_t round = 0;
  double longest = 0;
  while (seconds_since(start) < 7 || longest < 4) {
    CHECK(Clock::now() - start < kHang);
    auto before = Clock::now();
    ++round;
    for (uint64_t slot = 0; slot < 16; ++slot) {
      std::memset(job.data(0) + slot * 65536, static_cast<int>(1 + (round + static_cast<int64_t>(slot)) % 250), 65536);
      job.put(0, slot * 65536, slot * 65536, 65536, slot, round);
    }
    for (uint64_t slot = 0; slot < 16; ++slot) {
      if (!job.wait(1, slot, round)) job.check_errors();
      CHECK(poll_word(job.signal(1, slot)) == round);
      CHECK(std::memcmp(job.data(0) + slot * 65536, job.data(1) + slot * 65536, 65536) == 0);
    }
    longest = std::max(longest, seconds_since(before));
  }
  cutter.join();
  job.check_errors();
  std::printf("%ld rounds, the longest took %.1f s\n", static_cast<long>(round), longest);
}

// A cable that stays cut: an error for who sends, a timeout for who waits.
void silence() {
  Job job(1 << 16, milliseconds(5000));
  job.put(0, 0, 0, 100, 0, 1);
  CHECK(job.wait(1, 0, 1));
  netem("loss 100%");
  auto start = Clock::now();
  job.put(0, 0, 0, 5000, 1, 1);
  CHECK(eventually([&] { return !job.proxies[0]->error().empty(); }));
  std::printf("after %.1f s: %s\n", seconds_since(start), job.proxies[0]->error().c_str());
  CHECK(contains(job.proxies[0]->error(), "network proxy of rank 0: rank 1, by rxe0, queue pair "));
  CHECK(contains(job.proxies[0]->error(), "transport retry counter exceeded (status 12"));
  CHECK(!eventually([&] { return poll_word(job.signal(1, 1)) >= 1; }, milliseconds(1000)));
  CHECK(job.proxies[1]->error().empty());
  netem("");
}

// Memory that was taken back is not written, and the sender hears of it.
void detached() {
  Job job(1 << 16);
  job.put(0, 0, 0, 100, 0, 1);
  CHECK(job.wait(1, 0, 1));
  job.transports[1]->detach(0);
  std::fill(job.memory[1].begin(), job.memory[1].end(), 77);
  job.put(0, 0, 0, 100, 0, 2);
  CHECK(eventually([&] { return !job.proxies[0]->error().empty(); }));
  std::printf("%s\n", job.proxies[0]->error().c_str());
  CHECK(contains(job.proxies[0]->error(), "remote access error"));
  for (int64_t word : job.memory[1]) CHECK(word == 77);
}

}  // namespace
}  // namespace selftest

int main(int count, char** arguments) {
  std::string what = count > 1 ? arguments[1] : "";
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    if (what == "refusals") selftest::refusals();
    else if (what == "sizes") selftest::sizes();
    else if (what == "writes") selftest::writes();
    else if (what == "growth") selftest::growth();
    else if (what == "loss") selftest::disturbed("loss 2%", 1000);
    else if (what == "duplication") selftest::disturbed("duplicate 10%", 1000);
    else if (what == "reordering") selftest::disturbed("delay 2ms reorder 25% 50%", 500);
    else if (what == "cut") selftest::cut();
    else if (what == "silence") selftest::silence();
    else if (what == "detached") selftest::detached();
    else return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", what.c_str(), error.what());
    return 1;
  }
  std::printf("%s: well\n", what.c_str());
  return 0;
}
