/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libs.c - where ld.so finds a library, by the rules of ld.so(8), "When resolving shared object dependencies". Not
 * implemented: $LIB and $PLATFORM, folders relative to the current one, and the subfolders for processor levels
 * (glibc-hwcaps), in which none of the libraries in question is shipped.
 */
#include "libs.h"
#include "common/memory.h"
#include "common/text.h"

#include <elf.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/*
 * Debian and Ubuntu search the folders of their architecture and /lib, /usr/lib; Red Hat /lib64, /usr/lib64. The
 * machine may be of either family and architecture; only some of these folders exist on it.
 */
static const char *const *const default_folders =
    TEXTS("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
          "/lib", "/usr/lib", "/lib64", "/usr/lib64");

struct libs_env libs_env_of(struct source *source)
{
    const char *path = source_env(source, "LD_LIBRARY_PATH"), *preload = source_env(source, "LD_PRELOAD");

    return (struct libs_env){.library_path = path ? path : "", .preload = preload ? preload : ""};
}

/* The location of a library that was not found. */
static struct lib_location libs_not_found(void)
{
    return (struct lib_location){.state = SOURCE_ABSENT, .path = "", .real = "", .found_by = ""};
}

const char *libs_folder_of(struct source *source, const char *path)
{
    const char *slash = strrchr(path, '/');

    if (!slash)
        return "";
    return slash == path ? "/" : source_printf(source, "%.*s", (int)(slash - path), path);
}

/* --- expansion --- */

const char *libs_expand(struct source *source, const char *text, size_t n, const char *origin)
{
    static const char *const words[] = {"$ORIGIN", "${ORIGIN}"};
    const char *path = source_printf(source, "%.*s", n < PATH_MAX ? (int)n : 0, text);

    for (size_t i = 0; i < COUNT(words); i++)
        for (const char *at; (at = strstr(path, words[i]));) {
            if (!origin || strchr(origin, '$'))
                return NULL;
            path = source_printf(source, "%.*s%s%s", (int)(at - path), path, origin, at + strlen(words[i]));
        }
    for (n = strlen(path); n > 1 && path[n - 1] == '/';)
        n--;
    return n < PATH_MAX ? source_printf(source, "%.*s", (int)n, path) : NULL;
}

/* --- lists of folders --- */

#define MAX_FOLDERS 256 /* per search; further folders are ignored */

struct libs_folder {
    const char *path, *found_by;
};

/* Without duplicates, and without folders that are known not to exist. */
struct libs_list {
    size_t n;
    struct libs_folder folders[MAX_FOLDERS];
};

static void libs_list_add(struct source *source, struct libs_list *list, const char *path, const char *found_by)
{
    struct source_stat stat;

    if (!path || *path != '/' || list->n == MAX_FOLDERS)
        return;
    for (size_t i = 0; i < list->n; i++)
        if (strcmp(list->folders[i].path, path) == 0)
            return;
    stat = source_stat(source, "%s", path);
    if (stat.state == SOURCE_ABSENT || (stat.state == SOURCE_OK && stat.kind != SOURCE_FOLDER))
        return;
    list->folders[list->n++] = (struct libs_folder){.path = path, .found_by = found_by};
}

/* --- /etc/ld.so.conf and the files that it includes, as ldconfig(8) reads them --- */

/* One folder per line, "include PATTERN...", comments after '#'. */

#define BLANK " \t\r\f\v"
#define MAX_FILES 256 /* include lines may form a loop */

struct conf {
    struct source *source;
    struct libs_list *list;
    int n_files;
};

static void read_file(struct conf *conf, const char *path);

/* A copy of the next word of a line; NULL at its end. */
static const char *next_word(struct source *source, const char **at)
{
    const char *word = *at + strspn(*at, BLANK);
    size_t n = strcspn(word, BLANK "#\n");

    *at = word + n;
    return n ? source_printf(source, "%.*s", (int)n, word) : NULL;
}

/* Files that match a pattern with wildcards in its last component, which is the only form in use. */
static void read_matching(struct conf *conf, const char *pattern)
{
    const char *slash = strrchr(pattern, '/');
    const char *folder = libs_folder_of(conf->source, pattern);

    if (!strpbrk(pattern, "*?[")) {
        read_file(conf, pattern);
        return;
    }
    FOR_NAMES (name, source_list(conf->source, "%s", folder))
        if (fnmatch(slash + 1, name, FNM_PERIOD) == 0)
            read_file(conf, source_printf(conf->source, "%s/%s", folder, name));
}

