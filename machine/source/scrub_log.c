/* SPDX-License-Identifier: Apache-2.0 */
/* scrub_log.c - what stays of logs. */
#include "scrub.h"

#include <ctype.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/*
 * Does the text begin with this form? 'd': a digit, '_': a digit or a blank, 'x': a hexadecimal digit, 'a': a letter.
 */
static bool has_form(const char *text, size_t bytes, const char *form)
{
    for (size_t i = 0; form[i]; i++) {
        unsigned char c = i < bytes ? (unsigned char)text[i] : 0;

        if (form[i] == 'd'   ? !isdigit(c)
            : form[i] == '_' ? !isdigit(c) && c != ' '
            : form[i] == 'x' ? !isxdigit(c)
            : form[i] == 'a' ? !isalpha(c)
                             : c != (unsigned char)form[i])
            return false;
    }
    return true;
}

/* "[   12.345678]", RFC 3339 with or without a fraction and a zone, "Nov 21 12:00:00"; nothing else. */
static bool is_time(const char *text, size_t bytes)
{
    static const char rfc3339[] = "dddd-dd-ddTdd:dd:dd";
    size_t n = sizeof(rfc3339) - 1;

    if (has_form(text, bytes, rfc3339)) {
        n += text[n] == '.' ? 1 + strspn(text + n + 1, "0123456789") : 0;
        if (text[n] == 'Z' || text[n] == 'z')
            n++;
        else if (text[n] == '+' || text[n] == '-')
            n += has_form(text + n + 1, bytes - n - 1, "dd:dd") ? 6 : 0;
        return n == bytes && bytes <= 35;
    }
    if (bytes > 2 && text[0] == '[' && bytes < 24) {
        n = 1 + strspn(text + 1, " ");
        n += strspn(text + n, "0123456789");
        return has_form(text + n, bytes - n, ".dddddd]") && n + 8 == bytes;
    }
    return bytes == 15 && has_form(text, bytes, "aaa _d dd:dd:dd");
}

/* "0000:0f:00", "0000:0f:00.0" */
static bool is_device(const char *text, size_t bytes)
{
    return has_form(text, bytes, "xxxx:xx:xx") && (bytes == 10 || (bytes == 12 && has_form(text + 10, 2, ".x")));
}

void scrub_event(struct scrub *scrub, const char *text, size_t bytes, FILE *out)
{
    (void)scrub;
    if (is_time(text, bytes) || is_device(text, bytes))
        fwrite(text, 1, bytes, out);
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
