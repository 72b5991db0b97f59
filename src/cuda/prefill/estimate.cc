#include "cuda/prefill/estimate.h"

#include <algorithm>
#include <cmath>
#include <variant>

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

// Figures are of head_dim 128 on an H100: nanoseconds of a key, microseconds of what all keys share.
constexpr std::int64_t kWorkers = 132;

double decode_us(const AttentionProblem& problem, int unit) {
  const Bounds b(problem);
  const KvFormat& k = format_of_k(problem);
  const bool codes = dtype_bits(k.dtype) < 16;
  const auto units = static_cast<double>(blocks(b.rows, unit));
  const double each = !codes ? 0.134 : dtype_bits(k.dtype) == 4 ? 0.112 : k.dynamic_scale() ? 0.092 : 0.075;
  return (codes ? 18.5 : 14) + b.scale * each * units;
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

/// What a kernel of prefill takes.
struct Cost {
  double key, key_and_row;  // of a unit
  double begin;             // and end
  double item;              // one beside others
  double few, many;         // parts of a unit that are merged
  double reading = 0;       // a thousand keys of a head, by memory
  double staging = 0;       // likewise, before
};

Cost cost_of(const AttentionProblem& problem, PrefillKeys keys, std::int64_t unit) {
  if (keys == PrefillKeys::kGiven && unit <= 128) return {5.4, 0.0544, 13.8, 8, 2.8, 0, 0.186};
  if (keys == PrefillKeys::kGiven) return {7.2, 0.0585, 11.4, 3.8, 4.7, 2.3, 0.186};
  if (keys == PrefillKeys::kCodePages) return {10.1, 0, 16, 5, 6.5, 2, 0.092};
  if (problem.arithmetic == Arithmetic::kFp8) return {13, 0, 24.5, 5.3, 7, 5, 0, 0.09};
  if (keys != PrefillKeys::kPacked) return {9.35, 0.0334, 24.5, 5.3, 6, 4, 0, 0.315};
  // Whatever the rows: two warpgroups wait for their conversion and for each other.
  const KvFormat& k = format_of_k(problem);
  return {dtype_bits(k.dtype) == 4 ? 18.2 : k.dynamic_scale() ? 16.7 : 14.8, 0, 20.5, 5.5, 7, 2};
}

/// A unit's keys take their time, but once memory takes longer.
double prefill_us(const AttentionProblem& problem, PrefillKeys keys, std::int64_t unit) {
  const Bounds b(problem);
  const std::int64_t units = blocks(b.rows, unit);
  const double rows = static_cast<double>(b.rows) / static_cast<double>(units);
  const Share share(planning::saturating_product(b.heads, units), b.keys);
  const Cost cost = cost_of(problem, keys, unit);
  // Exponentials do not become fewer with the dims.
  const double dims = static_cast<double>(problem.head_dim()) / 128.0, work = std::max(dims, 0.43 + dims / 2);
  const double computing =
      share.units * static_cast<double>(b.keys) * 1e-3 * (cost.key + cost.key_and_row * rows) * work * b.seen;
  // Values of 16 bits are read once and, as units of the same keys do not keep step, partly again for each.
  const double reading = b.scale * cost.reading * (1 + 0.2 * static_cast<double>(units - 1));
  const double merging = share.parts == 1 ? 0 : share.parts <= kFewParts ? cost.few : cost.many;
  return cost.begin + cost.staging * b.scale + merging + cost.item * std::max(share.items - 1, 0.0) +
         std::max(computing, reading);
}

double prefill_us(const AttentionProblem& problem, PrefillKeys keys) {
  return prefill_us(problem, keys, prefill_unit(problem, keys));
}

/// Whether a kernel reads K and V as codes in their pages. For values, rotations of K and scales of its
/// channels are undone by staging only; bounds must not decide for batch_invariant.
bool can_read_packed(const AttentionProblem& problem, const KvCacheSpec& spec, PrefillKeys keys) {
  if (problem.policy == SplitPolicy::kBatchInvariant) return false;
  if (keys == PrefillKeys::kPacked ? spec.rotate_k || spec.scale_k : problem.arithmetic != Arithmetic::kFp8) {
    return false;
  }
  return dtype_bits(problem.q_dtype) == 16 && std::ranges::any_of(kPrefillTable, [&](const PrefillConfig& c) {
           return c.keys == keys && reads_packed(c, spec);
         });
}

/// Whether warpgroups share the dims of O where pages are read as they are.
bool shares_output(const AttentionProblem& problem) {
  return std::ranges::any_of(kPrefillTable, [&](const PrefillConfig& c) {
    return c.keys == PrefillKeys::kGiven && c.value_dim == problem.v_dim() && c.shares > 1;
  });
}

}  // namespace

