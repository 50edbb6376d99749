/* SPDX-License-Identifier: Apache-2.0 */
/* libs_load.c - all libraries that loading one file loads, and the symbol versions that are then missing. */
#include "common/memory.h"
#include "libs.h"

#include <stdlib.h>
#include <string.h>

struct load {
    struct source *source;
    const struct libs_env *env;
    struct libs_closure *closure;
    const char *sonames[LIBS_MAX];
    int machine;             /* of the file that is loaded; libraries for other machines are skipped */
    struct libs_list front;  /* LD_LIBRARY_PATH */
    struct libs_list back;   /* /etc/ld.so.conf and default folders */
    struct libs_list search; /* scratch: the search path of one library */
};

/* Adds a library. Returns its index, -1 if there is no more room. */
static int add_lib(struct load *load, struct lib_location location, const char *name, int needed_by)
{
    struct libs_closure *closure = load->closure;

    if (closure->n == LIBS_MAX) {
        closure->cut = true;
        return -1;
    }
    closure->libs[closure->n] = (struct lib){.location = location, .name = name, .needed_by = needed_by};
    load->sonames[closure->n] = location.state == SOURCE_OK ? source_elf(load->source, "%s", location.path).soname : "";
    return closure->n++;
}

/* Finds a loaded library by name. ld.so compares the requested name and the soname. */
static int find_by_name(struct load *load, const char *name)
{
    const struct libs_closure *closure = load->closure;

    for (int i = 0; i < closure->n; i++)
        if (strcmp(closure->libs[i].name, name) == 0 || strcmp(load->sonames[i], name) == 0)
            return i;
    return -1;
}

/* A file with two names is loaded once. */
static bool is_loaded(const struct load *load, const char *real)
{
    for (int i = 0; i < load->closure->n; i++)
        if (load->closure->libs[i].location.state == SOURCE_OK &&
            strcmp(load->closure->libs[i].location.real, real) == 0)
            return true;
    return false;
}

/* --- search --- */

static bool try_paths(struct load *load, const char *paths, const char *kind, const struct lib *owner, const char *name,
                      struct lib_location *location)
{
    load->search.n = 0;
    libs_list_split(load->source, &load->search, paths, ":", libs_folder_of(load->source, owner->location.path),
                    source_printf(load->source, "%s of %s", kind, owner->location.path));
    return libs_try_list(load->source, &load->search, name, load->machine, location);
}

/* Searches the RPATH of the library and of those that loaded it. The RPATH of a file with a RUNPATH is ignored. */
static bool try_rpaths(struct load *load, int user, const char *name, struct lib_location *location)
{
    /* needed_by is smaller than the index, so the loop ends. */
    for (int i = user; i >= 0; i = load->closure->libs[i].needed_by) {
        const struct lib *lib = &load->closure->libs[i];
        struct elf_facts facts = source_elf(load->source, "%s", lib->location.path);

        if (*facts.rpath && !*facts.runpath && try_paths(load, facts.rpath, "RPATH", lib, name, location))
            return true;
    }
    return false;
}

static struct lib_location find_needed(struct load *load, int user, const char *name)
{
    const struct lib *lib = &load->closure->libs[user];
    const char *runpath = source_elf(load->source, "%s", lib->location.path).runpath;
    struct lib_location location = libs_not_found();
    const char *path;

    if (strchr(name, '/')) {
        path = libs_expand(load->source, name, strlen(name), libs_folder_of(load->source, lib->location.path));
        if (path && *path == '/')
            libs_try(load->source, path, load->machine, "its path", &location);
        return location;
    }
    if ((*runpath || !try_rpaths(load, user, name, &location)) &&
        !libs_try_list(load->source, &load->front, name, load->machine, &location) &&
        !(*runpath && try_paths(load, runpath, "RUNPATH", lib, name, &location)))
        libs_try_list(load->source, &load->back, name, load->machine, &location);
    return location;
}

/* --- loading --- */

