// The safetensors reader against every malformed file we could think of, and the atomic writer.
#include "cli/files/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>

#include "halftone/error.h"
#include "reference/sanitizer.h"
#include "tests/expect_error.h"

namespace halftone::cli {
namespace {

namespace fs = std::filesystem;

std::string le64(std::uint64_t value) {
  std::string bytes(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(value >> (8 * i));
  return bytes;
}

/// A file from a header and `data_bytes` of data.
std::string file_of(const std::string& header, std::size_t data_bytes) {
  return le64(header.size()) + header + std::string(data_bytes, '\x01');
}

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets +
         "}";
}

class SafetensorsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "halftone-safetensors-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name = "x.safetensors") const { return (folder_ / name).string(); }

  void store(const std::string& content) const {
    std::ofstream file(path(), std::ios::binary | std::ios::trunc);
    file << content;
    ASSERT_TRUE(file.good());
  }

  /// Opens `content` and expects the error code and a piece of its sentence.
  void expect_refused(const std::string& content, ErrorCode code, const std::string& piece) const {
    store(content);
    expect_open_error(path(), code, piece);
  }

  static void expect_open_error(const std::string& name, ErrorCode code, const std::string& piece) {
    expect_error(code, {piece}, [&] { const SafetensorsReader reader(name); });
  }

  std::size_t files_in_folder() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

