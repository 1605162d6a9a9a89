// A rank's segments: the memory that requests may read and peers may write.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace mkernel {

class CopyQueue;

class Segments {
  struct Segment {
    uint8_t* base;
    uint64_t size;
    CopyQueue* copy_queue;  // of device memory; none: host memory
    int pins = 0;
    bool leaving = false;
  };

 public:
  // Keeps a segment attached while some of its bytes are read or written. Hold it only briefly: detach waits for it.
  class Pin {
   public:
    // Host memory that needs no pin.
    explicit Pin(uint8_t* bytes) : data(bytes), copy_queue(nullptr), owner_(nullptr) {}
    Pin(Pin&& other) noexcept
        : data(other.data), copy_queue(other.copy_queue), owner_(other.owner_), segment_(std::move(other.segment_)) {
      other.segment_ = nullptr;
    }
    Pin(const Pin&) = delete;
    Pin& operator=(const Pin&) = delete;
    Pin& operator=(Pin&&) = delete;
    ~Pin();
    uint8_t* const data;
    CopyQueue* const copy_queue;  // device memory can only be touched through it; none: host memory

   private:
    friend class Segments;
    Pin(uint8_t* bytes, Segments* owner, std::shared_ptr<Segment> segment)
        : data(bytes), copy_queue(segment->copy_queue), owner_(owner), segment_(std::move(segment)) {}
    Segments* owner_;
    std::shared_ptr<Segment> segment_;
  };

  explicit Segments(int rank) : rank_(rank) {}
  ~Segments();

  // `device` is the number of the CUDA device that the memory is on; -1: host memory.
  void attach(uint32_t number, void* base, uint64_t size, int device = -1);
  // When it returns, nothing accesses the segment's memory any more.
  void detach(uint32_t number);
  // Detaches all segments, and accepts no more.
  void close();

  // Bytes [offset, offset + size) of a segment. If they exceed it, raises an Error that names `what`.
  Pin pin(uint32_t number, uint64_t offset, uint64_t size, const char* what);
  // A signal: an aligned 64-bit word.
  Pin pin_signal(uint32_t number, uint64_t offset);
  // The copy queue of this device.
  CopyQueue& copy_queue_of(int device);

 private:
  void leave(std::unique_lock<std::mutex>& lock, std::unordered_map<uint32_t, std::shared_ptr<Segment>>::iterator it);

  const int rank_;
  bool closed_ = false;
  std::mutex mutex_;
  std::condition_variable unpinned_;
  std::unordered_map<uint32_t, std::shared_ptr<Segment>> segments_;
  std::map<int, std::unique_ptr<CopyQueue>> copy_queues_;  // by device
};

}  // namespace mkernel
