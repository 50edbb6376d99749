/* SPDX-License-Identifier: Apache-2.0 */
/* facts.c - what is read from a file whose text is nobody's business: the facts are kept, and the text is not. */
#include "source/state.h"

#include <stdio.h>
#include <stdlib.h>

/* The entry of what `read` finds in a text; a text that is not ROOT_OK is the entry itself. Takes `file`. */
static json_t *make_fact(json_t *file, root_reader *read)
{
    json_t *value, *entry;

    if (!json_is_string(file))
        return file;
    value = read(json_string_value(file), json_string_length(file));
    entry = value ? json_pack("{s:o}", "value", value) : NULL;
    json_decref(file);
    return entry;
}

/* `needle` NULL: of the whole file. */
static struct root_answer make_answer(struct root *root, const char *name, root_reader *read, const char *needle,
                                      const char *full)
{
    enum keep_kind source = needle ? KEEP_LINES : KEEP_FILES;
    struct root_answer answer = {.state = ROOT_FAILED, .why = "no memory"};
    char *key, *source_key;
    const json_t *entry;
    json_t *text;

    if (asprintf(&source_key, "%s%s%s", full, needle ? "\t" : "", needle ? needle : "") < 0)
        return answer;
    if (asprintf(&key, "%s\t%s", full, name) < 0) {
        free(source_key);
        return answer;
    }
    entry = json_object_get(root->kept[KEEP_FACTS], key);
    /* An overlay has texts, and so has a snapshot that was saved before there were facts. */
    text = entry ? NULL : json_object_get(root->kept[source], source_key);
    if (!entry && !text)
        entry = keep_look_up(root, KEEP_FACTS, key);
    if (!entry && text)
        text = json_incref(text);
    else if (!entry)
        text = needle ? keep_log(root, full, needle) : keep_file(root, full);
    if (!entry)
        entry = keep_put(root, KEEP_FACTS, key, make_fact(text, read));
    free(source_key);
    free(key);
    answer.state = keep_state(entry, &answer.why);
    answer.value = answer.state == ROOT_OK ? json_object_get(entry, "value") : NULL;
    return answer;
}

static struct root_answer answer_at(struct root *root, const char *name, root_reader *read, const char *needle,
                                    const char *path, va_list args)
{
    char full[PATH_MAX];
    const char *why = keep_path(full, path, args);

    return why ? (struct root_answer){.state = ROOT_FAILED, .why = why} : make_answer(root, name, read, needle, full);
}

struct root_answer root_fact(struct root *root, const char *name, root_reader *read, const char *path, ...)
{
    struct root_answer answer;
    va_list args;

    va_start(args, path);
    answer = answer_at(root, name, read, NULL, path, args);
    va_end(args);
    return answer;
}

struct root_answer root_log_fact(struct root *root, const char *name, root_reader *read, const char *needle,
                                 const char *path, ...)
{
    struct root_answer answer;
    va_list args;

    va_start(args, path);
    answer = answer_at(root, name, read, needle, path, args);
    va_end(args);
    return answer;
}

bool root_fact_is(struct root_answer fact)
{
    return json_is_true(fact.value);
}

const char *root_fact_text(struct root_answer fact)
{
    const char *text = json_string_value(fact.value);

    return text ? text : "";
}
