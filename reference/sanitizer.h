// Which sanitizer this build runs under: tests shrink, and leave alone what a sanitizer reports by ending the
// process.
#pragma once

namespace halftone::reference {

#if defined(__SANITIZE_ADDRESS__)
#define HALFTONE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HALFTONE_ASAN 1
#endif
#endif

#if defined(__SANITIZE_THREAD__)
#define HALFTONE_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define HALFTONE_TSAN 1
#endif
#endif

#ifdef HALFTONE_ASAN
inline constexpr bool kAddressSanitizer = true;
#else
inline constexpr bool kAddressSanitizer = false;
#endif
#ifdef HALFTONE_TSAN
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

inline constexpr bool kSanitized = kAddressSanitizer || kThreadSanitizer;

}  // namespace halftone::reference
