/* SPDX-License-Identifier: Apache-2.0 */
#include "page.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static const char style[] =
    ":root{color-scheme:light dark;--fg:#1f2933;--soft:#5b6770;--bg:#fff;--card:#f6f7f9;--line:#dde1e6;--edge:#c3cad2;--good:#1a7f4b;"
    "--bad:#b3261e;--warn:#8a6100;--s0:#2f6fb0;--s1:#b9c0c7;--s2:#c0603a;--s3:#3f8f6b;--s4:#8a5fb0;--s5:#b08a1e}\n"
    "@media (prefers-color-scheme:dark){:root{--fg:#e3e6ea;--soft:#9aa5ae;--bg:#15191e;--card:#1d232a;--line:#343c45;--edge:#4a545f;"
    "--good:#5cc98f;--bad:#f28b82;--warn:#e0b354;--s0:#6aa7e8;--s1:#66707a;--s2:#e08a63;--s3:#62b891;--s4:#b08ad6;"
    "--s5:#d6b44f}}\n"
    "body{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}\n"
    "main{max-width:70rem;margin:0 auto;padding:2.5rem 1.25rem 4rem}\n"
    "h1{font-size:1rem;font-weight:600;color:var(--soft);margin:0 0 .75rem}\n"
    "h2{font-size:1.15rem;margin:2.5rem 0 .75rem}\n"
    ".verdict{font-size:1.35rem;line-height:1.4;font-weight:600;margin:0;padding:1rem 1.25rem;background:var(--card);"
    "border-left:.35rem solid var(--good);border-radius:.25rem;overflow-wrap:anywhere}\n"
    ".verdict.bad{border-color:var(--bad)}.verdict.warn{border-color:var(--warn)}"
    ".verdict.good,.verdict.bad,.verdict.warn{color:var(--fg)}\n"
    ".soft{color:var(--soft);font-size:.9rem}\n"
    ".good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}\n"
    "p:not(.verdict),li{max-width:52rem}\n"
    /* A shadow at an edge towards which the content can be scrolled. */
    ".scroll,.plot{overflow-x:auto;background:linear-gradient(90deg,var(--bg) 30%,transparent),"
    "linear-gradient(-90deg,var(--bg) 30%,transparent) 100% 0,linear-gradient(90deg,var(--edge),transparent),"
    "linear-gradient(-90deg,var(--edge),transparent) 100% 0;background-repeat:no-repeat;"
    "background-size:3rem 100%,3rem 100%,.75rem 100%,.75rem 100%;background-attachment:local,local,scroll,scroll}\n"
    "table{border-collapse:collapse;width:max-content;min-width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}\n"
    "th,td{text-align:left;padding:.4rem .6rem;max-width:26rem;border-bottom:1px solid var(--line);vertical-align:top}\n"
    "th:first-child,td:first-child{padding-left:0}\n"
    "th{font-weight:600;color:var(--soft);white-space:nowrap}\n"
    "td.n,th.n{text-align:right}td.good,td.warn,td.bad{white-space:nowrap}\n"
    "li{overflow-wrap:anywhere;margin:.2rem 0}\n"
    "figure{margin:1.5rem 0;max-width:58rem}figcaption{font-weight:600;margin-bottom:.25rem}\n"
    "figure svg{display:block;width:100%;min-width:34rem;height:auto}\n"
    "svg text{fill:var(--fg);font:12px system-ui,sans-serif}svg .label{fill:var(--soft)}\n"
    "svg .axis{stroke:var(--soft)}svg .grid{stroke:var(--line)}svg path{fill:none;stroke-width:2}\n"
    "rect.s0,circle.s0{fill:var(--s0)}rect.s1,circle.s1{fill:var(--s1)}rect.s2,circle.s2{fill:var(--s2)}\n"
    "rect.s3,circle.s3{fill:var(--s3)}rect.s4,circle.s4{fill:var(--s4)}rect.s5,circle.s5{fill:var(--s5)}\n"
    "path.s0{stroke:var(--s0)}path.s1{stroke:var(--s1)}path.s2{stroke:var(--s2)}path.s3{stroke:var(--s3)}"
    "path.s4{stroke:var(--s4)}path.s5{stroke:var(--s5)}\n"
    ".legend{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;margin:.25rem 0 0;font-size:.9rem;color:var(--soft)}\n"
    ".legend i{display:inline-block;width:.8rem;height:.8rem;border-radius:.15rem;margin-right:.4rem}\n"
    "i.s0{background:var(--s0)}i.s1{background:var(--s1)}i.s2{background:var(--s2)}i.s3{background:var(--s3)}"
    "i.s4{background:var(--s4)}i.s5{background:var(--s5)}\n"
    "code,pre{font:.88em ui-monospace,monospace;overflow-wrap:anywhere}pre{background:var(--card);padding:.75rem 1rem;"
    "overflow-x:auto;border-radius:.25rem}\n"
    "summary{cursor:pointer;color:var(--soft)}\n"
    "@media (max-width:40rem){main{padding:1.25rem 1rem 3rem}.verdict{font-size:1.1rem;padding:.75rem 1rem}}\n";

