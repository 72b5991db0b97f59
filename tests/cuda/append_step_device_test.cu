// run() that appends tokens which a kernel of the caller's still computes when attention begins.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "testing/step.h"
#include "tests/cuda/device_problem.h"
#include "tests/higher_bounds.h"

namespace halftone::testing {
namespace {

struct Copies {
  const std::uint16_t* from[3];
  std::uint16_t* to[3];
  std::int64_t count[3];
};

/// Stands for a projection: attention may begin at once, and what it needs comes after `clocks`.
__global__ void project(Copies copies, long long clocks) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const long long begin = clock64();
  while (clock64() - begin < clocks) {
  }
  for (int i = 0; i < 3; ++i) {
    for (std::int64_t at = blockIdx.x * blockDim.x + threadIdx.x; at < copies.count[i];
         at += gridDim.x * blockDim.x) {
      copies.to[i][at] = copies.from[i][at];
    }
  }
}

/// From the step's Q, K and V of one run into those of another.
Copies copies_of_inputs(const DeviceRun& from, const DeviceRun& to) {
  const TensorView sources[] = {from.args.q, from.args.append.k, from.args.append.v};
  const TensorView targets[] = {to.args.q, to.args.append.k, to.args.append.v};
  Copies copies{};
  for (int i = 0; i < 3; ++i) {
    copies.from[i] = static_cast<const std::uint16_t*>(sources[i].data);
    copies.to[i] = static_cast<std::uint16_t*>(targets[i].data);
    copies.count[i] = sources[i].data == nullptr ? 0 : sources[i].numel();  // V of a latent cache
  }
  return copies;
}

/// Q, K and V become NaN, and what they are to be `clocks` later, while the next kernel may have begun.
void project_late(const Copies& copies, long long clocks, cudaStream_t stream) {
  for (int i = 0; i < 3; ++i) {
    if (copies.count[i] == 0) continue;
    check_cuda(cudaMemsetAsync(copies.to[i], 0xff, static_cast<std::size_t>(copies.count[i]) * 2, stream));
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(4);
  config.blockDim = dim3(256);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, project, copies, clocks));
}

/// What a step is tried with: formats, the queries of each request and the head_dim.
struct Step {
  const char *k, *v;
  int queries, head_dim;
  int q_heads = 8, kv_heads = 2;
  bool latent = false;
};

/// Of a latent cache.
Step latent_step(const char* format, int queries, int heads) {
  return {.k = format, .v = "", .queries = queries, .head_dim = 0, .q_heads = heads, .latent = true};
}

AttentionCase case_of(const Step& step) {
  AttentionCase row;
  row.name = std::string(step.k) + ":" + step.v + ", " + std::to_string(step.queries) + " queries of " +
             std::to_string(step.q_heads) + " heads";
  row.k_format = step.k;
  row.v_format = step.v;
  row.head_dim = step.head_dim;
  row.q_heads = step.q_heads;
  row.kv_heads = step.kv_heads;
  row.mask.causal = true;
  for (const int keys : {16, 130, 700, 2051, 9000}) row.requests.push_back({step.queries, keys});
  if (step.latent) {
    row.requests.pop_back();  // many heads share their keys
    row = latent_case(row, step.k);
    if (row.k_format == "fp8-g64-e8m0") row.head_dim = row.v_head_dim;  // the rotary dims are V, too
  }
  return appending(row);
}

/// A step whose run() appends nothing, over the tensors of one that does.
struct PlainRun {
  Plan plan;
  DeviceMemory workspace;
  Uploads uploads;
  AttentionArgs args;

  PlainRun(const Plan& appends, const AttentionCase& row, const AttentionArgs& of)
      : plan(plan_of(appends)), workspace(plan.workspace_bytes()), args(of) {
    std::vector<std::int32_t> lengths;
    for (const Request& request : row.requests) lengths.push_back(request.kv_len);
    args.append = {};
    args.lengths.kv_lengths = uploads.add(Tensor::of({plan.problem().batch}, lengths).view());
  }

  void schedule() const { halftone::schedule(plan, args.lengths, space()); }
  void run(cudaStream_t stream) const { halftone::run(plan, args, space(), stream); }

