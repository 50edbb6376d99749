/* SPDX-License-Identifier: Apache-2.0 */
/* libs_load.c - everything that loading one file brings along, and the versions of symbols that then are missing. */
#include "base/error.h"
#include "software/libs.h"
#include "software/libs_search.h"

#include <stdlib.h>
#include <string.h>

#define MAX_WORK 20000000 /* comparisons of names: a real closure takes some ten thousand, a made up one no second */

struct load {
    struct root *root;
    const struct libs_setting *setting;
    struct libs_closure *closure;
    const char *sonames[LIBS_MAX];
    int work;
    int machine;             /* of the file that is loaded: libraries for another are passed over */
    struct libs_list front;  /* LD_LIBRARY_PATH */
    struct libs_list back;   /* /etc/ld.so.conf and default folders */
    struct libs_list search; /* room for that of one library */
};

/* Adds a library; its index, -1 when there is no more room. */
static int add_lib(struct load *load, struct lib_place place, const char *name, int needed_by)
{
    struct libs_closure *closure = load->closure;

    if (closure->n == LIBS_MAX) {
        closure->cut = true;
        return -1;
    }
    closure->libs[closure->n] = (struct lib){.place = place, .name = name, .needed_by = needed_by};
    load->sonames[closure->n] = place.state == ROOT_OK ? root_elf(load->root, "%s", place.path).soname : "";
    return closure->n++;
}

static bool is_same(struct load *load, const char *a, const char *b)
{
    load->work++;
    return strcmp(a, b) == 0;
}

/* Is it loaded under this name? ld.so compares the name that was asked for and the one that the library has itself. */
static int find_by_name(struct load *load, const char *name)
{
    const struct libs_closure *closure = load->closure;

    for (int i = 0; i < closure->n; i++)
        if (is_same(load, closure->libs[i].name, name) || is_same(load, load->sonames[i], name))
            return i;
    return -1;
}

/* One file under two names is loaded once. */
static bool is_loaded(const struct load *load, const char *real)
{
    for (int i = 0; i < load->closure->n; i++)
        if (load->closure->libs[i].place.state == ROOT_OK && strcmp(load->closure->libs[i].place.real, real) == 0)
            return true;
    return false;
}

static bool is_enough(struct load *load)
{
    if (load->work > MAX_WORK)
        load->closure->cut = true;
    return load->closure->cut;
}

/* --- search --- */

static bool try_paths(struct load *load, const char *paths, const char *kind, const struct lib *owner, const char *name,
                      struct lib_place *place)
{
    load->search.n = 0;
    libs_list_split(load->root, &load->search, paths, ":", libs_folder_of(load->root, owner->place.path),
                    root_printf(load->root, "%s of %s", kind, owner->place.path));
    return libs_try_list(load->root, &load->search, name, load->machine, place);
}

/* The RPATH of the library and of those that brought it along; a RUNPATH puts the RPATH of the same file out of use. */
static bool try_rpaths(struct load *load, int user, const char *name, struct lib_place *place)
{
    /* needed_by is smaller than the index: the walk ends. */
    for (int i = user; i >= 0; i = load->closure->libs[i].needed_by) {
        const struct lib *lib = &load->closure->libs[i];
        struct elf_facts facts = root_elf(load->root, "%s", lib->place.path);

        if (*facts.rpath && !*facts.runpath && try_paths(load, facts.rpath, "RPATH", lib, name, place))
            return true;
    }
    return false;
}

static struct lib_place find_needed(struct load *load, int user, const char *name)
{
    const struct lib *lib = &load->closure->libs[user];
    const char *runpath = root_elf(load->root, "%s", lib->place.path).runpath;
    struct lib_place place = libs_nowhere();
    const char *path;

    if (strchr(name, '/')) {
        path = libs_expand(load->root, name, strlen(name), libs_folder_of(load->root, lib->place.path));
        if (path && *path == '/')
            libs_try(load->root, path, load->machine, "its path", &place);
        return place;
    }
    if ((*runpath || !try_rpaths(load, user, name, &place)) &&
        !libs_try_list(load->root, &load->front, name, load->machine, &place) &&
        !(*runpath && try_paths(load, runpath, "RUNPATH", lib, name, &place)))
        libs_try_list(load->root, &load->back, name, load->machine, &place);
    return place;
}

/* --- loading --- */

