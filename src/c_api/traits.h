// Name, required fields and defaults of every struct of the C ABI.
#pragma once

#include <cstddef>

#include "c_api/struct.h"
#include "halftone/halftone.h"

namespace halftone::c_api {

/// A value with its header set and everything else zero.
template <class T>
T zeroed() {
  T value{};
  value.struct_size = sizeof(T);
  value.abi_version = HALFTONE_ABI_VERSION;
  return value;
}

/// Bytes before the first field with a default, rounded up to 8-byte steps: no field is ever cut.
constexpr std::size_t required_bytes(std::size_t first_optional) { return (first_optional + 7) / 8 * 8; }

template <>
struct StructTraits<halftone_tensor> {
  static constexpr StructRule rule{"halftone_tensor", sizeof(halftone_tensor), sizeof(halftone_tensor)};
  static halftone_tensor defaults() { return zeroed<halftone_tensor>(); }
};

template <>
struct StructTraits<halftone_kv_format> {
  static constexpr StructRule rule{"halftone_kv_format", sizeof(halftone_kv_format),
                                   required_bytes(offsetof(halftone_kv_format, asymmetric))};
  static halftone_kv_format defaults() {
    auto value = zeroed<halftone_kv_format>();
    value.dtype = HALFTONE_DTYPE_BF16;
    value.scale_dtype = HALFTONE_DTYPE_F16;
    return value;
  }
};

template <>
struct StructTraits<halftone_cache_spec> {
  static constexpr StructRule rule{"halftone_cache_spec", sizeof(halftone_cache_spec),
                                   required_bytes(offsetof(halftone_cache_spec, v_head_dim))};
  static halftone_cache_spec defaults() {
    auto value = zeroed<halftone_cache_spec>();
    value.page_size = 64;
    return value;
  }
};

template <>
struct StructTraits<halftone_page_layout> {
  static constexpr StructRule rule{"halftone_page_layout", sizeof(halftone_page_layout),
                                   required_bytes(offsetof(halftone_page_layout, k_data_bytes))};
  static halftone_page_layout defaults() { return zeroed<halftone_page_layout>(); }
};

template <>
struct StructTraits<halftone_paged_kv> {
  static constexpr StructRule rule{"halftone_paged_kv", sizeof(halftone_paged_kv),
                                   required_bytes(offsetof(halftone_paged_kv, block_table))};
  static halftone_paged_kv defaults() { return zeroed<halftone_paged_kv>(); }
};

template <>
struct StructTraits<halftone_append_args> {
  static constexpr StructRule rule{"halftone_append_args", sizeof(halftone_append_args),
                                   required_bytes(offsetof(halftone_append_args, slot_mapping))};
  static halftone_append_args defaults() { return zeroed<halftone_append_args>(); }
};

template <>
struct StructTraits<halftone_kv_tensors> {
  static constexpr StructRule rule{"halftone_kv_tensors", sizeof(halftone_kv_tensors),
                                   required_bytes(offsetof(halftone_kv_tensors, v_head_dim))};
  static halftone_kv_tensors defaults() {
    auto value = zeroed<halftone_kv_tensors>();
    value.dtype = HALFTONE_DTYPE_BF16;
    return value;
  }
};

template <>
struct StructTraits<halftone_attention_problem> {
  static constexpr StructRule rule{"halftone_attention_problem", sizeof(halftone_attention_problem),
                                   required_bytes(offsetof(halftone_attention_problem, max_q_len))};
  static halftone_attention_problem defaults() {
    auto value = zeroed<halftone_attention_problem>();
    value.max_q_len = value.min_q_len = 1;
    value.q_dtype = value.out_dtype = HALFTONE_DTYPE_BF16;
    value.window_left = value.window_right = -1;
    value.policy = HALFTONE_SPLIT_REPRODUCIBLE;
    return value;
  }
};

template <>
struct StructTraits<halftone_plan_info> {
  static constexpr StructRule rule{"halftone_plan_info", sizeof(halftone_plan_info),
                                   required_bytes(offsetof(halftone_plan_info, workers))};
  static halftone_plan_info defaults() { return zeroed<halftone_plan_info>(); }
};

template <>
struct StructTraits<halftone_sequence_lengths> {
  static constexpr StructRule rule{"halftone_sequence_lengths", sizeof(halftone_sequence_lengths),
                                   required_bytes(offsetof(halftone_sequence_lengths, cu_q))};
  static halftone_sequence_lengths defaults() { return zeroed<halftone_sequence_lengths>(); }
};

template <>
struct StructTraits<halftone_new_tokens> {
  static constexpr StructRule rule{"halftone_new_tokens", sizeof(halftone_new_tokens),
                                   required_bytes(offsetof(halftone_new_tokens, slot_mapping))};
  static halftone_new_tokens defaults() { return zeroed<halftone_new_tokens>(); }
};

template <>
struct StructTraits<halftone_attention_args> {
  static constexpr StructRule rule{"halftone_attention_args", sizeof(halftone_attention_args),
                                   required_bytes(offsetof(halftone_attention_args, lengths))};
  static halftone_attention_args defaults() { return zeroed<halftone_attention_args>(); }
};

}  // namespace halftone::c_api
