/* SPDX-License-Identifier: Apache-2.0 */
#include "kernel_log.h"

#include "common/json.h"
#include "common/text.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define XID "NVRM: Xid"
#define SXID "SXid (PCI:"
#define START "NVRM: loading NVIDIA"
#define INIT_FAILED ": RmInitAdapter failed"
#define NVRM_GPU "NVRM: GPU "
#define LINE_BYTES 300
#define ADDRESS_BYTES 32
#define INITS_MAX 16
#define XID_RECOVERY 154 /* "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)" */

const char *kernel_recovery_name(int recovery)
{
    static const char *const names[] = {[KERNEL_RECOVERY_NONE] = "None",
                                        [KERNEL_RECOVERY_RESET] = "GPU Reset Required",
                                        [KERNEL_RECOVERY_REBOOT] = "Node Reboot Required",
                                        [KERNEL_RECOVERY_DRAIN_P2P] = "Drain P2P",
                                        [KERNEL_RECOVERY_DRAIN_AND_RESET] = "Drain and Reset"};

    return recovery < 0 || recovery >= (int)COUNT(names) ? "" : names[recovery];
}

/* --- parse lines --- */

/* The length of the time that begins a line: "[  12.345678]", RFC 3339, or "Nov 21 12:00:00". */
static size_t time_bytes(const char *line, size_t n)
{
    size_t length = strcspn(line, " ");

    if (n > 2 && *line == '[' && memchr(line, ']', n))
        length = (size_t)((const char *)memchr(line, ']', n) - line) + 1;
    else if (n > 16 && line[3] == ' ' && line[9] == ':' && line[12] == ':' && line[15] == ' ')
        length = 15;
    else if (length < 19 || line[10] != 'T')
        length = 0;
    return length < n && length < 48 ? length : 0;
}

static json_t *text_of(const char *text, size_t n)
{
    return json_stringn_nocheck(text, n < LINE_BYTES ? n : LINE_BYTES);
}

/* A line with an error that begins at `at`. */
struct error_line {
    struct piece line;
    const char *at, *address;
    size_t n_address;
    int number, recovery;
};

/* Parses "(PCI:0000:0f:00): 79, ..." after the word at `at`: device and number. */
static bool parse_error(const char *at, struct error_line *error)
{
    size_t n;

    at += strspn(at, " ");
    if (*at++ != '(')
        return false;
    error->address = at += text_begins(at, "PCI:") ? 4 : 0;
    error->n_address = n = strcspn(at, ")\n");
    if (at[n] != ')' || at[n + 1] != ':' || n >= ADDRESS_BYTES)
        return false;
    at += n + 2;
    at += strspn(at, " ");
    error->number = atoi(at);
    n = strspn(at, "0123456789");
    return n > 0 && n <= 5;
}

static json_t *error_fact(const struct error_line *error)
{
    struct piece line = error->line;

    return json_pack("{s:i, s:i, s:o, s:o, s:o, s:i}", "number", error->number, "n", 1, "device",
                     text_of(error->address, error->n_address), "time",
                     text_of(line.text, time_bytes(line.text, (size_t)(error->at - line.text))), "line",
                     text_of(error->at, line.n - (size_t)(error->at - line.text)), "recovery", error->recovery);
}

/* Counts an Xid by GPU and number; one that reports a recovery removes the earlier ones of that GPU. */
static void record_xid(json_t *errors, const struct error_line *error)
{
    const char *device;
    json_t *fact;

    for (size_t i = json_array_size(errors); i-- > 0;) {
        fact = json_array_get(errors, i);
        device = json_text(fact, "device");
        if (strlen(device) != error->n_address || strncmp(device, error->address, error->n_address) != 0)
            continue;
        if (error->number == XID_RECOVERY && error->recovery == KERNEL_RECOVERY_NONE) {
            json_array_remove(errors, i);
        } else if (json_integer_value(json_object_get(fact, "number")) == error->number) {
            json_object_set_new(fact, "n", json_integer(json_integer_value(json_object_get(fact, "n")) + 1));
            return;
        }
    }
    if ((error->number != XID_RECOVERY || error->recovery != KERNEL_RECOVERY_NONE) &&
        json_array_size(errors) < KERNEL_LOG_KINDS)
        json_array_append_new(errors, error_fact(error));
}

