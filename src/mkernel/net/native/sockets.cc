#include "sockets.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "error.h"

namespace mkernel {
namespace {

constexpr int kBacklog = 1024;  // connections that wait to be accepted; the system's limit may be lower

Fd make_socket(const Address& address) {
  Fd fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) fail("no socket for ", text_of(address), ": ", errno_text());
  return fd;
}

const sockaddr* raw(const Address& address) { return reinterpret_cast<const sockaddr*>(&address.storage); }

void set_option(int fd, int level, int name, int value, const char* what) {
  if (::setsockopt(fd, level, name, &value, sizeof(value)) != 0) fail("setting ", what, ": ", errno_text());
}

}  // namespace

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    reset();
    number_ = other.number_;
    other.number_ = -1;
  }
  return *this;
}

void Fd::reset() {
  if (number_ >= 0) ::close(number_);
  number_ = -1;
}

Address parse_address(const std::string& host, int port) {
  if (port < 0 || port > 65535) fail("there is no port ", port);
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  int problem = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (problem != 0)
    fail("'", host, "' is not a numeric IPv4 or IPv6 address (such as 10.0.0.1 or fd00::1): ", gai_strerror(problem));
  Address address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.size = found->ai_addrlen;
  ::freeaddrinfo(found);
  return address;
}

std::string text_of(const Address& address) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (::getnameinfo(raw(address), address.size, host, sizeof(host), port, sizeof(port),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return "an unknown address";
  bool six = address.storage.ss_family == AF_INET6;
  return words(six ? "[" : "", host, six ? "]:" : ":", port);
}

int port_of(const Address& address) {
  if (address.storage.ss_family == AF_INET6)
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_port);
}

Address local_address(int fd) {
  Address address;
  address.size = sizeof(address.storage);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.size) != 0)
    fail("getsockname: ", errno_text());
  return address;
}

Fd listen_on(const Address& address) {
  Fd fd = make_socket(address);
  if (::bind(fd.get(), raw(address), address.size) != 0 || ::listen(fd.get(), kBacklog) != 0)
    fail("cannot listen on ", text_of(address), ": ", errno_text());
  return fd;
}

Fd start_connecting(const Address& address) {
  Fd fd = make_socket(address);
  if (::connect(fd.get(), raw(address), address.size) != 0 && errno != EINPROGRESS)
    fail("cannot connect to ", text_of(address), ": ", errno_text());
  return fd;
}

void prepare_stream(int fd, std::chrono::milliseconds timeout) {
  // three probes, evenly over the time; the kernel counts in seconds
  auto third = static_cast<int>(std::clamp<int64_t>(timeout.count() / 3000, 1, 3600));
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY");
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE");
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, third, "TCP_KEEPIDLE");
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, third, "TCP_KEEPINTVL");
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 2, "TCP_KEEPCNT");
  auto unacknowledged = static_cast<int>(std::clamp<int64_t>(timeout.count(), 1000, 3600 * 1000));
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, unacknowledged, "TCP_USER_TIMEOUT");
}

}  // namespace mkernel
