/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libs.c - where ld.so finds a library. The rules are those of ld.so(8), "When resolving shared object dependencies".
 * Left out: folders that depend on the current one, and the subfolders for processor levels (glibc-hwcaps), in which
 * none of the libraries in question is shipped.
 */
#include "software/libs.h"
#include "software/libs_search.h"
#include "source/text.h"

#include <elf.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/*
 * Debian and Ubuntu search the folders of their architecture and /lib, /usr/lib; Red Hat's /lib64, /usr/lib64. The
 * machine may be of either kind and of two processors, and only some of these folders exist on it.
 */
static const char *const default_folders[] = {
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib",
    "/usr/lib",
    "/lib64",
    "/usr/lib64",
};

struct libs_setting libs_setting_of(struct root *root)
{
    const char *path = root_env(root, "LD_LIBRARY_PATH"), *preload = root_env(root, "LD_PRELOAD");

    return (struct libs_setting){.library_path = path ? path : "", .preload = preload ? preload : ""};
}

struct lib_place libs_nowhere(void)
{
    return (struct lib_place){.state = ROOT_ABSENT, .path = "", .real = "", .found_by = ""};
}

const char *libs_folder_of(struct root *root, const char *path)
{
    const char *slash = strrchr(path, '/');

    if (!slash)
        return "";
    return slash == path ? "/" : root_printf(root, "%.*s", (int)(slash - path), path);
}

/* --- expansion --- */

/* What $LIB stands for: glibc has it compiled in, and distributions differ. */
static const char *lib_word(struct root *root)
{
    if (root_is_folder(root_stat(root, "/usr/lib/x86_64-linux-gnu")))
        return "lib/x86_64-linux-gnu";
    if (root_is_folder(root_stat(root, "/usr/lib/aarch64-linux-gnu")))
        return "lib/aarch64-linux-gnu";
    return "lib64";
}

static const char *platform_word(struct root *root)
{
    return root_is_folder(root_stat(root, "/usr/lib/aarch64-linux-gnu")) ? "aarch64" : "x86_64";
}

/* The word behind a '$' at `text`: what it stands for, NULL if nobody knows; *ret_n bytes are replaced, 0 for none. */
static const char *expand_word(struct root *root, const char *text, size_t left, const char *origin, size_t *ret_n)
{
    static const char *const words[] = {"ORIGIN", "LIB", "PLATFORM"};

    *ret_n = 0;
    for (size_t i = 0; i < COUNT(words); i++) {
        size_t n = strlen(words[i]);
        bool braced = left > n + 2 && text[1] == '{' && strncmp(text + 2, words[i], n) == 0 && text[2 + n] == '}';

        if (!braced && !(left > n && strncmp(text + 1, words[i], n) == 0))
            continue;
        *ret_n = n + (braced ? 3 : 1);
        if (i == 0)
            return origin;
        return i == 1 ? lib_word(root) : platform_word(root);
    }
    return "";
}

const char *libs_expand(struct root *root, const char *text, size_t n, const char *origin)
{
    char path[PATH_MAX];
    size_t used = 0, at = 0;

    while (at < n) {
        size_t n_word = 0;
        const char *word = text[at] == '$' ? expand_word(root, text + at, n - at, origin, &n_word) : "";

        if (!word)
            return NULL;
        if (n_word == 0) {
            word = text + at;
            n_word = 1;
        }
        for (size_t i = 0; word[i] && (i == 0 || word != text + at); i++) {
            if (used + 1 == sizeof(path))
                return NULL;
            path[used++] = word[i];
        }
        at += n_word;
    }
    while (used > 1 && path[used - 1] == '/')
        used--;
    path[used] = '\0';
    return root_printf(root, "%s", path);
}

/* --- lists of folders --- */

void libs_list_add(struct root *root, struct libs_list *list, const char *path, const char *found_by)
{
    struct root_stat stat;

    if (!path || *path != '/' || list->n == LIBS_MAX_FOLDERS)
        return;
    for (size_t i = 0; i < list->n; i++)
        if (strcmp(list->folders[i].path, path) == 0)
            return;
    stat = root_stat(root, "%s", path);
    if (stat.state == ROOT_ABSENT || (stat.state == ROOT_OK && stat.kind != ROOT_FOLDER))
        return;
    list->folders[list->n++] = (struct libs_folder){.path = path, .found_by = found_by};
}

void libs_list_split(struct root *root, struct libs_list *list, const char *text, const char *separators,
                     const char *origin, const char *found_by)
{
    while (*text && list->n < LIBS_MAX_FOLDERS) {
        size_t n = strcspn(text, separators);

        if (n)
            libs_list_add(root, list, libs_expand(root, text, n, origin), found_by);
        text += n + (text[n] != '\0');
    }
}

void libs_list_system(struct root *root, struct libs_list *list)
{
    libs_conf_read(root, list);
    for (size_t i = 0; i < COUNT(default_folders); i++)
        libs_list_add(root, list, default_folders[i], "default folder");
}

/* --- searching --- */

