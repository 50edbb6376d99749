/* SPDX-License-Identifier: Apache-2.0 */
/* version.c - which of two versions is later, and the version in the name of a library. */
#include "libs.h"

#include <string.h>

#define DIGITS "0123456789"
#define LETTERS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

/* The next run of digits or letters; empty at the end. Separators are ignored: 3.5.19-1 equals 3.5.19.1. */
struct run {
    const char *text;
    size_t n;
    bool is_word;
};

static struct run next_run(const char **at)
{
    struct run run;

    *at += strcspn(*at, DIGITS LETTERS);
    run.is_word = **at && strchr(LETTERS, **at);
    if (!run.is_word)
        *at += strspn(*at, "0");
    run.text = *at;
    run.n = strspn(*at, run.is_word ? LETTERS : DIGITS);
    *at += run.n;
    return run;
}

/* The end counts as the number 0. Numbers are compared as digit strings, so they have no limit. */
static int compare_runs(struct run a, struct run b)
{
    if (a.is_word && b.is_word) {
        int result = strncmp(a.text, b.text, a.n < b.n ? a.n : b.n);

        return result != 0 ? result : (a.n > b.n) - (a.n < b.n);
    }
    if (a.is_word || b.is_word) {
        const struct run *number = a.is_word ? &b : &a;
        /* 1.0rc is before 1.0.1, and after 1.0: a commit as in "1.2.1+29d31c0" is later than the release. */
        int word_is_later = number->n == 0 ? 1 : -1;

        return a.is_word ? word_is_later : -word_is_later;
    }
    if (a.n != b.n)
        return a.n < b.n ? -1 : 1;
    return strncmp(a.text, b.text, a.n);
}

int libs_version_compare(const char *a, const char *b)
{
    int result = 0;

    while (result == 0 && (*a || *b))
        result = compare_runs(next_run(&a), next_run(&b));
    return result;
}

const char *libs_file_version(const char *path)
{
    const char *slash = strrchr(path, '/'), *version = strstr(slash ? slash : path, ".so.");

    return version && strchr(version + 4, '.') ? version + 4 : "";
}
