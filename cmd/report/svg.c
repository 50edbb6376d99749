/* SPDX-License-Identifier: Apache-2.0 */
#include "svg.h"

#include "page.h"

#include <math.h>
#include <stdarg.h>
#include <string.h>

#define WIDTH 760.0
#define HEIGHT 320.0
#define LEFT 64.0
#define RIGHT 12.0
#define TOP 14.0
#define BOTTOM 50.0
#define BOTTOM_SLANTED 104.0
#define CHARACTER 6.6 /* width of one, at the size of labels */
#define MAX_LABEL 28
#define MAX_SLANTED 22

/* Lines need stronger colours than the grey of a second bar. */
static const int line_colours[SVG_MAX_SERIES] = {0, 2, 3, 4, 5, 1};

/* --- axes --- */

/* The top of the axis and the step of its marks: 1, 2 or 5 times a power of ten. */
static double axis_top(double most, double *ret_step)
{
    double step = pow(10, floor(log10(most > 0 ? most : 1)));

    if (most / step < 2)
        step /= 5;
    else if (most / step < 5)
        step /= 2;
    *ret_step = step;
    return step * ceil(most / step * 1.0001);
}

static double y_of(double value, double top, double height)
{
    return TOP + (height - TOP) * (1 - value / top);
}

static void print_number(FILE *stream, double value)
{
    if (value >= 1e6)
        fprintf(stream, "%.3gM", value / 1e6);
    else if (value >= 1e4)
        fprintf(stream, "%.3gk", value / 1e3);
    else
        fprintf(stream, "%.4g", value);
}

static void print_bytes(FILE *stream, double bytes)
{
    static const char *const units[] = {"", "K", "M", "G", "T"};
    size_t unit = 0;

    while (bytes >= 1024 && unit + 1 < sizeof(units) / sizeof(units[0])) {
        bytes /= 1024;
        unit++;
    }
    fprintf(stream, "%.4g%s", bytes, units[unit]);
}

static void begin_figure(FILE *stream, const char *title, double total)
{
    page_print(stream,
               "<figure>\n<figcaption>%s</figcaption>\n"
               "<div class=\"plot\"><svg viewBox=\"0 0 %.0f %.0f\" role=\"img\" aria-label=\"%s\">\n",
               title, WIDTH, total, title);
}

static void end_figure(FILE *stream, const char *const *names, size_t n, const int *colours)
{
    fputs("</svg></div>\n", stream);
    fputs("<p class=\"legend\">", stream);
    for (size_t i = 0; i < n; i++)
        page_print(stream, "<span><i class=\"s%d\"></i>%s</span>", colours ? colours[i] : (int)i, names[i]);
    fputs("</p>\n</figure>\n", stream);
}

static void print_y_axis(FILE *stream, const char *label, double top, double step, double height)
{
    for (int i = 0; i * step <= top * 1.0001 && i < 40; i++) {
        double y = y_of(i * step, top, height);

        fprintf(stream, "<line class=\"%s\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>", i ? "grid" : "axis",
                LEFT, y, WIDTH - RIGHT, y);
        fprintf(stream, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">", LEFT - 8, y + 4);
        print_number(stream, i * step);
        fputs("</text>\n", stream);
    }
    page_print(stream,
               "<text class=\"label\" transform=\"translate(14 %.1f) rotate(-90)\" text-anchor=\"middle\">%s</text>\n",
               (TOP + height) / 2, label);
}

static void print_label(FILE *stream, const char *label, int most)
{
    char text[MAX_LABEL + 4];

    snprintf(text, sizeof(text), strlen(label) > (size_t)most ? "%.*s..." : "%.*s", most, label);
    page_print(stream, "%s</text>\n", text);
}

/* --- bars --- */

void svg_add(struct svg_pairs *pairs, double first, double second, const char *label, ...)
{
    va_list args;

    if (pairs->n == SVG_MAX_PAIRS)
        return;
    va_start(args, label);
    vsnprintf(pairs->labels[pairs->n], sizeof(pairs->labels[0]), label, args);
    va_end(args);
    pairs->values[0][pairs->n] = first;
    pairs->values[1][pairs->n++] = second;
}

