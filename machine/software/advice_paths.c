/* SPDX-License-Identifier: Apache-2.0 */
/*
 * advice_paths.c - folders for LD_LIBRARY_PATH and PYTHONPATH, and what to preload.
 *
 * A folder is advised when the linker does not find the right library without it. libibverbs and its provider have to
 * come from one set: a folder that brings a libibverbs of its own along gets the folder of the complete set in front.
 */
#include "software/advice_internal.h"
#include "software/libs_search.h"
#include "software/read.h"

#include "base/error.h"

#include <stdlib.h>
#include <string.h>

#define FOLDERS_MAX 24
#define BUNDLE_MAX 64 /* packages of libraries beside PyTorch */
#define HOST_LIBRARY "libnvshmem_host.so.3"
#define GKE_LIBRARIES "/usr/local/nvidia/lib64" /* where GKE's node installer mounts the driver into containers */

/* What the linker finds without LD_LIBRARY_PATH and LD_PRELOAD. */
static const struct libs_setting bare = {.library_path = "", .preload = ""};

struct folder {
    const char *path, *reason;
};

struct folders {
    int n;
    struct folder at[FOLDERS_MAX];
    const char *nvshmem; /* the path of the one with NVSHMEM, NULL if none is there */
};

/* Can it be said and shown? A path with control characters is an accident or a trick. */
static bool is_printable(const char *path)
{
    char shown[1024];

    root_clean(path, shown, sizeof(shown));
    return *path && strcmp(path, shown) == 0;
}

/* ld.so divides LD_LIBRARY_PATH at colons and semicolons: a folder with one in its name cannot be said. */
static void add_folder(struct folders *folders, const char *path, const char *reason)
{
    if (!is_printable(path) || strpbrk(path, ":;") || folders->n == FOLDERS_MAX)
        return;
    for (int i = 0; i < folders->n; i++)
        if (strcmp(folders->at[i].path, path) == 0)
            return;
    folders->at[folders->n++] = (struct folder){.path = path, .reason = reason};
}

static const char *join(struct root *root, const char *a, const char *b)
{
    return root_printf(root, "%s%s%s", a, *a && *b ? ":" : "", b);
}

static const char *join_folders(struct root *root, const struct folders *folders)
{
    const char *text = "";

    for (int i = 0; i < folders->n; i++)
        text = join(root, text, folders->at[i].path);
    return text;
}

const char *advice_prepend(struct root *root, const char *value, const char *path)
{
    const char *inside = root_printf(root, ":%s:", path);
    const char *found = strstr(inside, root_printf(root, ":%s:", value));
    size_t n = strlen(value);

    if (!*value || !*path)
        return *value ? value : path;
    if (!found)
        return root_printf(root, "%s:%s", value, path);
    path = root_printf(root, "%.*s:%s", (int)(found - inside), inside, found + n + 2);
    path += path[0] == ':';
    n = strlen(path);
    n -= n > 0 && path[n - 1] == ':';
    return n ? root_printf(root, "%s:%.*s", value, (int)n, path) : value;
}

/* --- NVSHMEM --- */

/* The version in the name of the real file, "" if it has none: libnvshmem_host.so.3.5.19. */
static const char *version_of(struct root *root, const char *path)
{
    const char *real = root_resolve(root, "%s", path).text;
    const char *name = strrchr(real, '/');
    const char *version = name ? strstr(name, ".so.") : NULL;

    return version && strchr(version + 4, '.') ? version + 4 : "";
}

/* The copy of deep_ep to be imported: the one that is, or else the first installed one. -1: none. */
static int wanted_copy(const struct stack_deepep *deepep)
{
    if (deepep->imported >= 0 && *deepep->copies[deepep->imported].extension)
        return deepep->imported;
    for (int i = 0; i < deepep->n; i++)
        if (*deepep->copies[i].extension && !deepep->copies[i].is_source)
            return i;
    return deepep->imported;
}

ep_status advice_nvshmem_host(struct root *root, const struct stack *stack, const char **ret_path)
{
    static const char *const folders[] = {"lib", "lib64"};
    int copy = wanted_copy(&stack->deepep), i;
    struct libs_closure *closure;
    const char *path = "";

    if (copy >= 0 && *stack->deepep.copies[copy].extension) {
        EP_TRY(libs_load(root, &bare, stack->deepep.copies[copy].extension, &closure));
        i = libs_closure_find(closure, HOST_LIBRARY);
        if (i >= 0 && closure->libs[i].place.state == ROOT_OK)
            path = closure->libs[i].place.path;
        libs_closure_free(closure);
    }
    for (i = 0; i < 2 && !*path && *stack->nvshmem.home; i++)
        if (root_stat(root, "%s/%s/" HOST_LIBRARY, stack->nvshmem.home, folders[i]).state == ROOT_OK)
            path = root_printf(root, "%s/%s/" HOST_LIBRARY, stack->nvshmem.home, folders[i]);
    if (!*path)
        path = stack->nvshmem.host.state == ROOT_OK ? stack->nvshmem.host.path : "";
    *ret_path = path;
    return EP_OK;
}

