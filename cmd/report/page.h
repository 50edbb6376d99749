/* SPDX-License-Identifier: Apache-2.0 */
/* page.h - the frame of HTML reports, and plots: one self-contained file, for light and dark mode and all widths. */
#ifndef EP_REPORT_PAGE_H
#define EP_REPORT_PAGE_H

#include "common/json.h"
#include "common/output.h"

#include <stdbool.h>
#include <stdio.h>

/* Prints everything up to the verdict. */
void page_begin(FILE *stream, const char *title, const char *tone, const char *verdict);
void page_end(FILE *stream);

/* As fprintf(), for numbers of type int and double, and for texts: their special characters of HTML are escaped. */
void page_print(FILE *stream, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A line of a list; `check`: what `epkit doctor --only` is to look at, or "". */
void page_item(FILE *stream, const char *tone, const char *check, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Bars in pairs: a label, and a value for each of two names. */
struct page_bars {
    const char *title, *unit, *names[2];
    size_t n;
    struct {
        char label[80];
        double values[2];
    } pairs[24];
};

/* Adds a pair, if there is room. */
void page_pair(struct page_bars *bars, double first, double second, const char *label, ...)
    __attribute__((format(printf, 4, 5)));
void page_draw(FILE *stream, const struct page_bars *bars);

/* --- svg.c: plots as inline SVG, each a <figure> with its own legend and values as tooltips --- */

#define SVG_MAX_SERIES 6 /* number of colours of the page; further series are left out */
#define SVG_MAX_POINTS 160

enum svg_scale { SVG_NUMBERS, SVG_LOG2, SVG_BYTES /* log2, too */ };

struct svg_series {
    char name[80];
    size_t n;
    double x[SVG_MAX_POINTS], y[SVG_MAX_POINTS]; /* in ascending order of x; points with NAN are left out */
};

struct svg_plot {
    char title[200];
    const char *x_label, *y_label, *unit;
    enum svg_scale scale;
    size_t n;
    struct svg_series series[SVG_MAX_SERIES];
};

/* A new series, which needs room; and a point of it, unless there are SVG_MAX_POINTS. */
struct svg_series *svg_begin(struct svg_plot *plot, const char *name, ...) __attribute__((format(printf, 2, 3)));
void svg_point(struct svg_series *series, double x, double y);

/* false: there is nothing to draw, and nothing was printed. */
bool svg_draw(FILE *stream, const struct svg_plot *plot);

#endif
