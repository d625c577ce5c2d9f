// SPDX-License-Identifier: Apache-2.0

// Writes containerd's default seccomp profile as JSON: the rules that every container has, those that a capability of
// the container adds, and those that are there unless it has one. With the argument "apparmor": its default AppArmor
// profile, by the name that the CRI plugin gives it. profile.sh runs both.
package main

import (
	"encoding/json"
	"fmt"
	"log"
	"os"
	"reflect"
	"runtime/debug"

	"github.com/containerd/containerd/v2/contrib/apparmor"
	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
)

const (
	path    = "github.com/containerd/containerd/v2"
	licence = "Apache-2.0, Copyright The containerd Authors"
)

// Those of the DaemonSet and of its components.
var capabilities = []string{"CAP_BPF", "CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_PERFMON", "CAP_SYS_ADMIN"}

type recording struct {
	Origin  string                          `json:"origin"`
	Licence string                          `json:"licence"`
	Default specs.LinuxSeccompAction        `json:"default"`
	Rules   []specs.LinuxSyscall            `json:"rules"`
	With    map[string][]specs.LinuxSyscall `json:"with"`
	Unless  map[string][]specs.LinuxSyscall `json:"unless"`
}

func profile(capabilities ...string) *specs.LinuxSeccomp {
	held := &specs.LinuxCapabilities{Bounding: capabilities}
	return seccomp.DefaultProfile(&specs.Spec{Process: &specs.Process{Capabilities: held}})
}

// The rules of "all" that are not in "some".
func added(all, some []specs.LinuxSyscall) []specs.LinuxSyscall {
	found := []specs.LinuxSyscall{}
	for _, rule := range all {
		known := false
		for _, other := range some {
			known = known || reflect.DeepEqual(rule, other)
		}
		if !known {
			found = append(found, rule)
		}
	}
	return found
}

func main() {
	build, ok := debug.ReadBuildInfo()
	if !ok {
		log.Fatal("no build information")
	}
	origin := ""
	for _, module := range build.Deps {
		if module.Path == path {
			origin = module.Version
		}
	}
	if len(os.Args) == 2 && os.Args[1] == "apparmor" {
		text, err := apparmor.DumpDefaultProfile("cri-containerd.apparmor.d")
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("# %s/contrib/apparmor DumpDefaultProfile(), %s\n# %s\n%s", path, origin, licence, text)
		return
	}
	none := profile()
	always := none.Syscalls
	for _, name := range capabilities {
		always = added(always, added(always, profile(name).Syscalls))
	}
	written := recording{
		Origin:  path + "/contrib/seccomp DefaultProfile(), " + origin,
		Licence: licence,
		Default: none.DefaultAction,
		Rules:   always,
		With:    map[string][]specs.LinuxSyscall{},
		Unless:  map[string][]specs.LinuxSyscall{},
	}
	for _, name := range capabilities {
		with := profile(name).Syscalls
		written.With[name] = added(with, none.Syscalls)
		written.Unless[name] = added(none.Syscalls, with)
	}
	encoder := json.NewEncoder(os.Stdout)
	encoder.SetIndent("", " ")
	if err := encoder.Encode(written); err != nil {
		log.Fatal(err)
	}
}
