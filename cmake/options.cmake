# SPDX-License-Identifier: Apache-2.0
# Options, and the flags of everything that is compiled here.
if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Build type" FORCE)
endif()

option(BUILD_TESTING "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(EPKIT_COMMAND "Build the command and its manual pages; without it only the tests in tests/cuda are built" ON)
option(EPKIT_EXAMPLES "Build the examples" ${PROJECT_IS_TOP_LEVEL})
set(EPKIT_CUDA OFF CACHE STRING "libepkit-cuda: ON, OFF, or AUTO (when a CUDA compiler is found)")
set(EPKIT_PYTHON AUTO CACHE STRING "The Python packages: ON, OFF, or AUTO (when Python's headers are found)")
option(EPKIT_STATIC_DEPS "Libraries of others linked in or installed with the command: for a tree that runs elsewhere" OFF)
option(EPKIT_WERROR "Warnings are errors" OFF)
set(EPKIT_SANITIZE "" CACHE STRING "Sanitizers for everything: address,undefined or thread")
option(EPKIT_FUZZ "Build the fuzz targets for libFuzzer (needs clang) instead of as regression tests" OFF)

set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# So that an installed tree can be moved.
set(CMAKE_INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")

if(PROJECT_IS_TOP_LEVEL AND NOT DEFINED CMAKE_C_COMPILER_LAUNCHER)
    find_program(EPKIT_CCACHE ccache)
    mark_as_advanced(EPKIT_CCACHE)
    if(EPKIT_CCACHE)
        set(CMAKE_C_COMPILER_LAUNCHER ${EPKIT_CCACHE})
    endif()
endif()

add_library(epkit-flags INTERFACE)
target_compile_definitions(epkit-flags INTERFACE _GNU_SOURCE)
# For "cmd/...", "common/..." and "machine/...".
target_include_directories(epkit-flags INTERFACE ${PROJECT_SOURCE_DIR})
# Contraction off: the order and the rounding of every addition are part of the contract of ep_combine(), and compilers
# differ in whether a * b + c is fused by default.
target_compile_options(epkit-flags INTERFACE -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla
    -Wpointer-arith -Wwrite-strings -ffp-contract=off $<$<BOOL:${EPKIT_WERROR}>:-Werror>)
# For tests and what has sanitizers: gold takes half the time of ld, where it is.
find_program(EPKIT_GOLD ld.gold)
mark_as_advanced(EPKIT_GOLD)
set(EPKIT_FAST_LINKER "")
if(EPKIT_GOLD AND CMAKE_C_COMPILER_ID STREQUAL GNU)
    set(EPKIT_FAST_LINKER -fuse-ld=gold)
endif()
if(EPKIT_SANITIZE)
    target_compile_options(epkit-flags INTERFACE -fsanitize=${EPKIT_SANITIZE} -fno-omit-frame-pointer
        -fno-sanitize-recover=all)
    # A start of the command with its runtime and its addresses fixed takes a quarter less: the undefined-behaviour checks
    # alone have 180000 relocations. Libraries then use the runtime of the program, of which there may be only one.
    if(EPKIT_SANITIZE MATCHES address AND CMAKE_C_COMPILER_ID STREQUAL GNU)
        set(fixed "-fsanitize=${EPKIT_SANITIZE};-static-libasan;-static-libubsan;-no-pie;${EPKIT_FAST_LINKER}"
            "LINKER:--dynamic-list=${PROJECT_SOURCE_DIR}/cmake/sanitizers.list")
        target_link_options(epkit-flags INTERFACE
            "$<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:${fixed}>")
    else()
        target_link_options(epkit-flags INTERFACE -fsanitize=${EPKIT_SANITIZE})
    endif()
endif()
if(EPKIT_PYTHON STREQUAL "AUTO" AND (EPKIT_SANITIZE OR EPKIT_FUZZ OR NOT PROJECT_IS_TOP_LEVEL))
    set(EPKIT_PYTHON OFF) # an interpreter without the sanitizer cannot load such a module
endif()
if(EPKIT_FUZZ)
    if(NOT CMAKE_C_COMPILER_ID MATCHES Clang)
        message(FATAL_ERROR "EPKIT_FUZZ=ON needs clang (libFuzzer): configure with the preset fuzz, or with CC=clang.")
    endif()
    target_compile_options(epkit-flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
