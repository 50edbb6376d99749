/* SPDX-License-Identifier: Apache-2.0 */
/* Which GPUs a machine has for ranks, and whether they suffice. */
#include "common/ranks/gpu.h"
#include "common/ranks/ranks_internal.h"
#include "tree.h"

#define ANSWER(text) "{\"epkit_snapshot\": 1, \"answers\": {\"cuda\": {\"value\": " text "}}}"

const struct ranks_job ranks_jobs[] = {{0}};

static void read_answer(const char *overlay, struct ep_cuda_gpus *ret_gpus)
{
    struct source *source;
    struct tree tree;

    tree_init(&tree);
    if (overlay)
        tree_put(&tree, "/epkit-overlay.json", overlay);
    assert_int_equal(source_open(tree.place, &source), EP_OK);
    gpu_query_source(source, ret_gpus);
    source_free(source);
    tree_done(&tree);
}

TEST(an_answer_of_cuda)
{
    struct ep_cuda_gpus gpus;

    read_answer(ANSWER("{\"visible\": 3, \"usable\": 2, \"connected\": 1, \"why\": \"no P2P\", \"addresses\": "
                       "[\"0000:01:00.0\", \"0000:02:00.0\", \"0000:03:00.0\"]}"),
                &gpus);
    assert_int_equal(gpus.visible, 3);
    assert_int_equal(gpus.usable, 2);
    assert_int_equal(gpus.connected, 1);
    assert_string_equal(gpus.address[2], "0000:03:00.0");
    assert_string_equal(gpus.why, "no P2P");
}

/* What comes from a child that something has happened to is no GPU. */
TEST(what_is_no_answer)
{
    static const char *const bad[] = {
        ANSWER("{\"visible\": 1, \"usable\": 2, \"connected\": 2, \"why\": \"\", \"addresses\": [\"0000:01:00.0\"]}"),
        ANSWER("{\"visible\": 1, \"usable\": 1, \"connected\": -1, \"why\": \"\", \"addresses\": [\"0000:01:00.0\"]}"),
        ANSWER("{\"visible\": 2, \"usable\": 2, \"connected\": 2, \"why\": \"\", \"addresses\": [\"0000:01:00.0\"]}"),
        ANSWER("{\"visible\": 1, \"usable\": 1, \"connected\": 1, \"why\": \"\", \"addresses\": {}}"),
        ANSWER("{\"visible\": 1, \"usable\": 1, \"connected\": 1, \"addresses\": [\"0000:01:00.0\"]}"),
        ANSWER("[]"),
        "{\"epkit_snapshot\": 1, \"answers\": {\"cuda\": {\"state\": \"failed\", \"why\": \"killed by signal 11\"}}}",
        NULL,
    };
    struct ep_cuda_gpus gpus;

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        read_answer(bad[i], &gpus);
        assert_int_equal(gpus.visible, 0);
        assert_memory_equal(gpus.why, "asking CUDA: ", 13);
    }
    read_answer(bad[6], &gpus);
    assert_string_equal(gpus.why, "asking CUDA: killed by signal 11");
}

static bool are_offered(const char *name)
{
    struct source *source;
    struct tree tree;
    bool offered;

    tree_init(&tree);
    tree_put(&tree, name, "");
    assert_int_equal(source_open(tree.place, &source), EP_OK);
    offered = gpu_has_devices(source);
    source_free(source);
    tree_done(&tree);
    return offered;
}

TEST(device_files_tell_of_gpus)
{
    assert_true(are_offered("/dev/nvidia0"));
    assert_true(are_offered("/dev/nvidia15"));
    assert_false(are_offered("/dev/nvidiactl"));
    assert_false(are_offered("/dev/nvidia-uvm"));
    assert_false(are_offered("/dev/nvidia"));
    assert_false(are_offered("/dev/null"));
}

/* --- do they suffice? -------------------------------------------------------------------------------------------- */

