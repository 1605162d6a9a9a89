// Stress for the sanitizers: many producers, proxies that come and go, all transports.
// Usage: selftest ring | frames | counting | loopback | tcp | verbs | efa | rdma-on-device | lifecycle | cuda | fuzz SECONDS
// verbs, efa and those on a device need libraries that find devices: stand-ins, in LD_LIBRARY_PATH.
#include "selftest.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>

#include "loopback.h"
#include "proxy.h"
#include "rdma.h"

namespace selftest {
namespace {

constexpr int kProducers = 4;

// Four producers, a small ring, one consumer that completes in random order.
void ring() {
  constexpr int64_t kEach = 20000;
  Producer producer(16);
  std::vector<std::thread> threads;
  for (int which = 0; which < kProducers; ++which)
    threads.emplace_back([&producer, which] {
      for (int64_t i = 0; i < kEach; ++i) {
        Request request;
        request.peer = static_cast<uint32_t>(which);
        request.segment = 0xABCDEF;
        request.source_segment = 0x123456;
        request.source = (uint64_t{1} << 40) + static_cast<uint64_t>(i);
        request.bytes = request.source ^ 0xFF;
        request.value = -i;
        producer.post(request);
      }
    });
  Ring consumer(producer.words.data(), producer.words.size());
  std::vector<int64_t> next(kProducers, 0), flying;
  std::mt19937_64 random(1);
  int64_t taken = 0;
  CHECK(eventually([&] {
    if (auto request = consumer.take()) {
      CHECK(request->ticket == taken++);
      CHECK(request->segment == 0xABCDEF && request->source_segment == 0x123456);
      CHECK(request->source == (uint64_t{1} << 40) + static_cast<uint64_t>(next[request->peer]));
      CHECK(request->bytes == (request->source ^ 0xFF) && request->value == -next[request->peer]);
      ++next[request->peer];
      flying.push_back(request->ticket);
    }
    if (flying.size() > 64 || taken == kProducers * kEach) {
      std::swap(flying[random() % flying.size()], flying.back());
      consumer.complete(flying.back());
      flying.pop_back();
    }
    return taken == kProducers * kEach && flying.empty();
  }));
  for (auto& thread : threads) thread.join();
  CHECK(producer.words[layout::kCompleted] == kProducers * kEach);
}

// Four producers on each of two ranks write numbered blocks to the other; readers wait for the signal
// of each block and then look at its bytes.
void exchange(const std::shared_ptr<Transport>& zero, const std::shared_ptr<Transport>& one, int64_t blocks,
              uint64_t largest, int device = -1) {
  std::shared_ptr<Transport> ranks[2] = {zero, one};
  uint64_t signals = kProducers * static_cast<uint64_t>(blocks) * 8;
  uint64_t half = kProducers * static_cast<uint64_t>(blocks) * largest;
  std::vector<std::vector<int64_t>> memory(2);
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<Producer>> producers;
  std::vector<std::unique_ptr<Proxy>> proxies;
  for (int rank = 0; rank < 2; ++rank) {
    memory[rank].resize((signals + 2 * half) / 8 + 1);
    ranks[rank]->attach(3, memory[rank].data(), memory[rank].size() * 8, device);
    producers.push_back(std::make_unique<Producer>(8));
  }
  for (uint32_t rank = 0; rank < 2; ++rank)
    if (auto* rdma = dynamic_cast<RdmaTransport*>(ranks[rank].get()))
      rdma->learn_segment(1 - rank, 3, dynamic_cast<RdmaTransport&>(*ranks[1 - rank]).describe_segment(3));
  auto size_of = [&](uint64_t block) { return block * 7919 % (largest + 1); };
  auto fill_of = [](int rank, uint64_t block) { return static_cast<uint8_t>(1 + block % 250 + rank); };
  for (int rank = 0; rank < 2; ++rank) {
    auto& words = producers[rank]->words;
    proxies.push_back(std::make_unique<Proxy>(words.data(), words.size(), ranks[rank], ProxyOptions{}));
    auto* bytes = reinterpret_cast<uint8_t*>(memory[rank].data());
    for (uint64_t which = 0; which < kProducers; ++which) {
      threads.emplace_back([=, &producers] {
        for (uint64_t i = 0; i < static_cast<uint64_t>(blocks); ++i) {
          uint64_t block = which * static_cast<uint64_t>(blocks) + i;
          std::memset(bytes + signals + block * largest, fill_of(rank, block), size_of(block));
          Request request;
          request.peer = static_cast<uint32_t>(1 - rank);
          request.segment = request.source_segment = 3;
          request.source = signals + block * largest;
          request.target = signals + half + block * largest;
          request.bytes = size_of(block);
          request.signal = block * 8;
          request.value = static_cast<int64_t>(block) + 1;
          producers[rank]->post(request);
        }
      });
      threads.emplace_back([=] {
        for (uint64_t i = 0; i < static_cast<uint64_t>(blocks); ++i) {
          uint64_t block = which * static_cast<uint64_t>(blocks) + i;
          auto* signal = reinterpret_cast<int64_t*>(bytes + block * 8);
          CHECK(eventually([&] { return poll_word(signal) == static_cast<int64_t>(block) + 1; }));
          const uint8_t* came = bytes + signals + half + block * largest;
          for (uint64_t k = 0; k < size_of(block); ++k) CHECK(came[k] == fill_of(1 - rank, block));
          if (size_of(block) < largest) CHECK(came[size_of(block)] == 0);
        }
      });
    }
  }
  for (auto& thread : threads) thread.join();
  for (uint32_t rank = 0; rank < 2; ++rank)
    CHECK(eventually([&] {  // a transport counts, or its requests are complete only when they have arrived
      uint64_t sent = ranks[1 - rank]->counts(rank).sent, arrived = ranks[rank]->counts(1 - rank).arrived;
      return arrived == sent && (sent == 0 || sent >= static_cast<uint64_t>(kProducers * blocks));
    }));
  for (auto& proxy : proxies) {
    CHECK(proxy->stop(kHang));
    CHECK(proxy->error().empty());
    CHECK(proxy->statistics().completions == kProducers * blocks);
  }
  for (auto& rank : ranks) rank->detach(3);
}

void loopback() {
  for (int64_t seed : {-1, 5}) {
    LoopbackOptions options;
    options.shuffle_seed = seed;
    exchange(std::make_shared<LoopbackTransport>("stress", 0, options),
             std::make_shared<LoopbackTransport>("stress", 1, options), 500, 600);
  }
}

void tcp() {
  for (int streams : {1, 3}) {
    Pair pair(streams);
    exchange(pair.ranks[0], pair.ranks[1], 300, 600);
    exchange(pair.ranks[0], pair.ranks[1], 3, 2'500'000);
    for (auto& rank : pair.ranks) rank->stop(kHang);
  }
}

void rdma(bool efa, int device = -1) {
  std::vector<std::shared_ptr<RdmaTransport>> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    RdmaOptions options;
    options.rank = rank;
    for (int rail = 0; rail < 2; ++rail) options.ports.push_back({(efa ? "efa" : "fake") + std::to_string(rail), 1, 0});
    ranks.push_back(efa ? make_efa_transport(options) : make_verbs_transport(options));
  }
  std::string descriptions[2] = {ranks[0]->describe(1), ranks[1]->describe(0)};
  for (uint32_t rank = 0; rank < 2; ++rank) ranks[rank]->connect(1 - rank, descriptions[1 - rank]);
  exchange(ranks[0], ranks[1], 200, 600, device);
  exchange(ranks[0], ranks[1], 3, 1'200'000, device);
  // ends with requests under way
  std::vector<int64_t> memory(8192);
  ranks[0]->attach(0, memory.data(), memory.size() * 8);
  ranks[1]->attach(0, memory.data(), memory.size() * 8);
  ranks[0]->learn_segment(1, 0, ranks[1]->describe_segment(0));
  Producer producer(64);
  for (uint64_t i = 0; i < 64; ++i) {
    Request request;
    request.peer = 1;
    request.source = request.target = 64;
    request.bytes = 8 * i;
    request.value = static_cast<int64_t>(i);
    producer.post(request);
  }
  Proxy proxy(producer.words.data(), producer.words.size(), ranks[0], ProxyOptions{});
  std::this_thread::sleep_for(std::chrono::microseconds(300));
  proxy.stop(milliseconds(0));
  for (auto& rank : ranks) rank->stop(milliseconds(0));
}

// GPU memory: by dma-buf, else by its address, else a message that says what to load.
void rdma_on_device() {
  rdma(false, 0);
  rdma(true, 0);
  auto* control = reinterpret_cast<int64_t (*)(const char*, int64_t)>(
      ::dlsym(::dlopen("libibverbs.so.1", RTLD_NOW), "fake_control"));
  CHECK(control != nullptr);
  RdmaOptions options;
  options.ports = {{"fake0", 1, 0}};
  auto transport = make_verbs_transport(options);
  std::vector<int64_t> memory(4096);
  control("dmabufs", 0);
  transport->attach(0, memory.data(), 8192, 0);
  CHECK(control("dmabufs", 0) == 1);
  transport->attach(1, memory.data(), 8192);
  CHECK(control("dmabufs", 0) == 0);
  control("refuse_dmabuf", EOPNOTSUPP);
  transport->attach(2, memory.data() + 1, 8192, 0);
  control("refuse_memory", EFAULT);
  try {
    transport->attach(3, memory.data(), 8192, 0);
    CHECK(!"it was not refused");
  } catch (const Error& error) {
    std::string words = error.what();
    for (const char* part : {"By dma-buf: ibv_reg_dmabuf_mr: Operation not supported", "By peer memory: Bad address",
                             "nvidia_peermem"})
      CHECK(words.find(part) != std::string::npos);
  }
  control("refuse_memory", 0);
  control("refuse_dmabuf", 0);
  transport->attach(3, memory.data(), 8192, 0);
}

// Proxies and transports that end while requests are under way and segments come and go.
void lifecycle(int device = -1) {
  for (int round = 0; round < 24; ++round) {  // twice every combination of kinds below
    std::vector<std::shared_ptr<Transport>> ranks;
    std::unique_ptr<Pair> pair;
    if (round % 2 == 0) {
      pair = std::make_unique<Pair>(2);
      ranks = {pair->ranks[0], pair->ranks[1]};
      pair.reset();
    } else {
      for (int rank = 0; rank < 2; ++rank)
        ranks.push_back(std::make_shared<LoopbackTransport>("lifecycle", rank, LoopbackOptions{0, 0, round}));
    }
    std::vector<int64_t> a(4096), b(4096), c(64);
    ranks[0]->segments->attach(0, a.data(), a.size() * 8, device);
    ranks[1]->segments->attach(0, b.data(), b.size() * 8, device);
    Producer producer(64), nothing(1);
    for (int i = 0; i < 60; ++i) {
      Request request;
      request.peer = 1;
      request.source = request.target = 64;
      request.bytes = 4000;
      request.value = i;
      producer.post(request);
    }
    Proxy sender(producer.words.data(), producer.words.size(), ranks[0], ProxyOptions{0, 50});
    Proxy receiver(nothing.words.data(), nothing.words.size(), ranks[1], ProxyOptions{-1, 0});
    std::thread attacher([&] {
      for (uint32_t i = 1; i < 50; ++i) {
        ranks[1]->segments->attach(i, c.data(), c.size() * 8, device);
        ranks[1]->segments->detach(i);
      }
    });
    if (round % 4 < 2) {
      sender.stop(milliseconds(0));
    } else {
      ranks[1]->segments->detach(0);  // in the middle: an error of one of them, and never a write afterwards
      std::fill(b.begin(), b.end(), 0);
      sender.stop(milliseconds(100));
    }
    attacher.join();
    if (round % 3 == 0) ranks[1]->stop(milliseconds(50));
    receiver.stop(milliseconds(0));
    for (auto& rank : ranks) rank->stop(milliseconds(0));  // the memory is ours again
    std::fill(a.begin(), a.end(), 0);
    std::fill(b.begin(), b.end(), 0);
  }
}

// An error of the device: the proxy says so, and the words that kernels look at become 1.
void abort_flags() {
  std::shared_ptr<Transport> rank = std::make_shared<LoopbackTransport>("abort_flags", 0, LoopbackOptions{});
  std::vector<int64_t> memory(512), flags(2);
  rank->segments->attach(0, memory.data(), memory.size() * 8, 1);
  Producer producer(4);
  Proxy proxy(producer.words.data(), producer.words.size(), rank, ProxyOptions{});
  proxy.set_abort_flag(&flags[0], 1);
  Request request;
  request.bytes = 8;
  request.target = 64;
  request.signal = 32;
  request.value = 5;
  producer.post(request);
  CHECK(eventually([&] { return poll_word(&memory[4]) == 5; }));
  CHECK(poll_word(&flags[0]) == 0);
  request.bytes = 666;  // see fake_cuda
  producer.post(request);
  CHECK(eventually([&] { return poll_word(&flags[0]) == 1; }));
  CHECK(proxy.error().find("network proxy of rank 0: CUDA, copy and set signals: CUDA_ERROR_ILLEGAL_ADDRESS") == 0);
  proxy.set_abort_flag(&flags[1], -1);  // too late to be early
  CHECK(poll_word(&flags[1]) == 1);
  bool refused = false;
  try {
    rank->segments->attach(1, memory.data(), 8, 7);
  } catch (const Error& error) {
    refused = std::string(error.what()).find("CUDA, find the device: CUDA_ERROR_INVALID_DEVICE") == 0;
  }
  CHECK(refused);
}

struct Calls {
  Calls() {
    static auto* ask = reinterpret_cast<void (*)(int64_t*, int64_t*, int64_t*)>(
        ::dlsym(::dlopen("libcuda.so.1", RTLD_NOW), "fake_calls"));
    CHECK(ask != nullptr);
    ask(&copies, &writes, &launches);
  }
  Calls operator-(const Calls& before) const {
    Calls made = *this;
    made.copies -= before.copies;
    made.writes -= before.writes;
    made.launches -= before.launches;
    return made;
  }
  int64_t copies, writes, launches;
};

// Two loopback ranks, of which the first sends.
struct Sending {
  Sending(LoopbackOptions options, uint64_t bytes, int target_device = 0) : memory(2, std::vector<int64_t>(bytes / 8)) {
    for (int rank = 0; rank < 2; ++rank) {
      ranks.push_back(std::make_shared<LoopbackTransport>("sending", rank, options));
      ranks[rank]->attach(0, memory[rank].data(), bytes, rank == 0 ? 0 : target_device);
    }
  }
  ~Sending() {
    for (auto& rank : ranks) rank->stop(milliseconds(0));
  }
  uint8_t* bytes(int rank) { return reinterpret_cast<uint8_t*>(memory[rank].data()); }
  std::vector<std::vector<int64_t>> memory;
  std::vector<std::shared_ptr<Transport>> ranks;
};

// Requests that lie in the ring already: how many calls of the driver they take. Every block is there when its
// signal is.
Calls burst(LoopbackOptions options, int target_device = 0) {
  constexpr uint64_t kBlocks = 256, kBytes = 1024, kData = kBlocks * 8;
  Sending sending(options, kData + kBlocks * kBytes, target_device);
  auto& memory = sending.memory;
  Producer producer(kBlocks);
  for (uint64_t block = 0; block < kBlocks; ++block) {
    std::fill_n(memory[0].begin() + (kData + block * kBytes) / 8, kBytes / 8, block + 1);
    Request request;
    request.peer = 1;
    request.source = request.target = kData + block * kBytes;
    request.bytes = kBytes;
    request.signal = block * 8;
    request.value = 5;
    producer.post(request);
  }
  Calls before;
  auto start = std::chrono::steady_clock::now();
  Proxy proxy(producer.words.data(), producer.words.size(), sending.ranks[0], ProxyOptions{});
  for (uint64_t block = 0; block < kBlocks; ++block) {
    CHECK(eventually([&] { return poll_word(&memory[1][block]) == 5; }));
    for (uint64_t i = 0; i < kBytes / 8; ++i)
      CHECK(memory[1][(kData + block * kBytes) / 8 + i] == static_cast<int64_t>(block) + 1);
  }
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  CHECK(options.bytes_per_s == 0 || seconds >= kBlocks * kBytes / options.bytes_per_s);
  CHECK(proxy.stop(kHang));
  CHECK(proxy.statistics().completions == kBlocks);
  return Calls() - before;
}

void bursts() {
  // a proxy takes 64 requests out of its ring before it lets the transport work; a batch has room for 32
  Calls at_once = burst({});
  CHECK(at_once.launches == 8 && at_once.copies == 0 && at_once.writes == 0);
  // one request every 5 us: those of 20 us go together
  LoopbackOptions paced;
  paced.bytes_per_s = 1024 / 5e-6;
  paced.latency_ns = 5000;
  Calls in_time = burst(paced);
  CHECK(in_time.launches <= 64 && in_time.copies == 0 && in_time.writes == 0);
  burst({0, 0, 1});
  // to another device, and to host memory, the driver copies; the host's signal is a plain store, and waits for it
  CHECK(burst({}, 1).copies == 256);
  CHECK(burst({}, -1).copies == 256);
  burst(paced, -1);
  burst({0, 0, 1}, -1);
}

// Any size at any address, each between bytes that nobody may touch; a request without bytes only has a signal.
void odd_places() {
  constexpr uint64_t kSizes[] = {0, 1, 7, 8, 15, 16, 17, 100, 4095, 4096, 16383, 16384, 16385, 50001, 70000};
  constexpr uint64_t kData = 4096, kRoom = 72 * 1024, kCount = std::size(kSizes) * 4;
  Sending sending({}, kData + kCount * kRoom);
  std::mt19937_64 random(4);
  for (uint64_t i = kData; i < kData + kCount * kRoom; ++i) sending.bytes(0)[i] = static_cast<uint8_t>(random());
  std::vector<Request> requests(kCount);
  Producer producer(kCount);
  for (uint64_t i = 0; i < kCount; ++i) {
    Request& request = requests[i];
    request.peer = 1;
    request.bytes = kSizes[i / 4];
    request.source = kData + i * kRoom + (i % 2 == 0 ? 0 : random() % 64);
    request.target = kData + i * kRoom + 64 + (i % 4 < 2 ? 0 : random() % 64);
    request.signal = i * 8;
    request.value = static_cast<int64_t>(i) + 1;
    producer.post(request);
  }
  Proxy proxy(producer.words.data(), producer.words.size(), sending.ranks[0], ProxyOptions{});
  CHECK(proxy.stop(kHang));
  std::vector<uint8_t> expected(kData + kCount * kRoom);
  for (const Request& request : requests) {
    std::memcpy(expected.data() + request.signal, &request.value, 8);
    std::memcpy(expected.data() + request.target, sending.bytes(0) + request.source, request.bytes);
  }
  CHECK(std::memcmp(expected.data(), sending.bytes(1), expected.size()) == 0);
}

// Many requests to a few words, of values that grow and shrink, in one batch: the highest stays, and was never undone.
void one_word_for_many() {
  for (uint64_t bytes : {0, 8}) {
    Sending sending({}, 8192);
    Producer producer(200);
    std::vector<int64_t> highest(3), seen(3);
    for (int64_t i = 0; i < 200; ++i) {
      Request request;
      request.peer = 1;
      request.bytes = bytes;
      request.source = request.target = 1024 + static_cast<uint64_t>(i) * 8;
      request.signal = static_cast<uint64_t>(i % 3) * 8;
      request.value = i % 7 == 0 ? -5 : i < 150 ? i : 300 - i;
      highest[i % 3] = std::max(highest[i % 3], request.value);
      producer.post(request);
    }
    Calls before;
    Proxy proxy(producer.words.data(), producer.words.size(), sending.ranks[0], ProxyOptions{});
    CHECK(eventually([&] {
      for (int word = 0; word < 3; ++word) {
        int64_t now = poll_word(&sending.memory[1][word]);
        CHECK(now >= seen[word]);
        seen[word] = now;
      }
      return seen == highest;
    }));
    CHECK(proxy.stop(kHang));
    CHECK(proxy.statistics().completions == 200);
    CHECK(std::equal(highest.begin(), highest.end(), sending.memory[1].begin()));
    Calls made = Calls() - before;  // signals alone need no SM
    CHECK(bytes == 0 ? made.launches == 0 && made.writes <= 4 : made.launches <= 8 && made.writes == 0);
  }
}

// What was under way is done when detach returns; the memory is not touched any more.
void detached_in_flight() {
  for (int round = 0; round < 10; ++round) {
    LoopbackOptions options;
    options.bytes_per_s = 4e8;
    Sending sending(options, 65536 + 8);
    Producer producer(256);
    for (int64_t i = 0; i < 200; ++i) {
      Request request;
      request.peer = 1;
      request.source = request.target = 8;
      request.bytes = 60000;
      request.value = i + 1;
      producer.post(request);
    }
    Proxy proxy(producer.words.data(), producer.words.size(), sending.ranks[0], ProxyOptions{});
    CHECK(eventually([&] { return poll_word(&sending.memory[1][0]) > round; }));
    sending.ranks[1]->detach(0);
    std::fill(sending.memory[1].begin(), sending.memory[1].end(), 77);
    CHECK(eventually([&] { return !proxy.error().empty(); }));
    CHECK(proxy.error().find("segment 0 is not attached on rank 1") != std::string::npos);
    proxy.stop(milliseconds(0));
    CHECK(std::count(sending.memory[1].begin(), sending.memory[1].end(), 77) == 65536 / 8 + 1);
  }
}

// The driver refuses a batch: what it took before is waited for all the same, and nobody is told that it was done.
void refused() {
  Segments rank(0);
  std::vector<int64_t> memory(16384);
  rank.attach(0, memory.data(), memory.size() * 8, 0);
  CopyQueue& copy_queue = rank.copy_queue_of(0);
  auto copy = [&](uint64_t bytes) {
    return copy_queue.copy(rank.pin(0, 0, bytes, "target"), rank.pin(0, 65536, bytes, "source"), bytes);
  };
  for (int i = 0; i < 200; ++i) {
    copy(4000);
    copy_queue.flush();
  }
  CompletionToken never = copy(666);  // see fake_cuda
  rank.detach(0);          // asks the driver, which refuses
  std::fill(memory.begin(), memory.begin() + 8192, 77);  // the target, and not the source
  std::this_thread::sleep_for(milliseconds(50));
  CHECK(std::count(memory.begin(), memory.end(), 77) == 8192);
  auto is_refused = [](auto ask) {
    try {
      ask();
    } catch (const Error& error) {
      return std::string(error.what()).find("CUDA, copy and set signals: CUDA_ERROR_ILLEGAL_ADDRESS") == 0;
    }
    return false;
  };
  CHECK(is_refused([&] { never.done(); }));
  CHECK(is_refused([&] { copy_queue.flush(); }));
  rank.attach(1, memory.data(), memory.size() * 8, 0);  // nor is anything taken that would never be done
  CHECK(is_refused([&] { copy_queue.raise(rank.pin_signal(1, 0), 1); }));
  CHECK(is_refused([&] { copy_queue.copy(rank.pin(1, 0, 8, "target"), rank.pin(1, 65536, 8, "source"), 8); }));
}

// All of the above with memory on a device. It may be host memory in truth: the driver is a fake one.
void on_device() {
  for (int64_t seed : {-1, 5}) {
    LoopbackOptions options;
    options.shuffle_seed = seed;
    exchange(std::make_shared<LoopbackTransport>("cuda", 0, options),
             std::make_shared<LoopbackTransport>("cuda", 1, options), 150, 600, 0);
  }
  Pair pair(3);
  exchange(pair.ranks[0], pair.ranks[1], 200, 600, 0);
  exchange(pair.ranks[0], pair.ranks[1], 3, 2'500'000, 1);
  for (auto& rank : pair.ranks) rank->stop(kHang);
  bursts();
  odd_places();
  one_word_for_many();
  detached_in_flight();
  lifecycle(0);
  refused();
  abort_flags();
}

}  // namespace
}  // namespace selftest

int main(int count, char** arguments) {
  std::string what = count > 1 ? arguments[1] : "";
  try {
    if (what == "ring") selftest::ring();
    else if (what == "loopback") selftest::loopback();
    else if (what == "frames") selftest::frames();
    else if (what == "counting") selftest::counting();
    else if (what == "verbs") selftest::rdma(false);
    else if (what == "efa") selftest::rdma(true);
    else if (what == "rdma-on-device") selftest::rdma_on_device();
    else if (what == "tcp") selftest::tcp();
    else if (what == "lifecycle") selftest::lifecycle();
    else if (what == "cuda") selftest::on_device();
    else if (what == "fuzz" && count > 2) {
      double seconds = std::atof(arguments[2]);
      selftest::fuzz_frames(seconds * 0.8);
      selftest::fuzz_handshake(seconds * 0.2);
    } else {
      std::fprintf(stderr, "usage: selftest ring | frames | counting | loopback | tcp | verbs | efa | rdma-on-device | lifecycle | cuda | fuzz SECONDS\n");
      return 2;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", what.c_str(), error.what());
    return 1;
  }
  std::printf("%s: well\n", what.c_str());
  return 0;
}
