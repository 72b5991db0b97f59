// Every allocation fails in turn: a typed error or std::bad_alloc, nothing leaked, and the next call works.
#include <atomic>
#include <cstdlib>
#include <new>

#include "tests/misuse/adversarial.h"

namespace {

constexpr long kNever = -1;
std::atomic<long> countdown = kNever;  // allocations until one fails
std::atomic<long> live = 0;            // allocations not yet freed

/// One allocation fails, and all later ones until disarmed: what running out of memory looks like.
bool must_fail() {
  long left = countdown.load();
  while (left > 0 && !countdown.compare_exchange_weak(left, left - 1)) {
  }
  return left == 0;
}

void* allocate(std::size_t size, std::size_t alignment) noexcept {
  if (must_fail()) return nullptr;
  if (size == 0) size = 1;
  void* p = alignment <= alignof(std::max_align_t)
                ? std::malloc(size)
                : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (p != nullptr) ++live;
  return p;
}

void* allocate_or_throw(std::size_t size, std::size_t alignment) {
  void* p = allocate(size, alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

void release(void* p) noexcept {
  if (p != nullptr) --live;
  std::free(p);
}

}  // namespace

void* operator new(std::size_t n) { return allocate_or_throw(n, 1); }
void* operator new[](std::size_t n) { return allocate_or_throw(n, 1); }
void* operator new(std::size_t n, std::align_val_t a) {
  return allocate_or_throw(n, static_cast<std::size_t>(a));
}
void* operator new[](std::size_t n, std::align_val_t a) {
  return allocate_or_throw(n, static_cast<std::size_t>(a));
}
void* operator new(std::size_t n, const std::nothrow_t&) noexcept { return allocate(n, 1); }
void* operator new[](std::size_t n, const std::nothrow_t&) noexcept { return allocate(n, 1); }
void* operator new(std::size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return allocate(n, static_cast<std::size_t>(a));
}
void* operator new[](std::size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return allocate(n, static_cast<std::size_t>(a));
}
void operator delete(void* p) noexcept { release(p); }
void operator delete[](void* p) noexcept { release(p); }
void operator delete(void* p, std::size_t) noexcept { release(p); }
void operator delete[](void* p, std::size_t) noexcept { release(p); }
void operator delete(void* p, std::align_val_t) noexcept { release(p); }
void operator delete[](void* p, std::align_val_t) noexcept { release(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { release(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { release(p); }

namespace halftone::testing {
namespace {

enum class Outcome { kDone, kRefused, kOther };

/// Runs `call` with the allocation number `n` (from 0) failing. Allocates nothing while armed.
Outcome with_failure_at(long n, const std::function<void()>& call) {
  Outcome outcome = Outcome::kDone;
  countdown = n;
  try {
    call();
  } catch (const Error& e) {
    outcome = e.code() == ErrorCode::kResourceExhausted ? Outcome::kRefused : Outcome::kOther;
  } catch (const std::bad_alloc&) {
    outcome = Outcome::kRefused;
  } catch (...) {
    outcome = Outcome::kOther;
  }
  countdown = kNever;
  return outcome;
}

/// Fails allocation 0, 1, 2, ... until the call succeeds; returns how many failed. Twice: a first round may
/// leave tables behind that are built once, a second one must leave nothing.
long fail_in_turn(const char* name, const std::function<void()>& call) {
  long failed = 0;
  for (const bool warm : {false, true}) {
    for (long n = 0;; ++n) {
      const long before = live;
      const Outcome outcome = with_failure_at(n, call);
      EXPECT_NE(outcome, Outcome::kOther) << name << ", allocation " << n;
      if (warm) {
        EXPECT_EQ(live, before) << name << " leaks at allocation " << n;
      }
      if (outcome == Outcome::kDone) break;
      ++failed;
      if (n == 10000) {
        ADD_FAILURE() << name << " never succeeded";
        return failed;
      }
    }
  }
  return failed;
}

AttentionCase row_of(const std::string& k_format, const std::string& v_format) {
  AttentionCase row;
  row.requests = {{1, 100}, {3, 33}, {1, 0}};
  row.k_format = k_format;
  row.v_format = v_format;
  row.head_dim = 64;
  row.workers = 3;
  row.sinks = row.alibi = true;
  return row;
}

/// Before anything else in this process has warmed a table: the first append and run fail, too.
TEST(Fault, AttentionFromTheFirstCall) {
  for (const auto& [k, v] : {std::pair{"int8-head", "int4-g32"}, std::pair{"bf16", "fp8-token-head"}}) {
    AttentionCase row = row_of(k, v);
    row.rotate_k = row.rotate_v = true;
    const Problem p = make_problem(row);
    const Plan plan = halftone::plan(p.problem);
    const Tensor workspace(DType::kUInt8, {static_cast<std::int64_t>(plan.workspace_bytes())});
    const Outputs outputs = make_outputs(p);
    const AttentionArgs args = arguments(p, outputs);
    fail_in_turn("schedule", [&] { schedule(plan, args.lengths, workspace.view()); });
    fail_in_turn("run", [&] { run(plan, args, workspace.view()); });
    EXPECT_EQ(judge(p, make_reference(p), outputs), "");
    fail_in_turn("attend", [&] { attend(p.problem, args); });
    expect_same_bits(run_problem(p), outputs, "after failures");
  }
}

TEST(Fault, Plan) {
  const Problem p = make_problem(row_of("int8-tensor", "int4-g32"));
  EXPECT_GT(fail_in_turn("plan", [&] { (void)plan(p.problem); }), 0);
  const Plan made = plan(p.problem);
  EXPECT_GT(fail_in_turn("describe", [&] { (void)made.describe(); }), 0);
}

TEST(Fault, Append) {
  for (const char* format : {"bf16", "int8-tensor", "int8-token", "int4-g32", "fp8-token-head"}) {
    AttentionCase row = row_of(format, format);
    row.rotate_k = row.rotate_v = true;
    const Problem p = make_problem(row);
    Cache cache = p.cache->clone();
    cache.lengths.fill_bytes(0);
    cache.pages.fill_bytes(0xFF);
    const Tensor cu = Tensor::of({4}, std::vector<std::int32_t>{0, 100, 133, 133});
    AppendArgs args;
    args.k = p.k.view();
    args.v = p.v.view();
    args.cu_seqlens = cu.view();
    fail_in_turn("append", [&] { append(cache.view(), args); });
    EXPECT_TRUE(same_bytes(cache.pages, p.cache->pages)) << format;
    EXPECT_TRUE(cache.guards_intact());
  }
}

TEST(Fault, DequantizeAndCalibrate) {
  const Problem p = make_problem(row_of("int8-tensor", "int4-g32"));
  const reference::Dequantised expected = dequantised(*p.cache);
  const Tensor k = Tensor(DType::kFloat32, expected.k.shape()),
               v = Tensor(DType::kFloat32, expected.v.shape());
  fail_in_turn("dequantize", [&] { dequantize(p.cache->view(), k.view(), v.view()); });
  EXPECT_TRUE(same_bytes(k, expected.k) && same_bytes(v, expected.v));
  fail_in_turn("calibrate", [&] { (void)calibrate(p.k.view(), p.cache->spec.k_format, true); });
}

TEST(Fault, FbgemmRows) {
  const Problem p = make_problem(row_of("int4-g32", "int4-row"));
  const std::vector<std::int64_t> live = p.cache->slots();
  const auto tokens = static_cast<std::int64_t>(live.size());
  const Tensor slots = Tensor::of({tokens}, live);
  const Tensor rows(DType::kUInt8, {tokens, p.row.kv_heads, 4 * 2 + 64 / 2});
  const Tensor pages = p.cache->pages.clone();
  fail_in_turn("export", [&] { export_fbgemm_int4(p.cache->view(), KvPart::kK, slots.view(), rows.view()); });
  fail_in_turn("import", [&] { import_fbgemm_int4(p.cache->view(), KvPart::kK, rows.view(), slots.view()); });
  EXPECT_TRUE(same_bytes(pages, p.cache->pages));
}

TEST(Fault, Merge) {
  const std::vector<float> ones(2 * 3 * 64, 1.0F);
  std::vector<TensorView> parts, lses;
  std::vector<Tensor> owners;
  for (int i = 0; i < 5; ++i) {
    owners.push_back(Tensor::of(DType::kFloat32, {2, 3, 64}, ones));
    parts.push_back(owners.back().view());
    owners.push_back(Tensor::of(DType::kFloat32, {2, 3}, ones));
    lses.push_back(owners.back().view());
  }
  const Tensor out(DType::kFloat32, {2, 3, 64}), lse(DType::kFloat32, {2, 3});
  fail_in_turn("merge", [&] { halftone::merge(parts, lses, out.view(), lse.view()); });
  for (const float x : out.as<float>()) EXPECT_FLOAT_EQ(x, 1.0F);
}

TEST(Fault, Formats) {
  fail_in_turn("parse_format", [] { (void)parse_format("int8-token-head-asym-f32"); });
  fail_in_turn("format_name", [] { (void)format_name(parse_format("int8-token-head-asym-f32")); });
  fail_in_turn("page_layout", [] {
    KvCacheSpec spec;
    spec.kv_heads = 1;
    spec.head_dim = 64;
    (void)page_layout(spec);
  });
}

/// Building the sentence of a user error can fail as well.
TEST(Fault, ErrorsWhileOutOfMemory) {
  const Problem p = make_problem(row_of("int8-head", "int8-head"));
  const Prepared ready(p);
  AttentionArgs bad = ready.args;
  bad.q.rank = 2;
  for (long n = 0; n < 50; ++n) {
    bool threw = false;
    countdown = n;
    try {
      run(ready.plan, bad, ready.workspace.view());
    } catch (const Error& e) {
      threw = e.code() == ErrorCode::kInvalidArgument || e.code() == ErrorCode::kResourceExhausted;
    } catch (const std::bad_alloc&) {
      threw = true;
    }
    countdown = kNever;
    ASSERT_TRUE(threw) << n;
  }
  EXPECT_TRUE(untouched(ready.outputs.out));
}

}  // namespace
}  // namespace halftone::testing