static void escape(FILE *stream, const char *text)
{
    for (; text && *text; text++) {
        switch (*text) {
        case '&':
            fputs("&amp;", stream);
            break;
        case '<':
            fputs("&lt;", stream);
            break;
        case '>':
            fputs("&gt;", stream);
            break;
        case '"':
            fputs("&quot;", stream);
            break;
        case '\'':
            fputs("&#39;", stream);
            break;
        default:
            /* Control characters are not allowed in HTML. */
            if ((unsigned char)*text >= 0x20 || *text == '\n' || *text == '\t')
                fputc(*text, stream);
        }
    }
}

void page_print(FILE *stream, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    for (size_t n; *format; format += n) {
        char one[8];

        n = *format == '%' ? strcspn(format, "sdfg") + 1 : strcspn(format, "%");
        snprintf(one, sizeof(one), "%.*s", (int)n, format);
        if (*format != '%')
            fwrite(format, 1, n, stream);
        else if (format[n - 1] == 's')
            escape(stream, va_arg(args, const char *));
        else if (format[n - 1] == 'd') {
            int number = va_arg(args, int);

            fprintf(stream, one, number);
        } else
            fprintf(stream, one, va_arg(args, double));
    }
    va_end(args);
}

double page_number(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key));
}

void page_begin(FILE *stream, const char *title, const char *tone, const char *verdict)
{
    fputs("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
          "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n",
          stream);
    page_print(stream, "<title>%s</title>\n<style>\n", title);
    fputs(style, stream);
    page_print(stream, "</style>\n</head>\n<body>\n<main>\n<header><h1>%s</h1>\n<p class=\"verdict %s\">%s</p>\n",
               title, tone, verdict);
}

void page_end(FILE *stream)
{
    fputs("</main>\n</body>\n</html>\n", stream);
}

void page_item(FILE *stream, const char *tone, const char *check, const char *format, ...)
{
    char *text = NULL;
    va_list args;

    va_start(args, format);
    if (vasprintf(&text, format, args) < 0)
        text = NULL;
    va_end(args);
    page_print(stream, "<li class=\"%s\">%s", tone, text);
    if (*check)
        page_print(stream, " <code>epkit doctor --only %s</code>", check);
    fputs("</li>\n", stream);
    free(text);
}

/* The value of "key" or "key.key". */
static const json_t *value_at(const json_t *row, const char *key)
{
    const char *dot = strchr(key, '.');
    char first[64];

    if (!dot)
        return json_object_get(row, key);
    snprintf(first, sizeof(first), "%.*s", (int)(dot - key), key);
    return json_object_get(json_object_get(row, first), dot + 1);
}

static const char *tone_of_word(const char *word)
{
    static const char *const words[][2] = {
        {"passed", "good"}, {"in range", "good"},   {"improvement", "good"}, {"slow", "warn"},
        {"failed", "bad"},  {"unsupported", "bad"}, {"regression", "bad"},   {"not run", "warn"},
    };

    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
        if (strcmp(words[i][0], word) == 0)
            return words[i][1];
    return "";
}

static void print_cell(FILE *stream, const struct page_column *column, const json_t *value)
{
    const char *text = json_string_value(value);

    if (*column->title != '#') {
        page_print(stream, "<td class=\"%s\">%s", text ? tone_of_word(text) : "", text);
    } else {
        fputs("<td class=\"n\">", stream);
        if (json_is_number(value))
            fprintf(stream, "%.*f", column->digits, json_number_value(value) * (column->scale > 0 ? column->scale : 1));
    }
    fputs("</td>", stream);
}

void page_table(FILE *stream, const struct page_column *columns, size_t n, const json_t *rows)
{
    json_t *row;
    size_t i;

    fputs("<div class=\"scroll\"><table><thead><tr>", stream);
    for (size_t c = 0; c < n; c++) {
        bool is_number = *columns[c].title == '#';

        fputs(is_number ? "<th class=\"n\">" : "<th>", stream);
        page_print(stream, "%s</th>", columns[c].title + is_number);
    }
    fputs("</tr></thead><tbody>\n", stream);
    json_array_foreach (rows, i, row) {
        fputs("<tr>", stream);
        for (size_t c = 0; c < n; c++)
            print_cell(stream, &columns[c], value_at(row, columns[c].key));
        fputs("</tr>\n", stream);
    }
    fputs("</tbody></table></div>\n", stream);
}
