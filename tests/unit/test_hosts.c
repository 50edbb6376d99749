/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of hosts, hostfiles, and what schedulers put into the environment. */
#include "temp.h"

#include "cmd/launch/hosts.h"

#include "base/error.h"
#include "common/text.h"

#include <sys/stat.h>
#include <unistd.h>

/* The targets of `list` with a space between, or the reason in angle brackets. */
static const char *expand(const char *list)
{
    static char text[65536];
    struct hosts hosts = {0};
    size_t used = 0;

    text[0] = '\0';
    if (hosts_add_list("list", list, &hosts) != EP_OK)
        snprintf(text, sizeof(text), "<%s>", ep_last_error());
    else
        for (int i = 0; i < hosts.n; i++)
            used += (size_t)snprintf(text + used, sizeof(text) - used, "%s%s%s%s", i ? " " : "", hosts.list[i].target,
                                     *hosts.list[i].port ? ":" : "", hosts.list[i].port);
    hosts_done(&hosts);
    return text;
}

TEST(test_lists)
{
    assert_string_equal(expand("a"), "a");
    assert_string_equal(expand("a, b"), "a b");
    assert_string_equal(expand(" a ,\tb  c\nd\n"), "a b c d");
    assert_string_equal(expand("h[1, 2] g"), "h1 h2 g");
    assert_string_equal(expand("root@a:222,[2001:db8::1]:23,2001:db8::2"), "root@a:222 2001:db8::1:23 2001:db8::2");
    assert_string_equal(expand("h[1-3,7]"), "h1 h2 h3 h7");
    assert_string_equal(expand("gpu[08-11]"), "gpu08 gpu09 gpu10 gpu11");
    assert_string_equal(expand("r[1-2]n[01,03]-ib,login"), "r1n01-ib r1n03-ib r2n01-ib r2n03-ib login");
    assert_string_equal(expand("user@h[1-2]:2222"), "user@h1:2222 user@h2:2222");
    assert_string_equal(expand("h[098-101]"), "h098 h099 h100 h101");
}

TEST(test_lists_refused)
{
    static const char *const wrong[][2] = {
        {"", "empty name"},
        {"a,,b", "empty name"},
        {"a,", "empty name"},
        {"a , ,b", "empty name"},
        {" \n", "empty name"},
        {"a,b,a", "is listed twice"},
        {"gpu1,GPU1.", "is listed twice"},
        {"root@a,me@a", "is listed twice"},
        {"a:22,root@A:22", "is listed twice"},
        {"h[1-3],h2", "is listed twice"},
        {"h[3-1]", "is empty or has more than"},
        {"h[1-99999999]", "is empty or has more than"},
        {"h[0-4095],x", "more than 4096 hosts"},
        {"h[1-", "bracket is not closed"},
        {"h[1-2-3]", "is not a range"},
        {"h[-1]", "is not a range"},
        {"h[1,,2]", "is not a range"},
        {"h[a-b]", "is not a host"},
        {"-oProxyCommand=x", "is not a host"},
        {"a;reboot", "is not a host"},
        {"a:0", "is not a host"},
        {"a:65536", "is not a host"},
        {"user@", "is not a host"},
        {"user@-x", "is not a host"},
    };

    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        if (!strstr(expand(wrong[i][0]), wrong[i][1]) || *expand(wrong[i][0]) != '<')
            fail_msg("'%s' gives: %s", wrong[i][0], expand(wrong[i][0]));
}

static const char *write_text(const char *text)
{
    static char path[PATH_MAX];
    FILE *stream;

    if (*path)
        unlink(path);
    temp_template("hostfile", path);
    stream = fdopen(mkstemp(path), "w");
    assert_non_null(stream);
    fputs(text, stream);
    fclose(stream);
    return path;
}

static int remove_text(void **state)
{
    (void)state;
    return unlink(write_text(""));
}

