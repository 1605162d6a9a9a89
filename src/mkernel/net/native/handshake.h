// How two ranks of a job authenticate each other before they use a stream.
//
//   dialer   -> acceptor   Hello      who calls whom, which stream, a random number
//   acceptor -> dialer     Challenge  a random number, proof that the acceptor knows the secret
//   dialer   -> acceptor   Proof      proof that the dialer knows it
//   acceptor -> dialer     Welcome    the stream is taken
//
// A proof is an HMAC-SHA256 over the role, the Hello and the acceptor's random number, so it can
// neither be replayed nor reflected, nor be used for another rank or stream. All messages have fixed
// sizes, so no length needs to be checked. This authenticates connections; it does not protect the bytes
// that follow against an attacker who can change packets between the two hosts.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "error.h"
#include "sha256.h"

namespace mkernel {

// The other side is not the expected one, and another attempt will not help.
struct WrongSecret : Error {
  using Error::Error;
};

struct Job {
  uint32_t rank;
  uint32_t size;
  uint32_t streams;
  std::vector<uint8_t> secret;
};

struct Hello {
  std::array<char, 8> magic{};
  uint32_t dialer = 0;
  uint32_t acceptor = 0;
  uint32_t size = 0;
  uint32_t stream = 0;
  uint32_t streams = 0;
  uint32_t unused = 0;
  std::array<uint8_t, 32> random{};
};
static_assert(sizeof(Hello) == 64);

// One side of a handshake. Knows nothing of sockets: bytes go in, bytes come out.
class Handshake {
 public:
  static Handshake dial(const Job& job, uint32_t peer, uint32_t stream);
  static Handshake accept(const Job& job);

  // How many bytes the next message has; 0: done.
  size_t wanted() const { return wanted_; }
  // The next message, of that size. Throws Error if the other side is to be refused.
  void take(const std::vector<uint8_t>& message);
  bool done() const { return wanted_ == 0; }
  // Has this side, which dialled, nothing left to say? The acceptor may be done when it has read it.
  bool proven() const { return dialer_ && step_ == Step::kWelcome; }
  // Bytes to be sent; the caller removes what it sent.
  std::string outgoing;

  uint32_t peer() const { return dialer_ ? hello_.acceptor : hello_.dialer; }
  uint32_t stream() const { return hello_.stream; }

 private:
  enum class Step { kHello, kChallenge, kProof, kWelcome };

  Handshake(const Job& job, bool dialer) : job_(&job), dialer_(dialer) {}
  void take_hello(const uint8_t* message);
  void take_challenge(const uint8_t* message);
  void take_proof(const uint8_t* message);
  Digest proof(const char* role) const;
  void send(const void* data, size_t size) { outgoing.append(static_cast<const char*>(data), size); }
  void expect(Step step);

  const Job* job_;
  bool dialer_;
  Step step_ = Step::kHello;
  size_t wanted_ = 0;
  Hello hello_;
  std::array<uint8_t, 32> random_{};  // the acceptor's
};

}  // namespace mkernel
