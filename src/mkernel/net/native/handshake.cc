#include "handshake.h"

#include <sys/random.h>

#include <cstring>

namespace mkernel {
namespace {

// The last two digits are the version of everything that goes over a stream.
constexpr std::array<char, 8> kMagic = {'M', 'K', 'N', 'E', 'T', '/', '0', '1'};
constexpr char kWelcome[] = "WELCOME";  // eight bytes with its end

void fill_random(std::array<uint8_t, 32>& bytes) {
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    fail("no random numbers: ", errno_text());
}

}  // namespace

Handshake Handshake::dial(const Job& job, uint32_t peer, uint32_t stream) {
  Handshake handshake(job, true);
  Hello& hello = handshake.hello_;
  hello.magic = kMagic;
  hello.dialer = job.rank;
  hello.acceptor = peer;
  hello.size = job.size;
  hello.stream = stream;
  hello.streams = job.streams;
  fill_random(hello.random);
  handshake.send(&hello, sizeof(hello));
  handshake.expect(Step::kChallenge);
  return handshake;
}

Handshake Handshake::accept(const Job& job) {
  Handshake handshake(job, false);
  handshake.expect(Step::kHello);
  return handshake;
}

void Handshake::expect(Step step) {
  constexpr size_t kSizes[] = {sizeof(Hello), 64, 32, sizeof(kWelcome)};
  step_ = step;
  wanted_ = kSizes[static_cast<int>(step)];
}

void Handshake::take(const std::vector<uint8_t>& message) {
  if (message.size() != wanted_ || wanted_ == 0) fail("a handshake message of ", message.size(), " bytes");
  switch (step_) {
    case Step::kHello: return take_hello(message.data());
    case Step::kChallenge: return take_challenge(message.data());
    case Step::kProof: return take_proof(message.data());
    case Step::kWelcome:
      if (std::memcmp(message.data(), kWelcome, sizeof(kWelcome)) != 0) fail("it does not speak this protocol");
      wanted_ = 0;
  }
}

void Handshake::take_hello(const uint8_t* message) {
  std::memcpy(&hello_, message, sizeof(hello_));
  const Hello& hello = hello_;
  if (hello.magic != kMagic || hello.unused != 0) fail("it does not speak this protocol");
  if (hello.acceptor != job_->rank) fail("it looks for rank ", hello.acceptor);
  if (hello.size != job_->size || hello.streams != job_->streams)
    fail("its job has ", hello.size, " ranks and ", hello.streams, " streams, ours ", job_->size, " and ",
         job_->streams);
  if (hello.dialer <= job_->rank || hello.dialer >= job_->size || hello.stream >= job_->streams)
    fail("rank ", hello.dialer, " has no stream ", hello.stream, " to rank ", job_->rank);
  fill_random(random_);
  Digest ours = proof("accept");
  send(random_.data(), random_.size());
  send(ours.data(), ours.size());
  expect(Step::kProof);
}

void Handshake::take_challenge(const uint8_t* message) {
  std::memcpy(random_.data(), message, random_.size());
  if (!same(message + random_.size(), proof("accept").data(), sizeof(Digest)))
    throw WrongSecret("it does not know this job's secret");
  Digest ours = proof("dial");
  send(ours.data(), ours.size());
  expect(Step::kWelcome);
}

void Handshake::take_proof(const uint8_t* message) {
  if (!same(message, proof("dial").data(), sizeof(Digest))) throw WrongSecret("it does not know this job's secret");
  send(kWelcome, sizeof(kWelcome));
  wanted_ = 0;
}

Digest Handshake::proof(const char* role) const {
  std::string said = role;
  said.append(reinterpret_cast<const char*>(&hello_), sizeof(hello_));
  said.append(reinterpret_cast<const char*>(random_.data()), random_.size());
  return hmac_sha256(job_->secret.data(), job_->secret.size(), said.data(), said.size());
}

}  // namespace mkernel
