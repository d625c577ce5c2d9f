/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The maps: the contract between the programs, the control plane and anybody
 * who reads them with bpftool.  docs/maps.md explains each with an example.
 *
 * Rules that every type here keeps:
 *  - addresses are bytes in network order, ports are numbers in host order, so
 *    that a dump reads as a person writes them;
 *  - no anonymous padding; what must be zero is called zero;
 *  - this file is the only definition: the Python side reads the layouts from
 *    the BTF of the object.
 *
 * Anything that changes here changes LAYOUT_VERSION in pyebpf_proxy/datapath.
 */
#ifndef PEP_MAPS_H
#define PEP_MAPS_H

#include "reason.h"

enum protocol {
	TCP = 6,
	UDP = 17,
	SCTP = 132,
} __attribute__((packed));

enum frontend_kind {
	CLUSTER_IP = 1,
	EXTERNAL_IP = 2,
	LOAD_BALANCER = 3,
	NODE_PORT = 4,
};

/* In no map: what the programs make of a NodePort at an address that serves none. */
#define UNSERVED_NODE_PORT 5

/* How packets of the fast path leave by a device. */
enum passage {
	TO_STACK = 0,		/* not at all */
	TO_NEIGHBOUR = 1,	/* the kernel's neighbour table gives the link addresses, packet by packet */
	TO_PEER = 2,		/* into the network namespace at the other end of a veth */
} __attribute__((packed));

enum lane {
	DIRECT = 0,
	NETFILTER = 1,
} __attribute__((packed));

/* ---- who is meant: address, port, protocol -> service ------------------ */

/* A NodePort has the address 0.0.0.0 or ::, node_addresses says where it is served. */
struct frontend4_key {
	__u8 address[4];
	__u16 port;
	enum protocol protocol;
	__u8 zero;
};

struct frontend6_key {
	__u8 address[16];
	__u16 port;
	enum protocol protocol;
	__u8 zero;
};

struct frontend {
	__u32 service;
	enum frontend_kind kind;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct frontend4_key);
	__type(value, struct frontend);
} frontends4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct frontend6_key);
	__type(value, struct frontend);
} frontends6 SEC(".maps");

/*
 * One bit for each port number, 64 in a word: is it anybody's NodePort?  Most
 * packets need not ask frontends{4,6} a second time.  A hint: a bit may stay
 * set for a port that is no NodePort any more.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u64);
} node_port_hints SEC(".maps");

/* ---- a service port and its version in force --------------------------- */

/*
 * services[id] is one aligned word, written by the control plane through mmap:
 * the flip from one version of a service to the next is a single store.  (An
 * element of a hash map that is replaced goes back to the kernel's free list
 * at once and may be filled with another service while a reader looks at it.)
 */
struct service {
	__u32 table;
	__u32 zero;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 65536);
	__type(key, __u32);
	__type(value, struct service);
} services SEC(".maps");

/* One version of one service. Never changed once services[] names it; removed after a grace period. */
struct table {
	__u32 service;
	__u32 first_slot;	/* the cluster list, then the local list */
	__u32 cluster_count;
	__u32 local_count;
	__u32 affinity_seconds;	/* 0: no session affinity */
	__u8 any_endpoints;	/* service-semantics 3: "any endpoints" */
	__u8 internal_local;	/* internalTrafficPolicy: Local */
	__u8 external_local;	/* externalTrafficPolicy: Local */
	__u8 source_ranges;	/* LoadBalancer VIPs accept only source_ranges{4,6} of this table */
	__u32 vip_source_allowed;	/* service-semantics 7: the node is inside a range, its VIPs may be sources */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 131072);
	__type(key, __u32);
	__type(value, struct table);
} tables SEC(".maps");

/* Identity of a service id, for people and for adoption after a restart. The programs never read it. */
struct service_name {
	char namespace_name[64];
	char name[64];
	char port[64];
	__u8 family;		/* 4 or 6 */
	enum protocol protocol;
	__u8 zero[2];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, __u32);
	__type(value, struct service_name);
} service_names SEC(".maps");

/* ---- endpoints ---------------------------------------------------------- */

struct slot {
	__u32 backend;
	__u32 zero;
};

/* Ranges of backend ids; a table names its range. Written through mmap. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 524288);
	__type(key, __u32);
	__type(value, struct slot);
} slots SEC(".maps");

/*
 * backends4 and endpoints4 are preallocated, for some 20 MB: a hundred thousand
 * entries are written in half the time.  Their IPv6 twins grow as needed, since
 * few clusters are large in both families.
 */

/* One endpoint of one service port. Ids are not reused soon; an entry is never changed, only added and removed. */
struct backend4 {
	__u8 address[4];
	__u16 port;
	enum protocol protocol;
	enum lane lane;		/* NETFILTER: outside the pod network, or SCTP */
	__u32 service;
	__u32 local;		/* on this node */
};

struct backend6 {
	__u8 address[16];
	__u16 port;
	enum protocol protocol;
	enum lane lane;
	__u32 service;
	__u32 local;		/* on this node */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 131072);
	__type(key, __u32);
	__type(value, struct backend4);
} backends4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 131072);
	__type(key, __u32);
	__type(value, struct backend6);
} backends6 SEC(".maps");

/*
 * Backwards: which address is an endpoint.  service 0: of any service (replies
 * are recognised by it).  service != 0: UDP only, every *serving* endpoint of
 * that service; a UDP flow to anything else is stale (service-semantics 10).
 */
struct endpoint4_key {
	__u32 service;
	__u8 address[4];
	__u16 port;
	enum protocol protocol;
	__u8 zero;
};

