# SPDX-License-Identifier: Apache-2.0
# Files that the command writes about itself.
if(CMAKE_CROSSCOMPILING)
    message(STATUS "cross-compiling: no completion scripts and no pages of the verbs")
    return()
endif()

# man/${file} or completion/${file} in the build tree: standard output of `epkit ${ARGN}`, through ${filter}. The shell
# is there for the redirections.
function(epkit_generate file filter)
    add_custom_command(OUTPUT ${PROJECT_BINARY_DIR}/${file} DEPENDS epkit-command VERBATIM
        COMMAND sh -ec "mkdir -p $(dirname $1); out=$1 filter=$2; shift 2; \"$@\" >$out.source; $filter <$out.source >$out"
            sh ${file} ${filter} $<TARGET_FILE:epkit-command> ${ARGN}
        WORKING_DIRECTORY ${PROJECT_BINARY_DIR})
    set_property(GLOBAL APPEND PROPERTY EPKIT_GENERATED ${PROJECT_BINARY_DIR}/${file})
endfunction()

epkit_generate(completion/epkit cat completion bash)
epkit_generate(completion/_epkit cat completion zsh)
epkit_generate(completion/epkit.fish cat completion fish)
install(FILES ${PROJECT_BINARY_DIR}/completion/epkit
    DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
install(FILES ${PROJECT_BINARY_DIR}/completion/_epkit DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
install(FILES ${PROJECT_BINARY_DIR}/completion/epkit.fish
    DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)

find_program(SCDOC scdoc)
mark_as_advanced(SCDOC)
if(SCDOC)
    file(STRINGS verbs.c verb_rows REGEX "&verb_")
    string(REGEX MATCHALL "&verb_[a-z]+" verb_names "${verb_rows}")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS verbs.c)
    epkit_generate(man/epkit.1 ${SCDOC} help --man epkit)
    install(FILES ${PROJECT_BINARY_DIR}/man/epkit.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
    foreach(name ${verb_names})
        string(REPLACE "&verb_" "" verb ${name})
        epkit_generate(man/epkit-${verb}.1 ${SCDOC} help --man ${verb})
        install(FILES ${PROJECT_BINARY_DIR}/man/epkit-${verb}.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
    endforeach()
endif()

get_property(files GLOBAL PROPERTY EPKIT_GENERATED)
add_custom_target(epkit-generated ALL DEPENDS ${files})
