/* SPDX-License-Identifier: Apache-2.0 */
/* The assignment of GPUs to NICs: known machines, and random ones compared with all possible assignments. */
#include "machine/hardware/map.h"
#include "map_machine.h"
#include "temp.h"

#include <unistd.h>

static struct machine machine;

/* The assignment as text: "mlx5_0:1 mlx5_1:1", "-" for none. */
static const char *shown(const struct map *map)
{
    static char text[4096];
    size_t n = 0;

    text[0] = '\0';
    for (int i = 0; i < map->n; i++) {
        const struct map_choice *choice = &map->choices[i];

        assert_int_equal(choice->gpu, i);
        if (choice->nic < 0)
            n += (size_t)snprintf(text + n, sizeof(text) - n, "%s-", i ? " " : "");
        else
            n += (size_t)snprintf(text + n, sizeof(text) - n, "%s%s:%d", i ? " " : "", machine.nics[choice->nic].name,
                                  choice->port);
    }
    return text;
}

static struct map *best(void)
{
    struct map *map = NULL;

    map = map_best(&machine.topo);
    assert_int_equal(map->n, machine.topo.n_gpus);
    for (int i = 0; i < map->n; i++)
        assert_int_not_equal(*map->choices[i].why, '\0');
    return map;
}

static void best_is(const char *expected)
{
    struct map *map = best();

    assert_string_equal(shown(map), expected);
    map_free(map);
}

/* `per_switch` GPUs and as many NICs below each of four switches, two on each NUMA node. */
static void four_switches(int per_switch)
{
    machine_init(&machine);
    for (int s = 0; s < 4; s++) {
        int at = machine_switch(&machine, s, s / 2);

        for (int i = 0; i < per_switch; i++)
            machine_gpu(&machine, at, s, s / 2);
        for (int i = 0; i < per_switch; i++) {
            char name[24];

            snprintf(name, sizeof(name), "mlx5_%d", s * per_switch + i);
            machine_nic(&machine, name, 1, at, s, s / 2);
        }
    }
}

/* --- known machines; others are in tests/machines/expected --- */

/* Names of NICs have no order: their location counts. */
TEST(names_do_not_count)
{
    machine_init(&machine);
    for (int s = 0; s < 2; s++) {
        int at = machine_switch(&machine, s, s);

        machine_gpu(&machine, at, s, s);
        machine_nic(&machine, s ? "mlx5_0" : "mlx5_1", 1, at, s, s);
    }
    best_is("mlx5_1:1 mlx5_0:1");
}

/* EFA: 32 NICs for 8 GPUs, four on the switch of each; a GPU of another process keeps its four. */
TEST(four_for_each)
{
    struct map *map;

    machine_init(&machine);
    for (int s = 0; s < 8; s++) {
        int at = machine_switch(&machine, s, s / 4);
        char name[24];

        machine_gpu(&machine, at, s, s / 4);
        for (int i = 0; i < 4; i++) {
            snprintf(name, sizeof(name), "rdmap%d", 4 * s + i);
            machine_nic(&machine, name, 1, at, s, s / 4);
        }
    }
    map = best();
    assert_int_equal(map->n_idle, 0);
    for (int gpu = 0; gpu < 8; gpu++) {
        assert_int_equal(map->choices[gpu].nic, 4 * gpu);
        assert_int_equal(map->choices[gpu].n_more, 3);
        for (int i = 0; i < 3; i++)
            assert_int_equal(map->choices[gpu].more[i].nic, 4 * gpu + i + 1);
    }
    map_free(map);
    machine.topo.n_hidden_gpus = 7;
    for (int i = 0; i < 7; i++)
        machine.topo.hidden_gpus[i] = machine.gpus[i].pci;
    machine.gpus[0] = machine.gpus[7];
    machine.topo.n_gpus = 1;
    map = best();
    assert_int_equal(map->n, 1);
    assert_int_equal(map->n_idle, 0);
    assert_int_equal(map->choices[0].nic, 28);
    assert_int_equal(map->choices[0].n_more, 3);
    map_free(map);
}

