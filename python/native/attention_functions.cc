// Plans, schedules and attention: the functions that halftone/_native.py loads.
#include <tvm/ffi/tvm_ffi.h>

#include <fmt/format.h>

#include <string>
#include <variant>

#include "convert.h"
#include "objects.h"

namespace halftone::python {
namespace {

using ffi::AnyView;
using ffi::Array;
using ffi::Map;
using ffi::String;
using Options = Map<String, ffi::Any>;

template <class T>
T option(const Options& options, const char* name) {
  return options.at(name).cast<T>();
}

SplitPolicy to_policy(const String& text) {
  if (text == "fast") return SplitPolicy::kFast;
  if (text == "reproducible") return SplitPolicy::kReproducible;
  if (text == "batch_invariant") return SplitPolicy::kBatchInvariant;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("policy is '{}', but must be fast, reproducible or batch_invariant: choose one.",
                          std::string(text)));
}

DType float_option(const Options& options, const char* name) {
  return to_float_dtype(std::string(option<String>(options, name)), name);
}

AttentionProblem to_problem(const std::variant<KvCacheSpec, KvTensors>& kv, const Options& options) {
  AttentionProblem p;
  p.kv = kv;
  p.device = to_device(option<int>(options, "device_type"), option<int>(options, "device_index"), "device");
  p.batch = option<int>(options, "batch");
  p.q_heads = option<int>(options, "q_heads");
  p.max_q_len = option<int>(options, "max_q_len");
  p.min_q_len = option<int>(options, "min_q_len");
  p.max_kv_len = option<int>(options, "max_kv_len");
  p.max_total_kv = option<std::int64_t>(options, "max_total_kv");
  p.max_prompt_kv = option<std::int64_t>(options, "max_prompt_kv");
  p.q_dtype = float_option(options, "q_dtype");
  p.out_dtype = float_option(options, "out_dtype");
  p.mask.causal = option<bool>(options, "causal");
  p.mask.window_left = option<int>(options, "window_left");
  p.mask.window_right = option<int>(options, "window_right");
  p.scale = static_cast<float>(option<double>(options, "scale"));
  p.softcap = static_cast<float>(option<double>(options, "softcap"));
  p.alibi = option<bool>(options, "alibi");
  p.sinks = option<bool>(options, "sinks");
  p.lse = option<bool>(options, "lse");
  p.policy = to_policy(option<String>(options, "policy"));
  p.arithmetic = parse_arithmetic(std::string(option<String>(options, "arithmetic")));
  p.workers = option<int>(options, "workers");
  p.appends = option<bool>(options, "appends");
  p.listed.top_k = option<int>(options, "top_k");
  p.listed.extra_top_k = option<int>(options, "extra_top_k");
  if (const ffi::Any extra = options.at("extra"); extra != nullptr)
    p.listed.extra = extra.cast<Ref<SpecObj>>()->spec;
  return p;
}

Ref<PlanObj> make_plan(const Ref<SpecObj>& spec, const Options& options) {
  return guarded(
      [&] { return Ref<PlanObj>(ffi::make_object<PlanObj>(plan(to_problem(spec->spec, options)))); });
}

Ref<PlanObj> make_plan_tensors(const String& dtype, int kv_heads, int head_dim, int v_head_dim,
                               const Options& options) {
  return guarded([&] {
    const KvTensors kv{to_float_dtype(std::string(dtype), "dtype"), kv_heads, head_dim, v_head_dim};
    return Ref<PlanObj>(ffi::make_object<PlanObj>(plan(to_problem(kv, options))));
  });
}

Options pass_info(const PassInfo& i) {
  Options fields;
  fields.Set("config", String(i.config));
  fields.Set("reason", String(i.reason));
  fields.Set("min_rows", i.min_rows);
  fields.Set("max_rows", i.max_rows);
  fields.Set("row_block", i.row_block);
  fields.Set("kv_tile", i.kv_tile);
  fields.Set("split_tokens", i.split_tokens);
  fields.Set("max_units", i.max_units);
  fields.Set("max_partials", i.max_partials);
  fields.Set("fuses_append", i.fuses_append);
  fields.Set("staged_bytes", i.staged_bytes);
  return fields;
}

Options plan_info(const Ref<PlanObj>& plan) {
  return guarded([&] {
    const PlanInfo& i = plan->plan.info();
    Options fields;
    Array<Options> passes;
    for (const PassInfo& pass : i.passes) passes.push_back(pass_info(pass));
    fields.Set("passes", passes);
    fields.Set("config", String(i.config));
    fields.Set("reason", String(i.reason));
    fields.Set("workers", i.workers);
    fields.Set("group", i.group);
    fields.Set("row_block", i.row_block);
    fields.Set("kv_tile", i.kv_tile);
    fields.Set("split_tokens", i.split_tokens);
    fields.Set("max_units", i.max_units);
    fields.Set("max_partials", i.max_partials);
    fields.Set("fuses_append", i.fuses_append);
    fields.Set("staged_bytes", i.staged_bytes);
    fields.Set("schedule_bytes", i.schedule_bytes);
    fields.Set("workspace_bytes", i.workspace_bytes);
    return fields;
  });
}

String describe(const Ref<PlanObj>& plan) {
  return guarded([&] { return String(plan->plan.describe()); });
}

/// Fills the workspace; the result keeps workspace and lengths alive for run().
Ref<StepObj> make_step(const Ref<PlanObj>& plan, AnyView kv_lengths, AnyView cu_q, AnyView cu_kv,
                       AnyView counts, AnyView extra_counts, AnyView workspace, AnyView stream) {
  return guarded([&] {
    auto step = ffi::make_object<StepObj>();
    step->plan = plan->plan;
    step->lengths = {to_optional_view(cu_q, "cu_q"), to_optional_view(kv_lengths, "kv_lengths"),
                     to_optional_view(cu_kv, "cu_kv"), to_optional_view(counts, "counts"),
                     to_optional_view(extra_counts, "extra_counts")};
    step->workspace = to_view(workspace, "workspace");
    for (const AnyView tensor : {kv_lengths, cu_q, cu_kv, counts, extra_counts, workspace})
      hold(tensor, step->held);
    step->stream = to_stream(plan->plan.problem().device, stream);
    schedule(step->plan, step->lengths, step->workspace, step->stream);
    return Ref<StepObj>(std::move(step));
  });
}

/// Schedules again into the same workspace, for the lengths' present values. `like`: any of the caller's
/// arrays, from which tvm_ffi learns the framework's current stream. False on another stream than the last
/// one; follow_stream() then says that the step has moved there.
bool reschedule(const Ref<StepObj>& step, AnyView /*like*/, AnyView stream) {
  return guarded([&] {
    const StepUse use(*step.get());
    const Stream on = to_stream(step->plan.problem().device, stream);
    schedule(step->plan, step->lengths, step->workspace, on);
    return step->is_ordered_by(on);
  });
}

void follow_stream(const Ref<StepObj>& step, AnyView /*like*/, AnyView stream) {
  guarded([&] { step->stream = to_stream(step->plan.problem().device, stream); });
}

/// schedule() for halftone.torch, which keeps the workspace itself.
void schedule_tensors(const Ref<PlanObj>& plan, AnyView kv_lengths, AnyView cu_q, AnyView workspace) {
  guarded([&] {
    schedule(plan->plan,
             {to_optional_view(cu_q, "cu_q"), to_optional_view(kv_lengths, "kv_lengths"), {}, {}, {}},
             to_view(workspace, "workspace"), to_stream(plan->plan.problem().device, AnyView(nullptr)));
  });
}

/// Of a cache, or of k and v.
std::variant<PagedKv, KvTensorViews> to_kv(AnyView cache, AnyView k, AnyView v) {
  const bool tensors = k != nullptr || v != nullptr;
  if (cache == nullptr && !tensors) return {};
  if (cache == nullptr) return KvTensorViews{to_optional_view(k, "k"), to_optional_view(v, "v")};
  if (!tensors) return cache.cast<Ref<CacheObj>>()->cache;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} is given beside cache, but one of the two is attended: drop one.",
                          k != nullptr ? "k" : "v"));
}

