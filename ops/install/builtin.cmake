# SPDX-License-Identifier: Apache-2.0
# Writes OUT: the files in the list RECIPES as arrays of bytes, and a table of them (builtin.h).
set(arrays "")
set(table "")
foreach(recipe ${RECIPES})
    cmake_path(GET recipe STEM name)
    string(MAKE_C_IDENTIFIER ${name} id)
    file(READ ${recipe} hex HEX)
    string(REGEX REPLACE "(..)" "0x\\1, " bytes "${hex}")
    string(REGEX REPLACE "((0x.., )(0x.., )(0x.., )(0x.., )(0x.., )(0x.., )(0x.., )(0x.., ))" "\\1\n    " bytes "${bytes}")
    string(APPEND arrays "static const char ${id}[] = {\n    ${bytes}0\n};\n\n")
    string(APPEND table "    {\"${name}\", ${id}, sizeof(${id}) - 1},\n")
endforeach()
file(WRITE ${OUT} "/* Written by builtin.cmake from recipes/. */\n#include \"install/builtin.h\"\n\n${arrays}"
    "const struct builtin_recipe builtin_recipes[] = {\n${table}    {NULL, NULL, 0},\n};\n")
