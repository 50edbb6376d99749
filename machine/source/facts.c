/* SPDX-License-Identifier: Apache-2.0 */
/* facts.c - facts extracted from files. The facts are cached; the texts, which may identify the machine, are not. */
#include "common/memory.h"
#include "common/text.h"
#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The fact that `read` extracts from a text; an entry that is not SOURCE_OK stays. Consumes `file`. */
static json_t *make_fact(json_t *file, source_reader *read)
{
    json_t *value, *entry;

    if (!json_is_string(file))
        return file;
    value = read((struct source_text){SOURCE_OK, json_string_value(file), json_string_length(file), ""});
    entry = value ? json_pack("{s:o}", "value", value) : cache_failure(SOURCE_FAILED, "is not a text");
    json_decref(file);
    return entry;
}

struct source_answer path_fact(struct source *source, const char *name, source_reader *read, const char *needle)
{
    struct source_answer answer = {.state = SOURCE_FAILED, .why = source->path_why};
    const char *full = source->path;
    char *key, *text_key;
    const json_t *entry;
    json_t *text;

    if (answer.why)
        return answer;
    key = memory_printf("%s\t%s", full, name);
    text_key = memory_printf("%s%s%s", full, needle ? "\t" : "", needle ? needle : "");
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

/* --- the environment of the inspected process --- */

/* {"NAME": "value"}; of duplicates the first, as getenv(). The text is NUL-terminated. */
static json_t *read_variables(struct source_text file)
{
    json_t *variables = json_object();

    for (const char *at = file.text, *end = file.text + file.bytes; at < end; at += strlen(at) + 1) {
        const char *equals = strchr(at, '=');
        char *name = equals && equals > at ? strndup(at, (size_t)(equals - at)) : NULL;

        if (name && !json_object_get(variables, name))
            json_object_set_new_nocheck(variables, name, json_stringn_nocheck(equals + 1, strlen(equals + 1)));
        free(name);
    }
    return variables;
}

struct source_environment source_environment(struct source *source)
{
    struct source_environment *all = &source->environment;
    struct source_variable *variables;
    struct source_answer fact;

    if (source->environment_known)
        return *all;
    fact = source_fact(source, CACHE_ENVIRONMENT_FACT, read_variables, CACHE_ENVIRONMENT);
    *all = (struct source_environment){.state = fact.state, .why = fact.why};
    all->variables = variables = source_alloc(source, json_object_size(fact.value) * sizeof(*variables));
    FOR_MEMBERS (name, value, fact.value)
        if (json_is_string(value))
            variables[all->n++] = (struct source_variable){.name = name, .value = json_string_value(value)};
    qsort(variables, all->n, sizeof(*variables), text_order);
    source->variables = fact.value;
    source->environment_known = true;
    return *all;
}

const char *source_env(struct source *source, const char *name)
{
    source_environment(source);
    return json_string_value(json_object_get(source->variables, name));
}
