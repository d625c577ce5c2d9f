/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Events for `pyebpf-proxy trace`, and its filter. The rules of maps.h apply here, too. */
#ifndef PEP_TRACE_MAPS_H
#define PEP_TRACE_MAPS_H

#include "maps.h"

enum hook {
	AT_TC = 1,
	AT_XDP = 2,
	AT_SOCKET = 3,
} __attribute__((packed));

/* One decision. An event, not a map value: it goes through decisions. */
struct decision {
	__u64 when;		/* bpf_ktime_get_boot_ns() */
	__u8 source[16];	/* IPv4 in the first four bytes */
	__u8 destination[16];	/* the frontend */
	__u8 endpoint[16];	/* the endpoint, if `backend` is set */
	__u16 source_port;
	__u16 destination_port;
	__u16 endpoint_port;
	enum protocol protocol;
	__u8 ipv6;
	__u32 device;		/* the device it came in by; 0: a socket call */
	__u32 service;		/* 0: not known here */
	__u32 backend;
	__u32 reason;
	__u32 process;		/* the process that made the socket call */
	__u8 masquerade;
	enum hook hook;
	__u8 slow;		/* enum slow_path_reason: why a new flow takes the slow path */
	__u8 zero;
	__u8 command[16];	/* of that process */
};

/* Puts the layout into the BTF of the object, where the control plane reads it: no map and no function has the type. */
const volatile struct decision decision_layout SEC(".rodata") = {};

#define TRACED_SERVICES 16

/* The event filter.  The tracing process writes it; the programs write `lost`, and clear `process` when it is gone. */
struct tracing {
	__u64 lost;		/* events that did not fit into the ring */
	__u64 reasons;		/* a bit for each wanted reason */
	__u32 process;		/* the reader; 0: no reader, and the other fields are unused */
	__u32 device;		/* 0: any */
	__u32 service_count;	/* 0: any */
	__u32 services[TRACED_SERVICES];
	__u8 address[16];	/* source, destination or endpoint */
	__u8 family;		/* 4, 6; 0: any address */
	__u8 protocol;		/* 0: any */
	__u16 port;		/* source, destination or endpoint; 0: any */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tracing);
} tracing SEC(".maps");

/*
 * Rings of events, one per CPU, owned by the reader: they are bound to its descriptor of this map and are released with
 * it, however the process ends.  A BPF_MAP_TYPE_RINGBUF would stay and always use its memory.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERF_EVENT_ARRAY);
	__uint(max_entries, 1024);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(__u32));
} decisions SEC(".maps");

#endif