/* A log covers several boots, each with the driver's banner: {"start": TIME, "n_lines": N, "errors": [...]}. */
static json_t *read_xids(struct source_text file)
{
    json_t *errors = json_array(), *value = json_pack("{s:o, s:s, s:i}", "errors", errors, "start", "", "n_lines", 0);
    int n_lines = 0;

    FOR_LINES (line, file) {
        struct error_line error = {.line = line, .at = piece_find(line, XID)};
        const char *start = piece_find(line, START), *to;

        if (start) {
            json_array_clear(errors);
            json_object_set_new(value, "start", text_of(line.text, time_bytes(line.text, (size_t)(start - line.text))));
        }
        n_lines += error.at != NULL;
        if (!error.at || !parse_error(error.at + strlen(XID), &error) || error.number > 9999 ||
            xid_find(error.number)->action == XID_OF_PROGRAM)
            continue;
        line = (struct piece){error.at, line.n - (size_t)(error.at - line.text)};
        to = error.number == XID_RECOVERY ? piece_find(line, " to 0x") : NULL;
        error.recovery = to ? (int)strtol(to + 6, NULL, 16) : KERNEL_RECOVERY_UNKNOWN;
        record_xid(errors, &error);
    }
    json_object_set_new(value, "n_lines", json_integer(n_lines));
    return value;
}

#define CAUSE_NO_FILES 2
#define CAUSE_GFW 4
static const struct init_cause init_causes[] = {
    {"", " (RmInitAdapter failed)", true, ""},
    {"power cables", ": its power cables are not connected", false, ""},
    {"No firmware image found", ": the files of its firmware are not there", false,
     "Install them in the version of the driver (nvidia-firmware-*, linux-firmware-nvidia-gsp or the driver's own "
     "installer; below /lib/firmware/nvidia), also into the initramfs, and load the driver again."},
    {"WPR2 already up", ": it is in a state that only a power cycle ends (WPR2)", true, ""},
    {"GFW", ": its firmware has not started (GFW_BOOT)", true, ""},
};

/* "NVRM: GPU 0000:61:00.0: RmInitAdapter failed! (0x62:0x65:1792)", and before it what the driver waited for. */
static json_t *read_inits(struct source_text file)
{
    json_t *devices = json_array(), *value = json_pack("{s:o, s:i}", "devices", devices, "cause", 0);

    FOR_LINES (line, file) {
        const char *failed = piece_find(line, INIT_FAILED), *gpu = piece_find(line, NVRM_GPU);
        int cause = 1;

        while (cause < (int)COUNT(init_causes) && !piece_find(line, init_causes[cause].line))
            cause++;
        if (piece_find(line, START)) {
            json_array_clear(devices);
            json_object_set_new(value, "cause", json_integer(0));
        } else if (failed && gpu && failed > gpu && json_array_size(devices) < INITS_MAX) {
            gpu += strlen(NVRM_GPU);
            json_array_append_new(devices, text_of(gpu, (size_t)(failed - gpu)));
        } else if (cause < (int)COUNT(init_causes) &&
                   (cause < CAUSE_GFW || piece_find(line, "fail") || piece_find(line, "timed out"))) {
            json_object_set_new(value, "cause", json_integer(cause));
        }
    }
    return value;
}

/* "12028, Fatal, Link 32 ...": only fatal ones. If there are too many, the last ones are kept. */
static json_t *read_sxids(struct source_text file)
{
    json_t *errors = json_array(), *value = json_pack("{s:o}", "errors", errors);

    FOR_LINES (line, file) {
        struct error_line error = {.line = line, .at = piece_find(line, SXID), .recovery = KERNEL_RECOVERY_UNKNOWN};

        if (!error.at || !piece_find(line, ", Fatal") || !parse_error(error.at + strlen("SXid"), &error) ||
            !error.number)
            continue;
        if (json_array_size(errors) == KERNEL_LOG_KINDS)
            json_array_remove(errors, 0);
        json_array_append_new(errors, error_fact(&error));
    }
    return value;
}

