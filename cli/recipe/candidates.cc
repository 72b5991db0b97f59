#include "cli/recipe/candidates.h"

#include <algorithm>

#include "cuda/decode/config.h"
#include "halftone/error.h"

namespace halftone::cli {
namespace {

bool fits(const KvCacheSpec& spec) {
  try {
    page_layout(spec);
    return true;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInternal) throw;
    return false;
  }
}

/// Formats that differ in their bytes: a group as wide as the head is what token-head is.
std::vector<KvFormat> formats_for(int head_dim, bool half_precision) {
  std::vector<KvFormat> formats;
  for (const NamedFormat& named : named_formats()) {
    const KvFormat& f = named.format;
    const bool other_half = !f.quantised() && (f.dtype == DType::kFloat16) != half_precision;
    if (!f.static_scale() && !other_half && f.group_size != head_dim) formats.push_back(f);
  }
  return formats;
}

std::vector<FormatChoice> pairs(const std::vector<CapturedLayer>& layers, bool half_precision, bool kernels) {
  std::vector<FormatChoice> choices;
  const std::vector<KvFormat> formats = formats_for(layers.front().head_dim, half_precision);
  for (const KvFormat& k : formats) {
    for (const KvFormat& v : formats) {
      const bool mixed = !(k == v);
      const bool per_token = k.granularity == Granularity::kToken || v.granularity == Granularity::kToken;
      if (mixed && (!kernels || per_token)) continue;
      const auto serves = [&](const CapturedLayer& layer) {
        FormatChoice choice;
        choice.k = k;
        choice.v = v;
        const KvCacheSpec spec = choice.spec(layer.kv_heads, layer.head_dim, layer.v_dim, 64);
        return fits(spec) && (!kernels || (layer.v_dim == layer.head_dim && cuda::find_row(spec, 0) >= 0));
      };
      if (!std::all_of(layers.begin(), layers.end(), serves)) continue;
      for (const auto& [rotate_k, rotate_v] : {std::pair(false, false), {true, false}, {true, true}}) {
        if ((rotate_k && !k.quantised()) || (rotate_v && !v.quantised())) continue;
        if (rotate_k && !rotate_v && !mixed) continue;
        choices.push_back({choice_name(k, rotate_k, v, rotate_v), k, v, rotate_k, rotate_v});
        if (!k.quantised()) continue;
        choices.push_back({choice_name(k, rotate_k, v, rotate_v, true), k, v, rotate_k, rotate_v, true});
      }
    }
  }
  return choices;
}

}  // namespace

std::vector<FormatChoice> recipe_choices(const std::vector<CapturedLayer>& layers, bool half_precision) {
  std::vector<FormatChoice> choices = pairs(layers, half_precision, true);
  return choices.empty() ? pairs(layers, half_precision, false) : choices;
}

}  // namespace halftone::cli
