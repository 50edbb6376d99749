/* SPDX-License-Identifier: Apache-2.0 */
/* checks_firewall.c - what keeps processes apart: firewalls between nodes, the rules of ptrace within one. */
#include "checks.h"
#include "kernel_log.h"

/* --- firewall --- */

/* Ports of launchers and engines, and those that the kernel chooses for NCCL, Gloo and MPI; not services of a node. */
#define PORTS_OF_JOBS 20000
#define NODE_PORTS 30000 /* Kubernetes: what they lead to is on other nodes as well */
#define NODE_PORTS_END 32768
#define DROPS_MANY 3 /* without a job with other nodes they are a scan, or a job to come */

/* The length of what two addresses of one network share: two numbers of IPv4, three groups of IPv6. */
static size_t network_bytes(const char *address)
{
    const char *divider = memchr(address, '.', strcspn(address, " :")) ? "." : ":";
    size_t n = 0;

    for (int i = 0; i < (*divider == '.' ? 2 : 3); i++)
        n += strcspn(address + n, divider) + 1;
    return n;
}

/*
 * Connections that a rule dropped and logged: "... BLOCK] IN=eth0 OUT= ... SRC=A DST=B ... PROTO=TCP SPT=1 DPT=2 ...".
 * Of those from the machine's own network, which addresses tell, the last interface, by port. What comes from elsewhere
 * is the noise that a firewall is for.
 */
static json_t *read_dropped(struct source_text file)
{
    json_t *dropped = json_array();

    FOR_PIECES (line, file.text, "\n") {
        const char *in = piece_find(line, " IN="), *from = piece_find(line, " SRC="), *to = piece_find(line, " DST="),
                   *port = piece_find(line, " DPT=");

        if (!in || !from || !to || !port || in[4] == ' ' || json_array_size(dropped) == 64 ||
            memmem(line.text, (size_t)(in - line.text), "ALLOW", 5) ||
            memmem(line.text, (size_t)(in - line.text), "AUDIT", 5) || !piece_find(line, " SYN") ||
            piece_find(line, " ACK") || strncmp(from + 5, to + 5, network_bytes(to + 5)) != 0)
            continue;
        json_array_append_new(dropped, json_pack("{s:o, s:i}", "interface", json_stringn(in + 4, strcspn(in + 4, " ")),
                                                 "port", atoi(port + 5)));
    }
    return dropped;
}

static bool find_dropped(const struct doctor_machine *machine, bool is_job, struct doctor_result *result)
{
    long master = machine_job_number(machine, "MASTER_PORT", 0);
    const char *where;
    struct source_answer fact =
        kernel_log_fact(machine->source, "dropped-connections", read_dropped, "PROTO=TCP", &where);
    int n = 0;

    FOR_JSON (row, fact.value) {
        long port = (long)json_integer_value(json_object_get(row, "port"));

        if (port != master && (port < PORTS_OF_JOBS || (port >= NODE_PORTS && port < NODE_PORTS_END)))
            continue;
        doctor_evidence(result, where, "on %s, to port %ld", json_text(row, "interface"), port);
        n++;
    }
    if (n >= (is_job ? 1 : DROPS_MANY))
        doctor_found(result, is_job ? DOCTOR_ERROR : DOCTOR_WARNING,
                     "the firewall has dropped %d connection%s from the network of the nodes", n, n == 1 ? "" : "s");
    else
        result->n_evidence = result->n_evidence_left_out = 0;
    return result->outcome == DOCTOR_FOUND;
}

/* ufw.conf and its defaults: it is enabled, and drops what no rule allows. */
READER_BOOL(read_ufw, strstr(file.text, "\nENABLED=yes") || text_begins(file.text, "ENABLED=yes") ||
                          strstr(file.text, "\nDEFAULT_INPUT_POLICY=\"DROP\"") ||
                          strstr(file.text, "\nDEFAULT_INPUT_POLICY=\"REJECT\""))

/* Does a rule of ufw allow all ports of somebody? "### tuple ### allow any any 0.0.0.0/0 any 192.0.2.0/24 in" */
READER_BOOL(read_ufw_rules,
            strstr(file.text, "### tuple ### allow any any ") || strstr(file.text, "### tuple ### allow tcp any "))