/* --- the logs --- */

const char *kernel_error_line(struct source *source, const char *word, const json_t *error)
{
    const char *line = json_text(error, "line"), *recovery = kernel_recovery_name(json_int(error, "recovery"));

    return *line ? line
                 : source_printf(source, "%s (PCI:%.*s): %d%s%s", word, ADDRESS_BYTES, json_text(error, "device"),
                                 json_int(error, "number"), *recovery ? ", GPU recovery action changed to " : "",
                                 recovery);
}

bool kernel_error_is_since(const json_t *error, const char *since)
{
    const char *time = json_text(error, "time");

    /* RFC 3339 times up to the seconds compare as text; other formats do not. */
    return strlen(since) < 19 || strlen(time) < 19 || time[10] != 'T' || strncmp(time, since, 19) >= 0;
}

static struct source_answer xids_of(struct source *source, const char *needle, const char *path)
{
    return source_log_fact(source, "xids", read_xids, needle, "%s", path);
}

static struct kernel_log log_of(struct source_answer fact, const char *where)
{
    return (struct kernel_log){fact.state, fact.why, where, json_object_get(fact.value, "errors"), ""};
}

struct kernel_log kernel_log_xids(struct source *source)
{
    struct source_answer fact = xids_of(source, XID, "/dev/kmsg"), other;

    if (fact.state == SOURCE_OK)
        return log_of(fact, "/dev/kmsg");
    other = xids_of(source, "NVRM: ", KERNEL_LOG_FILE);
    if (other.state == SOURCE_OK)
        return log_of(other, KERNEL_LOG_FILE);
    /* Debian's copy of the log at the end of the boot: old, but useful if it contains an Xid. */
    other = xids_of(source, XID, "/var/log/dmesg");
    return other.state == SOURCE_OK && json_int(other.value, "n_lines") > 0 ? log_of(other, "/var/log/dmesg")
                                                                            : log_of(fact, "/dev/kmsg");
}

struct source_answer kernel_log_fact(struct source *source, const char *name, source_reader *read, const char *needle,
                                     const char **ret_where)
{
    static const char *const logs[] = {"/dev/kmsg", KERNEL_LOG_FILE};
    struct source_answer fact = {.state = SOURCE_ABSENT};

    for (size_t i = 0; i < COUNT(logs) && fact.state != SOURCE_OK; i++)
        fact = source_log_fact(source, name, read, needle, "%s", *ret_where = logs[i]);
    return fact;
}

/* "nvidia 0000:01:00.0: Direct firmware load for nvidia/550.76/gsp_ga10x.bin failed with error -2" */
READER_BOOL(read_no_file, strstr(file.text, "/gsp_"))

const json_t *kernel_log_inits(struct source *source, const char **ret_where, const struct init_cause **ret_cause)
{
    struct source_answer inits = kernel_log_fact(source, "gpu-inits", read_inits, "NVRM: ", ret_where);
    int cause = json_int(inits.value, "cause");
    const char *where;

    if (source_fact_bool(kernel_log_fact(source, "no-gsp-file", read_no_file, "Direct firmware load for nv", &where)))
        cause = CAUSE_NO_FILES;
    *ret_cause = &init_causes[cause > 0 && cause < (int)COUNT(init_causes) ? cause : 0];
    return inits.value;
}

struct kernel_log kernel_log_sxids(struct source *source)
{
    struct kernel_log log = log_of(source_log_fact(source, "sxids", read_sxids, "SXid", "/dev/kmsg"), "/dev/kmsg");

    if (log.state == SOURCE_OK)
        return log;
    log = log_of(source_log_fact(source, "sxids", read_sxids, "SXid", KERNEL_LOG_FILE), KERNEL_LOG_FILE);
    /* A file covers earlier starts too. */
    log.since = json_text(xids_of(source, "NVRM: ", KERNEL_LOG_FILE).value, "start");
    return log;
}

/* --- Xids --- */

