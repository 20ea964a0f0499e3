# The processor features that Arm builds use: most Arm servers since 2018 have them, and so has a Spark. With the dot
# product, 4-bit weights are computed several times faster.
#
# llama-cpp-sys-2's build script sets GGML_CPU_ARM_ARCH to armv8-a, whatever the environment says. But it passes
# CMAKE_PROJECT_INCLUDE on, and CMake reads this file after the build script's values.
if(NOT GGML_CPU_ALL_VARIANTS)
  set(GGML_CPU_ARM_ARCH "armv8.2-a+dotprod+fp16" CACHE STRING "ggml: CPU architecture for ARM" FORCE)
endif()
