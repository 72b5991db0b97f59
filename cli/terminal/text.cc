#include "cli/terminal/text.h"

#include <fmt/format.h>

#include <cctype>
#include <cmath>

namespace halftone::cli {

std::string printable(std::string_view text, std::size_t limit) {
  std::string out;
  for (const char c : text) {
    if (out.size() >= limit) return out + "...";
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out;
}

std::string html_escape(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (;;) {
    const std::size_t at = text.find(separator);
    parts.emplace_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

std::string human_bytes(double bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (std::fabs(bytes) >= 1024 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : 1, kUnits[unit]);
}

std::string human_count(double count) {
  if (count < 1000) return fmt::format("{:.0f}", std::floor(count));
  const char* const units[] = {"k", "M", "G", "T"};
  std::size_t unit = 0;
  for (count /= 1000; count >= 1000 && unit + 1 < std::size(units); ++unit) count /= 1000;
  return fmt::format("{:.{}f} {}", count, count < 9.995 ? 2 : count < 99.95 ? 1 : 0, units[unit]);
}

std::string short_number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  if (value == 0) return "0";
  const double magnitude = std::fabs(value);
  if (magnitude < 1e-4 || magnitude >= 1e6) return fmt::format("{:.1e}", value);
  const int decimals = std::max(0, 2 - static_cast<int>(std::floor(std::log10(magnitude))));
  return fmt::format("{:.{}f}", value, decimals);
}

std::string percent(double ratio) {
  if (!std::isfinite(ratio)) return short_number(ratio);
  if (ratio != 0 && std::fabs(ratio) < 1e-5) return fmt::format("{:.0e}", ratio);
  const double value = 100 * ratio;
  const double magnitude = std::fabs(value);
  const int decimals = magnitude >= 100 || magnitude == 0 ? 0
                       : magnitude >= 10                  ? 1
                       : magnitude >= 0.1                 ? 2
                                                          : 3;
  return fmt::format("{:.{}f}%", value, decimals);
}

std::string decibel(double ratio) {
  return std::isinf(ratio) && ratio > 0 ? "exact" : fmt::format("{:.1f}", ratio);
}

std::string human_time(double us) {
  if (us < 1e3) return fmt::format("{:.1f} us", us);
  if (us < 1e6) return fmt::format("{:.2f} ms", us / 1e3);
  return fmt::format("{:.2f} s", us / 1e6);
}

std::size_t display_width(std::string_view text) {
  std::size_t width = 0;
  for (const char c : text) width += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  return width;
}

bool natural_less(std::string_view a, std::string_view b) {
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  const auto take_number = [&](std::string_view& text) {
    std::size_t n = 0;
    while (n < text.size() && digit(text[n])) ++n;
    std::string_view number = text.substr(0, n);
    text.remove_prefix(n);
    while (number.size() > 1 && number.front() == '0') number.remove_prefix(1);
    return number;
  };
  const std::string_view whole_a = a, whole_b = b;
  while (!a.empty() && !b.empty()) {
    if (digit(a.front()) && digit(b.front())) {
      const std::string_view x = take_number(a), y = take_number(b);
      if (x.size() != y.size()) return x.size() < y.size();
      if (x != y) return x < y;
    } else {
      if (a.front() != b.front()) return a.front() < b.front();
      a.remove_prefix(1);
      b.remove_prefix(1);
    }
  }
  if (a.empty() != b.empty()) return a.empty();
  return whole_a < whole_b;
}

}  // namespace halftone::cli
