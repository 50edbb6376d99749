/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub.c - which entries get into a snapshot, and by which rule.
 *
 * A new file to read needs a row here; without one it is not in snapshots. For a text without a strict format a fact is
 * saved (source_fact()), which needs a row only if it holds text. tests/unit/test_source_deny.c runs identifiers of
 * every type through every row; tests/unit/test_source_scrub.c has a machine full of them, to which the new file is to
 * be added as well.
 */
#include "scrub.h"
#include "common/text.h"

#include "base/error.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct row {
    const char *pattern; /* scrub_match() */
    scrub_rule *rule;
};

#define PCI "/sys/bus/pci/devices/*/"
#define RDMA "/sys/class/infiniband/*/"
#define NET "/sys/class/net/*/"

/* The first match counts. */
static const struct row file_rows[] = {
    {PCI "config", scrub_pci_config},
    {PCI "class", scrub_attribute},
    {PCI "vendor", scrub_attribute},
    {PCI "device", scrub_attribute},
    {PCI "numa_node", scrub_attribute},
    {PCI "local_cpulist", scrub_attribute},
    {PCI "current_link_*", scrub_attribute},
    {PCI "max_link_*", scrub_attribute},
    {"/sys/devices/system/node/**/meminfo", scrub_numbers},
    {"/sys/devices/system/node/**", scrub_attribute},
    {"/sys/class/dmi/id/product_name", scrub_words},
    {"/sys/kernel/iommu_groups/*/type", scrub_attribute},
    {"/sys/module/*/version", scrub_version},
    {RDMA "hca_type", scrub_words},
    {RDMA "node_type", scrub_attribute},
    {RDMA "fw_ver", scrub_version},
    {RDMA "ports/*/state", scrub_attribute},
    {RDMA "ports/*/phys_state", scrub_attribute},
    {RDMA "ports/*/rate", scrub_attribute},
    {RDMA "ports/*/link_layer", scrub_attribute},
    {RDMA "ports/*/gids/*", scrub_gid},
    {RDMA "ports/*/gid_attrs/types/*", scrub_attribute},
    {RDMA "ports/*/gid_attrs/ndevs/*", scrub_words},
    {RDMA "ports/*/counters/*", scrub_counter},
    {RDMA "ports/*/hw_counters/*", scrub_counter},
    {RDMA "device/infiniband_verbs/*/ibdev", scrub_words},
    {"/sys/class/infiniband_verbs/*/ibdev", scrub_words},
    {RDMA "device/net/*/dev_port", scrub_attribute},
    {NET "statistics/*", scrub_counter},
    {NET "operstate", scrub_attribute},
    {NET "mtu", scrub_attribute},
    {NET "speed", scrub_attribute},
    {NET "carrier", scrub_attribute},
    {NET "carrier_down_count", scrub_attribute},
    {NET "bonding/slaves", scrub_words},
    {NET "bonding_slave/mii_status", scrub_attribute},
    {"/sys/class/net/bonding_masters", scrub_words},
    {"/sys/fs/cgroup/cpu.max", scrub_attribute},
    {"/sys/fs/cgroup/cpu/cpu.cfs_*_us", scrub_attribute},
    {"/proc/driver/nvidia/version", scrub_driver},
    {"/proc/driver/nvidia/params", scrub_params},
    {"/proc/driver/nvidia/gpus/*/information", scrub_information},
    {"/proc/self/limits", scrub_numbers},
    {"/proc/self/status", scrub_status},
    {"/proc/self/maps", scrub_maps},
    {"/proc/self/mounts", scrub_mounts},
    {"/proc/meminfo", scrub_numbers},
    {"/proc/cmdline", scrub_cmdline},
    {"/proc/net/route", scrub_route},
    {"/proc/net/ipv6_route", scrub_ipv6_route},
    {"/proc/sys/kernel/osrelease", scrub_release},
    {"/etc/ld.so.conf", scrub_paths},
    {"**/ld.so.conf.d/*.conf", scrub_paths},
    {"/etc/libibverbs.d/*.driver", scrub_paths},
    {"/var/lib/epkit/install/*/journal.jsonl", scrub_journal},
};

static const struct row line_rows[] = {
    {"/proc/cpuinfo", scrub_hypervisor},
};

