/* SPDX-License-Identifier: Apache-2.0 */
/* environment.c - the environment of the inspected process. */
#include "state.h"

#include <stdlib.h>
#include <string.h>

static int compare_variables(const void *left, const void *right)
{
    return strcmp(((const struct source_variable *)left)->name, ((const struct source_variable *)right)->name);
}

/* {"NAME": "value"}; of duplicates the first, as getenv(). The text is NUL-terminated. */
static json_t *read_variables(struct source_text file)
{
    json_t *variables = json_object();

    for (const char *at = file.text, *end = file.text + file.bytes; variables && at < end; at += strlen(at) + 1) {
        const char *equals = strchr(at, '=');
        char *name = equals && equals > at ? strndup(at, (size_t)(equals - at)) : NULL;

        if (name && !json_object_get(variables, name))
            json_object_set_new_nocheck(variables, name, json_stringn_nocheck(equals + 1, strlen(equals + 1)));
        free(name);
    }
    return variables;
}

static void environment_fill(struct source *source, const json_t *values)
{
    struct source_environment *all = &source->environment;
    struct source_variable *variables = source_alloc(source, (json_object_size(values) + 1) * sizeof(*variables));
    const char *name;
    json_t *value;

    if (!variables) {
        all->state = cache_state(source->full, &all->why);
        return;
    }
    json_object_foreach ((json_t *)values, name, value) {
        if (json_is_string(value))
            variables[all->n++] = (struct source_variable){.name = name, .value = json_string_value(value)};
    }
    qsort(variables, all->n, sizeof(*variables), compare_variables);
    all->variables = variables;
}

struct source_environment source_environment(struct source *source)
{
    struct source_answer fact;

    if (!source->environment_known) {
        fact = source_fact(source, CACHE_ENVIRONMENT_FACT, read_variables, CACHE_ENVIRONMENT);
        source->environment = (struct source_environment){.state = fact.state, .why = fact.why};
        if (fact.state == SOURCE_OK)
            environment_fill(source, fact.value);
        source->environment_known = true;
    }
    return source->environment;
}

static int compare_name(const void *name, const void *variable)
{
    return strcmp(name, ((const struct source_variable *)variable)->name);
}

const char *source_env(struct source *source, const char *name)
{
    struct source_environment all = source_environment(source);
    const struct source_variable *found =
        all.n ? bsearch(name, all.variables, all.n, sizeof(*all.variables), compare_name) : NULL;

    return found ? found->value : NULL;
}