struct endpoint6_key {
	__u32 service;
	__u8 address[16];
	__u16 port;
	enum protocol protocol;
	__u8 zero;
};

struct endpoint {
	__u32 backends;		/* how many backends have this address */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 131072);
	__type(key, struct endpoint4_key);
	__type(value, struct endpoint);
} endpoints4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 131072);
	__type(key, struct endpoint6_key);
	__type(value, struct endpoint);
} endpoints6 SEC(".maps");

/* ---- session affinity --------------------------------------------------- */

struct affinity_key {
	__u32 service;
	__u8 client[16];	/* IPv4 in the first four bytes */
};

struct affinity {
	__u64 last_used;	/* bpf_ktime_get_ns() of the newest connection */
	__u32 backend;
	__u32 position;		/* where in its list the backend was: a hint, checked before use */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct affinity_key);
	__type(value, struct affinity);
} affinities SEC(".maps");

/* ---- the schedulers of mode ipvs (made only where one of them uses them) -------- */

/* rr: whose turn it is in the list that begins with this slot. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 524288);	/* as slots */
	__type(key, __u32);
	__type(value, __u32);
} turns SEC(".maps");

/*
 * How many connections each backend has: what the control plane has counted,
 * and when: `choices` is what the programs had chosen by then.  Those that were
 * chosen since are added, so that nothing is lost between two counts.
 */
struct connections {
	__u32 active;
	__u32 inactive;
	__u32 choices;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 262144);	/* backends of both families */
	__type(key, __u32);
	__type(value, struct connections);
} connections SEC(".maps");

/* How often a backend was chosen, ever. Written by the programs alone. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 262144);
	__type(key, __u32);
	__type(value, __u32);
} choices SEC(".maps");

/* lblc: where connections to an address of a service went last (`client` is that address). */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct affinity_key);
	__type(value, struct affinity);
} localities SEC(".maps");

/* lblcr: the same with several backends for each address; 0: free. */
#define SET_SIZE 16

struct server_set {
	__u64 changed;		/* bpf_ktime_get_ns() when a backend came or was taken out */
	__u32 backends[SET_SIZE];
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct affinity_key);
	__type(value, struct server_set);
} locality_sets SEC(".maps");

/* ---- loadBalancerSourceRanges ------------------------------------------- */

struct source_range4_key {
	__u32 prefix_length;	/* 32 for the table + the range's own */
	__u32 table;
	__u8 address[4];
};

struct source_range6_key {
	__u32 prefix_length;
	__u32 table;
	__u8 address[16];
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct source_range4_key);
	__type(value, __u32);
} source_ranges4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct source_range6_key);
	__type(value, __u32);
} source_ranges6 SEC(".maps");

/* ---- the node ------------------------------------------------------------ */

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

/* ---- sockets that were translated at connect or sendmsg ------------------- */

struct socket_peer4_key {
	__u64 cookie;
	__u8 address[4];	/* the backend the socket talks to */
	__u16 port;
	enum protocol protocol;
	__u8 zero;
};

struct socket_peer6_key {
	__u64 cookie;
	__u8 address[16];
	__u16 port;
	enum protocol protocol;
	__u8 zero[5];
};

/* What the application believes it talks to. */
struct socket_peer4 {
	__u8 address[4];
	__u16 port;
	__u8 moved;	/* tc has found another endpoint for the socket since (pods.h) */
	__u8 zero;
};

struct socket_peer6 {
	__u8 address[16];
	__u16 port;
	__u8 moved;	/* tc has found another endpoint for the socket since (pods.h) */
	__u8 zero;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 32768);
	__type(key, struct socket_peer4_key);
	__type(value, struct socket_peer4);
} socket_peers4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 32768);
	__type(key, struct socket_peer6_key);
	__type(value, struct socket_peer6);
} socket_peers6 SEC(".maps");

/* Which backend an unconnected UDP socket uses for a service, as conntrack would remember it. */
struct socket_flow_key {
	__u64 cookie;
	__u32 service;
	enum frontend_kind kind;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 32768);
	__type(key, struct socket_flow_key);
	__type(value, struct affinity);
} socket_flows SEC(".maps");

/* ---- pods whose sockets are translated (made only with socketLB: all) -------- */

struct pod_key {
	__u64 netns;		/* cookie of the pod's network namespace */
	__u32 family;		/* 4 or 6 */
	__u32 zero;
};

static __always_inline __u32 family_of(bool ipv6)
{
	return ipv6 ? 6 : 4;
}

/* How packets of a network namespace look when they enter the node; learned by tc from one of them (pods.h). */
struct pod_source {
	__u64 learned;		/* bpf_ktime_get_ns() */
	__u8 address[16];	/* IPv4 in the first four bytes */
	__u32 device;		/* where it came in */
	__u32 served;		/* the detector says that it is a pod, and it is not excluded */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct pod_key);
	__type(value, struct pod_source);
} pod_sources SEC(".maps");

/* A socket that was left to tc: whose it is, and what was chosen for it, if anything. Key: its cookie. */
struct left_socket {
	__u64 netns;
	__u32 service;
	__u32 backend;		/* 0: tc chooses */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct left_socket);
} left_sockets SEC(".maps");

/* socketLBExclude: pods with these addresses are always left to tc. */
struct excluded_pods_key {
	__u32 prefix_length;	/* 32 for the family + the range's own */
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

/* ---- counters ------------------------------------------------------------- */

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASON_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} reasons SEC(".maps");

#endif
