// From the structs of the C ABI to the types of the C++ API.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "c_api/struct.h"
#include "halftone/attention.h"
#include "halftone/cache.h"
#include "halftone/format.h"
#include "halftone/halftone.h"
#include "halftone/types.h"

namespace halftone::c_api {

/// Throws InvalidArgument.
[[noreturn]] void invalid(const std::string& sentence);

// Scalars. Each throws InvalidArgument naming `argument`.
DType to_dtype(std::int32_t value, const Name& argument);
Device to_device(std::int32_t type, std::int32_t index, const Name& argument);
bool to_bool(std::int32_t value, const Name& argument);
KvPart to_part(std::int32_t value, const Name& argument);

// Structs. `argument` prefixes the names of their fields in sentences.
KvFormat to_cpp(const halftone_kv_format* in, const Name& argument);
KvCacheSpec to_cpp(const halftone_cache_spec* in, const Name& argument);
PagedKv to_cpp(const halftone_paged_kv* in, const Name& argument);
AppendArgs to_cpp(const halftone_append_args* in, const Name& argument);
KvTensors to_cpp(const halftone_kv_tensors* in, const Name& argument);
AttentionProblem to_cpp(const halftone_attention_problem* in, const Name& argument);
SequenceLengths to_cpp(const halftone_sequence_lengths* in, const Name& argument);
NewTokens to_cpp(const halftone_new_tokens* in, const Name& argument);
AttentionArgs to_cpp(const halftone_attention_args* in, const Name& argument);

/// NULL is an absent tensor.
TensorView to_cpp(const halftone_tensor* in, const Name& argument);

// The other direction, for what a plan and a format hand out. Pointers of the result are left NULL.
halftone_kv_format to_c(const KvFormat& format);
halftone_cache_spec to_c(const KvCacheSpec& spec);
halftone_kv_tensors to_c(const KvTensors& tensors);
halftone_attention_problem to_c(const AttentionProblem& problem);

/// Writes `text` as halftone_plan_describe() documents.
void copy_text(std::string_view text, char* buffer, std::size_t capacity, std::size_t* length);

}  // namespace halftone::c_api
