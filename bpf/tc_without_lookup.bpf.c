/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * tc.bpf.c for where the functions of conntrack cannot be named.  libbpf looks for each function that an object
 * declares, also for weak ones that only dead code calls, and before 1.4 fails where it may not read the types of modules
 * (CAP_SYS_ADMIN).
 */
#define WITHOUT_LOOKUP
#include "tc.bpf.c"
