/* SPDX-License-Identifier: Apache-2.0 */
/* facts.c - facts extracted from files. The facts are cached; the texts, which may identify the machine, are not. */
#include "state.h"

#include <stdio.h>
#include <stdlib.h>

/* The fact that `read` extracts from a text; an entry that is not SOURCE_OK stays. Consumes `file`. */
static json_t *make_fact(json_t *file, source_reader *read)
{
    json_t *value, *entry;

    if (!json_is_string(file))
        return file;
    value = read((struct source_text){SOURCE_OK, json_string_value(file), json_string_length(file), ""});
    entry = value ? json_pack("{s:o}", "value", value) : NULL;
    json_decref(file);
    return entry;
}

struct source_answer source_log_fact(struct source *source, const char *name, source_reader *read, const char *needle,
                                     const char *path, ...)
{
    struct source_answer answer = {.state = SOURCE_FAILED};
    char full[PATH_MAX], *key, *text_key = NULL;
    const json_t *entry;
    json_t *text;
    va_list args;

    va_start(args, path);
    answer.why = cache_path(full, path, args);
    va_end(args);
    if (answer.why)
        return answer;
    answer.why = "no memory";
    if (asprintf(&key, "%s\t%s", full, name) < 0)
        return answer;
    if (asprintf(&text_key, "%s%s%s", full, needle ? "\t" : "", needle ? needle : "") < 0) {
        free(key);
        return answer;
    }
    /* An overlay has texts, as has a snapshot that was saved before facts existed. */
    text = json_object_get(source->cached[CACHE_FACTS], key)
               ? NULL
               : json_object_get(source->cached[needle ? CACHE_LINES : CACHE_FILES], text_key);
    entry = text ? NULL : cache_get(source, CACHE_FACTS, key);
    if (!entry) {
        text = text ? json_incref(text) : needle ? cache_log(source, full, needle) : cache_file(source, full);
        entry = cache_put(source, CACHE_FACTS, key, make_fact(text, read));
    }
    free(text_key);
    free(key);
    answer.state = cache_state(entry, &answer.why);
    answer.value = answer.state == SOURCE_OK ? json_object_get(entry, "value") : NULL;
    return answer;
}

bool source_fact_bool(struct source_answer fact)
{
    return json_is_true(fact.value);
}

const char *source_fact_text(struct source_answer fact)
{
    const char *text = json_string_value(fact.value);

    return text ? text : "";
}
