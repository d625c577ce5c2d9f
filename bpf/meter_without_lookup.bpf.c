/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* meter.bpf.c for where the functions of conntrack cannot be named: see tc_without_lookup.bpf.c. */
#define WITHOUT_LOOKUP
#include "meter.bpf.c"
