/* SPDX-License-Identifier: Apache-2.0 */
/*
 * deepep_v2.c - tests/elastic/test_ep.py of DeepEP 2. The first process of each node prints settings and cases, every
 * rank its figures. SO is scale-out (between nodes), SU scale-up (within one):
 *
 *     Config:
 *      > Ranks: 2 x 8
 *      > Experts: 8/256
 *      > Tokens: 8192 (max: 8192), hidden: 7168
 *      > #SM: 12, #QPs: 17/17
 *     Running all test cases:
 *      > Testing with do_handle_copy=1, expert_alignment=128, use_fp8_dispatch=1, num_bias=0, ... ...
 *        * EP:   0/16 | dispatch: 90 GB/s (SO), 300 GB/s (SU), 1204.100 us, 389 bytes | copy: 1500 GB/s, 61.200 us
 *        - EP:   0/16 | expanded dispatch: ...         # cached dispatch, @ combine, + reduced combine
 *
 * A case has passed when the next one begins: nothing is printed for it. There are 144.
 */
#include "deepep_log.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static struct parse_run *v2_begin(struct parser *parser, struct deepep_scratch *scratch)
{
    struct parse_run *run = run_begin(parser, PARSE_DEEPEP_V2, "test_ep");

    memset(&scratch->v2, 0, sizeof(scratch->v2));
    return run;
}

/* The bit for a value of a setting; unexpected values share one bit. */
static unsigned value_bit(const char *line, const char *label)
{
    int64_t value = lex_setting(line, label);

    return value < 0 ? 0 : value < 16 ? 1u << value : 1u << 16;
}

static bool case_line(struct parser *parser, struct deepep_scratch *scratch, const char *at)
{
    struct parse_run *run = run_open(parser, PARSE_DEEPEP_V2);
    struct v2_scratch *v2 = &scratch->v2;
    uint32_t key = lex_hash(at, strlen(at));

    if (!strstr(at, "use_fp8_dispatch=") || !strstr(at, "allocate_on_comm_stream=")) {
        parser->totals.unreadable++;
        return true;
    }
    if (!run)
        run = v2_begin(parser, scratch);
    if (!run)
        return true;
    if (!v2->has_case || v2->last_case != key) {
        run->started++;
        v2->measured += memcmp(v2->before, v2->figures, sizeof(v2->before)) != 0;
        memcpy(v2->before, v2->figures, sizeof(v2->before));
    }
    v2->has_case = true;
    v2->last_case = key;
    v2->case_type = parser->v2_type = lex_setting(at, "use_fp8_dispatch=") == 1 ? "fp8" : "bf16";
    v2->copies |= value_bit(at, "do_handle_copy=");
    v2->alignments |= value_bit(at, "expert_alignment=");
    v2->formats |= value_bit(at, "use_fp8_dispatch=");
    v2->biases |= value_bit(at, "num_bias=");
    return true;
}

static bool setting_line(struct parser *parser, struct deepep_scratch *scratch, const char *line)
{
    struct parse_run *run = run_open(parser, PARSE_DEEPEP_V2);
    int64_t out, in, topk, experts;
    const char *slash;

    if (lex_starts(line, "Config:") && line[7] == '\0') {
        if (!run || scratch->v2.has_case)
            (void)v2_begin(parser, scratch);
        return true;
    }
    if (!run)
        return false;
    if (lex_starts(line, " > Ranks: ")) {
        out = lex_setting(line, "Ranks: ");
        in = lex_setting(line, " x ");
        if (out < 1 || in < 1 || out > 100000 || in > 100000) {
            parser->totals.unreadable++;
        } else {
            run->nodes = out;
            run->ranks = out * in;
        }
        return true;
    }
    if (lex_starts(line, " > Experts: ")) {
        slash = strchr(line, '/');
        topk = lex_setting(line, "Experts: ");
        experts = slash ? lex_setting(slash, "/") : -1;
        if (topk < 0 || experts < 0) {
            parser->totals.unreadable++;
        } else {
            run->topk = topk;
            run->experts = experts;
        }
        return true;
    }
    if (lex_starts(line, " > Tokens: ")) {
        run->tokens = lex_setting(line, "(max: ");
        run->hidden = lex_setting(line, "hidden: ");
        return true;
    }
    if (lex_starts(line, " > #SM: ")) {
        run->sms = lex_setting(line, "#SM: ");
        return true;
    }
    return lex_starts(line, " > Mode: ");
}

