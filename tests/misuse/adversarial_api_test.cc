// The API misused: wrong plans, workspaces, devices, dtypes, ranks and options.
#include "plan/backend.h"
#include "tests/misuse/adversarial.h"

namespace halftone::testing {
namespace {

using enum ErrorCode;

AttentionCase simple() {
  AttentionCase row;
  row.requests = {{1, 70}, {3, 33}};
  row.k_format = "int8-tensor";
  row.alibi = true;
  row.sinks = true;
  return row;
}

TEST(Api, EmptyPlan) {
  const Plan empty;
  const Problem p = make_problem(simple());
  const Prepared ready(p);
  expect_error(kInvalidArgument, {"plan"}, [&] { (void)empty.problem(); });
  expect_error(kInvalidArgument, {"plan"}, [&] { (void)empty.info(); });
  expect_error(kInvalidArgument, {"plan"}, [&] { (void)empty.workspace_bytes(); });
  expect_error(kInvalidArgument, {"plan"}, [&] { (void)empty.describe(); });
  expect_error(kInvalidArgument, {"plan"}, [&] { schedule(empty, p.lengths(), ready.workspace.view()); });
  expect_error(kInvalidArgument, {"plan"}, [&] { run(empty, ready.args, ready.workspace.view()); });
  EXPECT_TRUE(untouched(ready.outputs.out));
}

TEST(Api, PlansOutliveTheirCopies) {
  const Problem p = make_problem(simple());
  Plan kept;
  {
    const Plan made = plan(p.problem);
    kept = made;
  }
  const Tensor workspace(DType::kUInt8, {static_cast<std::int64_t>(kept.workspace_bytes())});
  const Outputs outputs = make_outputs(p);
  schedule(kept, p.lengths(), workspace.view());
  run(kept, arguments(p, outputs), workspace.view());
  expect_same_bits(run_problem(p), outputs, "copied plan");
}

TEST(Api, WorkspaceWithoutASchedule) {
  const Problem p = make_problem(simple());
  const Prepared ready(p);
  for (const int fill : {0x00, 0xFF, 0x5A}) {
    const Tensor workspace(DType::kUInt8, {static_cast<std::int64_t>(ready.plan.workspace_bytes())});
    workspace.fill_bytes(static_cast<std::uint8_t>(fill));
    expect_error(kInvalidArgument, {"workspace", "schedule"},
                 [&] { run(ready.plan, ready.args, workspace.view()); });
  }
  EXPECT_TRUE(untouched(ready.outputs.out));
}

/// A schedule of another plan, even one with the same shapes.
TEST(Api, StaleOrForeignPlan) {
  const Problem p = make_problem(simple());
  const Prepared ready(p);
  const std::function<void(AttentionProblem&)> changes[] = {
      [](AttentionProblem& a) { a.scale = 0.5F; },
      [](AttentionProblem& a) { a.softcap = 5; },
      [](AttentionProblem& a) { a.mask.causal = true; },
      [](AttentionProblem& a) { a.mask.window_left = 7; },
      [](AttentionProblem& a) { a.max_kv_len += 1; },
      [](AttentionProblem& a) { a.workers = 1; },
      [](AttentionProblem& a) { a.policy = SplitPolicy::kBatchInvariant; },
      [](AttentionProblem& a) { spec_of(a).page_size = 128; },
  };
  for (const auto& change : changes) {
    AttentionProblem other = p.problem;
    other.workers = 2;
    change(other);
    const Plan foreign = plan(other);
    const Tensor workspace(
        DType::kUInt8,
        {static_cast<std::int64_t>(std::max(foreign.workspace_bytes(), ready.plan.workspace_bytes()))});
    schedule(foreign, p.lengths(), workspace.view());
    expect_error(kInvalidArgument, {"workspace", "another plan"},
                 [&] { run(ready.plan, ready.args, workspace.view()); });
  }
  EXPECT_TRUE(untouched(ready.outputs.out));
}

/// A schedule that failed must not leave the previous one half overwritten and accepted.
TEST(Api, FailedScheduleDoesNotCorrupt) {
  const Problem p = make_problem(simple());
  const Prepared ready(p);
  const Outputs expected = run_problem(p);
  const Tensor bad = Tensor::of({2}, std::vector<std::int32_t>{70, 1 << 20});
  SequenceLengths lengths = p.lengths();
  lengths.kv_lengths = bad.view();
  expect_error(kOutOfRange, {"kv_lengths[1]"},
               [&] { schedule(ready.plan, lengths, ready.workspace.view()); });
  run(ready.plan, ready.args, ready.workspace.view());
  expect_same_bits(expected, ready.outputs, "previous schedule");
}

struct Slot {
  const char* name;
  TensorView& (*of)(AttentionArgs&);
};
constexpr Slot kTensors[] = {
    {"q", [](AttentionArgs& a) -> TensorView& { return a.q; }},
    {"out", [](AttentionArgs& a) -> TensorView& { return a.out; }},
    {"lse", [](AttentionArgs& a) -> TensorView& { return a.lse; }},
    {"alibi_slopes", [](AttentionArgs& a) -> TensorView& { return a.alibi_slopes; }},
    {"sinks", [](AttentionArgs& a) -> TensorView& { return a.sinks; }},
    {"status", [](AttentionArgs& a) -> TensorView& { return a.status; }},
    {"cache.pages", [](AttentionArgs& a) -> TensorView& { return cache_of(a).pages; }},
    {"cache.block_table", [](AttentionArgs& a) -> TensorView& { return cache_of(a).block_table; }},
    {"cache.lengths", [](AttentionArgs& a) -> TensorView& { return cache_of(a).lengths; }},
    {"cache.k_scale.scale", [](AttentionArgs& a) -> TensorView& { return cache_of(a).k_scale.scale; }},
    {"cache.v_scale.scale", [](AttentionArgs& a) -> TensorView& { return cache_of(a).v_scale.scale; }},
    {"cu_q", [](AttentionArgs& a) -> TensorView& { return a.lengths.cu_q; }},
    {"kv_lengths", [](AttentionArgs& a) -> TensorView& { return a.lengths.kv_lengths; }},
};

TEST(Api, WrongDevice) {
  const Problem p = make_problem(simple());
  const Prepared ready(p);
  for (const Slot& slot : kTensors) {
    ready.refuses(kInvalidArgument, {slot.name, "cuda:0", "cpu"}, [&](AttentionArgs& a) {
      slot.of(a).device = {DeviceType::kCuda, 0};
    });
  }
  TensorView workspace = ready.workspace.view();
  workspace.device = {DeviceType::kCuda, 1};
  expect_error(kInvalidArgument, {"workspace", "cuda:1"}, [&] { run(ready.plan, ready.args, workspace); });
  expect_error(kInvalidArgument, {"workspace", "cuda:1"},
               [&] { schedule(ready.plan, p.lengths(), workspace); });
}

TEST(Api, WrongDtype) {
  const Problem p = make_problem(simple());
  const Prepared ready(p);
  for (const Slot& slot : kTensors) {
    for (const DType wrong : {DType::kInt64, DType::kFloat8E4M3, DType::kInt4, static_cast<DType>(200)}) {
      ready.refuses(kInvalidArgument, {slot.name}, [&](AttentionArgs& a) { slot.of(a).dtype = wrong; });
    }
  }
  ready.refuses(kInvalidArgument, {"q", "f16", "bf16"},
                [](AttentionArgs& a) { a.q.dtype = DType::kFloat16; });
  ready.refuses(kInvalidArgument, {"out", "f16", "bf16"},
                [](AttentionArgs& a) { a.out.dtype = DType::kFloat16; });
}

TEST(Api, WrongRankAndShape) {
  const Problem p = make_problem(simple());
  const Prepared ready(p);
  for (const Slot& slot : kTensors) {
    for (const int rank : {0, 4, 5}) {
      ready.refuses(kInvalidArgument, {slot.name, "rank", std::to_string(rank)},
                    [&](AttentionArgs& a) { slot.of(a).rank = rank; });
    }
    for (const std::int64_t delta : {-1, 1, 1000000}) {
      const std::string name = slot.name;
      if (name == "cache.block_table") continue;  // its width is free
      ready.refuses(kInvalidArgument, {slot.name, "shape"}, [&](AttentionArgs& a) {
        slot.of(a).shape[static_cast<std::size_t>(slot.of(a).rank - 1)] += delta;
      });
    }
    ready.refuses(kInvalidArgument, {slot.name}, [&](AttentionArgs& a) { slot.of(a).shape[0] = -5; });
  }
}

TEST(Api, RankBeyondTheView) {
  const Problem p = make_problem(simple());
  const Prepared ready(p);
  for (const int rank : {-1, 6, 1000000, std::numeric_limits<int>::min()}) {
    for (const Slot& slot : kTensors) {
      ready.refuses(kInvalidArgument, {slot.name, "rank"}, [&](AttentionArgs& a) { slot.of(a).rank = rank; });
    }
  }
}

/// Shapes and strides whose products wrap, and strides that lead out of the address space.
TEST(Api, ShapesThatWrap) {
  const Problem p = make_problem(simple());
  const Prepared ready(p);
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t huge : {std::int64_t{1} << 32, std::int64_t{1} << 61, kMost}) {
    ready.refuses(kInvalidArgument, {"q"}, [&](AttentionArgs& a) { a.q.shape[0] = huge; });
    ready.refuses(kInvalidArgument, {"cache.pages"}, [&](AttentionArgs& a) {
      cache_of(a).pages.shape[0] = huge;
      cache_of(a).pages.strides[0] = huge;
    });
  }
  for (const std::int64_t huge : {std::int64_t{1} << 56, std::int64_t{1} << 61, kMost}) {
    for (const std::int64_t stride : {huge, -huge}) {
      ready.refuses(kInvalidArgument, {"q", "stride"}, [&](AttentionArgs& a) { a.q.strides[0] = stride; });
      ready.refuses(kInvalidArgument, {"out", "stride"},
                    [&](AttentionArgs& a) { a.out.strides[1] = stride; });
    }
  }
}

TEST(Api, MissingTensors) {
  const Problem p = make_problem(simple());
  const Prepared ready(p);
  for (const Slot& slot : kTensors) {
    const std::string name = slot.name;
    if (name == "status" || name == "cu_q" || name == "kv_lengths" || name == "cache.lengths") continue;
    ready.refuses(kInvalidArgument, {slot.name, "absent"},
                  [&](AttentionArgs& a) { slot.of(a) = TensorView{}; });
  }
  expect_error(kInvalidArgument, {"kv_lengths"}, [&] {
    schedule(ready.plan, SequenceLengths{p.cu_q.view(), TensorView{}, TensorView{}}, ready.workspace.view());
  });
}

TEST(Api, TensorsThatThePlanDoesNotUse) {
  AttentionCase row = simple();
  row.alibi = row.sinks = row.lse = false;
  row.k_format = "int8-head";
  const Problem p = make_problem(row);
  const Prepared ready(p);
  const Tensor heads(DType::kFloat32, {row.q_heads}), one(DType::kFloat32, {1});
  const Tensor lse(DType::kFloat32, {p.total_q(), row.q_heads});
  ready.refuses(kInvalidArgument, {"alibi_slopes"}, [&](AttentionArgs& a) { a.alibi_slopes = heads.view(); });
  ready.refuses(kInvalidArgument, {"sinks"}, [&](AttentionArgs& a) { a.sinks = heads.view(); });
  ready.refuses(kInvalidArgument, {"lse"}, [&](AttentionArgs& a) { a.lse = lse.view(); });
  ready.refuses(kInvalidArgument, {"k_scale"},
                [&](AttentionArgs& a) { cache_of(a).k_scale.scale = one.view(); });
  ready.refuses(kInvalidArgument, {"k and v are present", "paged cache"}, [&](AttentionArgs& a) {
    a.kv = KvTensorViews{a.q, a.q};
  });
}

TEST(Api, CacheOfAnotherSpec) {
  const Problem p = make_problem(simple());
  const Prepared ready(p);
  const std::function<void(KvCacheSpec&)> changes[] = {
      [](KvCacheSpec& s) { s.page_size = 32; },
      [](KvCacheSpec& s) { s.kv_heads = 4; },
      [](KvCacheSpec& s) { s.head_dim = 64; },
      [](KvCacheSpec& s) { s.v_head_dim = 64; },
      [](KvCacheSpec& s) { s.rotate_k = true; },
      [](KvCacheSpec& s) { s.rotate_v = true; },
      [](KvCacheSpec& s) { s.k_format = parse_format("fp8"); },
      [](KvCacheSpec& s) { s.v_format = parse_format("int8-head"); },
  };
  for (const auto& change : changes) {
    ready.refuses(kInvalidArgument, {"cache.spec"}, [&](AttentionArgs& a) { change(cache_of(a).spec); });
  }
  // v_head_dim 0 and the same number spelt out are one spec.
  AttentionArgs args = ready.args;
  cache_of(args).spec.v_head_dim = cache_of(args).spec.head_dim;
  run(ready.plan, args, ready.workspace.view());
  expect_same_bits(run_problem(p), ready.outputs, "v_head_dim spelt out");
}

TEST(Api, UnsupportedCombinations) {
  const Problem p = make_problem(simple());
  const auto refuses = [&](ErrorCode code, std::initializer_list<std::string_view> words,
                           const std::function<void(AttentionProblem&)>& change) {
    AttentionProblem a = p.problem;
    change(a);
    expect_error(code, words, [&] { (void)plan(a); });
  };
  for (const DType bad :
       {DType::kInt8, DType::kFloat8E4M3, DType::kInt4, DType::kInt64, static_cast<DType>(77)}) {
    refuses(kInvalidArgument, {"q_dtype"}, [&](AttentionProblem& a) { a.q_dtype = bad; });
    refuses(kInvalidArgument, {"out_dtype"}, [&](AttentionProblem& a) { a.out_dtype = bad; });
    refuses(kInvalidArgument, {"kv.dtype", "use bf16"}, [&](AttentionProblem& a) {
      a.kv = KvTensors{bad, 2, 128};
    });
  }
  refuses(kInvalidArgument, {"policy", "9"},
          [](AttentionProblem& a) { a.policy = static_cast<SplitPolicy>(9); });
  refuses(kInvalidArgument, {"device.index", "3"}, [](AttentionProblem& a) { a.device.index = 3; });
  refuses(kUnsupported, {"asymmetric"}, [](AttentionProblem& a) {
    spec_of(a).k_format = parse_format("fp8-token-head");
    spec_of(a).k_format.asymmetric = true;
  });
  refuses(kInvalidArgument, {"k_format"},
          [](AttentionProblem& a) { spec_of(a).k_format.dtype = DType::kInt64; });
  refuses(kInvalidArgument, {"k_format", "granularity"},
          [](AttentionProblem& a) { spec_of(a).k_format.granularity = Granularity::kNone; });
  refuses(kInvalidArgument, {"v_format", "scale_dtype"},
          [](AttentionProblem& a) { spec_of(a).v_format.scale_dtype = DType::kBFloat16; });
  if (planning::find_backend(DeviceType::kCuda) != nullptr) return;
  refuses(kUnsupported, {"device", "cuda:0"}, [](AttentionProblem& a) { a.device = {DeviceType::kCuda, 0}; });
}

/// A stream means nothing on the CPU: refused, not ignored.
TEST(Api, StreamOnTheCpu) {
  const Problem p = make_problem(simple());
  const Prepared ready(p);
  int anything = 0;
  expect_error(kInvalidArgument, {"stream"},
               [&] { schedule(ready.plan, p.lengths(), ready.workspace.view(), &anything); });
  expect_error(kInvalidArgument, {"stream"},
               [&] { run(ready.plan, ready.args, ready.workspace.view(), &anything); });
  EXPECT_TRUE(untouched(ready.outputs.out));
  const reference::Dequantised d = dequantised(*p.cache);
  expect_error(kInvalidArgument, {"stream"},
               [&] { dequantize(p.cache->view(), d.k.view(), d.v.view(), &anything); });
  AttentionProblem device = p.problem;
  device.device.index = 0;
  EXPECT_NO_THROW((void)plan(device));
}

TEST(Api, ErrorsKeepTheObjectUsable) {
  const Problem p = make_problem(simple());
  const Prepared ready(p);
  const Outputs expected = run_problem(p);
  for (int i = 0; i < 3; ++i) {
    ready.outputs.out.fill_bytes(0xFF);
    ready.outputs.lse.fill_bytes(0xFF);
    ready.refuses(kInvalidArgument, {"q"}, [](AttentionArgs& a) { a.q.rank = 2; });
    run(ready.plan, ready.args, ready.workspace.view());
    expect_same_bits(expected, ready.outputs, "after an error");
  }
}

TEST(Api, PlanDescribesItself) {
  for (const AttentionCase& row : attention_cases()) {
    const Plan made = plan(attention_problem(row));
    const PlanInfo& info = made.info();
    EXPECT_FALSE(info.config.empty());
    EXPECT_FALSE(info.reason.empty());
    EXPECT_GE(info.workers, 1);
    EXPECT_EQ(info.group, row.q_heads / row.kv_heads);
    EXPECT_GE(info.kv_tile, kTileTokens);
    EXPECT_EQ(info.split_tokens > 0, row.policy == SplitPolicy::kBatchInvariant);
    EXPECT_EQ(static_cast<std::size_t>(info.workspace_bytes), made.workspace_bytes());
    EXPECT_LE(info.schedule_bytes, info.workspace_bytes);
    EXPECT_NE(made.describe().find(info.config), std::string::npos);
    if (::testing::Test::HasFailure()) break;
  }
}

}  // namespace
}  // namespace halftone::testing
