#include "loopback.h"

#include <algorithm>
#include <cstring>
#include <mutex>

namespace mkernel {
namespace {

constexpr size_t kAtOnce = 1024;      // requests in flight
constexpr int kPiecesPerPoll = 256;

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
  if (flights_.size() >= kAtOnce) return false;
  auto peer = find(request.peer);
  // all of it is checked before anything is written
  segments->pin(request.source_segment, request.source, request.bytes, "source");
  peer->pin(request.segment, request.target, request.bytes, "target");
  peer->pin_signal(request.segment, request.signal);
  Clock::time_point due{};
  if (options_.latency_ns > 0 || options_.bytes_per_s > 0) {
    link_free_ = std::max(link_free_, Clock::now());
    if (options_.bytes_per_s > 0)
      link_free_ += std::chrono::nanoseconds(
          static_cast<int64_t>(static_cast<double>(request.bytes) * 1e9 / options_.bytes_per_s));
    due = link_free_ + std::chrono::nanoseconds(options_.latency_ns);
  }
  flights_.push_back({request, std::move(peer), due, cut(request.bytes)});
  return true;
}

void LoopbackTransport::copy_piece(Flight& flight) {
  auto [begin, end] = flight.pieces.back();
  const Request& request = flight.request;
  auto from = segments->pin(request.source_segment, request.source + begin, end - begin, "source");
  auto to = flight.peer->pin(request.segment, request.target + begin, end - begin, "target");
  std::memmove(to.data, from.data, end - begin);  // a rank may write to itself
  flight.pieces.pop_back();
}

bool LoopbackTransport::poll(std::vector<int64_t>& completed) {
  if (flights_.empty()) return false;
  bool shuffled = options_.shuffle_seed >= 0;
  bool paced = options_.latency_ns > 0 || options_.bytes_per_s > 0;
  auto now = paced ? Clock::now() : Clock::time_point{};
  bool any = false;
  for (int i = 0; i < kPiecesPerPoll && !flights_.empty(); ++i) {
    if (shuffled && random_() % 16 == 0) return true;  // put off
    size_t chosen = shuffled ? random_() % flights_.size() : 0;
    Flight& flight = flights_[chosen];
    if (flight.due > now) {
      if (shuffled) continue;
      break;
    }
    any = true;
    if (!flight.pieces.empty()) copy_piece(flight);
    if (!flight.pieces.empty()) continue;
    raise_signal(flight.peer->pin_signal(flight.request.segment, flight.request.signal), flight.request.value);
    completed.push_back(flight.request.ticket);
    flights_.erase(flights_.begin() + static_cast<std::ptrdiff_t>(chosen));
  }
  return any;
}

}  // namespace mkernel
