# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets. Everything fetched or built is in .venv/, build/, dist/ and pyebpf_proxy/bpf/.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.SUFFIXES:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

# bpftool and other tools are in sbin, which a normal user's PATH lacks on Debian.
export PATH := $(PATH):/usr/local/sbin:/usr/sbin:/sbin
export DEBIAN_FRONTEND := noninteractive

PYTHON := .venv/bin/python
# Namespaces and BPF need root. Without root and sudo, the tests still run, and list what they have skipped.
# sudo keeps no variables: those that the tests read are passed explicitly.
SEEDS = FLOW_SEED FLOW_SEEDS FLOW_STEPS FLOW_WAY FLOW_REDUCE PARITY_SEED PARITY_COUNT PLAN_SEED PLAN_COUNT FUZZ_SEED CHANGES_SEED CHANGES_STEPS CHANGES_ROUNDS CHANGES_FAST
PASSED = PYEBPF_PROXY_STRICT PYEBPF_PROXY_FRESH PYEBPF_PROXY_UNTIL PYEBPF_PROXY_CACHE PEP_FAST_PATH PEP_XDP PEP_FEW_RIGHTS FLOW_WHOLE OUTAGE_SECONDS $(SEEDS)
SUDO := $(if $(filter 0,$(shell id -u)),,$(if $(shell command -v sudo),sudo env PATH="$(PATH)" $(foreach name,$(PASSED),$(if $($(name)),$(name)="$($(name))")) PYTHONDONTWRITEBYTECODE=1 PYTEST_ADDOPTS="-p no:cacheprovider"))

# Tests wait more than they compute, so there are more workers than CPUs. A run of a few tests (ARGS) is faster, and its
# output easier to read, without workers.
WORKERS = $(shell n=$$((2 * $$(nproc))); echo $$((n < 8 ? n : 8)))
# Fewer workers: these tests also run an API server and kube-proxy, which need CPU time.
test-cluster: WORKERS = $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))
# A test that hangs would stop all workers, because a test that runs alone waits for it. The longest test takes a minute;
# a slow machine needs ten.
PARALLEL = $(if $(ARGS),,-n $(WORKERS) --timeout 900)