/* Facts that are or hold text. Of all other facts, booleans and numbers stay. */
static const struct row fact_rows[] = {{"version", scrub_version},
                                       {"packages", scrub_version},
                                       {"nvidia-dwords", scrub_dwords},
                                       {"xids", scrub_event},
                                       {"sxids", scrub_event},
                                       {"gib-settings", scrub_words},
                                       {"nccl-switches", scrub_event},
                                       {"fabric-manager*", scrub_version},
                                       {CACHE_ENVIRONMENT_FACT, scrub_variable}};

/* Folders whose names all stay; in others, names of common software (scrub_name()). */
static const char *const folder_rows[] = {
    "/sys/**",         "/proc/driver/nvidia/**", "/dev/infiniband",        "/dev/nvidia-caps-imex-channels",
    "**/modprobe.d",   "/etc/profile.d",         "/var/lib/epkit/install", "**/ld.so.conf.d",
    "/lib/modules/**", "/usr/lib/modules/**"};

/* Answers whose strings stay, after the general pass. */
static const char *const answer_rows[] = {"nvml", "load:**", "ethtool:**"};

static bool matches_any(const char *const *patterns, size_t n, const char *text)
{
    for (size_t i = 0; i < n; i++)
        if (scrub_match(patterns[i], text))
            return true;
    return false;
}

const char *scrub_pattern(enum cache_kind kind, size_t i)
{
    if (kind == CACHE_FILES && i < COUNT(file_rows))
        return file_rows[i].pattern;
    if (kind == CACHE_LINES && i < COUNT(line_rows))
        return line_rows[i].pattern;
    if (kind == CACHE_FACTS && i < COUNT(fact_rows))
        return fact_rows[i].pattern;
    return NULL;
}

static scrub_rule *rule_of(const struct row *rows, size_t n, const char *path)
{
    for (size_t i = 0; i < n; i++)
        if (scrub_match(rows[i].pattern, path))
            return rows[i].rule;
    return NULL;
}

/* --- strings --- */

/* Applies `rule` to a string; a new value. */
static json_t *apply(struct scrub *scrub, scrub_rule *rule, const char *text, size_t bytes)
{
    char *kept = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&kept, &n);
    json_t *string = NULL;

    if (!out) {
        scrub->failed = true;
        return NULL;
    }
    rule(scrub, text, bytes, out);
    if (fclose(out) == 0 && kept)
        string = json_stringn_nocheck(kept, n);
    if (!string)
        scrub->failed = true;
    free(kept);
    return string;
}

static void path_rule(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    if (bytes == 1)
        fputc('/', out);
    else
        scrub_path(scrub, text, bytes, out);
}

static json_t *scrub_value(struct scrub *scrub, const json_t *value);

/* Facts of an ELF file: $ORIGIN/../x is a path as well, and names of symbol versions are user-chosen. */
static json_t *scrub_member(struct scrub *scrub, const char *key, const json_t *value)
{
    json_t *copy, *item;
    size_t i;

    if (json_is_string(value) && (strcmp(key, "runpath") == 0 || strcmp(key, "rpath") == 0))
        return apply(scrub, scrub_path_list, json_string_value(value), json_string_length(value));
    if (!json_is_array(value) || (strcmp(key, "definitions") != 0 && strcmp(key, "needs") != 0))
        return scrub_value(scrub, value);
    copy = json_array();
    json_array_foreach(value, i, item)
    {
        json_t *kept = json_is_string(item)
                           ? apply(scrub, scrub_parts, json_string_value(item), json_string_length(item))
                           : scrub_member(scrub, key, item);

        if (json_array_append_new(copy, kept) < 0)
            scrub->failed = true;
    }
    return copy;
}

/* The general pass over all strings of any value. Keys belong to a format, not to a machine. */
static json_t *scrub_value(struct scrub *scrub, const json_t *value)
{
    json_t *copy, *item;
    const char *key;
    size_t i;
    int failed = 0;

    switch (json_typeof(value)) {
    case JSON_STRING:
        return apply(scrub, scrub_versions, json_string_value(value), json_string_length(value));
    case JSON_ARRAY:
        copy = json_array();
        json_array_foreach(value, i, item) failed |= json_array_append_new(copy, scrub_value(scrub, item));
        break;
    case JSON_OBJECT:
        copy = json_object();
        json_object_foreach((json_t *)value, key, item)
        {
            if (strstr(key, "serial") || !strcmp(key, "hostname"))
                continue;
            failed |= json_object_set_new_nocheck(copy, key, scrub_member(scrub, key, item));
        }
        break;
    default:
        return json_incref((json_t *)value);
    }
    if (failed)
        scrub->failed = true;
    return copy;
}

