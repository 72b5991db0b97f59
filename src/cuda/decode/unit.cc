#include "cuda/decode/unit.h"

#include <cstdint>
#include <variant>

#include "halftone/format.h"
#include "plan/backend.h"

namespace halftone::cuda {
namespace {

constexpr int kWorkers = 132;  // multiprocessors of a GPU
constexpr double kMiB = 1 << 20;

/// Requests at the bounds of a problem, in units of `size` packed rows.
struct Units {
  std::int64_t each;  // of a request and KV head
  std::int64_t all;   // of all
  double traffic;     // bytes of K and V, for each unit anew

  Units(const AttentionProblem& p, const KvCacheSpec& spec, std::int64_t rows, int size)
      : each((rows + size - 1) / size),
        all(std::int64_t{p.batch} * spec.kv_heads * each),
        traffic(static_cast<double>(planning::most_keys(p)) * bytes_per_token(spec) *
                static_cast<double>(each)) {}

  /// Whether some workers have parts of two units and others of one, so that the units of a head do not keep
  /// step.
  bool out_of_step() const { return all > kWorkers / 2 && all < kWorkers * 5 / 6; }
};

/// Bytes up to which to read K and V for each unit of 8 rows anew takes less than units of more rows need to
/// begin and to end.
double most_traffic(const KvCacheSpec& spec, std::int64_t rows, const Units& eights) {
  const int bits = dtype_bits(spec.k_format.dtype), dim = spec.head_dim;
  const bool wide = dim > 128 && dim <= 256;
  if (rows <= 16) {
    if (wide) return dim == 256 && bits == 8 ? 80 * kMiB : 0;
    return (dim == 64 ? 5 * bits / 2 : dim <= 128 ? 80 : bits == 4 ? 76 : 40) * kMiB;
  }
  if (wide) {
    if (bits == 16 || rows > 32 || (dim == 256 && bits == 4)) return 0;
    return (dim == 192 && eights.all <= 32 ? 80 : 40) * kMiB;
  }
  if (bits == 4 && rows <= 32) return 76 * kMiB;
  return (bits == 8 && dim == 128 && eights.all <= 32 ? 64 : 40) * kMiB;
}

/// For more than 16 rows in units of 8: whether these take less time than half as many of 16, whatever K and
/// V take.
bool prefers_eights(const KvCacheSpec& spec, const Units& eights, const Units& sixteens) {
  constexpr double kSixteen = 1.7;  // units of 8 rows that take as long as one of 16, of codes of 4 bits
  const bool four_bits = dtype_bits(spec.k_format.dtype) == 4;
  if (spec.head_dim == 128 || spec.head_dim >= 256) return false;
  if (spec.head_dim < 128 && sixteens.out_of_step() && eights.each > 4) {
    return four_bits || eights.traffic <= 80 * kMiB;
  }
  return four_bits && eights.all > kWorkers &&
         static_cast<double>(eights.each) <= kSixteen * static_cast<double>(sixteens.each);
}

}  // namespace

int largest_unit(const AttentionProblem& problem) {
  const auto* const spec = std::get_if<KvCacheSpec>(&problem.kv);
  if (spec == nullptr || problem.policy == SplitPolicy::kBatchInvariant) return kAnyUnit;
  const std::int64_t rows = std::int64_t{problem.q_heads} / spec->kv_heads * problem.max_q_len;
  if (rows <= 8 || rows > 64) return kAnyUnit;
  const int dim = spec->head_dim;
  const Units eights(problem, *spec, rows, 8), sixteens(problem, *spec, rows, 16);
  const bool keeps_step = eights.all <= kWorkers && (dim == 128 || !eights.out_of_step());
  if (keeps_step && eights.traffic <= most_traffic(*spec, rows, eights)) return 8;
  if (rows <= 16) return kAnyUnit;
  if (prefers_eights(*spec, eights, sixteens)) return 8;
  // Units of 32 rows of mma take up to twice the time of 16, and long to begin.
  const bool groups =
      spec->k_format.dtype == DType::kInt8 && spec->k_format.granularity == Granularity::kGroup;
  if (dim == 128 && !groups) return kAnyUnit;
  if (rows <= 32) return dim > 128 && sixteens.all <= kWorkers ? 16 : kAnyUnit;
  return rows <= 48 && (dim >= 128 || !sixteens.out_of_step()) ? 16 : kAnyUnit;
}

bool appends_in_time(const AttentionProblem& problem, const DecodeConfig& config) {
  const int tokens = problem.max_q_len;
  if (tokens == 1) return true;
  if (problem.max_kv_len < std::int64_t{256} * tokens) return false;
  const auto& spec = std::get<KvCacheSpec>(problem.kv);
  const Units units(problem, spec, std::int64_t{problem.q_heads} / spec.kv_heads * tokens, rows_of(config));
  // What a worker reads of a key and KV head counts as dims of 8 bits, of fewer as many: 128 of K, 128 of V.
  const auto size = [](const KvFormat& f, int dim) { return dtype_bits(f.dtype) == 16 ? 2.0 * dim : dim; };
  const double each = (size(spec.k_format, spec.head_dim) + size(spec.v_format, spec.v_dim())) / 256;
  const double keys = static_cast<double>(planning::most_keys(problem)) * spec.kv_heads *
                      static_cast<double>(units.each) * each / kWorkers;
  if (config.family != Family::kRows) return keys >= 160.0 * tokens;
  // Tokens of 4 bits take longer, and hold up the queries of a worker's next item.
  return keys >= 90.0 * (tokens - 2) && (tokens <= 8 || dtype_bits(spec.k_format.dtype) > 4);
}

}  // namespace halftone::cuda
