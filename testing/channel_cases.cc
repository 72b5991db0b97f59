#include "testing/channel_cases.h"

#include <array>
#include <string>

namespace halftone::testing {

void add_channel_rows(std::vector<AttentionCase>& rows) {
  constexpr std::array kFormats = {"fp8",       "fp8-static-head", "fp8-token-head", "int8-tensor",
                                   "int8-head", "int8-token",      "int8-g32",       "int8-token-asym-f32",
                                   "int4-g32",  "int4-g64",        "int4-row",       "int4-token-sym-f32"};
  constexpr std::array kDims = {128, 64, 256, 96, 192, 80, 512};
  const std::vector<std::vector<Request>> requests = {{{1, 15}, {1, 64}, {1, 200}, {1, 1025}},
                                                      {{1, 37}, {5, 64}, {0, 10}, {3, 0}, {17, 130}},
                                                      {{70, 70}, {33, 100}}};
  int n = 0;
  for (const char* format : kFormats) {
    for (const bool offset : {false, true}) {
      for (const bool scale : {false, true}) {
        if (!offset && !scale) continue;
        ++n;
        const auto i = static_cast<std::size_t>(n);
        AttentionCase row;
        row.k_format = format;
        row.v_format = n % 5 == 0 ? "int8-head" : format;
        row.head_dim = kDims[i % 3 == 0 ? i / 3 % kDims.size() : 0];
        if (const int group = parse_format(format).group_size; group != 0 && row.head_dim % group != 0) {
          row.head_dim = 128;
        }
        row.offset_k = offset;
        row.scale_k = scale;
        row.rotate_k = n % 4 == 3;
        row.rotate_v = n % 7 == 5;
        row.page_size = n % 2 == 0 ? 64 : 16;
        row.mask.causal = n % 3 != 0;
        row.q_dtype = n % 4 == 0 ? DType::kFloat16 : n % 11 == 0 ? DType::kFloat32 : DType::kBFloat16;
        row.out_dtype = n % 5 == 1 ? DType::kFloat32 : row.q_dtype;
        row.requests = requests[i / 2 % requests.size()];
        row.q_heads = n % 6 == 1 ? 40 : 8;
        row.policy = n % 3 == 1 ? SplitPolicy::kBatchInvariant : SplitPolicy::kReproducible;
        row.workers = n % 4 == 1 ? 7 : 0;
        row.softcap = !offset && n % 2 == 0 ? 20.0F : 0.0F;
        row.alibi = n % 5 == 2;
        row.sinks = n % 3 == 2;
        row.lse = n % 4 != 2;
        row.data = n % 5 == 3 ? Data::kNormal : Data::kOutlierChannels;
        row.cu_q = n % 2 == 0;
        row.seed = 6000 + i;
        row.name = std::string("channels-") + (offset ? "offset-" : "") + (scale ? "scale-" : "") + format;
        rows.push_back(row);
        if (n % 6 != 0 || row.alibi) continue;
        row.mask = {};
        row.lists.top_k = 40;
        row.name += "-listed";
        rows.push_back(row);
      }
    }
  }
}

void treat_channels(AttentionCase& row, Random& random) {
  const bool offset = random.chance(0.7), scale = !offset || random.chance(0.5);
  const bool apart = !row.plain && row.rope_dim == 0 && row.lists.extra_top_k == 0;
  if (!apart || row.arithmetic != "16-bit" || !parse_format(row.k_format).quantised()) return;
  row.offset_k = offset && row.softcap == 0;
  row.scale_k = scale;
}

}  // namespace halftone::testing
