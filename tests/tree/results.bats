#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# What test.sh reports of suites that pass, fail, and fail only once (scripts/count_results.py).

bats_require_minimum_version 1.5.0

setup() {
    cd "$BATS_TEST_TMPDIR" || return
    cat >CMakeLists.txt <<'END'
cmake_minimum_required(VERSION 3.20)
project(suites NONE)
enable_testing()
add_test(NAME good COMMAND sh -c "echo '3 passed, 0 failed, 1 skipped'")
add_test(NAME once COMMAND sh -c "echo 1..2; echo ok 1 fine; test -e ran && echo ok 2 late || { touch ran; echo not ok 2 late; exit 1; }")
add_test(NAME bad COMMAND sh -c "echo 1..2; echo not ok 1 wrong; echo ok 2 fine; exit 1")
add_test(NAME hangs COMMAND sleep 60)
set_tests_properties(hangs PROPERTIES TIMEOUT 1)
END
    cmake -G Ninja -B build . >/dev/null
    # Tests of this build run in a ctest themselves.
    unset DASHBOARD_TEST_FROM_CTEST
}

report() {
    ctest --test-dir build --output-junit "$PWD/first.xml" "$@" >/dev/null || true
    ctest --test-dir build --rerun-failed --output-junit "$PWD/again.xml" >/dev/null || true
    "$EPKIT_SOURCE/scripts/count_results.py" it first.xml again.xml counts failures >report
    cat report
}

@test "a suite that passes alone counts as passed, and its first failure is reported" {
    report -R 'good|once'
    [ "$(cat counts)" = "5 0 1" ]
    grep -q 'it: once .*failed once, and passed when it ran again alone' report
    grep -qx '      | not ok 2 late' report
    grep -q 'it: once: failed once' failures
    grep -qx '      the first run: failed: late' failures
    run ! grep -q good failures
}

@test "a case that is skipped the second time has not passed" {
    sed -i "s/echo ok 2 late ||/echo 'ok 2 late # skip not here' ||/" CMakeLists.txt
    cmake -B build . >/dev/null
    report -R once
    [ "$(cat counts)" = "1 1 0" ]
    grep -q 'it: once: FAILED TWICE' failures
}

@test "what fails twice has failed" {
    report -R 'good|bad|hangs'
    [ "$(cat counts)" = "4 2 1" ]
    grep -q 'it: bad: FAILED TWICE' failures
    grep -qx '      failed: ended by its time limit or a signal' failures
}

@test "without a second run a failure is one" {
    ctest --test-dir build --output-junit "$PWD/first.xml" -R bad >/dev/null || true
    "$EPKIT_SOURCE/scripts/count_results.py" it first.xml none.xml counts failures
    [ "$(cat counts)" = "1 1 0" ]
    grep -q 'it: bad: FAILED$' failures
}
