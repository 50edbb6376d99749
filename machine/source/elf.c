/* SPDX-License-Identifier: Apache-2.0 */
/* elf.c - the headers and symbols of ELF files, read once, cached and presented as plain arrays. */
#include "elf.h"
#include "common/json.h"
#include "common/memory.h"
#include "state.h"

#include <stdlib.h>
#include <unistd.h>

#define WHY_BYTES 256
#define MISSING_MAX 8 /* symbols of a library that are named */

static json_t *elf_entry(struct source *source, const char *path)
{
    char why[WHY_BYTES] = "";
    json_t *failure = NULL, *facts;
    int64_t bytes;
    int fd = live_open_file(source, path, &bytes, &failure);

    if (fd < 0)
        return failure;
    facts = elf_describe(fd, why, sizeof(why));
    close(fd);
    live_done(source);
    return facts ? facts : cache_failure(SOURCE_FAILED, why);
}

/* A list of strings; other values become "". A snapshot may have been edited. */
static const char *const *get_strings(struct source *source, const json_t *list, size_t most, size_t *ret_n)
{
    size_t n = json_array_size(list) < most ? json_array_size(list) : most;
    const char **strings = source_alloc(source, n * sizeof(*strings));

    for (size_t i = 0; i < n; i++)
        strings[i] = json_text_at(list, i);
    *ret_n = n;
    return strings;
}

/* Needed versions are pairs [file, name], definitions names. */
static const struct elf_version *get_versions(struct source *source, const json_t *list, size_t *ret_n)
{
    size_t n = json_array_size(list) < ELF_MAX_VERSIONS ? json_array_size(list) : ELF_MAX_VERSIONS;
    struct elf_version *versions = source_alloc(source, n * sizeof(*versions));

    for (size_t i = 0; i < n; i++) {
        const json_t *item = json_array_get(list, i);
        const char *file = json_string_value(json_array_get(item, 0));
        const char *name = json_string_value(json_is_array(item) ? json_array_get(item, 1) : item);

        versions[i] = (struct elf_version){.file = file ? file : "", .name = name ? name : ""};
    }
    *ret_n = n;
    return versions;
}

static const int *get_archs(struct source *source, const json_t *list, size_t *ret_n)
{
    size_t n = json_array_size(list) < ELF_MAX_ARCHS ? json_array_size(list) : ELF_MAX_ARCHS;
    int *archs = source_alloc(source, n * sizeof(*archs));

    for (size_t i = 0; i < n; i++)
        archs[i] = (int)json_integer_value(json_array_get(list, i));
    *ret_n = n;
    return archs;
}

static void elf_fill(struct source *source, const json_t *entry, struct elf_facts *facts)
{
    facts->soname = json_text(entry, "soname");
    facts->rpath = json_text(entry, "rpath");
    facts->runpath = json_text(entry, "runpath");
    facts->needed = get_strings(source, json_object_get(entry, "needed"), ELF_MAX_NEEDED, &facts->n_needed);
    facts->needs = get_versions(source, json_object_get(entry, "needs"), &facts->n_needs);
    facts->definitions = get_versions(source, json_object_get(entry, "definitions"), &facts->n_definitions);
    facts->archs = get_archs(source, json_object_get(entry, "archs"), &facts->n_archs);
    facts->archs_known = !json_is_false(json_object_get(entry, "archs_known"));
    facts->machine = (int)json_integer_value(json_object_get(entry, "machine"));
}

struct elf_facts path_elf(struct source *source)
{
    const json_t *entry = cache_query(source, CACHE_ELF, elf_entry);
    struct elf_facts facts = {.soname = "", .rpath = "", .runpath = ""}, *memo;

    memo = cache_memo(source, CACHE_ELF, source->path);
    if (memo)
        return *memo;
    facts.state = cache_state(entry, &facts.why);
    if (facts.state != SOURCE_OK)
        return facts;
    elf_fill(source, entry, &facts);
    memo = source_alloc(source, sizeof(*memo));
    *memo = facts;
    cache_set_memo(source, CACHE_ELF, source->path, memo);
    return facts;
}

/* --- symbols --- */

static json_t *missing_entry(struct source *source, const char *path, const char *const *providers, size_t n)
{
    json_t *failure = NULL, *names;
    int64_t bytes;
    int fd = live_open_file(source, path, &bytes, &failure);

    if (fd < 0)
        return failure;
    names = elf_undefined(fd);
    close(fd);
    for (size_t i = 0; i < n && json_array_size(names) > 0; i++) {
        fd = live_open_file(source, providers[i], &bytes, &failure);
        if (fd < 0) {
            json_decref(failure);
            continue;
        }
        elf_remove_defined(fd, names);
        close(fd);
    }
    live_done(source);
    while (json_array_size(names) > MISSING_MAX)
        json_array_remove(names, json_array_size(names) - 1);
    return json_pack("{s:o}", "value", names);
}

struct source_names source_missing_symbols(struct source *source, const char *path, const char *const *providers,
                                           size_t n)
{
    char *key = memory_printf("%s\tmissing-symbols", path);
    struct source_names missing = {.n = 0};
    const json_t *entry;

    entry = cache_get(source, CACHE_FACTS, key);
    if (!entry)
        entry = cache_put(source, CACHE_FACTS, key, missing_entry(source, path, providers, n));
    free(key);
    missing.state = cache_state(entry, &missing.why);
    if (missing.state == SOURCE_OK)
        missing.names = get_strings(source, json_object_get(entry, "value"), MISSING_MAX, &missing.n);
    return missing;
}
