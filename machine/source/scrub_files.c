/* SPDX-License-Identifier: Apache-2.0 */
/* scrub_files.c - what stays of the files of packages and administrators. */
#include "source/scrub.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* A line without white space around it; false when there is none left. */
static bool next_line(const char **text, const char *end, const char **ret_line, size_t *ret_bytes)
{
    if (!scrub_line(text, end, ret_line, ret_bytes))
        return false;
    while (*ret_bytes > 0 && isspace((unsigned char)**ret_line)) {
        ++*ret_line;
        --*ret_bytes;
    }
    while (*ret_bytes > 0 && isspace((unsigned char)(*ret_line)[*ret_bytes - 1]))
        --*ret_bytes;
    return true;
}

static bool begins(const char *line, size_t bytes, const char *word)
{
    size_t n = strlen(word);

    return bytes >= n && memcmp(line, word, n) == 0;
}

/* --- modprobe.d --- */

/* Modules of GPUs, NICs and what comes between them. Which other ones a site has is its own business. */
static bool is_known_module(const char *name, size_t n)
{
    static const char *const beginnings[] = {"nvidia",  "nouveau", "mlx",   "ib_",  "rdma",  "gdrdrv",
                                             "nv_peer", "vfio",    "iommu", "efa",  "bnxt_", "irdma",
                                             "mlnx",    "nvme",    "knem",  "xpmem"};

    for (size_t i = 0; i < sizeof(beginnings) / sizeof(beginnings[0]); i++)
        if (begins(name, n, beginnings[i]))
            return scrub_is_plain(name, n);
    return false;
}

/* The next word of a line; white space within double quotes does not end it, '\\' and newline do. */
static bool next_modprobe_word(const char **text, const char *end, const char **ret_word, size_t *ret_bytes)
{
    bool quoted = false;

    while (*text < end && (isspace((unsigned char)**text) || **text == '\\'))
        ++*text;
    *ret_word = *text;
    for (; *text < end && (quoted || (!isspace((unsigned char)**text) && **text != '\\')); ++*text)
        quoted ^= **text == '"';
    *ret_bytes = (size_t)(*text - *ret_word);
    return *ret_bytes > 0;
}

static bool is_number(const char *text, size_t n)
{
    return n > 0 && n <= 10 && isdigit((unsigned char)*text) && strspn(text, "0123456789xabcdefABCDEF") >= n;
}

/* "PeerMappingOverride=1;RMNvLinkDisableLinks=0x0": keys of the driver's own, with numbers. */
static void write_dwords(const char *value, size_t n, FILE *out)
{
    static const char *const beginnings[] = {"RM",     "Rm",      "Peer", "Power", "Perf",  "Override",
                                             "Enable", "Disable", "NV",   "Force", "Grdma", "UvmDisable"};
    const char *end = value + n;

    while (value < end) {
        size_t length = strcspn(value, ";,\" \t\n"), name;

        length = length < (size_t)(end - value) ? length : (size_t)(end - value);
        name = strcspn(value, "=");
        for (size_t i = 0; name < length && name <= 64 && i < sizeof(beginnings) / sizeof(beginnings[0]); i++) {
            if (begins(value, name, beginnings[i]) && is_number(value + name + 1, length - name - 1)) {
                fwrite(value, 1, length, out);
                break;
            }
        }
        value += length;
        if (value < end)
            fputc(*value++, out);
    }
}

