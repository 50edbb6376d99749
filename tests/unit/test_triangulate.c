/* SPDX-License-Identifier: Apache-2.0 */
/* Planted slow nodes are found in any fleet, with few runs; ambiguous results are reported as such. */
#include "unit.h"

#include "cmd/triangulate/triangulate.h"

#include <math.h>

#define FLEETS 200
#define NOISE 0.03

static uint64_t random_state;

static double uniform(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (double)(random_state >> 11) / (double)(1ull << 53);
}

struct fleet {
    int n;
    double share[1024]; /* of the full rate */
    int min_group;      /* groups of at least this size are slow, whatever their nodes; 0: none */
};

static bool measure(const struct fleet *fleet, const struct triangulate_group *group)
{
    double share = fleet->min_group > 0 && group->n >= fleet->min_group ? 0.5 : 1;

    assert_true(group->n >= 2);
    for (int i = 0; i < group->n; i++)
        share = fmin(share, fleet->share[group->nodes[i]]);
    return share * (1 + NOISE * (2 * uniform() - 1)) < 0.85;
}

/* The number of runs. */
static int solve(const struct fleet *fleet, enum triangulate_end *ret_end, bool *ret_is_suspect)
{
    struct triangulate t = {.n_nodes = fleet->n};
    int runs;

    for (size_t i = 0; triangulate_next(&t);) {
        unsigned char seen[1024] = {0};

        for (; i < t.n_groups; i++) {
            for (int j = 0; j < t.groups[i].n; j++)
                assert_int_equal(seen[t.groups[i].nodes[j]]++, 0); /* groups of a round share no node */
            t.groups[i].is_slow = measure(fleet, &t.groups[i]);
        }
    }
    *ret_end = triangulate_judge(&t, ret_is_suspect);
    runs = (int)t.n_groups;
    triangulate_done(&t);
    return runs;
}

static void make_fleet(struct fleet *fleet, int n)
{
    fleet->n = n;
    fleet->min_group = 0;
    for (int i = 0; i < n; i++)
        fleet->share[i] = 1;
}

TEST(test_fleets)
{
    for (int i = 0; i < FLEETS; i++) {
        static struct fleet fleet;
        enum triangulate_end end;
        bool is_suspect[1024];
        int n_slow, runs;

        random_state = (uint64_t)i * 7919 + 1;
        make_fleet(&fleet, 3 + (int)(uniform() * (i % 4 ? 1021 : 30)));
        n_slow = fleet.n < 8 ? 1 : 1 + i % 3;
        for (int k = 0; k < n_slow; k++)
            fleet.share[(int)(uniform() * fleet.n)] = 0.25 + 0.5 * uniform();
        runs = solve(&fleet, &end, is_suspect);
        assert_int_equal(end, TRIANGULATE_FOUND);
        for (int k = 0; k < fleet.n; k++)
            assert_int_equal(is_suspect[k], fleet.share[k] < 1);
        /* Each further slow node takes two more. */
        assert_true(runs <= triangulate_runs(fleet.n) + 2 * (n_slow - 1));
    }
}

TEST(test_untellable)
{
    static struct fleet fleet;
    enum triangulate_end end;
    bool is_suspect[1024];

    random_state = 5;
    make_fleet(&fleet, 2);
    fleet.share[1] = 0.5;
    (void)solve(&fleet, &end, is_suspect);
    assert_int_equal(end, TRIANGULATE_EITHER);
    assert_true(is_suspect[0] && is_suspect[1]);
    make_fleet(&fleet, 12);
    assert_int_equal(solve(&fleet, &end, is_suspect), 7);
    assert_int_equal(end, TRIANGULATE_NONE);
    fleet.min_group = 5; /* no node: the network between groups of five and more */
    (void)solve(&fleet, &end, is_suspect);
    assert_int_equal(end, TRIANGULATE_SPREAD);
    /* A slow node in each of two pairs. */
    for (int n = 4; n <= 5; n++) {
        make_fleet(&fleet, n);
        fleet.share[0] = fleet.share[2] = 0.5;
        (void)solve(&fleet, &end, is_suspect);
        assert_int_equal(end, TRIANGULATE_FOUND);
        assert_true(is_suspect[0] && !is_suspect[1] && is_suspect[2] && !is_suspect[3]);
    }
    make_fleet(&fleet, 12);
    fleet.min_group = 2;
    assert_int_equal(solve(&fleet, &end, is_suspect), 6);
    assert_int_equal(end, TRIANGULATE_EITHER);
}

/* Pairs of a chain of five nodes, from `first` on; whether each is slow. */
static enum triangulate_end judge(int first, const char *slow, bool *ret_is_suspect)
{
    struct triangulate t = {.n_nodes = 5};
    enum triangulate_end end;

    for (int i = first; *slow; i++, slow++)
        triangulate_add(&t, (int[]){i, i + 1}, 2, *slow == 's');
    end = triangulate_judge(&t, ret_is_suspect);
    triangulate_done(&t);
    return end;
}

TEST(test_recorded)
{
    bool is_suspect[5];

    assert_int_equal(judge(0, "fssf", is_suspect), TRIANGULATE_FOUND);
    assert_true(is_suspect[2] && !is_suspect[1] && !is_suspect[3]);
    assert_int_equal(judge(1, "ssf", is_suspect), TRIANGULATE_EITHER);
    assert_true(is_suspect[1] && is_suspect[2] && !is_suspect[3]);
    assert_int_equal(judge(0, "fsss", is_suspect), TRIANGULATE_EITHER);
    assert_int_equal(judge(0, "fsf", is_suspect), TRIANGULATE_SPREAD);
    assert_int_equal(judge(0, "ffff", is_suspect), TRIANGULATE_NONE);
}
