/* SPDX-License-Identifier: Apache-2.0 */
/* scrub_log.c - what stays of the kernel log: the driver's start, and its Xids. */
#include "source/scrub.h"

#include <ctype.h>
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

/* Of other lines only the one with which a driver starts matters. */
void scrub_kernel_log(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    static const char xid[] = "NVRM: Xid (PCI:", loading[] = "NVRM: loading NVIDIA";
    const char *end = text + bytes, *line, *found;
    size_t n;

    while (scrub_line(&text, end, &line, &n)) {
        found = memmem(line, n, xid, sizeof(xid) - 1);
        if (found) {
            write_xid(line, found, n - (size_t)(found - line), out);
            continue;
        }
        found = memmem(line, n, loading, sizeof(loading) - 1);
        if (found) {
            scrub_text(scrub, found, n - (size_t)(found - line), SCRUB_VERSIONS, out);
            fputc('\n', out);
        }
    }
}
