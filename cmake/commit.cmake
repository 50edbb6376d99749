# SPDX-License-Identifier: Apache-2.0
# cmake -DSOURCE=... -DOUTPUT=... -P commit.cmake: a header with the commit of the source, rewritten only when it has
# changed. Runs with every build, because the configuration may be many commits old.
set(commit unknown)
find_package(Git QUIET)
if(GIT_FOUND)
    # A copy of the source in another repository has no commit of its own: there the prefix is not empty.
    execute_process(COMMAND ${GIT_EXECUTABLE} rev-parse --show-prefix WORKING_DIRECTORY ${SOURCE}
        OUTPUT_VARIABLE prefix OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed AND prefix STREQUAL "")
        execute_process(COMMAND ${GIT_EXECUTABLE} describe --always --dirty --abbrev=10 WORKING_DIRECTORY ${SOURCE}
            OUTPUT_VARIABLE described OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
        if(NOT failed)
            set(commit ${described})
        endif()
    endif()
endif()
file(WRITE ${OUTPUT}.new "#define EPKIT_COMMIT \"${commit}\"\n")
file(COPY_FILE ${OUTPUT}.new ${OUTPUT} ONLY_IF_DIFFERENT)
