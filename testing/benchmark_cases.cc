#include "testing/cases.h"

namespace halftone::testing {

std::vector<AttentionCase> benchmark_cases() {
  std::vector<AttentionCase> rows;
  const auto add = [&](const std::string& name, int q_heads, int kv_heads, int batch, int q_len, int kv_len) {
    AttentionCase row;
    row.name = name;
    row.requests = uniform_requests(batch, q_len, kv_len);
    row.q_heads = q_heads;
    row.kv_heads = kv_heads;
    row.mask.causal = true;
    row.lse = false;
    rows.push_back(row);
  };
  for (const int batch : {32, 64, 128, 256, 512}) {
    add("decode-8x1-t8192-b" + std::to_string(batch), 8, 1, batch, 1, 8192);
  }
  for (const int batch : {1, 2, 4, 8, 16, 32, 64}) {
    add("decode-32x8-t8192-b" + std::to_string(batch), 32, 8, batch, 1, 8192);
  }
  for (const int kv_len : {1024, 2048, 4096, 16384, 32768}) {
    add("decode-32x8-t" + std::to_string(kv_len) + "-b8", 32, 8, 8, 1, kv_len);
  }
  add("decode-64x8-t131072-b1", 64, 8, 1, 1, 131072);
  add("decode-8x1-t131072-b2", 8, 1, 2, 1, 131072);
  add("verify-16x1-q3-t8192-b32", 16, 1, 32, 3, 8192);
  for (const int tokens : {1024, 4096, 16384}) {
    add("prefill-32x8-t" + std::to_string(tokens), 32, 8, 1, tokens, tokens);
  }
  add("chunk-32x8-q512-t8192-b4", 32, 8, 4, 512, 8192);

  AttentionCase ragged = rows.front();
  ragged.name = "ragged-32x8-b64";
  ragged.q_heads = 32;
  ragged.kv_heads = 8;
  Random random(7);
  ragged.requests.clear();
  for (const int kv_len : ragged_lengths(random, 64, 16, 16384)) ragged.requests.push_back({1, kv_len});
  rows.push_back(ragged);
  return rows;
}

}  // namespace halftone::testing
