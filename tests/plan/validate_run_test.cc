// run() and merge() refuse every wrong argument with a sentence, before any work: outputs stay untouched.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "plan/backend.h"
#include "plan/plan.h"
#include "tests/misuse/ready_to_run.h"

namespace halftone {
namespace {

using enum ErrorCode;
using namespace ready_to_run;

struct BadRun {
  std::string name;
  ErrorCode code;
  std::function<void(Ready&)> change;
  std::vector<std::string> fragments;
};

void shift(TensorView& t, int bytes) { t.data = static_cast<char*>(t.data) + bytes; }

const std::vector<BadRun>& bad_paged_runs() {
  static const Device kOtherDevice{DeviceType::kCuda, 0};
  static const std::vector<BadRun> all = {
      {"QAbsent", kInvalidArgument, [](Ready& r) { r.args.q = {}; }, {"q is absent"}},
      {"QDtype", kInvalidArgument, [](Ready& r) { r.args.q.dtype = DType::kFloat16; }, {"q is f16", "bf16"}},
      {"QRank", kInvalidArgument, [](Ready& r) { r.args.q.rank = 2; }, {"q has rank 2", "rank 3"}},
      {"QHeads",
       kInvalidArgument,
       [](Ready& r) { r.args.q.shape[1] = 4; },
       {"q has shape [6, 4, 64]", "pass 8"}},
      {"QTokens",
       kInvalidArgument,
       [](Ready& r) { r.args.q.shape[0] = 5; },
       {"q.shape[0] is 5", "6 queries"}},
      {"QStride",
       kInvalidArgument,
       [](Ready& r) { r.args.q.strides[2] = 2; },
       {"q has stride 2", "dimension 2"}},
      {"QAlignment",
       kInvalidArgument,
       [](Ready& r) { shift(r.args.q, 1); },
       {"q starts 1 bytes", "element size"}},
      {"QDevice", kInvalidArgument, [](Ready& r) { r.args.q.device = kOtherDevice; }, {"q is on cuda:0"}},
      {"OutAbsent", kInvalidArgument, [](Ready& r) { r.args.out = {}; }, {"out is absent"}},
      {"OutDtype",
       kInvalidArgument,
       [](Ready& r) { r.args.out.dtype = DType::kFloat32; },
       {"out is f32", "bf16"}},
      {"OutShape",
       kInvalidArgument,
       [](Ready& r) { r.args.out.shape[2] = 80; },
       {"out has shape [6, 8, 80]", "64"}},
      {"OutBroadcast",
       kInvalidArgument,
       [](Ready& r) { r.args.out.strides[0] = 0; },
       {"out has stride 0 in dimension 0", "share memory"}},
      {"OutOverlappingRows",
       kInvalidArgument,
       [](Ready& r) { r.args.out.strides[1] = 32; },
       {"out has stride 32 in dimension 1", "at least 64"}},
      {"OutIsQ", kInvalidArgument, [](Ready& r) { r.args.out.data = r.args.q.data; }, {"out overlaps q"}},
      {"OutInPages",
       kInvalidArgument,
       [](Ready& r) { r.args.out.data = cache_of(r.args).pages.data; },
       {"out overlaps cache.pages"}},
      {"OutInWorkspace",
       kInvalidArgument,
       [](Ready& r) { r.args.out.data = r.workspace.bytes().data() + 512; },
       {"out overlaps workspace"}},
      {"LseIsOut",
       kInvalidArgument,
       [](Ready& r) { r.args.lse.data = r.args.out.data; },
       {"out overlaps lse"}},
      {"LseAbsent",
       kInvalidArgument,
       [](Ready& r) { r.args.lse = {}; },
       {"lse is absent", "problem.lse is set"}},
      {"LseShape",
       kInvalidArgument,
       [](Ready& r) { r.args.lse.shape[1] = 9; },
       {"lse has shape [6, 9]", "[6, 8]"}},
      {"LseDtype",
       kInvalidArgument,
       [](Ready& r) { r.args.lse.dtype = DType::kBFloat16; },
       {"lse is bf16", "f32"}},
      {"SlopesAbsent",
       kInvalidArgument,
       [](Ready& r) { r.args.alibi_slopes = {}; },
       {"alibi_slopes is absent", "problem.alibi"}},
      {"SlopesShape",
       kInvalidArgument,
       [](Ready& r) { r.args.alibi_slopes.shape[0] = 2; },
       {"alibi_slopes has shape [2]", "[8]"}},
      {"SinksAbsent",
       kInvalidArgument,
       [](Ready& r) { r.args.sinks = {}; },
       {"sinks is absent", "problem.sinks"}},
      {"SinksDtype",
       kInvalidArgument,
       [](Ready& r) { r.args.sinks.dtype = DType::kBFloat16; },
       {"sinks is bf16"}},
      {"StatusShape",
       kInvalidArgument,
       [](Ready& r) { r.args.status.shape[0] = 2; },
       {"status has shape [2]", "[1]"}},
      {"Tensors",
       kInvalidArgument,
       [](Ready& r) {
         r.args.kv = KvTensorViews{r.args.q, r.args.q};
       },
       {"k and v are present", "paged cache", "pass the cache"}},
      {"CacheSpec",
       kInvalidArgument,
       [](Ready& r) { cache_of(r.args).spec.page_size = 32; },
       {"cache.spec is", "pages of 32", "pages of 64"}},
      {"CacheFormat",
       kInvalidArgument,
       [](Ready& r) { cache_of(r.args).spec.k_format = parse_format("int8-g32"); },
       {"cache.spec is", "K int8-g32", "K int8-head"}},
      {"PagesAbsent",
       kInvalidArgument,
       [](Ready& r) { cache_of(r.args).pages = {}; },
       {"cache.pages is absent"}},
      {"PagesAlignment",
       kInvalidArgument,
       [](Ready& r) { shift(cache_of(r.args).pages, 8); },
       {"cache.pages starts 8 bytes", "16-byte"}},
      {"PagesStride",
       kInvalidArgument,
       [](Ready& r) { cache_of(r.args).pages.strides[0] -= 16; },
       {"cache.pages has stride", "dimension 0"}},
      {"PagesShape",
       kInvalidArgument,
       [](Ready& r) { cache_of(r.args).pages.shape[1] -= 1; },
       {"cache.pages has shape"}},
      {"TableAbsent",
       kInvalidArgument,
       [](Ready& r) { cache_of(r.args).block_table = {}; },
       {"cache.block_table is absent"}},
      {"TableBatch",
       kInvalidArgument,
       [](Ready& r) { cache_of(r.args).block_table.shape[0] = 2; },
       {"cache.block_table has shape [2,", "[3, n]"}},
      {"TableNarrow",
       kOutOfRange,
       [](Ready& r) { cache_of(r.args).block_table.shape[1] = 3; },
       {"kv_lengths[2] is 200", "3 pages of 64", "wider table"}},
      {"TableEntryNegative",
       kOutOfRange,
       [](Ready& r) { r.problem.cache->block_table.as<std::int32_t>()[0] = -1; },
       {"cache.block_table[0, 0] is -1", "kClamped"}},
      {"TableEntryLarge",
       kOutOfRange,
       [](Ready& r) { r.problem.cache->block_table.as<std::int32_t>()[1] = 1 << 30; },
       {"cache.block_table[0, 1] is 1073741824", "pages 0 to"}},
      {"Clamped",
       kInvalidArgument,
       [](Ready& r) { cache_of(r.args).table_mode = static_cast<BlockTableMode>(5); },
       {"cache.table_mode is 5"}},
      {"StaticScale",
       kInvalidArgument,
       [](Ready& r) { cache_of(r.args).k_scale.scale = r.args.sinks; },
       {"cache.k_scale.scale is present"}},
      {"CuQ",
       kInvalidArgument,
       [](Ready& r) { r.args.lengths.cu_q.shape[0] = 3; },
       {"cu_q has shape [3]", "[4]"}},
  };
  return all;
}

class RunRefuses : public ::testing::TestWithParam<BadRun> {};

TEST_P(RunRefuses, WithASentence) {
  Ready ready(paged_case());
  GetParam().change(ready);
  ready.expect_refused(GetParam().code, GetParam().fragments);
}
INSTANTIATE_TEST_SUITE_P(ValidateRun, RunRefuses, ::testing::ValuesIn(bad_paged_runs()),
                         [](const auto& info) { return info.param.name; });

TEST(ValidateRun, PlainTensors) {
  const auto refused = [](ErrorCode code, const std::vector<std::string>& fragments, auto change) {
    Ready ready(plain_case());
    change(ready);
    ready.expect_refused(code, fragments);
  };
  refused(kInvalidArgument, {"k is absent"}, [](Ready& r) { tensors_of(r.args).k = {}; });
  refused(kInvalidArgument, {"v is absent"}, [](Ready& r) { tensors_of(r.args).v = {}; });
  refused(kInvalidArgument, {"k.shape[0] is 269", "270 keys"},
          [](Ready& r) { --tensors_of(r.args).k.shape[0], --tensors_of(r.args).v.shape[0]; });
  refused(kInvalidArgument, {"v has shape [269, 2, 64]", "270"},
          [](Ready& r) { --tensors_of(r.args).v.shape[0]; });
  refused(kInvalidArgument, {"k is f32", "bf16"},
          [](Ready& r) { tensors_of(r.args).k.dtype = DType::kFloat32; });
  refused(kInvalidArgument, {"k and v are absent", "plan is for tensors", "pass them"},
          [](Ready& r) { r.args.kv = PagedKv{}; });
  refused(kInvalidArgument, {"lse is present", "lse = true"}, [](Ready& r) { r.args.lse = r.args.q; });
  refused(kInvalidArgument, {"sinks is present", "sinks = true"}, [](Ready& r) { r.args.sinks = r.args.q; });
  refused(kInvalidArgument, {"alibi_slopes is present", "alibi = true"},
          [](Ready& r) { r.args.alibi_slopes = r.args.q; });
  refused(kInvalidArgument, {"out overlaps v"},
          [](Ready& r) { r.args.out.data = tensors_of(r.args).v.data; });
}

TEST(ValidateRun, ForeignStaleAndMissingSchedules) {
  const Ready ready(paged_case());
  const Tensor fresh(DType::kUInt8, {static_cast<std::int64_t>(ready.made.workspace_bytes())});
  ready.expect_refused_in(fresh.view(), kInvalidArgument,
                          {"workspace holds no schedule", "schedule() first"});
  fresh.fill_bytes(0);
  ready.expect_refused_in(fresh.view(), kInvalidArgument, {"workspace holds no schedule"});

  AttentionProblem other = ready.problem.problem;
  other.mask.causal = true;  // as large a workspace, other bits
  schedule(plan(other), ready.args.lengths, ready.workspace.view());
  ready.expect_refused(kInvalidArgument,
                       {"workspace holds a schedule of another plan", "schedule() with this plan"});
}

TEST(ValidateRun, DeadTableEntriesAreNeverJudged) {
  AttentionCase row = paged_case();
  row.requests = {{1, 70}, {0, 60}, {1, 200}};  // request 1 has keys but no query
  row.mask = {true, 20, -1};                    // request 2 sees keys 179 and up: page 2 on
  const Ready ready(row);
  const auto table = ready.problem.cache->block_table.as<std::int32_t>();
  const std::int64_t width = cache_of(ready.args).block_table.shape[1];
  table[static_cast<std::size_t>(width)] = -7;
  table[static_cast<std::size_t>(2 * width)] = INT32_MAX;
  table[static_cast<std::size_t>(2 * width + 1)] = -1;
  EXPECT_NO_THROW(run(ready.made, ready.args, ready.workspace.view()));
  table[static_cast<std::size_t>(2 * width + 2)] = -1;
  expect_error(kOutOfRange, {"cache.block_table[2, 2] is -1"},
               [&] { run(ready.made, ready.args, ready.workspace.view()); });
}

TEST(ValidateRun, AnEmptyBatchNeedsNoTensorsButQAndOut) {
  AttentionCase row = paged_case();
  row.requests = {};
  const Ready ready(row);
  EXPECT_NO_THROW(run(ready.made, ready.args, ready.workspace.view()));
  EXPECT_NO_THROW(schedule(ready.made, {}, ready.workspace.view()));
}

// --- merge()
// -------------------------------------------------------------------------------------------------------

TEST(ValidateMerge, Arguments) {
  const Tensor a(DType::kFloat32, {5, 2, 64}), b(DType::kFloat32, {5, 2, 64}),
      out(DType::kFloat32, {5, 2, 64});
  const Tensor lse_a(DType::kFloat32, {5, 2}), lse_b(DType::kFloat32, {5, 2}), lse(DType::kFloat32, {5, 2});
  struct Args {
    std::vector<TensorView> parts, part_lse;
    TensorView out, lse;
  };
  const Args good{{a.view(), b.view()}, {lse_a.view(), lse_b.view()}, out.view(), lse.view()};
  const auto refused = [&](ErrorCode code, std::initializer_list<std::string_view> fragments, auto change) {
    Args args = good;
    change(args);
    expect_error(code, fragments, [&] { halftone::merge(args.parts, args.part_lse, args.out, args.lse); });
  };
  refused(kInvalidArgument, {"parts has 0 views"}, [](Args& m) { m.parts.clear(), m.part_lse.clear(); });
  refused(kInvalidArgument, {"part_lse has 1 views", "parts has 2"}, [](Args& m) { m.part_lse.pop_back(); });
  refused(kInvalidArgument, {"parts[1] has shape [4, 2, 64]"}, [](Args& m) { m.parts[1].shape[0] = 4; });
  refused(kInvalidArgument, {"parts[0] is int32"}, [](Args& m) { m.parts[0].dtype = DType::kInt32; });
  refused(kInvalidArgument, {"part_lse[1] is bf16", "f32"},
          [](Args& m) { m.part_lse[1].dtype = DType::kBFloat16; });
  refused(kInvalidArgument, {"part_lse[0] is absent"}, [](Args& m) { m.part_lse[0] = {}; });
  refused(kInvalidArgument, {"out is absent"}, [](Args& m) { m.out = {}; });
  refused(kInvalidArgument, {"out overlaps parts[1]"}, [](Args& m) { m.out = m.parts[1]; });
  refused(kInvalidArgument, {"lse overlaps part_lse[0]"}, [](Args& m) { m.lse = m.part_lse[0]; });
  refused(kInvalidArgument, {"lse has shape [5, 3]"}, [](Args& m) { m.lse.shape[1] = 3; });
  refused(kInvalidArgument, {"out has stride 0"}, [](Args& m) { m.out.strides[1] = 0; });
  refused(kInvalidArgument, {"out is on cpu", "cuda:0"}, [](Args& m) {
    m.parts[0].device = {DeviceType::kCuda, 0};
  });
  refused(kInvalidArgument, {"part_lse[1] is on cuda:0", "cpu"}, [](Args& m) {
    m.part_lse[1].device = {DeviceType::kCuda, 0};
  });
  int stream = 0;
  expect_error(kInvalidArgument, {"stream is"},
               [&] { halftone::merge(good.parts, good.part_lse, good.out, good.lse, &stream); });
  EXPECT_TRUE(std::ranges::all_of(out.bytes(), [](std::uint8_t byte) { return byte == 0xFF; }));
}

// --- attend() and merge() on a device that this build lacks
// -------------------------------------------

TEST(ValidateApi, OtherDevices) {
  const Ready ready(paged_case());
  AttentionProblem p = ready.problem.problem;
  p.device = {DeviceType::kCuda, 0};
  expect_error(kUnsupported, {"attend", "cuda:0"}, [&] { attend(p, ready.args); });
  if (planning::find_backend(DeviceType::kCuda) != nullptr) return;
  const auto on_cuda = [](TensorView view) {
    view.device = {DeviceType::kCuda, 0};
    return view;
  };
  const Tensor part(DType::kFloat32, {5, 2, 64}), lse(DType::kFloat32, {5, 2}),
      out(DType::kFloat32, {5, 2, 64});
  expect_error(kUnsupported, {"merge", "cuda:0"}, [&] {
    halftone::merge({on_cuda(part.view())}, {on_cuda(lse.view())}, on_cuda(out.view()), {});
  });
}

TEST(ValidateApi, ScheduleIgnoresLaterChangesOfTheLengths) {
  const Ready ready(paged_case());
  const planning::Schedule s =
      planning::carve_workspace(*ready.made.impl(),
                                reinterpret_cast<std::byte*>(ready.workspace.bytes().data()))
          .passes[0]
          .schedule;
  std::ranges::fill(ready.problem.cache->lengths.as<std::int32_t>(), -5);
  std::ranges::fill(ready.problem.cu_q.as<std::int32_t>(), 99);
  EXPECT_EQ(s.kv_lengths[2], 200);
  EXPECT_EQ(s.cu_q[3], 6);
  EXPECT_NO_THROW(run(ready.made, ready.args, ready.workspace.view()));
}

}  // namespace
}  // namespace halftone