/* Rules of nft: a chain for input drops by its policy, and accepts nobody by address or interface but the loopback. */
static json_t *read_nft(struct source_text file)
{
    bool is_open = false, drops = strstr(file.text, "hook input") && strstr(file.text, "policy drop");

    FOR_PIECES (line, file.text, "\n") {
        const char *accept = piece_find(line, " accept");

        is_open = is_open || (accept && !piece_find(line, "lo\"") && !piece_find(line, "iif lo") &&
                              !piece_find(line, "iifname lo") && !piece_find(line, "dport") &&
                              (piece_find(line, "saddr") || piece_find(line, "iif")));
    }
    return json_boolean(drops && !is_open);
}

/* Rules as iptables-save writes them: the chain ends with a refusal, and accepts nobody by address or interface. */
static json_t *read_iptables(struct source_text file)
{
    bool is_open = false, drops = strstr(file.text, "\n:INPUT DROP");

    FOR_PIECES (line, file.text, "\n") {
        bool is_general = text_begins(line.text, "-A INPUT ") && !piece_find(line, "port");

        drops = drops || text_begins_any(line.text, TEXTS("-A INPUT -j REJECT", "-A INPUT -j DROP"));
        is_open = is_open || (is_general && piece_find(line, "-j ACCEPT") &&
                              (piece_find(line, " -s ") || piece_find(line, " -i ")) && !piece_find(line, "-i lo "));
    }
    return json_boolean(drops && !is_open);
}

/* Is the default zone of firewalld another one than that which accepts everything? */
READER_BOOL(read_firewalld, !strstr(file.text, "\nDefaultZone=trusted"))

/* In the order in which they are looked for: what enables it, what it does by default, what opens it. */
static const struct {
    const char *name, *unit, *closed, *open;
    source_reader *read_closed, *read_open;
    const char *advice;
} firewalls[] = {
    {"ufw", "/etc/ufw/ufw.conf", "/etc/default/ufw", "/etc/ufw/user.rules", read_ufw, read_ufw_rules,
     "sudo ufw allow from NETWORK, with the network of the nodes"},
    {"nftables", "/etc/systemd/system/sysinit.target.wants/nftables.service", "/etc/nftables.conf", NULL, read_nft,
     NULL, "a rule in /etc/nftables.conf: ip saddr NETWORK accept, with the network of the nodes"},
    {"nftables", "/etc/systemd/system/multi-user.target.wants/nftables.service", "/etc/sysconfig/nftables.conf", NULL,
     read_nft, NULL, "a rule in /etc/sysconfig/nftables.conf: ip saddr NETWORK accept, with the network of the nodes"},
    {"iptables", "/etc/systemd/system/multi-user.target.wants/netfilter-persistent.service", "/etc/iptables/rules.v4",
     NULL, read_iptables, NULL,
     "-A INPUT -s NETWORK -j ACCEPT before the refusal in /etc/iptables/rules.v4, with the network of the nodes"},
    {"iptables", "/etc/systemd/system/multi-user.target.wants/iptables.service", "/etc/sysconfig/iptables", NULL,
     read_iptables, NULL,
     "-A INPUT -s NETWORK -j ACCEPT before the refusal in /etc/sysconfig/iptables, with the network of the nodes"},
    {"firewalld", "/etc/systemd/system/multi-user.target.wants/firewalld.service", "/etc/firewalld/firewalld.conf",
     "/etc/firewalld/zones/trusted.xml", read_firewalld, NULL,
     "sudo firewall-cmd --permanent --zone=trusted --add-source=NETWORK, with the network of the nodes, and --reload"},
};

