// SPDX-License-Identifier: Apache-2.0
/*
 * New connections at a steady rate, without end, and the server for them.
 *
 *	load serve PORT
 *	load ask RATE ADDRESS PORT [ADDRESS PORT ...]
 *
 * A connection: connect, one byte in each direction, reset.  `ask` prints a line for each
 * failure, and each second the numbers so far: "asked N failed N".  A connection that takes
 * longer than LIMIT has failed.  Time in which `ask` itself did not run does not count: answers
 * may have come meanwhile.  A longer pause is printed: "stalled N ms".  `ask` begins when each
 * target has accepted a connection.
 * `serve` continues for a while after SIGTERM, as a server does until no proxy sends it
 * connections any more.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdbool.h>

#include "../../bench/load.h"

#define LIMIT (3 * SECOND)
/* More than the wait for events, and less than a user would call a pause. */
#define NO_PAUSE (SECOND / 10)
#define REPORTED_PAUSE (SECOND / 2)
#define LAST_SECONDS 8
#define EVENTS 256
#define MOST 8192
#define TARGETS 8
/* Below the ephemeral ports, the NodePorts and those of tests (tests/support/ports.py): no trial may connect to itself. */
#define TRIAL_PORTS 10000
#define TRIALS 8000

struct connection {
	uint64_t began; /* by the clock of `awake`; 0: none */
	uint64_t opened;
	int target;
	bool sent;
};

struct target {
	struct sockaddr_storage address;
	socklen_t size;
	char name[96];
};

static struct connection connections[MOST]; /* by descriptor */
static struct target targets[TARGETS];
static uint64_t asked, failed;
static uint64_t awake = 1; /* how long `ask` has run */
static volatile sig_atomic_t ending;

static void end(int number)
{
	(void)number;
	ending = 1;
}

/* ---- the server ----------------------------------------------------------- */

static int serve(uint16_t port)
{
	struct epoll_event events[EVENTS];
	int poll = epoll_create1(0), listener = listen_on(port, SOCK_NONBLOCK);
	uint64_t last = 0;

	watch(poll, listener, EPOLLIN);
	while (!last || now() < last) {
		int n = epoll_wait(poll, events, EVENTS, 100);

		if (ending && !last)
			last = now() + LAST_SECONDS * SECOND;
		for (int i = 0; i < n; i++) {
			int fd = events[i].data.fd;

			if (fd != listener) {
				answer(fd);
				continue;
			}
			while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0)
				watch(poll, fd, EPOLLIN);
		}
	}
	return 0;
}

/* ---- the clients ---------------------------------------------------------- */

/* The own port finds the connection in a capture of packets, or among the flows of the proxy. */
static void report(int fd, const char *why)
{
	struct sockaddr_in6 own = {};
	socklen_t size = sizeof(own);
	char at[16];
	struct timespec time;

	clock_gettime(CLOCK_REALTIME, &time);
	strftime(at, sizeof(at), "%T", gmtime(&time.tv_sec));
	getsockname(fd, (struct sockaddr *)&own, &size);
	printf("%s.%03ld %s, own port %u: %s after %lu ms\n", at, time.tv_nsec / 1000000,
	       targets[connections[fd].target].name, ntohs(own.sin6_port), why,
	       (unsigned long)((now() - connections[fd].opened) * 1000 / SECOND));
	fflush(stdout);
}

static void finish(int fd, const char *why)
{
	static const struct linger reset = { .l_onoff = 1 };

	if (why) {
		failed++;
		report(fd, why);
	}
	connections[fd].began = 0;
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
	close(fd);
}

static void begin(int poll, int target)
{
	struct target *to = &targets[target];
	int fd = socket(to->address.ss_family, SOCK_STREAM | SOCK_NONBLOCK, 0);

	if (fd < 0 || fd >= MOST)
		die("too many connections at once");
	asked++;
	connections[fd] = (struct connection){ .began = awake, .opened = now(), .target = target };
	if (connect(fd, (struct sockaddr *)&to->address, to->size) && errno != EINPROGRESS)
		finish(fd, strerror(errno));
	else
		watch(poll, fd, EPOLLOUT);
}

