// Random rows beside those of the case table.
#include <algorithm>
#include <array>

#include "testing/case_options.h"
#include "testing/channel_cases.h"
#include "testing/latent_cases.h"

namespace halftone::testing {
namespace {

/// Single tokens beside prompts, and requests on both sides of where a kernel's packed rows end.
void mix_lengths(AttentionCase& row, Random& random) {
  const int group = row.q_heads / row.kv_heads;
  for (Request& r : row.requests) {
    const int fits = std::max(1, random.pick(std::array{8, 16, 48, 64}) / group);
    r.q_len = random.pick(std::array{0, 1, 1, fits, fits + 1, 70});
  }
}

}  // namespace

AttentionCase random_case(std::uint64_t seed) {
  Random random(seed * 2 + 1);
  AttentionCase row;
  row.name = "random-" + std::to_string(seed);
  row.seed = seed;
  const bool paged = random.chance(0.85);
  const DType dtype = random.pick(kFloats);
  if (!paged) row.plain = dtype;
  row.head_dim = random.pick(kDims);
  row.v_head_dim = random.chance(0.25) ? random.pick(kDims) : 0;
  const int v_dim = row.v_head_dim == 0 ? row.head_dim : row.v_head_dim;
  do {
    row.k_format = random.pick(format_texts());
  } while (!fits(row.k_format, row.head_dim));
  row.v_format = row.k_format;
  while (random.chance(0.3) || !fits(row.v_format, v_dim)) row.v_format = random.pick(format_texts());
  if (!paged) row.k_format = row.v_format = dtype == DType::kFloat16 ? "fp16" : "bf16";
  row.rotate_k = paged && random.chance(0.3);
  row.rotate_v = paged && random.chance(0.3);
  row.page_size = random.pick(kPages);
  row.q_dtype = random.pick(kFloats);
  row.out_dtype = random.pick(kFloats);
  row.kv_heads = static_cast<int>(random.integer(1, 4));
  row.q_heads =
      row.kv_heads * static_cast<int>(random.chance(0.2) ? random.integer(1, 40) : random.integer(1, 8));
  row.mask.causal = random.chance(0.5);
  if (random.chance(0.3)) row.mask.window_left = static_cast<int>(random.integer(0, 150));
  if (random.chance(0.2)) row.mask.window_right = static_cast<int>(random.integer(0, 100));
  row.scale = random.chance(0.2) ? static_cast<float>(0.02 + 0.3 * random.uniform()) : 0.0F;
  row.softcap = random.chance(0.2) ? static_cast<float>(5 + 45 * random.uniform()) : 0.0F;
  row.alibi = random.chance(0.2);
  row.sinks = random.chance(0.25);
  row.lse = random.chance(0.8);
  row.policy = random.pick(kPolicies);
  row.workers = random.chance(0.5) ? static_cast<int>(random.integer(1, 40)) : 0;
  row.table_mode = random.chance(0.3) ? BlockTableMode::kClamped : BlockTableMode::kTrusted;
  row.data = random.pick(std::array{Data::kNormal, Data::kNormal, Data::kOutlierChannels, Data::kSinkToken});
  row.slack = random.chance(0.3) ? static_cast<int>(random.integer(1, 500)) : 0;
  row.cu_q = random.chance(0.5);
  const int batch = static_cast<int>(random.integer(1, 7));
  const int longest = random.chance(0.1) ? 1500 : 300;
  for (const int kv_len : ragged_lengths(random, batch, 0, longest)) {
    const double kind = random.uniform();
    const int q_len = kind < 0.5 ? 1 : kind < 0.6 ? 0 : static_cast<int>(random.integer(1, 48));
    row.requests.push_back({q_len, kv_len});
  }
  if (paged && random.chance(0.2)) {  // drawn last, so that the other cases do not depend on it
    const FormatPair pair = random.pick(kMixedPairs);
    row.head_dim = random.pick(kMixedDims);
    row.v_head_dim = 0;
    row.k_format = pair.k;
    row.v_format = pair.v;
  }
  if (random.chance(0.2)) mix_lengths(row, random);  // likewise
  if (random.chance(0.2)) row.arithmetic = "half_int8";
  if (paged && random.chance(0.15)) make_latent_or_listed(row, random);
  if (paged && row.lists.top_k == 0 && random.chance(0.2)) {
    row = appending(
        row,
        {.dtype = random.pick(kFloats),
         .rope = random.pick(std::array{RopePairing::kNone, RopePairing::kHalf, RopePairing::kInterleaved}),
         .slots = random.chance(0.3)});
  }
  if (random.chance(0.2)) treat_channels(row, random);
  if (row.arithmetic != "16-bit" && random.chance(0.7))
    row.arithmetic = random.chance(0.5) ? "full_int8" : "fp8";
  if (row.rope_dim == 0 && random.chance(0.12)) row.head_dim = kWideDim;  // which groups of any size divide
  return row;
}

}  // namespace halftone::testing
