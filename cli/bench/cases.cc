#include "cli/bench/cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "cli/terminal/terminal.h"
#include "cli/terminal/text.h"

namespace halftone::cli {
namespace {

constexpr int kMaxContext = 1 << 24;
constexpr int kMaxBatch = 1 << 20;
constexpr std::string_view kPolicyFormats = "bf16,fp8,int8-head,int4-g32";
constexpr std::string_view kDecodeFormats = "bf16,fp8,int8-head,int4-g32,int4-row";

bool parse_number(std::string_view text, int low, int high, int& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= low && value <= high;
}

}  // namespace

Suite parse_suite(std::string_view text) {
  for (const Suite suite : {Suite::kDecode, Suite::kPrefill, Suite::kAppend, Suite::kLayer}) {
    if (suite_text(suite) == text) return suite;
  }
  throw UsageError(fmt::format("--suite is '{}', but must be decode, prefill, append or layer: use decode.",
                               printable(text)));
}

std::string_view suite_text(Suite suite) {
  switch (suite) {
    case Suite::kDecode:
      return "decode";
    case Suite::kPrefill:
      return "prefill";
    case Suite::kAppend:
      return "append";
    case Suite::kLayer:
      return "layer";
  }
  return "unknown";
}

std::string_view layer_append_text(LayerAppend append) {
  return append == LayerAppend::kNone ? "none" : append == LayerAppend::kSeparate ? "separate" : "fused";
}

std::vector<BenchCase> with_appends(const BenchCase& setup) {
  if (setup.suite != Suite::kLayer) return {setup};
  std::vector<BenchCase> cases;
  for (const LayerAppend append : {LayerAppend::kNone, LayerAppend::kSeparate, LayerAppend::kFused}) {
    for (const bool early : {false, true}) {
      if (early && !setup.gemm) continue;
      cases.push_back(setup);
      cases.back().append = append;
      cases.back().early = early;
    }
  }
  return cases;
}

std::string_view kind_text(const BenchCase& setup) {
  if (setup.suite == Suite::kAppend) return "append";
  const bool sparse = setup.shape.top_k > 0;
  if (setup.suite == Suite::kPrefill) return sparse ? "sparse_prefill" : "dense_prefill";
  return sparse ? "sparse_decode" : "dense_decode";
}

std::vector<std::int64_t> kv_lengths(const BenchCase& setup) {
  if (setup.mixed.empty()) {
    return std::vector<std::int64_t>(static_cast<std::size_t>(setup.shape.batch), setup.shape.context);
  }
  std::vector<std::int64_t> lengths;
  for (const RequestGroup& g : setup.mixed) {
    lengths.insert(lengths.end(), static_cast<std::size_t>(g.count), g.context);
  }
  return lengths;
}

std::vector<std::int64_t> q_lengths(const BenchCase& setup) {
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(setup.shape.batch), setup.shape.q_len);
  auto next = lengths.begin();
  for (const RequestGroup& g : setup.mixed) {
    if (g.q_len > 0) std::fill_n(next, g.count, g.q_len);
    next += g.count;
  }
  return lengths;
}

std::vector<RequestGroup> parse_requests(std::string_view text, std::string_view option) {
  std::vector<RequestGroup> groups;
  std::int64_t requests = 0;
  for (const std::string& part : split(text, ',')) {
    const std::size_t slash = part.find('/'), cross = part.find('x');
    const std::size_t begin = slash == std::string::npos ? 0 : slash + 1;
    const std::string_view all = part;
    RequestGroup group;
    if (cross == std::string::npos || cross < begin ||
        (begin > 0 && !parse_number(all.substr(0, slash), 1, kMaxContext, group.q_len)) ||
        !parse_number(all.substr(begin, cross - begin), 1, kMaxContext, group.context) ||
        !parse_number(all.substr(cross + 1), 1, kMaxBatch, group.count)) {
      throw UsageError(
          fmt::format("{} has '{}', but a group of requests is CONTEXTxCOUNT or QUERIES/CONTEXTxCOUNT with "
                      "queries and a context of 1 to {} and a count of 1 to {}: use, for example, "
                      "131072x1,4096x31.",
                      option, printable(part), kMaxContext, kMaxBatch));
    }
    requests += group.count;
    groups.push_back(group);
  }
  if (requests > kMaxBatch) {
    throw UsageError(fmt::format("{} has {} requests, but at most {} are possible: use less.", option,
                                 requests, kMaxBatch));
  }
  return groups;
}

