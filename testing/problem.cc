// From a row of the case table to tensors and a run.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <variant>

#include "testing/cases.h"
#include "testing/lists.h"
#include "testing/step.h"

namespace halftone::testing {
namespace {

Tensor random_tensor(Random& random, Data data, DType dtype, std::int64_t tokens, int heads, int dim) {
  std::vector<float> values(static_cast<std::size_t>(tokens * heads * dim));
  fill(random, data, values, heads, dim);
  return Tensor::of(dtype, {tokens, heads, dim}, values);
}

/// What V and Q look like when K is `data`.
Data companion(Data data) { return data == Data::kConstant || data == Data::kZero ? data : Data::kNormal; }

/// V of a latent's K.
Tensor first_dims(const Tensor& k, int count) {
  const std::int64_t rows = k.shape()[0] * k.shape()[1], dim = k.shape()[2];
  std::vector<float> values;
  const std::vector<float> all = k.to_floats();
  for (std::int64_t row = 0; row < rows; ++row) {
    values.insert(values.end(), all.begin() + row * dim, all.begin() + row * dim + count);
  }
  return Tensor::of(k.dtype(), {k.shape()[0], k.shape()[1], count}, values);
}

/// Appends in two steps, so that the second one starts inside pages and tiles.
void fill_by_append(Problem& p, Random& random) {
  const int kv_heads = p.row.kv_heads;
  std::vector<int> counts[2];
  for (const Request& r : p.row.requests) {
    counts[0].push_back(r.kv_len > 0 ? static_cast<int>(random.integer(0, r.kv_len)) : 0);
    counts[1].push_back(r.kv_len - counts[0].back());
  }
  p.cache->calibrate(p.k, p.v);
  if (p.k.numel() == 0) return;
  const std::int64_t k_row = std::int64_t{kv_heads} * p.row.head_dim;
  const std::int64_t v_row = std::int64_t{kv_heads} * p.cache->spec.v_dim();
  const std::vector<float> all_k = p.k.to_floats(), all_v = p.v.to_floats();
  for (int step = 0; step < 2; ++step) {
    std::vector<float> k, v;
    std::int64_t token = 0;
    for (std::size_t i = 0; i < p.row.requests.size(); ++i) {
      const std::int64_t first = token + (step == 0 ? 0 : counts[0][i]), end = first + counts[step][i];
      k.insert(k.end(), all_k.begin() + first * k_row, all_k.begin() + end * k_row);
      v.insert(v.end(), all_v.begin() + first * v_row, all_v.begin() + end * v_row);
      token += p.row.requests[i].kv_len;
    }
    const std::int64_t tokens = static_cast<std::int64_t>(k.size()) / k_row;
    if (tokens == 0) continue;
    p.cache->append(counts[step], Tensor::of(DType::kFloat32, {tokens, kv_heads, p.row.head_dim}, k),
                    Tensor::of(DType::kFloat32, {tokens, kv_heads, p.cache->spec.v_dim()}, v));
  }
}

/// Appends to a small cache and copies its pages.
void fill_by_tiling(Problem& p, Random& random) {
  constexpr int kSourcePages = 8;
  const KvCacheSpec& spec = p.cache->spec;
  const int tokens = kSourcePages * spec.page_size;
  const Tensor k = random_tensor(random, p.row.data, DType::kFloat32, tokens, spec.kv_heads, spec.head_dim);
  const Tensor v =
      random_tensor(random, companion(p.row.data), DType::kFloat32, tokens, spec.kv_heads, spec.v_dim());
  p.cache->calibrate(k, v);
  Cache source(spec, std::vector<int>{tokens}, random, {.spare_pages = 0});
  source.k_scale = p.cache->k_scale.clone();
  source.k_min = p.cache->k_min.clone();
  source.v_scale = p.cache->v_scale.clone();
  source.v_min = p.cache->v_min.clone();
  source.k_offset = p.cache->k_offset.clone();
  source.k_channel_scale = p.cache->k_channel_scale.clone();
  source.append(std::vector<int>{tokens}, k, v);
  const std::size_t page_bytes = source.pages.bytes().size() / kSourcePages;
  const auto target = p.cache->pages.bytes();
  for (std::size_t page = 0; page * page_bytes < target.size(); ++page) {
    std::memcpy(target.data() + page * page_bytes,
                source.pages.bytes().data() + page % kSourcePages * page_bytes, page_bytes);
  }
  for (std::size_t i = 0; i < p.row.requests.size(); ++i) {
    p.cache->lengths.as<std::int32_t>()[i] = p.row.requests[i].kv_len;
  }
}

void require(bool condition, const char* what) {
  if (!condition) throw std::logic_error(std::string("guard region written: ") + what);
}

}  // namespace

KvCacheSpec case_spec(const AttentionCase& row) {
  return {.k_format = parse_format(row.k_format),
          .v_format = parse_format(row.v_format.empty() ? row.k_format : row.v_format),
          .kv_heads = row.kv_heads,
          .head_dim = row.head_dim,
          .v_head_dim = row.v_head_dim,
          .page_size = row.page_size,
          .rotate_k = row.rotate_k,
          .rotate_v = row.rotate_v,
          .rope_dim = row.rope_dim,
          .offset_k = row.offset_k,
          .scale_k = row.scale_k};
}

AttentionProblem attention_problem(const AttentionCase& row) {
  AttentionProblem a;
  a.batch = static_cast<int>(row.requests.size());
  a.q_heads = row.q_heads;
  if (row.plain) {
    a.kv = KvTensors{*row.plain, row.kv_heads, row.head_dim, row.v_head_dim};
  } else {
    a.kv = case_spec(row);
  }
  a.max_q_len = a.max_kv_len = 0;
  bool equal = true;
  for (const Request& r : row.requests) {
    a.max_q_len = std::max(a.max_q_len, r.q_len);
    a.max_kv_len = std::max(a.max_kv_len, r.kv_len);
    equal = equal && r.q_len == row.requests.front().q_len;
  }
  a.max_q_len = std::max(1, a.max_q_len) + (equal && !row.cu_q ? 0 : row.slack);
  a.max_kv_len = std::max(1, a.max_kv_len) + row.slack + row.key_slack;
  if (row.lists.top_k != 0) a.listed.top_k = row.lists.top_k;
  if (row.lists.extra_top_k != 0) {
    a.listed.extra_top_k = row.lists.extra_top_k;
    a.listed.extra = extra_spec(row);
  }
  a.appends = row.step.appends;
  a.q_dtype = row.q_dtype;
  a.out_dtype = row.out_dtype;
  a.mask = row.mask;
  a.scale = row.scale;
  a.softcap = row.softcap;
  a.alibi = row.alibi;
  a.sinks = row.sinks;
  a.lse = row.lse;
  a.policy = row.policy;
  a.arithmetic = parse_arithmetic(row.arithmetic);
  a.workers = row.workers;
  return a;
}

SequenceLengths Problem::lengths() const {
  SequenceLengths l;
  l.cu_q = cu_q.view();
  l.counts = counts.view();
  l.extra_counts = extra_counts.view();
  if (row.lists.top_k != 0) return l;
  if (row.plain) {
    l.cu_kv = cu_kv.view();
  } else {
    l.kv_lengths = cache->lengths.view();
  }
  return l;
}

bool Problem::guards_intact() const {
  const Tensor* const all[] = {&q,     &k,         &v,      &cu_q,          &cu_kv,        &alibi_slopes,
                               &sinks, &indices,   &counts, &extra_indices, &extra_counts, &new_k,
                               &new_v, &new_slots, &cos,    &sin,           &positions};
  return (!cache || cache->guards_intact()) && (!extra || extra->guards_intact()) &&
         std::all_of(std::begin(all), std::end(all), [](const Tensor* t) { return t->guards_intact(); });
}

Problem make_problem(const AttentionCase& row, Fill fill) {
  Problem p;
  p.row = row;
  p.problem = attention_problem(row);
  Random random(row.seed);
  std::vector<std::int32_t> cu_q = {0}, cu_kv = {0};
  std::vector<int> capacities;
  bool equal = true;
  for (const Request& r : row.requests) {
    cu_q.push_back(cu_q.back() + r.q_len);
    cu_kv.push_back(cu_kv.back() + (fill == Fill::kAppend ? r.kv_len : 0));
    capacities.push_back(r.kv_len);
    equal = equal && r.q_len == p.problem.max_q_len;
  }
  const auto boundaries = static_cast<std::int64_t>(cu_q.size());
  if (!equal || row.cu_q) p.cu_q = Tensor::of({boundaries}, cu_q);
  p.q = random_tensor(random, companion(row.data), row.q_dtype, cu_q.back(), row.q_heads, row.head_dim);
  const DType kv_dtype = row.plain.value_or(DType::kFloat32);
  if (fill == Fill::kAppend) {
    p.k = random_tensor(random, row.data, kv_dtype, cu_kv.back(), row.kv_heads, row.head_dim);
    p.v = row.rope_dim != 0 ? first_dims(p.k, p.problem.v_dim())
                            : random_tensor(random, companion(row.data), kv_dtype, cu_kv.back(), row.kv_heads,
                                            p.problem.v_dim());
  }
  if (const auto* spec = std::get_if<KvCacheSpec>(&p.problem.kv)) {
    p.cache = std::make_unique<Cache>(*spec, capacities, random,
                                      reference::CacheOptions{.table_mode = row.table_mode});
    if (fill == Fill::kAppend) {
      fill_by_append(p, random);
    } else {
      fill_by_tiling(p, random);
    }
  } else {
    if (fill == Fill::kTiled) throw std::invalid_argument("Fill::kTiled needs a paged case");
    p.cu_kv = Tensor::of({boundaries}, cu_kv);
  }
  if (row.alibi) {
    p.alibi_slopes = Tensor(DType::kFloat32, {row.q_heads});
    for (int h = 0; h < row.q_heads; ++h)
      p.alibi_slopes.set(h, std::exp2(-8.0F * static_cast<float>(h + 1) / static_cast<float>(row.q_heads)));
  }
  if (row.sinks) {
    p.sinks = Tensor(DType::kFloat32, {row.q_heads});
    for (int h = 0; h < row.q_heads; ++h) p.sinks.set(h, 2 * random.normal());
  }
  if (row.lists.top_k != 0) fill_lists(p, random);
  fill_step(p, random);
  return p;
}

Outputs make_outputs(const Problem& p) {
  Outputs o;
  o.out = Tensor(p.row.out_dtype, {p.total_q(), p.row.q_heads, p.problem.v_dim()});
  if (p.row.lse) o.lse = Tensor(DType::kFloat32, {p.total_q(), p.row.q_heads});
  o.status = Tensor(DType::kInt32, {1});
  o.status.fill_bytes(0);
  return o;
}

AttentionArgs arguments(const Problem& p, const Outputs& o) {
  AttentionArgs a;
  a.q = p.q.view();
  a.lengths = p.lengths();
  if (p.row.plain) {
    a.kv = KvTensorViews{p.k.view(), p.v.view()};
  } else {
    a.kv = p.cache->view();
  }
  a.append = new_tokens(p);
  if (p.row.lists.top_k != 0) a.indices = p.indices.view();
  if (p.extra) {
    a.extra_indices = p.extra_indices.view();
    a.extra_kv = p.extra->view();
  }
  a.alibi_slopes = p.alibi_slopes.view();
  a.sinks = p.sinks.view();
  a.out = o.out.view();
  a.lse = o.lse.view();
  a.status = o.status.view();
  return a;
}

Outputs run_problem(const Problem& p, const std::function<void(AttentionProblem&)>& change) {
  AttentionProblem problem = p.problem;
  if (change) change(problem);
  const Plan plan = halftone::plan(problem);
  const Tensor workspace(DType::kUInt8, {static_cast<std::int64_t>(plan.workspace_bytes())});
  Outputs outputs = make_outputs(p);
  const AttentionArgs args = arguments(p, outputs);
  schedule(plan, args.lengths, workspace.view());
  run(plan, args, workspace.view());
  require(workspace.guards_intact(), "workspace");
  require(outputs.out.guards_intact(), "out");
  require(outputs.lse.guards_intact(), "lse");
  require(outputs.status.guards_intact(), "status");
  require(p.guards_intact(), "an input");
  return outputs;
}

}  // namespace halftone::testing
