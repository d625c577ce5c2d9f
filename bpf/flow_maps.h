/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The flow cache: how a packet of an established flow is rewritten and where it
 * goes.  Soft state, filled from the kernel's connection tracking; losing it
 * costs time and nothing else.  The rules of maps.h hold here, too.
 */
#ifndef PEP_FLOW_MAPS_H
#define PEP_FLOW_MAPS_H

#include "maps.h"

/* A packet as it comes in: of each direction of a flow there is one. */
struct flow_key {
	__u8 source[16];	/* IPv4 in the first four bytes */
	__u8 destination[16];
	__u16 source_port;
	__u16 destination_port;
	enum protocol protocol;
	__u8 ipv6;
	__u8 zero[2];
};

/* Which frames of XDP a device sends. */
enum xdp_frames {
	NO_FRAMES = 0,
	ONE_BUFFER = 1,
	ANY_FRAMES = 2,		/* those of several buffers, too */
} __attribute__((packed));

struct flow {
	__u32 tag;		/* of the key; as in tag_again, or the element is just being used for another flow */
	__u32 generation;	/* of fast_path when this was learned */
	__u64 check_at;		/* bpf_ktime_get_coarse_ns() from which on conntrack and routes are asked again */
	__u8 source[16];	/* what the packet gets */
	__u8 destination[16];
	__u16 source_port;
	__u16 destination_port;
	__u32 device_in;	/* as the IP layer sees it: a port's bridge */
	__u32 device_out;
	__u8 next_hop[16];
	__u32 next_hop_family;	/* AF_INET, AF_INET6 */
	__u32 address_sum;	/* what the addresses and the ports change a checksum by */
	__u32 port_sum;
	__u8 mac_to[6];		/* TO_PEER, and XDP */
	__u8 mac_from[6];
	__u16 mtu;
	enum passage passage;
	__u8 ended;		/* a FIN or RST came by */
	enum reason why;	/* TO_STACK: for what */
	/* XDP alone: the device's own address where it comes in, and what struct xdp_device says of where it leaves */
	__u8 mac_in[6];
	enum xdp_frames returns;	/* NO_FRAMES also where it leaves by another device than it came in by */
	enum xdp_frames takes;
	__u32 tag_again;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct flow_key);
	__type(value, struct flow);
} flows SEC(".maps");

#define SIGHTING_BITS 15
#define SIGHTING_COUNT 7

/*
 * How many packets of an endpoint's were met of a flow that the cache does not know: the count in SIGHTING_COUNT, of
 * the key's tag in the bits above.  Flows that fall on the same number take it from each other: they wait longer.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << SIGHTING_BITS);
	__type(key, __u32);
	__type(value, __u32);
} flow_sightings SEC(".maps");

/* One entry, written by the agent. */
struct fast_path {
	__u64 alive_until;	/* CLOCK_MONOTONIC, ns: while somebody watches the routes, the rules and IPsec */
	__u32 generation;	/* moves with routes, devices and endpoints */
	enum reason closed4;	/* REASON_UNSPECIFIED: IPv4 may take the fast path */
	enum reason closed6;
	__u32 zero;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fast_path);
} fast_path SEC(".maps");

/* Room to put entries together, too large for the stack. */
struct flow_draft {
	struct flow_key key;	/* Linux 6.1 takes no argument of a function that is not static for a key */
	struct flow_key back_key;
	struct flow there;
	struct flow back;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct flow_draft);
} flow_drafts SEC(".maps");

#endif
