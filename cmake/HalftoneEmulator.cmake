# The kernels where there is no GPU: device tests linked with tests/emulator/ in place of the CUDA run-time library. It
# interprets the PTX that nvcc leaves in the folder ptx/ of the build, one folder for each source.

file(GLOB_RECURSE sources CONFIGURE_DEPENDS src/*.cu cli/*.cu tests/cuda/*.cu)
file(GLOB_RECURSE kept RELATIVE "${PROJECT_BINARY_DIR}/ptx" "${PROJECT_BINARY_DIR}/ptx/*.ptx")
foreach(ptx IN LISTS kept)  # of sources that are no more: their kernels must not be found
  get_filename_component(name "${ptx}" DIRECTORY)
  if(NOT EXISTS "${PROJECT_SOURCE_DIR}/${name}")
    file(REMOVE_RECURSE "${PROJECT_BINARY_DIR}/ptx/${name}")
  endif()
endforeach()
foreach(source IN LISTS sources)
  file(RELATIVE_PATH name "${PROJECT_SOURCE_DIR}" "${source}")
  file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/ptx/${name}")
  set_source_files_properties("${source}" PROPERTIES
    COMPILE_OPTIONS "--keep;--keep-dir=${PROJECT_BINARY_DIR}/ptx/${name}")
endforeach()

file(GLOB sources CONFIGURE_DEPENDS tests/emulator/*.cc)
list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
add_library(halftone_emulator OBJECT EXCLUDE_FROM_ALL ${sources})
target_link_libraries(halftone_emulator PRIVATE halftone_compile CUDA::toolkit)
target_include_directories(halftone_emulator PRIVATE "${PROJECT_SOURCE_DIR}")
target_compile_definitions(halftone_emulator PRIVATE HALFTONE_EMULATOR_PTX="${PROJECT_BINARY_DIR}/ptx")
target_compile_options(halftone_emulator PRIVATE -O3 -march=native -ffp-contract=off)  # it runs where it is built

# Every device test program and every test on all backends has its twin, NAME_emulated.
file(GLOB_RECURSE sources CONFIGURE_DEPENDS tests/cuda/*_test.cu tests/cuda/*_test.cc)
get_property(on_runners GLOBAL PROPERTY halftone_cuda_tests)
foreach(source IN LISTS sources on_runners)
  get_filename_component(name "${source}" NAME_WE)
  set(emulated ${name}_emulated)
  add_executable(${emulated} EXCLUDE_FROM_ALL $<TARGET_OBJECTS:${name}> $<TARGET_OBJECTS:halftone_emulator>)
  set_target_properties(${emulated} PROPERTIES LINKER_LANGUAGE CXX)
  target_link_libraries(${emulated} PRIVATE ${halftone_cli_if_built} halftone_test_base GTest::gtest_main)
endforeach()

add_executable(emulator_test EXCLUDE_FROM_ALL tests/emulator/emulator_test.cc $<TARGET_OBJECTS:halftone_emulator>)
target_link_libraries(emulator_test PRIVATE halftone_compile GTest::gtest_main Threads::Threads)
target_include_directories(emulator_test PRIVATE "${PROJECT_SOURCE_DIR}")

# Reads the PTX and the machine code of the library, which it is linked with so that Ninja compiles that first. The second
# needs a disassembler, of the toolkit or of requirements/nvdisasm.txt.
set(hints "${CUDAToolkit_BIN_DIR}")
if(HALFTONE_PYTHON)
  execute_process(COMMAND "${HALFTONE_PYTHON}" -c "import sysconfig; print(sysconfig.get_path('purelib'))"
    OUTPUT_VARIABLE packages OUTPUT_STRIP_TRAILING_WHITESPACE)
  file(GLOB packaged "${packages}/nvidia/*/bin")
  list(APPEND hints ${packaged})
endif()
find_program(HALFTONE_NVDISASM nvdisasm HINTS ${hints})
if(HALFTONE_NEED_NVDISASM AND NOT HALFTONE_NVDISASM)
  message(FATAL_ERROR "HALFTONE_NEED_NVDISASM is set, but there is no nvdisasm on PATH or in: ${hints}")
endif()
add_executable(instructions_test EXCLUDE_FROM_ALL tests/emulator/instructions_test.cc)
target_link_libraries(instructions_test PRIVATE halftone_test_base GTest::gtest_main)
target_compile_definitions(instructions_test PRIVATE HALFTONE_EMULATOR_PTX="${PROJECT_BINARY_DIR}/ptx"
  HALFTONE_NVDISASM="$<$<BOOL:${HALFTONE_NVDISASM}>:${HALFTONE_NVDISASM}>")

add_custom_target(halftone_emulated)

# Tests of one of these programs, those that the filter names.
function(halftone_emulate program filter)
  add_dependencies(halftone_emulated ${program})
  halftone_register_test(${program} ${program} "--gtest_filter=${filter}")
  set_tests_properties(${program} PROPERTIES LABELS emulated FAIL_REGULAR_EXPRESSION "Running 0 tests")
  set_property(TEST ${program} APPEND PROPERTY ENVIRONMENT "OMP_NUM_THREADS=1")
endfunction()

# Every kernel family, in cases that take some seconds each.
halftone_emulate(emulator_test "*")
halftone_emulate(instructions_test "*")
if(HALFTONE_WERROR AND CMAKE_GENERATOR STREQUAL "Ninja")  # there are rules for nvcc, and all of them go by way of nvcc.sh
  halftone_register_test(nvcc_launcher_test sh -c
    [[grep -qe ' -x cu ' "$1" && ! grep -e ' -x cu ' "$1" | grep -vF "$2"]]
    sh "${PROJECT_BINARY_DIR}/CMakeFiles/rules.ninja" "command = ${PROJECT_SOURCE_DIR}/cmake/nvcc.sh ")
  set_tests_properties(nvcc_launcher_test PROPERTIES LABELS emulated)
endif()
halftone_emulate(adversarial_numerics_runner_test_emulated "*ExtremeWindows/cuda:*BadStaticScales/cuda")
halftone_emulate(adversarial_step_test_emulated "*WithoutRoom*/cuda")
halftone_emulate(append_bytes_test_emulated "*Latent*/cuda:*BeyondTheirScales/cuda:*ManyMoreTokens/cuda")
halftone_emulate(append_checks_test_emulated "*/cuda")
halftone_emulate(append_step_test_emulated "*ManyRows/cuda:*HalfBlocksAndWideRows/cuda")
halftone_emulate(attention_device_test_emulated
  "*MixedFormats:*GraphReplay*:*ManyRowsOfAnySize:*RowsOfAUnit*:*TilesBesideLines:*UnitsOf32Rows")
halftone_emulate(coded_device_test_emulated "*Dims*:*Rotated*:*CausalKeys*:*Groups*:*BadPages*:*BatchInv*:*ManySizes*")
halftone_emulate(coded_sums_device_test_emulated "*LogitsThatRise*:*LongContexts*:*SumsOf*fp8")
halftone_emulate(coded_tensors_device_test_emulated "*Infinities*:*PoisonedMemory*:*Runs*:*UnitsOfTheirOwn*:*Wild*")
halftone_emulate(codec_device_test_emulated "*Groups*:*Rope*")
halftone_emulate(dequantize_device_test_emulated "*")
halftone_emulate(dequantize_test_emulated "*Latent*/cuda")
halftone_emulate(gather_device_test_emulated "*")
halftone_emulate(gemm_device_test_emulated "*")
halftone_emulate(latent_append_device_test_emulated
  "*-*EveryShape*:*FillNoUnit:*4GiB:*RandomSteps")
halftone_emulate(latent_attention_device_test_emulated
  "*Lists*:*FormatsAgree*:*DeadBytes*:*SlotsOutside*:*QueriesThat*:*MoreQueries*:*Graphs*-*65536*")
halftone_emulate(latent_dense_device_test_emulated "*DensePages*:*DenseBatchInvariant*:*Graphs*")
halftone_emulate(latent_numbers_device_test_emulated "*ScalesFarApart:*Large*")
halftone_emulate(merge_device_test_emulated "*")
halftone_emulate(merge_test_emulated "*/cuda")
halftone_emulate(packed_device_test_emulated
  "*EveryFormat*:*Edges:*Groups:*PagesOfEverySize:*LargeKeys:*LogitsThat*:*BadPages*:*TooNarrow:*.Parts")
halftone_emulate(policy_test_emulated "*ALongRequest*/cuda:*DoNotDependOnBounds/cuda")
halftone_emulate(prefill_bounds_device_test_emulated "*Refused:*NoKeys*:*RowsBehind*:*WildFirstKeys")
halftone_emulate(prefill_device_test_emulated "*Chunks:*PartsOfSharedRows:*PartsOfBusyWorkers")
halftone_emulate(schedule_device_test_emulated "*")
halftone_emulate(staged_device_test_emulated
  "*Groups:*PagesOfEverySize:*ValuesInBf16:*BadScales*:*TablesThat*:*BitsOfPlain*:*ABoundOfPrompts*:*BatchInvariant*:*DimsThat*")

# Plans for a GPU need none, but a build that has its backend.
foreach(name plan_cuda_test plan_cuda_latent_test plan_cuda_units_test plan_staged_test
  plan_staged_fp8_test)
  add_dependencies(halftone_emulated ${name})
  set_property(TEST ${name} APPEND PROPERTY LABELS emulated)
endforeach()
