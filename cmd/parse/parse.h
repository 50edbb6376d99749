/* SPDX-License-Identifier: Apache-2.0 */
/*
 * parse.h - reads the output of test programs.
 *
 * A parser reads any number of log files block by block, in bounded memory. It recognises the dialects of DeepEP
 * (intranode, internode, low latency, V2), nccl-tests, perftest, epkit itself and cmd/parse/programs.json. It handles
 * the prefixes of kubectl, mpirun, srun, torchrun and `epkit launch`, colours, progress bars and torn lines.
 * docs/log-dialects.md lists the lines.
 *
 * A parser is not thread-safe. Nothing here prints.
 */
#ifndef EP_PARSE_PARSE_H
#define EP_PARSE_PARSE_H

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
    PARSE_PROGRAM, /* of cmd/parse/programs.json */
    PARSE_EPKIT_TEST,
    PARSE_EPKIT_BENCH,
    PARSE_N_DIALECTS
};

/* "deepep-internode" and so on. */
const char *parse_dialect_name(enum parse_dialect dialect);

#define PARSE_MAX_POINTS 160
#define PARSE_MAX_MEASURES 64
#define PARSE_MAX_PROBLEMS 8
#define PARSE_TEXT 400

/* One point of a sweep over the message size in bytes or over the index of the configuration. */
struct parse_point {
    double x, gbps, time_us;
};

/*
 * Measurements of one operation. Rates are in GB/s (1e9 bytes) as printed; NAN: not printed. If several ranks or nodes
 * print the same figure, the value is that of the slowest; min, max and sum are over all of them.
 */
struct parse_measure {
    char op[40];                    /* dispatch, combine, expanded dispatch, all_reduce, ib_write_bw ... */
    char type[16];                  /* fp8, bf16, float ...; "" */
    char config[64];                /* best configuration as text: "24 SMs, NVL chunk 8, RDMA chunk 12"; "" */
    int sms, nvl_chunk, rdma_chunk; /* -1: not printed */
    double nvl_gbps, rdma_gbps;     /* logical, as the program counts them */
    double bus_gbps, alg_gbps;      /* nccl-tests */
    double time_us, notify_us;      /* of the operation; of its notification, if printed separately */
    double epilogue_us;             /* DeepEP V2: copy or reduce epilogue */
    double bytes;                   /* message size of the quoted figure */
    double min, max, sum;           /* of the leading rate, over ranks or nodes */
    uint64_t n;                     /* number of figures in min, max and sum */
    bool is_final;                  /* a "Best ..." or average line; else the best of the sweep so far */
    struct parse_point *points;
    size_t n_points, dropped_points;
};

/* What a row of cmd/parse/failures.json knows of a line. */
struct parse_known {
    const char *id;      /* ID of the doctor's check, or NULL */
    const char *cause;   /* sentence */
    int rank;            /* of two lines the one with the higher rank says more */
    bool is_fatal;       /* the program cannot have succeeded */
    bool is_fatal_alone; /* so only if no test began */
    bool may_pass;       /* a notice if a run follows that is complete */
    bool is_specific;    /* its cause says more than the line */
};

/* A line that reports the failure of a run. */
struct parse_problem {
    char line[PARSE_TEXT];
    const struct parse_known *known; /* NULL: the line is all that is known */
};

/* One run of one program. */
struct parse_run {
    enum parse_dialect dialect;
    char title[64];                 /* program: test_internode, all_reduce_perf, ib_write_bw ... */
    char source[256];               /* file in which it started */
    char device[64];                /* GPU as the log names it; "" */
    uint64_t first_line, last_line; /* in that file, from 1 */
    char stream[96];                /* prefix of its lines, which distinguishes nodes; "" */
    int writers; /* nodes (or streams) that printed the same run; nccl-tests: runs at once whose lines are mixed */
    /* Settings named in the log; -1: not named. */
    int64_t tokens, hidden, topk, topk_groups, experts, ranks, nodes, sms;
    /* Cases of one writer. `expected` is 0 if the dialect has no cases. */
    int started, passed, failed, expected;
    uint64_t wrong;    /* nccl-tests: values out of bounds */
    double average;    /* nccl-tests: average bus bandwidth; NAN */
    int bits;          /* nccl-tests: 8 if rates are printed in Gb/s; else 0 */
    bool is_complete;  /* the end of the run was seen */
    bool is_open;      /* more of it may follow: parser_refresh() */
    int kinds;         /* DeepEP low latency: result lines that each rank prints */
    int lines_missing; /* of them, those that some ranks printed and others did not */
    int ranks_absent;  /* ranks of nodes that printed none */
    struct parse_measure *measures;
    size_t n_measures;
    struct parse_problem problems[PARSE_MAX_PROBLEMS]; /* those that say most come first */
    size_t n_problems;
    uint64_t seen_line, seen_ns; /* for who follows a log: its last line, and when that was seen first */
};

struct parser;

/* parser_free() accepts NULL. */
struct parser *parser_new(void);
void parser_free(struct parser *parser);

/* The following lines belong to `source`, a file name or a host; no earlier line continues. */
void parser_begin(struct parser *parser, const char *source);

/* Feeds a block of bytes, cut anywhere. */
void parser_feed(struct parser *parser, const char *bytes, size_t n);

enum { PARSE_COMPRESSED = -1, PARSE_DEVICE = -2 };

/* Opens it without waiting for the writer of a FIFO. 0, or the errno, or PARSE_DEVICE: it is endless. */
int parser_open(int dir, const char *path, int *ret_fd);

/*
 * Reads a whole file of the folder `dir`, which is no link, or of any path (AT_FDCWD); "-" is standard input. 0, or the
 * errno, or one of the above: not text, or endless. `tick` is called periodically, also while no input arrives; it may
 * be NULL.
 */
int parser_read(struct parser *parser, int dir, const char *path, void (*tick)(uint64_t bytes));

/*
 * For a log that grows: the runs may be read as if it ended after the last whole line; is_open: no other run has
 * followed on its stream.
 */
void parser_refresh(struct parser *parser);

/* Ends the input and completes open runs. Afterwards the runs may be read. */
void parser_end(struct parser *parser);

struct parse_totals {
    uint64_t bytes, lines, recognised; /* recognised: lines of some dialect */
    uint64_t unreadable;               /* torn: they start like a line of a dialect but do not continue like one */
    uint64_t long_lines;               /* longer than the buffer, cut */
    uint64_t runs_dropped;             /* runs dropped because 2000 are kept already */
};

/* The last line that is not empty, also without its end: its first PARSE_LAST_LINE - 1 bytes; "": none. */
#define PARSE_LAST_LINE 200
const char *parser_last_line(struct parser *parser);

size_t parser_count(const struct parser *parser);
struct parse_run *parser_run(const struct parser *parser, size_t i);
struct parse_totals parser_totals(const struct parser *parser);

/* A line that names a known fault, from any program. */
struct parse_fault {
    const struct parse_known *known;
    bool is_loose; /* one of its lines belongs to no run, so it makes no run fail */
    char line[PARSE_TEXT];
    char source[256], stream[96];
    uint64_t line_number, last_line, count;
};

/* Faults, the most specific ones first; of the same rank in the order of their first lines. Borrowed. */
const struct parse_fault *parser_faults(const struct parser *parser, size_t *ret_n);

/* NULL: no such measure. type NULL: any. */
const struct parse_measure *parse_find(const struct parse_run *run, const char *op, const char *type);

#endif
