/* SPDX-License-Identifier: Apache-2.0 */
/* deepep.c - the copies of DeepEP on a machine, and which of them Python imports. */
#include "software/parse.h"
#include "software/read.h"

#include <stdlib.h>
#include <string.h>

/* The module that is compiled: deep_ep_cpp.cpython-312-x86_64-linux-gnu.so; "" none. */
static const char *find_extension(struct root *root, const char *folder)
{
    struct root_names names = root_list(root, "%s", folder);

    for (size_t i = 0; i < names.n; i++)
        if (text_begins(names.names[i], "deep_ep_cpp") && text_ends(names.names[i], ".so"))
            return root_printf(root, "%s/%s", folder, names.names[i]);
    return "";
}

/* "1.2.1" of a line __version__ = "1.2.1" */
static json_t *read_version(const char *text, size_t bytes)
{
    struct piece value = parse_field(text, "__version__", '=');

    (void)bytes;
    if (value.n < 2 || (*value.text != '"' && *value.text != '\''))
        return json_string("");
    return json_stringn_nocheck(value.text + 1, strcspn(value.text + 1, "\"'\n"));
}

static json_t *read_buffer(const char *text, size_t bytes)
{
    struct parse_buffer facts = parse_buffer_py(text);

    return json_pack("{s:b, s:b, s:b, s:I}", "defines_mapping", facts.defines_mapping, "calls_mapping",
                     facts.calls_mapping, "decorator_stolen", facts.decorator_stolen, "hash",
                     (json_int_t)root_hash(text, bytes));
}

/* Snapshots that were saved before there were facts have the shape of the program, and the hash of its text apart. */
static uint64_t hash_of(struct root *root, const char *path, const json_t *facts)
{
    const char *digits =
        root_is_live(root) ? NULL
                           : json_string_value(root_ask(root, root_printf(root, "hash:%s", path), NULL, NULL, 0).value);

    return digits ? strtoull(digits, NULL, 16) : (uint64_t)json_integer_value(json_object_get(facts, "hash"));
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
    const char *path = root_printf(root, "%s/deep_ep/buffer.py", folder->path);
    struct root_answer buffer = root_fact(root, "deepep-buffer", read_buffer, "%s", path);

    *copy = (struct stack_copy){
        .folder = root_printf(root, "%s/deep_ep", folder->path),
        .version = python_version(root, folder->path, "deep_ep"),
        .extension = find_extension(root, folder->path),
        .on_path = folder->on_path,
        .is_source = root_stat(root, "%s/setup.py", folder->path).state == ROOT_OK &&
                     root_is_folder(root_stat(root, "%s/csrc", folder->path)),
        .buffer = buffer.state,
        .defines_mapping = json_is_true(json_object_get(buffer.value, "defines_mapping")),
        .calls_mapping = json_is_true(json_object_get(buffer.value, "calls_mapping")),
        .decorator_stolen = json_is_true(json_object_get(buffer.value, "decorator_stolen")),
        .hash = hash_of(root, path, buffer.value),
    };
    if (!*copy->version)
        copy->version =
            root_fact_text(root_fact(root, "version", read_version, "%s/deep_ep/__init__.py", folder->path));
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
