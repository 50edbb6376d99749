/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as a snapshot: what is refused has a reason, and what is accepted answers every question about what is in
 * it and can be saved, and what was saved can be read again.
 */
#include "tests/unit/load_snapshot.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool holds)
{
    if (!holds)
        abort();
}

static void check_text(struct source_text text)
{
    check(text.text && text.why);
    check(text.text[text.bytes] == '\0');
    check(text.state == SOURCE_OK || text.bytes == 0);
}

static json_t *read_length(struct source_text file)
{
    check(file.text[file.bytes] == '\0');
    return json_integer((json_int_t)file.bytes);
}

static void ask_path(struct source *source, const char *path)
{
    struct source_names names = source_list(source, "%s", path);
    struct source_text line = source_line(source, "%s", path);
    struct source_stat stat = source_stat(source, "%s", path);
    struct elf_facts elf = source_elf(source, "%s", path);
    int64_t value;
    uint64_t now;

    check_text(source_read(source, "%s", path));
    check_text(source_resolve(source, "%s", path));
    source_log_fact(source, "length of lines", read_length, "Xid", "%s", path);
    check_text(line);
    check(strlen(line.text) == line.bytes && !strchr(line.text, '\n'));
    check(names.why && (names.state == SOURCE_OK || names.n == 0));
    for (size_t i = 0; i < names.n; i++)
        check(names.names[i][0] && !strchr(names.names[i], '/'));
    check(stat.why && elf.why && elf.soname && elf.runpath && elf.rpath);
    for (size_t i = 0; i < elf.n_needed; i++)
        check(elf.needed[i] != NULL);
    source_number(source, &value, "%s", path);
    source_number_uncached(source, &now, "%s", path);
}

/* A fact that is there, and one that a text is read for if there is any. */
static void ask_fact(struct source *source, const char *key)
{
    const char *tab = strchr(key, '\t');
    char path[PATH_MAX];
    struct source_answer fact;

    check(tab && tab - key < PATH_MAX);
    snprintf(path, sizeof(path), "%.*s", (int)(tab - key), key);
    fact = source_fact(source, tab + 1, read_length, "%s", path);
    check(fact.why && (fact.state == SOURCE_OK) == (fact.value != NULL));
    check(source_fact_text(fact) && (!source_fact_bool(fact) || fact.value));
    fact = source_fact(source, "length", read_length, "%s", path);
    check((fact.state == SOURCE_OK) == (fact.value != NULL));
}

static void ask_everything(struct source *source)
{
    struct source_environment environment = source_environment(source);

    for (size_t i = 0; i < environment.n; i++)
        check(source_env(source, environment.variables[i].name) == environment.variables[i].value);
    ask_path(source, "/");
    for (int kind = 0; kind < CACHE_KINDS; kind++) {
        FOR_MEMBERS (key, entry, source->cached[kind]) {
            if (kind == CACHE_ANSWERS)
                check((source_query(source, key, NULL, NULL, 0).state == SOURCE_OK) ==
                      (source_query(source, key, NULL, NULL, 0).value != NULL));
            else if (kind == CACHE_FACTS)
                ask_fact(source, key);
            else if (kind != CACHE_LINES)
                ask_path(source, key);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct source *source, *saved = NULL;
    char *text, *again;

    if (load_snapshot("input", (const char *)data, size, &source) != EP_OK) {
        check(strncmp(ep_last_error(), "input: ", 7) == 0);
        return 0;
    }
    ask_everything(source);
    text = snapshot_text(source);
    check(load_snapshot("saved", text, strlen(text), &saved) == EP_OK);
    ask_everything(saved);
    again = snapshot_text(saved);
    free(again);
    free(text);
    source_free(saved);
    source_free(source);
    return 0;
}
