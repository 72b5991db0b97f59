// Packed caches in safetensors files: what `quantize` writes and `dequantize` reads.
//
// Of each layer: `<layer>.pages` U8 [pages, page_bytes] in the native layout, `<layer>.lengths` I32 [1],
// static scales `<layer>.k_scale`, `k_min`, `v_scale`, `v_min` F32 where the format has them, `k_offset` and
// `k_channel_scale` F32 [kv_heads, head_dim] where the spec has them. Metadata: "format" = "halftone-cache-1"
// and "<layer>.spec", the KvCacheSpec as a JSON object.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "cli/files/owned_cache.h"
#include "cli/files/safetensors.h"

namespace halftone::cli {

inline constexpr const char* kPackedFormat = "halftone-cache-1";

std::string spec_to_json(const KvCacheSpec& spec);
/// Throws CorruptFile naming `where`.
KvCacheSpec spec_from_json(const std::string& text, const std::string& where);

struct PackedLayer {
  std::string label;
  KvCacheSpec spec;
  const TensorInfo* pages = nullptr;
  std::int64_t tokens = 0;
};

/// Declarations of one layer's tensors, in the order in which write_packed_layer writes them.
void declare_packed_layer(const std::string& label, const KvCacheSpec& spec, std::int64_t tokens,
                          std::vector<TensorDeclaration>& tensors,
                          std::map<std::string, std::string>& metadata);
void write_packed_layer(SafetensorsWriter& writer, const OwnedCache& cache);

/// Layers of a packed file in natural order, every shape checked. Throws CorruptFile or InvalidArgument.
std::vector<PackedLayer> find_packed_layers(const SafetensorsReader& file);
OwnedCache load_packed_layer(const SafetensorsReader& file, const PackedLayer& layer);

}  // namespace halftone::cli
