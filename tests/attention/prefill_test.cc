// Prompts of 16 bits on every backend: where tensors lie, what lies beside them and who is in the batch must
// not matter.
//
// ctest: 2 parts
#include <cmath>
#include <limits>
#include <utility>
#include <variant>

#include "tests/attention/prefill_cases.h"
#include "tests/attention/select.h"
#include "tests/misuse/adversarial.h"
#include "tests/on_runners.h"

namespace halftone::testing {
namespace {

class Prefill : public OnRunners {};
HALFTONE_ON_EVERY_RUNNER(Prefill);

/// x[token][head] of an owner that holds it some other way.
struct Strided {
  Tensor owner;
  TensorView view;
};

/// [heads][tokens][dim].
Strided head_major(const Tensor& x) {
  const std::int64_t tokens = x.shape()[0], heads = x.shape()[1], dim = x.shape()[2];
  Strided s{Tensor(x.dtype(), {heads, tokens, dim}), x.view()};
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const std::int64_t d = i % dim, h = i / dim % heads, t = i / dim / heads;
    s.owner.set((h * tokens + t) * dim + d, x.get(i));
  }
  s.view.data = s.owner.view().data;
  s.view.strides[0] = dim;
  s.view.strides[1] = tokens * dim;
  return s;
}

/// Rows of `width` elements, of which x has those from `first` on; the others are NaN.
Strided slice_of_rows(const Tensor& x, std::int64_t first, std::int64_t width) {
  const std::int64_t tokens = x.shape()[0], row = x.shape()[1] * x.shape()[2];
  Strided s{Tensor(x.dtype(), {tokens, width}), x.view()};
  for (std::int64_t i = 0; i < x.numel(); ++i) s.owner.set(i / row * width + first + i % row, x.get(i));
  s.view.data = static_cast<std::uint8_t*>(s.owner.view().data) + first * 2;
  s.view.strides[0] = width;
  return s;
}

/// Of tensors of one layout: the outputs, in the layout of `p`.
Outputs run_strided(const Runner& runner, const Problem& p, Strided (*layout)(const Tensor&)) {
  const Plan plan = runner.plan(p);
  const Outputs outputs = make_outputs(p);
  const Strided q = layout(p.q), k = layout(p.k), v = layout(p.v), out = layout(outputs.out);
  AttentionArgs host = arguments(p, outputs);
  host.q = q.view, host.out = out.view;
  tensors_of(host) = {k.view, v.view};
  const Tensor workspace(DType::kUInt8, {static_cast<std::int64_t>(plan.workspace_bytes())});
  const std::unique_ptr<Place> place = runner.place();
  const AttentionArgs args = place->add(host);
  const TensorView space = place->add(workspace.view());
  schedule(plan, args.lengths, space);
  halftone::run(plan, args, space);
  place->finish();
  place->read(args.out, out.owner);
  place->read(args.lse, outputs.lse);
  const std::int64_t dim = out.view.shape[2], heads = out.view.shape[1];
  for (std::int64_t i = 0; i < outputs.out.numel(); ++i) {
    const std::int64_t t = i / dim / heads, h = i / dim % heads, d = i % dim;
    outputs.out.set(i, out.owner.get(t * out.view.strides[0] + h * out.view.strides[1] + d));
  }
  return {outputs.out.clone(), outputs.lse.clone(), outputs.status.clone()};
}

TEST_P(Prefill, HeadMajorTensorsGiveTheSameBits) {
  for (const auto& [q_heads, kv_heads] : {std::pair{2, 2}, {8, 2}, {6, 2}}) {
    for (AttentionCase row : prefill_cases({{130, 200}, {1, 77}, {0, 9}, {65, 65}})) {
      if (!row.plain) continue;
      row.q_heads = q_heads, row.kv_heads = kv_heads;
      const Problem p = make_problem(row);
      if (!serves(p)) continue;
      expect_same_bits(run(p), run_strided(runner(), p, head_major), row.name);
    }
  }
}

/// Slices of one tensor [tokens, (q_heads + 2 kv_heads) head_dim], as a model's projection leaves them.
TEST_P(Prefill, SlicesOfAPackedTensorGiveTheSameBits) {
  for (AttentionCase row : prefill_cases({{130, 130}, {1, 1}, {65, 65}})) {
    if (!row.plain) continue;
    row.q_heads = 6, row.kv_heads = 2;
    const Problem p = make_problem(row);
    if (!serves(p)) continue;
    const std::int64_t dim = row.head_dim, width = 10 * dim;
    const Strided q = slice_of_rows(p.q, 0, width), k = slice_of_rows(p.k, 6 * dim, width),
                  v = slice_of_rows(p.v, 8 * dim, width);
    const Plan plan = runner().plan(p);
    const PlacedRun space(runner(), p, plan);
    const Outputs outputs = make_outputs(p);
    AttentionArgs host = arguments(p, outputs);
    host.q = q.view;
    tensors_of(host) = {k.view, v.view};
    const std::unique_ptr<Place> place = runner().place();
    const AttentionArgs args = place->add(host);
    schedule(plan, args.lengths, space.space());
    halftone::run(plan, args, space.space());
    place->finish();
    place->read(args.out, outputs.out);
    place->read(args.lse, outputs.lse);
    expect_same_bits(run(p), outputs, row.name);
  }
}

/// NaN in every other request's K and V, which lie before and behind in the same tensors.
TEST_P(Prefill, KeysOfOtherRequestsNeverMatter) {
  std::vector<Request> requests;
  for (const Request& r : edge_requests()) {
    requests.push_back({0, 20});  // a neighbour without queries
    requests.push_back(r);
  }
  requests.push_back({0, 200});
  for (const bool causal : {true, false}) {
    for (AttentionCase row : prefill_cases(requests)) {
      if (!row.plain) continue;
      row.mask.causal = causal;
      const Problem p = make_problem(row);
      if (!serves(p)) continue;
      const Outputs clean = run(p);
      ASSERT_EQ(judge(p, clean), "") << row.name;
      const std::vector<std::int64_t> first = first_tokens(row);
      for (const std::size_t poisoned : {0U, 2U}) {  // neighbours; then every other request's own keys, too
        for (std::size_t i = 0; i < requests.size(); ++i) {
          if (poisoned == 0 ? requests[i].q_len != 0 : i % 4 != 1) continue;
          poison_rows(p.k, first[i], first[i + 1]);
          poison_rows(p.v, first[i], first[i + 1]);
        }
        const Outputs outputs = run(p);
        for (std::size_t i = 0; i < requests.size(); ++i) {
          if (poisoned == 2 && i % 4 == 1) continue;
          ASSERT_EQ(request_bytes(p, clean.out, i), request_bytes(p, outputs.out, i))
              << row.name << ", request " << i;
          ASSERT_EQ(request_bytes(p, clean.lse, i), request_bytes(p, outputs.lse, i)) << row.name;
        }
      }
    }
  }
}

/// Bytes of pages that hold no token.
TEST_P(Prefill, DeadBytesOfPagesNeverMatter) {
  for (AttentionCase row : prefill_cases(edge_requests())) {
    if (row.plain) continue;
    for (const int page_size : {16, 128}) {
      row.page_size = page_size;
      Problem p = make_problem(row);
      p.cache = refilled(p, {0x00});
      const Outputs clean = run(p);
      ASSERT_EQ(judge(p, clean), "") << row.name;
      for (const std::uint8_t byte : {0xFF, 0x7C, 0x7F}) {
        p.cache = refilled(p, {byte});
        expect_same_bits(clean, run(p), row.name);
      }
    }
  }
}

/// A request alone, among some and among all, under its own bounds and the batch's.
TEST_P(Prefill, BatchInvariantBitsDoNotDependOnNeighbours) {
  for (AttentionCase row :
       prefill_cases({{1, 700}, {300, 900}, {2, 900}, {0, 50}, {193, 193}, {1, 3000}, {1, 0}})) {
    if (!row.plain) continue;
    row.q_heads = 8, row.kv_heads = 2;
    row.policy = SplitPolicy::kBatchInvariant;
    const Problem p = make_problem(row);
    if (!serves(p)) continue;
    const Outputs expected = run(p);
    const auto expect_same = [&](const std::vector<std::size_t>& chosen, bool own_bounds) {
      const Problem s = select(p, chosen, own_bounds);
      const Outputs actual = run(s);
      for (std::size_t n = 0; n < chosen.size(); ++n) {
        ASSERT_EQ(request_bytes(p, expected.out, chosen[n]), request_bytes(s, actual.out, n))
            << row.name << ", request " << chosen[n] << " of " << chosen.size();
        ASSERT_EQ(request_bytes(p, expected.lse, chosen[n]), request_bytes(s, actual.lse, n)) << row.name;
      }
    };
    for (const bool own_bounds : {true, false}) {
      for (std::size_t i = 0; i < row.requests.size(); ++i) {
        if (row.requests[i].q_len > 0) expect_same({i}, own_bounds);
      }
      expect_same({5, 0, 2}, own_bounds);
      expect_same({1, 4}, own_bounds);
    }
  }
}

}  // namespace
}  // namespace halftone::testing
