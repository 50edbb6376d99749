#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# What test.sh reports of suites (scripts/count_results.py).

bats_require_minimum_version 1.5.0

setup() {
    cd "$BATS_TEST_TMPDIR" || return
    cat >CMakeLists.txt <<'END'
cmake_minimum_required(VERSION 3.20)
project(suites NONE)
enable_testing()
add_test(NAME good COMMAND sh -c "echo '3 passed, 0 failed, 1 skipped'")
add_test(NAME bad COMMAND sh -c "echo 1..2; echo not ok 1 wrong; echo ok 2 fine; exit 1")
add_test(NAME hangs COMMAND sleep 60)
set_tests_properties(hangs PROPERTIES TIMEOUT 1)
END
    cmake -G Ninja -B build . >/dev/null
    # Tests of this build run in a ctest themselves.
    unset DASHBOARD_TEST_FROM_CTEST
}

@test "cases are counted, and failed ones are reported with their output" {
    ctest --test-dir build --output-junit "$PWD/suites.xml" >/dev/null || true
    "$EPKIT_SOURCE/scripts/count_results.py" it suites.xml counts failures >report
    cat report
    [ "$(cat counts)" = "4 2 1" ]
    grep -q 'it: bad .*FAILED' report
    grep -qx '      | not ok 1 wrong' report
    grep -qx '      failed: wrong' failures
    grep -qx '      failed: ended by its time limit or a signal' failures
    run ! grep -q good failures
}

@test "no suite is run a second time" {
    run ! grep -E 'rerun-failed|repeat until-pass' "$EPKIT_SOURCE"/test.sh "$EPKIT_SOURCE"/CMakePresets.json
}

@test "what the release build leaves out in the medium tier is run with sanitizers, and whole" {
    left_out() {
        jq -r --arg preset "$1" '.testPresets[] | select(.name == $preset).filter.exclude.name' "$EPKIT_SOURCE/CMakePresets.json"
    }
    local suite suites
    suites=$(ctest --test-dir "$EPKIT_BUILD" --label-regex '^cli$' --show-only | sed -n 's/^ *Test *#[0-9]*: //p' |
        grep -E "$(left_out release-medium)")
    for suite in $suites; do
        echo "$suite"
        [[ ! $suite =~ $(left_out asan-medium) ]]
        run ! grep -q EPKIT_SANITIZED "$EPKIT_SOURCE/tests/${suite/_//}.bats"
    done
    # And nothing of another label.
    [ "$(ctest --test-dir "$EPKIT_BUILD" --exclude-regex "$(left_out release-medium)" --show-only | wc -l)" -eq \
        "$(($(ctest --test-dir "$EPKIT_BUILD" --show-only | wc -l) - $(wc -w <<<"$suites")))" ]
}

@test "cases that the medium tier runs once run with sanitizers, and do not ask for the build" {
    local file suite once text with_sanitizers
    with_sanitizers=$(jq -r '.testPresets[] | select(.name == "asan-medium").filter.exclude.name' "$EPKIT_SOURCE/CMakePresets.json")
    once=$(grep --files-with-matches --recursive 'file_tags=once' "$EPKIT_SOURCE/tests" --include='*.bats' | grep --invert-match results.bats)
    [ -n "$once" ]
    for file in $once; do
        suite=cli_$(basename "$file" .bats)
        echo "$suite"
        [[ $file == */tests/cli/* && ! $suite =~ $with_sanitizers ]]
        # Cases without the tag "both", and functions behind them.
        text=$(awk '/^# bats test_tags=both/ { both = 1; next } /^@test/ { on = !both; both = 0 } on' "$file")
        [ "$(grep --count '^@test' <<<"$text")" -ge 10 ]
        run ! grep --extended-regexp 'EPKIT_SANITIZED|EPKIT_TEST_LONG|unless_sanitized|EVERY' <<<"$text"
        # What is left out of the other build is what is tagged.
        [ "$(EPKIT_ONCE=1 EPKIT_BUILD=$EPKIT_BUILD "$EPKIT_SOURCE/tests/bats.sh" "cli/$(basename "$file" .bats)" --count)" -eq \
            "$(($(grep --count '^@test' "$file") - $(grep --count '^@test' <<<"$text")))" ]
    done
}