static void add_nvshmem_folder(struct advice_work *work, const char *host, struct folders *folders)
{
    struct lib_place found;

    if (!*host)
        return;
    found = libs_find(work->root, &bare, HOST_LIBRARY);
    if (found.state != ROOT_OK || strcmp(found.real, root_resolve(work->root, "%s", host).text) != 0)
        add_folder(folders, libs_folder_of(work->root, host), "NVSHMEM with its transports");
    folders->nvshmem = folders->n > 0 ? folders->at[0].path : NULL;
}

static bool path_can_be_preloaded(const char *path)
{
    return is_printable(path) && *path == '/' && !strpbrk(path, ": "); /* ld.so(8): divided by spaces or colons */
}

/* PyTorch loads the NVSHMEM of its wheel, and the first copy that is loaded serves everybody. */
static void advise_preload(struct advice_work *work, const char *host)
{
    const struct stack_nvshmem *nvshmem = &work->stack->nvshmem;
    const char *version = version_of(work->root, host), *real = root_resolve(work->root, "%s", host).text;
    const char *bundled = root_resolve(work->root, "%s", nvshmem->bundled).text;
    struct advice_row *row;
    char text[2][64];

    if (!*nvshmem->bundled || !path_can_be_preloaded(host) || strcmp(real, bundled) == 0)
        return;
    if (!*version && strncmp(host, nvshmem->home, strlen(nvshmem->home)) == 0)
        version = nvshmem->version;
    if (*version && libs_version_compare(version, nvshmem->bundled_version) == 0)
        return;
    root_clean(*version ? version : "another version", text[0], sizeof(text[0]));
    root_clean(*nvshmem->bundled_version ? nvshmem->bundled_version : "another one", text[1], sizeof(text[1]));
    row = advice_add(work, "LD_PRELOAD",
                     root_printf(work->root,
                                 "PyTorch brings NVSHMEM %s, which would be loaded first; DeepEP is made for %s.",
                                 text[1], text[0]));
    row->scope = ADVICE_PROGRAM;
    row->prepend = true;
    row->value = host;
}

/* --- verbs --- */

/* Does the folder of this libibverbs hold the provider for mlx5 that fits it? */
static bool set_is_complete(struct root *root, const char *ibverbs)
{
    struct elf_facts facts = root_elf(root, "%s", ibverbs);
    const char *folder = libs_folder_of(root, ibverbs);

    for (size_t i = 0; facts.state == ROOT_OK && i < facts.n_definitions; i++) {
        const char *name = facts.definitions[i].name;

        if (strncmp(name, "IBVERBS_PRIVATE_", 16) == 0)
            return root_stat(root, "%s/libibverbs/libmlx5-rdmav%s.so", folder, name + 16).state == ROOT_OK;
    }
    return false;
}

static bool is_elsewhere(struct root *root, const char *path, const char *name, const char *folder)
{
    struct libs_setting setting = {.library_path = path, .preload = ""};
    struct lib_place place = libs_find(root, &setting, name);

    return place.state == ROOT_OK && strcmp(libs_folder_of(root, place.real), folder) != 0;
}

/* In front of the others; one that is among them keeps its reason. */
static void put_first(struct folders *folders, const char *path, const char *reason)
{
    struct folder first = {.path = path, .reason = reason};
    int n = folders->n, at = 0;

    while (at < n && strcmp(folders->at[at].path, path) != 0)
        at++;
    if (!is_printable(path) || strpbrk(path, ":;") || at == FOLDERS_MAX)
        return;
    if (at < n)
        first = folders->at[at];
    memmove(folders->at + 1, folders->at, (size_t)at * sizeof(folders->at[0]));
    folders->n += at == n;
    folders->at[0] = first;
}

/* Does `folder` hold another file of one of these names than `own` does? */
static bool replaces(struct root *root, const char *folder, const char *own)
{
    struct root_names names = root_list(root, "%s", own);

    for (size_t i = 0; i < names.n; i++) {
        struct root_text theirs;

        if (!strstr(names.names[i], ".so."))
            continue;
        theirs = root_resolve(root, "%s/%s", folder, names.names[i]);
        if (theirs.state == ROOT_OK && root_stat(root, "%s/%s", folder, names.names[i]).state == ROOT_OK &&
            strcmp(theirs.text, root_resolve(root, "%s/%s", own, names.names[i]).text) != 0)
            return true;
    }
    return false;
}

/*
 * LD_LIBRARY_PATH comes before the folders that are compiled into PyTorch (ld.so(8): RUNPATH): the NCCL or cuDNN of a
 * folder in it replaces the one that PyTorch brings along. The folders of those that `folder` would replace come first;
 * of NVSHMEM it is the one that DeepEP is made for.
 */