 private:
  static Plan plan_of(const Plan& appends) {
    AttentionProblem problem = appends.problem();
    problem.appends = false;
    return halftone::plan(problem);
  }
  TensorView space() const {
    return TensorView::contiguous(workspace.data(), DType::kUInt8,
                                  {static_cast<std::int64_t>(workspace.size())}, plan.problem().device);
  }
};

/// A graph of four layers over one cache, each, layer(stream), behind a projection that is late: their
/// outputs, which are to be `expected`.
template <class Layer>
Outputs expect_layers(const DeviceRun& late, const Copies& copies, long long clocks, const Outputs& expected,
                      const Layer& layer) {
  check_cuda(cudaDeviceSynchronize());
  const CapturedGraph graph([&](cudaStream_t stream) {
    for (int i = 0; i < 4; ++i) {
      project_late(copies, clocks, stream);
      layer(stream);
    }
  });
  graph.replay();
  Outputs actual = late.outputs();
  EXPECT_TRUE(same_bytes(expected.out, actual.out)) << clocks;
  EXPECT_TRUE(same_bytes(expected.lse, actual.lse)) << clocks;
  return actual;
}

Tensor pages_of(const DeviceRun& device, const Problem& p) {
  Tensor pages = p.cache->pages.clone();
  device.read(std::get<PagedKv>(device.args.kv).pages, pages);
  return pages;
}

/// The table's kernels of one warp, of two row groups, of warpgroups, with rows as M, of mixed formats and of
/// head_dims with half a block or two chunks of a lane; those of latent caches: for few rows, for a block and
/// for pairs over codes of each kind, over bf16. A graph of four layers over one cache, each behind a
/// projection that gives it Q, K and V late and had NaN there before.
TEST(DeviceAppendStep, TokensOfAKernelThatStillRuns) {
  for (const Step& step : {Step{"int4-g32", "", 1, 128},
                           Step{"int4-g32", "", 2, 128},
                           Step{"int4-g32", "", 8, 128},
                           Step{"bf16", "", 4, 128},
                           Step{"fp8", "", 4, 128},
                           Step{"int8-head", "", 2, 128},
                           Step{"int8-g32", "", 8, 128},
                           Step{"bf16", "int4-g32", 2, 128},
                           Step{"bf16", "", 1, 64},
                           Step{"int4-row", "", 3, 256},
                           Step{"fp8", "", 3, 128, 16, 1},
                           Step{"int8-head", "", 8, 128, 32, 8},
                           Step{"int4-g32", "", 3, 128, 16, 1},
                           Step{"fp8", "", 9, 128, 16, 1},
                           Step{"int8-head", "", 1, 80},
                           Step{"bf16", "", 2, 80},
                           Step{"int4-row", "", 1, 512},
                           Step{"fp8", "", 3, 512},
                           Step{"int8-token", "", 2, 128},
                           Step{"int8-token", "", 8, 128, 32, 8},
                           Step{"int8-token", "", 1, 192},
                           Step{"int8-token", "", 3, 256, 16, 4},
                           latent_step("fp8-g64-e8m0", 1, 8),
                           latent_step("fp8-g128-f32", 1, 16),
                           latent_step("int8-g64", 4, 4),
                           latent_step("bf16", 1, 16),
                           latent_step("int4-g64", 1, 32),
                           latent_step("bf16", 1, 64),
                           latent_step("fp8-g128-f32", 16, 16),
                           latent_step("fp8-g128-f32", 1, 64),
                           latent_step("int8-g64", 1, 64),
                           latent_step("int4-g64", 1, 64),
                           latent_step("fp8-g64-e8m0", 1, 64),
                           latent_step("int4-g64", 3, 64),
                           latent_step("fp8-g128-f32", 2, 128),
                           latent_step("fp8-g64-e8m0", 1, 128),
                           latent_step("int8-g64", 1, 128),
                           latent_step("bf16", 2, 128)}) {
    AttentionCase row = case_of(step);
    if (step.queries > 2 || step.q_heads == 64) row = under_higher_bounds(row);  // no units of 8, or 16
    SCOPED_TRACE(row.name);
    const Problem p = make_problem(row);
    const Plan plan = plan_on_device(p);
    ASSERT_TRUE(plan.info().fuses_append);
    DeviceRun given(p, plan), late(p, plan);
    given.schedule();
    given.run();
    const Outputs expected = given.outputs();
    const Copies copies = copies_of_inputs(given, late);
    late.args.cache_settled = true;
    late.args.append.advance = true;
    late.schedule();
    check_cuda(cudaDeviceSynchronize());
    for (const long long clocks : {0LL, 20'000LL, 200'000LL}) {
      late.clear();
      expect_layers(late, copies, clocks, expected, [&](cudaStream_t stream) { late.run(stream); });
      EXPECT_TRUE(same_bytes(pages_of(given, p), pages_of(late, p))) << clocks;
    }
  }
}

