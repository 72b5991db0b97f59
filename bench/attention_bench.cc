// Speed of the CPU backend beside two ceilings measured in the same run: the read bandwidth of this machine
// and its fp32 multiply-add rate. Counters, medians over the iterations of a case:
//   GB/s     cache bytes, scales included, per second; `of_read` is the fraction of the read bandwidth
//   GFLOP/s  2 (head_dim + v_dim) per visible (query head, query, key); `of_fma` is the fraction of the peak
// Filter with --benchmark_filter=decode or =prefill; OMP_NUM_THREADS sets the threads of both sides.
#include <benchmark/benchmark.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "cpu/targets.h"
// Order matters from here on.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/attention_bench.cc"
#include "hwy/foreach_target.h"
//
#include "halftone/attention.h"
#include "hwy/highway.h"
#include "testing/cases.h"

HWY_BEFORE_NAMESPACE();
namespace halftone::bench {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Reads `bytes` (a multiple of 1024) and returns something that depends on all of them.
std::uint64_t ReadAll(const std::uint8_t* p, std::size_t bytes) {
  const hn::ScalableTag<std::uint64_t> d;
  const std::size_t step = hn::Lanes(d) * 8;
  auto a = hn::Zero(d), b = a, c = a, e = a;
  for (std::size_t i = 0; i < bytes; i += 4 * step) {
    const auto* q = reinterpret_cast<const std::uint64_t*>(p + i);
    a = hn::Add(a, hn::Load(d, q));
    b = hn::Add(b, hn::Load(d, q + step / 8));
    c = hn::Add(c, hn::Load(d, q + 2 * step / 8));
    e = hn::Add(e, hn::Load(d, q + 3 * step / 8));
  }
  return hn::GetLane(hn::Add(hn::Add(a, b), hn::Add(c, e)));
}

/// `rounds` times 16 independent multiply-adds; returns how many floats that were.
std::int64_t MultiplyAdds(std::int64_t rounds, float* result) {
  const hn::ScalableTag<float> d;
  const auto x = hn::Set(d, 0.999f), y = hn::Set(d, 0.001f);
  auto a = hn::Iota(d, 0.0f), b = hn::Iota(d, 1.0f), c = hn::Iota(d, 2.0f), e = hn::Iota(d, 3.0f);
  auto f = hn::Iota(d, 4.0f), g = hn::Iota(d, 5.0f), h = hn::Iota(d, 6.0f), i = hn::Iota(d, 7.0f);
  auto j = hn::Iota(d, 8.0f), k = hn::Iota(d, 9.0f), l = hn::Iota(d, 10.0f), m = hn::Iota(d, 11.0f);
  for (std::int64_t n = 0; n < rounds; ++n) {
    a = hn::MulAdd(a, x, y), b = hn::MulAdd(b, x, y), c = hn::MulAdd(c, x, y), e = hn::MulAdd(e, x, y);
    f = hn::MulAdd(f, x, y), g = hn::MulAdd(g, x, y), h = hn::MulAdd(h, x, y), i = hn::MulAdd(i, x, y);
    j = hn::MulAdd(j, x, y), k = hn::MulAdd(k, x, y), l = hn::MulAdd(l, x, y), m = hn::MulAdd(m, x, y);
  }
  a = hn::Add(hn::Add(hn::Add(a, b), hn::Add(c, e)), hn::Add(hn::Add(f, g), hn::Add(h, i)));
  *result = hn::GetLane(hn::Add(a, hn::Add(hn::Add(j, k), hn::Add(l, m))));
  return rounds * 12 * static_cast<std::int64_t>(hn::Lanes(d));
}

}  // namespace HWY_NAMESPACE
}  // namespace halftone::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halftone::bench {
namespace {

HWY_EXPORT(ReadAll);
HWY_EXPORT(MultiplyAdds);

using testing::AttentionCase;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr int kCeilingPasses = 7;
constexpr std::size_t kReadBytes = std::size_t{512} << 20;

/// GB/s of all OpenMP threads reading a buffer far larger than any cache: the best of some passes.
double read_bandwidth() {
  static std::uint8_t* const buffer = [] {
    auto* p = static_cast<std::uint8_t*>(::operator new (kReadBytes, std::align_val_t{2 << 20}));
    std::fill_n(p, kReadBytes, std::uint8_t{1});
    return p;
  }();
  double best = 0;
  for (int pass = 0; pass < kCeilingPasses; ++pass) {
    std::uint64_t sum = 0;
    const auto start = Clock::now();
#pragma omp parallel reduction(+ : sum)
    {
      const std::size_t share = kReadBytes / static_cast<std::size_t>(omp_get_num_threads()) / 1024 * 1024;
      sum = HWY_DYNAMIC_DISPATCH(ReadAll)(buffer + share * static_cast<std::size_t>(omp_get_thread_num()),
                                          share);
    }
    benchmark::DoNotOptimize(sum);
    best = std::max(best, static_cast<double>(kReadBytes) / seconds_since(start) / 1e9);
  }
  return best;
}

/// fp32 GFLOP/s of all OpenMP threads, best of some passes.
double fma_peak() {
  double best = 0;
  for (int pass = 0; pass < kCeilingPasses; ++pass) {
    std::int64_t count = 0;
    const auto start = Clock::now();
#pragma omp parallel reduction(+ : count)
    {
      float result = 0;
      count = HWY_DYNAMIC_DISPATCH(MultiplyAdds)(1 << 20, &result);
      benchmark::DoNotOptimize(result);
    }
    best = std::max(best, 2.0 * static_cast<double>(count) / seconds_since(start) / 1e9);
  }
  return best;
}

/// Keys that all queries of a request see, summed; the cases are causal or unmasked.
double visible_pairs(const AttentionCase& row) {
  double pairs = 0;
  for (const testing::Request& r : row.requests) {
    for (int i = 0; i < r.q_len; ++i) {
      pairs += row.mask.causal ? std::max(0, i + r.kv_len - r.q_len + 1) : r.kv_len;
    }
  }
  return pairs;
}

void run_case(benchmark::State& state, const AttentionCase& row, bool prefill) {
  const testing::Problem p = testing::make_problem(row, testing::Fill::kTiled);
  const Plan plan = halftone::plan(p.problem);
  const reference::Tensor workspace(DType::kUInt8, {static_cast<std::int64_t>(plan.workspace_bytes())});
  const testing::Outputs outputs = testing::make_outputs(p);
  const AttentionArgs args = testing::arguments(p, outputs);
  schedule(plan, args.lengths, workspace.view());
  run(plan, args, workspace.view());  // first call: tables and scratch

  const double ceiling = prefill ? fma_peak() : read_bandwidth();
  std::vector<double> times;
  for (auto _ : state) {
    const auto start = Clock::now();
    run(plan, args, workspace.view());
    times.push_back(seconds_since(start));
    state.SetIterationTime(times.back());
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  const double median = times[times.size() / 2];
  double tokens = 0;
  for (const testing::Request& r : row.requests) tokens += r.kv_len;
  const double bytes = tokens * bytes_per_token(p.cache->spec);
  const double flops = 2.0 * (p.problem.head_dim() + p.problem.v_dim()) * row.q_heads * visible_pairs(row);
  state.counters["us"] = median * 1e6;
  state.counters["GB/s"] = bytes / median / 1e9;
  state.counters["GFLOP/s"] = flops / median / 1e9;
  state.counters[prefill ? "fma_peak" : "read_GB/s"] = ceiling;
  state.counters[prefill ? "of_fma" : "of_read"] = (prefill ? flops : bytes) / median / 1e9 / ceiling;
  state.counters["workspace_MiB"] = static_cast<double>(plan.workspace_bytes()) / (1 << 20);
}

void add(const AttentionCase& row, bool prefill) {
  benchmark::RegisterBenchmark(row.name.c_str(),
                               [row, prefill](benchmark::State& state) { run_case(state, row, prefill); })
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

/// The formats at one shape, then one format at growing batch and context, then prompts.
const bool kRegistered = [] {
  for (const char* format :
       {"int8-head", "int8-token", "int8-g32", "fp8", "int4-g32", "int4-row", "bf16", "fp16"}) {
    add(testing::with_format(testing::find_case("decode-32x8-t8192-b8"), format), false);
  }
  for (const char* shape : {"decode-32x8-t8192-b1", "decode-32x8-t8192-b2", "decode-32x8-t8192-b4",
                            "decode-32x8-t8192-b16", "decode-32x8-t1024-b8", "decode-32x8-t2048-b8",
                            "decode-32x8-t4096-b8", "decode-32x8-t16384-b8", "decode-32x8-t32768-b8"}) {
    add(testing::with_format(testing::find_case(shape), "int8-head"), false);
  }
  add(testing::with_format(testing::find_case("decode-8x1-t8192-b32"), "int8-head"), false);
  add(testing::with_format(testing::find_case("verify-16x1-q3-t8192-b32"), "int8-head"), false);
  for (const char* format : {"bf16", "int8-head", "int4-g32"}) {
    add(testing::with_format(testing::find_case("prefill-32x8-t1024"), format), true);
    add(testing::with_format(testing::find_case("prefill-32x8-t4096"), format), true);
  }
  return true;
}();

}  // namespace
}  // namespace halftone::bench
#endif  // HWY_ONCE
