#include "loopback.h"

#include <algorithm>
#include <mutex>

namespace mkernel {
namespace {

constexpr size_t kAtOnce = 1024;      // requests in flight
constexpr int kPiecesPerPoll = 256;
constexpr auto kSoon = std::chrono::microseconds(100);  // the proxy does not sleep when a signal is due so soon

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

// In one piece, or, when shuffled, in up to four pieces in random order.
std::vector<std::pair<uint64_t, uint64_t>> LoopbackTransport::cut(uint64_t bytes) {
  if (bytes == 0) return {};
  std::vector<uint64_t> cuts = {0, bytes};
  if (options_.shuffle_seed >= 0)
    for (int i = 0; i < 3; ++i) cuts.push_back(random_() % bytes);
  std::sort(cuts.begin(), cuts.end());
  std::vector<std::pair<uint64_t, uint64_t>> pieces;
  for (size_t i = 1; i < cuts.size(); ++i)
    if (cuts[i - 1] < cuts[i]) pieces.emplace_back(cuts[i - 1], cuts[i]);
  if (options_.shuffle_seed >= 0) std::shuffle(pieces.begin(), pieces.end(), random_);
  return pieces;
}

bool LoopbackTransport::post(const Request& request) {
  if (flights_.size() + landing_.size() >= kAtOnce) return false;
  auto peer = find(request.peer);
  // all of it is checked before anything is written
  segments->pin(request.source_segment, request.source, request.bytes, "source");
  peer->pin(request.segment, request.target, request.bytes, "target");
  peer->pin_signal(request.segment, request.signal);
  Clock::time_point start{}, due{};
  if (options_.latency_ns > 0 || options_.bytes_per_s > 0) {
    start = std::max(link_free_, Clock::now());
    double seconds = options_.bytes_per_s > 0 ? static_cast<double>(request.bytes) / options_.bytes_per_s : 0;
    link_free_ = start + std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
    due = link_free_ + std::chrono::nanoseconds(options_.latency_ns);
  }
  flights_.push_back({request, std::move(peer), start, due, cut(request.bytes)});
  return true;
}

void LoopbackTransport::copy_piece(Flight& flight) {
  auto [begin, end] = flight.pieces.back();
  const Request& request = flight.request;
  auto from = segments->pin(request.source_segment, request.source + begin, end - begin, "source");
  auto to = flight.peer->pin(request.segment, request.target + begin, end - begin, "target");
  start_copy(std::move(to), std::move(from), end - begin);
  flight.pieces.pop_back();
}

// One step of a request; false if it is not time for one.
bool LoopbackTransport::advance(Flight& flight, Clock::time_point now) {
  if (!flight.pieces.empty()) {
    if (flight.start > now) return false;
    copy_piece(flight);
    return true;
  }
  if (flight.due > now) return false;
  const Request& request = flight.request;
  flight.mark = raise_signal(flight.peer->pin_signal(request.segment, request.signal), request.value);
  Mover* mover = flight.mark.mover;
  if (mover != nullptr && std::find(busy_.begin(), busy_.end(), mover) == busy_.end()) busy_.push_back(mover);
  return true;
}

void LoopbackTransport::land(size_t flight) {
  landing_.push_back(std::move(flights_[flight]));
  flights_.erase(flights_.begin() + static_cast<std::ptrdiff_t>(flight));
}

// Later requests may be copied while earlier ones wait for their time: that is the link's latency.
bool LoopbackTransport::fly_in_order(Clock::time_point now) {
  bool any = false;
  int steps = 0;
  for (size_t i = 0; i < flights_.size() && steps < kPiecesPerPoll && flights_[i].start <= now;) {
    bool copied = flights_[i].pieces.empty();
    bool moved = advance(flights_[i], now);
    any |= moved;
    steps += moved;
    if (moved && copied) land(i);
    else if (!moved) ++i;
  }
  return any;
}

bool LoopbackTransport::fly_shuffled(Clock::time_point now) {
  bool any = false;
  for (int i = 0; i < kPiecesPerPoll && !flights_.empty(); ++i) {
    if (random_() % 16 == 0) return true;  // put off
    size_t chosen = random_() % flights_.size();
    bool copied = flights_[chosen].pieces.empty();
    if (flights_[chosen].due > now || !advance(flights_[chosen], now)) continue;
    any = true;
    if (copied) land(chosen);
  }
  return any;
}

bool LoopbackTransport::poll(std::vector<int64_t>& completed) {
  if (flights_.empty() && landing_.empty()) return false;
  bool paced = options_.latency_ns > 0 || options_.bytes_per_s > 0;
  auto now = paced ? Clock::now() : Clock::time_point{};
  bool any = options_.shuffle_seed >= 0 ? fly_shuffled(now) : fly_in_order(now);
  for (Mover* mover : busy_) mover->flush();
  busy_.clear();
  while (!landing_.empty() && landing_.front().mark.done()) {
    completed.push_back(landing_.front().request.ticket);
    landing_.pop_front();
    any = true;
  }
  return any || !landing_.empty() || (!flights_.empty() && flights_.front().due - now < kSoon);
}

}  // namespace mkernel
