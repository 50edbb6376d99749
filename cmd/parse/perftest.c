/* SPDX-License-Identifier: Apache-2.0 */
/*
 * perftest.c - ib_write_bw and the other programs of perftest:
 *
 *                         RDMA_Write BW Test
 *      Dual-port       : OFF          Device         : mlx5_0
 *      #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 *      65536      5000             43012.44            42998.71              0.687979
 *
 * MB are 1048576 bytes here (MiB in newer versions), Gb (--report_gbits) 1e9 bits. With -a there is a row for each
 * size. Latency tests have t_typical and t_avg instead.
 */
#include "common/text.h"
#include "parse_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { UNIT_NONE, UNIT_MIB, UNIT_GBIT, UNIT_LATENCY, UNIT_LATENCY_SHORT, UNIT_QOS = 16 };

/* "RDMA_Write BW Test", "Send Bidirectional Post List BW Test", "Atomic FETCH_AND_ADD Latency Test" ... */
static const struct verb {
    const char *title, *program, *op;
} verbs[] = {
    {"RDMA_Write_Imm", "write_imm", "write with immediate"},
    {"RDMA_Write", "write", "write"},
    {"RDMA_Read", "read", "read"},
    {"Send", "send", "send"},
    {"Atomic FETCH_AND_ADD", "atomic", "atomic"},
    {"Atomic CMP_AND_SWAP", "atomic", "atomic"},
    {"Raw Eth", "raw_ethernet", "raw Ethernet"},
};

/* false: the line is no title. The name of the program includes the option that the title implies. */
static bool read_title(const char *line, char *ret_program, size_t bytes)
{
    const char *text = line + strspn(line, " ");
    bool is_both = false;

    for (size_t i = 0; i < sizeof(verbs) / sizeof(verbs[0]); i++) {
        if (!text_begins(text, verbs[i].title) || text[strlen(verbs[i].title)] != ' ')
            continue;
        text += strlen(verbs[i].title) + 1;
        if (text_begins(text, "Bidirectional ")) {
            is_both = true;
            text += strlen("Bidirectional ");
        }
        if (text_begins(text, "Post List "))
            text += strlen("Post List ");
        if (!text_begins(text, "BW Test") && !text_begins(text, "Latency Test"))
            return false;
        snprintf(ret_program, bytes, "%s%s_%s%s", strcmp(verbs[i].program, "raw_ethernet") == 0 ? "" : "ib_",
                 verbs[i].program, *text == 'B' ? "bw" : "lat", is_both ? " -b" : "");
        return true;
    }
    return false;
}

bool perftest_is_title(const char *line)
{
    char program[64];

    return read_title(line, program, sizeof(program));
}

/* The operation, from the program: "write", "send (both ways)", "read latency". */
static void op_of(const struct parse_run *run, char *ret_op, size_t bytes)
{
    const char *op = "write", *name = run->title + (text_begins(run->title, "ib_") ? 3 : 0);

    for (size_t i = 0; i < sizeof(verbs) / sizeof(verbs[0]); i++)
        if (text_begins(name, verbs[i].program) && name[strlen(verbs[i].program)] == '_' &&
            !strchr(name + strlen(verbs[i].program) + 1, '_'))
            op = verbs[i].op;
    snprintf(ret_op, bytes, "%s%s", op, strstr(name, "_lat") ? " latency" : strstr(name, " -b") ? " (both ways)" : "");
}

static bool header(struct parser *parser, const char *line)
{
    struct stream *stream = stream_now(parser);

    if (!text_begins(line + strspn(line, " "), "#bytes") || !strstr(line, "#iterations") || !stream)
        return false;
    if (strstr(line, "t_min[usec]"))
        stream->perftest_unit = UNIT_LATENCY;
    else if (strstr(line, "t_avg[usec]"))
        stream->perftest_unit = UNIT_LATENCY_SHORT;
    else if (strstr(line, "[Gb/sec]"))
        stream->perftest_unit = UNIT_GBIT;
    else if (strstr(line, "[MB/sec]") || strstr(line, "[MiB/sec]"))
        stream->perftest_unit = UNIT_MIB;
    else
        parser->totals.unreadable++;
    if (strstr(line, "#sl"))
        stream->perftest_unit |= UNIT_QOS;
    (void)run_need(parser, PARSE_PERFTEST, "ib_write_bw");
    return true;
}

