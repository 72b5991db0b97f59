// schedule() refuses wrong lengths and workspaces with a sentence, before any work: the workspace stays
// untouched.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "tests/misuse/ready_to_run.h"

namespace halftone {
namespace {

using enum ErrorCode;
using namespace ready_to_run;

struct Lengths {
  std::vector<std::int32_t> cu_q = {0, 3, 4, 6};
  std::vector<std::int32_t> kv = {70, 0, 200};

  SequenceLengths view() const {
    SequenceLengths l;
    l.cu_q = TensorView::contiguous(cu_q.data(), DType::kInt32, {static_cast<std::int64_t>(cu_q.size())});
    l.kv_lengths = TensorView::contiguous(kv.data(), DType::kInt32, {static_cast<std::int64_t>(kv.size())});
    return l;
  }
};

void expect_schedule_error(ErrorCode code, std::initializer_list<std::string_view> fragments,
                           const std::function<void(Lengths&)>& change) {
  const Ready ready(paged_case());
  Lengths lengths;
  change(lengths);
  const Tensor before = ready.workspace.clone();
  expect_error(code, fragments, [&] { schedule(ready.made, lengths.view(), ready.workspace.view()); });
  EXPECT_TRUE(reference::same_bytes(before, ready.workspace));
}

TEST(ValidateSchedule, Lengths) {
  expect_schedule_error(kOutOfRange, {"kv_lengths[2] is 201", "max_kv_len is 200", "larger max_kv_len"},
                        [](Lengths& l) { l.kv[2] = 201; });
  expect_schedule_error(kOutOfRange, {"kv_lengths[1] is -1", "0 to max_kv_len 200"},
                        [](Lengths& l) { l.kv[1] = -1; });
  expect_schedule_error(kOutOfRange, {"cu_q gives request 2 4 tokens", "max_q_len is 3"},
                        [](Lengths& l) { l.cu_q[3] = 8; });
  expect_schedule_error(kInvalidArgument, {"cu_q[2] is 2", "cu_q[1] = 3", "cumulative"},
                        [](Lengths& l) { l.cu_q[2] = 2; });
  expect_schedule_error(kInvalidArgument, {"cu_q[0] is 1", "must be 0"}, [](Lengths& l) { l.cu_q[0] = 1; });
  expect_schedule_error(kInvalidArgument, {"cu_q has shape [3]", "[4]"},
                        [](Lengths& l) { l.cu_q.pop_back(); });
  expect_schedule_error(kInvalidArgument, {"kv_lengths has shape [4]", "[3]"},
                        [](Lengths& l) { l.kv.push_back(1); });
}

/// The sum of all keys against max_total_kv, of pages and of plain tensors: as many are fine, one more is
/// not.
TEST(ValidateSchedule, TotalOfKeys) {
  for (const bool plain : {false, true}) {
    AttentionProblem p = testing::attention_problem(plain ? plain_case() : paged_case());
    const std::vector<std::int32_t> lengths = {70, 0, 200}, cu_kv = {0, 70, 70, 270};
    SequenceLengths view;
    Lengths queries;
    view.cu_q = queries.view().cu_q;
    if (plain) {
      view.cu_kv = TensorView::contiguous(const_cast<std::int32_t*>(cu_kv.data()), DType::kInt32, {4});
    } else {
      view.kv_lengths = TensorView::contiguous(const_cast<std::int32_t*>(lengths.data()), DType::kInt32, {3});
    }
    const auto build = [&](std::int64_t max_total_kv) {
      p.max_total_kv = max_total_kv;
      const Plan made = plan(p);
      const Tensor workspace(DType::kUInt8, {made.info().workspace_bytes});
      const Tensor before = workspace.clone();
      try {
        schedule(made, view, workspace.view());
      } catch (...) {
        EXPECT_TRUE(reference::same_bytes(before, workspace));
        throw;
      }
    };
    build(0);
    build(270);
    expect_error(
        kOutOfRange,
        {"the requests have 270 keys together", "max_total_kv is 269", "plan with a larger max_total_kv"},
        [&] { build(269); });
  }
}

/// The keys of requests of more than one query against max_prompt_kv: those of single queries and of requests
/// without queries do not count.
TEST(ValidateSchedule, KeysOfPrompts) {
  for (const bool plain : {false, true}) {
    AttentionProblem p = testing::attention_problem(plain ? plain_case() : paged_case());
    struct Row {
      std::vector<std::int32_t> cu_q;  // absent if empty: max_q_len, 3, of each
      std::int64_t keys;
    };
    for (const Row& row : {Row{{0, 3, 4, 6}, 270}, Row{{0, 3, 4, 5}, 70}, Row{{0, 1, 4, 6}, 200},
                           Row{{0, 0, 0, 2}, 200}, Row{{}, 270}}) {
      const std::vector<std::int32_t> lengths = {70, 0, 200}, cu_kv = {0, 70, 70, 270};
      const auto view_of = [](const std::vector<std::int32_t>& x) {
        return TensorView::contiguous(const_cast<std::int32_t*>(x.data()), DType::kInt32,
                                      {static_cast<std::int64_t>(x.size())});
      };
      SequenceLengths view;
      if (!row.cu_q.empty()) view.cu_q = view_of(row.cu_q);
      (plain ? view.cu_kv : view.kv_lengths) = view_of(plain ? cu_kv : lengths);
      const auto build = [&](std::int64_t max_prompt_kv) {
        p.max_prompt_kv = max_prompt_kv;
        const Plan made = plan(p);
        const Tensor workspace(DType::kUInt8, {made.info().workspace_bytes});
        schedule(made, view, workspace.view());
      };
      SCOPED_TRACE(fmt::format("{} keys{}", row.keys, plain ? " of plain tensors" : ""));
      EXPECT_NO_THROW(build(row.keys));
      expect_error(kOutOfRange,
                   {fmt::format("more than one query have {} keys together", row.keys),
                    fmt::format("max_prompt_kv is {}", row.keys - 1), "plan with a larger max_prompt_kv"},
                   [&] { build(row.keys - 1); });
    }
  }
}

TEST(ValidateSchedule, LengthTensors) {
  const Ready ready(paged_case());
  const auto refused = [&](std::initializer_list<std::string_view> fragments,
                           const std::function<void(SequenceLengths&)>& change) {
    Lengths values;
    SequenceLengths lengths = values.view();
    change(lengths);
    expect_error(kInvalidArgument, fragments, [&] { schedule(ready.made, lengths, ready.workspace.view()); });
  };
  refused({"kv_lengths is absent", "[3]"}, [](auto& l) { l.kv_lengths = {}; });
  refused({"kv_lengths is int64", "int32"}, [](auto& l) { l.kv_lengths.dtype = DType::kInt64; });
  refused({"kv_lengths has stride 2", "contiguous"}, [](auto& l) { l.kv_lengths.strides[0] = 2; });
  refused({"kv_lengths is on cuda:0", "cpu"}, [](auto& l) { l.kv_lengths.device = {DeviceType::kCuda, 0}; });
  refused({"cu_q has rank 2"}, [](auto& l) { l.cu_q.rank = 2; });
  refused({"cu_kv is present", "leave it out"}, [](auto& l) { l.cu_kv = l.cu_q; });
  refused({"kv_lengths starts 2 bytes"},
          [](auto& l) { l.kv_lengths.data = static_cast<char*>(l.kv_lengths.data) + 2; });
}

TEST(ValidateSchedule, PlainLengths) {
  const Ready ready(plain_case());
  const auto refused = [&](ErrorCode code, std::initializer_list<std::string_view> fragments,
                           std::vector<std::int32_t> cu_kv, bool with_kv_lengths = false) {
    SequenceLengths lengths = ready.args.lengths;
    lengths.cu_kv = cu_kv.empty() ? TensorView{}
                                  : TensorView::contiguous(cu_kv.data(), DType::kInt32,
                                                           {static_cast<std::int64_t>(cu_kv.size())});
    if (with_kv_lengths) lengths.kv_lengths = TensorView::contiguous(cu_kv.data(), DType::kInt32, {3});
    expect_error(code, fragments, [&] { schedule(ready.made, lengths, ready.workspace.view()); });
  };
  refused(kInvalidArgument, {"cu_kv is absent"}, {});
  refused(kInvalidArgument, {"cu_kv[2] is 60", "cu_kv[1] = 70"}, {0, 70, 60, 200});
  refused(kOutOfRange, {"cu_kv gives request 2 201 tokens", "max_kv_len is 200"}, {0, 70, 70, 271});
  refused(kInvalidArgument, {"kv_lengths is present", "cu_kv"}, {0, 70, 70, 270}, true);
}

TEST(ValidateSchedule, TooManyQueries) {
  AttentionProblem p = Ready(paged_case()).problem.problem;
  p.batch = 1 << 20;
  p.max_q_len = 1 << 12;
  const Plan made = plan(p);
  const Tensor workspace(DType::kUInt8, {static_cast<std::int64_t>(made.workspace_bytes())});
  const std::vector<std::int32_t> kv(1 << 20, 1);
  SequenceLengths lengths;
  lengths.kv_lengths = TensorView::contiguous(kv.data(), DType::kInt32, {1 << 20});
  expect_error(kOutOfRange, {"batch * max_q_len is 4294967296", "pass cu_q"},
               [&] { schedule(made, lengths, workspace.view()); });
}

TEST(ValidateSchedule, Workspace) {
  const Ready ready(paged_case());
  const Lengths lengths;
  const auto refused = [&](ErrorCode code, std::initializer_list<std::string_view> fragments,
                           const TensorView& w) {
    expect_error(code, fragments, [&] { schedule(ready.made, lengths.view(), w); });
    expect_error(code, fragments, [&] { run(ready.made, ready.args, w); });
  };
  const auto size = static_cast<std::int64_t>(ready.made.workspace_bytes());
  TensorView w = ready.workspace.view();
  w.shape[0] = size - 1;
  refused(kResourceExhausted,
          {fmt::format("workspace has {} bytes", size - 1), fmt::format("{}", size), "workspace_bytes()"}, w);
  for (const std::size_t misalignment : {1, 2, 8, 16, 128}) {
    const Tensor shifted(DType::kUInt8, {size}, misalignment);
    refused(kInvalidArgument, {fmt::format("workspace starts {} bytes past a multiple of 256", misalignment)},
            shifted.view());
  }
  refused(kInvalidArgument, {"workspace is absent"}, {});
  w = ready.workspace.view();
  w.dtype = DType::kInt8;
  refused(kInvalidArgument, {"workspace is int8", "uint8"}, w);
  w = ready.workspace.view();
  w.device = {DeviceType::kCuda, 1};
  refused(kInvalidArgument, {"workspace is on cuda:1"}, w);
  expect_error(kInvalidArgument, {"kv_lengths", "workspace", "overlap"}, [&] {
    SequenceLengths inside = lengths.view();
    inside.kv_lengths.data = ready.workspace.bytes().data() + 64;
    schedule(ready.made, inside, ready.workspace.view());
  });
}

TEST(ValidateSchedule, ABatchOf100000FitsItsWorkspaceExactly) {
  AttentionProblem p = Ready(paged_case()).problem.problem;
  p.batch = 100000;
  p.max_q_len = 1;
  for (const auto policy : {SplitPolicy::kFast, SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
    p.policy = policy;
    const Plan made = plan(p);
    const Tensor workspace(DType::kUInt8, {static_cast<std::int64_t>(made.workspace_bytes())});
    std::vector<std::int32_t> kv(100000);
    for (std::size_t i = 0; i < kv.size(); ++i) kv[i] = static_cast<std::int32_t>(i * 2654435761U % 201);
    SequenceLengths lengths;
    lengths.kv_lengths = TensorView::contiguous(kv.data(), DType::kInt32, {100000});
    schedule(made, lengths, workspace.view());
    EXPECT_TRUE(workspace.guards_intact());
    const auto* header = reinterpret_cast<const planning::ScheduleHeader*>(workspace.bytes().data());
    EXPECT_EQ(header->units, 100000 * p.kv_heads());
    EXPECT_LE(header->partials, made.info().max_partials);
  }
}

TEST(ValidateSchedule, StreamOnTheCpu) {
  const Ready ready(paged_case());
  int stream = 0;
  expect_error(kInvalidArgument, {"stream is", "null on the CPU"},
               [&] { schedule(ready.made, Lengths().view(), ready.workspace.view(), &stream); });
  expect_error(kInvalidArgument, {"stream is", "null on the CPU"},
               [&] { run(ready.made, ready.args, ready.workspace.view(), &stream); });
}

}  // namespace
}  // namespace halftone