/* "NAME=VALUE" of the driver, modprobe's own way to write it; only numbers, and the keys that hold them. */
static void write_option(const char *word, size_t n, FILE *out)
{
    static const char *const names[] = {
        "NVreg_",  "modeset",         "fbdev", "peerdirect_support",         "prof_sel",        "num_of_groups",
        "num_vfs", "port_type_array", "uvm_",  "enable_unsafe_noiommu_mode", "disable_idle_d3", "roce_mode",
        "probe_vf"};
    const char *equals = memchr(word, '=', n), *value = equals + 1;
    size_t n_name = equals ? (size_t)(equals - word) : 0, n_value = n_name ? n - n_name - 1 : 0;
    bool known = false;

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        known = known || begins(word, n_name, names[i]);
    if (!known || n_name > 64 ||
        strspn(word, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_") < n_name)
        return;
    if (begins(word, n_name, "NVreg_RegistryDwords") && n_name == 20) {
        fprintf(out, " %.*s=", (int)n_name, word);
        write_dwords(value, n_value, out);
    } else if (is_number(value, n_value)) {
        fprintf(out, " %.*s", (int)n, word);
    }
}

/* "install module command": what is run does not matter, but for the two that switch a module off. */
static void write_command(const char *command, const char *end, FILE *out)
{
    while (command < end && isspace((unsigned char)*command))
        command++;
    if (begins(command, (size_t)(end - command), "/bin/true"))
        fputs(" /bin/true", out);
    else if (begins(command, (size_t)(end - command), "/bin/false"))
        fputs(" /bin/false", out);
    else
        fputs(" command", out);
}

/* A line with those that its '\\' at the end continues. */
static void write_modprobe_line(const char *line, size_t n, FILE *out)
{
    static const char *const verbs[] = {"options", "blacklist", "softdep", "install", "remove", "alias"};
    const char *at = line, *end = line + n, *word, *verb = NULL;
    size_t bytes;

    if (!next_modprobe_word(&at, end, &word, &bytes))
        return;
    for (size_t i = 0; i < sizeof(verbs) / sizeof(verbs[0]); i++)
        if (bytes == strlen(verbs[i]) && memcmp(word, verbs[i], bytes) == 0)
            verb = verbs[i];
    if (!verb || !next_modprobe_word(&at, end, &word, &bytes) || !is_known_module(word, bytes))
        return;
    fprintf(out, "%s %.*s", verb, (int)bytes, word);
    if (*verb == 'i' || *verb == 'r') {
        write_command(at, end, out);
        return;
    }
    while (next_modprobe_word(&at, end, &word, &bytes)) {
        if (*verb == 'o')
            write_option(word, bytes, out);
        else if (is_known_module(word, bytes) || begins(word, bytes, "pre:") || begins(word, bytes, "post:"))
            fprintf(out, " %.*s", (int)(word[bytes - 1] == ':' || is_known_module(word, bytes) ? bytes : 0), word);
    }
}

/* modprobe.d(5). Comments may say anything, behind options as well: what is known stays, and nothing else does. */
void scrub_modprobe(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    const char *end = text + strnlen(text, bytes);

    (void)scrub;
    while (text < end) {
        const char *line = text, *newline;
        int n_lines = 0;

        do {
            newline = memchr(text, '\n', (size_t)(end - text));
            text = newline ? newline + 1 : end;
            n_lines++;
        } while (newline && newline > line && newline[-1] == '\\' && text < end);
        write_modprobe_line(line, (size_t)((newline ? newline : end) - line), out);
        while (n_lines--)
            fputc('\n', out);
    }
}

/* --- modules.dep --- */

/* "updates/dkms/mlx5_ib.ko: updates/dkms/mlx5_core.ko kernel/...": files below the folders that depmod looks in. */
static bool is_module_line(const char *line, size_t n)
{
    static const char *const folders[] = {"kernel/", "updates/", "extra/", "weak-updates/"};
    size_t at = 0;

    while (at < n) {
        bool known = false;

        for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++)
            known = known || begins(line + at, n - at, folders[i]);
        if (!known)
            return false;
        at += strcspn(line + at, " \n");
        at += strspn(line + at, " ");
    }
    return n > 0;
}

void scrub_modules_dep(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    const char *end = text + bytes, *line;
    size_t n;

    while (next_line(&text, end, &line, &n)) {
        if (!is_module_line(line, n))
            continue;
        scrub_text(scrub, line, n, SCRUB_VERSIONS, out);
        fputc('\n', out);
    }
}

/* --- ld.so.conf --- */

/* A folder, "include" with patterns of files, "driver" with a provider, a module: such lines stay, and no others. */
static void write_path_line(struct scrub *scrub, const char *line, size_t n, FILE *out)
{
    static const char include[] = "include ", driver[] = "driver ";
    const char *name = line + sizeof(driver) - 1;

    if ((n > 0 && *line == '/') || (begins(line, n, include) && memchr(line, '/', n)))
        scrub_text(scrub, line, n, SCRUB_VERSIONS, out);
    else if ((begins(line, n, driver) && scrub_is_plain(name, n - (sizeof(driver) - 1))) || is_known_module(line, n))
        fprintf(out, "%.*s", (int)n, line);
}

void scrub_paths(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    const char *end = text + bytes, *line;
    size_t n;

    while (next_line(&text, end, &line, &n)) {
        const char *comment = memchr(line, '#', n);

        n = comment ? (size_t)(comment - line) : n;
        while (n > 0 && isspace((unsigned char)line[n - 1]))
            n--;
        write_path_line(scrub, line, n, out);
        fputc('\n', out);
    }
}

/* --- gIB --- */

/* "NAME=VALUE", of which a value that is not plain becomes one that is none; what is no variable of NCCL's is left out.
 */
static void write_setting(struct scrub *scrub, const char *word, size_t n, FILE *out)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
    size_t n_name = strspn(word, letters), n_value;
    const char *value = word + n_name + 1;
    bool is_quoted;

    n_name = n_name < n ? n_name : n;
    if (!begins(word, n, "NCCL_") && !begins(word, n, "TORCH_NCCL_"))
        return;
    fprintf(out, " %.*s", (int)n_name, word);
    if (n_name == n || word[n_name] != '=')
        return;
    n_value = n - n_name - 1;
    is_quoted = n_value >= 2 && (*value == '"' || *value == '\'') && value[n_value - 1] == *value;
    value += is_quoted;
    n_value -= is_quoted ? 2 : 0;
    fputc('=', out);
    if (n_value > 0 && memchr(value, '$', n_value))
        fputs("$word", out);
    else
        scrub_text(scrub, value, n_value, SCRUB_VERSIONS | SCRUB_WORDS, out);
}

