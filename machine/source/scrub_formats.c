/* SPDX-License-Identifier: Apache-2.0 */
/* scrub_formats.c - formats of values: what does not have the format of its path is left out or replaced. */
#include "common/env_variables.h"
#include "common/redact.h"
#include "common/text.h"
#include "scrub.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define SYMBOL_LETTERS "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_"

/* Does the text have this form? 'd': digit, 'x': hex, 'a': letter, '*': up to 9 digits, '_': any number of blanks. */
static bool has_form(const char *text, size_t bytes, const char *form)
{
    const char *at = text, *end = text + bytes;

    for (; *form; form++) {
        int c = at < end ? (unsigned char)*at : EOF;
        size_t run = strspn(at, *form == '*' ? "0123456789" : *form == '_' ? " " : "");

        if (*form == '*' || *form == '_')
            at += run <= 9 ? run : 0;
        else if (*form == 'd' ? isdigit(c) : *form == 'x' ? isxdigit(c) : *form == 'a' ? isalpha(c) : c == *form)
            at++;
        else
            return false;
    }
    return at == end;
}

/* --- lines of numbers and words --- */

/*
 * A number of the kernel: decimal of up to `most` digits, with a point or as a list ("0-3,8"), or up to 8 hexadecimal
 * digits after 0x. Two dashes without a comma between them, or two points, are an address.
 */
static bool is_number(const char *word, size_t n, size_t most)
{
    size_t n_dashes = 0, n_points = 0, n_digits = 0;

    if (n > 2 && n <= 10 && word[0] == '0' && word[1] == 'x')
        return strspn(word + 2, "0123456789abcdefABCDEF") >= n - 2;
    for (size_t i = 0; i < n; i++) {
        n_dashes = word[i] == ',' ? 0 : n_dashes + (word[i] == '-' && i > 0);
        n_points += word[i] == '.';
        n_digits = isdigit((unsigned char)word[i]) ? n_digits + 1 : 0;
        if (!strchr("0123456789.,-", word[i]) || n_dashes > 1 || n_points > 1 || n_digits > most)
            return false;
    }
    return n > 0;
}

void scrub_lines(struct scrub *scrub, const char *text, size_t bytes, const struct scrub_row *row, FILE *out)
{
    /* Capabilities are a mask of 64 bits, of which the upper 16 are unused (capabilities(7)). */
    static const char mask[] = "0000xxxxxxxxxxxx";
    size_t most = row->keys ? 20 : 9;

    (void)scrub;
    (void)bytes;
    FOR_PIECES (line, text, "\n") {
        const char *at = line.text;
        bool is_strict = true;

        while (is_strict && at < line.text + line.n) {
            struct piece word = text_take(&at, " \t\r\v\f\n");
            size_t n = word.n - (word.n > 0 && word.text[word.n - 1] == ':');

            is_strict = word.n == 0 || scrub_is_among(word.text, word.n, row->words) || is_number(word.text, n, most) ||
                        (text_begins(line.text, "CapEff:") && has_form(word.text, word.n, mask));
        }
        if (is_strict)
            fprintf(out, "%.*s%s", (int)line.n, line.text, line.text[line.n] ? "\n" : "");
    }
}

/* --- words --- */

void scrub_words(struct scrub *scrub, const char *text, size_t bytes, const struct scrub_row *row, FILE *out)
{
    size_t n = strcspn(text, "\n");

    scrub_text(scrub, text, n < bytes ? n + 1 : bytes, SCRUB_NAME | (row->keys ? SCRUB_VERSIONS : 0), row->words, out);
}

void scrub_any(struct scrub *scrub, const char *text, size_t bytes, const struct scrub_row *row, FILE *out)
{
    scrub_text(scrub, text, bytes, SCRUB_VERSIONS, row->words, out);
}

/* Does a line begin with one of the keys, which commas separate? */
static bool has_key(const char *line, size_t bytes, const char *keys)
{
    FOR_PIECES (key, keys, ",")
        if (key.n <= bytes && strncmp(line, key.text, key.n) == 0)
            return true;
    return false;
}

void scrub_fields(struct scrub *scrub, const char *text, size_t bytes, const struct scrub_row *row, FILE *out)
{
    (void)bytes;
    FOR_PIECES (line, text, "\n")
        if (has_key(line.text, line.n, row->keys)) {
            scrub_text(scrub, line.text, line.n, 0, row->words, out);
            fputc('\n', out);
        }
}

