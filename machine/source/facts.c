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

struct root_answer root_fact(struct root *root, const char *name, root_reader *read, const char *path, ...)
{
    struct root_answer answer = {.state = ROOT_FAILED};
    char full[PATH_MAX], *key;
    const json_t *entry;
    json_t *file;
    va_list args;

    va_start(args, path);
    answer.why = keep_path(full, path, args);
    va_end(args);
    if (answer.why || asprintf(&key, "%s\t%s", full, name) < 0)
        return answer;
    entry = json_object_get(root->kept[KEEP_FACTS], key);
    /* An overlay has texts, and so has a snapshot that was saved before there were facts. */
    file = entry ? NULL : json_object_get(root->kept[KEEP_FILES], full);
    if (!entry && !file)
        entry = keep_look_up(root, KEEP_FACTS, key);
    if (!entry)
        entry = keep_put(root, KEEP_FACTS, key, make_fact(file ? json_incref(file) : keep_file(root, full), read));
    free(key);
    answer.state = keep_state(entry, &answer.why);
    answer.value = answer.state == ROOT_OK ? json_object_get(entry, "value") : NULL;
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
