/* SPDX-License-Identifier: Apache-2.0 */
/*
 * advice_paths.c - recommended LD_LIBRARY_PATH, PYTHONPATH and LD_PRELOAD.
 *
 * A folder is advised if the linker does not find the right library without it. libibverbs and its provider must come
 * from the same installation: if an advised folder contains its own libibverbs, the folder of the complete installation
 * is put in front.
 */
#include "libs.h"
#include "read_software.h"

#include <string.h>

#define FOLDERS_MAX 24
#define BUNDLE_MAX 64 /* library packages next to PyTorch */
#define HOST_LIBRARY "libnvshmem_host.so.3"
#define GKE_LIBRARIES "/usr/local/nvidia/lib64" /* where GKE's node installer mounts the driver into containers */

/* The linker's environment without LD_LIBRARY_PATH and LD_PRELOAD. */
static const struct libs_env default_env = {.library_path = "", .preload = ""};

struct folder {
    const char *path, *reason;
};

struct folders {
    int n;
    struct folder at[FOLDERS_MAX];
    const char *nvshmem; /* the folder with NVSHMEM, NULL if there is none */
};

/* A path with control characters is an accident or an attack, and is not advised. */
static bool is_printable(const char *path)
{
    char shown[1024];

    text_clean(path, shown, sizeof(shown));
    return *path && strcmp(path, shown) == 0;
}

/* ld.so separates LD_LIBRARY_PATH at colons and semicolons, so a folder whose name contains one cannot be listed. */
static void add_folder(struct folders *folders, const char *path, const char *reason)
{
    if (!is_printable(path) || strpbrk(path, ":;") || folders->n == FOLDERS_MAX)
        return;
    for (int i = 0; i < folders->n; i++)
        if (strcmp(folders->at[i].path, path) == 0)
            return;
    folders->at[folders->n++] = (struct folder){.path = path, .reason = reason};
}

static const char *join_paths(struct source *source, const char *a, const char *b)
{
    return source_printf(source, "%s%s%s", a, *a && *b ? ":" : "", b);
}

static const char *join_folders(struct source *source, const struct folders *folders)
{
    const char *text = "";

    for (int i = 0; i < folders->n; i++)
        text = join_paths(source, text, folders->at[i].path);
    return text;
}

const char *advice_prepend(struct source *source, const char *value, const char *path)
{
    const char *inside = source_printf(source, ":%s:", path);
    const char *found = strstr(inside, source_printf(source, ":%s:", value));
    size_t n = strlen(value);

    if (!*value || !*path)
        return *value ? value : path;
    if (!found)
        return source_printf(source, "%s:%s", value, path);
    path = source_printf(source, "%.*s:%s", (int)(found - inside), inside, found + n + 2);
    path += path[0] == ':';
    n = strlen(path);
    n -= n > 0 && path[n - 1] == ':';
    return n ? source_printf(source, "%s:%.*s", value, (int)n, path) : value;
}

/* --- NVSHMEM --- */

int advice_deepep_copy(const struct software_deepep *deepep)
{
    if (deepep->imported >= 0 && *deepep->copies[deepep->imported].extension)
        return deepep->imported;
    for (int i = 0; i < deepep->n; i++)
        if (*deepep->copies[i].extension && !deepep->copies[i].is_source)
            return i;
    return deepep->imported;
}

/*
 * Finds the libnvshmem_host.so.3 that the program should load: the one that DeepEP is linked with, otherwise one that
 * is installed separately from PyTorch's. "" if there is none.
 */
static const char *advice_nvshmem_host(struct source *source, const struct software *software)
{
    static const char *const folders[] = {"lib", "lib64"};
    int copy = advice_deepep_copy(&software->deepep);
    const char *path = "";

    if (copy >= 0)
        path = libs_loaded_with(source, default_env, software->deepep.copies[copy].extension, HOST_LIBRARY,
                                (struct lib_location){.path = ""})
                   .path;
    for (int i = 0; i < 2 && !*path && *software->nvshmem.home; i++)
        if (source_stat(source, "%s/%s/" HOST_LIBRARY, software->nvshmem.home, folders[i]).state == SOURCE_OK)
            path = source_printf(source, "%s/%s/" HOST_LIBRARY, software->nvshmem.home, folders[i]);
    if (!*path)
        path = software->nvshmem.host.state == SOURCE_OK ? software->nvshmem.host.path : "";
    return path;
}

