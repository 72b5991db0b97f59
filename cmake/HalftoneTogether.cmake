# Headers of others, and what is instantiated of them, are most of what it takes to compile a source, above all where
# options or JSON are parsed. With HALFTONE_TOGETHER several sources are one translation unit, so that names in their
# unnamed namespaces have to differ. The build for clang-tidy goes without, and finds an include that is missing.

# halftone_together(PATTERN SOURCES...): those of the sources that match and have the same flags, which are final, are
# compiled as the last of them by name, which includes the others.
function(halftone_together pattern)
  if(NOT HALFTONE_TOGETHER)
    return()
  endif()
  list(FILTER ARGN INCLUDE REGEX "${pattern}")
  list(FILTER ARGN EXCLUDE REGEX "/cuda/|\\.cu$")  # which clang-tidy does not read
  # What differs with CUDA: the objects of the others are shared with builds without it (scripts/share_objects.sh).
  list(FILTER ARGN EXCLUDE REGEX "/without_cuda/|/src/backends\\.cc$")
  list(SORT ARGN ORDER DESCENDING)
  foreach(source IN LISTS ARGN)
    # Sources that Highway reads once for each instruction set include themselves.
    file(STRINGS "${source}" alone REGEX "hwy/foreach_target\\.h")
    if(alone)
      continue()
    endif()
    set(flags "")
    foreach(property COMPILE_OPTIONS COMPILE_DEFINITIONS INCLUDE_DIRECTORIES)
      get_property(value SOURCE "${source}" PROPERTY ${property})
      string(APPEND flags "${property}=${value} ")
    endforeach()
    string(MD5 unit "${flags}")
    if(DEFINED last_${unit})
      set_source_files_properties("${source}" PROPERTIES HEADER_FILE_ONLY ON)
      list(PREPEND others_${unit} -include "${source}")
    else()
      set(last_${unit} "${source}")
      list(APPEND units ${unit})
    endif()
  endforeach()
  foreach(unit IN LISTS units)
    set_property(SOURCE "${last_${unit}}" APPEND PROPERTY COMPILE_OPTIONS ${others_${unit}})
  endforeach()
endfunction()
