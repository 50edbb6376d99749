/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs.c - libibverbs and its provider for mlx5.
 *
 * libibverbs and its providers share a private interface with a version number: libibverbs.so.1 defines the symbol
 * version IBVERBS_PRIVATE_<NN>, libmlx5.so.1 needs it, and the provider is loaded as lib<name>-rdmav<NN>.so. Names come
 * from RDMAV_DRIVERS (or IBV_DRIVERS) and from the files in /etc/libibverbs.d. A name that begins with '/' is opened
 * with "-rdmav<NN>.so" appended; any other is searched in the compiled-in folder, then in ld.so's search path
 * (rdma-core, libibverbs/dynamic_driver.c, load_drivers() and load_driver()).
 */
#include "read_software.h"

#include <stdlib.h>
#include <string.h>

#define PRIVATE "IBVERBS_PRIVATE_"
#define CONFIG "/etc/libibverbs.d"

/* Compiled in: "libibverbs" in the library folder of the distribution. */
static const char *const provider_folders[] = {"/usr/lib/x86_64-linux-gnu/libibverbs",
                                               "/usr/lib/aarch64-linux-gnu/libibverbs", "/usr/lib64/libibverbs",
                                               "/usr/lib/libibverbs"};

/* NN of the first such version in a list, 0 if there is none. */
static int private_number(const struct elf_version *versions, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const char *name = versions[i].name;

        if (strncmp(name, PRIVATE, strlen(PRIVATE)) == 0) {
            long number = strtol(name + strlen(PRIVATE), NULL, 10);

            return number > 0 && number < 100000 ? (int)number : 0;
        }
    }
    return 0;
}

struct search {
    struct source *source;
    const struct software_verbs *verbs;
    const char *name;     /* of the provider: "mlx5" */
    const char *found;    /* path of its file; "" */
    const char *searched; /* searched folders, separated by ", " */
    bool named;           /* did anything name it? */
};

static bool record_folder(struct search *search, const char *folder)
{
    if (!strstr(search->searched, folder))
        search->searched =
            *search->searched ? source_printf(search->source, "%s, %s", search->searched, folder) : folder;
    return true;
}

static bool is_library(struct source *source, const char *path)
{
    enum source_state state = source_elf(source, "%s", path).state;

    return state == SOURCE_OK || state == SOURCE_FAILED;
}

/*
 * Searches the compiled-in folder. A libibverbs in another folder may come from another distribution, or may have been
 * moved together with its provider folder, so the folder next to it is searched as well.
 */
static void try_plain(struct search *search)
{
    int number = search->verbs->private_version;
    struct libs_env env = libs_env_of(search->source);
    struct lib_location place;
    bool is_noted = false;
    const char *library = search->verbs->ibverbs.real, *slash = strrchr(library, '/');

    for (size_t i = 0; i <= COUNT(provider_folders); i++) {
        const char *folder, *path;

        if (i == COUNT(provider_folders) && !slash)
            break;
        folder = i < COUNT(provider_folders)
                     ? provider_folders[i]
                     : source_printf(search->source, "%.*s/libibverbs", (int)(slash - library), library);
        if (!source_is_folder(source_stat(search->source, "%s", folder))) {
            /* Reports where it belongs on this machine even if it is not there. */
            if (!is_noted &&
                source_is_folder(source_stat(search->source, "%.*s", (int)(strrchr(folder, '/') - folder), folder)))
                is_noted = record_folder(search, folder);
            continue;
        }
        is_noted = record_folder(search, folder);
        path = source_printf(search->source, "%s/lib%s-rdmav%d.so", folder, search->name, number);
        if (is_library(search->source, path)) {
            search->found = path;
            return;
        }
    }
    place = libs_find(search->source, &env, source_printf(search->source, "lib%s-rdmav%d.so", search->name, number));
    record_folder(search, "the folders of ld.so");
    if (place.state == SOURCE_OK)
        search->found = place.path;
}

/* One name of a provider, from the environment or a file. */
static void try_name(struct search *search, struct piece name)
{
    const char *path, *slash;

    if (*search->found || name.n == 0 || name.n > 4000)
        return;
    if (*name.text != '/') {
        if (piece_is(name, search->name)) {
            search->named = true;
            try_plain(search);
        }
        return;
    }
    path = source_printf(search->source, "%.*s-rdmav%d.so", (int)name.n, name.text, search->verbs->private_version);
    slash = strrchr(path, '/');
    if (!text_begins(slash + 1, source_printf(search->source, "lib%s-", search->name)))
        return;
    search->named = true;
    record_folder(search, source_printf(search->source, "%.*s", (int)(slash - path), path));
    if (is_library(search->source, path))
        search->found = path;
}

static void try_environment(struct search *search)
{
    const char *list = source_env(search->source, "RDMAV_DRIVERS");

    if (!list)
        list = source_env(search->source, "IBV_DRIVERS");
    FOR_PIECES (name, list, ":;")
        try_name(search, name);
}

static void try_config(struct search *search)
{
    struct source_names names = source_list(search->source, CONFIG);

    FOR_NAMES (name, names) {
        FOR_PIECES (line, source_read(search->source, CONFIG "/%s", name).text, "\n") {
            const char *word = line.text + strspn(line.text, " \t");

            if (text_begins_any(word, TEXTS("driver ", "driver\t"))) {
                word += 6 + strspn(word + 6, " \t");
                try_name(search, (struct piece){.text = word, .n = strcspn(word, " \t\n")});
            }
        }
    }
    /* Some images contain only the libraries and lack the folder; some builds have another one compiled in. */
    if (!search->named && names.state != SOURCE_OK)
        try_name(search, (struct piece){.text = search->name, .n = strlen(search->name)});
    else if (!search->named)
        record_folder(search, source_printf(search->source, CONFIG " (no file there names %s)", search->name));
}

const char *software_find_provider(struct source *source, const struct software_verbs *verbs, const char *name,
                                   const char **ret_searched)
{
    struct search search = {.source = source, .verbs = verbs, .name = name, .found = "", .searched = ""};

    if (verbs->private_version) {
        try_environment(&search);
        if (!*search.found)
            try_config(&search);
    }
    *ret_searched = search.searched;
    return search.found;
}

void software_read_verbs(struct source *source, struct software_verbs *verbs)
{
    struct libs_env env = libs_env_of(source);
    struct elf_facts facts;

    verbs->ibverbs = libs_find(source, &env, "libibverbs.so.1");
    verbs->mlx5 = libs_find(source, &env, "libmlx5.so.1");
    if (verbs->ibverbs.state == SOURCE_OK) {
        facts = source_elf(source, "%s", verbs->ibverbs.path);
        verbs->private_version = private_number(facts.definitions, facts.n_definitions);
    }
    if (verbs->mlx5.state == SOURCE_OK) {
        facts = source_elf(source, "%s", verbs->mlx5.path);
        verbs->provider_needs = private_number(facts.needs, facts.n_needs);
    }
    verbs->provider = software_find_provider(source, verbs, "mlx5", &verbs->provider_folders);
}
