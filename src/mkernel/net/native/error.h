// Errors are exceptions whose messages say what went wrong, for which rank, and what the system reported.
//
// Messages are built without streams. Streams need the C++ library's locales, of which a process may have two
// copies, one with torch and one linked into this library; mixing them does not work.
#pragma once

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>

namespace mkernel {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void append(std::string& text, std::string_view part) { text += part; }

// Whole numbers; for others say how many digits (short_text).
template <class Number, std::enable_if_t<std::is_integral_v<Number> || std::is_enum_v<Number>, int> = 0>
void append(std::string& text, Number number) {
  text += std::to_string(+number);
}

template <class... Parts>
std::string words(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

// As 0x1f.
inline std::string hex_text(uint64_t number) {
  char text[24];
  std::snprintf(text, sizeof(text), "0x%" PRIx64, number);
  return text;
}

// To three digits.
inline std::string short_text(double number) {
  char text[24];
  std::snprintf(text, sizeof(text), "%.3g", number);
  return text;
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(words(parts...));
}

inline std::string errno_text(int number = errno) {
  return words(std::system_category().message(number), " (errno ", number, ")");
}

}  // namespace mkernel
