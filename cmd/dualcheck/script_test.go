package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestMain makes this test binary stand for the program where a script or a test
// runs "dualcheck".
func TestMain(m *testing.M) {
	// A program with the race detector otherwise sleeps a second at its end.
	if os.Getenv(raceVariable) == "" {
		if err := os.Setenv(raceVariable, "atexit_sleep_ms=0"); err != nil {
			panic(err)
		}
	}
	if strings.HasSuffix(calledAs, ".test") {
		calledAs = "dualcheck"
	}
	testscript.Main(m, map[string]func(){"dualcheck": main})
}

const raceVariable = "GORACE"

// TestScripts runs the scripts against a real server each.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			env.Setenv(raceVariable, os.Getenv(raceVariable))
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"dev":    devCommand,
			"code":   codeCommand,
			"json":   jsonCommand,
			"expect": expectCommand,
		},
	})
}

// startup bounds how long a server may take to be ready, and to stop.
const startup = 60 * time.Second

// devCommand starts `dualcheck dev` in the background with the script's own state,
// waits until it is ready, and points the script at it:
//
//	dev [FLAG...]
func devCommand(ts *testscript.TestScript, neg bool, args []string) {
	if neg {
		ts.Fatalf("dev cannot be expected to fail")
	}
	state := ts.MkAbs("state")
	args = append([]string{"dev", "--state-dir", state, "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"}, args...)
	said, err := os.Create(ts.MkAbs("dev.log"))
	ts.Check(err)
	cmd := exec.Command("dualcheck", args...)
	cmd.Dir = ts.Getenv("WORK")
	cmd.Env = append(os.Environ(), "HOME="+ts.Getenv("WORK"))
	cmd.Stdout, cmd.Stderr = said, said
	ts.Check(cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	ts.Defer(func() {
		if err := stopServer(cmd, ended); err != nil {
			ts.Logf("dev: %v\n%s", err, ts.ReadFile(said.Name()))
		}
		ts.Check(said.Close())
	})
	addresses, err := readyServer(filepath.Join(state, "dev.json"), ended)
	if err != nil {
		ts.Fatalf("dev: %v\n%s", err, ts.ReadFile(said.Name()))
	}
	ts.Setenv(addrVariable, addresses.GRPC)
	ts.Setenv("DEV_HTTP", addresses.HTTP)
}

// addresses is what dev says of itself.
type addresses struct {
	GRPC string `json:"grpc"`
	HTTP string `json:"http"`
}

// readyServer waits for dev to say that it is ready.
func readyServer(path string, ended chan error) (addresses, error) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	limit := time.NewTimer(startup)
	defer limit.Stop()
	for {
		select {
		case err := <-ended:
			ended <- err
			return addresses{}, fmt.Errorf("it ended: %w", err)
		case <-limit.C:
			return addresses{}, fmt.Errorf("it was not ready after %v", startup)
		case <-tick.C:
		}
		var at addresses
		raw, err := os.ReadFile(path)
		if err == nil && json.Unmarshal(raw, &at) == nil && at.GRPC != "" {
			return at, nil
		}
	}
}

// stopServer interrupts dev and waits for its end.
func stopServer(cmd *exec.Cmd, ended chan error) error {
	if err := cmd.Process.Signal(os.Interrupt); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), startup)
	defer cancel()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		err := cmd.Process.Signal(syscall.SIGKILL)
		<-ended
		return errors.Join(errors.New("it did not stop"), err)
	}
}

// codeCommand runs a command line and wants its exit status:
//
//	code STATUS COMMAND [ARG...]
func codeCommand(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: code STATUS COMMAND [ARG...]")
	}
	err := ts.Exec(args[1], args[2:]...)
	got := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		got = exit.ExitCode()
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	if fmt.Sprint(got) != args[0] {
		ts.Fatalf("exit status %d, want %s", got, args[0])
	}
}

// jsonCommand takes a value out of a JSON object and, with a name, puts it into
// the environment:
//
//	json FILE PATH [NAME]
//
// PATH is member names with dots between them; "." is the object.
func jsonCommand(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 || len(args) > 3 {
		ts.Fatalf("usage: json FILE PATH [NAME]")
	}
	value := valueAt(ts, args[0], args[1])
	if len(args) == 3 {
		ts.Setenv(args[2], value)
	}
}

// expectCommand wants values of a JSON object: numbers and words as they are, a
// member that is not there as an empty word.
//
//	expect FILE PATH=VALUE...
func expectCommand(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: expect FILE PATH=VALUE...")
	}
	for _, arg := range args[1:] {
		path, want, _ := strings.Cut(arg, "=")
		if got := valueAt(ts, args[0], path); got != want {
			ts.Fatalf("%s is %q, want %q", path, got, want)
		}
	}
}

// valueAt is a value of the JSON object in a file, as text.
func valueAt(ts *testscript.TestScript, file, path string) string {
	text := ts.ReadFile(file)
	var value any
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.UseNumber()
	if err := decoder.Decode(&value); err != nil {
		ts.Fatalf("%s is not JSON: %v\n%s", file, err, text)
	}
	if decoder.More() {
		ts.Fatalf("%s has more than one JSON value:\n%s", file, text)
	}
	for name := range strings.SplitSeq(strings.Trim(path, "."), ".") {
		if name == "" {
			continue
		}
		object, ok := value.(map[string]any)
		if !ok {
			ts.Fatalf("%s: %s has no members\n%s", file, path, text)
		}
		value = object[name]
	}
	switch value := value.(type) {
	case nil:
		return ""
	case string:
		return value
	}
	raw, err := json.Marshal(value)
	ts.Check(err)
	return string(raw)
}
