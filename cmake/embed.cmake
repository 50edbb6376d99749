# SPDX-License-Identifier: Apache-2.0
# cmake -DINPUT=file -DOUTPUT=file.c -DNAME=symbol -P embed.cmake: a file as a C constant.
file(READ ${INPUT} bytes HEX)
string(LENGTH "${bytes}" digits)
math(EXPR length "${digits} / 2")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
string(REGEX REPLACE "(0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,)" "\\1\n" bytes
    "${bytes}")
file(WRITE ${OUTPUT} "#include <stddef.h>\nextern const char ${NAME}[];\nextern const size_t ${NAME}_bytes;\nconst char ${NAME}[] = {\n${bytes}0};\nconst size_t ${NAME}_bytes = ${length};\n")
