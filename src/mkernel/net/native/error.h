// Errors are exceptions whose words say what went wrong, for whom, and what the system said.
#pragma once

#include <cerrno>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>

namespace mkernel {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
std::string words(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(words(parts...));
}

inline std::string errno_text(int number = errno) {
  return words(std::system_category().message(number), " (errno ", number, ")");
}

}  // namespace mkernel
