/* SPDX-License-Identifier: Apache-2.0 */
/*
 * roles.c - the role of each NIC: a rail for the traffic of GPUs, or one of the reasons why it should carry none.
 *
 * No single fact determines a role, so it is inferred by these steps, in this order. Each step considers the rails that
 * the previous steps left, and none assumes as many NICs as GPUs.
 *
 *   individual   virtual functions in addition to their physical one, no active port, software in addition to hardware
 *   distance     if NICs share PCIe switches with GPUs, these are the rails, and farther ones are for storage
 *   link layer   the rails have one link layer: the one with the most bandwidth that no default route uses
 *   speed        NICs with less than half of the speed of the fastest rail have another purpose
 *   make         if some NICs are near GPUs, a far one of another make is for storage
 *   route        NICs that the default route uses, and those like them
 *   access       NICs that this process may not use, while it may use others
 *
 * A NIC that is down counts for distance and link layer: a storage NIC does not become a rail instead.
 */
#include "common/text.h"
#include "read_hardware.h"

#define MUCH_SLOWER 0.5 /* of the fastest rail */
#define N_LAYERS (TOPO_LINK_ETHERNET + 1)

/* The input of the rules. GPUs are all on the bus, also those of others, because NICs belong to them too. */
struct view {
    struct topo *topo;
    int n_gpus;
    enum topo_path distance[TOPO_MAX_NICS]; /* to the nearest GPU, by index in topo.nics */
    bool is_down[TOPO_MAX_NICS];            /* would be a rail if a port were active */
};

/* --- one NIC --- */

/* The rate of the fastest active port; 0 without one, or if it is unknown. */
static double fastest_port(const struct topo_nic *nic)
{
    double rate = 0;

    for (int i = 0; i < nic->n_ports; i++)
        if (nic->ports[i].active && nic->ports[i].rate_gbps > rate)
            rate = nic->ports[i].rate_gbps;
    return rate;
}

/* The link layer of the first active port, else of the first one. */
static int layer_of(const struct topo_nic *nic)
{
    for (int p = 0; p < nic->n_ports; p++)
        if (nic->ports[p].active)
            return (int)nic->ports[p].link_layer;
    return nic->n_ports > 0 ? (int)nic->ports[0].link_layer : TOPO_LINK_UNKNOWN;
}

/* The NIC of the physical function; -1 if this is not a virtual function or the physical one is not present. */
static int physical_function(const struct topo *topo, const struct topo_nic *nic)
{
    struct pci_address address;
    const char *path;
    int pci = -1;
    char text[20];

    if (nic->pci < 0)
        return -1;
    path = source_resolve(topo->source, "/sys/bus/pci/devices/%s/physfn", topo->pci[nic->pci].address).text;
    if (pci_of_path(path, &address)) {
        print_pci_address(&address, text);
        pci = topo_find_pci(topo, text);
    }
    return pci < 0 ? -1 : FIRST_OF(i, topo->n_nics, topo->nics[i].pci == pci && pci != nic->pci);
}

static void set_role(struct topo_nic *nic, enum topo_role role, const char *why)
{
    nic->role = role;
    nic->role_why = why;
}

static const char *down_why(struct topo *topo, const struct topo_nic *nic)
{
    const char *state, *phys_state;

    if (nic->n_ports == 0)
        return "no port can be read";
    if (nic->n_ports > 1)
        return "no port is active";
    state = nic->ports[0].state;
    phys_state = nic->ports[0].phys_state;
    return source_printf(topo->source, "port %d is %s (%s)", nic->ports[0].number,
                         *state ? state : "in an unknown state", *phys_state ? phys_state : "link unknown");
}

/* Does this process have virtual functions, and none of their physical ones? Then one without access is missing. */
static bool is_given_functions(const struct topo *topo)
{
    bool is_given = false;

    for (int i = 0; i < topo->n_nics; i++) {
        int physical = physical_function(topo, &topo->nics[i]);

        if (physical >= 0 && topo->nics[physical].access != TOPO_ACCESS_NO)
            return false;
        is_given = is_given || (physical >= 0 && topo->nics[i].access == TOPO_ACCESS_YES);
    }
    return is_given;
}

