// Whether each compiled kernel has the matrix products of its row's arithmetic, and no others: a kernel that
// falls back to other instructions may still compute the right numbers. Reads the PTX that nvcc leaves, and
// of prefill the machine code; executes none of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
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

/// The kernels of machine code as nvdisasm prints it: of their products those of warpgroups, without the
/// shape, and of other instructions those on local memory.
std::vector<Kernel> machine_kernels_in(std::istream& code, const std::string& file) {
  constexpr std::string_view kText = ".text.";
  std::vector<Kernel> kernels;
  for (std::string line; std::getline(code, line);) {
    if (line.starts_with(kText)) {
      kernels.push_back({line.substr(kText.size(), line.size() - kText.size() - 1), file, {}});
      continue;
    }
    for (const char* part : {"GMMA.", " LDL", " STL"}) {
      const std::size_t found = line.find(part);
      if (found == std::string::npos || kernels.empty()) continue;
      const std::size_t begin = line.rfind(' ', found + 1) + 1;
      std::string name = line.substr(begin, line.find_first_of(" ;", begin) - begin);
      if (name.find("GMMA") != std::string::npos) {
        const std::size_t shape = name.find('.');
        name.erase(shape, name.find('.', shape + 1) - shape);
      }
      kernels.back().kinds.insert(name);
    }
  }
  return kernels;
}

std::vector<Kernel> disassembled(const fs::path& cubin, const std::string& file) {
  const fs::path said = fs::path(::testing::TempDir()) / ("nvdisasm-" + cubin.filename().string() + ".txt");
  const std::string command = "'" + std::string(HALFTONE_NVDISASM) + "' -c -raw -ndf '" + cubin.string() +
                              "' 2>'" + said.string() + "'";
  std::FILE* const pipe = popen(command.c_str(), "r");  // NOLINT(cert-env33-c)
  if (pipe == nullptr) throw std::runtime_error("no shell");
  std::string text, piece(1 << 16, '\0');
  while (const std::size_t bytes = std::fread(piece.data(), 1, piece.size(), pipe))
    text.append(piece, 0, bytes);
  const int status = pclose(pipe);
  std::ostringstream why;
  why << std::ifstream(said).rdbuf();
  fs::remove(said);
  if (status != 0) throw std::runtime_error(command + " failed: " + why.str());
  std::istringstream code(std::move(text));
  return machine_kernels_in(code, file);
}

/// Of the files below a folder.
template <class Read>
std::vector<Kernel> read_kernels(const fs::path& folder, const char* extension, const Read& read) {
  std::vector<Kernel> all;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.path().extension() != extension) continue;
    const std::vector<Kernel> some = read(entry.path(), entry.path().lexically_relative(folder).string());
    all.insert(all.end(), some.begin(), some.end());
  }
  if (all.empty()) throw std::runtime_error(std::string("no ") + extension + " below " + folder.string());
  return all;
}

std::vector<Kernel> read_ptx(const fs::path& folder) {
  return read_kernels(folder, ".ptx", [](const fs::path& path, const std::string& file) {
    std::ifstream ptx(path);
    return kernels_in(ptx, file);
  });
}

/// Those of the library; tests and the command have kernels of their own.
const std::vector<Kernel>& library_kernels() {
  static const std::vector<Kernel> kernels = read_ptx(fs::path(HALFTONE_EMULATOR_PTX) / "src/cuda");
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
      scores = DType::kFloat16;
      break;
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

/// What machine code has for the warpgroups' products among those of PTX.
Kinds machine_kinds(const Kinds& promised) {
  Kinds kinds;
  for (const auto& [ptx, code] : {std::pair{DType::kFloat16, "HGMMA.F32"},
                                  {DType::kBFloat16, "HGMMA.F32.BF16"},
                                  {DType::kInt8, "IGMMA.S8.S8"},
                                  {DType::kFloat8E4M3, "QGMMA.F32.E4M3.E4M3"}}) {
    if (promised.contains(wgmma(ptx))) kinds.insert(code);
  }
  return kinds;
}

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

/// In machine code, too, the products are those of the arithmetic, and nothing lies in local memory.
TEST(Instructions, OfPrefillInMachineCode) {
  if (std::string_view(HALFTONE_NVDISASM).empty()) GTEST_SKIP() << "no nvdisasm";
  const std::vector<Kernel> kernels =
      read_kernels(fs::path(HALFTONE_EMULATOR_PTX) / "src/cuda/prefill", ".cubin", disassembled);
  Kinds all;  // of the table, of which a smaller build has some rows
  for (std::size_t row = 0; row < kPrefillTable.size(); ++row) {
    const Kinds expected = machine_kinds(promised(kPrefillTable[row]));
    EXPECT_FALSE(expected.empty()) << "row " << row;
    all.insert(expected.begin(), expected.end());
    if (!is_built(kPrefillTable[row])) continue;
    EXPECT_EQ(fault(kernels, mangled("prefill", row), expected), "") << "row " << row;
  }
  EXPECT_EQ(all.size(), 4u) << list(all);
  for (const Kernel& kernel : kernels) {
    for (const std::string& kind : kernel.kinds) {
      EXPECT_FALSE(kind.starts_with("LDL") || kind.starts_with("STL"))
          << kernel.file << ": " << kernel.name << " has " << kind;
    }
  }
}

TEST(Instructions, FaultsInMachineCodeAreFound) {
  std::istringstream code(R"(	.headerflags	@"EF_CUDA_SM90"
//--------------------- .text._ZN1a7prefillILi3EEEvi --------------------------
	.section	.text._ZN1a7prefillILi3EEEvi,"ax",@progbits
.text._ZN1a7prefillILi3EEEvi:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*6460*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R88, gdesc[UR4], RZ, !UPT ;
        /*6470*/              @!P0 IGMMA.64x80x32.S8.S8 R24, gdesc[UR8], R24, gsb0 ;
        /*6480*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
.text._ZN1a7prefillILi4EEEvi:
        /*0010*/               @P1 LDL.64 R4, [R1+0x8] ;
        /*0020*/                   HGMMA.64x96x16.F32.BF16 R24, R4, gdesc[UR8], R24 ;
        /*0030*/                   STL [R1], R2 ;
)");
  const std::vector<Kernel> kernels = machine_kernels_in(code, "x.cubin");
  ASSERT_EQ(kernels.size(), 2u);
  EXPECT_EQ(fault(kernels, mangled("prefill", 3), {"IGMMA.S8.S8", "QGMMA.F32.E4M3.E4M3"}), "");
  EXPECT_EQ(fault(kernels, mangled("prefill", 4), {"HGMMA.F32.BF16"}),
            "x.cubin has HGMMA.F32.BF16, LDL.64, STL; its row promises HGMMA.F32.BF16");
  EXPECT_EQ(machine_kinds({wgmma(DType::kBFloat16), mma(DType::kFloat16)}), Kinds{"HGMMA.F32.BF16"});
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
  EXPECT_THROW(read_ptx(fs::path(::testing::TempDir()) / "there is no such folder"), std::exception);
}

}  // namespace
}  // namespace halftone::cuda
