# The CUDA backend: Hopper only (sm_90a), static run-time library, so that the binary starts on machines without CUDA.

set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_ARCHITECTURES OFF)  # sm_90a is given below: CMake 3.25 has no name for it
set(cxx_standard ${CMAKE_CXX_STANDARD})
unset(CMAKE_CXX_STANDARD)  # the compiler check would demand it of nvcc, for which CMake 3.25 knows no C++20
enable_language(CUDA)
set(CMAKE_CXX_STANDARD ${cxx_standard})
set(CMAKE_CUDA_STANDARD ${cxx_standard})
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
find_package(CUDAToolkit 12.8 REQUIRED)

set(cuda "$<COMPILE_LANGUAGE:CUDA>")
target_compile_options(halftone_compile INTERFACE
  "$<${cuda}:SHELL:-gencode arch=compute_90a,code=sm_90a>"
  "$<${cuda}:SHELL:--expt-relaxed-constexpr --extended-lambda>"
  # Kernels of one role differ little: compressed they take an eighth, in the library, the wheel and every test program.
  # Drivers before 550.54 (CUDA 12.4) cannot read it.
  "$<${cuda}:--compress-mode=size>"
  "$<${cuda}:-Xcompiler=-Wall,-Wextra,-ffp-contract=off>"
  "$<${cuda}:-Xptxas=-warn-spills,-warn-lmem-usage>")
if(HALFTONE_WERROR)
  target_compile_options(halftone_compile INTERFACE "$<${cuda}:-Werror=all-warnings>" "$<${cuda}:-Xcompiler=-Werror>")
  list(PREPEND CMAKE_CUDA_COMPILER_LAUNCHER "${CMAKE_CURRENT_LIST_DIR}/nvcc.sh")
endif()
