# SPDX-License-Identifier: Apache-2.0
# Third-party libraries of a tree that must run where none of them is installed. With EPKIT_STATIC_DEPS=ON archives are
# linked in; a library without an archive stays shared and is installed in lib/epkit, which is in the run path of the
# command. The file THIRD-PARTY of the installed tree lists them, next to their licences. Without the option, nothing
# here has an effect.

# As in the copyright files that are installed with them. libsmartcols: the licence of this part of util-linux.
set(EPKIT_LICENCE_jansson "MIT")
set(EPKIT_LICENCE_elf "LGPL-3.0-or-later, or GPL-2.0-or-later")
set(EPKIT_LICENCE_yaml "MIT")
set(EPKIT_LICENCE_z "Zlib")
set(EPKIT_LICENCE_zstd "BSD-3-Clause, or GPL-2.0-only")
set(EPKIT_LICENCE_smartcols "LGPL-2.1-or-later")
set(EPKIT_LICENCE_stdc++ "GPL-3.0-or-later with the GCC Runtime Library Exception")
set(EPKIT_LICENCE_cudart_static "NVIDIA CUDA Toolkit EULA, which names it as redistributable")

set(EPKIT_THIRD_PARTY_DIR ${CMAKE_INSTALL_DATADIR}/doc/epkit)
find_program(EPKIT_DPKG_QUERY dpkg-query)
mark_as_advanced(EPKIT_DPKG_QUERY)

# epkit_third_party(<name> <file> <place> [<version> <licence file>]): adds a row for lib<name> to THIRD-PARTY. If the
# file belongs to a package, version and copyright file are those of the package.
function(epkit_third_party name file place)
    list(APPEND ARGN "" "")
    list(GET ARGN 0 version)
    list(GET ARGN 1 copyright)
    set(licence ${EPKIT_LICENCE_${name}})
    if(EPKIT_DPKG_QUERY)
        # A package may list it as a file in /lib, which is a link to /usr/lib.
        file(REAL_PATH ${file} path)
        string(REGEX REPLACE "^/usr/" "/" path ${path})
        execute_process(COMMAND ${EPKIT_DPKG_QUERY} --search "*${path}" OUTPUT_VARIABLE found ERROR_QUIET)
        if(found MATCHES "^([^ ,]+): ")
            set(package ${CMAKE_MATCH_1})
            execute_process(COMMAND ${EPKIT_DPKG_QUERY} --show "--showformat=\${source:Package} \${source:Version}"
                ${package} OUTPUT_VARIABLE version)
            string(REGEX REPLACE ":.*" "" package ${package})
            set(copyright /usr/share/doc/${package}/copyright)
        endif()
    endif()
    set(text "licences/lib${name}")
    if(copyright AND EXISTS "${copyright}")
        file(REAL_PATH "${copyright}" copyright)
        install(FILES ${copyright} DESTINATION ${EPKIT_THIRD_PARTY_DIR}/licences RENAME lib${name})
    else()
        set(text "not found where this was built")
        message(WARNING "EPKIT_STATIC_DEPS: no licence text was found next to ${file}; the installed tree lacks it.")
    endif()
    if(NOT licence)
        set(licence "see its text")
    endif()
    if(NOT version)
        set(version "a file of no package")
    endif()
    set_property(GLOBAL APPEND_STRING PROPERTY EPKIT_THIRD_PARTY
        "\nlib${name}\n    is in    ${place}\n    from     ${version}\n    licence  ${licence}\n    text     ${text}\n")
endfunction()

# epkit_use_archives(<prefix>): after pkg_check_modules(<prefix> IMPORTED_TARGET ...), PkgConfig::<prefix> refers
# to archives if there are any. The dependencies of an archive are archives, too.
function(epkit_use_archives prefix)
    if(NOT EPKIT_STATIC_DEPS)
        return()
    endif()
    set(files)
    foreach(name ${${prefix}_STATIC_LIBRARIES})
        if(name MATCHES "^(c|dl|m|pthread|rt)$")
            list(APPEND files ${name})
            continue()
        endif()
        find_library(EPKIT_LIBRARY_${name} NAMES lib${name}.a ${name} HINTS ${${prefix}_STATIC_LIBRARY_DIRS} REQUIRED)
        mark_as_advanced(EPKIT_LIBRARY_${name})
        list(APPEND files ${EPKIT_LIBRARY_${name}})
        file(REAL_PATH ${EPKIT_LIBRARY_${name}} file)
        if(file MATCHES "\\.a$")
            epkit_third_party(${name} ${file} "bin/epkit")
        else()
            epkit_third_party(${name} ${file} "${CMAKE_INSTALL_LIBDIR}/epkit, a file that may be replaced")
        endif()
    endforeach()
    set_target_properties(PkgConfig::${prefix} PROPERTIES INTERFACE_LINK_LIBRARIES "${files}")
endfunction()

# libepkit-cuda is linked by the C++ compiler, and the CUDA runtime uses a small part of its library.
function(epkit_third_party_cuda)
    if(NOT EPKIT_STATIC_DEPS)
        return()
    endif()
    target_link_options(epkit-cuda PRIVATE -static-libstdc++ -static-libgcc)
    cmake_path(GET EPKIT_CUDART PARENT_PATH folder)
    file(REAL_PATH ${folder} folder)
    # In wheels, and in NVIDIA's packages and installers.
    file(GLOB licences ${folder}/../../../nvidia_cuda_runtime-*.dist-info/licenses/License.txt
        ${folder}/../EULA.txt ${folder}/../../../EULA.txt ${folder}/../../../LICENSE)
    set(licence "")
    if(licences)
        list(GET licences 0 licence)
    endif()
    set(place "${CMAKE_INSTALL_LIBDIR}/libepkit-cuda.so")
    epkit_third_party(cudart_static ${EPKIT_CUDART} ${place} "CUDA ${CMAKE_CUDA_COMPILER_VERSION}" "${licence}")
    execute_process(COMMAND ${CMAKE_CUDA_HOST_LINK_LAUNCHER} -print-file-name=libstdc++.a OUTPUT_VARIABLE file
        OUTPUT_STRIP_TRAILING_WHITESPACE)
    epkit_third_party(stdc++ ${file} ${place})
endfunction()

# Called last: writes the list, and installs it with epkit's own licence.
function(epkit_install_third_party)
    if(NOT EPKIT_STATIC_DEPS)
        return()
    endif()
    get_property(rows GLOBAL PROPERTY EPKIT_THIRD_PARTY)
    set(list ${PROJECT_BINARY_DIR}/THIRD-PARTY)
    file(CONFIGURE OUTPUT ${list} @ONLY CONTENT [[
Software of others in this tree. epkit itself is under the Apache License 2.0, see LICENSE.

"from" names source packages of the distribution that this was built on; who wants their source finds it there. epkit's
own source is all that is needed to link it with another version of a library below.
@rows@]])
    install(FILES LICENSE ${list} DESTINATION ${EPKIT_THIRD_PARTY_DIR})
endfunction()
