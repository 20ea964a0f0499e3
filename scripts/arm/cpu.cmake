# The processor features of the Arm build that scripts/check-arm.sh tests: most Arm servers since 2018 have them, and so has a
# Spark.
#
# llama-cpp-sys-2's build script sets GGML_CPU_ARM_ARCH to armv8-a, whatever the environment says. But it passes
# CMAKE_PROJECT_INCLUDE on, and CMake reads this file after the build script's values.
include("${CMAKE_CURRENT_LIST_DIR}/../llama.cmake")
set(GGML_CPU_ARM_ARCH "armv8.2-a+dotprod+fp16" CACHE STRING "ggml: CPU architecture for ARM" FORCE)