static void read_line(struct conf *conf, const char *path, const char *line)
{
    const char *word = next_word(conf->source, &line);

    if (word && *word == '/')
        libs_list_add(conf->source, conf->list, libs_expand(conf->source, word, strlen(word), NULL), "/etc/ld.so.conf");
    if (!word || strcmp(word, "include") != 0)
        return;
    while ((word = next_word(conf->source, &line)))
        read_matching(
            conf, *word == '/' ? word : source_printf(conf->source, "%s/%s", libs_folder_of(conf->source, path), word));
}

static void read_file(struct conf *conf, const char *path)
{
    if (conf->n_files++ >= MAX_FILES)
        return;
    for (const char *at = source_read(conf->source, "%s", path).text; *at; at += strcspn(at, "\n"), at += *at != '\0')
        read_line(conf, path, at);
}

static void read_conf(struct source *source, struct libs_list *list)
{
    struct conf conf = {.source = source, .list = list};

    read_file(&conf, "/etc/ld.so.conf");
}

/*
 * Adds the folders of a list that is separated by any of `separators`, with $ORIGIN expanded;
 * `origin` is NULL if it is not known. Relative folders are left out: they depend on the current folder of the process.
 */
static void libs_list_split(struct source *source, struct libs_list *list, const char *text, const char *separators,
                            const char *origin, const char *found_by)
{
    FOR_PIECES (folder, text, separators)
        if (folder.n && list->n < MAX_FOLDERS)
            libs_list_add(source, list, libs_expand(source, folder.text, folder.n, origin), found_by);
}

static void libs_list_system(struct source *source, struct libs_list *list)
{
    read_conf(source, list);
    for (size_t i = 0; default_folders[i]; i++)
        libs_list_add(source, list, default_folders[i], "default folder");
}

/* --- searching --- */

/*
 * Is there a library at `path` for `machine` (0: any)? If false, ld.so continues its search. *location is set in both
 * cases: if a snapshot does not contain the file, SOURCE_ABSENT becomes SOURCE_NOT_RECORDED.
 */
static bool libs_try(struct source *source, const char *path, int machine, const char *found_by,
                     struct lib_location *location)
{
    struct elf_facts facts = source_elf(source, "%s", path);
    struct source_text real;

    switch (facts.state) {
    case SOURCE_OK:
        if (machine && facts.machine && facts.machine != machine)
            return false;
        break;
    case SOURCE_ABSENT:
    case SOURCE_DENIED:
        return false;
    case SOURCE_NOT_RECORDED:
        location->state = SOURCE_NOT_RECORDED;
        return false;
    case SOURCE_FAILED:
        if (strncmp(facts.why, ELF_FOREIGN, strlen(ELF_FOREIGN)) == 0)
            return false;
        break;
    }
    real = source_resolve(source, "%s", path);
    *location =
        (struct lib_location){.state = facts.state, .path = source_printf(source, "%s", path), .found_by = found_by};
    location->real = real.state == SOURCE_OK ? real.text : location->path;
    return true;
}

/* Tries the folders of a list in turn. */
static bool libs_try_list(struct source *source, const struct libs_list *list, const char *name, int machine,
                          struct lib_location *location)
{
    FOR_EACH (folder, list->folders, list->n)
        if (strlen(folder->path) + strlen(name) + 2 < PATH_MAX &&
            libs_try(source, source_printf(source, "%s/%s", folder->path, name), machine, folder->found_by, location))
            return true;
    return false;
}

/* The next name in LD_PRELOAD, which is separated by spaces and colons. Returns false at the end. */
static bool libs_next_preload(struct source *source, const char **at, const char **ret_name)
{
    struct piece name;

    *at += strspn(*at, ": ");
    name = text_take(at, ": ");
    *ret_name = libs_expand(source, name.text, name.n, NULL) ?: "";
    return name.n > 0;
}

