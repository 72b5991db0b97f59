// The emulator itself, on PTX written by hand: what it computes, and what it must not let pass.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "tests/emulator/machine.h"

namespace halftone::emulator {
namespace {

namespace fs = std::filesystem;

constexpr int kThreads = 64;

/// A kernel `k(out)` of these statements; %rd1 is where the thread's 32-bit result goes, %r1 its number.
std::string kernel_of(const std::string& statements) {
  return R"(.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(
	.param .u64 k_param_0
)
{
	.reg .pred %p<8>;
	.reg .f32 %f<8>;
	.reg .b32 %r<16>;
	.reg .b64 %rd<8>;
	.shared .align 16 .b8 buffer[1024];

	ld.param.u64 	%rd2, [k_param_0];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd3, %r1, 4;
	add.s64 	%rd1, %rd2, %rd3;
)" + statements +
         "\tret;\n}\n";
}

class Emulator : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        fs::path(::testing::TempDir()) / ::testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::create_directories(folder_);
    memory().add(out_.data(), sizeof out_);
  }
  void TearDown() override {
    memory().remove(out_.data());
    fs::remove_all(folder_);
  }
  /// The results of the threads of one block.
  const std::array<std::uint32_t, kThreads>& run(const std::string& statements) {
    std::ofstream(folder_ / "k.ptx") << kernel_of(statements);
    library_ = std::make_unique<Library>(folder_.string());
    Launch launch;
    launch.program = &library_->kernel("k");
    launch.block = {kThreads, 1, 1};
    launch.params = {reinterpret_cast<std::uint64_t>(out_.data())};
    Machine(launch, 1, 7).run();
    return out_;
  }
  /// What the fault says that these statements are.
  std::string fault(const std::string& statements) {
    try {
      run(statements);
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }

  alignas(16) std::array<std::uint32_t, kThreads> out_{};

 private:
  fs::path folder_;
  std::unique_ptr<Library> library_;
};

TEST_F(Emulator, LanesGoTheirOwnWaysAndMeetAgain) {
  const auto& out = run(R"(
	mov.u32 	%r2, 0;
	mov.u32 	%r3, 0;
$again:
	setp.ge.u32 	%p1, %r2, %r1;
	@%p1 bra 	$done;
	add.s32 	%r3, %r3, %r2;
	add.s32 	%r2, %r2, 1;
	bra.uni 	$again;
$done:
	shfl.sync.bfly.b32 	%r4|%p2, %r3, 1, 31, -1;
	st.global.u32 	[%rd1], %r4;
)");
  for (std::uint32_t i = 0; i < kThreads; ++i) {
    const std::uint32_t other = i ^ 1;
    EXPECT_EQ(out[i], other * (other - 1) / 2) << i;
  }
}

TEST_F(Emulator, NumbersRoundAsPtxSays) {
  const auto& out = run(R"(
	cvt.rn.f32.u32 	%f1, %r1;
	fma.rn.f32 	%f2, %f1, 0f3DCCCCCD, 0fBF800000;
	cvt.rn.satfinite.e4m3x2.f32 	%r2, %f2, %f1;
	cvt.rn.bf16x2.f32 	%r3, %f2, %f1;
	prmt.b32 	%r4, %r2, %r3, 0x5410;
	cvt.rni.s32.f32 	%r5, %f2;
	xor.b32 	%r6, %r4, %r5;
	st.global.u32 	[%rd1], %r6;
)");
  EXPECT_EQ(out[0], (0xb800u | 0u << 16) ^ ~0u);       // e4m3 of -1 and 0, bf16 of 0, -1
  EXPECT_EQ(out[1], (0xb638u | 0x3f80u << 16) ^ ~0u);  // -0.875 is the nearest code to -0.9
  EXPECT_EQ(out[20], (0x385au | 0x41a0u << 16) ^ 1u);  // 1 and 20
}

