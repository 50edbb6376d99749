/* SPDX-License-Identifier: Apache-2.0 */
/* scrub_log.c - what stays of logs: of the kernel's the driver's start, Xids and SXids. */
#include "source/scrub.h"

#include <ctype.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* The time in front of a line, before the name of the host: "[  12.345678]", RFC 3339, or "Nov 21 12:00:00". */
static void write_time(const char *line, size_t bytes, FILE *out)
{
    size_t n = 0;

    if (bytes > 2 && line[0] == '[') {
        n = 1 + strspn(line + 1, " 0123456789.");
        n = line[n] == ']' ? n + 1 : 0;
    } else if (bytes > 19 && line[10] == 'T') {
        n = strspn(line, "0123456789-+:.TZ");
        n = n >= 19 ? n : 0;
    } else if (bytes > 16 && line[3] == ' ' && strspn(line + 4, " 0123456789:") == 12) {
        for (size_t i = 0; i < 3; i++)
            n += isalpha((unsigned char)line[i]) != 0;
        n = n == 3 ? 15 : 0;
    }
    if (n > 0 && n < 48 && n < bytes && line[n] == ' ')
        fprintf(out, "%.*s ", (int)n, line);
}

/* Xid 154: "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)". */
static void write_recovery(const char *text, size_t bytes, FILE *out)
{
    static const char *const actions[] = {"None", "GPU Reset Required", "Node Reboot Required", "Drain P2P",
                                          "Drain and Reset"};
    static const char changed[] = "GPU recovery action changed from ";
    const char *at = memmem(text, bytes, changed, sizeof(changed) - 1), *end = text + bytes;
    size_t n = sizeof(changed) - 1;

    for (int side = 0; at && side < 2; side++) {
        bool known = false;

        n += at + n + 4 < end && strncmp(at + n, "0x", 2) == 0 ? 2 : 0;
        n += strspn(at + n, "0123456789abcdef");
        for (size_t i = 0; i < sizeof(actions) / sizeof(actions[0]) && !known; i++) {
            size_t length = strlen(actions[i]);

            known = at + n + length + 3 <= end && strncmp(at + n, " (", 2) == 0 &&
                    strncmp(at + n + 2, actions[i], length) == 0 && at[n + 2 + length] == ')';
            n += known ? length + 3 : 0;
        }
        if (!known || (side == 0 && strncmp(at + n, " to ", 4) != 0))
            return;
        n += side == 0 ? 4 : 0;
    }
    if (at)
        fprintf(out, ", %.*s", (int)n, at);
}

/*
 * "NVRM: Xid (PCI:0000:0f:00): 79, pid=1234, name=..., ...": up to the number. What follows has the name of a process
 * and any text; of texts one that the driver always writes in the same way stays.
 */
static void write_xid(const char *line, const char *xid, size_t bytes, FILE *out)
{
    static const char lost[] = "GPU has fallen off the bus.";
    size_t used = strcspn(xid, "(") + sizeof("(PCI:") - 1;

    used += strspn(xid + used, "0123456789abcdefABCDEF:.");
    if (used + 3 >= bytes || strncmp(xid + used, "): ", 3) != 0)
        return;
    used += 3;
    used += strspn(xid + used, "0123456789");
    if (used > bytes || used >= 64)
        return;
    write_time(line, (size_t)(xid - line), out);
    fprintf(out, "%.*s", (int)used, xid);
    write_recovery(xid + used, bytes - used, out);
    if (memmem(xid, bytes, lost, sizeof(lost) - 1))
        fprintf(out, ", pid='<unknown>', name=<unknown>, %s", lost);
    fputc('\n', out);
}

/* "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 44 ...": the number, and how grave it is. */
static void write_sxid(const char *line, const char *sxid, size_t bytes, FILE *out)
{
    static const char *const kinds[] = {", Fatal", ", Non-fatal"};
    size_t used = sizeof("SXid (PCI:") - 1, kind;

    used += strspn(sxid + used, "0123456789abcdefABCDEF:.");
    if (used + 3 >= bytes || strncmp(sxid + used, "): ", 3) != 0)
        return;
    used += 3;
    used += strspn(sxid + used, "0123456789");
    if (used > bytes || used >= 64)
        return;
    for (kind = 0; kind < 2; kind++)
        if (bytes - used >= strlen(kinds[kind]) && strncmp(sxid + used, kinds[kind], strlen(kinds[kind])) == 0)
            break;
    write_time(line, (size_t)(sxid - line), out);
    fprintf(out, "%.*s%s\n", (int)used, sxid, kind < 2 ? kinds[kind] : "");
}