/* --- hardware --- */

/*
 * "PeerMappingOverride=1;RMNvLinkDisableLinks=0x0": keys defined by the driver, with numbers; the text row->keys before
 * them, and of other parameters those in row->words.
 */
void scrub_dwords(struct scrub *scrub, const char *text, size_t bytes, const struct scrub_row *row, FILE *out)
{
    static const char keys[] = "RM* Peer* Power* Perf* Override* Enable* Disable* NV* Force* Grdma* UvmDisable*";
    const char *end = text + bytes;
    char blank = '\0';

    (void)scrub;
    while (text < end) {
        size_t n = strcspn(text, ";,\" \t\n"), name = strcspn(text, "="), n_keys = row->keys ? strlen(row->keys) : 0;
        bool is_kept;

        n = n < (size_t)(end - text) ? n : (size_t)(end - text);
        is_kept = scrub_is_among(text, n, row->words) ||
                  (name < n && name <= 64 && strcspn(text, "-:./@ ") >= name && scrub_is_among(text, name, keys) &&
                   is_number(text + name + 1, n - name - 1, 9));
        if (n_keys && text_begins(text, row->keys)) {
            is_kept = true;
            n = n_keys;
        } else if (n == 0) { /* a separator; only the last one of blanks, and none at the end */
            n = 1;
            is_kept = !isspace((unsigned char)*text);
            blank = is_kept ? blank : *text;
        }
        if (is_kept && n) {
            if (blank)
                fputc(blank, out);
            fwrite(text, 1, n, out);
            blank = '\0';
        }
        text += n;
    }
    fputs(blank ? "\n" : "", out);
}

/* --- process --- */

static const char variables_kept[] =
    "NVSHMEM_* NCCL_* DEEP_EP_* DEEPEP_* GDRCOPY_* UCX_* MLX5_* IBV_* RDMAV_* CUDA_* TORCH_NCCL_* "
    "TORCH_CUDA_ARCH_LIST LD_LIBRARY_PATH LD_PRELOAD LD_AUDIT PATH PYTHONPATH PYTHONHOME VIRTUAL_ENV CONDA_PREFIX "
    "PYTHONNOUSERSITE PYTHONUSERBASE HOME LANG MPI_HOME OMPI_MCA_btl* OMPI_MCA_pml NVIDIA_VISIBLE_DEVICES container "
    "MELLANOX_VISIBLE_DEVICES KUBERNETES_SERVICE_HOST NVIDIA_DRIVER_CAPABILITIES "
    "WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK "
    "MASTER_ADDR MASTER_PORT NNODES GROUP_WORLD_SIZE OMPI_COMM_WORLD_* MPI_LOCAL* PMI_SIZE PMI_LOCAL_SIZE PMI_RANK "
    "PMI_LOCAL_RANK SLURM_JOB_NUM_NODES SLURM_NNODES SLURM_NTASKS SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE "
    "SLURM_LOCALID SLURM_NODEID SLURM_PROCID GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME USE_NVPEERMEM DISABLE_SM90_FEATURES OMP_NUM_THREADS "
    "PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF RAY_JOB_ID VLLM_ALL2ALL_BACKEND OMPI_MCA_smsc "
    "FI_PROVIDER FI_EFA_SET_CUDA_SYNC_MEMOPS EP_* EPKIT_*";

