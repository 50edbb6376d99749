/* SPDX-License-Identifier: Apache-2.0 */
/* preflight.c - may this recipe be applied to this machine? Runs before anything changes. */
#include "base/error.h"
#include "common/memory.h"
#include "install.h"
#include "machine/software/read_software.h"

#include <ctype.h>
#include <elf.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

static const char *const target_keys[] = {"os", "release", "arch", "disk_gb", "signing", "managed", "node", NULL};

static void __attribute__((format(printf, 4, 5)))
row(struct install *install, const char *name, int result, const char *format, ...)
{
    struct preflight_row *at = &install->preflight[install->n_preflight];

    if (install->n_preflight == PREFLIGHT_MAX)
        return;
    at->name = name;
    at->result = result;
    WITH_ARGS(args, format, vsnprintf(at->text, sizeof(at->text), format, args));
    install->n_preflight++;
}

static const char *wanted(const struct install *install, const char *key)
{
    const struct yaml_node *node = recipe_entry(install->recipe, "target", key);

    return node && node->kind == YAML_SCALAR ? node->text : NULL;
}

/* In an image there is no kernel to be built for, and no driver. */
static bool is_node(const struct install *install)
{
    const char *flag = wanted(install, "node");
    const struct recipe_variable *variable = flag ? recipe_variable_find(install->recipe, flag) : NULL;

    return !variable || !variable->value || strcmp(variable->value, "0") != 0;
}

static ep_status check_scalars(const struct recipe *recipe, const struct yaml_node *parent, const char *name,
                               const char *const *allowed)
{
    const struct yaml_node *map = parent ? tree_get(parent, name) : NULL;
    const char *text;
    int line;

    if (!map)
        return EP_OK;
    if (map->kind != YAML_MAP)
        return recipe_refuse(recipe, map->line, "'%s' must be a map", name);
    if (allowed)
        EP_TRY(recipe_check_keys(recipe, map, "'target'", allowed));
    for (size_t i = 0; i < map->n; i++)
        EP_TRY(recipe_scalar(recipe, map, map->keys[i], false, &text, &line));
    return EP_OK;
}

ep_status preflight_check_target(const struct recipe *recipe)
{
    const struct yaml_node *disk = recipe_entry(recipe, "target", "disk_gb"), *of;

    EP_TRY(check_scalars(recipe, recipe->tree, "target", target_keys));
    EP_TRY(check_scalars(recipe, recipe->variant, "target", target_keys));
    EP_TRY(check_scalars(recipe, recipe->tree, "kernels", NULL));
    EP_TRY(check_scalars(recipe, recipe->variant, "kernels", NULL));
    if (disk && (strspn(disk->text, "0123456789") != strlen(disk->text) || strlen(disk->text) > 5 || !*disk->text))
        return recipe_refuse(recipe, disk->line, "'disk_gb' must be a number");
    of = recipe_entry(recipe, "kernels", "of");
    if (of && !recipe_variable_find(recipe, of->text))
        return recipe_refuse(recipe, of->line, "there is no version or variable '%.64s'", of->text);
    return EP_OK;
}

/* --- checks --- */

static void check_os(struct install *install, struct source *source)
{
    struct source_text text = source_read(source, "/etc/os-release");
    const char *os = wanted(install, "os"), *release = wanted(install, "release");
    struct piece id = parse_release(text.text, "ID"), version = parse_release(text.text, "VERSION_ID");

    if (!os)
        return;
    if (text.state != SOURCE_OK) {
        row(install, "system", PREFLIGHT_UNKNOWN, "/etc/os-release: %s", text.why);
        return;
    }
    if (!piece_is(id, os) || (release && !piece_is(version, release)))
        row(install, "system", PREFLIGHT_REFUSE, "this is %.*s %.*s; the recipe is for %.40s %.40s", (int)id.n, id.text,
            (int)version.n, version.text, os, release ? release : "");
    else
        row(install, "system", PREFLIGHT_OK, "%.*s %.*s", (int)id.n, id.text, (int)version.n, version.text);
}

/* The architecture of the machine's own programs. */
static void check_arch(struct install *install, struct source *source)
{
    const char *arch = wanted(install, "arch");
    struct elf_facts elf = source_elf(source, "/usr/bin/dpkg");
    const char *found = elf.machine == EM_X86_64 ? "amd64" : elf.machine == EM_AARCH64 ? "arm64" : NULL;

    if (!arch)
        return;
#if defined(__x86_64__)
    if (!found && install->is_live)
        found = "amd64";
#elif defined(__aarch64__)
    if (!found && install->is_live)
        found = "arm64";
#endif
    if (!found)
        row(install, "processor", PREFLIGHT_UNKNOWN, "not known: %s", elf.why && *elf.why ? elf.why : "no dpkg");
    else if (strcmp(found, arch) != 0)
        row(install, "processor", PREFLIGHT_REFUSE, "this is %s; the recipe is for %.40s", found, arch);
    else
        row(install, "processor", PREFLIGHT_OK, "%s", found);
}

/* The value of the variable that an entry of `kernels` names; "" if none. */
static const char *named_value(const struct install *install, const char *key)
{
    const struct yaml_node *entry = recipe_entry(install->recipe, "kernels", key);
    const struct recipe_variable *variable = entry ? recipe_variable_find(install->recipe, entry->text) : NULL;

    return variable && variable->value ? variable->value : "";
}

