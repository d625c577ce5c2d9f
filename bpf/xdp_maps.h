/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Maps for XDP only, and the one through which it hands over to tc. The rules of maps.h apply here, too. */
#ifndef PEP_XDP_MAPS_H
#define PEP_XDP_MAPS_H

#include "flow_maps.h"

/* Every device that an XDP program is attached to, or that frames may be redirected to (key: ifindex). */
struct xdp_device {
	__u8 mac[6];		/* frames for this address are for this node */
	__u8 starts_flow;		/* new flows may be opened here */
	enum xdp_frames returns;	/* which frames that came in here may be sent back (XDP_TX) */
	enum xdp_frames takes;	/* which frames the device accepts by XDP_REDIRECT */
	__u8 zero[3];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct xdp_device);
} xdp_devices SEC(".maps");

/* An endpoint that a scheduler chose in XDP for a new flow on the slow path: tc gets the packet next, and uses it. */
struct xdp_choice {
	__u32 service;
	__u32 backend;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct flow_key);
	__type(value, struct xdp_choice);
} xdp_choices SEC(".maps");

#endif