/* Roles by the NIC alone. A virtual function that this process was given counts, its physical one does not. */
static void classify_individually(struct topo *topo)
{
    FOR_EACH (nic, topo->nics, topo->n_nics) {
        int physical = physical_function(topo, nic);

        if (physical >= 0 && nic->access == TOPO_ACCESS_NO && is_given_functions(topo))
            set_role(nic, TOPO_ROLE_NO_ACCESS, nic->access_why);
        else if (physical >= 0 && (nic->access == TOPO_ACCESS_NO || topo->nics[physical].access != TOPO_ACCESS_NO))
            set_role(nic, TOPO_ROLE_VIRTUAL,
                     source_printf(topo->source, "a virtual function of %s", topo->nics[physical].name));
        else if (!ANY_OF(k, nic->n_ports, nic->ports[k].active))
            set_role(nic, TOPO_ROLE_DOWN, down_why(topo, nic));
        else
            set_role(nic, TOPO_ROLE_DATA, "");
    }
    for (int i = 0; i < topo->n_nics; i++) {
        int physical = topo->nics[i].role == TOPO_ROLE_VIRTUAL ? -1 : physical_function(topo, &topo->nics[i]);

        if (physical >= 0)
            set_role(&topo->nics[physical], TOPO_ROLE_NO_ACCESS, topo->nics[physical].access_why);
    }
}

/* --- all NICs --- */

static bool is_rail(const struct topo_nic *nic)
{
    return nic->role == TOPO_ROLE_DATA && nic->pci >= 0;
}

/* A rail, or one that is down. */
static bool is_candidate(const struct view *view, int nic)
{
    return is_rail(&view->topo->nics[nic]) || view->is_down[nic];
}

static bool is_near(const struct view *view, int nic)
{
    return view->distance[nic] <= TOPO_PXB;
}

static bool is_gpu_of_bus(const struct topo *topo, int pci)
{
    return ANY_OF(i, topo->n_gpus, topo->gpus[i].pci == pci) ||
           (topo->pci[pci].vendor == PCI_VENDOR_NVIDIA && topo->pci[pci].class_code >> 16 == PCI_CLASS_DISPLAY);
}

static void view_init(struct topo *topo, struct view *view)
{
    *view = (struct view){.topo = topo};
    for (int i = 0; i < topo->n_nics; i++) {
        view->distance[i] = TOPO_SYS;
        view->is_down[i] = topo->nics[i].role == TOPO_ROLE_DOWN && topo->nics[i].pci >= 0 && topo->nics[i].n_ports > 0;
    }
    for (int p = 0; p < topo->n_pci && view->n_gpus < TOPO_MAX_GPUS; p++) {
        if (!is_gpu_of_bus(topo, p))
            continue;
        view->n_gpus++;
        for (int i = 0; i < topo->n_nics; i++) {
            enum topo_path path = topo_path(topo, p, topo->nics[i].pci);

            if (path < view->distance[i])
                view->distance[i] = path;
        }
    }
}

static int count_within(const struct view *view, enum topo_path distance, bool is_up)
{
    return COUNT_OF(i, view->topo->n_nics,
                    is_candidate(view, i) && view->distance[i] <= distance && (!is_up || !view->is_down[i]));
}

/* The fastest rail, hardware before software, whose rates mean nothing; NULL without one. */
static const struct topo_nic *fastest_rail(const struct topo *topo)
{
    const struct topo_nic *fastest = NULL;

    FOR_EACH (nic, topo->nics, topo->n_nics)
        if (nic->role == TOPO_ROLE_DATA &&
            (!fastest || (nic->pci >= 0) > (fastest->pci >= 0) ||
             ((nic->pci >= 0) == (fastest->pci >= 0) && fastest_port(nic) > fastest_port(fastest))))
            fastest = nic;
    return fastest;
}

/* Excludes a NIC from the rails. If it is also much slower than `best`, it is for management. */
static void exclude(struct view *view, int nic, double best, const char *why)
{
    struct topo_nic *it = &view->topo->nics[nic];
    double rate = fastest_port(it);

    view->is_down[nic] = false;
    if (it->role != TOPO_ROLE_DATA)
        return;
    if (it->is_uplink)
        set_role(it, TOPO_ROLE_UPLINK, source_printf(view->topo->source, "the default route goes over it; %s", why));
    else
        set_role(it, rate > 0 && rate < best * MUCH_SLOWER ? TOPO_ROLE_MANAGEMENT : TOPO_ROLE_STORAGE, why);
}

