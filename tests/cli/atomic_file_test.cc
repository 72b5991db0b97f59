// Output files that appear complete or not at all.
#include "cli/files/atomic_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "halftone/error.h"

namespace halftone::cli {
namespace {

namespace fs = std::filesystem;

class AtomicFileTest : public ::testing::TestWithParam<AtomicFile::Hiding> {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "halftone-atomic-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }
  static std::string read(const std::string& name) {
    std::ifstream file(name);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  static void write(const std::string& name, const std::string& text) {
    AtomicFile file(name, GetParam());
    file.write(text);
    file.commit();
  }

  fs::path folder_;
};

TEST_P(AtomicFileTest, AppearsOnCommitAndReplaces) {
  {
    AtomicFile file(path("x"), GetParam());
    file.write("one");
    EXPECT_FALSE(fs::exists(path("x")));
    file.write(" two");
    file.commit();
  }
  EXPECT_EQ(read(path("x")), "one two");
  write(path("x"), "three");
  EXPECT_EQ(read(path("x")), "three");
  EXPECT_EQ(files(), 1U);
}

TEST_P(AtomicFileTest, WithoutCommitTheOldFileStays) {
  write(path("x"), "old");
  {
    AtomicFile file(path("x"), GetParam());
    file.write("new");
  }
  EXPECT_EQ(read(path("x")), "old");
  EXPECT_EQ(files(), 1U);
}

TEST_P(AtomicFileTest, KilledWriteLeavesNothing) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGKILL}) {
    if (number == SIGKILL && GetParam() == AtomicFile::Hiding::kNamed)
      continue;  // nobody can clean up after it
    const pid_t child = ::fork();
    if (child == 0) {
      AtomicFile file(path("x"), GetParam());
      file.write("half");
      ::raise(number);
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == number) << number;
    EXPECT_EQ(files(), 0U) << "after signal " << number;
  }
}

TEST_P(AtomicFileTest, ModesLinksAndRelativeNames) {
  const mode_t mask = ::umask(027);
  write(path("x"), "old");
  ::umask(mask);
  EXPECT_EQ(static_cast<unsigned>(fs::status(path("x")).permissions()), 0640U);
  ::chmod(path("x").c_str(), 0604);
  fs::create_symlink("x", path("link"));
  write(path("link"), "new");
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(read(path("x")), "new");
  EXPECT_EQ(static_cast<unsigned>(fs::status(path("x")).permissions()), 0604U);
  EXPECT_EQ(files(), 2U);
  const fs::path before = fs::current_path();
  fs::current_path(folder_);
  write("relative", "here");
  fs::current_path(before);
  EXPECT_EQ(read(path("relative")), "here");
}

TEST_P(AtomicFileTest, DevicesAreWrittenNotReplaced) {
  write("/dev/null", "gone");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST_P(AtomicFileTest, Errors) {
  const auto refuse = [](const std::string& name, ErrorCode code) {
    try {
      write(name, std::string(100'000, 'x'));
      ADD_FAILURE() << "no error for " << name;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
    }
  };
  refuse(folder_.string(), ErrorCode::kInvalidArgument);
  refuse(path("absent/x"), ErrorCode::kInvalidArgument);
  refuse(path(std::string(300, 'x')), ErrorCode::kInvalidArgument);
  refuse("", ErrorCode::kInvalidArgument);
  refuse("/dev/full", ErrorCode::kResourceExhausted);
  EXPECT_EQ(files(), 0U);
}

INSTANTIATE_TEST_SUITE_P(Hiding, AtomicFileTest,
                         ::testing::Values(AtomicFile::Hiding::kUnnamed, AtomicFile::Hiding::kNamed),
                         [](const auto& info) {
                           return info.param == AtomicFile::Hiding::kUnnamed ? "Unnamed" : "Named";
                         });

}  // namespace
}  // namespace halftone::cli
