# SPDX-License-Identifier: Apache-2.0
# The module with points (points.h), in a folder of its own: a program loads it in place of the other one if
# LD_LIBRARY_PATH names that folder first. Included by lib/backend/cuda, where CUDA is enabled and `kernels` are listed.
# It compiles all kernels once more, so it is built only when it is asked for: ninja -C BUILD epkit-cuda-points
add_library(epkit-cuda-points-host OBJECT ${PROJECT_SOURCE_DIR}/tests/cuda/points.c)
target_include_directories(epkit-cuda-points-host PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/lib)
target_link_libraries(epkit-cuda-points-host PRIVATE epkit-flags epkit-cudart)
set_target_properties(epkit-cuda-points-host PROPERTIES POSITION_INDEPENDENT_CODE ON C_VISIBILITY_PRESET hidden)
add_library(epkit-cuda-points SHARED EXCLUDE_FROM_ALL ${kernels} $<TARGET_OBJECTS:epkit-cuda-host>
    ${EPKIT_GROUP_OBJECTS} $<TARGET_OBJECTS:epkit-cuda-points-host>)
target_compile_definitions(epkit-cuda-points PRIVATE EPKIT_POINTS)
target_compile_options(epkit-cuda-points PRIVATE $<TARGET_PROPERTY:epkit-cuda,COMPILE_OPTIONS>)
target_include_directories(epkit-cuda-points PRIVATE ${PROJECT_SOURCE_DIR}/lib)
target_link_libraries(epkit-cuda-points PRIVATE epkit epkit-cudart m)
target_link_options(epkit-cuda-points PRIVATE $<TARGET_PROPERTY:epkit-cuda,LINK_OPTIONS> LINKER:--wrap=cuda_status)
set_target_properties(epkit-cuda-points PROPERTIES C_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden
    CUDA_ARCHITECTURES 90 OUTPUT_NAME epkit-cuda SOVERSION ${PROJECT_VERSION_MAJOR}
    LINK_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/epkit-cuda.map
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/cuda/points)
