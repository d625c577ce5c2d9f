/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Traffic whose every connection is on record: when it began and ended, what
 * came of it, and who answered.
 *
 *	traffic serve NAME PORT...
 *	traffic load FILE RATE TIMEOUT TARGET...	new connections, RATE a second in all
 *	traffic hold FILE PERIOD COUNT TARGET...	COUNT connections, spread over the targets, that go on
 *
 * A target is ADDRESS,PORT; RATE 0 makes as many as there can be; TIMEOUT and
 * PERIOD are milliseconds.  A server says its name and the port when somebody
 * connects, then sends back what it gets.  `load` takes the name and resets the
 * connection; `hold` sends CHUNK bytes every PERIOD and compares what comes back.
 *
 * `serve` prints a line when it listens.  `load` and `hold` answer each byte on
 * standard input with a line, "made answered" or "open least-rounds"; when it ends
 * they write their records to FILE, and end.  They are one thread on epoll.  Moments
 * in which the machine did not let them run are on record, too.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../../bench/load.h"

#define EVENTS 256
#define FILES 65536
#define NAME 24
#define CHUNK 4096
#define BURST 32
#define CLOSED_LOOP 32			/* connections at a time where there is no rate */
#define IN_FLIGHT 16			/* at most, to one target: where nobody answers, and on a slow machine, they pile up */
#define MILLISECOND 1000000ULL
#define STALL_NS (10 * MILLISECOND)
#define ROUND_TIMEOUT (60 * SECOND)	/* as good as never, on any machine */
#define STALL_RECORD UINT32_MAX

/* Read by tests/changes/traffic.py. */
struct record {
	uint64_t begun, ended;		/* CLOCK_MONOTONIC, nanoseconds */
	uint32_t target;		/* STALL_RECORD: nothing ran in between */
	int32_t error;			/* errno; 0: answered, or still there */
	uint32_t count;			/* load: retransmissions. hold: rounds */
	char name[NAME];
	uint32_t port;			/* of our own */
};

struct target {
	struct sockaddr_storage to;
	socklen_t length;
	uint32_t in_flight;
};

struct connection {
	struct record record;
	bool open;
	uint32_t named;			/* bytes of the name that are there */
	/* hold */
	uint64_t due;
	bool waiting;
	uint32_t back;
	int next, previous;		/* in the order in which they began */
};

static struct connection connections[FILES];
static struct target targets[64];
static struct record *records;
static size_t recorded, room;
static int target_count, poller, first = -1, last = -1;
static uint64_t made, answered;
static bool stopping;

static void put_on_record(const struct record *r)
{
	if (recorded == room) {
		room = room ? 2 * room : 1 << 16;
		records = realloc(records, room * sizeof(*records));
		if (!records)
			die("realloc");
	}
	records[recorded++] = *r;
}

/* ---- the server ----------------------------------------------------------- */

static uint16_t served[FILES];		/* by listener: its port; 0: a connection */

static void serve_on(uint16_t port)
{
	struct sockaddr_in6 any = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
	int fd = socket(AF_INET6, SOCK_STREAM | SOCK_NONBLOCK, 0), on = 1;

	if (fd < 0)
		die("socket");
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (bind(fd, (struct sockaddr *)&any, sizeof(any)) || listen(fd, 4096))
		die("listen");
	served[fd] = port;
	watch(poller, fd, EPOLLIN);
}

static void greet(int listener, const char *name)
{
	char greeting[NAME] = "";
	int fd;

	snprintf(greeting, sizeof(greeting), "%s:%u", name, served[listener]);
	while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
		if (send(fd, greeting, sizeof(greeting), MSG_NOSIGNAL) == sizeof(greeting))
			watch(poller, fd, EPOLLIN);
		else
			close(fd);
	}
}

static void send_back(int fd)
{
	char data[CHUNK];
	ssize_t n = recv(fd, data, sizeof(data), 0);

	if (n < 0 && errno == EAGAIN)
		return;
	/* A client never has more than one chunk under way, which always fits. */
	if (n <= 0 || send(fd, data, n, MSG_NOSIGNAL) != n)
		close(fd);
}