static void add_nvshmem_folder(struct advice_work *work, const char *host, struct folders *folders)
{
    struct lib_location found;

    if (!*host)
        return;
    found = libs_find(work->source, &default_env, HOST_LIBRARY);
    if (found.state != SOURCE_OK || strcmp(found.real, source_resolve(work->source, "%s", host).text) != 0)
        add_folder(folders, libs_folder_of(work->source, host), "NVSHMEM with its transports");
    folders->nvshmem = folders->n > 0 ? folders->at[0].path : NULL;
}

static bool path_can_be_preloaded(const char *path)
{
    return is_printable(path) && *path == '/' &&
           !strpbrk(path, ": "); /* ld.so(8): entries are separated by spaces or colons */
}

/* PyTorch loads the NVSHMEM of its wheel, and the first copy that is loaded is used by the whole process. */
static void advise_preload(struct advice_work *work, const char *host)
{
    const struct software_nvshmem *nvshmem = &work->software->nvshmem;
    const char *real = source_resolve(work->source, "%s", host).text, *version = libs_file_version(real);
    const char *bundled = source_resolve(work->source, "%s", nvshmem->bundled).text;
    struct advice_row *row;
    char text[2][64];

    if (!*nvshmem->bundled || !path_can_be_preloaded(host) || strcmp(real, bundled) == 0)
        return;
    if (!*version && strncmp(host, nvshmem->home, strlen(nvshmem->home)) == 0)
        version = nvshmem->version;
    if (*version && strverscmp(version, nvshmem->bundled_version) == 0)
        return;
    text_clean(*version ? version : "another version", text[0], sizeof(text[0]));
    text_clean(*nvshmem->bundled_version ? nvshmem->bundled_version : "another one", text[1], sizeof(text[1]));
    row = advice_add(work, "LD_PRELOAD",
                     source_printf(work->source,
                                   "PyTorch brings NVSHMEM %s, which would be loaded first; DeepEP was built with %s.",
                                   text[1], text[0]));
    row->scope = ADVICE_PROGRAM;
    row->prepend = true;
    row->value = host;
}

/* --- verbs --- */

/* Does the folder of this libibverbs contain the matching mlx5 provider? */
static bool set_is_complete(struct source *source, const char *ibverbs)
{
    struct elf_facts facts = source_elf(source, "%s", ibverbs);
    const char *folder = libs_folder_of(source, ibverbs);

    for (size_t i = 0; facts.state == SOURCE_OK && i < facts.n_definitions; i++) {
        const char *name = facts.definitions[i].name;

        if (strncmp(name, "IBVERBS_PRIVATE_", 16) == 0)
            return source_stat(source, "%s/libibverbs/libmlx5-rdmav%s.so", folder, name + 16).state == SOURCE_OK;
    }
    return false;
}

static bool is_elsewhere(struct source *source, const char *path, const char *name, const char *folder)
{
    struct libs_env env = {.library_path = path, .preload = ""};
    struct lib_location location = libs_find(source, &env, name);

    return location.state == SOURCE_OK && strcmp(libs_folder_of(source, location.real), folder) != 0;
}

/* Moves the folder to the front; if it is already listed, it keeps its reason. */
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

/* Does `folder` contain a library with one of these names that is not the one in `own`? */
static bool replaces_library(struct source *source, const char *folder, const char *own)
{
    FOR_NAMES (name, source_list(source, "%s", own)) {
        struct source_text theirs;

        if (!strstr(name, ".so."))
            continue;
        theirs = source_resolve(source, "%s/%s", folder, name);
        if (theirs.state == SOURCE_OK && source_stat(source, "%s/%s", folder, name).state == SOURCE_OK &&
            strcmp(theirs.text, source_resolve(source, "%s/%s", own, name).text) != 0)
            return true;
    }
    return false;
}

/*
 * LD_LIBRARY_PATH precedes the folders that are compiled into PyTorch (ld.so(8): RUNPATH), so an NCCL or cuDNN in one
 * of its folders replaces the one that PyTorch ships. The folders of the libraries that `folder` would replace are put
 * first; for NVSHMEM this is the folder of the version that DeepEP was built with.
 */