/* Sees the GPUs in `digits`, each at 0000:0<digit>:00.0; the first `connected` of them can be used. */
static struct ep_cuda_gpus view(const char *digits, int connected, const char *why)
{
    struct ep_cuda_gpus gpus = {.visible = (int)strlen(digits), .usable = connected, .connected = connected};

    for (int i = 0; i < gpus.visible; i++)
        snprintf(gpus.address[i], sizeof(gpus.address[i]), "0000:0%c:00.0", digits[i]);
    snprintf(gpus.why, sizeof(gpus.why), "%s", why);
    return gpus;
}

TEST(ranks_that_see_the_same)
{
    const struct {
        struct ep_cuda_gpus view;
        int nranks;
        bool cuda;
        const char *why;
    } cases[] = {
        {view("1", 1, ""), 1, true, "there is a GPU"},
        {view("1234", 4, ""), 4, true, "there is a GPU for each rank"},
        {view("1234", 4, ""), 3, true, "there is a GPU for each rank"},
        {view("1234", 4, ""), 5, false, "4 GPUs are visible, 5 ranks"},
        {view("1", 1, ""), 2, false, "1 GPU is visible, 2 ranks"},
        {view("", 0, "none is visible"), 1, false, "none is visible"},
        {view("1234", 2, "no P2P between 1 and 3"), 2, true, "there is a GPU for each rank"},
        {view("1234", 2, "no P2P between 1 and 3"), 3, false, "no P2P between 1 and 3"},
        /* Not that there are too few: with fewer ranks it would be this as well. */
        {view("12", 1, "no P2P between 1 and 2"), 8, false, "no P2P between 1 and 2"},
        {view("12", 0, "GPU 1 is too old"), 1, false, "GPU 1 is too old"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        bool hidden = true;
        char why[256];

        assert_int_equal(gpu_check(&cases[i].view, true, cases[i].nranks, &hidden, why, sizeof(why)), cases[i].cuda);
        assert_string_equal(why, cases[i].why);
        assert_int_equal(hidden, !cases[i].cuda);
    }
}

/* Under mpirun, where each rank may have an environment of its own. */
TEST(ranks_that_see_each_their_own)
{
    static const char none[] = "no usable GPU: none is visible";
    const struct {
        struct ep_cuda_gpus views[3];
        bool cuda, hidden;
        const char *why;
    } cases[] = {
        {{view("1", 1, ""), view("2", 1, ""), view("3", 1, "")}, true, true, "there is a GPU for each rank"},
        {{view("123", 3, ""), view("123", 3, ""), view("123", 3, "")}, true, false, "there is a GPU for each rank"},
        {{view("12", 2, ""), view("12", 2, ""), view("3", 1, "")}, true, true, "there is a GPU for each rank"},
        {{view("1", 1, ""), view("1", 1, ""), view("1", 1, "")}, false, false, "1 GPU is visible, 3 ranks"},
        {{view("12", 2, ""), view("12", 2, ""), view("12", 2, "")}, false, false, "2 GPUs are visible, 3 ranks"},
        {{view("1", 1, ""), view("2", 1, ""), view("12", 2, "")},
         false,
         false,
         "ranks 0 and 2 see the same GPU, 0000:01:00.0"},
        {{view("1", 1, ""), view("2", 1, ""), view("", 0, none)},
         false,
         false,
         "rank 2: no usable GPU: none is visible"},
        {{view("1", 1, ""), view("2", 0, "GPU 2 is too old"), view("3", 1, "")},
         false,
         false,
         "rank 1: GPU 2 is too old"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        bool hidden = false;
        char why[256];

        assert_int_equal(gpu_check(cases[i].views, false, 3, &hidden, why, sizeof(why)), cases[i].cuda);
        assert_string_equal(why, cases[i].why);
        assert_int_equal(hidden, cases[i].hidden);
    }
}