  fs::path folder_;
};

TEST_F(SafetensorsTest, ReadsEveryDTypeAndMetadata) {
  const std::vector<TensorDeclaration> declarations = {
      {"f32", DType::kFloat32, {2, 3}},  {"f16", DType::kFloat16, {4}}, {"bf16", DType::kBFloat16, {1, 2, 2}},
      {"e4m3", DType::kFloat8E4M3, {5}}, {"i8", DType::kInt8, {3}},     {"u8", DType::kUInt8, {2}},
      {"i32", DType::kInt32, {2}},       {"i64", DType::kInt64, {1}},   {"empty", DType::kFloat32, {0, 7}},
      {"scalar", DType::kInt32, {}}};
  std::string content;
  {
    SafetensorsWriter writer(path(), declarations, {{"author", "a test"}, {"unicode", "h\xc3\xa9"}});
    char next = 0;
    for (const TensorDeclaration& d : declarations) {
      std::int64_t bytes = dtype_bits(d.dtype) / 8;
      for (const std::int64_t extent : d.shape) bytes *= extent;
      std::string piece;
      for (std::int64_t i = 0; i < bytes; ++i) piece += next++;
      writer.write(std::as_bytes(std::span(piece)));
      content += piece;
    }
    EXPECT_FALSE(fs::exists(path()));
    writer.commit();
  }
  const SafetensorsReader reader(path());
  EXPECT_EQ(reader.metadata().at("author"), "a test");
  EXPECT_EQ(reader.metadata().at("unicode"), "h\xc3\xa9");
  ASSERT_EQ(reader.tensors().size(), declarations.size());
  std::string read;
  for (const TensorDeclaration& d : declarations) {
    const TensorInfo* info = reader.find(d.name);
    ASSERT_NE(info, nullptr) << d.name;
    EXPECT_EQ(info->dtype, d.dtype);
    EXPECT_EQ(info->shape, d.shape);
    const std::vector<std::byte> bytes = reader.read(*info);
    read.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  EXPECT_EQ(read, content);
  EXPECT_EQ(reader.find("absent"), nullptr);
  // A range from the middle of a tensor.
  std::byte two[2];
  reader.read(*reader.find("e4m3"), 2, two);
  const std::size_t start = 24 + 8 + 8 + 2;
  EXPECT_EQ(std::memcmp(two, content.data() + start, 2), 0);
  EXPECT_THROW(reader.read(*reader.find("e4m3"), 4, two), Error);
  EXPECT_THROW(reader.read(*reader.find("e4m3"), ~std::uint64_t{0}, two), Error);
}

TEST_F(SafetensorsTest, AcceptsWhatTheFormatAllows) {
  for (const char* dtype : {"F64", "I16", "U16", "U64", "F8_E5M2", "BOOL"}) {  // sized, but not for us
    const int bytes = std::string(dtype) == "F64" || std::string(dtype) == "U64" ? 8
                      : dtype[1] == '1'                                          ? 2
                                                                                 : 1;
    store(file_of("{" + tensor("a", dtype, "[2]", "[0," + std::to_string(2 * bytes) + "]") + "}",
                  static_cast<std::size_t>(2 * bytes)));
    const SafetensorsReader reader(path());
    EXPECT_FALSE(reader.find("a")->dtype.has_value()) << dtype;
    EXPECT_EQ(reader.find("a")->dtype_text, dtype);
  }
  store(file_of("{}", 0));
  EXPECT_TRUE(SafetensorsReader(path()).tensors().empty());
  store(file_of("{}      ", 0));  // padding after the header
  EXPECT_TRUE(SafetensorsReader(path()).tensors().empty());
  store(file_of("{" + tensor("b", "U8", "[2]", "[1,3]") + "," + tensor("a", "U8", "[1]", "[0,1]") + "}", 3));
  EXPECT_EQ(SafetensorsReader(path()).tensors().front().name, "a");  // header order is free
  // One gap-free span list with empty tensors in between.
  store(file_of("{" + tensor("a", "U8", "[0]", "[0,0]") + "," + tensor("b", "U8", "[1]", "[0,1]") + "," +
                    tensor("c", "U8", "[3,0]", "[1,1]") + "}",
                1));
  EXPECT_EQ(SafetensorsReader(path()).tensors().size(), 3U);
}

TEST_F(SafetensorsTest, ZeroToSevenBytes) {
  for (std::size_t n = 0; n < 8; ++n) {
    expect_refused(std::string(n, '\xff'), ErrorCode::kCorruptFile, "has " + std::to_string(n) + " bytes");
  }
}

TEST_F(SafetensorsTest, HeaderLength) {
  const std::string header = "{" + tensor("a", "U8", "[4]", "[0,4]") + "}";
  for (const std::uint64_t length : {~std::uint64_t{0}, std::uint64_t{1} << 63, kMaxHeaderBytes + 1}) {
    expect_refused(le64(length) + header + "1234", ErrorCode::kCorruptFile, "but the limit is 100000000");
  }
  expect_refused(le64(kMaxHeaderBytes) + header + "1234", ErrorCode::kCorruptFile, "follow: it is cut short");
  expect_refused(le64(header.size() + 5) + header + "1234", ErrorCode::kCorruptFile,
                 "follow: it is cut short");
  expect_refused(le64(0) + header + "1234", ErrorCode::kCorruptFile, "not valid UTF-8 JSON");
  expect_refused(le64(header.size() - 1) + header + "1234", ErrorCode::kCorruptFile, "not valid UTF-8 JSON");
  expect_refused(le64(header.size() + 4) + header + "1234", ErrorCode::kCorruptFile, "not valid UTF-8 JSON");
}

TEST_F(SafetensorsTest, EveryTruncationIsAnError) {
  const std::string whole =
      file_of("{" + tensor("a", "F32", "[2]", "[0,8]") + "," + tensor("b", "U8", "[3]", "[8,11]") + "}", 11);
  store(whole);
  EXPECT_EQ(SafetensorsReader(path()).tensors().size(), 2U);
  for (std::size_t n = 0; n < whole.size(); ++n) {
    expect_refused(whole.substr(0, n), ErrorCode::kCorruptFile, "x.safetensors");
  }
  expect_refused(whole + "!", ErrorCode::kCorruptFile, "1 bytes follow its last tensor");
}

TEST_F(SafetensorsTest, EveryByteFlipIsReadOrRefused) {
  const std::string whole =
      file_of("{\"__metadata__\":{\"k\":\"v\"}," + tensor("a", "F32", "[2]", "[0,8]") + "}", 8);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    for (const int flip : {0x01, 0x20, 0x80, 0xff}) {
      std::string broken = whole;
      broken[i] = static_cast<char>(broken[i] ^ flip);
      store(broken);
      try {
        const SafetensorsReader reader(path());
        for (const TensorInfo& info : reader.tensors()) EXPECT_EQ(reader.read(info).size(), info.bytes());
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kCorruptFile) << error.what();
      }
    }
  }
}

