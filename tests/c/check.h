/* Plain checks for the C tests: every failure is printed, main() returns check_report(). */
#ifndef HALFTONE_TESTS_C_CHECK_H_
#define HALFTONE_TESTS_C_CHECK_H_

#include <halftone/halftone.h>
#include <stdio.h>
#include <string.h>

static int check_count = 0;
static int check_failures = 0;

static inline void check_true(int ok, const char* file, int line, const char* text) {
  ++check_count;
  if (ok) return;
  ++check_failures;
  fprintf(stderr, "%s:%d: failed: %s\n", file, line, text);
}

static inline void check_status(halftone_status expected, halftone_status got, const char* file, int line,
                                const char* text) {
  ++check_count;
  if (got == expected) return;
  ++check_failures;
  fprintf(stderr, "%s:%d: %s gave %s, expected %s; last error: %s\n", file, line, text,
          halftone_status_name(got), halftone_status_name(expected), halftone_last_error());
}

/* The call failed as expected, and its sentence contains every word of `words`, separated by '|'. */
static inline void check_error(halftone_status expected, halftone_status got, const char* words,
                               const char* file, int line, const char* text) {
  char copy[512];
  char* word = copy;
  check_status(expected, got, file, line, text);
  if (got == HALFTONE_OK) return;
  strncpy(copy, words, sizeof copy - 1);
  copy[sizeof copy - 1] = '\0';
  while (word != NULL) {
    char* end = strchr(word, '|');
    if (end != NULL) *end++ = '\0';
    ++check_count;
    if (strstr(halftone_last_error(), word) == NULL) {
      ++check_failures;
      fprintf(stderr, "%s:%d: the sentence of %s lacks '%s': %s\n", file, line, text, word,
              halftone_last_error());
    }
    word = end;
  }
}

static inline int check_report(const char* name) {
  printf("%s: %d checks, %d failures\n", name, check_count, check_failures);
  return check_failures == 0 ? 0 : 1;
}

#define CHECK(condition) check_true((condition) != 0, __FILE__, __LINE__, #condition)
#define CHECK_OK(call) check_status(HALFTONE_OK, (call), __FILE__, __LINE__, #call)
#define CHECK_ERROR(status, words, call) check_error((status), (call), (words), __FILE__, __LINE__, #call)

#endif /* HALFTONE_TESTS_C_CHECK_H_ */
