// The shapes of the tests in github.com/deepseek-ai/FlashMLA (commit 9241ae3): dense decode, sparse decode
// and sparse prefill, each with its regular, irregular and corner cases and the shapes of its benchmarks.
// What differs here:
// - A grid of all combinations is covered by rows that walk through its lists, each at its own pace.
// - Sizes shrink where the oracle would take more than a second on one core: first requests, then keys of a
//   request by halves, in prompts queries. Heads, queries of a request in decode and top_k are as published,
//   and so are the sizes in a row's name. Lists of 16,384 places have fewer tokens than that.
// - Pages of 1 to 5 tokens are of 16, those of 53 to 69 of 64 and those of 576 of 256, the nearest that a
//   cache may have.
// - Several KV heads are left out, which no latent cache has, and so are contexts of more than 8,192 keys in
//   dense decode and prompts of 70,000 queries.
// - Places without a key hold -1. What a slot outside the cache does, the tests of lists say.
// - Dense decode has 656-byte records, too, and sparse prefill both quantised tokens.
#include "testing/flashmla_cases.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <utility>

#include "reference/sanitizer.h"
#include "testing/case_options.h"

namespace halftone::testing {
namespace {

constexpr std::int64_t kMostProducts = 1 << 17;  ///< of a row: heads * queries * keys
constexpr std::int64_t kMostTokens = 1 << 12;
constexpr std::array kWideHeads = {64, 128};

/// `batch` requests of `kv_len` keys, or of that many in the mean with half of it as the deviation, as few
/// and as short as a test needs them. `listed`: keys that a query attends to at most; 0: all.
std::vector<Request> scaled(Random& random, int batch, int q_len, int kv_len, bool varlen, int heads,
                            int listed = 0) {
  const auto too_large = [&] {
    const std::int64_t keys = listed == 0 ? kv_len : std::min(kv_len, listed);
    return std::int64_t{batch} * kv_len > kMostTokens || batch * keys * heads * q_len > kMostProducts;
  };
  while (batch > 2 && too_large()) batch = std::max(2, batch / 2);
  while (listed == 0 && too_large()) kv_len /= 2;
  if (too_large()) batch = 1;  // lists keep their length
  std::vector<Request> requests = uniform_requests(batch, q_len, kv_len);
  if (!varlen) return requests;
  for (Request& r : requests) {
    const float drawn = static_cast<float>(kv_len) * (1 + random.normal() / 2);
    r.kv_len = std::clamp(static_cast<int>(std::lround(drawn)), q_len, 2 * kv_len);
  }
  return requests;
}

/// "-h64-q2-k4096", and more.
std::string shape_text(int heads, int q_len, int kv_len) {
  return "-h" + std::to_string(heads) + "-q" + std::to_string(q_len) + "-k" + std::to_string(kv_len);
}

/// A row as every kind of test has it.
AttentionCase base_row(std::string_view format, int heads, int n) {
  AttentionCase row = latent_case(AttentionCase(), format);
  if (format.ends_with("-e8m0")) row.head_dim = row.v_head_dim;  // 448 + 64 dims, which all are V
  row.q_heads = heads;
  row.policy = kPolicies[static_cast<std::size_t>(n % 7) % kPolicies.size()];
  row.seed = 9000 + static_cast<std::uint64_t>(n);
  return row;
}

class Grid {
 public:
  explicit Grid(std::vector<AttentionCase>& rows) : rows_(rows) {}

  void add_dense_decode() {
    constexpr std::array kHeads = {1, 3, 9, 63, 64, 126, 128};
    constexpr std::array kBatches = {1, 2, 6, 64};
    constexpr std::array kKeys = {20, 140, 4096};
    for (const int heads : kHeads) {
      for (const int q_len : {1, 2, 4}) {
        const int keys = kKeys[at(n_ + n_ / 3) % kKeys.size()];  // all of them for each q_len
        dense("dense", heads, q_len, kBatches[at(n_) % kBatches.size()], keys, n_ / 4 % 2 == 0);
      }
    }
    for (const int heads : {1, 9, 64, 128}) {  // some requests have no key
      AttentionCase& row = dense("dense-zero", heads, 2, 128, 4096, true);
      if (row.requests.size() < 3) row.requests.push_back({2, 77});
      row.requests[1].kv_len = 0;
    }
    for (const int heads : {16, 32, 64, 128}) {  // of the benchmarks
      for (const int q_len : {1, 2}) {
        for (const int keys : {4096, 8192}) {
          AttentionCase& row = dense("dense-128", heads, q_len, 128, keys, true);
          if (std::int64_t{heads} * q_len * keys <= 4 * kMostProducts) row.requests[0].kv_len = keys;
        }
      }
    }
  }

