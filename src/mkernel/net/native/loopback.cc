#include "loopback.h"

#include <algorithm>
#include <mutex>
#include <tuple>

namespace mkernel {
namespace {

constexpr size_t kAtOnce = 1024;      // requests in flight
constexpr int kPiecesPerPoll = 256;
constexpr auto kSoon = std::chrono::microseconds(100);  // the proxy does not sleep when a signal is due so soon
// See loopback.h. The windows are short beside what they save: a call of the driver takes some 4 us, and the
// proxies of one process make theirs one after the other.
constexpr auto kCopiedAhead = std::chrono::microseconds(20);
constexpr auto kCopiedTogether = std::chrono::microseconds(200);
constexpr auto kRaisedTogether = std::chrono::microseconds(20);
constexpr uint64_t kMostJoined = 2 << 20;  // no larger: a mover has made copies up to this size when it was made

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

// Up to four pieces in random order.
std::vector<std::pair<uint64_t, uint64_t>> LoopbackTransport::cut(uint64_t bytes) {
  if (bytes == 0) return {};
  std::vector<uint64_t> cuts = {0, bytes};
  for (int i = 0; i < 3; ++i) cuts.push_back(random_() % bytes);
  std::sort(cuts.begin(), cuts.end());
  std::vector<std::pair<uint64_t, uint64_t>> pieces;
  for (size_t i = 1; i < cuts.size(); ++i)
    if (cuts[i - 1] < cuts[i]) pieces.emplace_back(cuts[i - 1], cuts[i]);
  std::shuffle(pieces.begin(), pieces.end(), random_);
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
  flights_.push_back({request, std::move(peer), start, due, {}});
  if (options_.shuffle_seed >= 0) flights_.back().pieces = cut(request.bytes);
  return true;
}

Mark LoopbackTransport::copy(const Request& request, Segments& peer) {
  auto from = segments->pin(request.source_segment, request.source, request.bytes, "source");
  auto to = peer.pin(request.segment, request.target, request.bytes, "target");
  return start_copy(std::move(to), std::move(from), request.bytes);
}

// The bytes of these requests; those that are neighbours both here and there go in one copy.
void LoopbackTransport::copy_joined(std::vector<Flight*> flights) {
  auto place = [](const Flight* flight) {
    const Request& request = flight->request;
    return std::tie(request.peer, request.segment, request.source_segment, request.target);
  };
  std::stable_sort(flights.begin(), flights.end(), [&](auto* one, auto* other) { return place(one) < place(other); });
  for (size_t next = 0; next < flights.size();) {
    size_t first = next;
    Request whole = flights[next++]->request;
    for (; next < flights.size(); ++next) {
      const Request& more = flights[next]->request;
      if (more.peer != whole.peer || more.segment != whole.segment || more.source_segment != whole.source_segment ||
          more.target != whole.target + whole.bytes || more.source != whole.source + whole.bytes ||
          whole.bytes + more.bytes > kMostJoined)
        break;
      whole.bytes += more.bytes;
    }
    Mark copied = copy(whole, *flights[first]->peer);
    for (; first < next; ++first) flights[first]->copied = copied;
  }
}

// The signal, if the bytes are sure to be there before it.
bool LoopbackTransport::raise(Flight& flight) {
  const Request& request = flight.request;
  auto signal = flight.peer->pin_signal(request.segment, request.signal);
  // the mover of the target works in order; what comes from a device to host memory is waited for
  if (signal.mover == nullptr && !flight.copied.done()) return false;
  flight.raised = raise_signal(std::move(signal), request.value);
  Mover* mover = flight.raised.mover;
  if (mover != nullptr && std::find(busy_.begin(), busy_.end(), mover) == busy_.end()) busy_.push_back(mover);
  return true;
}

void LoopbackTransport::land(size_t flight) {
  landing_.push_back(std::move(flights_[flight]));
  flights_.erase(flights_.begin() + static_cast<std::ptrdiff_t>(flight));
}

// Start the copies whose time has come, and those of the near future with them.
bool LoopbackTransport::copy_ahead(Clock::time_point now) {
  if (copied_ == flights_.size() || flights_[copied_].start > now + kCopiedAhead) return false;
  std::vector<Flight*> flights;
  for (; copied_ < flights_.size() && flights_[copied_].start <= now + kCopiedTogether; ++copied_)
    if (flights_[copied_].request.bytes > 0) flights.push_back(&flights_[copied_]);
  copy_joined(std::move(flights));
  return true;
}

// Signals become due in the order of the requests. The first one waits for those that follow closely.
bool LoopbackTransport::raise_together(Clock::time_point now) {
  if (copied_ == 0) return false;
  auto until = std::max(now, flights_.front().due + kRaisedTogether);
  size_t count = 0;
  while (count < copied_ && flights_[count].due <= until) ++count;
  if (count == 0 || flights_[count - 1].due > now) return false;
  bool any = false;
  for (; count > 0 && raise(flights_.front()); --count) {
    land(0);
    --copied_;
    any = true;
  }
  return any;
}

// One step of a request: its next piece, then its signal.
bool LoopbackTransport::advance(size_t chosen) {
  Flight& flight = flights_[chosen];
  if (flight.pieces.empty()) {
    if (!raise(flight)) return false;
    land(chosen);
    return true;
  }
  auto [begin, end] = flight.pieces.back();
  Request piece = flight.request;
  piece.source += begin;
  piece.target += begin;
  piece.bytes = end - begin;
  flight.copied = copy(piece, *flight.peer);
  flight.pieces.pop_back();
  return true;
}

bool LoopbackTransport::fly_shuffled(Clock::time_point now) {
  bool any = false;
  for (int i = 0; i < kPiecesPerPoll && !flights_.empty(); ++i) {
    if (random_() % 16 == 0) return true;  // put off
    size_t chosen = random_() % flights_.size();
    if (flights_[chosen].due <= now) any |= advance(chosen);
  }
  return any;
}

bool LoopbackTransport::poll(std::vector<int64_t>& completed) {
  if (flights_.empty() && landing_.empty()) return false;
  auto now = Clock::now();
  bool any = false;
  if (options_.shuffle_seed >= 0) {
    any = fly_shuffled(now);
  } else {
    any = copy_ahead(now);
    any |= raise_together(now);
  }
  for (Mover* mover : busy_) mover->flush();
  busy_.clear();
  while (!landing_.empty() && landing_.front().raised.done()) {
    completed.push_back(landing_.front().request.ticket);
    landing_.pop_front();
    any = true;
  }
  return any || !landing_.empty() || (!flights_.empty() && flights_.front().due - now < kSoon);
}

}  // namespace mkernel
