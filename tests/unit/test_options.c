/* SPDX-License-Identifier: Apache-2.0 */
/* The parser of command lines: values, ranges, defaults, and what is said about mistakes. */
#include "unit.h"

#include "common/cmd.h"

struct sample_options {
    bool quick;
    int64_t count, bytes;
    const char *name, *file;
    int colour;
    struct opt_list numbers, colours;
};

static const char *const colours[] = {"red", "green", "blue", NULL};
static const char *const things[] = {"table", "chair", NULL};

#define AT(member) offsetof(struct sample_options, member)

/* clang-format off */
static const struct opt sample_table[] = {
    {"quick", 'q', NULL, OPT_FLAG, AT(quick), .help = "h"},
    {"count", 'c', "N", OPT_INT, AT(count), .min = -5, .max = 100, .value = "7", .help = "h"},
    {"bytes", 0, "BYTES", OPT_SIZE, AT(bytes), .min = 0, .max = INT64_C(1) << 40, .value = "4K", .help = "h"},
    {"name", 'n', "NAME", OPT_STRING, AT(name), .help = "h"},
    {"file", 0, "FILE", OPT_FILE, AT(file), .value = "default.txt", .help = "h"},
    {"colour", 0, "COLOUR", OPT_CHOICE, AT(colour), .choices = colours, .value = "green", .help = "h"},
    {"numbers", 0, "LIST", OPT_LIST, AT(numbers), .min = 1, .max = 9, .value = "1,2", .help = "h"},
    {"colours", 0, "LIST", OPT_LIST, AT(colours), .choices = colours, .help = "h"},
    {0},
};
/* clang-format on */

static const struct cmd sample = {
    .name = "sample",
    .args = "table|chair [MORE]",
    .min_args = 1,
    .max_args = 2,
    .arg_choices = things,
    .options = sample_table,
    .options_bytes = sizeof(struct sample_options),
};

#define MAX_WORDS 16

/* Parses "sample WORD..."; words are those of `line` between spaces. */
static int parse(const char *line, struct cmd_call *ret_call, bool *ret_help, char ret_error[256])
{
    static char copy[512];
    static char *words[MAX_WORDS + 2];
    int n = 0;

    ret_error[0] = '\0';
    snprintf(copy, sizeof(copy), "sample %s", line);
    for (char *word = strtok(copy, " "); word && n <= MAX_WORDS; word = strtok(NULL, " "))
        words[n++] = word;
    words[n] = NULL;
    return options_parse(&sample, n, words, ret_call, ret_help, ret_error, 256);
}

static const struct sample_options *parse_good(const char *line, struct cmd_call *ret_call)
{
    char error[256];
    bool help;

    if (parse(line, ret_call, &help, error) != CMD_FINE)
        fail_msg("'%s' is refused: %s", line, error);
    assert_false(help);
    return ret_call->options;
}

/* The line is refused, in these words. */
static void refused(const char *line, const char *expected)
{
    struct cmd_call call;
    char error[256];
    bool help;

    assert_int_equal(parse(line, &call, &help, error), CMD_USAGE);
    assert_string_equal(error, expected);
    assert_null(call.options);
}

TEST(test_defaults)
{
    struct cmd_call call;
    const struct sample_options *options = parse_good("table", &call);

    assert_false(options->quick);
    assert_int_equal(options->count, 7);
    assert_int_equal(options->bytes, 4096);
    assert_null(options->name);
    assert_string_equal(options->file, "default.txt");
    assert_int_equal(options->colour, 1);
    assert_int_equal(options->numbers.n, 2);
    assert_int_equal(options->numbers.values[1], 2);
    assert_int_equal(options->colours.n, 0);
    assert_int_equal(call.given, 0);
    assert_int_equal(call.n_args, 1);
    assert_string_equal(call.args[0], "table");
    options_done(&call);
    assert_null(call.options);
}

TEST(test_values)
{
    struct cmd_call call;
    const struct sample_options *options = parse_good(
        "-q --count=-5 chair --bytes 3M -nada --file x --colour blue --numbers 9,1,5 --colours blue,red more", &call);

    assert_true(options->quick);
    assert_int_equal(options->count, -5);
    assert_int_equal(options->bytes, 3 << 20);
    assert_string_equal(options->name, "ada");
    assert_string_equal(options->file, "x");
    assert_int_equal(options->colour, 2);
    assert_int_equal(options->numbers.n, 3);
    assert_int_equal(options->numbers.values[0], 9);
    assert_int_equal(options->numbers.values[2], 5);
    assert_int_equal(options->colours.n, 2);
    assert_int_equal(options->colours.values[0], 2);
    assert_int_equal(call.n_args, 2);
    assert_string_equal(call.args[0], "chair");
    assert_string_equal(call.args[1], "more");
    assert_true(cmd_given(&sample, &call, "quick"));
    assert_true(cmd_given(&sample, &call, "colours"));
    assert_false(cmd_given(&sample, &call, "nothing"));
    options_done(&call);
}

TEST(test_last_value_counts)
{
    struct cmd_call call;
    const struct sample_options *options = parse_good("table --count 1 --count 2 --numbers 3 --numbers 4,5", &call);

    assert_int_equal(options->count, 2);
    assert_int_equal(options->numbers.n, 2);
    assert_int_equal(options->numbers.values[0], 4);
    options_done(&call);
}