/* One GPU per task, two of them on a switch with two NICs: each task independently finds the NIC of its own GPU. */
TEST(one_gpu_a_task)
{
    int first, second;
    struct map *map;

    for (int own = 0; own < 2; own++) {
        int at;

        machine_init(&machine);
        at = machine_switch(&machine, 0, 0);
        first = machine_leaf(&machine, at, 0, 0);
        second = machine_leaf(&machine, at, 0, 0);
        machine_nic(&machine, "mlx5_0", 1, at, 0, 0);
        machine_nic(&machine, "mlx5_1", 1, at, 0, 0);
        machine.gpus[0] = (struct topo_gpu){.pci = own ? second : first};
        machine.topo.n_gpus = 1;
        machine.topo.n_hidden_gpus = 1;
        machine.topo.hidden_gpus[0] = own ? first : second;
        map = best();
        assert_int_equal(map->choices[0].nic, own);
        assert_non_null(strstr(map->choices[0].why, "goes to a GPU that this process is not given"));
        map_free(map);
    }
    /* A pod with one of the NICs uses it, whatever others have. */
    machine.nics[1].role = TOPO_ROLE_NO_ACCESS;
    map = best();
    assert_int_equal(map->choices[0].nic, 0);
    map_free(map);
}

TEST(nothing)
{
    struct map *map;

    machine_init(&machine);
    best_is("");
    machine_nic(&machine, "mlx5_0", 1, -1, 0, 0);
    map = best();
    assert_int_equal(map->n, 0);
    assert_int_equal(map->n_idle, 1);
    map_free(map);
    machine_init(&machine);
    machine_gpu(&machine, -1, 0, 0);
    map = best();
    assert_string_equal(shown(map), "-");
    assert_int_equal(map->choices[0].sharers, 0);
    assert_string_equal(map->choices[0].why, "there is no NIC");
    map_free(map);
    map_free(NULL);
}

TEST(only_active_data_ports)
{
    struct topo_nic *nic;

    machine_init(&machine);
    machine_gpu(&machine, -1, 0, 0);
    machine_gpu(&machine, -1, 0, 0);
    machine_nic(&machine, "mgmt", 1, -1, 0, 0)->role = TOPO_ROLE_MANAGEMENT;
    nic = machine_nic(&machine, "down", 1, -1, 0, 0);
    nic->role = TOPO_ROLE_DOWN;
    nic->ports[0].active = false;
    machine_nic(&machine, "virtual", 1, -1, 0, 0)->role = TOPO_ROLE_VIRTUAL;
    best_is("- -");
    nic = machine_nic(&machine, "two", 2, -1, 1, 1);
    best_is("two:1 two:2");
    nic->ports[0].active = false;
    best_is("two:2 two:2");
}

/* All GPUs on the NUMA node without NICs: they are spread all the same. */
TEST(numa_imbalance)
{
    struct map *map;

    machine_init(&machine);
    for (int i = 0; i < 2; i++)
        machine_gpu(&machine, -1, 0, 0);
    machine_nic(&machine, "far_0", 1, -1, 2, 1);
    machine_nic(&machine, "far_1", 1, -1, 2, 1);
    machine_nic(&machine, "near_0", 1, -1, 1, 0);
    map = best();
    assert_string_equal(shown(map), "far_0:1 near_0:1");
    assert_string_equal(map->choices[0].why, "SYS, not the nearest: near_0 goes to GPU 1 (NODE); no port serves two "
                                             "GPUs while another is free");
    map_free(map);
}

/*
 * One SYS and one PIX have a smaller sum than two NODE, but the exchange waits for the GPU behind the link between the
 * sockets. Only an inconsistent machine offers this choice: two devices of one switch on different NUMA nodes.
 */
TEST(far_paths_are_avoided_first)
{
    struct map *map;
    int at;

    machine_init(&machine);
    at = machine_switch(&machine, 0, 0);
    machine_gpu(&machine, at, 0, 0);
    machine_gpu(&machine, -1, 1, 1);
    machine_nic(&machine, "mlx5_0", 1, at, 0, 1);
    machine_nic(&machine, "mlx5_1", 1, -1, 2, 0);
    assert_int_equal(topo_gpu_nic_path(&machine.topo, 0, 0), TOPO_PIX);
    assert_int_equal(topo_gpu_nic_path(&machine.topo, 1, 1), TOPO_SYS);
    map = best();
    assert_string_equal(shown(map), "mlx5_1:1 mlx5_0:1");
    assert_int_equal(map->distance, 6);
    map_free(map);
}

/* --- against all assignments --- */

#define SMALL 6

struct ports {
    int n, nics[SMALL], numbers[SMALL];
};

