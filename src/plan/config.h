// The configurations and how one is chosen. A backend instantiates its kernels from the rows of its table.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "halftone/attention.h"

namespace halftone::planning {

/// One row of a table.
struct Config {
  std::string_view name;
  std::int32_t max_rows;      ///< chosen when a request has at most this many packed rows; 0: any number
  std::int32_t row_block;     ///< packed rows of a unit
  std::int32_t kv_tile;       ///< tokens: one step of the softmax and the granularity of splits
  std::int32_t split_tokens;  ///< batch_invariant: distance of the split boundaries
  std::int32_t unit_bytes;    ///< cache that a worker could read in the time that beginning a unit takes it
  std::string_view use;       ///< what it is made for
  bool universal = false;     ///< for what no other row serves
};

/// CPU: every row has the same kv_tile and split_tokens, so that a request's bits do not depend on which row
/// its batch led to.
inline constexpr std::array<Config, 3> kCpuConfigs{{
    {"cpu-decode", 16, 16, 64, 1024, 0, "one or a few queries per request; bound by reading the cache"},
    {"cpu-speculative", 64, 32, 64, 1024, 0, "drafts of several queries, or many query heads per KV head"},
    {"cpu-prefill", 0, 64, 64, 1024, 0, "prompts; bound by arithmetic"},
}};

/// Hopper: what one CTA of the decode kernel takes. A format and head_dim may lack some of them; the last row
/// serves what lacks all of them.
inline constexpr std::array<Config, 6> kCudaConfigs{{
    {"sm90-decode-8", 8, 8, 128, 4096, 163840, "up to 8 packed rows, read at the speed of memory"},
    {"sm90-decode-16", 16, 16, 128, 4096, 163840, "up to 16 packed rows"},
    {"sm90-decode-32", 32, 32, 128, 4096, 163840,
     "drafts, or many query heads per KV head; bound by arithmetic"},
    {"sm90-decode-48", 48, 48, 128, 4096, 163840, "likewise"},
    {"sm90-decode-64", 0, 64, 128, 4096, 163840, "64 packed rows at a time"},
    {"sm90-universal", 8, 8, 128, 4096, 32768,
     "any formats, dims and types, in fp32; several times slower than reading memory", true},
}};

/// The table of a device; empty when this build has no backend for it.
std::span<const Config> configs(Device device);

/// The chosen row of configs(device) and the reason, for people.
struct Choice {
  int index = 0;
  std::string reason;
};

/// Whether the backend can run the problem with a row of its table.
using Serves = bool(const AttentionProblem& problem, const Config& config);

/// The smallest unit that holds a request's packed rows, else the largest. Depends only on shapes and bounds
/// of an already validated problem; index -1 if the device has no row for it.
Choice choose_config(const AttentionProblem& problem, Serves* serves);

}  // namespace halftone::planning