/// Of each half: the larger magnitude, with the product of the signs, or a NaN.
TEST_F(Emulator, MagnitudesOfPairs) {
  const auto both = [&](const std::string& type, std::uint32_t a, std::uint32_t b) {
    return run("	mov.u32 	%r2, " + std::to_string(a) + ";\n	mov.u32 	%r3, " +
               std::to_string(b) + ";\n	max.NaN.xorsign.abs." + type +
               " 	%r4, %r2, %r3;\n	st.global.u32 	[%rd1], %r4;\n")[0];
  };
  EXPECT_EQ(both("bf16x2", 0x3f80c000u, 0xbfc00001u), 0xbfc0c000u);  // 1 and -1.5, -2 and a subnormal
  EXPECT_EQ(both("f16x2", 0x8000fc00u, 0x00003c00u), 0x8000fc00u);   // -0 and 0, -infinity and 1
  for (const std::uint32_t nan : {0x7fc1u, 0xffc1u}) {
    EXPECT_GT(both("bf16x2", nan, 0x7f80u) & 0x7fff, 0x7f80u);  // beside an infinity
    EXPECT_GT(both("bf16x2", 0x0001u, nan) & 0x7fff, 0x7f80u);
    EXPECT_GT(both("f16x2", 0x3c00u << 16, (nan | 0x7e00u) << 16) >> 16 & 0x7fff, 0x7c00u);
  }
}

/// Of each half: the smaller or larger value, or a NaN.
TEST_F(Emulator, EndsOfPairs) {
  const auto both = [&](const std::string& opcode, std::uint32_t a, std::uint32_t b) {
    return run("	mov.u32 	%r2, " + std::to_string(a) + ";\n	mov.u32 	%r3, " +
               std::to_string(b) + ";\n	" + opcode +
               " 	%r4, %r2, %r3;\n	st.global.u32 	[%rd1], %r4;\n")[0];
  };
  EXPECT_EQ(both("max.NaN.bf16x2", 0x3f80c000u, 0xbfc00001u), 0x3f800001u);  // 1 and -1.5, -2 and a subnormal
  EXPECT_EQ(both("min.NaN.bf16x2", 0x3f80c000u, 0xbfc00001u), 0xbfc0c000u);
  EXPECT_EQ(both("max.NaN.f16x2", 0xfc003c00u, 0xc0003800u), 0xc0003c00u);  // -infinity and -2, 1 and 0.5
  EXPECT_EQ(both("min.NaN.f16x2", 0xfc003c00u, 0xc0003800u), 0xfc003800u);
  for (const std::string end : {"min", "max"}) {
    EXPECT_GT(both(end + ".NaN.bf16x2", 0x7fc1u, 0x7f80u) & 0x7fff, 0x7f80u);  // beside an infinity
    EXPECT_GT(both(end + ".NaN.f16x2", 0x3c00u << 16, 0xfe00u << 16) >> 16 & 0x7fff, 0x7c00u);
  }
}

/// Four threads each add to the same four floats.
TEST_F(Emulator, FourFloatsAreAddedAtATime) {
  for (std::uint32_t i = 0; i < kThreads; ++i)
    out_[i] = std::bit_cast<std::uint32_t>(1.0f + static_cast<float>(i));
  const auto& out = run(R"(
	shr.u32 	%r2, %r1, 2;
	mul.wide.u32 	%rd3, %r2, 16;
	add.s64 	%rd4, %rd2, %rd3;
	mov.f32 	%f1, 0f3FC00000;
	mov.f32 	%f2, 0f40000000;
	red.relaxed.gpu.global.add.v4.f32 	[%rd4], {%f1, %f2, %f2, %f1};
)");
  for (std::uint32_t i = 0; i < kThreads; ++i) {
    const float added = i % 4 == 0 || i % 4 == 3 ? 6.0f : 8.0f;
    EXPECT_EQ(std::bit_cast<float>(out[i]), 1.0f + static_cast<float>(i) + added) << i;
  }
}

TEST_F(Emulator, BlocksMeetAtBarriers) {
  const auto& out = run(R"(
	mov.u32 	%r2, buffer;
	shl.b32 	%r3, %r1, 2;
	add.s32 	%r4, %r2, %r3;
	st.shared.u32 	[%r4], %r1;
	bar.sync 	0;
	xor.b32 	%r5, %r3, 252;
	add.s32 	%r6, %r2, %r5;
	ld.shared.u32 	%r7, [%r6];
	st.global.u32 	[%rd1], %r7;
)");
  for (std::uint32_t i = 0; i < kThreads; ++i) EXPECT_EQ(out[i], 63 - i);
}

