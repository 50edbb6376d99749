/* SPDX-License-Identifier: Apache-2.0 */
/* scrub_files.c - what stays of the files of packages and administrators. */
#include "root/scrub.h"

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

/* "install module command": what is run does not matter, but for the two that switch a module off. */
static void write_command(struct scrub *scrub, const char *line, size_t bytes, FILE *out)
{
    size_t n = strcspn(line, " \t"), n_module;
    const char *command;

    n += strspn(line + n, " \t");
    n_module = n + strcspn(line + n, " \t\n");
    if (n_module >= bytes)
        return;
    scrub_text(scrub, line, n_module, SCRUB_NAME, out);
    command = line + n_module + strspn(line + n_module, " \t");
    if (begins(command, bytes - (size_t)(command - line), "/bin/true") ||
        begins(command, bytes - (size_t)(command - line), "/bin/false"))
        fprintf(out, " %.*s", (int)strspn(command, "/abefilnrstu"), command);
    else
        fputs(" command", out);
}

/* modprobe.d(5). Comments may say anything; options of other modules than those of GPUs and NICs do not matter. */
void scrub_modprobe(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    static const char *const kept[] = {"options nvidia", "options mlx",   "options ib_",  "options rdma",
                                       "options gdrdrv", "options iommu", "options vfio", "blacklist ",
                                       "softdep ",       "alias "};
    const char *end = text + bytes, *line;
    size_t n;

    while (next_line(&text, end, &line, &n)) {
        bool is_kept = false;

        for (size_t i = 0; i < sizeof(kept) / sizeof(kept[0]); i++)
            is_kept = is_kept || begins(line, n, kept[i]);
        if (is_kept)
            scrub_text(scrub, line, n, SCRUB_VERSIONS, out);
        else if (begins(line, n, "install ") || begins(line, n, "remove "))
            write_command(scrub, line, n, out);
        fputc('\n', out);
    }
}

/* --- ld.so.conf --- */

void scrub_paths(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    const char *end = text + bytes, *line;
    size_t n;

    while (next_line(&text, end, &line, &n)) {
        const char *comment = memchr(line, '#', n);

        scrub_text(scrub, line, comment ? (size_t)(comment - line) : n, SCRUB_VERSIONS, out);
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

/* Where a string or comment of a Python program ends, which begins at `at`. */
static size_t end_of_string(const char *text, size_t bytes, size_t at)
{
    char quote = text[at];
    bool is_long = at + 2 < bytes && text[at + 1] == quote && text[at + 2] == quote;
    size_t i = at + (is_long ? 3 : 1);

    for (; i < bytes; i++) {
        if (text[i] == '\\')
            i++;
        else if (!is_long && (text[i] == quote || text[i] == '\n'))
            return i + 1;
        else if (is_long && text[i] == quote && i + 2 < bytes && text[i + 1] == quote && text[i + 2] == quote)
            return i + 3;
    }
    return bytes;
}

/* A string of several lines without what it says. The lines stay, so that every other one keeps its number. */
static void write_emptied(const char *text, size_t bytes, FILE *out)
{
    bool is_long = bytes >= 6 && text[1] == text[0] && text[2] == text[0];

    for (size_t i = 0; i < bytes; i++)
        if (text[i] == '\n' || (is_long && (i < 3 || i >= bytes - 3)))
            fputc(text[i], out);
}

void scrub_python(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    char *code = calloc(1, bytes + 1);
    FILE *kept = code ? fmemopen(code, bytes + 1, "w") : NULL;
    size_t at = 0;
    long n;

    while (kept && at < bytes) {
        size_t end;

        if (text[at] == '#') {
            for (end = at; end < bytes && text[end] != '\n'; end++)
                ;
        } else if (text[at] == '"' || text[at] == '\'') {
            end = end_of_string(text, bytes, at);
            if (memchr(text + at, '\n', end - at))
                write_emptied(text + at, end - at, kept);
            else
                fwrite(text + at, 1, end - at, kept);
        } else {
            end = at + 1;
            fputc((unsigned char)text[at], kept);
        }
        at = end;
    }
    n = kept && fflush(kept) == 0 ? ftell(kept) : -1;
    if (n < 0)
        scrub->failed = true;
    else
        scrub_text(scrub, code, (size_t)n, SCRUB_VERSIONS | SCRUB_CODE, out);
    if (kept)
        fclose(kept);
    free(code);
}

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
