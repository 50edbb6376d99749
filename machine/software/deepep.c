/* SPDX-License-Identifier: Apache-2.0 */
/* deepep.c - the copies of DeepEP on a machine, and which of them Python imports. */
#include "read_software.h"

#include <stdlib.h>
#include <string.h>

/* A compiled module: deep_ep_cpp.cpython-312-x86_64-linux-gnu.so; "" if there is none. */
static const char *find_module(struct source *source, const char *folder, const char *beginning)
{
    const char *name = software_first_with(source, folder, beginning, ".so");

    return *name ? source_printf(source, "%s/%s", folder, name) : "";
}

/* Beside the package in version 1, in it since version 2. */
static const char *find_extension(struct source *source, const char *folder)
{
    const char *module = find_module(source, folder, "deep_ep_cpp");

    return *module ? module : find_module(source, source_printf(source, "%s/deep_ep", folder), "_C.");
}

/* "1.2.1" of a line __version__ = "1.2.1" */
static json_t *read_version(struct source_text file)
{
    struct piece value = parse_field(file.text, "__version__", '=');

    if (value.n < 2 || (*value.text != '"' && *value.text != '\''))
        return json_string("");
    return json_stringn_nocheck(value.text + 1, strcspn(value.text + 1, "\"'\n"));
}

static json_t *read_buffer(struct source_text file)
{
    struct parse_buffer facts = parse_buffer_py(file.text);

    return json_pack("{s:b, s:b, s:b, s:I}", "defines_mapping", facts.defines_mapping, "calls_mapping",
                     facts.calls_mapping, "decorator_stolen", facts.decorator_stolen, "hash",
                     (json_int_t)text_hash(file.text, file.bytes));
}

/* Snapshots saved before facts existed contain the structure of the program, and the hash of its text separately. */
static uint64_t hash_of(struct source *source, const char *path, const json_t *facts)
{
    const char *digits =
        source_is_live(source)
            ? NULL
            : json_string_value(source_query(source, source_printf(source, "hash:%s", path), NULL, NULL, 0).value);

    return digits ? strtoull(digits, NULL, 16) : (uint64_t)json_integer_value(json_object_get(facts, "hash"));
}

static void add_copy(struct source *source, struct software_deepep *deepep, const struct python_folder *folder)
{
    struct software_copy *copy = &deepep->copies[deepep->n];
    const char *path = source_printf(source, "%s/deep_ep/buffer.py", folder->path);
    struct source_answer buffer = source_fact(source, "deepep-buffer", read_buffer, "%s", path);

    *copy = (struct software_copy){
        .folder = source_printf(source, "%s/deep_ep", folder->path),
        .version = python_version(source, folder->path, "deep_ep"),
        .extension = find_extension(source, folder->path),
        .on_path = folder->on_path,
        .is_source = source_stat(source, "%s/setup.py", folder->path).state == SOURCE_OK &&
                     source_is_folder(source_stat(source, "%s/csrc", folder->path)),
        .buffer = buffer.state,
        .defines_mapping = json_is_true(json_object_get(buffer.value, "defines_mapping")),
        .calls_mapping = json_is_true(json_object_get(buffer.value, "calls_mapping")),
        .decorator_stolen = json_is_true(json_object_get(buffer.value, "decorator_stolen")),
        .hash = hash_of(source, path, buffer.value),
    };
    if (!*copy->version)
        copy->version =
            source_fact_text(source_fact(source, "version", read_version, "%s/deep_ep/__init__.py", folder->path));
    deepep->n++;
}

bool software_maps_devices(const struct software_copy *copy)
{
    return copy->defines_mapping && copy->calls_mapping && !copy->decorator_stolen;
}

/* UCCL has a package of this name as well, and needs nothing of what DeepEP needs. */
READER_BOOL(read_is_uccl, strstr(file.text, "from uccl"))

void software_read_deepep(struct source *source, const struct python *python, struct software_deepep *deepep)
{
    struct software_copy *imported;
    bool is_other = false; /* deep_ep.py comes first, which is epkit's, or that of UCCL */

    deepep->imported = -1;
    for (size_t i = 0; i < python->n && deepep->n < SOFTWARE_MAX_COPIES; i++) {
        const char *path = python->folders[i].path;
        bool is_package = source_stat(source, "%s/deep_ep/__init__.py", path).state == SOURCE_OK,
             is_uccl = is_package &&
                       source_fact_bool(source_fact(source, "is-uccl", read_is_uccl, "%s/deep_ep/__init__.py", path));
        struct source_text real;

        if (!is_package || is_uccl) {
            is_other = is_other || (python->folders[i].on_path &&
                                    (is_uccl || source_stat(source, "%s/deep_ep.py", path).state == SOURCE_OK));
            continue;
        }
        real = source_resolve(source, "%s/deep_ep", path);
        if (real.state == SOURCE_OK &&
            ANY_OF(k, deepep->n, strcmp(source_resolve(source, "%s", deepep->copies[k].folder).text, real.text) == 0))
            continue;
        if (deepep->imported < 0 && !is_other && python->folders[i].on_path)
            deepep->imported = deepep->n;
        add_copy(source, deepep, &python->folders[i]);
    }
    if (deepep->imported < 0)
        return;
    imported = &deepep->copies[deepep->imported];
    /* The package imports the extension by name, so it may be in another folder of the path. */
    for (size_t i = 0; i < python->n && !*imported->extension; i++)
        if (python->folders[i].on_path)
            imported->extension = find_module(source, python->folders[i].path, "deep_ep_cpp");
    deepep->mapping_active = software_maps_devices(imported);
}