static void classify_software(struct topo *topo)
{
    const struct topo_nic *fastest = fastest_rail(topo);

    for (int i = 0; i < topo->n_nics && fastest && fastest->pci >= 0; i++)
        if (topo->nics[i].role == TOPO_ROLE_DATA && topo->nics[i].pci < 0)
            set_role(
                &topo->nics[i], TOPO_ROLE_MANAGEMENT,
                source_printf(topo->source, "a software device, in addition to hardware such as %s", fastest->name));
}

/* --- distance --- */

/*
 * The maximum distance of rails. Within it there is a NIC for each GPU; or, on switches with GPUs, for most of them, so
 * that a storage NIC does not replace a missing one; or for half of them, unless together with the farther ones there
 * are exactly as many NICs as GPUs. PIX alone is the limit only if most rails are that near and PIX and PXB together
 * have more than enough.
 */
static bool find_rail_distance(const struct view *view, enum topo_path *ret_distance)
{
    int n_pix = count_within(view, TOPO_PIX, false), n_near = count_within(view, TOPO_PXB, false);
    bool is_whole = count_within(view, TOPO_SYS, false) == view->n_gpus;
    enum topo_path limit;

    if (n_pix >= view->n_gpus || (n_pix * 2 > view->n_gpus && n_near > view->n_gpus))
        limit = TOPO_PIX;
    else if (n_near * 2 > view->n_gpus || (n_near * 2 == view->n_gpus && !is_whole))
        limit = TOPO_PXB;
    else
        for (limit = TOPO_PHB; limit <= TOPO_SYS; limit++)
            if (count_within(view, limit, false) >= view->n_gpus)
                break;
    /* If most near NICs are down, the others are better than none. */
    if (limit > TOPO_SYS || count_within(view, limit, true) * 2 < count_within(view, limit, false))
        return false;
    *ret_distance = limit;
    return true;
}

static double fastest_within(const struct view *view, enum topo_path limit)
{
    double best = 0;

    for (int i = 0; i < view->topo->n_nics; i++)
        if (is_rail(&view->topo->nics[i]) && view->distance[i] <= limit && fastest_port(&view->topo->nics[i]) > best)
            best = fastest_port(&view->topo->nics[i]);
    return best;
}

static void classify_by_distance(struct view *view)
{
    enum topo_path limit;
    double best;
    int n_near;

    if (!find_rail_distance(view, &limit))
        return;
    n_near = count_within(view, limit, false);
    best = fastest_within(view, limit);
    for (int i = 0; i < view->topo->n_nics; i++)
        if (is_candidate(view, i) && view->distance[i] > limit)
            exclude(view, i, best,
                    source_printf(view->topo->source, "%s from the nearest GPU, and %d other NIC%s nearer to one",
                                  topo_path_name(view->distance[i]), n_near, n_near == 1 ? " is" : "s are"));
}

/* --- link layer --- */

/* The bandwidth of a link layer, with or without uplinks; a NIC that is down counts as the others. */
static double bandwidth_of(const struct view *view, int layer, double best, bool has_uplinks)
{
    double sum = 0;

    for (int i = 0; i < view->topo->n_nics; i++) {
        const struct topo_nic *nic = &view->topo->nics[i];

        if (is_candidate(view, i) && layer_of(nic) == layer && (has_uplinks || !nic->is_uplink))
            sum += view->is_down[i] && best > 0 ? best : fastest_port(nic) > 0 ? fastest_port(nic) : 1;
    }
    return sum;
}

static int count_layer(const struct view *view, int layer)
{
    return COUNT_OF(i, view->topo->n_nics, is_candidate(view, i) && layer_of(&view->topo->nics[i]) == layer);
}

/* At equal bandwidth InfiniBand has precedence. If default routes use all NICs, these are the rails too. */
static int main_layer(const struct view *view)
{
    static const int order[] = {TOPO_LINK_INFINIBAND, TOPO_LINK_ETHERNET, TOPO_LINK_UNKNOWN};
    double best = fastest_within(view, TOPO_SYS), most = 0;
    int layer = order[0];

    for (int has_uplinks = 0; has_uplinks < 2 && most <= 0; has_uplinks++)
        for (size_t i = 0; i < COUNT(order); i++)
            if (bandwidth_of(view, order[i], best, has_uplinks) > most) {
                most = bandwidth_of(view, order[i], best, has_uplinks);
                layer = order[i];
            }
    return layer;
}

static bool is_alike(const struct view *view, int a, int b);

