// The C ABI over attention: plan handles, schedule, run, attend and merge.
#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "c_api/convert.h"
#include "c_api/struct.h"
#include "c_api/traits.h"
#include "halftone/attention.h"
#include "halftone/error.h"
#include "halftone/halftone.h"

namespace halftone::c_api {
namespace {

/// A cache's geometry as C sees it.
struct SpecEntry {
  halftone_kv_format k_format{};
  halftone_kv_format v_format{};
  halftone_cache_spec spec{};

  const halftone_cache_spec* fill(const KvCacheSpec& from) {
    k_format = to_c(from.k_format);
    v_format = to_c(from.v_format);
    spec = to_c(from);
    spec.k_format = &k_format;
    spec.v_format = &v_format;
    return &spec;
  }
};

/// A plan and its problem as C sees it.
struct PlanEntry {
  Plan plan;
  SpecEntry cache, extra;
  halftone_kv_tensors tensors{};
  halftone_attention_problem problem;

  explicit PlanEntry(Plan p) : plan(std::move(p)), problem(to_c(plan.problem())) {
    const auto& kv = plan.problem().kv;
    const ListedKeys& listed = plan.problem().listed;
    if (listed.extra_top_k != 0) problem.extra = extra.fill(listed.extra);
    if (const auto* spec = std::get_if<KvCacheSpec>(&kv)) {
      problem.kv = cache.fill(*spec);
    } else {
      tensors = to_c(std::get<KvTensors>(kv));
      problem.kv_tensors = &tensors;
    }
  }
  PlanEntry(const PlanEntry&) = delete;
  PlanEntry& operator=(const PlanEntry&) = delete;
};

/// The live plans. A handle is a number that is never given out twice, not an address: a stale handle cannot
/// reach another plan, and no handle is ever dereferenced.
class PlanRegistry {
 public:
  halftone_plan* add(std::shared_ptr<const PlanEntry> entry) {
    const std::unique_lock lock(mutex_);
    plans_.emplace(next_, std::move(entry));
    // Never dereferenced.
    return reinterpret_cast<halftone_plan*>(next_++);  // NOLINT(performance-no-int-to-ptr)
  }

  std::shared_ptr<const PlanEntry> find(const halftone_plan* handle) const {
    const std::shared_lock lock(mutex_);
    const auto it = plans_.find(reinterpret_cast<std::uintptr_t>(handle));
    if (it == plans_.end()) refuse(handle);
    return it->second;
  }

  void remove(const halftone_plan* handle) {
    std::shared_ptr<const PlanEntry> entry;  // destroyed after the lock
    const std::unique_lock lock(mutex_);
    const auto it = plans_.find(reinterpret_cast<std::uintptr_t>(handle));
    if (it == plans_.end()) refuse(handle);
    entry = std::move(it->second);
    plans_.erase(it);
  }

 private:
  [[noreturn]] static void refuse(const halftone_plan* handle) {
    if (handle == nullptr) {
      throw Error(ErrorCode::kInvalidArgument,
                  "plan is NULL, but must be a handle of halftone_plan_create: create one first.");
    }
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "plan is {}, but must be a live handle of halftone_plan_create: this one was destroyed or "
            "never created; create one first.",
            fmt::ptr(handle)));
  }

  mutable std::shared_mutex mutex_;
  std::unordered_map<std::uintptr_t, std::shared_ptr<const PlanEntry>> plans_;
  std::uintptr_t next_ = 0x6874'0000'0000'0001;  // no valid address on x86-64 and AArch64
};

/// Lives until the process ends: threads may still use plans while static objects are destroyed.
PlanRegistry& registry() {
  static PlanRegistry* const instance = std::make_unique<PlanRegistry>().release();
  return *instance;
}

std::vector<TensorView> to_views(size_t count, const halftone_tensor* const* tensors, const char* argument) {
  if (count > 0 && tensors == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} is NULL, but count is {}: pass that many tensors.", argument, count));
  }
  std::vector<TensorView> views;
  views.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    if (tensors[i] == nullptr) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("{}[{}] is NULL, but all {} entries must be tensors: pass one.", argument, i, count));
    }
    views.push_back(to_cpp(tensors[i], argument));
  }
  return views;
}

}  // namespace
}  // namespace halftone::c_api

using namespace halftone;
using namespace halftone::c_api;

