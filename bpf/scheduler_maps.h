/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* State of the schedulers of mode ipvs; a map is created only for a scheduler that uses it.  Part of maps.h. */
#ifndef PEP_SCHEDULER_MAPS_H
#define PEP_SCHEDULER_MAPS_H

/* rr: the next turn in the list that begins with this slot. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 524288);	/* as slots */
	__type(key, __u32);
	__type(value, __u32);
} rr_cursor SEC(".maps");

/*
 * How many connections each backend has.  `active` and `inactive` were counted by the
 * control plane; `choices` is the value of map `choices` at that time.  The programs add
 * what was chosen since, so that nothing is lost between two counts.
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

/* How often a backend was chosen in total. Written by the programs only. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 262144);
	__type(key, __u32);
	__type(value, __u32);
} choices SEC(".maps");

/* lblc: where the last connection to an address of a service went (`client` is that address). */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct affinity_key);
	__type(value, struct affinity);
} localities SEC(".maps");

/* lblcr: the same with several backends for each address; 0: free. */
#define SET_SIZE 16

struct server_set {
	__u64 changed;		/* bpf_ktime_get_ns() when a backend was added or removed */
	__u32 backends[SET_SIZE];
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct affinity_key);
	__type(value, struct server_set);
} locality_sets SEC(".maps");

#endif
