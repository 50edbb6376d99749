/* SPDX-License-Identifier: Apache-2.0 */
/*
 * parse.h - what the output of test programs says.
 *
 * A parser reads any number of log files, a block at a time, and keeps a bounded amount of memory however long they
 * are. It recognises the dialects of DeepEP (intranode, internode, low latency, V2), of nccl-tests, of perftest and of
 * epkit itself, through the prefixes of kubectl, mpirun, srun, torchrun and `epkit launch`, through colours, progress
 * bars and torn lines. docs/log-dialects.md lists the lines.
 *
 * Not safe for use by several threads at once. Nothing here prints.
 */
#ifndef EP_OPS_PARSE_H
#define EP_OPS_PARSE_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum parse_dialect {
    PARSE_DEEPEP_INTRANODE,
    PARSE_DEEPEP_INTERNODE,
    PARSE_DEEPEP_LOW_LATENCY,
    PARSE_DEEPEP_V2,
    PARSE_NCCL_TESTS,
    PARSE_PERFTEST,
    PARSE_EPKIT_TEST,
    PARSE_EPKIT_BENCH,
    PARSE_N_DIALECTS
};

/* "deepep-internode" and so on. */
const char *parse_dialect_name(enum parse_dialect dialect);

#define PARSE_MAX_POINTS 160
#define PARSE_MAX_MEASURES 64
#define PARSE_MAX_PROBLEMS 8
#define PARSE_TEXT 200

/* One point of a sweep: over message size in bytes, or over the number of the configuration. */
struct parse_point {
    double x, gbps, time_us;
};

/*
 * What was measured of one operation. Rates are in GB/s (1e9 bytes) as printed; NAN: not printed. Of several ranks or
 * nodes that print the same figure, the figure is that of the slowest, and min, max and mean are over all of them.
 */
struct parse_measure {
    char op[40];                    /* dispatch, combine, expanded dispatch, all_reduce, ib_write_bw ... */
    char type[16];                  /* fp8, bf16, float ...; "" */
    char device[32];                /* RDMA device of perftest; "" */
    char config[64];                /* best configuration as text: "24 SMs, NVL chunk 8, RDMA chunk 12"; "" */
    int sms, nvl_chunk, rdma_chunk; /* -1: not printed */
    double nvl_gbps, rdma_gbps;     /* logical, as the program counts */
    double bus_gbps, alg_gbps;      /* nccl-tests */
    double time_us, notify_us;      /* of the operation; of its notification, where it is printed apart */
    double epilogue_us;             /* DeepEP V2: copy or reduce epilogue */
    double bytes;                   /* message size of the quoted figure */
    double min, max, sum;           /* of the leading rate, over ranks or nodes */
    uint64_t n;                     /* how many figures those are of */
    bool is_final;                  /* a "Best ..." or average line; else the best of the sweep so far */
    struct parse_point *points;
    size_t n_points, dropped_points;
};

/* One run of one program. */
struct parse_run {
    enum parse_dialect dialect;
    char title[64];                 /* program: test_internode, all_reduce_perf, ib_write_bw ... */
    char source[256];               /* file that it began in */
    char device[64];                /* GPU as the log names it; "" */
    uint64_t first_line, last_line; /* in that file, from 1 */
    char stream[96];                /* prefix of its lines, which tells nodes apart; "" */
    int writers; /* nodes (or streams) that printed the same run; nccl-tests: runs at once whose lines are mixed */
    /* Settings that the log names; -1: not named. */
    int64_t tokens, hidden, topk, topk_groups, experts, ranks, nodes, sms;
    /* Cases, of one writer. Expected is 0 where the dialect has none. */
    int started, passed, failed, expected;
    uint64_t wrong;    /* nccl-tests: values out of bounds */
    double average;    /* nccl-tests: average bus bandwidth; NAN */
    int bits;          /* nccl-tests: 8 where rates are printed in Gb/s; else 0 */
    bool is_complete;  /* the end of the run was seen */
    int lines_missing; /* DeepEP low latency: lines of ranks that others have printed, and these have not */
    struct parse_measure *measures;
    size_t n_measures;
    char problems[PARSE_MAX_PROBLEMS][PARSE_TEXT]; /* lines that say what failed */
    size_t n_problems;
    json_t *document; /* epkit: the document itself; NULL */
};

struct parser;

/* NULL: out of memory. parser_free() accepts NULL. */
struct parser *parser_new(void);
void parser_free(struct parser *parser);

/* From here on lines belong to `source`, a file name or a host: no line of before goes on. */
void parser_begin(struct parser *parser, const char *source);

/* Any bytes, cut anywhere. */
void parser_feed(struct parser *parser, const char *bytes, size_t n);

enum { PARSE_COMPRESSED = -1, PARSE_DEVICE = -2 };

/*
 * Reads a whole file, "-" for standard input. 0, or the errno, or one of the above: no text, or no end. `tick` is
 * called now and then, also while nothing comes; it may be NULL.
 */
int parser_read(struct parser *parser, const char *path, void (*tick)(uint64_t bytes));

/* No more input: completes what is open. Afterwards the runs may be read. */
void parser_end(struct parser *parser);

struct parse_totals {
    uint64_t bytes, lines, recognised; /* recognised: lines of some dialect */
    uint64_t unreadable;               /* torn: they begin like a line of a dialect and do not go on like one */
    uint64_t long_lines;               /* longer than the buffer, cut */
    uint64_t runs_dropped;             /* times that a run was not kept, because there are 2000 */
};

size_t parser_count(const struct parser *parser);
struct parse_run *parser_run(const struct parser *parser, size_t i);
struct parse_totals parser_totals(const struct parser *parser);

/* A line that names a known fault, whatever program printed it. */
struct parse_fault {
    const char *id;    /* of the doctor's check, or NULL */
    const char *cause; /* sentence */
    bool is_fatal;     /* the program cannot have succeeded */
    bool is_loose;     /* a line of it is of no run, so that no run fails by it */
    char line[PARSE_TEXT];
    char source[256];
    uint64_t line_number, count;
};

/* Faults in the order of their first line. Borrowed. */
const struct parse_fault *parser_faults(const struct parser *parser, size_t *ret_n);

/* NULL: no such measure. type NULL: any. */
const struct parse_measure *parse_find(const struct parse_run *run, const char *op, const char *type);

#endif