/* Does a default route use this NIC, or one that is like it? */
static bool has_uplink_like(const struct view *view, int nic)
{
    return ANY_OF(i, view->topo->n_nics,
                  view->topo->nics[i].is_uplink && view->topo->nics[i].pci >= 0 && is_alike(view, i, nic));
}

/*
 * A port of a ConnectX can have either link layer. A port of the rails' make, as near to a GPU and as fast, is a
 * misconfigured rail if the rails would be incomplete without it: the doctor reports it.
 */
static bool is_odd_rail(const struct view *view, int nic, int layer, double best)
{
    const struct topo *topo = view->topo;
    int n_rails = count_layer(view, layer);

    return !has_uplink_like(view, nic) && fastest_port(&topo->nics[nic]) >= best * 0.95 &&
           ANY_OF(i, topo->n_nics,
                  i != nic && is_candidate(view, i) && layer_of(&topo->nics[i]) == layer &&
                      topo_is_same_model(topo, i, nic) && is_near(view, i) == is_near(view, nic)) &&
           (count_within(view, TOPO_SYS, false) == view->n_gpus || (is_near(view, nic) && n_rails < view->n_gpus));
}

static void classify_by_link_layer(struct view *view)
{
    static const char *const names[N_LAYERS] = {"another link layer", "InfiniBand", "Ethernet"};
    double best = fastest_within(view, TOPO_SYS);
    int layer = main_layer(view), n_main = count_layer(view, layer);
    bool is_odd[TOPO_MAX_NICS];

    for (int i = 0; i < view->topo->n_nics; i++)
        is_odd[i] = is_candidate(view, i) && layer_of(&view->topo->nics[i]) != layer &&
                    (view->is_down[i] || !is_odd_rail(view, i, layer, best));
    for (int i = 0; i < view->topo->n_nics; i++) {
        int own = layer_of(&view->topo->nics[i]);

        if (is_odd[i])
            exclude(view, i, best,
                    source_printf(view->topo->source, "%s, and %d other NIC%s as near to a GPU speak%s %s", names[own],
                                  n_main, n_main == 1 ? "" : "s", n_main == 1 ? "s" : "", names[layer]));
    }
}

/* --- speed and make --- */

static void classify_by_speed(struct view *view)
{
    const struct topo_nic *fastest = fastest_rail(view->topo);

    for (int i = 0; i < view->topo->n_nics; i++) {
        struct topo_nic *nic = &view->topo->nics[i];
        double rate = fastest_port(nic), best = fastest_port(fastest ? fastest : nic);

        if (is_rail(nic) && rate > 0 && rate < best * MUCH_SLOWER)
            exclude(view, i, best,
                    source_printf(view->topo->source, "%g Gb/s, less than half of the %g Gb/s of %s", rate, best,
                                  fastest->name));
    }
}

/* The bandwidth of all rails of the make of rail `nic`. */
static double bandwidth_of_make(const struct view *view, int nic, double best)
{
    double sum = 0;

    for (int i = 0; i < view->topo->n_nics; i++)
        if (is_candidate(view, i) && topo_is_same_model(view->topo, i, nic))
            sum += view->is_down[i] ? best : fastest_port(&view->topo->nics[i]);
    return sum;
}

static bool is_like_near_one(const struct view *view, int nic)
{
    return ANY_OF(i, view->topo->n_nics,
                  is_candidate(view, i) && is_near(view, i) && topo_is_same_model(view->topo, i, nic));
}

/* Is it a far NIC of another make than those on switches with GPUs, or than those with most bandwidth? */
static bool is_of_other_make(const struct view *view, int nic, double best)
{
    double most = 0;

    if (count_within(view, TOPO_PXB, true) > 0)
        return !is_near(view, nic) && !is_like_near_one(view, nic);
    for (int i = 0; i < view->topo->n_nics; i++)
        if (is_candidate(view, i) && bandwidth_of_make(view, i, best) > most)
            most = bandwidth_of_make(view, i, best);
    return bandwidth_of_make(view, nic, best) < most;
}

/* If there are as many NICs as GPUs, all are rails, whatever their makes. */
static void classify_by_make(struct view *view)
{
    double best = fastest_within(view, TOPO_SYS);
    bool is_other[TOPO_MAX_NICS];

    if (count_within(view, TOPO_SYS, false) == view->n_gpus)
        return;
    for (int i = 0; i < view->topo->n_nics; i++)
        is_other[i] = is_candidate(view, i) && is_of_other_make(view, i, best);
    for (int i = 0; i < view->topo->n_nics; i++)
        if (is_other[i])
            exclude(view, i, best, "of another make than the NICs that GPUs use");
}

