/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as a snapshot: what is refused has a reason, and what is accepted answers every question about what is in
 * it and can be saved, and what was saved can be read again.
 */
#include "source/state.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool holds)
{
    if (!holds)
        abort();
}

static void check_text(struct root_text text)
{
    check(text.text && text.why);
    check(text.text[text.bytes] == '\0');
    check(text.state == ROOT_OK || text.bytes == 0);
}

static void ask_path(struct root *root, const char *path)
{
    struct root_names names = root_list(root, "%s", path);
    struct root_text line = root_line(root, "%s", path);
    struct root_stat stat = root_stat(root, "%s", path);
    struct elf_facts elf = root_elf(root, "%s", path);
    int64_t value;
    uint64_t now;

    check_text(root_read(root, "%s", path));
    check_text(root_resolve(root, "%s", path));
    check_text(root_lines(root, "Xid", "%s", path));
    check_text(line);
    check(strlen(line.text) == line.bytes && !strchr(line.text, '\n'));
    check(names.why && (names.state == ROOT_OK || names.n == 0));
    for (size_t i = 0; i < names.n; i++)
        check(names.names[i][0] && !strchr(names.names[i], '/'));
    check(stat.why && elf.why && elf.soname && elf.runpath && elf.rpath);
    for (size_t i = 0; i < elf.n_needed; i++)
        check(elf.needed[i] != NULL);
    root_number(root, &value, "%s", path);
    root_number_now(root, &now, "%s", path);
}

static json_t *read_length(const char *text, size_t bytes)
{
    check(text[bytes] == '\0');
    return json_integer((json_int_t)bytes);
}

/* A fact that is there, and one that a text is read for if there is any. */
static void ask_fact(struct root *root, const char *key)
{
    const char *tab = strchr(key, '\t');
    char path[PATH_MAX];
    struct root_answer fact;

    check(tab && tab - key < PATH_MAX);
    snprintf(path, sizeof(path), "%.*s", (int)(tab - key), key);
    fact = root_fact(root, tab + 1, read_length, "%s", path);
    check(fact.why && (fact.state == ROOT_OK) == (fact.value != NULL));
    check(root_fact_text(fact) && (!root_fact_is(fact) || fact.value));
    fact = root_fact(root, "length", read_length, "%s", path);
    check((fact.state == ROOT_OK) == (fact.value != NULL));
}

static void ask_everything(struct root *root)
{
    struct root_environment environment = root_environment(root);
    const char *key;
    json_t *entry;

    for (size_t i = 0; i < environment.n; i++)
        check(root_env(root, environment.variables[i].name) == environment.variables[i].value);
    ask_path(root, "/");
    for (int kind = 0; kind < KEEP_KINDS; kind++) {
        json_object_foreach(root->kept[kind], key, entry)
        {
            if (kind == KEEP_ANSWERS)
                check((root_ask(root, key, NULL, NULL, 0).state == ROOT_OK) ==
                      (root_ask(root, key, NULL, NULL, 0).value != NULL));
            else if (kind == KEEP_FACTS)
                ask_fact(root, key);
            else if (kind != KEEP_LINES)
                ask_path(root, key);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct root *root, *saved;
    char *text, *again;
    size_t bytes, bytes_again;

    if (root_from_json("input", (const char *)data, size, &root) != EP_OK) {
        check(strncmp(ep_last_error(), "input: ", 7) == 0);
        return 0;
    }
    ask_everything(root);
    check(snapshot_text(root, &text, &bytes) == EP_OK);
    check(root_from_json("saved", text, bytes, &saved) == EP_OK);
    ask_everything(saved);
    check(snapshot_text(saved, &again, &bytes_again) == EP_OK);
    free(again);
    free(text);
    root_free(saved);
    root_free(root);
    return 0;
}