/* Numbers of SYS, NODE, PHB and PXB paths, in order of cost; then how far the order of ports is from that of GPUs. */
static void count_paths(const struct ports *ports, const int *assignment, int counts[5])
{
    memset(counts, 0, 5 * sizeof(*counts));
    for (int g = 0; g < machine.topo.n_gpus; g++) {
        counts[4] += (machine.topo.n_gpus - g) * assignment[g];
        switch (topo_gpu_nic_path(&machine.topo, g, ports->nics[assignment[g]])) {
        case TOPO_SYS:
            counts[0]++;
            break;
        case TOPO_NODE:
            counts[1]++;
            break;
        case TOPO_PHB:
            counts[2]++;
            break;
        case TOPO_PXB:
            counts[3]++;
            break;
        default:
            break;
        }
    }
}

static bool is_balanced(const struct ports *ports, const int *assignment)
{
    int loads[SMALL] = {0}, least = SMALL + 1, most = 0;

    for (int g = 0; g < machine.topo.n_gpus; g++)
        loads[assignment[g]]++;
    for (int p = 0; p < ports->n; p++) {
        least = loads[p] < least ? loads[p] : least;
        most = loads[p] > most ? loads[p] : most;
    }
    return most - least <= 1;
}

static bool is_less(const int a[5], const int b[5])
{
    for (int i = 0; i < 5; i++)
        if (a[i] != b[i])
            return a[i] < b[i];
    return false;
}

/* The counts of the best of all assignments. */
static void search_all(const struct ports *ports, int ret_fewest[5])
{
    int assignment[SMALL] = {0}, counts[5];

    memcpy(ret_fewest, (int[5]){SMALL + 1}, 5 * sizeof(*ret_fewest));

    for (;;) {
        int g = machine.topo.n_gpus - 1;

        if (is_balanced(ports, assignment)) {
            count_paths(ports, assignment, counts);
            if (is_less(counts, ret_fewest))
                memcpy(ret_fewest, counts, sizeof(counts));
        }
        while (g >= 0 && ++assignment[g] == ports->n)
            assignment[g--] = 0;
        if (g < 0)
            return;
    }
}

static unsigned next_random(unsigned *seed, unsigned below)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 16) % below;
}

static void random_machine(unsigned seed, struct ports *ret_ports)
{
    int switches[4], bridges, n_gpus, left;

    machine_init(&machine);
    bridges = 1 + (int)next_random(&seed, 4);
    for (int b = 0; b < 4; b++)
        switches[b] = machine_switch(&machine, b % bridges, b % bridges % 2);
    /* Nested switches: paths out of them are PXB. */
    machine.pci[switches[3]].parent = switches[3 % bridges];
    if (machine.pci[switches[3]].parent == switches[3])
        machine.pci[switches[3]].parent = switches[3] - 1;
    n_gpus = 1 + (int)next_random(&seed, SMALL);
    for (int i = 0; i < n_gpus; i++) {
        int b = (int)next_random(&seed, 4);

        machine_gpu(&machine, next_random(&seed, 3) ? switches[b] : -1, b % bridges, b % bridges % 2);
    }
    left = 1 + (int)next_random(&seed, SMALL);
    *ret_ports = (struct ports){0};
    while (left > 0) {
        int b = (int)next_random(&seed, 4);
        int n = left > 1 && next_random(&seed, 4) == 0 ? 2 : 1;
        struct topo_nic *nic =
            machine_nic(&machine, "nic", n, next_random(&seed, 3) ? switches[b] : -1, b % bridges, b % bridges % 2);

        for (int p = 0; p < n; p++) {
            ret_ports->nics[ret_ports->n] = (int)(nic - machine.nics);
            ret_ports->numbers[ret_ports->n++] = p + 1;
        }
        left -= n;
    }
    /* Inconsistent firmware: distances that no tree has. */
    for (int i = 0; i < machine.topo.n_pci && seed % 3 == 0; i++)
        if (next_random(&seed, 4) == 0)
            machine.pci[i].numa_node = (int)next_random(&seed, 3) - 1;
}

