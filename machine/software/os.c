/* SPDX-License-Identifier: Apache-2.0 */
#include "os.h"

#include "common/shell.h"
#include "read_software.h"

#include <stdio.h>
#include <string.h>

/* Is `word` one of the words of `list`? */
static bool has_word(struct piece list, const char *word)
{
    for (const char *at = list.text; at < list.text + list.n;)
        if (piece_is(text_take(&at, " \t\r\n\"'"), word))
            return true;
    return false;
}

static const char *const family_names[] = {[OS_OTHER] = "other", [OS_DEBIAN] = "debian", [OS_RHEL] = "rhel",
                                           [OS_COS] = "cos",     [OS_SUSE] = "suse",     [OS_OSTREE] = "ostree"};

static enum os_family family_of(struct piece ids)
{
    static const struct {
        const char *id;
        enum os_family family;
    } known[] = {
        {"cos", OS_COS},     {"rhcos", OS_OSTREE}, {"debian", OS_DEBIAN}, {"ubuntu", OS_DEBIAN},      {"rhel", OS_RHEL},
        {"fedora", OS_RHEL}, {"centos", OS_RHEL},  {"rocky", OS_RHEL},    {"almalinux", OS_RHEL},     {"ol", OS_RHEL},
        {"amzn", OS_RHEL},   {"suse", OS_SUSE},    {"sles", OS_SUSE},     {"opensuse-leap", OS_SUSE},
    };

    for (size_t i = 0; i < COUNT(known); i++)
        if (has_word(ids, known[i].id))
            return known[i].family;
    return OS_OTHER;
}

/* The root of a container is an overlay of image layers; that of an installed system is not. */
static json_t *read_overlay_root(struct source_text file)
{
    bool layered = false;

    FOR_PIECES (line, file.text, "\n") {
        const char *place = memchr(line.text, ' ', line.n);

        /* Of several mounts at one mount point, the last one hides the others. */
        if (place && text_begins(place, " / "))
            layered = text_begins_any(place + 3, TEXTS("overlay ", "fuse.fuse-overlayfs "));
    }
    return json_boolean(layered);
}

/* Docker, Podman and CRI-O, Apptainer; systemd's convention for all of them (systemd.io/CONTAINER_INTERFACE). */
static bool is_in_container(struct source *source)
{
    static const char *const marks[] = {"/.dockerenv", "/run/.containerenv", "/.singularity.d"};
    const char *container = source_env(source, "container");

    if ((container && *container) || source_env(source, "KUBERNETES_SERVICE_HOST"))
        return true;
    return ANY_OF(i, COUNT(marks), source_stat(source, "%s", marks[i]).state == SOURCE_OK) ||
           source_fact_bool(source_fact(source, "overlay-root", read_overlay_root, "/proc/self/mounts"));
}

static json_t *read_family(struct source_text file)
{
    enum os_family family = family_of(parse_release(file.text, "ID"));

    if (family == OS_OTHER)
        family = family_of(parse_release(file.text, "ID_LIKE"));
    if (family == OS_RHEL && has_word(parse_release(file.text, "VARIANT_ID"), "coreos"))
        family = OS_OSTREE;
    return json_pack("{s:b}", family_names[family], 1);
}

/* Arguments of dracut, live-boot, casper and the kernel for a system from a server; BOOTIF is what PXELINUX adds. */
static json_t *read_network_boot(struct source_text file)
{
    static const char *const marks[] = {
        " BOOTIF=",  " root=live:http", " root=live:nfs", " root=/dev/nfs",           " root=nfs",  " nfsroot=",
        " netroot=", " fetch=",         " netboot=",      " coreos.live.rootfs_url=", " root=http", " wwinit"};
    char line[4096];

    snprintf(line, sizeof(line), " %s", file.text);
    return json_boolean(ANY_OF(i, COUNT(marks), strstr(line, marks[i])));
}

/*
 * Boot loaders of Debian and Ubuntu other than GRUB, by what they have on the disk: U-Boot of boards, systemd-boot. A
 * DGX Spark without GRUB's settings has those of its firmware.
 */
static const char *loader_of(struct source *source)
{
    static const char *const loaders[][2] = {
        {"/boot/extlinux/extlinux.conf", "the lines APPEND of /boot/extlinux/extlinux.conf"},
        {"/etc/kernel/cmdline", "/etc/kernel/cmdline, then sudo kernel-install add-all"}};

    for (size_t i = 0; i < COUNT(loaders); i++)
        if (source_stat(source, "%s", loaders[i][0]).state == SOURCE_OK &&
            source_stat(source, "/etc/default/grub").state == SOURCE_ABSENT)
            return loaders[i][1];
    return strstr(source_line(source, "/sys/class/dmi/id/product_name").text, "Spark") &&
                   source_stat(source, "/etc/default/grub").state == SOURCE_ABSENT
               ? "the kernel command line in the settings of the boot loader"
               : "";
}

