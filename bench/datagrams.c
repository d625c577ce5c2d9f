/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Queries as in DNS lookups: one datagram from a new port, and its reply.
 *
 *	datagrams serve PORT
 *	datagrams load ADDRESS PORT IN_FLIGHT WARM_UP_SECONDS SECONDS
 *
 * Each query has its own socket.  Ports are used in turn, so no port is reused within 64 000 queries.  Each side is one
 * thread with real-time priority, as in `connections`.  `serve` prints a line when it listens and ends when its standard
 * input is closed.  `load` prints one line of JSON; a query without a reply within 200 ms has failed.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "load.h"

#define EVENTS 256
#define FILES 4096
#define LATE_NS (SECOND / 5)
#define QUERY 45		/* bytes: a cluster's domain name; the reply has an address */
#define ANSWER 90
#define FIRST_PORT 1024

static int serve(uint16_t port)
{
	struct sockaddr_in6 any = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
	int fd = socket(AF_INET6, SOCK_DGRAM | SOCK_NONBLOCK, 0), size = 4 << 20;
	struct pollfd waiting[2] = { { .fd = STDIN_FILENO, .events = POLLIN }, { .fd = fd, .events = POLLIN } };
	char bytes[ANSWER] = {};

	if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof(size)) ||
	    bind(fd, (struct sockaddr *)&any, sizeof(any)))
		die("bind");
	printf("listening\n");
	fflush(stdout);
	for (;;) {
		struct sockaddr_in6 from;
		socklen_t length = sizeof(from);

		if (poll(waiting, 2, -1) < 0)
			die("poll");
		if (waiting[0].revents)
			return 0;
		while (recvfrom(fd, bytes, sizeof(bytes), 0, (struct sockaddr *)&from, &length) == QUERY) {
			sendto(fd, bytes, ANSWER, 0, (struct sockaddr *)&from, length);
			length = sizeof(from);
		}
	}
}

static struct {
	struct sockaddr_storage to, from;
	socklen_t length;
	uint64_t begun[FILES];		/* start of the query, by descriptor; 0: none */
	uint16_t port;
	bool counting;
	uint64_t answered, failed;
	int poller;
} load;

/* Returns a socket with an unused port. */
static int open_socket(void)
{
	int fd = socket(load.to.ss_family, SOCK_DGRAM | SOCK_NONBLOCK, 0);

	if (fd < 0 || fd >= FILES)
		die("socket");
	for (int tries = 0; tries < 100; tries++) {
		uint16_t port = load.port;

		load.port = port == 65535 ? FIRST_PORT : port + 1;
		/* The field has the same offset in both families. */
		((struct sockaddr_in *)&load.from)->sin_port = htons(port);
		if (!bind(fd, (struct sockaddr *)&load.from, load.length))
			return fd;
		if (errno != EADDRINUSE)
			break;
	}
	die("bind");
}

static void begin(void)
{
	char bytes[QUERY] = {};
	int fd = open_socket();

	load.begun[fd] = now();
	watch(load.poller, fd, EPOLLIN);
	if (connect(fd, (struct sockaddr *)&load.to, load.length) || send(fd, bytes, QUERY, 0) != QUERY)
		die("send");
}

static void end(int fd, bool good)
{
	load.begun[fd] = 0;
	close(fd);
	if (load.counting) {
		load.answered += good;
		load.failed += !good;
	}
	begin();
}

static void end_the_late(uint64_t before)
{
	for (int fd = 0; fd < FILES; fd++)
		if (load.begun[fd] && load.begun[fd] < before)
			end(fd, false);
}

static void run_until(uint64_t deadline)
{
	uint64_t looked = now(), t;

	while ((t = now()) < deadline) {
		struct epoll_event events[EVENTS];
		int n = epoll_wait(load.poller, events, EVENTS, 50);
		char bytes[ANSWER];

		for (int i = 0; i < n; i++)
			end(events[i].data.fd, recv(events[i].data.fd, bytes, sizeof(bytes), 0) == ANSWER);
		if (t - looked > LATE_NS / 2) {
			end_the_late(t - LATE_NS);
			looked = t;
		}
	}
}

static int put_under_load(char **arguments)
{
	uint64_t warm_up = atof(arguments[3]) * SECOND, length = atof(arguments[4]) * SECOND, start;
	double seconds;

	load.length = parse_address(arguments[0], atoi(arguments[1]), &load.to);
	load.from.ss_family = load.to.ss_family;
	/* A random first port, so that a run does not begin with the ports of the previous one. */
	load.port = FIRST_PORT + now() / 1000 % (65536 - FIRST_PORT);
	load.poller = epoll_create1(0);
	for (int i = atoi(arguments[2]); i > 0; i--)
		begin();
	run_until(now() + warm_up);
	load.counting = true;
	start = now();
	run_until(start + length);
	seconds = (now() - start) / 1e9;
	printf("{\"answered\": %lu, \"seconds\": %.6f, \"per_second\": %.1f, \"failed\": %lu}\n", load.answered, seconds,
	       load.answered / seconds, load.failed);
	return 0;
}

int main(int count, char **arguments)
{
	come_first();
	if (count == 3 && !strcmp(arguments[1], "serve"))
		return serve(atoi(arguments[2]));
	if (count == 7 && !strcmp(arguments[1], "load"))
		return put_under_load(arguments + 2);
	fprintf(stderr, "usage: datagrams serve PORT | load ADDRESS PORT IN_FLIGHT WARM_UP_SECONDS SECONDS\n");
	return 2;
}
