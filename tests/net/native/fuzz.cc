// Random damage to what comes over a stream. The parser may refuse it or, where the damage makes no
// difference to it, accept it; it must not write outside of the segment or get stuck. The numbers are
// the same on every run; how far they get is a matter of time.
#include <algorithm>
#include <cstring>
#include <random>

#include "handshake.h"
#include "inbox.h"
#include "selftest.h"

namespace selftest {
namespace {

using Bytes = std::vector<uint8_t>;
using Random = std::mt19937_64;

constexpr uint64_t kSignals = 64;
constexpr int kStreams = 3;

void append(Bytes& stream, const Fragment& fragment, const Bytes& data) {
  auto* header = reinterpret_cast<const uint8_t*>(&fragment);
  stream.insert(stream.end(), header, header + sizeof(fragment));
  auto from = data.begin() + static_cast<std::ptrdiff_t>(Fragmentation(fragment.total).begin(fragment.index));
  stream.insert(stream.end(), from, from + static_cast<std::ptrdiff_t>(fragment.bytes));
}

// Transfers over several streams, and the memory as it should be afterwards.
std::vector<Bytes> conversation(Random& random, Bytes& expected) {
  std::vector<Bytes> streams(kStreams);
  uint64_t room = expected.size() - kSignals;
  for (uint64_t transfer = 0; transfer < 1 + random() % 6; ++transfer) {
    Fragment fragment;
    fragment.kind = kFragment;
    fragment.transfer = transfer;
    fragment.total = random() % (random() % 16 == 0 ? room + 1 : 200);
    fragment.target = kSignals + random() % (room - fragment.total + 1);
    fragment.signal = transfer % 8 * 8;
    fragment.value = static_cast<int64_t>(transfer) + 1;
    Bytes data(fragment.total);
    for (auto& byte : data) byte = static_cast<uint8_t>(transfer * 31 + (&byte - data.data()));
    Fragmentation fragmentation(fragment.total);
    for (fragment.index = 0; fragment.index < fragmentation.fragments; ++fragment.index) {
      fragment.bytes = fragmentation.bytes(fragment.index);
      append(streams[transfer * 7 % kStreams], fragment, data);
    }
    std::copy(data.begin(), data.end(), expected.begin() + static_cast<std::ptrdiff_t>(fragment.target));
    std::memcpy(expected.data() + fragment.signal, &fragment.value, 8);
  }
  Fragment fin;
  fin.kind = kFin;
  for (auto& stream : streams) append(stream, fin, {});
  return streams;
}

void damage(Random& random, Bytes& stream) {
  constexpr uint64_t kTelling[] = {0, 1, 7, 8, kFragmentBytes, kFragmentBytes + 1, ~uint64_t{0}, uint64_t{1} << 63};
  for (uint64_t times = 1 + random() % 3; times > 0 && !stream.empty(); --times) {
    uint64_t at = random() % stream.size();
    switch (random() % 5) {
      case 0: stream[at] ^= static_cast<uint8_t>(1 << random() % 8); break;
      case 1: stream.erase(stream.begin() + static_cast<std::ptrdiff_t>(at)); break;
      case 2: stream.insert(stream.begin() + static_cast<std::ptrdiff_t>(at), static_cast<uint8_t>(random())); break;
      case 3: stream.resize(at); break;
      case 4: {  // a word of the first header
        uint64_t word = random() % 2 ? kTelling[random() % 8] : random() % 5'000'000;
        if (stream.size() >= 64) std::memcpy(stream.data() + random() % 8 * 8, &word, 8);
      }
    }
  }
}

void feed(Random& random, Inbox& inbox, const std::vector<Bytes>& streams) {
  std::vector<StreamReader> readers(streams.size(), StreamReader(inbox));
  std::vector<size_t> done(streams.size(), 0);
  bool any = true;
  while (any) {
    any = false;
    for (size_t i = 0; i < streams.size(); ++i) {
      size_t part = std::min<size_t>(streams[i].size() - done[i], 1 + random() % (random() % 2 ? 100 : 100'000));
      readers[i].feed(streams[i].data() + done[i], part);
      done[i] += part;
      any |= part > 0;
    }
  }
}

// What the parser says to these fragments, headers only where they have no bytes of their own.
std::string answer(const std::vector<Fragment>& fragments) {
  Bytes memory(3 * kFragmentBytes, 0);
  auto segments = std::make_shared<Segments>(0);
  segments->attach(0, memory.data(), memory.size());
  Inbox inbox(segments);
  try {
    for (const Fragment& fragment : fragments) {
      StreamReader reader(inbox);
      Bytes stream;
      append(stream, fragment, Bytes(std::min<uint64_t>(fragment.total, memory.size())));
      reader.feed(stream.data(), stream.size());
    }
  } catch (const Error& error) {
    return error.what();
  }
  return words(inbox.unfinished(), " unfinished, signal ", poll_word(reinterpret_cast<int64_t*>(memory.data())));
}

}  // namespace

void frames() {
  auto says = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  Fragment first;
  first.kind = kFragment;
  first.target = 64;
  first.total = 2 * kFragmentBytes - 3;
  first.value = 9;
  first.bytes = Fragmentation(first.total).bytes(0);
  Fragment second = first;
  second.index = 1;
  second.bytes = Fragmentation(first.total).bytes(1);
  CHECK(answer({first}) == "1 unfinished, signal 0");
  CHECK(answer({first, second}) == "0 unfinished, signal 9");
  CHECK(answer({second, first}) == "0 unfinished, signal 9");
  CHECK(says(answer({first, first}), "came twice"));
  for (auto change : {+[](Fragment& fragment) { fragment.target += 8; }, +[](Fragment& fragment) { fragment.signal += 8; },
                      +[](Fragment& fragment) { fragment.value += 1; }}) {
    Fragment other = second;
    change(other);
    CHECK(says(answer({first, other}), "contradict each other"));
  }
  Fragment wrong = first;
  wrong.bytes -= 1;
  CHECK(says(answer({wrong}), "cannot have"));
  wrong = first;
  wrong.target = ~uint64_t{0} - 10;
  CHECK(says(answer({wrong}), "not inside"));
  wrong = first;
  wrong.total = 4 * kFragmentBytes;
  CHECK(says(answer({wrong}), "not inside"));
  Fragment fin;
  fin.kind = kFin;
  fin.value = 1;
  CHECK(says(answer({fin}), "malformed FIN"));
  for (uint64_t total : {uint64_t{0}, uint64_t{1}, kFragmentBytes, kFragmentBytes + 1, 7 * kFragmentBytes + 5, ~uint64_t{0}}) {
    Fragmentation fragmentation(total);
    uint64_t last = fragmentation.fragments - 1;
    CHECK(fragmentation.begin(0) == 0 && fragmentation.begin(last) + fragmentation.bytes(last) == total);
    CHECK(fragmentation.bytes(0) <= kFragmentBytes && (last == 0 || fragmentation.bytes(last) >= kFragmentBytes / 2));
    if (last > 0) CHECK(fragmentation.begin(last - 1) + fragmentation.bytes(last - 1) == fragmentation.begin(last));
  }
}

void fuzz_frames(double seconds) {
  Random random(2026);
  auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  int64_t runs = 0, refused = 0;
  for (; std::chrono::steady_clock::now() < end; ++runs) {
    // two transfers of several fragments at most; malloc's memory, so that each byte outside is noticed
    size_t size = random() % 16 ? 4096 : 2'200'000;
    Bytes memory(size, 0), expected(size, 0);
    auto segments = std::make_shared<Segments>(0);
    segments->attach(0, memory.data(), memory.size());
    Inbox inbox(segments);
    auto streams = conversation(random, expected);
    bool whole = runs % 4 == 0;
    if (!whole) damage(random, streams[random() % kStreams]);
    try {
      feed(random, inbox, streams);
      CHECK(!whole || inbox.unfinished() == 0);
    } catch (const Error&) {
      CHECK(!whole);
      ++refused;
    }
    if (whole) CHECK(std::equal(memory.begin(), memory.begin() + 64, expected.begin()));
  }
  CHECK(runs > 20 && refused > 0);
  std::printf("frames: %lld runs, %lld refused\n", static_cast<long long>(runs), static_cast<long long>(refused));
}

void fuzz_handshake(double seconds) {
  Random random(7);
  Job zero{0, 4, 2, Bytes(32, 1)}, one{1, 4, 2, Bytes(32, 1)};
  auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  int64_t runs = 0, accepted = 0;
  for (; std::chrono::steady_clock::now() < end; ++runs) {
    Handshake dialer = Handshake::dial(one, 0, 1), acceptor = Handshake::accept(zero);
    uint64_t broken_at = random() % 4;  // 3: none is; the last message needs no proof
    try {
      Handshake* sides[2] = {&dialer, &acceptor};
      for (uint64_t message = 0; message < 4; ++message) {
        Handshake &from = *sides[message % 2], &to = *sides[1 - message % 2];
        Bytes bytes(from.outgoing.begin(), from.outgoing.end());
        from.outgoing.clear();
        CHECK(bytes.size() == to.wanted());
        if (message == broken_at && message < 3) bytes[random() % bytes.size()] ^= static_cast<uint8_t>(1 + random() % 255);
        to.take(bytes);
      }
      CHECK(broken_at == 3 && dialer.done() && acceptor.done() && acceptor.peer() == 1 && acceptor.stream() == 1);
      ++accepted;
    } catch (const Error&) {
      CHECK(broken_at < 3);
    }
  }
  CHECK(runs > 20 && accepted > 0);
  std::printf("handshakes: %lld runs, %lld accepted\n", static_cast<long long>(runs), static_cast<long long>(accepted));
}

}  // namespace selftest