TEST(test_abbreviation_and_end)
{
    struct cmd_call call;
    const struct sample_options *options = parse_good("--cou 3 table -- --quick", &call);

    assert_int_equal(options->count, 3);
    assert_false(options->quick);
    assert_string_equal(call.args[1], "--quick");
    options_done(&call);
}

TEST(test_help)
{
    struct cmd_call call;
    char error[256];
    bool help;

    assert_int_equal(parse("--help --nonsense", &call, &help, error), CMD_FINE);
    assert_true(help);
    options_done(&call);
    assert_int_equal(parse("-h", &call, &help, error), CMD_FINE);
    assert_true(help);
    options_done(&call);
}

TEST(test_bad_numbers)
{
    refused("table --count 101", "--count: 101 is out of range -5..100");
    refused("table --count -6", "--count: -6 is out of range -5..100");
    refused("table --count 99999999999999999999", "--count: 99999999999999999999 is out of range -5..100");
    refused("table --count 3x", "--count: '3x' is not a whole number (-5..100)");
    refused("table --count 0x10", "--count: '0x10' is not a whole number (-5..100)");
    refused("table --count +3", "--count: '+3' is not a whole number (-5..100)");
    refused("table --count 1.5", "--count: '1.5' is not a whole number (-5..100)");
    refused("table --count 3K", "--count: '3K' is not a whole number (-5..100)");
    refused("table --bytes 2G5", "--bytes: '2G5' is not a size in bytes, optionally with suffix K, M or G "
                                 "(0..1099511627776)");
    refused("table --bytes 2000G", "--bytes: 2000G is out of range 0..1099511627776");
    refused("table --bytes 9223372036854775807G", "--bytes: 9223372036854775807G is out of range 0..1099511627776");
    refused("table --bytes -1", "--bytes: -1 is out of range 0..1099511627776");
}

TEST(test_bad_lists)
{
    refused("table --numbers 1,,2", "--numbers: '1,,2' is not a comma-separated list");
    refused("table --numbers 1,", "--numbers: '1,' is not a comma-separated list");
    refused("table --numbers 1,10", "--numbers: 10 is out of range 1..9");
    refused("table --numbers 1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1",
            "--numbers: more than 32 entries");
    refused("table --colours red,gren", "--colours: 'gren' is none of red, green, blue; did you mean 'green'?");
}

TEST(test_bad_names)
{
    refused("table --colour gren", "--colour: 'gren' is none of red, green, blue; did you mean 'green'?");
    refused("table --colour xyzzy", "--colour: 'xyzzy' is none of red, green, blue");
    refused("table --colr red", "unknown option '--colr'; did you mean '--colour'?");
    refused("table --nubmers=3", "unknown option '--nubmers'; did you mean '--numbers'?");
    refused("table --hlep", "unknown option '--hlep'; did you mean '--help'?");
    refused("table --xyzzy", "unknown option '--xyzzy'");
    refused("table -x", "unknown option '-x'");
    refused("table -qx", "unknown option '-x'");
    refused("table --colo red", "option '--colo' is ambiguous: write it in full");
    refused("table --quick=yes", "--quick takes no argument");
    refused("table --help=yes", "--help takes no argument");
    refused("table --count", "--count needs an argument (N)");
    refused("table -c", "--count needs an argument (N)");
    refused("table --name=", "--name: empty argument");
}

TEST(test_bad_arguments)
{
    refused("", "missing argument: table|chair [MORE]");
    refused("table more most", "unexpected argument 'most'");
    refused("chiar", "unknown argument 'chiar'; did you mean 'chair'?");
    refused("xyzzy", "unknown argument 'xyzzy': it must be one of table, chair");
}

TEST(test_nearest)
{
    static const char *const names[] = {"test", "bench", "version", "completion", NULL};

    assert_string_equal(options_nearest("tset", names), "test");
    assert_string_equal(options_nearest("comp", names), "completion");
    assert_string_equal(options_nearest("versoin", names), "version");
    assert_string_equal(options_nearest("bnech", names), "bench");
    assert_null(options_nearest("launch", names));
    assert_null(options_nearest("", names));
    assert_null(options_nearest("t", names));
}

TEST(test_print)
{
    static const char *const except[] = {"count", NULL};
    struct cmd_call call;
    char text[256], small[16];

    parse_good("chair -q --count 3 --bytes 2K --name it's --colour red --numbers 1,2 --colours red,blue", &call);
    options_print(&sample, &call, except, text, sizeof(text));
    assert_string_equal(text, "epkit sample chair --quick --bytes 2048 --name 'it'\\''s' --colour red --numbers 1,2 "
                              "--colours red,blue");
    options_print(&sample, &call, except, small, sizeof(small));
    assert_string_equal(small, "epkit sample");
    options_done(&call);
    /* What looks like an option stands behind "--", where it is none. */
    parse_good("--quick -- table -c", &call);
    options_print(&sample, &call, except, text, sizeof(text));
    assert_string_equal(text, "epkit sample --quick -- table -c");
    options_done(&call);
}