AttentionArgs to_args(AnyView q, AnyView out, AnyView lse, AnyView alibi_slopes, AnyView sinks,
                      AnyView status) {
  AttentionArgs args;
  args.q = to_view(q, "q");
  args.out = to_view(out, "out");
  args.lse = to_optional_view(lse, "lse");
  args.alibi_slopes = to_optional_view(alibi_slopes, "alibi_slopes");
  args.sinks = to_optional_view(sinks, "sinks");
  args.status = to_optional_view(status, "status");
  return args;
}

/// False, with nothing done, on another stream than the one that the step was scheduled on, unless
/// `any_stream`.
bool run_layer(const Ref<StepObj>& step, AttentionArgs& args, AnyView stream, bool any_stream) {
  args.lengths = step->lengths;
  const StepUse use(*step.get());
  const Stream on = to_stream(step->plan.problem().device, stream);
  if (!any_stream && !step->is_ordered_by(on)) return false;
  run(step->plan, args, step->workspace, on);
  return true;
}

bool run_step(const Ref<StepObj>& step, AnyView cache, AnyView q, AnyView k, AnyView v, AnyView out,
              AnyView lse, AnyView alibi_slopes, AnyView sinks, AnyView status, AnyView stream,
              bool any_stream) {
  return guarded([&] {
    AttentionArgs args = to_args(q, out, lse, alibi_slopes, sinks, status);
    args.kv = to_kv(cache, k, v);
    return run_layer(step, args, stream, any_stream);
  });
}

