# The native half of the Python package: one library that depends on neither Python nor a framework. libtvm_ffi.so comes
# with apache-tvm-ffi, which the package imports first.

if(NOT HALFTONE_PYTHON)
  find_package(Python REQUIRED COMPONENTS Interpreter)
  set(HALFTONE_PYTHON "${Python_EXECUTABLE}")
endif()
function(halftone_tvm_ffi option variable)
  execute_process(COMMAND "${HALFTONE_PYTHON}" -m tvm_ffi.config ${option}
    OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status ERROR_VARIABLE error)
  if(status)
    message(FATAL_ERROR "HALFTONE_PYTHON is '${HALFTONE_PYTHON}', which cannot import tvm_ffi: install apache-tvm-ffi "
      "there (requirements/python.txt), or set HALFTONE_PYTHON_PACKAGE=OFF.\n${error}")
  endif()
  set(${variable} "${path}" PARENT_SCOPE)
endfunction()
halftone_tvm_ffi(--includedir tvm_ffi_include)
halftone_tvm_ffi(--dlpack-includedir dlpack_include)
halftone_tvm_ffi(--libfiles tvm_ffi_library)

file(GLOB sources CONFIGURE_DEPENDS python/native/*.cc)
add_library(halftone_python MODULE ${sources} $<TARGET_OBJECTS:halftone_objects>)
target_include_directories(halftone_python PRIVATE "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/src")
target_include_directories(halftone_python SYSTEM PRIVATE "${tvm_ffi_include}" "${dlpack_include}")
target_compile_features(halftone_python PRIVATE cxx_std_20)
target_link_libraries(halftone_python PRIVATE
  halftone_compile halftone_cold ${halftone_private_libraries} "${tvm_ffi_library}")
set_target_properties(halftone_python PROPERTIES
  LINKER_LANGUAGE CXX OUTPUT_NAME halftone_python SKIP_BUILD_RPATH ON INSTALL_RPATH "")

if(TARGET halftone_cli)  # the objects above come first: nothing of halftone_internal, which it links, is taken twice
  target_sources(halftone_python PRIVATE cli/library.cc)
  target_include_directories(halftone_python PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(halftone_python PRIVATE halftone_cli)
endif()

# For a wheel that runs where glibc is older than here: the version of glibc to link for, such as 2.28. libstdc++ and
# {fmt} are linked in then, as theirs are too new as well; what libraries are left is the wheel's business.
set(HALFTONE_GLIBC "" CACHE STRING "Oldest glibc that the Python package's library runs with; empty: this machine's")
if(HALFTONE_GLIBC)
  set(stubs "${PROJECT_BINARY_DIR}/glibc-${HALFTONE_GLIBC}")
  set(script "${PROJECT_SOURCE_DIR}/scripts/glibc_stubs.py")
  set(exports "${PROJECT_SOURCE_DIR}/python/portable/exports.map")
  add_custom_command(OUTPUT "${stubs}/libc.so" DEPENDS "${script}" VERBATIM
    COMMAND "${HALFTONE_PYTHON}" "${script}" "${HALFTONE_GLIBC}" "${stubs}" "${CMAKE_CXX_COMPILER}")
  file(GLOB sources CONFIGURE_DEPENDS python/portable/*.cc)
  target_sources(halftone_python PRIVATE ${sources} "${stubs}/libc.so")
  target_link_options(halftone_python PRIVATE "-L${stubs}" -static-libstdc++
    LINKER:-z,defs LINKER:--gc-sections LINKER:--exclude-libs,ALL LINKER:--version-script=${exports}
    LINKER:--no-as-needed -lpthread -ldl LINKER:--as-needed)  # before 2.34 these two are not in libc
  set_target_properties(halftone_python PROPERTIES LINK_DEPENDS "${stubs}/libc.so;${exports}")
endif()

# scikit-build-core installs this component into the wheel; `cmake --install` leaves it out.
install(TARGETS halftone_python LIBRARY DESTINATION halftone/lib COMPONENT python EXCLUDE_FROM_ALL)
if(TARGET halftone_cli AND SKBUILD_SCRIPTS_DIR)
  install(PROGRAMS cli/launch.py DESTINATION "${SKBUILD_SCRIPTS_DIR}" RENAME halftone COMPONENT python EXCLUDE_FROM_ALL)
endif()
