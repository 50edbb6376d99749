#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Help, versions and usage errors.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common

@test "without a command: the overview on standard error, exit code 2" {
    run -2 --separate-stderr epkit
    [ -z "$output" ]
    [[ "$stderr" == "Usage: epkit COMMAND"* ]]
}

@test "help lists the commands, all of which have a help" {
    [ "$(all_commands | wc -l)" -ge 6 ]
    for command in $(all_commands); do
        run -0 --separate-stderr epkit help "$command"
        [ -z "$stderr" ]
        [[ "${lines[0]}" == "Usage: epkit $command"* ]]
        grep -q '^Exit codes:$' <<<"$output"
        grep -q '^Examples:$' <<<"$output"
        [ "$output" = "$(epkit "$command" --help)" ]
        [ "$output" = "$(epkit "$command" -h)" ]
    done
}

@test "--help takes precedence over usage errors" {
    run -0 epkit test --help nonsense --more-nonsense
}

@test "no line of a help is wider than a terminal" {
    for command in $(all_commands); do
        # shellcheck disable=SC2016 # of awk
        run -0 awk 'length > 80 { print FILENAME ": " $0; wide = 1 } END { exit wide }' <(epkit help "$command")
    done
}

@test "names of options are unique" {
    for command in $(all_commands); do
        [ -n "$(options "$command")" ]
        [ -z "$(options "$command" | sort | uniq -d)" ]
    done
}

@test "an unknown command: exit code 2 and the nearest one" {
    run -2 --separate-stderr epkit tset
    [ -z "$output" ]
    [[ "$stderr" == *"unknown command 'tset'; did you mean 'test'?"* ]]
    run -2 --separate-stderr epkit help vresion
    [[ "$stderr" == *"did you mean 'version'?"* ]]
}

@test "an unknown command that is similar to none: no suggestion" {
    run -2 --separate-stderr epkit xyzzyxyzzy
    [[ "$stderr" != *"did you mean"* ]]
}

@test "an unknown option: exit code 2 and the nearest one, for every command" {
    for command in $(all_commands); do
        run -2 --separate-stderr epkit "$command" --hlep
        [ -z "$output" ]
        [[ "$stderr" == *"$command: unknown option '--hlep'; did you mean '--help'?"* ]]
    done
}

@test "version: of command and library, also as JSON" {
    run -0 --separate-stderr epkit version
    [[ "${lines[0]}" =~ ^epkit\ [0-9]+\.[0-9]+\.[0-9]+$ ]]
    [ "$output" = "$(epkit --version)" ]
    epkit version --json | valid version
}

@test "output that cannot be written is a failure" {
    [ -w /dev/full ] || skip "no /dev/full"
    run epkit help test >/dev/full
    run -1 bash -c "'$EPKIT' help test >/dev/full"
    [[ "$output" == *"No space left on device"* ]]
    run -1 bash -c "'$EPKIT' version --json >/dev/full"
}

@test "a reader that exits early is no error" {
    run --separate-stderr bash -c "set -o pipefail; '$EPKIT' help test | head -1"
    [[ "$output" == "Usage: epkit test"* ]]
    [ -z "$stderr" ]
}

@test "man pages: source for scdoc, of every command" {
    command -v scdoc >/dev/null || skip "scdoc is not installed"
    for page in epkit $(all_commands); do
        epkit help --man "$page" >"$BATS_TEST_TMPDIR/page.scd"
        scdoc <"$BATS_TEST_TMPDIR/page.scd" >"$BATS_TEST_TMPDIR/page.1"
        grep -q '^\.SH NAME' "$BATS_TEST_TMPDIR/page.1"
        grep -q '^\.SH EXIT STATUS' "$BATS_TEST_TMPDIR/page.1"
    done
}

@test "the exit codes of the overview are those of the man page and of the conventions" {
    epkit help | sed -n '/^Exit codes: /,/\.$/p' | grep -oE '\b[0-9]\b' >"$BATS_TEST_TMPDIR/overview"
    [ "$(wc -l <"$BATS_TEST_TMPDIR/overview")" -ge 6 ]
    epkit help --man | grep -oE '^\*[0-9]\*$' | tr -d '*' | diff "$BATS_TEST_TMPDIR/overview" -
    sed -n '/^# EXIT CODES/,/^# JSON/p' "$EPKIT_SOURCE/man/epkit.7.scd" | grep -oE '^\*[0-9]\*$' | tr -d '*' | diff "$BATS_TEST_TMPDIR/overview" -
}

@test "man pages name every option, and no other" {
    for command in $(all_commands); do
        diff <(epkit help "$command" | grep -oE '^ +(-[a-zA-Z], )?--[a-z0-9-]+' | grep -oE -- '--[a-z0-9-]+' | sort) \
            <(epkit help --man "$command" | sed 's/\\//g' | grep -oE '^(\*-[a-zA-Z]\*, )?\*--[a-z0-9-]+\*' | grep -oE -- '--[a-z0-9-]+' | sort)
        epkit help --man "$command" | sed 's/\\//g' >"$BATS_TEST_TMPDIR/page"
        while read -r option; do
            grep -qF -- "*$option*" "$BATS_TEST_TMPDIR/page"
        done < <(options "$command")
    done
}

@test "man: the pages are part of the build" {
    [ -d "$EPKIT_BUILD/man" ] && command -v scdoc >/dev/null || skip "built without man pages"
    for page in epkit $(all_commands | sed 's/^/epkit-/'); do
        [ -s "$EPKIT_BUILD/man/$page.1" ]
    done
}
