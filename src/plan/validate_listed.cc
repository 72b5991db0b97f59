#include "plan/validate_listed.h"

#include <string_view>
#include <variant>

#include "plan/check_tensor.h"
#include "plan/fail.h"
#include "plan/listed.h"

namespace halftone::planning {
namespace {

void check_count_shape(const AttentionProblem& p, const TensorView& counts, std::string_view name, int top_k,
                       std::string_view option) {
  if (!given(counts)) return;
  if (top_k == 0) check_absent(counts, name, fmt::format("problem.listed.{} is 0", option));
  check_tensor(counts, {name, {DType::kInt32}, {kAnySize}, p.device});
}

void check_counts_of(const TensorView& counts, std::string_view name, int top_k, std::string_view option,
                     std::int64_t total_q) {
  if (!given(counts)) return;
  if (counts.shape[0] != total_q) {
    invalid("{}.shape[0] is {}, but there are {} queries: pass one count for each.", name, counts.shape[0],
            total_q);
  }
  const auto* values = static_cast<const std::int32_t*>(counts.data);
  for (std::int64_t i = 0; i < total_q; ++i) {
    if (values[i] >= 0 && values[i] <= top_k) continue;
    fail(ErrorCode::kOutOfRange, "{}[{}] is {}, but must be 0 to {} {}: use {}.", name, i, values[i], option,
         top_k, values[i] < 0 ? 0 : top_k);
  }
}

void check_list(const AttentionProblem& p, const TensorView& indices, std::string_view name, int top_k,
                std::string_view option, std::int64_t total_q) {
  if (top_k == 0) {
    if (given(indices)) check_absent(indices, name, fmt::format("problem.listed.{} is 0", option));
    return;
  }
  if (!given(indices)) {
    invalid("{} is absent, but problem.listed.{} is {}: pass each query's slots.", name, option, top_k);
  }
  check_tensor(indices, {name, {DType::kInt32}, {total_q, top_k}, p.device, Strides::kLastContiguous});
}

/// Places [0, count) of a query's list.
void check_slots(const TensorView& indices, std::string_view name, const PagedKv& cache, std::int64_t query,
                 std::int32_t count) {
  const std::int64_t slots = cache.pages.shape[0] * cache.spec.page_size;
  const auto* list = static_cast<const std::int32_t*>(indices.data) + query * indices.strides[0];
  for (std::int32_t place = 0; place < count; ++place) {
    if (list[place] < slots) continue;
    fail(ErrorCode::kOutOfRange,
         "{}[{}, {}] is {}, but its cache has slots 0 to {}: correct the list, skip the place with -1 or use "
         "kClamped.",
         name, query, place, list[place], slots - 1);
  }
}

}  // namespace

void check_counts(const AttentionProblem& p, const SequenceLengths& lengths) {
  check_count_shape(p, lengths.counts, "counts", p.listed.top_k, "top_k");
  check_count_shape(p, lengths.extra_counts, "extra_counts", p.listed.extra_top_k, "extra_top_k");
}

void check_count_values(const AttentionProblem& p, const SequenceLengths& lengths) {
  if (!p.is_listed()) return;
  const std::int64_t total_q = given(lengths.cu_q)
                                   ? static_cast<const std::int32_t*>(lengths.cu_q.data)[p.batch]
                                   : std::int64_t{p.batch} * p.max_q_len;
  check_counts_of(lengths.counts, "counts", p.listed.top_k, "top_k", total_q);
  check_counts_of(lengths.extra_counts, "extra_counts", p.listed.extra_top_k, "extra_top_k", total_q);
}

void check_lists(const AttentionProblem& p, const AttentionArgs& args, std::int64_t total_q) {
  check_list(p, args.indices, "indices", p.listed.top_k, "top_k", total_q);
  check_list(p, args.extra_indices, "extra_indices", p.listed.extra_top_k, "extra_top_k", total_q);
  if (p.listed.extra_top_k == 0)
    check_absent(args.extra_kv.pages, "extra_kv.pages", "problem.listed.extra_top_k is 0");
}

void check_listed_slots(const AttentionArgs& args, const Schedule& schedule) {
  const auto& cache = std::get<PagedKv>(args.kv);
  const std::int32_t queries = schedule.header->total_q;
  for (std::int32_t i = 0; i < queries; ++i) {
    const std::int32_t all = schedule.kv_lengths[i];
    const std::int32_t first = schedule.first_list == nullptr ? all : schedule.first_list[i];
    if (cache.table_mode == BlockTableMode::kTrusted) check_slots(args.indices, "indices", cache, i, first);
    const std::int32_t extra = all - second_list_begin(first);
    if (extra > 0 && args.extra_kv.table_mode == BlockTableMode::kTrusted)
      check_slots(args.extra_indices, "extra_indices", args.extra_kv, i, extra);
  }
}

}  // namespace halftone::planning
