/* SPDX-License-Identifier: Apache-2.0 */
/* environment.c - the environment of the process that is looked at. */
#include "source/state.h"

#include <stdlib.h>
#include <string.h>

struct found {
    struct root_variable variable;
    size_t at; /* of several with one name the first counts */
};

static int compare_found(const void *left, const void *right)
{
    const struct found *a = left, *b = right;
    int order = strcmp(a->variable.name, b->variable.name);

    if (order)
        return order;
    return a->at < b->at ? -1 : 1;
}

/* Splits the text at its NULs and equals signs. Its end is marked: root_text.text has a NUL behind it. */
static size_t split(struct root *root, struct root_text text, struct found *ret_found)
{
    const char *end = text.text + text.bytes;
    size_t n = 0;

    for (const char *at = text.text; at < end; at += strlen(at) + 1) {
        const char *equals = strchr(at, '=');
        char *name;

        if (!equals || equals == at)
            continue;
        name = root_alloc(root, (size_t)(equals - at) + 1);
        if (!name)
            break;
        memcpy(name, at, (size_t)(equals - at));
        ret_found[n] = (struct found){.variable = {.name = name, .value = equals + 1}, .at = n};
        n++;
    }
    return n;
}

static void fill(struct root *root, struct root_text text)
{
    struct root_environment *all = &root->environment;
    struct root_variable *variables;
    struct found *found;
    size_t n = 1;

    for (size_t i = 0; i < text.bytes; i++)
        n += text.text[i] == '\0';
    found = calloc(n, sizeof(*found));
    variables = root_alloc(root, n * sizeof(*variables));
    if (!found || !variables) {
        free(found);
        all->state = keep_state(root->full, &all->why);
        return;
    }
    n = split(root, text, found);
    qsort(found, n, sizeof(*found), compare_found);
    for (size_t i = 0; i < n; i++)
        if (i == 0 || strcmp(found[i].variable.name, found[i - 1].variable.name) != 0)
            variables[all->n++] = found[i].variable;
    all->variables = variables;
    free(found);
}

struct root_environment root_environment(struct root *root)
{
    struct root_text text;

    if (!root->environment_known) {
        text = root_read(root, "/proc/self/environ");
        root->environment = (struct root_environment){.state = text.state, .why = text.why};
        if (text.state == ROOT_OK)
            fill(root, text);
        root->environment_known = true;
    }
    return root->environment;
}

static int compare_name(const void *name, const void *variable)
{
    return strcmp(name, ((const struct root_variable *)variable)->name);
}

const char *root_env(struct root *root, const char *name)
{
    struct root_environment all = root_environment(root);
    const struct root_variable *found =
        all.n ? bsearch(name, all.variables, all.n, sizeof(*all.variables), compare_name) : NULL;

    return found ? found->value : NULL;
}
