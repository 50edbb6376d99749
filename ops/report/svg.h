/* SPDX-License-Identifier: Apache-2.0 */
/*
 * svg.h - plots as SVG inside of a page, without any other program. Colours come from the page's style (page.h), so
 * that they suit a light and a dark page. Each plot is a <figure> with a legend of its own and values as tooltips.
 */
#ifndef EP_OPS_REPORT_SVG_H
#define EP_OPS_REPORT_SVG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#define SVG_MAX_SERIES 6 /* colours that the page has; a seventh series is left out */

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

/* false: there is nothing to be drawn, and nothing was printed. */
bool svg_bars(FILE *stream, const struct svg_bars *bars);
bool svg_lines(FILE *stream, const struct svg_lines *lines);

#endif
