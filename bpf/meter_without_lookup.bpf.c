/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* meter.bpf.c for kernels on which conntrack's kfuncs cannot be resolved: see tc_without_lookup.bpf.c. */
#define WITHOUT_LOOKUP
#include "meter.bpf.c"
