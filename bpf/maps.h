/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The maps: the contract between the programs, the control plane and anybody
 * who reads them with bpftool.  docs/maps.md explains each with an example.
 *
 * Rules that every type here keeps:
 *  - addresses are bytes in network order, ports are numbers in host order, so
 *    that a dump reads as a person writes them;
 *  - no anonymous padding; what must be zero is called zero;
 *  - this file, with those that it includes, is the only definition: the Python
 *    side reads the layouts from the BTF of the object.
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

#include "service_maps.h"
#include "scheduler_maps.h"
#include "node_maps.h"
#include "socket_maps.h"

/* ---- counters, and what explains them ---------------------------------------- */

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASON_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

/* The newest packet, or socket call, that was refused or dropped for each reason. */
struct refused {
	__u64 when;		/* bpf_ktime_get_boot_ns(); 0: never */
	__u8 source[16];	/* IPv4 in the first four bytes; a socket that is bound to nothing: the node's */
	__u8 destination[16];
	__u16 source_port;
	__u16 destination_port;
	enum protocol protocol;
	__u8 ipv6;
	__u8 zero[2];
	__u32 device;		/* where it came in, 0: a socket's call */
	__u32 zero2;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASON_COUNT);
	__type(key, __u32);
	__type(value, struct refused);
} last_refused SEC(".maps");

/* The same refusals, counted by periods of REFUSED_PERIOD seconds: what came within the last minute. */
#define REFUSED_PERIOD 4
#define REFUSED_PERIODS 16

struct recent_refusals {
	__u32 period[REFUSED_PERIODS];	/* seconds of bpf_ktime_get_boot_ns() / REFUSED_PERIOD */
	__u32 count[REFUSED_PERIODS];	/* within that one */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASON_COUNT);
	__type(key, __u32);
	__type(value, struct recent_refusals);
} recent_refusals SEC(".maps");

/* The same by service; 0: no service's. Those that were refused nothing for longest are forgotten. */
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

/* Pinned nowhere: what a dry run (settings.h) has decided. */
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
