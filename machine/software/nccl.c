/* SPDX-License-Identifier: Apache-2.0 */
/* nccl.c - NCCL, the network plugin that it loads, and gIB. */
#include "read_software.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#define LIB "libnccl.so.2"
#define GIB "/usr/local/gib"

/* The library of a wheel has only the ABI number in its name; its version is that of the package. */
const char *software_nccl_version(struct source *source, const char *path)
{
    struct source_text real = source_resolve(source, "%s", path);
    const char *version = libs_file_version(real.state == SOURCE_OK ? real.text : path);
    const char *site = software_without(source, path, "/nvidia/nccl/lib/" LIB);

    return *version || !*site ? version : python_version(source, site, "nvidia_nccl_cu");
}

bool software_is_internal_net(const char *net)
{
    return strcasecmp(net, "IB") == 0 || strcasecmp(net, "Socket") == 0;
}

/*
 * According to NCCL's documentation, NCCL_NET_PLUGIN=x names the library libnccl-net-x.so, or x itself if that is a
 * file; "none" means no plugin; if not set, it is libnccl-net.so. NCCL_NET only selects one of the networks that a
 * plugin offers.
 */
static void find_plugin(struct source *source, struct software_nccl *nccl)
{
    struct libs_env env = libs_env_of(source);
    const char *plugin = source_env(source, "NCCL_NET_PLUGIN"), *net = source_env(source, "NCCL_NET");

    nccl->plugin_name = "";
    nccl->plugin = libs_find(source, &env, "libnccl-net.so");
    if (!plugin || !*plugin) {
        if (nccl->plugin.state != SOURCE_ABSENT || (net && *net))
            nccl->plugin_name = "libnccl-net.so";
        return;
    }
    nccl->plugin = (struct lib_location){.state = SOURCE_ABSENT, .path = "", .real = "", .found_by = ""};
    if (strcmp(plugin, "none") == 0 || strlen(plugin) > 1024)
        return;
    nccl->plugin_name = strstr(plugin, ".so") ? source_printf(source, "%s", plugin)
                                              : source_printf(source, "libnccl-net-%s.so", plugin);
    nccl->plugin = libs_find(source, &env, nccl->plugin_name);
}

/* gIB has one file for each machine type; the types differ by GPU. */
static const char *find_tuner_config(struct source *source, const struct topo *topo)
{
    static const char *const pairs[][2] = {{"GB200", "a4x"}, {"GB300", "a4x"}, {"B200", "a4"}, {"H200", "a3u"}};
    const char *name = topo->n_gpus ? topo->gpus[0].name : "";

    for (size_t i = 0; i < COUNT(pairs); i++) {
        const char *path = GIB "/configs/tuner_config_";

        if (!strstr(name, pairs[i][0]))
            continue;
        path = source_printf(source, "%s%s.txtpb", path, pairs[i][1]);
        return source_stat(source, "%s", path).state == SOURCE_OK ? path : "";
    }
    return "";
}

/*
 * --- the settings of the installed gIB's script; values differ by release and machine type ---
 *
 * The script is read, never run: lines `export NAME=VALUE` and `unset NAME` with plain values. A value with an
 * expansion, and a name that is set to different values in different cases, are marked unclear.
 */

#define SCRIPT "/scripts/set_nccl_env.sh"
#define NAME_LETTERS "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
#define VALUE_LETTERS "abcdefghijklmnopqrstuvwxyz" NAME_LETTERS "./,:=^+-"

static bool has_known_prefix(const char *name, size_t n)
{
    return n > 5 && n < 128 && (strncmp(name, "NCCL_", 5) == 0 || strncmp(name, "TORCH_NCCL_", 11) == 0);
}

/* What a name is set to: a string; null: the script unsets it; false: not known. Takes `value`. */
static void record_setting(json_t *settings, const char *name, size_t n, json_t *value)
{
    char key[128];
    const json_t *known;

    snprintf(key, sizeof(key), "%.*s", (int)n, name);
    known = json_object_get(settings, key);
    if (known && !json_equal(known, value)) {
        json_decref(value);
        value = json_false();
    }
    if (known || json_object_size(settings) < SOFTWARE_MAX_SETTINGS)
        json_object_set_new_nocheck(settings, key, value);
    else
        json_decref(value);
}

/* Reads one word after `export` or `unset`; returns where the next one begins. */
static const char *read_word(json_t *settings, const char *word, bool is_export)
{
    size_t n = strspn(word, NAME_LETTERS), n_value = 0;
    const char *value = word + n + 1, quote = word[n] == '=' && word[n] ? *value : '\0';
    bool is_quoted = quote == '"' || quote == '\'', is_clear;

    if (!is_export || word[n] != '=') {
        if (!is_export && has_known_prefix(word, n) && strchr(" \t\r\n;", word[n]))
            record_setting(settings, word, n, json_null());
        return word + n + strcspn(word + n, " \t\n");
    }
    value += is_quoted;
    n_value = strspn(value, VALUE_LETTERS);
    is_clear = is_quoted ? value[n_value] == quote : strchr(" \t\r\n;", value[n_value]) != NULL;
    if (has_known_prefix(word, n))
        record_setting(settings, word, n, is_clear ? json_stringn(value, n_value) : json_false());
    return value + n_value + strcspn(value + n_value, " \t\n");
}

