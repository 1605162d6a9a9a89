// A rank's segments: the memory that requests may read and peers may write.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace mkernel {

class Segments {
  struct Segment {
    uint8_t* base;
    uint64_t size;
    int pins = 0;
    bool leaving = false;
  };

 public:
  // Holds a segment in place while some of its bytes are read or written. Short: detach waits for it.
  class Pin {
   public:
    Pin(Pin&& other) noexcept : data(other.data), owner_(other.owner_), segment_(std::move(other.segment_)) {
      other.segment_ = nullptr;
    }
    Pin(const Pin&) = delete;
    Pin& operator=(const Pin&) = delete;
    Pin& operator=(Pin&&) = delete;
    ~Pin();
    uint8_t* const data;

   private:
    friend class Segments;
    Pin(uint8_t* bytes, Segments* owner, std::shared_ptr<Segment> segment)
        : data(bytes), owner_(owner), segment_(std::move(segment)) {}
    Segments* owner_;
    std::shared_ptr<Segment> segment_;
  };

  explicit Segments(int rank) : rank_(rank) {}

  void attach(uint32_t number, void* base, uint64_t size);
  // When it returns, nobody touches the segment's memory any more.
  void detach(uint32_t number);
  // Detach all, and take no more.
  void close();

  // Bytes [offset, offset + size) of a segment; an Error that names `what` if they are not all there.
  Pin pin(uint32_t number, uint64_t offset, uint64_t size, const char* what);
  // A signal: an aligned 64-bit word.
  Pin pin_signal(uint32_t number, uint64_t offset);

 private:
  void leave(std::unique_lock<std::mutex>& lock, std::unordered_map<uint32_t, std::shared_ptr<Segment>>::iterator it);

  const int rank_;
  bool closed_ = false;
  std::mutex mutex_;
  std::condition_variable unpinned_;
  std::unordered_map<uint32_t, std::shared_ptr<Segment>> segments_;
};

// The signal grows to `value`, or stays if it is there already. Everything this thread wrote before
// is seen by who sees the signal.
void raise_signal(const Segments::Pin& signal, int64_t value);

}  // namespace mkernel
