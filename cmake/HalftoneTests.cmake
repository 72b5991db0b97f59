# Tests, fuzzers and benchmarks: one executable per file, named after it.

find_package(Threads REQUIRED)
find_program(HALFTONE_LLD ld.lld)
enable_testing()

# What test, fuzz and benchmark code may rely on.
add_library(halftone_test_base INTERFACE)
target_link_libraries(halftone_test_base INTERFACE
  halftone_compile halftone_testing halftone_internal Threads::Threads)
set(halftone_cli_if_built $<TARGET_NAME_IF_EXISTS:halftone_cli>)
target_compile_definitions(halftone_test_base INTERFACE
  HALFTONE_SOURCE_DIR="${PROJECT_SOURCE_DIR}" HALFTONE_VERSION="${PROJECT_VERSION}")

if(HALFTONE_SANITIZE STREQUAL "address" AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  add_library(halftone_asan_ranges OBJECT tests/asan_ranges.cc)
  target_compile_options(halftone_asan_ranges PRIVATE -O2 -fno-sanitize=all)
  target_link_libraries(halftone_asan_ranges PRIVATE halftone_compile)
  target_sources(halftone_test_base INTERFACE $<TARGET_OBJECTS:halftone_asan_ranges>)
  target_link_options(halftone_test_base INTERFACE LINKER:--wrap=__asan_loadN,--wrap=__asan_storeN)
endif()

set(halftone_test_environment
  "GTEST_OUTPUT=xml:${PROJECT_BINARY_DIR}/test-results/" "OMP_WAIT_POLICY=passive")
if(HALFTONE_SANITIZE STREQUAL "thread")
  # Archer tells ThreadSanitizer about OpenMP's barriers; without it every parallel region looks like a race.
  find_library(HALFTONE_ARCHER archer PATHS /usr/lib/llvm-14/lib REQUIRED)
  list(APPEND halftone_test_environment
    "OMP_TOOL_LIBRARIES=${HALFTONE_ARCHER}" "TSAN_OPTIONS=ignore_noninstrumented_modules=1 halt_on_error=1")
elseif(HALFTONE_SANITIZE)
  list(APPEND halftone_test_environment
    "UBSAN_OPTIONS=print_stacktrace=1" "ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1"
    "LSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/lsan.supp:print_suppressions=0")
endif()

function(halftone_register_test name)
  add_test(NAME ${name} COMMAND ${ARGN})
  set_tests_properties(${name} PROPERTIES ENVIRONMENT "${halftone_test_environment}" TIMEOUT 600)
endfunction()

# GoogleTest sources, labelled with their folder; in CUDA builds those that run on every backend are tests of the GPU, too.
# One with a line `// ctest: N parts` is N tests, each with a share of its cases and all of the time limit. One with a line
# `// sanitizers: optimised` has loops of its own that take longer without than the compiler takes for them.
function(halftone_add_gtests)
  halftone_for_cuda(${ARGN})
  foreach(source IN LISTS ARGN)
    get_filename_component(name "${source}" NAME_WE)
    get_filename_component(folder "${source}" DIRECTORY)
    get_filename_component(folder "${folder}" NAME)
    add_executable(${name} "${source}")
    target_link_libraries(${name} PRIVATE ${halftone_cli_if_built} halftone_test_base GTest::gtest_main)
    set(speed cold)
    file(STRINGS "${source}" optimised REGEX "^// sanitizers: optimised$")
    if(HALFTONE_SANITIZE AND optimised)
      set(speed hot)
    else()
      target_link_libraries(${name} PRIVATE halftone_cold)
    endif()
    if(HALFTONE_SANITIZE STREQUAL "address")  # coverage is for the fuzzers
      target_compile_options(${name} PRIVATE -fno-sanitize=fuzzer-no-link)
    endif()
    halftone_precompile(tests_${speed} tests ${name} "${source}")
    if(HALFTONE_SANITIZE AND HALFTONE_LLD AND folder STREQUAL "cli")  # programs of 90 MiB, for which ld takes seconds
      target_link_options(${name} PRIVATE -fuse-ld=lld)
    endif()
    if(folder STREQUAL "cli" AND TARGET halftone_command)
      set_property(SOURCE "${source}" APPEND PROPERTY
        COMPILE_DEFINITIONS HALFTONE_CLI_PATH="$<TARGET_FILE:halftone_command>")
    endif()
    set(tests ${name})
    file(STRINGS "${source}" parts REGEX "^// ctest: [0-9]+ parts$")
    if(parts)
      string(REGEX MATCH "[0-9]+" parts "${parts}")
      set(tests "")
      foreach(part RANGE 1 ${parts})
        math(EXPR index "${part} - 1")
        halftone_register_test(${name}_${part} ${name})
        set_property(TEST ${name}_${part} APPEND PROPERTY ENVIRONMENT "GTEST_TOTAL_SHARDS=${parts}"
          "GTEST_SHARD_INDEX=${index}" "GTEST_OUTPUT=xml:${PROJECT_BINARY_DIR}/test-results/${name}_${part}.xml")
        list(APPEND tests ${name}_${part})
      endforeach()
      set_tests_properties(${tests} PROPERTIES COST 10)  # long ones begin first, so that none is left at the end
    else()
      halftone_register_test(${name} ${name})
    endif()
    set(labels ${folder})
    file(STRINGS "${source}" on_runners REGEX "tests/on_runners\\.h")
    if(HALFTONE_CUDA AND on_runners)
      list(APPEND labels cuda)
      set_property(GLOBAL APPEND PROPERTY halftone_cuda_tests ${name})
    endif()
    set_tests_properties(${tests} PROPERTIES LABELS "${labels}")
  endforeach()
endfunction()

if(HALFTONE_BUILD_TESTS)
  find_package(GTest CONFIG REQUIRED)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS tests/*_test.cc)
  list(FILTER sources EXCLUDE REGEX "/tests/(cuda|emulator)/")
  if(NOT TARGET halftone_cli)
    list(FILTER sources EXCLUDE REGEX "/tests/cli/")
  endif()
  # Where threads meet: of plans one test makes them in several, and instruction sets differ in none of it.
  if(HALFTONE_SANITIZE STREQUAL "thread")
    list(FILTER sources INCLUDE REGEX "/tests/((append|attention)/|plan/plan_test)")
    list(FILTER sources EXCLUDE REGEX "/tests/attention/targets_")
  endif()
  halftone_add_gtests(${sources})

  # The C ABI, from C and through the shared library as a user gets it.
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS tests/c/*.c)
  if(sources AND NOT HALFTONE_SANITIZE STREQUAL "thread")
    enable_language(C)
    foreach(source IN LISTS sources)
      get_filename_component(name "${source}" NAME_WE)
      set(name "c_${name}")
      add_executable(${name} "${source}")
      set_target_properties(${name} PROPERTIES C_STANDARD 11 C_EXTENSIONS OFF)
      if(HALFTONE_SANITIZE)  # the sanitizers' C++ run-time comes with clang++
        set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
      endif()
      target_link_libraries(${name} PRIVATE halftone halftone_compile m)
      target_compile_options(${name} PRIVATE -Wpedantic)
      target_compile_definitions(${name} PRIVATE HALFTONE_VERSION="${PROJECT_VERSION}")
      halftone_register_test(${name} ${name})
      set_tests_properties(${name} PROPERTIES LABELS c)
    endforeach()
  endif()

  if(HALFTONE_CUDA)
    file(GLOB_RECURSE sources CONFIGURE_DEPENDS tests/cuda/*_test.cu tests/cuda/*_test.cc)
    halftone_add_gtests(${sources})
    get_property(cuda_tests GLOBAL PROPERTY halftone_cuda_tests)
    add_custom_target(halftone_cuda DEPENDS halftone ${cuda_tests})
    if(TARGET halftone_command)
      add_dependencies(halftone_cuda halftone_command)
    endif()
    foreach(source IN LISTS sources)
      get_filename_component(name "${source}" NAME_WE)
      add_dependencies(halftone_cuda ${name})
    endforeach()
    if(TARGET halftone_python)
      add_dependencies(halftone_cuda halftone_python)
    endif()
  endif()

  file(GLOB sources CONFIGURE_DEPENDS tests/golden/*_test.py tests/scripts/*_test.py)
  if(HALFTONE_SANITIZE)
    set(sources "")  # no code of ours runs in them
  endif()
  if(HALFTONE_PYTHON)
    foreach(source IN LISTS sources)
      get_filename_component(name "${source}" NAME_WE)
      halftone_register_test(${name} "${HALFTONE_PYTHON}" "${source}")
      set_tests_properties(${name} PROPERTIES LABELS python)
    endforeach()
  elseif(sources)
    message(STATUS "HALFTONE_PYTHON is not set: the Python tests in tests/golden and tests/scripts are left out")
  endif()

  # The Python package from the source tree, with the library built here. The sanitizers' run-time cannot be loaded into
  # an unsuspecting Python.
  function(halftone_add_pytest name python label)
    halftone_register_test(${name} "${python}" -m pytest -q -p no:cacheprovider
      --rootdir "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/tests/python"
      "--junitxml=${PROJECT_BINARY_DIR}/test-results/${name}.xml")
    set_property(TEST ${name} PROPERTY LABELS ${label})
    set_property(TEST ${name} APPEND PROPERTY ENVIRONMENT
      "PYTHONPATH=${PROJECT_SOURCE_DIR}/python" "HALFTONE_PYTHON_LIBRARY=$<TARGET_FILE:halftone_python>")
    if(TARGET halftone_command)
      set_property(TEST ${name} APPEND PROPERTY ENVIRONMENT "HALFTONE_COMMAND=$<TARGET_FILE:halftone_command>")
    endif()
    set_property(TEST ${name} PROPERTY COST 20)
  endfunction()
  if(HALFTONE_PYTHON_PACKAGE AND NOT HALFTONE_SANITIZE)
    halftone_add_pytest(python_package_test "${HALFTONE_PYTHON}" python)
    if(HALFTONE_CUDA AND HALFTONE_TORCH_PYTHON)
      halftone_add_pytest(python_torch_test "${HALFTONE_TORCH_PYTHON}" cuda)
    endif()
  endif()

  # A user's view: install, then build and run small programs against the installed tree.
  if(NOT HALFTONE_SANITIZE)
    halftone_register_test(consumer_test "${PROJECT_SOURCE_DIR}/tests/consumer/run.sh"
      "${CMAKE_COMMAND}" "${PROJECT_BINARY_DIR}" "${PROJECT_VERSION}")
    set_tests_properties(consumer_test PROPERTIES LABELS install)
  endif()
endif()

if(HALFTONE_BUILD_FUZZ)
  file(GLOB sources CONFIGURE_DEPENDS tests/fuzz/*_fuzz.cc)
  add_custom_target(halftone_fuzzers)
  foreach(source IN LISTS sources)
    get_filename_component(name "${source}" NAME_WE)
    add_executable(${name} "${source}")
    target_link_libraries(${name} PRIVATE ${halftone_cli_if_built} halftone_test_base)
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL TRUE RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/fuzzers")
    add_dependencies(halftone_fuzzers ${name})
  endforeach()
endif()

if(HALFTONE_BUILD_BENCH)
  find_package(benchmark CONFIG REQUIRED)
  file(GLOB sources CONFIGURE_DEPENDS bench/*_bench.cc)
  add_custom_target(halftone_benchmarks)
  foreach(source IN LISTS sources)
    get_filename_component(name "${source}" NAME_WE)
    add_executable(${name} "${source}")
    target_link_libraries(${name} PRIVATE ${halftone_cli_if_built} halftone_test_base benchmark::benchmark_main)
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL TRUE RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/benchmarks")
    add_dependencies(halftone_benchmarks ${name})
  endforeach()
endif()
