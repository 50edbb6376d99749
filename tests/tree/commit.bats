#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Figures name the commit that they were measured with, and it is the right one.
#
# shellcheck disable=SC2154 # $stderr is set by run

bats_require_minimum_version 1.5.0

setup() {
    command -v git >/dev/null || skip "git is not installed"
    command -v jq >/dev/null || skip "jq is not installed"
    export GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b.c GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b.c
    # A repository with one file and the script, and a command that says that it was built from $BUILT.
    REPOSITORY="$BATS_TEST_TMPDIR/repository"
    mkdir -p "$REPOSITORY/scripts" "$REPOSITORY/part"
    cp "$EPKIT_SOURCE/scripts/bench_record.sh" "$REPOSITORY/scripts"
    echo 1 >"$REPOSITORY/part/file"
    git -C "$REPOSITORY" init --quiet
    commit
    export BUILT
    cat >"$BATS_TEST_TMPDIR/epkit" <<'END'
#!/bin/sh
echo "$@" >>"$0.calls"
printf '{"build": {"commit": "%s"}, "machine": {"cpu": "A CPU"}, "device": "host", "rows": []}\n' "$BUILT"
END
    chmod +x "$BATS_TEST_TMPDIR/epkit"
}

commit() {
    git -C "$REPOSITORY" add --all
    git -C "$REPOSITORY" commit --quiet --allow-empty --message change
}

described() {
    git -C "$REPOSITORY" describe --always --dirty --abbrev=10
}

# header [FOLDER]: what a build of the source in FOLDER says
header() {
    cmake -DSOURCE="${1:-$REPOSITORY}" -DOUTPUT="$BATS_TEST_TMPDIR/commit.h" -P "$EPKIT_SOURCE/cmake/commit.cmake" &&
        sed -n 's/^#define EPKIT_COMMIT "\(.*\)"$/\1/p' "$BATS_TEST_TMPDIR/commit.h"
}

record() {
    "$REPOSITORY/scripts/bench_record.sh" "$BATS_TEST_TMPDIR/epkit"
}

@test "a build knows the commit of its source, and that it has changed since" {
    [ "$(header)" = "$(described)" ]
    commit
    [ "$(header)" = "$(described)" ]
    echo 2 >"$REPOSITORY/part/file"
    [[ "$(header)" == *-dirty ]]
}

@test "the header stays as it is while the commit does: nothing is compiled again" {
    header
    touch --date=@1 "$BATS_TEST_TMPDIR/commit.h"
    header
    [ "$(stat --format=%Y "$BATS_TEST_TMPDIR/commit.h")" -eq 1 ]
}

@test "a copy of the source in somebody else's repository does not take its commit" {
    [ "$(header "$REPOSITORY/part")" = unknown ]
}

@test "every build looks at the commit" {
    local header
    header=$(find "$EPKIT_BUILD" -name commit.h -path '*bench*' | head -1)
    grep -q EPKIT_COMMIT "$header"
    # Not by building: other tests use the tree at the same time.
    if [ -f "$EPKIT_BUILD/build.ninja" ]; then
        run ninja -C "$EPKIT_BUILD" -n epkit-commit
        [[ "$output" == *commit.cmake* ]]
    fi
}

# For a dry run the header with the commit is always new.
@test "a build with nothing to do is silent" {
    local folder="$BATS_TEST_TMPDIR/build" object=cmd/bench/CMakeFiles/epkit-bench.dir/request.c.o
    cd "$BATS_TEST_TMPDIR" || return
    mkdir "$folder" bin
    echo "CMAKE_HOME_DIRECTORY:INTERNAL=$EPKIT_SOURCE" >"$folder/CMakeCache.txt"
    [ ! -f "$EPKIT_BUILD/build.ninja" ] || grep -q "^build $object: .*commit\.h" "$EPKIT_BUILD/build.ninja"
    touch "$folder/build.ninja"
    printf '#!/bin/sh\necho "[2/4] Building C object %s"\n' "$object" >bin/ninja
    printf '#!/bin/sh\n' >bin/cmake
    chmod +x bin/*
    PATH="$PWD/bin:$PATH" EPKIT_BUILD_FOLDER="$folder" run -0 "$EPKIT_SOURCE/scripts/build.sh" release --command
    [ -z "$output" ]
    echo 'echo "[3/4] Building C object cmd/main.c.o"' >>bin/ninja
    PATH="$PWD/bin:$PATH" EPKIT_BUILD_FOLDER="$folder" run -0 "$EPKIT_SOURCE/scripts/build.sh" release --command
    [ "$output" = "build.sh: building $folder, 1 files" ]
}

@test "no record of a command that was built from another commit" {
    BUILT=0123456789
    run -1 --separate-stderr record
    [[ "$stderr" == *"was built from 0123456789, but "*": build again"* ]]
    [ "$(wc -l <"$BATS_TEST_TMPDIR/epkit.calls")" -eq 1 ]
}

@test "no record of a source that is not committed" {
    echo 2 >"$REPOSITORY/part/file"
    BUILT=$(described)
    run -1 --separate-stderr record
    [[ "$stderr" == *"has changes that are not committed"* ]]
    [ ! -e "$BATS_TEST_TMPDIR/epkit.calls" ]
}

@test "a record of the right one" {
    BUILT=$(described)
    record
    [ "$(jq -r '.runs[0].document.build.commit' "$REPOSITORY"/bench/results/*-host-a-cpu-"$BUILT".json)" = "$BUILT" ]
}

@test "a record where mpirun is Hydra, which does not know the options of Open MPI" {
    BUILT=$(described)
    mkdir "$BATS_TEST_TMPDIR/bin"
    cat >"$BATS_TEST_TMPDIR/bin/mpirun" <<'END'
#!/bin/bash
if [ "$1" = --version ]; then echo 'HYDRA build details:'; exit; fi
[ "$1 $2" = "-n 8" ] && [ "${3#-}" = "$3" ] || { echo "unrecognized argument $3" >&2; exit 255; }
shift 2
exec "$@"
END
    chmod +x "$BATS_TEST_TMPDIR/bin/mpirun"
    PATH=$BATS_TEST_TMPDIR/bin:$PATH record
}