NewTokens to_new_tokens(AnyView k, AnyView v, AnyView slots, int pairing, AnyView cos, AnyView sin,
                        AnyView positions, bool advance) {
  return {.k = to_optional_view(k, "k"),
          .v = to_optional_view(v, "v"),
          .slot_mapping = to_optional_view(slots, "slot_mapping"),
          .rope = {static_cast<RopePairing>(pairing), to_optional_view(cos, "rope.cos"),
                   to_optional_view(sin, "rope.sin"), to_optional_view(positions, "rope.positions")},
          .advance = advance};
}

/// The same over a cache to which it appends k and v.
bool run_appending(const Ref<StepObj>& step, const Ref<CacheObj>& cache, AnyView q, AnyView k, AnyView v,
                   AnyView slots, int pairing, AnyView cos, AnyView sin, AnyView positions, bool advance,
                   AnyView out, AnyView lse, AnyView alibi_slopes, AnyView sinks, AnyView status,
                   AnyView stream, bool any_stream) {
  return guarded([&] {
    AttentionArgs args = to_args(q, out, lse, alibi_slopes, sinks, status);
    args.kv = cache->cache;
    args.append = to_new_tokens(k, v, slots, pairing, cos, sin, positions, advance);
    return run_layer(step, args, stream, any_stream);
  });
}

/// The same over lists of keys.
bool run_listed(const Ref<StepObj>& step, AnyView cache, AnyView q, AnyView indices, AnyView extra_cache,
                AnyView extra_indices, AnyView out, AnyView lse, AnyView sinks, AnyView status,
                AnyView stream, bool any_stream) {
  return guarded([&] {
    AttentionArgs args = to_args(q, out, lse, AnyView(nullptr), sinks, status);
    args.kv = to_kv(cache, AnyView(nullptr), AnyView(nullptr));
    args.indices = to_optional_view(indices, "indices");
    args.extra_indices = to_optional_view(extra_indices, "extra_indices");
    if (extra_cache != nullptr) args.extra_kv = extra_cache.cast<Ref<CacheObj>>()->cache;
    return run_layer(step, args, stream, any_stream);
  });
}

