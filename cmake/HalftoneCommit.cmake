# Writes halftone_commit.h with the commit of the source tree, "-dirty" if tracked files differ from it, or "" outside a
# checkout: cmake -DSOURCE=... -DHEADER=... -P HalftoneCommit.cmake. The file is touched only when it changes.

execute_process(COMMAND git -C "${SOURCE}" rev-parse --show-toplevel
  OUTPUT_VARIABLE top OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE status)
set(commit "")
if(status EQUAL 0 AND top STREQUAL SOURCE)  # not some repository that holds an unpacked release
  execute_process(COMMAND git -C "${SOURCE}" rev-parse --short=12 HEAD
    OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  execute_process(COMMAND git -C "${SOURCE}" diff --quiet HEAD RESULT_VARIABLE dirty ERROR_QUIET)
  if(commit AND NOT dirty EQUAL 0)
    string(APPEND commit "-dirty")
  endif()
endif()
file(CONFIGURE OUTPUT "${HEADER}" CONTENT "#define HALFTONE_COMMIT \"${commit}\"\n")
