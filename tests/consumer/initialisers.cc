// Every public struct with one field named and the others left out, compiled with -Wextra as errors: each
// field has a default of its own.
#include <halftone/halftone.hpp>

namespace halftone {

static_assert(HALFTONE_VERSION_NUMBER ==
              HALFTONE_MAKE_VERSION(HALFTONE_VERSION_MAJOR, HALFTONE_VERSION_MINOR, HALFTONE_VERSION_PATCH));
static_assert(HALFTONE_VERSION_NUMBER < HALFTONE_MAKE_VERSION(HALFTONE_VERSION_MAJOR + 1, 0, 0));

bool all_structs_have_defaults() {
  const Device device{.type = DeviceType::kCpu};
  const TensorView view{.dtype = DType::kInt8};
  const KvFormat format{.dtype = DType::kFloat16};
  const NamedFormat named{.name = "mine"};
  const KvSpan span{.dims = 1};
  const KvSpans spans{.count = 0};
  const KvCacheSpec spec{.kv_heads = 1};
  const SpanLayout span_layout{.data_bytes = 1};
  const PageLayout layout{.page_bytes = 1};
  const StaticScale scale{.scale = view};
  const PagedKv cache{.table_mode = BlockTableMode::kClamped};
  const Rope rope{.pairing = RopePairing::kHalf};
  const AppendArgs append_args{.advance = true};
  const StaticScaleValues values{.scale = {1.0f}};
  const Mask mask{.causal = true};
  const KvTensors tensors{.kv_heads = 1};
  const AttentionProblem problem{.batch = 1};
  const PassInfo pass{.min_rows = 1};
  const PlanInfo info{.workers = 1};
  const SequenceLengths lengths{.kv_lengths = view};
  const KvTensorViews views{.k = view};
  const AttentionArgs args{.cache_settled = true};
  return device == Device{} && !view.present() && format.granularity == Granularity::kNone &&
         named.description.empty() && span.k_first == -1 && spans.begin() == spans.end() &&
         spec.k_format == KvFormat{} && span_layout.param_bytes == 0 && layout.tile_bytes == 0 &&
         !scale.min.present() && !cache.pages.present() && !rope.cos.present() && !append_args.k.present() &&
         values.min.empty() && mask.window_left == -1 && tensors.head_dim == 0 && problem.q_heads == 0 &&
         pass.config.empty() && info.passes.empty() && !lengths.cu_q.present() && !views.v.present() &&
         !args.out.present();
}

}  // namespace halftone
