/* SPDX-License-Identifier: Apache-2.0 */
#include "page.h"

#include "common/embedded.h"
#include "common/memory.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

extern const struct embedded report_style[];

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
            out_html(stream, va_arg(args, const char *));
        else if (format[n - 1] == 'd') {
            int number = va_arg(args, int);

            fprintf(stream, one, number);
        } else
            fprintf(stream, one, va_arg(args, double));
    }
    va_end(args);
}

void page_begin(FILE *stream, const char *title, const char *tone, const char *verdict)
{
    fputs("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
          "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n",
          stream);
    page_print(stream, "<title>%s</title>\n<style>\n", title);
    fputs(report_style[0].text, stream);
    page_print(stream,
               "</style>\n</head>\n<body>\n<main>\n<header><h1>%s</h1>\n"
               "<p class=\"verdict %s\"><span>%s</span></p>\n",
               title, tone, verdict);
}

void page_end(FILE *stream)
{
    fputs("</main>\n</body>\n</html>\n", stream);
}

void page_item(FILE *stream, const char *tone, const char *check, const char *format, ...)
{
    char *text = WITH_ARGS(args, format, memory_vprintf(format, args));

    page_print(stream, "<li class=\"%s\">%s", tone, text);
    if (*check)
        page_print(stream, " <code>epkit doctor --only %s</code>", check);
    fputs("</li>\n", stream);
    free(text);
}

void page_pair(struct page_bars *bars, double first, double second, const char *label, ...)
{
    if (bars->n == COUNT(bars->pairs))
        return;
    WITH_ARGS(args, label, vsnprintf(bars->pairs[bars->n].label, sizeof(bars->pairs[0].label), label, args));
    bars->pairs[bars->n].values[0] = first;
    bars->pairs[bars->n++].values[1] = second;
}

void page_draw(FILE *stream, const struct page_bars *bars)
{
    double most = 0;

    for (size_t i = 0; i < bars->n; i++)
        most = fmax(most, fmax(bars->pairs[i].values[0], bars->pairs[i].values[1]));
    if (most <= 0)
        return;
    page_print(stream, "<figure>\n<figcaption>%s</figcaption>\n<dl>\n", bars->title);
    for (size_t i = 0; i < bars->n; i++) {
        page_print(stream, "<dt>%s</dt>", bars->pairs[i].label);
        for (int k = 0; k < 2; k++) {
            double value = bars->pairs[i].values[k];

            fprintf(stream, "<dd class=\"s%d\" style=\"--w:%.1f%%\">", k, 100 * fmax(value, 0) / most);
            page_print(stream, "%.4g %s %s</dd>\n", value, bars->unit, bars->names[k]);
        }
    }
    fputs("</dl>\n</figure>\n", stream);
}
