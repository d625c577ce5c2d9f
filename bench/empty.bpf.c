/* SPDX-License-Identifier: Apache-2.0 */
/* Programs that do nothing: the reference for the cost of a packet. */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>

#define TC_ACT_UNSPEC (-1)

SEC("tc")
int empty(struct __sk_buff *skb __attribute__((unused)))
{
	return TC_ACT_UNSPEC;
}

SEC("xdp")
int empty_xdp(struct xdp_md *ctx __attribute__((unused)))
{
	return XDP_PASS;
}

char LICENSE[] SEC("license") = "Apache-2.0";