TEST(test_files)
{
    struct hosts hosts = {0};

    assert_int_equal(
        hosts_add_file(write_text("# the job\n\na slots=8\n b:222 max_slots=8 # x\r\n"), HOSTS_OPEN_MPI, &hosts),
        EP_OK);
    assert_int_equal(hosts.n, 2);
    assert_int_equal(hosts.list[0].slots, 8);
    assert_string_equal(hosts.list[1].port, "222");
    hosts_done(&hosts);
    /* PBS: a line for each slot. */
    assert_int_equal(hosts_add_file(write_text("a\na\nb\n"), HOSTS_REPEATED, &hosts), EP_OK);
    assert_int_equal(hosts.n, 2);
    assert_int_equal(hosts.list[0].slots, 2);
    hosts_done(&hosts);
    assert_fails(hosts_add_file(write_text("a\na\n"), HOSTS_OPEN_MPI, &hosts), EP_E_ARG,
                 "line 2: 'a' is already in line 1");
    hosts_done(&hosts);
    assert_int_equal(hosts_add_file(write_text("a slots=none\n"), HOSTS_OPEN_MPI, &hosts), EP_E_ARG);
    hosts_done(&hosts);
    assert_int_equal(hosts_add_file(write_text("# nothing\n"), HOSTS_OPEN_MPI, &hosts), EP_E_ARG);
    hosts_done(&hosts);
}

/* Files of editors, other schedulers' formats, settings, typing errors. */
TEST(test_formats)
{
    static const char *const wrong[][2] = {
        {"a\rb\rc\n", "line 1: a carriage return within the line"},
        {"a\nb slotss=8\n", "line 2: 'slotss=8' after the host is not a setting of Open MPI"},
        {"a slots=8.5\n", "slots= takes a number"},
        {"a slots=99999999999999999999\n", "slots= takes a number"},
        {"a slots=\n", "slots= takes a number"},
        {"a\nA\n", "line 2: 'A' is already in line 1; for several slots write slots=N once"},
        {"a\nme@a slots=4\n", "line 2: 'me@a' is already in line 1"},
        {"a user=-oProxyCommand=x\n", "is not a host"},
        {"a,b\n", "is not a host: [USER@]HOST[:PORT]; a file has one host a line"},
        {"gpu[01-04]\n",
         "is not a host: [USER@]HOST[:PORT]; a file has one host a line, --hosts takes lists and ranges"},
        {"a:\n", "is not a host"},
        {"[::1\n", "is not a host"},
        {"[a]:22\n", "is not a host"},
        {"\xff\xfe"
         "a\n",
         "is not a host"},
        {"\n\n   \n\t# a\n", "the file contains no host"},
    };
    struct hosts hosts = {0};

    assert_int_equal(hosts_add_file(write_text("\xef\xbb\xbf"
                                               "a slots=4\r\nb user=me cpu=2 max-slots=9\r\n"
                                               "[2001:db8::1]:23\tslots=2\r\n2001:db8::2#x"),
                                    HOSTS_OPEN_MPI, &hosts),
                     EP_OK);
    assert_int_equal(hosts.n, 4);
    assert_string_equal(hosts.list[0].target, "a");
    assert_string_equal(hosts.list[1].target, "me@b");
    assert_int_equal(hosts.list[1].slots, 2);
    assert_string_equal(hosts.list[2].target, "2001:db8::1");
    assert_string_equal(hosts.list[2].port, "23");
    hosts_done(&hosts);
    /* Such a number behind the colon is no port. */
    assert_int_equal(hosts_add_file(write_text("a:8\nb\n"), HOSTS_OPEN_MPI, &hosts), EP_OK);
    assert_string_equal(hosts.list[0].port, "");
    assert_int_equal(hosts.list[0].slots, 8);
    hosts_done(&hosts);
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        if (hosts_add_file(write_text(wrong[i][0]), HOSTS_OPEN_MPI, &hosts) == EP_OK ||
            !strstr(ep_last_error(), wrong[i][1]))
            fail_msg("file %zu gives: %s", i, ep_last_error());
        hosts_done(&hosts);
    }
}

