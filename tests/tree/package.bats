#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` leaves is usable: by pkg-config, by CMake, from the shell, and from any place.

bats_require_minimum_version 1.5.0

setup_file() {
    export PREFIX="$BATS_FILE_TMPDIR/prefix"
    cmake --install "$EPKIT_BUILD" --prefix "$BATS_FILE_TMPDIR/first" >"$BATS_FILE_TMPDIR/install.log"
    # Moved, so that nothing can work because of the place that it was installed to.
    mv "$BATS_FILE_TMPDIR/first" "$PREFIX"

    PKG_CONFIG_PATH=$(dirname "$(find "$PREFIX" -name epkit.pc)")
    export PKG_CONFIG_PATH
    LIBDIR=$(dirname "$PKG_CONFIG_PATH")
    export LIBDIR
    cp -r "$EPKIT_SOURCE/examples" "$BATS_FILE_TMPDIR/examples"
}

@test "the examples build by make and pkg-config, and run" {
    LD_LIBRARY_PATH="$LIBDIR" make -C "$BATS_FILE_TMPDIR/examples" CFLAGS="-O2 -Wall -Wextra -Werror" check
}

@test "the examples build by the CMake package, and run" {
    cmake -S "$BATS_FILE_TMPDIR/examples" -B "$BATS_TEST_TMPDIR/build" -DCMAKE_PREFIX_PATH="$PREFIX"
    cmake --build "$BATS_TEST_TMPDIR/build"
    ctest --test-dir "$BATS_TEST_TMPDIR/build" --output-on-failure --no-tests=error
}

# configures VERSION [COMPONENTS...]: a project that asks for this epkit
configures() {
    cat >"$BATS_TEST_TMPDIR/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.25)
project(user LANGUAGES C)
find_package(epkit $* REQUIRED)
END
    cmake -S "$BATS_TEST_TMPDIR" -B "$BATS_TEST_TMPDIR/build" -DCMAKE_PREFIX_PATH="$PREFIX"
}

@test "the CMake package accepts its own minor version" {
    configures 0.1
}

@test "the CMake package refuses another minor version" {
    run configures 0.2
    [ "$status" -ne 0 ]
    [[ "$output" == *'version: 0.1.0'* ]]
}

@test "the CMake package refuses a component that does not exist" {
    run configures 0.1 COMPONENTS nothing
    [ "$status" -ne 0 ]
}

@test "the command runs from where it was installed, and says the version of the package" {
    local version
    version=$("$PREFIX/bin/epkit" --version)
    echo "$version"
    [[ "$version" == *"$(pkg-config --modversion epkit)"* ]]
}

@test "nothing installed points into the build or the source tree" {
    local file
    run -1 grep -rIl -e "$EPKIT_BUILD" -e "$EPKIT_SOURCE" "$PREFIX"
    for file in "$PREFIX"/bin/* "$LIBDIR"/*.so; do
        echo "$file"
        run -1 grep -vF "\$ORIGIN" < <(objdump -p "$file" | grep -E 'R(UN)?PATH')
        # What is loaded, not what is for debuggers. Sanitizers put the names of source files there.
        if ! nm --dynamic "$file" | grep -qE '__([at]san_init|ubsan_)'; then
            run -1 grep -F -e "$EPKIT_BUILD" -e "$EPKIT_SOURCE" < <(strings --data "$file")
        fi
    done
}

@test "headers, manual pages and completions are in place" {
    [ -f "$PREFIX/include/epkit/epkit.h" ]
    command -v scdoc >/dev/null || skip "scdoc is not installed: no manual pages"
    [ -s "$PREFIX/share/man/man7/epkit.7" ]
    [ -s "$PREFIX/share/man/man3/libepkit.3" ]
    [ -s "$PREFIX/share/man/man1/epkit.1" ]
    [ -s "$PREFIX/share/bash-completion/completions/epkit" ]
}
