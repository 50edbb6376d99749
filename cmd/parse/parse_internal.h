/* SPDX-License-Identifier: Apache-2.0 */
/*
 * parse_internal.h - declarations shared by the files of the parser.
 *
 * parse.c splits bytes into physical lines. log_lines.c strips their prefixes and joins them into logical lines per
 * stream. Each logical line is offered to the dialects in turn. A stream is the output of one writer, as far as
 * prefixes distinguish writers: a pod, a rank of mpirun, a host.
 */
#ifndef EP_PARSE_PARSE_INTERNAL_H
#define EP_PARSE_PARSE_INTERNAL_H

#include "parse.h"

#define MAX_LINE (1 << 20)      /* bytes of a physical line; a JSON document on one line has to fit */
#define MAX_PENDING (16 << 10)  /* bytes of a line that arrives in parts */
#define MAX_DOCUMENT (32 << 20) /* bytes of a JSON document over many lines */
#define MAX_STREAMS 4096
#define MAX_RUNS 2000
#define MAX_FAULTS 64
#define MAX_NCCL_HOSTS 512
#define KEY_BYTES 96
#define LL_MAX_RANKS 4096 /* of a low-latency run */
#define LL_KINDS 3

/* State of the dialects for one stream, kept between lines. */
struct stream {
    char key[KEY_BYTES];
    char *pending; /* start of a line whose end has not arrived; MAX_PENDING */
    size_t n_pending;
    struct parse_run *open[PARSE_N_DIALECTS];
    int ordinal[PARSE_N_DIALECTS]; /* how many runs of the dialect have begun here */
    struct deepep_scratch *deepep; /* of the open DeepEP run */
    bool nccl_rows_seen, nccl_has_error_column, nccl_has_iterations;
    uint64_t nccl_hosts[MAX_NCCL_HOSTS]; /* hashes of the names of the open run's hosts */
    int n_nccl_hosts, n_nccl_ranks;      /* ranks: lines of them */
    const char *program_op, *program_type, *program_config,
        *program_table;   /* in a run of cmd/parse/programs.json: of what follows */
    size_t program_begin; /* the form of its first line */
    char *document;       /* JSON document collected so far */
    size_t n_document;
    int depth;
    bool in_string, escaped;
    bool ignores_traceback; /* the line before had "Exception ignored in" (Python) */
    int n_ignored;          /* tracebacks after such lines whose exception is still to come */
    bool in_stack;          /* of frames that are of no error */
    bool in_traceback;      /* of another one: its exception is still to come */
    size_t traceback_indent;
    char frame[PARSE_TEXT]; /* the latest line of one */
    uint64_t frame_line;    /* its number */
    bool is_explained;      /* a line says more than tracebacks without their ends */
    bool is_over;           /* no more lines follow */
    const json_t *next; /* a line about a failure goes on with one that begins with one of these; NULL: it does not */
    char begun[PARSE_TEXT]; /* that line so far */
    uint64_t begun_line;    /* its number */
    const char *after;      /* the latest line that rows of failures.json refer to, as they name it */
};

/* Internal state next to the public part of a run. */
struct run {
    struct parse_run public;
    int stream;                                  /* index */
    int source;                                  /* index */
    int ordinal;                                 /* which run of its dialect in its stream */
    bool has_all_ranks;                          /* DeepEP 2: all ranks' figures; another file is of another run */
    uint8_t ll_seen[LL_KINDS][LL_MAX_RANKS / 8]; /* low latency: bit set: the rank has printed this kind of line */
};

struct parser {
    char *line; /* MAX_LINE + 1 */
    size_t n_line;
    bool is_cut, after_cr;
    char last_line[PARSE_LAST_LINE];
    char source[256];
    int n_sources;
    uint64_t line_number; /* in the source */
    struct parse_totals totals;
    struct stream **streams;
    size_t n_streams;
    int current_stream; /* index of the stream whose line the dialects read */
    struct run **runs;
    size_t n_runs;
    struct run lost;     /* stands for each run beyond MAX_RUNS: read, and not kept */
    char program[64];    /* last program name seen: all_reduce_perf ... */
    const char *v2_type; /* of the last case of DeepEP 2 in this source, from any stream; NULL: none */
    struct parse_fault faults[MAX_FAULTS];
    size_t n_faults;
    int heading_nodes;     /* "# 4 nodes" in this source, or of a command: of the runs that follow; 0: none */
    int64_t command_ranks; /* that the command starts; 0: not known */
};

/* --- prefix.c --- */

struct prefix {
    size_t bytes; /* to skip */
    char key[KEY_BYTES];
    bool is_partial; /* the container runtime cut the line here: the next line continues it */
};

/* Prefixes with an unambiguous form: times, kubectl, mpirun, srun, torchrun, container runtimes. */
void prefix_read(const char *line, struct prefix *ret_prefix);

/* One prefix that may be a host or text: "[x] ", "x: ", "x | ". 0: none. Appends to the key. */
size_t prefix_guess(const char *line, char *key, size_t key_bytes);

/* Any first word or bracket, as loggers print it. Only valid if the rest is a known line. 0: none. */
size_t prefix_word(const char *line, char *key, size_t key_bytes);

/* The next tag of mpirun within `line`, after its start: output of another writer. NULL: none. */
const char *prefix_next_tag(const char *line);

/* Removes terminal escape sequences and control characters in place. Returns the new length. */
size_t prefix_clean(char *text, size_t n);

/* --- log_lines.c --- */

/* Processes a physical line without its line end. */
void stream_line(struct parser *parser, char *line, size_t n);

/* Completes the pending lines of all streams and drops the streams. */
void stream_flush(struct parser *parser);

/* --- runs.c --- */

