// SPDX-License-Identifier: Apache-2.0

// Writes the rules of a node by AWS VPC CNI's own functions, with the plugin's environment variables, for record.sh:
// for the node, for a second ENI, and for two pods, of which one has an address of the second ENI. With the argument
// "ipv6" for a node of an IPv6 cluster with one pod.
package main

import (
	"log"
	"net"
	"os"

	"github.com/aws/amazon-vpc-cni-k8s/cmd/routed-eni-cni-plugin/driver"
	"github.com/aws/amazon-vpc-cni-k8s/pkg/networkutils"
	"github.com/aws/amazon-vpc-cni-k8s/pkg/utils/logger"
)

const (
	mtu     = 1500
	maxENIs = 4
)

func main() {
	primary := net.ParseIP("10.0.1.1")
	ipv6 := len(os.Args) > 1 && os.Args[1] == "ipv6"
	network, err := networkutils.New()
	must(err)
	must(network.SetupHostNetwork([]string{"10.0.0.0/16"}, mac("eth0"), &primary, false, ipv6))
	first := networkutils.CalculateRouteTableId(0, 0)
	if ipv6 {
		pod("pod1", "2001:db8::10", 128, first)
		return
	}
	second := networkutils.CalculateRouteTableId(1, 0)
	must(network.SetupENINetwork("10.0.2.1", mac("eth1"), 0, "10.0.2.0/24", maxENIs, false, second, false))
	pod("pod1", "10.0.1.10", 32, first)
	pod("pod2", "10.0.2.10", 32, second)
}

// pod connects a pod whose network namespace has this name.
func pod(name, address string, bits, table int) {
	ends := []driver.VirtualInterfaceMetadata{{
		IPAddress:         &net.IPNet{IP: net.ParseIP(address), Mask: net.CIDRMask(bits, bits)},
		RouteTable:        table,
		HostVethName:      "eni" + name,
		ContainerVethName: "eth0",
	}}
	must(driver.New().SetupPodNetwork(ends, "/run/netns/"+name, mtu, logger.Get()))
}

func mac(device string) string {
	link, err := net.InterfaceByName(device)
	must(err)
	return link.HardwareAddr.String()
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
