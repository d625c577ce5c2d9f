/* SPDX-License-Identifier: Apache-2.0 */
/* The record of each connection and of each pause of the machine; and the wait that detects pauses. */
#ifndef TESTS_CHANGES_TRAFFIC_RECORDS_H
#define TESTS_CHANGES_TRAFFIC_RECORDS_H

#include <unistd.h>

#include "../../bench/load.h"

#define EVENTS 256
#define NAME 24
#define MILLISECOND 1000000ULL
#define STALL_NS (10 * MILLISECOND)
#define STALL_RECORD UINT32_MAX

/* Read by tests/changes/traffic.py. */
struct record {
	uint64_t begun, ended;		/* CLOCK_MONOTONIC, nanoseconds */
	uint32_t target;		/* STALL_RECORD: a pause of the machine */
	int32_t error;			/* errno; 0: answered, or still open */
	uint32_t count;			/* load: retransmissions. hold: rounds */
	char name[NAME];
	uint32_t port;			/* the local one */
};

static struct record *records;
static size_t recorded, capacity;
static int poller;

static void put_on_record(const struct record *r)
{
	if (recorded == capacity) {
		capacity = capacity ? 2 * capacity : 1 << 16;
		records = realloc(records, capacity * sizeof(*records));
		if (!records)
			die("realloc");
	}
	records[recorded++] = *r;
}

static void write_records(const char *path)
{
	FILE *file = fopen(path, "wb");

	if (!file || fwrite(records, sizeof(*records), recorded, file) != recorded || fclose(file))
		die(path);
}

/* Wait for events, at the latest until `until`, and record if that took too long. */
static int wait_until(uint64_t until, struct epoll_event *events)
{
	uint64_t begun = now(), wait = until > begun ? until - begun : 0, after;
	struct timespec t = { .tv_sec = wait / SECOND, .tv_nsec = wait % SECOND };
	static uint64_t busy_since;
	struct record stall = { .target = STALL_RECORD };
	int n;

	/* There is little work between two waits: if it took long, this process did not run. */
	if (busy_since && begun - busy_since > STALL_NS) {
		stall.begun = busy_since;
		stall.ended = begun;
		put_on_record(&stall);
	}
	n = epoll_pwait2(poller, events, EVENTS, &t, NULL);
	after = now();
	if (after > begun + wait + STALL_NS) {
		stall.begun = begun + wait;
		stall.ended = after;
		put_on_record(&stall);
	}
	busy_since = after;
	return n;
}

#endif