static double to_gbps(double value, int unit)
{
    return unit == UNIT_GBIT ? value / 8 : value * 1048576 / 1e9;
}

static void keep_row(struct parse_run *run, double bytes, double peak, double average, double time_us)
{
    bool is_latency = !isnan(time_us);
    struct parse_measure *measure;
    char op[40];

    op_of(run, op, sizeof(op));
    measure = run_measure(run, op, "", NULL);
    if (!measure)
        return;
    measure_point(measure, bytes, average, time_us);
    snprintf(measure->device, sizeof(measure->device), "%.31s", run->device);
    if (is_latency) {
        if (isnan(measure->time_us) || time_us < measure->time_us) {
            measure->time_us = time_us;
            measure->bytes = bytes;
        }
        measure->n++;
        return;
    }
    measure_sample(measure, average);
    if (isnan(measure->rdma_gbps) || average > measure->rdma_gbps) {
        measure->rdma_gbps = average;
        measure->alg_gbps = peak;
        measure->bytes = bytes;
    }
}

static bool row(struct parser *parser, const char *line)
{
    struct stream *stream = stream_now(parser);
    struct parse_run *run = run_open(parser, PARSE_PERFTEST);
    struct lex_words split;
    double values[LEX_WORDS];
    size_t n, at;
    int unit;

    if (!stream || !run || stream->perftest_unit == UNIT_NONE || !lex_words(line, &split))
        return false;
    unit = stream->perftest_unit & ~UNIT_QOS;
    n = split.n;
    if (n < 2)
        return false;
    for (size_t i = 0; i < n; i++) {
        if (!lex_is_number(split.words[i], &values[i])) {
            parser->totals.unreadable += i >= 2; /* starts as a row but continues as something else */
            return i >= 2;
        }
    }
    at = stream->perftest_unit & UNIT_QOS ? 3 : 2;
    if (unit == UNIT_LATENCY ? n < 5 : unit == UNIT_LATENCY_SHORT ? n < 3 : n < at + 2) {
        parser->totals.unreadable++;
        return true;
    }
    if (unit == UNIT_LATENCY)
        keep_row(run, values[0], NAN, NAN, n > 5 ? values[5] : values[4]);
    else if (unit == UNIT_LATENCY_SHORT)
        keep_row(run, values[0], NAN, NAN, values[2]);
    else
        keep_row(run, values[0], to_gbps(values[at], unit), to_gbps(values[at + 1], unit), NAN);
    return true;
}

/* `is_whole`: the text starts the line. Otherwise a host name may precede it, which identifies the run that failed. */
static bool failure(struct parser *parser, const char *line, bool is_whole)
{
    struct parse_run *run;

    if (!fault_of_perftest(parser, line, is_whole))
        return false;
    run = run_need(parser, PARSE_PERFTEST, *parser->program ? parser->program : "perftest");
    if (run)
        run_problem(run, line + strspn(line, " "), 0);
    return true;
}

/* The text after "Device         : "; NULL: missing. */
static const char *device_of(const char *line)
{
    const char *at = strstr(line, "Device ");

    if (!at)
        return NULL;
    at += 7;
    at += strspn(at, " ");
    return at[0] == ':' && at[1] == ' ' ? at + 2 : NULL;
}

bool perftest_line(struct parser *parser, const char *line)
{
    struct stream *stream = stream_now(parser);
    struct parse_run *run = stream ? stream->open[PARSE_PERFTEST] : NULL;
    const char *device = device_of(line);
    char program[64];

    if (!stream)
        return false;
    if (read_title(line, program, sizeof(program))) {
        stream->perftest_unit = UNIT_NONE;
        run = run_begin(parser, PARSE_PERFTEST, program);
        if (run)
            run->started = 1; /* the start of the log was seen */
        return true;
    }
    if (device && run) {
        snprintf(run->device, sizeof(run->device), "%.*s", (int)strcspn(device, " \t"), device);
        run->last_line = parser->line_number;
        return true;
    }
    if (header(parser, line))
        return true;
    if (run && stream->perftest_unit != UNIT_NONE && text_begins(line + strspn(line, " "), "---------------") &&
        run->n_measures > 0) {
        run->is_complete = true;
        stream->perftest_unit = UNIT_NONE;
        return true;
    }
    return row(parser, line) || failure(parser, line, true);
}

bool perftest_failure(struct parser *parser, const char *line)
{
    return failure(parser, line, false);
}