std::string requests_text(const std::vector<RequestGroup>& groups) {
  std::string text;
  for (const RequestGroup& g : groups) {
    text += fmt::format("{}{}{}x{}", text.empty() ? "" : ",", g.q_len > 0 ? fmt::format("{}/", g.q_len) : "",
                        g.context, g.count);
  }
  return text;
}

namespace {

/// Prompts in 16 bits over tensors and over pages, the end of a long prompt, and prompts over codes.
std::vector<Sweep> prefill_sweeps() {
  std::vector<Sweep> sweeps;
  const auto add = [&](std::string_view formats, Sweep::Heads heads, int head_dim, int q_len,
                       std::vector<std::string_view> requests) -> Sweep& {
    sweeps.push_back(
        {"prefill", Suite::kPrefill, formats, {heads}, {head_dim}, {64}, q_len, std::move(requests)});
    return sweeps.back();
  };
  constexpr int kHidden = 2048;
  for (const bool plain : {true, false}) {
    for (const int head_dim : {64, 128, 256}) {
      const int heads = kHidden / head_dim;
      for (const bool causal : {false, true}) {
        Sweep& sweep = add("bf16", {heads, heads}, head_dim, 0, {"1024x16", "4096x4", "16384x1"});
        sweep.plain = plain;
        sweep.causal = causal;
      }
    }
    add("bf16", {32, 8}, 128, 0, {"4096x4", "16384x1"}).plain = plain;
    for (const auto& [head_dim, v_head_dim] : {std::pair{80, 0}, {96, 0}, {192, 0}, {192, 128}}) {
      const int heads = v_head_dim == 0 ? kHidden / head_dim : kHidden / v_head_dim;
      for (const bool causal : {false, true}) {
        Sweep& sweep = add("bf16", {heads, heads}, head_dim, 0, {"4096x4", "16384x1"});
        sweep.v_head_dim = v_head_dim;
        sweep.plain = plain;
        sweep.causal = causal;
      }
    }
  }
  add("bf16", {32, 8}, 128, 2048, {"32768x1"});
  for (const bool causal : {false, true}) {
    add("fp8,int8-head,int4-g32", {32, 8}, 128, 0, {"1024x16", "4096x4", "16384x1"}).causal = causal;
  }
  add("int8-head,int4-g32", {32, 8}, 128, 2048, {"32768x1"});
  for (const bool causal : {false, true}) {  // K and V that are staged, and V of fewer dims
    const auto add_coded = [&](std::string_view formats, Sweep::Heads heads, int head_dim, Arithmetic how,
                               int v_head_dim = 0) {
      Sweep& sweep = add(formats, heads, head_dim, 0, {"4096x4", "16384x1"});
      sweep.plain = formats == "bf16";
      sweep.causal = causal;
      sweep.arithmetic = how;
      sweep.v_head_dim = v_head_dim;
    };
    add_coded("bf16,int8-head,int4-g32", {32, 8}, 128, Arithmetic::kFp8);
    for (const Arithmetic arithmetic : {Arithmetic::k16Bit, Arithmetic::kHalfInt8, Arithmetic::kFp8}) {
      for (const auto& [heads, v_head_dim] : {std::pair{16, 128}, {10, 0}}) {
        if (arithmetic != Arithmetic::k16Bit) add_coded("bf16", {heads, heads}, 192, arithmetic, v_head_dim);
        add_coded("int8-head", {heads, heads}, 192, arithmetic, v_head_dim);
      }
      add_coded("bf16", {8, 8}, 512, arithmetic);
      add_coded("int8-head", {8, 1}, 512, arithmetic);
    }
    add_coded("fp8", {16, 16}, 192, Arithmetic::kFp8, 128);
    add_coded("fp8", {10, 10}, 192, Arithmetic::kFp8);
    add_coded("bf16", {32, 32}, 64, Arithmetic::kFp8);
    add_coded("fp8", {32, 8}, 64, Arithmetic::kFp8);
  }
  for (const bool causal : {false, true}) {  // the shapes in which half-INT8 attention was published
    for (const int head_dim : {128, 256}) {
      Sweep& sweep = add("int8-head,int8-tensor", {kHidden / head_dim, 1}, head_dim, 0,
                         {"1024x32", "4096x8", "16384x2", "32768x1"});
      sweep.causal = causal;
      sweep.arithmetic = Arithmetic::kHalfInt8;
    }
    for (const int head_dim : {128, 256}) {
      const int heads = kHidden / head_dim;
      const auto add_coded = [&](std::string_view format, Arithmetic arithmetic) {
        Sweep& sweep = add(format, {heads, heads}, head_dim, 0, {"1024x16", "4096x4", "16384x1"});
        sweep.plain = format == "bf16";
        sweep.causal = causal;
        sweep.arithmetic = arithmetic;
      };
      add_coded("bf16", Arithmetic::kHalfInt8);
      add_coded("bf16", Arithmetic::kFp8);
      add_coded("fp8", Arithmetic::kFp8);
    }
  }
  return sweeps;
}

/// Chunks and drafts of 48 to 256 packed rows over long contexts, between decode and prefill; and a step with
/// prompts beside single queries, and each of the two alone.
std::vector<Sweep> step_sweeps() {
  constexpr std::string_view kFormats = "bf16,fp8,int8-head,int4-g32";
  std::vector<Sweep> sweeps;
  for (const Sweep::Heads heads : {Sweep::Heads{32, 8}, Sweep::Heads{16, 1}}) {
    for (const int rows : {48, 64, 96, 128, 192, 256}) {
      sweeps.push_back({"chunks",
                        Suite::kPrefill,
                        kFormats,
                        {heads},
                        {128},
                        {64},
                        rows * heads.kv / heads.q,
                        {"8192x1", "32768x1", "131072x1", "8192x8", "32768x8", "131072x8"}});
    }
  }
  sweeps.push_back({"steps",
                    Suite::kPrefill,
                    kFormats,
                    {{32, 8}},
                    {128},
                    {64},
                    1,
                    {"2048/2048x8,1/8192x64", "2048/2048x8", "1/8192x64"}});
  return sweeps;
}

/// Latent caches of 512 + 64 dims (e8m0: 448 + 64): lists of keys, small batches of them also back to back,
/// second and long lists, all keys, prompts over lists, append.
std::vector<Sweep> latent_sweeps() {
  std::vector<Sweep> sweeps;
  const auto add = [&](Suite suite, std::string_view formats, int heads, int q_len, int top_k,
                       std::vector<std::string_view> requests) -> Sweep& {
    Sweep s{"mla", suite, formats, {{heads, 1}}, {576}, {64}, q_len, std::move(requests)};
    s.rope_dim = 64;
    s.top_k = top_k;
    sweeps.push_back(std::move(s));
    return sweeps.back();
  };
  for (const int heads : {128, 64}) {
    for (const int top_k : {2048, 16384}) {
      add(Suite::kDecode, kLatentFormats, heads, 2, top_k, {"32768x2", "32768x128"});
    }
  }
  for (const int heads : {32, 16, 8}) {
    for (const int q_len : {1, 2})
      add(Suite::kDecode, kLatentFormats, heads, q_len, 2048, {"32768x8", "32768x128"});
  }
  for (const int heads : {16, 8}) add(Suite::kDecode, kLatentFormats, heads, 1, 2048, {"32768x8"}).chain = 16;
  add(Suite::kDecode, kLatentFormats, 64, 1, 512, {"32768x128"}).extra_top_k = 128;
  add(Suite::kDecode, kLatentFormats, 64, 1, 65536, {"131072x2"});
  for (const int heads : {128, 64, 32, 16})
    add(Suite::kDecode, kLatentFormats, heads, 1, 0, {"4096x128", "8192x128"});
  add(Suite::kPrefill, "fp8-g128-f32,bf16", 128, 4096, 2048, {"8192x1"});
  add(Suite::kAppend, kLatentFormats, 128, 1, 0, {"8192x128"});
  add(Suite::kAppend, kLatentFormats, 128, 8192, 0, {"8192x8"});
  return sweeps;
}

std::vector<Sweep> make_sweeps() {
  using enum Suite;
  static const std::vector<SplitPolicy> kPolicies = {SplitPolicy::kFast, SplitPolicy::kReproducible,
                                                     SplitPolicy::kBatchInvariant};
  // A layer of a decode step: attention alone, append() before it, and attention that appends; and what each
  // of them adds to a projection.
  const Sweep layer = {"layer", kLayer, "bf16,fp8,int8-head,int4-g32",   {{32, 8}}, {128},
                       {64},    1,      {"8192x1", "8192x8", "8192x64"}, 16};
  Sweep behind_gemm = layer;
  behind_gemm.gemm = true;
  std::vector<Sweep> sweeps = {
      {"headline",
       kDecode,
       "bf16,fp8,int8-head,int8-head:int4-g32,int4-g32,int4-row",
       {{8, 1}},
       {128},
       {64},
       1,
       {"8192x32", "8192x128", "8192x512"}},
      // The cost of a launch shared by a chain of layers, as in a decode step.
      {"chain", kDecode, kDecodeFormats, {{8, 1}}, {128}, {64}, 1, {"8192x32", "8192x64", "8192x128"}, 16},
      {"speculative",
       kDecode,
       "fp8,int8-head,int4-g32",
       {{16, 1}},
       {128},
       {64},
       3,
       {"1024x256", "2048x128", "4096x64", "8192x32", "16384x16", "32768x8", "65536x4", "131072x2"}},
      {"shapes",
       kDecode,
       kDecodeFormats,
       {{32, 8}, {64, 8}, {32, 32}},
       {128},
       {64},
       1,
       {"4096x1", "4096x8", "4096x64", "32768x1", "32768x8", "32768x64", "131072x1", "131072x8",
        "131072x64"}},
      {"mixed",
       kDecode,
       kDecodeFormats,
       {{8, 1}, {32, 8}},
       {128},
       {64},
       1,
       {"131072x1,4096x31", "128x64,4096x64", "128x256,4096x256"},
       1,
       true},
      // What each split policy costs.
      {"policies",
       kDecode,
       kPolicyFormats,
       {{32, 8}},
       {128},
       {64},
       1,
       {"8192x1", "8192x8", "8192x64"},
       1,
       false,
       kPolicies},
      {"policies", kDecode, kPolicyFormats, {{8, 1}}, {128}, {64}, 1, {"8192x32"}, 1, false, kPolicies},
      {"geometry", kDecode, kDecodeFormats, {{8, 1}}, {64, 128, 256}, {16, 64}, 1, {"8192x128", "8192x512"}},
      layer,
      behind_gemm,
      {"append", kAppend, kDecodeFormats, {{32, 8}}, {128}, {64}, 8192, {"8192x1", "8192x8"}},
      {"append", kAppend, kDecodeFormats, {{32, 8}}, {128}, {64}, 1, {"8192x32", "8192x256"}},
  };
  for (const int q_len : {4, 8, 16}) {  // such layers of steps that check a draft
    Sweep draft = layer;
    draft.table = "drafts";
    draft.q_len = q_len;
    draft.requests = {"2048x1", "8192x1", "8192x8"};
    sweeps.push_back(std::move(draft));
  }
  for (Sweep& sweep : prefill_sweeps()) sweeps.push_back(std::move(sweep));
  for (Sweep& sweep : step_sweeps()) sweeps.push_back(std::move(sweep));
  for (Sweep& sweep : latent_sweeps()) sweeps.push_back(std::move(sweep));
  return sweeps;
}

}  // namespace

