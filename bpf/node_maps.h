/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The node: its addresses, its devices, fragments on bridges.  Part of maps.h. */
#ifndef PEP_NODE_MAPS_H
#define PEP_NODE_MAPS_H

/* How the fast path sends a packet through a device. */
enum redirect_mode {
	REDIRECT_NONE = 0,	/* no fast path for packets to or from this device */
	REDIRECT_DEVICE = 1,	/* bpf_redirect: the device transmits it */
	REDIRECT_PEER = 2,	/* bpf_redirect_peer: straight into the network namespace at the other end of a veth */
} __attribute__((packed));

struct address4 {
	__u8 address[4];
};

struct address6 {
	__u8 address[16];
};

/*
 * Every address of this node.  Of 127.0.0.0/8, which needs no map, only those that nodePortAddresses lists, without
 * 127.0.0.1.  These never have node_ports, which is for every packet: they serve only the node's own sockets.
 */
struct node_address {
	__u32 node_ports;	/* serves NodePorts */
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

/* A device that the proxy's programs are attached to (key: ifindex). */
struct node_device {
	__u32 bridge;		/* ifindex of the bridge that the device is a port of; 0: none */
	__u8 bridge_mac[6];	/* zero: another device is the gateway of its ports */
	__u8 pod_source;	/* detectLocalMode by interface: packets from here come from a pod */
	enum redirect_mode redirect;
	__u32 mtu;		/* 0: the device is down */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct node_device);
} devices SEC(".maps");

#define BRIDGED_SLOTS 4096

/*
 * By a hash of a client: the tag of the flow straight to an endpoint, from one port of a bridge to another, that the
 * client's port has begun last.  0: none, or it has begun a flow to a service since (bridge.h).
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, BRIDGED_SLOTS);
	__type(key, __u32);
	__type(value, __u32);
} bridged_flows SEC(".maps");

/* Identifies the packet that a fragment belongs to. */
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
} bridged_fragments SEC(".maps");

#endif