/* "HOST:8" of MPICH and Horovod: no ssh server has a port below that of ssh. */
TEST(test_slots_after_a_colon)
{
    struct hosts hosts = {0};

    assert_int_equal(hosts_add_file(write_text("w1:8\nme@w2:21\nw3:22\n[2001:db8::1]:4\n2001:db8::2:8\nw4:1 slots=2\n"),
                                    HOSTS_OPEN_MPI, &hosts),
                     EP_OK);
    assert_int_equal(hosts.n, 6);
    assert_string_equal(hosts.list[0].target, "w1");
    assert_string_equal(hosts.list[0].port, "");
    assert_int_equal(hosts.list[0].slots, 8);
    assert_string_equal(hosts.list[1].target, "me@w2");
    assert_int_equal(hosts.list[1].slots, 21);
    assert_string_equal(hosts.list[2].port, "22");
    assert_int_equal(hosts.list[2].slots, 0);
    assert_string_equal(hosts.list[3].target, "2001:db8::1");
    assert_int_equal(hosts.list[3].slots, 4);
    assert_string_equal(hosts.list[4].target, "2001:db8::2:8");
    assert_int_equal(hosts.list[4].slots, 0);
    assert_string_equal(hosts.list[5].port, "");
    assert_int_equal(hosts.list[5].slots, 2);
    hosts_done(&hosts);
    assert_int_equal(hosts_add_list("list", "w[1-2]:8", &hosts), EP_OK);
    assert_string_equal(hosts.list[1].target, "w2");
    assert_string_equal(hosts.list[1].port, "");
    hosts_done(&hosts);
    /* A file may not name a node twice. */
    assert_int_equal(hosts_add_file(write_text("w1:8\nw1\n"), HOSTS_OPEN_MPI, &hosts), EP_E_ARG);
    hosts_done(&hosts);
}

/* What never ends is not read for ever, and what is no file not waited for. */
TEST(test_no_files)
{
    struct hosts hosts = {0};

    assert_fails(hosts_add_file("/nowhere/hosts", HOSTS_OPEN_MPI, &hosts), EP_E_ARG, "No such file");
    assert_fails(hosts_add_file("/", HOSTS_OPEN_MPI, &hosts), EP_E_ARG, "not a regular file");
    assert_int_equal(hosts_add_file("/proc/self/environ", HOSTS_OPEN_MPI, &hosts), EP_E_ARG);
    hosts_done(&hosts);
}

TEST(test_written_anew)
{
    const char *path = write_text("old\n");
    struct hosts hosts = {0}, read = {0};
    struct stat before, after;

    assert_int_equal(hosts_add_list("list", "root@h[1-2]:22", &hosts), EP_OK);
    assert_int_equal(stat(path, &before), 0);
    assert_int_equal(hosts_write(path, &hosts, 8), EP_OK);
    assert_int_equal(stat(path, &after), 0);
    /* Another file, which took the place of the old one at once. */
    assert_int_not_equal(before.st_ino, after.st_ino);
    assert_int_equal(hosts_add_file(path, HOSTS_OPEN_MPI, &read), EP_OK);
    assert_int_equal(read.n, 2);
    assert_string_equal(read.list[0].target, "h1");
    assert_int_equal(read.list[1].slots, 8);
    assert_fails(hosts_write("/nowhere/hostfile", &hosts, 8), EP_E_SYSTEM, "/nowhere/hostfile");
    hosts_done(&hosts);
    hosts_done(&read);
}

static const char *const variables[] = {"JOBSET_NAME",
                                        "NNODES",
                                        "JOB_COMPLETION_INDEX",
                                        "REPLICATED_JOB_NAME",
                                        "REPLICATED_JOB_REPLICAS",
                                        "JOB_INDEX",
                                        "JOBSET_SUBDOMAIN",
                                        "LWS_LEADER_ADDRESS",
                                        "LWS_GROUP_SIZE",
                                        "LWS_WORKER_INDEX",
                                        "JOB_SUBDOMAIN",
                                        "PBS_NODEFILE",
                                        "SLURM_JOB_NODELIST",
                                        "SLURM_NODELIST",
                                        "SLURM_JOB_ID",
                                        "SLURM_STEP_ID",
                                        "SLURM_PROCID",
                                        "SLURM_STEP_NUM_TASKS",
                                        "SLURM_STEP_NODELIST",
                                        "SLURM_HET_SIZE",
                                        "COMPLETIONS",
                                        "PARALLELISM",
                                        "JOB_COMPLETIONS",
                                        "JOB_PARALLELISM",
                                        "LSB_DJOB_HOSTFILE",
                                        "OMPI_MCA_orte_default_hostfile",
                                        "HOSTNAME_PREFIX",
                                        "DOMAIN_NAME"};

