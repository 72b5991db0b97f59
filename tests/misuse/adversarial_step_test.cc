// Attention that appends, with arguments and values that are not what they must be: what is refused changes
// no byte, and where values lie on a device the status tells.
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <variant>

#include "testing/runner.h"
#include "testing/step.h"
#include "tests/misuse/adversarial.h"
#include "tests/misuse/ready_to_run.h"
#include "tests/on_runners.h"

namespace halftone::testing {
namespace {

using enum ErrorCode;

AttentionCase step_case() {
  AttentionCase row;
  row.requests = {{2, 17}, {1, 1}, {3, 64}};
  row.k_format = "int8-head";
  row.head_dim = 64;
  row.page_size = 16;
  row.mask.causal = true;
  return appending(row, {.dtype = DType::kFloat32, .rope = RopePairing::kHalf});
}

/// A step that is refused: neither pages nor lengths nor outputs change, and the same step then runs.
void expect_refused(ErrorCode code, const std::vector<std::string>& fragments,
                    const std::function<void(ready_to_run::Ready&)>& change) {
  ready_to_run::Ready ready(step_case());
  const Tensor pages = ready.problem.cache->pages.clone(), lengths = ready.problem.cache->lengths.clone();
  ready.args.append.advance = true;
  change(ready);
  ready.expect_refused(code, fragments);
  EXPECT_TRUE(same_bytes(pages, ready.problem.cache->pages)) << fragments[0];
  EXPECT_TRUE(same_bytes(lengths, ready.problem.cache->lengths)) << fragments[0];
}

TEST(StepArguments, AreCheckedBeforeAnyByteIsWritten) {
  const Tensor none, other(DType::kFloat32, {6, 2, 80}), few(DType::kFloat32, {5, 2, 64});
  const Tensor half(DType::kFloat16, {6, 2, 64}), slots(DType::kInt64, {6}), short_slots(DType::kInt64, {5});
  const Tensor positions(DType::kInt32, {6});
  using Change = std::function<void(ready_to_run::Ready&)>;
  const struct {
    ErrorCode code;
    std::vector<std::string> fragments;
    Change change;
  } cases[] = {
      {kInvalidArgument,
       {"k of append is absent", "appends"},
       [&](auto& r) { r.args.append.k = none.view(); }},
      {kInvalidArgument, {"v is absent"}, [&](auto& r) { r.args.append.v = none.view(); }},
      {kInvalidArgument, {"k", "[6, 2, 80]"}, [&](auto& r) { r.args.append.k = other.view(); }},
      {kInvalidArgument, {"v", "f16", "f32"}, [&](auto& r) { r.args.append.v = half.view(); }},
      {kInvalidArgument,
       {"k.shape[0] is 5, but q has 6 rows"},
       [&](auto& r) {
         r.args.append.k = r.args.append.v = few.view();
         r.args.append.rope = {};
       }},
      {kInvalidArgument,
       {"slot_mapping", "[5]"},
       [&](auto& r) { r.args.append.slot_mapping = short_slots.view(); }},
      {kInvalidArgument, {"cache.lengths is absent"}, [](auto& r) { cache_of(r.args).lengths = {}; }},
      {kInvalidArgument,
       {"cache.pages overlaps k"},
       [](auto& r) { r.args.append.k.data = cache_of(r.args).pages.data; }},
      {kInvalidArgument,
       {"cache.lengths overlaps rope.positions"},
       [](auto& r) {
         r.args.append.rope.positions = r.problem.positions.view();
         cache_of(r.args).lengths.data = r.args.append.rope.positions.data;
       }},
      {kInvalidArgument, {"out overlaps v"}, [](auto& r) { r.args.append.v.data = r.args.out.data; }},
      {kInvalidArgument, {"rope.cos is absent"}, [](auto& r) { r.args.append.rope.cos = {}; }},
      {kOutOfRange,
       {"rope.positions[1] is 64, but rope.cos has rows 0 to 63"},
       [](auto& r) { r.problem.positions.template as<std::int32_t>()[1] = 64; }},
      {kInvalidArgument,
       {"k[5, 1, 63] is nan"},
       [](auto& r) { r.problem.new_k.set(r.problem.new_k.numel() - 1, std::nanf("")); }},
      {kInvalidArgument,
       {"v[0, 0, 1] is inf", "2^100"},
       [](auto& r) { r.problem.new_v.set(1, std::numeric_limits<float>::infinity()); }},
      {kOutOfRange,
       {"cache.block_table[2, 3] is -1"},
       [](auto& r) {
         const Tensor& table = r.problem.cache->block_table;
         table.template as<std::int32_t>()[static_cast<std::size_t>(2 * table.shape()[1] + 3)] = -1;
       }},
      {kInvalidArgument,
       {"slot_mapping[0] is 5", "request 0's at position 15", "cache.block_table"},
       [&](auto& r) {
         slots.fill_bytes(0xff);
         slots.as<std::int64_t>()[0] = 5;
         r.args.append.slot_mapping = slots.view();
       }},
      {kInvalidArgument,
       {"cache.block_table sends tokens"},
       [](auto& r) {  // two requests append to one page
         const Tensor& table = r.problem.cache->block_table;
         const auto width = static_cast<std::size_t>(table.shape()[1]);
         const auto entries = table.template as<std::int32_t>();
         entries[width] = entries[1];
       }},
  };
  for (const auto& each : cases) {
    SCOPED_TRACE(each.fragments[0]);
    expect_refused(each.code, each.fragments, each.change);
  }
}

TEST(StepArguments, OfAPlanWithoutThem) {
  AttentionCase row = step_case();
  row.step = {};
  const ready_to_run::Ready ready(row);
  const Problem tokens = make_problem(step_case());
  const auto refused = [&](const char* fragment, const std::function<void(AttentionArgs&)>& change) {
    AttentionArgs args = ready.args;
    change(args);
    expect_error(kInvalidArgument, {fragment, "problem.appends is not set"},
                 [&] { run(ready.made, args, ready.workspace.view()); });
  };
  refused("k of append is present", [&](AttentionArgs& a) { a.append = new_tokens(tokens); });
  refused("v of append is present", [&](AttentionArgs& a) { a.append.v = tokens.new_v.view(); });
  refused("advance of append is true", [&](AttentionArgs& a) { a.append.advance = true; });
}

/// A schedule that does not count the new tokens is another plan's.
TEST(StepArguments, ScheduleOfAPlanWithoutThem) {
  const Problem p = make_problem(step_case());
  AttentionProblem without = p.problem;
  without.appends = false;
  const Plan appends = plan(p.problem), other = plan(without);
  EXPECT_NE(appends.describe().find("append     before attention"), std::string::npos) << appends.describe();
  EXPECT_EQ(other.describe().find("append"), std::string::npos);
  const Tensor workspace(DType::kUInt8, {static_cast<std::int64_t>(appends.workspace_bytes())});
  schedule(other, p.lengths(), workspace.view());
  const Outputs outputs = make_outputs(p);
  expect_error(kInvalidArgument, {"a schedule of another plan"},
               [&] { halftone::run(appends, arguments(p, outputs), workspace.view()); });
}

/// attend() takes the cache's lengths, too, for those before the step; a run may be repeated after it.
TEST(StepArguments, OfAttend) {
  const Problem p = make_problem(step_case());
  const Outputs want = run_problem(p), got = make_outputs(p);
  AttentionArgs args = arguments(p, got);
  args.lengths.kv_lengths = {};
  args.append.advance = true;
  attend(p.problem, args);
  EXPECT_TRUE(same_bytes(want.out, got.out));
  EXPECT_EQ(p.cache->lengths.as<std::int32_t>()[2], 64);
}

TEST(StepBounds, CountTheNewTokens) {
  const Problem p = make_problem(step_case());
  AttentionProblem tight = p.problem;
  const auto schedules = [&] {
    const Plan made = plan(tight);
    const Tensor workspace(DType::kUInt8, {static_cast<std::int64_t>(made.workspace_bytes())});
    schedule(made, p.lengths(), workspace.view());
  };
  tight.max_kv_len = 64;
  tight.max_total_kv = 17 + 1 + 64;
  EXPECT_NO_THROW(schedules());
  --tight.max_total_kv;
  expect_error(kOutOfRange, {"82 keys together", "max_total_kv is 81"}, schedules);
  tight.max_total_kv = 0;
  tight.max_prompt_kv = 17 + 64;  // of two requests with more than one new token
  EXPECT_NO_THROW(schedules());
  --tight.max_prompt_kv;
  expect_error(kOutOfRange, {"81 keys together", "max_prompt_kv is 80"}, schedules);
  tight.max_prompt_kv = 0;
  tight.max_kv_len = 63;
  expect_error(kOutOfRange, {"kv_lengths[2] is 61 before 3 new tokens", "max_kv_len is 63"}, schedules);
  tight.max_kv_len = 64;
  const KvTensors tensors{DType::kBFloat16, 2, 64};
  tight.kv = tensors;
  expect_error(kUnsupported, {"appends is true", "plain tensors"}, [&] { (void)plan(tight); });
  tight = p.problem;
  tight.mask = {};
  tight.listed.top_k = 4;
  expect_error(kUnsupported, {"appends is true", "listed.top_k is 4", "call append()"},
               [&] { (void)plan(tight); });
}

class Steps : public OnRunners {};
HALFTONE_ON_EVERY_RUNNER(Steps);

/// A bad entry of the block table drops the new tokens behind it, as append() does; neighbours keep theirs.
TEST_P(Steps, BadEntriesDropTheirTokens) {
  AttentionCase row = step_case();
  row.table_mode = BlockTableMode::kClamped;
  const Problem clean = make_problem(row), p = make_problem(row);
  const std::int64_t width = p.cache->block_table.shape()[1];
  for (const std::int32_t bad : {-1, std::numeric_limits<std::int32_t>::max()}) {
    p.cache->block_table.as<std::int32_t>()[static_cast<std::size_t>(2 * width + 3)] =
        bad;  // tokens 48 to 63
    const Outputs want = run(clean), got = run(p);
    EXPECT_EQ(got.status.as<std::int32_t>()[0], 1);
    const std::size_t row_bytes = want.out.bytes().size() / 6, healthy = 3 * row_bytes;
    EXPECT_TRUE(std::equal(want.out.bytes().begin(), want.out.bytes().begin() + std::ptrdiff_t(healthy),
                           got.out.bytes().begin()));
    EXPECT_TRUE(std::ranges::none_of(got.out.to_floats(), [](float x) { return std::isnan(x); }));
  }
}

/// Where nobody checks lengths: tokens for which the bounds have no room are not written, and their rows are
/// empty; the other requests get what they get without them. A GPU's kernels of attention write the
/// tokens, of the third case those with rows as M. Behind these, latent caches: 16 and 32 rows, a pair
/// over codes and one over bf16.
TEST_P(Steps, TokensWithoutRoomAreLeftOut) {
  AttentionCase fused;
  fused.k_format = "int4-g32";
  fused.mask.causal = true;
  fused.requests = {{1, 640}, {1, 128}, {1, 300}};
  AttentionCase many = fused;
  many.k_format = "int8-head";
  many.requests = {{3, 640}, {3, 128}, {3, 300}};
  many.q_heads = 16, many.kv_heads = 1;
  many.key_slack = 8192;  // no units of 8
  AttentionCase few = appending(step_case(), {.rope = RopePairing::kHalf});
  few.key_slack = 32768;  // the time that it takes
  std::vector<AttentionCase> rows{few, appending(fused), appending(many)};
  for (const auto& [format, heads] :
       {std::pair{"int4-g64", 8}, {"fp8-g128-f32", 16}, {"int8-g64", 64}, {"bf16", 64}}) {
    AttentionCase row = latent_case(fused, format);
    row.q_heads = heads;
    row.requests = {{2, 300}, {2, 128}, {2, 200}};
    rows.push_back(appending(row));
  }
  for (AttentionCase row : rows) {
    for (const int workers : {0, 1}) {
      row.workers = workers;
      const Problem p = make_problem(row);
      const Plan plan = runner().plan(p);
      PlacedRun placed(runner(), p, plan);
      const TensorView cached = std::get<PagedKv>(placed.args.kv).lengths;
      const Tensor lengths = p.cache->lengths.clone();
      const std::int32_t too_long = plan.problem().max_kv_len - row.requests[2].q_len + 1;
      lengths.as<std::int32_t>()[2] = too_long;
      placed.write(cached, lengths);
      placed.args.lengths.kv_lengths = cached;
      placed.args.append.advance = true;
      if (runner().checks_values()) {
        EXPECT_THROW(placed.schedule(), Error);
        continue;
      }
      EXPECT_TRUE(plan.info().fuses_append);
      placed.schedule();
      placed.run();
      const Outputs want = run(p), got = placed.outputs();
      EXPECT_EQ(want.status.as<std::int32_t>()[0], 0);
      EXPECT_EQ(got.status.as<std::int32_t>()[0], 1);
      const std::int64_t healthy = p.total_q() - row.requests[2].q_len;
      for (const std::uint8_t byte : row_bytes(got.out, healthy, p.total_q())) ASSERT_EQ(byte, 0);
      if (workers == 1) {  // several may cut the others elsewhere
        EXPECT_EQ(row_bytes(got.out, 0, healthy), row_bytes(want.out, 0, healthy));
      }
      placed.read(cached, lengths);
      const auto after = lengths.as<std::int32_t>();
      EXPECT_EQ((std::array{after[0], after[1], after[2]}),
                (std::array{row.requests[0].kv_len, row.requests[1].kv_len, too_long}));
    }
  }
}

/// What append() reports of a value, run() reports.
TEST_P(Steps, ValuesThatAreNotFiniteAreReported) {
  if (runner().checks_values()) GTEST_SKIP() << "they are refused";
  for (const char* format : {"int8-head", "int8-token"}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {  // by append's kernel, by attention's
      for (int head = 0; head < 2; ++head) {  // of which that of a shared scale is read for others, too
        AttentionCase row = step_case();
        row.k_format = format;
        row = appending(row, {.dtype = dtype, .rope = RopePairing::kHalf});
        row.key_slack = 32768;  // the time that the kernels of attention need
        const Problem p = make_problem(row);
        ASSERT_EQ(row.kv_heads, 2);
        EXPECT_TRUE(runner().plan(p).info().fuses_append);
        p.new_k.set(head * row.head_dim + 6, std::numeric_limits<float>::infinity());
        EXPECT_EQ(run(p).status.as<std::int32_t>()[0] & 2, 2) << format << ", head " << head;
      }
    }
  }
}

}  // namespace
}  // namespace halftone::testing
