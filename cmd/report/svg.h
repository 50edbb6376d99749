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

struct svg_series {
    const char *name;
    const double *values; /* as many as there are labels; NAN: no bar */
};

struct svg_bars {
    const char *title, *y_label, *unit;
    const char *const *labels;
    size_t n_labels;
    const struct svg_series *series;
    size_t n_series;
    bool is_stacked;
};

struct svg_curve {
    const char *name;
    const double *x, *y; /* in ascending order of x; points with NAN are left out */
    size_t n;
};

enum svg_scale { SVG_NUMBERS, SVG_LOG2, SVG_BYTES /* log2, too */ };

struct svg_lines {
    const char *title, *x_label, *y_label, *unit;
    enum svg_scale scale;
    const struct svg_curve *curves;
    size_t n_curves;
};

/* false: there is nothing to draw, and nothing was printed. */
bool svg_bars(FILE *stream, const struct svg_bars *bars);
bool svg_lines(FILE *stream, const struct svg_lines *lines);

#endif
