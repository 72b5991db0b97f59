# Headers of others are a third of what it takes to compile a source that uses them: in the builds with sanitizers, sources
# with the same flags read them once. Other builds do without, so that an include that is missing in a test fails there
# (elsewhere it does in the build for clang-tidy), and because GCC 12 then warns of more that is no fault. Nor is it done
# with ccache, which does more and cannot cache such objects.

# halftone_precompile(NAME HEADER LIKE SOURCES...): makes cmake/precompiled.gch/HEADER.hxx the first include of sources that
# have the flags of the target LIKE, which are final; those with flags of their own are left out. Calls with one NAME share.
function(halftone_precompile name header like)
  if(NOT HALFTONE_SANITIZE OR CMAKE_DISABLE_PRECOMPILE_HEADERS OR HALFTONE_CCACHE OR NOT CMAKE_GENERATOR STREQUAL "Ninja"
      OR NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    return()
  endif()
  set(target halftone_precompiled_${name})
  set(header "${PROJECT_SOURCE_DIR}/cmake/precompiled.gch/${header}.hxx")
  # For an -include of X the compiler takes what fits in the folder X.gch; other tools read X.
  file(RELATIVE_PATH include "${PROJECT_SOURCE_DIR}" "${header}")
  set(object "CMakeFiles/${target}.dir/${include}.o")
  string(REGEX REPLACE "\\.gch/.*" "" include "${object}")
  if(NOT TARGET ${target})
    file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/${include}" CONTENT "#include \"${header}\"\n")
    add_library(${target} OBJECT EXCLUDE_FROM_ALL "${header}")
    set_source_files_properties("${header}" PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-x;c++-header")
    get_target_property(type ${like} TYPE)
    if(type STREQUAL "EXECUTABLE")
      set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
      target_compile_options(${target} PRIVATE ${CMAKE_CXX_COMPILE_OPTIONS_PIE})
    endif()
    foreach(property COMPILE_OPTIONS LINK_LIBRARIES)
      get_target_property(value ${like} ${property})
      if(value)
        set_property(TARGET ${target} APPEND PROPERTY ${property} "${value}")
      endif()
    endforeach()
  endif()
  foreach(source IN LISTS ARGN)
    get_property(own SOURCE "${source}" PROPERTY COMPILE_OPTIONS)
    if(source MATCHES "\\.cc$" AND NOT "${own}" MATCHES "(^|;)-[fO]")
      set_property(SOURCE "${source}" APPEND PROPERTY COMPILE_OPTIONS -Winvalid-pch -include "${include}")
      set_property(SOURCE "${source}" APPEND PROPERTY OBJECT_DEPENDS "${PROJECT_BINARY_DIR}/${object}")
    endif()
  endforeach()
endfunction()
