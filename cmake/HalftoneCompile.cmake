# Language level, warnings, numerics and sanitizers: everything compiled here links `halftone_compile` privately.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  if(PROJECT_IS_TOP_LEVEL)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  else()
    set(CMAKE_BUILD_TYPE Release)  # of this folder: the project's own programs are its business
  endif()
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
  set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib")
  set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib")
endif()

find_program(HALFTONE_CCACHE ccache)
if(HALFTONE_CCACHE)
  foreach(language C CXX CUDA)
    if(NOT CMAKE_${language}_COMPILER_LAUNCHER)
      set(CMAKE_${language}_COMPILER_LAUNCHER "${HALFTONE_CCACHE}")
    endif()
  endforeach()
endif()

add_library(halftone_compile INTERFACE)
set(host "$<COMPILE_LANGUAGE:C,CXX>")
target_compile_options(halftone_compile INTERFACE $<${host}:-Wall> $<${host}:-Wextra>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # False alarms of GCC 12 inside std::string (bug 105651) and fmt's format specs.
  set(gcc12 -Wno-restrict -Wno-stringop-overflow)
endif()
target_compile_options(halftone_compile INTERFACE "$<${host}:${gcc12}>")
if(HALFTONE_WERROR)
  target_compile_options(halftone_compile INTERFACE $<${host}:-Werror>)
endif()

# No contraction: codes, scales and partials must have the same bits on every backend and compiler. Where a fused
# multiply-add is wanted the code says so.
target_compile_options(halftone_compile INTERFACE $<${host}:-ffp-contract=off>)

# What CUDA adds to the commands of sources in folders cuda/. The objects of the others are those of a build without it
# (scripts/share_objects.sh).
function(halftone_for_cuda)
  if(HALFTONE_CUDA)
    list(FILTER ARGN INCLUDE REGEX "/(src|testing|cli|tests)/cuda/.*\\.cc$")
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS -isystem "${CUDAToolkit_INCLUDE_DIRS}")
  endif()
endfunction()

# For code that instantiates much and runs briefly (the command's and the tests' own): a third less time to compile, with
# sanitizers half, which see all the more in what is not optimised.
add_library(halftone_cold INTERFACE)
target_compile_options(halftone_cold INTERFACE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O1>)
if(HALFTONE_SANITIZE)
  target_compile_options(halftone_cold INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-O0>)
endif()

# Sanitizers. `address` is with undefined behaviour and, so that fuzzers share the build, libFuzzer's coverage. Left out
# are the checks that multiply the compile time of the vector kernels and whose defects AddressSanitizer sees as well.
if(HALFTONE_SANITIZE)
  set(sanitize_address
    -fsanitize=address,undefined,fuzzer-no-link -fno-sanitize=pointer-overflow,null,object-size,vptr -fno-sanitize-recover=all)
  set(sanitize_thread -fsanitize=thread)
  if(NOT DEFINED sanitize_${HALFTONE_SANITIZE})
    message(FATAL_ERROR "HALFTONE_SANITIZE is '${HALFTONE_SANITIZE}'; it must be address or thread")
  endif()
  add_compile_options(${sanitize_${HALFTONE_SANITIZE}} -fno-omit-frame-pointer)
  add_compile_definitions(HALFTONE_SANITIZE=1)
  add_link_options(${sanitize_${HALFTONE_SANITIZE}})
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    add_compile_options(-Wno-pass-failed)  # `omp simd` cannot be honoured at the sanitizers' -O1
  endif()
endif()
