// How a receiver knows that a message is whole when nothing keeps its order: by counting.
//
// The network gives three things: what is sent arrives exactly once, or the sender hears of it; a write
// may carry 32 bits, which the receiver is handed when the bytes of that write are in its memory; and
// nothing else. Fragments of a message overtake each other, and so do messages, on one way or on several.
//
//   sender                                      receiver
//   writes each fragment to its place, with the    counts, for each label, the fragments that came
//   message's label as its 32 bits
//   sends an announcement, a small message:     a message is whole when its announcement is here and
//   label, number of fragments, signal, value      as many fragments came as that says; then, and only then,
//                                               the signal grows to the value
//
// The announcement may be first, last or in between. It cannot ride in the 32 bits: a signal's segment,
// offset and value alone have 152.
//
// Why it is right:
// - A fragment is counted after its bytes are in memory, and once. So all bytes are there when the count is.
// - Which message a fragment belongs to is its label: the sender's rank and a number of 16 bits. The number
//   comes again after 65,536 messages of that sender. A sender begins a message only if it is less than
//   kWindow ahead of its oldest one that was not acknowledged in full, so by then the earlier message with
//   that number was acknowledged: all of it is in the receiver's completion queues, before anything of the
//   new one. A receiver takes in turns from its queues, one for each rail, no more than a few from each;
//   what waits in one is bounded by that queue's receive buffers (kMostWaiting). So it has seen the last of
//   the earlier message before another rail can bring it kMostWaiting more messages, and the number
//   is 65,536 - kWindow messages away. Both bounds together must be below 65,536; see the assertion.
// - Signals grow to the larger value, so it does not matter which of two messages is whole first.
//
// There is nothing here that knows of a network: tests drive it with one that shuffles.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>

#include "error.h"

namespace mkernel {

constexpr uint64_t kNumbers = 1 << 16;
constexpr uint64_t kWindow = 1024;       // messages to one receiver that are not acknowledged in full
constexpr uint64_t kMostWaiting = 4096;  // receive buffers of one rail
static_assert(kWindow + kMostWaiting < kNumbers);

struct Announcement {
  uint32_t label = 0;
  uint32_t fragments = 0;
  uint32_t segment = 0;
  uint32_t unused = 0;
  uint64_t signal = 0;
  int64_t value = 0;
};
static_assert(sizeof(Announcement) == 32);

inline uint32_t sender_of(uint32_t label) { return label / kNumbers; }

// A sender's labels towards one receiver.
class Labels {
 public:
  explicit Labels(uint32_t rank) : rank_(rank) {}

  bool has_space() const { return done_.size() < kWindow; }
  uint32_t begin() {
    if (!has_space()) fail("more than ", kWindow, " messages are under way");
    done_.push_back(false);
    return static_cast<uint32_t>(rank_ * kNumbers + (oldest_ + done_.size() - 1) % kNumbers);
  }
  // All of the message was acknowledged.
  void finish(uint32_t label) {
    uint64_t index = (label % kNumbers + kNumbers - oldest_ % kNumbers) % kNumbers;
    if (sender_of(label) != rank_ || index >= done_.size() || done_[index])
      fail("message ", label, " was acknowledged, but it is not under way");
    done_[index] = true;
    for (; !done_.empty() && done_.front(); ++oldest_) done_.pop_front();
  }

 private:
  const uint64_t rank_;
  uint64_t oldest_ = 0;     // number of the oldest message that is not finished
  std::deque<bool> done_;  // from that one on
};

// A receiver's count of what came from all senders. Each call returns the announcement of the message
// that became whole by it.
class Tally {
 public:
  std::optional<Announcement> fragment(uint32_t label) {
    Message& message = messages_[label];
    if (message.announced && message.came == message.announcement.fragments)
      fail("rank ", sender_of(label), ": a message has more fragments than were announced");
    ++message.came;
    return whole(label, message);
  }
  std::optional<Announcement> announce(const Announcement& announcement) {
    Message& message = messages_[announcement.label];
    if (message.announced) fail("rank ", sender_of(announcement.label), ": a message was announced twice");
    if (message.came > announcement.fragments)
      fail("rank ", sender_of(announcement.label), ": a message has more fragments than were announced");
    message.announced = true;
    message.announcement = announcement;
    return whole(announcement.label, message);
  }
  size_t unfinished() const { return messages_.size(); }

 private:
  struct Message {
    Announcement announcement;
    bool announced = false;
    uint64_t came = 0;
  };
  std::optional<Announcement> whole(uint32_t label, const Message& message) {
    if (!message.announced || message.came < message.announcement.fragments) return std::nullopt;
    Announcement announcement = message.announcement;
    messages_.erase(label);
    return announcement;
  }

  std::unordered_map<uint32_t, Message> messages_;
};

}  // namespace mkernel