TEST_F(SafetensorsTest, Offsets) {
  const auto one = [](const std::string& offsets) { return "{" + tensor("a", "U8", "[4]", offsets) + "}"; };
  const auto two = [](const std::string& a, const std::string& b) {
    return "{" + tensor("a", "U8", "[4]", a) + "," + tensor("b", "U8", "[4]", b) + "}";
  };
  const auto bad = ErrorCode::kCorruptFile;
  expect_refused(file_of(one("[4,0]"), 4), bad, "ends at byte 0 before it begins at 4");
  expect_refused(file_of(one("[18446744073709551615,3]"), 4), bad, "before it begins");
  expect_refused(file_of(one("[0,18446744073709551615]"), 4), bad, "the file has 4 bytes of data");
  expect_refused(file_of(one("[0,18446744073709551616]"), 4), bad, "no 64-bit unsigned integer");
  expect_refused(file_of(one("[-4,0]"), 4), bad, "negative number -4");
  expect_refused(file_of(one("[0.0,4]"), 4), bad, "no 64-bit unsigned integer");
  expect_refused(file_of(one("[0]"), 4), bad, "must give 2");
  expect_refused(file_of(one("[]"), 4), bad, "must give 2");
  expect_refused(file_of(one("[0,4,4]"), 4), bad, "more than 2 data_offsets");
  expect_refused(file_of(one("[0,5]"), 5), bad, "shape [4] of U8 needs 4");
  expect_refused(file_of(two("[0,4]", "[2,6]"), 6), bad, "overlaps");
  expect_refused(file_of(two("[0,4]", "[0,4]"), 4), bad, "overlaps");
  expect_refused(file_of(two("[0,4]", "[5,9]"), 9), bad, "hole");
  expect_refused(file_of(one("[1,5]"), 5), bad, "hole");
  expect_refused(file_of(one("[0,4]"), 9), bad, "5 bytes follow its last tensor");
}

TEST_F(SafetensorsTest, Shapes) {
  const auto shaped = [](const std::string& dtype, const std::string& shape) {
    return file_of("{" + tensor("a", dtype, shape, "[0,4]") + "}", 4);
  };
  const auto bad = ErrorCode::kCorruptFile;
  expect_refused(shaped("U8", "[5]"), bad, "has 4 bytes, but shape [5] of U8 needs 5");
  expect_refused(shaped("F32", "[2]"), bad, "needs 8");
  expect_refused(shaped("U8", "[4294967296,4294967296]"), bad, "exceeds 64 bits");  // wraps to 0
  expect_refused(shaped("F32", "[4611686018427387905]"), bad, "exceeds 64 bits");   // wraps to 4 bytes
  expect_refused(shaped("U8", "[2305843009213693952,8,2]"), bad, "exceeds 64 bits");
  expect_refused(shaped("U8", "[9223372036854775808]"), bad, "beyond 2^63 - 1");
  expect_refused(shaped("U8", "[-4]"), bad, "negative number");
  expect_refused(shaped("U8", "[4.0]"), bad, "no 64-bit unsigned integer");
  expect_refused(shaped("U8", "[\"4\"]"), bad, "a string where none may be");
  expect_refused(shaped("U8", "[[4]]"), bad, "an array where none may be");
  expect_refused(shaped("U8", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,4]"), bad, "more than 16 dimensions");
  expect_refused(shaped("F4", "[7]"), bad, "needs 3");  // 3.5 bytes
}

TEST_F(SafetensorsTest, DTypeKeysAndTypes) {
  const auto bad = ErrorCode::kCorruptFile;
  const auto body = [](const std::string& text) { return file_of("{\"a\":" + text + "}", 1); };
  expect_refused(file_of("{" + tensor("a", "F33", "[1]", "[0,1]") + "}", 1), bad, "unknown dtype 'F33'");
  expect_refused(file_of("{" + tensor("a", "u8", "[1]", "[0,1]") + "}", 1), bad, "unknown dtype 'u8'");
  expect_refused(body(R"({"dtype":8,"shape":[1],"data_offsets":[0,1]})"), bad, "a number where none may be");
  expect_refused(body(R"({"dtype":null,"shape":[1],"data_offsets":[0,1]})"), bad, "null where none may be");
  expect_refused(body(R"({"shape":[1],"data_offsets":[0,1]})"), bad, "lacks dtype of tensor 'a'");
  expect_refused(body(R"({"dtype":"U8","data_offsets":[0,1]})"), bad, "lacks shape");
  expect_refused(body(R"({"dtype":"U8","shape":[1]})"), bad, "lacks data_offsets");
  expect_refused(body(R"({"dtype":"U8","shape":1,"data_offsets":[0,1]})"), bad, "a number where none may be");
  expect_refused(body(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":"x"})"), bad,
                 "a string where none may be");
  expect_refused(body("[]"), bad, "an array where none may be");
  expect_refused(body("7"), bad, "a number where none may be");
  expect_refused(body("true"), bad, "true or false where none may be");
  for (const char* root : {"[]", "7", "null", "\"text\""})
    expect_refused(file_of(root, 0), bad, "where none may be");
  expect_refused(file_of(R"({"__metadata__":{"k":1}})", 0), bad, "a number where none may be");
  expect_refused(file_of(R"({"__metadata__":{"k":{}}})", 0), bad, "an object where none may be");
  expect_refused(file_of(R"({"__metadata__":[]})", 0), bad, "an array where none may be");
}

TEST_F(SafetensorsTest, DuplicateKeys) {
  const auto bad = ErrorCode::kCorruptFile;
  expect_refused(
      file_of("{" + tensor("a", "U8", "[1]", "[0,1]") + "," + tensor("a", "U8", "[1]", "[1,2]") + "}", 2),
      bad, "has the key 'a' twice");
  // The same name behind another spelling.
  expect_refused(
      file_of("{" + tensor("a", "U8", "[1]", "[0,1]") + "," + tensor("\\u0061", "U8", "[1]", "[1,2]") + "}",
              2),
      bad, "has the key 'a' twice");
  expect_refused(file_of(R"({"__metadata__":{"k":"1","k":"2"}})", 0), bad, "has the key 'k' twice");
  expect_refused(file_of(R"({"__metadata__":{},"__metadata__":{}})", 0), bad,
                 "has the key '__metadata__' twice");
  expect_refused(file_of(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1), bad,
                 "twice");
  expect_refused(file_of(R"({"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})", 1), bad,
                 "twice");
  expect_refused(file_of(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"data_offsets":[0,1]}})", 1),
                 bad, "twice");
}

