/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by both clients: connections in the order of their start, each recorded at its end. */
#ifndef TESTS_CHANGES_TRAFFIC_CLIENTS_H
#define TESTS_CHANGES_TRAFFIC_CLIENTS_H

#include <netinet/tcp.h>
#include <stdbool.h>
#include <string.h>

#include "traffic_records.h"

#define FILES 65536
#define QUESTION 8			/* bytes of struct connection's */

struct target {
	struct sockaddr_storage to;
	socklen_t length;
	bool udp;
	uint32_t in_flight;
};

struct connection {
	struct record record;
	bool open;
	bool udp;
	uint32_t named;			/* received bytes of the name */
	uint64_t due;			/* when the next round begins, or this one fails */
	bool waiting;			/* for an answer */
	uint32_t back;			/* received bytes of it */
	uint64_t question;
	uint32_t left;			/* load: requests that are not sent yet */
	int next, previous;		/* in the order in which they began */
};

static struct connection connections[FILES];
static struct target targets[64];
static int target_count, first = -1, last = -1;
static uint64_t made, answered;
static bool stopping;
static uint32_t questions;		/* load: requests per connection, after the name */

static void unlink_connection(struct connection *c)
{
	if (c->previous >= 0)
		connections[c->previous].next = c->next;
	else
		first = c->next;
	if (c->next >= 0)
		connections[c->next].previous = c->previous;
	else
		last = c->previous;
}

static uint32_t retransmissions(int fd)
{
	struct tcp_info info = {};
	socklen_t length = sizeof(info);

	getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length);
	return info.tcpi_total_retrans;
}

static uint16_t own_port(int fd)
{
	struct sockaddr_in6 name = {};		/* the port has the same offset in both families */
	socklen_t length = sizeof(name);

	getsockname(fd, (struct sockaddr *)&name, &length);
	return ntohs(name.sin6_port);
}

static void end(int fd, int error, bool load)
{
	struct connection *c = &connections[fd];

	c->record.ended = now();
	c->record.error = error;
	c->record.port = own_port(fd);
	unlink_connection(c);
	if (load) {
		c->record.count = c->udp ? 0 : retransmissions(fd);
		made++;
		answered += !error;
	}
	targets[c->record.target].in_flight--;
	put_on_record(&c->record);
	c->open = false;
	close(fd);
}

/* Send a number that no other request of any client has; returns an errno. */
static int ask(int fd)
{
	struct connection *c = &connections[fd];
	static uint64_t asked;

	if (!asked)
		asked = now();
	c->question = ++asked;
	c->waiting = true;
	c->back = 0;
	if (send(fd, &c->question, QUESTION, MSG_NOSIGNAL) != QUESTION)
		return errno;
	return 0;
}

static void begin(uint32_t target, bool load)
{
	struct linger reset = { .l_onoff = 1, .l_linger = 0 };
	struct target *t = &targets[target];
	int fd = socket(t->to.ss_family, (t->udp ? SOCK_DGRAM : SOCK_STREAM) | SOCK_NONBLOCK, 0), error = 0;
	struct connection *c = &connections[fd];

	if (fd < 0 || fd >= FILES)
		die("socket");
	/* Neither side keeps state of a reset connection: the next one may use the same ports. */
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
	memset(c, 0, sizeof(*c));
	c->open = true;
	c->udp = t->udp;
	c->left = questions;
	c->record.target = target;
	c->next = -1;
	c->previous = last;
	if (last >= 0)
		connections[last].next = fd;
	else
		first = fd;
	last = fd;
	t->in_flight++;
	c->record.begun = now();
	if (connect(fd, (struct sockaddr *)&t->to, t->length) && errno != EINPROGRESS)
		error = errno;
	if (!error) {
		watch(poller, fd, EPOLLIN | EPOLLET);
		/* A UDP server sends its name in its answers. */
		error = c->udp ? ask(fd) : 0;
	}
	if (error)
		end(fd, error, load);
}

static int error_of(int fd)
{
	int error = 0;
	socklen_t length = sizeof(error);

	getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
	return error;
}

/* True when the name is complete; a connection that ends before that is recorded. */
static bool read_name(int fd, bool load)
{
	struct connection *c = &connections[fd];
	ssize_t n = recv(fd, c->record.name + c->named, NAME - c->named, 0);

	if (n < 0 && errno == EAGAIN)
		return false;
	if (n <= 0) {
		end(fd, n ? errno : EPROTO, load);
		return false;
	}
	c->named += n;
	return c->named == NAME;
}

/*
 * True when the answer is complete: the name and the number.  If the flow has moved,
 * another server answers than before.
 */
static bool read_datagram(int fd, bool load)
{
	struct connection *c = &connections[fd];
	char data[NAME + QUESTION + 1];
	ssize_t n;

	/* A late answer to an earlier socket with this port belongs to no request of this one. */
	do {
		n = recv(fd, data, sizeof(data), 0);
	} while (n == NAME + QUESTION && memcmp(data + NAME, &c->question, QUESTION));
	if (n < 0 && errno == EAGAIN)
		return false;
	if (n != NAME + QUESTION) {
		end(fd, n < 0 ? errno : EBADMSG, load);
		return false;
	}
	if (c->named && memcmp(data, c->record.name, NAME)) {
		end(fd, ESTALE, load);
		return false;
	}
	memcpy(c->record.name, data, NAME);
	c->named = NAME;
	c->waiting = false;
	return true;
}

/* The same for a TCP connection, where only the number is echoed. */
static bool read_number(int fd, bool load)
{
	struct connection *c = &connections[fd];
	char data[QUESTION];
	ssize_t n = recv(fd, data, QUESTION - c->back, 0);

	if (n < 0 && errno == EAGAIN)
		return false;
	if (n <= 0 || memcmp(data, (char *)&c->question + c->back, n)) {
		end(fd, n < 0 ? errno : n ? EBADMSG : EPIPE, load);
		return false;
	}
	c->back += n;
	c->waiting = c->back < QUESTION;
	return !c->waiting;
}

static void answer_command(void (*status)(void))
{
	char bytes[64];
	ssize_t n = read(STDIN_FILENO, bytes, sizeof(bytes));

	if (n <= 0 && !(n < 0 && errno == EAGAIN)) {
		stopping = true;
		epoll_ctl(poller, EPOLL_CTL_DEL, STDIN_FILENO, NULL);
	}
	for (; n > 0; n--)
		status();
	fflush(stdout);
}

#endif