## ---- BPF objects -------------------------------------------------------------------------------------------
CLANG ?= clang
LLVM_STRIP ?= llvm-strip
# Nothing of the build machine: no type of its kernel (bpf/vmlinux.h has them), no header of its architecture. So the
# objects are the same wherever they are built, and load on amd64 and arm64.
BPF_CFLAGS = -O2 -g -target bpf -mcpu=v3 -std=gnu11 -Wall -Wextra -Werror -Ibpf -ffile-prefix-map=$(CURDIR)=.
BPF_SOURCES := $(wildcard bpf/*.bpf.c)
BPF_OBJECTS := $(BPF_SOURCES:bpf/%.c=pyebpf_proxy/bpf/%.o)

## ---- C tools of the benchmarks -----------------------------------------------------------------------------
BENCH_SOURCES := $(filter-out %.bpf.c,$(wildcard bench/*.c))
BENCH_TOOLS := $(BENCH_SOURCES:bench/%.c=build/bench/%) $(patsubst bench/%.c,build/bench/%.o,$(wildcard bench/*.bpf.c))
TEST_TOOLS := $(patsubst tests/changes/%.c,build/tests/%,$(wildcard tests/changes/*.c)) \
	$(patsubst tests/packet/%.c,build/tests/%.o,$(wildcard tests/packet/*.bpf.c))

# $(call need,program,Debian package): one line with the missing program and the remedy.
need = command -v $(1) >/dev/null || { echo "$(1) is missing: run make setup, or apt-get install $(2)" >&2; exit 1; }

.PHONY: help setup objects build wheel demo inspect screenshots lint docs man pictures clean distclean
.PHONY: test test-cluster test-api-versions test-kernels test-e2e test-deb test-faults test-upgrades test-model soak fuzz lab-test parity record
.PHONY: cluster-up cluster-down bench bench-check profile image-root sbom deb chart

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  Targets such as demo and test run setup first. make test ARGS='-k name' passes arguments to pytest."

setup: ## install Debian packages (by sudo if not root) and .venv with pinned versions, build BPF objects; fast if up to date
	@tools/setup.sh packages
	@tools/setup.sh venv
	@$(MAKE) --no-print-directory build
	@# Where PYTHONDONTWRITEBYTECODE is set, each command and each agent of a test would compile the package again.
	@$(PYTHON) -m compileall -q pyebpf_proxy

objects: $(BPF_OBJECTS) ## compile only the BPF objects
	@:

build: $(BPF_OBJECTS) $(BENCH_TOOLS) $(TEST_TOOLS) ## compile the BPF objects for any kernel and architecture (CO-RE), and the load tools of bench/ and tests/
	@:

pyebpf_proxy/bpf/%.bpf.o: bpf/%.bpf.c Makefile
	@$(call need,$(CLANG),clang)
	@$(call need,$(LLVM_STRIP),llvm)
	@[ -r /usr/include/bpf/bpf_helpers.h ] || { echo "bpf/bpf_helpers.h is missing: run make setup, or apt-get install libbpf-dev" >&2; exit 1; }
	@mkdir -p $(@D) build/bpf
	@echo "  CLANG  $@"
	@# Build under another name and rename: a concurrent load sees the old or the new object. strip -g keeps BTF.
	@temporary=build/bpf/$*.$$$$.o; trap 'rm -f "$$temporary" "$${temporary%.o}.d"' EXIT; \
		$(CLANG) $(BPF_CFLAGS) -MMD -MP -MT $@ -MF "$${temporary%.o}.d" -c $< -o "$$temporary"; \
		$(LLVM_STRIP) -g "$$temporary"; \
		mv "$${temporary%.o}.d" build/bpf/$*.d; mv "$$temporary" $@

define compile-bpf
	@$(call need,$(CLANG),clang)
	@mkdir -p $(@D)
	@echo "  CLANG  $@"
	@$(CLANG) $(BPF_CFLAGS) -MMD -MP -MT $@ -MF $@.d -c $< -o $@.$$$$ && mv $@.$$$$ $@
endef

build/bench/%.bpf.o: bench/%.bpf.c Makefile
	$(compile-bpf)

# Kernels' guests have no compiler.
build/tests/%.bpf.o: tests/packet/%.bpf.c Makefile
	$(compile-bpf)

define compile
	@$(call need,gcc,gcc)
	@mkdir -p $(@D)
	@echo "  CC     $@"
	@gcc -O2 -g -std=gnu11 -Wall -Wextra -Werror -pthread -MMD -MP -MT $@ -MF $@.d $< $(LDLIBS) -o $@.$$$$ && mv $@.$$$$ $@
endef

build/bench/flood: LDLIBS := -lbpf

build/bench/%: bench/%.c Makefile
	$(compile)

build/tests/%: tests/changes/%.c Makefile
	$(compile)

wheel: setup ## build a wheel with the BPF objects, in dist/
	@# Remove files of earlier builds: setuptools would put them into the wheel. And the wheel of an earlier version: the
	@# commands of the pages name dist/*.whl.
	@rm -rf build/lib build/bdist.* *.egg-info dist/pyebpf_proxy-*.whl
	@$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index --wheel-dir dist .
	@rm -rf build/lib build/bdist.* *.egg-info
	@ls -1 dist/*.whl

deb: wheel man ## build a Debian package of the agent with its libraries, a systemd unit, man pages and completion, in dist/ (docs/deploy.md)
	@deploy/deb/build.sh

test-deb: deb ## install, start, upgrade, remove and purge that package on a separate machine (root, debootstrap, a Debian mirror)
	@tools/setup.sh packages tests/deb/debian-packages.txt
	@$(SUDO) $(PYTHON) -m pytest tests/deb $(ARGS)

chart: setup ## build the Helm chart from deploy/, in build/chart, and package it in dist/ with Helm (needs Go)
	@tests/cluster/build.sh helm
	@$(PYTHON) tools/chart.py build/chart
	@$${PYEBPF_PROXY_CACHE:-/var/cache/pyebpf-proxy}/go/helm package --destination dist build/chart/pyebpf-proxy

demo: setup ## run a two-node cluster in network namespaces, send real requests, print a table of the results
	@$(SUDO) .venv/bin/pyebpf-proxy lab demo

inspect: setup ## show the maps of the demo cluster with bpftool only: from a VIP to its backends (docs/maps.md)
	@$(SUDO) .venv/bin/pyebpf-proxy lab inspect

screenshots: setup ## regenerate docs/top.svg and docs/explain.svg from the real commands in a lab with traffic
	@$(SUDO) $(PYTHON) tools/screenshots.py

test: setup ## run all unit, packet and netns tests; skipped tests are listed at the end, with reasons
	@$(SUDO) $(PYTHON) -m pytest $(PARALLEL) $(ARGS)

test-faults: setup ## cause faults and floods under load, and compare with kube-proxy if it is built; writes docs/reliability.md; ARGS='syn-flood quota'
	@tools/setup.sh packages tests/faults/debian-packages.txt
	@$(SUDO) $(PYTHON) -m tests.faults $(ARGS)

test-upgrades: setup ## upgrade from former commits and roll back, under load (tests/README.md); ARGS='COMMIT --scenario kill'
	@$(SUDO) $(if $(PYEBPF_PROXY_CACHE),env PYEBPF_PROXY_CACHE="$(PYEBPF_PROXY_CACHE)") $(PYTHON) -m tests.upgrades $(ARGS)

test-model: setup ## compare the agent with a slow model under random events, kills and damage; ARGS='--streams 1000 --seed 7' (tests/README.md)
	@$(SUDO) $(PYTHON) -m tests.model $(ARGS)

soak: setup ## run load and churn near conntrack's limit for an hour, and plot what grows; writes docs/reliability.md; ARGS='--minutes 5'
	@$(SUDO) $(PYTHON) -m tests.soak $(ARGS)
	@$(PYTHON) -m tests.faults --page

fuzz: setup ## search for inputs that crash the parsers, guided by coverage; ARGS='--seconds 300 manifests' (tests/README.md)
	@tools/setup.sh fuzz
	@$(PYTHON) -m tests.fuzz $(ARGS)

image-root: ## build the image of deploy/Dockerfile in the directory build/image/root, without pulling images (root, debootstrap); ARCH=arm64: build/image-arm64/root
	@$(SUDO) $(if $(PYEBPF_PROXY_CACHE),env PYEBPF_PROXY_CACHE="$(PYEBPF_PROXY_CACHE)") \
		python3 deploy/image/root.py build/image$(if $(ARCH),-$(ARCH)) $(ARCH)

sbom: image-root ## list what the image contains, as CycloneDX: build/image/debian.cdx.json and python.cdx.json
	@tools/setup.sh sbom
	@$(SUDO) deploy/image/sbom.sh build/image

test-cluster: setup ## run tests against the real Kubernetes programs; builds them first (Go 1.26) if they are not cached
	@tools/setup.sh packages tests/cluster/debian-packages.txt
	@tests/cluster/build.sh kube-proxy kube-apiserver
	@# Continue without these tools: the tests that need one of them report that it is missing.
	@tests/cluster/build.sh plan || echo "make test-cluster: kube-proxy's plan cannot be built" >&2
	@tests/cluster/build.sh helm || echo "make test-cluster: helm cannot be built" >&2
	@tests/cluster/tools.sh || echo "make test-cluster: promtool and prometheus cannot be fetched" >&2
	@$(SUDO) $(PYTHON) -m pytest tests/cluster $(PARALLEL) $(ARGS)

# The tests skip what is not built: make test-cluster does not build these, but runs what is in the cache.
test-api-versions: setup ## run the agent with the API servers of Kubernetes 1.33 to 1.36; builds them first, which takes minutes each (Go 1.26)
	@tools/setup.sh packages tests/cluster/debian-packages.txt
	@tests/cluster/build.sh kube-apiserver-1.33 kube-apiserver-1.34 kube-apiserver-1.35 kube-apiserver etcd
	@$(SUDO) $(PYTHON) -m pytest tests/cluster/test_api_versions.py $(ARGS)

test-kernels: setup ## run test suites under stock Debian kernels in QEMU: KERNELS="6.1 6.12", other series, or newest; ARCH=arm64 (tests/kernels/README.md)
	@tools/setup.sh packages tests/kernels/debian-packages.txt
	@$(SUDO) env $(foreach name,PYEBPF_PROXY_CACHE ARCH SUITES ACCEL QEMU LIMIT JOBS,$(if $($(name)),$(name)="$($(name))")) \
		ARGS="$(ARGS)" $(PYTHON) -m tests.kernels $(KERNELS)

lab-test: setup ## test two Vagrant machines: requests, restart and upgrade under load; LAB_DRIVER, LAB_BOX, LAB_KERNEL (vagrant/README.md)
	@tools/setup.sh packages vagrant/debian-packages.txt
	@$(SUDO) env $(foreach name,PYEBPF_PROXY_CACHE LAB_DRIVER LAB_BOX LAB_KERNEL LAB_BOOT_TIMEOUT,$(if $($(name)),$(name)="$($(name))")) \
		nice -n 10 $(PYTHON) -m tests.vagrant

# The programs that make test-e2e and make cluster-up need; building them takes 20 to 40 minutes the first time.
define e2e-programs
	@tools/setup.sh packages tests/cluster/debian-packages.txt
	@tests/cluster/build.sh kube-proxy kube-apiserver kubelet kubectl kube-controller-manager kube-scheduler coredns agnhost \
		regression-issue-74839 $(if $(filter flannel,$(CNI)),flanneld kube-router) \
		$(if $(filter cilium,$(CNI)),cilium-agent cilium-operator cilium-cni) $(1)
endef
E2E = $(SUDO) env $(foreach name,PYEBPF_PROXY_CACHE E2E_WORK,$(if $($(name)),$(name)="$($(name))")) nice -n 5 $(PYTHON) -m tests.e2e

cluster-up: setup ## start a real Kubernetes cluster on this machine: PROXY=pyebpf-proxy, kube-proxy or kube-proxy-nftables, DUAL=1: both families, CNI=bridge, flannel or cilium (docs/kubernetes-e2e.md)
	$(call e2e-programs)
	@$(E2E) up --proxy $(or $(PROXY),pyebpf-proxy) $(if $(DUAL),--dual) $(if $(CNI),--cni $(CNI))

cluster-down: setup ## remove what make cluster-up, or a killed make test-e2e, has left
	@$(E2E) down

test-e2e: setup ## run Kubernetes' own e2e tests of Services in such a cluster: PROXY and CNI as for cluster-up, ARGS="--record" writes the table
	$(call e2e-programs,ginkgo e2e.test)
	@$(E2E) test --proxy $(or $(PROXY),pyebpf-proxy) $(if $(DUAL),--dual) $(if $(CNI),--cni $(CNI)) $(ARGS)

parity: setup ## compare 300 random object sets with the real kube-proxy, different in every run (docs/parity.md)
	@tools/setup.sh packages tests/cluster/debian-packages.txt
	@tests/cluster/build.sh
	@$(SUDO) env FLOW_SEEDS=$(or $(FLOW_SEEDS),15) FLOW_STEPS=$(or $(FLOW_STEPS),10) \
		$(foreach name,FLOW_SEED FLOW_WAY FLOW_REDUCE,$(if $($(name)),$(name)="$($(name))")) $(PYTHON) -m pytest -s tests/cluster/test_flows.py $(ARGS)

record: setup ## run all cases and flows with the real kube-proxy again, and record its results for make test
	@tests/cluster/build.sh
	@$(SUDO) $(PYTHON) -m tests.cluster.record
	@$(SUDO) $(PYTHON) -m tests.cluster.record_flows

lint: setup ## ruff, mypy --strict, import layers, links of the pages, C warnings as errors, shellcheck if installed
	@# setup has compiled the C code with -Wall -Wextra -Werror.
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy --strict
	.venv/bin/lint-imports --no-cache
	$(PYTHON) -m pytest -q -p no:cacheprovider tests/unit/docs/test_links.py
	@if command -v shellcheck >/dev/null; then \
		set -x; shellcheck .ci/run vagrant/build-box $$(git ls-files '*.sh' 2>/dev/null || echo tools/*.sh); \
	else echo "shellcheck is not installed: shell scripts were not checked"; fi

docs: ## build the documentation as a site in build/site/html, and check every link
	@tools/setup.sh docs
	@rm -rf build/site && mkdir -p build/site/pages
	@git ls-files | xargs -d '\n' cp --parents -t build/site/pages
	@NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --quiet --strict
	@echo build/site/html/README.html

man: setup ## build the manual pages in build/man from the commands' help texts, and check them with mandoc
	@tools/setup.sh packages docs/debian-packages.txt
	@rm -rf build/man
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct 2>/dev/null || date +%s) $(PYTHON) tools/man_pages.py build/man
	@mandoc -Tlint -Wwarning build/man/*.1
	@ls build/man/*.1

pictures: setup ## regenerate the pictures in docs/ that have a source in docs/pictures/, with Graphviz
	@tools/setup.sh packages docs/debian-packages.txt
	@$(PYTHON) tools/pictures.py

bench: setup ## run the benchmarks, each with a comparison; results and plots in bench/results/; QUICK=1: shorter
	@$(SUDO) $(PYTHON) -m bench $(if $(QUICK),--quick) $(ARGS)

profile: setup ## profile the control plane with clusters of several shapes; results in bench/profiles/; QUICK=1: shorter
	@$(SUDO) $(PYTHON) -m bench.profile $(if $(QUICK),--quick)

bench-check: setup ## compare the cost of a packet with a base commit, in turns; fails if a row is 10 % worse. BASE=commit
	@$(SUDO) $(PYTHON) -m bench.check $(if $(BASE),--base $(BASE)) $(ARGS)

clean: ## remove build results and caches of tools
	@rm -rf build dist pyebpf_proxy/bpf *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -path ./.venv -prune -o -path ./.git -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## clean, and also remove .venv
	@rm -rf .venv

-include $(wildcard build/bpf/*.d build/bench/*.d build/tests/*.d)