/* --- entries --- */

/* Names in a folder: all if a row says so, else only those that identify no owner. */
static json_t *scrub_names(struct scrub *scrub, const char *folder, const json_t *names)
{
    bool all = matches_any(folder_rows, COUNT(folder_rows), folder);
    json_t *copy = json_array(), *name;
    size_t i;

    json_array_foreach(names, i, name)
    {
        const char *text = json_string_value(name);
        char *kept = NULL;
        size_t n = 0;
        FILE *out;

        if (!all && !scrub_is_common(folder, text))
            continue;
        out = open_memstream(&kept, &n);
        if (out)
            scrub_name(scrub, folder, text, out);
        if (!out || fclose(out) != 0 || json_array_append_new(copy, json_stringn_nocheck(kept, n)) < 0)
            scrub->failed = true;
        free(kept);
    }
    return copy;
}

static json_t *scrub_fact(struct scrub *scrub, scrub_rule *rule, const json_t *value);

static json_t *apply_to_variable(struct scrub *scrub, const char *name, const char *value)
{
    char *text;
    int n = asprintf(&text, "%s=%s", name, value);
    json_t *kept;

    if (n < 0) {
        scrub->failed = true;
        return NULL;
    }
    kept = apply(scrub, scrub_variable, text, (size_t)n);
    free(text);
    return kept;
}

static json_t *scrub_facts(struct scrub *scrub, scrub_rule *rule, const json_t *values)
{
    json_t *copy = json_array(), *item;
    size_t i;

    json_array_foreach(values, i, item)
    {
        if (json_array_append_new(copy, scrub_fact(scrub, rule, item)) < 0)
            scrub->failed = true;
    }
    return copy;
}

/* A fact, with only the texts that `rule` allows. */
static json_t *scrub_fact(struct scrub *scrub, scrub_rule *rule, const json_t *value)
{
    json_t *copy, *item, *kept;
    const char *key;

    if (json_is_string(value))
        return rule ? apply(scrub, rule, json_string_value(value), json_string_length(value)) : json_null();
    if (json_is_array(value))
        return rule ? scrub_facts(scrub, rule, value) : json_null();
    if (!json_is_object(value))
        return json_incref((json_t *)value);
    copy = json_object();
    json_object_foreach((json_t *)value, key, item)
    {
        if (rule == scrub_variable && json_is_string(item)) {
            if (!scrub_allows_variable(key))
                continue;
            kept = apply_to_variable(scrub, key, json_string_value(item));
        } else {
            kept = scrub_fact(scrub, rule, item);
        }
        if (json_object_set_new_nocheck(copy, key, kept) < 0)
            scrub->failed = true;
    }
    return copy;
}

/* Attributes of the kernel are one line; the rest is dropped. */
static size_t bytes_that_count(const char *key, scrub_rule *rule, const json_t *entry)
{
    const char *text = json_string_value(entry), *end;
    size_t bytes = json_string_length(entry);

    if (rule == scrub_pci_config || rule == scrub_numbers ||
        (strncmp(key, "/sys/", 5) != 0 && strncmp(key, "/proc/sys/", 10) != 0 && strcmp(key, "/proc/cmdline") != 0))
        return bytes;
    end = memchr(text, '\n', bytes);
    return end ? (size_t)(end - text) + 1 : bytes;
}

