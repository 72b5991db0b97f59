#include "cli/files/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "cli/terminal/text.h"
#include "halftone/error.h"

namespace halftone::cli {
namespace {

// The one hidden named file that a signal must remove. Only used where O_TMPFILE is missing.
std::array<char, PATH_MAX> doomed_path;
std::atomic<bool> doomed{false};
constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};

void remove_doomed(int signal_number) {
  if (doomed.load()) ::unlink(doomed_path.data());
  ::signal(signal_number, SIG_DFL);
  ::raise(signal_number);
}

void guard_from_signals(const std::string& path) {
  static std::once_flag installed;
  std::call_once(installed, [] {
    for (const int number : kSignals) {
      struct sigaction old {};
      ::sigaction(number, nullptr, &old);
      if (old.sa_handler != SIG_DFL) continue;  // ignored, or the program has a handler of its own
      struct sigaction action {};
      action.sa_handler = remove_doomed;
      ::sigaction(number, &action, nullptr);
    }
  });
  if (path.size() >= doomed_path.size()) return;
  ::memcpy(doomed_path.data(), path.c_str(), path.size() + 1);
  doomed.store(true);
}

std::string hidden_name(const std::string& target) {
  static std::atomic<unsigned> counter{0};
  const std::size_t slash = target.rfind('/');
  const std::string folder = slash == std::string::npos ? "" : target.substr(0, slash + 1);
  return fmt::format("{}.halftone-{}-{}.tmp", folder, ::getpid(), counter.fetch_add(1));
}

}  // namespace

void AtomicFile::fail(std::string_view action) const {
  const int reason = errno;
  const bool space = reason == ENOSPC || reason == EDQUOT || reason == EFBIG || reason == EIO;
  throw Error(
      space ? ErrorCode::kResourceExhausted : ErrorCode::kInvalidArgument,
      fmt::format("output file '{}' cannot be {} ({}): {}.", printable(path_), action, ::strerror(reason),
                  space ? "free some space or name another place" : "name a writable file"));
}

AtomicFile::AtomicFile(std::string path, Hiding hiding) : path_(std::move(path)) {
  if (path_.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "output file is '', but must be a file name: name one.");
  }
  struct stat status {};
  mode_t mode = 0;
  if (::stat(path_.c_str(), &status) == 0) {
    if (S_ISDIR(status.st_mode)) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("output file '{}' is a directory: name a file in it.", printable(path_)));
    }
    if (!S_ISREG(status.st_mode)) {  // /dev/null must never be renamed over
      fd_ = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
      if (fd_ < 0) fail("opened");
      return;
    }
    if (::access(path_.c_str(), W_OK) != 0) fail("written");
    mode = status.st_mode & 07777;
    char resolved[PATH_MAX];
    if (::realpath(path_.c_str(), resolved) == nullptr) fail("resolved");
    target_ = resolved;
  } else {
    target_ = path_;
    mode = ::umask(0);
    ::umask(mode);
    mode = 0666 & ~mode;
  }
  const std::size_t slash = target_.rfind('/');
  open_hidden(slash == std::string::npos ? "." : target_.substr(0, slash + 1), mode, hiding);
}

void AtomicFile::open_hidden(const std::string& folder, unsigned mode, Hiding hiding) {
  const bool named = hiding == Hiding::kNamed;
  if (!named) fd_ = ::open(folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
  if (named || (fd_ < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL))) {
    const std::string name = hidden_name(target_);
    guard_from_signals(name);
    fd_ = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd_ >= 0) hidden_ = name;
  }
  if (fd_ < 0) fail("created");
  if (::fchmod(fd_, mode) != 0) fail("given its mode");
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!hidden_.empty()) {
    ::unlink(hidden_.c_str());
    doomed.store(false);
  }
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd_, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("written");
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
}

void AtomicFile::commit() {
  if (target_.empty()) {
    const int fd = fd_;
    fd_ = -1;
    if (::close(fd) != 0) fail("closed");
    return;
  }
  if (::fsync(fd_) != 0) fail("synced");
  if (hidden_.empty()) {
    const std::string name = hidden_name(target_);
    const std::string source = fmt::format("/proc/self/fd/{}", fd_);
    guard_from_signals(name);
    if (::linkat(AT_FDCWD, source.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) != 0) fail("named");
    hidden_ = name;
  }
  if (::rename(hidden_.c_str(), target_.c_str()) != 0) fail("renamed into place");
  hidden_.clear();
  doomed.store(false);
  const std::size_t slash = target_.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : target_.substr(0, slash + 1);
  if (const int directory = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); directory >= 0) {
    ::fsync(directory);  // best effort: some file systems refuse it
    ::close(directory);
  }
}

void write_text(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

}  // namespace halftone::cli
