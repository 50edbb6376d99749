#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The completion script: bash accepts it, and completes everything in the help.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common

setup() {
    epkit completion bash >"$BATS_TEST_TMPDIR/script.bash"
}

# complete WORD...: completions of the last word in bash
complete_words() {
    # shellcheck disable=SC1091
    (
        source "$BATS_TEST_TMPDIR/script.bash"
        COMP_WORDS=(epkit "$@")
        COMP_CWORD=$#
        _epkit
        printf '%s\n' "${COMPREPLY[@]}"
    )
}

@test "bash accepts its script" {
    bash -n "$BATS_TEST_TMPDIR/script.bash"
}

@test "shellcheck finds nothing in the script for bash" {
    command -v shellcheck >/dev/null || skip "shellcheck is not installed"
    shellcheck --shell=bash "$BATS_TEST_TMPDIR/script.bash"
}

@test "no other shell" {
    run -2 --separate-stderr epkit completion zsh
    [[ "$stderr" == *"it must be one of bash"* ]]
}

@test "bash: commands" {
    [ "$(complete_words te)" = test ]
    for command in $(all_commands); do
        complete_words "" | grep -qx "$command"
    done
    complete_words --v | grep -qx -- --version
}

@test "bash: arguments of commands" {
    [ "$(complete_words test intra)" = intranode ]
    [ "$(complete_words help comp)" = completion ]
    [ "$(complete_words completion b)" = bash ]
}

@test "bash: all options of every command" {
    for command in $(all_commands); do
        complete_words "$command" -- >"$BATS_TEST_TMPDIR/offered"
        while read -r option; do
            grep -qx -- "$option" "$BATS_TEST_TMPDIR/offered"
        done < <(options "$command")
    done
}

@test "bash: values of options" {
    [ "$(complete_words test intranode --boot th)" = threads ]
    [ "$(complete_words test intranode -b f)" = fork ]
    [ "$(complete_words test intranode --ranks "")" = "" ]
    touch "$BATS_TEST_TMPDIR/some.txt"
    cd "$BATS_TEST_TMPDIR"
    complete_words test intranode --routing som | grep -qx some.txt
}

@test "the script names all commands" {
    for command in $(all_commands); do
        grep -qw "$command" "$BATS_TEST_TMPDIR/script.bash"
    done
}
