/* SPDX-License-Identifier: Apache-2.0 */
/* Parsers for the small texts of sysfs. */
#include "machine/hardware/read_hardware.h"
#include "temp.h"

TEST(test_pci_address)
{
    static const char *const wrong[] = {
        "",           "0000",         "0000:0f",       "0000:0f:00",        "0000:0f:00.",   "0000:0f:00.8",
        "000:0f:0.0", "0000:0f:20.0", "0000:0f:00.0 ", " 0000:0f:00.0",     "0000:0f:00.00", "0000;0f:00.0",
        "0f:00.0",    "0000:0g:00.0", "0000:0f:00:0",  "000000000:0f:00.0",
    };
    struct pci_address address;
    char text[20];

    assert_true(parse_pci_address("0000:0f:1f.7", &address));
    assert_int_equal(address.domain, 0);
    assert_int_equal(address.bus, 0x0f);
    assert_int_equal(address.device, 0x1f);
    assert_int_equal(address.function, 7);
    /* The form of NVML; the domain of a volume management device. */
    assert_true(parse_pci_address("00000009:AB:00.0", &address));
    print_pci_address(&address, text);
    assert_string_equal(text, "0009:ab:00.0");
    assert_true(parse_pci_address("10000:e0:06.0", &address));
    print_pci_address(&address, text);
    assert_string_equal(text, "10000:e0:06.0");
    assert_true(parse_pci_address("ffffffff:ff:1f.7", &address));
    print_pci_address(&address, text);
    assert_string_equal(text, "ffffffff:ff:1f.7");
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        assert_false(parse_pci_address(wrong[i], &address));
}

TEST(test_pci_order)
{
    static const char *const ordered[] = {"0000:0f:00.0", "0000:0f:00.1", "0000:0f:01.0",
                                          "0000:10:00.0", "0001:00:00.0", "10000:00:00.0"};

    for (int i = 0; i < 6; i++)
        for (int j = 0; j < 6; j++) {
            struct pci_address a, b;
            int order;

            assert_true(parse_pci_address(ordered[i], &a) && parse_pci_address(ordered[j], &b));
            order = compare_pci_addresses(&a, &b);
            assert_int_equal((order > 0) - (order < 0), (i > j) - (i < j));
        }
}

TEST(test_host_bridge)
{
    struct pci_address address;

    assert_true(parse_host_bridge("pci0000:8a", &address));
    assert_int_equal(address.bus, 0x8a);
    assert_true(parse_host_bridge("pci10000:e0", &address));
    assert_int_equal(address.domain, 0x10000);
    assert_false(parse_host_bridge("pci0000", &address));
    assert_false(parse_host_bridge("pci0000:8a:00.0", &address));
    assert_false(parse_host_bridge("pci_bus", &address));
    assert_false(parse_host_bridge("", &address));
}

static void assert_near(double value, double expected)
{
    assert_true(value > expected - 1e-9 && value < expected + 1e-9);
}

TEST(test_rates)
{
    assert_near(parse_rate("400 Gb/sec (4X NDR)"), 400);
    assert_near(parse_rate("2.5 Gb/sec (1X SDR)"), 2.5);
    assert_near(parse_rate("400"), 0);
    assert_near(parse_rate("400 GB/sec"), 0);
    assert_near(parse_rate("-1 Gb/sec"), 0);
    assert_near(parse_rate("9999999999 Gb/sec"), 0);
    assert_near(parse_rate(""), 0);
    assert_near(parse_speed("32.0 GT/s PCIe"), 32);
    assert_near(parse_speed("2.5 GT/s PCIe"), 2.5);
    assert_near(parse_speed("8 GT/s"), 8);
    assert_near(parse_speed("Unknown"), 0);
    assert_near(parse_speed("nan GT/s"), 0);
    assert_near(parse_speed("0x10 GT/s"), 0);
}

TEST(test_gids)
{
    uint8_t bytes[16];

    assert_true(parse_gid("0000:0000:0000:0000:0000:ffff:c000:0201", bytes));
    assert_int_equal(gid_kind(bytes), TOPO_GID_IPV4);
    assert_int_equal(bytes[15], 1);
    assert_true(parse_gid("fe80:0000:0000:0000:0200:5eff:fe00:5301", bytes));
    assert_int_equal(gid_kind(bytes), TOPO_GID_LINK_LOCAL);
    assert_true(parse_gid("2001:0db8:0000:0000:0000:0000:0000:0001", bytes));
    assert_int_equal(gid_kind(bytes), TOPO_GID_OTHER);
    assert_false(parse_gid("", bytes));
    assert_false(parse_gid("fe80::1", bytes));
    assert_false(parse_gid("fe80:0000:0000:0000:0200:5eff:fe00", bytes));
    assert_false(parse_gid("fe80:0000:0000:0000:0200:5eff:fe00:5301:0000", bytes));
    assert_int_equal(parse_gid_type("RoCE v2", TOPO_LINK_ETHERNET), TOPO_GID_ROCE2);
    assert_int_equal(parse_gid_type("IB/RoCE v1", TOPO_LINK_ETHERNET), TOPO_GID_ROCE1);
    assert_int_equal(parse_gid_type("IB/RoCE v1", TOPO_LINK_INFINIBAND), TOPO_GID_IB);
    assert_int_equal(parse_gid_type("IB/RoCE v1", TOPO_LINK_UNKNOWN), TOPO_GID_UNKNOWN);
    assert_int_equal(parse_gid_type("RoCE v3", TOPO_LINK_ETHERNET), TOPO_GID_UNKNOWN);
}

TEST(test_numbers_before_texts)
{
    static const char *const states[] = {"ACTIVE", "ACTIVE_DEFER", NULL}, *const phys_states[] = {"LinkUp", "Phy Test",
                                                                                                  NULL};

    assert_string_equal(parse_state("4: ACTIVE", states), "ACTIVE");
    assert_string_equal(parse_state("ACTIVE", states), "ACTIVE");
    assert_string_equal(parse_state("5: ACTIVE_DEFER", states), "ACTIVE_DEFER");
    assert_string_equal(parse_state("4", states), "");
    assert_string_equal(parse_state("", states), "");
    assert_string_equal(parse_state("5: LinkUp", states), "");
    assert_string_equal(parse_state("7: Phy Test", phys_states), "Phy Test");
    assert_string_equal(parse_state("0: <unknown>", phys_states), "");
}

TEST(test_cpus)
{
    static const char *const wrong[] = {"x", "1-", "-1", "3-1", "1,,2", "1 2", "1-2-3", "0x3", "1,"};
    uint64_t mask[2];

    assert_true(topo_parse_cpus("0-3,8,64-65\n", mask, 128));
    assert_int_equal(mask[0], 0x10f);
    assert_int_equal(mask[1], 3);
    assert_true(topo_parse_cpus("", mask, 128));
    assert_int_equal(mask[0] | mask[1], 0);
    /* Numbers beyond the mask are ignored, however large. */
    assert_true(topo_parse_cpus("63,100-999999999", mask, 64));
    assert_int_equal(mask[0], UINT64_C(1) << 63);
    mask[0] = 77;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        assert_false(topo_parse_cpus(wrong[i], mask, 128));
    /* Set on success only. */
    assert_int_equal(mask[0], 77);
}
