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
#include "common/text.h"
#include "parse_internal.h"

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
    uint64_t key = text_hash(at, strlen(at));

    if (!strstr(at, "use_fp8_dispatch=") || !strstr(at, "allocate_on_comm_stream=")) {
        parser->totals.unreadable++;
        return true;
    }
    if (!run)
        run = v2_begin(parser, scratch);
    if (!v2->has_case || v2->last_case != key) {
        run->started++;
        v2->measured += memcmp(v2->before, v2->figures, sizeof(v2->before)) != 0;
        memcpy(v2->before, v2->figures, sizeof(v2->before));
    }
    v2->has_case = true;
    v2->last_case = key;
    v2->case_type = parser->v2_type = lex_setting(at, "use_fp8_dispatch=") == 1 ? "fp8" : "bf16";
    v2->alignments |= value_bit(at, "expert_alignment=");
    v2->formats |= value_bit(at, "use_fp8_dispatch=");
    v2->biases |= value_bit(at, "num_bias=");
    return true;
}

static bool setting_line(struct parser *parser, struct deepep_scratch *scratch, const char *line)
{
    struct parse_run *run = run_open(parser, PARSE_DEEPEP_V2);
    double numbers[LEX_NUMBERS];

    if (text_begins(line, "Config:") && line[7] == '\0') {
        if (!run || scratch->v2.has_case)
            (void)v2_begin(parser, scratch);
        return true;
    }
    if (!run)
        return false;
    if (lex_match(line, "> Ranks: %f x %f", numbers) && numbers[0] >= 1 && numbers[1] >= 1 && numbers[0] <= 1e5 &&
        numbers[1] <= 1e5) {
        run->nodes = (int64_t)numbers[0];
        run->ranks = (int64_t)(numbers[0] * numbers[1]);
    } else if (lex_match(line, "> Experts: %f/%f", numbers) && numbers[0] <= 1e9 && numbers[1] <= 1e9) {
        run->topk = (int64_t)numbers[0];
        run->experts = (int64_t)numbers[1];
    } else if (text_begins(line, "> Tokens: ")) {
        run->tokens = lex_setting(line, "(max: ");
        run->hidden = lex_setting(line, "hidden: ");
    } else if (text_begins(line, "> #SM: ")) {
        run->sms = lex_setting(line, "#SM: ");
    } else if (text_begins_any(line, TEXTS("> Ranks: ", "> Experts: "))) {
        parser->totals.unreadable++;
    } else {
        return text_begins(line, "> Mode: ");
    }
    return true;
}

/* The text after "EP:   0/16 | ". */
static bool figures(struct parser *parser, struct deepep_scratch *scratch, const char *at, double ranks)
{
    static const char *const ops[V2_OPS] = {"expanded dispatch", "cached dispatch", "reduced combine", "dispatch",
                                            "combine"};
    struct parse_run *run = run_need(parser, PARSE_DEEPEP_V2, "test_ep");
    const char *op = NULL, *type = "bf16", *end;
    double numbers[LEX_NUMBERS], rate, epilogue;
    struct parse_measure *measure;
    size_t which = 0;

    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]) && !op; i++)
        if (text_begins(at, ops[i]) && at[strlen(ops[i])] == ':') {
            op = ops[i];
            which = i;
        }
    if (!op)
        return false;
    at += strlen(op) + 1;
    end = lex_match(at, "%f GB/s (SO), %f GB/s (SU), %f us", numbers);
    if (!end)
        return false;
    rate = numbers[0] > 0 ? numbers[0] : numbers[1];
    scratch->v2.figures[which]++;
    if (run->ranks < 0)
        run->ranks = (int64_t)ranks;
    /* Only the first process of a node prints cases. Other streams use the last case of any stream. */
    if (!strstr(op, "combine"))
        type = scratch->v2.case_type ? scratch->v2.case_type : parser->v2_type ? parser->v2_type : "";
    measure = run_measure(run, op, type, NULL);
    if (!measure)
        return true;
    measure_sample(measure, rate);
    measure_point(measure, (double)run->started, rate, numbers[2]);
    /* Keep the figure of the slowest rank over all cases. */
    if (isnan(measure->time_us) || numbers[2] > measure->time_us) {
        measure->rdma_gbps = numbers[0] > 0 ? numbers[0] : NAN;
        measure->nvl_gbps = numbers[1];
        measure->time_us = numbers[2];
        if (lex_match(end, "*|*GB/s, %f", &epilogue))
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
    double numbers[LEX_NUMBERS];

    line += strspn(line, " "); /* pasted logs are indented */
    if (!at && !strstr(line, " EP: ") && !text_begins_any(line, TEXTS("> ", "Config:", "Running all test cases:")))
        return false;
    scratch = deepep_scratch_of(parser);
    if (at == line)
        return case_line(parser, scratch, at);
    if (!at && setting_line(parser, scratch, line))
        return true;
    if (text_begins(line, "Running all test cases:")) {
        (void)run_need(parser, PARSE_DEEPEP_V2, "test_ep");
        return true;
    }
    at = next_ep(line);
    if (at != line + 1)
        return false;
    for (; at; at = next_ep(at + 1)) {
        const char *figures_at = lex_match(at, " EP: %f/%f | ", numbers);

        if (!figures_at || !figures(parser, scratch, figures_at, numbers[1]))
            parser->totals.unreadable++;
    }
    return true;
}
