/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * tc.bpf.c for kernels on which conntrack's kfuncs cannot be resolved.  libbpf looks for each kfunc that an object
 * declares, also for weak ones that only dead code calls.  Before 1.4 it fails if it may not read the types of modules
 * (CAP_SYS_ADMIN).
 */
#define WITHOUT_LOOKUP
#include "tc.bpf.c"