/*
 * Source: NVIDIA, "Xid Errors" (docs.nvidia.com/deploy/xid-errors), the catalogue with its column "immediate action"
 * for Ampere to Blackwell, and "GPU Memory Error Management" for 48, 63, 64, 94 and 95. 144 to 150 are those of NVLink
 * 5 (Blackwell), which replace 74. Numbers that the catalogue calls unused are left out.
 */

/* Caused by a program, or without a meaning for the GPU's health. */
static const short ignored[][2] = {
    {8, 8},     {11, 14},   {25, 25},   {31, 32},   {37, 41},   {43, 45},   {60, 60},   {66, 72},
    {75, 77},   {80, 80},   {82, 86},   {88, 89},   {93, 93},   {96, 108},  {121, 121}, {126, 135},
    {137, 137}, {139, 139}, {141, 141}, {152, 153}, {160, 160}, {162, 164}, {171, 172},
};

static const struct xid xids[] = {
    {46, 46, XID_RESET, "the GPU stopped processing"},
    {48, 48, XID_RESET, "double bit ECC error"},
    {54, 54, XID_OTHER, "auxiliary power is not connected to the board"},
    {62, 62, XID_RESET, "internal micro-controller halt"},
    {63, 63, XID_RECOVERED, "a row of memory was remapped"},
    {64, 64, XID_RESET, "remapping a row of memory failed"},
    {74, 74, XID_LINK, "NVLink error"},
    {79, 79, XID_RESTART, "the GPU has fallen off the bus"},
    {92, 92, XID_RESET, "many single bit ECC errors"},
    {94, 94, XID_RECOVERED, "contained memory error"},
    {95, 95, XID_RESET, "uncontained memory error"},
    {109, 109, XID_RESET, "a context switch timed out"},
    {110, 110, XID_RESET, "security fault"},
    {119, 120, XID_RESET, "the GPU's own processor (GSP) does not answer"},
    {136, 136, XID_RESET, "training of the link to the processor failed"},
    {140, 140, XID_RESET, "unrecovered ECC error"},
    {143, 143, XID_RESET, "initialisation of the GPU failed"},
    {144, 144, XID_LINK, "NVLink error (SAW)"},
    {145, 145, XID_LINK, "NVLink error (RLW)"},
    {146, 146, XID_LINK, "NVLink error (TLW)"},
    {147, 147, XID_LINK, "NVLink error (TREX)"},
    {148, 148, XID_LINK, "NVLink error (NVLPW_CTRL)"},
    {149, 149, XID_LINK, "NVLink error (NETIR)"},
    {150, 150, XID_LINK, "NVLink error (MSE)"},
    {154, 154, XID_RECOVERED, "the driver waits for a recovery of the GPU"},
    {155, 155, XID_LINK, "NVLink error (defined by software)"},
    {156, 156, XID_RESET, "a part of the GPU has to be retired"},
    {158, 158, XID_RESET, "fatal timeout of the GPU"},
};

const struct xid *xid_find(int number)
{
    static const struct xid unknown = {0, 0, XID_OTHER, "see NVIDIA's Xid catalogue"};
    static const struct xid of_program = {0, 0, XID_OF_PROGRAM, "not a fault of the GPU"};

    for (size_t i = 0; i < COUNT(xids); i++)
        if (number >= xids[i].first && number <= xids[i].last)
            return &xids[i];
    for (size_t i = 0; i < COUNT(ignored); i++)
        if (number >= ignored[i][0] && number <= ignored[i][1])
            return &of_program;
    return &unknown;
}

const char *xid_action_text(enum xid_action action)
{
    switch (action) {
    case XID_RESTART:
        return "A reset is not sufficient for this GPU: drain the node and restart it, with a power cycle if possible; "
               "stop and start a virtual machine.";
    case XID_LINK:
        return "The fault is on an NVLink: stop the programs on the GPUs at both ends, reset them together, and check "
               "nvidia-smi nvlink --status and the switches' SXids if it comes back.";
    case XID_RESET:
    case XID_OTHER:
        return "A reset ends every program on the GPU and on those connected to it by NVLink.";
    case XID_OF_PROGRAM:
    case XID_RECOVERED:
        break;
    }
    return "";
}
