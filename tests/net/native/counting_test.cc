// The counting protocol over a network that delivers in any order: several senders, several ways, each way
// a bag of which anything may come next.
#include <map>
#include <random>
#include <set>

#include "counting.h"
#include "selftest.h"

namespace selftest {
namespace {

struct Parcel {
  bool announcement = false;
  Announcement what;
  uint64_t message = 0;
};

struct Sender {
  explicit Sender(uint32_t rank) : labels(rank) {}
  Labels labels;
  std::map<uint64_t, std::pair<uint32_t, uint32_t>> unacknowledged;  // message -> label, parcels left
};

// `waiting` parcels of each way have arrived but were not looked at: a receiver that lags behind.
void shuffled(uint64_t seed, int senders, int ways, size_t lag, uint64_t messages) {
  std::mt19937_64 random(seed);
  std::vector<std::unique_ptr<Sender>> all;
  for (int i = 0; i < senders; ++i) all.push_back(std::make_unique<Sender>(static_cast<uint32_t>(100 + i)));
  std::vector<std::vector<Parcel>> network(static_cast<size_t>(ways));
  std::vector<std::deque<Parcel>> arrived(static_cast<size_t>(ways));
  Tally tally;
  std::map<uint64_t, uint32_t> placed, expected;  // by message: fragments whose bytes are in memory, and all
  std::set<uint64_t> raised;
  uint64_t begun = 0;
  auto sender_of_message = [&](uint64_t message) -> Sender& { return *all[message % all.size()]; };
  auto take = [&](size_t way) {
    if (arrived[way].empty()) return;
    Parcel parcel = arrived[way].front();
    arrived[way].pop_front();
    auto whole = parcel.announcement ? tally.announce(parcel.what) : tally.fragment(parcel.what.label);
    if (!whole) return;
    auto message = static_cast<uint64_t>(whole->value);
    CHECK(whole->label == parcel.what.label && whole->signal == message * 8);
    CHECK(placed[message] == expected[message]);  // every byte is there
    CHECK(raised.insert(message).second);
    placed.erase(message);
    expected.erase(message);
  };
  while (raised.size() < messages) {
    if (begun < messages && sender_of_message(begun).labels.has_space() && random() % 2 == 0) {
      uint64_t message = begun++;
      Sender& sender = sender_of_message(message);
      Parcel parcel;
      parcel.message = message;
      parcel.what.label = sender.labels.begin();
      parcel.what.fragments = static_cast<uint32_t>(random() % 5);
      parcel.what.signal = message * 8;
      parcel.what.value = static_cast<int64_t>(message);
      expected[message] = parcel.what.fragments;
      sender.unacknowledged[message] = {parcel.what.label, parcel.what.fragments + 1};
      for (uint32_t i = 0; i <= parcel.what.fragments; ++i) {
        parcel.announcement = i == parcel.what.fragments;
        network[random() % network.size()].push_back(parcel);
      }
    }
    // anything on a way arrives: its bytes are in memory, its event waits, and the sender is told
    size_t way = random() % network.size();
    if (!network[way].empty() && (arrived[way].size() < lag)) {
      size_t chosen = random() % network[way].size();
      Parcel parcel = network[way][chosen];
      network[way][chosen] = network[way].back();
      network[way].pop_back();
      if (!parcel.announcement) ++placed[parcel.message];
      arrived[way].push_back(parcel);
      Sender& sender = sender_of_message(parcel.message);
      auto it = sender.unacknowledged.find(parcel.message);
      if (--it->second.second == 0) {
        sender.labels.finish(it->second.first);
        sender.unacknowledged.erase(it);
      }
    }
    // the receiver polls now and then, all rails in turn
    bool stuck = arrived[way].size() >= lag;
    if (stuck || random() % 4 == 0 || begun == messages)
      for (size_t each = 0; each < arrived.size(); ++each)
        for (int i = 0; i < 4; ++i) take(each);
  }
  CHECK(tally.unfinished() == 0);
  for (auto& sender : all) CHECK(sender->unacknowledged.empty());
}

template <class Body>
void refused(Body body) {
  try {
    body();
  } catch (const Error&) {
    return;
  }
  CHECK(!"it was not refused");
}

}  // namespace

void counting() {
  for (uint64_t seed = 0; seed < 4; ++seed) shuffled(seed, 3, 1 + static_cast<int>(seed) % 3, 1 + 40 * seed, 5000);
  shuffled(9, 1, 2, 4096, 140'000);  // the numbers come round twice
  Labels labels(7);
  for (uint64_t i = 0; i < kWindow; ++i) CHECK(labels.begin() == 7 * kNumbers + i);
  CHECK(!labels.has_space());
  refused([&] { labels.begin(); });
  labels.finish(7 * kNumbers + 1);  // not the oldest
  CHECK(!labels.has_space());
  labels.finish(7 * kNumbers);
  CHECK(labels.has_space());
  refused([&] { labels.finish(7 * kNumbers); });
  refused([&] { labels.finish(8 * kNumbers + 5); });
  Tally tally;
  Announcement two;
  two.label = 5;
  two.fragments = 2;
  CHECK(!tally.announce(two));
  refused([&] { tally.announce(two); });
  CHECK(!tally.fragment(5));
  CHECK(tally.fragment(5)->fragments == 2);
  for (int i = 0; i < 3; ++i) CHECK(!tally.fragment(5));
  refused([&] { tally.announce(two); });
}

}  // namespace selftest
