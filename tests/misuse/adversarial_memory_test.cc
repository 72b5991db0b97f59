// Memory: alignment, strides, aliasing, workspaces, and what a refusal must leave alone.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "tests/misuse/adversarial.h"
#include "tests/on_runners.h"

namespace halftone::testing {
namespace {

using enum ErrorCode;

AttentionCase full(const std::string& format = "int8-tensor") {
  AttentionCase row;
  row.requests = {{1, 70}, {3, 33}, {1, 129}};
  row.k_format = format;
  row.page_size = 32;
  row.alibi = true;
  row.sinks = true;
  return row;
}

AttentionCase full_plain() {
  AttentionCase row = full();
  row.plain = DType::kBFloat16;
  return row;
}

using Member = TensorView& (*)(AttentionArgs&);
struct NamedMember {
  const char* name;  ///< as sentences call it
  Member of;
  bool paged;  ///< exists with a paged cache
  bool plain;  ///< exists with plain K and V
};
constexpr NamedMember kInputs[] = {
    {"q", [](AttentionArgs& a) -> TensorView& { return a.q; }, true, true},
    {"alibi_slopes", [](AttentionArgs& a) -> TensorView& { return a.alibi_slopes; }, true, true},
    {"sinks", [](AttentionArgs& a) -> TensorView& { return a.sinks; }, true, true},
    {"cache.pages", [](AttentionArgs& a) -> TensorView& { return cache_of(a).pages; }, true, false},
    {"cache.block_table", [](AttentionArgs& a) -> TensorView& { return cache_of(a).block_table; }, true,
     false},
    {"cache.lengths", [](AttentionArgs& a) -> TensorView& { return cache_of(a).lengths; }, true, false},
    {"cache.k_scale.scale", [](AttentionArgs& a) -> TensorView& { return cache_of(a).k_scale.scale; }, true,
     false},
    {"cache.v_scale.scale", [](AttentionArgs& a) -> TensorView& { return cache_of(a).v_scale.scale; }, true,
     false},
    {"k", [](AttentionArgs& a) -> TensorView& { return tensors_of(a).k; }, false, true},
    {"v", [](AttentionArgs& a) -> TensorView& { return tensors_of(a).v; }, false, true},
};
constexpr NamedMember kOutputs[] = {
    {"out", [](AttentionArgs& a) -> TensorView& { return a.out; }, true, true},
    {"lse", [](AttentionArgs& a) -> TensorView& { return a.lse; }, true, true},
    {"status", [](AttentionArgs& a) -> TensorView& { return a.status; }, true, true},
};

template <class F>
void for_each_member(const F& f) {
  for (const bool paged : {true, false}) {
    const Problem p = make_problem(paged ? full() : full_plain());
    const Prepared ready(p);
    for (const auto& list : {std::span<const NamedMember>(kInputs), std::span<const NamedMember>(kOutputs)}) {
      for (const NamedMember& member : list) {
        if (paged ? member.paged : member.plain) f(p, ready, member);
      }
    }
  }
}

void shift(TensorView& view, int bytes) { view.data = static_cast<std::uint8_t*>(view.data) + bytes; }

/// Below the element's own alignment: refused by name, for every tensor.
TEST(Memory, MisalignedTensors) {
  for_each_member([](const Problem&, const Prepared& ready, const NamedMember& member) {
    for (const int bytes : {1, 2, 8}) {
      AttentionArgs args = ready.args;
      const int needed =
          member.name == std::string("cache.pages") ? 16 : dtype_bits(member.of(args).dtype) / 8;
      if (bytes % needed == 0) continue;
      ready.refuses(kInvalidArgument, {member.name, std::to_string(bytes % needed)},
                    [&](AttentionArgs& a) { shift(member.of(a), bytes); });
    }
  });
}

/// Aligned to the element but to nothing more: the same bits as from aligned memory.
TEST(Memory, ElementAlignmentIsEnough) {
  for (const bool paged : {true, false}) {
    AttentionCase row = paged ? full() : full_plain();
    const Problem p = make_problem(row);
    const Outputs expected = run_problem(p);
    for (const std::size_t bytes : {2U, 4U, 8U, 12U}) {
      const auto moved = [&](const Tensor& t) {
        Tensor copy(t.dtype(), t.shape(), bytes);
        std::copy(t.bytes().begin(), t.bytes().end(), copy.bytes().begin());
        return copy;
      };
      const Outputs actual = make_outputs(p);
      const Tensor q = moved(p.q), out = moved(actual.out);
      AttentionArgs args = arguments(p, actual);
      args.q = q.view();
      args.out = out.view();
      Tensor k, v;
      if (!paged) {
        k = moved(p.k);
        v = moved(p.v);
        args.kv = KvTensorViews{k.view(), v.view()};
      }
      attend(p.problem, args);
      EXPECT_TRUE(same_bytes(expected.out, out)) << bytes;
      EXPECT_TRUE(out.guards_intact());
    }
  }
}

TEST(Memory, MisalignedWorkspace) {
  const Problem p = make_problem(full());
  const Prepared ready(p);
  const auto size = static_cast<std::int64_t>(ready.plan.workspace_bytes());
  for (const std::size_t bytes : {1U, 2U, 8U, 128U}) {
    const Tensor workspace(DType::kUInt8, {size}, bytes);
    expect_error(kInvalidArgument, {"workspace", std::to_string(bytes), "256"},
                 [&] { schedule(ready.plan, p.lengths(), workspace.view()); });
    expect_error(kInvalidArgument, {"workspace", "256"},
                 [&] { run(ready.plan, ready.args, workspace.view()); });
    EXPECT_TRUE(untouched(workspace));
  }
  EXPECT_TRUE(untouched(ready.outputs.out));
}

TEST(Memory, WorkspaceAbsentOrLarger) {
  const Problem p = make_problem(full());
  const Prepared ready(p);
  expect_error(kInvalidArgument, {"workspace"}, [&] { run(ready.plan, ready.args, TensorView{}); });
  expect_error(kInvalidArgument, {"workspace"}, [&] { schedule(ready.plan, p.lengths(), TensorView{}); });
  const Tensor larger(DType::kUInt8, {static_cast<std::int64_t>(ready.plan.workspace_bytes()) + 1000});
  schedule(ready.plan, p.lengths(), larger.view());
  run(ready.plan, ready.args, larger.view());
  expect_same_bits(run_problem(p), ready.outputs, "a larger workspace");
}

class Workspaces : public OnRunners {};
HALFTONE_ON_EVERY_RUNNER(Workspaces);

TEST_P(Workspaces, OneByteShort) {
  const Problem p = make_problem(full());
  const Plan plan = runner().plan(p);
  const PlacedRun calls(runner(), p, plan);
  const auto size = static_cast<std::int64_t>(plan.workspace_bytes());
  TensorView space = calls.space();
  space.shape[0] = size - 1;
  const std::string needed = std::to_string(size), given = std::to_string(size - 1);
  expect_error(kResourceExhausted, {"workspace", given, needed},
               [&] { schedule(plan, calls.args.lengths, space); });
  expect_error(kResourceExhausted, {"workspace", given, needed},
               [&] { halftone::run(plan, calls.args, space); });
  const Tensor workspace(DType::kUInt8, {size});
  calls.read(calls.space(), workspace);
  EXPECT_TRUE(untouched(workspace) && untouched(calls.outputs().out));
}

/// The stated size is enough (run() gives exactly that, with guards), whatever it holds.
TEST_P(Workspaces, ContentsDoNotMatter) {
  AttentionCase few = full("int4-g32"), many = table_case("int4-g32", DType::kFloat16);
  few.workers = 9;
  few.requests = {{1, 700}, {2, 300}, {1, 0}};
  many.requests = {{1, 30000}, {2, 300}, {1, 0}};
  for (AttentionCase row : {few, many}) {
    for (const SplitPolicy policy :
         {SplitPolicy::kFast, SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
      row.policy = policy;
      const Problem p = make_problem(row);
      const Plan plan = runner().plan(p);
      const Outputs expected = runner().run(p, plan);
      EXPECT_EQ(judge(p, expected), "");
      for (const int fill : {0x00, 0x7F, 0x3C}) {
        const PlacedRun calls(runner(), p, plan, fill);
        calls.schedule();
        calls.run();
        if (policy == SplitPolicy::kFast && runner().checks_values()) {  // the CPU's bits may differ
          EXPECT_EQ(judge(p, calls.outputs()), "");
        } else {
          expect_same_bits(expected, calls.outputs(), "workspace of " + std::to_string(fill));
        }
      }
    }
  }
}

class Tensors : public OnRunners {};
HALFTONE_ON_EVERY_RUNNER(Tensors);

/// x [tokens, heads, dim] where a backend finds it, inside a larger tensor whose other elements are NaN.
struct Inside {
  Inside(Place& place, const Tensor& x, std::int64_t first, std::int64_t gap, bool heads_first)
      : shape(x.shape()),
        memory(x.dtype(), {first + x.shape()[0] * x.shape()[1] * (x.shape()[2] + gap)}),
        view(x.view()),
        begin(first) {
    const std::int64_t width = x.shape()[2] + gap;
    view.strides[0] = heads_first ? width : x.shape()[1] * width;
    view.strides[1] = heads_first ? x.shape()[0] * width : width;
    for (std::int64_t i = 0; i < x.numel(); ++i) memory.set(at(i), x.get(i));
    placed = place.add(memory.view());
    view.data = static_cast<std::uint8_t*>(placed.data) + first * dtype_bits(x.dtype()) / 8;
    view.device = placed.device;
  }

  /// Position in `memory` of element i of x.
  std::int64_t at(std::int64_t i) const {
    const std::int64_t heads = shape[1], dim = shape[2];
    return begin + i / (heads * dim) * view.strides[0] + i / dim % heads * view.strides[1] + i % dim;
  }

  std::vector<std::int64_t> shape;
  Tensor memory;
  TensorView placed, view;
  std::int64_t begin;
};

/// Over a cache, over K and V as tensors of each type, and over latent caches with many heads.
std::vector<AttentionCase> strided_cases() {
  std::vector<AttentionCase> rows(2, table_case("int8-head", DType::kFloat16));
  rows[0].head_dim = 80;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    rows.push_back(full_plain());
    rows.back().plain = rows.back().q_dtype = rows.back().out_dtype = dtype;
  }
  for (const char* format : {"fp8-g128-f32", "bf16"}) {
    rows.push_back(latent_case({}, format));
    rows.back().q_heads = 64;
    rows.back().requests = {{1, 100}, {3, 70}};
    rows.back().mask.causal = true;
  }
  return rows;
}

/// Q at any element alignment and stride, K, V and O at those that the backend takes, heads before tokens:
/// the same bits, gaps left alone.
TEST_P(Tensors, StridedViews) {
  const bool on_gpu = runner().device().type == DeviceType::kCuda;
  for (const AttentionCase& row : strided_cases()) {
    const Problem p = make_problem(row);
    if (!serves(p)) continue;
    const Plan plan = runner().plan(p);
    const Outputs expected = runner().run(p, plan);
    for (const std::int64_t gap : {0, 3, 8, 64}) {
      for (const auto& [shift, heads_first] :
           {std::pair{0, false}, {1, false}, {4, false}, {0, true}, {4, true}}) {
        const std::unique_ptr<Place> place = runner().place();
        const auto inside = [&, shift = shift, heads_first = heads_first](const Tensor& x, int bytes) {
          // `bytes`: of which a GPU takes multiples
          const std::int64_t unit = on_gpu ? std::max(8 * bytes / dtype_bits(x.dtype()), 1) : 1;
          return Inside(*place, x, shift / unit * unit, gap / unit * unit, heads_first);
        };
        const PlacedRun calls(runner(), p, plan);
        AttentionArgs args = calls.args;
        const Inside q = inside(p.q, 1), out = inside(make_outputs(p).out, 8);
        args.q = q.view;
        args.out = out.view;
        std::optional<Inside> k, v;
        if (row.plain) tensors_of(args) = {k.emplace(inside(p.k, 16)).view, v.emplace(inside(p.v, 16)).view};
        schedule(plan, args.lengths, calls.space());
        halftone::run(plan, args, calls.space());
        place->finish();
        place->read(out.placed, out.memory);
        const std::string what = "gap " + std::to_string(gap) + ", shift " + std::to_string(shift);
        for (std::int64_t i = 0; i < expected.out.numel(); ++i) {
          ASSERT_EQ(expected.out.get(i), out.memory.get(out.at(i))) << what << ", element " << i;
        }
        std::int64_t untouched_elements = 0;
        for (const float x : out.memory.to_floats()) untouched_elements += std::isnan(x) ? 1 : 0;
        EXPECT_EQ(untouched_elements, out.memory.numel() - expected.out.numel())
            << what << ": a gap was written";
      }
    }
  }
}

TEST(Memory, LastDimMustBeContiguous) {
  const Problem p = make_problem(full_plain());
  const Prepared ready(p);
  for (const char* name : {"q", "k", "v", "out", "lse"}) {
    ready.refuses(kInvalidArgument, {name, "stride", "2"}, [&](AttentionArgs& a) {
      const std::string n = name;
      auto& [k, v] = tensors_of(a);
      TensorView& view = n == "q" ? a.q : n == "k" ? k : n == "v" ? v : n == "out" ? a.out : a.lse;
      view.strides[static_cast<std::size_t>(view.rank - 1)] = 2;
    });
  }
}

/// Two elements of an output at one address.
TEST(Memory, OutputThatOverlapsItself) {
  const Problem p = make_problem(full());
  const Prepared ready(p);
  ready.refuses(kInvalidArgument, {"out", "stride"}, [](AttentionArgs& a) { a.out.strides[0] = 0; });
  ready.refuses(kInvalidArgument, {"out", "stride"}, [](AttentionArgs& a) { a.out.strides[1] = 64; });
  ready.refuses(kInvalidArgument, {"lse", "stride"}, [](AttentionArgs& a) { a.lse.strides[0] = 1; });
}

/// The page stride of the cache: padded pages give the same bits; overlapping or misaligned ones are refused.
TEST(Memory, PageStrides) {
  const Problem p = make_problem(full());
  const Outputs expected = run_problem(p);
  const std::int64_t count = p.cache->pages.shape()[0], bytes = p.cache->pages.shape()[1];
  const Tensor wide(DType::kUInt8, {count, bytes + 48});
  for (std::int64_t i = 0; i < count; ++i) {
    std::copy_n(p.cache->pages.bytes().begin() + i * bytes, bytes, wide.bytes().begin() + i * (bytes + 48));
  }
  const Outputs actual = make_outputs(p);
  AttentionArgs args = arguments(p, actual);
  cache_of(args).pages = wide.view();
  cache_of(args).pages.shape[1] = bytes;
  attend(p.problem, args);
  expect_same_bits(expected, actual, "padded pages");
  const Prepared ready(p);
  for (const std::int64_t stride : {std::int64_t{0}, bytes - 16, bytes + 8, -bytes}) {
    ready.refuses(kInvalidArgument, {"cache.pages", "stride", std::to_string(stride)},
                  [&](AttentionArgs& a) { cache_of(a).pages.strides[0] = stride; });
  }
}

/// Bytes from the first to behind the last element of a contiguous view.
std::size_t byte_size(const TensorView& view) {
  return static_cast<std::size_t>(view.numel() * dtype_bits(view.dtype) / 8);
}

/// Every output over every other tensor, the last bytes of the one being the first of the other.
TEST(Memory, OutputAliasingAnInput) {
  for_each_member([](const Problem&, const Prepared& ready, const NamedMember& member) {
    for (const NamedMember& output : kOutputs) {
      AttentionArgs args = ready.args;
      TensorView &target = output.of(args), &source = member.of(args);
      if (&target == &source) continue;
      const std::size_t size = byte_size(target), offset = size <= 16 ? 0 : (size - 1) / 16 * 16;
      const Tensor arena(DType::kUInt8, {static_cast<std::int64_t>(offset + byte_size(source))});
      std::copy_n(static_cast<const std::uint8_t*>(source.data), byte_size(source),
                  arena.bytes().data() + offset);
      target.data = arena.bytes().data();
      source.data = arena.bytes().data() + offset;
      const Tensor before = arena.clone();
      expect_error(kInvalidArgument, {output.name, member.name, "overlaps"},
                   [&] { run(ready.plan, args, ready.workspace.view()); });
      EXPECT_TRUE(same_bytes(before, arena)) << output.name << " over " << member.name;
    }
  });
}

TEST(Memory, WorkspaceAliasingATensor) {
  const Problem p = make_problem(full());
  const Prepared ready(p);
  ready.refuses(kInvalidArgument, {"workspace", "out", "overlap"},
                [&](AttentionArgs& a) { a.out.data = ready.workspace.bytes().data(); });
  ready.refuses(kInvalidArgument, {"workspace", "q", "overlap"},
                [&](AttentionArgs& a) { a.q.data = ready.workspace.bytes().data(); });
  SequenceLengths lengths = p.lengths();
  lengths.kv_lengths.data = ready.workspace.bytes().data();
  expect_error(kInvalidArgument, {"workspace", "kv_lengths", "overlap"},
               [&] { schedule(ready.plan, lengths, ready.workspace.view()); });
}

/// Neighbours in one allocation do not overlap.
TEST(Memory, AdjacentTensorsAreFine) {
  const Problem p = make_problem(full());
  const Outputs expected = run_problem(p);
  const std::size_t q_bytes = p.q.bytes().size(), out_bytes = expected.out.bytes().size();
  const Tensor both(DType::kUInt8, {static_cast<std::int64_t>(q_bytes + out_bytes)});
  std::copy(p.q.bytes().begin(), p.q.bytes().end(), both.bytes().begin());
  const Outputs actual = make_outputs(p);
  AttentionArgs args = arguments(p, actual);
  args.q.data = both.bytes().data();
  args.out.data = both.bytes().data() + q_bytes;
  attend(p.problem, args);
  EXPECT_TRUE(std::equal(expected.out.bytes().begin(), expected.out.bytes().end(),
                         both.bytes().begin() + static_cast<std::ptrdiff_t>(q_bytes)));
}

}  // namespace
}  // namespace halftone::testing