TEST(best_of_all)
{
    int seen[TOPO_SYS + 1] = {0};

    for (unsigned seed = 1; seed <= 600; seed++) {
        int assignment[SMALL] = {0}, expected[5], counts[5];
        struct ports ports;
        struct map *map;

        random_machine(seed, &ports);
        search_all(&ports, expected);
        map = best();
        for (int g = 0; g < map->n; g++) {
            while (map->choices[g].nic != ports.nics[assignment[g]] ||
                   map->choices[g].port != ports.numbers[assignment[g]])
                assignment[g]++;
            seen[map->choices[g].path]++;
        }
        count_paths(&ports, assignment, counts);
        if (!is_balanced(&ports, assignment) || memcmp(counts, expected, sizeof(counts)) != 0)
            fail_msg("seed %u: SYS %d of %d, NODE %d of %d, PHB %d of %d, PXB %d of %d, order %d of %d", seed,
                     counts[0], expected[0], counts[1], expected[1], counts[2], expected[2], counts[3], expected[3],
                     counts[4], expected[4]);
        map_free(map);
    }
    /* The random machines covered all kinds. */
    for (enum topo_path path = TOPO_PIX; path <= TOPO_SYS; path++)
        assert_true(seen[path] > 50);
}

TEST(hostile_sizes)
{
    double begin = unit_processor_seconds(), seconds;

    for (int shape = 0; shape < 3; shape++) {
        unsigned seed = (unsigned)shape;
        struct map_nvshmem how = {.hca_list = "", .hca_prefix = "nic"};
        struct map *map;

        machine_init(&machine);
        for (int i = 0; i < TOPO_MAX_GPUS; i++)
            machine_gpu(&machine, -1, (int)next_random(&seed, 8), (int)next_random(&seed, 2));
        for (int i = 0; i < (shape == 2 ? 3 : TOPO_MAX_NICS); i++)
            machine_nic(&machine, "nic", TOPO_MAX_PORTS, -1, (int)next_random(&seed, shape ? 200 : 1),
                        (int)next_random(&seed, 2));
        map = best();
        map_free(map);
        map = map_nvshmem(&machine.topo, &how);
        map_free(map);
    }
    seconds = unit_processor_seconds() - begin;
    print_message("64 GPUs, 128 NICs of 4 ports: %.3f s of CPU for six maps\n", seconds);
    assert_true(seconds < 3); /* also with sanitizers and without optimisation */
}

/* --- NVSHMEM --- */

static void nvshmem_is(struct map_nvshmem how, const char *expected)
{
    struct map *map = NULL;

    if (!how.hca_list)
        how.hca_list = "";
    if (!how.hca_prefix)
        how.hca_prefix = "mlx5";
    map = map_nvshmem(&machine.topo, &how);
    assert_string_equal(shown(map), expected);
    for (int i = 0; i < map->n; i++)
        assert_int_not_equal(*map->choices[i].why, '\0');
    map_free(map);
}

TEST(nvshmem_by_distance)
{
    four_switches(2);
    /* GPUs of one switch take the same NIC if each is a world of its own. */
    nvshmem_is((struct map_nvshmem){.hca_list = NULL},
               "mlx5_0:1 mlx5_0:1 mlx5_2:1 mlx5_2:1 mlx5_4:1 mlx5_4:1 mlx5_6:1 mlx5_6:1");
}

TEST(nvshmem_with_pe_mapping)
{
    four_switches(2);
    nvshmem_is((struct map_nvshmem){.pe_mapping = true},
               "mlx5_0:1 mlx5_0:1 mlx5_0:1 mlx5_0:1 mlx5_0:1 mlx5_0:1 mlx5_0:1 mlx5_0:1");
    nvshmem_is((struct map_nvshmem){.pe_mapping = true, .hca_list = "mlx5_4,mlx5_2:1,mlx5_6:2"},
               "mlx5_2:1 mlx5_2:1 mlx5_2:1 mlx5_2:1 mlx5_2:1 mlx5_2:1 mlx5_2:1 mlx5_2:1");
    nvshmem_is((struct map_nvshmem){.pe_mapping = true, .hca_list = "mlx5_5:1"},
               "mlx5_5:1 mlx5_5:1 mlx5_5:1 mlx5_5:1 mlx5_5:1 mlx5_5:1 mlx5_5:1 mlx5_5:1");
}

