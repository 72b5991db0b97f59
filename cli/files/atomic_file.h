// Output files that appear complete or not at all.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace halftone::cli {

/// Writes a file that replaces `path` only on commit(). Until then the data lives in an unnamed file of the
/// same directory (O_TMPFILE; where the file system has none, in a hidden named file that SIGINT, SIGTERM and
/// SIGHUP remove), so an interrupted run leaves `path` as it was and nothing else behind. Commit syncs before
/// it renames.
///
/// A symbolic link is followed; an existing file keeps its mode. A device or FIFO is written directly.
/// Throws InvalidArgument (a directory, a missing folder, no permission) and ResourceExhausted (no space).
class AtomicFile {
 public:
  /// Where the data waits for commit(). kNamed is what kUnnamed falls back to.
  enum class Hiding { kUnnamed, kNamed };

  explicit AtomicFile(std::string path, Hiding hiding = Hiding::kUnnamed);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void commit();

 private:
  void open_hidden(const std::string& folder, unsigned mode, Hiding hiding);
  [[noreturn]] void fail(std::string_view action) const;

  std::string path_;    ///< as given, for messages
  std::string target_;  ///< with links resolved; empty when the target is written directly
  std::string hidden_;  ///< name of the temporary file, empty while it has none
  int fd_ = -1;
};

/// Writes `text` to `path` atomically.
void write_text(const std::string& path, std::string_view text);

}  // namespace halftone::cli
