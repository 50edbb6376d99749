# SPDX-License-Identifier: Apache-2.0
# Flags common to everything that is compiled here.
set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Build type" FORCE)
endif()

option(EPKIT_WERROR "Warnings are errors" OFF)
set(EPKIT_SANITIZE "" CACHE STRING "Sanitizers for everything: address,undefined or thread")

add_library(epkit-flags INTERFACE)
target_compile_definitions(epkit-flags INTERFACE _GNU_SOURCE)
target_compile_options(epkit-flags INTERFACE -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla
    -Wpointer-arith -Wwrite-strings $<$<BOOL:${EPKIT_WERROR}>:-Werror>)
if(EPKIT_SANITIZE)
    target_compile_options(epkit-flags INTERFACE -fsanitize=${EPKIT_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
    target_link_options(epkit-flags INTERFACE -fsanitize=${EPKIT_SANITIZE})
endif()
