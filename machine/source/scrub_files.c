/* SPDX-License-Identifier: Apache-2.0 */
/* scrub_files.c - what stays of the files of packages and administrators. */
#include "scrub.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* A line without surrounding white space; false after the last. */
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

/* --- options of the driver --- */

/* A number of 32 bits: hexadecimal with 0x, or decimal and too short for a serial number. */
static bool is_number(const char *text, size_t n)
{
    if (n > 2 && n <= 10 && text[0] == '0' && text[1] == 'x')
        return strspn(text + 2, "0123456789abcdefABCDEF") >= n - 2;
    return n > 0 && n <= 9 && strspn(text, "0123456789") >= n;
}

/* "PeerMappingOverride=1;RMNvLinkDisableLinks=0x0": keys defined by the driver, with numbers. */
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
            if (begins(value, name, beginnings[i]) && strcspn(value, "-:./@ ") >= name &&
                is_number(value + name + 1, length - name - 1)) {
                fwrite(value, 1, length, out);
                break;
            }
        }
        value += length;
        if (value < end)
            fputc(*value++, out);
    }
}

void scrub_dwords(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    (void)scrub;
    write_dwords(text, bytes, out);
}

/* "RegistryDwords: "PeerMappingOverride=1;"", the only parameter of the driver that is read. */
void scrub_params(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    static const char name[] = "RegistryDwords: ";
    const char *end = text + bytes, *line;
    size_t n;

    (void)scrub;
    while (next_line(&text, end, &line, &n)) {
        if (!begins(line, n, name))
            continue;
        fputs(name, out);
        write_dwords(line + sizeof(name) - 1, n - (sizeof(name) - 1), out);
        fputc('\n', out);
    }
}

/* --- ld.so.conf --- */

/* Only these lines stay: a folder, "include" with patterns of files, "driver" with a provider. */
static void write_path_line(struct scrub *scrub, const char *line, size_t n, FILE *out)
{
    static const char include[] = "include ", driver[] = "driver ";
    const char *name = line + sizeof(driver) - 1;

    if (begins(line, n, include) && memchr(line, '/', n)) {
        fputs(include, out);
        scrub_path_list(scrub, line + sizeof(include) - 1, n - (sizeof(include) - 1), out);
    } else if (n > 0 && *line == '/') {
        scrub_path_list(scrub, line, n, out);
    } else if ((begins(line, n, driver) && scrub_is_plain(name, n - (sizeof(driver) - 1))))
        scrub_text(scrub, line, n, SCRUB_NAME, out);
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

/* --- processors --- */

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

/* --- facts --- */

/* "+29d31c0": the beginning of a commit of Git. */
static size_t commit_bytes(const char *text, size_t bytes)
{
    size_t n = bytes > 1 && *text == '+' ? strspn(text + 1, "0123456789abcdef") : 0;

    return (n == 7 || n == 8) && (n + 1 == bytes || text[n + 1] == '.' || text[n + 1] == '\n') ? n + 1 : 0;
}

/* "1.2.1+29d31c0", "1:3.4.5-1+cuda12.8": numbers and words of common software. */
void scrub_version(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    static const char allowed[] = "0123456789.+_~:abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-";
    bool is_line = bytes > 0 && text[bytes - 1] == '\n';
    char *kept = NULL;
    size_t n = bytes - is_line, n_kept = 0, n_plain = 0;
    FILE *passed = open_memstream(&kept, &n_kept);

    if (passed && n > 0 && n <= 64 && isdigit((unsigned char)*text) && strspn(text, allowed) >= n)
        scrub_text(scrub, text, n, SCRUB_VERSIONS | SCRUB_NAME, passed);
    if (!passed || fclose(passed) != 0) {
        scrub->failed = true;
    } else {
        while (n_plain < n_kept && !commit_bytes(kept + n_plain, n_kept - n_plain))
            n_plain++;
        scrub_parts(scrub, kept, n_plain, out);
        n = commit_bytes(kept + n_plain, n_kept - n_plain);
        fwrite(kept + n_plain, 1, n, out);
        scrub_parts(scrub, kept + n_plain + n, n_kept - n_plain - n, out);
    }
    fputs(is_line ? "\n" : "", out);
    free(kept);
}
