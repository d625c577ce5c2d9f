# The root of the images of agnhost and of kube-proxy: Debian with the programs that specs and kube-proxy run.
# tests/e2e/images.py adds agnhost, CoreDNS and kube-proxy; deploy/image/root.py carries this out.
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends \
      bind9-dnsutils conntrack curl ipset iperf iproute2 iptables iputils-ping kmod netcat-openbsd nftables \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*
ENTRYPOINT ["/agnhost"]
