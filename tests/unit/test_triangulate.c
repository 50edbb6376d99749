/* SPDX-License-Identifier: Apache-2.0 */
/* A planted slow node is found in any fleet, with few runs; ambiguous results are reported as such. */
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

static double measure(const struct fleet *fleet, const int *nodes, int n)
{
    double share = fleet->min_group > 0 && n >= fleet->min_group ? 0.5 : 1;

    assert_true(n >= 2);
    for (int i = 0; i < n; i++)
        share = fmin(share, fleet->share[nodes[i]]);
    return share * (1 + NOISE * (2 * uniform() - 1));
}

static struct triangulate *solve(const struct fleet *fleet, struct triangulate_options options)
{
    struct triangulate *t = triangulate_new(fleet->n, &options);
    struct triangulate_round round;
    unsigned char seen[1024];

    assert_non_null(t);
    while (triangulate_next(t, &round)) {
        for (int i = 0; i < fleet->n; i++)
            seen[i] = 0;
        for (int i = 0; i < round.n_groups; i++) {
            for (int j = 0; j < round.sizes[i]; j++)
                assert_int_equal(seen[round.groups[i][j]]++, 0); /* groups of a round share no node */
            triangulate_result(t, i, measure(fleet, round.groups[i], round.sizes[i]));
        }
    }
    assert_true(triangulate_runs(t) <= options.max_runs);
    return t;
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
    int total = 0, least = 0, most = 0;

    for (int i = 0; i < FLEETS; i++) {
        static struct fleet fleet;
        struct triangulate_options options = {.max_runs = 64, .margin = 0.04};
        struct triangulate *t;
        const int *slow;
        int n, node, worst;

        random_state = (uint64_t)i * 7919 + 1;
        make_fleet(&fleet, 3 + (int)(uniform() * (i % 4 ? 1022 : 30)));
        node = (int)(uniform() * fleet.n);
        fleet.share[node] = 0.25 + 0.5 * uniform();
        options.full = fleet.share[node];
        t = solve(&fleet, options);
        assert_int_equal(triangulate_end(t, &slow, &n), TRIANGULATE_FOUND);
        assert_int_equal(n, 1);
        assert_int_equal(slow[0], node);
        worst = triangulate_worst_case(fleet.n, triangulate_choose(fleet.n, &options));
        assert_true(triangulate_runs(t) <= worst + 2); /* two may have to be repeated */
        total += triangulate_runs(t);
        least += triangulate_least(fleet.n);
        most = triangulate_runs(t) > most ? triangulate_runs(t) : most;
        triangulate_free(t);
    }
    printf("%d fleets: %.2f runs on average, at most %d; the theoretical least is %.2f on average\n", FLEETS,
           (double)total / FLEETS, most, (double)least / FLEETS);
    assert_true(total <= least + 3 * FLEETS);
}

TEST(test_several)
{
    for (int i = 0; i < 50; i++) {
        static struct fleet fleet;
        struct triangulate_options options = {.max_runs = 100, .margin = 0.04, .full = 0.5};
        struct triangulate *t;
        const int *slow;
        int n, a, b;

        random_state = (uint64_t)i + 99;
        make_fleet(&fleet, 8 + (int)(uniform() * 200));
        a = (int)(uniform() * fleet.n);
        b = (int)(uniform() * fleet.n);
        fleet.share[a] = fleet.share[b] = 0.5;
        t = solve(&fleet, options);
        assert_int_equal(triangulate_end(t, &slow, &n), TRIANGULATE_FOUND);
        assert_int_equal(n, a == b ? 1 : 2);
        for (int j = 0; j < n; j++)
            assert_true(slow[j] == a || slow[j] == b);
        triangulate_free(t);
    }
}

static enum triangulate_end end_of(const struct fleet *fleet, struct triangulate_options options, int *ret_n)
{
    struct triangulate *t = solve(fleet, options);
    const int *slow;
    enum triangulate_end end = triangulate_end(t, &slow, ret_n);

    triangulate_free(t);
    return end;
}

TEST(test_untellable)
{
    static struct fleet fleet;
    struct triangulate_options options = {.max_runs = 64, .full = 0.5};
    int n;

    random_state = 5;
    make_fleet(&fleet, 2);
    fleet.share[1] = 0.5;
    assert_int_equal(end_of(&fleet, options, &n), TRIANGULATE_EITHER);
    assert_int_equal(n, 2);
    make_fleet(&fleet, 12);
    fleet.min_group = 5; /* no node: the network between groups of five and more */
    assert_int_equal(end_of(&fleet, options, &n), TRIANGULATE_SPREAD);
    assert_true(n >= 5 && n <= 6);
    options.full = 0;
    make_fleet(&fleet, 12);
    assert_int_equal(end_of(&fleet, options, &n), TRIANGULATE_NONE);
    make_fleet(&fleet, 600);
    fleet.share[77] = 0.5;
    options.max_runs = 4;
    assert_int_equal(end_of(&fleet, options, &n), TRIANGULATE_BUDGET);
    assert_true(n > 1 && n < 100);
    assert_null(triangulate_new(1, &options));
}

TEST(test_deduce)
{
    int groups[4][3] = {{0, 1}, {1, 2}, {2, 3}, {3, 4}}, *at[4] = {groups[0], groups[1], groups[2], groups[3]};
    int sizes[4] = {2, 2, 2, 2}, suspects[5];
    bool slow[4] = {false, true, true, false}, is_proof;

    assert_int_equal(triangulate_deduce(5, 4, at, sizes, slow, suspects, &is_proof), 1);
    assert_int_equal(suspects[0], 2);
    assert_true(is_proof);
    assert_int_equal(triangulate_deduce(5, 3, at, sizes, slow + 1, suspects, &is_proof), 2);
    slow[3] = true;
    assert_int_equal(triangulate_deduce(5, 4, at, sizes, slow, suspects, &is_proof), 3);
    assert_false(is_proof);
    slow[1] = slow[2] = slow[3] = false;
    assert_int_equal(triangulate_deduce(5, 4, at, sizes, slow, suspects, &is_proof), 0);
    assert_false(is_proof);
}
