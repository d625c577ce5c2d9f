/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The maps: the interface between the programs, the control plane and people
 * who read them with bpftool.  docs/maps.md explains each with an example.
 *
 * Rules for every type here:
 *  - addresses are bytes in network order, ports are numbers in host order, so
 *    that a dump reads naturally;
 *  - no anonymous padding; fields that must be zero are named zero;
 *  - this file and those that it includes are the only definition: the Python
 *    side reads the layouts from the BTF of the object.
 *
 * A change that a program of another version cannot read changes LAYOUT_VERSION
 * in pyebpf_proxy/datapath.  README.md lists the steps for a new map.
 */
#ifndef PEP_MAPS_H
#define PEP_MAPS_H

#include "reason.h"

enum protocol {
	TCP = 6,
	UDP = 17,
	SCTP = 132,
} __attribute__((packed));

#include "service_maps.h"
#include "scheduler_maps.h"
#include "node_maps.h"
#include "socket_maps.h"

/* ---- counters and details of refusals ---------------------------------------- */

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS_END);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

/* The newest packet, or socket call, that was refused or dropped for each reason. */
struct refused {
	__u64 when;		/* bpf_ktime_get_boot_ns(); 0: never */
	__u8 source[16];	/* IPv4 in the first four bytes; for an unbound socket: the node's address */
	__u8 destination[16];
	__u16 source_port;
	__u16 destination_port;
	enum protocol protocol;
	__u8 ipv6;
	__u8 zero[2];
	__u32 device;		/* the device it came in by; 0: a socket call */
	__u32 zero2;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS_END);
	__type(key, __u32);
	__type(value, struct refused);
} last_refused SEC(".maps");

/* The same refusals, counted in periods of REFUSED_PERIOD seconds: those of the last minute. */
#define REFUSED_PERIOD 4
#define REFUSED_PERIODS 16

struct recent_refusals {
	__u32 period[REFUSED_PERIODS];	/* seconds of bpf_ktime_get_boot_ns() / REFUSED_PERIOD */
	__u32 count[REFUSED_PERIODS];	/* within that period */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS_END);
	__type(key, __u32);
	__type(value, struct recent_refusals);
} recent_refusals SEC(".maps");

/* The same by service; 0: no service. LRU: the least recently used entries are evicted. */
struct refusal_key {
	__u32 service;
	__u32 reason;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_PERCPU_HASH);
	__uint(max_entries, 2048);
	__type(key, struct refusal_key);
	__type(value, __u64);
} refusals SEC(".maps");

/* Not pinned: the decision of a dry run (settings.h). */
struct dry_result {
	__u32 backend;
	__u32 masqueraded;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dry_result);
} dry_results SEC(".maps");

#endif
