// Static scales from sample values.
#include <fmt/format.h>

#include <array>

#include "cpu/element.h"
#include "cpu/interrupt.h"
#include "format/channels.h"
#include "format/codec.h"
#include "format/hadamard.h"
#include "format/head_dim.h"
#include "halftone/cache.h"
#include "halftone/error.h"
#include "plan/check_tensor.h"
#include "plan/validate_cache.h"

namespace halftone {

StaticScaleValues calibrate(const TensorView& x, const KvFormat& format, bool rotate,
                            const ChannelTensors& channels) {
  const auto invalid = [](const std::string& sentence) {
    throw Error(ErrorCode::kInvalidArgument, sentence);
  };
  planning::check_tensor(x, {"x",
                             {DType::kFloat32, DType::kFloat16, DType::kBFloat16},
                             {planning::kAnySize, planning::kAnySize, planning::kAnySize},
                             Device{},
                             planning::Strides::kLastContiguous});
  check_format(format, kHeadDims.back(), "format");  // every group fits it; static scales have none
  if (!format.static_scale()) {
    invalid(
        fmt::format("format is {}, but only per-tensor and per-head static scales are calibrated: use fp8 or "
                    "int8-tensor, or append directly.",
                    format_name(format)));
  }
  check_head_dim(x.shape[2], "x.shape[2]");
  const int dim = static_cast<int>(x.shape[2]);
  if (x.shape[0] == 0 || x.shape[1] == 0) {
    invalid(fmt::format("x has shape {}, but a scale needs at least one value: pass sample tokens.",
                        planning::shape_text(x)));
  }

  planning::check_channels(channels,
                           {.kv_heads = static_cast<int>(x.shape[1]),
                            .head_dim = dim,
                            .offset_k = planning::given(channels.offset),
                            .scale_k = planning::given(channels.scale)},
                           Device{});
  const Channels treated = channels_of(channels);
  const bool per_head = format.granularity == Granularity::kHead;
  std::vector<codec::Range> ranges(static_cast<std::size_t>(per_head ? x.shape[1] : 1));
  cpu::Interruption interruption;
  for (std::int64_t t = 0; t < x.shape[0] && !interruption.poll(t); ++t) {
    for (std::int64_t head = 0; head < x.shape[1]; ++head) {
      std::array<float, kHeadDims.back()> row;
      cpu::load_row(x.dtype, cpu::row_at(x, t, head), dim, row.data());
      for (int d = 0; d < dim; ++d) {
        if (codec::ht_abs(row[d]) <= codec::kMaxInput) continue;
        invalid(
            fmt::format("x[{}, {}, {}] is {}, but must be finite and at most 2^100 in magnitude: clean it.",
                        t, head, d, row[d]));
      }
      for (int d = 0; treated.any() && d < dim; ++d) row[d] = treated.taken(row[d], head * dim + d);
      if (rotate) hadamard::rotate(row.data(), dim);
      codec::Range& range = ranges[static_cast<std::size_t>(per_head ? head : 0)];
      for (int d = 0; d < dim; ++d) range.include(row[d]);
    }
  }

  interruption.check();
  StaticScaleValues values;
  for (const codec::Range& range : ranges) {
    const codec::Params params = codec::params_of(format, range);
    values.scale.push_back(params.scale);
    if (format.asymmetric) values.min.push_back(params.min);
  }
  return values;
}

}  // namespace halftone
