# SPDX-License-Identifier: Apache-2.0
# epkit_embed(<target> <name> <file>...): compiles files into a target, as the table `name` (common/embedded.h).
#
# As a script, with FILES, NAME and OUTPUT, it writes the C file with the table.
function(epkit_embed target name)
    set(output ${CMAKE_CURRENT_BINARY_DIR}/${name}.c)
    set(script ${PROJECT_SOURCE_DIR}/cmake/embed.cmake)
    add_custom_command(OUTPUT ${output} VERBATIM DEPENDS ${ARGN} ${script} WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}
        COMMAND ${CMAKE_COMMAND} -D "FILES=${ARGN}" -D NAME=${name} -D OUTPUT=${output} -P ${script})
    target_sources(${target} PRIVATE ${output})
endfunction()

if(NOT CMAKE_SCRIPT_MODE_FILE)
    return()
endif()
set(arrays "")
set(table "")
foreach(file ${FILES})
    cmake_path(GET file STEM LAST_ONLY stem)
    string(MAKE_C_IDENTIFIER ${stem} id)
    file(READ ${file} bytes HEX)
    string(REGEX REPLACE "(..)" "0x\\1, " bytes "${bytes}")
    string(REGEX REPLACE "((0x.., )(0x.., )(0x.., )(0x.., )(0x.., )(0x.., )(0x.., )(0x.., ))" "\\1\n    " bytes "${bytes}")
    string(APPEND arrays "static const char ${id}[] = {\n    ${bytes}0\n};\n\n")
    string(APPEND table "    {\"${stem}\", ${id}, sizeof(${id}) - 1},\n")
endforeach()
file(WRITE ${OUTPUT} "/* Written by embed.cmake. */\n#include \"common/embedded.h\"\n\n${arrays}"
    "extern const struct embedded ${NAME}[];\n"
    "const struct embedded ${NAME}[] = {\n${table}    {NULL, NULL, 0},\n};\n")
