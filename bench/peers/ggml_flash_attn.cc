// Participant of compare_cpu.py: ggml's flash attention on a quantised cache, called as llama.cpp's graph
// calls it. Arguments: the shape (worker.h), data=DIR, type=q8_0|q4_0|f16, and layout=token|head: whether a
// token's heads are neighbours in memory (llama.cpp's cache) or a head's tokens. No mask is passed: every key
// is visible, and a mask would only cost time.
#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <cmath>

#include "bench/peers/worker.h"

namespace {

ggml_type parse_type(const std::string& text) {
  for (const ggml_type type : {GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_F16}) {
    if (text == ggml_type_name(type)) return type;
  }
  throw std::invalid_argument("type is " + text + ", but must be q8_0, q4_0 or f16");
}

/// One request's [context, kv_heads, head_dim], or [kv_heads, context, head_dim] with head-major layout.
std::vector<float> arrange(const peers::Shape& s, const std::vector<float>& x, bool head_major) {
  if (!head_major) return x;
  std::vector<float> y(x.size());
  for (std::int64_t t = 0; t < s.context; ++t) {
    for (std::int64_t h = 0; h < s.kv_heads; ++h) {
      std::copy_n(x.begin() + (t * s.kv_heads + h) * s.head_dim, s.head_dim,
                  y.begin() + (h * s.context + t) * s.head_dim);
    }
  }
  return y;
}

/// A cache tensor [head_dim, context, kv_heads, batch] (innermost first), filled with `x` for every request.
ggml_tensor* make_cache(ggml_context* context, const peers::Shape& s, ggml_type type, bool head_major,
                        const std::vector<float>& x) {
  ggml_tensor* flat = ggml_new_tensor_2d(context, type, s.head_dim, s.context * s.kv_heads * s.batch);
  const std::size_t row = ggml_row_size(type, s.head_dim);
  const auto tokens = static_cast<std::size_t>(s.context), heads = static_cast<std::size_t>(s.kv_heads);
  const std::vector<float> values = arrange(s, x, head_major);
  for (std::int64_t b = 0; b < s.batch; ++b) {
    ggml_quantize_chunk(type, values.data(),
                        static_cast<char*>(flat->data) + static_cast<std::size_t>(b) * tokens * heads * row,
                        0, s.context * s.kv_heads, s.head_dim, nullptr);
  }
  return ggml_view_4d(context, flat, s.head_dim, s.context, s.kv_heads, s.batch,
                      head_major ? row : heads * row, head_major ? tokens * row : row, tokens * heads * row,
                      0);
}

/// A graph of one flash_attn_ext node and the memory that computing it needs.
struct Layer {
  ggml_cgraph* graph = nullptr;
  ggml_tensor* out = nullptr;  // f32 [head_dim, q_heads, 1, batch], innermost first
  ggml_cplan plan{};
  std::vector<std::uint8_t> work;
};

}  // namespace

int main(int argc, char** argv) {
  return peers::participant(argc, argv, [](const peers::Arguments& arguments) {
    const peers::Shape s(arguments);
    const ggml_type type = parse_type(arguments.text("type"));
    const bool head_major = arguments.text("layout") == "head";
    const std::string data = arguments.text("data");
    const std::vector<float> q = peers::read_floats(data + "/q.f32", s.q_heads * s.head_dim);
    const std::vector<float> k = peers::read_floats(data + "/k.f32", s.request_values());
    const std::vector<float> v = peers::read_floats(data + "/v.f32", s.request_values());

    const std::size_t part_bytes =
        ggml_row_size(type, s.head_dim) * static_cast<std::size_t>(s.context * s.kv_heads * s.batch);
    const std::size_t small_bytes = std::size_t{16} << 20;  // q, outputs, graphs
    const peers::Buffer memory(static_cast<std::size_t>(s.layers) * (2 * part_bytes + small_bytes));
    ggml_context* const context = ggml_init({memory.bytes(), memory.data(), false});
    if (context == nullptr) throw std::runtime_error("ggml_init failed");

    ggml_tensor* const queries =
        ggml_new_tensor_4d(context, GGML_TYPE_F32, s.head_dim, 1, s.q_heads, s.batch);
    for (std::int64_t b = 0; b < s.batch; ++b) {
      std::copy(q.begin(), q.end(), static_cast<float*>(queries->data) + b * s.q_heads * s.head_dim);
    }
    ggml_threadpool_params pool_params = ggml_threadpool_params_default(s.threads);
    ggml_threadpool* const pool = ggml_threadpool_new(&pool_params);
    std::vector<Layer> layers(static_cast<std::size_t>(s.layers));
    for (Layer& layer : layers) {
      ggml_tensor* const keys = make_cache(context, s, type, head_major, k);
      ggml_tensor* const values = make_cache(context, s, type, head_major, v);
      const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
      layer.out = ggml_flash_attn_ext(context, queries, keys, values, nullptr, scale, 0.0f, 0.0f);
      layer.graph = ggml_new_graph_custom(context, 16, false);
      ggml_build_forward_expand(layer.graph, layer.out);
      layer.plan = ggml_graph_plan(layer.graph, s.threads, pool);
      layer.work.resize(layer.plan.work_size);
      layer.plan.work_data = layer.work.data();
    }
    std::cout << "{\"bytes\": " << 2 * part_bytes << ", \"version\": \"ggml " << ggml_version() << "\"}"
              << std::endl;
    peers::serve(
        s.layers,
        [&](std::int64_t index) {
          Layer& layer = layers[static_cast<std::size_t>(index)];
          if (ggml_graph_compute(layer.graph, &layer.plan) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("ggml_graph_compute failed");
          }
        },
        [&] {
          return std::span<const float>(static_cast<const float*>(layers[0].out->data),
                                        static_cast<std::size_t>(s.output_values()));
        });
    ggml_threadpool_free(pool);
    ggml_free(context);
  });
}
