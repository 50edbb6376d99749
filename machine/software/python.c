/* SPDX-License-Identifier: Apache-2.0 */
/*
 * python.c - Python's search path as far as it can be determined from files: PYTHONPATH, then the site folders of the
 * virtual environment or of the system, each followed by the folders in its .pth files (module site in Python's
 * documentation) and of packages installed with pip install -e.
 */
#include "common/json.h"
#include "read_software.h"

#include <limits.h>
#include <string.h>

#define MAX_PTH 64 /* .pth files of one folder */

/* Where common install scripts put DeepEP without adding it to Python's path. */
static const char *const installer_folders[] = {"/opt/deepep/python", "/opt/deepep/DeepEP", "/opt/deepep/source",
                                                "/usr/local/nvidia/deepep", "/workspace/DeepEP"};

static void add_folder(struct source *source, struct python *python, const char *path, bool on_path)
{
    if (*path != '/' || python->n == PYTHON_MAX_FOLDERS || strlen(path) >= PATH_MAX - 256)
        return;
    for (size_t i = 0; i < python->n; i++)
        if (strcmp(python->folders[i].path, path) == 0)
            return;
    if (source_is_folder(source_stat(source, "%s", path)))
        python->folders[python->n++] = (struct python_folder){.path = path, .on_path = on_path};
}

/* Lines of a .pth file are folders, relative to the file's folder; "import ..." is code. */
static json_t *read_pth(struct source_text file)
{
    json_t *folders = json_array();

    FOR_PIECES (line, file.text, "\n") {
        while (line.n && strchr(" \t\r", line.text[line.n - 1]))
            line.n--;
        if (line.n && line.n < PATH_MAX && *line.text != '#' &&
            !text_begins_any(line.text, TEXTS("import ", "import\t")))
            json_array_append_new(folders, json_stringn_nocheck(line.text, line.n));
    }
    return folders;
}

/* MAPPING = {'deep_ep': '/workspace/DeepEP/deep_ep'} in the finder that setuptools writes for pip install -e. */
static json_t *read_finder(struct source_text file)
{
    json_t *folders = json_array();
    const char *at = strstr(file.text, "\nMAPPING"), *end = at ? strchr(at, '}') : NULL;

    while (end && (at = strstr(at, "': '/")) && at < end) {
        const char *path = at + strlen("': '"), *last;
        size_t n = strcspn(path, "'");

        at = path + n;
        last = memrchr(path, '/', n);
        json_array_append_new(folders, json_stringn_nocheck(path, (size_t)(last - path)));
    }
    return folders;
}

static void add_pth(struct source *source, struct python *python, const char *folder, const char *file, bool on_path)
{
    struct source_answer folders = text_ends(file, ".pth")
                                       ? source_fact(source, "pth", read_pth, "%s/%s", folder, file)
                                       : source_fact(source, "editable", read_finder, "%s/%s", folder, file);

    for (size_t i = 0; i < json_array_size(folders.value); i++) {
        const char *name = json_text_at(folders.value, i);

        name = piece_copy(source, (struct piece){.text = name, .n = strlen(name)});
        if (strncmp(name, "./", 2) == 0)
            name += 2;
        add_folder(source, python, *name == '/' ? name : source_printf(source, "%s/%s", folder, name), on_path);
    }
}

static void add_site(struct source *source, struct python *python, const char *folder, bool on_path)
{
    size_t before = python->n, n_files = 0;
    struct source_names names;

    /* The distribution epkit-deep-ep puts this folder before its own (python/wheels.py). */
    if (source_stat(source, "%s/epkit_deep_ep.pth", folder).state == SOURCE_OK)
        add_folder(source, python, source_printf(source, "%s/epkit_deep_ep", folder), on_path);
    add_folder(source, python, folder, on_path);
    if (python->n == before)
        return;
    names = source_list(source, "%s", folder);
    for (size_t i = 0; i < names.n && n_files < MAX_PTH; i++)
        if ((text_ends(names.names[i], ".pth") && strlen(names.names[i]) > 4) ||
            (text_begins(names.names[i], "__editable___") && text_ends(names.names[i], "_finder.py"))) {
            add_pth(source, python, folder, names.names[i], on_path);
            n_files++;
        }
}

/* <prefix>/lib/python3.<minor>/<site>, the latest Python first. */
static void add_prefix(struct source *source, struct python *python, const char *lib, const char *site, bool on_path)
{
    struct source_names names = source_list(source, "%s", lib);

    for (size_t i = names.n; i-- > 0;)
        if (strncmp(names.names[i], "python3.", 8) == 0)
            add_site(source, python, source_printf(source, "%s/%s/%s", lib, names.names[i], site), on_path);
}

