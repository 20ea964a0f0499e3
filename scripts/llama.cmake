# llama-cpp-sys-2's build script passes CMAKE_PROJECT_INCLUDE on, and CMake reads this file after the script's values.

# Leaves out what Baton does not use of llama.cpp: `common`, the library of llama.cpp's own programs, is a third of its
# build. llama-cpp-2 turns it on in llama-cpp-sys-2 and has no feature to turn it off.
set(LLAMA_BUILD_COMMON OFF)

# Compiles the sources of `llama` and `mtmd` in groups, as llama.cpp does with its models: a fifth of its build is reading
# the same headers for each file.
function(compile_in_groups)
  set_target_properties(mtmd PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 24)
  foreach(target IN ITEMS llama mtmd)
    get_target_property(sources ${target} SOURCES)
    # These check that they are not compiled together with mtmd's headers.
    list(FILTER sources EXCLUDE REGEX "mtmd-helper")
    get_target_property(folder ${target} SOURCE_DIR)
    list(TRANSFORM sources PREPEND "${folder}/")
    set_source_files_properties(${sources} TARGET_DIRECTORY ${target} PROPERTIES SKIP_UNITY_BUILD_INCLUSION OFF)
  endforeach()
  get_target_property(folder mtmd SOURCE_DIR)
  set_source_files_properties("${folder}/mtmd-helper.cpp" "${folder}/mtmd-helper-gen.cpp" TARGET_DIRECTORY mtmd
    PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()
if(PROJECT_NAME STREQUAL "llama.cpp" AND CMAKE_VERSION VERSION_GREATER_EQUAL 3.19)
  cmake_language(DEFER CALL compile_in_groups)
endif()