/* --- the default route --- */

/* Of the same make, link layer and distance: bought together. */
static bool is_alike(const struct view *view, int a, int b)
{
    return topo_is_same_model(view->topo, a, b) && is_near(view, a) == is_near(view, b) &&
           layer_of(&view->topo->nics[a]) == layer_of(&view->topo->nics[b]);
}

/* The bandwidth of the rails that are like `nic`, and of those that are not. */
static void sum_bandwidth(const struct view *view, int nic, double *ret_alike, double *ret_others)
{
    double best = fastest_within(view, TOPO_SYS);

    *ret_alike = *ret_others = 0;
    for (int i = 0; i < view->topo->n_nics; i++) {
        double rate = view->is_down[i] ? best : fastest_port(&view->topo->nics[i]);

        if (is_candidate(view, i))
            *(is_alike(view, i, nic) ? ret_alike : ret_others) += rate;
    }
}

/* NICs like an uplink of another make than rails of its bandwidth are uplinks too: the second of a pair. */
static void classify_uplinks_by_make(struct view *view)
{
    struct topo *topo = view->topo;

    for (int i = 0; i < topo->n_nics; i++) {
        double alike, others;

        if (!is_rail(&topo->nics[i]) || !topo->nics[i].is_uplink)
            continue;
        sum_bandwidth(view, i, &alike, &others);
        if (others <= 0 || others < alike)
            continue;
        for (int k = 0; k < topo->n_nics; k++) {
            if (k == i || !is_candidate(view, k) || !is_alike(view, k, i))
                continue;
            view->is_down[k] = false;
            if (topo->nics[k].role == TOPO_ROLE_DATA)
                set_role(&topo->nics[k], TOPO_ROLE_UPLINK,
                         source_printf(topo->source, "of the make of %s, which the default route goes over",
                                       topo->nics[i].name));
        }
        set_role(&topo->nics[i], TOPO_ROLE_UPLINK, "the default route goes over it, and the rails are of another make");
    }
}

/*
 * If all rails are alike, an uplink is not a rail if the others suffice: as many as GPUs, or a number that divides the
 * number of GPUs, which the total does not. Otherwise it is a rail that also carries the default route.
 */
static void classify_uplinks_by_number(struct view *view)
{
    struct topo *topo = view->topo;
    int needed = view->n_gpus > 0 ? view->n_gpus : 1, n = count_within(view, TOPO_SYS, false),
        n_uplinks = COUNT_OF(i, topo->n_nics, is_rail(&topo->nics[i]) && topo->nics[i].is_uplink),
        n_others = n - n_uplinks;

    if (n_uplinks == 0 || n_others < 1)
        return;
    if (n_others < needed && (needed % n == 0 || needed % n_others != 0))
        return;
    for (int i = 0; i < topo->n_nics; i++)
        if (is_rail(&topo->nics[i]) && topo->nics[i].is_uplink)
            set_role(&topo->nics[i], TOPO_ROLE_UPLINK,
                     source_printf(topo->source, "the default route goes over it, and %d other NIC%s as fast", n_others,
                                   n_others == 1 ? " is" : "s are"));
}

/* --- access --- */

static void classify_by_access(struct topo *topo)
{
    bool has_any = ANY_OF(i, topo->n_nics, is_rail(&topo->nics[i]) && topo->nics[i].access != TOPO_ACCESS_NO);

    for (int i = 0; i < topo->n_nics && has_any; i++)
        if (is_rail(&topo->nics[i]) && topo->nics[i].access == TOPO_ACCESS_NO)
            set_role(&topo->nics[i], TOPO_ROLE_NO_ACCESS, topo->nics[i].access_why);
}

void nics_classify(struct topo *topo)
{
    struct view view;

    nics_find_uplinks(topo);
    nics_find_access(topo);
    classify_individually(topo);
    classify_software(topo);
    view_init(topo, &view);
    if (view.n_gpus > 0) {
        classify_by_distance(&view);
        classify_by_link_layer(&view);
    }
    classify_by_speed(&view);
    if (view.n_gpus > 0)
        classify_by_make(&view);
    classify_uplinks_by_make(&view);
    classify_uplinks_by_number(&view);
    classify_by_access(topo);
}