static void keep_bundle_before(struct advice_work *work, struct folders *folders, const char *folder)
{
    const char *top = stack_without(work->root, work->stack->nccl.bundled, "/nccl/lib/libnccl.so.2");
    struct root_names packages;

    if (folders->nvshmem && root_stat(work->root, "%s/" HOST_LIBRARY, folder).state == ROOT_OK)
        put_first(folders, folders->nvshmem, "");
    if (!*top)
        return;
    packages = root_list(work->root, "%s", top);
    for (size_t i = 0; i < packages.n && i < BUNDLE_MAX; i++) {
        const char *own = root_printf(work->root, "%s/%s/lib", top, packages.names[i]);

        if (strcmp(packages.names[i], "nvshmem") != 0 && replaces(work->root, folder, own))
            put_first(folders, own, root_printf(work->root, "what PyTorch brings, before that of %s", folder));
    }
}

/* The system's set in front, where other folders would bring in parts of another one. */
static void put_verbs_first(struct advice_work *work, struct folders *folders)
{
    const char *current = root_env(work->root, "LD_LIBRARY_PATH");
    const char *path = join(work->root, join_folders(work->root, folders), current ? current : "");
    struct lib_place own = libs_find(work->root, &bare, "libibverbs.so.1");
    const char *folder = own.state == ROOT_OK ? libs_folder_of(work->root, own.real) : "";

    if (!*path || !*folder || folders->n == FOLDERS_MAX || !set_is_complete(work->root, own.real))
        return;
    if (!is_elsewhere(work->root, path, "libibverbs.so.1", folder) &&
        !is_elsewhere(work->root, path, "libmlx5.so.1", folder))
        return;
    put_first(folders, folder, "libibverbs and its provider from one set");
    keep_bundle_before(work, folders, folder);
}

/* --- all of LD_LIBRARY_PATH --- */

/* A library that is there and that nothing leads to. */
static void add_if_lost(struct advice_work *work, struct folders *folders, const char *name, const char *folder,
                        const char *reason)
{
    if (libs_find(work->root, &bare, name).state != ROOT_OK &&
        root_stat(work->root, "%s/%s", folder, name).state == ROOT_OK)
        add_folder(folders, folder, reason);
}

static void advise_library_path(struct advice_work *work, const char *host)
{
    struct folders folders = {.n = 0};
    const char *reason = "", **reasons;
    struct advice_row *row;

    add_nvshmem_folder(work, host, &folders);
    if (*work->stack->nccl.gib && advice_find(work->advice, "NCCL_NET"))
        add_if_lost(work, &folders, "libnccl-net.so", root_printf(work->root, "%s/lib64", work->stack->nccl.gib),
                    "gIB's plugin, which NCCL looks for by its name");
    if (work->topo->n_gpus > 0)
        add_if_lost(work, &folders, "libcuda.so.1", GKE_LIBRARIES, "the driver's libraries");
    put_verbs_first(work, &folders);
    if (folders.n == 0)
        return;
    reasons = root_alloc(work->root, (size_t)folders.n * sizeof(*reasons));
    for (int i = 0; i < folders.n; i++) {
        reason = root_printf(work->root, "%s%s%s: %s", reason, *reason ? "; " : "", folders.at[i].path,
                             folders.at[i].reason);
        if (reasons)
            reasons[i] = folders.at[i].reason;
    }
    row = advice_add(work, "LD_LIBRARY_PATH", root_printf(work->root, "%s.", reason));
    row->folder_reasons = reasons;
    row->prepend = true;
    row->value = join_folders(work->root, &folders);
}

/* --- Python --- */

static bool path_holds(const char *path, const char *folder)
{
    size_t n = strlen(folder);

    for (; path && *path; path += strcspn(path, ":"), path += *path == ':')
        if (strncmp(path, folder, n) == 0 && (path[n] == ':' || !path[n]))
            return true;
    return false;
}

static void advise_python_path(struct advice_work *work)
{
    const struct stack_deepep *deepep = &work->stack->deepep;
    int wanted = wanted_copy(deepep);
    const char *folder = wanted >= 0 ? libs_folder_of(work->root, deepep->copies[wanted].folder) : "";
    struct advice_row *row;

    if (!is_printable(folder) || strchr(folder, ':'))
        return;
    if (wanted == deepep->imported && !path_holds(root_env(work->root, "PYTHONPATH"), folder))
        return;
    row = advice_add(work, "PYTHONPATH", "Python does not find this deep_ep without it.");
    row->prepend = true;
    row->value = folder;
}

ep_status advice_paths(struct advice_work *work)
{
    const char *host;

    EP_TRY(advice_nvshmem_host(work->root, work->stack, &host));
    advise_library_path(work, host);
    advise_preload(work, host);
    advise_python_path(work);
    return EP_OK;
}
