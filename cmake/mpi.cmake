# SPDX-License-Identifier: Apache-2.0
# MPI::MPI_C, where there is a complete MPI. It is for the baseline of epkit bench and for an example.
#
# Debian's openmpi-bin has the compiler mpicc, but neither headers nor libraries, and FindMPI ends the configuration
# there: so the compiler is tried first. CMAKE_DISABLE_FIND_PACKAGE_MPI=ON builds without MPI.
if(CMAKE_DISABLE_FIND_PACKAGE_MPI)
    message(STATUS "MPI: not used (CMAKE_DISABLE_FIND_PACKAGE_MPI)")
    return()
endif()
find_program(MPI_C_COMPILER NAMES mpicc mpiicc HINTS ENV MPI_HOME PATH_SUFFIXES bin)
if(NOT MPI_C_COMPILER)
    message(STATUS "MPI: not found, there is no mpicc (Debian: libopenmpi-dev)")
    return()
endif()
set(program ${PROJECT_BINARY_DIR}/CMakeFiles/mpi)
file(WRITE ${program}.c "#include <mpi.h>\nint main(int argc, char **argv) { return MPI_Init(&argc, &argv); }\n")
execute_process(COMMAND ${MPI_C_COMPILER} ${program}.c -o ${program} RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
if(NOT failed)
    find_package(MPI QUIET COMPONENTS C GLOBAL)
endif()
if(MPI_C_FOUND)
    message(STATUS "MPI: ${MPI_C_COMPILER}")
else()
    message(STATUS "MPI: not used, ${MPI_C_COMPILER} cannot compile a program with mpi.h (Debian: libopenmpi-dev)")
endif()