void run_firewall(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source *source = machine->source;
    bool is_job = machine_has_other_nodes(machine), is_found = find_dropped(machine, is_job, result);

    doctor_advise(result, "Let the nodes of the job reach each other on all ports: NCCL, Gloo and MPI choose them.");
    if (!is_found && doctor_not_applicable_if(result, !is_job, "the job has no other nodes"))
        return;
    for (size_t i = 0; i < COUNT(firewalls) && !machine->software->os.in_container; i++) {
        bool is_ufw = firewalls[i].read_closed == read_ufw;
        struct source_answer closed = source_fact(source, firewalls[i].name, firewalls[i].read_closed, "%s",
                                                  firewalls[i].closed),
                             open = {.state = SOURCE_ABSENT};

        if (is_ufw ? !source_fact_bool(source_fact(source, "ufw", read_ufw, "%s", firewalls[i].unit))
                   : source_stat(source, "%s", firewalls[i].unit).state != SOURCE_OK)
            continue;
        if (firewalls[i].read_open)
            open = source_fact(source, "ufw-rules", firewalls[i].read_open, "%s", firewalls[i].open);
        else if (firewalls[i].open)
            open.state = source_stat(source, "%s", firewalls[i].open).state;
        result->missing = DOCTOR_MISSING_ROOT;
        if ((!is_found && doctor_unknown_if(result, closed.state == SOURCE_DENIED || open.state == SOURCE_DENIED,
                                            "the rules of %s: only root can read them", firewalls[i].name)) ||
            !source_fact_bool(closed) || (firewalls[i].read_open ? source_fact_bool(open) : open.state == SOURCE_OK))
            continue;
        if (!is_found)
            doctor_found(result, DOCTOR_WARNING,
                         "the firewall (%s) lets no connection of the job's other nodes through but to single ports",
                         firewalls[i].name);
        doctor_evidence(result, firewalls[i].closed, "it drops what no rule allows");
        doctor_advise(result,
                      "Let the nodes of the job reach each other on all ports, which NCCL, Gloo and MPI choose "
                      "as they like: %s.",
                      firewalls[i].advice);
        return;
    }
}

/* --- ptrace --- */

#define PTRACE_SCOPE "/proc/sys/kernel/yama/ptrace_scope"
#define CAP_SYS_PTRACE (1ULL << 19)

/*
 * What makes a program read memory, or take file descriptors (pidfd_getfd), of processes beside it: a variable, and
 * what its value contains. PyTorch does it only where tensors go to other processes, as those of Ray do.
 */
static const struct {
    const char *name, *word, *with, *what;
    bool needs_files; /* which docker's filter of system calls (seccomp) refuses in any case */
} ptrace_users[] = {
    {"PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "RAY_JOB_ID", "PyTorch cannot hand over tensors", true},
    {"PYTORCH_ALLOC_CONF", "expandable_segments:True", "RAY_JOB_ID", "PyTorch cannot hand over tensors", true},
    {"VLLM_ALL2ALL_BACKEND", "flashinfer", NULL, "FlashInfer cannot share memory of GPUs", true},
    {"UCX_TLS", "cma", NULL, "UCX cannot copy from process to process (CMA)", false},
    {"OMPI_MCA_btl_vader_single_copy_mechanism", "cma", NULL, "Open MPI cannot copy from process to process (CMA)",
     false},
    {"OMPI_MCA_smsc", "cma", NULL, "Open MPI cannot copy from process to process (CMA)", false},
};

void run_ptrace(const struct doctor_machine *machine, struct doctor_result *result)
{
    struct source *source = machine->source;
    struct source_text scope = source_line(source, PTRACE_SCOPE);
    const char *status = source_read(source, "/proc/self/status").text;
    bool in_container = machine->software->os.in_container, any = false,
         may_all = strtoull(source_field(source, status, "CapEff"), NULL, 16) & CAP_SYS_PTRACE,
         is_filtered = strcmp(source_field(source, status, "Seccomp"), "2") == 0;

    FOR_EACH (user, ptrace_users, COUNT(ptrace_users)) {
        const char *value = machine_env(machine, user->name);

        if (!strcasestr(value, user->word) || (user->with && !source_env(source, user->with)))
            continue;
        any = true;
        if (may_all || (strtol(scope.text, NULL, 10) == 0 && !(is_filtered && user->needs_files)))
            continue;
        doctor_found_first(result, user->needs_files ? DOCTOR_ERROR : DOCTOR_WARNING,
                           "%s: this process may not access those beside it", user->what);
        doctor_evidence(result, user->name, "%s", value);
    }
    if (doctor_not_applicable_if(result, !any, "no variable makes processes access each other") ||
        result->outcome != DOCTOR_FOUND)
        return;
    if (scope.state == SOURCE_OK)
        doctor_evidence(result, PTRACE_SCOPE, "%s", scope.text);
    if (!in_container && strtol(scope.text, NULL, 10) < 3)
        doctor_fix(result, true, "sudo sysctl -w kernel.yama.ptrace_scope=0");
    doctor_advise(result, "%s",
                  in_container && source_env(source, "KUBERNETES_SERVICE_HOST")
                      ? "Give the container the capability SYS_PTRACE (securityContext.capabilities.add)."
                  : in_container ? "Start the container with --cap-add=SYS_PTRACE."
                                 : "It lasts until a reboot: for later ones write it to /etc/sysctl.d/10-ptrace.conf.");
}