bool libs_try(struct root *root, const char *path, int machine, const char *found_by, struct lib_place *place)
{
    struct elf_facts facts = root_elf(root, "%s", path);
    struct root_text real;

    switch (facts.state) {
    case ROOT_OK:
        if (machine && facts.machine && facts.machine != machine)
            return false;
        break;
    case ROOT_ABSENT:
    case ROOT_DENIED:
        return false;
    case ROOT_UNASKED:
        place->state = ROOT_UNASKED;
        return false;
    case ROOT_FAILED:
        if (strncmp(facts.why, ELF_FOREIGN, strlen(ELF_FOREIGN)) == 0)
            return false;
        break;
    }
    real = root_resolve(root, "%s", path);
    *place = (struct lib_place){.state = facts.state, .path = root_printf(root, "%s", path), .found_by = found_by};
    place->real = real.state == ROOT_OK ? real.text : place->path;
    return true;
}

bool libs_try_list(struct root *root, const struct libs_list *list, const char *name, int machine,
                   struct lib_place *place)
{
    for (size_t i = 0; i < list->n; i++) {
        const struct libs_folder *folder = &list->folders[i];

        if (strlen(folder->path) + strlen(name) + 2 < PATH_MAX &&
            libs_try(root, root_printf(root, "%s/%s", folder->path, name), machine, folder->found_by, place))
            return true;
    }
    return false;
}

bool libs_next_preload(struct root *root, const char **at, const char **ret_name)
{
    size_t n;

    *at += strspn(*at, ": ");
    n = strcspn(*at, ": ");
    if (n == 0)
        return false;
    *ret_name = libs_expand(root, *at, n, NULL);
    *at += n;
    if (!*ret_name)
        *ret_name = "";
    return true;
}

/* Is a preloaded library the one that `name` asks for? By its file name or by the name that it gives itself. */
static bool find_preloaded(struct root *root, const struct libs_setting *setting, const struct libs_list *list,
                           const char *name, struct lib_place *place)
{
    const char *at = setting->preload, *preload;

    while (libs_next_preload(root, &at, &preload)) {
        struct lib_place found = libs_nowhere();
        bool there = strchr(preload, '/') ? libs_try(root, preload, 0, "LD_PRELOAD", &found)
                                          : *preload && libs_try_list(root, list, preload, 0, &found);

        if (!there || found.state != ROOT_OK)
            continue;
        if (strcmp(text_base(preload), name) != 0 && strcmp(root_elf(root, "%s", found.path).soname, name) != 0)
            continue;
        *place = found;
        place->found_by = "LD_PRELOAD";
        return true;
    }
    return false;
}

static void list_folders(struct root *root, const struct libs_setting *setting, struct libs_list *list)
{
    list->n = 0;
    libs_list_split(root, list, setting->library_path, ":;", NULL, "LD_LIBRARY_PATH");
    libs_list_system(root, list);
}

struct lib_place libs_find(struct root *root, const struct libs_setting *setting, const char *name)
{
    struct lib_place place = libs_nowhere();
    struct libs_list list;

    if (strchr(name, '/')) {
        libs_try(root, name, 0, "its path", &place);
        return place;
    }
    list_folders(root, setting, &list);
    if (!find_preloaded(root, setting, &list, name, &place))
        libs_try_list(root, &list, name, 0, &place);
    return place;
}

struct root_names libs_folders(struct root *root, const struct libs_setting *setting)
{
    struct root_names names = {.state = ROOT_OK, .why = ""};
    struct libs_list list;
    const char **paths;

    list_folders(root, setting, &list);
    paths = root_alloc(root, (list.n + 1) * sizeof(*paths));
    if (!paths)
        return (struct root_names){.state = ROOT_FAILED, .why = "out of memory"};
    for (size_t i = 0; i < list.n; i++)
        paths[names.n++] = list.folders[i].path;
    names.names = paths;
    return names;
}

/* --- mapped files --- */

#define MAX_MAPPED 4096

static bool has_name(const char *const *names, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(names[i], name) == 0)
            return true;
    return false;
}

/* The path at the end of a line of /proc/<pid>/maps; NULL for memory without a file. */
static const char *mapped_path(struct root *root, const char *line, size_t n)
{
    const char *path = memchr(line, '/', n);
    size_t bytes = path ? n - (size_t)(path - line) : 0;
    static const char deleted[] = " (deleted)";

    if (!path || bytes >= PATH_MAX)
        return NULL;
    if (bytes > strlen(deleted) && memcmp(path + bytes - strlen(deleted), deleted, strlen(deleted)) == 0)
        bytes -= strlen(deleted);
    return root_printf(root, "%.*s", (int)bytes, path);
}

struct root_names libs_mapped(struct root *root, const char *part)
{
    struct root_text maps = root_read(root, "/proc/self/maps");
    struct root_names names = {.state = maps.state, .why = maps.why};
    const char **paths = root_alloc(root, MAX_MAPPED * sizeof(*paths));
    const char *line = maps.text;

    if (!paths)
        return (struct root_names){.state = ROOT_FAILED, .why = "out of memory"};
    while (*line && names.n < MAX_MAPPED) {
        size_t n = strcspn(line, "\n");
        const char *path = memmem(line, n, part, strlen(part)) ? mapped_path(root, line, n) : NULL;

        if (path && strstr(text_base(path), part) && !has_name(paths, names.n, path))
            paths[names.n++] = path;
        line += n + (line[n] == '\n');
    }
    names.names = paths;
    return names;
}
