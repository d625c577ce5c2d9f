/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Services: frontends, the current version, endpoints, affinity, source ranges.  Part of maps.h. */
#ifndef PEP_SERVICE_MAPS_H
#define PEP_SERVICE_MAPS_H

enum frontend_kind {
	CLUSTER_IP = 1,
	EXTERNAL_IP = 2,
	LOAD_BALANCER = 3,
	NODE_PORT = 4,
};

/* In no map: the programs use it for a NodePort at an address that serves none. */
#define UNSERVED_NODE_PORT 5

/* ---- frontends: address, port, protocol -> service --------------------- */

/* A NodePort has the address 0.0.0.0 or ::; node_addresses{4,6} has the addresses that serve it. */
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
 * One bit for each port number, 64 in a word: may it be a NodePort?  It saves
 * most packets the second lookup in frontends{4,6}.  A hint: a bit may stay
 * set after the NodePort is gone.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u64);
} node_port_hints SEC(".maps");

#define ADDRESS_HINT_BITS 20

/*
 * One bit for each address and port of a frontend, an endpoint or the destination of an entry in `flows`, by a hash
 * (hints.h), 64 in a word.  It saves most packets of no service the lookups in those maps.  A bit is set before the
 * entry exists and stays set: without it the entry would not be found.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1 << (ADDRESS_HINT_BITS - 6));
	__type(key, __u32);
	__type(value, __u64);
} address_hints SEC(".maps");

/* ---- a service port and its current version ---------------------------- */

/*
 * services[id] is one aligned word, written by the control plane through mmap:
 * the flip from one version of a service to the next is a single store.  (An
 * element of a hash map that is replaced goes back to the kernel's free list
 * at once and may be filled with another service while a reader looks at it.)
 */
struct service {
	__u32 config;
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
struct service_config {
	__u32 service;
	__u32 first_slot;	/* the cluster list, then the local list */
	__u32 cluster_count;
	__u32 local_count;
	__u32 affinity_seconds;	/* 0: no session affinity */
	__u8 any_endpoints;	/* service-semantics 3: "any endpoints" */
	__u8 internal_local;	/* internalTrafficPolicy: Local */
	__u8 external_local;	/* externalTrafficPolicy: Local */
	__u8 source_ranges;	/* LoadBalancer VIPs accept only source_ranges{4,6} of this configuration */
	__u32 vip_source_allowed;	/* service-semantics 7: the node is inside a range, its VIPs may be sources */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 131072);
	__type(key, __u32);
	__type(value, struct service_config);
} service_configs SEC(".maps");

/* Identity of a service id, for people and for adoption after a restart. The programs do not read it. */
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
	__u32 chosen;	/* written by the programs: new flows this endpoint got from this list (`pyebpf-proxy top`) */
};

/* Lists of backend ids; a struct service_config names its range. Written through mmap. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 524288);
	__type(key, __u32);
	__type(value, struct slot);
} slots SEC(".maps");

/*
 * backends4 and endpoints4 are preallocated, about 20 MB: writing a hundred thousand
 * entries takes half the time.  Their IPv6 counterparts grow as needed, because
 * few clusters are large in both families.
 */

/* One endpoint of one service port. Ids are not reused soon; an entry is added and removed, never changed. */
struct backend4 {
	__u8 address[4];
	__u16 port;
	enum protocol protocol;
	__u8 zero;
	__u32 service;
	__u32 local;		/* on this node */
};

struct backend6 {
	__u8 address[16];
	__u16 port;
	enum protocol protocol;
	__u8 zero;
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
 * Reverse index: which addresses are endpoints.  service 0: of any service (to
 * recognise replies).  service != 0: UDP only, every *serving* endpoint of that
 * service; a UDP flow to any other address is stale (service-semantics 10).
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
	__u64 last_used;	/* bpf_ktime_get_coarse_ns() of the newest connection */
	__u32 backend;
	__u32 position;		/* the backend's position in its list: a hint, checked before use */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct affinity_key);
	__type(value, struct affinity);
} affinities SEC(".maps");

/*
 * How many clients of a service are in affinities: the programs add, the control plane recounts what is still there.
 * [0], which is no service: the maximum for one service, 0 for no limit.  Without a limit the clients of one service,
 * forged sources included, would evict those of all others.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 65536);
	__type(key, __u32);
	__type(value, __u64);
} affinity_counts SEC(".maps");

/* ---- loadBalancerSourceRanges ------------------------------------------- */

struct source_range4_key {
	__u32 prefix_length;	/* 32 for the configuration + the prefix length of the range */
	__u32 config;
	__u8 address[4];
};

struct source_range6_key {
	__u32 prefix_length;
	__u32 config;
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

#endif
