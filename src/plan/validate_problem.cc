#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <variant>

#include "format/head_dim.h"
#include "plan/backend.h"
#include "plan/fail.h"
#include "plan/listed.h"
#include "plan/validate.h"

namespace halftone::planning {
namespace {

void check_range(std::int64_t value, std::int64_t low, std::int64_t high, std::string_view name) {
  if (value >= low && value <= high) return;
  invalid("{} is {}, but must be {} to {}: use {}.", name, value, low, high, value < low ? low : high);
}

bool is_float(DType t) { return t == DType::kFloat32 || t == DType::kFloat16 || t == DType::kBFloat16; }

void check_float(DType t, std::string_view name) {
  if (is_float(t)) return;
  invalid("{} is {}, but must be f32, f16 or bf16: use bf16.", name, dtype_name(t));
}

void check_device(Device device) {
  if (device.type == DeviceType::kCpu) {
    if (device.index != 0) invalid("device.index is {}, but must be 0 on the CPU: use 0.", device.index);
    return;
  }
  if (device.type != DeviceType::kCuda) {
    invalid("device.type is {}, but must be kCpu or kCuda: use kCpu.", static_cast<int>(device.type));
  }
  if (device.index < 0) invalid("device.index is {}, but must be 0 or more: use 0.", device.index);
  if (find_backend(device.type) == nullptr) {
    fail(ErrorCode::kUnsupported,
         "device is {}, but this build of halftone has no CUDA attention: configure it with "
         "-DHALFTONE_CUDA=ON, or "
         "use the CPU.",
         device_name(device));
  }
}

void check_heads(const AttentionProblem& p) {
  const int kv_heads = p.kv_heads();
  check_range(kv_heads, 1, kMaxHeads, "kv.kv_heads");
  check_range(p.q_heads, 1, kMaxHeads, "q_heads");
  if (p.q_heads % kv_heads == 0) return;
  const int below = p.q_heads / kv_heads * kv_heads;
  if (below == 0) {
    invalid("q_heads is {}, but must be a multiple of kv_heads {}: use {}.", p.q_heads, kv_heads, kv_heads);
  }
  invalid("q_heads is {}, but must be a multiple of kv_heads {}: use {} or {}.", p.q_heads, kv_heads, below,
          below + kv_heads);
}

void check_tensors(const KvTensors& tensors) {
  check_head_dim(tensors.head_dim, "kv.head_dim");
  if (tensors.v_head_dim != 0) check_head_dim(tensors.v_head_dim, "kv.v_head_dim");
  check_float(tensors.dtype, "kv.dtype");
}

void check_bounds(const AttentionProblem& p) {
  check_range(p.batch, 0, kMaxBatch, "batch");
  check_range(p.max_q_len, 0, kMaxTokens, "max_q_len");
  const int longest = std::max(p.max_q_len, 1);
  if (p.min_q_len < 1 || p.min_q_len > longest) {
    invalid("min_q_len is {}, but must be 1 to {} = {}: use {}.", p.min_q_len,
            p.max_q_len < 1 ? "max(max_q_len, 1)" : "max_q_len", longest, p.min_q_len < 1 ? 1 : longest);
  }
  check_range(p.max_kv_len, 0, kMaxTokens, "max_kv_len");
  const std::int64_t most = std::int64_t{p.batch} * p.max_kv_len;
  if (p.max_total_kv < 0 || p.max_total_kv > most) {
    invalid("max_total_kv is {}, but must be 1 to batch * max_kv_len = {}, or 0 for that: use 0.",
            p.max_total_kv, most);
  }
  const std::int64_t of_all = most_keys(p);
  if (p.max_prompt_kv < 0 || p.max_prompt_kv > of_all) {
    invalid("max_prompt_kv is {}, but must be 1 to {} = {}, or 0 for that: use 0.", p.max_prompt_kv,
            p.max_total_kv != 0 ? "max_total_kv" : "batch * max_kv_len", of_all);
  }
  const std::int64_t group = p.q_heads / p.kv_heads();
  if (group * p.max_q_len > kMaxTokens) {
    invalid("max_q_len is {}, but with {} query heads per KV head must be at most {}: use that.", p.max_q_len,
            group, kMaxTokens / group);
  }
}

/// Treated channels of K: what softmax cancels, or Q takes up, before anything else happens to a logit.
void check_channels(const AttentionProblem& p, const KvCacheSpec& spec) {
  if (!spec.has_channels()) return;
  const std::string_view name = spec.offset_k ? "kv.offset_k" : "kv.scale_k";
  if (p.softcap > 0 && spec.offset_k) {
    fail(ErrorCode::kUnsupported,
         "softcap is {}, but kv.offset_k leaves logits without a constant that softcap needs: use scale_k or "
         "rotate_k alone.",
         p.softcap);
  }
  if (p.arithmetic != Arithmetic::k16Bit) {
    fail(ErrorCode::kUnsupported, "arithmetic is {}, but {} is true: use 16-bit, or a cache without it.",
         arithmetic_name(p.arithmetic), name);
  }
  if (p.listed.extra_top_k != 0) {
    fail(ErrorCode::kUnsupported,
         "listed.extra_top_k is {}, but {} is true, and both caches would have to share it: use false.",
         p.listed.extra_top_k, name);
  }
}

/// The second list's cache takes part in the same products as the first one's.
void check_extra(const KvCacheSpec& spec, const KvCacheSpec& extra) {
  (void)page_layout(extra);
  const struct {
    std::string_view name;
    int extra, first;
  } same[] = {{"kv_heads", extra.kv_heads, spec.kv_heads}, {"head_dim", extra.head_dim, spec.head_dim},
              {"v_dim()", extra.v_dim(), spec.v_dim()},    {"rotate_k", extra.rotate_k, spec.rotate_k},
              {"rotate_v", extra.rotate_v, spec.rotate_v}, {"offset_k", extra.offset_k, spec.offset_k},
              {"scale_k", extra.scale_k, spec.scale_k}};
  for (const auto& field : same) {
    if (field.extra == field.first) continue;
    invalid("listed.extra.{} is {}, but a query attends to both caches, and kv.{} is {}: use {}.", field.name,
            field.extra, field.name, field.first, field.first);
  }
}

void check_listed(const AttentionProblem& p) {
  const ListedKeys& listed = p.listed;
  check_range(listed.top_k, 0, kMaxListed, "listed.top_k");
  check_range(listed.extra_top_k, 0, kMaxListed, "listed.extra_top_k");
  if (listed.extra_top_k == 0 && !(listed.extra == KvCacheSpec{})) {
    invalid("listed.extra is given, but listed.extra_top_k is {}: say how long the second list is.", 0);
  }
  if (!p.is_listed()) {
    if (listed.extra_top_k == 0) return;
    invalid("listed.extra_top_k is {}, but listed.top_k is 0: let the first list have the keys.",
            listed.extra_top_k);
  }
  const auto* const spec = std::get_if<KvCacheSpec>(&p.kv);
  if (spec == nullptr) {
    fail(ErrorCode::kUnsupported,
         "listed.top_k is {}, but lists name slots of a cache, and kv is plain tensors: append them to a "
         "cache.",
         listed.top_k);
  }
  const std::pair<bool, std::string_view> orders[] = {{p.mask.causal, "mask.causal"},
                                                      {p.mask.window_left >= 0, "mask.window_left"},
                                                      {p.mask.window_right >= 0, "mask.window_right"},
                                                      {p.alibi, "alibi"}};
  for (const auto& [set, name] : orders) {
    if (!set) continue;
    invalid(
        "{} is set, but listed keys have no positions (listed.top_k is {}): list the keys that a query "
        "may see.",
        name, listed.top_k);
  }
  if (const std::int64_t queries = scheduled_bounds(p).batch; queries > kMaxTokens) {
    invalid(
        "batch {} with max_q_len {} gives {} queries with lists, but there may be {}: use smaller bounds.",
        p.batch, p.max_q_len, queries, kMaxTokens);
  }
  if (listed.extra_top_k != 0) check_extra(*spec, listed.extra);
}

/// New tokens have positions in pages.
void check_appends(const AttentionProblem& p) {
  if (!p.appends) return;
  if (!p.is_paged()) {
    fail(ErrorCode::kUnsupported,
         "appends is {}, but kv is plain tensors, to which nothing is appended: plan for a cache, or without "
         "it.",
         p.appends);
  }
  if (p.is_listed()) {
    fail(ErrorCode::kUnsupported,
         "appends is {}, but listed.top_k is {}, and lists name slots, not positions: call append() before "
         "run() and plan without it.",
         p.appends, p.listed.top_k);
  }
}

void check_options(const AttentionProblem& p) {
  for (const auto& [window, name] : {std::pair{p.mask.window_left, "mask.window_left"},
                                     std::pair{p.mask.window_right, "mask.window_right"}}) {
    if (window < -1) {
      invalid("{} is {}, but must be -1 (unlimited) or the number of keys seen on that side: use -1.", name,
              window);
    }
  }
  if (!(p.scale >= 0) || !std::isfinite(p.scale)) {
    invalid("scale is {}, but must be finite and positive, or 0 for 1/sqrt(head_dim): use 0.", p.scale);
  }
  if (!(p.softcap >= 0) || !std::isfinite(p.softcap)) {
    invalid("softcap is {}, but must be finite and positive, or 0 for none: use 0.", p.softcap);
  }
  if (p.policy != SplitPolicy::kFast && p.policy != SplitPolicy::kReproducible &&
      p.policy != SplitPolicy::kBatchInvariant) {
    invalid("policy is {}, but must be kFast, kReproducible or kBatchInvariant: use kReproducible.",
            static_cast<int>(p.policy));
  }
  if (p.arithmetic > Arithmetic::kFp8) {
    invalid("arithmetic is {}, but must be k16Bit, kHalfInt8, kFullInt8 or kFp8: use k16Bit.",
            static_cast<int>(p.arithmetic));
  }
  check_range(p.workers, 0, kMaxWorkers, "workers");
}

}  // namespace

void validate_problem(const AttentionProblem& p) {
  check_device(p.device);
  const auto* const spec = std::get_if<KvCacheSpec>(&p.kv);
  check_heads(p);
  if (spec != nullptr) {
    (void)page_layout(*spec);
  } else {
    check_tensors(std::get<KvTensors>(p.kv));
  }
  check_float(p.q_dtype, "q_dtype");
  check_float(p.out_dtype, "out_dtype");
  check_bounds(p);
  check_options(p);
  if (spec != nullptr) check_channels(p, *spec);
  check_listed(p);
  check_appends(p);
}

const Plan::Impl& require_plan(const Plan& plan) {
  if (plan.impl() == nullptr)
    invalid("plan is empty, but must come from halftone::plan(): {}.", "call it first");
  return *plan.impl();
}

}  // namespace halftone::planning
