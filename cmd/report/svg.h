/* SPDX-License-Identifier: Apache-2.0 */
/*
 * svg.h - plots as inline SVG, without external programs. Colours come from the style of the page (page.h), for light
 * and dark mode. Each plot is a <figure> with its own legend and values as tooltips.
 */
#ifndef EP_REPORT_SVG_H
#define EP_REPORT_SVG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

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