static void add_pythonpath(struct source *source, struct python *python)
{
    FOR_PIECES (folder, source_env(source, "PYTHONPATH"), ":") {
        while (folder.n > 1 && folder.text[folder.n - 1] == '/')
            folder.n--;
        if (folder.n && folder.n < PATH_MAX)
            add_folder(source, python, source_printf(source, "%.*s", (int)folder.n, folder.text), true);
    }
}

READER_BOOL(read_venv, piece_is(parse_field(file.text, "include-system-site-packages", '='), "true"))

void software_read_python(struct source *source, struct python *python)
{
    const char *environment = source_env(source, "VIRTUAL_ENV"), *home = source_env(source, "HOME");
    bool is_system = true;

    python->n = 0;
    add_pythonpath(source, python);
    if (!environment || !*environment)
        environment = source_env(source, "CONDA_PREFIX");
    if (environment && *environment == '/') {
        add_prefix(source, python, source_printf(source, "%s/lib", environment), "site-packages", true);
        /* A virtual environment hides the packages of the system unless it was created with access to them. */
        is_system =
            source_fact_bool(source_fact(source, "with-system-packages", read_venv, "%s/pyvenv.cfg", environment));
    }
    if (home && *home == '/')
        add_prefix(source, python, source_printf(source, "%s/.local/lib", home), "site-packages", is_system);
    add_prefix(source, python, "/usr/local/lib", "dist-packages", is_system);
    add_site(source, python, "/usr/lib/python3/dist-packages", is_system);
    add_prefix(source, python, "/usr/local/lib", "site-packages", is_system);
    add_prefix(source, python, "/usr/lib64", "site-packages", is_system);
    add_prefix(source, python, "/usr/lib", "site-packages", is_system);
    add_prefix(source, python, "/opt/conda/lib", "site-packages", is_system);
    for (size_t i = 0; i < COUNT(installer_folders); i++)
        add_folder(source, python, installer_folders[i], false);
}

const char *python_find(struct source *source, const struct python *python, const char *name)
{
    for (size_t i = 0; i < python->n; i++)
        if (source_stat(source, "%s/%s", python->folders[i].path, name).state == SOURCE_OK)
            return source_printf(source, "%s/%s", python->folders[i].path, name);
    return "";
}

/* In "<name><digits>-<version>.dist-info" or "...egg-info": the start and length of the version; 0 for other names. */
static size_t find_version(const char *file, const char *name, const char *suffix, const char **ret_version)
{
    size_t n_name = strlen(name), n_file = strlen(file), n_suffix = strlen(suffix), n;
    const char *at;

    if (strncmp(file, name, n_name) != 0 || n_file < n_suffix || strcmp(file + n_file - n_suffix, suffix) != 0)
        return 0;
    at = file + n_name + strspn(file + n_name, "0123456789");
    if (*at != '-' || at + 1 >= file + n_file - n_suffix)
        return 0;
    *ret_version = at + 1;
    n = (size_t)(file + n_file - n_suffix - *ret_version);
    /* The name of an egg continues with "-py3.12-linux-x86_64". */
    return strcspn(*ret_version, "-") < n ? strcspn(*ret_version, "-") : n;
}

/* The package description follows an empty line and may contain lines of the same form. */
static json_t *read_metadata(struct source_text file)
{
    const char *end = memmem(file.text, file.bytes, "\n\n", 2);
    struct piece version = parse_field(file.text, "Version", ':');

    return end && version.text > end ? json_string("") : json_stringn_nocheck(version.n ? version.text : "", version.n);
}

static const char *metadata_version(struct source *source, const char *path)
{
    return source_fact_text(source_fact(source, "version", read_metadata, "%s", path));
}

const char *python_version(struct source *source, const char *folder, const char *name)
{
    struct source_names names = source_list(source, "%s", folder);
    const char *version = "", *text;

    for (size_t i = 0; i < names.n && !*version; i++) {
        size_t n = find_version(names.names[i], name, ".dist-info", &text);

        if (n) {
            version = metadata_version(source, source_printf(source, "%s/%s/METADATA", folder, names.names[i]));
        } else if ((n = find_version(names.names[i], name, ".egg-info", &text)) != 0) {
            version = metadata_version(source, source_printf(source, "%s/%s/PKG-INFO", folder, names.names[i]));
        }
        if (n && !*version)
            version = piece_copy(source, (struct piece){.text = text, .n = n});
    }
    if (!*version)
        version = metadata_version(source, source_printf(source, "%s/EGG-INFO/PKG-INFO", folder));
    if (!*version)
        version = metadata_version(source, source_printf(source, "%s/%s.egg-info/PKG-INFO", folder, name));
    return version;
}
