// Small text helpers shared by the commands.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace halftone::cli {

/// `text` for a terminal or a sentence: control characters escaped, cut to `limit` characters with "...".
std::string printable(std::string_view text, std::size_t limit = 80);

/// `text` with & < > " ' replaced by entities: safe as HTML text and inside a quoted attribute.
std::string html_escape(std::string_view text);

/// Pieces of `text` between commas. Empty pieces are kept, so that callers can refuse them.
std::vector<std::string> split(std::string_view text, char separator);

/// "3.2 MiB"
std::string human_bytes(double bytes);

/// A count in three digits: "987", "12.3 k", "4.56 M".
std::string human_count(double count);

/// Three significant digits in a form that lines up: "0.0123", "12.3", "1.2e-06"; "inf" and "nan" as words.
std::string short_number(double value);

/// A ratio as a percentage: "0.69%", "12.3%"; far below rounding as "3e-07".
std::string percent(double ratio);

/// A signal-to-noise ratio in dB: "42.1"; no noise at all is "exact".
std::string decibel(double ratio);

/// Microseconds as "12.3 us", "4.56 ms" or "1.23 s".
std::string human_time(double us);

/// Number of terminal columns that UTF-8 `text` takes, every code point counted as one.
std::size_t display_width(std::string_view text);

/// True when `a` sorts before `b` with runs of digits compared as numbers: layers.2 before layers.10.
bool natural_less(std::string_view a, std::string_view b);

}  // namespace halftone::cli
