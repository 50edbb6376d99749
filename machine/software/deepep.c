/* SPDX-License-Identifier: Apache-2.0 */
/* deepep.c - the copies of DeepEP on a machine, and which of them Python imports. */
#include "software/parse.h"
#include "software/read.h"

#include <string.h>

/* The module that is compiled: deep_ep_cpp.cpython-312-x86_64-linux-gnu.so; "" none. */
static const char *find_extension(struct root *root, const char *folder)
{
    struct root_names names = root_list(root, "%s", folder);

    for (size_t i = 0; i < names.n; i++) {
        size_t length = strlen(names.names[i]);

        if (strncmp(names.names[i], "deep_ep_cpp", 11) == 0 && length > 3 &&
            strcmp(names.names[i] + length - 3, ".so") == 0)
            return root_printf(root, "%s/%s", folder, names.names[i]);
    }
    return "";
}

/* "1.2.1" of a line __version__ = "1.2.1" */
static const char *version_in_package(struct root *root, const char *folder)
{
    struct piece value = parse_field(root_read(root, "%s/deep_ep/__init__.py", folder).text, "__version__", '=');

    if (value.n < 2 || (*value.text != '"' && *value.text != '\''))
        return "";
    return piece_keep(root, (struct piece){.text = value.text + 1, .n = strcspn(value.text + 1, "\"'\n")});
}

static bool is_known(struct root *root, const struct stack_deepep *deepep, const char *real)
{
    for (int i = 0; i < deepep->n; i++)
        if (strcmp(root_resolve(root, "%s", deepep->copies[i].folder).text, real) == 0)
            return true;
    return false;
}

static void add_copy(struct root *root, struct stack_deepep *deepep, const struct python_folder *folder)
{
    struct stack_copy *copy = &deepep->copies[deepep->n];
    struct root_text buffer = root_read(root, "%s/deep_ep/buffer.py", folder->path);
    struct parse_buffer facts = parse_buffer_py(buffer.text);

    *copy = (struct stack_copy){
        .folder = root_printf(root, "%s/deep_ep", folder->path),
        .version = python_version(root, folder->path, "deep_ep"),
        .extension = find_extension(root, folder->path),
        .on_path = folder->on_path,
        .is_source = root_stat(root, "%s/setup.py", folder->path).state == ROOT_OK &&
                     root_is_folder(root_stat(root, "%s/csrc", folder->path)),
        .buffer = buffer.state,
        .defines_mapping = facts.defines_mapping,
        .calls_mapping = facts.calls_mapping,
        .decorator_stolen = facts.decorator_stolen,
        .hash = root_hash(root, root_printf(root, "%s/deep_ep/buffer.py", folder->path)),
    };
    if (!*copy->version)
        copy->version = version_in_package(root, folder->path);
    deepep->n++;
}

void stack_read_deepep(struct root *root, const struct python *python, struct stack_deepep *deepep)
{
    struct stack_copy *imported;

    deepep->imported = -1;
    for (size_t i = 0; i < python->n && deepep->n < STACK_MAX_COPIES; i++) {
        const char *path = python->folders[i].path;
        struct root_text real;

        if (root_stat(root, "%s/deep_ep/__init__.py", path).state != ROOT_OK)
            continue;
        real = root_resolve(root, "%s/deep_ep", path);
        if (real.state == ROOT_OK && is_known(root, deepep, real.text))
            continue;
        if (deepep->imported < 0 && python->folders[i].on_path)
            deepep->imported = deepep->n;
        add_copy(root, deepep, &python->folders[i]);
    }
    if (deepep->imported < 0)
        return;
    imported = &deepep->copies[deepep->imported];
    /* The package imports it by name, so it may lie in another folder of the path. */
    for (size_t i = 0; i < python->n && !*imported->extension; i++)
        if (python->folders[i].on_path)
            imported->extension = find_extension(root, python->folders[i].path);
    deepep->mapping_active = imported->defines_mapping && imported->calls_mapping && !imported->decorator_stolen;
}
