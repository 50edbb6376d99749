# SPDX-License-Identifier: Apache-2.0
# The commands of docs/quickstart.md, word for word, and what the page says of their output.

# page_section HEADING: the part of the page below the heading that begins with these words
page_section() {
    awk -v heading="$1" '/^```/ { code = !code } /^#/ && !code { on = 0; sub(/^#+ /, ""); on = index($0, heading) == 1; next } on' \
        "$EPKIT_SOURCE/docs/quickstart.md"
}

# page_commands HEADING: its first block of commands
page_commands() {
    page_section "$1" | awk '/^```/ { if (on) exit; on = /^```sh$/; next } on'
}

# page_row PLACE HEADING: the row of its table that is for this place: commands and expected output
page_row() {
    page_section "$2" | grep "^| $1 |" | head -n "${3:-1}" | tail -n 1
}

# page_agrees TEXT OUTPUT: the output has each piece in backquotes of what the page expects ("..." stands for anything)
page_agrees() {
    local piece
    while IFS= read -r piece; do
        [[ "$2" == *"$piece"* ]] && continue
        printf 'the page promises: %s\n' "$piece"
        return 1
    done < <(grep -oE '`[^`]+`' <<<"$1" | tr -d '`' | sed 's/ \.\.\. /\n/g')
}

# page_expects HEADING OUTPUT: the same for a section's sentence that begins with "Expected:"
page_expects() {
    page_agrees "$(page_section "$1" | awk '/^Expected:/ { on = 1 } /^$/ { on = 0 } on' | sed -n 'H; ${x; s/\n/ /g; s/ If not:.*//; p}')" "$2"
}
