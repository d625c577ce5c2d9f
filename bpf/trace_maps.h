/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What `pyebpf-proxy trace` is told, and what it asks for. The rules of maps.h hold here, too. */
#ifndef PEP_TRACE_MAPS_H
#define PEP_TRACE_MAPS_H

#include "maps.h"

enum hook {
	AT_TC = 1,
	AT_XDP = 2,
	AT_SOCKET = 3,
} __attribute__((packed));

/* One decision. An event, no map's value: it goes through decisions. */
struct decision {
	__u64 when;		/* bpf_ktime_get_boot_ns() */
	__u8 source[16];	/* IPv4 in the first four bytes */
	__u8 destination[16];	/* what was asked for */
	__u8 endpoint[16];	/* what was chosen, if `backend` is set */
	__u16 source_port;
	__u16 destination_port;
	__u16 endpoint_port;
	enum protocol protocol;
	__u8 ipv6;
	__u32 device;		/* where it came in; 0: a socket's call */
	__u32 service;		/* 0: not known here */
	__u32 backend;
	__u32 reason;
	__u32 process;		/* whose socket's call it was */
	__u8 masquerade;
	enum hook hook;
	__u8 slow;		/* enum reason: why a new flow takes the slow path */
	__u8 zero;
	__u8 command[16];	/* of that process */
};

#define TRACED_SERVICES 16

/* What is to be told. Whoever traces writes it; the programs write `lost` and, when nobody reads any more, `process`. */
struct tracing {
	__u64 lost;		/* events that there was no room for */
	__u64 reasons;		/* a bit for each that is wanted */
	__u32 process;		/* who reads; 0: nobody, and nothing else here means anything */
	__u32 device;		/* 0: any */
	__u32 service_count;	/* 0: any */
	__u32 services[TRACED_SERVICES];
	__u8 address[16];	/* of any party */
	__u8 family;		/* 4, 6; 0: any address */
	__u8 protocol;		/* 0: any */
	__u16 port;		/* of any party; 0: any */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tracing);
} tracing SEC(".maps");

/*
 * Rings of events, one per CPU, that belong to who reads: they come with its descriptor of this map and go with it,
 * however it ends.  That is why it is no BPF_MAP_TYPE_RINGBUF, which would stay, and take its memory always.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERF_EVENT_ARRAY);
	__uint(max_entries, 1024);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(__u32));
} decisions SEC(".maps");

#endif