/* The scrubbed entry, or NULL if it is omitted. */
static json_t *scrub_entry(struct scrub *scrub, enum cache_kind kind, const char *key, const json_t *entry)
{
    char path[PATH_MAX];
    const char *why;
    scrub_rule *rule = scrub_as_is;
    size_t n = strcspn(key, "\t");

    if (kind == CACHE_LINES && n < sizeof(path)) {
        memcpy(path, key, n);
        path[n] = '\0';
        rule = rule_of(line_rows, COUNT(line_rows), path);
    } else if (kind == CACHE_FILES) {
        rule = rule_of(file_rows, COUNT(file_rows), key);
    } else if (kind == CACHE_FACTS && key[n]) {
        rule = rule_of(fact_rows, COUNT(fact_rows), key + n + 1);
    } else if (kind == CACHE_ANSWERS && !matches_any(answer_rows, COUNT(answer_rows), key)) {
        rule = NULL;
    }
    /* Errors are saved for every path: that it does not exist, or why it could not be read. */
    if (cache_state(entry, &why) != SOURCE_OK)
        return scrub_value(scrub, entry);
    if (kind == CACHE_FACTS)
        return scrub_fact(scrub, rule, entry);
    if (!rule)
        return NULL;
    switch (kind) {
    case CACHE_FILES:
    case CACHE_LINES:
        return apply(scrub, rule, json_string_value(entry), bytes_that_count(key, rule, entry));
    case CACHE_LINKS:
        return apply(scrub, path_rule, json_string_value(entry), json_string_length(entry));
    case CACHE_FOLDERS:
        return scrub_names(scrub, key, entry);
    case CACHE_STATS:
        return json_deep_copy(entry);
    default:
        return scrub_value(scrub, entry);
    }
}

static json_t *scrub_key(struct scrub *scrub, enum cache_kind kind, const char *key)
{
    json_t *scrubbed, *joined;
    size_t n = strcspn(key, "\t");

    if (kind == CACHE_ANSWERS)
        return apply(scrub, scrub_versions, key, strlen(key));
    if (kind != CACHE_LINES && kind != CACHE_FACTS)
        return apply(scrub, path_rule, key, strlen(key));
    /* The search text and the name of the fact are constants of epkit. */
    scrubbed = apply(scrub, path_rule, key, n);
    joined = scrubbed ? json_sprintf("%s%s", json_string_value(scrubbed), key + n) : NULL;
    json_decref(scrubbed);
    return joined;
}

static json_t *scrub_kind(struct scrub *scrub, enum cache_kind kind, const json_t *entries)
{
    json_t *copy = json_object(), *entry;
    const char *key;

    json_object_foreach((json_t *)entries, key, entry)
    {
        json_t *kept = scrub_entry(scrub, kind, key, entry);
        json_t *name = kept ? scrub_key(scrub, kind, key) : NULL;

        if (kept && (!name || json_object_set_nocheck(copy, json_string_value(name), kept) < 0))
            scrub->failed = true;
        json_decref(name);
        json_decref(kept);
    }
    return copy;
}

/* --- registration of known names --- */

static void learn_value(struct scrub *scrub, const json_t *value)
{
    const char *key;
    json_t *item;
    size_t i;

    json_array_foreach(value, i, item) learn_value(scrub, item);
    json_object_foreach((json_t *)value, key, item) learn_value(scrub, item);
    if (json_is_string(value))
        scrub_learn_uuids(scrub, json_string_value(value), json_string_length(value));
}

/* Registers a host also without its domain. */
static void learn_host(struct scrub *scrub, const char *name)
{
    char host[256];

    /* Neither an address nor the port after a name. */
    if (name[strspn(name, "0123456789.:[]abcdefABCDEF\n")] == '\0' && strpbrk(name, ".:"))
        return;
    snprintf(host, sizeof(host), "%.*s", (int)strcspn(name, ":\n"), name);
    scrub_learn_name(scrub, SCRUB_HOST, host);
    host[strcspn(host, ".")] = '\0';
    scrub_learn_name(scrub, SCRUB_HOST, host);
}

static void learn_variable(struct scrub *scrub, const char *name, const char *value)
{
    static const char *const hosts[] = {
        "HOSTNAME",     "HOST",        "NODE_NAME",   "SLURMD_NODENAME",   "POD_NAME", "MASTER_ADDR",
        "NCCL_COMM_ID", "NCCL_HOSTID", "MASTER_HOST", "SLURM_SUBMIT_HOST", NULL};

    if (text_is_any(name, TEXTS("USER", "LOGNAME", "SUDO_USER", "USERNAME")))
        scrub_learn_name(scrub, SCRUB_USER, value);
    if (text_is_any(name, hosts))
        learn_host(scrub, value);
    if (strncmp(name, "SLURM_", 6) == 0 && scrub_match("**NODELIST", name))
        scrub_learn_hosts(scrub, value);
    if (strcmp(name, "HOME") == 0 && strrchr(value, '/'))
        scrub_learn_name(scrub, SCRUB_USER, strrchr(value, '/') + 1);
}