TEST_F(SafetensorsTest, DeepNestingAndBrokenJson) {
  const auto bad = ErrorCode::kCorruptFile;
  const std::size_t depth = 1'000'000;
  expect_refused(file_of(std::string(depth, '['), 0), bad, "an array where none may be");
  std::string objects = "{";
  for (std::size_t i = 0; i < depth; ++i) objects += "\"a\":{";
  expect_refused(file_of(objects, 0), bad, "an object where none may be");
  expect_refused(file_of("{\"a\":" + std::string(depth, '[') + std::string(depth, ']') + "}", 0), bad,
                 "an array where none may be");
  for (const char* text :
       {"{", "{\"a\"", "{]", "{\"a\":}", "}", "{} x", "{},{}", "// c\n{}", "{'a':1}", " ", "\xef\xbb\xbf"}) {
    expect_refused(file_of(text, 0), bad, "not valid UTF-8 JSON");
  }
}

TEST_F(SafetensorsTest, BadUtf8AndControlCharacters) {
  const auto bad = ErrorCode::kCorruptFile;
  for (const char* name :
       {"\xff", "\xc3(", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xc0\xaf", "\x01", "\\ud800"}) {
    expect_refused(file_of("{" + tensor(name, "U8", "[1]", "[0,1]") + "}", 1), bad, "not valid UTF-8 JSON");
  }
  // An escaped control character is legal JSON; a sentence must not pass it to the terminal.
  store(file_of("{" + tensor("a\\u001b[2J", "U8", "[2]", "[0,1]") + "}", 1));
  try {
    const SafetensorsReader reader(path());
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find('\x1b'), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("a\\x1b[2J"), std::string::npos) << error.what();
  }
}

