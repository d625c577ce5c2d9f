/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Arithmetic of the Internet checksum (RFC 1624): a change in a packet changes its checksum by the same amount. */
#ifndef PEP_CHECKSUM_H
#define PEP_CHECKSUM_H

#include "common.h"

#define UDP_CHECK 6		/* offset of the checksum in the header */
#define TCP_CHECK 16

static __always_inline __u16 fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

static __always_inline __u32 add(__u32 a, __u32 b)
{
	__u64 sum = (__u64)a + b;

	return (__u32)sum + (sum >> 32);
}

#endif
