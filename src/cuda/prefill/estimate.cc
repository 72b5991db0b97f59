#include "cuda/prefill/estimate.h"

#include <algorithm>
#include <cmath>
#include <variant>

#include "cuda/attention/items.h"
#include "plan/work.h"

namespace halftone::cuda {
namespace {

std::int64_t blocks(std::int64_t count, std::int64_t size) { return (count + size - 1) / size; }

/// Requests at the bounds of a problem with pages.
struct Bounds {
  std::int64_t heads, rows, keys;  // KV heads of all requests; of each its packed rows, and its keys
  double scale;                    // thousands of keys of a head, as if of 128 dims
  double seen;                     // the part of the keys that a row sees, on average

  explicit Bounds(const AttentionProblem& p)
      : heads(std::int64_t{p.batch} * p.kv_heads()),
        rows(std::max<std::int64_t>(p.max_q_len, 1) * (p.q_heads / p.kv_heads())),
        keys(p.max_kv_len) {
    if (p.mask.window_left >= 0) {
      keys = std::min<std::int64_t>(keys, std::int64_t{p.mask.window_left} + p.max_q_len);
    }
    scale = static_cast<double>(heads) * static_cast<double>(keys) * p.head_dim() / 128.0 * 1e-3;
    const double hidden = 0.5 * static_cast<double>(std::min<std::int64_t>(p.max_q_len, keys));
    seen = p.mask.causal && keys > 0 ? 1 - hidden / static_cast<double>(keys) : 1;
  }
};

const KvFormat& format_of_k(const AttentionProblem& problem) {
  return std::get<KvCacheSpec>(problem.kv).k_format;
}

// Figures are of head_dim 128: nanoseconds of a key, microseconds of what all keys share, on an H100; of
// 16-bit pages a key's are an H200's.
constexpr std::int64_t kWorkers = 132;

double decode_us(const AttentionProblem& problem, int unit) {
  const Bounds b(problem);
  const KvFormat& k = format_of_k(problem);
  const double each = dtype_bits(k.dtype) == 16  ? 0.134
                      : dtype_bits(k.dtype) == 4 ? 0.114
                      : k.dynamic_scale()        ? 0.094
                                                 : 0.077;
  return 14 + b.scale * each * static_cast<double>(blocks(b.rows, unit));
}

/// What the busiest worker has of `units` units: how many items, of which the last ones may be parts, and how
/// many units' keys they have together.
struct Share {
  double items, units;
  std::int64_t parts = 1;

  Share(std::int64_t all, std::int64_t keys) : items(static_cast<double>(all / kWorkers)), units(items) {
    const std::int64_t rest = all % kWorkers;
    double least = HUGE_VAL, rounds = 0;
    for (std::int64_t n = 1; rest > 0 && n * rest <= 2 * kWorkers && n <= blocks(keys, 128); ++n) {
      const auto turns = static_cast<double>(blocks(rest * n, kWorkers));
      const double cost = turns * (static_cast<double>(keys) / static_cast<double>(n) + (n > 1 ? 512 : 256));
      if (cost < least) least = cost, parts = n, rounds = turns;
    }
    items += rounds, units += rounds / static_cast<double>(parts);
  }
};

/// Packed rows of the largest unit over `keys`.
std::int64_t unit_rows(const AttentionProblem& problem, PrefillKeys keys) {
  return problem.head_dim() > 256 ? 64 : keys == PrefillKeys::kPacked || problem.head_dim() > 128 ? 128 : 192;
}

/// Pages in 16 bits: each unit reads its keys, unless it has so many rows that products bind.
double given_us(const AttentionProblem& problem) {
  const Bounds b(problem);
  const std::int64_t units = blocks(b.rows, unit_rows(problem, PrefillKeys::kGiven));
  const double rows = static_cast<double>(b.rows) / static_cast<double>(units);
  const std::int64_t parts = std::clamp<std::int64_t>(
      kWorkers / std::max<std::int64_t>(planning::saturating_product(b.heads, units), 1), 1,
      std::max<std::int64_t>(blocks(b.keys, 128), 1));
  const double merging = parts == 1 ? 0 : parts <= kMergeGroup ? 5 : 12;
  return 17 + 0.09 * rows + merging + b.scale * std::max(0.122, 0.00085 * rows) * static_cast<double>(units);
}

/// Codes, staged or packed: a unit's keys take their time, whoever else reads them.
double codes_us(const AttentionProblem& problem, PrefillKeys keys) {
  const Bounds b(problem);
  const bool packed = keys == PrefillKeys::kPacked;
  const std::int64_t units = blocks(b.rows, unit_rows(problem, keys));
  const double rows = static_cast<double>(b.rows) / static_cast<double>(units);
  const Share share(planning::saturating_product(b.heads, units), b.keys);
  const KvFormat& k = format_of_k(problem);
  // Of packed ones whatever the rows: two warpgroups wait for their conversion and for each other.
  const double key = !packed                    ? 0.08 * rows
                     : dtype_bits(k.dtype) == 4 ? 18.3
                     : k.dynamic_scale()        ? 16.4
                                                : 13.6;
  const double merging = share.parts == 1 ? 0 : share.parts <= kMergeGroup ? 13 : 20;
  constexpr double kItem = 6;  // beginning and ending one beside others
  const double dims = static_cast<double>(problem.head_dim()) / 128.0;
  return 13 + 0.09 * rows + merging + kItem * std::max(share.items - 1, 0.0) +
         share.units * static_cast<double>(b.keys) * 1e-3 * key * dims * b.seen +
         (packed ? 0 : 5 + 0.3 * b.scale);
}

double prefill_us(const AttentionProblem& problem, PrefillKeys keys) {
  return keys == PrefillKeys::kGiven ? given_us(problem) : codes_us(problem, keys);
}

/// Rotations of K and scales of its channels are undone by staging only, and bounds must not decide for
/// batch_invariant.
bool can_read_packed(const AttentionProblem& problem, const KvCacheSpec& spec) {
  if (spec.rotate_k || spec.scale_k || problem.policy == SplitPolicy::kBatchInvariant) return false;
  return dtype_bits(problem.q_dtype) == 16 &&
         std::ranges::any_of(kPrefillTable, [&](const PrefillConfig& c) { return reads_packed(c, spec); });
}

}  // namespace

bool reads_packed(const PrefillConfig& c, const KvCacheSpec& spec) {
  return c.keys == PrefillKeys::kPacked && is_built(c) && c.head_dim == spec.head_dim &&
         spec.v_dim() == spec.head_dim && serves(c.part, spec.k_format, spec.head_dim) &&
         serves(c.part, spec.v_format, spec.head_dim);
}

PrefillKeys keys_of(const AttentionProblem& problem) {
  if (problem.arithmetic != Arithmetic::k16Bit) return PrefillKeys::kCodes;
  const auto* const spec = std::get_if<KvCacheSpec>(&problem.kv);
  if (spec == nullptr) return PrefillKeys::kGiven;
  const bool as_q = spec->k_format.dtype == problem.q_dtype && spec->v_format.dtype == problem.q_dtype;
  if (as_q && !spec->rotate_k) return PrefillKeys::kGiven;
  if (!can_read_packed(problem, *spec)) return PrefillKeys::kScaled;
  const bool faster = prefill_us(problem, PrefillKeys::kPacked) < prefill_us(problem, PrefillKeys::kScaled);
  return faster ? PrefillKeys::kPacked : PrefillKeys::kScaled;
}

bool decode_is_faster(const AttentionProblem& problem, int unit) {
  return decode_us(problem, unit) < prefill_us(problem, keys_of(problem));
}

}  // namespace halftone::cuda
