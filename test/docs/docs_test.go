// Package docs keeps what is written true as far as a test can: what is linked is
// there, tests that are named exist, and the scenarios that are tested are listed.
package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const root = "../.."

// pages returns the text of every page, by its path.
func pages(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	paths, err := filepath.Glob(filepath.Join(root, "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	err = filepath.WalkDir(filepath.Join(root, "docs"), func(path string, d fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".md") {
			paths = append(paths, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		all[path] = string(b)
	}
	if len(all) < 10 {
		t.Fatalf("only %d pages were found", len(all))
	}
	return all
}

var testFunc = regexp.MustCompile(`(?m)^func (Test[A-Za-z0-9_]+)\(`)

// tests returns the names of all tests.
func tests(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		for _, found := range testFunc.FindAllStringSubmatch(string(b), -1) {
			names[found[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

var link = regexp.MustCompile(`\]\(([^)#\s]+)(#[^)]*)?\)`)

func TestLinksLeadSomewhere(t *testing.T) {
	for path, text := range pages(t) {
		for _, found := range link.FindAllStringSubmatch(text, -1) {
			if strings.Contains(found[1], "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(path), found[1])); err != nil {
				t.Errorf("%s: %v", path, err)
			}
		}
	}
}

var (
	named   = regexp.MustCompile("`(Test[A-Za-z0-9_]+)(…?)`")
	pageRef = regexp.MustCompile("`(docs/[a-z0-9/_-]+\\.md)`")
)

func TestWhatIsNamedExists(t *testing.T) {
	all := tests(t)
	for path, text := range pages(t) {
		for _, found := range named.FindAllStringSubmatch(text, -1) {
			exists := all[found[1]]
			for name := range all {
				exists = exists || found[2] != "" && strings.HasPrefix(name, found[1])
			}
			if !exists {
				t.Errorf("%s names %s, and there is no such test", path, found[0])
			}
		}
		for _, found := range pageRef.FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join(root, found[1])); err != nil {
				t.Errorf("%s: %v", path, err)
			}
		}
	}
}

var (
	scenario = regexp.MustCompile(`^Test([CEH]\d+)`)
	row      = regexp.MustCompile(`(?m)^\| ([CEH]\d+) \|`)
)

func TestScenariosAreListed(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(root, "docs", "scenarios.md"))
	if err != nil {
		t.Fatal(err)
	}
	listed, tested := map[string]bool{}, map[string]bool{}
	for _, found := range row.FindAllStringSubmatch(string(b), -1) {
		listed[found[1]] = true
	}
	for name := range tests(t) {
		if found := scenario.FindStringSubmatch(name); found != nil {
			tested[found[1]] = true
			if !listed[found[1]] {
				t.Errorf("%s is tested and has no row", found[1])
			}
		}
	}
	for id := range listed {
		if !tested[id] {
			t.Errorf("%s has a row and no test", id)
		}
	}
}
