# SPDX-License-Identifier: Apache-2.0
"""A machine full of what identifies it, its owner and its users: nothing of it may get into a snapshot.

Everything is made up. Each mark stands where the real thing would.
"""
import software

HOST = "gpu-node-0042"
DOMAIN = "rack7.cluster.example.com"
MARKS = {
    "host name": HOST,
    "domain": DOMAIN,
    "user name": "erika.mustermann",
    "second user": "maxmuster",
    "mail address": "erika.mustermann@example.org",
    "token": "hf_ExampleExampleExampleExample0042",
    "access key": "AKIAEXAMPLEEXAMPLE42",
    "secret key": "wJalrXUtnFEMIexampleK7MDENGexampleKEY42",
    "password": "hunter2-example",
    "private key": "MIIEexampleexampleexampleexample0042",
    "IPv4 address": "198.51.100.42",
    "IPv6 address": "2001:db8:42:0:5054:ff:fe12:3442",
    "MAC address": "00:00:5e:00:53:fa",
    "GUID": "0200:5eff:fe00:53fa",
    "GUID without colons": "0x02005efffe0053fa",
    "GID": "fe80:0000:0000:0000:0200:5eff:fe00:53fa",
    "IPv4 GID": "c633:642a",
    "IPv6 GID": "2001:0db8:0042:0000:5054:00ff:fe12:3442",
    "UUID": "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9",
    "file system": "5f0c1e2d-3b4a-5968-7786-95a4b3c2d1e0",
    "serial number": "1654321000042",
    "board": "MT_EXAMPLE0042",
    "company": "akmefirma",
    "hosts of a list": "akmerail17",
}

# Tools and logs write the same things in other forms.
FORMS = {
    "MAC with dashes": "00-00-5e-00-53-fb", "MAC without": "00005e0053fc", "MAC of a switch": "0000.5e00.53fd",
    "MAC in capitals": "00:00:5E:00:53:BB", "EUI-64": "02:00:5e:ff:fe:00:53:fb",
    "EUI-64 with dashes": "02-00-5e-ff-fe-00-53-fb", "GUID in one": "02005efffe0053fb",
    "GUID without zeros": "0x2005efffe0053fb", "IPoIB": "80:00:02:08:fe:80:00:00:00:00:00:00:02:00:5e:ff:fe:00:53:f1",
    "IPv6 with a zone": "fe80::200:5eff:fe00:53fb%eth0", "IPv6 with a port": "[2001:db8:43::17]:8080",
    "IPv4 in IPv6": "::ffff:198.51.100.43", "network": "198.51.100.44/24", "IPv4 with a port": "198.51.100.45:29500",
    "IPv4 of /proc": "2B6433C6", "UUID in one": "0a1b2c3d4e5f60718293a4b5c6d7e8fa",
    "UUID in capitals": "0A1B2C3D-4E5F-6071-8293-A4B5C6D7E8FB",
    "volume of a pod": "/var/lib/kubelet/pods/0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8fc/volumes/x",
    "container": "4f1e9c" + "a7b8c9d0" * 7 + "a1", "instance": "i-0abcd1234ef567890",
    "pod": "trainer-7d9f8b6c5d-x2x4z", "web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJlLWV4YW1wbGU",
    "token of a forge": "ghp_exampleExampleExample0123456789abcd", "serial of a NIC": "MT2312X01234",
    "serial of a GPU": "PN1324A00721", "program of a user": "/home/erikamuster/train.py",
    "folder of a user": "/users/erikamuster2/.cache", "scratch": "/scratch/proj-akme99/run7",
    "file server": "10.9.8.7@o2ib:/akmefs", "full name": "node-17.akmedc.example.net", "mail": "e.muster@akme.example",
    "node": "akmegpu0017", "project": "akme-prod-123456", "public key": "AAAAB3NzaC1yc2EAAAADAQABAAABgQCexample",
    "serial of digits": "1654321000043", "account": "132452100178", "number of an instance": "4567890123456789012",
    "world wide name": "0x5000c500a1b2c3d4", "mail with a plus": "e.muster+gpu@akme.example",
    "role": "arn:aws:iam::132452100179:role/akme-train", "asset": "akme-asset-004711",
    "identifier of a cloud": "ocid1.instance.oc1.iad.anuwcljt5rg7akmeq3zy4w5x6v7u2t3s4r5q",
    "resource": "/subscriptions/0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8fd/resourceGroups/akme-rg",
    "token with a name": "github_pat_11AKMEAKME0_akmeAkmeAkme0123456789", "prefix": "fd77:8899:aabb::/48",
}