/* Of other lines only the one with which a driver starts matters. */
void scrub_kernel_log(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    static const char xid[] = "NVRM: Xid (PCI:", loading[] = "NVRM: loading NVIDIA", sxid[] = "SXid (PCI:";
    const char *end = text + bytes, *line, *found;
    size_t n;

    while (scrub_line(&text, end, &line, &n)) {
        found = memmem(line, n, xid, sizeof(xid) - 1);
        if (found) {
            write_xid(line, found, n - (size_t)(found - line), out);
            continue;
        }
        found = memmem(line, n, sxid, sizeof(sxid) - 1);
        if (found) {
            write_sxid(line, found, n - (size_t)(found - line), out);
            continue;
        }
        found = memmem(line, n, loading, sizeof(loading) - 1);
        if (found) {
            write_time(line, (size_t)(found - line), out);
            scrub_text(scrub, found, n - (size_t)(found - line), SCRUB_VERSIONS | SCRUB_WORDS, out);
            fputc('\n', out);
        }
    }
}

/* --- logs that tell the version of the fabric manager --- */

void scrub_fabric_log(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    static const char *const words[] = {"Upgrade: nvidia-fabric-manager-", "Installed: nvidia-fabric-manager-",
                                        "Upgrade: nvidia-fabricmanager-", "Installed: nvidia-fabricmanager-",
                                        "Fabric Manager version "};
    const char *end = text + bytes, *line, *found;
    size_t n, n_version;

    (void)scrub;
    while (scrub_line(&text, end, &line, &n)) {
        for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
            found = memmem(line, n, words[i], strlen(words[i]));
            n_version = found ? strspn(found + strlen(words[i]), "0123456789.") : 0;
            /* "580.126.09": an address has more points, a serial number more digits. */
            if (n_version > 0 && n_version <= 10 && strspn(found + strlen(words[i]), "0123456789") == 3)
                fprintf(out, "%s%.*s\n", words[i], (int)n_version, found + strlen(words[i]));
        }
    }
}

/* --- journal of epkit install --- */

void scrub_journal(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    static const char *const events[] = {"begin",   "start",    "end",  "failed",      "reboot", "stopped", "finished",
                                         "rebuilt", "repaired", "undo", "uninstalled", "undone", "again"};
    const char *end = text + bytes, *line;
    size_t n;

    while (scrub_line(&text, end, &line, &n)) {
        json_t *value = n < 65536 ? json_loadb(line, n, 0, NULL) : NULL;
        const char *event = json_string_value(json_object_get(value, "event"));
        const char *boot = json_string_value(json_object_get(value, "boot"));
        const char *step = json_string_value(json_object_get(value, "step"));

        for (size_t i = 0; event && i < sizeof(events) / sizeof(events[0]); i++) {
            if (strcmp(event, events[i]) != 0)
                continue;
            fprintf(out, "{\"v\": 1, \"event\": \"%s\", \"boot\": \"", event);
            scrub_text(scrub, boot ? boot : "", boot ? strcspn(boot, "\"\\") : 0, SCRUB_NAME | SCRUB_WORDS, out);
            fputc('"', out);
            if (step && !step[strcspn(step, "\"\\")]) {
                fputs(", \"step\": \"", out);
                scrub_text(scrub, step, strlen(step), SCRUB_NAME | SCRUB_WORDS, out);
                fputc('"', out);
            }
            fputs("}\n", out);
        }
        json_decref(value);
    }
}

/* --- start files of shells --- */

bool scrub_evaluates_environ(const char *line, size_t n)
{
    static const char *const words[] = {"source ", ". ", "eval ", "export ", "xargs"};
    size_t skip = strspn(line, " \t");

    if ((skip < n && line[skip] == '#') || !memmem(line, n, "/proc/1/environ", 15))
        return false;
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        const char *at = memmem(line, n, words[i], strlen(words[i]));

        if (at && (at == line || strchr(" \t;&|($`", at[-1])))
            return true;
    }
    return false;
}

void scrub_start_file(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    const char *end = text + bytes, *line;
    size_t n;

    (void)scrub;
    while (scrub_line(&text, end, &line, &n))
        if (scrub_evaluates_environ(line, n))
            fputs("source /proc/1/environ\n", out);
}