TEST(nvshmem_lists)
{
    machine_init(&machine);
    machine_gpu(&machine, -1, 0, 0);
    machine_nic(&machine, "mlx5_1", 2, -1, 0, 0);
    machine_nic(&machine, "mlx5_10", 1, -1, 0, 0)->role = TOPO_ROLE_MANAGEMENT;
    nvshmem_is((struct map_nvshmem){.hca_list = ""}, "mlx5_1:1");
    nvshmem_is((struct map_nvshmem){.hca_list = "mlx5_1:2"}, "mlx5_1:2");
    nvshmem_is((struct map_nvshmem){.hca_list = "^mlx5_1:1"}, "mlx5_1:2");
    nvshmem_is((struct map_nvshmem){.hca_list = "^mlx5_1"}, "mlx5_10:1"); /* names are exact; roles do not count */
    nvshmem_is((struct map_nvshmem){.hca_list = "^mlx5_1,mlx5_10"}, "-");
    nvshmem_is((struct map_nvshmem){.hca_list = ",,mlx5_10:1:3,"}, "mlx5_10:1");
    nvshmem_is((struct map_nvshmem){.hca_list = "mlx5_7"}, "-");
    nvshmem_is((struct map_nvshmem){.hca_prefix = "x5_10"}, "mlx5_10:1"); /* anywhere in the name */
    nvshmem_is((struct map_nvshmem){.hca_prefix = "rocep"}, "-");
    nvshmem_is((struct map_nvshmem){.hca_prefix = "rocep", .hca_list = "mlx5_1"}, "-");
    nvshmem_is((struct map_nvshmem){.hca_prefix = ""}, "mlx5_1:1");
    machine.nics[0].ports[0].active = false;
    nvshmem_is((struct map_nvshmem){.hca_list = "mlx5_1"}, "mlx5_1:2");
    machine.nics[0].ports[1].link_layer = TOPO_LINK_UNKNOWN;
    nvshmem_is((struct map_nvshmem){.hca_list = "mlx5_1"}, "-");
}

TEST(nvshmem_with_twice_the_nics)
{
    machine_init(&machine);
    for (int s = 0; s < 4; s++) {
        int at = machine_switch(&machine, s, s / 2);
        char name[24];

        for (int i = 0; i < 2; i++)
            machine_gpu(&machine, at, s, s / 2);
        for (int i = 0; i < 4; i++) {
            snprintf(name, sizeof(name), "mlx5_%d", 4 * s + i);
            machine_nic(&machine, name, 1, at, s, s / 2);
        }
    }
    nvshmem_is((struct map_nvshmem){.hca_list = NULL},
               "mlx5_0:1 mlx5_0:1 mlx5_4:1 mlx5_4:1 mlx5_8:1 mlx5_8:1 mlx5_12:1 mlx5_12:1");
    best_is("mlx5_0:1 mlx5_1:1 mlx5_4:1 mlx5_5:1 mlx5_8:1 mlx5_9:1 mlx5_12:1 mlx5_13:1");
}

TEST(nvshmem_takes_pix_before_pxb)
{
    int above, below;

    machine_init(&machine);
    above = machine_switch(&machine, 0, 0);
    below = machine_pci(&machine, machine_pci(&machine, above, 0, 0), 0, 0);
    for (int i = 0; i < 2; i++)
        machine_gpu(&machine, below, 0, 0);
    machine_nic(&machine, "mlx5_0", 1, above, 0, 0);
    machine_nic(&machine, "mlx5_1", 1, below, 0, 0);
    assert_int_equal(topo_gpu_nic_path(&machine.topo, 0, 0), TOPO_PXB);
    assert_int_equal(topo_gpu_nic_path(&machine.topo, 0, 1), TOPO_PIX);
    nvshmem_is((struct map_nvshmem){.hca_list = NULL}, "mlx5_1:1 mlx5_1:1");
}

/* --- texts --- */

TEST(parse_good)
{
    struct map *map;

    four_switches(1);
    assert_int_equal(map_parse(&machine.topo, "0:mlx5_3:1,2:mlx5_3", &map), EP_OK);
    assert_string_equal(shown(map), "mlx5_3:1 - mlx5_3:1 -");
    assert_int_equal(map->n_shared, 1);
    assert_int_equal(map->n_idle, 3);
    assert_int_equal(map->choices[0].path, TOPO_SYS);
    assert_int_equal(map->choices[0].sharers, 2);
    map_free(map);
    machine.nics[1].n_ports = 2;
    machine.nics[1].ports[0].active = false;
    machine.nics[1].ports[1] = (struct topo_port){.number = 2, .active = true};
    assert_int_equal(map_parse(&machine.topo, "3:mlx5_1", &map), EP_OK);
    assert_string_equal(shown(map), "- - - mlx5_1:2");
    map_free(map);
}

