// The socket functions that the tcp transport needs.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <string>

namespace mkernel {

// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int number) : number_(number) {}
  Fd(Fd&& other) noexcept : number_(other.number_) { other.number_ = -1; }
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { reset(); }
  void reset();
  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_ = -1;
};

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
};

// A numeric IPv4 or IPv6 address. Names are not looked up: that may block for minutes.
Address parse_address(const std::string& host, int port);
std::string text_of(const Address& address);
int port_of(const Address& address);

Address local_address(int fd);

// Non-blocking; listens at once.
Fd listen_on(const Address& address);
// Non-blocking; the connection may be under way when this returns.
Fd start_connecting(const Address& address);

// Sends small requests immediately, and lets the kernel detect within `timeout` that the peer is gone: by probes
// while nothing is sent, by missing acknowledgements otherwise.
void prepare_stream(int fd, std::chrono::milliseconds timeout);

}  // namespace mkernel
