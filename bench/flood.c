/* SPDX-License-Identifier: Apache-2.0 */
/*
 * UDP frames of 64 bytes at the maximum rate of one CPU, and their receivers.
 *
 *	flood make OBJECT DEVICE CPU TO_MAC SOURCE DESTINATION PORT FLOWS SECONDS
 *	flood sink OBJECT DEVICE
 *	flood sink_xdp OBJECT DEVICE
 *	flood pass_on OBJECT DEVICE OUT TO_MAC
 *	flood nothing OBJECT DEVICE...
 *
 * `make`: an XDP program generates live frames (BPF_F_TEST_XDP_LIVE_FRAMES) that leave through DEVICE, as if forwarded.
 * They belong to FLOWS flows in turn, each with its own source address and port; 0: each frame is of a new flow.  On
 * the same CPU, the kernel processes each batch completely before the next one is generated.
 * Prints one line of JSON; its `made` is 0 if another task used the CPU all the time.
 *
 * `sink`: counts the UDP frames that reach DEVICE in a tc program, and drops them there; `sink_xdp` does so in an XDP
 * program.  Prints a line when it is attached; then, for every line on standard input, the number of frames so far.
 * The line is a number N: from then on, one frame of N is sent back; 0: none.  Ends when its standard input is closed.
 *
 * `pass_on`: sends the UDP frames that reach DEVICE through OUT to TO_MAC.  Prints a line when it is attached.
 *
 * `nothing`: a tc program that does nothing, on ingress and egress of each DEVICE (tcx, Linux 6.6). Prints a line when
 * all are attached.
 */
#define _GNU_SOURCE
#include <bpf/bpf.h>
#include <bpf/libbpf.h>
#include <linux/bpf.h>
#include <linux/if_link.h>
#include <net/if.h>
#include <signal.h>
#include <string.h>
#include <sys/time.h>

#include "flood.h"
#include "load.h"

#define BATCH 64
#define FOREVER (1 << 30)
/* enum bpf_attach_type; missing in the headers of libbpf 1.1. */
#define TCX_INGRESS 46
#define TCX_EGRESS 47

static struct bpf_object *object;

static int map_of(const char *name)
{
	int fd = bpf_object__find_map_fd_by_name(object, name);

	if (fd < 0)
		die(name);
	return fd;
}

/* Loads only the program with this name. */
static int load_program(const char *path, const char *name)
{
	struct bpf_program *each;

	object = bpf_object__open_file(path, NULL);
	if (!object)
		die(path);
	bpf_object__for_each_program(each, object)
		bpf_program__set_autoload(each, !strcmp(bpf_program__name(each), name));
	if (bpf_object__load(object))
		die("load");
	return bpf_program__fd(bpf_object__find_program_by_name(object, name));
}

static unsigned int device_of(const char *name)
{
	unsigned int device = if_nametoindex(name);

	if (!device)
		die(name);
	return device;
}

static void read_mac(const char *text, unsigned char *to)
{
	if (sscanf(text, "%hhx:%hhx:%hhx:%hhx:%hhx:%hhx", &to[0], &to[1], &to[2], &to[3], &to[4], &to[5]) != 6) {
		errno = EINVAL;
		die(text);
	}
}

static void nothing(int number __attribute__((unused)))
{
}

