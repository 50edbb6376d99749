/* SPDX-License-Identifier: Apache-2.0 */
/* nvshmem.c - the NVSHMEM that a process would load, and the one that PyTorch ships. */
#include "libs.h"
#include "read_software.h"

#include <string.h>

#define HOST "libnvshmem_host.so.3"

const char *software_without(struct source *source, const char *path, const char *end)
{
    return text_ends(path, end) ? source_printf(source, "%.*s", (int)(strlen(path) - strlen(end)), path) : "";
}

const char *software_first_with(struct source *source, const char *folder, const char *prefix, const char *end)
{
    FOR_NAMES (name, source_list(source, "%s", folder))
        if (text_begins(name, prefix) && text_ends(name, end))
            return name;
    return "";
}

/* From the installed header: the file name of a wheel's library has only the ABI number. */
static json_t *read_header(struct source_text file)
{
    struct piece major = parse_define(file.text, "NVSHMEM_VENDOR_MAJOR_VERSION");
    struct piece minor = parse_define(file.text, "NVSHMEM_VENDOR_MINOR_VERSION");
    struct piece patch = parse_define(file.text, "NVSHMEM_VENDOR_PATCH_VERSION");

    if (!major.n || !minor.n || !patch.n || major.n + minor.n + patch.n > 30)
        return json_string("");
    return json_sprintf("%.*s.%.*s.%.*s", (int)major.n, major.text, (int)minor.n, minor.text, (int)patch.n, patch.text);
}

static const char *header_version(struct source *source, const char *home)
{
    return source_fact_text(source_fact(source, "version", read_header, "%s/include/non_abi/nvshmem_version.h", home));
}

/* The parent folder of lib or lib64; "" if the library is in a folder with another name. */
static const char *home_of(struct source *source, const char *path)
{
    const char *folder = libs_folder_of(source, path), *name = text_base(folder);

    return strcmp(name, "lib") == 0 || strcmp(name, "lib64") == 0 ? libs_folder_of(source, folder) : "";
}

const char *software_nvshmem_version(struct source *source, const char *path)
{
    struct source_text real = source_resolve(source, "%s", path);
    const char *version = libs_file_version(real.state == SOURCE_OK ? real.text : path);
    const char *home = home_of(source, path), *site = software_without(source, home, "/nvidia/nvshmem");

    if (!*version && *home)
        version = header_version(source, home);
    /* From the wheel: <site>/nvidia/nvshmem/lib/<library> and <site>/nvidia_nvshmem_cu12-3.4.5.dist-info. */
    return *version || !*site ? version : python_version(source, site, "nvidia_nvshmem_cu");
}

/* Path of a library that is installed although the linker does not find it; "" if there is none. */
static const char *find_installed(struct source *source)
{
    const char *const homes[] = {source_env(source, "NVSHMEM_HOME"), source_env(source, "NVSHMEM_DIR"),
                                 "/opt/deepep/nvshmem", "/usr/local/nvshmem", "/usr/local/nvidia"};
    static const char *const libs[] = {"lib", "lib64"};

    for (size_t i = 0; i < COUNT(homes); i++) {
        for (size_t j = 0; homes[i] && *homes[i] == '/' && j < COUNT(libs); j++)
            if (source_elf(source, "%s/%s/" HOST, homes[i], libs[j]).state == SOURCE_OK)
                return source_printf(source, "%s/%s/" HOST, homes[i], libs[j]);
    }
    return "";
}

/* Through LD_PRELOAD and ld.so's search path, or through the RUNPATH of DeepEP's extension. */
static struct lib_location find_host(struct source *source, const struct software_deepep *deepep)
{
    struct libs_env env = libs_env_of(source);
    struct lib_location location = libs_find(source, &env, HOST);

    if (deepep->imported < 0 || (location.state == SOURCE_OK && strcmp(location.found_by, "LD_PRELOAD") == 0))
        return location;
    return libs_loaded_with(source, env, deepep->copies[deepep->imported].extension, HOST, location);
}

void software_read_nvshmem(struct source *source, const struct python *python, const struct software_deepep *deepep,
                           struct software_nvshmem *nvshmem)
{
    struct libs_env env = libs_env_of(source), plain = {.library_path = "", .preload = ""};
    const char *path, *folder, *name;
    struct lib_location wheel = {.path = python_find(source, python, "nvidia/nvshmem/lib/" HOST)};

    nvshmem->host = find_host(source, deepep);
    path = nvshmem->host.state == SOURCE_OK ? nvshmem->host.path : find_installed(source);
    nvshmem->home = home_of(source, path);
    nvshmem->version = *path ? software_nvshmem_version(source, path) : "";
    folder = libs_folder_of(source, path);
    name = *folder ? software_first_with(source, folder, "nvshmem_transport_ibgda.so.", "") : "";
    nvshmem->transport_ibgda = *name ? source_printf(source, "%s/%s", folder, name) : "";
    nvshmem->bundled =
        libs_loaded_with(source, plain, python_find(source, python, "torch/lib/libtorch_cuda.so"), HOST, wheel).path;
    nvshmem->bundled_version = *nvshmem->bundled ? software_nvshmem_version(source, nvshmem->bundled) : "";
    nvshmem->gdrapi = libs_find(source, &env, "libgdrapi.so.2");
}

bool software_has_cpu_assisted_ibgda(const struct software_nvshmem *nvshmem)
{
    return *nvshmem->version && strverscmp(nvshmem->version, "3.4.5") >= 0;
}
