#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The validator of JSON documents detects errors, as the other tests assume.
#
# shellcheck disable=SC2154 # $stderr is set by run

load common

@test "all schemas are readable, and every command with --json has one" {
    local n=0
    for command in $(all_commands); do
        if epkit help "$command" | grep -q -- '--json '; then
            python3 -m json.tool "$EPKIT_SOURCE/cmd/$command/schema.json" >/dev/null
            n=$((n + 1))
        fi
    done
    # Fails if a change of the help leaves this loop empty.
    [ "$n" -ge 4 ]
}

# refused EDIT TEXT: a version document, changed by a jq program, is rejected with this text
refused() {
    local code=0 said
    said=$(epkit version --json | jq "$1" | valid version) || code=$?
    echo "$said"
    [ "$code" -eq 1 ]
    [[ "$said" == *"$2"* ]]
}

@test "invalid documents are rejected" {
    refused 'del(.subcommand)' "'subcommand' is missing"
    refused '.extra = 1' "'extra' is not in the schema"
    refused '.schema_version = true' 'is not 1'
    refused '.epkit = 3' 'is not of type string'
    refused '.epkit = "three"' 'does not match'
    refused '.libraries.jansson = null' '$.libraries.jansson: null is not of type string'
    refused '[.]' 'is not of type object'
}

@test "a schema with a keyword that the validator does not know is rejected" {
    jq '.properties.epkit.format = "date"' "$EPKIT_SOURCE/cmd/version/schema.json" >"$BATS_TEST_TMPDIR/schema.json"
    run --separate-stderr python3 -S "$EPKIT_SOURCE/tests/cli/validate.py" "$BATS_TEST_TMPDIR/schema.json" \
        <(epkit version --json)
    [ "$status" -ne 0 ]
    [[ "$stderr" == *"keywords that this validator does not know: format"* ]]
}

@test "what is no JSON is rejected" {
    run valid version <(echo '{"a": NaN}')
    [ "$status" -ne 0 ]
    run valid version <(echo '{')
    [ "$status" -ne 0 ]
}
