/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Access to a socket call in a cgroup program. */
#ifndef PEP_CONTEXT_H
#define PEP_CONTEXT_H

#include "common.h"

/* Not a typedef: BTF would then have its name instead of the kernel's type. */
#define context bpf_sock_addr
#define HOOK AT_SOCKET

/* A socket call comes from no device. */
static __always_inline __u32 receiving_device(struct context *ctx __attribute__((unused)))
{
	return 0;
}

/* The verifier requires constant offsets into these, so each is read by its own instruction. */
#define FIELD(x) (*(volatile typeof(x) *)&(x))

#endif
