#include "loopback.h"

#include <algorithm>
#include <mutex>

namespace mkernel {
namespace {

constexpr size_t kAtOnce = 1024;      // requests in flight
constexpr int kPiecesPerPoll = 256;
constexpr auto kSoon = std::chrono::microseconds(100);  // the proxy does not sleep when a signal is due so soon
// See loopback.h. Short beside what it saves: a call of the driver takes some 4 us, and the proxies of one process
// make theirs one after the other.
constexpr auto kTogether = std::chrono::microseconds(20);

// Where the ranks of this process find each other's segments.
struct Registry {
  std::mutex mutex;
  std::map<std::pair<std::string, uint32_t>, std::weak_ptr<Segments>> ranks;
};

Registry& registry() {
  static auto* shared = new Registry;  // never destroyed: threads may outlive main
  return *shared;
}

}  // namespace

LoopbackTransport::LoopbackTransport(std::string job, int rank, LoopbackOptions options)
    : Transport(rank), job_(std::move(job)), options_(options), random_(static_cast<uint64_t>(options.shuffle_seed)) {
  if (rank < 0 || rank > 0xFFFF) fail("rank must be from 0 to 65535, got ", rank);
  Registry& shared = registry();
  std::lock_guard<std::mutex> lock(shared.mutex);
  auto& entry = shared.ranks[{job_, static_cast<uint32_t>(rank)}];
  if (!entry.expired()) fail("job '", job_, "' has a rank ", rank, " in this process already");
  entry = segments;
}

LoopbackTransport::~LoopbackTransport() { LoopbackTransport::stop(std::chrono::milliseconds(0)); }

void LoopbackTransport::stop(std::chrono::milliseconds) {
  {
    Registry& shared = registry();
    std::lock_guard<std::mutex> lock(shared.mutex);
    auto it = shared.ranks.find({job_, static_cast<uint32_t>(rank)});
    if (it != shared.ranks.end() && it->second.lock() == segments) shared.ranks.erase(it);
  }
  segments->close();
}

std::shared_ptr<Segments> LoopbackTransport::find(uint32_t peer) {
  auto known = peers_.find(peer);
  if (known != peers_.end()) return known->second;
  Registry& shared = registry();
  std::lock_guard<std::mutex> lock(shared.mutex);
  auto it = shared.ranks.find({job_, peer});
  auto found = it == shared.ranks.end() ? nullptr : it->second.lock();
  if (!found) fail("rank ", peer, " of job '", job_, "' is not in this process");
  peers_[peer] = found;
  return found;
}

// When shuffled up to four fragments, in random order.
std::vector<std::pair<uint64_t, uint64_t>> LoopbackTransport::fragmentation(uint64_t bytes) {
  if (bytes == 0) return {};
  if (options_.shuffle_seed < 0) return {{0, bytes}};
  std::vector<uint64_t> cuts = {0, bytes};
  for (int i = 0; i < 3; ++i) cuts.push_back(random_() % bytes);
  std::sort(cuts.begin(), cuts.end());
  std::vector<std::pair<uint64_t, uint64_t>> fragments;
  for (size_t i = 1; i < cuts.size(); ++i)
    if (cuts[i - 1] < cuts[i]) fragments.emplace_back(cuts[i - 1], cuts[i]);
  std::shuffle(fragments.begin(), fragments.end(), random_);
  return fragments;
}

bool LoopbackTransport::post(const Request& request) {
  if (flights_.size() + landing_.size() >= kAtOnce) return false;
  auto peer = find(request.peer);
  // everything is checked before anything is written
  segments->pin(request.source_segment, request.source, request.bytes, "source");
  peer->pin(request.segment, request.target, request.bytes, "target");
  peer->pin_signal(request.segment, request.signal);
  Clock::time_point due{};
  if (options_.latency_ns > 0 || options_.bytes_per_s > 0) {
    double seconds = options_.bytes_per_s > 0 ? static_cast<double>(request.bytes) / options_.bytes_per_s : 0;
    link_free_ = std::max(link_free_, Clock::now()) + std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
    due = link_free_ + std::chrono::nanoseconds(options_.latency_ns);
  }
  flights_.push_back({request, std::move(peer), due, fragmentation(request.bytes)});
  return true;
}

// At the end of the poll.
CompletionToken LoopbackTransport::flush_later(CompletionToken token) {
  if (token.copy_queue != nullptr && std::find(busy_.begin(), busy_.end(), token.copy_queue) == busy_.end())
    busy_.push_back(token.copy_queue);
  return token;
}

void LoopbackTransport::copy_piece(Flight& flight) {
  const Request& request = flight.request;
  auto [begin, end] = flight.fragments.back();
  auto from = segments->pin(request.source_segment, request.source + begin, end - begin, "source");
  auto to = flight.peer->pin(request.segment, request.target + begin, end - begin, "target");
  flight.copied = flush_later(start_copy(std::move(to), std::move(from), end - begin));
  flight.fragments.pop_back();
}

// The signal of a request whose copies were started, if the bytes are sure to be there before it.
bool LoopbackTransport::raise(size_t chosen) {
  Flight& flight = flights_[chosen];
  const Request& request = flight.request;
  auto signal = flight.peer->pin_signal(request.segment, request.signal);
  // the copy_queue of the target keeps that order; what comes from a device to host memory is waited for
  if (signal.copy_queue == nullptr && !flight.copied.done()) return false;
  flight.raised = flush_later(raise_signal(std::move(signal), request.value));
  landing_.push_back(std::move(flight));
  flights_.erase(flights_.begin() + static_cast<std::ptrdiff_t>(chosen));
  return true;
}

// All requests that are due, once the first one has waited for those that follow closely.
bool LoopbackTransport::fly_together(Clock::time_point now) {
  if (flights_.empty()) return false;
  auto until = std::max(now, flights_.front().due + kTogether);
  size_t count = 0;
  while (count < flights_.size() && flights_[count].due <= until) ++count;
  if (count == 0 || flights_[count - 1].due > now) return false;
  bool any = false;
  for (size_t next = 0; count > 0; --count) {
    for (; !flights_[next].fragments.empty(); any = true) copy_piece(flights_[next]);
    if (raise(next)) any = true;
    else ++next;
  }
  return any;
}

// Steps of requests in random order: the next fragment, or the signal after the last.
bool LoopbackTransport::fly_shuffled(Clock::time_point now) {
  bool any = false;
  for (int i = 0; i < kPiecesPerPoll && !flights_.empty(); ++i) {
    if (random_() % 16 == 0) return true;  // put off
    size_t chosen = random_() % flights_.size();
    if (flights_[chosen].due > now) continue;
    if (flights_[chosen].fragments.empty()) {
      any |= raise(chosen);
    } else {
      copy_piece(flights_[chosen]);
      any = true;
    }
  }
  return any;
}

bool LoopbackTransport::poll(std::vector<int64_t>& completed) {
  if (flights_.empty() && landing_.empty()) return false;
  auto now = Clock::now();
  bool any = options_.shuffle_seed >= 0 ? fly_shuffled(now) : fly_together(now);
  for (CopyQueue* copy_queue : busy_) copy_queue->flush();
  busy_.clear();
  while (!landing_.empty() && landing_.front().raised.done()) {
    completed.push_back(landing_.front().request.ticket);
    landing_.pop_front();
    any = true;
  }
  return any || !landing_.empty() || (!flights_.empty() && flights_.front().due - now < kSoon);
}

}  // namespace mkernel