/* Does a list of kernels like "6.8 6.14" have this one? */
static bool lists_kernel(const char *list, const char *kernel)
{
    FOR_PIECES (word, list, " ")
        if (word.n && strncmp(kernel, word.text, word.n) == 0 && !isdigit((unsigned char)kernel[word.n]))
            return true;
    return false;
}

/*
 * Modules are built for the kernel that runs. Only kernels for which a source says that this works are accepted: a
 * build that fails leaves a node without its network.
 */
static void check_kernel(struct install *install)
{
    const struct yaml_node *of = recipe_entry(install->recipe, "kernels", "of");
    const struct yaml_node *all = install->recipe->variant ? tree_get(install->recipe->variant, "kernels") : NULL;
    const char *version = named_value(install, "of"), *known = "";
    char other[80] = "";

    if (!of || !is_node(install))
        return;
    all = all ? all : tree_get(install->recipe->tree, "kernels");
    for (size_t i = 0; i < all->n; i++) {
        if (strcmp(all->keys[i], version) == 0)
            known = all->items[i].text;
        else if (isdigit((unsigned char)all->keys[i][0]) && lists_kernel(all->items[i].text, install->kernel))
            snprintf(other, sizeof(other), "--set %.20s=%.20s, which builds for it, or ", of->text, all->keys[i]);
    }
    if (!*install->kernel)
        row(install, "kernel", PREFLIGHT_UNKNOWN, "its release is unknown");
    else if (lists_kernel(known, install->kernel) || lists_kernel(named_value(install, "also"), install->kernel))
        row(install, "kernel", PREFLIGHT_OK, "%.100s", install->kernel);
    else
        row(install, "kernel", PREFLIGHT_REFUSE,
            "kernel %.60s is not known: no source says that %.20s %.20s builds for it; take %s%s%.40s%s%s--set "
            "kernel_also=%.*s if you know that it builds",
            install->kernel, of->text, version, other, *known ? "one of the kernels " : "", known,
            lists_kernel(known, "6.8") ? " (6.8: apt install linux-image-gcp-lts-24.04)" : "", *known ? ", or " : "",
            (int)strspn(install->kernel, "0123456789."), install->kernel);
}

/* DKMS signs with a key that is not enrolled: with Secure Boot the kernel would refuse its modules. */
static void check_secure_boot(struct install *install, struct source *source)
{
    struct source_text text =
        source_read(source, "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c");

    if (!wanted(install, "signing") || !is_node(install))
        return;
    if (text.state == SOURCE_ABSENT)
        row(install, "secure boot", PREFLIGHT_OK, "not supported by the machine");
    else if (text.state != SOURCE_OK || text.bytes < 5)
        row(install, "secure boot", PREFLIGHT_UNKNOWN, "cannot be read: %s", text.why);
    else if (text.text[4] == 1)
        row(install, "secure boot", PREFLIGHT_REFUSE,
            "it is on: the kernel refuses modules that DKMS builds; make the node pool without --shielded-secure-boot");
    else
        row(install, "secure boot", PREFLIGHT_OK, "off");
}

/* A driver that GKE installs and updates must not be replaced. */
static void check_managed(struct install *install, struct source *source)
{
    static const char *const files[] = {"/etc/default/kubelet", "/home/kubernetes/kube-env",
                                        "/home/kubernetes/kubelet-config.yaml", "/etc/systemd/system/kubelet.service",
                                        NULL};
    static const char label[] = "cloud.google.com/gke-gpu-driver-version=";

    if (!wanted(install, "managed") || !is_node(install))
        return;
    for (size_t i = 0; files[i]; i++) {
        struct source_text text = source_read(source, "%s", files[i]);
        const char *at = strstr(text.text, label);
        char value[32];

        if (!at)
            continue;
        at += strlen(label);
        snprintf(value, sizeof(value), "%.*s", (int)strspn(at, "abcdefghijklmnopqrstuvwxyz0123456789"), at);
        if (strcmp(value, "disabled") != 0)
            row(install, "GPU driver", PREFLIGHT_REFUSE,
                "GKE manages it here (%s: gke-gpu-driver-version=%s); make the pool with gpu-driver-version=disabled",
                files[i], value);
        else
            row(install, "GPU driver", PREFLIGHT_OK, "not managed by GKE");
        return;
    }
    row(install, "GPU driver", PREFLIGHT_OK, "no sign that GKE manages it");
}

static void check_disk(struct install *install)
{
    const char *text = wanted(install, "disk_gb");
    struct statvfs stat;
    long long free_gb;

    if (!text)
        return;
    if (!install->is_live && !install->can_chroot)
        return;
    if (statvfs(*install->root ? install->root : "/", &stat) != 0) {
        row(install, "disk", PREFLIGHT_UNKNOWN, "the free space cannot be read");
        return;
    }
    free_gb = (long long)((double)stat.f_bavail * (double)stat.f_frsize / 1e9);
    row(install, "disk", free_gb < atoll(text) ? PREFLIGHT_REFUSE : PREFLIGHT_OK, "%lld GB free, %s GB needed", free_gb,
        text);
}

enum install_result preflight_run(struct install *install)
{
    struct source *source;

    if (source_open(install->is_live ? NULL : install->root, &source) != EP_OK)
        return install_fail_status(install);
    install->n_preflight = 0;
    check_os(install, source);
    check_arch(install, source);
    check_kernel(install);
    check_secure_boot(install, source);
    check_managed(install, source);
    check_disk(install);
    source_free(source);
    return INSTALL_FINE;
}

bool preflight_refuses(const struct install *install)
{
    return ANY_OF(i, install->n_preflight, install->preflight[i].result == PREFLIGHT_REFUSE);
}
