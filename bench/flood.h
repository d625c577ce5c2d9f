/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by flood.c and its programs. */
#ifndef BENCH_FLOOD_H
#define BENCH_FLOOD_H

struct flood {
	__u32 device;			/* through which frames leave */
	__u32 flows;			/* number of flows that take turns; 0: every frame is of a new flow */
	__u32 begin;			/* number of the first of these new flows, different in each run */
	__u32 source;			/* the first source address, in host order; others follow */
	__u32 destination;		/* in network order */
	__u16 port;			/* in network order */
	__u8 to[6];
	__u8 from[6];
	__u16 sum;			/* checksum of the IPv4 header without the source */
};

struct flood_made {
	__u64 frames;
	__u64 first, last;		/* times, CLOCK_MONOTONIC, nanoseconds; last: set for one of FLOOD_CLOCK frames */
};

#define FLOOD_CLOCK 256
#define FLOOD_PAYLOAD 18		/* 64 bytes on the wire, with 4 bytes of checksum, which virtual devices lack */
#define FLOOD_FIRST_PORT 10000
#define FLOOD_PORTS 0x4000		/* for each source address; more than the flows that take turns */

#define FLOOD_SOURCES 100000		/* addresses in 198.18.0.0/15 from which new flows may come */

#endif
