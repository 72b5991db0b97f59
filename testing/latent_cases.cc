#include "testing/latent_cases.h"

#include <algorithm>
#include <array>

#include "reference/sanitizer.h"
#include "testing/case_options.h"

namespace halftone::testing {
namespace {

constexpr std::array kHalves = {DType::kBFloat16, DType::kFloat16};
constexpr std::array kLatentHeads = {8, 16, 32, 64, 128};
/// What the GPU has kernels for, with 512 dims of V, 64 rotary ones and Q in bf16.
constexpr std::array<std::string_view, 5> kServedFormats = {"fp8-g128-f32", "bf16", "int8-g64", "int4-g64",
                                                            "fp8-g64-e8m0"};
struct NamedListing {
  Listing order;
  const char* name;
};
constexpr std::array kListings = {
    NamedListing{Listing::kMixed, "mixed"},           NamedListing{Listing::kAll, "all"},
    NamedListing{Listing::kPageBorder, "borders"},    NamedListing{Listing::kRepeated, "repeated"},
    NamedListing{Listing::kDescending, "descending"}, NamedListing{Listing::kNothing, "nothing"},
};

/// All dims of K are V, as in the token of 584 bytes.
void make_rotary_v(AttentionCase& row) { row.head_dim = row.v_head_dim; }

/// What rows vary in cycles of their own lengths.
AttentionCase varied(int n, std::string_view format, int latent_dim = 512, int rope_dim = 64) {
  const auto i = static_cast<std::size_t>(n);
  AttentionCase row = latent_case(AttentionCase(), format, latent_dim, rope_dim);
  if (format.ends_with("-e8m0")) make_rotary_v(row);
  row.page_size = kPages[i % kPages.size()];
  row.q_dtype = kHalves[i / 2 % kHalves.size()];
  row.out_dtype = n % 3 == 0 ? DType::kFloat32 : row.q_dtype;
  row.scale = 0.072F;
  row.policy = kPolicies[i % kPolicies.size()];
  row.workers = n % 4 == 1 ? 7 : 0;
  row.sinks = n % 3 == 1;
  row.softcap = n % 7 == 3 ? 20.0F : 0.0F;
  row.lse = n % 5 != 2;
  row.cu_q = n % 2 == 0;
  row.table_mode = n % 4 == 3 ? BlockTableMode::kClamped : BlockTableMode::kTrusted;
  row.seed = 5000 + i;
  return row;
}

void add_dense_rows(std::vector<AttentionCase>& rows) {
  int n = 0;
  for (const std::string& format : latent_formats()) {
    for (const int heads : {16, 128}) {
      AttentionCase row = varied(++n, format);
      row.name = "latent-" + format + "-h" + std::to_string(heads);
      row.q_heads = heads;
      row.mask.causal = n % 4 != 0;
      row.requests = {{1, 1}, {2, 64}, {1, 65}, {3, 200}, {0, 7}};
      if (n % 2 == 0) row.requests = {{1, 127}, {16, 129}, {1, 0}};
      rows.push_back(row);
    }
  }
  for (const int heads : {1, 3, 8, 32, 64}) {
    AttentionCase row = varied(++n, "fp8-g128-f32", heads == 3 ? 256 : 512, heads == 3 ? 32 : 64);
    row.name = "latent-heads-" + std::to_string(heads);
    row.q_heads = heads;
    row.mask.causal = true;
    row.requests = {{1, 1030}, {4, 77}, {2, 2}};
    rows.push_back(row);
  }
}

void add_list_rows(std::vector<AttentionCase>& rows) {
  int n = 40;
  const auto add = [&](AttentionCase row, const std::string& name) {
    row.name = "listed-" + name;
    rows.push_back(std::move(row));
  };
  for (const std::string& format : latent_formats()) {
    for (const int heads : {8, 128}) {
      AttentionCase row = varied(++n, format);
      row.q_heads = heads;
      row.requests = {{1, 300}, {2, 70}, {1, 5}};
      row.lists = {.top_k = 128, .counts = n % 2 == 0};
      add(row, format + "-h" + std::to_string(heads));
    }
  }
  for (const int heads : kLatentHeads) {
    AttentionCase row = varied(++n, "fp8-g128-f32");
    row.q_heads = heads;
    row.requests = {{2, 700}, {2, 900}};
    row.lists = {.top_k = 513, .counts = heads == 32};
    add(row, "heads-" + std::to_string(heads));
    row.lists.extra_top_k = 65;
    row.lists.extra_format = heads == 16 ? "bf16" : "";
    row.lists.extra_page_size = heads == 64 ? 16 : 64;
    add(row, "two-heads-" + std::to_string(heads));
  }
  for (const NamedListing& listing : kListings) {
    for (const int top_k : {1, 100, 256}) {
      ++n;
      AttentionCase row = varied(n, n % 2 == 0 ? "fp8-g128-f32" : "bf16");
      row.q_heads = 16;
      row.lse = true;
      row.requests = {{1, 200}, {3, 33}};
      row.lists = {.top_k = top_k, .order = listing.order, .counts = top_k == 256};
      add(row, std::string(listing.name) + "-" + std::to_string(top_k));
    }
  }
  for (const char* format : {"int8-g64", "int4-g64", "fp8-g64-e8m0"}) {
    for (const int heads : {48, 128}) {
      AttentionCase row = varied(++n, format);
      row.q_heads = heads;
      row.q_dtype = row.out_dtype = DType::kBFloat16;
      row.requests = {{2, 300}, {1, 150}, {1, 40}};
      row.lists = {.top_k = heads == 48 ? 200 : 130, .counts = heads == 48};
      add(row, std::string(format) + "-bf16-h" + std::to_string(heads));
      row.lists = {};
      row.mask.causal = true;
      add(row, std::string(format) + "-bf16-all-h" + std::to_string(heads));
    }
  }
  AttentionCase prefill = varied(++n, "fp8-g128-f32");
  prefill.q_heads = 16;
  prefill.requests = {{90, 300}, {41, 41}};
  prefill.lists = {.top_k = 64, .extra_top_k = 16};
  add(prefill, "prefill");
  int seed = 0;
  for (const char* format : {"bf16", "int8-head", "int4-g32", "fp8"}) {  // K and V apart
    AttentionCase row;
    row.k_format = format;
    row.q_heads = 8;
    row.kv_heads = 2;
    row.rotate_k = ++seed % 2 == 0;
    row.rotate_v = seed == 3;
    row.v_head_dim = seed == 2 ? 64 : 0;
    row.requests = {{1, 90}, {3, 200}};
    row.lists = {.top_k = 70, .counts = seed == 1, .extra_top_k = seed == 3 ? 20 : 0};
    row.seed = 6000 + static_cast<std::uint64_t>(seed);
    add(row, std::string("apart-") + format);
  }
}

/// Turns a random row into one that the GPU has kernels for.
void make_served(AttentionCase& row, Random& random) {
  row = latent_case(row, random.pick(kServedFormats));
  if (row.k_format.ends_with("-e8m0")) make_rotary_v(row);
  const bool f16 = row.k_format != "bf16" && random.chance(0.3);
  row.q_dtype = f16 ? DType::kFloat16 : DType::kBFloat16;
  row.alibi = false;
}

/// Every order of lists with every format that has no such row above, and with many heads, which have kernels
/// of their own; and the longest list.
void add_listing_rows(std::vector<AttentionCase>& rows) {
  constexpr std::array kTopK = {1, 100, 256};  // the last one is more than the cache has
  std::vector<AttentionCase> all;
  int n = 200;
  for (const NamedListing& listing : kListings) {
    for (const std::string& format : latent_formats()) {
      const auto add = [&](int heads) {
        AttentionCase row = varied(++n, format);
        row.q_heads = heads;
        if (heads > 16) row.q_dtype = row.out_dtype = DType::kBFloat16;
        row.lse = true;
        row.requests = {{1, 200}, {3, 33}};
        const int top_k = kTopK[static_cast<std::size_t>(n) % kTopK.size()];
        row.lists = {.top_k = top_k, .order = listing.order, .counts = n % 4 == 0};
        row.name = "listed-" + std::string(listing.name) + "-" + format + "-h" + std::to_string(heads) + "-" +
                   std::to_string(top_k);
        all.push_back(std::move(row));
      };
      if (format != "bf16" && format != "fp8-g128-f32") add(16);
      if (std::ranges::find(kServedFormats, format) != kServedFormats.end()) add(64), add(128);
    }
  }
  AttentionCase longest = varied(++n, "fp8-g128-f32");
  longest.name = "listed-65536-places";
  longest.q_heads = 2;
  longest.requests = {{1, 3000}};
  longest.lists = {.top_k = 65536};
  all.push_back(longest);
  constexpr std::size_t kStep = reference::kSanitized ? 5 : 1;
  for (std::size_t i = 0; i < all.size(); i += kStep) rows.push_back(std::move(all[i]));
}

}  // namespace

const std::vector<std::string>& latent_formats() {
  static const std::vector<std::string> formats = {
      "bf16",         "fp16",        "fp8-g128-f32",      "fp8-token-head",
      "int8-g64",     "int8-head",   "int8-g64-asym-f32", "int4-g64",
      "int4-g32-sym", "fp8-g64-e8m0"};
  return formats;
}

void add_latent_rows(std::vector<AttentionCase>& rows) {
  add_dense_rows(rows);
  add_list_rows(rows);
  add_listing_rows(rows);
}

namespace {

/// What follows for a row that has the format of its cache: heads, queries, lists.
void draw_lists(AttentionCase& row, Random& random, bool latent, bool served) {
  if (latent) {
    row.q_heads = random.chance(0.7) ? random.pick(kLatentHeads) : static_cast<int>(random.integer(1, 40));
    row.data = Data::kNormal;
  }
  const int longest = row.q_heads > 32 ? 2 : row.q_heads > 8 ? 4 : 16;
  for (Request& r : row.requests) r.q_len = std::min(r.q_len, longest);
  if (latent && random.chance(0.3)) return;
  row.mask = {};
  row.alibi = false;
  row.lists = {.top_k = static_cast<int>(random.chance(0.3) ? random.integer(1, 5) : random.integer(1, 400)),
               .order = random.pick(kListings).order,
               .counts = random.chance(0.5)};
  if (!random.chance(0.4)) return;
  row.lists.extra_top_k = static_cast<int>(random.integer(1, 200));
  row.lists.extra_page_size = random.pick(kPages);
  if (!latent || served || random.chance(0.5)) return;
  do {
    row.lists.extra_format = random.pick(latent_formats());
  } while (row.head_dim == row.v_head_dim && parse_format(row.lists.extra_format).group_size == 128);
}

}  // namespace

void make_latent_or_listed(AttentionCase& row, Random& random) {
  row.arithmetic = "16-bit";  // no other is served
  const bool latent = random.chance(0.7), served = latent && random.chance(0.5);
  if (served) {
    make_served(row, random);
  } else if (latent) {
    row = latent_case(row, random.pick(latent_formats()), random.pick(std::array{256, 512}),
                      random.pick(std::array{32, 64}));
    const bool divides = 448 % std::max(1, parse_format(row.k_format).group_size) == 0;
    if (divides && row.rope_dim == 64 && random.chance(0.3)) make_rotary_v(row);
  }
  draw_lists(row, random, latent, served);
}

AttentionCase random_latent_case(std::uint64_t seed) {
  Random random(seed);
  AttentionCase row = random_case(seed);
  row.plain.reset();
  row.step = {};
  row.lists = {};
  row.offset_k = row.scale_k = false;
  row.arithmetic = "16-bit";
  make_served(row, random);
  draw_lists(row, random, true, true);
  return row;
}

}  // namespace halftone::testing
