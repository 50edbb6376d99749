/* SPDX-License-Identifier: Apache-2.0 */
/* preflight.c - may this recipe be applied to this machine? Runs before anything changes. */
#include "base/error.h"
#include "install.h"
#include "machine/software/software_text.h"

#include <ctype.h>
#include <elf.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

static const char *const target_keys[] = {"os",         "release",      "arch",       "disk_gb", "signing",
                                          "kernel_min", "kernel_below", "kernel_why", "managed", NULL};

static void row(struct install *install, const char *name, int result, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static void row(struct install *install, const char *name, int result, const char *format, ...)
{
    struct preflight_row *at = &install->preflight[install->n_preflight];
    va_list args;

    if (install->n_preflight == PREFLIGHT_MAX)
        return;
    at->name = name;
    at->result = result;
    va_start(args, format);
    vsnprintf(at->text, sizeof(at->text), format, args);
    va_end(args);
    install->n_preflight++;
}

static const char *wanted(const struct install *install, const char *key)
{
    const struct yaml_node *node = install->recipe->target ? tree_get(install->recipe->target, key) : NULL;

    return node && node->kind == YAML_SCALAR ? node->text : NULL;
}

ep_status preflight_check_target(const struct recipe *recipe)
{
    const struct yaml_node *target = recipe->target;
    const char *text;
    int line;

    if (!target)
        return EP_OK;
    if (target->kind != YAML_MAP)
        return recipe_refuse(recipe, target->line, "'target' must be a map");
    EP_TRY(recipe_check_keys(recipe, target, "'target'", target_keys));
    for (size_t i = 0; i < target->n; i++)
        EP_TRY(recipe_scalar(recipe, target, target->keys[i], false, &text, &line));
    EP_TRY(recipe_scalar(recipe, target, "disk_gb", false, &text, &line));
    if (text && (strspn(text, "0123456789") != strlen(text) || strlen(text) > 5 || !*text))
        return recipe_refuse(recipe, line, "'disk_gb' must be a number");
    for (size_t i = 0; i < 2; i++) {
        const char *key = i ? "kernel_below" : "kernel_min";

        EP_TRY(recipe_scalar(recipe, target, key, false, &text, &line));
        if (text && (!isdigit((unsigned char)*text) || strspn(text, "0123456789.") != strlen(text)))
            return recipe_refuse(recipe, line, "'%s' must be a release like 6.14", key);
    }
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

static void check_kernel(struct install *install)
{
    const char *min = wanted(install, "kernel_min"), *below = wanted(install, "kernel_below");
    const char *why = wanted(install, "kernel_why");

    if (!min && !below)
        return;
    if (!*install->kernel)
        row(install, "kernel", PREFLIGHT_UNKNOWN, "its release is unknown");
    else if (min && strverscmp(install->kernel, min) < 0)
        row(install, "kernel", PREFLIGHT_REFUSE, "%.60s is older than %.20s: %.120s", install->kernel, min,
            why ? why : "");
    else if (below && strverscmp(install->kernel, below) >= 0)
        row(install, "kernel", PREFLIGHT_REFUSE, "%.60s is not below %.20s: %.120s", install->kernel, below,
            why ? why : "");
    else
        row(install, "kernel", PREFLIGHT_OK, "%.100s", install->kernel);
}

/* DKMS signs with a key that is not enrolled: with Secure Boot the kernel would refuse its modules. */
static void check_secure_boot(struct install *install, struct source *source)
{
    struct source_text text =
        source_read(source, "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c");

    if (!wanted(install, "signing"))
        return;
    if (text.state == SOURCE_ABSENT)
        row(install, "secure boot", PREFLIGHT_OK, "not supported by the machine");
    else if (text.state != SOURCE_OK || text.bytes < 5)
        row(install, "secure boot", PREFLIGHT_UNKNOWN, "cannot be read: %s", text.why);
    else if (text.text[4] == 1)
        row(install, "secure boot", PREFLIGHT_REFUSE,
            "it is on: the kernel refuses modules that DKMS builds; make the node pool without "
            "--shielded-secure-boot");
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

    if (!wanted(install, "managed"))
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
    for (size_t i = 0; i < install->n_preflight; i++)
        if (install->preflight[i].result == PREFLIGHT_REFUSE)
            return true;
    return false;
}
