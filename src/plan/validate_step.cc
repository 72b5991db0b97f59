#include "plan/validate_step.h"

#include <variant>

#include "plan/check_tensor.h"
#include "plan/fail.h"
#include "plan/validate_cache.h"

namespace halftone::planning {
namespace {

const std::int32_t* entries(const TensorView& t) { return static_cast<const std::int32_t*>(t.data); }

std::int32_t queries_of(const AttentionProblem& p, const SequenceLengths& lengths, std::int32_t request) {
  if (!given(lengths.cu_q)) return p.max_q_len;
  return entries(lengths.cu_q)[request + 1] - entries(lengths.cu_q)[request];
}

}  // namespace

void check_grown(const AttentionProblem& p, const SequenceLengths& lengths) {
  if (!p.appends) return;
  for (std::int32_t r = 0; r < p.batch; ++r) {
    const std::int32_t length = entries(lengths.kv_lengths)[r], added = queries_of(p, lengths, r);
    if (std::int64_t{length} + added <= p.max_kv_len) continue;
    fail(ErrorCode::kOutOfRange,
         "kv_lengths[{}] is {} before {} new tokens, but the plan's max_kv_len is {} with them: plan with a "
         "larger max_kv_len.",
         r, length, added, p.max_kv_len);
  }
}

TotalKeys total_keys(const AttentionProblem& p, const SequenceLengths& lengths) {
  TotalKeys total;
  for (std::int32_t r = 0; r < p.batch; ++r) {
    const std::int32_t queries = queries_of(p, lengths, r);
    const std::int64_t keys = given(lengths.cu_kv)
                                  ? entries(lengths.cu_kv)[r + 1] - entries(lengths.cu_kv)[r]
                                  : std::int64_t{entries(lengths.kv_lengths)[r]} + (p.appends ? queries : 0);
    total.all += keys;
    if (queries > 1) total.prompts += keys;
  }
  return total;
}

void check_new_tokens(const AttentionProblem& p, const AttentionArgs& args, std::int64_t total_q) {
  const NewTokens& tokens = args.append;
  if (!p.appends) {
    const auto absent = [](const TensorView& t, std::string_view name) {
      if (!given(t)) return;
      invalid(
          "{} of append is present, but problem.appends is not set: plan with appends = {}, or call "
          "append().",
          name, true);
    };
    absent(tokens.k, "k");
    absent(tokens.v, "v");
    absent(tokens.slot_mapping, "slot_mapping");
    if (!tokens.advance) return;
    invalid("advance of append is {}, but problem.appends is not set: call append() with it.", true);
  }
  if (!given(tokens.k)) {
    invalid("k of append is absent, but problem.appends is set: pass the {}, or plan without it.",
            "new tokens");
  }
  const auto& cache = std::get<PagedKv>(args.kv);
  check_appended(cache.spec, p.device, {tokens.k, tokens.v, tokens.rope});
  if (tokens.k.shape[0] != total_q) {
    invalid("k.shape[0] is {}, but q has {} rows, and each query brings one token: pass [{}, ...].",
            tokens.k.shape[0], total_q, total_q);
  }
  if (given(tokens.slot_mapping)) {
    check_tensor(tokens.slot_mapping, {"slot_mapping", {DType::kInt64}, {total_q}, p.device});
  }
  if (tokens.advance && p.batch > 0) {
    check_tensor(cache.lengths, {"cache.lengths", {DType::kInt32}, {p.batch}, p.device});
  }
  if (p.device.type == DeviceType::kCuda) {
    check_tensor(args.status, {"status", {DType::kInt32}, {1}, p.device});
  }

  const TensorView none;
  const NamedTensor outputs[] = {{cache.pages, "cache.pages"},
                                 {tokens.advance ? cache.lengths : none, "cache.lengths"}};
  const NamedTensor inputs[] = {{args.q, "q"},
                                {tokens.k, "k"},
                                {tokens.v, "v"},
                                {tokens.slot_mapping, "slot_mapping"},
                                {tokens.rope.cos, "rope.cos"},
                                {tokens.rope.sin, "rope.sin"},
                                {tokens.rope.positions, "rope.positions"},
                                {args.lengths.cu_q, "cu_q"},
                                {cache.block_table, "cache.block_table"},
                                {tokens.advance ? none : cache.lengths, "cache.lengths"},
                                {args.alibi_slopes, "alibi_slopes"},
                                {args.sinks, "sinks"}};
  check_disjoint(outputs, inputs);
  check_apart(outputs, cache);
}

}  // namespace halftone::planning