static void load_preloads(struct load *load)
{
    const char *at = load->setting->preload, *name;

    while (libs_next_preload(load->root, &at, &name)) {
        struct lib_place place = libs_nowhere();

        if (strchr(name, '/'))
            libs_try(load->root, name, load->machine, "LD_PRELOAD", &place);
        else if (*name && !libs_try_list(load->root, &load->front, name, load->machine, &place))
            libs_try_list(load->root, &load->back, name, load->machine, &place);
        /* ld.so warns of one that it cannot load and goes on. */
        if (place.state != ROOT_OK || is_loaded(load, place.real))
            continue;
        place.found_by = "LD_PRELOAD";
        add_lib(load, place, name, -1);
    }
}

static void load_needed(struct load *load, int user)
{
    struct elf_facts facts = root_elf(load->root, "%s", load->closure->libs[user].place.path);

    for (size_t i = 0; i < facts.n_needed && !is_enough(load); i++) {
        const char *name = facts.needed[i];
        struct lib_place place;
        int index;

        if (find_by_name(load, name) >= 0)
            continue;
        place = find_needed(load, user, name);
        if (place.state == ROOT_OK && is_loaded(load, place.real))
            continue;
        index = add_lib(load, place, name, user);
        if (index >= 0 && place.state != ROOT_OK && load->closure->first_missing < 0)
            load->closure->first_missing = index;
    }
}

/* --- versions --- */

static bool defines(struct load *load, const struct elf_facts *facts, const char *version)
{
    for (size_t i = 0; i < facts->n_definitions; i++)
        if (is_same(load, facts->definitions[i].name, version))
            return true;
    return false;
}

static void find_gaps(struct load *load, int user)
{
    struct libs_closure *closure = load->closure;
    struct elf_facts facts = root_elf(load->root, "%s", closure->libs[user].place.path);

    for (size_t i = 0; i < facts.n_needs && closure->n_gaps < LIBS_MAX_GAPS && !is_enough(load); i++) {
        int provider = find_by_name(load, facts.needs[i].file);
        struct elf_facts provided;

        if (provider < 0 || closure->libs[provider].place.state != ROOT_OK)
            continue;
        provided = root_elf(load->root, "%s", closure->libs[provider].place.path);
        /* ld.so takes a library without any versions for every version. */
        if (provided.n_definitions == 0 || defines(load, &provided, facts.needs[i].name))
            continue;
        closure->gaps[closure->n_gaps++] =
            (struct lib_version_gap){.user = user, .provider = provider, .version = facts.needs[i].name};
    }
}

ep_status libs_load(struct root *root, const struct libs_setting *setting, const char *path,
                    struct libs_closure **ret_closure)
{
    struct load *load = calloc(1, sizeof(*load));
    struct libs_closure *closure = calloc(1, sizeof(*closure));
    struct lib_place start = libs_nowhere();

    if (!load || !closure) {
        free(load);
        free(closure);
        return ep_fail(EP_E_MEMORY, "the search for libraries");
    }
    closure->first_missing = -1;
    *load = (struct load){.root = root, .setting = setting, .closure = closure};
    libs_list_split(root, &load->front, setting->library_path, ":;", NULL, "LD_LIBRARY_PATH");
    libs_list_system(root, &load->back);
    load->machine = root_elf(root, "%s", path).machine;
    libs_try(root, path, 0, "its path", &start);
    if (start.state != ROOT_OK) {
        start.path = root_printf(root, "%s", path);
        closure->first_missing = 0;
    }
    add_lib(load, start, root_printf(root, "%s", path), -1);
    load_preloads(load);
    for (int i = 0; i < closure->n; i++)
        if (closure->libs[i].place.state == ROOT_OK)
            load_needed(load, i);
    for (int i = 0; i < closure->n; i++)
        if (closure->libs[i].place.state == ROOT_OK)
            find_gaps(load, i);
    free(load);
    *ret_closure = closure;
    return EP_OK;
}

void libs_closure_free(struct libs_closure *closure)
{
    free(closure);
}

int libs_closure_find(const struct libs_closure *closure, const char *soname)
{
    size_t n = strlen(soname);

    for (int i = 0; i < closure->n; i++) {
        const char *path = closure->libs[i].place.path, *slash = strrchr(path, '/');
        const char *name = slash ? slash + 1 : closure->libs[i].name;

        if (strncmp(name, soname, n) == 0 && (name[n] == '\0' || name[n] == '.'))
            return i;
    }
    return -1;
}