static double bars_most(const struct svg_pairs *pairs)
{
    double most = 0;

    for (size_t i = 0; i < pairs->n; i++)
        most = fmax(most, fmax(pairs->values[0][i], pairs->values[1][i]));
    return most;
}

/* The bars of a label, between x and x + width. */
static void print_pair(FILE *stream, const struct svg_pairs *pairs, size_t i, double x, double width, double top,
                       double height)
{
    double one = fmin(width * 0.4, 60), left = x + width / 2 - one;

    for (size_t j = 0; j < 2; j++) {
        double value = pairs->values[j][i], y = y_of(value, top, height);

        if (!isfinite(value) || value < 0)
            continue;
        page_print(stream,
                   "<rect class=\"s%d\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\">"
                   "<title>%s, %s: %.4g %s</title></rect>",
                   (int)j, left + one * (double)j, y, fmax(one - 1, 1), fmax(height - y, 0.5), pairs->labels[i],
                   pairs->names[j], value, pairs->unit);
    }
    fputc('\n', stream);
}

bool svg_bars(FILE *stream, const struct svg_pairs *pairs)
{
    double most = bars_most(pairs), step, top, width, height = HEIGHT - BOTTOM;
    size_t longest = 0;
    bool is_slanted;

    if (pairs->n == 0 || most <= 0)
        return false;
    width = (WIDTH - LEFT - RIGHT) / (double)pairs->n;
    for (size_t i = 0; i < pairs->n; i++)
        longest = strlen(pairs->labels[i]) > longest ? strlen(pairs->labels[i]) : longest;
    longest = longest > MAX_LABEL ? MAX_LABEL : longest;
    is_slanted = (double)longest * CHARACTER > width;
    top = axis_top(most, &step);
    begin_figure(stream, pairs->title, is_slanted ? HEIGHT - BOTTOM + BOTTOM_SLANTED : HEIGHT - 20);
    print_y_axis(stream, pairs->y_label, top, step, height);
    for (size_t i = 0; i < pairs->n; i++) {
        double x = LEFT + width * (double)i, middle = x + width / 2;

        print_pair(stream, pairs, i, x, width, top, height);
        if (is_slanted)
            fprintf(stream, "<text transform=\"translate(%.1f %.1f) rotate(-32)\" text-anchor=\"end\">", middle + 4,
                    height + 16);
        else
            fprintf(stream, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">", middle, height + 20);
        print_label(stream, pairs->labels[i], is_slanted ? MAX_SLANTED : MAX_LABEL);
    }
    end_figure(stream, pairs->names, 2, NULL);
    return true;
}

/* --- lines --- */

struct svg_curve *svg_begin(struct svg_lines *lines, const char *name, ...)
{
    struct svg_curve *curve = &lines->curves[lines->n++];
    va_list args;

    curve->n = 0;
    va_start(args, name);
    vsnprintf(curve->name, sizeof(curve->name), name, args);
    va_end(args);
    return curve;
}

void svg_point(struct svg_curve *curve, double x, double y)
{
    if (curve->n == SVG_MAX_POINTS)
        return;
    curve->x[curve->n] = x;
    curve->y[curve->n++] = y;
}

struct range {
    double low, high, most;
    size_t points;
};

static double scaled(enum svg_scale scale, double x)
{
    return scale == SVG_NUMBERS ? x : log2(x);
}

static bool is_point(const struct svg_lines *lines, const struct svg_curve *curve, size_t i)
{
    return isfinite(curve->x[i]) && isfinite(curve->y[i]) && curve->y[i] >= 0 &&
           (lines->scale == SVG_NUMBERS || curve->x[i] > 0);
}

static struct range range_of(const struct svg_lines *lines)
{
    struct range range = {INFINITY, -INFINITY, 0, 0};

