// SPDX-License-Identifier: Apache-2.0

// Prints every feature gate that kube-proxy knows: name, default, stage, whether it is locked, and what it needs.
package main

import (
	"fmt"
	"sort"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
	_ "k8s.io/kubernetes/cmd/kube-proxy/app"
)

func main() {
	gates := utilfeature.DefaultMutableFeatureGate.GetAll()
	needs := utilfeature.DefaultMutableFeatureGate.Dependencies()
	names := []string{}
	for name := range gates {
		names = append(names, string(name))
	}
	sort.Strings(names)
	for _, name := range names {
		for feature, spec := range gates {
			if string(feature) != name {
				continue
			}
			stage := string(spec.PreRelease)
			if stage == "" {
				stage = "GA"
			}
			fmt.Printf("%s %t %s %t", name, spec.Default, stage, spec.LockToDefault)
			for _, need := range needs[feature] {
				fmt.Printf(" %s", need)
			}
			fmt.Println()
		}
	}
}