const std::vector<Sweep>& bench_sweeps() {
  static const std::vector<Sweep> sweeps = make_sweeps();
  return sweeps;
}

std::string table_names() {
  std::string names;
  std::string_view last;
  for (const Sweep& s : bench_sweeps()) {
    if (s.table != last) names += fmt::format("{}{}", names.empty() ? "" : ", ", s.table);
    last = s.table;
  }
  return names;
}

namespace {

/// The cases of one heads, head_dim, page size and batch of a sweep.
void expand(const Sweep& sweep, const BenchCase& shape, std::string_view formats, SplitPolicy policy,
            std::vector<BenchCase>& cases) {
  for (const FormatChoice& format : parse_choices(formats.empty() ? sweep.formats : formats, "--formats")) {
    if (sweep.plain && format.name != "bf16") continue;
    for (const SplitPolicy each : sweep.policies.empty() ? std::vector{policy} : sweep.policies) {
      for (BenchCase& c : with_appends(shape)) {
        c.shape.format = format;
        c.shape.policy = each;
        fit_latent(c.shape);
        cases.push_back(std::move(c));
      }
    }
  }
}

void expand(const Sweep& sweep, std::string_view formats, SplitPolicy policy, std::vector<BenchCase>& cases) {
  BenchCase c;
  c.suite = sweep.suite;
  c.table = sweep.table;
  c.chain = sweep.chain;
  c.with_schedule = sweep.with_schedule;
  c.gemm = sweep.gemm;
  c.shape.plain = sweep.plain;
  c.shape.causal = sweep.causal;
  c.shape.arithmetic = sweep.arithmetic;
  c.shape.rope_dim = sweep.rope_dim;
  c.shape.top_k = sweep.top_k;
  c.shape.extra_top_k = sweep.extra_top_k;
  for (const Sweep::Heads heads : sweep.heads) {
    c.shape.q_heads = heads.q;
    c.shape.kv_heads = heads.kv;
    for (const int head_dim : sweep.head_dims) {
      c.shape.head_dim = head_dim;
      c.shape.v_dim = sweep.v_head_dim;
      for (const int page_size : sweep.page_sizes) {
        c.shape.page_size = page_size;
        for (const std::string_view requests : sweep.requests) {
          set_requests(c, parse_requests(requests, "the table"), sweep.q_len);
          expand(sweep, c, formats, policy, cases);
        }
      }
    }
  }
}

}  // namespace