static void proceed(int poll, int fd)
{
	char byte = 'x';
	int error = 0;
	socklen_t size = sizeof(error);

	if (!connections[fd].sent) {
		if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) || error)
			finish(fd, strerror(error));
		else if (send(fd, &byte, 1, MSG_NOSIGNAL) != 1)
			finish(fd, strerror(errno));
		else {
			connections[fd].sent = true;
			control(poll, EPOLL_CTL_MOD, fd, EPOLLIN);
		}
		return;
	}
	switch (recv(fd, &byte, 1, 0)) {
	case 1:
		finish(fd, NULL);
		break;
	case 0:
		finish(fd, "closed without an answer");
		break;
	default:
		if (errno != EAGAIN)
			finish(fd, strerror(errno));
	}
}

static void give_up(uint64_t before)
{
	for (int fd = 0; fd < MOST; fd++)
		if (connections[fd].began && connections[fd].began < before)
			finish(fd, connections[fd].sent ? "no answer" : "no connection");
}

static void note_pause(uint64_t pause)
{
	awake += pause < NO_PAUSE ? pause : NO_PAUSE;
	if (pause < REPORTED_PAUSE)
		return;
	printf("stalled %lu ms\n", (unsigned long)(pause * 1000 / SECOND));
	fflush(stdout);
}

static bool accepts(const struct target *to, uint16_t own_port)
{
	static const struct timeval patience = { .tv_sec = 1 };
	static const struct linger reset = { .l_onoff = 1 };
	struct sockaddr_storage own = { .ss_family = to->address.ss_family };
	int fd = socket(to->address.ss_family, SOCK_STREAM, 0), on = 1;
	bool connected;

	/* The port is at the same place in both families, here and in report(). */
	((struct sockaddr_in *)&own)->sin_port = htons(own_port);
	if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) ||
	    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience)) ||
	    setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)) ||
	    bind(fd, (struct sockaddr *)&own, to->size))
		die("a trial connection");
	connected = !connect(fd, (const struct sockaddr *)&to->address, to->size);
	close(fd);
	return connected;
}

/*
 * Waits until each target accepts a connection.  kube-proxy refuses connections to a Service without endpoints after
 * conntrack has confirmed them, untranslated: a connection from the same port is refused, too, for two minutes.  The
 * trials therefore use other ports than the connections that are counted.
 */
static void await(int count)
{
	static const struct timespec pause = { .tv_nsec = SECOND / 10 };

	for (int i = 0, trial = 0; i < count && !ending; trial = (trial + 1) % TRIALS) {
		if (accepts(&targets[i], TRIAL_PORTS + trial))
			i++;
		else
			nanosleep(&pause, NULL);
	}
}

static int ask(uint64_t rate, int count)
{
	struct epoll_event events[EVENTS];
	int poll = epoll_create1(0);
	uint64_t began, reported, last, started = 0;

	await(count);
	began = reported = last = now();
	while (!ending) {
		int n = epoll_wait(poll, events, EVENTS, 2);
		uint64_t time = now();

		note_pause(time - last);
		last = time;
		for (int i = 0; i < n; i++)
			proceed(poll, events[i].data.fd);
		/* Connections that were missed while the machine was busy are skipped. */
		if ((time - began) * rate / SECOND > started + rate / 2)
			started = (time - began) * rate / SECOND;
		for (; started < (time - began) * rate / SECOND; started++)
			begin(poll, started % count);
		if (time - reported >= SECOND) {
			reported = time;
			if (awake > LIMIT)
				give_up(awake - LIMIT);
			printf("asked %lu failed %lu\n", (unsigned long)asked, (unsigned long)failed);
			fflush(stdout);
		}
	}
	printf("asked %lu failed %lu\n", (unsigned long)asked, (unsigned long)failed);
	return 0;
}

static void parse(struct target *to, const char *text, const char *port)
{
	snprintf(to->name, sizeof(to->name), "%s port %s", text, port);
	to->size = parse_address(text, atoi(port), &to->address);
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_handler = end };
	int count = (argc - 3) / 2;

	sigaction(SIGTERM, &action, NULL);
	sigaction(SIGINT, &action, NULL);
	if (argc == 3 && !strcmp(argv[1], "serve"))
		return serve(atoi(argv[2]));
	if (argc < 5 || argc % 2 == 0 || count > TARGETS || strcmp(argv[1], "ask")) {
		fprintf(stderr, "usage: load serve PORT | load ask RATE ADDRESS PORT [ADDRESS PORT ...]\n");
		return 2;
	}
	for (int i = 0; i < count; i++)
		parse(&targets[i], argv[3 + 2 * i], argv[4 + 2 * i]);
	return ask(atoi(argv[2]), count);
}
