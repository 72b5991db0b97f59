# `cmake --install`: headers, libraries, find_package(halftone CONFIG) and pkg-config.

include(CMakePackageConfigHelpers)
set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/halftone")

install(TARGETS halftone EXPORT halftoneTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET halftone_command)
  install(TARGETS halftone_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(DIRECTORY include/halftone "${PROJECT_BINARY_DIR}/include/halftone" DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
install(EXPORT halftoneTargets NAMESPACE halftone:: DESTINATION ${package_dir})

configure_package_config_file(cmake/halftoneConfig.cmake.in halftoneConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(halftoneConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  "${PROJECT_BINARY_DIR}/halftoneConfig.cmake" "${PROJECT_BINARY_DIR}/halftoneConfigVersion.cmake"
  DESTINATION ${package_dir})

# A static libhalftone.a brings its dependencies along; a shared one has them inside its NEEDED list.
file(RELATIVE_PATH HALFTONE_PC_PREFIX "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
if(NOT BUILD_SHARED_LIBS)
  set(HALFTONE_PC_REQUIRES_PRIVATE "libhwy fmt")
  set(HALFTONE_PC_LIBS_PRIVATE "${OpenMP_CXX_FLAGS} -lstdc++ -lm")
  if(HALFTONE_CUDA)
    string(PREPEND HALFTONE_PC_LIBS_PRIVATE "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt -lpthread ")
  endif()
endif()
configure_file(cmake/halftone.pc.in halftone.pc @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/halftone.pc" DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