void set_requests(BenchCase& setup, std::vector<RequestGroup> groups, int q_len) {
  setup.shape.batch = setup.shape.context = setup.shape.q_len = 0;
  for (const RequestGroup& g : groups) {
    setup.shape.batch += g.count;
    setup.shape.context = std::max(setup.shape.context, g.context);
  }
  const int others = q_len > 0 ? q_len : setup.shape.context;
  const bool own = std::ranges::any_of(groups, [](const RequestGroup& g) { return g.q_len > 0; });
  for (RequestGroup& g : groups) {
    if (own && g.q_len == 0) g.q_len = others;
    setup.shape.q_len = std::max(setup.shape.q_len, own ? g.q_len : others);
  }
  setup.mixed = groups.size() > 1 ? std::move(groups) : std::vector<RequestGroup>{};
}

std::vector<BenchCase> table_cases(std::string_view tables, std::string_view formats, SplitPolicy policy) {
  std::vector<BenchCase> cases;
  for (const std::string& name : split(tables, ',')) {
    bool known = false;
    for (const Sweep& sweep : bench_sweeps()) {
      if (name != "all" && name != sweep.table) continue;
      known = true;
      expand(sweep, formats, policy, cases);
    }
    if (!known) {
      throw UsageError(fmt::format("--table has '{}', but the tables are {} and all: use one of these.",
                                   printable(name), table_names()));
    }
  }
  return cases;
}

}  // namespace halftone::cli
