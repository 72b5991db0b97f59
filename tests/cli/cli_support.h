// Runs the halftone command inside the test, in a folder of its own.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "cli/commands/command.h"
#include "cli/files/safetensors.h"
#include "reference/random.h"
#include "reference/tensor.h"

namespace halftone::cli {

struct Result {
  int code = 0;
  std::string out;
  std::string err;
};

/// Runs `halftone <arguments>` as in a pipe, or with progress on stderr.
inline Result run(std::vector<std::string> arguments, bool progress = false) {
  std::vector<const char*> argv = {"halftone"};
  for (const std::string& a : arguments) argv.push_back(a.c_str());
  std::ostringstream out, err;
  const int code =
      run_command(static_cast<int>(argv.size()), argv.data(), Terminal{out, err, progress, false});
  return {code, out.str(), err.str()};
}

/// How often a piece is in a text.
inline std::size_t count_of(const std::string& text, const std::string& piece) {
  std::size_t n = 0;
  for (std::size_t at = text.find(piece); at != std::string::npos; at = text.find(piece, at + 1)) ++n;
  return n;
}

/// One tensor of a capture.
struct Capture {
  std::string name;
  reference::Tensor tensor;
};

inline void write_file(const std::string& path, const std::vector<Capture>& tensors,
                       const std::map<std::string, std::string>& metadata = {}) {
  std::vector<TensorDeclaration> declarations;
  for (const Capture& c : tensors) declarations.push_back({c.name, c.tensor.dtype(), c.tensor.shape()});
  SafetensorsWriter writer(path, declarations, metadata);
  for (const Capture& c : tensors) writer.write(std::as_bytes(c.tensor.bytes()));
  writer.commit();
}

inline reference::Tensor activations(reference::Random& random, reference::Data data, DType dtype,
                                     std::int64_t tokens, int heads, int dim) {
  std::vector<float> values(static_cast<std::size_t>(tokens * heads * dim));
  reference::fill(random, data, values, heads, dim);
  return reference::Tensor::of(dtype, {tokens, heads, dim}, values);
}

class CliTest : public ::testing::Test {
 protected:
  static constexpr int kTokens = 150, kQHeads = 4, kKvHeads = 2, kDim = 64;

  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "halftone-cli-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  std::size_t files() const {
    return static_cast<std::size_t>(
        std::distance(std::filesystem::directory_iterator(folder_), std::filesystem::directory_iterator()));
  }

  /// q, k and v of `layers` layers with outlier channels in K.
  static std::vector<Capture> capture(int layers, DType dtype = DType::kBFloat16, int tokens = kTokens) {
    reference::Random random(7);
    std::vector<Capture> tensors;
    for (int i = 0; i < layers; ++i) {
      const std::string prefix = "layers." + std::to_string(i) + ".";
      tensors.push_back(
          {prefix + "q", activations(random, reference::Data::kNormal, dtype, tokens, kQHeads, kDim)});
      tensors.push_back({prefix + "k", activations(random, reference::Data::kOutlierChannels, dtype, tokens,
                                                   kKvHeads, kDim)});
      tensors.push_back(
          {prefix + "v", activations(random, reference::Data::kNormal, dtype, tokens, kKvHeads, kDim)});
    }
    return tensors;
  }

  std::string write_capture(int layers, DType dtype = DType::kBFloat16) const {
    write_file(path("capture.safetensors"), capture(layers, dtype));
    return path("capture.safetensors");
  }

  static std::string read_text(const std::string& name) {
    std::ifstream file(name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  /// One line "halftone: error: ... <piece> ..." on stderr, nothing on stdout, and the exit code.
  static void expect_failure(const Result& result, int code, const std::string& piece) {
    EXPECT_EQ(result.code, code) << result.err;
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(result.err.rfind("halftone: error: ", 0), 0U) << result.err;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    EXPECT_NE(result.err.find(piece), std::string::npos) << result.err << "expected piece: " << piece;
  }

  std::filesystem::path folder_;
};

}  // namespace halftone::cli
