/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Settings, which the control plane writes once, before the programs are loaded.  They are constants of .rodata: the
 * verifier removes what is switched off, so on a kernel that lacks a kfunc it never sees the call.
 */
#ifndef PEP_SETTINGS_H
#define PEP_SETTINGS_H

/* How a packet from a pod is recognised (service-semantics 6). */
enum detector {
	DETECT_NOTHING = 0,
	DETECT_CIDR = 1,
	DETECT_DEVICE = 2,
} __attribute__((packed));

/* How an endpoint is chosen. The order matters: LEAST_CONNECTIONS and all after it use connection counts. */
enum scheduler {
	AT_RANDOM = 0,
	ROUND_ROBIN = 1,	/* rr, wrr */
	SOURCE_HASH = 2,	/* sh */
	DESTINATION_HASH = 3,	/* dh */
	MAGLEV_HASH = 4,	/* mh */
	LEAST_CONNECTIONS = 5,	/* lc, wlc */
	SHORTEST_DELAY = 6,	/* sed, nq */
	LOCALITY = 7,		/* lblc */
	LOCALITY_WITH_REPLICATION = 8,	/* lblcr */
} __attribute__((packed));

/* Where the node's own sockets reach NodePorts on loopback (service-semantics 8). */
enum loopback_node_ports {
	NOT_ON_LOOPBACK = 0,
	ON_ALL_LOOPBACK = 1,	/* all of 127.0.0.0/8 */
	ON_LOCALHOST = 2,	/* 127.0.0.1, because nodePortAddresses lists networks and one contains it */
	ON_OTHER_LOOPBACK = 3,	/* not at 127.0.0.1, because the listed networks contain only others of 127.0.0.0/8 */
	/* The last two: also at the other addresses of 127.0.0.0/8 that are in the map of the node's addresses. */
} __attribute__((packed));

struct settings {
	__u64 netns_cookie;		/* sockets of this network namespace are served */
	__u64 permit_seed;		/* random and odd: no tenant can choose a frontend with a given hash (permit.h) */
	__u64 permit_seed6;		/* the same, for the second half of an IPv6 address */
	__u32 masquerade_mark;		/* one bit */
	__u32 flow_quota;		/* how many young flows one device may have open at a time */
	__u32 udp_seconds;		/* conntrack's timeouts: of a UDP flow without replies, */
	__u32 udp_stream_seconds;	/* and of one with replies */
	__u32 load;			/* differs each time programs are loaded; 0: conntrack is always asked */
	__u16 snat_port_min;		/* source ports of masqueraded young flows; 0: none */
	__u16 snat_port_max;
	__u8 pod_cidr4[4];
	__u8 pod_mask4[4];
	__u8 pod_cidr6[16];
	__u8 pod_mask6[16];
	__u8 node_address4[4];		/* fallback address for masquerading; the source of the node's own sockets */
	__u8 node_address6[16];
	enum detector detector4;
	enum detector detector6;
	__u8 masquerade_all;
	__u8 conntrack_lookup;		/* the lookup kfunc can be used */
	__u8 nft_mode;			/* where kube-proxy's modes differ, follow the nftables mode */
	enum loopback_node_ports localhost_node_ports;
	enum scheduler scheduler;
	__u8 pod_sockets;		/* sockets of pods are translated too */
	__u8 fast_path;		/* the flow table is used */
	__u8 mark_datagrams;	/* the proxy's nft table reads the marks of sockets */
	__u8 xdp;		/* an XDP program is on some device */
	__u8 xdp_generic;	/* that program is generic XDP, not in the driver */
	__u8 dry_run;		/* `pyebpf-proxy explain`: the decision is recorded; no flow is created or ended */
	__u8 weak_memory;	/* the processor may reorder loads (arm64) */
};

const volatile struct settings settings SEC(".rodata") = {
	.permit_seed = 1,
	.masquerade_mark = 0x4000,
	.flow_quota = 8192,
	.udp_seconds = 30,
	.udp_stream_seconds = 120,
	.conntrack_lookup = 1,
};

#endif