/* A new run in the current stream. */
struct parse_run *run_begin(struct parser *parser, enum parse_dialect dialect, const char *title);

/* The open run of the dialect, if there is one, is over before this line. */
void run_end(struct parser *parser, enum parse_dialect dialect);

/* The open run of the dialect, or NULL. */
struct parse_run *run_open(struct parser *parser, enum parse_dialect dialect);

/* The open run of the dialect, or a new one. */
struct parse_run *run_need(struct parser *parser, enum parse_dialect dialect, const char *title);

/* The measure of (op, type), created if missing; NULL if there are too many. `config` may be NULL. */
struct parse_measure *run_measure(struct parse_run *run, const char *op, const char *type, const char *config);

void measure_point(struct parse_measure *measure, double x, double gbps, double time_us);

/* Adds a figure of the leading rate. */
void measure_sample(struct parse_measure *measure, double rate);

/* Those with the highest rank come first. `known` may be NULL. */
void run_problem(struct parse_run *run, const char *line, const struct parse_known *known);

/* The internal run that contains `public`. */
struct run *run_whole(struct parse_run *public);

void run_clear(struct run *run);

/* Merges the parts of one run that several writers printed. */
void runs_merge(struct parser *parser);

/* The stream of the line that is read. */
struct stream *stream_now(struct parser *parser);

/* --- lex.c --- */

/* One space for each run of spaces, and none at the ends. false: nothing is left, or more than fits. */
bool lex_squeeze(const char *line, char *ret_text, size_t bytes);

/* The number after `label` in `text`. false: no label, or no number after it. */
bool lex_after(const char *text, const char *label, double *ret_number);

/* As lex_after(), for settings: an integer, or -1. */
int64_t lex_setting(const char *text, const char *label);

/*
 * Does the text begin as the format says? %f takes a number for ret_numbers, after spaces; '*' skips to the next
 * occurrence of what follows it, up to the next % or '*'; '$' at the end is that of the text. Returns the rest of the
 * text; NULL: it does not.
 */
#define LEX_NUMBERS 8
const char *lex_match(const char *text, const char *format, double *ret_numbers);

/* A finite number >= 0 that ends at a space, comma or unit. *ret_end: the character after it. */
bool lex_number(const char *text, const char **ret_end, double *ret_number);

/* The number right before the first `label` in `text`. */
bool lex_before(const char *text, const char *label, double *ret_number);

/* Words between spaces and tabs, at most LEX_WORDS. false: the line is too long. */
#define LEX_WORDS 24
struct lex_words {
    char text[512], *words[LEX_WORDS];
    size_t n;
};
bool lex_words(const char *line, struct lex_words *ret_words);

bool lex_is_number(const char *word, double *ret_number);

/* --- the dialects: true if the line was one of theirs, torn ones included --- */

bool deepep_line(struct parser *parser, const char *line);
bool deepep_v2_line(struct parser *parser, const char *line);
bool nccl_line(struct parser *parser, const char *line);

/* --- programs.c --- */
void programs_load(void);
bool program_begins(const char *line);
bool program_line(struct parser *parser, const char *line);

/* Keeps how many nodes and ranks a command starts, if the line has one. */
void program_command(struct parser *parser, const char *line);

/* Gives a line that a document stands for to the reader of such lines. */
void feed(struct parser *parser, bool (*reader)(struct parser *, const char *), const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* --- json_results.c: a document of nccl-tests, rccl-tests or perftest; false: of none of them --- */
bool json_results(struct parser *parser, const json_t *document);

/* One of perftest in 2023: words without quotes, commas before brackets (perftest issue 216). NULL: it is none. */
json_t *json_bare(const char *text, size_t bytes);

/* Lines of a JSON document. */
bool epkit_document_line(struct parser *parser, const char *line);

/* No more lines follow: an incomplete document is lost. */
void epkit_document_end(struct parser *parser);

/* The runs of DeepEP 1 that are open in this stream are over. */
void deepep_close(struct parser *parser);

/* The end of a run: computes counts that need the complete run. */
void deepep_finish(struct parse_run *run, struct deepep_scratch *scratch);

/* --- deepep_log.c, deepep_v2.c: counters of a run until it ends --- */

/* DeepEP 1: throughput mode. */
struct v1_scratch {
    int started[2][8]; /* fp8; bits: top-k, async, previous */
    int all_started, passed, configs;
    bool has_cases, has_tuning;
    int best;                      /* "Best" lines seen */
    unsigned seen_best, last_best; /* their operations, as bits */
    struct parse_point sweep[PARSE_MAX_POINTS];
    size_t n_sweep, dropped;
};

#define V2_OPS 5

/* DeepEP 2. */
struct v2_scratch {
    uint64_t last_case;
    bool has_case;
    const char *case_type;                   /* of the open case; NULL: none */
    unsigned alignments, formats, biases;    /* bit i: the i-th value was seen */
    int64_t figures[V2_OPS], before[V2_OPS]; /* lines of each operation, and those before the open case */
    int64_t measured;                        /* cases before the open one with figures */
};

struct deepep_scratch {
    struct v1_scratch v1;
    struct v2_scratch v2;
};

struct deepep_scratch *deepep_scratch_of(struct parser *parser);

/* --- faults.c --- */
void faults_load(void);

void fault_line(struct parser *parser, const char *line);

/* A line that does not continue the one before ends that; before it is read otherwise, as it may begin a run. */
void fault_begin(struct parser *parser, const char *line);

/* No more lines of this stream follow. */
void fault_end(struct parser *parser);

/* Does the line report a failure of perftest? `is_whole`: at its start; else after any prefix. */
bool perftest_failure(struct parser *parser, const char *line, bool is_whole);

#endif
