// Formats as the command line names them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "halftone/cache.h"

namespace halftone::cli {

/// Formats of K and V, each with or without a Hadamard rotation; K's channels with or without offset and
/// scale.
struct FormatChoice {
  std::string name;  ///< "int8-head", "int4-g32+rot" or "int4-g32+rot:int8-head"
  KvFormat k;
  KvFormat v;
  bool rotate_k = false;
  bool rotate_v = false;
  bool channels = false;

  KvCacheSpec spec(int kv_heads, int head_dim, int v_dim, int page_size) const;
};

/// Parses FORMAT[+chan][+rot] for K and V alike (+chan is K's), or K[+chan][+rot]:V[+rot]. Throws UsageError
/// naming `option`.
FormatChoice parse_choice(std::string_view text, std::string_view option);

/// Parses a comma-separated list; duplicates are dropped.
std::vector<FormatChoice> parse_choices(std::string_view text, std::string_view option);

/// Every named format, the rotated variants of those that rotation helps, and two mixtures of K and V.
std::vector<FormatChoice> default_choices();

/// "K[+chan][+rot]:V[+rot]", or one name when K and V agree.
std::string choice_name(const KvFormat& k, bool rotate_k, const KvFormat& v, bool rotate_v,
                        bool channels = false);

/// Refuses what a latent does not have, two formats, +rot and +chan. Throws UsageError naming `option`.
void check_latent_format(const FormatChoice& choice, std::string_view option);

/// Checks a page size; throws UsageError naming `option`.
void check_page_size(int page_size, std::string_view option);

}  // namespace halftone::cli
