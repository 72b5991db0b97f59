// What `halftone eval` shows people: the table and the page.
#include "halftone/format.h"
#include "tests/cli/cli_support.h"

namespace halftone::cli {
namespace {

using EvalReportTest = CliTest;

TEST_F(EvalReportTest, TextTableIsSortedAndStatesTheConclusion) {
  const Result result =
      run({"eval", write_capture(1), "--formats", "int4-row,bf16,int8-head", "--per-layer"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  EXPECT_EQ(result.out.find('\x1b'), std::string::npos);
  const std::size_t bf16 = result.out.find("\nbf16 "), int8 = result.out.find("\nint8-head "),
                    int4 = result.out.find("\nint4-row ");
  EXPECT_LT(bf16, int8);
  EXPECT_LT(int8, int4);
  EXPECT_NE(int4, std::string::npos);
  EXPECT_NE(result.out.find("the smallest format is"), std::string::npos);
  EXPECT_NE(result.out.find("layers.0  int8-head"), std::string::npos);
}

TEST_F(EvalReportTest, HtmlIsSelfContained) {
  const Result result = run({"eval", write_capture(2), "--html", path("report.html")});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_NE(result.out.find("Wrote "), std::string::npos);
  const std::string html = read_text(path("report.html"));
  EXPECT_EQ(html.rfind("<!DOCTYPE html>", 0), 0U);
  for (const char* external :
       {"http:", "https:", "//", "src=", "href=", "url(", "@import", "<link", "<script", "<img", "<iframe"}) {
    EXPECT_EQ(html.find(external), std::string::npos) << external;
  }
  EXPECT_NE(html.find("prefers-color-scheme: dark"), std::string::npos);
  // One SVG per plot: error against bytes, the colour scale, a heat map per listed format, K channels per
  // layer.
  const std::size_t heat_maps = count_of(html, "by layer and query head\"");
  EXPECT_GE(heat_maps, 2U);
  EXPECT_EQ(count_of(html, "Largest K of each channel"), 2U);
  EXPECT_EQ(count_of(html, "<svg "), 2 + heat_maps + 2);
  EXPECT_EQ(count_of(html, "</svg>"), count_of(html, "<svg "));
  EXPECT_EQ(html.find("nan"), std::string::npos);
  for (const NamedFormat& named : named_formats()) {
    if (named.format.group_size <= kDim) {
      EXPECT_NE(html.find(">" + std::string(named.name) + "<"), std::string::npos) << named.name;
    }
  }
}

TEST_F(EvalReportTest, PlotsFitNarrowPages) {
  const Result result = run({"eval", write_capture(1), "--formats", "bf16,int8-head", "--html", "-"});
  EXPECT_EQ(result.out.find("min-width: 640px"), std::string::npos);  // a phone would show two thirds
}

TEST_F(EvalReportTest, HtmlSaysWhatATokenTakes) {
  const auto page = [&](std::vector<std::string> more) {
    more.insert(more.begin(),
                {"eval", write_capture(2), "--formats", "bf16", "--max-error", "1", "--html", "-"});
    return run(more).out;
  };
  const std::string plain = page({});
  EXPECT_NE(plain.find("<b>1024 bytes</b><span>per token in the 2 captured layers; bf16: 1024</span>"),
            std::string::npos);
  EXPECT_NE(plain.find("<b>976.6 MiB</b><span>for 1M tokens; bf16: 976.6 MiB</span>"), std::string::npos);
  EXPECT_EQ(plain.find("32,768"), std::string::npos);
  const std::string model = page({"--model-layers", "32", "--memory", "16384KB"});
  EXPECT_NE(model.find("<b>16384 bytes</b><span>per token in 32 layers like the 2 captured"),
            std::string::npos);
  EXPECT_NE(model.find("<b>1.00 k tokens</b><span>fit into 16384KB; bf16: 1.00 k</span>"), std::string::npos);
  EXPECT_NE(model.find("<td>1.00 k</td>"), std::string::npos);
}

TEST_F(EvalReportTest, HtmlEscapesNames) {
  std::vector<Capture> tensors = capture(1);
  for (Capture& c : tensors) c.name = "<script>alert(1)</script>&\"'." + c.name.substr(c.name.size() - 1);
  write_file(path("<i>&.safetensors"), tensors);
  const Result result = run({"eval", path("<i>&.safetensors"), "--formats", "bf16,int8-head", "--html", "-"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.out.find("<script"), std::string::npos);
  EXPECT_EQ(result.out.find("<i>"), std::string::npos);
  EXPECT_NE(result.out.find("&lt;script&gt;"), std::string::npos);
}

}  // namespace
}  // namespace halftone::cli
