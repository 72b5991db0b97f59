// How the C ABI turns exceptions into status codes and reads and writes structs whose size the caller states.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include "halftone/error.h"
#include "halftone/halftone.h"

namespace halftone::c_api {

/// Keeps `sentence` for halftone_last_error() of this thread, cut to its buffer; returns `status`. Never
/// allocates.
halftone_status fail(halftone_status status, std::string_view sentence) noexcept;

/// Runs `body` and returns the status of what it threw.
template <class Body>
halftone_status guarded(Body&& body) noexcept {
  try {
    body();
    return HALFTONE_OK;
  } catch (const Error& e) {
    return fail(static_cast<halftone_status>(e.code()), e.what());
  } catch (const std::bad_alloc&) {
    return fail(HALFTONE_RESOURCE_EXHAUSTED,
                "host memory is exhausted: free memory or make the problem smaller.");
  } catch (const std::length_error&) {
    return fail(HALFTONE_RESOURCE_EXHAUSTED,
                "a size exceeds what host memory can hold: make the problem smaller.");
  } catch (const std::exception& e) {
    return fail(HALFTONE_INTERNAL, e.what());
  } catch (...) {
    return fail(HALFTONE_INTERNAL,
                "an exception of unknown type reached the C ABI: this is a defect in halftone.");
  }
}

/// The path of an argument for sentences, as "args.cache.pages": spelled out only when a sentence needs it,
/// so that translating valid arguments never allocates.
struct Name {
  std::string_view leaf;
  const Name* parent = nullptr;

  // A literal is a name.
  Name(const char* text) : leaf(text) {}  // NOLINT(google-explicit-constructor)
  Name operator()(const char* child) const {
    Name name(child);
    name.parent = this;
    return name;
  }
  std::string text() const;
};

/// What the generic code knows about a C struct. `required` is the end of the fields that have no default.
struct StructRule {
  const char* name;
  std::size_t known;
  std::size_t required;
};

/// StructTraits<T>::rule and ::defaults(), for every struct of the C ABI.
template <class T>
struct StructTraits;

/// No struct will outgrow this: a larger size is a struct that was never initialised.
inline constexpr std::size_t kLargestStruct = 1024;

/// Checks pointer, struct_size and abi_version of the struct at `in`, and returns its struct_size.
std::size_t check_header(const void* in, const StructRule& rule, const Name& argument);

/// check_header(), and refuses bytes set beyond the known fields. Returns the number of bytes to read.
std::size_t check_input(const void* in, const StructRule& rule, const Name& argument);

/// Checks the `struct_size` that an init function was given.
void check_size(const void* out, std::size_t struct_size, const StructRule& rule, const Name& argument);

/// Reads the caller's struct; fields that its size leaves out take their defaults.
template <class T>
T read_struct(const T* in, const Name& argument) {
  static_assert(std::is_trivially_copyable_v<T> && alignof(T) == 8 && sizeof(T) <= kLargestStruct);
  const std::size_t bytes = check_input(in, StructTraits<T>::rule, argument);
  T out = StructTraits<T>::defaults();
  std::memcpy(&out, in, bytes);
  return out;
}

/// Writes `value` into the caller's struct, which has `struct_size` bytes; bytes beyond the known fields
/// become zero.
template <class T>
void store_struct(T* out, std::size_t struct_size, T value) {
  value.struct_size = struct_size;
  value.abi_version = HALFTONE_ABI_VERSION;
  const std::size_t bytes = std::min(sizeof(T), struct_size);
  std::memcpy(static_cast<void*>(out), &value, bytes);
  std::memset(reinterpret_cast<unsigned char*>(out) + bytes, 0, struct_size - bytes);
}

/// The body of an init function.
template <class T>
void init_struct(T* out, std::size_t struct_size, const Name& argument) {
  check_size(out, struct_size, StructTraits<T>::rule, argument);
  store_struct(out, struct_size, StructTraits<T>::defaults());
}

/// Checks the caller's initialised struct, then fills it with what `make` returns.
template <class T, class Make>
void write_struct(T* out, const Name& argument, Make&& make) {
  const std::size_t struct_size = check_header(out, StructTraits<T>::rule, argument);
  store_struct(out, struct_size, make());
}

}  // namespace halftone::c_api
