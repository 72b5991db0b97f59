#include "halftone/format.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "format/head_dim.h"
#include "halftone/error.h"

namespace halftone {
namespace {

using enum DType;
using enum Granularity;

constexpr KvFormat quantised_format(DType dtype, Granularity granularity, int group_size = 0) {
  const bool static_scale = granularity == kTensor || granularity == kHead;
  return {dtype, granularity, dtype == kInt4, group_size, static_scale ? kFloat32 : kFloat16};
}

constexpr std::array<NamedFormat, 15> kNamedFormats = {{
    {"bf16", {kBFloat16}, "bfloat16, not quantised"},
    {"fp16", {kFloat16}, "IEEE half, not quantised"},
    {"fp8", quantised_format(kFloat8E4M3, kTensor), "e4m3, one static scale"},
    {"fp8-static-head", quantised_format(kFloat8E4M3, kHead), "e4m3, one static scale per KV head"},
    {"fp8-token-head", quantised_format(kFloat8E4M3, kTokenHead), "e4m3, one scale per token and KV head"},
    {"int8-tensor", quantised_format(kInt8, kTensor), "symmetric int8, one static scale"},
    {"int8-token", quantised_format(kInt8, kToken), "symmetric int8, one scale per token"},
    {"int8-head", quantised_format(kInt8, kTokenHead), "symmetric int8, one scale per token and KV head"},
    {"int8-g32", quantised_format(kInt8, kGroup, 32), "symmetric int8, one scale per 32 dims"},
    {"int8-g64", quantised_format(kInt8, kGroup, 64), "symmetric int8, one scale per 64 dims"},
    {"int8-g128", quantised_format(kInt8, kGroup, 128), "symmetric int8, one scale per 128 dims"},
    {"int4-g32", quantised_format(kInt4, kGroup, 32), "asymmetric int4, one scale and min per 32 dims"},
    {"int4-g64", quantised_format(kInt4, kGroup, 64), "asymmetric int4, one scale and min per 64 dims"},
    {"int4-g128", quantised_format(kInt4, kGroup, 128), "asymmetric int4, one scale and min per 128 dims"},
    {"int4-row", quantised_format(kInt4, kTokenHead),
     "asymmetric int4, one scale and min per token and KV head"},
}};

// Names of earlier versions, read until 0.2 and never printed. In every other name "head" means that append
// computes a scale for each token and head.
struct Alias {
  std::string_view old_name, name;
};
constexpr std::array<Alias, 1> kAliases = {{{"fp8-head", "fp8-static-head"}}};

struct DTypeText {
  std::string_view text;
  DType dtype;
};
constexpr std::array<DTypeText, 3> kQuantisedDTypes = {
    {{"fp8", kFloat8E4M3}, {"int8", kInt8}, {"int4", kInt4}}};

struct GranularityText {
  std::string_view text;
  Granularity granularity;
  int group_size;
};
// Of two texts for one granularity the last one is printed.
constexpr std::array<GranularityText, 8> kGranularities = {{
    {"static-tensor", kTensor, 0},
    {"tensor", kTensor, 0},
    {"static-head", kHead, 0},
    {"token", kToken, 0},
    {"token-head", kTokenHead, 0},
    {"g32", kGroup, 32},
    {"g64", kGroup, 64},
    {"g128", kGroup, 128},
}};

[[noreturn]] void refuse(ErrorCode code, const std::string& sentence) { throw Error(code, sentence); }

// Everything about a format that does not depend on the head dimension.
void check_combination(const KvFormat& f, std::string_view argument) {
  const auto invalid = [](const std::string& sentence) { refuse(ErrorCode::kInvalidArgument, sentence); };
  const bool sixteen = f.dtype == kBFloat16 || f.dtype == kFloat16;
  const bool packed = f.dtype == kFloat8E4M3 || f.dtype == kInt8 || f.dtype == kInt4;
  if (!sixteen && !packed) {
    const std::string_view name = f.dtype <= kFloat8E8M0 ? dtype_name(f.dtype) : "unknown";
    invalid(fmt::format("{}.dtype is {}, but a cache stores bf16, f16, e4m3, int8 or int4: use bf16.",
                        argument, name));
  }
  if (f.granularity > kGroup) {
    invalid(fmt::format("{}.granularity is {}, but must be one of the Granularity values: use kTokenHead.",
                        argument, static_cast<int>(f.granularity)));
  }
  if (sixteen != (f.granularity == kNone)) {
    invalid(sixteen ? fmt::format("{}.granularity is set, but {} has no scales: use Granularity::kNone.",
                                  argument, dtype_name(f.dtype))
                    : fmt::format("{}.granularity is kNone, but {} needs scales: use kTokenHead.", argument,
                                  dtype_name(f.dtype)));
  }
  if (f.asymmetric && sixteen) {
    invalid(fmt::format("{}.asymmetric is true, but {} has no scales: use false.", argument,
                        dtype_name(f.dtype)));
  }
  if (f.asymmetric && f.dtype == kFloat8E4M3) {
    refuse(ErrorCode::kUnsupported,
           fmt::format("{}.asymmetric is true, but e4m3 is always symmetric: use false, or int8.", argument));
  }
  if (f.granularity != kGroup && f.group_size != 0) {
    invalid(fmt::format("{}.group_size is {}, but only Granularity::kGroup has groups: use 0.", argument,
                        f.group_size));
  }
  constexpr std::array<int, 3> kGroupSizes = {32, 64, 128};
  if (f.granularity == kGroup && std::ranges::find(kGroupSizes, f.group_size) == kGroupSizes.end()) {
    invalid(fmt::format("{}.group_size is {}, but must be 32, 64 or 128: use {}.", argument, f.group_size,
                        nearest_choice(kGroupSizes, f.group_size)));
  }
  if (f.scale_dtype == kFloat8E8M0) {
    if (f.dtype == kFloat8E4M3 && f.granularity == kGroup) return;
    refuse(
        ErrorCode::kUnsupported,
        fmt::format("{}.scale_dtype is e8m0, but only groups of e4m3 have such scales: use f16.", argument));
  }
  if (f.scale_dtype != kFloat16 && f.scale_dtype != kFloat32) {
    const std::string_view name = f.scale_dtype <= kFloat8E8M0 ? dtype_name(f.scale_dtype) : "unknown";
    invalid(fmt::format("{}.scale_dtype is {}, but must be f16 or f32: use f16.", argument, name));
  }
  if (f.static_scale() && f.scale_dtype != kFloat32) {
    invalid(fmt::format("{}.scale_dtype is f16, but static scales are f32: use f32.", argument));
  }
  if (sixteen && f.scale_dtype != kFloat16) {
    invalid(fmt::format("{}.scale_dtype is f32, but {} has no scales: leave it at f16.", argument,
                        dtype_name(f.dtype)));
  }
}

std::string general_name(const KvFormat& f) {
  if (f.dtype == kBFloat16) return "bf16";
  if (f.dtype == kFloat16) return "fp16";
  std::string text(dtype_name(f.dtype));
  for (const DTypeText& d : kQuantisedDTypes) {
    if (d.dtype == f.dtype) text = d.text;
  }
  std::string granularity = fmt::format("g{}", f.group_size);
  for (const GranularityText& g : kGranularities) {
    if (g.granularity == f.granularity && f.granularity != kGroup) granularity = g.text;
  }
  text += "-" + granularity;
  if (f.asymmetric != (f.dtype == kInt4)) text += f.asymmetric ? "-asym" : "-sym";
  if (f.dynamic_scale() && f.scale_dtype != kFloat16) text += fmt::format("-{}", dtype_name(f.scale_dtype));
  return text;
}

bool take_suffix(std::string_view& text, std::string_view suffix) {
  if (!text.ends_with(suffix)) return false;
  text.remove_suffix(suffix.size());
  return true;
}

std::optional<KvFormat> parse_general(std::string_view text) {
  for (const DTypeText& d : kQuantisedDTypes) {
    if (!text.starts_with(d.text) || text.substr(d.text.size(), 1) != "-") continue;
    std::string_view rest = text.substr(d.text.size() + 1);
    const bool f32 = take_suffix(rest, "-f32");
    const bool f16 = !f32 && take_suffix(rest, "-f16");
    const bool e8m0 = !f32 && !f16 && take_suffix(rest, "-e8m0");
    const bool asym = take_suffix(rest, "-asym");
    const bool sym = !asym && take_suffix(rest, "-sym");
    for (const GranularityText& g : kGranularities) {
      if (g.text != rest) continue;
      KvFormat f = quantised_format(d.dtype, g.granularity, g.group_size);
      if (asym || sym) f.asymmetric = asym;
      if (f32 || f16 || e8m0) f.scale_dtype = f32 ? kFloat32 : f16 ? kFloat16 : kFloat8E8M0;
      return f;
    }
  }
  return std::nullopt;
}

std::optional<KvFormat> find_format(std::string_view text) {
  for (const Alias& alias : kAliases) {
    if (alias.old_name == text) text = alias.name;
  }
  for (const NamedFormat& n : kNamedFormats) {
    if (n.name == text) return n.format;
  }
  return parse_general(text);
}

// What a text that names no format may mean: a word in it, a piece of the names of the formats that are
// nearest in meaning, and why it is none of them (empty: it is only called otherwise).
struct Meaning {
  std::string_view word, nearest, refusal;
};
constexpr std::string_view kNoFloat4 = "4-bit floats are not stored, only 4-bit integers";
constexpr std::string_view kNoFewerBits = "no value is stored in less than 4 bits";
constexpr std::string_view kNoMoreBits = "no value is stored in more than 16 bits";
// The first row whose word occurs decides: "bf16" before the "f16" in it, dtypes before scale dtypes. Every
// text has the last one.
constexpr std::array<Meaning, 23> kMeanings = {{
    {"e5m2", "fp8", "e5m2 is not stored, only e4m3"},
    {"e4m3", "fp8", {}},
    {"fp8", "fp8", {}},
    {"float8", "fp8", {}},
    {"fp4", "int4", kNoFloat4},
    {"nf4", "int4", kNoFloat4},
    {"e2m1", "int4", kNoFloat4},
    {"float4", "int4", kNoFloat4},
    {"int4", "int4", {}},
    {"int8", "int8", {}},
    {"int32", "16", kNoMoreBits},
    {"int3", "int4", kNoFewerBits},
    {"int2", "int4", kNoFewerBits},
    {"bf16", "bf16", {}},
    {"bfloat16", "bf16", {}},
    {"fp16", "fp16", {}},
    {"float16", "fp16", {}},
    {"f16", "fp16", {}},
    {"half", "fp16", {}},
    {"fp32", "16", kNoMoreBits},
    {"float32", "16", kNoMoreBits},
    {"f32", "16", kNoMoreBits},
    {"", "", {}},
}};

// "a, b or c"
std::string alternatives(const std::vector<std::string_view>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    text += i == 0 ? "" : i + 1 == names.size() ? " or " : ", ";
    text += names[i];
  }
  return text;
}

// Why `text` is no format and what to use. A format is suggested for what it is, never for how its name is
// spelled.
std::string refusal_of(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) c = c == '_' ? '-' : c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  if (find_format(lower)) return fmt::format("names are lower case with hyphens: use {}", lower);
  if (const std::string name = lower.substr(0, lower.find_first_of("+:"));
      name != lower && find_format(name)) {
    return fmt::format(
        "names end before + and : (the command's +rot, +chan and K:V are rotate_k and rotate_v, K's "
        "channels and V's format elsewhere): use {}",
        name);
  }
  const Meaning& meaning = *std::ranges::find_if(
      kMeanings, [&](const Meaning& m) { return lower.find(m.word) != std::string::npos; });
  std::vector<std::string_view> names;
  for (const NamedFormat& n : kNamedFormats) {
    if (n.name.find(meaning.nearest) != std::string_view::npos) names.push_back(n.name);
  }
  return fmt::format("{}: use {}", meaning.refusal.empty() ? "no format has this name" : meaning.refusal,
                     alternatives(names));
}

}  // namespace