static int make(char **arguments)
{
	struct flood s = { .device = device_of(arguments[1]), .flows = atoi(arguments[7]) };
	char frame[14 + 20 + 8 + FLOOD_PAYLOAD] = {};
	LIBBPF_OPTS(bpf_test_run_opts, options, .data_in = frame, .data_size_in = sizeof(frame), .repeat = FOREVER,
		    .flags = BPF_F_TEST_XDP_LIVE_FRAMES, .batch_size = BATCH);
	struct in_addr source, destination;
	struct sigaction ending = { .sa_handler = nothing };
	struct itimerval timer = {};
	struct flood_made made;
	uint32_t zero = 0, sum;
	double seconds;
	cpu_set_t cpu;
	int program;

	CPU_ZERO(&cpu);
	CPU_SET(atoi(arguments[2]), &cpu);
	if (sched_setaffinity(0, sizeof(cpu), &cpu))
		die("sched_setaffinity");
	read_mac(arguments[3], s.to);
	if (inet_pton(AF_INET, arguments[4], &source) != 1 || inet_pton(AF_INET, arguments[5], &destination) != 1) {
		errno = EINVAL;
		die("an address");
	}
	s.from[0] = 2;
	s.begin = FLOOD_PORTS * (1 + now() / 1000000 % FLOOD_SOURCES);
	s.source = ntohl(source.s_addr);
	s.destination = destination.s_addr;
	s.port = htons(atoi(arguments[6]));
	/* Version and length, total length, TTL and protocol, destination. */
	sum = htons(0x4500) + htons(sizeof(frame) - 14) + htons(64 << 8 | 17);
	sum += (s.destination & 0xffff) + (s.destination >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	s.sum = (sum & 0xffff) + (sum >> 16);
	program = load_program(arguments[0], "generate");
	if (bpf_map_update_elem(map_of("flood_settings"), &zero, &s, BPF_ANY))
		die("settings");
	come_first();
	seconds = atof(arguments[8]);
	timer.it_value.tv_sec = seconds;
	timer.it_value.tv_usec = (seconds - timer.it_value.tv_sec) * 1e6;
	/* One run, which the signal ends: the start of a run takes the kernel milliseconds. */
	if (sigaction(SIGALRM, &ending, NULL) || setitimer(ITIMER_REAL, &timer, NULL))
		die("timer");
	if (bpf_prog_test_run_opts(program, &options) && errno != EINTR)
		die("test run of live frames");
	if (bpf_map_lookup_elem(map_of("made"), &zero, &made))
		die("made");
	if (made.last <= made.first)
		made.frames = 0;
	printf("{\"made\": %llu, \"seconds\": %.6f}\n", made.frames, (made.last - made.first) / 1e9);
	return 0;
}

static uint64_t received(int map)
{
	uint64_t counts[256] = {}, sum = 0;
	uint32_t zero = 0;

	if (libbpf_num_possible_cpus() > 256 || bpf_map_lookup_elem(map, &zero, counts))
		die("received");
	for (int i = 0; i < libbpf_num_possible_cpus(); i++)
		sum += counts[i];
	return sum;
}

static void say_listening(void)
{
	printf("listening\n");
	fflush(stdout);
}

static void attach_xdp(unsigned int device, int program)
{
	if (bpf_xdp_attach(device, program, XDP_FLAGS_DRV_MODE | XDP_FLAGS_UPDATE_IF_NOEXIST, NULL))
		die("attach");
}

/* The program stays attached as long as this process lives. */
static void attach_tcx(unsigned int device, int program, int type)
{
	if (bpf_link_create(program, device, type, NULL) < 0)
		die("attach");
}

static int pass_on(char **arguments)
{
	struct flood s = { .device = device_of(arguments[2]) };
	int program = load_program(arguments[0], "pass_on");
	uint32_t zero = 0;

	read_mac(arguments[3], s.to);
	if (bpf_map_update_elem(map_of("flood_settings"), &zero, &s, BPF_ANY))
		die("settings");
	attach_xdp(device_of(arguments[1]), program);
	say_listening();
	while (getchar() != EOF)
		;
	return 0;
}

static int attach_nothing(int count, char **arguments)
{
	int program = load_program(arguments[0], "empty");

	for (int i = 1; i < count; i++)
		for (int type = TCX_INGRESS; type <= TCX_EGRESS; type++)
			attach_tcx(device_of(arguments[i]), program, type);
	say_listening();
	while (getchar() != EOF)
		;
	return 0;
}

static int end_here(char **arguments, bool xdp)
{
	unsigned int device = device_of(arguments[1]);
	int program = load_program(arguments[0], xdp ? "sink_xdp" : "sink");
	int counts = map_of("received"), echo = map_of("echo_one_of");
	char line[32];

	if (xdp)
		attach_xdp(device, program);
	else
		attach_tcx(device, program, TCX_INGRESS);
	say_listening();
	while (fgets(line, sizeof(line), stdin)) {
		uint32_t zero = 0, one_of = atoi(line);

		if (bpf_map_update_elem(echo, &zero, &one_of, BPF_ANY))
			die("echo");
		printf("%lu\n", received(counts));
		fflush(stdout);
	}
	return xdp && bpf_xdp_detach(device, XDP_FLAGS_DRV_MODE, NULL) ? 1 : 0;
}

int main(int count, char **arguments)
{
	if (count == 11 && !strcmp(arguments[1], "make"))
		return make(arguments + 2);
	if (count == 4 && !strcmp(arguments[1], "sink"))
		return end_here(arguments + 2, false);
	if (count == 4 && !strcmp(arguments[1], "sink_xdp"))
		return end_here(arguments + 2, true);
	if (count == 6 && !strcmp(arguments[1], "pass_on"))
		return pass_on(arguments + 2);
	if (count >= 4 && !strcmp(arguments[1], "nothing"))
		return attach_nothing(count - 2, arguments + 2);
	fprintf(stderr, "usage: flood make OBJECT DEVICE CPU TO_MAC SOURCE DESTINATION PORT FLOWS SECONDS\n"
			"       flood sink OBJECT DEVICE\n"
			"       flood sink_xdp OBJECT DEVICE\n"
			"       flood pass_on OBJECT DEVICE OUT TO_MAC\n"
			"       flood nothing OBJECT DEVICE...\n");
	return 2;
}
