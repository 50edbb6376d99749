#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The allowed directions of ARCHITECTURE.md hold, and the checker notices when they do not.

bats_require_minimum_version 1.5.0

setup() {
    cp -r "$EPKIT_SOURCE/include" "$EPKIT_SOURCE/lib" "$EPKIT_SOURCE/common" "$EPKIT_SOURCE/machine" "$EPKIT_SOURCE/cmd" \
        "$EPKIT_SOURCE/ARCHITECTURE.md" "$BATS_TEST_TMPDIR"
}

check() {
    python3 "$EPKIT_SOURCE/scripts/check_includes.py" "${1:-$BATS_TEST_TMPDIR}"
}

# The include in $2 is refused with the text $3 when it stands in the file $1.
refuses() {
    echo "#include $2" >>"$BATS_TEST_TMPDIR/$1"
    run -1 check
    [ "${#lines[@]}" -eq 1 ]
    [[ "$output" == "$1:"*"$3"* ]]
}

@test "every include of the tree goes in an allowed direction" {
    run -0 check "$EPKIT_SOURCE"
}

@test "base may not include core" {
    refuses lib/base/shm.c '"core/core.h"' 'lib/base must not include lib/core/core.h'
}

@test "core may not include a backend" {
    refuses lib/core/args.c '"backend/host/host.h"' 'lib/core must not include lib/backend/host/host.h'
}

@test "the checker's own data may not include the library" {
    refuses cmd/test/check/data.c '"base/clock.h"' 'cmd/test/check must not include lib/base/clock.h'
}

@test "the command may not include the library's inside" {
    refuses cmd/main.c '"core/core.h"' 'cmd must not include lib/core/core.h'
}

@test "a path through .. is seen through" {
    refuses lib/net/net.h '"../core/core.h"' 'lib/net must not include lib/core/core.h'
}

@test "MPI may not appear outside its folder" {
    refuses lib/boot/shm.c '<mpi.h>' '<mpi.h> is not allowed here'
}

@test "an include that leads nowhere is reported" {
    refuses lib/base/shm.c '"base/no_such.h"' '"base/no_such.h" is not in the tree'
}

@test "a folder without a row is reported" {
    mkdir "$BATS_TEST_TMPDIR/lib/new"
    refuses lib/new/new.c '"base/error.h"' 'no row for this folder'
}

@test "what reads machines may not include a command" {
    refuses machine/source/lines.c '"cmd/inspect.h"' 'machine/source must not include cmd/inspect.h'
}