    for (size_t i = 0; i < lines->n; i++) {
        for (size_t j = 0; j < lines->curves[i].n; j++) {
            double x;

            if (!is_point(lines, &lines->curves[i], j))
                continue;
            x = scaled(lines->scale, lines->curves[i].x[j]);
            range.low = fmin(range.low, x);
            range.high = fmax(range.high, x);
            range.most = fmax(range.most, lines->curves[i].y[j]);
            range.points++;
        }
    }
    return range;
}

static double x_of(const struct range *range, double x)
{
    double wide = range->high - range->low, inset = 14;

    return LEFT + inset + (WIDTH - LEFT - RIGHT - 2 * inset) * (wide > 0 ? (x - range->low) / wide : 0.5);
}

static void print_x_axis(FILE *stream, const struct svg_lines *lines, const struct range *range, double height)
{
    double step = 1, first;

    if (lines->scale == SVG_NUMBERS)
        (void)axis_top(fmax(range->high - range->low, 1), &step);
    step = fmax(step, lines->scale == SVG_NUMBERS && range->high - range->low < 8 ? 1 : step);
    while ((range->high - range->low) / step > 9)
        step *= 2;
    if (lines->scale != SVG_NUMBERS)
        step = ceil(step);
    first = ceil(range->low / step - 1e-9) * step;
    for (int i = 0; first + i * step <= range->high + 1e-9 && i < 40; i++) {
        double x = first + i * step;

        fprintf(stream, "<line class=\"axis\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>", x_of(range, x),
                height, x_of(range, x), height + 5);
        fprintf(stream, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">", x_of(range, x), height + 20);
        if (lines->scale == SVG_BYTES)
            print_bytes(stream, exp2(x));
        else
            print_number(stream, lines->scale == SVG_NUMBERS ? x : exp2(x));
        fputs("</text>\n", stream);
    }
    page_print(stream, "<text class=\"label\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%s</text>\n",
               (LEFT + WIDTH - RIGHT) / 2, height + 42, lines->x_label);
}

static void print_curve(FILE *stream, const struct svg_lines *lines, size_t number, const struct range *range,
                        double top, double height)
{
    const struct svg_curve *curve = &lines->curves[number];
    bool has_begun = false;

    fprintf(stream, "<path class=\"s%d\" d=\"", line_colours[number]);
    for (size_t i = 0; i < curve->n; i++) {
        if (!is_point(lines, curve, i))
            continue;
        fprintf(stream, "%s%.1f %.1f", has_begun ? "L" : "M", x_of(range, scaled(lines->scale, curve->x[i])),
                y_of(curve->y[i], top, height));
        has_begun = true;
    }
    fputs(has_begun ? "\"/>\n" : "M0 0\"/>\n", stream);
    for (size_t i = 0; i < curve->n; i++) {
        if (!is_point(lines, curve, i))
            continue;
        fprintf(stream, "<circle class=\"s%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"3\"><title>", line_colours[number],
                x_of(range, scaled(lines->scale, curve->x[i])), y_of(curve->y[i], top, height));
        page_print(stream, "%s, ", curve->name);
        if (lines->scale == SVG_BYTES)
            print_bytes(stream, curve->x[i]);
        else
            print_number(stream, curve->x[i]);
        fprintf(stream, ": %.4g %s</title></circle>", curve->y[i], lines->unit);
    }
    fputc('\n', stream);
}

bool svg_lines(FILE *stream, const struct svg_lines *lines)
{
    struct range range = range_of(lines);
    double step, top, height = HEIGHT - BOTTOM;
    const char *names[SVG_MAX_SERIES];

    if (range.points < 2 || range.most <= 0)
        return false;
    top = axis_top(range.most, &step);
    begin_figure(stream, lines->title, HEIGHT);
    print_y_axis(stream, lines->y_label, top, step, height);
    print_x_axis(stream, lines, &range, height);
    for (size_t i = 0; i < lines->n; i++) {
        print_curve(stream, lines, i, &range, top, height);
        names[i] = lines->curves[i].name;
    }
    end_figure(stream, names, lines->n, line_colours);
    return true;
}
