// `halftone doctor --kernels`: the matrix is what the backends' tables say, with and without a backend.
#include "cli/commands/kernel_matrix.h"

#include <sstream>

#include "tests/cli/cli_support.h"

namespace halftone::cli {
namespace {

using nlohmann::json;
using planning::Backend;
using planning::Kernel;

constexpr std::array<Kernel, 6> kFakeKernels{{
    {"fake-latent-16", 16, 16, 32, 512, 0, "latent caches", false, 0, true},
    {"fake-latent", 0, 64, 32, 512, 0, "latent caches, many rows", false, 0, true},
    {"fake-8", 8, 8, 64, 1024, 0, "few rows"},
    {"fake-many", 0, 32, 64, 1024, 0, "many rows"},
    {"fake-rotated", 0, 16, 64, 1024, 0, "many rows of rotated keys"},
    {"fake-universal", 8, 8, 64, 1024, 0, "the rest", true},
}};

/// Kernels for paged caches in int8 at head_dim 128, those of many rows only for scales per token and head,
/// and for V in int4 beside K in int8-head; for caches in fp16 beside Q in f16; a universal kernel for what
/// else is paged. Of latent caches any, in kernels of their own.
int fake_variant(const AttentionProblem& problem, const Kernel& kernel) {
  const auto* const spec = std::get_if<KvCacheSpec>(&problem.kv);
  if (spec == nullptr) return -1;
  if (spec->is_latent() || kernel.latent) return spec->is_latent() && kernel.latent ? 0 : -1;
  const KvFormat& k = spec->k_format;
  const KvFormat& v = spec->v_format;
  const bool head = k.granularity == Granularity::kTokenHead;
  const bool fast = problem.head_dim() == 128 && problem.q_dtype != DType::kFloat32 &&
                    problem.v_dim() == 128 &&
                    (k.dtype == DType::kInt8 || (k.dtype == DType::kFloat16 && problem.q_dtype == k.dtype)) &&
                    (k == v || (head && v.dtype == DType::kInt4));
  if (kernel.universal) return fast ? -1 : 0;
  if (kernel.row_block == 16) return fast && spec->rotate_k ? 0 : -1;
  return fast && (kernel.max_rows == 8 || (head && !spec->rotate_k)) ? 0 : -1;
}

std::vector<NamedBackend> with_fake() {
  static const Backend fake = [] {
    Backend b{};
    b.kernels = kFakeKernels;
    b.variant = fake_variant;
    b.append = [](const PagedKv&, const AppendArgs&, Stream) {};
    return b;
  }();
  return {{"cpu", planning::find_backend(DeviceType::kCpu)}, {"fake", &fake}, {"absent", nullptr}};
}

TEST(KernelMatrix, SaysWhatTheTablesSay) {
  const json matrix = kernel_matrix(with_fake());
  const json& fake = matrix["fake"];
  EXPECT_EQ(fake["operations"], json::parse(R"({"append": true, "dequantize": false, "merge": false})"));
  EXPECT_EQ(fake["kernels"], json::parse(R"([
      {"name": "fake-latent-16", "rows": "1 to 16", "use": "latent caches"},
      {"name": "fake-latent", "rows": "17 and more", "use": "latent caches, many rows"},
      {"name": "fake-8", "rows": "1 to 8", "use": "few rows"},
      {"name": "fake-many", "rows": "9 and more", "use": "many rows"},
      {"name": "fake-rotated", "rows": "9 and more", "use": "many rows of rotated keys"},
      {"name": "fake-universal", "rows": "any, 8 at a time", "use": "the rest"}])"));
  EXPECT_EQ(fake["cases"]["K int8-head, V int4-g32"], "fake-8");
  EXPECT_EQ(fake["cases"]["latent bf16, 16 heads"], "fake-latent-16");
  EXPECT_EQ(fake["cases"]["the same, 128 heads, 8 requests"], "fake-latent");
  EXPECT_EQ(fake["cases"]["four queries (drafts), int4-g32"], "fake-universal");
  EXPECT_EQ(fake["cases"]["Q and O in f32, int4-g32"], "fake-universal");
  EXPECT_TRUE(fake["cases"]["plain tensors in bf16, no cache"].is_null());
  EXPECT_EQ(fake["formats"]["int8-head"]["128"], 32);
  EXPECT_EQ(fake["formats"]["int8-tensor"]["128"], 8);
  EXPECT_EQ(fake["formats"]["int8-head"]["64"], 0);
  EXPECT_EQ(fake["formats"]["bf16"]["128"], 0);
  EXPECT_EQ(fake["formats"]["fp16"]["128"], 8) << "asked with Q in f16";
  EXPECT_TRUE(fake["formats"]["int8-g64"]["80"].is_null()) << "a partial group has no layout";
  EXPECT_EQ(fake["pairs"]["int8-head"], json::parse(R"(["int4-g32", "int4-g64", "int4-g128", "int4-row"])"));
  EXPECT_EQ(fake["pairs"]["bf16"], json::array());
  EXPECT_EQ(matrix["absent"], json::parse(R"({"built": false})"));
}

TEST(KernelMatrix, TheCpuRefusesNothing) {
  const json cpu = kernel_matrix(all_backends())["cpu"];
  EXPECT_EQ(cpu["operations"], json::parse(R"({"append": true, "dequantize": true, "merge": true})"));
  EXPECT_EQ(cpu["cases"]["one query, int4-g32"], "cpu-decode");
  EXPECT_EQ(cpu["cases"]["four queries (drafts), int4-g32"], "cpu-speculative");
  EXPECT_EQ(cpu["cases"]["a prompt of 1024 queries, int4-g32"], "cpu-prefill");
  EXPECT_EQ(cpu["cases"]["a prompt of 1024 queries, bf16"], "cpu-prefill");
  for (const auto& [name, kernel] : cpu["cases"].items()) EXPECT_TRUE(kernel.is_string()) << name;
  EXPECT_FALSE(cpu.contains("formats")) << "every kernel serves every format";
}

TEST(KernelMatrix, TextShowsEveryTable) {
  std::ostringstream out, err;
  Terminal terminal{out, err, false, false};
  print_kernel_matrix(terminal, with_fake());
  const std::string text = out.str();
  for (const char* line : {
           "what runs where                     cpu              fake            absent\n",
           "append                              yes              yes             not built\n",
           "merge                               yes              -               not built\n",
           "K int8-head, V int4-g32             cpu-decode       fake-8          not built\n",
           "plain tensors in bf16, no cache     cpu-decode       -               not built\n",
           "fake-many        9 and more        many rows\n",
           "fake-rotated     9 and more        many rows of rotated keys\n",
           "lack the kernel of their rows meet the next larger one that they have,\n",
           "int8-head        universal  universal  universal         32  universal  universal  universal\n",
           "int8-g64         universal          -          -          8  universal  universal  universal\n",
           "int8-head  int4-g32, int4-g64, int4-g128, int4-row\n",
           "This build has no absent backend: configure it with -DHALFTONE_CUDA=ON",
       }) {
    EXPECT_NE(text.find(line), std::string::npos) << line << "is not in\n" << text;
  }
}

class KernelMatrixCommand : public CliTest {};

TEST_F(KernelMatrixCommand, TheReadmeShowsIt) {
  const std::string readme = read_text(HALFTONE_SOURCE_DIR "/README.md"),
                    printed = run({"doctor", "--kernels"}).out;
  if (all_backends().back().built()) {
    EXPECT_NE(readme.find(printed.substr(0, printed.find("\ncuda, K and V"))), std::string::npos) << printed;
    return;
  }
  std::istringstream lines(printed);
  int seen = 0;
  for (std::string line; std::getline(lines, line);) {
    const std::size_t end = line.find("not built");
    if (end == std::string::npos && line.rfind("cpu-", 0) != 0) continue;
    ++seen;
    const std::size_t gap = end == std::string::npos ? line.find("  ") : end;
    EXPECT_NE(readme.find("\n" + line.substr(0, gap)), std::string::npos) << line;
  }
  EXPECT_EQ(seen, 25) << "21 cases and operations, 4 kernels";
}

TEST_F(KernelMatrixCommand, DoctorPrintsIt) {
  const Result text = run({"doctor", "--kernels"});
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_EQ(text.out.rfind("what runs where", 0), 0U) << text.out;
  EXPECT_EQ(json::parse(run({"doctor", "--kernels", "--json"}).out), json(kernel_matrix(all_backends())));
  EXPECT_EQ(json::parse(run({"doctor", "--json"}).out).contains("cpu"), true);
}

}  // namespace
}  // namespace halftone::cli
