# SPDX-License-Identifier: Apache-2.0
# texts.awk - the texts of the checks, from the rows of docs/failure-modes.md, as macros with the members of a
# struct doctor_check: a check without a row does not compile.
BEGIN { FS = " [|] " }

# A cell as the content of a C string: without the marks of code, and what is escaped as it is.
function text(cell) {
    gsub(/\\`/, "\001", cell)
    gsub(/`/, "", cell)
    gsub(/\001/, "`", cell)
    gsub(/\\/, "", cell)
    gsub(/"/, "\\\"", cell)
    return cell
}

/^[|] [0-9]+ [|].* `[a-z0-9-]+` [|]$/ {
    mode = substr($1, 3)
    id = $8
    gsub(/[` |]/, "", id)
    name = id
    gsub(/-/, "_", name)
    n = split($7, links, "`")
    see = ""
    for (i = 2; i <= n; i += 2)
        see = see (see ? ", " : "") "\"" text(links[i]) "\""
    printf "#define DOCTOR_TEXTS_%s .id = \"%s\", .mode = %d, .title = \"%s\", .symptom = \"%s\", .cause = \"%s\", " \
           ".remedy = \"%s\", .links = TEXTS(%s)\n", name, id, mode, text($2), text($3), text($4), text($6), see
}
