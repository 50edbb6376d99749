/* SPDX-License-Identifier: Apache-2.0 */
#include "page.h"

#include "common/memory.h"

#include <math.h>

/* Small: a page as wide as a phone shows it at its size. */
#define WIDTH 420.0
#define HEIGHT 270.0
#define LEFT 60.0 /* "12.5k" beside the name of the axis */
#define RIGHT 8.0
#define TOP 10.0
#define BASE 222.0 /* y of the horizontal axis */
#define INSET 14.0 /* of the first and the last point of a curve */

/* Lines need stronger colours than the grey of a second bar. */
static const int colours[SVG_MAX_SERIES] = {0, 2, 3, 4, 5, 1};

struct svg_series *svg_begin(struct svg_plot *plot, const char *name, ...)
{
    struct svg_series *series = &plot->series[plot->n++];

    series->n = 0;
    WITH_ARGS(args, name, vsnprintf(series->name, sizeof(series->name), name, args));
    return series;
}

void svg_point(struct svg_series *series, double x, double y)
{
    if (series->n == SVG_MAX_POINTS)
        return;
    series->x[series->n] = x;
    series->y[series->n++] = y;
}

/* --- scales --- */

/* What is drawn: the range of the points, and the top of the vertical axis with the step of its marks. */
struct range {
    double low, high, most, top, step;
    size_t points;
};

static bool is_log(const struct svg_plot *plot)
{
    return plot->scale == SVG_LOG2 || plot->scale == SVG_BYTES;
}

static double scaled(const struct svg_plot *plot, double x)
{
    return is_log(plot) ? log2(x) : x;
}

static bool is_point(const struct svg_plot *plot, const struct svg_series *series, size_t i)
{
    return isfinite(series->x[i]) && isfinite(series->y[i]) && series->y[i] >= 0 && (!is_log(plot) || series->x[i] > 0);
}

/* The step of the marks of an axis: 1, 2 or 5 times a power of ten. */
static double step_of(double most)
{
    double step = pow(10, floor(log10(most > 0 ? most : 1)));

    return most / step < 2 ? step / 5 : most / step < 5 ? step / 2 : step;
}

static struct range range_of(const struct svg_plot *plot)
{
    struct range range = {.low = INFINITY, .high = -INFINITY};

    FOR_EACH (series, plot->series, plot->n) {
        for (size_t j = 0; j < series->n; j++) {
            if (!is_point(plot, series, j))
                continue;
            range.low = fmin(range.low, scaled(plot, series->x[j]));
            range.high = fmax(range.high, scaled(plot, series->x[j]));
            range.most = fmax(range.most, series->y[j]);
            range.points++;
        }
    }
    range.step = step_of(range.most);
    range.top = range.step * ceil(range.most / range.step * 1.0001);
    return range;
}

static double x_of(const struct range *range, double x)
{
    double wide = range->high - range->low;

    return LEFT + INSET + (WIDTH - LEFT - RIGHT - 2 * INSET) * (wide > 0 ? (x - range->low) / wide : 0.5);
}

static double y_of(const struct range *range, double y)
{
    return TOP + (BASE - TOP) * (1 - y / range->top);
}

/* --- axes --- */

static void print_number(FILE *stream, bool is_bytes, double value)
{
    static const char units[] = " KMGT";
    size_t unit = 0;

    while (is_bytes && value >= 1024 && unit < 4) {
        value /= 1024;
        unit++;
    }
    if (unit > 0)
        fprintf(stream, "%.4g%c", value, units[unit]);
    else if (value >= 1e6)
        fprintf(stream, "%.3gM", value / 1e6);
    else if (value >= 1e4)
        fprintf(stream, "%.3gk", value / 1e3);
    else
        fprintf(stream, "%.4g", value);
}

static void print_y_axis(FILE *stream, const struct svg_plot *plot, const struct range *range)
{
    for (int i = 0; i * range->step <= range->top * 1.0001 && i < 40; i++) {
        double y = y_of(range, i * range->step);

        fprintf(stream, "<line class=\"%s\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>", i ? "grid" : "axis",
                LEFT, y, WIDTH - RIGHT, y);
        fprintf(stream, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">", LEFT - 8, y + 4);
        print_number(stream, false, i * range->step);
        fputs("</text>\n", stream);
    }
    page_print(stream,
               "<text class=\"label\" transform=\"translate(14 %.1f) rotate(-90)\" text-anchor=\"middle\">%s</text>\n",
               (TOP + BASE) / 2, plot->y_label);
}

static void print_x_axis(FILE *stream, const struct svg_plot *plot, const struct range *range)
{
    double wide = range->high - range->low, step = is_log(plot) ? 1 : step_of(fmax(wide, 1)), first;

    step = fmax(step, wide < 8 ? 1 : step);
    while (wide / step > 6)
        step *= 2;
    if (is_log(plot))
        step = ceil(step);
    first = ceil(range->low / step - 1e-9) * step;
    for (int i = 0; first + i * step <= range->high + 1e-9 && i < 40; i++) {
        double at = first + i * step, x = x_of(range, at);

        fprintf(stream, "<line class=\"axis\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>", x, BASE, x, BASE + 5);
        fprintf(stream, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">", x, BASE + 20);
        print_number(stream, plot->scale == SVG_BYTES, is_log(plot) ? exp2(at) : at);
        fputs("</text>\n", stream);
    }
    page_print(stream, "<text class=\"label\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%s</text>\n",
               (LEFT + WIDTH - RIGHT) / 2, BASE + 42, plot->x_label);
}

/* --- curves --- */

static void print_curve(FILE *stream, const struct svg_plot *plot, size_t number, const struct range *range)
{
    const struct svg_series *series = &plot->series[number];
    const char *letter = "M";

    /* Not by colour alone. */
    fprintf(stream, "<path class=\"s%d%s\" d=\"", colours[number], number % 2 ? " dashed" : "");
    for (size_t i = 0; i < series->n; i++) {
        if (!is_point(plot, series, i))
            continue;
        fprintf(stream, "%s%.1f %.1f", letter, x_of(range, scaled(plot, series->x[i])), y_of(range, series->y[i]));
        letter = "L";
    }
    fputs("\"/>\n", stream);
    for (size_t i = 0; i < series->n; i++) {
        if (!is_point(plot, series, i))
            continue;
        page_print(stream, "<circle class=\"s%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"3\"><title>%s, ", colours[number],
                   x_of(range, scaled(plot, series->x[i])), y_of(range, series->y[i]), series->name);
        print_number(stream, plot->scale == SVG_BYTES, series->x[i]);
        fprintf(stream, ": %.4g %s</title></circle>\n", series->y[i], plot->unit);
    }
}

bool svg_draw(FILE *stream, const struct svg_plot *plot)
{
    struct range range = range_of(plot);

    if (range.points < 2 || range.most <= 0)
        return false;
    page_print(stream,
               "<figure>\n<figcaption>%s</figcaption>\n"
               "<svg viewBox=\"0 0 %.0f %.0f\" role=\"img\" aria-label=\"%s\">\n",
               plot->title, WIDTH, HEIGHT, plot->title);
    print_y_axis(stream, plot, &range);
    print_x_axis(stream, plot, &range);
    for (size_t i = 0; i < plot->n; i++)
        print_curve(stream, plot, i, &range);
    fputs("</svg>\n<p class=\"legend\">", stream);
    for (size_t i = 0; i < plot->n; i++)
        page_print(stream, "<span><i class=\"s%d%s\"></i>%s</span>", colours[i], i % 2 ? " dashed" : "",
                   plot->series[i].name);
    fputs("</p>\n</figure>\n", stream);
    return true;
}