static void load_preloads(struct load *load)
{
    const char *at = load->env->preload, *name;

    while (libs_next_preload(load->source, &at, &name)) {
        struct lib_location location = libs_not_found();

        if (strchr(name, '/'))
            libs_try(load->source, name, load->machine, "LD_PRELOAD", &location);
        else if (*name && !libs_try_list(load->source, &load->front, name, load->machine, &location))
            libs_try_list(load->source, &load->back, name, load->machine, &location);
        /* ld.so prints a warning for one that it cannot load, and continues. */
        if (location.state != SOURCE_OK || is_loaded(load, location.real))
            continue;
        location.found_by = "LD_PRELOAD";
        add_lib(load, location, name, -1);
    }
}

static void load_needed(struct load *load, int user)
{
    struct elf_facts facts = source_elf(load->source, "%s", load->closure->libs[user].location.path);

    for (size_t i = 0; i < facts.n_needed && !load->closure->cut; i++) {
        const char *name = facts.needed[i];
        struct lib_location location;
        int index;

        if (find_by_name(load, name) >= 0)
            continue;
        location = find_needed(load, user, name);
        if (location.state == SOURCE_OK && is_loaded(load, location.real))
            continue;
        index = add_lib(load, location, name, user);
        if (index >= 0 && location.state != SOURCE_OK && load->closure->first_missing < 0)
            load->closure->first_missing = index;
    }
}

/* --- versions --- */

static bool defines_version(const struct elf_facts *facts, const char *version)
{
    for (size_t i = 0; i < facts->n_definitions; i++)
        if (strcmp(facts->definitions[i].name, version) == 0)
            return true;
    return false;
}

static void find_gaps(struct load *load, int user)
{
    struct libs_closure *closure = load->closure;
    struct elf_facts facts = source_elf(load->source, "%s", closure->libs[user].location.path);

    for (size_t i = 0; i < facts.n_needs && closure->n_gaps < LIBS_MAX_GAPS; i++) {
        int provider = find_by_name(load, facts.needs[i].file);
        struct elf_facts provided;

        if (provider < 0 || closure->libs[provider].location.state != SOURCE_OK)
            continue;
        provided = source_elf(load->source, "%s", closure->libs[provider].location.path);
        /* ld.so accepts a library without version definitions for every version. */
        if (provided.n_definitions == 0 || defines_version(&provided, facts.needs[i].name))
            continue;
        closure->gaps[closure->n_gaps++] =
            (struct lib_version_gap){.user = user, .provider = provider, .version = facts.needs[i].name};
    }
}

struct libs_closure *libs_load(struct source *source, const struct libs_env *env, const char *path)
{
    struct load *load = memory_new(1, sizeof(*load));
    struct libs_closure *closure = source_alloc(source, sizeof(*closure));
    struct lib_location start = libs_not_found();

    closure->first_missing = -1;
    *load = (struct load){.source = source, .env = env, .closure = closure};
    libs_list_split(source, &load->front, env->library_path, ":;", NULL, "LD_LIBRARY_PATH");
    libs_list_system(source, &load->back);
    load->machine = source_elf(source, "%s", path).machine;
    libs_try(source, path, 0, "its path", &start);
    if (start.state != SOURCE_OK) {
        start.path = source_printf(source, "%s", path);
        closure->first_missing = 0;
    }
    add_lib(load, start, source_printf(source, "%s", path), -1);
    load_preloads(load);
    for (int i = 0; i < closure->n; i++)
        if (closure->libs[i].location.state == SOURCE_OK)
            load_needed(load, i);
    for (int i = 0; i < closure->n; i++)
        if (closure->libs[i].location.state == SOURCE_OK)
            find_gaps(load, i);
    free(load);
    return closure;
}

int libs_closure_find(const struct libs_closure *closure, const char *soname)
{
    size_t n = strlen(soname);

    for (int i = 0; i < closure->n; i++) {
        const char *path = closure->libs[i].location.path, *slash = strrchr(path, '/');
        const char *name = slash ? slash + 1 : closure->libs[i].name;

        if (strncmp(name, soname, n) == 0 && (name[n] == '\0' || name[n] == '.'))
            return i;
    }
    return -1;
}

struct lib_location libs_loaded_with(struct source *source, struct libs_env env, const char *path, const char *soname,
                                     struct lib_location other)
{
    const struct libs_closure *closure = *path ? libs_load(source, &env, path) : NULL;
    int index = closure ? libs_closure_find(closure, soname) : 0;

    return index > 0 && closure->libs[index].location.state == SOURCE_OK ? closure->libs[index].location : other;
}