int nearest_choice(std::span<const int> choices, std::int64_t value) {
  const auto distance = [&](int c) {
    return c > value ? std::uint64_t(c) - std::uint64_t(value) : std::uint64_t(value) - std::uint64_t(c);
  };
  int best = choices.front();
  for (const int c : choices) {
    if (distance(c) <= distance(best)) best = c;
  }
  return best;
}

void check_head_dim(std::int64_t value, std::string_view argument) {
  const auto* const larger = std::ranges::lower_bound(kHeadDims, value);
  if (larger != kHeadDims.end() && *larger == value) return;
  std::string remedy = "larger heads are not supported";
  if (larger != kHeadDims.end()) remedy = fmt::format("use {}", *larger);
  if (larger != kHeadDims.end() && value > 0) {
    const bool of_k = argument.ends_with("head_dim") && !argument.ends_with("v_head_dim");
    remedy +=
        of_k ? fmt::format(", pad with zeros and set scale to 1/sqrt({})", value) : " and pad with zeros";
  }
  refuse(ErrorCode::kInvalidArgument,
         fmt::format("{} is {}, but must be 64, 80, 96, 128, 192, 256 or 512: {}.", argument, value, remedy));
}

std::span<const NamedFormat> named_formats() { return kNamedFormats; }

KvFormat parse_format(std::string_view text) {
  constexpr std::size_t kLongestName = 64;
  const std::string_view head = text.substr(0, kLongestName);
  const std::optional<KvFormat> format = text.size() > kLongestName ? std::nullopt : find_format(text);
  if (!format) {
    refuse(ErrorCode::kInvalidArgument,
           fmt::format("format is '{}{}', but {}.", head, text.size() > head.size() ? "..." : "",
                       refusal_of(head)));
  }
  check_combination(*format, fmt::format("format '{}'", text));
  return *format;
}

