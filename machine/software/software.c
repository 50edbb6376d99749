/* SPDX-License-Identifier: Apache-2.0 */
/* software.c - reads the software of a machine. */
#include "read_software.h"

#include <string.h>

static const char *find_cuda(struct source *source)
{
    const char *const homes[] = {source_env(source, "CUDA_HOME"), source_env(source, "CUDA_PATH"), "/usr/local/cuda"};
    struct source_names names;

    for (size_t i = 0; i < COUNT(homes); i++)
        if (homes[i] && *homes[i] == '/' && source_is_folder(source_stat(source, "%s", homes[i])))
            return source_printf(source, "%s", homes[i]);
    names = source_list(source, "/usr/local");
    for (size_t i = names.n; i-- > 0;)
        if (strncmp(names.names[i], "cuda-", 5) == 0 &&
            source_is_folder(source_stat(source, "/usr/local/%s", names.names[i])))
            return source_printf(source, "/usr/local/%s", names.names[i]);
    return "";
}

static const char *list_python(struct source *source, const struct python *python)
{
    const char *list = "";

    for (size_t i = 0; i < python->n; i++)
        if (python->folders[i].on_path)
            list = source_printf(source, "%s%s%s", list, *list ? ", " : "", python->folders[i].path);
    return list;
}

/* The PyTorch that Python imports; "" if there is none. */
static void find_torch(struct source *source, const struct python *python, struct software *software)
{
    const char *lib = python_find(source, python, "torch/lib");

    software->torch = software_without(source, lib, "/lib");
    software->torch_version =
        *software->torch ? python_version(source, software_without(source, software->torch, "/torch"), "torch") : "";
}

struct software *software_read(struct source *source, const struct topo *topo)
{
    struct software *software = source_alloc(source, sizeof(*software));
    struct python *python = source_alloc(source, sizeof(*python));

    software->source = source;
    os_read(source, &software->os);
    software_read_driver(source, topo, &software->driver);
    software_read_verbs(source, &software->verbs);
    software_read_python(source, python);
    software_read_deepep(source, python, &software->deepep);
    software_read_nvshmem(source, python, &software->deepep, &software->nvshmem);
    software_read_nccl(source, topo, python, &software->nccl);
    software->cuda_home = find_cuda(source);
    software->python_paths = list_python(source, python);
    find_torch(source, python, software);
    software_read_stacks(python, software);
    return software;
}
