#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Requests that are refused although each option is valid, and their error texts.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common

# refused TEXT ARGUMENT...: exit code 2, nothing on standard output
refused() {
    local text="$1"
    shift
    run -2 --separate-stderr epkit "$@"
    [ -z "$output" ]
    [[ "$stderr" == *"$text"* ]]
}

# none_starts TEXT COMMAND...: each COMMAND (words) is refused with TEXT, and has written no report
none_starts() {
    local text="$1" command
    shift
    for command in "$@"; do
        # shellcheck disable=SC2086 # words
        refused "$text" $command
    done
    [ ! -e report ]
}

# without_memory ARGUMENT...: shared memory is a file for this limit, so no group can be created
without_memory() (
    ulimit -f 16
    exec "$EPKIT" "$@"
)

@test "a matrix of one node over several" {
    refused "intranode runs on one node only" test intranode --nodes 2
    refused "--no-partial-reduce is for lowlatency, and intranode has no" test intranode --no-partial-reduce
}

@test "options of the network on one node" {
    refused "--net-delay-us needs --nodes 2 or more" test intranode --net-delay-us 5
    refused "--net-reorder needs --nodes 2 or more" test lowlatency --net-reorder
    refused "--net-ring needs --nodes 2 or more" test intranode --net-ring 4K
    refused "--net-split needs --nodes 2 or more" test intranode --net-split 100
    refused "--channels needs --nodes 2 or more" bench --channels 2
    refused "--partial needs --nodes 2 or more" bench --partial bf16
}

@test "a backend of the environment that does not exist, as one of the command line" {
    export EPKIT_BACKEND=foo
    none_starts "EPKIT_BACKEND: 'foo' is none of host, cuda" "test intranode" bench "run --output report"
    # The command line takes precedence.
    epkit test intranode "${SMALL[@]}" --only 2 --backend host
}

@test "a network of the environment that does not exist, as one of the command line" {
    export EPKIT_NETWORK=foo
    none_starts "EPKIT_NETWORK: 'foo' is none of emulated, tcp, verbs" "test internode" bench "run --output report"
    epkit test internode --ranks 2 --nodes 2 --tokens 8 --hidden 256 --only 2 --network emulated
    # The command that repeats a failure has what the network depended on.
    EPKIT_NETWORK=emulated run -1 without_memory test internode --ranks 2 --nodes 2 --tokens 8 --hidden 256 --only 2
    [[ "$output" == *"    EPKIT_NETWORK=emulated epkit test internode "* ]]
}

@test "an instruction set of the environment that does not exist" {
    export EPKIT_HOST_ISA=sse9
    none_starts "EPKIT_HOST_ISA: 'sse9' is none of portable, avx2, avx512" "test intranode" bench "run --output report"
    EPKIT_HOST_ISA=portable epkit test intranode "${SMALL[@]}" --only 2
}

@test "a backend that this build does not have: why, and no command to repeat it" {
    run --separate-stderr epkit test intranode "${SMALL[@]}" --only 2 --backend cuda
    [ "$status" -eq 4 ] || skip "there is a cuda backend"
    [[ "$stderr" == *"this epkit was built without the CUDA backend: select the host backend by EPKIT_BACKEND=host"* ]]
    [[ "$output" != *"To repeat"* ]]
}

@test "the command that repeats a failure has the same case and backend" {
    EPKIT_BACKEND=host run -1 --separate-stderr without_memory test intranode "${SMALL[@]}" --only 2 --seed 5
    [[ "$output" == *"EPKIT_BACKEND=host epkit test intranode"*" --seed 5 --only 2"* ]]
}

@test "the singular of ranks" {
    run epkit test intranode --ranks 1 --tokens 16 --hidden 512 --only 2 --seed 1
    [[ "$output" == *"(1 rank, seed 1,"* ]]
    refused "over 2 ranks" test intranode --ranks 2 --experts 3
}

@test "an option where the command should be" {
    refused "unknown option '--bogus'" --bogus
    run ! grep -q "command '--bogus'" <<<"$stderr"
}

@test "no suggestion for a name that is not similar" {
    refused "unknown argument 'tcsh': it must be one of bash" completion tcsh
    [[ "$stderr" != *"did you mean"* ]]
}

@test "a folder that cannot hold the report: another one is suggested" {
    touch "$BATS_TEST_TMPDIR/file"
    refused "choose another with --output" run --output "$BATS_TEST_TMPDIR/file"
    refused "choose another with --output" run --output "$BATS_TEST_TMPDIR/no/such"
}
