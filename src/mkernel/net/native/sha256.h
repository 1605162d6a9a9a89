// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), for the handshake. Small, not fast.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace mkernel {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  Sha256& update(const void* data, size_t size);
  Digest finish();

 private:
  void block(const uint8_t* bytes);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> pending_{};
  uint64_t size_ = 0;
};

Digest hmac_sha256(const void* key, size_t key_size, const void* data, size_t size);

// Takes the same time wherever the two differ.
bool same(const uint8_t* a, const uint8_t* b, size_t size);

}  // namespace mkernel
