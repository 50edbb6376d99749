/* SPDX-License-Identifier: Apache-2.0 */
/* nvshmem.c - the NVSHMEM that a process would take, and the one that PyTorch brings along. */
#include "software/libs_search.h"
#include "software/parse.h"
#include "software/read.h"
#include "source/text.h"

#include <string.h>

#define HOST "libnvshmem_host.so.3"

const char *stack_name_version(struct root *root, const char *real)
{
    const char *so = strstr(text_base(real), ".so.");
    const char *version = so ? so + 4 : "";

    /* "3" alone is that of the interface. */
    if (!strchr(version, '.') || version[strspn(version, "0123456789.")] != '\0')
        return "";
    return root_printf(root, "%s", version);
}

const char *stack_without(struct root *root, const char *path, const char *end)
{
    return text_ends(path, end) ? root_printf(root, "%.*s", (int)(strlen(path) - strlen(end)), path) : "";
}

const char *stack_first_with(struct root *root, const char *folder, const char *prefix)
{
    struct root_names names = root_list(root, "%s", folder);

    for (size_t i = 0; i < names.n; i++)
        if (text_begins(names.names[i], prefix))
            return names.names[i];
    return "";
}

/* By the header that is installed with it: the file name of a wheel's library has the interface's number alone. */
static json_t *read_header(const char *text, size_t bytes)
{
    struct piece major = parse_define(text, "NVSHMEM_VENDOR_MAJOR_VERSION");
    struct piece minor = parse_define(text, "NVSHMEM_VENDOR_MINOR_VERSION");
    struct piece patch = parse_define(text, "NVSHMEM_VENDOR_PATCH_VERSION");

    (void)bytes;
    if (!major.n || !minor.n || !patch.n || major.n + minor.n + patch.n > 30)
        return json_string("");
    return json_sprintf("%.*s.%.*s.%.*s", (int)major.n, major.text, (int)minor.n, minor.text, (int)patch.n, patch.text);
}

static const char *header_version(struct root *root, const char *home)
{
    return root_fact_text(root_fact(root, "version", read_header, "%s/include/non_abi/nvshmem_version.h", home));
}

/* By the wheel that it came with: <site>/nvidia/nvshmem/lib/<library> and <site>/nvidia_nvshmem_cu12-3.4.5.dist-info.
 */
static const char *wheel_version(struct root *root, const char *home)
{
    const char *site = stack_without(root, home, "/nvidia/nvshmem");

    return *site ? python_version(root, site, "nvidia_nvshmem_cu") : "";
}

/* The folder above lib or lib64; "" when the library lies in a folder of another kind. */
static const char *home_of(struct root *root, const char *path)
{
    const char *folder = libs_folder_of(root, path), *name = text_base(folder);

    return strcmp(name, "lib") == 0 || strcmp(name, "lib64") == 0 ? libs_folder_of(root, folder) : "";
}

const char *stack_nvshmem_version(struct root *root, const char *path)
{
    struct root_text real = root_resolve(root, "%s", path);
    const char *version = stack_name_version(root, real.state == ROOT_OK ? real.text : path);
    const char *home = home_of(root, path);

    if (!*version && *home)
        version = header_version(root, home);
    if (!*version && *home)
        version = wheel_version(root, home);
    return version;
}

/* Installed, though no process would find it by itself. The path of the library, "" none. */
static const char *find_installed(struct root *root)
{
    const char *const homes[] = {root_env(root, "NVSHMEM_HOME"), root_env(root, "NVSHMEM_DIR"), "/opt/deepep/nvshmem",
                                 "/usr/local/nvshmem", "/usr/local/nvidia"};
    static const char *const libs[] = {"lib", "lib64"};

    for (size_t i = 0; i < COUNT(homes); i++) {
        for (size_t j = 0; homes[i] && *homes[i] == '/' && j < COUNT(libs); j++)
            if (root_elf(root, "%s/%s/" HOST, homes[i], libs[j]).state == ROOT_OK)
                return root_printf(root, "%s/%s/" HOST, homes[i], libs[j]);
    }
    return "";
}

/* By LD_PRELOAD and the folders of ld.so, or by way of DeepEP's extension, which has the folder compiled in. */
static struct lib_place find_host(struct root *root, const struct stack_deepep *deepep)
{
    struct libs_setting setting = libs_setting_of(root);
    const char *extension = deepep->imported >= 0 ? deepep->copies[deepep->imported].extension : "";
    struct lib_place place = libs_find(root, &setting, HOST);
    struct libs_closure *closure;

    if (!*extension || (place.state == ROOT_OK && strcmp(place.found_by, "LD_PRELOAD") == 0) ||
        libs_load(root, &setting, extension, &closure) != EP_OK)
        return place;
    for (int i = 0; i < closure->n; i++) {
        if (closure->libs[i].place.state == ROOT_OK && strcmp(closure->libs[i].name, HOST) == 0) {
            place = closure->libs[i].place;
            break;
        }
    }
    libs_closure_free(closure);
    return place;
}

void stack_read_nvshmem(struct root *root, const struct python *python, const struct stack_deepep *deepep,
                        struct stack_nvshmem *nvshmem)
{
    struct libs_setting setting = libs_setting_of(root);
    const char *path, *folder, *name;

    nvshmem->host = find_host(root, deepep);
    path = nvshmem->host.state == ROOT_OK ? nvshmem->host.path : find_installed(root);
    nvshmem->home = home_of(root, path);
    nvshmem->version = *path ? stack_nvshmem_version(root, path) : "";
    folder = libs_folder_of(root, path);
    name = *folder ? stack_first_with(root, folder, "nvshmem_transport_ibgda.so.") : "";
    nvshmem->transport_ibgda = *name ? root_printf(root, "%s/%s", folder, name) : "";
    nvshmem->bundled = python_find(root, python, "nvidia/nvshmem/lib/" HOST);
    nvshmem->bundled_version = *nvshmem->bundled ? stack_nvshmem_version(root, nvshmem->bundled) : "";
    nvshmem->gdrapi = libs_find(root, &setting, "libgdrapi.so.2");
}
