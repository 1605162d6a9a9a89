#include "inbox.h"

#include <algorithm>
#include <cstring>

#include "error.h"

namespace mkernel {
namespace {

// See Fragmentation: a sender that keeps to the rules stays far below.
constexpr size_t kMostUnfinished = 16384;
constexpr size_t kMostLanding = 16;  // buffers on their way to the device, before we wait for one

}  // namespace

void Inbox::begin(const Fragment& fragment) {
  segments_->pin(fragment.segment, fragment.target, fragment.total, "target");
  segments_->pin_signal(fragment.segment, fragment.signal);
  Fragmentation fragmentation(fragment.total);
  if (fragment.index >= fragmentation.fragments || fragment.bytes != fragmentation.bytes(fragment.index))
    fail("fragment ", fragment.index, " of a transfer of ", fragment.total, " bytes cannot have ", fragment.bytes, " bytes");
  if (fragmentation.fragments == 1) return;
  auto it = transfers_.find(fragment.transfer);
  if (it == transfers_.end()) {
    if (transfers_.size() >= kMostUnfinished) fail("more than ", kMostUnfinished, " transfers are unfinished");
    it = transfers_.emplace(fragment.transfer, Transfer{fragment, std::vector<bool>(fragmentation.fragments), fragmentation.fragments}).first;
  }
  Transfer& transfer = it->second;
  const Fragment& first = transfer.first;
  if (fragment.segment != first.segment || fragment.target != first.target || fragment.total != first.total ||
      fragment.signal != first.signal || fragment.value != first.value)
    fail("two fragments of transfer ", fragment.transfer, " contradict each other");
  if (transfer.announced[fragment.index]) fail("fragment ", fragment.index, " of transfer ", fragment.transfer, " came twice");
  transfer.announced[fragment.index] = true;
}

void Inbox::finish(const Fragment& fragment) {
  if (Fragmentation(fragment.total).fragments > 1) {
    auto it = transfers_.find(fragment.transfer);
    if (--it->second.missing > 0) return;
    transfers_.erase(it);
  }
  CompletionToken token = raise_signal(segments_->pin_signal(fragment.segment, fragment.signal), fragment.value);
  if (token.copy_queue != nullptr) token.copy_queue->flush();
  ++arrived_;
}

void Inbox::land(const Fragment& fragment, std::shared_ptr<PinnedBuffer> bytes) {
  CompletionToken token = start_copy(place(fragment, 0, fragment.bytes), Segments::Pin(bytes->data), fragment.bytes);
  landing_.emplace_back(token, std::move(bytes));
  // a copy engine does not wait for kernels, so this does not last long
  while (!landing_.empty() && (landing_.front().first.done() || landing_.size() > kMostLanding))
    if (landing_.front().first.done()) landing_.pop_front();
}

Inbox::~Inbox() {
  if (!landing_.empty()) landing_.back().first.copy_queue->settle();
}

Segments::Pin Inbox::place(const Fragment& fragment, uint64_t done, uint64_t size) {
  return segments_->pin(fragment.segment, fragment.target + Fragmentation(fragment.total).begin(fragment.index) + done, size, "target");
}

void StreamReader::feed(const uint8_t* data, size_t size) {
  while (size > 0) {
    size_t part;
    if (in_payload_) {
      part = static_cast<size_t>(std::min<uint64_t>(size, payload_due()));
      std::memcpy(place(part).data, data, part);
      placed(part);
    } else {
      if (ended_) fail("data after the FIN");
      part = std::min(size, sizeof(Fragment) - header_bytes_);
      std::memcpy(reinterpret_cast<uint8_t*>(&fragment_) + header_bytes_, data, part);
      header_bytes_ += part;
      if (header_bytes_ == sizeof(Fragment)) take_header();
    }
    data += part;
    size -= part;
  }
}

void StreamReader::take_header() {
  header_bytes_ = 0;
  if (fragment_.kind == kFin) {
    Fragment fin;
    fin.kind = kFin;
    if (std::memcmp(&fin, &fragment_, sizeof(Fragment)) != 0) fail("a malformed FIN");
    ended_ = true;
    return;
  }
  if (fragment_.kind != kFragment) fail("something that is not a header");
  inbox_.begin(fragment_);
  done_ = 0;
  in_payload_ = true;
  if (fragment_.bytes > 0 && inbox_.on_device(fragment_)) waiting_ = std::make_shared<PinnedBuffer>(kFragmentBytes);
  placed(0);
}

void StreamReader::placed(uint64_t size) {
  done_ += size;
  if (done_ < fragment_.bytes) return;
  in_payload_ = false;
  if (waiting_) inbox_.land(fragment_, std::move(waiting_));
  inbox_.finish(fragment_);
}

}  // namespace mkernel
