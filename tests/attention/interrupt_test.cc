// A caller that asks for the end of its call.
#include <omp.h>

#include <thread>
#include <utility>

#include "cpu/interrupt.h"
#include "tests/misuse/adversarial.h"

namespace halftone::testing {
namespace {

int answers_no = 0;  ///< left before the answer is yes
int asked = 0;
std::thread::id asking_thread;

bool end_now() noexcept {
  asking_thread = std::this_thread::get_id();
  ++asked;
  return answers_no-- <= 0;
}

/// `call` ends early where its caller says so the first and the third time it is asked. Calls in which other
/// threads did all the items, so that nobody was asked so often, are repeated.
void expect_interrupted(const char* name, const std::function<void()>& call) {
  for (const int no : {0, 2}) {
    bool interrupted = false;
    for (int tries = 0; tries < 1000 && !interrupted; ++tries) {
      answers_no = no;
      asked = 0;
      const cpu::Interruptible scope(end_now, std::chrono::nanoseconds(0));
      try {
        call();
      } catch (const cpu::Interrupted&) {
        interrupted = true;
      }
      EXPECT_EQ(interrupted, asked == no + 1) << name;
      ASSERT_TRUE(interrupted || omp_get_max_threads() > 1) << name;
    }
    EXPECT_TRUE(interrupted) << name;
    EXPECT_EQ(asking_thread, std::this_thread::get_id()) << name;
  }
}

Problem problem_to_end() {
  AttentionCase row;
  row.requests = {{70, 700}, {3, 130}, {1, 1000}, {20, 300}};
  row.k_format = "int8-tensor";
  row.v_format = "int4-g32";
  row.out_dtype = DType::kFloat32;
  row.rotate_k = true;
  row.workers = 6;
  return make_problem(row);
}

class Interrupt : public ::testing::TestWithParam<int> {
 protected:
  Interrupt() : threads_before_(omp_get_max_threads()) { omp_set_num_threads(GetParam()); }
  ~Interrupt() override { omp_set_num_threads(threads_before_); }

 private:
  int threads_before_;
};

TEST_P(Interrupt, Attention) {
  const Problem p = problem_to_end();
  const Outputs expected = run_problem(p);
  const Prepared ready(p);
  expect_interrupted("run", [&] { run(ready.plan, ready.args, ready.workspace.view()); });
  expect_interrupted("attend", [&] { attend(p.problem, ready.args); });
  EXPECT_TRUE(ready.workspace.guards_intact() && ready.outputs.out.guards_intact());
  run(ready.plan, ready.args, ready.workspace.view());  // the schedule is as it was
  expect_same_bits(expected, ready.outputs, "after interruptions");
}

TEST_P(Interrupt, Append) {
  const Problem p = problem_to_end();
  Cache cache = p.cache->clone();
  cache.pages.fill_bytes(0xFF);
  cache.lengths.fill_bytes(0);
  const Tensor cu = Tensor::of({5}, std::vector<std::int32_t>{0, 700, 830, 1830, 2130});
  AppendArgs args;
  args.k = p.k.view();
  args.v = p.v.view();
  args.cu_seqlens = cu.view();
  args.advance = true;
  expect_interrupted("append", [&] { append(cache.view(), args); });
  for (const std::int32_t length : cache.lengths.as<std::int32_t>()) EXPECT_EQ(length, 0);
  append(cache.view(), args);
  EXPECT_TRUE(same_bytes(cache.lengths, p.cache->lengths));
  EXPECT_TRUE(same_bytes(cache.pages, p.cache->pages));
}

TEST_P(Interrupt, Conversions) {
  const Problem p = problem_to_end();
  const reference::Dequantised expected = dequantised(*p.cache);
  const reference::Dequantised actual{expected.k.clone(), expected.v.clone()};
  expect_interrupted("dequantize", [&] { dequantize(p.cache->view(), actual.k.view(), actual.v.view()); });
  dequantize(p.cache->view(), actual.k.view(), actual.v.view());
  EXPECT_TRUE(same_bytes(actual.k, expected.k) && same_bytes(actual.v, expected.v));

  expect_interrupted("calibrate", [&] { (void)calibrate(p.k.view(), p.cache->spec.k_format); });

  const std::vector<std::int64_t> live = p.cache->slots();
  const auto tokens = static_cast<std::int64_t>(live.size());
  const Tensor slots = Tensor::of({tokens}, live);
  const Tensor rows(DType::kUInt8, {tokens, p.row.kv_heads, 4 * 4 + 128 / 2});
  const Tensor pages = p.cache->pages.clone();
  const PagedKv view = p.cache->view();
  expect_interrupted("export", [&] { export_fbgemm_int4(view, KvPart::kV, slots.view(), rows.view()); });
  export_fbgemm_int4(view, KvPart::kV, slots.view(), rows.view());
  expect_interrupted("import", [&] { import_fbgemm_int4(view, KvPart::kV, rows.view(), slots.view()); });
  import_fbgemm_int4(view, KvPart::kV, rows.view(), slots.view());
  EXPECT_TRUE(same_bytes(pages, p.cache->pages));
}

TEST_P(Interrupt, Merge) {
  const Problem p = problem_to_end();
  const Outputs part = run_problem(p);
  const Tensor merged(DType::kFloat32, part.out.shape());
  expect_interrupted("merge", [&] {
    halftone::merge({part.out.view(), part.out.view()}, {part.lse.view(), part.lse.view()}, merged.view(),
                    {});
  });
}

INSTANTIATE_TEST_SUITE_P(Threads, Interrupt, ::testing::Values(1, 4));

/// A bad page that was met before a handler made a call of its own still counts.
TEST(InterruptHandler, MayCall) {
  AttentionCase row;
  row.requests = {{1, 200}, {1, 200}, {1, 200}};
  row.table_mode = BlockTableMode::kClamped;
  row.workers = 1;
  const Problem p = make_problem(row);
  p.cache->block_table.as<std::int32_t>()[0] = -1;
  const Outputs expected = run_problem(p);
  ASSERT_EQ(expected.status.as<std::int32_t>()[0], 1);

  static const Problem* inner = nullptr;
  const Problem good = make_problem(row);
  inner = &good;
  static int calls = 0;
  const cpu::Interruptible scope(
      []() noexcept {
        if (inner == nullptr) return false;  // the inner call asks, too
        const Problem* const problem = std::exchange(inner, nullptr);
        calls += run_problem(*problem).status.as<std::int32_t>()[0] == 0 ? 1 : -1000;
        inner = problem;
        return false;
      },
      std::chrono::nanoseconds(0));
  expect_same_bits(expected, run_problem(p), "with calls in between");
  const Outputs outputs = run_problem(p);
  EXPECT_EQ(outputs.status.as<std::int32_t>()[0], 1);
  EXPECT_GE(calls, 6);  // before each item
}

/// Without a pressing caller, calls of some microseconds ask nobody.
TEST(InterruptHandler, ShortCallsDoNotAsk) {
  asked = 0;
  const cpu::Interruptible scope(end_now);
  AttentionCase row;
  row.requests = {{1, 33}};
  (void)run_problem(make_problem(row));
  EXPECT_EQ(asked, 0);
  EXPECT_NE(cpu::Interruptible::current(), nullptr);
}

}  // namespace
}  // namespace halftone::testing