/* Registers names of devices, and releases of kernels in paths. */
static void learn_folder(struct scrub *scrub, const char *folder, const json_t *names)
{
    json_t *name;
    size_t i;

    json_array_foreach(names, i, name)
    {
        if (!json_is_string(name))
            continue;
        if (scrub_match("**/lib/modules", folder))
            scrub_learn_release(scrub, json_string_value(name));
        if ((strcmp(folder, "/sys/class/infiniband") == 0 || strcmp(folder, "/sys/class/net") == 0 ||
             scrub_match("/sys/class/infiniband/*/device/net", folder)) &&
            json_object_set_new_nocheck(scrub->devices, json_string_value(name), json_true()) < 0)
            scrub->failed = true;
    }
}

static void learn_release_in(struct scrub *scrub, const char *path)
{
    static const char modules[] = "/lib/modules/";
    const char *found = strstr(path, modules);
    char release[129];

    if (!found)
        return;
    found += sizeof(modules) - 1;
    snprintf(release, sizeof(release), "%.*s", (int)(strcspn(found, "/\t") & 127), found);
    scrub_learn_release(scrub, release);
}

static void learn_names(struct scrub *scrub, json_t *const cached[CACHE_KINDS])
{
    const char *release = json_string_value(json_object_get(cached[CACHE_FILES], "/proc/sys/kernel/osrelease")), *key;
    json_t *entry;

    if (release)
        scrub_learn_release(scrub, release);
    for (int kind = 0; kind < CACHE_KINDS; kind++) {
        json_object_foreach(cached[kind], key, entry)
        {
            learn_release_in(scrub, key);
            if (kind == CACHE_FOLDERS)
                learn_folder(scrub, key, entry);
        }
    }
    scrub_learn_confs(scrub, cached);
}

static void learn(struct scrub *scrub, json_t *const cached[CACHE_KINDS], bool is_live)
{
    const json_t *fact = json_object_get(cached[CACHE_FACTS], CACHE_ENVIRONMENT "\t" CACHE_ENVIRONMENT_FACT);
    const char *user, *name;
    char host[256] = "";
    json_t *value;

    for (int kind = 0; kind < CACHE_KINDS; kind++)
        learn_value(scrub, cached[kind]);
    learn_names(scrub, cached);
    json_object_foreach(json_object_get(fact, "value"), name, value)
    {
        if (json_is_string(value))
            learn_variable(scrub, name, json_string_value(value));
    }
    if (!is_live)
        return;
    if (gethostname(host, sizeof(host) - 1) == 0)
        learn_host(scrub, host);
    /* Not from the user database, which may query the network. */
    user = getenv("USER");
    if (user)
        scrub_learn_name(scrub, SCRUB_USER, user);
}

json_t *scrub_snapshot(json_t *const cached[CACHE_KINDS], bool is_live)
{
    struct scrub scrub = {.uuids = json_object(),
                          .names = json_object(),
                          .stems = json_object(),
                          .devices = json_object(),
                          .releases = json_object(),
                          .confs = json_object()};
    json_t *all = json_object();

    scrub.failed =
        !scrub.uuids || !scrub.names || !scrub.stems || !scrub.devices || !scrub.releases || !scrub.confs || !all;
    for (int map = 0; map < SCRUB_MAPS; map++) {
        scrub.maps[map] = json_object();
        scrub.failed = scrub.failed || !scrub.maps[map];
    }
    if (!scrub.failed)
        learn(&scrub, cached, is_live);
    for (int kind = 0; !scrub.failed && kind < CACHE_KINDS; kind++)
        if (json_object_set_new(all, cache_kind_names[kind], scrub_kind(&scrub, (enum cache_kind)kind, cached[kind])) <
            0)
            scrub.failed = true;
    for (int map = 0; map < SCRUB_MAPS; map++)
        json_decref(scrub.maps[map]);
    json_decref(scrub.uuids);
    json_decref(scrub.names);
    json_decref(scrub.stems);
    json_decref(scrub.devices);
    json_decref(scrub.releases);
    json_decref(scrub.confs);
    if (!scrub.failed)
        return all;
    json_decref(all);
    ep_fail(EP_E_MEMORY, "no memory to scrub what was read");
    return NULL;
}