std::string format_name(const KvFormat& format) {
  for (const NamedFormat& n : kNamedFormats) {
    if (n.format == format) return std::string(n.name);
  }
  return general_name(format);
}

void check_format(const KvFormat& format, int head_dim, std::string_view argument) {
  check_combination(format, argument);
  check_head_dim(head_dim, "head_dim");
  if (format.scale_dtype == kFloat8E8M0) {
    refuse(ErrorCode::kUnsupported,
           fmt::format("{} is {}, but e8m0 scales are a latent cache's: use f16 scales.", argument,
                       format_name(format)));
  }
  if (format.granularity != kGroup || head_dim % format.group_size == 0) return;
  std::string remedy = "use Granularity::kTokenHead, as int8-head and int4-row do";
  for (const int size : {128, 64, 32}) {
    if (size < format.group_size && head_dim % size == 0) {
      remedy = fmt::format("use {}", size);
      break;
    }
  }
  refuse(ErrorCode::kInvalidArgument,
         fmt::format("{}.group_size is {}, but must divide head_dim {} (a partial group has no layout): {}.",
                     argument, format.group_size, head_dim, remedy));
}

void check_latent_format(const KvFormat& format, int latent_dim, std::string_view argument) {
  check_combination(format, argument);
  if (format.granularity == kGroup && latent_dim % format.group_size != 0) {
    refuse(ErrorCode::kInvalidArgument,
           fmt::format("{}.group_size is {}, but must divide the latent's {} dims: use {}.", argument,
                       format.group_size, latent_dim, latent_dim % 64 == 0 ? 64 : 32));
  }
  if (!format.static_scale()) return;
  refuse(ErrorCode::kUnsupported,
         fmt::format("{} is {}, but a latent cache stores its scales beside the codes: use fp8-g128-f32, a "
                     "format with computed scales or a 16-bit one.",
                     argument, format_name(format)));
}

}  // namespace halftone