bool has_codes(const KvCacheSpec& spec, DType codes) {
  const KvFormat& k = spec.k_format;
  return k.dtype == codes && !k.asymmetric && k.params_per_token(spec.head_dim) <= 1;
}

bool has_value_codes(const KvCacheSpec& spec) {
  return spec.v_format.dtype == DType::kFloat8E4M3 && spec.v_format.static_scale();
}

bool reads_packed(const PrefillConfig& c, const KvCacheSpec& spec) {
  if (!is_built(c) || c.head_dim != spec.head_dim || c.value_dim != spec.v_dim()) return false;
  if (c.keys == PrefillKeys::kCodePages) return has_codes(spec, c.dtype) && has_value_codes(spec);
  return c.keys == PrefillKeys::kPacked && serves(c.part, spec.k_format, spec.head_dim) &&
         serves(c.part, spec.v_format, spec.head_dim);
}

std::int64_t prefill_unit(const AttentionProblem& problem, PrefillKeys keys) {
  std::int64_t unit = 0;
  for (const PrefillConfig& c : kPrefillTable) {
    if (c.keys != keys || c.head_dim != problem.head_dim() || c.value_dim != problem.v_dim()) continue;
    if (rows_of(c) == unit) continue;
    const bool decides = unit > 0 && problem.policy != SplitPolicy::kBatchInvariant;
    if (unit == 0 || (decides && prefill_us(problem, keys, rows_of(c)) < prefill_us(problem, keys, unit))) {
      unit = rows_of(c);
    }
  }
  return std::max<std::int64_t>(unit, 64);
}

PrefillKeys keys_of(const AttentionProblem& problem) {
  const auto* const spec = std::get_if<KvCacheSpec>(&problem.kv);
  const bool values = problem.arithmetic == Arithmetic::k16Bit;
  if (spec == nullptr) return values ? PrefillKeys::kGiven : PrefillKeys::kCodes;
  const bool as_q = spec->k_format.dtype == problem.q_dtype && spec->v_format.dtype == problem.q_dtype;
  // Where warpgroups share the dims of O, none can rotate it back: V is staged as it was.
  const bool rotates_o = spec->rotate_v && shares_output(problem);
  if (values && as_q && !spec->rotate_k && !rotates_o) return PrefillKeys::kGiven;
  const PrefillKeys staged = values ? PrefillKeys::kScaled : PrefillKeys::kCodes;
  const PrefillKeys packed = values ? PrefillKeys::kPacked : PrefillKeys::kCodePages;
  if (!can_read_packed(problem, *spec, packed)) return staged;
  return prefill_us(problem, packed) < prefill_us(problem, staged) ? packed : staged;
}

bool decode_is_faster(const AttentionProblem& problem, int unit) {
  return decode_us(problem, unit) < prefill_us(problem, keys_of(problem));
}

bool universal_is_faster(const AttentionProblem& problem, int unit) {
  // us, and ns of a key, of an H200 (docs/kernels/prefill-chunks-measured.md).
  constexpr double kBegin = 17, kEach = 0.31;
  const Bounds b(problem);
  const double units = static_cast<double>(blocks(b.rows, unit)) * b.seen;
  return kBegin + b.scale * kEach * units < prefill_us(problem, keys_of(problem));
}

}  // namespace halftone::cuda