extern "C" {

halftone_status halftone_kv_tensors_init(halftone_kv_tensors* tensors, size_t struct_size) {
  return guarded([&] { init_struct(tensors, struct_size, "tensors"); });
}

halftone_status halftone_attention_problem_init(halftone_attention_problem* problem, size_t struct_size) {
  return guarded([&] { init_struct(problem, struct_size, "problem"); });
}

halftone_status halftone_plan_create(const halftone_attention_problem* problem, halftone_plan** plan) {
  return guarded([&] {
    if (plan == nullptr) {
      throw Error(ErrorCode::kInvalidArgument, "plan is NULL, but must point to a handle: pass its address.");
    }
    *plan = registry().add(std::make_shared<const PlanEntry>(halftone::plan(to_cpp(problem, "problem"))));
  });
}

halftone_status halftone_plan_destroy(halftone_plan* plan) {
  return guarded([&] {
    if (plan != nullptr) registry().remove(plan);
  });
}

halftone_status halftone_plan_info_init(halftone_plan_info* info, size_t struct_size) {
  return guarded([&] { init_struct(info, struct_size, "info"); });
}

halftone_status halftone_plan_get_info(const halftone_plan* plan, halftone_plan_info* info) {
  return guarded([&] {
    write_struct(info, "info", [&] {
      const std::shared_ptr<const PlanEntry> entry = registry().find(plan);
      const PlanInfo& from = entry->plan.info();
      auto out = zeroed<halftone_plan_info>();
      out.workers = from.workers;
      out.config = from.config.c_str();
      out.reason = from.reason.c_str();
      out.group = from.group;
      out.row_block = from.row_block;
      out.kv_tile = from.kv_tile;
      out.split_tokens = from.split_tokens;
      out.max_units = from.max_units;
      out.max_partials = from.max_partials;
      out.passes = static_cast<int32_t>(from.passes.size());
      if (from.passes.size() > 1) {
        out.short_rows = from.passes.front().max_rows;
        out.short_config = from.passes.front().config.c_str();
      }
      out.schedule_bytes = from.schedule_bytes;
      out.workspace_bytes = from.workspace_bytes;
      out.staged_bytes = from.staged_bytes;
      out.fuses_append = from.fuses_append;
      return out;
    });
  });
}

halftone_status halftone_plan_get_problem(const halftone_plan* plan, halftone_attention_problem* problem) {
  return guarded([&] { write_struct(problem, "problem", [&] { return registry().find(plan)->problem; }); });
}

halftone_status halftone_plan_workspace_bytes(const halftone_plan* plan, size_t* bytes) {
  return guarded([&] {
    if (bytes == nullptr) {
      throw Error(ErrorCode::kInvalidArgument,
                  "bytes is NULL, but must point to a size_t: pass its address.");
    }
    *bytes = registry().find(plan)->plan.workspace_bytes();
  });
}

halftone_status halftone_plan_describe(const halftone_plan* plan, char* buffer, size_t capacity,
                                       size_t* length) {
  return guarded([&] { copy_text(registry().find(plan)->plan.describe(), buffer, capacity, length); });
}

halftone_status halftone_sequence_lengths_init(halftone_sequence_lengths* lengths, size_t struct_size) {
  return guarded([&] { init_struct(lengths, struct_size, "lengths"); });
}

halftone_status halftone_schedule(const halftone_plan* plan, const halftone_sequence_lengths* lengths,
                                  const halftone_tensor* workspace, void* stream) {
  return guarded([&] {
    const std::shared_ptr<const PlanEntry> entry = registry().find(plan);
    const SequenceLengths step = to_cpp(lengths, "lengths");
    schedule(entry->plan, step, to_cpp(workspace, "workspace"), stream);
  });
}

halftone_status halftone_new_tokens_init(halftone_new_tokens* tokens, size_t struct_size) {
  return guarded([&] { init_struct(tokens, struct_size, "tokens"); });
}

halftone_status halftone_attention_args_init(halftone_attention_args* args, size_t struct_size) {
  return guarded([&] { init_struct(args, struct_size, "args"); });
}

halftone_status halftone_run(const halftone_plan* plan, const halftone_attention_args* args,
                             const halftone_tensor* workspace, void* stream) {
  return guarded([&] {
    const std::shared_ptr<const PlanEntry> entry = registry().find(plan);
    const AttentionArgs layer = to_cpp(args, "args");
    run(entry->plan, layer, to_cpp(workspace, "workspace"), stream);
  });
}

halftone_status halftone_attend(const halftone_attention_problem* problem,
                                const halftone_attention_args* args) {
  return guarded([&] {
    const AttentionProblem shape = to_cpp(problem, "problem");
    attend(shape, to_cpp(args, "args"));
  });
}

halftone_status halftone_merge(size_t count, const halftone_tensor* const* parts,
                               const halftone_tensor* const* part_lse, const halftone_tensor* out,
                               const halftone_tensor* lse, void* stream) {
  return guarded([&] {
    const std::vector<TensorView> part_views = to_views(count, parts, "parts");
    const std::vector<TensorView> lse_views = to_views(count, part_lse, "part_lse");
    const TensorView out_view = to_cpp(out, "out");
    merge(part_views, lse_views, out_view, to_cpp(lse, "lse"), stream);
  });
}

}  // extern "C"