/// append() and then run(), each with its promise: what they read ahead is older than the projection before
/// them, and the bits are those of a run() that appends. Formats of every family of kernels, one with scales
/// for all heads and one that the universal kernel serves.
TEST(DeviceAppendStep, AppendRightBeforeRun) {
  for (const Step& step :
       {Step{"int4-g32", "", 1, 128}, Step{"int4-g32", "", 8, 128}, Step{"fp8", "", 12, 128},
        Step{"int8-head", "", 12, 128}, Step{"int8-token", "", 1, 128}, Step{"bf16", "int4-g32", 2, 128},
        Step{"bf16", "", 1, 64}, Step{"int4-g32", "bf16", 1, 128}, latent_step("int8-g64", 2, 64),
        latent_step("fp8-g128-f32", 1, 128), latent_step("int4-g64", 1, 16)}) {
    AttentionCase row = case_of(step);
    if (step.queries > 2) row = under_higher_bounds(row);  // the time that many tokens take
    SCOPED_TRACE(row.name);
    const Problem p = make_problem(row);
    const Plan fused = plan_on_device(p);
    EXPECT_EQ(fused.info().fuses_append, row.v_format != "bf16");  // that pair is the universal kernel's
    DeviceRun given(p, fused), late(p, fused);
    given.schedule();
    given.run();
    const Outputs expected = given.outputs();

    PlainRun plain(fused, row, late.args);
    plain.args.cache_settled = plain.args.new_tokens_late = true;
    const NewTokens& tokens = late.args.append;
    const AppendArgs append_args{.k = tokens.k,
                                 .v = tokens.v,
                                 .cu_seqlens = plain.uploads.add(cumulative_queries(row).view()),
                                 .rope = tokens.rope,
                                 .status = late.args.status,
                                 .cache_settled = true};
    const Copies copies = copies_of_inputs(given, late);
    plain.schedule();
    const auto& cache = std::get<PagedKv>(late.args.kv);
    for (const long long clocks : {200'000LL, 20'000LL, 0LL}) {
      late.clear();
      late.write(cache.pages, p.cache->pages);
      const Outputs actual = expect_layers(late, copies, clocks, expected, [&](cudaStream_t stream) {
        append(cache, append_args, stream);
        plain.run(stream);
      });
      EXPECT_EQ(status_of(actual), 0) << clocks;
      EXPECT_TRUE(same_bytes(pages_of(given, p), pages_of(late, p))) << clocks;
    }
  }
}

/// A cache that is settled whole, new tokens among it: only Q comes from the kernel before.
TEST(DeviceAppendStep, CachesThatAreSettled) {
  for (const Step& step : {Step{"int8-head", "", 1, 128}, latent_step("fp8-g128-f32", 1, 64),
                           latent_step("int4-g64", 1, 64), latent_step("fp8-g64-e8m0", 2, 128)}) {
    const AttentionCase row = case_of(step);
    SCOPED_TRACE(row.name);
    const Problem p = make_problem(row);
    const Plan appends = plan_on_device(p);
    DeviceRun given(p, appends), late(p, appends);
    given.schedule();
    given.run();
    const Outputs expected = given.outputs();

    PlainRun plain(appends, row, late.args);
    plain.args.cache_settled = true;
    const Copies copies = copies_of_inputs(given, late);
    late.write(std::get<PagedKv>(late.args.kv).pages, pages_of(given, p));
    plain.schedule();
    for (const long long clocks : {200'000LL, 20'000LL, 0LL}) {
      late.clear();
      const Outputs actual =
          expect_layers(late, copies, clocks, expected, [&](cudaStream_t stream) { plain.run(stream); });
      EXPECT_EQ(status_of(actual), 0) << clocks;
    }
  }
}

}  // namespace
}  // namespace halftone::testing