def mark(tree):
    environment(tree)
    software_of_users(tree)
    company(tree, MARKS["company"])
    nic = next(path for path in tree.entries if path.endswith("/infiniband/mlx5_0/fw_ver")).rsplit("/", 1)[0]
    tree.put(f"{nic}/node_guid", MARKS["GUID"] + "\n")
    tree.put(f"{nic}/sys_image_guid", MARKS["GUID"] + "\n")
    tree.put(f"{nic}/node_desc", f"{HOST} mlx5_0\n")
    tree.put(f"{nic}/board_id", MARKS["board"] + "\n")
    for i in (0, 1):
        tree.put(f"{nic}/ports/1/gids/{i}", MARKS["GID"] + "\n")
    for i in (2, 3):
        tree.put(f"{nic}/ports/1/gids/{i}", f"0000:0000:0000:0000:0000:ffff:{MARKS['IPv4 GID']}\n")
    tree.put(f"{nic}/ports/1/gids/4", MARKS["IPv6 GID"] + "\n")
    tree.put(f"{nic}/ports/1/gid_attrs/types/4", "RoCE v2\n")
    tree.put(nic.rsplit("/", 2)[0] + "/net/gpu0rdma0/address", MARKS["MAC address"] + "\n")
    for gpu in tree.answers["nvml"]["gpus"]:
        gpu["uuid"] = "GPU-" + MARKS["UUID"]
    information = next(path for path in tree.entries if path.startswith("/proc/driver/nvidia/gpus/"))
    tree.replace(information, "GPU-00000000-0000-0000-0000-000000000001", "GPU-" + MARKS["UUID"])
    tree.append(information, f"Serial Number: \t {MARKS['serial number']}\n")
    tree.put("/proc/sys/kernel/hostname", HOST + "\n")
    tree.put("/etc/hostname", HOST + "\n")
    tree.replace("/proc/cmdline", "root=/dev/sda1",
                 f"root=UUID={MARKS['file system']} ip={MARKS['IPv4 address']}::192.0.2.1 hostname={HOST} "
                 f"token={MARKS['token']}")
    tree.replace("/proc/self/mounts", "proc /proc proc",
                 f"{MARKS['IPv4 address']}:/home/{MARKS['user name']} /home/{MARKS['user name']} nfs "
                 f"rw,addr={MARKS['IPv4 address']},clientaddr={MARKS['IPv6 address']} 0 0\n"
                 f"//{HOST}.{DOMAIN}/share /mnt cifs rw,username={MARKS['user name']},password={MARKS['password']} "
                 "0 0\nproc /proc proc")
    tree.append("/etc/modprobe.d/nvidia-deepep.conf",
                f"# {MARKS['mail address']} on {HOST}, {MARKS['serial number']}\n")
    tree.append("/var/log/kern.log",
                f"1970-01-01T00:10:00+00:00 {HOST} kernel: NVRM: Xid (PCI:0000:c4:00): 79, pid=77, "
                f"name=/home/{MARKS['user name']}/train, GPU {MARKS['UUID']} serial {MARKS['serial number']} lost\n"
                f"1970-01-01T00:10:01+00:00 {HOST} kernel: NVRM: node GUID {MARKS['GUID without colons']}\n")
    tree.append("/var/log/kern.log", "".join(
        f"1970-01-01T00:10:02+00:00 {HOST} kernel: {line}\n" for line in (
            f"[UFW BLOCK] IN={MARKS['company']}0 OUT= MAC={MARKS['MAC address']} SRC={MARKS['IPv4 address']} "
            f"DST={MARKS['IPv4 address']} PROTO=TCP SPT=1 DPT=43210",
            *[f"mlx5_core 0000:0f:00.0 {MARKS['company']}0: Link down"] * 12)))
    tree.put("/etc/ufw/ufw.conf", f"# {MARKS['company']}\nENABLED=yes\n")
    tree.put("/etc/default/ufw", f'# {HOST}\nDEFAULT_INPUT_POLICY="DROP"\n')
    tree.put("/etc/ufw/user.rules", f"### tuple ### allow any any 0.0.0.0/0 any {MARKS['IPv4 address']} in\n")
    tree.put("/etc/nftables.conf", f"# {HOST}\nip saddr {MARKS['IPv4 address']} accept\n")
    for gpu in tree.answers["nvml"]["gpus"]:
        gpu["domain"] = {"cluster": MARKS["UUID"], "clique": 32766}
    tree.put(f"{software.PYTHON}/__editable___deep_ep_1_finder.py",
             f"\nMAPPING = {{'deep_ep': '/home/{MARKS['user name']}/{MARKS['company']}/deep_ep'}}\n")
    software.wheel(tree, f"{MARKS['company']}-deep-ep", "1.0")
    tree.append("/var/lib/dpkg/status", f"Package: x\nMaintainer: E. M. <{MARKS['mail address']}>\nVersion: 1\n\n")
    tree.append("/opt/deepep/python/deep_ep/buffer.py",
                f"# {MARKS['mail address']}: KEY = '{MARKS['token']}', https://{HOST}.{DOMAIN}/\n")