static void serve(const char *name, char **ports)
{
	struct epoll_event events[EVENTS];

	for (; *ports; ports++)
		serve_on(atoi(*ports));
	printf("listening\n");
	fflush(stdout);
	for (;;) {
		int n = epoll_wait(poller, events, EVENTS, -1);

		for (int i = 0; i < n; i++) {
			int fd = events[i].data.fd;

			if (served[fd])
				greet(fd, name);
			else
				send_back(fd);
		}
	}
}

/* ---- what both clients do ---------------------------------------------------- */

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
	struct sockaddr_in6 name = {};		/* the port of both families is at the same place */
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
		c->record.count = retransmissions(fd);
		made++;
		answered += !error;
	}
	targets[c->record.target].in_flight--;
	put_on_record(&c->record);
	c->open = false;
	close(fd);
}

static void begin(uint32_t target, bool load)
{
	struct linger reset = { .l_onoff = 1, .l_linger = 0 };
	struct target *t = &targets[target];
	int fd = socket(t->to.ss_family, SOCK_STREAM | SOCK_NONBLOCK, 0), error = 0;
	struct connection *c = &connections[fd];

	if (fd < 0 || fd >= FILES)
		die("socket");
	/* No side keeps anything of a connection that was reset: the next may have the same ports. */
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
	memset(c, 0, sizeof(*c));
	c->open = true;
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
	if (error)
		end(fd, error, load);
	else
		watch(poller, fd, EPOLLIN | EPOLLET);
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

static void write_records(const char *path)
{
	FILE *file = fopen(path, "wb");

	if (!file || fwrite(records, sizeof(*records), recorded, file) != recorded || fclose(file))
		die(path);
}

/* Waits for events, until `until` at the latest, and notes when that took longer than it should. */
static int wait_until(uint64_t until, struct epoll_event *events)
{
	uint64_t begun = now(), wait = until > begun ? until - begun : 0, after;
	struct timespec t = { .tv_sec = wait / SECOND, .tv_nsec = wait % SECOND };
	static uint64_t busy_since;
	struct record stall = { .target = STALL_RECORD };
	int n;

	/* Between two waits there is little to do: if that took long, we were not let run. */
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

/* ---- load -------------------------------------------------------------------- */

static void load_status(void)
{
	printf("%lu %lu\n", made, answered);
}

static void load_event(int fd, uint32_t events)
{
	struct connection *c = &connections[fd];

	if (!c->open)
		return;
	if (events & EPOLLERR) {
		int error = error_of(fd);

		end(fd, error ? error : EPROTO, true);
	} else if (read_name(fd, true)) {
		end(fd, 0, true);
	}
}

static void begin_one(uint32_t *turn)
{
	for (int tries = 0; tries < target_count; tries++) {
		uint32_t target = (*turn)++ % target_count;

		if (targets[target].in_flight < IN_FLIGHT) {
			begin(target, true);
			return;
		}
	}
}

static int put_under_load(const char *path, double rate, uint64_t timeout)
{
	uint64_t start = now(), begun = 0;
	struct epoll_event events[EVENTS];
	uint32_t turn = 0;

	while (!stopping || first >= 0) {
		uint64_t present = now(), wake = present + 5 * MILLISECOND;
		int n;

		while (first >= 0 && present - connections[first].record.begun > timeout)
			end(first, ETIMEDOUT, true);
		if (!stopping && rate > 0) {
			uint64_t due = (present - start) * rate / SECOND, next;

			/* What was not begun in time is not made up for. */
			if (due > begun + BURST)
				begun = due - BURST;
			for (; begun < due; begun++)
				begin_one(&turn);
			next = start + (begun + 1) * SECOND / rate;
			wake = next < wake ? next : wake;
		} else if (!stopping) {
			while (made + CLOSED_LOOP > begun) {
				begin_one(&turn);
				begun++;
			}
		}
		n = wait_until(wake, events);
		for (int i = 0; i < n; i++) {
			if (events[i].data.fd == STDIN_FILENO)
				answer_command(load_status);
			else
				load_event(events[i].data.fd, events[i].events);
		}
	}
	write_records(path);
	return 0;
}

/* ---- hold -------------------------------------------------------------------- */

static uint64_t period;

static void hold_status(void)
{
	uint32_t open = 0, least = UINT32_MAX;

	for (int fd = first; fd >= 0; fd = connections[fd].next) {
		struct connection *c = &connections[fd];

		if (!c->open)
			continue;
		open++;
		least = c->record.count < least ? c->record.count : least;
	}
	printf("%u %u\n", open, open ? least : 0);
}

static void fill(unsigned char *data, int fd, uint32_t round)
{
	for (int i = 0; i < CHUNK; i++)
		data[i] = fd * 131 + round * 31 + i * 7 + (i >> 8);
}

static void next_round(int fd, uint64_t present)
{
	struct connection *c = &connections[fd];
	unsigned char data[CHUNK];

	if (c->waiting || c->named < NAME) {
		end(fd, ETIMEDOUT, false);
		return;
	}
	fill(data, fd, c->record.count);
	if (send(fd, data, CHUNK, MSG_NOSIGNAL) != CHUNK) {
		end(fd, errno, false);
		return;
	}
	c->waiting = true;
	c->back = 0;
	c->due = present + ROUND_TIMEOUT;
}

static void hold_event(int fd)
{
	struct connection *c = &connections[fd];
	unsigned char data[CHUNK], right[CHUNK];
	ssize_t n;

	if (!c->open)
		return;
	if (c->named < NAME) {
		if (read_name(fd, false))
			c->due = now() + period * (fd % 16) / 16;
		return;
	}
	while (c->back < CHUNK && (n = recv(fd, data, CHUNK - c->back, 0))) {
		if (n < 0 && errno == EAGAIN)
			return;
		if (n < 0) {
			end(fd, errno, false);
			return;
		}
		fill(right, fd, c->record.count);
		if (!c->waiting || memcmp(data, right + c->back, n)) {
			end(fd, EBADMSG, false);
			return;
		}
		c->back += n;
	}
	if (c->back < CHUNK) {
		end(fd, EPIPE, false);
		return;
	}
	c->record.count++;
	c->waiting = false;
	c->back = 0;
	c->due = now() + period;
}

static int hold(const char *path, int count)
{
	struct epoll_event events[EVENTS];

	for (int i = 0; i < count; i++) {
		uint64_t present = now();

		begin(i % target_count, false);
		if (last >= 0 && connections[last].record.begun >= present)
			connections[last].due = present + ROUND_TIMEOUT;
	}
	while (!stopping) {
		uint64_t present = now();
		int n = wait_until(present + 5 * MILLISECOND, events);

		for (int i = 0; i < n; i++) {
			if (events[i].data.fd == STDIN_FILENO)
				answer_command(hold_status);
			else
				hold_event(events[i].data.fd);
		}
		for (int fd = first, next; fd >= 0; fd = next) {
			next = connections[fd].next;
			if (connections[fd].due <= present)
				next_round(fd, present);
		}
	}
	while (first >= 0)
		end(first, 0, false);
	write_records(path);
	return 0;
}

static void add_target(char *text)
{
	char *comma = strchr(text, ',');
	struct target *t = &targets[target_count++];
	struct sockaddr_in *v4 = (struct sockaddr_in *)&t->to;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&t->to;

	errno = EINVAL;
	if (!comma || target_count > 64)
		die(text);
	*comma = 0;
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
	 * Both help and neither is needed.  No real-time scheduling: on a slow machine the
	 * kernel's own threads would get no turn, and packets would be lost by that.
	 */
	setpriority(PRIO_PROCESS, 0, -5);
	setrlimit(RLIMIT_NOFILE, &files);
	poller = epoll_create1(0);
	if (count >= 4 && !strcmp(arguments[1], "serve"))
		serve(arguments[2], arguments + 3);
	for (int i = 5; i < count; i++)
		add_target(arguments[i]);
	fcntl(STDIN_FILENO, F_SETFL, O_NONBLOCK);
	if (target_count && !strcmp(arguments[1], "load")) {
		watch(poller, STDIN_FILENO, EPOLLIN);
		return put_under_load(arguments[2], atof(arguments[3]), atoll(arguments[4]) * MILLISECOND);
	}
	if (target_count && !strcmp(arguments[1], "hold")) {
		watch(poller, STDIN_FILENO, EPOLLIN);
		period = atoll(arguments[3]) * MILLISECOND;
		return hold(arguments[2], atoi(arguments[4]));
	}
	fprintf(stderr, "usage: traffic serve NAME PORT... | load FILE RATE TIMEOUT TARGET..."
			" | hold FILE PERIOD COUNT TARGET...\n");
	return 2;
}