/// run() over paged K and V in a workspace that was scheduled elsewhere, on the framework's current stream.
void run_paged(const Plan& plan, AttentionArgs& args, const PagedKv& cache, const TensorView& kv_lengths,
               AnyView cu_q, AnyView workspace) {
  args.kv = cache;
  args.lengths = {to_optional_view(cu_q, "cu_q"), kv_lengths, {}, {}, {}};
  run(plan, args, to_view(workspace, "workspace"), to_stream(plan.problem().device, AnyView(nullptr)));
}

/// run() in a workspace that schedule_tensors() has filled; `kv_lengths`: None means the cache's. With k it
/// appends.
void run_scheduled(const Ref<PlanObj>& plan, const Ref<CacheObj>& cache, AnyView kv_lengths, AnyView cu_q,
                   AnyView workspace, AnyView q, AnyView out, AnyView lse, AnyView alibi_slopes,
                   AnyView sinks, AnyView status, AnyView k, AnyView v, bool advance) {
  guarded([&] {
    AttentionArgs args = to_args(q, out, lse, alibi_slopes, sinks, status);
    args.append = {.k = to_optional_view(k, "k"), .v = to_optional_view(v, "v"), .advance = advance};
    run_paged(plan->plan, args, cache->cache,
              kv_lengths == nullptr ? cache->cache.lengths : to_view(kv_lengths, "kv_lengths"), cu_q,
              workspace);
  });
}

/// run() for torch's operators, which know tensors only: the workspace was scheduled elsewhere, and nothing
/// of the cache is held. The plan is over pages.
void run_tensors(const Ref<PlanObj>& plan, AnyView kv_lengths, AnyView cu_q, AnyView workspace, AnyView pages,
                 AnyView block_table, AnyView k_scale, AnyView k_min, AnyView v_scale, AnyView v_min,
                 AnyView k_offset, AnyView k_channel_scale, bool clamped, AnyView q, AnyView out, AnyView lse,
                 AnyView alibi_slopes, AnyView sinks, AnyView status, AnyView k, AnyView v, bool advance) {
  guarded([&] {
    AttentionArgs args = to_args(q, out, lse, alibi_slopes, sinks, status);
    args.append = {.k = to_optional_view(k, "k"), .v = to_optional_view(v, "v"), .advance = advance};
    const PagedKv cache =
        to_cache(std::get<KvCacheSpec>(plan->plan.problem().kv), pages, block_table, kv_lengths, k_scale,
                 k_min, v_scale, v_min, k_offset, k_channel_scale, clamped);
    run_paged(plan->plan, args, cache, cache.lengths, cu_q, workspace);
  });
}

std::vector<TensorView> to_views(const Array<ffi::Any>& values, const char* name) {
  std::vector<TensorView> views;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const ffi::Any value = values[static_cast<std::int64_t>(i)];
    views.push_back(to_view(value, fmt::format("{}[{}]", name, i)));
  }
  return views;
}

void merge_parts(const Array<ffi::Any>& parts, const Array<ffi::Any>& part_lse, AnyView out, AnyView lse,
                 AnyView stream) {
  guarded([&] {
    const TensorView out_view = to_view(out, "out");
    merge(to_views(parts, "parts"), to_views(part_lse, "part_lse"), out_view, to_optional_view(lse, "lse"),
          to_stream(out_view.device, stream));
  });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, make_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_tensors, make_plan_tensors);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_info, plan_info);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(describe, describe);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(step, make_step);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(schedule_tensors, schedule_tensors);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(reschedule, reschedule);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(follow_stream, follow_stream);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run_step);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_appending, run_appending);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_listed, run_listed);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_scheduled, run_scheduled);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_tensors, run_tensors);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge, merge_parts);

}  // namespace halftone::python
