/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Sockets that are translated when they connect or send: those of the node and of pods.  Part of maps.h. */
#ifndef PEP_SOCKET_MAPS_H
#define PEP_SOCKET_MAPS_H

/*
 * ---- sockets that were translated at connect or sendmsg -------------------
 *
 * The state of a socket is stored in the socket and released with it, so other sockets cannot evict it, however many
 * there are.  The hash maps below are for what cannot be stored there: kernels without socket storage (abilities.h),
 * sockets that an earlier agent has translated, sockets with more than SOCKET_PEERS endpoints at a time, and connected
 * UDP sockets of the node, because the agent cannot read socket storage.
 */

/* A connected socket. Port 0: not translated. */
struct connected_revnat_value {
	struct bpf_spin_lock lock;
	__u16 port;
	__u16 original_port;
	__u8 address[16];	/* the backend that the socket is translated to; IPv4 in the first four bytes */
	__u8 original[16];	/* the destination as the application sees it */
	__u8 ipv6;
	__u8 moved;		/* tc has chosen another endpoint for the socket since (pods.h) */
	__u8 zero[2];
};

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct connected_revnat_value);
} connected_revnat SEC(".maps");

#define SOCKET_PEERS 4

/* An endpoint that an unconnected UDP socket sends to. */
struct socket_translation {
	__u64 last_used;	/* bpf_ktime_get_ns(); 0: free */
	__u32 service;
	__u32 backend;		/* 0: tc chooses it */
	__u32 began;		/* when the flow to it began, and whether it was answered (socket_storage.h) */
	__u32 kind;		/* enum frontend_kind; 0: the socket uses another endpoint of the service by now */
	__u8 address[16];
	__u8 original[16];
	__u16 port;		/* 0: the application addresses this endpoint itself by now */
	__u16 original_port;
	__u8 ipv6;
	__u8 moved;
	__u8 zero[2];
};

struct socket_translations {
	struct bpf_spin_lock lock;
	__u32 marked;		/* the proxy set the masquerade bit of the socket (sock.bpf.c) */
	struct socket_translation translations[SOCKET_PEERS];
};

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct socket_translations);
} socket_translations SEC(".maps");

struct socket_revnat4_key {
	__u64 cookie;
	__u8 address[4];	/* the backend that the socket is translated to */
	__u16 port;
	enum protocol protocol;
	__u8 zero;
};

struct socket_revnat6_key {
	__u64 cookie;
	__u8 address[16];
	__u16 port;
	enum protocol protocol;
	__u8 zero[5];
};

/*
 * The destination as the application sees it.  If this is the address of the key: a socket of the node that has asked
 * this one, and whose port is a NodePort's number.
 */
struct socket_revnat4_value {
	__u8 address[4];
	__u16 port;
	__u8 moved;	/* tc has chosen another endpoint for the socket since (pods.h) */
	__u8 answered;	/* when a reply was last noted (sock.bpf.c) */
};

struct socket_revnat6_value {
	__u8 address[16];
	__u16 port;
	__u8 moved;	/* tc has chosen another endpoint for the socket since (pods.h) */
	__u8 answered;	/* when a reply was last noted (sock.bpf.c) */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct socket_revnat4_key);
	__type(value, struct socket_revnat4_value);
} socket_revnat4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct socket_revnat6_key);
	__type(value, struct socket_revnat6_value);
} socket_revnat6 SEC(".maps");

/*
 * Which backend an unconnected UDP socket uses for a service, as conntrack would remember it: `position` tells when the
 * flow began, and whether it was answered (socket_storage.h).  Service 0: the proxy set the masquerade bit of the
 * socket (sock.bpf.c).
 */
struct socket_flow_key {
	__u64 cookie;
	__u32 service;
	enum frontend_kind kind;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, struct socket_flow_key);
	__type(value, struct affinity);
} socket_flows SEC(".maps");

/* ---- pods whose sockets are translated (created only with socketLB: all) ----- */

struct pod_key {
	__u64 netns;		/* cookie of the pod's network namespace */
	__u32 family;		/* 4 or 6 */
	__u32 zero;
};

static __always_inline __u32 family_of(bool ipv6)
{
	return ipv6 ? 6 : 4;
}

/* What packets of a network namespace look like when they enter the node; learned by tc from one of them (pods.h). */
struct pod_source {
	__u64 learned;		/* bpf_ktime_get_ns() */
	__u8 address[16];	/* IPv4 in the first four bytes */
	__u32 device;		/* the device they come in by */
	__u32 served;		/* a pod according to the local detector, and not excluded */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct pod_key);
	__type(value, struct pod_source);
} pod_sources SEC(".maps");

/* A socket that was left to tc: its namespace, and the backend if one was chosen. Key: its cookie. */
struct deferred_socket {
	__u64 netns;
	__u32 service;
	__u32 backend;		/* 0: tc chooses */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct deferred_socket);
} deferred_sockets SEC(".maps");

/* socketLBExclude: pods with these addresses are always left to tc. */
struct excluded_pods_key {
	__u32 prefix_length;	/* 32 for the family + the prefix length of the range */
	__u32 family;		/* 4 or 6 */
	__u8 address[16];	/* IPv4 in the first four bytes */
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1024);
	__type(key, struct excluded_pods_key);
	__type(value, __u32);
} excluded_pods SEC(".maps");

#endif