TEST(parse_bad)
{
    static const struct {
        const char *text, *why;
    } cases[] = {
        {"", "entry 1, '', is not GPU:NIC or GPU:NIC:PORT"},
        {",", "entry 1, '', is not"},
        {"0:mlx5_0,", "entry 2, '', is not"},
        {"0", "entry 1, '0', is not"},
        {"0:", "entry 1, '0:', is not"},
        {":mlx5_0", "no GPU has the number"},
        {"4:mlx5_0", "entry 1, '4:mlx5_0': no GPU has the number before the colon; there are 4"},
        {"-1:mlx5_0", "no GPU has the number"},
        {"0x1:mlx5_0", "no GPU has the number"},
        {"99999999999999999999:mlx5_0", "no GPU has the number"},
        {" 0:mlx5_0", "no GPU has the number"},
        {"0:mlx5_0,0:mlx5_1", "entry 2, '0:mlx5_1': GPU 0 has a NIC from an entry before"},
        {"0:mlx5_9", "entry 1, '0:mlx5_9': no NIC has that name"},
        {"0:MLX5_0", "no NIC has that name"},
        {"0:mlx5_0:", "the NIC has no such port; it has 1"},
        {"0:mlx5_0:0", "no such port"},
        {"0:mlx5_0:2", "no such port"},
        {"0:mlx5_0:1:1", "no such port"},
        {"0:mlx5_0:one", "no such port"},
        {"0:mlx5_0;1:mlx5_1", "entries are divided by ','"},
        {"0:\033[31m", "entry 1, '0:?[31m': no NIC"},
    };
    char longest[200];
    struct map *map = NULL;

    four_switches(1);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(map_parse(&machine.topo, cases[i].text, &map), EP_E_ARG);
        if (!strstr(ep_last_error(), cases[i].why))
            fail_msg("'%s': \"%s\" lacks \"%s\"", cases[i].text, ep_last_error(), cases[i].why);
    }
    memset(longest, 'x', sizeof(longest));
    longest[sizeof(longest) - 1] = '\0';
    assert_fails(map_parse(&machine.topo, longest, &map), EP_E_ARG, "entry 1 is longer than");
    assert_null(map);
}

TEST(forms)
{
    char folder[PATH_MAX];
    struct map *map;

    four_switches(1);
    machine.nics[2].n_ports = 2;
    machine.nics[2].ports[0].active = false;
    machine.nics[2].ports[1] = (struct topo_port){.number = 2, .active = true};
    machine.nics[3].role = TOPO_ROLE_MANAGEMENT;
    temp_template("map", folder);
    assert_non_null(mkdtemp(folder));
    assert_int_equal(source_open(folder, &machine.topo.source), EP_OK);
    map = best();
    assert_string_equal(map_deepep(&machine.topo, map), "0:mlx5_0:1,1:mlx5_1:1,2:mlx5_2:2,3:mlx5_2:2");
    assert_string_equal(map_nccl(&machine.topo), "=mlx5_0:1,mlx5_1:1,mlx5_2:2");
    assert_string_equal(map_hca_list(&machine.topo, map, 3), "mlx5_2:2");
    assert_string_equal(map_verbs(&machine.topo, map), "mlx5_0:1,mlx5_1:1,mlx5_2:2,mlx5_2:2");
    map->choices[2].nic = -1;
    assert_string_equal(map_verbs(&machine.topo, map), "");
    map_free(map);
    /* The output can be parsed. */
    assert_int_equal(map_parse(&machine.topo, "0:mlx5_0:1,1:mlx5_1:1,2:mlx5_2:2,3:mlx5_2:2", &map), EP_OK);
    assert_string_equal(map_deepep(&machine.topo, map), "0:mlx5_0:1,1:mlx5_1:1,2:mlx5_2:2,3:mlx5_2:2");
    map_free(map);
    machine.topo.n_nics = 0;
    map = best();
    assert_string_equal(map_deepep(&machine.topo, map), "");
    assert_string_equal(map_nccl(&machine.topo), "");
    assert_string_equal(map_hca_list(&machine.topo, map, 0), "");
    map_free(map);
    source_free(machine.topo.source);
    assert_int_equal(rmdir(folder), 0);
}