/// Thread 0 copies; all wait for the barrier and read what came.
TEST_F(Emulator, CopiesArriveWhenTheirBarrierSaysSo) {
  for (std::uint32_t i = 0; i < kThreads; ++i) out_[i] = 1000 + i;
  const auto& out = run(R"(
	mov.u32 	%r2, buffer;
	setp.ne.s32 	%p1, %r1, 0;
	@%p1 bra 	$begun;
	mbarrier.init.shared::cta.b64 [%r2], 1;
	add.s32 	%r3, %r2, 256;
	mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
	cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd2], 256, [%r2];
$begun:
	bar.sync 	0;
$wait:
	mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
	@!%p2 bra 	$wait;
	xor.b32 	%r4, %r1, 63;
	shl.b32 	%r5, %r4, 2;
	add.s32 	%r6, %r2, %r5;
	ld.shared.u32 	%r7, [%r6+256];
	bar.sync 	0;
	st.global.u32 	[%rd1], %r7;
)");
  for (std::uint32_t i = 0; i < kThreads; ++i) EXPECT_EQ(out[i], 1000 + 63 - i);
}

TEST_F(Emulator, AccessesOutsideAreFaults) {
  EXPECT_NE(
      fault("	st.global.u32 	[%rd1+4], %r1;\n").find("outside of every allocation: block 0, warp 1"),
      std::string::npos);
  EXPECT_NE(fault("	st.global.u32 	[%rd1+2], %r1;\n").find("no multiple of the access"),
            std::string::npos);
  const std::string shared = fault("	ld.shared.u32 	%r2, [buffer+1024];\n");
  EXPECT_NE(shared.find("behind the end of shared memory"), std::string::npos) << shared;
  EXPECT_NE(shared.find("ld.shared.u32 \t%r2, [buffer+1024]"), std::string::npos) << shared;
}

TEST_F(Emulator, WaitingForNothingIsAFault) {
  const std::string text = fault(R"(
	mov.u32 	%r2, buffer;
	mbarrier.init.shared::cta.b64 [%r2], 1000;
$wait:
	mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
	@!%p2 bra 	$wait;
)");
  EXPECT_NE(text.find("every warp waits"), std::string::npos) << text;
  EXPECT_NE(text.find("mbarrier.try_wait"), std::string::npos) << text;
}

TEST_F(Emulator, BarriersAreCounted) {
  EXPECT_NE(fault("	mov.u32 	%r2, buffer;\n	mbarrier.arrive.shared::cta.b64 _, [%r2];\n")
                .find("not initialised"),
            std::string::npos);
  EXPECT_NE(fault(R"(
	mov.u32 	%r2, buffer;
	setp.ne.s32 	%p1, %r1, 0;
	@%p1 bra 	$end;
	mbarrier.init.shared::cta.b64 [%r2], 1;
	mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16;
	mbarrier.arrive.shared::cta.b64 _, [%r2];
$end:
)")
                .find("more arrivals"),
            std::string::npos);
}

TEST_F(Emulator, ABlockDoesNotEndBeforeItsCopies) {
  std::string copies;  // each may be done in time by chance
  for (int n = 0; n < 16; ++n) {
    copies +=
        "	cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd2], 16, "
        "[%r2];\n";
  }
  EXPECT_NE(fault(R"(
	mov.u32 	%r2, buffer;
	setp.ne.s32 	%p1, %r1, 0;
	@%p1 bra 	$end;
	mbarrier.init.shared::cta.b64 [%r2], 1;
	add.s32 	%r3, %r2, 256;
	mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
)" + copies + "$end:\n")
                .find("ended before a copy that it did not wait for"),
            std::string::npos);
}

TEST_F(Emulator, ABlockDoesNotEndBeforeCopiesThatAWarpMustWaitFor) {
  EXPECT_NE(fault(R"(
	mov.u32 	%r2, buffer;
	setp.ne.s32 	%p1, %r1, 0;
	@%p1 bra 	$end;
	cp.async.cg.shared.global [%r2], [%rd2], 16;
	cp.async.commit_group;
	cp.async.cg.shared.global [%r2+16], [%rd2], 16;
	cp.async.commit_group;
	cp.async.wait_group 1;
$end:
)")
                .find("ended before a copy that it did not wait for"),
            std::string::npos);
}

TEST_F(Emulator, InstructionsThatItDoesNotKnowAreNamed) {
  EXPECT_NE(fault("	sin.approx.f32 	%f1, %f2;\n").find("does not know sin.approx.f32"),
            std::string::npos);
}

}  // namespace
}  // namespace halftone::emulator