static json_t *read_script(struct source_text file)
{
    json_t *settings = json_object();

    for (const char *at = file.text; *at; at += strcspn(at, "\n"), at += *at == '\n') {
        bool is_export;
        const char *word;

        at += strspn(at, " \t");
        is_export = strncmp(at, "export ", 7) == 0;
        if (!is_export && strncmp(at, "unset ", 6) != 0)
            continue;
        for (word = at + (is_export ? 7 : 6); *word && *word != '\n' && *word != '#';) {
            word += strspn(word, " \t");
            if (*word && *word != '\n' && *word != '#')
                word = read_word(settings, word, is_export);
        }
    }
    return settings;
}

static void read_gib(struct source *source, struct software_nccl *nccl)
{
    struct source_answer script = source_fact(source, "gib-settings", read_script, "%s" SCRIPT, nccl->gib);

    nccl->script = "";
    nccl->n_settings = 0;
    FOR_MEMBERS (name, value, *nccl->gib ? script.value : NULL) {
        const char *text = json_string_value(value);

        /* A snapshot may come from an untrusted source, and what is set here becomes lines of a shell script. */
        if (!has_known_prefix(name, strlen(name)) || name[strspn(name, NAME_LETTERS)] ||
            (text ? text[strspn(text, VALUE_LETTERS)] != '\0' : !json_is_null(value)))
            continue;
        if (nccl->n_settings < SOFTWARE_MAX_SETTINGS)
            nccl->settings[nccl->n_settings++] = (struct software_setting){name, text};
    }
    if (nccl->n_settings > 0)
        nccl->script = source_printf(source, "%s" SCRIPT, nccl->gib);
}

void software_read_nccl(struct source *source, const struct topo *topo, const struct python *python,
                        struct software_nccl *nccl)
{
    struct libs_env env = libs_env_of(source);

    nccl->lib = libs_find(source, &env, LIB);
    nccl->version = nccl->lib.state == SOURCE_OK ? software_nccl_version(source, nccl->lib.path) : "";
    nccl->bundled = python_find(source, python, "nvidia/nccl/lib/" LIB);
    nccl->bundled_version = *nccl->bundled ? software_nccl_version(source, nccl->bundled) : "";
    /* Settings for a plugin that is not installed would prevent NCCL from starting. */
    nccl->gib = source_is_folder(source_stat(source, GIB)) &&
                        source_stat(source, GIB "/lib64/libnccl-net.so").state != SOURCE_ABSENT
                    ? GIB
                    : "";
    nccl->tuner_config = *nccl->gib ? find_tuner_config(source, topo) : "";
    read_gib(source, nccl);
    find_plugin(source, nccl);
}

/* NAME=VALUE, one a line, as NCCL reads it: of several lines for one name the first counts. */
static json_t *read_conf(struct source_text file)
{
    json_t *settings = json_object();

    for (const char *at = file.text; *at; at += strcspn(at, "\n"), at += *at == '\n') {
        size_t n = strspn(at, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"), n_value;
        char name[128];

        if (at[n] != '=' || n < 6 || n >= sizeof(name) || strncmp(at, "NCCL_", 5) != 0)
            continue;
        snprintf(name, sizeof(name), "%.*s", (int)n, at);
        n_value = strcspn(at + n + 1, "\r\n");
        if (!json_object_get(settings, name) && n_value < 1024)
            json_object_set_new_nocheck(settings, name, json_stringn(at + n + 1, n_value));
    }
    return settings;
}

const char *software_nccl_conf(struct source *source, const char *name, const char **ret_file)
{
    const char *own = source_env(source, "NCCL_CONF_FILE"), *home = source_env(source, "HOME");
    const char *files[] = {own && *own == '/' ? own : "", "/etc/nccl.conf"};

    if ((!own || !*own) && home && *home == '/')
        files[0] = source_printf(source, "%s/.nccl.conf", strcmp(home, "/") == 0 ? "" : home);
    for (size_t i = 0; i < COUNT(files) && text_begins(name, "NCCL_"); i++) {
        struct source_answer conf = {.value = NULL};
        const char *value;

        if (*files[i])
            conf = source_fact(source, "nccl-conf", read_conf, "%s", files[i]);
        value = json_string_value(json_object_get(conf.value, name));
        if (!value)
            continue;
        *ret_file = files[i];
        return source_printf(source, "%s", value);
    }
    return "";
}
