#include "cli/options/format_choice.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/terminal/terminal.h"
#include "cli/terminal/text.h"
#include "halftone/error.h"

namespace halftone::cli {
namespace {

constexpr std::string_view kRotated = "+rot", kChannels = "+chan";
constexpr std::string_view kRotatedByDefault[] = {"int8-head", "int4-g32", "int4-row"};
constexpr std::string_view kMixedByDefault[] = {"int8-head+rot:int4-g32", "int4-g32+rot:int8-head"};

struct Part {
  KvFormat format;
  bool rotate = false;
  bool channels = false;
};

Part parse_part(std::string_view text, std::string_view option) {
  std::string_view name = text;
  Part part;
  const auto take = [&](std::string_view mark, bool& found) {
    const bool ends = !found && name.ends_with(mark);
    if (ends) name.remove_suffix(mark.size()), found = true;
    return ends;
  };
  while (take(kRotated, part.rotate) || take(kChannels, part.channels)) {
  }
  try {
    part.format = parse_format(name);
    return part;
  } catch (const Error& error) {
    throw UsageError(fmt::format("{} is '{}': {}", option, printable(text), error.what()));
  }
}

}  // namespace

KvCacheSpec FormatChoice::spec(int kv_heads, int head_dim, int v_dim, int page_size) const {
  KvCacheSpec spec;
  spec.k_format = k;
  spec.v_format = v;
  spec.kv_heads = kv_heads;
  spec.head_dim = head_dim;
  spec.v_head_dim = v_dim;
  spec.page_size = page_size;
  spec.rotate_k = rotate_k;
  spec.rotate_v = rotate_v;
  spec.offset_k = spec.scale_k = channels;
  return spec;
}

FormatChoice parse_choice(std::string_view text, std::string_view option) {
  FormatChoice choice;
  const std::size_t colon = text.find(':');
  const Part k = parse_part(text.substr(0, colon), option);
  const Part v =
      colon == std::string_view::npos ? Part{k.format, k.rotate} : parse_part(text.substr(colon + 1), option);
  if (v.channels) {
    throw UsageError(fmt::format("{} is '{}', but only K has +chan: leave it out after the colon.", option,
                                 printable(text)));
  }
  choice = {choice_name(k.format, k.rotate, v.format, v.rotate, k.channels),
            k.format,
            v.format,
            k.rotate,
            v.rotate,
            k.channels};
  return choice;
}

std::vector<FormatChoice> parse_choices(std::string_view text, std::string_view option) {
  std::vector<FormatChoice> choices;
  for (const std::string& part : split(text, ',')) {
    FormatChoice choice = parse_choice(part, option);
    const bool known =
        std::any_of(choices.begin(), choices.end(), [&](const auto& c) { return c.name == choice.name; });
    if (!known) choices.push_back(std::move(choice));
  }
  return choices;
}

std::vector<FormatChoice> default_choices() {
  std::vector<FormatChoice> choices;
  for (const NamedFormat& named : named_formats()) {
    choices.push_back(parse_choice(named.name, "--formats"));
    if (std::find(std::begin(kRotatedByDefault), std::end(kRotatedByDefault), named.name) !=
        std::end(kRotatedByDefault)) {
      choices.push_back(parse_choice(fmt::format("{}{}", named.name, kRotated), "--formats"));
    }
  }
  for (const std::string_view mixed : kMixedByDefault) choices.push_back(parse_choice(mixed, "--formats"));
  return choices;
}

std::string choice_name(const KvFormat& k, bool rotate_k, const KvFormat& v, bool rotate_v, bool channels) {
  const auto name = [](const KvFormat& format, bool rotate, bool treated) {
    return fmt::format("{}{}{}", format_name(format), treated ? kChannels : "", rotate ? kRotated : "");
  };
  const bool alike = k == v && rotate_k == rotate_v;
  return alike ? name(k, rotate_k, channels) : name(k, rotate_k, channels) + ":" + name(v, rotate_v, false);
}

void check_latent_format(const FormatChoice& choice, std::string_view option) {
  if (choice.k == choice.v && !choice.rotate_k && !choice.rotate_v && !choice.channels) return;
  throw UsageError(fmt::format("{} has '{}', but a latent has one format, without +rot and +chan: use {}.",
                               option, choice.name, format_name(choice.k)));
}

void check_page_size(int page_size, std::string_view option) {
  for (const int choice : {16, 32, 64, 128, 256}) {
    if (page_size == choice) return;
  }
  throw UsageError(fmt::format("{} is {}, but must be 16, 32, 64, 128 or 256: use 64.", option, page_size));
}

}  // namespace halftone::cli
