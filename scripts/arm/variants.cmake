# Kernels for every kind of Arm processor need a compiler that knows SME (GCC 14). With an older one, as Ubuntu 24.04 and with
# it a Spark has, there is one library, for the features that most Arm servers since 2018 have, and a Spark.
#
# llama-cpp-sys-2's build script passes CMAKE_PROJECT_INCLUDE on, and CMake reads this file after the build script's values.
include("${CMAKE_CURRENT_LIST_DIR}/../llama.cmake")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64" AND GGML_CPU_ALL_VARIANTS)
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag("-march=armv9.2-a+sve2+sme" BATON_COMPILER_KNOWS_SME)
  if(NOT BATON_COMPILER_KNOWS_SME)
    set(GGML_CPU_ALL_VARIANTS OFF CACHE BOOL "ggml: kernels for every kind of processor" FORCE)
    set(GGML_CPU_ARM_ARCH "armv8.2-a+dotprod+fp16" CACHE STRING "ggml: CPU architecture for ARM" FORCE)
  endif()
endif()
