/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs.c - libibverbs and its provider for mlx5.
 *
 * libibverbs and its providers share a private interface with a number: libibverbs.so.1 defines the symbol version
 * IBVERBS_PRIVATE_<NN>, libmlx5.so.1 needs it, and the provider is loaded as lib<name>-rdmav<NN>.so. Names come from
 * RDMAV_DRIVERS (or IBV_DRIVERS) and from the files in /etc/libibverbs.d. One that begins with '/' has "-rdmav<NN>.so"
 * appended and is opened; another is looked for in the folder that is compiled in, then as ld.so looks for libraries
 * (rdma-core, libibverbs/dynamic_driver.c, load_drivers() and load_driver()).
 */
#include "software/parse.h"
#include "software/read.h"
#include "source/text.h"

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
    struct root *root;
    struct stack_verbs *verbs;
    const char *looked; /* ", " between */
    bool named;         /* did anything name mlx5? */
};

static bool note_folder(struct search *search, const char *folder)
{
    if (!strstr(search->looked, folder))
        search->looked = *search->looked ? root_printf(search->root, "%s, %s", search->looked, folder) : folder;
    return true;
}

static bool is_library(struct root *root, const char *path)
{
    enum root_state state = root_elf(root, "%s", path).state;

    return state == ROOT_OK || state == ROOT_FAILED;
}

/*
 * In the compiled-in folder; a libibverbs that lies elsewhere may be one of another distribution, or moved there with
 * its folder, so that beside it is looked at as well.
 */
static void try_plain(struct search *search)
{
    int number = search->verbs->private_version;
    struct libs_setting setting = libs_setting_of(search->root);
    struct lib_place place;
    bool is_noted = false;
    const char *beside = search->verbs->ibverbs.real, *slash = strrchr(beside, '/');

    for (size_t i = 0; i <= COUNT(provider_folders); i++) {
        const char *folder, *path;

        if (i == COUNT(provider_folders) && !slash)
            break;
        folder = i < COUNT(provider_folders)
                     ? provider_folders[i]
                     : root_printf(search->root, "%.*s/libibverbs", (int)(slash - beside), beside);
        if (!root_is_folder(root_stat(search->root, "%s", folder))) {
            /* Where it belongs on this machine, though it is not there. */
            if (!is_noted &&
                root_is_folder(root_stat(search->root, "%.*s", (int)(strrchr(folder, '/') - folder), folder)))
                is_noted = note_folder(search, folder);
            continue;
        }
        is_noted = note_folder(search, folder);
        path = root_printf(search->root, "%s/libmlx5-rdmav%d.so", folder, number);
        if (is_library(search->root, path)) {
            search->verbs->provider = path;
            return;
        }
    }
    place = libs_find(search->root, &setting, root_printf(search->root, "libmlx5-rdmav%d.so", number));
    note_folder(search, "the folders of ld.so");
    if (place.state == ROOT_OK)
        search->verbs->provider = place.path;
}

/* One name of a provider, from the environment or a file. */
static void try_name(struct search *search, struct piece name)
{
    const char *path, *slash;

    if (*search->verbs->provider || name.n == 0 || name.n > 4000)
        return;
    if (*name.text != '/') {
        if (piece_is(name, "mlx5")) {
            search->named = true;
            try_plain(search);
        }
        return;
    }
    path = root_printf(search->root, "%.*s-rdmav%d.so", (int)name.n, name.text, search->verbs->private_version);
    slash = strrchr(path, '/');
    if (strncmp(slash + 1, "libmlx5-", 8) != 0)
        return;
    search->named = true;
    note_folder(search, root_printf(search->root, "%.*s", (int)(slash - path), path));
    if (is_library(search->root, path))
        search->verbs->provider = path;
}

static void try_environment(struct search *search)
{
    const char *list = root_env(search->root, "RDMAV_DRIVERS");

    if (!list)
        list = root_env(search->root, "IBV_DRIVERS");
    while (list && *list)
        try_name(search, text_take(&list, ":;"));
}

static void try_config(struct search *search)
{
    struct root_names names = root_list(search->root, CONFIG);

    for (size_t i = 0; i < names.n; i++) {
        const char *at = root_read(search->root, CONFIG "/%s", names.names[i]).text;

        while (*at) {
            size_t n = strcspn(at, "\n");
            size_t blank = strspn(at, " \t");

            if (strncmp(at + blank, "driver", 6) == 0 && strspn(at + blank + 6, " \t")) {
                const char *value = at + blank + 6 + strspn(at + blank + 6, " \t");

                try_name(search, (struct piece){.text = value, .n = strcspn(value, " \t\n")});
            }
            at += n + (at[n] == '\n');
        }
    }
    /* Some images lack the folder and bring the libraries alone; some builds have another one compiled in. */
    if (!search->named && names.state != ROOT_OK)
        try_name(search, (struct piece){.text = "mlx5", .n = 4});
    else if (!search->named)
        note_folder(search, CONFIG " (no file there names mlx5)");
}

void stack_read_verbs(struct root *root, struct stack_verbs *verbs)
{
    struct libs_setting setting = libs_setting_of(root);
    struct search search = {.root = root, .verbs = verbs, .looked = ""};
    struct elf_facts facts;

    verbs->provider = "";
    verbs->ibverbs = libs_find(root, &setting, "libibverbs.so.1");
    verbs->mlx5 = libs_find(root, &setting, "libmlx5.so.1");
    if (verbs->ibverbs.state == ROOT_OK) {
        facts = root_elf(root, "%s", verbs->ibverbs.path);
        verbs->private_version = private_number(facts.definitions, facts.n_definitions);
    }
    if (verbs->mlx5.state == ROOT_OK) {
        facts = root_elf(root, "%s", verbs->mlx5.path);
        verbs->provider_wants = private_number(facts.needs, facts.n_needs);
    }
    if (verbs->private_version) {
        try_environment(&search);
        if (!*verbs->provider)
            try_config(&search);
    }
    verbs->provider_folders = search.looked;
}
