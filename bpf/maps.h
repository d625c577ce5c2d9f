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

/* ---- counters ------------------------------------------------------------- */

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASON_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} reasons SEC(".maps");

#endif