/* Does a preloaded library match `name`, by its file name or its soname? */
static bool find_preloaded(struct source *source, const struct libs_env *env, const struct libs_list *list,
                           const char *name, struct lib_location *location)
{
    const char *at = env->preload, *preload;

    while (libs_next_preload(source, &at, &preload)) {
        struct lib_location found = libs_not_found();
        bool there = strchr(preload, '/') ? libs_try(source, preload, 0, "LD_PRELOAD", &found)
                                          : *preload && libs_try_list(source, list, preload, 0, &found);

        if (!there || found.state != SOURCE_OK)
            continue;
        if (strcmp(text_base(preload), name) != 0 && strcmp(source_elf(source, "%s", found.path).soname, name) != 0)
            continue;
        *location = found;
        location->found_by = "LD_PRELOAD";
        return true;
    }
    return false;
}

static void list_folders(struct source *source, const struct libs_env *env, struct libs_list *list)
{
    list->n = 0;
    libs_list_split(source, list, env->library_path, ":;", NULL, "LD_LIBRARY_PATH");
    libs_list_system(source, list);
}

struct lib_location libs_find(struct source *source, const struct libs_env *env, const char *name)
{
    struct lib_location location = libs_not_found();
    struct libs_list list;

    if (strchr(name, '/')) {
        libs_try(source, name, 0, "its path", &location);
        return location;
    }
    list_folders(source, env, &list);
    if (!find_preloaded(source, env, &list, name, &location))
        libs_try_list(source, &list, name, 0, &location);
    return location;
}

const char *libs_file_version(const char *path)
{
    const char *so = strstr(text_base(path), ".so."), *version = so ? so + 4 : "";

    return strchr(version, '.') && !version[strspn(version, "0123456789.")] ? version : "";
}

/* --- mapped files --- */

#define MAX_MAPPED 4096

/* The libraries among the files at the ends of lines of /proc/<pid>/maps, of which each has several. */
static json_t *read_mapped(struct source_text file)
{
    json_t *paths = json_array();

    FOR_PIECES (line, file.text, "\n") {
        const char *path = memchr(line.text, '/', line.n), *last;
        size_t n = path ? line.n - (size_t)(path - line.text) : 0;
        static const char deleted[] = " (deleted)";

        if (n > strlen(deleted) && memcmp(path + n - strlen(deleted), deleted, strlen(deleted)) == 0)
            n -= strlen(deleted);
        last = json_string_value(json_array_get(paths, json_array_size(paths) - 1));
        if (n > 0 && n < PATH_MAX && memmem(path, n, ".so", 3) && json_array_size(paths) < MAX_MAPPED &&
            !(last && strlen(last) == n && memcmp(last, path, n) == 0))
            json_array_append_new(paths, json_stringn(path, n));
    }
    return paths;
}

struct source_names libs_mapped(struct source *source, const char *part)
{
    struct source_answer mapped = source_fact(source, "mapped", read_mapped, "/proc/self/maps");
    struct source_names names = {.state = mapped.state, .why = mapped.why};
    const char **paths = source_alloc(source, (json_array_size(mapped.value) + 1) * sizeof(*paths));

    FOR_JSON (item, mapped.value) {
        const char *path = json_string_value(item);

        if (path && strstr(text_base(path), part) && !ANY_OF(k, names.n, strcmp(paths[k], path) == 0))
            paths[names.n++] = path;
    }
    names.names = paths;
    return names;
}

/* --- all libraries that loading one file loads, and the symbol versions that are then missing --- */

struct load {
    struct source *source;
    const struct libs_env *env;
    struct libs_closure *closure;
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
    closure->libs[closure->n] = (struct lib){.location = location, .name = name, .needed_by = needed_by, .soname = ""};
    if (location.state == SOURCE_OK)
        closure->libs[closure->n].soname = source_elf(load->source, "%s", location.path).soname;
    return closure->n++;
}

/* Finds a loaded library by name. ld.so compares the requested name and the soname. */
static int find_by_name(struct load *load, const char *name)
{
    const struct libs_closure *closure = load->closure;

    return FIRST_OF(i, closure->n,
                    strcmp(closure->libs[i].name, name) == 0 || strcmp(closure->libs[i].soname, name) == 0);
}

/* A file with two names is loaded once. */
static bool is_loaded(const struct load *load, const char *real)
{
    return ANY_OF(i, load->closure->n,
                  load->closure->libs[i].location.state == SOURCE_OK &&
                      strcmp(load->closure->libs[i].location.real, real) == 0);
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
        if (provided.n_definitions == 0 ||
            ANY_OF(k, provided.n_definitions, strcmp(provided.definitions[k].name, facts.needs[i].name) == 0))
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
