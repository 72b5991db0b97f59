// Formats as data: names, parsing, validity, and the sizes of pages.
#include "halftone/format.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "format/page.h"
#include "halftone/cache.h"
#include "halftone/error.h"
#include "tests/expect_error.h"

namespace halftone {
namespace {

using enum DType;
using enum Granularity;

// Every combination that check_format accepts for some head dimension.
std::vector<KvFormat> all_formats() {
  std::vector<KvFormat> formats = {{kBFloat16}, {kFloat16}};
  for (const DType dtype : {kFloat8E4M3, kInt8, kInt4}) {
    for (const bool asymmetric : {false, true}) {
      if (asymmetric && dtype == kFloat8E4M3) continue;
      formats.push_back({dtype, kTensor, asymmetric, 0, kFloat32});
      formats.push_back({dtype, kHead, asymmetric, 0, kFloat32});
      for (const DType scale : {kFloat16, kFloat32}) {
        formats.push_back({dtype, kToken, asymmetric, 0, scale});
        formats.push_back({dtype, kTokenHead, asymmetric, 0, scale});
        for (const int size : {32, 64, 128}) formats.push_back({dtype, kGroup, asymmetric, size, scale});
      }
    }
  }
  return formats;
}

TEST(FormatTest, NamedFormatsAreValidDistinctAndNamed) {
  const std::vector<std::string> names = {"bf16",           "fp16",        "fp8",        "fp8-static-head",
                                          "fp8-token-head", "int8-tensor", "int8-token", "int8-head",
                                          "int8-g32",       "int8-g64",    "int8-g128",  "int4-g32",
                                          "int4-g64",       "int4-g128",   "int4-row"};
  ASSERT_EQ(named_formats().size(), names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    const NamedFormat& n = named_formats()[i];
    EXPECT_EQ(n.name, names[i]);
    EXPECT_FALSE(n.description.empty());
    EXPECT_NO_THROW(check_format(n.format, 128, "format"));
    EXPECT_EQ(parse_format(n.name), n.format);
    EXPECT_EQ(format_name(n.format), n.name);
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(named_formats()[j].format, n.format);
  }
}

TEST(FormatTest, TheGeneralFormHasTheDocumentedDefaults) {
  EXPECT_EQ(parse_format("int8-token-head"), parse_format("int8-head"));
  EXPECT_EQ(parse_format("int4-token-head"), parse_format("int4-row"));
  EXPECT_EQ(parse_format("fp8-tensor"), parse_format("fp8"));
  EXPECT_EQ(parse_format("int4-static-tensor-sym"), parse_format("int4-tensor-sym"));
  EXPECT_EQ(parse_format("int8-tensor-f32"), parse_format("int8-tensor"));
  EXPECT_EQ(parse_format("int4-g64-asym-f16"), parse_format("int4-g64"));
  EXPECT_EQ(parse_format("int8-g64-asym-f32"), (KvFormat{kInt8, kGroup, true, 64, kFloat32}));
  EXPECT_EQ(parse_format("int4-token-sym"), (KvFormat{kInt4, kToken, false, 0, kFloat16}));
  EXPECT_EQ(parse_format("int4-static-head"), (KvFormat{kInt4, kHead, true, 0, kFloat32}));
}

// "head" alone is a scale that append computes for each token and head; what has static scales says so.
TEST(FormatTest, OneWordHasOneMeaning) {
  for (const NamedFormat& n : named_formats()) {
    const bool says_static =
        n.name == "fp8" || n.name.find("tensor") != n.name.npos || n.name.find("static") != n.name.npos;
    EXPECT_EQ(n.format.static_scale(), says_static) << n.name;
  }
}

TEST(FormatTest, OldNamesKeepTheirMeaning) {
  EXPECT_EQ(parse_format("fp8-head"), (KvFormat{kFloat8E4M3, kHead, false, 0, kFloat32}));
  EXPECT_EQ(format_name(parse_format("fp8-head")), "fp8-static-head");
}

TEST(FormatTest, EveryFormatHasANameThatParsesBack) {
  for (const KvFormat& f : all_formats()) {
    EXPECT_NO_THROW(check_format(f, 128, "format"));
    EXPECT_EQ(parse_format(format_name(f)), f) << format_name(f);
  }
}

TEST(FormatTest, UnknownNamesSuggestWhatIsNearInMeaning) {
  const auto suggests = [](const std::string& text, const std::string& names, const std::string& why) {
    expect_error(ErrorCode::kInvalidArgument, {"'" + text + "', but " + why + ": use " + names + "."},
                 [&] { parse_format(text); });
  };
  const std::string none = "no format has this name", fp8 = "fp8, fp8-static-head or fp8-token-head",
                    int8 = "int8-tensor, int8-token, int8-head, int8-g32, int8-g64 or int8-g128",
                    int4 = "int4-g32, int4-g64, int4-g128 or int4-row";
  for (const char* text : {"int4", "int4-g23", "int4row", "uint4", "int4-g16-f32", "int4-g32-f32-f16"}) {
    suggests(text, int4, none);
  }
  for (const char* text : {"int8", "int8-", "int8-tensor-asym-asym", "torch.int8"})
    suggests(text, int8, none);
  for (const char* text : {"fp8_e4m3", "float8_e4m3fn", "fp8-per-token-head"}) suggests(text, fp8, none);
  for (const char* text : {"fp8_e5m2", "float8_e5m2", "E5M2"}) {
    suggests(text, fp8, "e5m2 is not stored, only e4m3");
  }
  for (const char* text : {"nvfp4", "mxfp4", "nf4", "fp4_e2m1"}) {
    suggests(text, int4, "4-bit floats are not stored, only 4-bit integers");
  }
  suggests("int2", int4, "no value is stored in less than 4 bits");
  const std::string apart =
      "names end before + and : (the command's +rot, +chan and K:V are rotate_k and rotate_v, K's channels "
      "and "
      "V's format elsewhere)";
  for (const char* text : {"int8-head+rot", "int8-head:int4-g32", "int8-head+rott", "INT8_HEAD+chan"}) {
    suggests(text, "int8-head", apart);
  }
  for (const char* text : {"fp32", "f32", "float32", "int32"}) {
    suggests(text, "bf16 or fp16", "no value is stored in more than 16 bits");
  }
  for (const char* text : {"bfloat16", "torch.bfloat16", "bf16-asym"}) suggests(text, "bf16", none);
  for (const char* text : {"half", "f16", "float16"}) suggests(text, "fp16", none);
  const std::string respelled = "names are lower case with hyphens";
  suggests("INT8-HEAD", "int8-head", respelled);
  suggests("int4_g32", "int4-g32", respelled);
  suggests("int4_G64_sym", "int4-g64-sym", respelled);
  for (const char* text : {"", "-", "int-head", "auto", "it4-g32"}) {
    suggests(
        text,
        "bf16, fp16, fp8, fp8-static-head, fp8-token-head, int8-tensor, int8-token, int8-head, int8-g32, "
        "int8-g64, int8-g128, int4-g32, int4-g64, int4-g128 or int4-row",
        none);
  }
  expect_error(ErrorCode::kInvalidArgument, {"...'"}, [] { parse_format(std::string(1 << 20, 'x')); });
}

TEST(FormatTest, ImpossibleCombinationsAreRefused) {
  const auto refused = [](ErrorCode code, const KvFormat& f, std::vector<std::string> words) {
    expect_error(code, words, [&] { check_format(f, 128, "k_format"); });
  };
  refused(ErrorCode::kUnsupported, {kFloat8E4M3, kTokenHead, true}, {"k_format.asymmetric", "e4m3", "int8"});
  refused(ErrorCode::kInvalidArgument, {kFloat32}, {"k_format.dtype", "f32", "bf16"});
  refused(ErrorCode::kInvalidArgument, {kInt64}, {"k_format.dtype", "int64"});
  refused(ErrorCode::kInvalidArgument, {static_cast<DType>(99)}, {"k_format.dtype", "unknown"});
  refused(ErrorCode::kInvalidArgument, {kInt8, static_cast<Granularity>(77)}, {"k_format.granularity", "77"});
  refused(ErrorCode::kInvalidArgument, {kBFloat16, kTokenHead}, {"k_format.granularity", "kNone"});
  refused(ErrorCode::kInvalidArgument, {kInt8, kNone}, {"k_format.granularity", "kTokenHead"});
  refused(ErrorCode::kInvalidArgument, {kBFloat16, kNone, true}, {"k_format.asymmetric"});
  refused(ErrorCode::kInvalidArgument, {kInt8, kTokenHead, false, 32},
          {"k_format.group_size", "32", "use 0"});
  refused(ErrorCode::kInvalidArgument, {kInt8, kGroup, false, 48}, {"k_format.group_size", "48", "use 64"});
  refused(ErrorCode::kInvalidArgument, {kInt8, kGroup, false, 0}, {"k_format.group_size", "use 32"});
  refused(ErrorCode::kInvalidArgument, {kInt8, kGroup, false, -5}, {"k_format.group_size", "-5", "use 32"});
  refused(ErrorCode::kInvalidArgument, {kInt8, kGroup, false, 256}, {"k_format.group_size", "use 128"});
  refused(ErrorCode::kInvalidArgument, {kInt8, kTokenHead, false, 0, kBFloat16},
          {"k_format.scale_dtype", "bf16"});
  refused(ErrorCode::kInvalidArgument, {kInt8, kTensor, false, 0, kFloat16}, {"k_format.scale_dtype", "f32"});
  refused(ErrorCode::kInvalidArgument, {kBFloat16, kNone, false, 0, kFloat32}, {"k_format.scale_dtype"});
  expect_error(ErrorCode::kUnsupported, {"asymmetric"}, [] { parse_format("fp8-token-asym"); });
  expect_error(ErrorCode::kInvalidArgument, {"scale_dtype"}, [] { parse_format("int8-tensor-f16"); });
}

TEST(FormatTest, PartialGroupsNameTheNearestThatWorks) {
  const auto refused = [](int group, int dim, const std::string& remedy) {
    expect_error(ErrorCode::kInvalidArgument,
                 {"v_format.group_size", std::to_string(group), std::to_string(dim), remedy}, [&] {
                   check_format({kInt4, kGroup, true, group}, dim, "v_format");
                 });
  };
  refused(32, 80, "kTokenHead");
  refused(128, 64, "use 64");
  refused(64, 96, "use 32");
  refused(128, 96, "use 32");
  refused(128, 192, "use 64");
  EXPECT_NO_THROW(check_format({kInt4, kGroup, true, 32}, 96, "v_format"));
}

TEST(FormatTest, OtherHeadDimsNameTheNextLarger) {
  const auto refused = [](int dim, const std::string& remedy) {
    expect_error(ErrorCode::kInvalidArgument,
                 {"head_dim is " + std::to_string(dim) +
                  ", but must be 64, 80, 96, 128, 192, 256 or 512: " + remedy + "."},
                 [&] { check_format({kBFloat16}, dim, "k_format"); });
  };
  for (const auto& [dim, larger] : std::vector<std::pair<int, int>>{{1, 64},
                                                                    {59, 64},
                                                                    {65, 80},
                                                                    {72, 80},
                                                                    {81, 96},
                                                                    {100, 128},
                                                                    {112, 128},
                                                                    {129, 192},
                                                                    {255, 256},
                                                                    {257, 512},
                                                                    {511, 512}}) {
    refused(dim, "use " + std::to_string(larger) + ", pad with zeros and set scale to 1/sqrt(" +
                     std::to_string(dim) + ")");
  }
  for (const int dim : {513, 576, std::numeric_limits<int>::max()}) {
    refused(dim, "larger heads are not supported");
  }
  for (const int dim : {0, -1, std::numeric_limits<int>::min()}) refused(dim, "use 64");
  KvCacheSpec spec{{kBFloat16}, {kBFloat16}, 2, 128};
  spec.v_head_dim = 100;  // V has no scale
  expect_error(ErrorCode::kInvalidArgument, {"v_head_dim is 100", ": use 128 and pad with zeros."},
               [&] { page_layout(spec); });
}

TEST(FormatTest, ParamsPerToken) {
  EXPECT_EQ(parse_format("bf16").params_per_token(128), 0);
  EXPECT_EQ(parse_format("fp8").params_per_token(128), 0);
  EXPECT_EQ(parse_format("int8-head").params_per_token(128), 1);
  EXPECT_EQ(parse_format("int8-token").params_per_token(128), 1);
  EXPECT_EQ(parse_format("int4-g32").params_per_token(192), 6);
}

// --- Page sizes
// --------------------------------------------------------------------------------------------------------------

KvCacheSpec spec_of(const std::string& k, const std::string& v, int heads = 8, int dim = 128) {
  return {parse_format(k), parse_format(v), heads, dim};
}

TEST(LayoutTest, BytesPerTokenMatchTheFormatsAsPublished) {
  const auto per_head = [](const std::string& name, int dim = 128) {
    return bytes_per_token(spec_of(name, name, 8, dim)) / 16;
  };
  EXPECT_EQ(per_head("bf16"), 256);
  EXPECT_EQ(per_head("fp8"), 128);
  EXPECT_EQ(per_head("fp8-token-head"), 130);
  EXPECT_EQ(per_head("int8-head"), 130);
  EXPECT_EQ(per_head("int8-token-head-f32"), 132);
  EXPECT_EQ(per_head("int4-row"), 68);
  EXPECT_EQ(per_head("int4-g32"), 80);
  EXPECT_EQ(per_head("int4-g32-sym"), 72);
  EXPECT_EQ(per_head("int8-g64-asym-f32"), 144);
  EXPECT_EQ(per_head("int4-row", 80), 44);
}

TEST(LayoutTest, AHandWorkedPage) {
  KvCacheSpec s = spec_of("int8-head", "int4-g32", 4);
  s.v_head_dim = 64;
  s.page_size = 32;
  const PageLayout l = page_layout(s);
  EXPECT_EQ(l.k_data_bytes, 16 * 128);
  EXPECT_EQ(l.v_data_bytes, 16 * 64 / 2);
  EXPECT_EQ(l.k_param_bytes, 16 * 2);
  EXPECT_EQ(l.v_param_bytes, 16 * 2 * 2 * 2);
  EXPECT_EQ(l.v_data_offset, 2048);
  EXPECT_EQ(l.k_param_offset, 2560);
  EXPECT_EQ(l.v_param_offset, 2592);
  EXPECT_EQ(l.tile_bytes, 2720);
  EXPECT_EQ(l.head_bytes, 5440);
  EXPECT_EQ(l.page_bytes, 21760);
  EXPECT_EQ(bytes_per_token(s), 680);
}

TEST(LayoutTest, EveryFieldIsChecked) {
  const auto refused = [](const std::function<void(KvCacheSpec&)>& change, std::vector<std::string> words) {
    KvCacheSpec s = spec_of("int8-head", "int8-head");
    change(s);
    expect_error(ErrorCode::kInvalidArgument, words, [&] { page_layout(s); });
    expect_error(ErrorCode::kInvalidArgument, words, [&] { bytes_per_token(s); });
  };
  refused([](KvCacheSpec& s) { s.kv_heads = 0; }, {"kv_heads is 0"});
  refused([](KvCacheSpec& s) { s.kv_heads = -8; }, {"kv_heads is -8"});
  refused([](KvCacheSpec& s) { s.head_dim = 59; }, {"head_dim is 59", "use 64"});
  refused([](KvCacheSpec& s) { s.v_head_dim = 513; }, {"v_head_dim is 513", "512: larger"});
  refused([](KvCacheSpec& s) { s.v_head_dim = -64; }, {"v_head_dim is -64"});
  refused([](KvCacheSpec& s) { s.page_size = 48; }, {"page_size is 48", "use 64"});
  refused([](KvCacheSpec& s) { s.page_size = 0; }, {"page_size is 0", "use 16"});
  refused([](KvCacheSpec& s) { s.page_size = 1 << 30; }, {"page_size", "use 256"});
  refused(
      [](KvCacheSpec& s) {
        s.k_format = {kInt4, kGroup, true, 128};
        s.head_dim = 64;
      },
      {"k_format.group_size is 128", "use 64"});
  refused(
      [](KvCacheSpec& s) {
        s.v_format = {kInt4, kGroup, true, 128};
        s.v_head_dim = 64;
      },
      {"v_format.group_size is 128", "use 64"});
}

TEST(LayoutTest, SizesDoNotWrapAtTheLargestHeadCount) {
  KvCacheSpec s = spec_of("bf16", "bf16", std::numeric_limits<int>::max(), 256);
  s.page_size = 256;
  const PageLayout l = page_layout(s);
  EXPECT_EQ(l.page_bytes, std::int64_t{256} * 256 * 4 * std::numeric_limits<int>::max());
  EXPECT_EQ(page::tile_offset(l, std::numeric_limits<int>::max() - 1, 255), l.page_bytes - l.tile_bytes);
}

}  // namespace
}  // namespace halftone
