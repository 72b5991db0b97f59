// Whether each compiled kernel has the matrix products of its row's arithmetic, and no others: a kernel that
// falls back to other instructions may still compute the right numbers. Reads the PTX that nvcc leaves;
// executes none of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/decode/config.h"
#include "cuda/latent/bf16/config.h"
#include "cuda/latent/few/config.h"
#include "cuda/latent/wide/config.h"
#include "cuda/prefill/config.h"

namespace halftone::cuda {
namespace {

namespace fs = std::filesystem;

/// Kinds of matrix products: the instruction, and the types of D, A and B, of mma also of C.
using Kinds = std::set<std::string>;

struct Kernel {
  std::string name, file;  // mangled; empty: functions that are no kernels
  Kinds kinds;
};

/// The matrix products of a line of PTX. What is neither shape nor layout stays part of a kind: .sp is
/// another.
void add_kinds(const std::string& line, Kinds& kinds) {
  if (line.find("mma") == std::string::npos) return;  // most lines, and the expressions are slow
  static const std::regex product(R"((?:^|[^\w.])(mma|wmma\.mma|wgmma\.mma_async)((?:\.[\w:]+)+))"),
      shape(R"(\.(sync|aligned|row|col|m\d\w*)(?=\.|$))");
  const std::string code = line.substr(0, line.find("//"));
  for (std::sregex_iterator found(code.begin(), code.end(), product), end; found != end; ++found) {
    const std::string name = found->str(1), types = std::regex_replace(found->str(2), shape, "");
    kinds.insert(name.substr(0, name.find('.')) + " " + types.substr(types.find_first_not_of('.')));
  }
}

/// The kernels of a PTX file; the first element is what functions have that are none. Either goes on to the
/// next one: assembly in the source has lines of braces of its own.
std::vector<Kernel> kernels_in(std::istream& ptx, const std::string& file) {
  constexpr std::string_view kEntry = ".entry ";
  std::vector<Kernel> kernels{{"", file, {}}};
  bool inside = false;
  for (std::string line; std::getline(ptx, line);) {
    const std::size_t entry = line.find(kEntry);
    if (entry != std::string::npos) {
      const std::size_t name = entry + kEntry.size();
      kernels.push_back({line.substr(name, line.find('(', name) - name), file, {}});
      inside = true;
    } else if (line.find(".func ") != std::string::npos) {
      inside = false;
    }
    add_kinds(line, (inside ? kernels.back() : kernels.front()).kinds);
  }
  return kernels;
}

std::vector<Kernel> read_kernels(const fs::path& folder) {
  std::vector<Kernel> all;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.path().extension() != ".ptx") continue;
    std::ifstream ptx(entry.path());
    const std::vector<Kernel> some = kernels_in(ptx, entry.path().lexically_relative(folder).string());
    all.insert(all.end(), some.begin(), some.end());
  }
  if (all.empty()) throw std::runtime_error("no PTX below " + folder.string());
  return all;
}

/// Those of the library; tests and the command have kernels of their own.
const std::vector<Kernel>& library_kernels() {
  static const std::vector<Kernel> kernels = read_kernels(fs::path(HALFTONE_EMULATOR_PTX) / "src/cuda");
  return kernels;
}

std::string types(DType operands) {
  switch (operands) {
    case DType::kFloat16:
      return "f32.f16.f16";
    case DType::kBFloat16:
      return "f32.bf16.bf16";
    case DType::kFloat8E4M3:
      return "f32.e4m3.e4m3";
    case DType::kInt8:
      return "s32.s8.s8";
    default:
      throw std::logic_error("no kernel multiplies " + std::string(dtype_name(operands)));
  }
}
std::string wgmma(DType operands) { return "wgmma " + types(operands); }
std::string mma(DType operands) {
  return "mma " + types(operands) + (operands == DType::kInt8 ? ".s32" : ".f32");
}

/// Q K^T and P V by warpgroups; and Q K^T once more by a warp whose offsets must rise.
Kinds promised(const PrefillConfig& c) {
  DType scores = c.dtype, values = c.dtype;
  switch (c.keys) {
    case PrefillKeys::kGiven:
      break;
    case PrefillKeys::kScaled:
    case PrefillKeys::kPacked:
      scores = values = DType::kFloat16;
      break;
    case PrefillKeys::kCodes:
      if (c.dtype != DType::kFloat8E4M3) scores = DType::kInt8;
      break;
    case PrefillKeys::kCodePages:
      scores = values = DType::kFloat8E4M3;
      break;
  }
  return {wgmma(scores), wgmma(values), mma(scores)};
}
std::string name_of(const PrefillConfig&) { return "prefill"; }

/// Codes become f16; bf16, whose range is larger, stays.
Kinds promised(const DecodeConfig& c) {
  const auto operands = [](DType type) {
    return type == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
  };
  const DType scores = operands(c.k.dtype), values = operands(c.v.dtype);
  return c.family == Family::kWarp ? Kinds{mma(scores), mma(values)} : Kinds{wgmma(scores), wgmma(values)};
}
std::string name_of(const DecodeConfig& c) { return c.family == Family::kRows ? "decode_rows" : "decode"; }

