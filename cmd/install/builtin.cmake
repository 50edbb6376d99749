# SPDX-License-Identifier: Apache-2.0
# Writes OUT: the files PRELUDE and RECIPES (a list) as arrays of bytes, and a table of the recipes (builtin.h).
set(arrays "")
set(table "")
foreach(file ${PRELUDE} ${RECIPES})
    cmake_path(GET file STEM name)
    string(MAKE_C_IDENTIFIER ${name} id)
    file(READ ${file} hex HEX)
    string(REGEX REPLACE "(..)" "0x\\1, " bytes "${hex}")
    string(REGEX REPLACE "((0x.., )(0x.., )(0x.., )(0x.., )(0x.., )(0x.., )(0x.., )(0x.., ))" "\\1\n    " bytes "${bytes}")
    if(file STREQUAL PRELUDE)
        string(APPEND arrays "const char builtin_prelude[] = {\n    ${bytes}0\n};\n"
            "const size_t builtin_prelude_bytes = sizeof(builtin_prelude) - 1;\n\n")
        continue()
    endif()
    string(APPEND arrays "static const char ${id}[] = {\n    ${bytes}0\n};\n\n")
    string(APPEND table "    {\"${name}\", ${id}, sizeof(${id}) - 1},\n")
endforeach()
file(WRITE ${OUT} "/* Written by builtin.cmake from recipes/. */\n#include \"cmd/install/builtin.h\"\n\n${arrays}"
    "const struct builtin_recipe builtin_recipes[] = {\n${table}    {NULL, NULL, 0},\n};\n")
