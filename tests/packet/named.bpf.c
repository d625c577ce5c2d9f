/* SPDX-License-Identifier: Apache-2.0 */
/* A test run cannot set tc_index and hash: this program sets them, and calls the program under test. */
#include "common.h"

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} next SEC(".maps");

#define NOT_CALLED 77

SEC("tc")
int named(struct __sk_buff *skb)
{
	__u32 index = skb->cb[0];

	skb->tc_index = index;
	bpf_set_hash(skb, skb->cb[1]);
	bpf_tail_call(skb, &next, 0);
	return NOT_CALLED;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
