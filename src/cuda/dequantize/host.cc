#include "cuda/dequantize/host.h"

#include "cuda/dequantize/params.h"
#include "cuda/device/call.h"
#include "plan/check_tensor.h"
#include "plan/fail.h"

namespace halftone::cuda {

DequantizeParams dequantize_params(const PagedKv& cache, const PageLayout& layout, const page::Part& part,
                                   const StaticScale& scale, const TensorView& out) {
  DequantizeParams p{};
  p.layout = layout;
  p.part = part;
  p.pages = pointer<std::uint8_t>(cache.pages);
  p.page_stride = cache.pages.strides[0];
  p.num_pages = cache.pages.shape[0];
  p.page_log2 = log2_of(cache.spec.page_size);
  p.kv_heads = cache.spec.kv_heads;
  p.block_table = pointer<std::int32_t>(cache.block_table);
  p.table_stride = cache.block_table.strides[0];
  p.table_width = cache.block_table.shape[1];
  p.lengths = pointer<std::int32_t>(cache.lengths);
  p.batch = static_cast<std::int32_t>(cache.lengths.shape[0]);
  p.static_stride = p.part.format.granularity == Granularity::kHead ? 1 : 0;
  p.static_scale = pointer<float>(scale.scale);
  p.static_min = pointer<float>(scale.min);
  if (part.which == KvPart::kK) p.channels = channels_of(cache.k_channels);
  p.out = out.data;
  p.rows = out.shape[0];
  p.row_tokens = 1;
  p.row_stride = out.strides[0];
  p.head_stride = out.strides[1];
  p.out_type = out.dtype;
  p.aligned = rows_aligned(out);
  p.clears_rest = true;
  return p;
}

void dequantize(const PagedKv& cache, const TensorView& k_out, const TensorView& v_out, Stream stream) {
  if (planning::given(k_out) && planning::given(v_out) && k_out.shape[0] != v_out.shape[0]) {
    planning::invalid(
        "v_out.shape[0] is {}, but must be sum(cache.lengths), as k_out.shape[0] {}: allocate {} rows.",
        v_out.shape[0], k_out.shape[0], k_out.shape[0]);
  }
  const DeviceScope scope(cache.pages.device.index);
  const PageLayout layout = page_layout(cache.spec);
  for (const KvPart which : {KvPart::kK, KvPart::kV}) {
    const bool of_k = which == KvPart::kK;
    TensorView out = of_k ? k_out : v_out;
    if (!planning::given(out)) continue;
    void* const rows = out.data;
    for (const page::Part& part : page::parts_of(cache.spec, layout)) {
      const int first = part.first_in(which);
      if (first < 0) continue;
      if (rows != nullptr) out.data = static_cast<std::byte*>(rows) + first * (dtype_bits(out.dtype) / 8);
      const DequantizeParams p =
          dequantize_params(cache, layout, part, of_k ? cache.k_scale : cache.v_scale, out);
      check(cache.spec.is_latent() ? launch_dequantize_records(p, stream) : launch_dequantize(p, stream),
            "dequantize");
    }
  }
}

}  // namespace halftone::cuda