  void add_sparse_decode() {
    struct Shape {
      int keys, top_k, page_size;
    };
    constexpr std::array kShapes = {Shape{512, 64, 16},    Shape{512, 64, 64},    Shape{1024, 576, 16},
                                    Shape{1024, 576, 64},  Shape{2046, 2048, 16}, Shape{2046, 2048, 64},
                                    Shape{2046, 2048, 256}};
    constexpr std::array kBatches = {4, 74, 321};
    for (const int heads : kWideHeads) {
      for (const Shape& s : kShapes) {
        const int batch = kBatches[at(n_ / 3) % kBatches.size()], q_len = n_ % 2 == 0 ? 1 : 3;
        sparse("sparse", "fp8-g128-f32", heads, q_len, batch, s.keys, s.page_size, {.top_k = s.top_k});
        sparse("sparse", "fp8-g64-e8m0", heads, q_len, batch, s.keys, s.page_size,
               {.top_k = s.top_k, .counts = n_ % 4 < 2});
        const Shape& extra = kShapes[at(n_ * 3) % kShapes.size()];
        sparse("sparse-two", "fp8-g64-e8m0", heads, 4 - q_len, batch, s.keys, s.page_size,
               {.top_k = s.top_k,
                .counts = n_ % 4 >= 2,
                .extra_top_k = extra.top_k,
                .extra_page_size = extra.page_size,
                .extra_tokens = extra.keys});
      }
    }
    add_sparse_corners();
    // Of the benchmarks: DeepSeek V3.2, a window beside tokens of the whole context, and the longest lists.
    sparse("sparse-v32", "fp8-g128-f32", 128, 2, 128, 32768, 64, {.top_k = 2048});
    for (const int heads : kWideHeads) {
      for (const auto& [extra, page_size] : {std::pair{512, 64}, {1024, 64}, {1024, 16}}) {
        if (heads == 128 && extra == 512) continue;
        sparse("sparse-window-" + std::to_string(extra), "fp8-g64-e8m0", heads, 2, 128, 16384, 256,
               {.top_k = 128,
                .counts = page_size == 16,
                .extra_top_k = extra,
                .extra_page_size = page_size,
                .extra_tokens = 4096});
      }
      for (const char* format : {"fp8-g128-f32", "fp8-g64-e8m0"})
        sparse("sparse-long", format, heads, 1, 148, 1500, 64, {.top_k = 16384});
    }
  }

  void add_sparse_prefill() {
    struct Shape {
      int keys, top_k;
    };
    constexpr std::array kShapes = {Shape{128, 128},  Shape{256, 256},  Shape{512, 512},  Shape{592, 128},
                                    Shape{1840, 256}, Shape{1592, 384}, Shape{1521, 512}, Shape{95, 128},
                                    Shape{153, 256},  Shape{114, 384}};
    constexpr std::array kQueries = {1, 62, 213};
    constexpr std::array kFormats = {"bf16", "fp8-g64-e8m0", "fp8-g128-f32"};
    for (const int heads : kWideHeads) {
      for (const Shape& s : kShapes) {
        AttentionCase& row = prefill("prefill", kFormats[at(n_) % kFormats.size()], heads,
                                     kQueries[at(n_ / 2) % kQueries.size()], s.keys, s.top_k);
        row.sinks = n_ / 2 % 2 == 0;
        row.lists.counts = n_ / 3 % 2 == 0;
      }
      for (const Shape& s : {Shape{128, 128}, {256, 256}, {4321, 4096}, {2048, 2048}}) {
        prefill("prefill-some", "fp8-g128-f32", heads, 1234, s.keys, s.top_k).lists.order =
            Listing::kSomeNothing;
      }
      for (const Shape& s : {Shape{32, 2048}, {64, 8192}}) {  // most of a list is -1
        for (const int queries : {1, 1024})
          prefill("prefill-few", n_ % 2 == 0 ? "bf16" : "fp8-g64-e8m0", heads, queries, s.keys, s.top_k)
              .lists.counts = true;
      }
    }
  }