bool scrub_allows_variable(const char *name)
{
    return name[strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_")] == '\0' &&
           strlen(name) < 128 && scrub_is_among(name, strlen(name), variables_kept) && !identifier_is_secret_name(name);
}

/* The loopback, a short number, whole pages, or a known value. A longer number may be an account. */
static bool is_plain_value(const char *name, const char *value)
{
    const struct variable *variable = variable_find(name);
    size_t n = strspn(value, "0123456789");
    char why[256];

    if (address_is_loopback(value))
        return true;
    if (!value[n])
        return n <= 9 || (n <= 15 && strtoull(value, NULL, 10) % 4096 == 0);
    return variable && variable->values && strchr(variable->values, '|') &&
           variable_accepts(variable, value, why, sizeof(why));
}

void scrub_variable(struct scrub *scrub, const char *text, size_t bytes, const struct scrub_row *row, FILE *out)
{
    static const char path_lists[] = "LD_LIBRARY_PATH LD_PRELOAD LD_AUDIT PATH PYTHONPATH";
    const char *name = row->keys;

    if (name && scrub_is_among(name, strlen(name), path_lists))
        scrub_path_list(scrub, text, bytes, row, out);
    else if (name && is_plain_value(name, text))
        fputs(text, out);
    else
        scrub_text(scrub, text, bytes, SCRUB_VERSIONS, row->words, out);
}

/* Lists of files and folders, which need not be absolute. */
void scrub_path_list(struct scrub *scrub, const char *value, size_t bytes, const struct scrub_row *row, FILE *out)
{
    static const char own[] = ". $ORIGIN ${ORIGIN} $LIB ${LIB} $PLATFORM ${PLATFORM}";
    const char *end = value + bytes;
    char item[PATH_MAX], *name, *rest;

    (void)row;
    while (value < end) {
        size_t n = strcspn(value, ": \"'");

        n = n < (size_t)(end - value) ? n : (size_t)(end - value);
        if (n > 0 && value[0] == '/') {
            scrub_path(scrub, value, n, out);
        } else if (n > 0 && n < sizeof(item)) {
            snprintf(item, sizeof(item), "%.*s", (int)n, value);
            for (rest = item; (name = strsep(&rest, "/"));) {
                if (scrub_is_among(name, strlen(name), own))
                    fputs(name, out);
                else
                    scrub_name(scrub, "", name, out);
                if (rest)
                    fputc('/', out);
            }
        }
        value += n;
        if (value < end)
            fputc(*value++, out);
    }
}

void scrub_symbol(struct scrub *scrub, const char *text, size_t bytes, const struct scrub_row *row, FILE *out)
{
    bool is_known = scrub_is_among(text, bytes, row->words) && strspn(text, SYMBOL_LETTERS) == bytes;

    scrub_text(scrub, text, bytes, SCRUB_NAME | SCRUB_VERSIONS, is_known ? NULL : "", out);
}

/* --- files of packages and administrators --- */

/* "+29d31c0": the beginning of a commit of Git. */
static size_t commit_bytes(const char *text, size_t bytes)
{
    size_t n = bytes > 1 && *text == '+' ? strspn(text + 1, "0123456789abcdef") : 0;

    return (n == 7 || n == 8) && (n + 1 == bytes || text[n + 1] == '.') ? n + 1 : 0;
}

/* "1.2.1+29d31c0", "1:3.4.5-1+cuda12.8" */
void scrub_version(struct scrub *scrub, const char *text, size_t bytes, const struct scrub_row *row, FILE *out)
{
    static const char allowed[] = "0123456789.+_~:abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-";
    size_t line = strcspn(text, "\n"), n = line < bytes ? line : bytes, n_plain = strcspn(text, "+"), n_commit;

    if (n <= 64 && isdigit((unsigned char)*text) && strspn(text, allowed) >= n) {
        n_commit = n_plain < n ? commit_bytes(text + n_plain, n - n_plain) : 0;
        n_plain = n_commit ? n_plain : n;
        scrub_text(scrub, text, n_plain, SCRUB_VERSIONS | SCRUB_NAME, row->words, out);
        fwrite(text + n_plain, 1, n_commit, out);
        n_plain += n_commit;
        scrub_text(scrub, text + n_plain, n - n_plain, SCRUB_VERSIONS | SCRUB_NAME, row->words, out);
    }
    fputs(n < bytes ? "\n" : "", out);
}

/* --- logs --- */

void scrub_event(struct scrub *scrub, const char *text, size_t bytes, const struct scrub_row *row, FILE *out)
{
#define RFC3339 "dddd-dd-ddTdd:dd:dd"
    static const char *const forms[] = {RFC3339,       RFC3339 "Z",       RFC3339 "+dd:dd",   RFC3339 "-dd:dd",
                                        RFC3339 ".*",  RFC3339 ".*Z",     RFC3339 ".*+dd:dd", RFC3339 ".*-dd:dd",
                                        "[_*.dddddd]", "aaa _* dd:dd:dd", "xxxx:xx:xx",       "xxxx:xx:xx.x"};

    (void)scrub;
    (void)row;
    for (size_t i = 0; i < COUNT(forms); i++)
        if (has_form(text, bytes, forms[i]))
            fwrite(text, 1, bytes, out);
}
