/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Traffic that records every connection: when it began and ended, its outcome, and
 * the server that answered.
 *
 *	traffic serve NAME PORT...
 *	traffic load FILE RATE TIMEOUT QUESTIONS PAUSE TARGET...	new connections, RATE a second in all
 *	traffic hold FILE PERIOD COUNT TARGET...	COUNT long connections, spread over the targets
 *
 * A target is ADDRESS,PORT or ADDRESS,PORT,udp; RATE 0 makes as many as
 * possible; TIMEOUT, PAUSE and PERIOD are milliseconds.  A server sends its name and the
 * port when a client connects, then echoes; the answer to a datagram contains both.
 * `load` reads the name, sends QUESTIONS more requests, one every PAUSE, and resets the
 * connection; `hold` sends CHUNK bytes every PERIOD and compares the echo, and for UDP
 * also the name.
 *
 * `serve` prints a line when it listens.  `load` and `hold` answer each byte on
 * standard input with a line, "made answered" or "open least-rounds"; when it
 * ends, they write their records to FILE and exit.  They are one thread on epoll.  Times
 * in which the machine did not run them are recorded too.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/resource.h>

#include "traffic_hold.h"
#include "traffic_load.h"
#include "traffic_serve.h"

static void add_target(char *text)
{
	char *comma = strchr(text, ','), *udp = strstr(text, ",udp");
	struct target *t = &targets[target_count++];
	struct sockaddr_in *v4 = (struct sockaddr_in *)&t->to;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&t->to;

	errno = EINVAL;
	if (!comma || target_count > 64)
		die(text);
	*comma = 0;
	t->udp = udp;
	if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons(atoi(comma + 1));
		t->length = sizeof(*v4);
	} else if (inet_pton(AF_INET6, text, &v6->sin6_addr) == 1) {
		v6->sin6_family = AF_INET6;
		v6->sin6_port = htons(atoi(comma + 1));
		t->length = sizeof(*v6);
	} else {
		die(text);
	}
}

int main(int count, char **arguments)
{
	struct rlimit files = { FILES, FILES };

	/*
	 * Both help, but neither is required.  No real-time scheduling: on a slow machine the
	 * kernel's own threads would not run, and packets would be lost.
	 */
	setpriority(PRIO_PROCESS, 0, -5);
	setrlimit(RLIMIT_NOFILE, &files);
	poller = epoll_create1(0);
	if (count >= 4 && !strcmp(arguments[1], "serve"))
		serve(arguments[2], arguments + 3);
	for (int i = count > 2 && !strcmp(arguments[1], "load") ? 7 : 5; i < count; i++)
		add_target(arguments[i]);
	fcntl(STDIN_FILENO, F_SETFL, O_NONBLOCK);
	if (target_count && !strcmp(arguments[1], "load")) {
		watch(poller, STDIN_FILENO, EPOLLIN);
		questions = atoi(arguments[5]);
		pause_between = atoll(arguments[6]) * MILLISECOND;
		return put_under_load(arguments[2], atof(arguments[3]), atoll(arguments[4]) * MILLISECOND);
	}
	if (target_count && !strcmp(arguments[1], "hold")) {
		watch(poller, STDIN_FILENO, EPOLLIN);
		period = atoll(arguments[3]) * MILLISECOND;
		return hold(arguments[2], atoi(arguments[4]));
	}
	fprintf(stderr, "usage: traffic serve NAME PORT... | load FILE RATE TIMEOUT QUESTIONS PAUSE TARGET..."
			" | hold FILE PERIOD COUNT TARGET...\n");
	return 2;
}
