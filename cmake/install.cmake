# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` installs: library, headers, pkg-config files and the CMake package. The command, the man
# pages and the completions are installed by cmd/ and man/.
include(CMakePackageConfigHelpers)

set(EPKIT_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/epkit)

install(TARGETS epkit EXPORT epkit-targets)
install(EXPORT epkit-targets NAMESPACE epkit:: FILE epkitTargets.cmake DESTINATION ${EPKIT_CMAKE_DIR})
install(DIRECTORY include/epkit DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h"
    PATTERN cuda.h EXCLUDE)

# The pkg-config files derive the prefix from their own path, so that `cmake --install --prefix` and a moved tree work.
# Absolute install directories (distributions set them) must not be appended to the prefix.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
    set(EPKIT_PC_PREFIX ${CMAKE_INSTALL_PREFIX})
else()
    file(RELATIVE_PATH up "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
    string(REGEX REPLACE "/$" "" up "${up}")
    set(EPKIT_PC_PREFIX "\${pcfiledir}/${up}")
endif()
foreach(dir LIBDIR INCLUDEDIR)
    if(IS_ABSOLUTE "${CMAKE_INSTALL_${dir}}")
        set(EPKIT_PC_${dir} "${CMAKE_INSTALL_${dir}}")
    else()
        set(EPKIT_PC_${dir} "\${prefix}/${CMAKE_INSTALL_${dir}}")
    endif()
endforeach()
configure_file(cmake/epkit.pc.in epkit.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/epkit.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# libepkit finds the CUDA backend in its own folder. Programs that use epkit/cuda.h link with it.
if(TARGET epkit-cuda)
    install(TARGETS epkit-cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
    install(FILES include/epkit/cuda.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/epkit)
endif()

epkit_install_third_party()

configure_package_config_file(cmake/epkitConfig.cmake.in epkitConfig.cmake INSTALL_DESTINATION ${EPKIT_CMAKE_DIR}
    NO_SET_AND_CHECK_MACRO)
# Before 1.0 a new minor version may break users.
write_basic_package_version_file(epkitConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/epkitConfig.cmake ${PROJECT_BINARY_DIR}/epkitConfigVersion.cmake
    DESTINATION ${EPKIT_CMAKE_DIR})