/* The text after "EP:   0/16 | ". */
static bool figures(struct parser *parser, struct deepep_scratch *scratch, const char *at, double ranks)
{
    static const char *const ops[V2_OPS] = {"expanded dispatch", "cached dispatch", "reduced combine", "dispatch",
                                            "combine"};
    struct parse_run *run = run_need(parser, PARSE_DEEPEP_V2, "test_ep");
    const char *op = NULL, *type = "bf16", *end;
    double out, in, time_us, epilogue;
    struct parse_measure *measure;
    size_t which = 0;

    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]) && !op; i++)
        if (lex_starts(at, ops[i]) && at[strlen(ops[i])] == ':') {
            op = ops[i];
            which = i;
        }
    if (!op)
        return false;
    at += strlen(op) + 1;
    if (!lex_number(at, &end, &out) || !lex_starts(end, " GB/s (SO), ") || !lex_number(end + 12, &end, &in) ||
        !lex_starts(end, " GB/s (SU), ") || !lex_number(end + 12, &end, &time_us) || !lex_starts(end, " us"))
        return false;
    scratch->v2.figures[which]++;
    if (!run)
        return true;
    if (run->ranks < 0)
        run->ranks = (int64_t)ranks;
    /* Only the first process of a node prints cases. Other streams use the last case of any stream. */
    if (!strstr(op, "combine"))
        type = scratch->v2.case_type ? scratch->v2.case_type : parser->v2_type ? parser->v2_type : "";
    measure = run_measure(run, op, type, NULL);
    if (!measure)
        return true;
    measure_sample(measure, out > 0 ? out : in);
    measure_point(measure, (double)run->started, out > 0 ? out : in, time_us);
    /* Keep the figure of the slowest rank over all cases. */
    if (isnan(measure->time_us) || time_us > measure->time_us) {
        measure->rdma_gbps = out > 0 ? out : NAN;
        measure->nvl_gbps = in;
        measure->time_us = time_us;
        end = strchr(end, '|');
        if (end && (end = strstr(end, "GB/s, ")) != NULL && lex_number(end + 6, NULL, &epilogue))
            measure->epilogue_us = epilogue;
        if (run->sms >= 0)
            snprintf(measure->config, sizeof(measure->config), "%d SMs", (int)run->sms);
    }
    measure->is_final = true;
    return true;
}

static const char *next_ep(const char *at)
{
    while ((at = strstr(at, " EP: ")) != NULL) {
        if (at[-1] == '*' || at[-1] == '-' || at[-1] == '#' || at[-1] == '@' || at[-1] == '+')
            return at;
        at++;
    }
    return NULL;
}

bool deepep_v2_line(struct parser *parser, const char *line)
{
    const char *at = strstr(line, "> Testing with do_handle_copy=");
    struct deepep_scratch *scratch;
    double rank, ranks;
    const char *end;

    if (!at && !strstr(line, " EP: ") && !lex_starts(line, " > ") && !lex_starts(line, "Config:") &&
        !lex_starts(line, "Running all test cases:"))
        return false;
    scratch = deepep_scratch_of(parser);
    if (!scratch)
        return false;
    if (at && (at == line || (at == line + 1 && *line == ' ')))
        return case_line(parser, scratch, at);
    if (!at && setting_line(parser, scratch, line))
        return true;
    if (lex_starts(line, "Running all test cases:")) {
        (void)run_need(parser, PARSE_DEEPEP_V2, "test_ep");
        return true;
    }
    at = strlen(line) > 5 ? next_ep(line + 1) : NULL;
    if (!at || strspn(line, " ") != (size_t)(at - line) - 1)
        return false;
    for (; at; at = next_ep(at)) {
        at += 5;
        if (!lex_number(at, &end, &rank) || *end != '/' || !lex_number(end + 1, &end, &ranks) ||
            !lex_starts(end, " | ") || !figures(parser, scratch, end + 3, ranks))
            parser->totals.unreadable++;
    }
    return true;
}
