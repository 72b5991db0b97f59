# The kernels where there is no GPU: device tests linked with tests/emulator/ in place of the CUDA run-time library. It
# interprets the PTX that nvcc leaves in the folder ptx/ of the build, one folder for each source.

file(GLOB_RECURSE sources CONFIGURE_DEPENDS src/*.cu tests/cuda/*.cu)
foreach(source IN LISTS sources)
  file(RELATIVE_PATH name "${PROJECT_SOURCE_DIR}" "${source}")
  file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/ptx/${name}")
  set_source_files_properties("${source}" PROPERTIES
    COMPILE_OPTIONS "--keep;--keep-dir=${PROJECT_BINARY_DIR}/ptx/${name}")
endforeach()

file(GLOB sources CONFIGURE_DEPENDS tests/emulator/*.cc)
add_library(halftone_emulator OBJECT EXCLUDE_FROM_ALL ${sources})
target_link_libraries(halftone_emulator PRIVATE halftone_compile CUDA::toolkit)
target_include_directories(halftone_emulator PRIVATE "${PROJECT_SOURCE_DIR}")
target_compile_definitions(halftone_emulator PRIVATE HALFTONE_EMULATOR_PTX="${PROJECT_BINARY_DIR}/ptx")
target_compile_options(halftone_emulator PRIVATE -O2 -march=native -ffp-contract=off)  # it runs where it is built
add_custom_target(halftone_emulated)

# The tests of a device test program that the filter names, as the test NAME_emulated.
function(halftone_emulate name filter)
  set(emulated ${name}_emulated)
  add_executable(${emulated} EXCLUDE_FROM_ALL $<TARGET_OBJECTS:${name}> $<TARGET_OBJECTS:halftone_emulator>)
  set_target_properties(${emulated} PROPERTIES LINKER_LANGUAGE CXX)
  target_link_libraries(${emulated} PRIVATE ${halftone_cli_if_built} halftone_test_base GTest::gtest_main)
  add_dependencies(halftone_emulated ${emulated})
  halftone_register_test(${emulated} ${emulated} "--gtest_filter=${filter}")
  set_tests_properties(${emulated} PROPERTIES LABELS emulated)
endfunction()

# The emulator itself, and what of the device tests takes seconds on it.
add_executable(emulator_test EXCLUDE_FROM_ALL tests/emulator/emulator_test.cc $<TARGET_OBJECTS:halftone_emulator>)
target_link_libraries(emulator_test PRIVATE halftone_compile GTest::gtest_main Threads::Threads)
target_include_directories(emulator_test PRIVATE "${PROJECT_SOURCE_DIR}")
add_dependencies(halftone_emulated emulator_test)
halftone_register_test(emulator_test emulator_test)
set_tests_properties(emulator_test PROPERTIES LABELS emulated)

halftone_emulate(append_device_test "*")
halftone_emulate(dequantize_device_test "*")
halftone_emulate(merge_device_test "*")
halftone_emulate(schedule_device_test "*")
halftone_emulate(codec_device_test "*Groups*:*Rope*")