/// Codes become f16; the rotary dims of K are bf16.
Kinds promised(const LatentFewConfig& c) {
  if (c.codes == LatentCodes::kBf16) return {mma(DType::kBFloat16)};
  return {mma(DType::kFloat16), mma(DType::kBFloat16)};
}
std::string name_of(const LatentFewConfig&) { return "latent_few"; }

/// Codes become f16; the rotary dims of K what Q is, but where they are V's, too.
Kinds promised(const LatentWideConfig& c) {
  const DType rotary = c.codes == LatentCodes::kFp8Apart ? DType::kFloat16 : c.q_dtype;
  return {wgmma(DType::kFloat16), wgmma(rotary)};
}
std::string name_of(const LatentWideConfig&) { return "latent_wide"; }

Kinds promised(const LatentBf16Config& c) { return {wgmma(c.dtype)}; }
std::string name_of(const LatentBf16Config&) { return "latent_bf16"; }

std::string list(const Kinds& kinds) {
  std::string text;
  for (const std::string& kind : kinds) text += (text.empty() ? "" : ", ") + kind;
  return text.empty() ? "none" : text;
}

/// What the mangled name of a template's instance for a row contains.
std::string mangled(const std::string& name, std::size_t row) {
  return std::to_string(name.size()) + name + "ILi" + std::to_string(row) + "EE";
}

/// What is wrong with the kernel of a row; "" if nothing is.
std::string fault(const std::vector<Kernel>& kernels, const std::string& key, const Kinds& expected) {
  const auto is_it = [&](const Kernel& kernel) { return kernel.name.find(key) != std::string::npos; };
  const auto count = std::count_if(kernels.begin(), kernels.end(), is_it);
  if (count != 1) return std::to_string(count) + " kernels, not 1";
  const Kernel& found = *std::find_if(kernels.begin(), kernels.end(), is_it);
  if (found.kinds == expected) return "";
  return found.file + " has " + list(found.kinds) + "; its row promises " + list(expected);
}

/// Checks the kernels of a table; `keys` gets what their names contain.
template <class Table>
void check(const Table& table, std::vector<std::string>& keys) {
  for (std::size_t row = 0; row < table.size(); ++row) {
    if constexpr (requires { is_built(table[row]); }) {  // tables of latents are built whole
      if (!is_built(table[row])) continue;
    }
    keys.push_back(mangled(name_of(table[row]), row));
    EXPECT_EQ(fault(library_kernels(), keys.back(), promised(table[row])), "")
        << name_of(table[row]) << ", row " << row;
  }
}

TEST(Instructions, AreThoseOfTheArithmeticOfEachRow) {
  std::vector<std::string> keys;
  check(kPrefillTable, keys);
  check(kDecodeTable, keys);
  check(kLatentFewTable, keys);
  check(kLatentWideTable, keys);
  check(kLatentBf16Table, keys);
  EXPECT_FALSE(keys.empty());
  // Nor does anything else multiply matrices: a table that is new must be checked above.
  for (const Kernel& kernel : library_kernels()) {
    const bool named = std::any_of(keys.begin(), keys.end(), [&](const std::string& key) {
      return kernel.name.find(key) != std::string::npos;
    });
    EXPECT_TRUE(named || kernel.kinds.empty())
        << kernel.file << ": " << (kernel.name.empty() ? "a function that is no kernel" : kernel.name)
        << " has " << list(kernel.kinds) << ", and is of none of the tables that this test checks";
  }
}

TEST(Instructions, FaultsAreFound) {
  std::istringstream ptx(R"(.func f()
{
 mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1,%f2,%f3,%f4}, ...;
}
.visible .entry _ZN1a7prefillILi3EEEvi(
{
	{
}
	@%p1 wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%r1}, %rd1, %rd2, p; // mma.sync.aligned.m8n8k4.f64
	wgmma.fence.sync.aligned;
 mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, ...;
}
.visible .entry _ZN1a7prefillILi30EEEvi(
{
	ret;
}
)");
  const std::vector<Kernel> kernels = kernels_in(ptx, "x.ptx");
  ASSERT_EQ(kernels.size(), 3u);
  EXPECT_EQ(kernels[0].kinds, Kinds{"mma sp.f32.f16.f16.f32"});
  EXPECT_EQ(fault(kernels, mangled("prefill", 3), {"mma f32.bf16.bf16.f32", "wgmma s32.s8.s8"}), "");
  EXPECT_EQ(fault(kernels, mangled("prefill", 3), {"mma f32.bf16.bf16.f32"}),
            "x.ptx has mma f32.bf16.bf16.f32, wgmma s32.s8.s8; its row promises mma f32.bf16.bf16.f32");
  EXPECT_EQ(fault(kernels, mangled("prefill", 30), {"wgmma s32.s8.s8"}),
            "x.ptx has none; its row promises wgmma s32.s8.s8");
  EXPECT_EQ(fault(kernels, mangled("prefill", 0), {}), "0 kernels, not 1");
  EXPECT_THROW(read_kernels(fs::path(::testing::TempDir()) / "there is no such folder"), std::exception);
}

}  // namespace
}  // namespace halftone::cuda
