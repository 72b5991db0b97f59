// plan() refuses every wrong field of a problem with a sentence.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "halftone/attention.h"
#include "tests/expect_error.h"
#include "tests/plan/decode_problem.h"

namespace halftone {
namespace {

using enum ErrorCode;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Refusal {
  std::string name;
  ErrorCode code;
  std::function<void(AttentionProblem&)> change;
  std::vector<std::string> fragments;
};

const std::vector<Refusal>& refusals() {
  static const std::vector<Refusal> all = {
      {"HeadDim1", kInvalidArgument, [](auto& p) { spec_of(p).head_dim = 1; }, {"head_dim is 1", "64"}},
      {"HeadDim7", kInvalidArgument, [](auto& p) { spec_of(p).head_dim = 7; }, {"head_dim is 7", "64"}},
      {"HeadDim59", kInvalidArgument, [](auto& p) { spec_of(p).head_dim = 59; }, {"head_dim is 59", "64"}},
      {"HeadDim513",
       kInvalidArgument,
       [](auto& p) { spec_of(p).head_dim = 513; },
       {"head_dim is 513", "512"}},
      {"PlainHeadDim59",
       kInvalidArgument,
       [](auto& p) {
         p.kv = KvTensors{DType::kBFloat16, 8, 59};
       },
       {"kv.head_dim is 59", "64"}},
      {"VHeadDim",
       kInvalidArgument,
       [](auto& p) { spec_of(p).v_head_dim = 130; },
       {"v_head_dim is 130", "use 192"}},
      {"PageSize", kInvalidArgument, [](auto& p) { spec_of(p).page_size = 48; }, {"page_size is 48", "64"}},
      {"PartialGroup",
       kInvalidArgument,
       [](auto& p) {
         spec_of(p).head_dim = 80, spec_of(p).k_format = spec_of(p).v_format = parse_format("int4-g64");
       },
       {"k_format", "80"}},
      {"NoKvHeads",
       kInvalidArgument,
       [](auto& p) { spec_of(p).kv_heads = 0; },
       {"kv.kv_heads is 0", "use 1"}},
      {"NoQHeads", kInvalidArgument, [](auto& p) { p.q_heads = 0; }, {"q_heads is 0", "use 1"}},
      {"HeadRatio",
       kInvalidArgument,
       [](auto& p) { p.q_heads = 30; },
       {"q_heads is 30", "kv_heads 8", "24 or 32"}},
      {"FewerQHeads",
       kInvalidArgument,
       [](auto& p) { p.q_heads = 4; },
       {"q_heads is 4", "kv_heads 8", "use 8"}},
      {"BatchNegative", kInvalidArgument, [](auto& p) { p.batch = -1; }, {"batch is -1", "use 0"}},
      {"BatchHuge", kInvalidArgument, [](auto& p) { p.batch = 1 << 25; }, {"batch is 33554432", "16777216"}},
      {"QLenNegative", kInvalidArgument, [](auto& p) { p.max_q_len = -3; }, {"max_q_len is -3", "use 0"}},
      {"QRows",
       kInvalidArgument,
       [](auto& p) { p.max_q_len = 1 << 29; },
       {"max_q_len is 536870912", "268435456"}},
      {"QLenMinZero",
       kInvalidArgument,
       [](auto& p) { p.min_q_len = 0; },
       {"min_q_len is 0", "1 to max_q_len = 1", "use 1"}},
      {"QLenMinBeyondMax",
       kInvalidArgument,
       [](auto& p) { p.max_q_len = 8, p.min_q_len = 9; },
       {"min_q_len is 9", "1 to max_q_len = 8", "use 8"}},
      {"QLenMinOfNone",
       kInvalidArgument,
       [](auto& p) { p.max_q_len = 0, p.min_q_len = 2; },
       {"min_q_len is 2", "1 to max(max_q_len, 1) = 1", "use 1"}},
      {"KvLenNegative", kInvalidArgument, [](auto& p) { p.max_kv_len = -1; }, {"max_kv_len is -1", "use 0"}},
      {"KvLenHuge",
       kInvalidArgument,
       [](auto& p) { p.max_kv_len = INT32_MAX; },
       {"max_kv_len", "1073741824"}},
      {"TotalKvNegative",
       kInvalidArgument,
       [](auto& p) { p.max_total_kv = -1; },
       {"max_total_kv is -1", "1 to batch * max_kv_len = 32768", "use 0"}},
      {"TotalKvHuge",
       kInvalidArgument,
       [](auto& p) { p.max_total_kv = 4 * 8192 + 1; },
       {"max_total_kv is 32769", "1 to batch * max_kv_len = 32768", "use 0"}},
      {"TotalKvOfNone",
       kInvalidArgument,
       [](auto& p) { p.batch = 0, p.max_total_kv = 1; },
       {"max_total_kv is 1", "batch * max_kv_len = 0"}},
      {"PromptKvNegative",
       kInvalidArgument,
       [](auto& p) { p.max_prompt_kv = -1; },
       {"max_prompt_kv is -1", "1 to batch * max_kv_len = 32768", "use 0"}},
      {"PromptKvHuge",
       kInvalidArgument,
       [](auto& p) { p.max_prompt_kv = 4 * 8192 + 1; },
       {"max_prompt_kv is 32769", "1 to batch * max_kv_len = 32768", "use 0"}},
      {"PromptKvBeyondAll",
       kInvalidArgument,
       [](auto& p) { p.max_total_kv = 700, p.max_prompt_kv = 701; },
       {"max_prompt_kv is 701", "1 to max_total_kv = 700", "use 0"}},
      {"WindowLeft",
       kInvalidArgument,
       [](auto& p) { p.mask.window_left = -2; },
       {"mask.window_left is -2", "use -1"}},
      {"WindowRight",
       kInvalidArgument,
       [](auto& p) { p.mask.window_right = -9; },
       {"mask.window_right is -9"}},
      {"ScaleNegative", kInvalidArgument, [](auto& p) { p.scale = -1; }, {"scale is -1", "1/sqrt(head_dim)"}},
      {"ScaleNan", kInvalidArgument, [](auto& p) { p.scale = kNan; }, {"scale is nan"}},
      {"ScaleInf", kInvalidArgument, [](auto& p) { p.scale = kInf; }, {"scale is inf"}},
      {"SoftcapNegative", kInvalidArgument, [](auto& p) { p.softcap = -30; }, {"softcap is -30", "use 0"}},
      {"SoftcapNan", kInvalidArgument, [](auto& p) { p.softcap = kNan; }, {"softcap is nan"}},
      {"SoftcapInf", kInvalidArgument, [](auto& p) { p.softcap = kInf; }, {"softcap is inf"}},
      {"WorkersNegative", kInvalidArgument, [](auto& p) { p.workers = -1; }, {"workers is -1", "use 0"}},
      {"WorkersMany", kInvalidArgument, [](auto& p) { p.workers = 65537; }, {"workers is 65537", "65536"}},
      {"Policy", kInvalidArgument, [](auto& p) { p.policy = static_cast<SplitPolicy>(9); }, {"policy is 9"}},
      {"Arithmetic",
       kInvalidArgument,
       [](auto& p) { p.arithmetic = static_cast<Arithmetic>(9); },
       {"arithmetic is 9", "use k16Bit"}},
      {"QDtype", kInvalidArgument, [](auto& p) { p.q_dtype = DType::kInt8; }, {"q_dtype is int8", "bf16"}},
      {"OutDtype",
       kInvalidArgument,
       [](auto& p) { p.out_dtype = DType::kFloat8E4M3; },
       {"out_dtype is e4m3"}},
      {"UnknownDtype",
       kInvalidArgument,
       [](auto& p) { p.q_dtype = static_cast<DType>(99); },
       {"q_dtype is unknown"}},
      {"PlainDtype",
       kInvalidArgument,
       [](auto& p) {
         p.kv = KvTensors{DType::kInt8, 8, 128};
       },
       {"kv.dtype is int8", "use bf16"}},
      {"PlainNoKvHeads",
       kInvalidArgument,
       [](auto& p) {
         p.kv = KvTensors{DType::kFloat32, 0, 128};
       },
       {"kv.kv_heads is 0", "use 1"}},
      {"PlainVHeadDim",
       kInvalidArgument,
       [](auto& p) {
         p.kv = KvTensors{DType::kFloat32, 8, 128, 130};
       },
       {"kv.v_head_dim is 130", "use 192"}},
      {"DeviceType",
       kInvalidArgument,
       [](auto& p) { p.device.type = static_cast<DeviceType>(7); },
       {"device.type is 7"}},
      {"CpuIndex", kInvalidArgument, [](auto& p) { p.device.index = 1; }, {"device.index is 1", "use 0"}},
      {"CudaIndex",
       kInvalidArgument,
       [](auto& p) {
         p.device = {DeviceType::kCuda, -1};
       },
       {"device.index is -1"}},
      {"Bounds",
       kResourceExhausted,
       [](auto& p) {
         p.batch = 1 << 24, p.max_q_len = 1 << 28, p.max_kv_len = 1 << 30, spec_of(p).kv_heads = 32;
       },
       {"batch 16777216", "2^62", "smaller bounds"}},
      {"Workspace",
       kResourceExhausted,
       [](auto& p) {
         p.batch = 4096, p.max_kv_len = 1 << 30, p.workers = 65536, p.policy = SplitPolicy::kBatchInvariant;
       },
       {"workspace_bytes is", "65536 workers", "2^46", "fewer workers"}},
  };
  return all;
}

class PlanRefuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(PlanRefuses, WithASentence) {
  AttentionProblem p = decode_problem();
  GetParam().change(p);
  expect_error(GetParam().code, {}, [&] { plan(p); });
  for (const std::string& fragment : GetParam().fragments) {
    expect_error(GetParam().code, {fragment}, [&] { plan(p); });
  }
}
INSTANTIATE_TEST_SUITE_P(Plan, PlanRefuses, ::testing::ValuesIn(refusals()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace halftone
