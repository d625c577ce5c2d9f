# SPDX-License-Identifier: Apache-2.0
"""Prints pyebpf_proxy/datapath/loader/_libbpf_abi.py: the functions of libbpf and libc that the agent calls.

.venv/bin/python tools/libbpf_abi.py >pyebpf_proxy/datapath/loader/_libbpf_abi.py
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import cffi

# const char * where libbpf has const void *: cffi then takes Python bytes without a copy.
DECLARATIONS = """
typedef int (*libbpf_print_fn_t)(int level, const char *format, void *arguments);
libbpf_print_fn_t libbpf_set_print(libbpf_print_fn_t function);
uint32_t libbpf_major_version(void);
int libbpf_num_possible_cpus(void);
int libbpf_probe_bpf_helper(int program_type, int helper, const void *options);
int libbpf_probe_bpf_map_type(int map_type, const void *options);

struct bpf_object *bpf_object__open_file(const char *path, const void *options);
int bpf_object__load(struct bpf_object *object);
void bpf_object__close(struct bpf_object *object);
struct btf *bpf_object__btf(const struct bpf_object *object);
const void *btf__raw_data(const struct btf *btf, uint32_t *size);
struct btf *btf__load_from_kernel_by_id(uint32_t id);
void btf__free(struct btf *btf);

struct bpf_program *bpf_object__next_program(const struct bpf_object *object, struct bpf_program *previous);
const char *bpf_program__name(const struct bpf_program *program);
int bpf_program__fd(const struct bpf_program *program);
int bpf_program__set_autoload(struct bpf_program *program, bool autoload);

struct bpf_map *bpf_object__next_map(const struct bpf_object *object, const struct bpf_map *previous);
const char *bpf_map__name(const struct bpf_map *map);
int bpf_map__fd(const struct bpf_map *map);
int bpf_map__type(const struct bpf_map *map);
uint32_t bpf_map__key_size(const struct bpf_map *map);
uint32_t bpf_map__value_size(const struct bpf_map *map);
uint32_t bpf_map__max_entries(const struct bpf_map *map);
uint32_t bpf_map__map_flags(const struct bpf_map *map);
int bpf_map__set_autocreate(struct bpf_map *map, bool create);
int bpf_map__set_max_entries(struct bpf_map *map, uint32_t max_entries);
int bpf_map__set_pin_path(struct bpf_map *map, const char *path);
int bpf_map__reuse_fd(struct bpf_map *map, int fd);
char *bpf_map__initial_value(struct bpf_map *map, size_t *size);

struct bpf_link *bpf_program__attach_cgroup(const struct bpf_program *program, int cgroup_fd);
struct bpf_link *bpf_link__open(const char *path);
int bpf_link__fd(const struct bpf_link *link);
int bpf_link__pin(struct bpf_link *link, const char *path);
int bpf_link__update_program(struct bpf_link *link, struct bpf_program *program);
int bpf_link__detach(struct bpf_link *link);
int bpf_link__destroy(struct bpf_link *link);

struct link_options { size_t sz; uint32_t flags; uint32_t iter_info_len; };
int bpf_link_create(int program_fd, int target, int attach_type, const struct link_options *options);
int bpf_link_update(int link_fd, int program_fd, const void *options);
int bpf_link_detach(int link_fd);
int bpf_obj_pin(int fd, const char *path);
struct query_options {
    size_t sz;
    uint32_t query_flags; uint32_t attach_flags; uint32_t *prog_ids; uint32_t count; uint32_t *prog_attach_flags;
};
int bpf_prog_query_opts(int target, int attach_type, struct query_options *options);
int bpf_map_create(int type, const char *name, uint32_t key_size, uint32_t value_size, uint32_t max_entries,
                   const void *options);
int bpf_prog_load(int type, const char *name, const char *license, const char *instructions, size_t count,
                  const void *options);

typedef void (*sample_fn)(void *context, int cpu, void *data, uint32_t size);
struct perf_buffer *perf_buffer__new(int map_fd, size_t pages, sample_fn sample, void *lost, void *context,
                                     const void *options);
int perf_buffer__epoll_fd(const struct perf_buffer *rings);
int perf_buffer__consume(struct perf_buffer *rings);
void perf_buffer__free(struct perf_buffer *rings);

struct batch_options { size_t sz; uint64_t element_flags; uint64_t flags; };
int bpf_map_lookup_elem(int fd, const char *key, char *value);
int bpf_map_update_elem(int fd, const char *key, const char *value, uint64_t flags);
int bpf_map_delete_elem(int fd, const char *key);
int bpf_map_lookup_and_delete_elem(int fd, const char *key, char *value);
int bpf_map_get_next_key(int fd, const char *key, char *next_key);
int bpf_map_lookup_batch(int fd, const char *in_batch, char *out_batch, char *keys, char *values, uint32_t *count,
                         const struct batch_options *options);
int bpf_map_update_batch(int fd, const char *keys, const char *values, uint32_t *count,
                         const struct batch_options *options);
int bpf_map_delete_batch(int fd, const char *keys, uint32_t *count, const struct batch_options *options);

struct test_run_options {
    size_t sz;
    const char *data_in; char *data_out; uint32_t data_size_in; uint32_t data_size_out;
    const char *ctx_in; char *ctx_out; uint32_t ctx_size_in; uint32_t ctx_size_out;
    uint32_t retval; int repeat; uint32_t duration; uint32_t flags; uint32_t cpu; uint32_t batch_size;
};
int bpf_prog_test_run_opts(int fd, struct test_run_options *options);

struct map_info {
    uint32_t type; uint32_t id; uint32_t key_size; uint32_t value_size; uint32_t max_entries; uint32_t map_flags;
    char name[16]; uint32_t ifindex; uint32_t btf_vmlinux_value_type_id; uint64_t netns_dev; uint64_t netns_ino;
    uint32_t btf_id; uint32_t btf_key_type_id; uint32_t btf_value_type_id; uint32_t btf_vmlinux_id;
};
struct program_info {
    uint32_t type; uint32_t id; uint8_t tag[8]; uint32_t jited_prog_len; uint32_t xlated_prog_len;
    uint64_t jited_prog_insns; uint64_t xlated_prog_insns; uint64_t load_time; uint32_t created_by_uid;
    uint32_t nr_map_ids; uint64_t map_ids; char name[16];
};
int bpf_obj_get(const char *path);
int bpf_prog_get_fd_by_id(uint32_t id);
int bpf_map_get_fd_by_id(uint32_t id);
int bpf_obj_get_info_by_fd(int fd, void *info, uint32_t *size);

int vasprintf(char **out, const char *format, void *arguments);
void free(void *pointer);
"""
MODULE = "pyebpf_proxy.datapath.loader._libbpf_abi"
HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""cffi's form of the declarations in tools/libbpf_abi.py, which generates this file: do not edit."""

'''


def text() -> str:
    """The content of the file."""
    ffi = cffi.FFI()
    ffi.cdef(DECLARATIONS)
    ffi.set_source(MODULE, None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "module.py")
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the name of the file
            ffi.emit_python_code(str(path))
        return HEAD + path.read_text().partition("\n")[2]


if __name__ == "__main__":
    print(text(), end="")
