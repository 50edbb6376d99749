#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Everything of one command is below one folder, and no stray file lies at the root.

ROOT=".ci .clang-format .clang-tidy .dockerignore .editorconfig .gitignore ARCHITECTURE.md CHANGELOG.md CMakeLists.txt
CMakePresets.json HACKING.md LICENSE README.md README.zh-CN.md SECURITY.md TESTING.md bench cmake cmd common deploy docs
examples include lib machine man pyproject.toml python recipes run.sh scripts test.sh tests"
COMMAND_ROOT=".clang-tidy CMakeLists.txt commands.c generated.cmake inspect.c inspect.h jobs.c main.c"

# strays NAME...: the lines of standard input that are not among the names
strays() {
    grep -vxF "$(printf '%s\n' "$@")" || true
}

setup() {
    cd "$EPKIT_SOURCE" || return
    git rev-parse HEAD >/dev/null 2>&1 || skip "the source is not a git repository, which knows its files"
}

@test "the root has only files and folders that are known" {
    # shellcheck disable=SC2086 # words
    run strays $ROOT < <(git ls-files --cached --others --exclude-standard | cut -d/ -f1 | sort -u)
    [ -z "$output" ]
    run strays a b <<<$'a\njson\nb'
    [ "$output" = json ]
}

@test "a command is a folder below cmd/, which defines it, and nothing else is there" {
    local name defined folders
    # shellcheck disable=SC2086
    run strays $COMMAND_ROOT < <(git ls-files cmd | sed -n 's,^cmd/\([^/]*\)$,\1,p')
    [ -z "$output" ]
    defined=$(git grep -hoE '^const struct cmd command_[a-z]+' | sed 's/.*_//' | sort)
    [ "$defined" = "$(sed -n 's/^ *&command_\([a-z]*\),$/\1/p' cmd/commands.c | sort)" ]
    while read -r name; do
        echo "$name"
        git grep -qE "^const struct cmd command_$name = " "cmd/$name/" || [ "$name" = completion ] # a part of help
    done <<<"$defined"
    folders=$(git ls-files cmd | sed -n 's,^cmd/\([^/]*\)/.*,\1,p' | sort -u)
    [ "$folders" = "$(grep -v completion <<<"$defined")" ]
}

# creations TREE: lines that create, rename or truncate files; common/dir.c and common/temporary.c alone may
creations() {
    git -C "$1" grep --untracked -nE 'O_CREAT|O_TRUNC|O_TMPFILE|\b(fopen|freopen|fdopen|open)\([^;]*"[wa][^;]*;|\b(creat|mkdir|mkdirat|mkdtemp|mkstemp|mkostemps?|mkfifo|mknod|rename|renameat2?|symlink|symlinkat|link|linkat|json_dump_file)\(|\bO_(WRONLY|RDWR)\b' \
        -- cmd common machine | grep -E '^[^:]*\.[ch]:' | grep -vE 'fdopen\(|"/dev/(null|tty)"|^common/(dir|temporary)\.c:|^[^:]*:[0-9]*: ?(/| )\*'
}

@test "only common/dir.c and common/temporary.c create files" {
    run creations .
    echo "$output"
    [ -z "$output" ]
    cd "$BATS_TEST_TMPDIR"
    git init -q tree
    mkdir tree/cmd
    printf 'f(path) {\n    fopen(path, "we");\n    open(path,\n         O_WRONLY | O_APPEND);\n    mkdir(path, 0777);\n    rename(a, b);\n    fopen(path, "re");\n}\n' >tree/cmd/a.c
    run creations tree
    [ "${#lines[@]}" -eq 4 ]
}
