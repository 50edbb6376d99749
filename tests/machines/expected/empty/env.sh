Neither a GPU nor an RDMA NIC: no PCI device (/sys/bus/pci/devices is not there), no RDMA device (/sys/class/infiniband is not there).