 private:
  static std::size_t at(int i) { return static_cast<std::size_t>(i); }

  AttentionCase& add(AttentionCase row, std::string name) {
    row.name = "flashmla-" + std::move(name) + "-" + std::to_string(n_++);
    rows_.push_back(std::move(row));
    return rows_.back();
  }

  AttentionCase& dense(const std::string& name, int heads, int q_len, int batch, int keys, bool varlen) {
    AttentionCase row = base_row(n_ % 8 % 3 == 2 ? "fp8-g128-f32" : "bf16", heads, n_);
    row.mask.causal = n_ % 5 < 3;
    Random random(row.seed);
    row.requests = scaled(random, batch, q_len, keys, varlen, heads);
    return add(std::move(row), name + shape_text(heads, q_len, keys));
  }

  AttentionCase& sparse(const std::string& name, std::string_view format, int heads, int q_len, int batch,
                        int keys, int page_size, CaseLists lists) {
    AttentionCase row = base_row(format, heads, n_);
    row.sinks = true;
    row.page_size = page_size;
    lists.order = Listing::kAll;
    row.lists = lists;
    Random random(row.seed);
    const int listed = std::min(lists.top_k, keys) + std::min(lists.extra_top_k, lists.extra_tokens);
    row.requests = scaled(random, batch, q_len, std::min(keys, 4096), true, heads, listed);
    return add(std::move(row), name + shape_text(heads, q_len, keys) + "-top" + std::to_string(lists.top_k));
  }

  /// Lists of other lengths than multiples of 64, without any key, over requests without tokens, and longer
  /// than what there is.
  void add_sparse_corners() {
    for (const int heads : kWideHeads) {
      for (const int top_k : {65, 100, 577, 1000})
        sparse("sparse-odd", n_ % 2 == 0 ? "fp8-g128-f32" : "fp8-g64-e8m0", heads, 1, 4, 650, 64,
               {.top_k = top_k, .counts = n_ % 4 == 0});
      for (const auto& [keys, top_k] : {std::pair{512, 64}, {650, 576}}) {
        for (const Listing order : {Listing::kNothing, Listing::kSomeNothing, Listing::kAll}) {
          const bool two = n_ % 3 == 0;
          AttentionCase& row =
              sparse("sparse-corner", two || n_ % 2 == 0 ? "fp8-g64-e8m0" : "fp8-g128-f32", heads, 3, 4, keys,
                     64, {.top_k = top_k, .extra_top_k = two ? 100 : 0, .extra_tokens = 512});
          row.lists.order = order;
          row.sinks = order != Listing::kNothing;
          row.requests.push_back({3, 0});
        }
      }
    }
  }

  /// A prompt is one request; of its queries an odd number is left where they are fewer here.
  AttentionCase& prefill(const std::string& name, std::string_view format, int heads, int queries, int keys,
                         int top_k) {
    AttentionCase row = base_row(format, heads, n_);
    row.sinks = true;
    row.lists = {.top_k = top_k, .order = Listing::kAll};
    const int most =
        std::max(3, static_cast<int>(kMostProducts / (std::int64_t{heads} * std::min(top_k, keys))));
    row.requests = {{queries <= most ? queries : (most - 1) | 1, keys}};
    return add(std::move(row), name + shape_text(heads, queries, keys) + "-top" + std::to_string(top_k));
  }

  std::vector<AttentionCase>& rows_;
  int n_ = 0;
};

}  // namespace

void add_flashmla_rows(std::vector<AttentionCase>& rows) {
  std::vector<AttentionCase> all;
  Grid grid(all);
  grid.add_dense_decode();
  grid.add_sparse_decode();
  grid.add_sparse_prefill();
  // Sanitizers look at code, which other rows reach as well, and take several times as long.
  constexpr std::size_t kStep = reference::kSanitized ? 5 : 1;
  for (std::size_t i = 0; i < all.size(); i += kStep) rows.push_back(std::move(all[i]));
}

}  // namespace halftone::testing
