#include "testing/lists.h"

#include <algorithm>
#include <climits>
#include <map>

namespace halftone::testing {
namespace {

/// A list of `top_k` places over `slots`.
std::vector<std::int32_t> draw_list(Random& random, Listing order, int top_k, int page_size,
                                    std::vector<std::int64_t> slots) {
  std::vector<std::int32_t> list(static_cast<std::size_t>(top_k), -1);
  if (slots.empty() || order == Listing::kNothing) return list;
  if (order == Listing::kSomeNothing) {
    if (random.chance(0.25)) return list;
    order = Listing::kAll;
  }
  if (order == Listing::kPageBorder) {
    std::erase_if(slots, [&](std::int64_t s) { return s % page_size > 0 && s % page_size < page_size - 1; });
    if (slots.empty()) return list;
  }
  if (order == Listing::kRepeated) slots.resize(std::min<std::size_t>(slots.size(), 3));
  if (order == Listing::kAll) random.shuffle(slots);
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (order == Listing::kAll) {
      if (i < slots.size()) list[i] = static_cast<std::int32_t>(slots[i]);
    } else if (order != Listing::kMixed || !random.chance(1.0 / 3)) {
      list[i] = static_cast<std::int32_t>(random.pick(slots));
    }
  }
  if (order == Listing::kDescending) std::sort(list.rbegin(), list.rend());
  return list;
}

/// What belongs to one list of all queries.
struct Lists {
  std::vector<std::int32_t> indices, counts;

  void add(Random& random, const std::vector<std::int32_t>& list, bool with_counts) {
    indices.insert(indices.end(), list.begin(), list.end());
    if (!with_counts) return;
    const auto size = static_cast<std::int64_t>(list.size());
    counts.push_back(static_cast<std::int32_t>(random.chance(0.2) ? 0 : random.integer(0, size)));
    std::fill(indices.end() - (size - counts.back()), indices.end(), INT_MAX);
  }
};

void set(const Lists& lists, std::int64_t queries, int top_k, bool with_counts, Tensor& indices,
         Tensor& counts) {
  indices = Tensor::of({queries, top_k}, lists.indices);
  if (with_counts) counts = Tensor::of({queries}, lists.counts);
}

std::map<std::int64_t, std::int64_t> tokens_of(const Cache& cache, std::int64_t first) {
  std::map<std::int64_t, std::int64_t> tokens;
  for (const std::int64_t slot : cache.slots()) tokens[slot] = first++;
  return tokens;
}

void append_tokens(const std::map<std::int64_t, std::int64_t>& tokens, const Tensor& indices,
                   const Tensor& counts, std::int64_t query, std::vector<std::int64_t>& out) {
  if (!indices.present()) return;
  const std::int64_t top_k = indices.shape()[1];
  const std::int64_t count =
      counts.present() ? counts.as<std::int32_t>()[static_cast<std::size_t>(query)] : top_k;
  for (std::int64_t place = 0; place < count; ++place) {
    const std::int32_t slot = indices.as<std::int32_t>()[static_cast<std::size_t>(query * top_k + place)];
    if (const auto at = tokens.find(slot); at != tokens.end()) out.push_back(at->second);
  }
}

}  // namespace

KvCacheSpec extra_spec(const AttentionCase& row) {
  KvCacheSpec spec = case_spec(row);
  if (!row.lists.extra_format.empty()) spec.k_format = spec.v_format = parse_format(row.lists.extra_format);
  spec.page_size = row.lists.extra_page_size;
  return spec;
}

void fill_lists(Problem& p, Random& random) {
  const CaseLists& want = p.row.lists;
  const int extra_tokens = want.extra_tokens;
  const std::vector<std::int64_t> all = p.cache->slots();
  if (want.extra_top_k != 0) {
    p.extra = std::make_unique<Cache>(p.problem.listed.extra, std::vector<int>{extra_tokens}, random,
                                      reference::CacheOptions{.table_mode = p.row.table_mode});
    const KvCacheSpec& spec = p.extra->spec;
    const auto values = [&](int dim) {
      std::vector<float> x(static_cast<std::size_t>(extra_tokens) * spec.kv_heads * dim);
      fill(random, Data::kNormal, x, spec.kv_heads, dim);
      return Tensor::of(DType::kFloat32, {extra_tokens, spec.kv_heads, dim}, x);
    };
    const Tensor k = values(spec.head_dim), v = values(spec.v_dim());
    p.extra->calibrate(k, v);
    p.extra->append(std::vector<int>{extra_tokens}, k, v);
  }
  Lists first, second;
  std::size_t token = 0;
  for (const Request& r : p.row.requests) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(token);
    const std::vector<std::int64_t> slots(begin, begin + r.kv_len);
    token += static_cast<std::size_t>(r.kv_len);
    for (int i = 0; i < r.q_len; ++i) {
      first.add(random, draw_list(random, want.order, want.top_k, p.row.page_size, slots), want.counts);
      if (!p.extra) continue;
      second.add(random,
                 draw_list(random, Listing::kMixed, want.extra_top_k, want.extra_page_size, p.extra->slots()),
                 want.counts);
    }
  }
  set(first, p.total_q(), want.top_k, want.counts, p.indices, p.counts);
  if (p.extra) set(second, p.total_q(), want.extra_top_k, want.counts, p.extra_indices, p.extra_counts);
}

std::vector<std::vector<std::int64_t>> listed_tokens(const Problem& p) {
  std::vector<std::vector<std::int64_t>> lists;
  if (p.row.lists.top_k == 0) return lists;
  const auto tokens = tokens_of(*p.cache, 0);
  std::map<std::int64_t, std::int64_t> extra;
  if (p.extra) extra = tokens_of(*p.extra, p.cache->total_tokens());
  for (std::int64_t i = 0; i < p.total_q(); ++i) {
    std::vector<std::int64_t>& list = lists.emplace_back();
    append_tokens(tokens, p.indices, p.counts, i, list);
    append_tokens(extra, p.extra_indices, p.extra_counts, i, list);
  }
  return lists;
}

}  // namespace halftone::testing
