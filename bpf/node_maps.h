/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The node: its addresses, its devices, what to masquerade with.  Part of maps.h. */
#ifndef PEP_NODE_MAPS_H
#define PEP_NODE_MAPS_H

/* How packets of the fast path leave by a device. */
enum passage {
	TO_STACK = 0,		/* not at all */
	TO_NEIGHBOUR = 1,	/* the kernel's neighbour table gives the link addresses, packet by packet */
	TO_PEER = 2,		/* into the network namespace at the other end of a veth */
} __attribute__((packed));

struct address4 {
	__u8 address[4];
};

struct address6 {
	__u8 address[16];
};

/* Every address of this node (except 127.0.0.0/8, known without a map). */
struct node_address {
	__u32 node_ports;	/* NodePorts are served on it */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, struct address4);
	__type(value, struct node_address);
} node_addresses4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, struct address6);
	__type(value, struct node_address);
} node_addresses6 SEC(".maps");

/*
 * Which address MASQUERADE would take: by the outgoing device and the next
 * hop (IPv4) or the destination (IPv6).  A default (prefix length 32: the
 * device alone) for every device that is up.
 */
struct masquerade4_key {
	__u32 prefix_length;
	__u32 device;
	__u8 address[4];
};

struct masquerade6_key {
	__u32 prefix_length;
	__u32 device;
	__u8 address[16];
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, struct masquerade4_key);
	__type(value, struct address4);
} masquerade4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, struct masquerade6_key);
	__type(value, struct address6);
} masquerade6 SEC(".maps");

/* A device that our programs are on (key: ifindex). */
struct node_device {
	__u32 bridge;		/* ifindex of the bridge it is a port of, 0: none */
	__u8 bridge_mac[6];
	__u8 pod_source;	/* detectLocalMode by interface: packets from here are a pod's */
	enum passage passage;	/* how the fast path sends by it; TO_STACK: never, nor packets from it */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct node_device);
} devices SEC(".maps");

/* A reply whose first fragment was lifted to the bridge (bridge.h): the others must follow it. */
struct fragments {
	__u8 source[16];	/* IPv4 in the first four bytes */
	__u8 destination[16];
	__u32 id;
	__u32 protocol;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, struct fragments);
	__type(value, __u32);
} lifted_fragments SEC(".maps");

#endif