void scrub_gib(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    const char *end = text + bytes, *line;
    size_t n;

    while (next_line(&text, end, &line, &n)) {
        bool is_export = begins(line, n, "export "), is_unset = begins(line, n, "unset ");
        const char *at = line + (is_export ? 7 : 6), *stop = line + n;

        if (!is_export && !is_unset)
            continue;
        fputs(is_export ? "export" : "unset", out);
        while (at < stop && *at != '#') {
            size_t length = strcspn(at, " \t\n");

            length = length < (size_t)(stop - at) ? length : (size_t)(stop - at);
            write_setting(scrub, at, length, out);
            at += length;
            at += strspn(at, " \t");
        }
        fputc('\n', out);
    }
}

/* --- packages --- */

/* Is a paragraph about a package between the hardware and an engine? */
static bool is_package_that_matters(const char *name, size_t bytes)
{
    static const char *const names[] = {
        "nvidia",        "libnvidia",  "cuda",      "libcuda",    "doca",       "mlnx",  "ofed",        "rdma",
        "ibverbs",       "libibverbs", "librdmacm", "libmlx",     "infiniband", "ibacm", "libnccl",     "nccl",
        "nvshmem",       "libnvshmem", "gdrcopy",   "libgdrapi",  "gdrdrv",     "dkms",  "linux-image", "linux-headers",
        "linux-modules", "ucx",        "openmpi",   "libopenmpi", "mft",        "libc6", "kernel-mft",  "iser",
        "isert",         "srp",        "knem",      "xpmem"};

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (begins(name, bytes, names[i]))
            return true;
    return false;
}

void scrub_dpkg(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    static const char package[] = "Package: ";
    static const char *const fields[] = {package, "Status: ", "Architecture: ", "Version: ", "Source: "};
    const char *end = text + bytes, *line;
    bool is_kept = false;
    size_t n;

    while (next_line(&text, end, &line, &n)) {
        if (begins(line, n, package))
            is_kept = is_package_that_matters(line + sizeof(package) - 1, n - (sizeof(package) - 1));
        if (n == 0 && is_kept)
            fputc('\n', out);
        if (n == 0)
            is_kept = false;
        for (size_t i = 0; is_kept && i < sizeof(fields) / sizeof(fields[0]); i++) {
            if (begins(line, n, fields[i])) {
                scrub_text(scrub, line, n, SCRUB_VERSIONS | SCRUB_NAME, out);
                fputc('\n', out);
            }
        }
    }
}

void scrub_hypervisor(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    const char *end = text + bytes, *line;
    size_t n;

    (void)scrub;
    while (next_line(&text, end, &line, &n))
        if (begins(line, n, "flags") && memmem(line, n, " hypervisor", 11)) {
            fputs("flags\t\t: hypervisor\n", out);
            return;
        }
}

void scrub_venv(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    static const char *const lines[] = {"include-system-site-packages = true", "include-system-site-packages = false"};
    const char *end = text + bytes, *line;
    size_t n;

    (void)scrub;
    while (next_line(&text, end, &line, &n))
        for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++)
            if (n == strlen(lines[i]) && begins(line, n, lines[i]))
                fprintf(out, "%s\n", lines[i]);
}

void scrub_metadata(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    static const char *const fields[] = {"Metadata-Version: ", "Name: ", "Version: "};
    const char *end = text + bytes, *line;
    size_t n;

    /* The description begins behind an empty line, and may have lines of the same form. */
    while (next_line(&text, end, &line, &n) && n > 0) {
        for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
            if (begins(line, n, fields[i])) {
                scrub_text(scrub, line, n, SCRUB_VERSIONS | SCRUB_NAME, out);
                fputc('\n', out);
            }
        }
    }
}

/* --- programs --- */

void scrub_defines(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    const char *end = text + bytes, *line;
    size_t n;

    while (next_line(&text, end, &line, &n)) {
        /* Numbers and strings of one line; no comments behind them. */
        const char *comment = memmem(line, n, "/*", 2), *other = memmem(line, n, "//", 2);

        if (comment)
            n = (size_t)(comment - line);
        if (other && other < line + n)
            n = (size_t)(other - line);
        if (begins(line, n, "#define "))
            scrub_text(scrub, line, n, SCRUB_VERSIONS | SCRUB_CODE, out);
        fputc('\n', out);
    }
}