TEST_F(SafetensorsTest, NotRegularFiles) {
  const auto bad = ErrorCode::kInvalidArgument;
  expect_open_error(folder_.string(), bad, "a directory");
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  expect_open_error(path("fifo"), bad, "a FIFO, socket or device");  // and does not wait for a writer
  expect_open_error("/dev/null", bad, "a FIFO, socket or device");
  expect_open_error("/dev/zero", bad, "a FIFO, socket or device");
  expect_open_error(path("absent"), bad, "No such file");
  expect_open_error("", bad, "cannot be opened");
  expect_open_error(std::string(10'000, 'x'), bad, "cannot be opened");
  fs::create_symlink(path("loop"), path("loop"));
  expect_open_error(path("loop"), bad, "cannot be opened");
}

TEST_F(SafetensorsTest, ChecksBeforeItAllocates) {
  if (reference::kSanitized) GTEST_SKIP() << "sanitizers need the address space that this test takes away";
  // Under 64 MiB more address space than now, every lie about a size must still give its typed error.
  const pid_t child = ::fork();
  if (child == 0) {
    std::ifstream statm("/proc/self/statm");
    rlim_t pages = 0;
    statm >> pages;
    const rlimit limit = {pages * 4096 + (64U << 20), pages * 4096 + (64U << 20)};
    ::setrlimit(RLIMIT_AS, &limit);
    int failures = 0;
    const auto expect_corrupt = [&](const std::string& content) {
      std::ofstream(path(), std::ios::binary | std::ios::trunc) << content;
      try {
        const SafetensorsReader reader(path());
        ++failures;
      } catch (const Error& error) {
        failures += error.code() != ErrorCode::kCorruptFile;
      } catch (...) {
        ++failures;
      }
    };
    expect_corrupt(le64(~std::uint64_t{0}) + "{}");
    expect_corrupt(le64(kMaxHeaderBytes) + "{}");
    expect_corrupt(
        file_of("{" + tensor("a", "F32", "[1152921504606846975]", "[0,4611686018427387900]") + "}", 4));
    expect_corrupt(file_of("{" + tensor("a", "F32", "[1000000000000]", "[0,4000000000000]") + "}", 4));
    ::_exit(failures);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(SafetensorsTest, HundredThousandTensors) {
  const int count = 100'000;
  std::string header = "{";
  for (int i = 0; i < count; ++i) {
    const std::string at = std::to_string(i), next = std::to_string(i + 1);
    if (i > 0) header += ",";
    header += tensor("tensor." + at, "U8", "[1]", "[" + at + "," + next + "]");
  }
  store(file_of(header + "}", count));
  const std::clock_t start = std::clock();  // of the processor: other work does not count
  const SafetensorsReader reader(path());
  EXPECT_EQ(reader.tensors().size(), static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) ASSERT_NE(reader.find("tensor." + std::to_string(i)), nullptr);
  EXPECT_LT(std::clock() - start, 10 * CLOCKS_PER_SEC);  // linear: tenths of a second
}

TEST_F(SafetensorsTest, EntriesAreBounded) {
  std::string header = "{\"__metadata__\":{\"0\":\"\"";
  for (std::size_t i = 1; i <= kMaxHeaderEntries; ++i) header += ",\"" + std::to_string(i) + "\":\"\"";
  expect_refused(file_of(header + "}}", 0), ErrorCode::kCorruptFile, "more than 1000000 entries");
}

TEST_F(SafetensorsTest, FileThatShrinksAfterOpening) {
  store(file_of("{" + tensor("a", "U8", "[4096]", "[0,4096]") + "}", 4096));
  const SafetensorsReader reader(path());
  fs::resize_file(path(), 200);
  try {
    reader.read(*reader.find("a"));
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorruptFile);
    EXPECT_NE(std::string(error.what()).find("cut short"), std::string::npos) << error.what();
  }
}

TEST_F(SafetensorsTest, WriterRefusesBadDeclarations) {
  const auto refuse = [&](const std::vector<TensorDeclaration>& tensors,
                          const std::map<std::string, std::string>& meta) {
    try {
      const SafetensorsWriter writer(path(), tensors, meta);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    }
    EXPECT_EQ(files_in_folder(), 0U);
  };
  refuse({{"a", DType::kUInt8, {1}}, {"a", DType::kUInt8, {1}}}, {});
  refuse({{"__metadata__", DType::kUInt8, {1}}}, {});
  refuse({{"a", DType::kInt4, {2}}}, {});
  refuse({{"a", DType::kUInt8, {-1}}}, {});
  refuse({{"a", DType::kFloat32, {std::int64_t{1} << 62, 4}}}, {});
  refuse({{"\xff", DType::kUInt8, {1}}}, {});
  refuse({}, {{"k", "\xc3("}});
}

TEST_F(SafetensorsTest, UnfinishedWriteLeavesNothing) {
  store("old");
  {
    SafetensorsWriter writer(path(), {{"a", DType::kUInt8, {8}}}, {});
    const std::string half = "1234";
    writer.write(std::as_bytes(std::span(half)));
    EXPECT_THROW(writer.commit(), Error);
    const std::string too_much = "56789";
    EXPECT_THROW(writer.write(std::as_bytes(std::span(too_much))), Error);
  }
  std::string content;
  std::ifstream(path()) >> content;
  EXPECT_EQ(content, "old");
  EXPECT_EQ(files_in_folder(), 1U);
}

}  // namespace
}  // namespace halftone::cli