void os_read(struct source *source, struct os *ret_os)
{
    struct source_answer release = source_fact(source, "os-family", read_family, "/etc/os-release");

    if (release.state != SOURCE_OK)
        release = source_fact(source, "os-family", read_family, "/usr/lib/os-release");
    ret_os->family = OS_OTHER;
    for (int family = OS_DEBIAN; family < OS_FAMILIES; family++)
        if (json_object_get(release.value, family_names[family]))
            ret_os->family = (enum os_family)family;
    ret_os->in_container = is_in_container(source);
    ret_os->loader = ret_os->family == OS_DEBIAN ? loader_of(source) : "";
    ret_os->is_netbooted = source_fact_bool(source_fact(source, "network-boot", read_network_boot, "/proc/cmdline"));
}

const char *os_driver_program(struct source *source, const struct os *os, const char *name)
{
    /* GKE's installer uses this path; the installer of COS itself uses /var/lib/nvidia/bin. */
    return os->family == OS_COS && !os->in_container
               ? source_printf(source, "%s/%s",
                               source_stat(source, "/var/lib/nvidia/lib64/libcuda.so.1").state == SOURCE_OK
                                   ? "/var/lib/nvidia/bin"
                                   : "/home/kubernetes/bin/nvidia/bin",
                               name)
               : name;
}

const char *os_initramfs(const struct os *os)
{
    static const char *const commands[OS_FAMILIES] = {
        [OS_DEBIAN] = "sudo update-initramfs -u", [OS_RHEL] = "sudo dracut --force", [OS_SUSE] = "sudo dracut --force"};

    return os->in_container || os->is_netbooted || !commands[os->family] ? "" : commands[os->family];
}

const char *os_install(struct source *source, const struct os *os, const char *debian, const char *rhel)
{
    if (os->family == OS_DEBIAN && *debian)
        return source_printf(source, "sudo apt-get install %s", debian);
    if (os->family == OS_RHEL && *rhel)
        return source_printf(source, "sudo dnf install %s", rhel);
    return "";
}

/* Quotes one word for a shell. "" if it contains an apostrophe, which no real kernel argument does. */
static const char *word_of(struct source *source, const char *argument)
{
    char word[SHELL_WORD_BYTES];

    if (strchr(argument, '\''))
        return "";
    return source_printf(source, "%s", shell_quote(argument, word, sizeof(word)));
}

const char *os_kernel_argument(struct source *source, const struct os *os, bool add, const char *argument)
{
    const char *verb = add ? "Add" : "Take", *place = add ? "to" : "out of", *word = word_of(source, argument);
    enum os_family family = *word ? os->family : OS_OTHER;

    if (os->in_container)
        return source_printf(source,
                             "On the node, not in this container: %s %s %s the kernel command line, and reboot.",
                             add ? "add" : "take", argument, place);
    if (os->is_netbooted)
        return source_printf(
            source,
            "This node boots over the network, so no file on it decides: %s %s %s the kernel arguments "
            "where they are served (PXE or iPXE configuration, Warewulf, xCAT, MAAS), and reboot.",
            add ? "add" : "take", argument, place);
    if (os->loader && *os->loader)
        return source_printf(source, "%s %s %s %s, and reboot.", verb, argument, place, os->loader);
    switch (family) {
    case OS_DEBIAN: /* grub-mkconfig reads /etc/default/grub */
        return source_printf(source,
                             "%s %s %s GRUB_CMDLINE_LINUX in /etc/default/grub%s, then sudo update-grub and reboot.",
                             verb, argument, place, add ? "" : " (and in /etc/default/grub.d)");
    case OS_SUSE:
        return source_printf(source,
                             "%s %s %s GRUB_CMDLINE_LINUX_DEFAULT in /etc/default/grub, then sudo grub2-mkconfig -o "
                             "/boot/grub2/grub.cfg and reboot.",
                             verb, argument, place);
    case OS_RHEL: /* grubby(8) */
        return source_printf(source, "sudo grubby --update-kernel=ALL --%s=%s, then reboot.",
                             add ? "args" : "remove-args", word);
    case OS_OSTREE:
        return source_printf(source,
                             "sudo rpm-ostree kargs --%s=%s, then reboot; on OpenShift kernelArguments of a "
                             "MachineConfig, which restarts the nodes of its pool one after the other.",
                             add ? "append" : "delete", word);
    case OS_COS: /* grub.cfg belongs to the node's image */
        return source_printf(source,
                             "%s %s %s the kernel command line, which Container-Optimized OS keeps in grub.cfg of its "
                             "EFI partition and an update replaces: better choose another image for these nodes.",
                             verb, argument, place);
    case OS_OTHER:
    case OS_FAMILIES:
        break;
    }
    return source_printf(source, "%s %s %s the kernel command line in the settings of the boot loader, and reboot.",
                         verb, argument, place);
}
