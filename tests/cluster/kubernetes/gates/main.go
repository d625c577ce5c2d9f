// SPDX-License-Identifier: Apache-2.0

// Prints every feature gate that kube-proxy knows: name, default, stage, whether it is locked, and what it needs.
package main

import (
	"fmt"
	"slices"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/featuregate"
	_ "k8s.io/kubernetes/cmd/kube-proxy/app"
)

func main() {
	gates := utilfeature.DefaultMutableFeatureGate.GetAll()
	needs := utilfeature.DefaultMutableFeatureGate.Dependencies()
	names := []featuregate.Feature{}
	for name := range gates {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		stage := string(gates[name].PreRelease)
		if stage == "" {
			stage = "GA"
		}
		fmt.Printf("%s %t %s %t", name, gates[name].Default, stage, gates[name].LockToDefault)
		for _, need := range needs[name] {
			fmt.Printf(" %s", need)
		}
		fmt.Println()
	}
}
