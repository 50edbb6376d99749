/* SPDX-License-Identifier: Apache-2.0 */
#include "fixes.h"

#include "common/shell.h"
#include "common/text.h"

#include <string.h>

#define MODPROBE_D "/etc/modprobe.d/"
#define OPTIONS(dwords) "options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords=\"" dwords "\""

/* A sentence that says how to make the driver read its options again. */
static const char *reload_words(const struct doctor_machine *machine)
{
    const struct os *os = &machine->software->os;

    if (os->in_container)
        return "On the node, not in this container: rebuild the initramfs (update-initramfs -u, on RHEL dracut "
               "--force) and reboot.";
    if (os->is_netbooted)
        return "This node boots over the network: change /etc/modprobe.d and the initramfs in the image that it boots.";
    if (os->family == OS_COS)
        return "Container-Optimized OS discards /etc/modprobe.d at a reboot: pass options to the installer of the "
               "driver with --module-arg nvidia.<option>=<value> (cos-extensions install gpu; on GKE in the DaemonSet "
               "of the installer, for a pool with gpu-driver-version=disabled).";
    if (os->family == OS_OSTREE)
        return "Pass options to the container that loads the driver: for the GPU operator, in a ConfigMap with "
               "nvidia.conf, which driver.kernelModuleConfig.name of its ClusterPolicy names.";
    if (*os_initramfs(os))
        return source_printf(
            machine->source,
            "The driver reads its options when it is loaded, from the initramfs: without %s they do not take effect "
            "even after a reboot.",
            os_initramfs(os));
    return "The driver reads its options when it is loaded: rebuild the initramfs if this system has one, and reboot.";
}

void driver_fix_reload(const struct doctor_machine *machine, struct doctor_result *result)
{
    const char *initramfs = os_initramfs(&machine->software->os);

    if (*initramfs)
        doctor_fix(result, false, "%s\nsudo reboot", initramfs);
    doctor_advise(result, "%s", reload_words(machine));
}

/* If there is an effective line, it must be changed: a further line would replace it or be replaced by it. */
static void merge_dwords(const struct doctor_machine *machine, struct doctor_result *result, const char *file)
{
    struct source *source = machine->source;
    const struct os *os = &machine->software->os;
    const char *merged = machine->software->driver.dwords_with_override, *initramfs = os_initramfs(os);
    const char *base = strrchr(file, '/') + 1;

    if (*initramfs && strncmp(file, MODPROBE_D, strlen(MODPROBE_D)) == 0)
        doctor_fix(result, false, "sudoedit %s\n%s\nsudo reboot", shell_word(source, file), initramfs);
    else if (*initramfs)
        /* The file belongs to a package; a file with the same name in /etc/modprobe.d overrides it (modprobe.d(5)). */
        doctor_fix(result, false, "sudo cp %s " MODPROBE_D "\nsudoedit %s\n%s\nsudo reboot", shell_word(source, file),
                   shell_word(source, source_printf(source, MODPROBE_D "%s", base)), initramfs);
    doctor_advise(result,
                  "Of several lines with NVreg_RegistryDwords only the last counts, which is that of %s: it has to "
                  "contain NVreg_RegistryDwords=\"%s\". %s",
                  file, merged, reload_words(machine));
}

void driver_fix_peer_mapping(const struct doctor_machine *machine, struct doctor_result *result)
{
    const struct software_driver *driver = &machine->software->driver;
    const struct os *os = &machine->software->os;
    const char *file = driver->peer_mapping_override.configured_in, *initramfs = os_initramfs(os);

    if (strcmp(file, "/proc/cmdline") == 0) {
        doctor_advise(result, "NVreg_RegistryDwords comes from the kernel's command line. %s",
                      os_kernel_argument(machine->source, os, true,
                                         source_printf(machine->source, "nvidia.NVreg_RegistryDwords=\"%s\"",
                                                       driver->dwords_with_override)));
    } else if (*file == '/') {
        merge_dwords(machine, result, file);
    } else if (*initramfs) {
        doctor_fix(result, false,
                   "echo '" OPTIONS("PeerMappingOverride=1;") "' | sudo tee " MODPROBE_D
                                                              "nvidia-ibgda.conf\n%s\nsudo reboot",
                   initramfs);
        doctor_advise(result, "%s", reload_words(machine));
    } else if (os->family == OS_COS && !os->in_container) {
        doctor_fix(result, false,
                   "sudo cos-extensions install gpu -- --module-arg nvidia.NVreg_EnableStreamMemOPs=1 --module-arg "
                   "'nvidia.NVreg_RegistryDwords=\"PeerMappingOverride=1;\"'");
        doctor_cost(result, DOCTOR_FIX_RESTART, "The driver is reloaded, and every program on a GPU ends.");
        doctor_advise(result, "%s", reload_words(machine));
    } else {
        doctor_advise(result, "The driver needs the line %s in a file of /etc/modprobe.d. %s",
                      OPTIONS("PeerMappingOverride=1;"), reload_words(machine));
    }
}

/* --- words and commands of fixes --- */

const char *shell_word(struct source *source, const char *text)
{
    size_t bytes = 4 * strlen(text) + 8;
    char *word = source_alloc(source, bytes);

    return word ? shell_quote(text, word, bytes) : "''";
}

bool shell_is_name(const char *name)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789";

    return *name && name[strspn(name, letters)] == '\0' && !(*name >= '0' && *name <= '9');
}

/* The length without a comment at the end, which follows a blank and is not in quotes. */
static size_t without_comment(const char *line, size_t n)
{
    char quote = 0;

    for (size_t i = 0; i < n; i++) {
        if (line[i] == '#' && !quote && (i == 0 || line[i - 1] == ' ' || line[i - 1] == '\t'))
            return i;
        if (quote ? line[i] == quote : line[i] == '\'' || line[i] == '"')
            quote = quote ? 0 : line[i];
    }
    return n;
}

bool shell_evaluates_environ(const char *line, size_t n)
{
    static const char *const words[] = {"source ", ". ", "eval ", "export ", "xargs"};

    const char *at;

    n = without_comment(line, n);
    return memmem(line, n, "/proc/1/environ", 15) &&
           ANY_OF(i, COUNT(words),
                  (at = memmem(line, n, words[i], strlen(words[i]))) && (at == line || strchr(" \t;&|($`", at[-1])));
}

const char *shell_prepend(struct source *source, const char *name, const char *folders)
{
    return source_printf(source, "export %s=%s${%s:+:$%s}", name, shell_word(source, folders), name, name);
}

const char *shell_leave_out(struct source *source, const char *name, const char *path, const char *folder)
{
    const char *kept = "";

    FOR_PIECES (entry, path, ":;") {
        size_t bare = entry.n;

        while (bare > 1 && entry.text[bare - 1] == '/')
            bare--;
        if (entry.n > 0 && (bare != strlen(folder) || strncmp(entry.text, folder, bare) != 0))
            kept = source_printf(source, "%s%s%.*s", kept, *kept ? ":" : "", (int)entry.n, entry.text);
    }
    return *kept ? source_printf(source, "export %s=%s", name, shell_word(source, kept))
                 : source_printf(source, "unset %s", name);
}
