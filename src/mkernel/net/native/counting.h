// How a receiver detects that a message is complete on a network without ordering: by counting.
//
// The network guarantees only two things. A message arrives exactly once, or the sender gets an error. And a
// write may carry 32 bits of immediate data, which the receiver gets once the bytes of that write are in its
// memory. Fragments of a message overtake each other, and so do messages, on one rail or on several.
//
//   sender                                         receiver
//   writes each fragment to its target, with the   counts the fragments that arrive for each label
//   message's label as immediate data
//   sends an announcement, a small message:        a message is complete once its announcement and that
//   label, number of fragments, signal, value      many fragments have arrived; only then does the signal
//                                                  grow to the value
//
// The announcement may arrive first, last or in between. It does not fit into the 32 bits: a signal's segment,
// offset and value take 152 bits.
//
// Why it is correct:
// - A fragment is counted once, after its bytes are in memory. So when the count is complete, so are the bytes.
// - A label identifies the message of a fragment: the sender's rank and a number of 16 bits. The number is
//   reused after 65,536 messages of that sender. A sender begins a message only if it is less than kWindow
//   ahead of its oldest message that was not fully acknowledged. By then, the earlier message with the same
//   number was acknowledged: all of it is in the receiver's completion queues, before anything of the new one.
//   A receiver polls its queues, one per rail, in turn, and takes only a few entries from each; a queue's
//   receive buffers (kMostWaiting) bound what waits in it. So the receiver has seen the last of the earlier
//   message before another rail can deliver kMostWaiting more messages, and the reuse of the number is 65,536 -
//   kWindow messages away. The sum of both bounds must be below 65,536; see the assertion.
// - Signals only grow, so it does not matter which of two messages is complete first.
//
// Nothing in this file depends on a network: tests drive it with one that shuffles.
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
  // The whole message was acknowledged.
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

// A receiver's count of what has arrived from all senders. Each call returns the announcement of the message
// that it completes, if any.
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