/* Sets "NAME=VALUE" words alone, and finds the hosts: "INDEX: a b c" or the reason. */
static const char *discover(const char *words)
{
    static char text[4096];
    struct hosts_source source;
    struct hosts hosts;
    char copy[1024], *rest = copy, *word;
    size_t used;

    for (size_t i = 0; i < sizeof(variables) / sizeof(variables[0]); i++)
        unsetenv(variables[i]);
    snprintf(copy, sizeof(copy), "%s", words);
    while ((word = strsep(&rest, " "))) {
        char *value = strchr(word, '=');

        *value = '\0';
        setenv(word, value + 1, 1);
    }
    if (hosts_discover(&hosts, &source) != EP_OK) {
        snprintf(text, sizeof(text), "<%s>", ep_last_error());
        return text;
    }
    used = (size_t)snprintf(text, sizeof(text), "%d%s:", source.index, source.is_pods ? " pods" : "");
    for (int i = 0; i < hosts.n; i++)
        used += (size_t)snprintf(text + used, sizeof(text) - used, " %s", hosts.list[i].target);
    hosts_done(&hosts);
    return text;
}

static void assert_contradiction(const char *words, const char *text)
{
    const char *answer = discover(words);

    if (*answer != '<' || !strstr(answer, text))
        fail_msg("%s gives: %s", words, answer);
}