static void put_bundle_before(struct advice_work *work, struct folders *folders, const char *folder)
{
    const char *top = software_without(work->source, work->software->nccl.bundled, "/nccl/lib/libnccl.so.2");
    struct source_names packages;

    if (folders->nvshmem && source_stat(work->source, "%s/" HOST_LIBRARY, folder).state == SOURCE_OK)
        put_first(folders, folders->nvshmem, "");
    if (!*top)
        return;
    packages = source_list(work->source, "%s", top);
    for (size_t i = 0; i < packages.n && i < BUNDLE_MAX; i++) {
        const char *own = source_printf(work->source, "%s/%s/lib", top, packages.names[i]);

        if (strcmp(packages.names[i], "nvshmem") != 0 && replaces_library(work->source, folder, own))
            put_first(folders, own, source_printf(work->source, "what PyTorch brings, before that of %s", folder));
    }
}

/* Puts the system's verbs libraries first if other folders would load parts of another installation. */
static void put_verbs_first(struct advice_work *work, struct folders *folders)
{
    const char *current = source_env(work->source, "LD_LIBRARY_PATH");
    const char *path = join_paths(work->source, join_folders(work->source, folders), current ? current : "");
    struct lib_location own = libs_find(work->source, &default_env, "libibverbs.so.1");
    const char *folder = own.state == SOURCE_OK ? libs_folder_of(work->source, own.real) : "";

    if (!*path || !*folder || folders->n == FOLDERS_MAX || !set_is_complete(work->source, own.real))
        return;
    if (!is_elsewhere(work->source, path, "libibverbs.so.1", folder) &&
        !is_elsewhere(work->source, path, "libmlx5.so.1", folder))
        return;
    put_first(folders, folder, "libibverbs and its provider from one installation");
    put_bundle_before(work, folders, folder);
}

/* --- all of LD_LIBRARY_PATH --- */

/* Adds the folder of an installed library that the linker does not find. */
static void add_if_not_found(struct advice_work *work, struct folders *folders, const char *name, const char *folder,
                             const char *reason)
{
    if (libs_find(work->source, &default_env, name).state != SOURCE_OK &&
        source_stat(work->source, "%s/%s", folder, name).state == SOURCE_OK)
        add_folder(folders, folder, reason);
}

static void advise_library_path(struct advice_work *work, const char *host)
{
    struct folders folders = {.n = 0};
    const char *reason = "", **reasons;
    struct advice_row *row;

    add_nvshmem_folder(work, host, &folders);
    if (*work->software->nccl.gib && advice_find(work->advice, "NCCL_NET"))
        add_if_not_found(work, &folders, "libnccl-net.so",
                         source_printf(work->source, "%s/lib64", work->software->nccl.gib),
                         "gIB's plugin, which NCCL looks for by its name");
    if (work->topo->n_gpus > 0)
        add_if_not_found(work, &folders, "libcuda.so.1", GKE_LIBRARIES, "the driver's libraries");
    put_verbs_first(work, &folders);
    if (folders.n == 0)
        return;
    reasons = source_alloc(work->source, (size_t)folders.n * sizeof(*reasons));
    for (int i = 0; i < folders.n; i++) {
        reason = source_printf(work->source, "%s%s%s: %s", reason, *reason ? "; " : "", folders.at[i].path,
                               folders.at[i].reason);
        reasons[i] = folders.at[i].reason;
    }
    row = advice_add(work, "LD_LIBRARY_PATH", source_printf(work->source, "%s.", reason));
    row->folder_reasons = reasons;
    row->prepend = true;
    row->value = join_folders(work->source, &folders);
}

/* --- Python --- */

static bool path_holds(const char *path, const char *folder)
{
    FOR_PIECES (entry, path, ":")
        if (piece_is(entry, folder))
            return true;
    return false;
}

static void advise_python_path(struct advice_work *work)
{
    const struct software_deepep *deepep = &work->software->deepep;
    int wanted = advice_deepep_copy(deepep);
    const char *folder = wanted >= 0 ? libs_folder_of(work->source, deepep->copies[wanted].folder) : "";
    struct advice_row *row;

    if (!is_printable(folder) || strchr(folder, ':'))
        return;
    if (wanted == deepep->imported && !path_holds(source_env(work->source, "PYTHONPATH"), folder))
        return;
    row = advice_add(work, "PYTHONPATH", "Python does not find this deep_ep without it.");
    row->prepend = true;
    row->value = folder;
}

void advice_paths(struct advice_work *work)
{
    const char *host = advice_nvshmem_host(work->source, work->software);

    advise_library_path(work, host);
    advise_preload(work, host);
    advise_python_path(work);
}
