// The truth about a problem, and what a run may differ from it by.
#include <algorithm>
#include <cmath>
#include <utility>

#include "format/hadamard.h"
#include "reference/arrays.h"
#include "testing/cases.h"
#include "testing/lists.h"

namespace halftone::testing {

using reference::judge_lse;
using reference::judge_output;

namespace {

reference::OracleParams oracle_params(const Problem& p, const Request& request) {
  reference::OracleParams o;
  o.q_len = request.q_len;
  o.kv_len = request.kv_len;
  o.q_heads = p.row.q_heads;
  o.kv_heads = p.row.kv_heads;
  o.head_dim = p.row.head_dim;
  o.v_head_dim = p.row.v_head_dim;
  o.causal = p.row.mask.causal;
  o.window_left = p.row.mask.window_left;
  o.window_right = p.row.mask.window_right;
  o.scale = p.row.scale;
  o.softcap = p.row.softcap;
  if (p.row.alibi) o.alibi_slopes = p.alibi_slopes.as<float>();
  if (p.row.sinks) o.sinks = p.sinks.as<float>();
  return o;
}

/// Whether a K is used as it is stored by arithmetic with codes of this type: one scale for all dims.
bool has_rows(const KvCacheSpec& spec, DType codes) {
  const KvFormat& k = spec.k_format;
  const bool one_scale = k.granularity != Granularity::kGroup || k.group_size == spec.head_dim;
  return k.dtype == codes && !k.asymmetric && one_scale;
}

/// What the oracle computes with: the values themselves, or what an arithmetic makes of them.
struct Operands {
  std::vector<double> q, k, v;
};

void add_widened(const std::vector<float>& x, std::vector<double>& to) {
  const std::size_t count = to.size();
  to.resize(count + x.size());
  reference::loops::convert(x.data(), x.size(), to.data() + count);
}

std::vector<double> widened(const std::vector<float>& x) {
  std::vector<double> result;
  add_widened(x, result);
  return result;
}

std::vector<float> narrowed(const std::vector<double>& x) {
  std::vector<float> result(x.size());
  reference::loops::convert(x.data(), x.size(), result.data());
  return result;
}

Operands exact_operands(const Problem& p) {
  if (p.row.plain) return {widened(p.q.to_floats()), widened(p.k.to_floats()), widened(p.v.to_floats())};
  Operands result{widened(p.q.to_floats()), {}, {}};
  for (const Cache* cache : {p.cache.get(), p.extra.get()}) {
    if (cache == nullptr) continue;
    const reference::Dequantised d = dequantised(p.row.step.appends ? stepped_cache(p) : cache->clone());
    add_widened(d.k.to_floats(), result.k);
    add_widened(d.v.to_floats(), result.v);
  }
  return result;
}

/// Blocks of V by the rule of kFullInt8 or kFp8, request by request.
void make_blocks(const Problem& p, std::vector<double>& v) {
  const auto rule =
      p.problem.arithmetic == Arithmetic::kFp8 ? reference::e4m3_blocks : reference::int8_blocks;
  const std::int64_t channels = std::int64_t{p.row.kv_heads} * p.problem.v_dim();
  const std::vector<float> given = narrowed(v);
  std::size_t at = 0;
  for (const Request& r : p.row.requests) {
    const int left = p.row.mask.window_left;
    const std::int64_t first = left < 0 ? 0 : std::max(0, r.kv_len - r.q_len - left);
    const auto count = static_cast<std::size_t>(r.kv_len * channels);
    const std::vector<double> made = rule(std::span(given).subspan(at, count), channels, first);
    std::copy(made.begin(), made.end(), v.begin() + static_cast<std::ptrdiff_t>(at));
    at += count;
  }
}

/// V of tensors in kFp8 on a GPU: a power of two for all values of a request and head.
void make_units(const Problem& p, std::vector<double>& v) {
  const std::int64_t dim = p.problem.v_dim(), width = p.row.kv_heads * dim;
  std::int64_t first = 0;
  for (const Request& r : p.row.requests) {
    for (std::int64_t head = 0; head < p.row.kv_heads && r.kv_len > 0; ++head) {
      const auto at = [&](std::int64_t i) -> double& {
        return v[static_cast<std::size_t>((first + i / dim) * width + head * dim + i % dim)];
      };
      std::vector<float> given(static_cast<std::size_t>(r.kv_len * dim));
      for (std::size_t i = 0; i < given.size(); ++i)
        given[i] = static_cast<float>(at(static_cast<std::int64_t>(i)));
      const std::vector<double> made = reference::e4m3_rows(given, static_cast<int>(given.size()));
      for (std::size_t i = 0; i < made.size(); ++i) at(static_cast<std::int64_t>(i)) = made[i];
    }
    first += r.kv_len;
  }
}

/// Divides (or multiplies) V by the static scales that kFp8 leaves to the end.
void scale_values(const Problem& p, std::vector<double>& v, bool back) {
  if (p.cache == nullptr || !p.cache->spec.v_format.static_scale() || p.cache->spec.v_format.asymmetric)
    return;
  const std::int64_t dim = p.problem.v_dim(), heads = p.row.kv_heads;
  const bool per_head = p.cache->spec.v_format.granularity == Granularity::kHead;
  for (std::size_t i = 0; i < v.size(); ++i) {
    const std::int64_t head = static_cast<std::int64_t>(i) / dim % heads;
    const double scale = p.cache->v_scale.get(per_head ? head : 0);
    v[i] = back ? v[i] * scale : v[i] / scale;
  }
}

/// V as the arithmetic takes it, on the CPU in the basis in which it is stored, on a GPU in the caller's.
void make_values(const Problem& p, bool on_cpu, std::vector<double>& v) {
  const bool rotated = p.row.rotate_v;
  // What has a static scale stays the code that it is, wherever.
  on_cpu |= p.problem.arithmetic == Arithmetic::kFp8 && p.cache != nullptr &&
            p.cache->spec.v_format.dtype == DType::kFloat8E4M3 && p.cache->spec.v_format.static_scale();
  if (p.problem.arithmetic == Arithmetic::kHalfInt8) {
    const DType type = p.row.q_dtype == DType::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
    for (double& x : v) x = on_cpu ? reference::round_to(type, static_cast<float>(x)) : x;
    if (rotated) reference::rotate_rows(v, p.problem.v_dim());
    return;
  }
  const bool fp8 = p.problem.arithmetic == Arithmetic::kFp8;
  if (fp8 && !on_cpu && p.cache == nullptr) return make_units(p, v);
  if (fp8) scale_values(p, v, false);
  if (rotated && !on_cpu) reference::rotate_rows(v, p.problem.v_dim());
  make_blocks(p, v);
  if (rotated && on_cpu) reference::rotate_rows(v, p.problem.v_dim());
  if (fp8) scale_values(p, v, true);
}

/// Arithmetic below 16 bits: Q and K in the basis of the pages as codes times scales, dots are those of that
/// basis; V comes back from it.
Operands coded_operands(const Problem& p, bool on_cpu) {
  const bool paged = p.cache != nullptr, fp8 = p.problem.arithmetic == Arithmetic::kFp8;
  const auto rows = fp8 ? reference::e4m3_rows : reference::int8_rows;
  reference::ExactValues values =
      paged ? stored_values(p.row.step.appends ? stepped_cache(p) : p.cache->clone())
            : reference::ExactValues{widened(p.k.to_floats()), widened(p.v.to_floats())};
  std::vector<float> q = p.q.to_floats();
  for (std::size_t row = 0; p.row.rotate_k && row < q.size();
       row += static_cast<std::size_t>(p.row.head_dim)) {
    hadamard::rotate(&q[row], p.row.head_dim);
  }
  if (!paged || !has_rows(p.cache->spec, fp8 ? DType::kFloat8E4M3 : DType::kInt8)) {
    values.k = rows(narrowed(values.k), p.row.head_dim);
  }
  make_values(p, on_cpu, values.v);
  return {rows(q, p.row.head_dim), std::move(values.k), std::move(values.v)};
}

}  // namespace

Reference make_reference(const Problem& p, bool on_cpu) {
  Reference reference;
  const Operands exact =
      p.problem.arithmetic == Arithmetic::k16Bit ? exact_operands(p) : coded_operands(p, on_cpu);
  const std::vector<float> q = narrowed(exact.q), k = narrowed(exact.k), v = narrowed(exact.v);
  const bool codes = p.problem.arithmetic == Arithmetic::kFullInt8;
  const bool rounded = p.problem.arithmetic == Arithmetic::kFp8 && !on_cpu;
  const double largest_v = reference::loops::largest_magnitude(exact.v.data(), exact.v.size());
  if (codes && !on_cpu) reference.out_slack = largest_v / 255;
  if (p.problem.arithmetic == Arithmetic::kHalfInt8 && on_cpu && p.row.q_dtype != DType::kFloat16) {
    reference.out_slack = std::ldexp(largest_v, -9);
  }
  const std::vector<std::vector<std::int64_t>> lists = listed_tokens(p);
  std::int64_t q_token = 0, kv_token = 0;
  for (const Request& r : p.row.requests) {
    reference::OracleParams o = oracle_params(p, r);
    if (p.problem.arithmetic == Arithmetic::kFullInt8) o.weight_tokens = on_cpu ? 64 : 128;
    if (!lists.empty()) {
      o.lists =
          std::span(lists).subspan(static_cast<std::size_t>(q_token), static_cast<std::size_t>(r.q_len));
      kv_token = 0;  // lists count from the first token of all
    }
    const std::int64_t at_q = q_token * o.q_heads * o.head_dim;
    const std::int64_t at_k = kv_token * o.kv_heads * o.head_dim, at_v = kv_token * o.kv_heads * o.v_dim();
    const reference::OracleResult truth =
        attention_oracle(o, exact.q.data() + at_q, exact.k.data() + at_k, exact.v.data() + at_v);
    const reference::PlainResult plain =
        attention_plain_fp32(o, q.data() + at_q, k.data() + at_k, v.data() + at_v, p.row.out_dtype);
    reference.out.insert(reference.out.end(), truth.out.begin(), truth.out.end());
    reference.lse.insert(reference.lse.end(), truth.lse.begin(), truth.lse.end());
    for (const double unsure : truth.unsure) {
      if (codes && on_cpu) reference.row_slack.push_back(unsure * largest_v);
      if (rounded) reference.row_slack.push_back((0x1.4p-4 * unsure + 0x1p-15 * r.kv_len) * largest_v);
    }
    reference.plain_out.insert(reference.plain_out.end(), plain.out.begin(), plain.out.end());
    reference.plain_lse.insert(reference.plain_lse.end(), plain.lse.begin(), plain.lse.end());
    q_token += r.q_len;
    kv_token += r.kv_len;
  }
  return reference;
}

std::string judge(const Problem& p, const Reference& reference, const Outputs& outputs, double lse_slack,
                  double out_slack) {
  const std::vector<float> out = outputs.out.to_floats();
  const std::int64_t rows = p.total_q() * p.row.q_heads;
  const reference::Verdict verdict =
      judge_output(rows, p.problem.v_dim(), reference.out.data(), reference.plain_out.data(), out.data(),
                   p.row.out_dtype, out_slack + reference.out_slack, reference.row_slack);
  if (!verdict.ok) return "out: " + verdict.sentence;
  if (!p.row.lse) return {};
  const std::vector<float> lse = outputs.lse.to_floats();
  return judge_lse(rows, reference.lse.data(), reference.plain_lse.data(), lse.data(), lse_slack).sentence;
}

}  // namespace halftone::testing
