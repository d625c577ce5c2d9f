/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the load programs: their end, the clock, priority, addresses. */
#ifndef BENCH_LOAD_H
#define BENCH_LOAD_H

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000ULL

static inline void __attribute__((noreturn)) die(const char *what)
{
	fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, strerror(errno));
	exit(1);
}

/* CLOCK_MONOTONIC, nanoseconds. */
static inline uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * SECOND + t.tv_nsec;
}

/* Real-time priority, so that other work on the machine does not distort a comparison. */
static inline void come_first(void)
{
	struct sched_param first = { .sched_priority = 1 };

	if (sched_setscheduler(0, SCHED_FIFO, &first))
		die("sched_setscheduler");
}

static inline void control(int poller, int operation, int fd, uint32_t events)
{
	struct epoll_event e = { .events = events, .data.fd = fd };

	if (epoll_ctl(poller, operation, fd, &e))
		die("epoll_ctl");
}

static inline void watch(int poller, int fd, uint32_t events)
{
	control(poller, EPOLL_CTL_ADD, fd, events);
}

/* A listener on every address of both families. */
static inline int listen_on(uint16_t port, int flags)
{
	struct sockaddr_in6 any = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
	int fd = socket(AF_INET6, SOCK_STREAM | flags, 0), on = 1;

	if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) ||
	    bind(fd, (struct sockaddr *)&any, sizeof(any)) || listen(fd, 4096))
		die("listen");
	return fd;
}

/* The server's part of a short connection: it returns one byte, then the client resets the connection. */
static inline void answer(int fd)
{
	char byte;
	ssize_t n = recv(fd, &byte, 1, 0);

	/* The byte is returned. The next event is the client's reset. */
	if (n == 1 && send(fd, &byte, 1, MSG_NOSIGNAL) == 1)
		return;
	/* errno is valid only after an error: at the end of the stream, it is still that of accept4(). */
	if (n < 0 && errno == EAGAIN)
		return;
	close(fd);
}

/* Returns the length of the address. */
static inline socklen_t parse_address(const char *text, uint16_t port, struct sockaddr_storage *to)
{
	struct sockaddr_in *v4 = (struct sockaddr_in *)to;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)to;

	if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons(port);
		return sizeof(*v4);
	}
	if (inet_pton(AF_INET6, text, &v6->sin6_addr) == 1) {
		v6->sin6_family = AF_INET6;
		v6->sin6_port = htons(port);
		return sizeof(*v6);
	}
	errno = EINVAL;
	die(text);
}

#endif
