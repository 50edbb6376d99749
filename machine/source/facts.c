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

/* `needle` NULL: the whole file. */
static struct source_answer make_answer(struct source *source, const char *name, source_reader *read,
                                        const char *needle, const char *full)
{
    enum cache_kind text_kind = needle ? CACHE_LINES : CACHE_FILES;
    struct source_answer answer = {.state = SOURCE_FAILED, .why = "no memory"};
    char *key, *text_key;
    const json_t *entry;
    json_t *text;

    if (asprintf(&text_key, "%s%s%s", full, needle ? "\t" : "", needle ? needle : "") < 0)
        return answer;
    if (asprintf(&key, "%s\t%s", full, name) < 0) {
        free(text_key);
        return answer;
    }
    entry = json_object_get(source->cached[CACHE_FACTS], key);
    /* An overlay has texts, as has a snapshot that was saved before facts existed. */
    text = entry ? NULL : json_object_get(source->cached[text_kind], text_key);
    if (!entry && !text)
        entry = cache_get(source, CACHE_FACTS, key);
    if (!entry && text)
        text = json_incref(text);
    else if (!entry)
        text = needle ? cache_log(source, full, needle) : cache_file(source, full);
    if (!entry)
        entry = cache_put(source, CACHE_FACTS, key, make_fact(text, read));
    free(text_key);
    free(key);
    answer.state = cache_state(entry, &answer.why);
    answer.value = answer.state == SOURCE_OK ? json_object_get(entry, "value") : NULL;
    return answer;
}

static struct source_answer answer_at(struct source *source, const char *name, source_reader *read, const char *needle,
                                      const char *path, va_list args)
{
    char full[PATH_MAX];
    const char *why = cache_path(full, path, args);

    return why ? (struct source_answer){.state = SOURCE_FAILED, .why = why}
               : make_answer(source, name, read, needle, full);
}

struct source_answer source_fact(struct source *source, const char *name, source_reader *read, const char *path, ...)
{
    struct source_answer answer;
    va_list args;

    va_start(args, path);
    answer = answer_at(source, name, read, NULL, path, args);
    va_end(args);
    return answer;
}

struct source_answer source_log_fact(struct source *source, const char *name, source_reader *read, const char *needle,
                                     const char *path, ...)
{
    struct source_answer answer;
    va_list args;

    va_start(args, path);
    answer = answer_at(source, name, read, needle, path, args);
    va_end(args);
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