TEST(test_surroundings)
{
    assert_string_equal(discover("JOBSET_NAME=js NNODES=2 JOB_COMPLETION_INDEX=1"),
                        "1 pods: js-workload-0-0.js js-workload-0-1.js");
    assert_string_equal(discover("JOBSET_NAME=js REPLICATED_JOB_NAME=w JOB_INDEX=1 REPLICATED_JOB_REPLICAS=2 NNODES=4 "
                                 "JOB_COMPLETION_INDEX=0 JOBSET_SUBDOMAIN=sub"),
                        "2 pods: js-w-0-0.sub js-w-0-1.sub js-w-1-0.sub js-w-1-1.sub");
    assert_string_equal(discover("LWS_LEADER_ADDRESS=lws-3.lws.ns LWS_GROUP_SIZE=3 LWS_WORKER_INDEX=2"),
                        "2 pods: lws-3.lws.ns lws-3-1.lws.ns lws-3-2.lws.ns");
    assert_string_equal(discover("HOSTNAME_PREFIX=rel-workload-0- DOMAIN_NAME=rel NNODES=2 JOB_COMPLETION_INDEX=0"),
                        "0 pods: rel-workload-0-0.rel rel-workload-0-1.rel");
    assert_string_equal(discover("SLURM_JOB_NODELIST=h[1-2] SLURM_JOB_ID=7"), "-1: h1 h2");
    /* A batch script has a SLURM_PROCID, a task of a step has more. */
    assert_string_equal(discover("SLURM_JOB_NODELIST=h[1-2] SLURM_PROCID=0"), "-1: h1 h2");
    assert_string_equal(discover("SLURM_JOB_NODELIST=h[1-2] SLURM_PROCID=3 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4"),
                        "3: h1 h2");
    /* A step on some of the job's nodes. */
    assert_string_equal(discover("SLURM_JOB_NODELIST=h[1-4] SLURM_STEP_NODELIST=h[2-3] SLURM_PROCID=1 SLURM_STEP_ID=0 "
                                 "SLURM_STEP_NUM_TASKS=2"),
                        "1: h2 h3");
    assert_string_equal(discover("SLURM_JOB_NODELIST=h[1-4] SLURM_STEP_NODELIST=h2 SLURM_PROCID=0 "
                                 "SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1"),
                        "-1: h1 h2 h3 h4");
    assert_contradiction("SLURM_JOB_NODELIST=h1 SLURM_HET_SIZE=2", "several lists of nodes: give --hosts");
    assert_contradiction("LWS_GROUP_SIZE=2", "LWS_GROUP_SIZE is set, but LWS_LEADER_ADDRESS is not");
    assert_contradiction("SLURM_JOB_ID=7", "SLURM_JOB_ID is set, but SLURM_JOB_NODELIST is not");
    /* All but NNODES count the pods of one job. */
    assert_string_equal(discover("JOBSET_NAME=js REPLICATED_JOB_REPLICAS=2 JOB_INDEX=1 COMPLETIONS=1 NNODES=2 "
                                 "JOB_COMPLETION_INDEX=0 REPLICATED_JOB_NAME=w"),
                        "1 pods: js-w-0-0.js js-w-1-0.js");
    assert_contradiction("JOBSET_NAME=js NNODES=2 COMPLETIONS=4 JOB_COMPLETION_INDEX=1",
                         "NNODES is 2 and COMPLETIONS is 4");
    assert_contradiction("JOBSET_NAME=js NNODES=2 JOB_COMPLETION_INDEX=2",
                         "JOB_COMPLETION_INDEX is '2', not a number from 0 to 1");
    assert_contradiction("JOBSET_NAME=js NNODES=4 REPLICATED_JOB_REPLICAS=2 JOB_INDEX=2 JOB_COMPLETION_INDEX=0",
                         "JOB_INDEX is '2', not a number from 0 to 1");
    assert_contradiction("JOBSET_NAME=js NNODES=3 REPLICATED_JOB_REPLICAS=2 JOB_COMPLETION_INDEX=0",
                         "cannot be spread");
    assert_contradiction("JOBSET_NAME=js NNODES=0 JOB_COMPLETION_INDEX=0", "NNODES is '0'");
    assert_contradiction("JOBSET_NAME=js NNODES=2 JOB_COMPLETION_INDEX=-1", "JOB_COMPLETION_INDEX is '-1'");
    assert_contradiction("JOBSET_NAME=js[ NNODES=2 JOB_COMPLETION_INDEX=0", "JobSet: ");
    assert_contradiction("JOB_COMPLETION_INDEX=2 NNODES=2", "JOB_COMPLETION_INDEX is '2', not a number from 0 to 1");
    assert_contradiction("LWS_LEADER_ADDRESS=l.s LWS_GROUP_SIZE=2 LWS_WORKER_INDEX=2", "LWS_WORKER_INDEX is '2'");
    assert_contradiction("LWS_LEADER_ADDRESS=l.s LWS_WORKER_INDEX=0", "LWS_GROUP_SIZE is not set");
    assert_contradiction("HOSTNAME_PREFIX=p- NNODES=2 JOB_COMPLETION_INDEX=2", "JOB_COMPLETION_INDEX is '2'");
    assert_contradiction("SLURM_JOB_NODELIST=(null)", "is not a host");
    assert_contradiction("SLURM_JOB_NODELIST=h[1-2] SLURM_PROCID=2 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2",
                         "SLURM_PROCID is '2', not a number from 0 to 1");
    assert_contradiction("PBS_NODEFILE=/nowhere/nodes", "/nowhere/nodes: No such file");
    assert_non_null(strstr(discover("JOBSET_NAME=js JOB_COMPLETION_INDEX=1"), "NNODES"));
    assert_non_null(strstr(discover("JOBSET_NAME=js NNODES=zwei JOB_COMPLETION_INDEX=1"), "NNODES is 'zwei'"));
    assert_non_null(strstr(discover("JOB_COMPLETION_INDEX=1 NNODES=2"), "does not end in '-1'"));
    assert_non_null(strstr(discover("SLURM_JOB_NODELIST=h[1-"), "SLURM_JOB_NODELIST"));
}

TEST(test_loopback)
{
    static const char *const yes[] = {"localhost",  "LocalHost",     "localhost.localdomain",
                                      "localhost6", "ip6-localhost", "localhost.",
                                      "127.0.0.1",  "127.1",         "127.0.1.1",
                                      "::1",        "0:0:0::1",      "::ffff:127.0.0.1"};
    static const char *const no[] = {"",
                                     "127.example",
                                     "127",
                                     "1270.0.0.1",
                                     "localhost1",
                                     "h1",
                                     "12.0.0.1",
                                     "::2",
                                     "::ffff:10.0.0.1",
                                     "127.0.0.1.example",
                                     "localhost.example"};

    for (size_t i = 0; i < sizeof(yes) / sizeof(yes[0]); i++)
        if (!address_is_loopback(yes[i]))
            fail_msg("%s is the loopback", yes[i]);
    for (size_t i = 0; i < sizeof(no) / sizeof(no[0]); i++)
        if (address_is_loopback(no[i]))
            fail_msg("'%s' is not the loopback", no[i]);
}

TEST_GROUP(NULL, remove_text)
