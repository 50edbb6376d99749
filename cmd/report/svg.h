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

#define SVG_MAX_PAIRS 24

/* Two bars for each label. */
struct svg_pairs {
    const char *title, *y_label, *unit;
    const char *names[2];
    size_t n;
    char labels[SVG_MAX_PAIRS][80];
    double values[2][SVG_MAX_PAIRS];
};

enum svg_scale { SVG_NUMBERS, SVG_LOG2, SVG_BYTES /* log2, too */ };

#define SVG_MAX_POINTS 160

struct svg_curve {
    char name[64];
    size_t n;
    double x[SVG_MAX_POINTS], y[SVG_MAX_POINTS]; /* in ascending order of x; points with NAN are left out */
};

struct svg_lines {
    const char *title, *x_label, *y_label, *unit;
    enum svg_scale scale;
    size_t n;
    struct svg_curve curves[SVG_MAX_SERIES];
};

/* Adds two values, unless there are SVG_MAX_PAIRS. */
void svg_add(struct svg_pairs *pairs, double first, double second, const char *label, ...)
    __attribute__((format(printf, 4, 5)));

/* A new curve, which needs room; and a point of it, unless there are SVG_MAX_POINTS. */
struct svg_curve *svg_begin(struct svg_lines *lines, const char *name, ...) __attribute__((format(printf, 2, 3)));
void svg_point(struct svg_curve *curve, double x, double y);

/* false: there is nothing to draw, and nothing was printed. */
bool svg_bars(FILE *stream, const struct svg_pairs *pairs);
bool svg_lines(FILE *stream, const struct svg_lines *lines);

#endif
