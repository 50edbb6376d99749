# SPDX-License-Identifier: Apache-2.0
# The commands of docs/quickstart.md, word for word, and what the page says of their output.
# shellcheck disable=SC2016,SC2034 # backquotes of the page; code is for the tests

# page_section HEADING: the part of the page below the heading that begins with these words
page_section() {
    awk -v heading="$1" '/^```/ { code = !code } /^#/ && !code { on = 0; sub(/^#+ /, ""); on = index($0, heading) == 1; next } on' \
        "$EPKIT_SOURCE/docs/quickstart.md"
}

# page_commands HEADING [N]: its Nth block of commands, the first one by default. Without one it prints a command that
# fails, since a shell has no fault to find in nothing.
page_commands() {
    page_section "$1" | awk -v n="${2:-1}" -v heading="$1" '/^```sh$/ { on = ++i == n; next } /^```/ { on = 0 } on { print; found = 1 }
        END { if (!found) { print "echo \047the page has no commands " n " below: " heading "\047 >&2; exit 1"; exit 1 } }'
}

# page_row PLACE HEADING: the row of its table for this place: sets $command, $expected, and the exit code $code
page_row() {
    IFS='|' read -r _ _ command expected _ < <(page_section "$2" | grep "^| $1 |")
    command=$(grep -oE '`[^`]+`' <<<"$command" | head -n 1 | tr -d '`')
    code=$(grep -oE 'exit code [0-9]+' <<<"$expected" | grep -oE '[0-9]+') || code=0
}

# page_agrees TEXT OUTPUT: the output has each piece in backquotes of what the page expects ("..." stands for anything)
page_agrees() {
    local piece pieces
    pieces=$(grep -oE '`[^`]+`' <<<"$1" | tr -d '`' | sed 's/ \.\.\. /\n/g')
    if [ -z "$pieces" ]; then
        printf 'the page promises nothing: there is no piece in backquotes in "%s"\n' "$1"
        return 1
    fi
    while IFS= read -r piece; do
        [[ "$2" == *"$piece"* ]] && continue
        printf 'the page promises: %s\n' "$piece"
        return 1
    done <<<"$pieces"
}

# page_expects HEADING OUTPUT: the same for a section's sentence that begins with "Expected:"
page_expects() {
    page_agrees "$(page_section "$1" | awk '/^Expected:/ { on = 1 } /^$/ { on = 0 } on' | sed -n 'H; ${x; s/\n/ /g; s/ If not:.*//; p}')" "$2"
}