def software_of_users(tree):
    """Libraries, their run paths, versions and interfaces are called after those who build and own them."""
    user, name, host = MARKS["second user"], MARKS["company"], MARKS["hosts of a list"]
    tree.environment["SUDO_USER"] = user
    tree.append("/etc/os-release", f'PRETTY_NAME="Ubuntu 24.04 {name} image for {user}"\nVARIANT="{name}"\n'
                f'HOME_URL="https://{host}.example.com/"\nBUILD_ID={host}\nID_LIKE="debian {name}"\n')
    tree.replace("/etc/os-release", 'NAME="Ubuntu"', f'NAME="Ubuntu {name}"')
    folder = "/usr/lib/x86_64-linux-gnu"
    tree.library(f"{folder}/lib{name}-hook.so.1", soname=f"lib{name}-hook.so.1",
                 needed=[f"lib{user}.so.2", "libc.so.6"], runpath=f"$ORIGIN/../{name}:/opt/{user}/lib:/home/{user}/lib")
    tree.environment["LD_PRELOAD"] = f"lib{name}-hook.so.1 /usr/lib/lib{user}x.so"
    tree.put(f"/sys/class/net/{user}0/operstate", "up\n")
    tree.put(f"/sys/class/net/{user}0/mtu", "1500\n")
    tree.put("/sys/module/mlx5_core/version", f"24.10-{name}1\n")


def company(tree, name):
    """The name of a company, which is a word like any other, in what people choose: names, comments, programs."""
    release = f"6.8.0-1041-{name}-llm"
    tree.put("/proc/sys/kernel/osrelease", release + "\n")
    tree.put(f"/usr/lib/modules/{release}/updates/dkms/mlx5_core.ko", "")
    tree.append("/etc/modprobe.d/nvidia-deepep.conf",
                f"options nvidia NVreg_EnableGpuFirmware=1 NVreg_Note={name} # set by {name}\n")
    tree.put(f"/etc/modprobe.d/{name}-secret.conf", f"blacklist {name}\n")
    tree.put(f"/etc/ld.so.conf.d/{name}.conf", "/usr/local/cuda/lib64\n")
    for program in ("buffer", "__init__"):
        tree.append(f"/opt/deepep/python/deep_ep/{program}.py", f'{name.upper()}_TOKEN = "{name}"\n"""{name} inside"""\n')
    tree.environment.update({
        "DEEP_EP_X": f"{name}017", "NVSHMEM_DEBUG_FILE": f"{name}log.%h", "NVSHMEM_IB_ADDR_RANGE": "::/0",
        "SLURM_JOB_NODELIST": "akmerail[01-64]", "NCCL_DEBUG_SUBSYS": "akmerail17", "NCCL_COMM_ID": "akmerail17:29500"})


def environment(tree):
    home = f"/home/{MARKS['user name']}"
    tree.environment.update({
        "HOME": home, "USER": MARKS["user name"], "LOGNAME": MARKS["user name"], "HOSTNAME": HOST,
        "PYTHONPATH": f"/opt/deepep/python:{home}/src",
        "LD_LIBRARY_PATH": tree.environment["LD_LIBRARY_PATH"] + f":{home}/lib",
        "HF_TOKEN": MARKS["token"], "AWS_ACCESS_KEY_ID": MARKS["access key"],
        "AWS_SECRET_ACCESS_KEY": MARKS["secret key"], "PASSWORD": MARKS["password"],
        "SSH_PRIVATE_KEY": f"-----BEGIN RSA PRIVATE KEY-----\n{MARKS['private key']}\n-----END RSA PRIVATE KEY-----",
        "http_proxy": f"http://{MARKS['user name']}:{MARKS['password']}@{HOST}.{DOMAIN}:3128",
        "MASTER_ADDR": MARKS["IPv4 address"], "NCCL_COMM_ID": f"{MARKS['IPv4 address']}:29500",
        "NCCL_HOSTID": HOST, "NCCL_DEBUG_FILE": f"{home}/nccl.{HOST}.log",
        "NCCL_SOCKET_IFNAME": "=eth0", "NVSHMEM_DEBUG_FILE": f"{home}/{HOST}.log",
        "CUDA_VISIBLE_DEVICES": "GPU-" + MARKS["UUID"],
        "SSH_CONNECTION": f"{MARKS['IPv6 address']} 50000 {MARKS['IPv4 address']} 22",
        "KUBERNETES_SERVICE_HOST": MARKS["IPv4 address"], "INVOCATION_ID": MARKS["UUID"].replace("-", ""),
    })
    software.wheel(tree, "deep_ep", software.DEEPEP_VERSION, f"{home}/src")
