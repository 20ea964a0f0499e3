# Leaves out what Baton does not use of llama.cpp: `common`, the library of llama.cpp's own programs, is a third of its
# build. llama-cpp-2 turns it on in llama-cpp-sys-2 and has no feature to turn it off. llama-cpp-sys-2's build script passes
# CMAKE_PROJECT_INCLUDE on, and CMake reads this file after the build script's values.
set(LLAMA_BUILD_COMMON OFF)
